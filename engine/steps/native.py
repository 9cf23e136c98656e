"""A decode step on a CPU as one call of the extension: see decode.cpp."""
import ctypes
import functools
import itertools
import sys

import numpy as np
import torch
from torch import nn

from common.gpt_config import unknown_field
from engine import native
from engine.pages.cache import PagedKVCache, PagedStore
from engine.pages.chunks import STORED, describe as describe_stored
from engine.steps.agreement import difference, note_once
from engine.weights.linear import describe, suits_prompts
from engine.weights.quantized import Int8Embedding, QuantizedLinear
from kv.cache import KVCache
from kv.slots import RingStore
from model import GPT

ACTIVATIONS = {'exact': native.GELU_EXACT, 'tanh': native.GELU_TANH, 'relu2': native.RELU2}
MULTIPLE = 8  # widths must be multiples of it: half a vector
# Tokens of prompts up to which a step is taken where torch is faster for many (measured with 37M
# parameters on 2 AVX-512 cores, and with 124M on AVX2)
FEW = 48


def native_decode(model: GPT, cache: KVCache) -> 'NativeDecode | None':
    """A C++ decode step for this cache. None if it is not supported, or if its logits differ from
    those of model.py, which may have been modified."""
    if not runs_here(model, cache) or native.library() is None:
        return None
    if setting := unsupported(model, cache):
        note_once(f'the C++ decode step does not support {setting}: plain torch decodes')
        return None
    make_decode = functools.partial(NativeDecode, model)
    if wrong := difference(model, cache, make_decode):
        note_once(f'the C++ decode steps (engine/native/decode.cpp) {wrong}: plain torch decodes')
        return None
    return make_decode(cache)


def runs_here(model: GPT, cache: KVCache) -> bool:
    """Whether the model is on a CPU, with weights in a form that the extension reads."""
    return (model.device.type == 'cpu' and type(cache) in (KVCache, PagedKVCache)
            and model.dtype in native.DTYPES
            and all(m.packed for m in model.modules() if isinstance(m, QuantizedLinear)))


def unsupported(model: GPT, cache: KVCache) -> str:
    """A setting of the model or cache that the extension does not support; '' = none."""
    c = model.config
    if unknown := unknown_field(c, 'fast'):
        return unknown
    for name, width in (('n_embd', c.n_embd), ('head_dim', model.plan.head_dim),
                        ('mlp_hidden', c.resolved_mlp_hidden)):
        if width % MULTIPLE:
            return f'{name}={width} (widths must be multiples of {MULTIPLE})'
    return '' if cache.torch_dtype in STORED else f'kv_dtype={cache.kv_dtype!r}'


class NativeDecode:
    """Decode steps over the first rows of `cache`. Computes in float32, except for matmuls with
    quantized weights, and for bfloat16 weights with several rows if the processor supports that.

    model: in eval mode; its weights may only change in place (bfloat16 weights not at all).
    """

    def __init__(self, model: GPT, cache: KVCache):
        self.cache, self.vocab_size = cache, model.config.vocab_size
        fast = isinstance(model.lm_head, QuantizedLinear) or suits_prompts(model.dtype)
        self.most_tokens = sys.maxsize if fast else FEW
        self._kept = []  # tensors whose addresses are in the structs
        self._model = self._describe(model)
        self._logits = torch.empty(cache.batch_size, self.vocab_size)
        self._table, self._versions = None, [-1] * cache.batch_size
        if isinstance(cache, PagedKVCache):
            width = cache.table.pages_for(cache.max_seq_len)
            self._table = np.zeros((cache.batch_size, width), np.int32)

    @torch.inference_mode()
    def __call__(self, tokens: torch.Tensor, lens: list[int] | None = None) -> torch.Tensor:
        """Append tokens (n, 1) to rows 0 .. n - 1, or only to those with lens[b] = 1; the logits of
        the remaining rows are undefined. Returns (n, V) float32 logits, overwritten by the next
        call. Raises UserError if a row is full, IndexError if a token is outside the vocabulary."""
        n, ids = len(tokens), tokens[:, 0].numpy()
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise IndexError(f'tokens {ids.tolist()}: the model has 0 to {self.vocab_size - 1}')
        step = self.cache.begin(1, lens, range(n))
        rows = [row for row in step.rows if step.lens[row]]
        logits = self._logits[:n]
        computed = logits if len(rows) == n else torch.empty(len(rows), self.vocab_size)
        if rows:
            starts = [step.starts[row] for row in rows]
            self._run(ids[rows], rows, starts, [0] * len(rows), range(len(rows)), computed)
        if len(rows) < n:
            logits[rows] = computed
        self.cache.commit()
        return logits

    @torch.inference_mode()
    def extend(self, texts: list[list[int]], rows: list[int], wanted: list[bool]) -> torch.Tensor:
        """Append texts[b], at least one token, to row rows[b]. Returns (n, V) float32 logits after
        the last token of each text that is wanted, overwritten by the next call. Errors are as in a
        decode step."""
        ids = [token for text in texts for token in text]
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise IndexError(f'tokens {ids}: the model has 0 to {self.vocab_size - 1}')
        lens = list(map(len, texts))
        step = self.cache.begin(max(lens), lens, rows)
        places = [(row, start + j, n - 1 - j) for row, start, n in zip(rows, step.starts, lens)
                  for j in range(n)]
        ends = list(itertools.compress(itertools.accumulate(lens), wanted))
        logits = self._logits[:len(ends)]  # megabytes, not reallocated
        self._run(ids, *zip(*places), [end - 1 for end in ends], logits)
        self.cache.commit()
        return logits

    def prepare(self, *sizes: int) -> None:
        """No-op, for the interface of `CapturedDecode`."""

    def _run(self, ids, rows, positions, later, wanted, logits):
        """later: number of tokens of the same row after each. wanted: which of the tokens, by their
        place in `ids`, get logits."""
        ids, rows, positions, later, wanted = (np.ascontiguousarray(x, np.int64)
                                               for x in (ids, rows, positions, later, wanted))
        table = None if self._table is None else self._pages(rows)
        arrays = [x.ctypes.data if x is not None else None
                  for x in (ids, positions, rows, later, wanted, table)]
        width = 0 if table is None else table.shape[1]
        step = native.Step(*arrays, len(rows), len(wanted), width, torch.get_num_threads(),
                           logits.data_ptr())
        native.library().nanokv_decode(ctypes.byref(self._model), ctypes.byref(step))

    def _pages(self, rows):
        """Block table (m, pages) int32 of these rows, updated for rows that have changed."""
        source = self.cache.table
        for row in rows.tolist():
            if source.versions[row] != self._versions[row]:
                self._table[row, :len(source.rows[row])] = source.rows[row]
                self._versions[row] = source.versions[row]
        return np.ascontiguousarray(self._table[rows])

    def _describe(self, model: GPT) -> native.Model:
        plan, t, cache = model.plan, model.transformer, self.cache
        layers = (native.Layer * len(plan.layers))(
            *(self._layer(model, *pair) for pair in zip(plan.layers, t.h)))
        slots = (native.Slot * len(plan.slots))(*map(self._slot, plan.slots, cache.stores))
        self._kept += [layers, slots]
        wte = None if isinstance(t.wte, Int8Embedding) else t.wte.weight.data_ptr()
        wpe = None if model.rotary else t.wpe.weight.data_ptr()
        return native.Model(
            ctypes.addressof(layers), ctypes.addressof(slots), wte, wpe, *self._norm(t.ln_f),
            self._linear(model.lm_head), len(plan.layers), len(plan.slots), model.config.n_embd,
            plan.n_head, plan.head_dim, STORED[model.dtype], STORED[model.dtype],
            ACTIVATIONS[model.config.gelu],
            model.config.kv_quant_train == 'int8' and cache.kv_dtype != 'int8')

    def _layer(self, model, layer, block) -> native.Layer:
        attn, cos, sin = block.attn, None, None
        if model.rotary and model.rotary[layer.kind]:
            tables = model.rotary[layer.kind](0, self.cache.max_seq_len, 'cpu', torch.float32)
            cos, sin = map(self._pointer, tables)
        gains = (self._pointer(norm and norm.weight) for norm in (attn.q_norm, attn.k_norm))
        linears = map(self._linear, (attn.c_attn, attn.c_proj, block.mlp.c_fc, block.mlp.c_proj,
                                     attn.gate))
        return native.Layer(*self._norm(block.ln_1), *self._norm(block.ln_2), *gains, cos, sin,
                            self._pointer(getattr(attn, 'k_up', None)),
                            self._pointer(getattr(attn, 'v_up', None)),
                            self._pointer(attn.sink), *linears, layer.slot, layer.owns)

    def _slot(self, slot, store) -> native.Slot:
        state = self.cache.last_keys.get(slot.index)
        return describe_stored(store.tensors, isinstance(store, PagedStore),
                               isinstance(store, RingStore),
                               state and state.tensors[0].data_ptr())

    def _linear(self, linear) -> native.Linear:
        described, kept = describe(linear) if linear else (native.Linear(), ())
        self._kept += kept
        return described

    def _norm(self, norm: nn.Module):
        return self._pointer(norm.weight), self._pointer(norm.bias)

    def _pointer(self, x):
        """Address of a float32 copy of a vector or table."""
        if x is None:
            return None
        self._kept.append(x.detach().float().contiguous())
        return self._kept[-1].data_ptr()
