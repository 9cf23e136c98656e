"""Who holds which bytes while a training step runs: every storage, from the operation that made it until it is freed.

Hooks on saved tensors would tell less: they see neither what selective checkpointing keeps (it saves tensors beside autograd)
nor what only Python holds, and give no peak. This sees every tensor below autograd, also under FakeTensorMode, where nothing
is computed. The idea is that of torch.distributed's MemTracker; what is added is which block and which part of it.

Not seen: what a kernel allocates for itself (beyond `_scratch`), alignment and fragmentation of the allocator.
"""
import weakref
from collections import Counter

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from model import LayerNorm

KINDS = ('norms', 'attention', 'mlp', 'residual stream', 'cast weights')
LOSS = 'logits and loss'
BACKWARD = 'backward'  # gradients, whatever of

aten = torch.ops.aten
UNSHARED = 4  # references to a storage that one tensor holds, as seen from inside a dispatch mode: at most


class LiveBytes(TorchDispatchMode):
    """A context that follows the storages made inside it; enter it before any other mode, so that it sees the real operations.

    Attributes:
        live, peak: bytes on the model's device, now and at most; what was there before does not count.
        loss_peak: the same of the kind LOSS: lm_head and loss, until the gradient of the final norm's output is known. The
            weight's gradient is not in it.
        elsewhere: bytes on other devices now, as of offloaded activations.
        flops: of products and attention (scores of a causal mask counted whole), as torch's FlopCounterMode has them.
    """

    def __init__(self, model):
        super().__init__()
        self.device, self.labels = model.device, _labels(model)
        self.ln_f, self.head_shape = model.transformer.ln_f, model.lm_head.weight.shape
        self.weights = {p.untyped_storage()._cdata for p in model.parameters()}
        self.live = self.peak = self.loss_live = self.loss_peak = self.elsewhere = self.flops = 0
        self.default, self.stack = (None, 'residual stream'), []  # label outside of labelled modules; those entered
        self.in_backward = False
        self._held, self._refs, self._hooks = {}, {}, []  # storage -> [bytes, label, on the device]

    def __enter__(self):
        for module in self.labels:
            self._hooks += [module.register_forward_pre_hook(self._entered),
                            module.register_forward_hook(self._left, always_call=True)]
        return super().__enter__()

    def __exit__(self, *exc):
        for hook in self._hooks:
            hook.remove()
        self._refs.clear()
        return super().__exit__(*exc)

    def by_label(self) -> Counter:
        """(block number or None, kind) -> bytes on the device now."""
        counts = Counter()
        for n, label, here in self._held.values():
            if here and n:
                counts[label] += n
        return counts

    def begin_backward(self):
        """Say so before `loss.backward()`."""
        self.in_backward = True

    def _entered(self, module, _):
        self.stack.append((module, self.labels[module]))

    def _left(self, module, _, output):
        while self.stack and self.stack.pop()[0] is not module:  # an exception may have passed by others
            pass
        if module is self.ln_f and torch.is_tensor(output):
            self.default = (None, LOSS)
            if output.requires_grad:
                output.register_hook(self._loss_is_done)

    def _loss_is_done(self, _):
        self.default = (None, BACKWARD)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        for a in given:  # views of them are not new
            self._register(a.untyped_storage(), 0, a.device, None)
        if func is aten.add.Tensor and self.in_backward and not torch.is_grad_enabled():
            self._in_place(*args[:2])
        out = self._all_selected(*args) if func is aten.index.Tensor else None
        out = func(*args, **kwargs) if out is None else out
        label = self._label(func, given)
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        for x in made:
            self._register(x.untyped_storage(), x.untyped_storage().nbytes(), x.device, self._kind(x, label))
        self._note(_scratch(func, given), label)
        count = _flops_of(func)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        return out

    def _label(self, func, given):
        if func is aten._to_copy.default and self.stack and given[0].untyped_storage()._cdata in self.weights:
            return self.stack[-1][1][0], 'cast weights'  # autocast's
        return self.stack[-1][1] if self.stack else self.default

    def _kind(self, x, label):
        """The weight's gradient is not the loss's memory, also where it is made with the loss (`training.loss`)."""
        return (None, BACKWARD) if label[1] == LOSS and x.shape == self.head_shape else label

    @staticmethod
    def _all_selected(x, indices, *_):
        """x[mask] under FakeTensorMode, whose size nothing can tell: as if all were selected, as all targets count."""
        mask = indices[0]
        if mask is None or mask.dtype != torch.bool or not isinstance(x, torch._subclasses.FakeTensor):
            return None
        return x.new_empty(mask.numel(), *x.shape[mask.dim():])

    def _in_place(self, held, other):
        """Autograd adds up gradients in place, but not where a dispatch mode is active: the first one's bytes become those of
        the sum."""
        record = self._held.get(held.untyped_storage()._cdata)
        if (torch.is_tensor(other) and held.shape == other.shape and record and record[0] == held.nbytes
                and torch._C._storage_Use_Count(held.untyped_storage()._cdata) <= UNSHARED):
            self._add(-record[0], record[1], record[2])
            record[0] = 0

    def _register(self, storage, n, device, label):
        key = storage._cdata
        if key in self._held:
            return
        here = device == self.device
        self._held[key] = [n, label, here]
        self._add(n, label, here)

        def freed(_):
            self._refs.pop(key, None)
            n, label, here = self._held.pop(key)
            self._add(-n, label, here)
        self._refs[key] = weakref.ref(storage, freed)

    def _add(self, n, label, here):
        if not here:
            self.elsewhere += n
            return
        self.live += n
        if label is not None and label[1] == LOSS:
            self.loss_live += n
        self._note(0, None)

    def _note(self, extra, label):
        self.peak = max(self.peak, self.live + extra)
        self.loss_peak = max(self.loss_peak, self.loss_live + extra * (label is not None and label[1] == LOSS))


def _labels(model) -> dict:
    """Module -> (block number or None, kind), of those that say more than the module around them."""
    labels = {model.transformer.ln_f: (None, 'norms'), model.lm_head: (None, LOSS)}
    for i, block in enumerate(model.transformer.h):
        labels |= {block: (i, 'residual stream'), block.attn: (i, 'attention'), block.mlp: (i, 'mlp')}
        labels |= {m: (i, 'norms') for m in block.modules() if isinstance(m, (LayerNorm, nn.RMSNorm))}
    return labels


def _scratch(func, given) -> int:
    """Bytes that a kernel holds meanwhile: logsumexp a tensor of its input's size, a sum on a CPU its narrower operand,
    widened."""
    if func is aten.logsumexp.default:
        return given[0].nbytes
    if func in (aten.add.Tensor, aten.add_.Tensor) and len(given) == 2 and given[0].device.type == 'cpu':
        a, b = sorted(given, key=lambda x: x.itemsize)
        return a.numel() * b.itemsize if a.dtype != b.dtype else 0
    return 0


def _flops_of(func):
    if func is aten._scaled_dot_product_flash_attention_for_cpu.default:  # not among torch's formulas
        return lambda q, k, v, *_, out_val, **__: sdpa_flop_count(q.shape, k.shape, v.shape)
    if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return lambda grad, q, k, v, *_, out_val, **__: sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)
    return flop_registry.get(aten.addmm if func is aten.addmm_.default else func._overloadpacket)
