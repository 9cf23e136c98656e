"""What AMX tiles gain: matmuls, decode steps and cold prompts, with and without them, interleaved.

    python lab/scripts/tiles.py FILE         # five minutes on two cores; FILE gets a JSON document
    python lab/scripts/tiles.py FILE 256     # prompts of 256 tokens, to try it out

The model is GPT-2 124M's shape with all savings and random weights, in bfloat16 and in int8.
Numbers are medians of five rounds in ms.
"""
import itertools
import json
import statistics
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import bench
import configurator
from common.errors import UserError
from data.datasets import DATA_ROOT
from engine import native
from engine.engine import Engine
from engine.requests.params import SamplingParams
from engine.weights.linear import by_extension, describe
from engine.weights.quantized import Int8Linear
from lab.benchmarks import clock, setting
from lab.benchmarks.decode import DecodeRound
from model import GPT

FULL = 'config/train_gpt2_mqa_local.py'
CPU, ROUNDS = torch.device('cpu'), 5


def compared(name: str, work) -> list[str]:
    """A row: the seconds that `work()` returns with and without tiles, in ms, and their ratio."""
    def timed(on):
        native.library().nanokv_tiles(on)
        return work()
    times = clock.alternate({on: partial(timed, on) for on in (1, 0)}, ROUNDS, name)
    native.library().nanokv_tiles(1)
    tiles, without = (1000 * statistics.median(times[on]) for on in (1, 0))
    return [name, f'{tiles:.3g}', f'{without:.3g}', f'{without / tiles:.2f}']


def matmuls(n: int, k: int):
    """Rows of the weight matrices of a layer, and of the output layer for few rows."""
    layer = torch.nn.Linear(k, n, bias=False)
    in_int8, described = Int8Linear(layer), describe(layer.bfloat16())
    for rows in (1, 2, 4, 16, 64, 256, 1024, 4096) if n < 10_000 else (1, 16, 64):
        x = torch.randn(rows, k)
        for dtype, matmul in (('bfloat16', partial(by_extension, described)), ('int8', in_int8)):
            yield compared(f'{dtype}, {rows} x {k} by {n}',
                           partial(clock.seconds, CPU, partial(matmul, x)))


def model_steps(dtype: str, prompt: int):
    """Decode steps of 1, 4, 16 and 32 rows that hold 1,024 tokens, and a cold prompt."""
    given = [FULL, '--dtype=bfloat16', f'--weight_dtype={dtype}', '--mode=decode', '--device=cpu']
    s = configurator.parse(bench.Settings, given, echo=False)
    model = setting.prepared(GPT(setting.model_config(s, DATA_ROOT)), s)
    for batch in (1, 4, 16, 32):
        yield compared(f'{dtype}, decode, {batch} rows',
                       DecodeRound(model, batch, 1024, 1024 + 32, 16, 'auto'))
    engine = Engine(model, 1, prompt + 8)

    def answer():
        text = setting.random_tokens(model, 1, prompt)[0].tolist()
        params = SamplingParams(max_new_tokens=1)
        return clock.seconds(CPU, partial(engine.generate, [text], params))
    yield compared(f'{dtype}, a prompt of {prompt:,}', answer)


def main(file: str, prompt: str = '4096') -> None:
    if native.library() is None or not native.library().tiles:
        raise UserError('this processor has no AMX tiles, or Linux does not permit them')
    columns, rows = ['what', 'tiles', 'without', 'times as fast'], []
    shapes = (3840, 768), (768, 3840), (896, 768), (768, 768), (50304, 768)
    for row in itertools.chain(*(matmuls(n, k) for n, k in shapes),
                               *(model_steps(dtype, int(prompt)) for dtype in ('auto', 'int8'))):
        rows.append(row)
        print(*row, sep=', ')
    document = {'processor': setting.processor(), 'threads': torch.get_num_threads(),
                'torch': torch.__version__, 'columns': columns, 'rows': rows}
    Path(file).write_text(json.dumps(document, indent=1) + '\n', encoding='utf-8')


if __name__ == '__main__':
    configurator.run_program(lambda: main(*sys.argv[1:]))
