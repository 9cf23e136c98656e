"""The KV plans of an elastic model: read from settings, or chosen from the base's bytes."""
import ast
import contextlib
import dataclasses
import functools
import itertools
import math
import warnings
from dataclasses import dataclass

from common.errors import UserError, shown
from common.gpt_config import GPTConfig
from common.sizes import nice_bytes
from kv.plan import KVPlan, plan_kv
from training.checkpoint.convert import MEMORY, check_conversion

AUTO = 'auto'
KINDS = {f.name: type(f.default) for f in dataclasses.fields(GPTConfig)}
# What the weights of a shared slot are of those of its layers, in checkpoints. Older ones took the
# first layer's: their losses of such plans are of other weights.
SHARED = 'mean'
SMALLEST, N_AUTO = 64, 6  # 'auto' goes down to 1/64 of the base's bytes in that many plans


@dataclass(frozen=True)
class Plan:
    """A smaller memory of a model. changes: {field of GPTConfig: value}, {} for the base itself."""
    changes: dict
    config: GPTConfig

    @functools.cached_property
    def kv(self) -> KVPlan:
        with warnings.catch_warnings(action='ignore'):  # the base's model has warned
            return plan_kv(self.config)

    @property
    def name(self) -> str:
        return ', '.join(f'{name}={value}' for name, value in self.changes.items()) or 'base'

    def nbytes(self, rows: int = 1, tokens: int = 0, kv_dtype: str = 'bfloat16') -> int:
        """Bytes of the cache; of one sequence of block_size tokens by default."""
        return self.kv.nbytes(rows, tokens or self.config.block_size, kv_dtype)


def plans_of(text: str, base: GPTConfig) -> list[Plan]:
    """Return the base and the plans in `text`, from the largest to the smallest in bytes at
    block_size; only the base if `text` is empty.

    text: 'field=value, ...; ...', a plan between semicolons, of the fields in `MEMORY`; or 'auto'.
    Raises UserError, naming the plan, if the base's weights do not make it or it is given twice.
    """
    changes = auto(base) if text == AUTO else [_parsed(part) for part in text.split(';')
                                                if part.strip()]
    plans = [made(each, base) for each in [{}, *changes]]
    check_different(plans)
    return [plans[0], *sorted(plans[1:], key=Plan.nbytes, reverse=True)]


def of_checkpoint(saved, base: GPTConfig) -> tuple[list[Plan], list[float | None]]:
    """The plans in a checkpoint, the base first, and their validation losses, None before they were
    evaluated; without plans only the base. UserError: if they are not what a run saves."""
    if saved is None:
        return [made({}, base)], [None]
    entries = saved if isinstance(saved, list) and saved else [None]
    for entry in entries:
        if not (isinstance(entry, dict) and isinstance(entry.get('changes'), dict)
                and (entry.get('loss') is None or isinstance(entry['loss'], float))):
            raise UserError(f'the plans of the checkpoint are invalid: {shown(entry)}')
    if entries[0]['changes']:
        raise UserError('the plans of the checkpoint are invalid: the first is not the base')
    plans = [made(entry['changes'], base) for entry in entries]
    check_different(plans)
    losses = [entry.get('loss') if entry.get('shared') == SHARED
              or not entry['changes'].keys() & {'kv_share', 'share_global_kv'} else None
              for entry in entries]
    return plans, [math.inf if loss != loss else loss for loss in losses]  # NaN is the worst


def check_different(plans: list[Plan]) -> None:
    for a, b in itertools.combinations(plans, 2):
        if a.config == b.config:
            raise UserError(f'plans: {b.name!r} is the same as {a.name!r}')


def made(changes: dict, base: GPTConfig) -> Plan:
    """The plan with these changes of the base. UserError: if its weights cannot make it."""
    try:
        if unknown := sorted(changes.keys() - {*MEMORY}):
            raise UserError(f'{", ".join(unknown)} cannot change; allowed are {", ".join(MEMORY)}')
        for name, value in changes.items():
            if type(value) is not KINDS[name]:
                raise UserError(f'{name}={shown(value)}: it takes {KINDS[name].__name__}')
        with warnings.catch_warnings(action='ignore'):
            config = dataclasses.replace(base, **changes)
            check_conversion(base, config)
    except UserError as e:
        raise UserError(f'plan {str(changes)!r}: {e}') from e
    return Plan(changes, config)


def _parsed(text: str) -> dict:
    """'a=1, b=LG' -> {'a': 1, 'b': 'LG'}. A piece without '=' goes on with the value before it, as
    in window_pattern=16,16,0."""
    changes, name = {}, None
    for piece in text.split(','):
        left, equals, right = piece.partition('=')
        if not equals and name is None:
            raise UserError(f'plans: {text.strip()!r}: a plan is written field=value, ...')
        name = left.strip() if equals else name
        if equals and name in changes:
            raise UserError(f'plans: {text.strip()!r} has {name} twice')
        changes[name] = right.strip() if equals else f'{changes[name]},{piece.strip()}'
    for name, value in changes.items():
        if KINDS.get(name, str) is not str:
            with contextlib.suppress(ValueError, SyntaxError):  # `made` refuses the text
                number = ast.literal_eval(value)
                changes[name] = float(number) if KINDS[name] is type(number) is float else number
    return changes


def auto(base: GPTConfig) -> list[dict]:
    """Changes of `N_AUTO` plans whose bytes come nearest to equal ratios from the base's down to
    1/`SMALLEST` of them, of all that its weights make with fewer K/V heads, windows of an eighth of
    the context in two of three layers or more, caches shared by two or three layers, and one cache
    for all global layers."""
    heads = [n for n in range(1, max(base.kv_heads)) if max(base.kv_heads) % n == 0]
    window = max(8, base.block_size // 8)
    choices = dict(n_kv_head=heads, layer_pattern=['LLG', 'LLLG', 'LLLLLG'], window_size=[window],
                   kv_share=['AAB', 'AABC', 'AABBBC'], share_global_kv=[True])
    plans = {}
    for on in itertools.product(*[[None, *values] for values in choices.values()]):
        given = {name: value for name, value in zip(choices, on) if value is not None}
        pattern, share = (given.get(name) for name in ('layer_pattern', 'kv_share'))
        local = 'L' in (pattern or base.layer_pattern)
        if (bool(pattern) != ('window_size' in given) or not local and len(given) > 1
                or share and len(share) != len(pattern or base.layer_pattern)
                or pattern and len(pattern) > base.n_layer
                or 'share_global_kv' in given and not local):
            continue
        changes = {name: value for name, value in given.items() if value != getattr(base, name)}
        try:
            plan = made(changes, base)
        except UserError:
            continue
        plans.setdefault(plan.nbytes(), plan)
    full = Plan({}, base).nbytes()
    smaller = {nbytes: plan for nbytes, plan in plans.items() if nbytes < full}
    if not smaller:
        raise UserError("plans='auto': this model has no smaller memory; give the plans")
    wanted = [full / SMALLEST ** (i / N_AUTO) for i in range(1, N_AUTO + 1)]
    nearest = {min(smaller, key=lambda n: abs(n / goal + goal / n)) for goal in wanted}
    return [smaller[n].changes for n in sorted(nearest, reverse=True)]


def table(plans: list[Plan], losses=()) -> list[str]:
    """Lines about the plans: bytes at block_size in bfloat16, how many times smaller than the
    base, validation loss if known, name."""
    full, lines = plans[0].nbytes(), []
    for i, plan in enumerate(plans):
        n = plan.nbytes()
        known = losses and losses[i] is not None
        loss = f'  val loss {losses[i]:.4f}' if known else ''
        lines.append(f'{nice_bytes(n):>9} {full / n:6.1f}x smaller{loss}  {plan.name}')
    return lines
