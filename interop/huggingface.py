"""GPT-2 as Hugging Face keeps it (config.json and safetensors), loaded into our model; pickles are never read.

    model = from_pretrained('gpt2', dict(dropout=0.1))   # OpenAI's weights, from the hub or its local cache
    model = from_pretrained('path/to/folder')            # what transformers' `save_pretrained` wrote, or interop.export

The names and the shapes are nanoGPT's, but for two things: OpenAI wrote its matrices for `x @ w` (Conv1D, input rows
first), so four per block are transposed; and its GELU is the tanh form. https://github.com/karpathy/nanoGPT (model.py)
"""
import contextlib
import dataclasses
import json
import re
from pathlib import Path

import torch

from config.errors import UserError
from config.gpt_config import GPTConfig
from config.schema import GPT2_FOLDER, GPT2_TYPES
from kv.plan import plan_kv
from model import GPT

OWNER = 'openai-community'  # of the repositories on the hub: openai-community/gpt2, ...
TRANSPOSED = ('attn.c_attn.weight', 'attn.c_proj.weight', 'mlp.c_fc.weight', 'mlp.c_proj.weight')
# causal masks, which old versions of transformers saved as if they were weights
MASKS = re.compile(r'h\.\d+\.attn\.(masked_)?bias')
GELUS = {'gelu_new': 'tanh', 'gelu_pytorch_tanh': 'tanh', 'gelu': 'exact'}
DTYPES = ('F64', 'F32', 'BF16', 'F16')
# transformers' GPT2Config: what an absent key means; the sizes, and the options of which our model has only this value
SIZES = {'n_layer': 12, 'n_head': 12, 'n_embd': 768, 'n_positions': 1024, 'vocab_size': 50257}
ONLY = {'model_type': 'gpt2', 'layer_norm_epsilon': 1e-5, 'scale_attn_weights': True, 'add_cross_attention': False,
        'scale_attn_by_inverse_layer_idx': False, 'reorder_and_upcast_attn': False}


def is_source(name: str) -> bool:
    """Whether `from_pretrained(name)` has something to try: a GPT-2 of the hub, or an existing folder."""
    return name in GPT2_TYPES or Path(name).is_dir()


def noted_source(source: str) -> tuple[str, str]:
    """The name of the data set and the `tokens_id` that interop.export noted in a folder; '' where it did not."""
    path = Path(source) / 'config.json'
    noted = read_json(path).get('nanokv_source') if path.is_file() else None
    return tuple(str(noted.get(name, '')) if isinstance(noted, dict) else '' for name in ('dataset', 'tokens'))


def from_pretrained(source: str, override_args: dict | None = None) -> GPT:
    """A GPT with the weights of `source`, on the CPU in float32 (whatever the file has), in training mode as nanoGPT's.

    Its config is the file's: vocab_size, block_size (`n_positions`), mlp_hidden (`n_inner`) and gelu
    (`activation_function`), bias=True, and dropout=0 as in nanoGPT, whatever the file says. Weights are read tensor by
    tensor, so memory stays near one model and one tensor. Unlike nanoGPT's, it draws no random numbers: no weights are
    initialized just to be replaced, and what a seed gives does not depend on what was loaded.

    Args:
        source: 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl', or a folder with config.json and model.safetensors (or
            its shards with model.safetensors.index.json). A folder that is itself named gpt2 is './gpt2'.
        override_args: 'dropout' and 'gelu' may be given.
    Raises:
        UserError (a ValueError): no such source, the hub cannot be reached, a package is missing, damaged files, options
            that this model does not have, missing, unknown or misshapen tensors. One line, naming the file.
    """
    overrides = dict(override_args or {})
    _check_overrides(overrides)
    safe_open = _import('safetensors').safe_open
    if not is_source(source):
        raise UserError(f'{source!r} is neither {", ".join(map(repr, GPT2_TYPES))} nor a folder: give one of these, or '
                        + GPT2_FOLDER)
    print(f'loading weights from pretrained gpt: {source}')
    folder = _download(source) if source in GPT2_TYPES else Path(source)
    path = folder / 'config.json'
    raw = read_json(path)
    own = _own_config(raw, path) if 'nanokv' in raw else None
    ours = own is not None and raw.get('model_type') == 'nanokv'
    config = own if ours else _config(raw, path)
    if own is not None and not ours:  # GPT2LMHeadModel, which always has biases and may have got more tokens since
        own = dataclasses.replace(own, vocab_size=config.vocab_size)
        if _as_gpt2(own) != _as_gpt2(config):
            raise UserError(f'{path}: its nanokv fields contradict the others')
        config = dataclasses.replace(own, bias=True)
    print(f'forcing vocab_size={config.vocab_size}, block_size={config.block_size}, bias={(own or config).bias}')
    if 'dropout' in overrides:
        print(f"overriding dropout rate to {overrides['dropout']}")
    if 'gelu' in overrides:
        print(f"overriding gelu to {overrides['gelu']}")
    config = dataclasses.replace(config, **overrides)
    with contextlib.ExitStack() as files:
        tensors = _open(folder, safe_open, files)
        model = _load(config, tensors, folder, raw.get('tie_word_embeddings') is False, () if ours else TRANSPOSED)
    return model if own is None or own.bias else _without_biases(model, folder)


def _as_gpt2(config) -> tuple:
    """What transformers' GPT2Config says of a model, however it was said to us."""
    return (plan_kv(config), config.resolved_mlp_hidden, config.gelu, config.pos_embedding, config.block_size, config.n_embd,
            config.qk_norm, config.kv_quant_train)


def _check_overrides(overrides):
    for name, value in overrides.items():
        if name not in ('dropout', 'gelu'):
            raise UserError(f'{name}={value!r}: a pretrained model is what its weights say; only dropout and gelu can be '
                            'overridden')
    if not isinstance(overrides.get('dropout', 0.0), (int, float)):
        raise UserError(f"dropout={overrides['dropout']!r}: must be a number, at least 0 and below 1")
    GPTConfig(**overrides)  # their ranges, before anything is fetched


def _import(name):
    try:
        return __import__(name)
    except ImportError as e:
        raise UserError(f'loading GPT-2 needs the {name} package: pip install safetensors huggingface_hub '
                        '(or pip install -e .[hf])') from e


# -- files ------------------------------------------------------------------------------------------------------------

def _download(model_type):
    """The folder in the hub's local cache that holds the two files of `model_type`, fetched where they are not there."""
    hub = _import('huggingface_hub')
    repo = f'{OWNER}/{model_type}'
    for name in ('config.json', 'model.safetensors'):
        try:
            try:  # first what is here: these files do not change, and being offline would cost a minute of retries
                path = hub.hf_hub_download(repo, name, local_files_only=True)
            except Exception:
                path = hub.hf_hub_download(repo, name)
        except Exception as e:  # network libraries raise nearly anything
            raise UserError(f'{name} of {repo} cannot be had from the Hugging Face hub ({_reason(e.__cause__ or e)}): check '
                            'the connection; or, without one, save the model elsewhere with transformers\' save_pretrained '
                            'and give that folder in place of its name') from e
    return Path(path).parent


def _reason(error):
    """Its kind and its first sentence (the rest is about request numbers and tokens)."""
    lines = str(error).strip().splitlines() or ['']
    return f"{type(error).__name__}: {lines[0].split('. ')[0][:150]}"


def read_json(path):
    try:
        raw = json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError as e:
        raise UserError(f'no {path.name} in {path.parent}: the folder must be {GPT2_FOLDER}') from e
    except (OSError, ValueError, RecursionError) as e:  # ValueError: bad JSON, or no UTF-8
        raise UserError(f'{path} cannot be read as JSON: {_reason(e)}') from e
    if not isinstance(raw, dict):
        raise UserError(f'{path} holds a JSON {type(raw).__name__}, not an object')
    return raw


def _open(folder, safe_open, files):
    """name -> (open safetensors file, its own name of the tensor, its path), of the weights in `folder`.

    Names are without the `transformer.` that GPT2LMHeadModel puts in front and GPT2Model does not; masks are left out.
    """
    tensors = {}
    for path in _weight_files(folder):
        try:
            file = files.enter_context(safe_open(path, framework='pt'))
        except Exception as e:  # SafetensorError, OSError
            raise UserError(f'{path} is damaged, or no safetensors file ({_reason(e)}): download or save it again') from e
        for full_name in file.keys():
            name = full_name.removeprefix('transformer.')
            if name in tensors:
                raise UserError(f'{path} has {full_name} a second time (it is in {tensors[name][2].name} too)')
            if not MASKS.fullmatch(name):
                tensors[name] = file, full_name, path
    return tensors


def _weight_files(folder):
    single, index = folder / 'model.safetensors', folder / 'model.safetensors.index.json'
    if single.exists():
        return [single]
    if index.exists():
        weight_map = read_json(index).get('weight_map')
        names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
        if not names or any(Path(name).name != name for name in names):
            raise UserError(f'{index} has no usable weight_map: it must map names of tensors to files beside it')
        for name in names:
            if not (folder / name).is_file():
                raise UserError(f'{folder / name} is missing, which {index.name} names: copy it there')
        return [folder / name for name in names]
    pickles = sorted(path.name for path in folder.glob('*.bin'))
    if pickles:
        raise UserError(f"{folder} has weights only as a pickle ({pickles[0]}), which can run code when read: convert it "
                        'with transformers\' model.save_pretrained(folder, safe_serialization=True)')
    raise UserError(f'no model.safetensors (or model.safetensors.index.json) in {folder}: the folder must be {GPT2_FOLDER}')


# -- config.json ------------------------------------------------------------------------------------------------------

def _config(raw, path):
    """The GPTConfig that config.json describes."""
    for name, value in ONLY.items():
        if raw.get(name, value) != value or (name not in raw and name == 'model_type'):
            raise UserError(f'{path}: {name}={raw.get(name)!r} is not supported, only {value!r}')
    sizes = {name: raw.get(name, default) for name, default in SIZES.items()}
    n_inner = raw.get('n_inner')
    for name, value in dict(sizes, n_inner=4 if n_inner is None else n_inner).items():
        if type(value) is not int or value < 1:
            raise UserError(f'{path}: {name}={value!r} is not a whole number of at least 1')
    activation = raw.get('activation_function', 'gelu_new')
    if not isinstance(activation, str) or activation not in GELUS:
        raise UserError(f'{path}: activation_function={activation!r}: allowed are {", ".join(map(repr, GELUS))}')
    n_embd = sizes['n_embd']
    try:
        return GPTConfig(block_size=sizes.pop('n_positions'), **sizes, bias=True, gelu=GELUS[activation],
                         mlp_hidden=0 if n_inner in (None, 4 * n_embd) else n_inner)
    except UserError as e:
        raise UserError(f'{path}: {e}') from e


def _own_config(raw, path):
    """The GPTConfig that interop.export noted, without dropout."""
    from interop.fields import checked
    try:
        return dataclasses.replace(checked(raw['nanokv'], raw if raw.get('model_type') == 'nanokv' else {}), dropout=0.0)
    except (TypeError, ValueError) as e:
        raise UserError(f'{path.parent}: {e}') from e


# -- weights ----------------------------------------------------------------------------------------------------------

def _load(config, tensors, folder, untied, transposed):
    """The model of `config` with `tensors` (see `_open`) in it. untied: the file must have an lm_head of its own. transposed:
    ends of the names of matrices that have their input rows first there."""
    with torch.device('meta'):  # no storage yet, and so no random numbers: GPT-2 XL's would be 1.6 billion
        model = GPT(config)
    wanted = {name.removeprefix('transformer.'): p for name, p in model.named_parameters()}  # the tied weight once, as wte
    _check_tensors(wanted, tensors, folder, untied, transposed)
    model.to_empty(device='cpu')
    model.transformer.wte.weight = model.lm_head.weight  # to_empty parts the two
    with torch.no_grad():
        for name, p in model.named_parameters():
            x = _read(tensors[name.removeprefix('transformer.')])
            p.copy_(x.t() if name.endswith(transposed) else x)  # into float32, whatever x has
    if 'lm_head.weight' in tensors and not torch.equal(_read(tensors['lm_head.weight']).float(), model.lm_head.weight):
        raise UserError(f"{tensors['lm_head.weight'][2]}: lm_head.weight differs from wte.weight; this model has one matrix "
                        'for both (tie_word_embeddings)')
    return model


def _without_biases(model, folder):
    """The same model without its biases, which are zeros (a GPT2LMHeadModel has to have them), unless it was trained there."""
    weights = model.state_dict()
    some = [name for name, x in weights.items() if name.endswith('.bias') and x.any()]
    if some:
        print(f'Note: {folder} was exported without biases, and has some by now ({some[0]}): bias=True')
        return model
    with torch.device('meta'):
        plain = GPT(dataclasses.replace(model.config, bias=False))
    plain.load_state_dict({name: x for name, x in weights.items() if not name.endswith('.bias')}, assign=True)
    plain.transformer.wte.weight = plain.lm_head.weight
    return plain


def _check_tensors(wanted, tensors, folder, untied, transposed):
    """Names, shapes and dtypes, before anything large is allocated."""
    head = {'lm_head.weight'}
    for problem, names in (('lack', (wanted.keys() | head if untied else wanted.keys()) - tensors.keys()),
                           ('have unknown', tensors.keys() - wanted.keys() - head)):
        if names:
            raise UserError(f'the weights in {folder} {problem} {sorted(names)[0]} ({len(names)} such in all): they are not '
                            'those of the GPT-2 language model in its config.json')
    for name, (file, full_name, path) in tensors.items():
        view = file.get_slice(full_name)
        shape = tuple(wanted['wte.weight' if name == 'lm_head.weight' else name].shape)
        shape = shape[::-1] if name.endswith(transposed) else shape
        if tuple(view.get_shape()) != shape:
            raise UserError(f'{path}: {full_name} is {tuple(view.get_shape())}, config.json says {shape}')
        if view.get_dtype() not in DTYPES:
            raise UserError(f'{path}: {full_name} is stored as {view.get_dtype()}: allowed are {", ".join(DTYPES)}')


def _read(tensor):
    file, full_name, path = tensor
    try:
        return file.get_tensor(full_name)
    except Exception as e:  # the disk, or a file that was cut while it was read
        raise UserError(f'{path}: {full_name} cannot be read: {_reason(e)}') from e
