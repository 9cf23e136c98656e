"""Loading GPT-2 and exported models from Hugging Face folders (config.json and safetensors).

Names and shapes are nanoGPT's, with two differences: OpenAI stored matrices for `x @ w` (Conv1D,
input rows first), so four per block are transposed; and its GELU is the tanh form. Pickles are
never read. https://github.com/karpathy/nanoGPT (model.py)
"""
import dataclasses
import importlib
from pathlib import Path

import torch

from common import files
from common.errors import UserError, shown
from common.gpt_config import GPTConfig
from common.settings import GPT2_FOLDER, GPT2_TYPES
from data.download import from_hub
from kv.plan import LOCAL, plan_kv
from kv.weights import EMBEDDING, HEAD, MASKS, TRANSPOSED
from model import GPT
from training.checkpoint.file import check_dtype, config_of, load_weights
from training.checkpoint.load_model import check_weights

GELUS = {'gelu_new': 'tanh', 'gelu_pytorch_tanh': 'tanh', 'gelu': 'exact'}
# Defaults of transformers' GPT2Config: sizes, and options that have only one value in our model
SIZES = {'n_layer': 12, 'n_head': 12, 'n_embd': 768, 'n_positions': 1024, 'vocab_size': 50257}
ONLY = {'model_type': 'gpt2', 'layer_norm_epsilon': 1e-5, 'scale_attn_weights': True,
        'add_cross_attention': False, 'scale_attn_by_inverse_layer_idx': False,
        'reorder_and_upcast_attn': False}


def noted_source(source: str) -> tuple[str, str]:
    """The data set and `tokens_id` recorded in a folder by interop.export, '' if absent."""
    path = Path(source) / 'config.json'
    noted = read_json(path).get('nanokv_source') if path.exists() else None
    noted = noted if isinstance(noted, dict) else {}
    dataset, tokens = (noted.get(name, '') for name in ('dataset', 'tokens'))
    for value in (dataset, tokens):
        if not isinstance(value, str):
            raise UserError(f'{path}: nanokv_source has {shown(value)}, which should be text')
    return dataset, tokens


def from_pretrained(source: str, override_args: dict | None = None) -> GPT:
    """A GPT with the weights of `source`, on the CPU, in float32 and training mode, like nanoGPT's.

    The config is read from the file, with dropout 0 as in nanoGPT. Files are mapped into memory, so
    peak memory is about one model. Unlike nanoGPT's, it uses no random numbers.

    source: 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl', or a folder with config.json and
        *.safetensors, all of which are read. A folder named gpt2 is './gpt2'.
    override_args: only 'dropout' is allowed.
    UserError (a ValueError): if the source does not exist, the hub is unreachable, a package is
    missing, files are damaged, options unsupported, or tensors missing or unexpected.
    """
    overrides = dict(override_args or {})
    if overrides.keys() - {'dropout'}:
        raise UserError(f'{overrides}: all but dropout is fixed by the pretrained weights')
    GPTConfig(**overrides)  # checks the range before anything is downloaded
    _import('safetensors')
    if source not in GPT2_TYPES and not Path(source).is_dir():
        raise UserError(f'{source!r} is neither {", ".join(map(repr, GPT2_TYPES))} nor a folder: '
                        f'give one of these, or {GPT2_FOLDER}')
    print(f'loading weights from pretrained gpt: {source}')
    folder = Path(source)
    if source in GPT2_TYPES:
        _import('huggingface_hub')
        folder = from_hub(f'openai-community/{source}', 'config.json').parent
        from_hub(f'openai-community/{source}', 'model.safetensors')
    raw = read_json(folder / 'config.json')
    config = _read_config(raw, folder / 'config.json')
    print(f'forcing vocab_size={config.vocab_size}, block_size={config.block_size}, '
          f'bias={config.bias}')
    if overrides:
        print(f"overriding dropout rate to {overrides['dropout']}")
    config = dataclasses.replace(config, **overrides)
    untied = raw.get('tie_word_embeddings') is False
    tensors = _read_tensors(folder)
    if raw.get('model_type') == 'nanokv':
        return _load(config, tensors, folder, untied, transposed=())
    if not config.bias:  # GPT2LMHeadModel always has biases; those of an exported model are zero
        biases = [name for name in tensors if name.endswith('.bias')]
        nonzero = [name for name in biases if tensors[name].any()]
        if nonzero:
            print(f'Note: {folder} was exported without biases, but now has some ({nonzero[0]}): '
                  'bias=True')
            config = dataclasses.replace(config, bias=True)
        else:
            tensors = {name: x for name, x in tensors.items() if name not in biases}
    return _load(config, tensors, folder, untied, TRANSPOSED)


def _import(name):
    try:
        importlib.import_module(name)
    except ImportError as e:
        raise UserError(f'loading GPT-2 needs the {name} package: pip install '
                        'safetensors huggingface_hub (or pip install -e .[hf])') from e


def _reason(error):
    """The error's type and first sentence (the rest is request ids and similar)."""
    lines = str(error).strip().splitlines() or ['']
    return f"{type(error).__name__}: {lines[0].split('. ')[0][:150]}"


def read_json(path):
    """Return the JSON object in the file at `path`. UserError: if there is none."""
    try:
        raw = files.read_json(path)
    except FileNotFoundError as e:
        raise UserError(f'no {path.name} in {path.parent}: the folder must be {GPT2_FOLDER}') from e
    except (OSError, ValueError) as e:
        raise UserError(f'{path} cannot be read as JSON: {_reason(e)}') from e
    if not isinstance(raw, dict):
        raise UserError(f'{path} holds a JSON {type(raw).__name__}, not an object')
    return raw


def _read_tensors(folder):
    """Return {name: tensor} of all *.safetensors, mapped from the files. Names are without the
    prefix `transformer.`, which only GPT2LMHeadModel has. Omits masks."""
    from safetensors.torch import load_file
    tensors, paths = {}, sorted(folder.glob('*.safetensors'))
    if not paths:  # pickles are not read: they can run code
        raise UserError(f'no *.safetensors in {folder}: must be {GPT2_FOLDER}, as written by '
                        "transformers' model.save_pretrained(folder, safe_serialization=True)")
    for path in paths:
        if not path.is_file():  # opening a FIFO would wait forever
            raise UserError(f'{path} is not a regular file')
        try:
            stored = load_file(path)
        except Exception as e:  # SafetensorError, OSError
            raise UserError(f'{path} is damaged, or not a safetensors file ({_reason(e)}): '
                            'download or save it again') from e
        for full_name, x in stored.items():
            name = full_name.removeprefix('transformer.')
            if name in tensors:
                raise UserError(f'{path} has {full_name} a second time')
            if not MASKS.fullmatch(name):
                tensors[name] = x
    return tensors


def _read_config(raw, path):
    if 'nanokv' not in raw:
        return _gpt2_config(raw, path)
    if not isinstance(raw['nanokv'], dict):
        raise UserError(f'{path}: nanokv={shown(raw["nanokv"])} is not an object')
    config = config_of({'model_args': raw['nanokv']}, path)
    config = dataclasses.replace(config, dropout=0.0)
    if raw.get('model_type') != 'nanokv':  # exported as GPT-2
        return dataclasses.replace(_gpt2_config(raw, path), bias=config.bias)
    for name, value in derived_keys(config).items():
        if raw.get(name, value) != value:
            raise UserError(f'{path}: {name}={shown(raw[name])}, but by nanokv it is '
                            f'{shown(value)}')
    return config


def derived_keys(config: GPTConfig) -> dict:
    """The keys of an exported model's config.json that follow from `nanokv`, under transformers'
    names. `kv_owners`: the layer whose K and V each layer reads."""
    plan = plan_kv(config)
    local = [layer.kind == LOCAL for layer in plan.layers]
    return {
        'vocab_size': config.vocab_size, 'hidden_size': config.n_embd,
        'num_hidden_layers': config.n_layer, 'num_attention_heads': config.n_head,
        'num_key_value_heads': plan.n_kv_head, 'head_dim': plan.head_dim,
        'intermediate_size': config.resolved_mlp_hidden,
        'layer_types': ['sliding_attention' if x else 'full_attention' for x in local],
        'sliding_window': config.window_size if any(local) else None,
        'kv_sharing_modes': ['store' if layer.owns else 'reuse' for layer in plan.layers],
        'kv_owners': [plan.slots[layer.slot].owner for layer in plan.layers],
        'max_position_embeddings': config.block_size, 'tie_word_embeddings': True}


def _gpt2_config(raw, path):
    for name, value in ONLY.items():
        if raw.get(name, value) != value or (name not in raw and name == 'model_type'):
            raise UserError(f'{path}: {name}={shown(raw.get(name))} is not supported, '
                            f'only {value!r}')
    sizes = {name: raw.get(name, default) for name, default in SIZES.items()}
    n_inner = raw.get('n_inner')
    for name, value in dict(sizes, n_inner=4 if n_inner is None else n_inner).items():
        if type(value) is not int or value < 1:
            raise UserError(f'{path}: {name}={shown(value)}: must be a whole number, at least 1')
    activation = raw.get('activation_function', 'gelu_new')
    if not isinstance(activation, str) or activation not in GELUS:
        raise UserError(f'{path}: activation_function={shown(activation)}: '
                        f'allowed are {", ".join(map(repr, GELUS))}')
    mlp_hidden = 0 if n_inner in (None, 4 * sizes['n_embd']) else n_inner
    try:
        return GPTConfig(block_size=sizes.pop('n_positions'), **sizes, bias=True,
                         gelu=GELUS[activation], mlp_hidden=mlp_hidden)
    except UserError as e:
        raise UserError(f'{path}: {e}') from e


def _load(config, tensors, folder, untied, transposed):
    """Return the model with these tensors. untied: the file must have an lm_head.
    transposed: suffixes of the names of matrices stored with input rows first."""
    weights = {}
    for name, x in tensors.items():
        check_dtype(folder, name, x.dtype)
        x = x.mT if name.endswith(transposed) and x.dim() > 1 else x
        weights[name if name == HEAD else f'transformer.{name}'] = x
    if not untied and EMBEDDING in weights:
        weights.setdefault(HEAD, weights[EMBEDDING])
    check_weights(config, {'model': weights}, folder)
    with torch.device('meta'):  # allocates nothing and uses no random numbers
        model = GPT(config)
    model.to_empty(device='cpu')
    model.transformer.wte.weight = model.lm_head.weight  # to_empty unties the two
    load_weights(model, {'model': weights}, folder)
    if not torch.equal(weights[HEAD].float(), weights[EMBEDDING].float()):
        raise UserError(f'{folder}: lm_head.weight differs from wte.weight; this model has one '
                        'matrix for both (tie_word_embeddings)')
    return model
