"""Train a GPT, vanilla or with a small KV cache.

    python train.py config/train_mqa_local.py            # the demo: Shakespeare, all savings on
    python train.py config/train_mqa_local.py --max_iters=1000 --learning_rate=1e-3
    python train.py config/train_mqa_local.py --init_from=resume   # go on from out_dir/ckpt.pt, to
                                                                   # the same losses
    python train.py config/train_mqa_local.py --init_from=resume --resume_from=ckpt_best.pt
    python train.py config/finetune_shakespeare.py --init_from=gpt2     # from OpenAI's weights
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
    python train.py --help                               # every key, its default and meaning

Ctrl-C or SIGTERM saves a checkpoint after the current step and exits.
"""
from common import startup  # noqa: F401  # isort: skip  (before torch is imported)
import contextlib
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

import configurator
from common.errors import UserError
from common.folder_lock import only_writer
from common.settings import (
    GPT2_FOLDER, GPT2_TYPES, Attention, Data, Device, Model, OutDir, key)
from data.datasets import DATA_ROOT
from training.checkpoint.manager import checkpoint_in, load_to_resume
from training.device import keep_freed_memory
from training.evaluate import bits_per_byte
from training.loop.batches import DataSet
from training.loop.build import build_model, elastic_of, move_to_device
from training.loop.log import RunLog, StepClock, check_packages, open_trackers
from training.loop.resume import restore, resumed_after_restart
from training.loop.run import Run
from training.loop.settings import check_settings
from training.loop.signals import StopRequest
from training.memory.measure import memory_line, print_memory_report
from training.native.loading import training_dtype
from training.parallel import fsdp
from training.parallel.distributed import Ranks
from training.step.optim import learning_rate_at, make_optimizer, set_learning_rate


@dataclass(frozen=True)
class Settings(OutDir, Data, Model, Device, Attention):
    eval_interval: int = key(2000, 'iterations between evaluations (and checkpoints)')
    log_interval: int = key(1, 'iterations between log lines')
    eval_iters: int = key(200, 'batches per split in one evaluation; always the same windows')
    eval_only: bool = key(False, 'evaluate once and stop')
    always_save_checkpoint: bool = key(True, 'save after every evaluation, not only improved ones')
    checkpoint_interval: int = key(0, 'also save every so many iterations; 0 = when evaluating')
    init_from: str = key(
        'scratch', "'scratch', 'resume' from out_dir, or GPT-2's weights to finetune",
        ('scratch', 'resume') + GPT2_TYPES, folder=GPT2_FOLDER, others=('random',))
    resume_from: str = key('ckpt.pt', "with init_from='resume': checkpoint in out_dir")
    # trackers
    wandb_log: bool = key(False, 'log to Weights & Biases')
    wandb_project: str = key('owt', 'Weights & Biases project')
    wandb_run_name: str = key('gpt2', 'Weights & Biases run name')
    tensorboard_log: bool = key(False, 'log to TensorBoard, in out_dir/tensorboard')
    # data
    gradient_accumulation_steps: int = key(40, 'micro-batches an iteration, of all processes')
    batch_size: int = key(12, 'sequences in a micro-batch')
    data_seed: int = key(-1, 'seed of the batch order; -1 = seed, after initialization')
    data_order: str = key(
        'random', "training windows: 'random' (with replacement, as in nanoGPT), 'sequential', "
        "'shuffled' (each once an epoch)", ('random', 'sequential', 'shuffled'))
    data_prefetch: int = key(2, 'batches that a thread prepares ahead; 0 = none')
    # optimizer
    learning_rate: float = key(6e-4, 'peak learning rate')
    max_iters: int = key(600000, 'iterations to train')
    optimizer: str = key('adamw', "'muon' = for matrices of blocks, else AdamW", ('adamw', 'muon'))
    muon_momentum: float = key(0.95, "with optimizer='muon': momentum")
    weight_decay: float = key(1e-1, 'weight decay, on matrices only')
    beta1: float = key(0.9, 'AdamW beta1')
    beta2: float = key(0.95, 'AdamW beta2')
    grad_clip: float = key(1.0, 'largest gradient norm; 0 = no clipping')
    max_skipped: int = key(20, 'stop after so many skipped (non-finite) iterations in a row')
    # learning rate
    decay_lr: bool = key(True, 'warm up and decay the learning rate')
    lr_schedule: str = key('cosine', "'wsd' = constant, linear cooldown", ('cosine', 'wsd'))
    cooldown_iters: int = key(0, "with 'wsd': iterations of the decay; 0 = lr_decay_iters / 5")
    warmup_iters: int = key(2000, 'iterations of linear warm-up')
    lr_decay_iters: int = key(600000, 'iteration at which min_lr is reached')
    min_lr: float = key(6e-5, 'lowest learning rate')
    # smaller memories
    plans: str = key('', "KV plans to train along, each on a part of every batch: 'auto', or "
                     "'n_kv_head=1; n_kv_head=1, layer_pattern=LLG, window_size=32; ...'")
    plan_passes: int = key(1, 'plans that each sequence is trained under; 2 = a step takes twice '
                           'as long, and each plan comes nearer to training alone')
    teacher: str = key('', "a run's folder, a checkpoint (.pt) or GPT-2 (as for init_from), whose "
                       'predictions the model and its plans learn in place of the tokens')
    # memory and devices
    recompute: str = key('none', "activations to recompute: 'none', 'selective', 'mlp', 'block', "
                         "'every:K' blocks, 'sqrt', 'offload' (to host memory instead)")
    chunked_loss: bool = key(True, 'compute large logits and gradients in chunks, for memory')
    memory_report: bool = key(False, 'before training, report the memory it will take')
    parallel: str = key('ddp', "under torchrun: 'ddp' (replicas), or 'fsdp' (FSDP2: parameters, "
                        'gradients and optimizer state in shards)', ('ddp', 'fsdp'))
    backend: str = key('nccl', "torch.distributed's: 'nccl' (CUDA), 'gloo'", ('nccl', 'gloo'))
    tf32: bool = key(True, 'on CUDA: float32 matmuls in TF32, as in nanoGPT')
    compile: bool = key(True, 'torch.compile the model')


def main(argv=None):
    echo = os.environ.get('RANK', '0') == '0'
    s = configurator.parse(Settings, argv, usage=__doc__, echo=echo, echo_files=echo)
    check_settings(s, DATA_ROOT)
    with Ranks(s.backend, s.device, 'backend' in s.given) as ranks, writer(s, ranks):
        s = resumed_after_restart(s, ranks)
        check_accumulation(s, ranks)
        if ranks.main:
            check_packages(s.wandb_log, s.tensorboard_log)
        run = build(s, ranks)
        with contextlib.closing(run.batches):
            if nothing_to_do(run):
                return
            n, given = s.gradient_accumulation_steps, 'gradient_accumulation_steps' in s.given
            if ranks.device.type == 'cpu' and n > 1 and not given:  # the default is for GPUs
                print(f'Note: that is {n} micro-batches of {s.batch_size} x '
                      f'{run.model.config.block_size} tokens; on a CPU fewer may do: '
                      '--gradient_accumulation_steps=1')
            repeats = 0.0 if ranks.world_size == 1 else 5.0
            with StopRequest(repeats) as stop, open_log(run) as log:
                train(run, log, stop)


def build(s, ranks) -> Run:
    """Data, model and optimizer in nanoGPT's order, as a checkpoint left them if one is resumed."""
    keep_freed_memory(ranks.device)
    dtype = training_dtype(s.dtype, s.compile, ranks.device)
    if len(set(ranks.gather(dtype))) > 1:  # machines of different kinds
        dtype = torch.float32
    sharded = fsdp.used(s.parallel, ranks)
    if s.parallel == 'fsdp':  # also with one process: a resumed run may have more
        fsdp.check(s.memory_report, dtype)
    torch.manual_seed(s.seed)
    torch.set_float32_matmul_precision('high' if s.tf32 else 'highest')

    origin = checkpoint_in(s.out_dir, s.resume_from)
    saved = load_to_resume(origin) if s.init_from == 'resume' else None
    with ranks.main_first():
        data = DataSet(s, DATA_ROOT)
    new_on = 'meta' if sharded and not ranks.main else 'cpu'
    model, changed = build_model(s, data, saved, origin, new_on)
    if sharded:  # only rank 0 has used its generator, to initialize weights
        torch.set_rng_state(ranks.gather(torch.get_rng_state())[0])
    elastic = elastic_of(model, s, data, saved, changed)
    batches = data.batches(s, model.config, ranks)

    torch.manual_seed(s.seed + ranks.rank)  # dropout
    move_to_device(model, elastic, s, ranks, dtype, sharded)
    optimizer = make_optimizer(model, s, ranks.device.type)
    run = Run(s, ranks, data, batches, model, elastic, changed, optimizer, dtype, origin)
    run.batch = restore(run, saved) if saved else batches.next()
    del saved
    if s.memory_report and ranks.main:
        print_memory_report(run)
    if s.compile:
        run.compile()
    run.distribute()
    return run


def train(run, log, stop):
    """Run the loop in nanoGPT's order (evaluate and save if due, then train one iteration) until
    after max_iters, or until a signal requests a stop."""
    s, clock = run.s, StepClock(run.iter_num)
    while not run.ranks.any(stop):
        lr = learning_rate_at(run.iter_num, s)
        set_learning_rate(run.optimizer, lr)

        losses = {}
        if run.iter_num % s.eval_interval == 0 or run.iter_num == s.max_iters or s.eval_only:
            losses = evaluate(run, log, stop, lr, clock.mfu)
            if s.eval_only:
                return
            if losses is None:  # interrupted by a signal
                break
            keep_best(run, log, losses['val'])
            clock.restart()
        due = s.checkpoint_interval and run.iter_num % s.checkpoint_interval == 0
        if due and run.iter_num not in (0, run.saved_at):
            run.save(best=False, say=log.line)
            clock.restart()

        loss = run.step()  # forward, backward, update
        clock.steps += 1
        if run.iter_num == clock.first:
            log.line(memory_line(run.model, s.optimizer, run.device))
        if run.iter_num % s.log_interval == 0 or losses:
            report(run, log, loss, lr, losses, clock)
        run.iter_num += 1
        if run.iter_num > s.max_iters:
            if why := run.why_unsaved(clock.first):
                log.line(why)
            return

    log.skipped(run.update.read())  # since the last logged iteration
    run.save(best=False, say=log.line)
    why = stop.name or 'another process was stopped'
    log.line(f'{why}: saved iteration {run.iter_num} to {run.path}; go on with --init_from=resume')


def evaluate(run, log, stop, lr, mfu):
    """Print and return {'train': loss, 'val': loss}; None if interrupted by a signal."""
    losses = run.evaluate(stop)
    if losses is not None:
        train_loss, val_loss = losses['train'], losses['val']
        log.line(f'step {run.iter_num}: train loss {train_loss:.4f}, val loss {val_loss:.4f}')
        row = {'train/loss': train_loss, 'val/loss': val_loss, 'lr': lr, 'mfu': mfu * 100}
        if run.data.bytes_per_token:
            bits = bits_per_byte(val_loss, 1, run.data.bytes_per_token)
            log.line(f'that val loss is {bits:.3f} bits per byte of text')
        for tracker in log.trackers:
            tracker.evaluated(run.iter_num, row)
        for line in run.plan_lines():
            log.line(line)
    return losses


def report(run, log, loss, lr, losses, clock):
    """Print and log an iteration: nanoGPT's line, and a row of metrics.jsonl."""
    s = run.s
    # .item() waits for the device, so the timing below is right
    loss = run.ranks.gather(loss.item())[-1]
    dt = clock.read()
    tokens_per_second = run.tokens_per_iter / dt
    clock.measured(run, dt)
    if run.iter_num % s.log_interval == 0:
        left = clock.mean_dt * (s.max_iters - run.iter_num)
        words = pace_words(run.device, clock.mfu, tokens_per_second, left)
        log.line(f'iter {run.iter_num}: loss {loss:.4f}, time {dt * 1000:.2f}ms, {words}')
    updates = run.update.read()
    log.skipped(updates)
    evaluated = {f'{split}_loss': each for split, each in losses.items()}
    if losses and run.plans:
        evaluated |= {f'plan_{i}_loss': loss for i, loss in enumerate(run.elastic.losses)}
    log.stepped(run.iter_num, evaluated, loss=loss, lr=lr, time_ms=dt * 1000,
                tokens_per_second=tokens_per_second, **run.metrics(updates, dt))


def keep_best(run, log, val_loss):
    """Save if the validation loss improved or always_save_checkpoint is set, as nanoGPT does."""
    improved = val_loss < run.best_val_loss
    if improved:
        run.best_val_loss = torch.tensor(val_loss)
    if run.iter_num > 0 and (improved or run.s.always_save_checkpoint):
        run.save(best=bool(improved), say=log.line)
        log.line(f'saving checkpoint to {run.s.out_dir}')


def pace_words(device, mfu: float, tokens_per_second: float, left: float) -> str:
    """Return the end of a log line: nanoGPT's MFU on CUDA; on a CPU, where that is meaningless,
    speed and time left (`left`, in seconds, without evaluations; 0 = not known yet)."""
    if device.type == 'cuda':
        return f'mfu {mfu * 100:.2f}%'
    time_left = f', {timedelta(seconds=round(left))} left' if left else ''
    return f'{tokens_per_second:,.0f} tokens/s{time_left}'


def writer(s, ranks):
    """Return the lock on out_dir if this process writes there; an evaluation only reads."""
    if s.eval_only or not ranks.main:
        return contextlib.nullcontext()
    return only_writer(Path(s.out_dir), 'Wait until it has ended, or give another --out_dir')


def check_accumulation(s, ranks):
    """Raise UserError if the micro-batches of an iteration cannot be divided evenly."""
    n = s.gradient_accumulation_steps
    if n % ranks.world_size:
        raise UserError(f'gradient_accumulation_steps={n} is not a multiple of the '
                        f'{ranks.world_size} processes that share it (WORLD_SIZE)')


def nothing_to_do(run) -> bool:
    """Return whether a resumed run has finished all its iterations, printing a note if so."""
    s = run.s
    if s.init_from != 'resume' or run.iter_num < s.max_iters or run.changed or s.eval_only:
        return False
    more = f' (and --lr_decay_iters={s.lr_decay_iters})' if s.lr_decay_iters <= s.max_iters else ''
    print(f'nothing to do: {run.origin} is of iteration {run.iter_num} of max_iters={s.max_iters}; '
          f'to go on, raise --max_iters{more}')
    return True


def open_log(run):
    s, trackers = run.s, []
    try:
        if run.ranks.main:
            run.out_dir.mkdir(parents=True, exist_ok=True)
            trackers = open_trackers(s, run.out_dir, run.iter_num)
        # resuming from an earlier checkpoint may drop rows that belong to a later one
        return RunLog(run.out_dir, run.iter_num, trackers,
                      run.ranks.main and not s.eval_only, keep_old=s.resume_from != 'ckpt.pt')
    except OSError as e:
        raise UserError(f'out_dir={s.out_dir!r} cannot be written to: {e}') from e


if __name__ == '__main__':
    configurator.run_program(main)
