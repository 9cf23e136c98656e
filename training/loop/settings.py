"""Checks train.py's settings before anything is loaded or written."""
import os
import warnings
from pathlib import Path

from common.errors import UserError, at_least
from data.tokenfiles import is_prepared
from kv.plan import plan_kv
from training.checkpoint.manager import checkpoint_in
from training.device import check_seed
from training.step.optim import cooldown


def check_settings(s, data_root: Path) -> None:
    """Raise UserError if two settings contradict each other, or one is out of range."""
    by_default = 'dataset' not in s.given and s.init_from == 'scratch'
    if by_default and not is_prepared(data_root / s.dataset):
        raise UserError(f"no dataset was given, and nanoGPT's default, {s.dataset!r}, is not "
                        f'prepared (data/{s.dataset}/prepare.py does it: 9 billion tokens, hours); '
                        'to begin, train the demo: python train.py config/train_mqa_local.py')
    at_least(s, batch_size=1, gradient_accumulation_steps=1, eval_interval=1, log_interval=1,
             eval_iters=1, max_skipped=1, max_iters=0, warmup_iters=0,
             grad_clip=0, weight_decay=0, learning_rate=0, min_lr=0, checkpoint_interval=0,
             cooldown_iters=0, data_prefetch=0)
    if s.lr_schedule == 'wsd' and s.decay_lr and s.warmup_iters + cooldown(s) > s.lr_decay_iters:
        raise UserError(f'warmup_iters={s.warmup_iters} and cooldown_iters={cooldown(s)} are more '
                        f'than lr_decay_iters={s.lr_decay_iters}')
    for name in ('beta1', 'beta2', 'muon_momentum'):
        if not 0.0 <= getattr(s, name) < 1.0:
            raise UserError(f'{name}={getattr(s, name)}: must be at least 0 and below 1')
    if s.recompute == 'offload' and s.compile:
        raise UserError("recompute='offload' moves tensors in ways that torch.compile does not "
                        'know: give --compile=False')
    if s.data_prefetch > 64:
        raise UserError(f'data_prefetch={s.data_prefetch}: at most 64 batches ahead')
    for seed in (s.seed, s.data_seed) if s.data_seed >= 0 else (s.seed,):
        check_seed(seed)
    if s.init_from == 'scratch':
        with warnings.catch_warnings(action='ignore'):  # the model will warn when it is built
            plan_kv(s.config(50304))
    checkpoint_in(s.out_dir, s.resume_from)
    if s.resume_from != 'ckpt.pt' and s.init_from != 'resume':
        raise UserError(f'resume_from={s.resume_from!r} says where to go on, but init_from is '
                        f'{s.init_from!r}: give --init_from=resume too')
    real = os.path.realpath(s.out_dir)
    if not s.out_dir or real == os.path.dirname(real):
        what = 'the root of the file system' if s.out_dir else 'empty'
        raise UserError(f'out_dir={s.out_dir!r} is {what}: give a folder for this run, as out')
    out_dir = Path(s.out_dir)
    blocker = next((p for p in (out_dir, *out_dir.parents) if os.path.exists(p)), None)
    if blocker and not os.path.isdir(blocker):
        raise UserError(f'out_dir={s.out_dir!r} cannot be a folder: {blocker} is a file')
