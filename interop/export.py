"""Write a trained model as a Hugging Face folder, which transformers can use without this project.

    python -m interop.export out-mqa-local DEST
    python -m interop.export out-vanilla DEST --resume_from=ckpt_best.pt --dtype=bfloat16
    python -m interop.import_hf DEST out-again                       # and back, bit for bit

DEST gets config.json, generation_config.json, the weights (safetensors), the tokenizer and copies
of interop/modeling_nanokv.py and (as configuration_nanokv.py) interop/nanokv_vllm/config.py, which
trust_remote_code runs: read them. A vanilla model becomes a plain GPT2LMHeadModel, which needs no
such files.
"""
from common import startup  # noqa: F401  # isort: skip  (before torch is imported)
import dataclasses
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from common.errors import UserError
from common.gpt_config import NANOGPT_FIELDS, GPTConfig, model_args, unknown_field
from configurator import run_program
from data.datasets import DATA_ROOT
from data.making.script import Arguments
from interop.huggingface import GELUS, derived_keys
from interop.load import tokenizer_of
from interop.tokenizer_files import save_tokenizer
from kv.plan import plan_kv
from kv.weights import TRANSPOSED, shapes
from training.checkpoint.manager import checkpoint_in, load_to_resume
from training.checkpoint.load_model import model_of

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
MODELING = {'configuration_nanokv.py': Path(__file__).parent / 'nanokv_vllm' / 'config.py',
            'modeling_nanokv.py': Path(__file__).with_name('modeling_nanokv.py')}
# fields that GPT2Config expresses; all others must be at their default
GPT2_FIELDS = {*NANOGPT_FIELDS, 'mlp_hidden', 'gelu'}
AUTO_MAP = {'AutoConfig': 'configuration_nanokv.NanoKVConfig',
            'AutoModel': 'modeling_nanokv.NanoKVForCausalLM',
            'AutoModelForCausalLM': 'modeling_nanokv.NanoKVForCausalLM'}


def is_gpt2(config: GPTConfig) -> bool:
    """Whether this model can be expressed as transformers' own GPT2LMHeadModel."""
    return set(model_args(config)) <= GPT2_FIELDS and config.gelu != 'relu2'


def as_gpt2(weights: dict, config: GPTConfig) -> tuple[dict, dict]:
    """The keys of GPT2Config, and GPT2LMHeadModel's tensors with zeros for missing biases."""
    keys = {name: getattr(config, name) for name in ('vocab_size', 'n_embd', 'n_layer', 'n_head')}
    activation = next(name for name, form in GELUS.items() if form == config.gelu)
    keys |= {'n_positions': config.block_size, 'n_inner': config.mlp_hidden or None,
             'layer_norm_epsilon': 1e-5, 'activation_function': activation}
    keys |= dict.fromkeys(('resid_pdrop', 'embd_pdrop', 'attn_pdrop'), config.dropout)
    with_biases = shapes(dataclasses.replace(config, bias=True), plan_kv(config))
    out = {name: torch.zeros(shape) for name, shape in with_biases.items()} | weights
    return keys, {name: x.t().contiguous() if name.endswith(TRANSPOSED) else x
                  for name, x in out.items()}


def hf_model(model, dtype: torch.dtype = torch.float32, end: int | None = None,
             source: dict | None = None):
    """Return the model as a transformers class or as NanoKVForCausalLM.

    end: the token that ends a text. source: recorded in config.json as `nanokv_source`.
    UserError: if transformers is missing, or does not support a field or a window of one token."""
    try:
        import transformers

        from interop.modeling_nanokv import NanoKVForCausalLM
        from interop.nanokv_vllm.config import NanoKVConfig
    except ImportError as e:
        package = e.name or 'a newer transformers'
        raise UserError(f"exporting needs {package}: pip install -e '.[export]'") from e
    config, weights = model.config, model.state_dict()
    if unknown := unknown_field(config, 'export'):
        raise UserError(f'{unknown} is not supported by interop.export')
    if any(layer.window == 1 for layer in model.plan.layers):
        raise UserError('window_size=1 cannot be exported: transformers needs 2 or more')
    notes = {'nanokv': model_args(config), 'nanokv_source': source or {}, 'dtype': dtype,
             'bos_token_id': end, 'eos_token_id': end}
    if is_gpt2(config):
        keys, weights = as_gpt2(weights, config)
        exported = transformers.GPT2LMHeadModel(transformers.GPT2Config(**keys, **notes))
    else:
        keys = derived_keys(config) | {'auto_map': AUTO_MAP}
        exported = NanoKVForCausalLM(NanoKVConfig(**keys, **notes))
    exported.load_state_dict(weights)
    return exported.to(dtype).eval()


def export(source: Path, target: Path, dtype: str = 'float32', max_shard_size: str = '5GB',
           data_root: Path = DATA_ROOT) -> None:
    """Write the checkpoint at `source` to the folder `target`; on an error, nothing is left there.
    UserError: if the checkpoint is unreadable, its alphabet is unknown, a package is missing, or
    `target` exists or cannot be written."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f'{target} is there already: delete it or give another folder')
    saved = load_to_resume(source)
    model = model_of(saved, source)
    config = model.config
    dataset, tokens = saved['config'].get('dataset', ''), saved.get('tokens', '')
    tokenizer = tokenizer_of(dataset, config.vocab_size, tokens, data_root, saved.get('meta'))
    noted = {'dataset': dataset, 'tokens': tokens, 'iter_num': saved['iter_num']}
    exported = hf_model(model, DTYPES[dtype], tokenizer.end_of_text, noted)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f'.{target.name}.') as temp:
            folder = Path(temp) / target.name
            exported.save_pretrained(folder, max_shard_size=max_shard_size)
            longest = 0 if config.pos_embedding == 'rope' else config.block_size
            save_tokenizer(tokenizer, folder, longest)
            if not is_gpt2(config):
                for name, path in MODELING.items():
                    shutil.copyfile(path, folder / name)
            for path in folder.iterdir():
                path.chmod(0o644)
            if target.exists():
                target.rmdir()
            folder.rename(target)
    except OSError as e:
        raise UserError(f'{target} cannot be written: {e.strerror or e}') from e


def main(argv=None):
    parser = Arguments(__doc__, prog='python -m interop.export')
    add = parser.add_argument
    add('out_dir', help='folder of the checkpoint')
    add('dest', type=Path, help='folder to write')
    add('--resume_from', default='ckpt.pt', help='which checkpoint in out_dir (%(default)s)')
    add('--dtype', default='float32', choices=DTYPES, help='of the weights (%(default)s, exact)')
    add('--max_shard_size', default='5GB', help='of a file of weights (%(default)s)')
    args = parser.parse_args(argv)
    source = checkpoint_in(args.out_dir, args.resume_from)
    export(source, args.dest, args.dtype, args.max_shard_size, DATA_ROOT)
    print(f'{args.dest}:', ', '.join(sorted(path.name for path in args.dest.iterdir())))


if __name__ == '__main__':
    # transformers imports torchao where it is installed, which prints warnings; not needed here
    sys.modules['torchao'] = None
    run_program(main)
