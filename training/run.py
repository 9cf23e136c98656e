"""One training run: its model, optimizer, data position and counters, and one iteration of it."""
import itertools
from pathlib import Path

import torch

from attention.kernels.choose import choose
from attention.kernels.flex import block_mask
from common.errors import UserError
from common.gpt_config import model_args, unknown_field
from common.settings import MODEL
from data.recall.tasks import TASKS
from data.tokenfiles import open_split
from data.tokenizer import bytes_per_token
from model import GPT
from training import checkpoint as ckpt
from training import fsdp, native
from training.adapt import adapt, adapted_config, differences, keep_trained, wishes
from training.batches import open_batches, open_meta
from training.checkpoint_manager import CheckpointManager, checkpoint_in, load_to_resume
from training.device import (
    autocast, describe_attention, device_name, keep_freed_memory, memory_use)
from training.distributed import launch_id
from training.flops import achieved, peak_tflops
from training.load_model import check_weights
from training.loss import linear_cross_entropy
from training.memory import print_memory_report
from training.optim import load_optimizer, make_optimizer
from training.recompute import set_recompute
from training.update import GuardedUpdate, broken, propagate_nonfinite


class Run:

    def __init__(self, s, ranks, data_root: Path):
        self.s, self.ranks, self.device = s, ranks, ranks.device
        keep_freed_memory(self.device)
        self.out_dir = Path(s.out_dir)
        self.manager = CheckpointManager(self.out_dir)
        self.path, self.origin = self.manager.path, checkpoint_in(s.out_dir, s.resume_from)
        self.dtype = native.training_dtype(s, self.device)
        if len(set(ranks.gather(self.dtype))) > 1:  # machines of different kinds
            self.dtype = torch.float32
        self.autocast = autocast(self.device, self.dtype)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.sharded = s.parallel == 'fsdp' and ranks.world_size > 1
        if s.parallel == 'fsdp':  # also with one process: a resumed run may have more
            fsdp.check(s, self.dtype)
        self.iter_num, self.best_val_loss = 0, torch.tensor(1e9)
        self.saved_at = -1       # iteration of the last checkpoint saved or resumed from
        self.holds_best = False  # whether that checkpoint has the best validation loss
        torch.manual_seed(s.seed)
        torch.set_float32_matmul_precision('high' if s.tf32 else 'highest')

        saved = load_to_resume(self.origin) if s.init_from == 'resume' else None
        with ranks.main_first():
            meta = open_meta(s, data_root)
        self.tokens = ckpt.tokens_id(meta)
        self.meta = meta if meta and 'stoi' in meta else None  # for a copy without its data set
        self.model, self.changed = self._model(saved, meta)
        if self.sharded:  # only rank 0 has used its generator, to initialize weights
            torch.set_rng_state(ranks.gather(torch.get_rng_state())[0])
        self._open_batches(data_root)
        self.bytes_per_token = 0.0 if s.dataset in TASKS else bytes_per_token(
            meta, open_split(data_root / s.dataset, 'val'))
        self._prepare_model()
        self.optimizer = make_optimizer(self.model, s, self.device.type)
        self.update = GuardedUpdate(self.optimizer, self.scaler, s.grad_clip, self.device)
        self.batch = self._resume(saved) if saved else self.batches.next()
        del saved
        if s.memory_report and ranks.main:
            print_memory_report(self, self.dtype)
        self._compile_and_distribute()

    def _open_batches(self, data_root):
        s, ranks = self.s, self.ranks
        generator = torch.Generator()
        # the state of nanoGPT's generator before its first batch
        generator.set_state(torch.get_rng_state())
        if s.data_seed >= 0:
            generator.manual_seed(s.data_seed)
        self.batches = open_batches(s, self.model.config, data_root, ranks, generator)
        torch.manual_seed(s.seed + ranks.rank)  # dropout

    def _prepare_model(self):
        """Set up recomputation, kernels and sharding."""
        s, ranks, model = self.s, self.ranks, self.model
        if not self.sharded:
            model.to(self.device)
        set_recompute(model, 'block' if s.checkpoint_blocks else s.recompute)
        model.loss_fn = linear_cross_entropy if s.chunked_loss else None
        model.attention_backend = s.attention_backend
        if self.sharded:
            fsdp.shard(model, ranks, self.dtype, s.compile)
        print(describe_attention(model, self.dtype, model.config.dropout))
        if native.wanted(s, self.device):
            native.speed_up(model)
            matmuls = ', matmuls in bfloat16' if self.dtype == torch.bfloat16 else ''
            unknown = unknown_field(model.config, 'fast')
            attention = f'attention in torch, for {unknown};' if unknown else 'attention,'
            print(f'training on a CPU: {attention} QK-norm, GELU and loss in C++{matmuls} '
                  "(dtype='float32' uses torch's)")
        print(f'number of parameters: {model.get_num_params() / 1e6:.2f}M')

    def _compile_and_distribute(self):
        self.compiled = self.trained = self.model
        if self.s.compile:
            prepare(self.model, self.model.config.block_size)
        if self.s.compile and not self.sharded:
            print('compiling the model... (takes a ~minute)')
            self.compiled = self.trained = torch.compile(self.model)
        if self.ranks.world_size > 1 and not self.sharded:
            self.trained = torch.nn.parallel.DistributedDataParallel(
                self.compiled, device_ids=[self.device] if self.device.type == 'cuda' else None)

    def _model(self, saved, meta):
        """Return the initial model, and whether settings differ from those it was trained with."""
        s = self.s
        if s.init_from == 'scratch':
            self._count_tokens(s.block_size)
        if meta is not None:
            is_task = s.dataset in TASKS
            source = f'of {s.dataset}_task' if is_task else f'inside data/{s.dataset}/meta.pkl'
            print(f"found vocab_size = {meta['vocab_size']} ({source})")
        if s.init_from == 'scratch':
            return self._new_model(meta), False
        if saved:
            source = s.out_dir if self.origin == self.path else self.origin
            print(f'Resuming training from {source}')
            model, origin = None, self.origin
            old = ckpt.config_of(saved, origin, dropout=s.dropout)
        else:
            print(f'Initializing from OpenAI GPT-2 weights: {s.init_from}')
            model, origin = GPT.from_pretrained(s.init_from, dict(dropout=s.dropout)), s.init_from
            old = model.config
        config = self._pretrained_config(old, meta, origin, (saved or {}).get('tokens', ''))
        self._count_tokens(config.block_size)
        changes = differences(old, config)
        for change in changes:
            print(change)
        if not saved and not changes:
            return model, False
        weights = saved or {'model': model.state_dict()}
        if saved:
            check_weights(old, weights, origin)
        adapt(weights, old, config, origin)
        model = GPT(config)
        ckpt.load_weights(model, weights, origin)
        return model, bool(changes)

    def _count_tokens(self, block_size: int) -> None:
        s = self.s
        self.tokens_per_iter = s.gradient_accumulation_steps * s.batch_size * block_size
        print(f'tokens per iteration will be: {self.tokens_per_iter:,}')

    def _new_model(self, meta):
        print('Initializing a new model from scratch')
        if meta is None:
            print('defaulting to vocab_size of GPT-2 to 50304 (50257 rounded up for efficiency)')
        config = self.s.config(50304 if meta is None else meta['vocab_size'])
        with torch.device('meta' if self.sharded and not self.ranks.main else 'cpu'):
            return GPT(config)

    def _pretrained_config(self, old, meta, origin, tokens):
        """Return a trained model's config with the given settings applied."""
        s = self.s
        config = adapted_config(old, wishes(s), s.asked)
        vocab_size = 50257 if meta is None else meta['vocab_size']
        if vocab_size > config.vocab_size or tokens not in ('', self.tokens):
            raise UserError(f'dataset {s.dataset!r} has {vocab_size} tokens that are not those of '
                            f'{origin} (it has {config.vocab_size}): go on with the data set it '
                            'was trained on, prepared as it was')
        if s.init_from != 'resume' and meta is not None:
            print(f"Note: dataset {s.dataset!r} has an alphabet of its own, which GPT-2's weights "
                  'know nothing of')
        keep_trained(s, config)
        return config

    def _resume(self, saved):
        """Restore optimizer, scaler, counters and generators; returns the next batch."""
        with ckpt.restoring(self.origin, 'optimizer'):
            kind = saved['config'].get('optimizer', 'adamw')
            if saved['optimizer']['state'] and kind != self.s.optimizer:
                raise UserError(f'{self.origin} was trained with optimizer={kind!r}, whose state '
                                f'{self.s.optimizer!r} cannot use: go on with --optimizer={kind}')
            load_optimizer(self.optimizer, saved['optimizer'])
            if saved['iter_num'] and not saved['optimizer']['state']:
                print(f'Note: {self.origin} has no state of an optimizer, which starts anew')
        if saved.get('scaler'):
            with ckpt.restoring(self.origin, 'scaler'):
                self.scaler.load_state_dict(saved['scaler'])
        self.iter_num = saved['iter_num']
        with ckpt.restoring(self.origin, 'skipped'):
            self.update.counts[0] = self.update.reported = int(saved.get('skipped', 0))
        if not self.changed:  # a changed model starts a new history
            self.best_val_loss = torch.as_tensor(saved['best_val_loss'])
            self.holds_best, self.saved_at = bool(saved.get('holds_best', True)), self.iter_num
            self.manager.resume(self.origin, saved)
        with ckpt.restoring(self.origin, 'rng'):  # nanoGPT saves neither rng nor data_rng
            rank = self.ranks.rank  # there may be more processes than before
            for state in saved.get('rng', [])[rank:rank + 1]:
                ckpt.set_rng_state(state)
        if 'data_rng' not in saved:
            return self.batches.next()
        order = saved['config'].get('data_order', 'random')
        if order != self.s.data_order:
            raise UserError(f'{self.origin} was trained with data_order={order!r}, whose data '
                            f'position {self.s.data_order!r} cannot use: go on with '
                            f'--data_order={order}')
        with ckpt.restoring(self.origin, 'data_rng'):
            return self.batches.resume(saved['data_rng'])

    def save(self, best: bool, say=print):
        """Write ckpt.pt from rank 0. All ranks must call it, since each has its own generators.
        Raises UserError if it cannot be written; the previous checkpoint is then intact.

        best: whether the validation loss is the best so far. say: as in `CheckpointManager.save`.
        """
        self.holds_best = best or (self.holds_best and self.saved_at == self.iter_num)
        states = self.ranks.gather(ckpt.rng_state())
        if self.sharded:
            weights, moments = (fsdp.gathered(x.state_dict(), self.ranks.main)
                                for x in (self.model, self.optimizer))
            weights[ckpt.HEAD] = weights[ckpt.EMBEDDING]  # one parameter, gathered twice
        else:
            weights, moments = self.model.state_dict(), self.optimizer.state_dict()
        if self.ranks.main:
            shape = {name: getattr(self.model.config, name) for name in MODEL}
            self.manager.save({
                'model': weights, 'optimizer': moments,
                'model_args': model_args(self.model.config), 'iter_num': self.iter_num,
                'best_val_loss': self.best_val_loss, 'config': self.s.values() | shape,
                # beyond nanoGPT's keys: what an exact resume needs
                'scaler': self.scaler.state_dict(), 'rng': states, 'data_rng': self.batches.state,
                'holds_best': self.holds_best, 'skipped': int(self.update.counts[0]),
                'launch': launch_id(), 'tokens': self.tokens, 'meta': self.meta}, say)
        self.saved_at = self.iter_num

    def why_unsaved(self, first: int) -> str:
        """Return a line for a run from iteration `first` that ends without having saved a
        checkpoint, '' if it has saved one."""
        if self.saved_at > first or (self.changed and self.saved_at == first):
            return ''
        kept = f'; {self.origin} is still of iteration {first}' if self.saved_at == first else ''
        if first == self.s.max_iters == 0:
            return 'Note: no checkpoint was saved, since none is at iteration 0: give --max_iters=1'
        return ('Note: no checkpoint was saved, since the validation loss did not improve and '
                f'always_save_checkpoint=False{kept}: give --always_save_checkpoint=True, or '
                '--checkpoint_interval=N to save every N iterations')

    @torch.no_grad()
    def evaluate(self, stop):
        """Return the mean loss of each split over fixed windows, divided among the ranks; None if a
        stop was requested."""
        self.compiled.eval()
        means, n = {}, -(-self.s.eval_iters // self.ranks.world_size)  # batches per rank
        for split in ('train', 'val'):
            total = count = 0
            batches = self.batches.evaluation(split, self.s.eval_iters, self.s.seed)
            # sharded parameters are gathered by all ranks, or by none: a rank without a batch left
            # evaluates another one that does not count
            for _, batch in itertools.zip_longest(range(n), batches):
                with self.autocast:
                    loss = self.compiled(*(batch or self.batch))[1].item()
                if batch:
                    total, count = total + loss, count + 1
                if self.ranks.any(stop) if self.sharded else stop:
                    break
            total, count, stopped = self.ranks.sum([total, count, float(bool(stop))])
            if stopped:
                return None
            means[split] = total / count
        return means

    def step(self):
        """Run one iteration: forward and backward over this rank's micro-batches, clip, update.
        Returns the loss of the last micro-batch. Raises UserError if the last `max_skipped`
        iterations were all skipped."""
        self.trained.train()
        n = self.s.gradient_accumulation_steps // self.ranks.world_size
        for k in range(n):
            self._sync_gradients(k == n - 1)
            with self.autocast:
                loss = propagate_nonfinite(self.trained(*self.batch)[1] / n)
            self.batch = self.batches.next()  # while the device is busy with the forward pass
            self.scaler.scale(loss).backward()
        loss = loss.detach() * n
        self.update(self.iter_num, loss)
        # reading the counts waits for the device unless it is the CPU
        due = self.device.type == 'cpu' or self.iter_num % self.s.max_skipped == 0
        if not due or self.update.counts[1] < self.s.max_skipped:
            return loss
        # only rank 0 saves, so only it knows whether there is a checkpoint
        own = self.manager.latest is not None or not self.ranks.main
        files = [self.path] * own + [self.origin] * (self.s.init_from == 'resume')
        saved = next((path for path in files if path.is_file()), None)
        lr = self.optimizer.param_groups[0]['lr']
        raise UserError(broken(self.update.read(), self.iter_num, loss.item(), lr, self.s, saved))

    def metrics(self, updates, seconds: float) -> dict:
        """Return a logged step's metrics from grad_norm on (see `RunLog`). updates: as returned by
        `GuardedUpdate.read`. seconds: per iteration."""
        n = self.s.batch_size * self.s.gradient_accumulation_steps
        tflops = achieved(self.model, n, seconds)
        peak = peak_tflops(device_name(self.device), self.dtype)
        memory = memory_use(self.device)
        share = memory.peak / memory.total if memory.peak and memory.total else None
        row = dict(grad_norm=updates.grad_norm, loss_scale=updates.loss_scale,
                   skipped=updates.skipped, model_tflops_per_second=tflops,
                   mfu=peak and tflops / (peak * self.ranks.world_size), memory_bytes=memory.used,
                   memory_peak_bytes=memory.peak, memory_share=share,
                   data_wait_share=self.batches.share)
        return {name: value for name, value in row.items() if value is not None}

    def _sync_gradients(self, last):
        """Average gradients over the ranks only in an iteration's last backward pass."""
        if self.sharded:
            self.model.set_requires_gradient_sync(last)
        elif self.ranks.world_size > 1:
            self.trained.require_backward_grad_sync = last  # what DDP's no_sync() sets, too


def prepare(model, n_positions: int) -> None:
    """Build the rotary tables and block masks for sequences of `n_positions`, so that a compiled
    forward pass need not."""
    dtype = model.dtype
    for table in filter(None, (model.rotary or {}).values()):
        table(0, n_positions, model.device, dtype)
    if model.attention_backend not in ('auto', 'flex'):
        return
    for layer in model.plan.layers:
        # evaluation uses no dropout, even if training does
        backend = choose(layer.kind, model.attention_backend, model.device, dtype,
                         model.plan.head_dim, sink=model.config.attn_sink)
        if backend == 'flex':
            window = min(layer.window or n_positions, n_positions)
            block_mask(n_positions, window, model.device)
