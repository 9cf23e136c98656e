"""Write a trained model as a Hugging Face folder, which transformers, and what is built on it, can use without this project.

    python -m interop.export out-mqa-local DEST
    python -m interop.export out-vanilla DEST --resume_from=ckpt_best.pt --dtype=bfloat16
    python -m interop.import_hf DEST out-again                       # and back, to the last bit

Then, anywhere that has transformers:

    model = AutoModelForCausalLM.from_pretrained(DEST, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(DEST, trust_remote_code=True)

DEST gets config.json, generation_config.json, the weights (safetensors), the tokenizer and a copy
of interop/modeling_nanokv.py, which trust_remote_code runs: read it. A vanilla model becomes a
plain GPT2LMHeadModel, which needs no such file.
"""
from config import missing  # noqa: F401  # isort: skip  (before packages that may be missing)
import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch

import model as model_py
from config.errors import UserError
from config.gpt_config import GPTConfig, model_args
from configurator import run_program
from data.datasets import DATA_ROOT
from data.tokenfiles import read_meta
from data.tokenizer import GPT2Tokenizer, load_tokenizer
from interop.huggingface import GELUS, TRANSPOSED
from interop.tokenizer_files import save_tokenizer
from kv.plan import plan_kv
from training.checkpoint import config_of, load_weights, tokens_id
from training.shelf import checkpoint_in, load_to_resume

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
MODELING = Path(__file__).with_name('modeling_nanokv.py')


def is_gpt2(config: GPTConfig) -> bool:
    """Whether transformers' own GPT2LMHeadModel is this model."""
    return (config.pos_embedding == 'learned' and not config.qk_norm and not config.kv_quant_train
            and config.resolved_head_dim * config.n_head == config.n_embd and plan_kv(config) == plan_kv(config).vanilla())


def as_gpt2(weights: dict, config: GPTConfig) -> tuple[dict, dict]:
    """config.json's keys, and the weights under transformers' names; biases that the model has not are zeros there."""
    keys = {name: getattr(config, name) for name in ('vocab_size', 'n_embd', 'n_layer', 'n_head')}
    keys |= {'n_positions': config.block_size, 'n_inner': config.mlp_hidden or None, 'layer_norm_epsilon': 1e-5,
            'activation_function': next(name for name, form in GELUS.items() if form == config.gelu)}
    keys |= {name: config.dropout for name in ('resid_pdrop', 'embd_pdrop', 'attn_pdrop')}
    out = {}
    for name, x in weights.items():
        out[name] = x.t().contiguous() if name.endswith(TRANSPOSED) else x
        bias = name.removesuffix('weight') + 'bias'
        if name.endswith('weight') and bias not in weights and ('.h.' in name or '.ln_f.' in name):
            out[bias] = torch.zeros(x.size(0), dtype=x.dtype)
    return keys, out


def hf_model(model, dtype: torch.dtype = torch.float32, end: int | None = None, source: dict | None = None):
    """The model as one of transformers' classes, or as ours. end: the token that ends a text. source: what is noted of where it
    is from.

    Raises:
        UserError: transformers is missing, or windows of one token.
    """
    try:
        import transformers

        from interop.modeling_nanokv import NanoKVConfig, NanoKVForCausalLM
    except ImportError as e:
        raise UserError(f"exporting needs {e.name or 'a newer transformers'}: pip install -e '.[export]'") from e
    config, weights = model.config, model.state_dict()
    if any(layer.window == 1 for layer in model.plan.layers):
        raise UserError('window_size=1 cannot be exported: caches of transformers do not keep such windows right')
    notes = {'nanokv_source': source or {}, 'dtype': dtype, 'bos_token_id': end, 'eos_token_id': end}
    if is_gpt2(config):
        keys, weights = as_gpt2(weights, config)
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**keys, nanokv=model_args(config), **notes))
    else:
        files = {f'AutoModel{kind}': 'modeling_nanokv.NanoKVForCausalLM' for kind in ('', 'ForCausalLM')}
        made = NanoKVForCausalLM(NanoKVConfig(nanokv=model_args(config), auto_map={
            'AutoConfig': 'modeling_nanokv.NanoKVConfig', **files}, **notes))
    made.load_state_dict(weights)
    return made.to(dtype).eval()


def export(source: Path, target: Path, dtype: str = 'float32', max_shard_size: str = '5GB',
           data_root: Path = DATA_ROOT) -> None:
    """Write the checkpoint at `source` as the folder `target`, which must not be there; whole, or not at all.

    Raises:
        UserError: no readable checkpoint, its alphabet is not known, a package is missing, or it cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f'{target} is there already: delete it or give another folder')
    saved = load_to_resume(source)
    config = config_of(saved, source)
    model = model_py.GPT(config)
    load_weights(model, saved, source)
    dataset = saved['config'].get('dataset', '')
    tokenizer = tokenizer_of(dataset, config.vocab_size, saved.get('tokens', ''), data_root)
    source_of = {'dataset': dataset, 'tokens': saved.get('tokens', ''), 'iter_num': saved['iter_num']}
    end = tokenizer.encoding.eot_token if isinstance(tokenizer, GPT2Tokenizer) else None
    made = hf_model(model, DTYPES[dtype], end, source_of)
    folder = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f'.{target.name}.'))
        made.save_pretrained(folder, max_shard_size=max_shard_size)
        save_tokenizer(tokenizer, folder, 0 if config.pos_embedding == 'rope' else config.block_size)
        if not is_gpt2(config):
            shutil.copy(MODELING, folder)
        for path in folder.iterdir():
            path.chmod(0o644)
        folder.chmod(0o755)  # a temporary one is for its owner alone
        if target.exists():
            target.rmdir()
        folder.rename(target)
    except OSError as e:
        raise UserError(f'{target} cannot be written: {e.strerror or e}') from e
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def tokenizer_of(dataset: str, vocab_size: int, known: str, data_root: Path):
    """Of the data set that the model was trained on.

    Raises:
        UserError: data/ does not have it, or not as it was then.
    """
    meta = read_meta(data_root / dataset) if dataset and not set(dataset) & set('/\\\0') else None
    if (meta is None and vocab_size < 50257) or known not in ('', tokens_id(meta)):
        raise UserError(f'what the {vocab_size} tokens of the model stand for is not known: data/{dataset}/meta.pkl is '
                        f'missing, or not that of its training; prepare it as it was (python data/{dataset}/prepare.py)')
    if meta is not None and 'stoi' not in meta:
        raise UserError(f"data/{dataset}/meta.pkl does not say what the model's tokens stand for")
    return load_tokenizer(meta)


def main(argv=None):
    parser = argparse.ArgumentParser(prog='python -m interop.export', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out_dir', help='folder of the checkpoint')
    parser.add_argument('dest', type=Path, help='folder to write')
    parser.add_argument('--resume_from', default='ckpt.pt', help='which checkpoint in out_dir (%(default)s)')
    parser.add_argument('--dtype', default='float32', choices=DTYPES, help='of the weights (%(default)s, as they are)')
    parser.add_argument('--max_shard_size', default='5GB', help='of a file of weights (%(default)s)')
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    source = checkpoint_in(args.out_dir, args.resume_from)
    export(source, args.dest, args.dtype, args.max_shard_size, DATA_ROOT)
    kind = json.loads((args.dest / 'config.json').read_text(encoding='utf-8'))['architectures'][0]
    print(f'{args.dest}: {kind}, ' + ', '.join(sorted(path.name for path in args.dest.iterdir())))


if __name__ == '__main__':
    # transformers imports torchao where it is installed, which prints warnings; not needed here
    sys.modules['torchao'] = None
    run_program(main)
