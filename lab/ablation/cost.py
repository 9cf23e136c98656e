"""The cost of running each row, regardless of what it has learned: bytes of KV and weights, FLOPs
of a prompt, and the speed of decoding, prefill and training."""
import contextlib
import dataclasses
import functools
import gc
import io
import sys

import torch

from config.errors import UserError
from engine.weights.quantize import quantize_weights
from kv.cache import KVCache
from kv.capacity import WEIGHT_BYTES, parameters, prefill_flops
from kv.plan import plan_kv
from lab.ablation.ladder import digest
from lab.ablation.results import core_digest
from lab.benchmarks import clock
from lab.benchmarks.decode import DecodeRound
from lab.benchmarks.prefill import PrefillRound
from lab.benchmarks.setting import numbers, processor
from lab.benchmarks.steps import TrainingSteps
from model import GPT
from training.device import device_name, pick_device, pick_dtype
from training.int8_training import train_in_int8
from training.loss import linear_cross_entropy
from training.memory_use import Predictor
from training.optim import make_optimizer, state_name
from training.recompute import set_recompute

STEPS = 16  # tokens timed in a round
REFERENCE = 'bfloat16'  # the storage assumed for 'auto'; vanilla GPT-2 is always counted with it
GIGABYTE = 10 ** 9
FAILURES = UserError, MemoryError, RuntimeError  # RuntimeError: out of memory, on a CPU or a GPU
TITLES = {'decode': 'decoding at {:,} tokens, batch {}', 'prefill': 'prompts of {:,} tokens',
          'train': 'training steps'}
# keys of train.py, besides the model's, that change the work of a training step
STEP = ('batch_size', 'recompute', 'chunked_loss', 'optimizer', 'offload_optimizer',
        'int8_training')


def kv_bytes(ladder, row, lengths: list[int]) -> dict:
    """KV bytes of one sequence at each of `lengths` and at block_size, alongside those of vanilla
    GPT-2 in the first row's shape. They are counted from an allocated cache and must equal the
    plan's arithmetic. Also the bytes of the weights (without int8 scales) and FLOPs of a prompt."""
    config = ladder.config(row)
    plan, T = plan_kv(config), config.block_size
    dtype, weights = (REFERENCE if each == 'auto' else each
                      for each in (row.kv_dtype, row.weight_dtype))
    vanilla = plan_kv(ladder.config(ladder.rows[ladder.first])).vanilla()
    at = {}
    for n in sorted({*lengths, T}):
        allocated, planned = KVCache(plan, 1, n, dtype).nbytes, plan.nbytes(1, n, dtype)
        if allocated != planned:
            raise RuntimeError(f'row {row.name!r}: a cache of {n} tokens takes {allocated} bytes, '
                               f'the plan says {planned}')
        at[n] = {'bytes': allocated, 'vanilla_bytes': vanilla.nbytes(1, n, REFERENCE),
                 'sequences_per_GB': GIGABYTE // allocated,
                 'prefill_flops': prefill_flops(config, plan, n)}
    n_bytes = WEIGHT_BYTES[weights] * parameters(config, plan)
    return {'dtype': dtype, 'T': T, 'bytes_per_token': at[T]['bytes'] / T, 'at': at,
            'smaller': at[T]['vanilla_bytes'] / at[T]['bytes'],
            'weights': {'dtype': weights, 'bytes': n_bytes}}


def set_fields(config) -> dict:
    """The fields of a GPTConfig that are not the default, so that a new field changes no digest."""
    return {field.name: value for field in dataclasses.fields(config)
            if (value := getattr(config, field.name)) != field.default}


class Speed:
    """Times all rows, interleaved. Rows that run the same code are timed once: `decodes_as` and
    `trains_as` map each row to the key of its measurement in `decoders` and `trainers`.

    Args:
        ladder: its settings specify contexts, batch sizes, the device and, as `shape`, a different
            model size.
    """

    def __init__(self, ladder):
        s = self.s = ladder.s
        self.contexts = numbers('contexts', s.contexts)
        self.batches = numbers('batch_sizes', s.batch_sizes)
        self.dtype_name = ladder.settings(ladder.rows[ladder.first]).dtype
        self.decoders, self.trainers, self.decodes_as, self.trains_as = {}, {}, {}, {}
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
        for context in self.contexts:
            self.todo += [('decode', context, batch) for batch in self.batches]
            self.todo.append(('prefill', context, 1))
        self.todo.append(('train', 0, 0))

    @property
    def fingerprint(self) -> str:
        """A digest of what is measured, without the machine."""
        return digest([sorted(self.decoders), sorted(self.trainers), self.contexts, self.batches,
                       self.dtype_name, STEPS, self.s.repeats, self.s.shape])

    def of(self, document: dict | None) -> dict | None:
        """Return an earlier measurement if it is of these models, otherwise None."""
        if not document or document.get('fingerprint') != self.fingerprint:
            return None
        return document | {'decodes_as': self.decodes_as, 'trains_as': self.trains_as}

    def measure(self) -> dict:
        """Measure all cells. A failed measurement (a cache larger than the memory) is listed under
        its cell's `errors`."""
        self.device = pick_device((self.s.devices or self.s.device).split(',')[0].strip())
        self.dtype = pick_dtype(self.dtype_name, self.device)
        torch.manual_seed(0)
        self.models = {}
        measures = {'decode': self._decode, 'prefill': self._prefill, 'train': self._train}
        cells = []
        for k, (kind, context, batch) in enumerate(self.todo, 1):
            title = TITLES[kind].format(context, batch)
            print(f'timing {k} of {len(self.todo)}: {title}', file=sys.stderr, flush=True)
            cell = {'kind': kind, 'context': context, 'batch': batch}
            cells.append(cell | measures[kind](title, context, batch))
        return {'device': device_name(self.device), 'processor': processor(),
                'threads': torch.get_num_threads(), 'torch': torch.__version__,
                'dtype': str(self.dtype).removeprefix('torch.'), 'steps': STEPS,
                'repeats': self.s.repeats, 'shape': self.s.shape, 'core': core_digest(),
                'fingerprint': self.fingerprint, 'decodes_as': self.decodes_as,
                'trains_as': self.trains_as, 'cells': cells}

    def _turns(self, makers: dict, title: str) -> tuple[dict, dict]:
        """Return (key -> results of its rounds, key -> error). makers: key -> function that returns
        the function to time. A failure ends only the measurement of its own key."""
        rounds, errors = {}, {}

        def guarded(key, function):
            try:
                return None if key in errors else function()
            except FAILURES as e:
                errors[key] = ' '.join(str(e).split()) or type(e).__name__
            rounds[key] = None
            self._free()
        for key, make in makers.items():
            rounds[key] = guarded(key, make)
        timed = {key: lambda key=key: guarded(key, rounds[key]) for key in makers}
        results = clock.alternate(timed, self.s.repeats, title)
        return {key: each for key, each in results.items() if key not in errors}, errors

    def _free(self):
        """Free unused memory: captured steps hold their caches in reference cycles."""
        if self.device.type == 'cuda':
            gc.collect()
            torch.cuda.empty_cache()

    def _model(self, key) -> GPT:
        """Return a model to decode with, with positions for every context."""
        if key not in self.models:
            config, _, weight_dtype = self.decoders[key]
            longest = max(self.contexts) + STEPS
            config = dataclasses.replace(config, block_size=max(config.block_size, longest))
            self.models[key] = GPT(config).to(self.device, self.dtype).eval()
            quantize_weights(self.models[key], weight_dtype)
        return self.models[key]

    def _decode(self, title, context, batch):
        """Each round allocates its cache and frees it, so that only one exists at a time."""
        def one_round(model, kv_dtype):
            self._free()
            return DecodeRound(model, batch, context, context + STEPS, STEPS, kv_dtype)()
        return self._generation('tpot_ms', one_round, title)

    def _prefill(self, title, context, batch):
        def one_round(model, kv_dtype):
            return PrefillRound(model, batch, context, 0, kv_dtype)()
        return self._generation('ttft_ms', one_round, title)

    def _generation(self, name, one_round, title):
        def make(key):
            return functools.partial(one_round, self._model(key), self.decoders[key][1])
        makers = {key: functools.partial(make, key) for key in self.decoders}
        seconds, errors = self._turns(makers, title)
        times = {key: clock.summary(1000 * x for x in each) for key, each in seconds.items()}
        return {name: times, 'errors': errors}

    def _train(self, title, *_):
        """Forward, backward and update, at each row's training batch size and length."""
        self.models = {}  # no longer needed
        self._free()
        makers = {key: functools.partial(self._steps, key) for key in self.trainers}
        seconds, errors = self._turns(makers, title)
        rates, memory = {}, {}
        for key, each in seconds.items():
            config, s = self.trainers[key]
            rates[key] = clock.summary(s.batch_size * config.block_size / x for x in each)
            predicted = Predictor(config, self.device).predict(
                recompute_of(s), s.batch_size, 0, s.chunked_loss, self.dtype,
                optimizer=state_name(s)).as_dict()
            memory[key] = {name: predicted[name] for name in ('activations', 'peak')}
        return {'tokens_per_second': rates, 'memory': memory, 'errors': errors}

    def _steps(self, key) -> TrainingSteps:
        config, s = self.trainers[key]
        model = GPT(config).to(self.device)
        set_recompute(model, recompute_of(s))
        model.loss_fn = linear_cross_entropy if s.chunked_loss else None
        if s.int8_training:
            with contextlib.redirect_stdout(io.StringIO()):
                train_in_int8(model)
        return TrainingSteps(model, s.batch_size, config.block_size, self.dtype,
                             lambda model: make_optimizer(model, s, self.device.type))


def recompute_of(settings) -> str:
    """Return the recomputation policy to time; 'auto' would depend on the machine's memory."""
    return 'none' if settings.recompute == 'auto' else settings.recompute
