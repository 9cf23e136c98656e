"""Train a GPT, vanilla or with a small KV cache.

    python train.py config/train_mqa_local.py                    # the demo: Shakespeare, all savings on
    python train.py config/train_mqa_local.py --max_iters=1000 --learning_rate=1e-3
    python train.py config/train_mqa_local.py --init_from=resume # go on from out_dir/ckpt.pt, to the same losses
    python train.py config/train_mqa_local.py --init_from=resume --resume_from=ckpt_best.pt  # or from another one there
    python train.py config/finetune_shakespeare.py --init_from=gpt2   # from OpenAI's weights
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
    python train.py --help                                       # every key, its default and meaning

Ctrl-C or SIGTERM saves a checkpoint after the current step and exits.
"""
from config import missing  # noqa: F401  # isort: skip  (before packages that may be missing)
import contextlib
import os
import warnings
from datetime import timedelta
from pathlib import Path

import torch

import configurator
from config.errors import UserError
from config.gpt_config import GPTConfig
from config.schema import MODEL
from data.datasets import DATA_ROOT
from data.tokenfiles import is_prepared
from kv.plan import plan_kv
from training.device import check_seed
from training.distributed import Ranks, go_on_after_restart
from training.int8_training import int8_linear
from training.lock import only_writer
from training.log import Pace, RunLog
from training.memory_use import memory_line
from training.optim import check_optimizer, cooldown, learning_rate_at, set_learning_rate
from training.run import Run
from training.shelf import checkpoint_in, launch_of
from training.signals import StopRequest
from training.trackers import check_packages, open_trackers

MOST_AHEAD = 64


def train(run, log, stop):
    """The loop, in nanoGPT's order: evaluate and save where due, then train one iteration; ends after max_iters."""
    s, pace, mfu, mean_dt, first = run.s, Pace(), -1.0, 0.0, run.iter_num
    while not run.ranks.any(stop):
        lr = learning_rate_at(run.iter_num, s)
        set_learning_rate(run.optimizer, lr)
        evaluated = {}
        if run.iter_num % s.eval_interval == 0 or run.iter_num == s.max_iters or s.eval_only:
            log.doing('evaluating')
            losses = run.evaluate(stop)
            if losses is None and s.eval_only:
                return
            if losses is None:
                break
            log.line(f"step {run.iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
            log.evaluated(run.iter_num, {'train/loss': losses['train'], 'val/loss': losses['val'], 'lr': lr, 'mfu': mfu * 100})
            if s.eval_only:
                return
            evaluated = {f'{split}_loss': loss for split, loss in losses.items()}
            keep_best(run, log, losses['val'])
            log.doing('training')
            pace.restart()
        if s.checkpoint_interval and run.iter_num % s.checkpoint_interval == 0 and run.iter_num not in (0, run.saved_at):
            run.save(best=False, say=log.line)
            pace.restart()
        loss = run.step()
        pace.step()
        if run.iter_num == first:
            log.line(memory_line(run.model, run.optimizer, run.device))
        if run.iter_num % s.log_interval == 0 or evaluated:
            loss = run.ranks.from_last(loss.item())  # waits for the device, so the clock below is right
            dt = pace.read()
            tokens_per_second = s.gradient_accumulation_steps * s.batch_size * s.block_size / dt
            if run.iter_num - first >= 5:
                now = run.model.estimate_mfu(s.batch_size * s.gradient_accumulation_steps // run.ranks.world_size, dt)
                mfu = now if mfu == -1.0 else 0.9 * mfu + 0.1 * now
            if run.iter_num > first:  # the first iteration also compiles
                mean_dt = 0.9 * mean_dt + 0.1 * dt if mean_dt else dt
            if run.iter_num % s.log_interval == 0:
                log.line(f'iter {run.iter_num}: loss {loss:.4f}, time {dt * 1000:.2f}ms, '
                         + pace_words(run.device, mfu, tokens_per_second, mean_dt * (s.max_iters - run.iter_num)))
            seen = run.update.read()
            log.skipped(seen)
            log.stepped(run.iter_num, evaluated, loss=loss, lr=lr, time_ms=dt * 1000, tokens_per_second=tokens_per_second,
                        **run.figures(seen, dt))
            log.advance(run.iter_num, tokens_per_second, loss)
        run.iter_num += 1
        if run.iter_num > s.max_iters:
            log.skipped(run.update.read())  # the last iteration is not always logged
            return
    stop_cleanly(run, log, stop)


def pace_words(device, mfu: float, tokens_per_second: float, left: float) -> str:
    """The end of a log line: nanoGPT's MFU on CUDA; on a CPU, where an A100's MFU says nothing, speed
    and time left (seconds, without evaluations; 0 = not known yet)."""
    if device.type == 'cuda':
        return f'mfu {mfu * 100:.2f}%'
    return f'{tokens_per_second:,.0f} tokens/s' + f', {timedelta(seconds=round(left))} left' * bool(left)


def keep_best(run, log, val_loss):
    """Save if the validation loss improved, or always where asked; never before the first step, as in nanoGPT."""
    improved = val_loss < run.best_val_loss
    if improved:
        run.best_val_loss = torch.tensor(val_loss)
    if run.iter_num > 0 and (improved or run.s.always_save_checkpoint):
        run.save(best=bool(improved), say=log.line)
        log.line(f'saving checkpoint to {run.s.out_dir}')


def stop_cleanly(run, log, stop):
    """Tell of what was skipped since the last logged iteration, and save where the run stands."""
    log.skipped(run.update.read())
    run.save(best=False, say=log.line)
    why = stop.name or 'another process was stopped'
    log.line(f'{why}: saved iteration {run.iter_num} to {run.path}; go on with --init_from=resume')


def check(s):
    """Settings that only make sense together, refused before anything is loaded or written."""
    if 'dataset' not in s.given and s.init_from == 'scratch' and not is_prepared(DATA_ROOT / s.dataset):
        raise UserError(f"no dataset was given, and nanoGPT's default, {s.dataset!r}, is not prepared "
                        f'(data/{s.dataset}/prepare.py does it: 9 billion tokens, hours); to begin, train the demo: '
                        'python train.py config/train_mqa_local.py')
    for name in ('batch_size', 'gradient_accumulation_steps', 'eval_interval', 'log_interval', 'eval_iters',
                 'keep_checkpoints', 'max_skipped'):
        if getattr(s, name) < 1:
            raise UserError(f'{name}={getattr(s, name)}: must be at least 1')
    for name in ('max_iters', 'warmup_iters', 'grad_clip', 'weight_decay', 'learning_rate', 'min_lr',
                 'checkpoint_interval', 'cooldown_iters', 'data_prefetch'):
        if getattr(s, name) < 0:
            raise UserError(f'{name}={getattr(s, name)}: must not be negative')
    if s.lr_schedule == 'wsd' and s.decay_lr and s.warmup_iters + cooldown(s) > s.lr_decay_iters:
        raise UserError(f'warmup_iters={s.warmup_iters} and cooldown_iters={cooldown(s)} are more than '
                        f'lr_decay_iters={s.lr_decay_iters}')
    for name in ('beta1', 'beta2', 'muon_momentum'):
        if not 0.0 <= getattr(s, name) < 1.0:
            raise UserError(f'{name}={getattr(s, name)}: must be at least 0 and below 1')
    if s.checkpoint_blocks and s.recompute not in ('none', 'block'):
        raise UserError(f"checkpoint_blocks=True means recompute='block', not {s.recompute!r}: leave one out")
    if s.recompute == 'offload' and s.compile:
        raise UserError("recompute='offload' moves tensors in ways that torch.compile does not know: give --compile=False")
    if s.data_prefetch > MOST_AHEAD:
        raise UserError(f'data_prefetch={s.data_prefetch}: at most {MOST_AHEAD} batches ahead')
    check_optimizer(s)
    if s.int8_training:
        int8_linear()
    for seed in (s.seed, s.data_seed) if s.data_seed >= 0 else (s.seed,):
        check_seed(seed)
    if s.init_from == 'scratch':
        with warnings.catch_warnings(action='ignore'):  # told when the model is made
            plan_kv(GPTConfig(**{key.name: getattr(s, key.name) for key in MODEL}))
    checkpoint_in(s.out_dir, s.resume_from)
    if s.resume_from != 'ckpt.pt' and s.init_from != 'resume':
        raise UserError(f'resume_from={s.resume_from!r} says where to go on, but init_from is {s.init_from!r}: '
                        'give --init_from=resume too')
    out_dir = Path(s.out_dir)
    blocker = next((p for p in (out_dir, *out_dir.parents) if p.exists()), None)
    if not s.out_dir or (blocker and not blocker.is_dir()):
        raise UserError(f'out_dir={s.out_dir!r} cannot be a folder' + (f': {blocker} is a file' if blocker else ''))


def main(argv=None):
    s = configurator.parse('train', argv, usage=__doc__, echo=os.environ.get('RANK', '0') == '0')
    check(s)
    with Ranks(s.backend, s.device, 'backend' in s.given) as ranks, writer(s, ranks):
        go_on_after_restart(s, ranks, launch_of)
        if s.gradient_accumulation_steps % ranks.world_size:
            raise UserError(f'gradient_accumulation_steps={s.gradient_accumulation_steps} is not a multiple of the '
                            f'{ranks.world_size} processes that share it (WORLD_SIZE)')
        if s.init_from == 'scratch':
            print_tokens(s)
        if ranks.main:
            check_packages(s)
        run = Run(s, ranks, DATA_ROOT)
        if s.init_from != 'scratch':
            print_tokens(s)  # only now is its block_size known
        if s.init_from == 'resume' and run.iter_num >= s.max_iters and not (run.changed or s.eval_only):
            run.batches.close()
            print(f'nothing to do: {run.origin} is of iteration {run.iter_num} of max_iters={s.max_iters}; to go on, raise '
                  f'--max_iters' + f' (and --lr_decay_iters={s.lr_decay_iters})' * (s.lr_decay_iters <= s.max_iters))
            return
        note_default_accumulation(s, ranks.device)
        with contextlib.closing(run.batches), StopRequest(repeats=0.0 if ranks.world_size == 1 else 5.0) as stop, \
                open_log(run) as log:
            train(run, log, stop)


def writer(s, ranks):
    """The lock on out_dir, of the process that writes there; an evaluation only reads."""
    if s.eval_only or not ranks.main:
        return contextlib.nullcontext()
    return only_writer(Path(s.out_dir), 'Wait until it has ended, or give another --out_dir')


def print_tokens(s):
    print(f'tokens per iteration will be: {s.gradient_accumulation_steps * s.batch_size * s.block_size:,}')


def note_default_accumulation(s, device):
    """nanoGPT's default of 40 micro-batches an iteration is made for GPUs: on a CPU say what it means."""
    if device.type == 'cpu' and s.gradient_accumulation_steps > 1 and 'gradient_accumulation_steps' not in s.given:
        print(f'Note: that is {s.gradient_accumulation_steps} micro-batches of {s.batch_size} x {s.block_size} tokens; '
              'on a CPU fewer may do: --gradient_accumulation_steps=1')


def open_log(run):
    s, writes = run.s, run.ranks.main and not run.s.eval_only
    try:
        if run.ranks.main:
            run.out_dir.mkdir(parents=True, exist_ok=True)
        trackers = open_trackers(s, run.out_dir, run.iter_num) if run.ranks.main else []
        return RunLog(run.out_dir, run.iter_num, s.max_iters, trackers, write=writes,
                      keep_old=s.resume_from != 'ckpt.pt')  # which may drop rows that another checkpoint goes with
    except OSError as e:
        raise UserError(f'out_dir={s.out_dir!r} cannot be written to: {e}') from e


if __name__ == '__main__':
    configurator.run_program(main)
