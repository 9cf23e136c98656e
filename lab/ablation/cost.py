"""What every row costs to run, whatever it has learned: bytes of KV and weights, FLOPs of a prompt,
speed of decoding, prefill and training."""
import contextlib
import dataclasses
import gc
import io

import torch

from config.errors import UserError, at_least
from engine.weights import quantize_weights
from kv.cache import KVCache
from kv.capacity import WEIGHT_BYTES, parameters, prefill_flops
from kv.plan import plan_kv
from lab.ablation.ladder import digest
from lab.benchmarks import clock
from lab.benchmarks.decode import DecodeRound
from lab.benchmarks.prefill import PrefillRound
from lab.benchmarks.setting import MIN_REPEATS, numbers, processor
from lab.benchmarks.steps import TrainingSteps
from model import GPT
from training.device import device_name, pick_device, pick_dtype
from training.int8_training import train_in_int8
from training.loss import linear_cross_entropy
from training.memory_use import Predictor
from training.optim import make_optimizer, state_name
from training.recompute import set_recompute

STEPS = 16        # tokens timed in a round
REFERENCE = 'bfloat16'  # what bytes are counted in where a row says 'auto', and vanilla's always
GIGABYTE = 10 ** 9
FAILURES = UserError, MemoryError, RuntimeError  # RuntimeError: no memory on a CPU, and torch.OutOfMemoryError
# keys of train.py, beside the model's, that change what a training step computes
STEP = ('batch_size', 'recompute', 'chunked_loss', 'optimizer', 'offload_optimizer', 'int8_training')


def counted(dtype: str) -> str:
    """The storage that bytes of a row that stores K and V, or weights, in `dtype` are counted in."""
    return REFERENCE if dtype == 'auto' else dtype


def kv_bytes(ladder, row, lengths: list[int]) -> dict:
    """Allocated by the cache for one sequence, at the lengths given and at block_size; beside vanilla GPT-2's in the first
    row's shape. A cache is made to count them, the plan's arithmetic must agree. Also bytes of the weights (without the
    scales of int8), and FLOPs to the first token of a prompt."""
    config = ladder.config(row)
    plan, dtype, T = plan_kv(config), counted(row.kv_dtype), config.block_size
    vanilla = plan_kv(ladder.config(ladder.rows[ladder.first])).vanilla()
    at = {}
    for n in sorted({*lengths, T}):
        held = KVCache(plan, 1, n, dtype).nbytes
        if held != plan.nbytes(1, n, dtype):
            raise RuntimeError(f'row {row.name!r}: a cache of {n} tokens takes {held} bytes, the plan says '
                               f'{plan.nbytes(1, n, dtype)}')
        at[n] = {'bytes': held, 'vanilla_bytes': vanilla.nbytes(1, n, REFERENCE), 'sequences_per_GB': GIGABYTE // held,
                 'prefill_flops': prefill_flops(config, plan, n)}
    weights = counted(row.weight_dtype)
    return {'dtype': dtype, 'T': T, 'bytes_per_token': at[T]['bytes'] / T, 'at': at,
            'smaller': at[T]['vanilla_bytes'] / at[T]['bytes'],
            'weights': {'dtype': weights, 'bytes': WEIGHT_BYTES[weights] * parameters(config, plan)}}


class Speed:
    """Times of all rows, in turns. Rows that run the same code share a side: `decodes_as` and `trains_as` say which.

    Args:
        ladder: whose settings say contexts, batch sizes, device and, in `shape`, another size of the models.
    """

    def __init__(self, ladder):
        s = self.s = ladder.s
        at_least(s, repeats=MIN_REPEATS)
        self.contexts, self.batches = numbers('contexts', s.contexts), numbers('batch_sizes', s.batch_sizes)
        self.dtype_name = ladder.settings(ladder.rows[ladder.first]).dtype
        self.decoders, self.trainers, self.decodes_as, self.trains_as = {}, {}, {}, {}
        for row in ladder.rows.values():
            config = dataclasses.replace(ladder.config(row, s.shape), kv_quant_train='')
            decoder = config, row.kv_dtype, row.weight_dtype
            key = self.decodes_as[row.name] = digest([dataclasses.asdict(config), *decoder[1:]])
            self.decoders[key] = decoder
            trained, settings = ladder.trained_config(row, s.shape), ladder.settings(row, s.shape)
            step = {name: getattr(settings, name) for name in STEP}
            key = self.trains_as[row.name] = digest([dataclasses.asdict(trained), step])
            self.trainers[key] = trained, settings

    @property
    def fingerprint(self) -> str:
        """Of what is measured; on which machine it was, the figures say."""
        return digest([sorted(self.decoders), sorted(self.trainers), self.contexts, self.batches, self.dtype_name, STEPS,
                       self.s.repeats, self.s.shape])

    def of(self, found: dict | None) -> dict | None:
        """Figures measured before, if they are of these models; None if they are not."""
        if not found or found.get('fingerprint') != self.fingerprint:
            return None
        return found | {'decodes_as': self.decodes_as, 'trains_as': self.trains_as}

    def is_whole(self, found: dict) -> bool:
        """Whether there is nothing left to measure; what failed is not tried again."""
        return len(found['cells']) == len(self._todo())

    def _todo(self) -> list[tuple]:
        """(kind, context, batch) of each cell."""
        by_context = [[*(('decode', context, batch) for batch in self.batches), ('prefill', context, 1)]
                      for context in self.contexts]
        return [*sum(by_context, []), ('train', 0, 0)]

    def measure(self, before: dict | None = None, save=lambda document: None) -> dict:
        """Every figure. What fails (a cache larger than the memory) is told in its place, under `errors`.

        before: what was measured already, on this machine, counts. save: is given the document after each measurement.
        """
        self.device = pick_device((self.s.devices or self.s.device).split(',')[0].strip())
        self.dtype = pick_dtype(self.dtype_name, self.device)
        facts = {'device': device_name(self.device), 'processor': processor(), 'threads': torch.get_num_threads(),
                 'torch': torch.__version__, 'dtype': str(self.dtype).removeprefix('torch.'), 'steps': STEPS,
                 'repeats': self.s.repeats, 'shape': self.s.shape}
        known = {}
        if before and all(before.get(name) == value for name, value in facts.items()):
            known = {(cell['kind'], cell['context'], cell['batch']): cell for cell in before['cells']}
        document = facts | {'fingerprint': self.fingerprint, 'decodes_as': self.decodes_as, 'trains_as': self.trains_as,
                            'cells': []}
        torch.manual_seed(0)
        self.models = {}
        todo = self._todo()
        for kind, context, batch in todo:
            if (kind, context, batch) not in known:
                found = getattr(self, f'_{kind}')(context, batch)
                known[kind, context, batch] = {'kind': kind, 'context': context, 'batch': batch} | found
                save(document | {'cells': [known[at] for at in todo if at in known]})
        document['cells'] = [known[at] for at in todo]
        return document

    def _turns(self, makers: dict, title: str) -> tuple[dict, dict]:
        """key -> what each round gave, and key -> what went wrong. makers: key -> function that makes the side."""
        sides, errors = {}, {}

        def guarded(key, run):
            """One side's failure leaves the others alone."""
            if key in errors:
                return None
            try:
                return run()
            except FAILURES as e:
                errors[key] = ' '.join(str(e).split()) or type(e).__name__
            sides[key] = None
            self._free()
            return None
        for key, make in makers.items():
            sides[key] = guarded(key, make)
        found = clock.alternate({key: lambda key=key: guarded(key, sides[key]) for key in makers}, self.s.repeats, title)
        return {key: each for key, each in found.items() if key not in errors}, errors

    def _free(self):
        """The memory of what is done with: captured steps hold their caches in cycles."""
        if self.device.type == 'cuda':
            gc.collect()
            torch.cuda.empty_cache()

    def _model(self, key) -> GPT:
        """The one to decode with, long enough for every context."""
        if key not in self.models:
            config, _, weight_dtype = self.decoders[key]
            longer = dataclasses.replace(config, block_size=max(config.block_size, max(self.contexts) + STEPS))
            model = self.models[key] = GPT(longer).to(self.device, self.dtype).eval()
            quantize_weights(model, weight_dtype)
        return self.models[key]

    def _decode(self, context, batch):
        """Caches are made and freed in every round, so that there is one at a time."""
        def make(key):
            model = self._model(key)

            def run():
                self._free()
                return DecodeRound(model, batch, context, context + STEPS, STEPS, self.decoders[key][1])()
            return run
        found, errors = self._turns({key: lambda key=key: make(key) for key in self.decoders},
                                    f'decoding at {context}, batch {batch}')
        return {'tpot_ms': {key: clock.summary(1000 * x for x in each) for key, each in found.items()}, 'errors': errors}

    def _prefill(self, context, batch):
        def make(key):
            model = self._model(key)
            return lambda: PrefillRound(model, batch, context, 0, self.decoders[key][1])()
        found, errors = self._turns({key: lambda key=key: make(key) for key in self.decoders}, f'prompts of {context}')
        return {'ttft_ms': {key: clock.summary(1000 * x for x in each) for key, each in found.items()}, 'errors': errors}

    def _train(self, *_):
        """Forward, backward and update, at the batch and length that each row trains with."""
        self.models = {}  # they have done their part
        self._free()
        found, errors = self._turns({key: lambda key=key: self._steps(key) for key in self.trainers}, 'training steps')
        cell = {'tokens_per_second': {}, 'memory': {}, 'errors': errors}
        for key, each in found.items():
            config, how = self.trainers[key]
            cell['tokens_per_second'][key] = clock.summary(how.batch_size * config.block_size / x for x in each)
            memory = Predictor(config, self.device).predict(recompute_of(how), how.batch_size, 0, how.chunked_loss, self.dtype,
                                                            optimizer=state_name(how)).as_dict()
            cell['memory'][key] = {name: memory[name] for name in ('activations', 'peak')}
        return cell

    def _steps(self, key) -> TrainingSteps:
        config, how = self.trainers[key]
        model = GPT(config).to(self.device)
        set_recompute(model, recompute_of(how))
        model.loss_fn = linear_cross_entropy if how.chunked_loss else None
        if how.int8_training:
            with contextlib.redirect_stdout(io.StringIO()):
                train_in_int8(model)
        return TrainingSteps(model, how.batch_size, config.block_size, self.dtype,
                             lambda model: make_optimizer(model, how, self.device.type))


def recompute_of(settings) -> str:
    """The policy that is timed: 'auto' would depend on the memory of the machine."""
    return 'none' if settings.recompute == 'auto' else settings.recompute
