"""The cells of the GPU check, part by part, the most informative first. Estimates and shares come
from reading the code and the compiled kernels (docs/gpu.md), not from a GPU."""
import math
from dataclasses import dataclass, field

from config.gpt_config import GPTConfig
from configurator import parse
from data.datasets import DATA_ROOT
from kv.capacity import read_nbytes
from kv.plan import plan_kv
from lab.ablation.ladder import parameters
from lab.benchmarks.setting import model_config, vanilla_config
from training.flops import flops_per_token

# the shape of GPT-2 124M with every saving on; it has as many parameters
FULL = 'config/train_gpt2_mqa_local.py'
FLEX, SDPA, VARLEN = (f'--attention_backend={name}' for name in ('flex', 'sdpa', 'varlen'))
# from the data sheet: memory bandwidth, and bfloat16 without sparsity
H100 = {'bytes_per_second': 3.35e12, 'flops': 989e12}
LINEARS = 768 * (2 * 3840 + 2 * 768 + 128)  # weights of a layer that owns its K and V
START = 15  # seconds until a process has imported torch, opened the device and built a small model


@dataclass(frozen=True)
class Cell:
    """One check or measurement.

    name: 'kind/...'; `lab.scripts.gpu.measure` has a function for each kind, called with `args`.
    seconds: estimated time, in a process that is already running.
    limit: seconds that the timed work takes at the H100's limits; 0 = no speed is measured.
    share: expected fraction of that limit. work: the work that the limit counts, in words.
    """
    name: str
    seconds: float
    args: dict = field(default_factory=dict)
    limit: float = 0.0
    share: float = 0.0
    work: str = ''


@dataclass(frozen=True)
class Stage:
    """Cells shared by `processes` workers; each worker runs one cell at a time. Timed cells use one
    worker. alone: each cell gets its own process."""
    cells: tuple[Cell, ...]
    processes: int = 1
    alone: bool = False

    @property
    def seconds(self) -> float:
        starts = math.ceil(len(self.cells) / self.processes) if self.alone else 1
        seconds = [cell.seconds for cell in self.cells]
        return START * starts + max([sum(seconds) / self.processes, *seconds])


def reading(nbytes: float, share: float) -> dict:
    work = f'{nbytes / 1e6:,.0f} MB read'
    return {'limit': nbytes / H100['bytes_per_second'], 'share': share, 'work': work}


def config_of(args: list[str]) -> GPTConfig:
    return model_config(parse('bench', args, echo=False), DATA_ROOT)


def bench(name, seconds, *args, **limit) -> Cell:
    return Cell(f'bench/{name}', seconds, {'args': list(args)}, **limit)


def decode(name, seconds, batch, context, share, *further, kv_dtype='bfloat16',
           vanilla=False) -> Cell:
    steps = 128 if batch == 1 else 32
    shape = ['--block_size=32768'] if vanilla else [FULL]
    if kv_dtype != 'bfloat16':
        further += (f'--kv_dtype={kv_dtype}',)
    config = config_of(shape)
    config = vanilla_config(config, context + steps) if vanilla else config
    # every weight once in bfloat16 (tied embeddings: as the output layer), K and V of each layer
    nbytes = 2 * parameters(config) + read_nbytes(plan_kv(config), batch, context, kv_dtype)
    return bench(f'decode/{name}', seconds, *shape, '--mode=decode', f'--batch_sizes={batch}',
                 f'--contexts={context}', f'--steps={steps}', *further, **reading(nbytes, share))


def train(name, seconds, batch, share, *further, vanilla=False) -> Cell:
    shape = ['--block_size=1024'] if vanilla else [FULL]
    config = config_of(shape)
    flops = flops_per_token(config).total * batch * config.block_size
    return bench(f'train/{name}', seconds, *shape, '--mode=train', '--real_data=False',
                 f'--batch_size={batch}', '--compile=True', *further,
                 limit=flops / H100['flops'], share=share, work=f'{flops / 1e12:,.1f} TFLOP')


def first() -> list[Stage]:
    """A short answer to each question: is it correct, is it fast, where is the time spent?"""
    layouts = [('contiguous', 'bfloat16'), ('contiguous', 'int8'), ('ring', 'bfloat16'),
               ('ring', 'int8'), ('paged', 'bfloat16'), ('paged', 'int8'), ('chunk', 'int8'),
               ('paged chunk', 'bfloat16'), ('paged chunk', 'int8'),
               ('contiguous', 'float16'), ('contiguous', 'float32')]
    kernels = [Cell(f'attention/{layout}/{kv_dtype}', 8, dict(layout=layout, kv_dtype=kv_dtype))
               for layout, kv_dtype in layouts]
    kernels += [Cell(f'write/{kv_dtype}', 6, dict(kv_dtype=kv_dtype))
                for kv_dtype in ('bfloat16', 'int8', 'none')]
    kernels += [Cell(f'linear/m{rows}', 6, dict(rows=rows)) for rows in (1, 16, 32, 64)]
    kernels += [Cell(f'linear/m{rows}/int8', 6, dict(rows=rows, int8=True)) for rows in (1, 64)]
    sequences = [('flex', 1024, 12), ('flex', 96, 4), ('flex', 64, 4), ('sdpa', 1024, 12)]
    kernels += [Cell(f'sequence/{backend}/T={T}', 15, dict(backend=backend, T=T, ratio=ratio))
                for backend, T, ratio in sequences]
    captured = [Cell(f'captured/{kv_dtype}/{"paged" if paged else "contiguous"}', 25,
                     dict(kv_dtype=kv_dtype, paged=paged))
                for kv_dtype in ('auto', 'int8') for paged in (False, True)]
    captured.append(Cell('engine/texts', 25, dict(batch=8, temperature=1.0)))
    timed = [Cell('rates', 10), decode('b1-1k', 20, 1, 1024, 0.32),
             decode('b64-8k-int8', 25, 64, 8192, 0.35, kv_dtype='int8'),
             train('full-b32', 80, 32, 0.25), decode('b64-8k', 20, 64, 8192, 0.42),
             # profile only after all timings in this process
             Cell('profile/decode', 15, dict(batch=1, context=1024)),
             Cell('profile/train', 25, dict(batch=32))]  # compiled by bench/train/full-b32
    compiled = Cell('captured/int8/compiled', 70, dict(kv_dtype='int8', paged=False, compiled=True))
    return [Stage(tuple(captured + kernels), 8), Stage(tuple(timed)), Stage((compiled,))]


def smoke() -> list[Stage]:
    """Does what everything else needs run at all? A process for each cell, two minutes at most."""
    cells = {cell.name: cell for stage in first() for cell in stage.cells}
    names = ('captured/auto/contiguous', 'captured/int8/paged', 'engine/texts', 'write/int8',
             'attention/paged/int8')
    vocabulary = Cell('vocabulary/int8', 6, dict(size=50257))
    return [Stage((*(cells[name] for name in names), vocabulary), 6, alone=True)]


def tune() -> list[Stage]:
    """Layouts of the decode kernel: keys per block, warps, stages, splits, which the first stage
    compiles in four processes; the Linear layers of few rows against torch's."""
    shares = {'int8': {1: 0.05, 16: 0.25, 64: 0.4, 256: 0.5},
              'bfloat16': {1: 0.1, 16: 0.4, 64: 0.6, 256: 0.75}}
    cases = [(batch, paged, kv_dtype) for batch in (1, 64, 16, 256)
             for kv_dtype in ('int8', 'bfloat16') for paged in (False, True)]

    def cell(kind, seconds, batch, paged, kv_dtype):
        nbytes = 2 * batch * 8192 * (64 + 2 if kv_dtype == 'int8' else 128)
        limit = reading(nbytes, shares[kv_dtype][batch]) if kind == 'tune' else {}
        return Cell(f"{kind}/{kv_dtype}/{'paged' if paged else 'contiguous'}/b{batch}", seconds,
                    dict(batch=batch, paged=paged, kv_dtype=kv_dtype), **limit)
    compiled = tuple(cell('compile', 90, 16, *case[1:]) for case in cases[:4])
    few = [Cell(f'few-rows/m{rows}', 10, dict(rows=rows), **reading(2 * LINEARS, 0.4))
           for rows in (1, 8, 16, 32, 64)]
    return [Stage(compiled, 4), Stage((*few, *(cell('tune', 15, *case) for case in cases)))]


def training() -> list[Stage]:
    """T=1,024: vanilla GPT-2 and the full stack, by batch and by backend of the local layers."""
    return [Stage((train('full-flex-b64', 90, 64, 0.31, FLEX),
                   train('vanilla-b64', 70, 64, 0.33, vanilla=True),
                   train('full-varlen-b64', 90, 64, 0.31, VARLEN),
                   train('full-flex-b16', 80, 16, 0.27, FLEX),
                   train('vanilla-b16', 60, 16, 0.3, vanilla=True)), alone=True)]


def training_more() -> list[Stage]:
    """The full stack without the chunked loss, and with SDPA; memory by recomputation policy."""
    whole = '--chunked_loss=False'
    return [Stage((train('full-flex-b16-whole-loss', 80, 16, 0.3, FLEX, whole),
                   train('full-flex-b64-whole-loss', 90, 64, 0.33, FLEX, whole),
                   train('full-sdpa-b64', 90, 64, 0.25, SDPA),
                   bench('recompute', 120, FULL, '--mode=recompute', '--against=vanilla',
                         '--contexts=1024', '--batch_sizes=16')), alone=True)]


def sizes() -> list[Stage]:
    """Decoding: other batches, contexts and models; our kernels compared with torch's."""
    big = [FULL, '--n_layer=24', '--n_head=16', '--n_embd=2048', '--mlp_hidden=0']
    return [Stage((decode('b1-1k-compiled', 60, 1, 1024, 0.33, '--compile=True'),
                   decode('b16-8k', 30, 16, 8192, 0.25),
                   decode('b16-8k-vanilla', 40, 16, 8192, 0.5, vanilla=True),
                   decode('b256-8k-int8', 60, 256, 8192, 0.25, kv_dtype='int8'),
                   bench('decode/1B', 60, *big, '--mode=decode', '--batch_sizes=1,16',
                         '--contexts=1024', '--steps=64'),
                   bench('kernels', 80, FULL, '--mode=kernels', '--window_size=512',
                         '--batch_sizes=1,64', '--contexts=1024,8192')), alone=True)]


def programs() -> list[Stage]:
    """The engine's steps, serving, prompts, training on long sequences."""
    config = config_of([FULL])
    nbytes = {batch: 2 * parameters(config) + read_nbytes(plan_kv(config), batch, 128, 'bfloat16')
              for batch in (1, 64)}
    return [Stage((Cell('engine/b1', 30, dict(batch=1), **reading(nbytes[1], 0.3)),
                   Cell('engine/b64', 40, dict(batch=64), **reading(nbytes[64], 0.3)),
                   bench('serve', 60, FULL, '--mode=serve', '--batch_sizes=64', '--contexts=256',
                         '--requests=256'),
                   bench('prefill', 60, FULL, '--mode=prefill', '--against=vanilla',
                         '--batch_sizes=1,8', '--contexts=1024,8192'),
                   bench('lengths', 120, FULL, '--mode=lengths', '--against=vanilla',
                         '--contexts=1024,8192')), alone=True)]


# the most informative first; pytest collects the cells of 'tests'
PARTS = {'smoke': smoke, 'first': first, 'tests': None, 'tune': tune, 'train': training,
         'sizes': sizes, 'programs': programs, 'train-more': training_more,
         'ladder': lambda: [Stage((Cell('ladder', 500),))]}
