"""A training run as train.py steps through it: built or resumed, then stepped, evaluated, saved."""
import itertools
from pathlib import Path

import torch

from common.errors import UserError
from data.recall.tasks import TASKS
from data.tokenfiles import open_split
from data.tokenizer import bytes_per_token
from training.checkpoint.file import tokens_id
from training.checkpoint.manager import CheckpointManager, checkpoint_in, load_to_resume
from training.device import autocast, device_name, keep_freed_memory, memory_use
from training.loop.batches import open_batches, open_meta
from training.loop.build import build_model, move_to_device
from training.loop.resume import checkpoint_of, restore
from training.memory.measure import print_memory_report
from training.native.loading import training_dtype
from training.parallel import fsdp
from training.step.flops import achieved, peak_tflops
from training.step.kernels import prepare
from training.step.optim import make_optimizer
from training.step.update import GuardedUpdate, broken, propagate_nonfinite


class Run:
    """A model in training, with its data, optimizer and counters, at the start of an iteration.

    Attributes:
        model, compiled, trained: the GPT; compiled if s.compile; and that under DDP, if it is used.
        changed: whether settings differ from those that the model was trained with.
        path, origin: ckpt.pt, and the checkpoint to resume from.
        saved_at, holds_best: the iteration of the last checkpoint saved or resumed from (-1: none),
            and whether it has the best validation loss.
        tokens, meta: the data set's `tokens_id`, and its alphabet, if it has one of its own.
    """

    def __init__(self, s, ranks, data_root: Path):
        self.s, self.ranks, self.device = s, ranks, ranks.device
        self.out_dir = Path(s.out_dir)
        self.manager = CheckpointManager(self.out_dir)
        self.path, self.origin = self.manager.path, checkpoint_in(s.out_dir, s.resume_from)
        self.iter_num, self.best_val_loss = 0, torch.tensor(1e9)
        self.saved_at, self.holds_best = -1, False

        keep_freed_memory(self.device)
        self.dtype = training_dtype(s.dtype, s.compile, self.device)
        if len(set(ranks.gather(self.dtype))) > 1:  # machines of different kinds
            self.dtype = torch.float32
        self.autocast = autocast(self.device, self.dtype)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.sharded = s.parallel == 'fsdp' and ranks.world_size > 1
        if s.parallel == 'fsdp':  # also with one process: a resumed run may have more
            fsdp.check(s.memory_report, self.dtype)
        torch.manual_seed(s.seed)
        torch.set_float32_matmul_precision('high' if s.tf32 else 'highest')

        # build the model, or resume it
        saved = load_to_resume(self.origin) if s.init_from == 'resume' else None
        with ranks.main_first():
            meta = open_meta(s, data_root)
        self.tokens = tokens_id(meta)
        self.meta = meta if meta and 'stoi' in meta else None  # for a copy without its data set
        new_on = 'meta' if self.sharded and not ranks.main else 'cpu'
        self.model, self.changed, self.tokens_per_iter = build_model(
            s, saved, meta, self.tokens, new_on)

        if self.sharded:  # only rank 0 has used its generator, to initialize weights
            torch.set_rng_state(ranks.gather(torch.get_rng_state())[0])
        self.batches = open_batches(s, self.model.config, data_root, ranks)
        torch.manual_seed(s.seed + ranks.rank)  # dropout
        self.bytes_per_token = 0.0
        if s.dataset not in TASKS:
            self.bytes_per_token = bytes_per_token(meta, open_split(data_root / s.dataset, 'val'))

        move_to_device(self.model, s, ranks, self.dtype, self.sharded)
        self.optimizer = make_optimizer(self.model, s, self.device.type)
        self.update = GuardedUpdate(self.optimizer, self.scaler, s.grad_clip, self.device)
        self.batch = restore(self, saved) if saved else self.batches.next()
        del saved
        if s.memory_report and ranks.main:
            print_memory_report(self)

        self.compiled = self.model
        if s.compile:
            prepare(self.model, self.model.config.block_size)
        if s.compile and not self.sharded:
            print('compiling the model... (takes a ~minute)')
            self.compiled = torch.compile(self.model)
        self.trained = self.compiled
        if ranks.world_size > 1 and not self.sharded:
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
        n = self.s.batch_size * self.s.gradient_accumulation_steps
        tflops = achieved(self.model, n, seconds)
        peak = peak_tflops(device_name(self.device), self.dtype)
        used, most, total = memory_use(self.device)
        row = dict(grad_norm=updates.grad_norm, loss_scale=updates.loss_scale,
                   skipped=updates.skipped, model_tflops_per_second=tflops,
                   mfu=peak and tflops / (peak * self.ranks.world_size), memory_bytes=used,
                   memory_peak_bytes=most, memory_share=most / total if most and total else None,
                   data_wait_share=self.batches.share)
        return {name: value for name, value in row.items() if value is not None}

