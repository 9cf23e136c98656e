"""What every row costs to run, whatever it has learned: bytes of KV, speed of decoding, prefill and training."""
import dataclasses

import torch

from ablation.ladder import digest
from benchmarks import clock
from benchmarks.decode import DecodeRound
from benchmarks.prefill import PrefillRound
from benchmarks.setting import MIN_REPEATS, at_least, numbers, processor
from benchmarks.steps import TrainingSteps
from kv.cache import KVCache
from kv.plan import plan_kv
from model import GPT
from training.device import device_name, pick_device, pick_dtype
from training.memory import predict

STEPS = 16        # tokens timed in a round
REFERENCE = 'bfloat16'  # what bytes of a row with kv_dtype='auto' are counted in, and vanilla's always
GIGABYTE = 10 ** 9


def counted_dtype(row) -> str:
    """The storage that a row's bytes are counted in."""
    return REFERENCE if row.kv_dtype == 'auto' else row.kv_dtype


def kv_bytes(ladder, row, lengths: list[int]) -> dict:
    """Allocated by the cache for one sequence, at the lengths given and at the row's block_size; beside vanilla GPT-2's in
    the same shape. A cache is made to count them, the plan's arithmetic must agree."""
    config = ladder.config(row)
    plan, dtype, T = plan_kv(config), counted_dtype(row), config.block_size
    at = {}
    for n in sorted({T, *lengths}):
        held = KVCache(plan, 1, n, dtype).nbytes
        if held != plan.nbytes(1, n, dtype):
            raise RuntimeError(f'row {row.name!r}: a cache of {n} tokens takes {held} bytes, the plan says '
                               f'{plan.nbytes(1, n, dtype)}')
        at[n] = {'bytes': held, 'vanilla_bytes': plan.vanilla().nbytes(1, n, REFERENCE), 'sequences_per_GB': GIGABYTE // held}
    return {'dtype': dtype, 'T': T, 'bytes_per_token': at[T]['bytes'] / T, 'at': at,
            'smaller': at[T]['vanilla_bytes'] / at[T]['bytes']}


class Speed:
    """Times of all rows, in turns. Rows that run the same code share a side.

    Args:
        ladder: whose settings say contexts, batch sizes, device and, in `shape`, another size of the models.
    """

    def __init__(self, ladder):
        s = self.s = ladder.s
        at_least(s, repeats=MIN_REPEATS)
        self.contexts, self.batches = numbers('contexts', s.contexts), numbers('batch_sizes', s.batch_sizes)
        self.device = pick_device(s.device)
        self.dtype = pick_dtype(s.dtype, self.device)
        self.sides, self.side_of = {}, {}  # digest -> (config, kv_dtype); row -> digest
        for row in ladder.rows.values():
            config = dataclasses.replace(ladder.config(row), kv_quant_train='', **s.shape)
            key = digest([dataclasses.asdict(config), row.kv_dtype])
            self.sides.setdefault(key, (config, row.kv_dtype))
            self.side_of[row.name] = key
        first = ladder.settings(ladder.rows[ladder.first])
        self.train_batch, self.train_T = first.batch_size, s.shape.get('block_size', first.block_size)

    @property
    def fingerprint(self) -> str:
        return digest([sorted(self.sides), self.contexts, self.batches, self.train_batch, self.s.repeats])

    def measure(self) -> dict:
        """Every figure, and what it means nothing without."""
        torch.manual_seed(self.s.seed if hasattr(self.s, 'seed') else 0)
        document = {'fingerprint': self.fingerprint, 'device': device_name(self.device), 'processor': processor(),
                    'threads': torch.get_num_threads(), 'torch': torch.__version__,
                    'dtype': str(self.dtype).removeprefix('torch.'), 'steps': STEPS, 'repeats': self.s.repeats,
                    'shape': self.s.shape, 'side_of': self.side_of, 'cells': []}
        longest = max(self.contexts) + STEPS
        models = {}
        for key, (config, _) in self.sides.items():
            longer = dataclasses.replace(config, block_size=max(config.block_size, longest))
            models[key] = GPT(longer).to(self.device, self.dtype).eval()
        for context in self.contexts:
            document['cells'] += [self._decode(models, context, batch) for batch in self.batches]
            document['cells'].append(self._prefill(models, context))
        document['cells'].append(self._train())
        return document

    def _decode(self, models, context, batch):
        """Caches are made and freed in every round, so that there is one at a time."""
        def side(key):
            return lambda: DecodeRound(models[key], batch, context, context + STEPS, STEPS, self.sides[key][1], True)()
        found = clock.alternate({key: side(key) for key in models}, self.s.repeats, f'decoding at {context}, batch {batch}')
        return {'kind': 'decode', 'context': context, 'batch': batch,
                'tpot_ms': {key: clock.summary(1000 * x for x in each) for key, each in found.items()}}

    def _prefill(self, models, context):
        def side(key):
            return lambda: PrefillRound(models[key], 1, context, 0, self.sides[key][1])()
        found = clock.alternate({key: side(key) for key in models}, self.s.repeats, f'prompts of {context}')
        return {'kind': 'prefill', 'context': context, 'batch': 1,
                'ttft_ms': {key: clock.summary(1000 * x for x in each) for key, each in found.items()}}

    def _train(self):
        """A forward and backward pass and an update at the length and batch that the rows train with."""
        batch, T = self.train_batch, self.train_T
        shapes = {}  # configs that train alike, whatever their caches store
        for key, (config, _) in self.sides.items():
            shapes.setdefault(digest(dataclasses.asdict(config)), (config, []))[1].append(key)
        sides = {keys[0]: TrainingSteps(GPT(config).to(self.device), batch, T, self.dtype) for config, keys in shapes.values()}
        found = clock.alternate(sides, self.s.repeats, f'training steps of {batch} x {T}')
        cell = {'kind': 'train', 'context': T, 'batch': batch, 'tokens_per_second': {}, 'memory': {}}
        for config, keys in shapes.values():
            rate = clock.summary(batch * T / x for x in found[keys[0]])
            memory = predict(config, batch).as_dict()
            for key in keys:
                cell['tokens_per_second'][key] = rate
                cell['memory'][key] = {name: memory[name] for name in ('activations', 'peak')}
        return cell
