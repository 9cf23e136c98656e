"""--mode=train: a step is what train.py does with one batch: forward, backward with the loss in
chunks, clipped gradients, AdamW; without dropout.

After 10 warm-up steps, 20 are timed; with against='nanogpt', they are interleaved, 4 at a time,
with 20 of nanoGPT's own model, which computes its loss from all logits at once. MFU is as in
nanoGPT (every query attends to every key, relative to an A100's 312 TFLOP/s); the line below it
counts only the visible keys (`training/step/flops.py`), relative to a matmul alone. nanoGPT's model
has the same dtype; on a CPU it may be faster in another (--dtype=float32).
"""
import contextlib
import importlib.util
import io
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from torch.profiler import schedule, tensorboard_trace_handler

from common.errors import UserError, at_least
from common.gpt_config import NANOGPT_FIELDS, model_args
from data.tokenfiles import is_prepared
from lab.benchmarks import clock
from lab.benchmarks.setting import model_config, run_facts
from model import GPT
from training.native.loading import training_dtype, wanted
from training.native.modules import speed_up
from training.loop.batches import TokenBatches
from training.device import autocast, keep_freed_memory, pick_device
from training.step.kernels import describe_attention, prepare
from training.step.flops import achieved
from training.step.loss import linear_cross_entropy
from training.step.update import GuardedUpdate, propagate_nonfinite

BURN_IN, TIMED, IN_TURN = 10, 20, 4
TRACES = Path('bench_log')  # in the working directory
GRAD_CLIP = 1.0  # train.py's default


class TrainingSteps:
    """A model, its optimizer and its batches. Callable that runs a step (forward, backward, clipped
    gradients, update) and returns its seconds; `losses` has the loss of each step.

    next_batch: function that returns (x, y); None: one fixed random batch.
    """

    def __init__(self, model, batch: int, context: int, dtype: torch.dtype, next_batch=None,
                 compiled: bool = False):
        self.model = model.train()
        self.device = next(model.parameters()).device  # nanoGPT's model does not tell it
        self.forward = torch.compile(model) if compiled else model
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
            self.optimizer = model.configure_optimizers(1e-2, 1e-4, (0.9, 0.95), self.device.type)
        if next_batch is None:
            x, y = torch.randint(model.config.vocab_size, (2, batch, context), device=self.device)
            next_batch = lambda: (x, y)
        self.next_batch = next_batch
        self.batch, self.losses = next_batch(), []  # (B, T) each
        self.autocast = autocast(self.device, dtype)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        self.update = GuardedUpdate(self.optimizer, self.scaler, GRAD_CLIP, self.device)

    def __call__(self) -> float:
        return clock.seconds(self.device, self.step)

    def step(self) -> None:
        loss = self.backward()
        self.update(len(self.losses), loss)
        self.losses.append(loss.item())

    def backward(self) -> torch.Tensor:
        """Forward and backward; the gradients stay in the parameters. Returns the loss."""
        with self.autocast:
            loss = propagate_nonfinite(self.forward(*self.batch)[1])
        self.batch = self.next_batch()  # fetched while the device is busy
        self.scaler.scale(loss).backward()
        return loss.detach()


def training_steps(s, data_root: Path, theirs: bool = False) -> TrainingSteps:
    """Steps of a model in the settings' shape on the settings' data.

    theirs: use nanoGPT's own model, from its checkout, with the same weights.
    """
    device = pick_device(s.device)
    keep_freed_memory(device)
    dtype = training_dtype(s.dtype, s.compile, device)
    torch.manual_seed(s.seed)
    torch.set_float32_matmul_precision('high')  # tf32 on CUDA, as in nanoGPT
    next_batch = None
    if s.real_data:
        folder = data_root / s.dataset
        if not is_prepared(folder):  # a benchmark does not start a download
            raise UserError(f'dataset={s.dataset!r} is not prepared: run python data/{s.dataset}/'
                            'prepare.py, or time random tokens with --real_data=False')
        next_batch = TokenBatches(folder, s.block_size, s.batch_size, device).next
    model = GPT(model_config(s, data_root))
    if theirs:
        model = nanogpt(model, s.nanogpt).to(device)
    else:
        model.to(device).attention_backend = s.attention_backend
        if s.chunked_loss:
            model.loss_fn = linear_cross_entropy
        print(describe_attention(model, dtype, dropout_p=0.0))
        if wanted(s.dtype, s.compile, device):
            speed_up(model)
    print(f'number of parameters: {model.get_num_params() / 1e6:.2f}M')
    if s.compile:
        print('Compiling model...')
        if not theirs:
            prepare(model, s.block_size)
    return TrainingSteps(model, s.batch_size, s.block_size, dtype, next_batch=next_batch,
                         compiled=s.compile)


def nanogpt(ours, folder: str):
    """Return nanoGPT's own GPT, from the checkout in `folder`, with our weights, in eval mode.
    UserError: if it does not support the model, or there is no checkout."""
    wrong = [f'{name}={value!r}' for name, value in model_args(ours.config).items()
             if name not in NANOGPT_FIELDS]
    if wrong:
        raise UserError("against='nanogpt' runs both with the same weights, so the model must be "
                        f"vanilla GPT-2, without {', '.join(wrong)}")
    path = Path(folder) / 'model.py'
    if not folder or not path.is_file():
        raise UserError(f"nanogpt={folder!r}: against='nanogpt' needs the folder of a nanoGPT "
                        'checkout, with its model.py')
    spec = importlib.util.spec_from_file_location('nanogpt_model', path)
    module = importlib.util.module_from_spec(spec)
    sys.modules['nanogpt_model'] = module  # needed by dataclasses
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(sys.stderr):  # it prints its size
        fields = {name: getattr(ours.config, name) for name in NANOGPT_FIELDS}
        model = module.GPT(module.GPTConfig(**fields))
    model.load_state_dict(ours.state_dict(), strict=False)  # its own may contain causal masks
    return model.eval()


def matmul_rate(model, tokens: int, dtype: torch.dtype) -> float:
    """FLOP/s of the first matmul of an MLP by itself, forward, with as many tokens as a step."""
    weight = model.transformer.h[0].mlp.c_fc.weight.detach().to(dtype)
    x = torch.randn(tokens, weight.size(1), dtype=dtype, device=weight.device)
    matmul = partial(torch.nn.functional.linear, x, weight)
    seconds = [clock.seconds(x.device, matmul) for _ in range(BURN_IN + TIMED)]
    return 2 * tokens * weight.numel() / statistics.median(seconds[BURN_IN:])


def run_steps(step, n: int):
    """Yield the seconds of each of `n` steps."""
    for k in range(n):
        seconds = step()
        print(f'{k}/{n} loss: {step.losses[-1]:.4f}', flush=True)
        yield seconds


def compared(ours, theirs, s) -> tuple[list[float], dict]:
    """Mean seconds of our steps in each turn, alternating with nanoGPT's every IN_TURN steps; our
    tokens per second divided by nanoGPT's, summarized over the turns."""
    list(run_steps(theirs, BURN_IN))
    turns = [(sum(run_steps(ours, IN_TURN)), sum(run_steps(theirs, IN_TURN)))
             for _ in range(TIMED // IN_TURN)]
    ratio = clock.summary(other / own for own, other in turns)
    rate = TIMED * s.batch_size * s.block_size / sum(other for _, other in turns)
    print(f"nanoGPT: {rate:,.0f} tokens/s; ours makes {ratio['median']:.2f} times its tokens/s "
          f"({ratio['min']:.2f}-{ratio['max']:.2f})")
    return [own / IN_TURN for own, _ in turns], {
        'nanogpt_tokens_per_second': rate, 'faster': ratio}


def profile(step) -> None:
    """Profile with nanoGPT's schedule: 5 steps without profiler, 5 to warm it up, 5 recorded.
    Prints a table and writes a trace."""
    write_trace = tensorboard_trace_handler(str(TRACES), worker_name='bench')
    with torch.profiler.profile(schedule=schedule(wait=5, warmup=5, active=5, repeat=1),
                                with_flops=True, on_trace_ready=write_trace) as profiler:
        for _ in run_steps(step, 15):
            profiler.step()
    slowest = f'self_{"device" if step.device.type == "cuda" else "cpu"}_time_total'
    print(profiler.key_averages().table(sort_by=slowest, row_limit=15, max_name_column_width=40))
    print(f'trace written to {TRACES}/')


def run(s, data_root: Path) -> dict:
    """Time (or profile) training steps. Returns the document that --json prints."""
    at_least(s, batch_size=1)
    step = training_steps(s, data_root)
    theirs = training_steps(s, data_root, theirs=True) if s.against else None
    settings = ('compile', 'batch_size', 'block_size', 'window_size', 'layer_pattern', 'n_kv_head',
                'real_data')
    dtype = training_dtype(s.dtype, s.compile, step.device)
    document = run_facts(s, step.device) | {
        'dtype': str(dtype).removeprefix('torch.'), 'params': step.model.get_num_params(),
        **{name: getattr(s, name) for name in settings}}
    if s.profile:
        profile(step)
        return document | {'trace': str(TRACES)}

    list(run_steps(step, BURN_IN))
    if theirs:
        seconds, found = compared(step, theirs, s)
        document |= found
    else:
        seconds = list(run_steps(step, TIMED))

    mean = statistics.fmean(seconds)
    mfu = step.model.estimate_mfu(s.batch_size, mean)
    tflops = achieved(step.model, s.batch_size, mean)
    rate = s.batch_size * s.block_size / mean
    print(f'time per iteration: {mean * 1000:.4f}ms, MFU: {mfu * 100:.2f}%')
    matmul = matmul_rate(step.model, s.batch_size * s.block_size, dtype) / 1e12
    print(f'counting keys that queries see: {tflops:.3f} model TFLOP/s, '
          f"{tflops / matmul:.0%} of a matmul's {matmul:.3f}; {rate:,.0f} tokens/s")
    ms = clock.summary(1000 * x for x in seconds)
    return document | {
        'first_loss': step.losses[0], 'last_loss': step.losses[-1], 'mean_ms': 1000 * mean,
        'median_ms': ms['median'], 'step_ms': ms['each'], 'tokens_per_second': rate,
        'mfu': mfu, 'model_tflops_per_second': tflops,
        'matmul_tflops_per_second': matmul}
