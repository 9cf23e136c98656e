"""The KV budget of a config, before a step is trained; no torch needed.

    python -m kv config/train_mqa_local.py --max_seq_len=8192
    # how many conversations fit:
    python -m kv config/train_gpt2_mqa_local.py --max_seq_len=8192 --budget=1GB --kv_dtype=int8
    python -m kv out-mqa-local       # a trained model, by its folder or checkpoint (torch reads it)
    # anybody's model, by the folder of its config.json or its name on the hub (docs/accounting.md):
    python -m kv google/gemma-3-4b-it --max_seq_len=32768 --budget=24GB --like=nanokv
    python -m kv --n_kv_head=1 --layer_pattern=LLLLLG --window_size=256 --pos_embedding=rope
    python -m kv config/train_gpt2_mqa_local.py --svg=plan.svg    # draws it, too
    python -m kv --help
"""
import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import configurator
from common.errors import UserError, at_least
from common.gpt_config import GPTConfig, unknown_field
from common.settings import MODEL, STORED_DTYPES, Data, Json, Model, key
from common.sizes import nice_bytes, parse_bytes
from data.datasets import DATA_ROOT
from data.recall.tasks import task_of
from data.tokenfiles import is_prepared, read_meta
from kv.counts import parameters, prefill_flops
from kv.plan import plan_kv
from kv.report import REPORTED_DTYPES, account
from kv.svg import plan_svg

OF_OTHERS = 'like', 'page_size', 'step_tokens'
GPT2_VOCAB = 50304  # padded, as nanoGPT does
WEIGHT_BYTES = {'bfloat16': 2, 'float32': 4, 'int8': 1}


@dataclass(frozen=True)
class Settings(Json, Data, Model):  # of a data set, only the vocabulary counts
    max_seq_len: int = key(0, 'sequence length; 0 = block_size (models of Hugging Face: 4,096)')
    batch: int = key(1, 'sequences in the cache')
    kv_dtype: str = key('bfloat16', 'dtype of the slot table', STORED_DTYPES, others=('auto',))
    budget: str = key('', "KV memory, as '1GB' or '512MiB': also report how many sequences fit")
    svg: str = key('', 'also draw the plan of one sequence, to this .svg file')
    like: str = key('', "models of Hugging Face: 'nanokv' = with its plan, too", ('', 'nanokv'))
    page_size: int = key(16, 'models of Hugging Face: positions in a page of vLLM (its block_size)')
    step_tokens: int = key(8192, "models of Hugging Face: vLLM's max_num_batched_tokens")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    takes_value = {f'--{name}' for name, key in configurator.keys_of(Settings).items()
                   if key.type is not bool}
    positional = [arg for before, arg in zip(['', *argv], argv)
                  if not arg.startswith('-') and before not in takes_value]
    others = [arg for arg in positional if is_config_of_others(arg)]
    saved = others or [arg for arg in positional if arg.endswith('.pt') or Path(arg).is_dir()]
    if len(saved) > 1:
        raise UserError(f"one model at a time, not {' and '.join(saved)}")
    rest = [arg for arg in argv if arg not in saved]
    s = configurator.parse(Settings, rest, usage=__doc__, echo=False)
    refused = {'svg', *MODEL} if others else {*OF_OTHERS}
    for name in sorted(s.given.keys() & refused):
        why = f'the shape of {others[0]} is in its config' if others else (
            'is for models of Hugging Face, by the folder of a config.json or a name on the hub')
        raise UserError(f'{name}={getattr(s, name)!r}: {why}')
    document = describe(others[0], s) if others else describe_plan(saved, s)
    if s.json:
        print(json.dumps(document))


def describe_plan(saved: list[str], s) -> dict:
    """Print the report of a model of ours, and return its numbers by kv_dtype. saved: a checkpoint
    whose config the settings may change, or none."""
    from kv.console import output, print_table
    from kv.tables import dtype_table, print_report
    config, plans = saved_config(Path(saved[0])) if saved else (
        GPTConfig(vocab_size=vocabulary(s)), [])
    config = dataclasses.replace(config, **s.given_fields())
    plan, T = plan_kv(config), s.max_seq_len or config.block_size
    at_least(s, max_seq_len=0, batch=1)

    if unknown := unknown_field(config, 'count'):
        print(f'Note: parameters of {unknown} are not counted: kv.weights does not know them')
    n = parameters(config, plan)
    sizes = {dtype: n * size for dtype, size in WEIGHT_BYTES.items()}
    flops, untrimmed = (prefill_flops(config, plan, T, trim=trim) / T for trim in (True, False))
    weights = {'parameters': n, 'bytes': sizes, 'tokens': T, 'prefill_flops_per_token': flops,
               'prefill_flops_per_token_untrimmed': untrimmed}
    document = {dtype: account(plan, s.batch, T, dtype) | {'weights': weights}
                for dtype in REPORTED_DTYPES}
    if s.budget:
        budget = parse_bytes(s.budget)
        for dtype, numbers in document.items():
            numbers |= {'budget': budget, 'fit': budget // plan.nbytes(1, T, dtype),
                        'fit_vanilla': budget // plan.vanilla().nbytes(1, T, dtype)}
    if s.svg:
        try:
            Path(s.svg).write_text(plan_svg(plan, T, s.kv_dtype), encoding='utf-8')
        except OSError as e:
            raise UserError(f'svg={s.svg!r} cannot be written: {e.strerror or e}') from e

    asked, console = document[s.kv_dtype], output()
    latents = f', latents of {config.kv_latent} on global layers' if config.kv_latent else ''
    print_report(asked, console,
                 f'KV plan in {s.kv_dtype}: {config.n_layer} layers, {plan.n_head} heads '
                 f'({plan.heads_of_kv} for K/V{latents}) of {plan.head_dim}, T={T}, '
                 f"W={plan.windows or '-'}")
    print_table(console, dtype_table(document), f'\nevery kv_dtype, {s.batch} x {T:,} tokens')
    print(f'\n{n:,} parameters: '
          + ', '.join(f'{nice_bytes(size)} in {dtype}' for dtype, size in sizes.items())
          + f'\nprefill of {T:,} tokens: {flops / 1e6:,.1f} MFLOPs a token, '
          f'{untrimmed / flops:.2f}x fewer than if every layer computed every token')
    if plans:
        print('\nits plans (train.py --plans), in bytes at block_size:', *plans, sep='\n  ')
    if config.pos_embedding == 'learned' and T > config.block_size:
        print(f'Note: learned positions end at block_size={config.block_size:,}: a cache of this '
              'model holds no more; these are the bytes of its shape with --pos_embedding=rope')
    if s.budget:
        print(f"{s.budget} of KV holds {asked['fit']:,} conversations of {T:,} tokens in "
              f"{s.kv_dtype}; vanilla GPT-2 of this shape {asked['fit_vanilla']:,}")
    return document


def vocabulary(s) -> int:
    """Return the vocabulary size of the data set in the settings; GPT-2's padded one if the data
    set has GPT-2's tokens, if none is given, or with a note if it is not prepared."""
    folder = DATA_ROOT / s.dataset
    if 'dataset' not in s.given:
        return GPT2_VOCAB
    if task := task_of(s):
        return task.vocab_size
    if meta := read_meta(folder):
        return meta['vocab_size']
    if not is_prepared(folder):
        print(f'Note: data set {s.dataset!r} is not prepared, so its vocabulary is unknown; '
              f"assumed are GPT-2's {GPT2_VOCAB:,} tokens")
    return GPT2_VOCAB


def describe(where: str, s) -> dict:
    """Print the account of somebody's model, and return it."""
    from kv.console import output
    from kv.models.account import account as account_of
    from kv.models.config import read_config
    from kv.models.report import print_account
    found = account_of(read_config(where), s.batch, s.max_seq_len or 4096, s.kv_dtype,
                       budget=parse_bytes(s.budget) if s.budget else 0,
                       **{name: getattr(s, name) for name in OF_OTHERS})
    print_account(found, output())
    return found


def is_config_of_others(arg: str) -> bool:
    """Whether it is a config.json, a folder with one and without a checkpoint, or on the hub."""
    path = Path(arg)
    if path.is_dir():
        return (path / 'config.json').is_file() and not (path / 'ckpt.pt').exists()
    on_hub = arg.count('/') == 1 and not path.exists() and not path.parent.exists()
    return arg.endswith('.json') or (on_hub and not arg.endswith(('.py', '.pt')))


def saved_config(path: Path) -> tuple[GPTConfig, list[str]]:
    """The config in a checkpoint or a folder's ckpt.pt, without reading its weights, and lines
    about its plans. Needs torch. UserError: if there is no checkpoint, or it is damaged."""
    from training.checkpoint.file import config_of, load_checkpoint, read_file
    from training.elastic.plans import of_checkpoint, table
    path = path / 'ckpt.pt' if path.is_dir() else path
    try:
        saved = read_file(path, mmap=True)
        config = config_of(saved, path)
    except Exception:  # cannot be memory-mapped; if damaged, the loader says so
        saved = load_checkpoint(path)
        config = config_of(saved, path)
    plans, losses = of_checkpoint(saved.get('plans'), config)
    return config, table(plans, losses) if len(plans) > 1 else []


if __name__ == '__main__':
    # transformers imports torchao where it is installed, which prints warnings; not needed here
    sys.modules['torchao'] = None
    os.environ |= {'TRANSFORMERS_VERBOSITY': 'error', 'HF_HUB_VERBOSITY': 'error',
                   'HF_HUB_DISABLE_PROGRESS_BARS': '1'}
    configurator.run_program(main)
