"""The plan at which an elastic model runs: the one of least validation loss within a KV budget."""
import re
from dataclasses import dataclass

import torch

from common.errors import UserError
from common.gpt_config import GPTConfig
from common.settings import COMMAND_LINE
from common.sizes import nice_bytes, parse_bytes
from model import GPT
from training.checkpoint.convert import MEMORY, convert_weights
from training.elastic.plans import Plan, made, of_checkpoint

FORM = re.compile(r'(?P<size>[^/@]+)(?P<token>/token)?(?:@(?P<length>[1-9]\d{0,8}))?')


@dataclass(frozen=True)
class Budget:
    """Bytes of K/V: of the program's whole cache, as '64KB'; of one sequence of T tokens, as
    '64KB@512'; or of each of its tokens, as '96/token' (T = block_size) or '96/token@512'."""
    nbytes: int
    per_token: bool = False
    length: int = 0

    @classmethod
    def parse(cls, text: str) -> 'Budget':
        """UserError: if the text has none of these forms."""
        match = FORM.fullmatch(text.replace(' ', ''))
        if not match:
            raise UserError(f"kv_budget={text!r}: give '64KB', '64KB@512' or '96/token@512'")
        return cls(parse_bytes(match['size'], 'kv_budget'), bool(match['token']),
                   int(match['length'] or 0))

    @property
    def total(self) -> int:
        """Bytes of the program's whole cache; 0 if the budget is of a sequence."""
        return 0 if self.per_token or self.length else self.nbytes

    def needed(self, plan: Plan, rows: int, tokens: int, kv_dtype: str) -> float:
        """What a plan takes of this budget in a program with `rows` sequences of `tokens`."""
        if self.total:
            return plan.nbytes(tokens, kv_dtype, rows)
        length = self.length or plan.config.block_size
        return plan.nbytes(length, kv_dtype) / (length if self.per_token else 1)


def choose(plans: list[Plan], losses: list[float], budget: Budget, rows: int, tokens: int,
           kv_dtype: str) -> tuple[int, str]:
    """Return the index of the plan of least loss within the budget, and a line about it. UserError:
    if the smallest plan is larger."""
    needed = [budget.needed(plan, rows, tokens, kv_dtype) for plan in plans]
    unit = '/token' if budget.per_token else ''
    words = [f'{nice_bytes(n)}{unit}, validation loss {loss:.4f} ({plan.name})'
             for n, loss, plan in zip(needed, losses, plans)]
    fitting = [i for i, n in enumerate(needed) if n <= budget.nbytes]
    if not fitting:
        least = min(range(len(plans)), key=needed.__getitem__)
        raise UserError(f'kv_budget={nice_bytes(budget.nbytes)}{unit} is less than the '
                        f'{nice_bytes(needed[least])}{unit} that the smallest plan of the model '
                        f'takes ({plans[least].name})')
    best = min(fitting, key=losses.__getitem__)
    better = [i for i, loss in enumerate(losses) if loss < losses[best]]
    larger = min(better, key=needed.__getitem__, default=None)
    more = '' if larger is None else f'; the next better one takes {words[larger]}'
    return best, f'KV plan within {nice_bytes(budget.nbytes)}{unit}: {words[best]}{more}'


def plan_of(checkpoint: dict, base: GPTConfig, s, size, kv_dtype: str) -> Plan:
    """Return the plan at which the settings run the model of a checkpoint: that of the memory
    fields on the command line, else the one within `s.kv_budget`, else the base. Prints a line
    about a choice.

    size: () -> the (rows, tokens) of the cache that the program allocates. kv_dtype: of K and V.
    UserError: if the weights cannot make that plan, or none fits.
    """
    saved = checkpoint.get('plans')
    fields = {name: value for name, value in s.given_fields().items()
              if name in MEMORY and s.given[name] == COMMAND_LINE}
    if saved and fields:
        return made(fields, base)
    if not saved or not s.kv_budget:
        return made({}, base)
    plans, losses = of_checkpoint(saved, base), [each['loss'] for each in saved]
    if not all(isinstance(loss, float) for loss in losses):
        raise UserError('the plans of this model were never evaluated: train it further')
    best, line = choose(plans, losses, Budget.parse(s.kv_budget), *size(), kv_dtype)
    print(line)
    return plans[best]


def check_budget(s, config: GPTConfig, rows: int, tokens: int, kv_dtype: str) -> None:
    """Raise UserError if the cache of a model takes more than `s.kv_budget`."""
    if s.kv_budget:
        choose([made({}, config)], [0.0], Budget.parse(s.kv_budget), rows, tokens, kv_dtype)


def at_plan(model: GPT, plan: Plan) -> GPT:
    """The model with a plan's memory, and its weights under that. It uses no random numbers."""
    if plan.config == model.config:
        return model
    with torch.random.fork_rng([]):
        smaller = GPT(plan.config).to(model.dtype)
    smaller.load_state_dict(convert_weights(model.state_dict(), model.config, plan.config))
    return smaller
