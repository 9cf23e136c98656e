"""The KV budget of a config, before a step is trained; no torch needed.

    python -m kv config/train_mqa_local.py --max_seq_len=8192
    python -m kv config/train_gpt2_mqa_local.py --max_seq_len=8192 --budget=1GB --kv_dtype=int8  # how many conversations fit
    python -m kv --n_kv_head=1 --layer_pattern=LLLLLG --window_size=256 --pos_embedding=rope
    python -m kv --help
"""
import json

import configurator
from config.errors import UserError
from config.gpt_config import GPTConfig
from config.schema import MODEL
from config.sizes import parse_bytes
from kv.plan import plan_kv
from kv.report import REPORTED_DTYPES, account, dtype_table, fitting, print_report


def main(argv=None):
    from rich.console import Console
    s = configurator.parse('kv', argv, usage=__doc__, echo=False)
    config = GPTConfig(**{key.name: getattr(s, key.name) for key in MODEL})
    plan, max_seq_len = plan_kv(config), s.max_seq_len or config.block_size
    for name, value in (('max_seq_len', max_seq_len), ('batch', s.batch)):
        if value < 1:
            raise UserError(f'{name}={value}: must be at least 1')
    if config.pos_embedding == 'learned' and max_seq_len > config.block_size:
        raise UserError(f"max_seq_len={max_seq_len} is more than block_size={config.block_size}, for which "
                        "pos_embedding='learned' has positions (vanilla is compared at any length with --pos_embedding=rope)")
    budget = parse_bytes(s.budget) if s.budget else 0
    console = Console()
    shape = (f'{config.n_layer} layers, {plan.n_head} heads ({plan.n_kv_head} for K/V) of {plan.head_dim}, '
             f'T={max_seq_len}, W={config.window_size or "-"}')
    print_report(account(plan, s.batch, max_seq_len, s.kv_dtype), console, f'KV plan in {s.kv_dtype}: {shape}')
    console.print(dtype_table(plan, s.batch, max_seq_len, budget))
    if budget:
        ours, vanilla = (fitting(p, budget, max_seq_len, s.kv_dtype) for p in (plan, plan.vanilla()))
        console.print(f'{s.budget} of KV holds {ours:,} conversations of {max_seq_len:,} tokens in {s.kv_dtype}; '
                      f'vanilla GPT-2 of this shape {vanilla:,}', highlight=False, soft_wrap=True)
    if s.json:
        print(json.dumps(as_json(plan, s.batch, max_seq_len, budget)))


def as_json(plan, batch, max_seq_len, budget) -> dict:
    """{kv_dtype: figures}, each with `fit` and `fit_vanilla` where a budget was given."""
    document = {}
    for dtype in REPORTED_DTYPES:
        document[dtype] = account(plan, batch, max_seq_len, dtype)
        if budget:
            document[dtype] |= {'budget': budget, 'fit': fitting(plan, budget, max_seq_len, dtype),
                                'fit_vanilla': fitting(plan.vanilla(), budget, max_seq_len, dtype)}
    return document


if __name__ == '__main__':
    configurator.run_program(main)
