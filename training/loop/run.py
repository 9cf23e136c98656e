"""A training run as train.py steps through it: built or resumed, then stepped, evaluated, saved."""
import functools
import itertools
from pathlib import Path

import torch

from common.errors import UserError
from training.checkpoint.manager import CheckpointManager
from training.device import autocast, device_name, memory_use
from training.elastic.plans import table
from training.loop.resume import checkpoint_of
from training.parallel import fsdp
from training.step.flops import achieved, peak_tflops
from training.step.kernels import prepare
from training.step.update import GuardedUpdate, broken, propagate_nonfinite


class Run:
    """A model in training, with its data, optimizer and counters, at the start of an iteration.

    Attributes:
        model, compiled, trained: the GPT, or with plans the `Elastic` of it in its place; compiled
            if s.compile; and that under DDP, if it is used.
        elastic: None without plans and teacher.
        plans: those of an elastic model, the base first; [] if there are none.
        changed: whether settings differ from those that the model was trained with.
        path, origin: ckpt.pt, and the checkpoint to resume from.
        saved_at, holds_best: the iteration of the last checkpoint saved or resumed from (-1: none),
            and whether it has the best validation loss.
        sequences, tokens_per_iter: of an iteration, of all processes.
    """

    def __init__(self, s, ranks, data, batches, model, elastic, changed: bool, optimizer,
                 dtype: torch.dtype, origin: Path):
        self.s, self.ranks, self.device, self.dtype = s, ranks, ranks.device, dtype
        self.data, self.batches = data, batches
        self.model, self.changed, self.optimizer = model, changed, optimizer
        self.elastic = elastic
        self.plans = elastic.plans if elastic and len(elastic.plans) > 1 else []
        self.compiled = self.trained = elastic or model
        self.sharded = fsdp.used(s.parallel, ranks)
        self.autocast = autocast(self.device, dtype)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        self.update = GuardedUpdate(optimizer, self.scaler, s.grad_clip, self.device)

        self.out_dir = Path(s.out_dir)
        self.manager = CheckpointManager(self.out_dir)
        self.path, self.origin = self.manager.path, origin
        self.iter_num, self.best_val_loss = 0, torch.tensor(1e9)
        self.saved_at, self.holds_best = -1, False
        self.sequences = s.batch_size * s.gradient_accumulation_steps
        self.tokens_per_iter = self.sequences * model.config.block_size

    def compile(self) -> None:
        """Compile the model, or its kernels alone if `fsdp.shard` has compiled its blocks."""
        for model in self.elastic.all_models if self.elastic else [self.model]:
            prepare(model, self.model.config.block_size)
        if not self.sharded:
            print('compiling the model... (takes a ~minute)')
            self.compiled = self.trained = torch.compile(self.trained)

    def distribute(self) -> None:
        """Let each backward pass average the gradients of all processes (DDP)."""
        if self.ranks.world_size > 1 and not self.sharded:
            own = [self.device] if self.device.type == 'cuda' else None
            self.trained = torch.nn.parallel.DistributedDataParallel(self.compiled, own)

    def save(self, best: bool, say=print):
        """Write ckpt.pt from rank 0; all ranks must call it. best: whether the validation loss is
        the best so far. Raises UserError as `CheckpointManager.save` does."""
        self.holds_best = best or (self.holds_best and self.saved_at == self.iter_num)
        checkpoint = checkpoint_of(self)
        if self.ranks.main:
            self.manager.save(checkpoint, say)
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
        means = {split: self._mean_loss(self.compiled, split, stop) for split in ('train', 'val')}
        n_others = len(self.elastic.plans) - 1 if self.elastic else 0
        others = [self._mean_loss(functools.partial(self.elastic.under, i + 1), 'val', stop)
                  for i in range(n_others)]
        if None in (*means.values(), *others):
            return None
        if self.elastic:
            self.elastic.losses = [means['val'], *others]
        return means

    def _mean_loss(self, model, split: str, stop) -> float | None:
        total = count = 0
        n = -(-self.s.eval_iters // self.ranks.world_size)  # batches per rank
        batches = self.batches.evaluation(split, self.s.eval_iters, self.s.seed)
        # sharded parameters are gathered by all ranks, or by none: a rank without a batch left
        # evaluates another one that does not count
        for _, batch in itertools.zip_longest(range(n), batches):
            with self.autocast:
                loss = model(*(batch or self.batch))[1].item()
            if batch:
                total, count = total + loss, count + 1
            if self.ranks.any(stop) if self.sharded else stop:
                break
        total, count, stopped = self.ranks.sum([total, count, float(bool(stop))])
        return None if stopped else total / count

    def plan_lines(self) -> list[str]:
        """A line a plan of an elastic model: its bytes and its validation loss."""
        return table(self.plans, self.elastic.losses) if self.plans else []

    def step(self):
        """Run one iteration: forward and backward over this rank's micro-batches, clip, update.
        Returns the loss of the last micro-batch. Raises UserError if the last `max_skipped`
        iterations were all skipped."""
        self.trained.train()
        n = self.s.gradient_accumulation_steps // self.ranks.world_size
        for k in range(n):
            last = k == n - 1  # of the backward passes; only this one averages over the ranks
            if self.sharded:
                self.model.set_requires_gradient_sync(last)
            elif self.ranks.world_size > 1:
                self.trained.require_backward_grad_sync = last  # what DDP's no_sync() sets, too
            with self.autocast:
                loss = propagate_nonfinite(self.trained(*self.batch)[1] / n)
            self.batch = self.batches.next()  # while the device is busy with the forward pass
            self.scaler.scale(loss).backward()
        loss = loss.detach() * n
        self.update(self.iter_num, loss)
        self._stop_if_broken(loss)
        return loss

    def _stop_if_broken(self, loss):
        # reading the counts waits for the device unless it is the CPU
        due = self.device.type == 'cpu' or self.iter_num % self.s.max_skipped == 0
        if not due or self.update.counts[1] < self.s.max_skipped:
            return
        resumed = self.s.init_from == 'resume' and self.origin.is_file()
        saved = self.origin if resumed else None
        # only rank 0 saves, so only it knows whether there is a checkpoint
        if self.path.is_file() and (self.manager.latest is not None or not self.ranks.main):
            saved = self.path
        lr = self.optimizer.param_groups[0]['lr']
        raise UserError(broken(self.update.read(), self.iter_num, loss.item(), lr,
                               self.s.grad_clip, self.s.max_skipped, saved))

    def metrics(self, updates, seconds: float) -> dict:
        """Return a logged step's metrics from grad_norm on (see `RunLog`). updates: as returned by
        `GuardedUpdate.read`. seconds: per iteration."""
        tflops = achieved(self.model, self.sequences * self.s.plan_passes, seconds)
        peak = peak_tflops(device_name(self.device), self.dtype)
        used, most, total = memory_use(self.device)
        row = dict(grad_norm=updates.grad_norm, loss_scale=updates.loss_scale,
                   skipped=updates.skipped, model_tflops_per_second=tflops,
                   mfu=peak and tflops / (peak * self.ranks.world_size), memory_bytes=used,
                   memory_peak_bytes=most, memory_share=most / total if most and total else None,
                   data_wait_share=self.batches.share)
        return {name: value for name, value in row.items() if value is not None}

