"""--mode=train: a step is what train.py does with one batch: forward, backward with the loss in
chunks, clipped gradients, AdamW; without dropout.

After 10 warm-up steps, 20 are timed; with against='nanogpt', they are interleaved, 4 at a time,
with 20 of nanoGPT's own model, and the loss is not in chunks. MFU is as in nanoGPT (every query
attends to every key, relative to an A100's 312 TFLOP/s); the line below it counts only the visible
keys (`training/flops.py`).
"""
import statistics
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, schedule, tensorboard_trace_handler

from config.errors import UserError
from data.datasets import available_datasets, ensure_dataset
from data.tokenfiles import is_prepared
from lab.benchmarks import clock
from lab.benchmarks.engines import check_checkout, check_vanilla, nanogpt
from lab.benchmarks.setting import model_config
from model import GPT
from training.batches import TokenBatches
from training.device import (
    autocast,
    describe_attention,
    device_name,
    pick_device,
    pick_dtype,
    synchronize,
)
from training.flops import achieved
from training.loss import linear_cross_entropy
from training.run import prepare
from training.update import GuardedUpdate, propagate_nonfinite

BURN_IN, TIMED, IN_TURN = 10, 20, 4
GRAD_CLIP = 1.0  # train.py's default
TRACES = Path('bench_log')  # in the working directory


def prepared(dataset: str, data_root: Path) -> Path:
    """Return the folder of a prepared data set. A benchmark does not start a download."""
    folder = data_root / dataset
    if is_prepared(folder):
        return ensure_dataset(dataset, data_root)  # here it only checks the name
    remedy = f'prepare it with python data/{dataset}/prepare.py'
    if dataset not in available_datasets(data_root):
        remedy = f"choose one of {', '.join(available_datasets(data_root)) or 'none'}"
    raise UserError(f'dataset={dataset!r} is not prepared: {remedy}, or time random tokens with '
                    '--real_data=False')


class TrainStep:
    """A model in the settings' shape, its optimizer and its batches; callable for a training step.

    theirs: use nanoGPT's own model, from its checkout, with the same weights.
    """

    def __init__(self, s, data_root: Path, theirs: bool = False):
        self.device = pick_device(s.device)
        self.dtype = pick_dtype(s.dtype, self.device)
        torch.manual_seed(s.seed)
        torch.set_float32_matmul_precision('high')  # tf32 on CUDA, as in nanoGPT
        folder = prepared(s.dataset, data_root) if s.real_data else data_root / s.dataset
        self.model = GPT(model_config(s, data_root))
        if theirs:
            check_vanilla(self.model.config, 'nanogpt')
            self.model = nanogpt(self.model, s.nanogpt).train()
        self.model.to(self.device)
        if not theirs:
            self.model.attention_backend = s.attention_backend
            if s.chunked_loss and not s.against:
                self.model.loss_fn = linear_cross_entropy
            print(describe_attention(self.model, self.dtype, dropout_p=0.0))
        if s.real_data:
            self.next_batch = TokenBatches(folder, s.block_size, s.batch_size, self.device).next
        else:
            shape = 2, s.batch_size, s.block_size
            batch = torch.randint(self.model.config.vocab_size, shape, device=self.device)
            self.next_batch = lambda: tuple(batch)
        print(f'number of parameters: {self.model.get_num_params() / 1e6:.2f}M')
        self.optimizer = self.model.configure_optimizers(1e-2, 1e-4, (0.9, 0.95), self.device.type)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.update = GuardedUpdate(self.optimizer, self.scaler, GRAD_CLIP, self.device)
        if s.compile:
            print('Compiling model...')
            if not theirs:
                prepare(self.model, s.block_size)
        self.compiled = torch.compile(self.model) if s.compile else self.model
        self.batch, self.losses = self.next_batch(), []

    def __call__(self) -> float:
        """Return the loss of the batch; reading it waits for the device."""
        with autocast(self.device, self.dtype):
            loss = propagate_nonfinite(self.compiled(*self.batch)[1])
        self.batch = self.next_batch()  # fetched while the device is busy
        self.scaler.scale(loss).backward()
        self.update(len(self.losses), loss.detach())
        self.losses.append(loss.item())
        return self.losses[-1]


def run_steps(step, n: int) -> list[float]:
    """Return the seconds of each of `n` steps."""
    synchronize(step.device)
    stamps = [clock.now()]
    for k in range(n):
        loss = step()
        stamps.append(clock.now())
        print(f'{k}/{n} loss: {loss:.4f}', flush=True)
    return [after - before for before, after in zip(stamps, stamps[1:])]


def compared(ours, theirs, s) -> tuple[list[float], dict]:
    """Seconds of TIMED steps of ours, alternating with nanoGPT's every IN_TURN steps; our tokens
    per second divided by nanoGPT's, summarized over the turns."""
    run_steps(theirs, BURN_IN)
    turns = [(run_steps(ours, IN_TURN), run_steps(theirs, IN_TURN))
             for _ in range(TIMED // IN_TURN)]
    ratio = clock.summary(sum(other) / sum(own) for own, other in turns)
    mean = statistics.mean(x for _, other in turns for x in other)
    rate = s.batch_size * s.block_size / mean
    print(f'nanoGPT: {1000 * mean:.4f}ms, {rate:,.0f} tokens/s; ours makes '
          f"{ratio['median']:.2f} times its tokens/s ({ratio['min']:.2f}-{ratio['max']:.2f})")
    return [x for own, _ in turns for x in own], {
        'against': s.against, 'nanogpt_tokens_per_second': rate, 'faster': ratio}


def profile(step) -> None:
    """Profile with nanoGPT's schedule: 5 steps without profiler, 5 to warm it up, 5 recorded.
    Prints a table and writes a trace."""
    try:
        TRACES.mkdir(exist_ok=True)
    except OSError as e:
        raise UserError(f'{TRACES}/ cannot be made for the trace: {e.strerror}') from e
    cuda = step.device.type == 'cuda'
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    steps = schedule(wait=5, warmup=5, active=5, repeat=1)
    write_trace = tensorboard_trace_handler(str(TRACES), worker_name='bench')
    with torch.profiler.profile(activities=activities, schedule=steps, with_flops=True,
                                on_trace_ready=write_trace) as profiler:
        for k in range(15):
            print(f'{k}/15 loss: {step():.4f}', flush=True)
            profiler.step()
    slowest = f'self_{"device" if cuda else "cpu"}_time_total'
    print(profiler.key_averages().table(sort_by=slowest, row_limit=15, max_name_column_width=40))
    print(f'trace written to {TRACES}/')


def run(s, data_root: Path) -> dict:
    """Time (or profile) training steps. Returns the document that --json prints."""
    if s.against and s.profile:
        raise UserError(f'against={s.against!r}: nothing is compared under the profiler')
    if s.against:
        check_checkout(s.nanogpt)
    if s.batch_size < 1:
        raise UserError(f'batch_size={s.batch_size}: must be at least 1')
    step = TrainStep(s, data_root)
    model = step.model
    settings = ('mode', 'compile', 'batch_size', 'block_size', 'window_size', 'layer_pattern',
                'n_kv_head', 'real_data')
    document = {'device': device_name(step.device), 'threads': torch.get_num_threads(),
               'torch': torch.__version__, 'dtype': str(step.dtype).removeprefix('torch.'),
               'params': model.get_num_params(), **{name: getattr(s, name) for name in settings}}
    if s.profile:
        profile(step)
        return document | {'trace': str(TRACES)}
    run_steps(step, BURN_IN)
    if s.against:
        seconds, found = compared(step, TrainStep(s, data_root, theirs=True), s)
        document |= found
    else:
        seconds = run_steps(step, TIMED)
    mean = statistics.mean(seconds)
    mfu, tflops = model.estimate_mfu(s.batch_size, mean), achieved(model, s.batch_size, mean)
    rate = s.batch_size * s.block_size / mean
    print(f'time per iteration: {mean * 1000:.4f}ms, MFU: {mfu * 100:.2f}%')
    print(f'counting only the keys each query sees: {tflops:.3f} model TFLOP/s; '
          f'{rate:,.0f} tokens/s')
    ms = [1000 * x for x in seconds]
    return document | {
        'first_loss': step.losses[0], 'last_loss': step.losses[-1], 'mean_ms': 1000 * mean,
        'median_ms': statistics.median(ms), 'min_ms': min(ms), 'max_ms': max(ms),
        'tokens_per_second': rate, 'mfu': mfu, 'model_tflops_per_second': tflops, 'step_ms': ms}
