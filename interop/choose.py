"""The plan at which an elastic model runs: the one of least validation loss within a KV budget."""
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.errors import UserError
from common.settings import COMMAND_LINE
from common.sizes import nice_bytes, parse_bytes
from engine.pages.cache import PAGE_SIZE
from engine.pages.page_table import page_nbytes, rows_nbytes
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

    @property
    def text(self) -> str:
        return nice_bytes(self.nbytes) + self.unit

    @property
    def unit(self) -> str:
        return '/token' if self.per_token else ''

    def needed(self, plan: Plan, kv_dtype: str, whole: Callable[[Plan], int]) -> float:
        """What a plan takes of this budget. whole: plan -> bytes of the program's whole cache."""
        if self.total:
            return whole(plan)
        length = self.length or plan.config.block_size
        return plan.nbytes(1, length, kv_dtype) / (length if self.per_token else 1)


def paged(plan: Plan, rows: int, tokens: int, kv_dtype: str) -> int:
    """Bytes of an engine's cache for `rows` sequences of `tokens` at a plan."""
    pages = rows * -(-tokens // PAGE_SIZE)
    return (rows_nbytes(plan.kv, rows, tokens, kv_dtype)
            + pages * page_nbytes(plan.kv, PAGE_SIZE, kv_dtype))


def choose(plans: list[Plan], losses: list[float], budget: Budget,
           needed: list[float]) -> tuple[int, str]:
    """Return the index of the plan of least loss within the budget, and a line about it. needed:
    what each plan takes of it. UserError: if the smallest plan takes more."""
    words = [f'{nice_bytes(n)}{budget.unit}, validation loss {loss:.4f} ({plan.name})'
             for n, loss, plan in zip(needed, losses, plans)]
    fitting = [i for i, n in enumerate(needed) if n <= budget.nbytes]
    if not fitting:
        least = min(range(len(plans)), key=needed.__getitem__)
        raise UserError(f'kv_budget={budget.text} is less than the smallest plan of the model '
                        f'takes here: {words[least]}')
    best = min(fitting, key=losses.__getitem__)
    better = [i for i, loss in enumerate(losses) if loss < losses[best]]
    larger = min(better, key=needed.__getitem__, default=None)
    more = '' if larger is None else f'; the next better one takes {words[larger]}'
    return best, f'KV plan within {budget.text}: {words[best]}{more}'


def plan_of(checkpoint: dict, base, s, kv_dtype: str, whole: Callable[[Plan], int],
            engine: bool = False) -> Plan:
    """Return the plan at which the settings run the model of a checkpoint: that of the memory
    fields on the command line, else the one within `s.kv_budget`, else the base. Prints a line
    about a choice.

    base: the model's config. whole: plan -> bytes of the program's whole cache, with K and V in
    kv_dtype. engine: it has an engine of many rows, which stays within a budget of its whole cache
    by having fewer pages. UserError: if the weights cannot make that plan, or it takes more.
    """
    budget = Budget.parse(s.kv_budget) if s.kv_budget else None
    plans, losses = of_checkpoint(checkpoint.get('plans'), base)
    fields = {name: value for name, value in s.given_fields().items()
              if name in MEMORY and s.given[name] == COMMAND_LINE}
    if budget and len(plans) > 1 and not fields:
        if None in losses:
            raise UserError('the plans of this model were never evaluated: train it further')
        needed = [budget.needed(plan, kv_dtype, whole) for plan in plans]
        best, line = choose(plans, losses, budget, needed)
        print(line)
        return plans[best]
    plan = made(fields, base) if len(plans) > 1 else plans[0]
    takes = budget.needed(plan, kv_dtype, whole) if budget else 0
    if budget and takes > budget.nbytes and not (engine and budget.total):
        raise UserError(f'kv_budget={budget.text} is less than the {nice_bytes(takes)}'
                        f'{budget.unit} that the model takes here')
    return plan


def at_plan(model: GPT, plan: Plan) -> GPT:
    """The model with a plan's memory, and its weights under that, which are the model's own where
    they are the same. It uses no random numbers."""
    if plan.config == model.config:
        return model
    with torch.device('meta'):
        smaller = GPT(plan.config)
    weights = convert_weights(model.state_dict(), model.config, plan.config)
    smaller.load_state_dict(weights, assign=True)
    smaller.transformer.wte.weight = smaller.lm_head.weight  # assigned apart
    return smaller
