"""What the GPU check runs, part by part, the most telling first: each cell with an estimate of its time and, where it measures
speed, what an H100's limits allow and what share of that we expect.

Estimates and expected shares come from reading the code and the compiled kernels (docs/gpu.md), not from a GPU.
"""
import math
from dataclasses import dataclass, field

from ablation.ladder import parameters
from benchmarks.setting import model_config, vanilla_config
from config.gpt_config import GPTConfig
from configurator import parse
from data.datasets import DATA_ROOT
from kv.plan import plan_kv
from training.flops import flops_per_token

FULL = 'config/train_gpt2_mqa_local.py'  # GPT-2 124M's shape with every saving on, as many parameters
H100 = {'bytes_per_second': 3.35e12, 'flops': 989e12}  # the data sheet's memory bandwidth, and bfloat16 without sparsity
START = 15  # seconds until a process has imported torch, opened the device and built a small model


@dataclass(frozen=True)
class Cell:
    """name: 'kind/...'; `scripts.gpu.measure` has a function for each kind, called with `args`. seconds: estimated, in a process
    that has started. limit: seconds at the H100's limits of what is timed; 0 = it is not about speed. share: of that limit we
    expect to reach. work: what the limit is about, in words."""
    name: str
    seconds: float
    args: dict = field(default_factory=dict)
    limit: float = 0.0
    share: float = 0.0
    work: str = ''

    @property
    def expected(self) -> dict:
        """For the record of its result."""
        return {'limit': self.limit, 'share': self.share, 'work': self.work} if self.limit else {}


@dataclass(frozen=True)
class Stage:
    """Cells that run side by side in so many processes (1, where they are timed), each process one cell after another.
    alone: one process per cell."""
    cells: tuple[Cell, ...]
    processes: int = 1
    alone: bool = False

    @property
    def seconds(self) -> float:
        starts = START * (math.ceil(len(self.cells) / self.processes) if self.alone else 1)
        return starts + max([sum(cell.seconds for cell in self.cells) / self.processes, *(cell.seconds for cell in self.cells)])


# -- what the limits allow --------------------------------------------------------------------------------------------

def reading(nbytes: float, share: float) -> dict:
    return {'limit': nbytes / H100['bytes_per_second'], 'share': share, 'work': f'{nbytes / 1e6:,.0f} MB read'}


def decode_step(config: GPTConfig, batch: int, held: int, kv_dtype: str, share: float) -> dict:
    """Weights once in bfloat16 (of tied embeddings the output layer), and each layer's K and V."""
    return reading(2 * parameters(config) + plan_kv(config).read_nbytes(batch, held, kv_dtype), share)


def training_step(config: GPTConfig, batch: int, share: float) -> dict:
    flops = flops_per_token(config).total * batch * config.block_size
    return {'limit': flops / H100['flops'], 'share': share, 'work': f'{flops / 1e12:,.1f} TFLOP'}


def config_of(args: list[str]) -> GPTConfig:
    return model_config(parse('bench', args, echo=False), DATA_ROOT)


# -- cells that are commands of bench.py ------------------------------------------------------------------------------

def decode(name, seconds, batch, context, share, *further, kv_dtype='bfloat16', vanilla=False) -> Cell:
    steps = 128 if batch == 1 else 32
    shape = ['--block_size=32768'] if vanilla else [FULL]
    args = [*shape, '--mode=decode', f'--batch_sizes={batch}', f'--contexts={context}', f'--steps={steps}', *further]
    if kv_dtype != 'bfloat16':
        args.append(f'--kv_dtype={kv_dtype}')
    config = config_of(shape)
    config = vanilla_config(config, context + steps) if vanilla else config
    return Cell(f'bench/decode/{name}', seconds, {'args': args}, **decode_step(config, batch, context, kv_dtype, share))


def train(name, seconds, batch, share, *further, vanilla=False) -> Cell:
    shape = ['--block_size=1024'] if vanilla else [FULL]
    args = [*shape, '--mode=train', '--real_data=False', f'--batch_size={batch}', '--chunked_loss=True', '--compile=True',
            *further]
    return Cell(f'bench/train/{name}', seconds, {'args': args}, **training_step(config_of(shape), batch, share))


def bench(name, seconds, *args) -> Cell:
    return Cell(f'bench/{name}', seconds, {'args': list(args)})


# -- the parts --------------------------------------------------------------------------------------------------------

def first() -> list[Stage]:
    """Is it right, is it fast, where does the time go: the answer to all of it, small."""
    layouts = [('contiguous', 'bfloat16'), ('contiguous', 'int8'), ('ring', 'bfloat16'), ('ring', 'int8'),
               ('paged', 'bfloat16'), ('paged', 'int8'), ('chunk', 'int8'), ('paged chunk', 'bfloat16'), ('paged chunk', 'int8'),
               ('tags', 'int8'), ('contiguous', 'float16'), ('contiguous', 'float32')]
    kernels = [Cell(f'attention/{layout}/{kv_dtype}', 8, dict(layout=layout, kv_dtype=kv_dtype)) for layout, kv_dtype in layouts]
    kernels += [Cell(f'write/{kv_dtype}', 6, dict(kv_dtype=kv_dtype)) for kv_dtype in ('bfloat16', 'int8', 'none')]
    kernels += [Cell(f'sequence/{backend}/T={T}', 15, dict(backend=backend, T=T, ratio=ratio)) for backend, T, ratio in
                [('flex', 1024, 12), ('flex', 96, 4), ('flex', 64, 4), ('sdpa', 1024, 12)]]
    captured = [Cell(f'captured/{kv_dtype}/{"paged" if paged else "contiguous"}', 25, dict(kv_dtype=kv_dtype, paged=paged))
                for kv_dtype in ('auto', 'int8') for paged in (False, True)]
    timed = [Cell('rates', 10), decode('b1-1k', 20, 1, 1024, 0.20),
             decode('b64-8k-int8', 25, 64, 8192, 0.22, kv_dtype='int8'), train('full-b32', 80, 32, 0.25),
             decode('b64-8k', 20, 64, 8192, 0.3),
             Cell('profile/decode', 15, dict(batch=1, context=1024)),  # after all that is timed in this process
             Cell('profile/train', 25, dict(batch=32))]                # compiled by the cell above
    compiled = Cell('captured/int8/compiled', 70, dict(kv_dtype='int8', paged=False, compiled=True))
    return [Stage(tuple(captured + kernels), 8), Stage(tuple(timed)), Stage((compiled,))]


def tune() -> list[Stage]:
    """Layouts of the decode kernel: keys of a block, warps, stages, splits. The first stage compiles them, 8 at a time."""
    shares = {'int8': {1: 0.05, 16: 0.25, 64: 0.4, 256: 0.5}, 'bfloat16': {1: 0.1, 16: 0.4, 64: 0.6, 256: 0.75}}
    cases = [(batch, paged, kv_dtype) for batch in (1, 64, 16, 256) for kv_dtype in ('int8', 'bfloat16')
             for paged in (False, True)]

    def cell(kind, seconds, batch, paged, kv_dtype):
        nbytes = 2 * batch * 8192 * (64 + 2 if kv_dtype == 'int8' else 128)
        more = reading(nbytes, shares[kv_dtype][batch]) if kind == 'tune' else {}
        return Cell(f"{kind}/{kv_dtype}/{'paged' if paged else 'contiguous'}/b{batch}", seconds,
                    dict(batch=batch, paged=paged, kv_dtype=kv_dtype), **more)
    compiled = [cell('compile', 90, 16, paged, kv_dtype) for _, paged, kv_dtype in cases[:4]]
    return [Stage(tuple(compiled), 4), Stage(tuple(cell('tune', 15, *case) for case in cases))]


def training() -> list[Stage]:
    """T=1,024: vanilla GPT-2 and the full stack, by backend of the local layers and batch."""
    return [Stage((train('full-flex-b64', 90, 64, 0.31, '--attention_backend=flex'),
                   train('vanilla-b64', 70, 64, 0.33, vanilla=True),
                   train('full-sdpa-b64', 90, 64, 0.25, '--attention_backend=sdpa'),
                   train('full-flex-b16', 80, 16, 0.27, '--attention_backend=flex'),
                   train('vanilla-b16', 60, 16, 0.3, vanilla=True)), alone=True)]


def training_more() -> list[Stage]:
    """The same with the loss whole, not in chunks; the other backend at the smaller batch; memory by recomputation policy."""
    return [Stage((train('full-flex-b16-whole-loss', 80, 16, 0.3, '--attention_backend=flex', '--chunked_loss=False'),
                   train('full-flex-b64-whole-loss', 90, 64, 0.33, '--attention_backend=flex', '--chunked_loss=False'),
                   train('full-sdpa-b16', 80, 16, 0.22, '--attention_backend=sdpa'),
                   bench('recompute', 120, FULL, '--mode=recompute', '--against=vanilla', '--contexts=1024',
                         '--batch_sizes=16')), alone=True)]


def sizes() -> list[Stage]:
    """Decoding: other batches, contexts and models; kernels beside torch's own."""
    big = [FULL, '--n_layer=24', '--n_head=16', '--n_embd=2048', '--mlp_hidden=0']
    return [Stage((decode('b1-1k-compiled', 60, 1, 1024, 0.33, '--compile=True'),
                   decode('b16-8k', 30, 16, 8192, 0.25), decode('b16-8k-vanilla', 40, 16, 8192, 0.5, vanilla=True),
                   decode('b256-8k-int8', 60, 256, 8192, 0.25, kv_dtype='int8'),
                   bench('decode/1B', 60, *big, '--mode=decode', '--batch_sizes=1,16', '--contexts=1024', '--steps=64'),
                   bench('kernels', 80, FULL, '--mode=kernels', '--window_size=512', '--batch_sizes=1,64',
                         '--contexts=1024,8192')), alone=True)]


def programs() -> list[Stage]:
    """Serving, prompts, long sequences in training."""
    return [Stage((bench('serve', 60, FULL, '--mode=serve', '--batch_sizes=64', '--contexts=256', '--requests=256'),
                   bench('prefill', 60, FULL, '--mode=prefill', '--against=vanilla', '--batch_sizes=1,8', '--contexts=1024,8192'),
                   bench('lengths', 120, FULL, '--mode=lengths', '--against=vanilla', '--contexts=1024,8192')), alone=True)]


def ladder() -> list[Stage]:
    """A short ladder of GPT-2's shape."""
    return [Stage((Cell('ladder', 500),))]


# the most telling first; tests are collected by pytest
PARTS = {'first': first, 'tests': None, 'tune': tune, 'train': training, 'sizes': sizes, 'programs': programs,
         'train-more': training_more, 'ladder': ladder}
