"""Train a GPT, vanilla or with a small KV cache, on one device.

    python train.py config/train_mqa_local.py                    # the demo: Shakespeare, all savings on
    python train.py config/train_mqa_local.py --max_iters=1000 --learning_rate=1e-3
    python train.py config/train_mqa_local.py --init_from=resume # go on from out_dir/ckpt.pt, to the same losses
    python train.py --help                                       # every key, its default and meaning

Ctrl-C or SIGTERM saves a checkpoint after the current step and exits.
"""
import os
from pathlib import Path

import torch

import configurator
from config.errors import UserError
from config.gpt_config import GPTConfig, model_args
from config.schema import MODEL
from data.datasets import DATA_ROOT, ensure_dataset
from data.tokenfiles import read_meta
from model import GPT
from training import checkpoint as ckpt
from training.batches import TokenBatches
from training.device import autocast, check_seed, pick_device, pick_dtype
from training.log import Pace, RunLog, start_wandb
from training.optim import learning_rate_at
from training.signals import StopRequest


class Run:
    """What training goes on with: model, optimizer, scaler, data position and where in the run it stands."""

    def __init__(self, s):
        self.s = s
        self.out_dir = Path(s.out_dir)
        self.path = self.out_dir / 'ckpt.pt'
        self.device = pick_device(s.device)
        dtype = pick_dtype(s.dtype, self.device)
        self.autocast = autocast(self.device, dtype)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        self.iter_num, self.best_val_loss = 0, torch.tensor(1e9)
        self.holds_best = False  # whether ckpt.pt is this run's evaluated best, not only the latest
        torch.manual_seed(s.seed)
        torch.set_float32_matmul_precision('high')  # tf32 on CUDA, as in nanoGPT

        saved = ckpt.load_checkpoint(self.path) if s.init_from == 'resume' else None
        folder = ensure_dataset(s.dataset, DATA_ROOT)
        self.batches = TokenBatches(folder, s.block_size, s.batch_size, self.device)
        self.model = self._resumed_model(saved, folder) if saved else self._new_model(folder)
        self.model.to(self.device)
        self.model.checkpoint_blocks = s.checkpoint_blocks
        print(f'number of parameters: {self.model.get_num_params() / 1e6:.2f}M')
        self.optimizer = self.model.configure_optimizers(s.weight_decay, s.learning_rate, (s.beta1, s.beta2),
                                                         self.device.type)
        self.batch = self._resume(saved) if saved else self.batches.next()
        del saved
        self.compiled = self.model
        if s.compile:
            print('compiling the model... (takes a ~minute)')
            self.model.prepare(s.block_size)
            self.compiled = torch.compile(self.model)

    def _new_model(self, folder):
        print('Initializing a new model from scratch')
        meta = read_meta(folder)
        if meta is None:
            print('defaulting to vocab_size of GPT-2 to 50304 (50257 rounded up for efficiency)')
        else:
            print(f"found vocab_size = {meta['vocab_size']} (inside {folder / 'meta.pkl'})")
        vocab_size = 50304 if meta is None else meta['vocab_size']
        return GPT(GPTConfig(vocab_size=vocab_size, **{key.name: getattr(self.s, key.name) for key in MODEL}))

    def _resumed_model(self, saved, folder):
        """The checkpoint's own shape, as in nanoGPT: of the model keys only dropout may be changed; others are passed over,
        and that is said."""
        print(f'Resuming training from {self.s.out_dir}')
        config = ckpt.config_of(saved, self.path, dropout=self.s.dropout)
        if config.block_size != self.s.block_size:
            raise UserError(f'block_size={self.s.block_size}, but the checkpoint {self.path} was trained with '
                            f'block_size={config.block_size}: resume with the config it was trained with')
        vocab_size = (read_meta(folder) or {'vocab_size': 50257})['vocab_size']
        if vocab_size > config.vocab_size:
            raise UserError(f'dataset {self.s.dataset!r} has vocab_size={vocab_size}, but the checkpoint '
                            f'{self.path} {config.vocab_size}: resume with the data set it was trained on')
        for key in MODEL:
            kept = getattr(config, key.name)
            if kept != getattr(self.s, key.name):
                print(f'{key.name} = {kept!r}, as in the checkpoint (not {getattr(self.s, key.name)!r})')
                setattr(self.s, key.name, kept)
        model = GPT(config)
        ckpt.load_weights(model, saved, self.path)
        return model

    def _resume(self, saved):
        """Optimizer, scaler, counters, random numbers; returns the batch that the next iteration was to train on."""
        with ckpt.restoring(self.path, 'optimizer'):
            ckpt.load_optimizer(self.optimizer, saved['optimizer'])
        for group, decay in zip(self.optimizer.param_groups, (self.s.weight_decay, 0.0)):  # today's settings, not the saved
            group.update(betas=(self.s.beta1, self.s.beta2), weight_decay=decay)
        if saved.get('scaler'):
            with ckpt.restoring(self.path, 'scaler'):
                self.scaler.load_state_dict(saved['scaler'])
        self.iter_num, self.best_val_loss = saved['iter_num'], torch.as_tensor(saved['best_val_loss'])
        self.holds_best = saved.get('holds_best', True)
        if 'rng' not in saved:  # nanoGPT's: it kept neither random numbers nor the data position
            return self.batches.next()
        with ckpt.restoring(self.path, 'rng'):
            ckpt.set_rng_state(saved['rng'])
        with ckpt.restoring(self.path, 'data_offsets'):
            offsets = torch.as_tensor(saved['data_offsets'])
            if len(offsets) == self.s.batch_size:
                return self.batches.at(offsets)
        return self.batches.next()  # another batch size is another run from here on

    def save(self, holds_best: bool):
        self.out_dir.mkdir(parents=True, exist_ok=True)
        ckpt.save_checkpoint(self.path, {
            'model': self.model.state_dict(), 'optimizer': self.optimizer.state_dict(),
            'model_args': model_args(self.model.config), 'iter_num': self.iter_num,
            'best_val_loss': self.best_val_loss, 'config': vars(self.s),
            # beyond nanoGPT's keys: what an exact resume needs
            'scaler': self.scaler.state_dict(), 'rng': ckpt.rng_state(), 'data_offsets': self.batches.offsets,
            'holds_best': holds_best})
        self.holds_best = holds_best

    @torch.no_grad()
    def evaluate(self, stop):
        """Mean loss per split over always the same windows; None if a stop was asked for meanwhile."""
        self.compiled.eval()
        means = {}
        for split in ('train', 'val'):
            losses = []
            for x, y in self.batches.evaluation(split, self.s.eval_iters, self.s.seed):
                with self.autocast:
                    losses.append(self.compiled(x, y)[1].item())
                if stop:
                    return None
            means[split] = sum(losses) / len(losses)
        return means

    def step(self):
        """One iteration: forward and backward over the micro-batches, clip, update. Returns the last micro-batch's loss."""
        self.compiled.train()
        n = self.s.gradient_accumulation_steps
        for _ in range(n):
            with self.autocast:
                loss = self.compiled(*self.batch)[1] / n
            self.batch = self.batches.next()  # fetched while the device is busy with the forward pass
            self.scaler.scale(loss).backward()
        if self.s.grad_clip != 0.0:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.s.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach() * n


def train(run, log, stop):
    """The loop, in nanoGPT's order: evaluate and save where due, then train one iteration; ends after max_iters."""
    s, pace, mfu, first = run.s, Pace(), -1.0, run.iter_num
    while not stop:
        lr = learning_rate_at(run.iter_num, s)
        for group in run.optimizer.param_groups:
            group['lr'] = lr
        evaluated = {}
        if run.iter_num % s.eval_interval == 0 or run.iter_num == s.max_iters or s.eval_only:
            log.doing('evaluating')
            losses = run.evaluate(stop)
            if losses is None:
                break
            log.line(f"step {run.iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
            log.wandb(iter=run.iter_num, train__loss=losses['train'], val__loss=losses['val'], lr=lr, mfu=mfu * 100)
            if s.eval_only:
                return
            evaluated = {f'{split}_loss': loss for split, loss in losses.items()}
            keep_best(run, log, losses['val'])
            log.doing('training')
            pace.restart()
        loss = run.step()
        pace.step()
        if run.iter_num % s.log_interval == 0 or evaluated:
            loss = loss.item()  # waits for the device, so the clock below is right
            dt = pace.read()
            tokens_per_second = s.gradient_accumulation_steps * s.batch_size * s.block_size / dt
            if run.iter_num - first >= 5:
                now = run.model.estimate_mfu(s.batch_size * s.gradient_accumulation_steps, dt)
                mfu = now if mfu == -1.0 else 0.9 * mfu + 0.1 * now
            if run.iter_num % s.log_interval == 0:
                log.line(f'iter {run.iter_num}: loss {loss:.4f}, time {dt * 1000:.2f}ms, mfu {mfu * 100:.2f}%')
            log.metrics(iter=run.iter_num, loss=loss, lr=lr, time_ms=dt * 1000, tokens_per_second=tokens_per_second,
                        **evaluated)
            log.advance(run.iter_num, tokens_per_second, loss)
        run.iter_num += 1
        if run.iter_num > s.max_iters:
            return
    stop_cleanly(run, log, stop)


def keep_best(run, log, val_loss):
    """Save if the validation loss improved, or always where asked; never before the first step, as in nanoGPT."""
    if val_loss < run.best_val_loss or run.s.always_save_checkpoint:
        run.best_val_loss = torch.tensor(val_loss)
        if run.iter_num > 0:
            run.save(holds_best=True)
            log.line(f'saving checkpoint to {run.s.out_dir}')


def stop_cleanly(run, log, stop):
    """Save where the run stands. Where ckpt.pt was the best so far rather than the latest, it is kept beside it."""
    best = run.out_dir / 'ckpt_best.pt'
    if run.holds_best and not run.s.always_save_checkpoint and run.path.is_file():
        best.unlink(missing_ok=True)
        try:
            os.link(run.path, best)  # ckpt.pt stays until the new one takes its name
        except OSError:  # a file system without hard links
            run.path.replace(best)
        log.line(f'the best checkpoint so far is kept as {best}')
    run.save(holds_best=False)
    log.line(f'{stop.name}: saved iteration {run.iter_num} to {run.path}; go on with --init_from=resume')


def check(s):
    """Settings that only make sense together, refused before anything is loaded or written."""
    for name in ('batch_size', 'gradient_accumulation_steps', 'eval_interval', 'log_interval', 'eval_iters'):
        if getattr(s, name) < 1:
            raise UserError(f'{name}={getattr(s, name)}: must be at least 1')
    for name in ('max_iters', 'warmup_iters', 'grad_clip', 'weight_decay', 'learning_rate', 'min_lr'):
        if getattr(s, name) < 0:
            raise UserError(f'{name}={getattr(s, name)}: must not be negative')
    for name in ('beta1', 'beta2'):
        if not 0.0 <= getattr(s, name) < 1.0:
            raise UserError(f'{name}={getattr(s, name)}: must be at least 0 and below 1')
    check_seed(s.seed)
    if os.environ.get('WORLD_SIZE', '1') != '1':  # they would all write the same checkpoint
        raise UserError(f"WORLD_SIZE={os.environ['WORLD_SIZE']}: training on several processes is not supported yet; start "
                        'train.py with python, not torchrun')
    out_dir = Path(s.out_dir)
    blocker = next((p for p in (out_dir, *out_dir.parents) if p.exists()), None)
    if not s.out_dir or (blocker and not blocker.is_dir()):
        raise UserError(f'out_dir={s.out_dir!r} cannot be a folder' + (f': {blocker} is a file' if blocker else ''))


def main(argv=None):
    s = configurator.parse('train', argv, usage=__doc__)
    check(s)
    print(f'tokens per iteration will be: {s.gradient_accumulation_steps * s.batch_size * s.block_size:,}')
    run = Run(s)
    try:
        run.out_dir.mkdir(parents=True, exist_ok=True)
        log = RunLog(run.out_dir, run.iter_num, s.max_iters, start_wandb(s), write=not s.eval_only)
    except OSError as e:
        raise UserError(f'out_dir={s.out_dir!r} cannot be written to: {e}') from e
    with StopRequest() as stop, log:
        train(run, log, stop)


if __name__ == '__main__':
    configurator.run_program(main)
