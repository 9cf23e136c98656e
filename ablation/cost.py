"""What every row costs to run, whatever it has learned: bytes of KV, speed of decoding, prefill and training."""
import contextlib
import dataclasses
import io

import torch

from ablation.ladder import digest
from benchmarks import clock
from benchmarks.decode import DecodeRound
from benchmarks.prefill import PrefillRound
from benchmarks.setting import MIN_REPEATS, at_least, numbers, processor
from benchmarks.steps import TrainingSteps
from config.errors import UserError
from kv.cache import KVCache
from kv.plan import plan_kv
from model import GPT
from training.device import device_name, pick_device, pick_dtype
from training.int8_training import train_in_int8
from training.memory import Predictor
from training.optim import make_optimizer, state_name

STEPS = 16        # tokens timed in a round
REFERENCE = 'bfloat16'  # what bytes of a row with kv_dtype='auto' are counted in, and vanilla's always
GIGABYTE = 10 ** 9
# keys of train.py, beside the model's, that change what a training step computes
STEP = ('batch_size', 'recompute', 'chunked_loss', 'optimizer', 'offload_optimizer', 'int8_training')


def counted_dtype(row) -> str:
    """The storage that a row's bytes are counted in."""
    return REFERENCE if row.kv_dtype == 'auto' else row.kv_dtype


def kv_bytes(ladder, row, lengths: list[int]) -> dict:
    """Allocated by the cache for one sequence, at the lengths given and at every row's block_size; beside vanilla GPT-2's in
    the first row's shape. A cache is made to count them, the plan's arithmetic must agree."""
    config = ladder.config(row)
    plan, dtype, T = plan_kv(config), counted_dtype(row), config.block_size
    vanilla = plan_kv(ladder.config(ladder.rows[ladder.first])).vanilla()
    at = {}
    for n in sorted({*lengths, *(ladder.config(other).block_size for other in ladder.rows.values())}):
        held = KVCache(plan, 1, n, dtype).nbytes
        if held != plan.nbytes(1, n, dtype):
            raise RuntimeError(f'row {row.name!r}: a cache of {n} tokens takes {held} bytes, the plan says '
                               f'{plan.nbytes(1, n, dtype)}')
        at[n] = {'bytes': held, 'vanilla_bytes': vanilla.nbytes(1, n, REFERENCE), 'sequences_per_GB': GIGABYTE // held}
    return {'dtype': dtype, 'T': T, 'bytes_per_token': at[T]['bytes'] / T, 'at': at,
            'smaller': at[T]['vanilla_bytes'] / at[T]['bytes']}


class Speed:
    """Times of all rows, in turns. Rows that run the same code share a side: `decodes_as` and `trains_as` say which.

    Args:
        ladder: whose settings say contexts, batch sizes, device and, in `shape`, another size of the models.
    """

    def __init__(self, ladder):
        s = self.s = ladder.s
        at_least(s, repeats=MIN_REPEATS)
        self.contexts, self.batches = numbers('contexts', s.contexts), numbers('batch_sizes', s.batch_sizes)
        self.device = pick_device((s.devices or s.device).split(',')[0].strip())
        self.dtype = pick_dtype(ladder.settings(ladder.rows[ladder.first]).dtype, self.device)
        self.decoders, self.trainers, self.decodes_as, self.trains_as = {}, {}, {}, {}
        for row in ladder.rows.values():
            config = dataclasses.replace(ladder.config(row, s.shape), kv_quant_train='')
            key = self.decodes_as[row.name] = digest([dataclasses.asdict(config), row.kv_dtype])
            self.decoders[key] = config, row.kv_dtype
            trained, settings = ladder.trained_config(row, s.shape), ladder.settings(row, s.shape)
            step = {name: getattr(settings, name) for name in STEP}
            key = self.trains_as[row.name] = digest([dataclasses.asdict(trained), step])
            self.trainers[key] = trained, settings

    def facts(self) -> dict:
        """What the figures mean nothing without."""
        return {'device': device_name(self.device), 'processor': processor(), 'threads': torch.get_num_threads(),
                'torch': torch.__version__, 'dtype': str(self.dtype).removeprefix('torch.'), 'steps': STEPS,
                'repeats': self.s.repeats, 'shape': self.s.shape}

    @property
    def fingerprint(self) -> str:
        return digest([sorted(self.decoders), sorted(self.trainers), self.contexts, self.batches, self.facts()])

    def measure(self) -> dict:
        """Every figure. A measurement that fails (a cache larger than the memory) is told in its place."""
        torch.manual_seed(0)
        document = self.facts() | {'fingerprint': self.fingerprint, 'decodes_as': self.decodes_as, 'trains_as': self.trains_as,
                                   'cells': []}
        longest = max(self.contexts) + STEPS
        models = {}
        for key, (config, _) in self.decoders.items():
            longer = dataclasses.replace(config, block_size=max(config.block_size, longest))
            models[key] = GPT(longer).to(self.device, self.dtype).eval()
        for context in self.contexts:
            for batch in self.batches:
                document['cells'].append(self._cell('decode', context, batch, self._decode, models))
            document['cells'].append(self._cell('prefill', context, 1, self._prefill, models))
        del models
        document['cells'].append(self._cell('train', 0, 0, self._train))
        return document

    def _cell(self, kind, context, batch, measure, *args):
        cell = {'kind': kind, 'context': context, 'batch': batch}
        try:
            return cell | measure(*args, context, batch)
        except (UserError, MemoryError, torch.OutOfMemoryError) as e:
            return cell | {'error': ' '.join(str(e).split()) or type(e).__name__}

    def _decode(self, models, context, batch):
        """Caches are made and freed in every round, so that there is one at a time."""
        def side(key):
            return lambda: DecodeRound(models[key], batch, context, context + STEPS, STEPS, self.decoders[key][1], True)()
        found = clock.alternate({key: side(key) for key in models}, self.s.repeats, f'decoding at {context}, batch {batch}')
        return {'tpot_ms': {key: clock.summary(1000 * x for x in each) for key, each in found.items()}}

    def _prefill(self, models, context, batch):
        def side(key):
            return lambda: PrefillRound(models[key], batch, context, 0, self.decoders[key][1])()
        found = clock.alternate({key: side(key) for key in models}, self.s.repeats, f'prompts of {context}')
        return {'ttft_ms': {key: clock.summary(1000 * x for x in each) for key, each in found.items()}}

    def _train(self, context, batch):
        """Forward, backward and update, at the batch and length that each row trains with."""
        sides, memory = {}, {}
        for key, (config, how) in self.trainers.items():
            model = GPT(config).to(self.device)
            policy = 'none' if how.recompute == 'auto' else how.recompute
            model.set_recompute(policy)
            model.chunked_loss = how.chunked_loss
            if how.int8_training:
                with contextlib.redirect_stdout(io.StringIO()):
                    train_in_int8(model)
            sides[key] = TrainingSteps(model, how.batch_size, config.block_size, self.dtype,
                                       lambda model, how=how: make_optimizer(model, how, self.device.type))
            found = Predictor(config, self.device).predict(policy, how.batch_size, 0, how.chunked_loss, self.dtype,
                                                           optimizer=state_name(how)).as_dict()
            memory[key] = {name: found[name] for name in ('activations', 'peak')}
        times = clock.alternate(sides, self.s.repeats, 'training steps')
        return {'memory': memory, 'tokens_per_second': {
            key: clock.summary(how.batch_size * config.block_size / x for x in times[key])
            for key, (config, how) in self.trainers.items()}}
