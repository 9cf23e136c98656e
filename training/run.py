"""One training run: model, optimizer, data position, and what takes them one iteration further."""
import contextlib
import shutil
from pathlib import Path

import torch

from attention.backends import choose
from attention.kernels.flex import block_mask
from config.errors import UserError
from config.gpt_config import GPTConfig, model_args
from config.schema import MODEL
from model import GPT
from training import checkpoint as ckpt
from training import fsdp, int8_training
from training import shard_files as shards
from training.adapt import adapt, adapted_config, differences
from training.batches import RECALL, open_batches, open_meta
from training.device import autocast, describe_attention, memory_use, pick_dtype
from training.distributed import launch_id
from training.flops import achieved, peak_tflops
from training.loss import linear_cross_entropy
from training.memory_plan import choose_policy, warn_of_memory
from training.optim import make_optimizer
from training.recompute import set_recompute
from training.shelf import Shelf, checkpoint_in, load_to_resume
from training.update import GuardedUpdate, broken, contagious


class Run:
    """What training goes on with: model, optimizer, scaler, data position and where in the run it stands."""

    def __init__(self, s, ranks, data_root: Path):
        self.s, self.ranks = s, ranks
        self.out_dir = Path(s.out_dir)
        self.shelf = Shelf(self.out_dir, s.keep_checkpoints)
        self.path, self.origin = self.shelf.path, checkpoint_in(s.out_dir, s.resume_from)
        self.device = ranks.device
        self.dtype = pick_dtype(s.dtype, self.device)
        self.autocast = autocast(self.device, self.dtype)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.sharded = s.parallel == 'fsdp' and ranks.world_size > 1
        if s.parallel == 'fsdp':  # also where one process is all there is: they may become more
            fsdp.check(s, self.dtype)
        if s.int8_training:
            int8_training.check(self.dtype, self.device)
        self.iter_num, self.best_val_loss = 0, torch.tensor(1e9)
        self.saved_at = -1       # iteration of the checkpoint that was saved, or gone on from, last
        self.holds_best = False  # whether that is this run's evaluated best, not only the latest
        torch.manual_seed(s.seed)
        torch.set_float32_matmul_precision('high' if s.tf32 else 'highest')

        saved = load_to_resume(self.origin, whole=not self.sharded) if s.init_from == 'resume' else None
        with ranks.main_first():
            meta = open_meta(s, data_root)
        self.tokens = ckpt.tokens_id(meta)
        self.model, self.changed = self._model(saved, meta)
        if self.sharded:
            torch.set_rng_state(ranks.from_first(torch.get_rng_state()))  # rank 0 alone has drawn weights
        policy = 'block' if s.checkpoint_blocks else s.recompute
        if ranks.main:
            warn_of_memory(s, self.model.config, policy, self.device, self.dtype, ranks.world_size)
        self.batches = open_batches(s, data_root, self.device, torch.Generator(), ranks.rank, ranks.world_size,
                                    self.model.config.vocab_size)
        self.batches.generator.set_state(torch.get_rng_state())  # from where nanoGPT draws its first batch
        if s.data_seed >= 0:
            self.batches.generator.manual_seed(s.data_seed)
        torch.manual_seed(s.seed + ranks.rank)  # dropout
        if not self.sharded:
            self.model.to(self.device)
        if policy == 'auto':
            policy = choose_policy(s, self.model.config, self.device, self.dtype, ranks.world_size, ranks.least)
        set_recompute(self.model, policy)
        self.model.loss_fn = linear_cross_entropy if s.chunked_loss else None
        self.model.attention_backend = s.attention_backend
        if s.int8_training:
            int8_training.train_in_int8(self.model)
        if self.sharded:
            fsdp.shard(self.model, ranks, self.dtype, s.compile, empty='shards' in (saved or {}))
        print(describe_attention(self.model, self.dtype, self.model.config.dropout))
        print(f'number of parameters: {self.model.get_num_params() / 1e6:.2f}M')
        self.optimizer = make_optimizer(self.model, s, self.device.type)
        self.update = GuardedUpdate(self.optimizer, self.scaler, s.grad_clip, self.device)
        self.batch = self._resume(saved, self.changed) if saved else self.batches.next()
        del saved
        if s.memory_report and ranks.main:
            from training.memory import print_memory_report
            print_memory_report(self, self.dtype)
        self._compile_and_distribute()

    def _compile_and_distribute(self):
        self.compiled = self.trained = self.model
        if self.sharded:
            return prepare(self.model, self.s.block_size) if self.s.compile else None
        if self.s.compile:
            print('compiling the model... (takes a ~minute)')
            prepare(self.model, self.s.block_size)
            self.compiled = torch.compile(self.model)
        self.trained = self.compiled
        if self.ranks.world_size > 1:
            self.trained = torch.nn.parallel.DistributedDataParallel(
                self.compiled, device_ids=[self.device] if self.device.type == 'cuda' else None)

    def _model(self, saved, meta):
        """The model to start from, and whether it was given settings that its weights were not trained with."""
        s = self.s
        if meta is not None:
            print(f"found vocab_size = {meta['vocab_size']} (" +
                  ('of recall_task)' if RECALL in meta else f'inside data/{s.dataset}/meta.pkl)'))
        if s.init_from == 'scratch':
            print('Initializing a new model from scratch')
            if meta is None:
                print('defaulting to vocab_size of GPT-2 to 50304 (50257 rounded up for efficiency)')
            vocab_size = 50304 if meta is None else meta['vocab_size']
            with torch.device('meta' if self.sharded and not self.ranks.main else 'cpu'):
                return GPT(GPTConfig(vocab_size=vocab_size, **{key.name: getattr(s, key.name) for key in MODEL})), False
        if saved:
            print(f'Resuming training from {s.out_dir if self.origin == self.path else self.origin}')
            model, origin, old = None, self.origin, ckpt.config_of(saved, self.origin, dropout=s.dropout)
        else:
            print(f'Initializing from OpenAI GPT-2 weights: {s.init_from}')
            model, origin = GPT.from_pretrained(s.init_from, dict(dropout=s.dropout)), s.init_from
            old = model.config
        config = self._settle(old, meta, origin, (saved or {}).get('tokens', ''))
        changes = differences(old, config)
        for change in changes:
            print(change)
        if saved or changes:
            weights = saved or {'model': model.state_dict()}
            if changes and 'shards' in weights:
                shards.fill(origin, weights)
            adapt(weights, old, config, origin)
            elsewhere = 'shards' in weights  # each process takes its part of them, when it knows which that is
            with torch.device('meta' if elsewhere else 'cpu'):
                model = GPT(config)
            if not elsewhere:
                ckpt.load_weights(model, weights, origin)
        return model, bool(changes)

    def _settle(self, old, meta, origin, known):
        """The shape of a model that is not new: its own, but for the settings that were given and that it can follow.

        The settings of this run become that shape, so that its checkpoints tell the truth.
        """
        config = adapted_config(old, {key.name: getattr(self.s, key.name) for key in MODEL if key.name in self.s.given})
        vocab_size = 50257 if meta is None else meta['vocab_size']
        if vocab_size > config.vocab_size or known not in ('', self.tokens):
            raise UserError(f'dataset {self.s.dataset!r} has {vocab_size} tokens that are not those of {origin} (it has '
                            f'{config.vocab_size}): go on with the data set it was trained on, prepared as it was')
        if self.s.init_from != 'resume' and meta is not None:
            print(f"Note: dataset {self.s.dataset!r} has an alphabet of its own, which GPT-2's weights know nothing of")
        ckpt.note_fixed_settings(self.s, config)
        for key in MODEL:
            setattr(self.s, key.name, getattr(config, key.name))
        return config

    def _resume(self, saved, changed):
        """Optimizer, scaler, counters, random numbers; returns the batch that the next iteration was to train on."""
        if 'shards' in saved:
            self._read_shards(saved)
        with ckpt.restoring(self.origin, 'optimizer'):
            kind = saved['config'].get('optimizer', 'adamw')
            if saved['optimizer']['state'] and kind != self.s.optimizer:
                raise UserError(f'{self.origin} was trained with optimizer={kind!r}, whose averages are of no use to '
                                f'{self.s.optimizer!r}: go on with --optimizer={kind}')
            ckpt.load_optimizer(self.optimizer, saved['optimizer'])
        if saved.get('scaler'):
            with ckpt.restoring(self.origin, 'scaler'):
                self.scaler.load_state_dict(saved['scaler'])
        self.iter_num = saved['iter_num']
        with ckpt.restoring(self.origin, 'skipped'):
            self.update.restore(int(saved.get('skipped', 0)))
        if not changed:  # a model with other settings is to be judged anew, and does not take the place of its origin
            self.best_val_loss = torch.as_tensor(saved['best_val_loss'])
            self.holds_best, self.saved_at = bool(saved.get('holds_best', True)), self.iter_num
            self.shelf.resume(self.origin, saved)
        with ckpt.restoring(self.origin, 'rng'):  # nanoGPT keeps neither random numbers nor the data position
            states = saved.get('rng', [])
            if type(states) is not list:
                raise TypeError(f'{type(states).__name__}, not a list')
            if self.ranks.rank < len(states):
                ckpt.set_rng_state(states[self.ranks.rank])
        order = saved['config'].get('data_order', 'random')
        if 'data_rng' in saved and order != self.s.data_order:
            raise UserError(f'{self.origin} was trained with data_order={order!r}, and its place in that is of no use to '
                            f'{self.s.data_order!r}: go on with --data_order={order}')
        with ckpt.restoring(self.origin, 'data_rng'):
            return self.batches.resume(saved['data_rng']) if 'data_rng' in saved else self.batches.next()

    def _read_shards(self, saved):
        """The weights, into the model, and the moments, into the checkpoint `saved`; of each this process's part."""
        params = [p for group in self.optimizer.param_groups for p in group['params']]
        tensors = {f'model.{name}': p.detach() for name, p in self.model.named_parameters()}
        for i, names in shards.moments(self.origin, saved['shards']).items():
            tensors |= {f'optimizer.{i}.{name}': torch.zeros_like(params[i].detach()) for name in names if i < len(params)}
        shards.read(self.origin, saved['shards'], tensors, self.ranks.control)
        saved['optimizer'] = shards.merged(saved['optimizer'], tensors)

    def _tensors(self):
        """What a checkpoint has of weights and optimizer: the tensors themselves, or where they were written to."""
        if not self.sharded:
            return {'model': self.model.state_dict(), 'optimizer': ckpt.optimizer_state(self.optimizer)}
        tensors, optimizer = shards.split(dict(self.model.named_parameters()), self.optimizer.state_dict())
        # rank 0's shelf is the one that saves
        folder = self.out_dir / self.ranks.from_first(shards.new_name(self.shelf.run, self.iter_num))
        return {'model': {}, 'optimizer': optimizer, 'shards': shards.write(folder, tensors, self.ranks.control)}

    def save(self, best: bool, say=print):
        """Write ckpt.pt, from rank 0; all ranks take part, for each has random numbers of its own.

        best: this state was evaluated, and is better than all before. say: is told which files got another name.
        Raises:
            UserError: it cannot be written. What there was before is whole, and named.
        """
        self.holds_best = best or (self.holds_best and self.saved_at == self.iter_num)
        states, tensors = self.ranks.gather(ckpt.rng_state()), self._tensors()
        if self.ranks.main:
            self._put({
                **tensors, 'model_args': model_args(self.model.config), 'iter_num': self.iter_num,
                'best_val_loss': self.best_val_loss, 'config': vars(self.s),
                # beyond nanoGPT's keys: what an exact resume needs
                'scaler': self.scaler.state_dict(), 'rng': states, 'data_rng': self.batches.state,
                'holds_best': self.holds_best, 'skipped': self.update.skipped, 'launch': launch_id(),
                'tokens': self.tokens}, say)  # tokens: against ids that came to mean others
        self.saved_at = self.iter_num

    def _put(self, checkpoint, say):
        """The checkpoint on the shelf, and none of its shards left behind where that fails, nor those of former ones."""
        try:
            self.shelf.save(checkpoint, say)
        except UserError:
            if 'shards' in checkpoint:
                shutil.rmtree(self.out_dir / checkpoint['shards']['folder'], ignore_errors=True)
            raise
        shards.collect(self.out_dir, self.shelf.run)

    @torch.no_grad()
    def evaluate(self, stop):
        """Mean loss per split over always the same windows, shared out over the ranks; None if a stop was asked for."""
        self.compiled.eval()
        means = {}
        for split in ('train', 'val'):
            total = count = 0
            for x, y, counts in self._evaluation(split):
                with self.autocast:
                    total += counts * self.compiled(x, y)[1].item()
                count += counts
                if self.ranks.any(stop) if self.sharded else stop:  # shared parameters are gathered by all, or none
                    break
            total, count, stopped = self.ranks.sum([total, count, float(bool(stop))])
            if stopped:
                return None
            means[split] = total / count
        return means

    def _evaluation(self, split):
        """(x, y, 1) of this rank's batches; where all ranks must make as many passes, the last again with 0."""
        n, x, y = 0, *self.batch
        for x, y in self.batches.evaluation(split, self.s.eval_iters, self.s.seed):
            n += 1
            yield x, y, 1
        if self.sharded:
            for _ in range(-(-self.s.eval_iters // self.ranks.world_size) - n):
                yield x, y, 0

    def step(self):
        """One iteration: forward and backward over this rank's micro-batches, clip, update. Returns the last one's loss.

        Raises:
            UserError: too many iterations in a row had nothing finite to step by (`stop_if_broken`).
        """
        self.trained.train()
        n = self.s.gradient_accumulation_steps // self.ranks.world_size
        for k in range(n):
            with self._last_syncs(k == n - 1):
                with self.autocast:
                    loss = contagious(self.trained(*self.batch)[1] / n)
                self.batch = self.batches.next()  # fetched while the device is busy with the forward pass
                self.scaler.scale(loss).backward()
        loss = loss.detach() * n
        self.update(self.iter_num, loss)
        if self.device.type == 'cpu' or self.iter_num % self.s.max_skipped == 0:  # elsewhere to look is to wait for the device
            self.stop_if_broken(loss)
        return loss

    def stop_if_broken(self, loss):
        """Raises UserError where the last `max_skipped` iterations were all skipped. It waits for the device."""
        if self.update.in_row >= self.s.max_skipped:
            own = self.shelf.latest is not None or not self.ranks.main  # only rank 0 saves, and knows
            files = [self.path] * own + [self.origin] * (self.s.init_from == 'resume')
            saved = next((path for path in files if path.is_file()), None)
            lr = self.optimizer.param_groups[0]['lr']
            raise UserError(broken(self.update.read(), self.iter_num, loss.item(), lr, self.s, saved))

    def figures(self, seen, seconds: float) -> dict:
        """What a logged step tells beside loss and pace: the keys of `RunLog`'s rows from grad_norm on.

        seen: from `GuardedUpdate.read`. seconds: of an iteration.
        """
        tflops = achieved(self.model, self.s.batch_size * self.s.gradient_accumulation_steps, seconds)
        peak = peak_tflops(self.device, self.dtype)
        memory = memory_use(self.device)
        row = dict(grad_norm=seen.grad_norm, loss_scale=seen.loss_scale, skipped=seen.skipped, model_tflops_per_second=tflops,
                   mfu=peak and tflops / (peak * self.ranks.world_size), memory_bytes=memory.used,
                   memory_peak_bytes=memory.peak, memory_share=memory.share, data_wait_share=self.batches.share)
        return {name: value for name, value in row.items() if value is not None}

    def _last_syncs(self, last):
        """Gradients are averaged over the ranks once an iteration, in its last backward pass."""
        if self.sharded:
            self.model.set_requires_gradient_sync(last)
            return contextlib.nullcontext()
        return contextlib.nullcontext() if last or self.ranks.world_size == 1 else self.trained.no_sync()


def prepare(model, n_positions: int) -> None:
    """Build what sequences of `n_positions` need and a compiled forward should find: rotary tables,
    block masks."""
    dtype = model.dtype
    for table in (model.rotary or {}).values():
        table(0, n_positions, model.device, dtype)
    if model.attention_backend not in ('auto', 'flex'):
        return
    for layer in model.plan.layers:
        # without dropout: evaluation has none, whatever training does
        backend = choose(layer.kind, model.attention_backend, model.device, dtype,
                         model.plan.head_dim)
        if backend == 'flex':
            window = min(layer.window or n_positions, n_positions)
            block_mask(n_positions, window, model.device)
