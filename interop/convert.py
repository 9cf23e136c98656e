"""Convert a trained model to a smaller KV cache: fewer K/V heads, windows, shared caches.

    python train.py config/train_rope_mha.py                                   # any model
    python -m interop.convert out-rope-mha out-mqa --n_kv_head=1               # MQA
    python -m interop.convert out-rope-mha out-small config/train_mqa_local.py # a config's settings
    python -m interop.convert out-elastic out-64k --kv_budget=64KB             # of train.py --plans
    python train.py config/train_rope_mha.py --init_from=resume --out_dir=out-mqa --n_kv_head=1 \\
        --teacher=out-rope-mha --batch_size=2 --max_iters=160 --lr_decay_iters=160 \\
        --warmup_iters=10 --cooldown_iters=150

K/V heads are pooled by their mean; so are those of layers that share a cache. Sinks,
offset keys, tied K and V, and latents can be neither added nor removed. Settings of a config that a
conversion cannot change are printed, and stay as they were. The converted model is
worse until it is trained more: the GQA paper (Ainslie et al. 2023) needs 5% of the original steps.
Small batches, for many steps, and the model that was converted as the teacher help.
The new checkpoint is at iteration 0, without optimizer state. An elastic model (train.py --plans)
was trained at its plans; with --kv_budget, of one sequence of block_size tokens in --kv_dtype, its
best plan within that is converted.
"""
from common import startup  # noqa: F401  # isort: skip  (before torch is imported)
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import configurator
from common.errors import UserError
from common.gpt_config import GPTConfig, model_args
from common.settings import COMMAND_LINE, STORED_DTYPES, Model, key
from interop.choose import plan_of
from model import GPT
from training.checkpoint.adapt import keep_trained
from training.checkpoint.convert import MEMORY, convert_weights
from training.checkpoint.file import config_of, load_checkpoint, load_weights
from training.checkpoint.manager import CheckpointManager
from training.checkpoint.load_model import model_of


@dataclass(frozen=True)
class Settings(Model):
    kv_budget: str = key('', "of an elastic model: convert the best plan within it, as '64KB'")
    kv_dtype: str = key('bfloat16', 'with kv_budget: dtype of K and V', STORED_DTYPES)


def convert_checkpoint(source: Path, changes: dict) -> dict:
    """Return the checkpoint at `source` with `changes`, at iteration 0 and without optimizer state.
    UserError: if the checkpoint is unreadable or cannot be converted (`check_conversion`)."""
    saved = load_checkpoint(source)
    old = config_of(saved, source)
    try:
        new = dataclasses.replace(old, **changes)
    except ValueError as e:
        raise UserError(f'{source}: {e}') from e
    weights = model_of(saved, source).state_dict()  # checked
    model = GPT(new)
    load_weights(model, {'model': convert_weights(weights, old, new)}, source)
    return new_checkpoint(model, new, saved.get('config', {}) | changes,
                          tokens=saved.get('tokens', ''), meta=saved.get('meta'))


def within_budget(source: Path, s) -> dict:
    """Return the changes of the best plan within `s.kv_budget`. UserError: if the model has none
    that is smaller than itself, or the command line has memory fields, too."""
    saved = load_checkpoint(source)
    typed = [name for name in s.given_fields() if s.given[name] == COMMAND_LINE]
    if 'plans' not in saved or typed:
        why = f'it does not go with {", ".join(typed)}' if typed else f'{source} has no plans'
        raise UserError(f'kv_budget={s.kv_budget!r}: {why}')
    base = config_of(saved, source)
    plan = plan_of(saved, base, s, s.kv_dtype, lambda plan: plan.nbytes(kv_dtype=s.kv_dtype))
    if not plan.changes:
        raise UserError(f'kv_budget={s.kv_budget!r}: the model itself is the best plan within it')
    return plan.changes


def new_checkpoint(model: GPT, config: GPTConfig, settings: dict, **more) -> dict:
    """A checkpoint at iteration 0 without optimizer state. settings: train.py's, but defaults."""
    return {'model': model.state_dict(), 'optimizer': {'state': {}, 'param_groups': []},
            'model_args': model_args(config), 'iter_num': 0, 'best_val_loss': torch.tensor(1e9),
            'holds_best': False, 'config': settings, **more}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    wants_help = {'-h', '--help'} & set(argv)
    s = configurator.parse(Settings, ['--help'] if wants_help else argv[2:], usage=__doc__)
    if len(argv) < 2 or argv[0].startswith('-') or argv[1].startswith('-'):
        raise UserError('give the folder of the checkpoint and one for the new checkpoint, then '
                        'the changes: python -m interop.convert out out-mqa --n_kv_head=1')
    source, target = Path(argv[0], 'ckpt.pt'), Path(argv[1], 'ckpt.pt')
    if target.exists():
        raise UserError(f'{target} is there already: delete it or give another folder')
    # a config file may also have settings that a conversion cannot change
    changes = {name: value for name, value in s.given_fields().items()
               if name in (*MEMORY, 'dropout') or s.given[name] == COMMAND_LINE}
    if s.kv_budget:
        changes = within_budget(source, s)
    if not changes:
        raise UserError(f'nothing to change: give one or more of {", ".join(MEMORY)}')
    checkpoint = convert_checkpoint(source, changes)
    CheckpointManager(target.parent).save(checkpoint)
    keep_trained(s, config_of(checkpoint, target))
    print(f'{target}: ' + ', '.join(f'{name} = {value!r}' for name, value in changes.items()))


if __name__ == '__main__':
    configurator.run_program(main)
