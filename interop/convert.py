"""Take a trained model to one that remembers less: fewer K/V heads, windows, shared caches; then train it a little more.

    python train.py config/train_rope_mha.py                                          # any model, to begin with
    python -m interop.convert out-rope-mha out-mqa --n_kv_head=1                      # MQA
    python -m interop.convert out-rope-mha out-small config/train_mqa_local.py        # the memory settings of a config
    python train.py config/train_rope_mha.py --init_from=resume --out_dir=out-mqa --n_kv_head=1 --max_iters=70

K and V of several heads become one by their mean; layers that share a cache use the K and V of the first of them. The
converted model is worse at first: the GQA paper (Ainslie et al. 2023) recovers it with 5% of the steps of the training
before. The new checkpoint stands at iteration 0, with no optimizer state, for a schedule of its own.
"""
from config import missing  # noqa: F401  # isort: skip  (before packages that may be missing)
import dataclasses
import sys
from pathlib import Path

import torch

import configurator
from config.errors import UserError
from config.gpt_config import GPTConfig, model_args
from config.schema import MODEL
from kv.plan import plan_kv
from model import GPT
from training.checkpoint import config_of, load_checkpoint, load_weights
from training.checkpoint_manager import CheckpointManager

# what a conversion may change; everything else stays as it was trained
MEMORY = ('n_kv_head', 'layer_pattern', 'window_size', 'kv_share', 'share_global_kv', 'rope_theta', 'rope_theta_global',
          'kv_quant_train')


def convert_weights(weights: dict, old: GPTConfig, new: GPTConfig) -> dict:
    """The weights of `old` as those of `new`, which differs in the settings of MEMORY.

    Args:
        weights: name -> tensor, nanoGPT's names; left as they are.
    Raises:
        UserError: another setting differs, K/V heads cannot be pooled evenly, or a layer is to own K and V that it has none of.
    """
    check_conversion(old, new)
    before, after = plan_kv(old), plan_kv(new)
    D, out = before.head_dim, dict(weights)
    for was, now in zip(before.layers, after.layers):
        prefix = f'transformer.h.{now.index}.attn.'
        for name in ('c_attn.weight', 'c_attn.bias'):
            rows = weights.get(prefix + name)
            if rows is not None and was.owns:
                q, k, v = rows.split([old.n_head * D, before.n_kv_head * D, before.n_kv_head * D])
                kv = [_pooled(x, before.n_kv_head, after.n_kv_head) for x in (k, v)] if now.owns else []
                out[prefix + name] = torch.cat([q, *kv])
        if not now.owns:
            out.pop(prefix + 'k_norm.weight', None)
    return out


def _pooled(rows: torch.Tensor, n_before: int, n_after: int) -> torch.Tensor:
    """(n_before * D, ...) -> (n_after * D, ...): heads that become one by their mean."""
    D = rows.size(0) // n_before
    return rows.view(n_after, n_before // n_after, D, *rows.shape[1:]).mean(1).flatten(0, 1)


def check_conversion(old: GPTConfig, new: GPTConfig) -> None:
    """Raises UserError where the weights of `old` cannot become those of `new`."""
    for f in dataclasses.fields(GPTConfig):
        if f.name not in MEMORY and f.name != 'dropout' and getattr(old, f.name) != getattr(new, f.name):
            raise UserError(f'{f.name}={getattr(new, f.name)!r}, but the weights have {f.name}={getattr(old, f.name)!r}: a '
                            f'conversion can change {", ".join(MEMORY)}')
    before, after = plan_kv(old), plan_kv(new)
    if before.n_kv_head % after.n_kv_head:
        raise UserError(f'n_kv_head={after.n_kv_head}: the {before.n_kv_head} K/V heads of the weights cannot be pooled into '
                        'so many evenly')
    for was, now in zip(before.layers, after.layers):
        if now.owns and not was.owns:
            raise UserError(f'layer {now.index} is to have K and V of its own, but was trained to use those of layer '
                            f'{before.slots[was.slot].owner}: sharing can be added, not undone')


def convert_checkpoint(source: Path, changes: dict) -> dict:
    """The checkpoint at `source` as one of a model with `changes`, at iteration 0 and without optimizer state.

    Raises:
        UserError: no readable checkpoint, or as `convert_weights`.
    """
    saved = load_checkpoint(source)
    old = config_of(saved, source)
    try:
        new = dataclasses.replace(old, **changes)
    except ValueError as e:
        raise UserError(f'{source}: {e}') from e
    model = GPT(old)
    load_weights(model, saved, source)  # says what is wrong with them
    converted = {'model': convert_weights(model.state_dict(), old, new)}
    model = GPT(new)
    load_weights(model, converted, source)
    config = vars(configurator.parse('train', [], echo=False)) | saved.get('config', {})
    optimizer = model.configure_optimizers(config['weight_decay'], config['learning_rate'],
                                           (config['beta1'], config['beta2']), 'cpu')
    return {'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'model_args': model_args(new), 'iter_num': 0,
            'best_val_loss': torch.tensor(1e9), 'config': config | changes, 'tokens': saved.get('tokens', '')}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    asks = {'-h', '--help'} & set(argv)
    s = configurator.parse('convert', ['--help'] if asks else argv[2:], usage=__doc__)
    if len(argv) < 2 or argv[0].startswith('-') or argv[1].startswith('-'):
        raise UserError('give the folder of the checkpoint and one for the new checkpoint, then what changes: '
                        'python -m interop.convert out out-mqa --n_kv_head=1')
    source, target = Path(argv[0]) / 'ckpt.pt', Path(argv[1])
    if (target / 'ckpt.pt').exists():
        raise UserError(f"{target / 'ckpt.pt'} is there already: delete it or give another folder")
    changes = {key.name: getattr(s, key.name) for key in MODEL if key.name in s.given and key.name in MEMORY}
    if not changes:
        raise UserError(f'nothing to change: give one or more of {", ".join(MEMORY)}')
    checkpoint = convert_checkpoint(source, changes)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f'{target} cannot be made: {e}') from e
    CheckpointManager(target, 1).save(checkpoint | {'holds_best': False}, print)
    print(f'{target / "ckpt.pt"}: ' + ', '.join(f'{name} = {value!r}' for name, value in changes.items()))


if __name__ == '__main__':
    configurator.run_program(main)
