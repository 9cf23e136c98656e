"""The cost of running each row, regardless of what it has learned: bytes of KV, and the speed of
decoding, prefill and training."""
import dataclasses
import functools
import gc

import torch

from engine.weights.quantize import quantize_weights
from kv.cache import KVCache
from kv.plan import plan_kv
from lab.ablation.ladder import digest
from lab.ablation.results import core_digest
from lab.benchmarks import clock
from lab.benchmarks.decode import DecodeRound
from lab.benchmarks.prefill import PrefillRound
from lab.benchmarks.setting import numbers, processor
from lab.benchmarks.steps import TrainingSteps
from model import GPT
from training import native
from training.device import device_name, pick_device, pick_dtype
from training.loss import linear_cross_entropy
from training.optim import make_optimizer
from training.recompute import set_recompute

STEPS = 16  # tokens timed in a round
REFERENCE = 'bfloat16'  # the storage assumed for 'auto'; vanilla GPT-2 is always counted with it
GIGABYTE = 10 ** 9
# keys of train.py, besides the model's, that change the work of a training step
STEP = ('batch_size', 'recompute', 'chunked_loss', 'optimizer')


def kv_bytes(ladder, row, lengths: list[int]) -> dict:
    """KV bytes of one sequence at each of `lengths` and at block_size, alongside those of vanilla
    GPT-2 in the first row's shape. They are counted from an allocated cache and must equal the
    plan's arithmetic."""
    config = ladder.config(row)
    plan, T = plan_kv(config), config.block_size
    dtype = REFERENCE if row.kv_dtype == 'auto' else row.kv_dtype
    vanilla = plan_kv(ladder.config(ladder.rows[ladder.first])).vanilla()
    at = {}
    for n in sorted({*lengths, T}):
        allocated, planned = KVCache(plan, 1, n, dtype).nbytes, plan.nbytes(1, n, dtype)
        if allocated != planned:
            raise RuntimeError(f'row {row.name!r}: a cache of {n} tokens takes {allocated} bytes, '
                               f'the plan says {planned}')
        at[n] = {'bytes': allocated, 'vanilla_bytes': vanilla.nbytes(1, n, REFERENCE),
                 'sequences_per_GB': GIGABYTE // allocated}
    return {'dtype': dtype, 'T': T, 'bytes_per_token': at[T]['bytes'] / T, 'at': at,
            'smaller': at[T]['vanilla_bytes'] / at[T]['bytes']}


def set_fields(config) -> dict:
    """The fields of a GPTConfig that are not the default, so that a new field changes no digest."""
    return {field.name: value for field in dataclasses.fields(config)
            if (value := getattr(config, field.name)) != field.default}


class Speed:
    """Times all rows, interleaved. Rows that run the same code are timed once.

    Args:
        ladder: its settings specify contexts, batch sizes, the device and, as `shape`, a different
            model size.
    """

    def __init__(self, ladder):
        s = self.s = ladder.s
        contexts, batches = numbers('contexts', s.contexts), numbers('batch_sizes', s.batch_sizes)
        self.longest = max(contexts) + STEPS
        self.dtype_name = ladder.settings(ladder.rows[ladder.first]).dtype
        # digest -> what is timed; name of a row -> digest
        self.decoders, self.trainers, self.decodes_as, self.trains_as = {}, {}, {}, {}
        self.models = {}  # digest -> the model in use
        for row in ladder.rows.values():
            config = dataclasses.replace(ladder.config(row, s.shape), kv_quant_train='')
            storage = row.kv_dtype, row.weight_dtype
            key = digest([set_fields(config), *storage])
            self.decodes_as[row.name], self.decoders[key] = key, (config, *storage)
            trained, settings = ladder.trained_config(row, s.shape), ladder.settings(row, s.shape)
            step = {name: getattr(settings, name) for name in STEP}
            key = digest([set_fields(trained), step])
            self.trains_as[row.name], self.trainers[key] = key, (trained, settings)
        self.todo = []  # (kind, context, batch) of each cell
        for context in contexts:
            self.todo += [('decode', context, batch) for batch in batches]
            self.todo.append(('prefill', context, 1))
        self.todo.append(('train', 0, 0))
        # what is measured, without the machine
        self.fingerprint = digest([self.decodes_as, self.trains_as, self.todo, self.dtype_name,
                                   STEPS, s.repeats, s.shape])

    def measure(self) -> dict:
        """Return the machine and `cells`: for each row in `rows` the milliseconds per token
        (decode) or prompt (prefill), or the tokens per second (train)."""
        self.device = pick_device((self.s.devices or self.s.device).split(',')[0].strip())
        self.dtype = pick_dtype(self.dtype_name, self.device)
        torch.manual_seed(0)
        measures = {'decode': self._decode, 'prefill': self._prefill, 'train': self._train}
        cells = []
        for kind, context, batch in self.todo:
            if kind == 'train':
                self.models.clear()  # no longer needed
            keys = self.trains_as if kind == 'train' else self.decodes_as
            sides = {key: functools.partial(measures[kind], key, context, batch)
                     for key in keys.values()}
            rounds = clock.alternate(sides, self.s.repeats, f"{kind} {context or ''}")
            found = {key: clock.summary(each) for key, each in rounds.items()}
            cells.append({'kind': kind, 'context': context, 'batch': batch,
                          'rows': {name: found[key] for name, key in keys.items()}})
        return {'device': device_name(self.device), 'processor': processor(),
                'threads': torch.get_num_threads(), 'torch': torch.__version__,
                'dtype': str(self.dtype).removeprefix('torch.'), 'steps': STEPS,
                'repeats': self.s.repeats, 'shape': self.s.shape, 'core': core_digest(),
                'fingerprint': self.fingerprint, 'cells': cells}

    def _decode(self, key, context: int, batch: int) -> float:
        """Allocate a cache, which is freed again so that only one exists at a time; ms/token."""
        if self.device.type == 'cuda':  # captured steps hold their caches in reference cycles
            gc.collect()
            torch.cuda.empty_cache()
        model, kv_dtype = self._model(key), self.decoders[key][1]
        return 1000 * DecodeRound(model, batch, context, context + STEPS, STEPS, kv_dtype)()

    def _prefill(self, key, context: int, batch: int) -> float:
        return 1000 * PrefillRound(self._model(key), batch, context, 0, self.decoders[key][1])()

    def _model(self, key) -> GPT:
        """Return a model to decode with, with positions for every context."""
        if key not in self.models:
            config, _, weight_dtype = self.decoders[key]
            config = dataclasses.replace(config, block_size=max(config.block_size, self.longest))
            self.models[key] = GPT(config).to(self.device, self.dtype).eval()
            quantize_weights(self.models[key], weight_dtype)
        return self.models[key]

    def _train(self, key, *_) -> float:
        """Forward, backward and update at the row's training batch size and length; tokens/s."""
        config, s = self.trainers[key]
        if key not in self.models:
            model = GPT(config).to(self.device)
            # 'auto' would depend on the machine's memory
            set_recompute(model, s.recompute)
            model.loss_fn = linear_cross_entropy if s.chunked_loss else None
            if native.wanted(s, self.device):
                native.speed_up(model)
            self.models[key] = TrainingSteps(
                model, s.batch_size, config.block_size, native.training_dtype(s, self.device),
                lambda model: make_optimizer(model, s, self.device.type))
        return s.batch_size * config.block_size / self.models[key]()
