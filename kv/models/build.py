"""The memory of a model that transformers can build: it is built without data, reads three tokens,
and its cache says by itself what each layer stores.

Torch's meta device has shapes and dtypes but no data, so the largest models take a few seconds and
no memory. Only classes that are part of transformers run; code named in a config never does.
"""
import contextlib
import importlib
import re
import warnings
from dataclasses import replace

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import UserError
from kv.models.memory import (BLOCKS, CHUNK, CONV, FULL, RECURRENT, STATE, WINDOW, Memory, Part,
                              State, Store)

TOKENS = 3
# Keys that are not for the config's class: what names code to run, and the names of labels.
DROPPED = re.compile('auto_map|.*_implementation|num_labels|id2label|label2id')
# lists of 0 and 1 in configs of MiniMax and MiMo
OTHER_NAMES = {'attn_type_list': ('linear_attention', 'full_attention'),
               'hybrid_layer_pattern': ('full_attention', 'sliding_attention')}
# attributes of the layers of a cache
STORED = {'keys', 'values', 'indexer_keys', 'conv_states', 'recurrent_states', 'compressed_kv',
          'buffer_kv', 'buffer_gate', 'overlap_kv', 'overlap_gate'}


class WithoutData(TorchDispatchMode):
    """Lets a model branch on meta tensors: every number is 1, and no element is nonzero."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return torch.empty(0, args[0].dim(), dtype=torch.long, device='meta')
        return func(*args, **(kwargs or {}))


def memory_of(given: dict) -> Memory:
    """The memory of a model, by the contents of its config.json. UserError: if transformers does
    not know it, cannot build or run it, or it has no cache."""
    with _refused(f"transformers does not know model_type={given.get('model_type')!r}"):
        cls = transformers.CONFIG_MAPPING[given['model_type']]
    with _refused(f"this config is not valid for transformers' {cls.__name__}"):
        config = cls.from_dict(_prepared(given))
        if config.is_encoder_decoder:
            raise ValueError('an encoder beside the decoder is not accounted for')
        config = config.get_text_config(decoder=True)
        if getattr(config, 'attention_chunk_size', 0) is None:  # Llama Guard 4
            config.layer_types = ['full_attention'] * config.num_hidden_layers
            config.attention_chunk_size = config.max_position_embeddings  # its mask needs one
    name = config.model_type
    with _refused(f'transformers cannot build or run this {name}'):
        model, cache = _run(config)
    if not hasattr(cache, 'layers'):
        raise UserError(f"transformers' {type(model).__name__} has no KV cache that is accounted "
                        'for')
    _check_known(cache, name)

    n_layer = max(len(cache.layers), config.num_hidden_layers)
    stores = {i: _store(model, cache, i) for i in range(n_layer)}
    stores = {i: store for i, store in stores.items() if store.parts or store.states}
    blocks = [store for i, layer in enumerate(cache.layers) for store in _blocks(layer, i)]
    n_shared = getattr(config, 'num_kv_shared_layers', None) or 0
    for i in range(n_layer - n_shared, n_layer):  # each reads the last layer of its kind
        writer = max(j for j in range(n_layer - n_shared)
                     if config.layer_types[j] == config.layer_types[i])
        stores[writer] = replace(stores[writer], layers=(*stores[writer].layers, i))

    assumed = []
    if getattr(config, 'cross_attention_layers', None):
        assumed.append('K and V of cross-attention are not counted: they depend on the length of '
                       'its input')
    widths = [store.parts[0].width for store in stores.values() if store.parts]
    width = max(widths, key=widths.count, default=0)
    first = config.per_layer_config[0] if config.is_heterogeneous else config
    if getattr(first, 'kv_lora_rank', None):
        width = first.v_head_dim  # of values made from latents
    return Memory((*stores.values(), *blocks), n_layer,
                  getattr(first, 'num_attention_heads', None) or 0, width, name, tuple(assumed),
                  f'transformers {transformers.__version__}, {type(config).__name__}')


def _prepared(config: dict) -> dict:
    """The config without the keys in `DROPPED`, and with `layer_types` for other names of them."""
    config = {name: _prepared(value) if isinstance(value, dict) else value
              for name, value in config.items() if not DROPPED.fullmatch(name)}
    for name in OTHER_NAMES.keys() & config.keys():
        config.setdefault('layer_types', [OTHER_NAMES[name][i] for i in config.pop(name)])
    return config


@contextlib.contextmanager
def _refused(what: str):
    """Whatever transformers raises becomes a UserError of one line. Its warnings are not shown."""
    try:
        with warnings.catch_warnings(action='ignore'):
            yield
    except Exception as e:
        raise UserError(f"{what}: {' '.join(str(e).split())[:300]}") from e


def _class_of(config) -> type:
    """The class of transformers that is built from a config. AutoModel does not list some text
    models with images or speech: theirs is the first that runs in the config's package."""
    if type(config) in transformers.MODEL_MAPPING:
        listed = transformers.MODEL_MAPPING[type(config)]
        return listed[0] if isinstance(listed, tuple) else listed
    package = importlib.import_module(type(config).__module__.replace('.configuration_',
                                                                      '.modeling_'))
    return next(cls for cls in vars(package).values()
                if getattr(cls, 'config_class', None) is type(config) and 'forward' in vars(cls))


def _run(config):
    """The model on the meta device, and its cache of three tokens; None if it has none."""
    with torch.device('meta'), torch.no_grad(), WithoutData():
        model = _class_of(config)._from_config(config, dtype=torch.bfloat16,
                                               attn_implementation='eager').eval()
        out = model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=True)
    cache = out.get('past_key_values')
    return model, out.get('cache_params') if cache is None else cache


def _check_known(cache, name: str) -> None:
    """Raise UserError if a layer of the cache keeps tensors that `_store` does not read."""
    for layer in cache.layers:
        for attribute, value in vars(layer).items():
            values = value.values() if isinstance(value, dict) else [value]
            stored = any(torch.is_tensor(x) and x.dim() > 1 for x in values)
            if stored and attribute not in STORED:
                raise UserError(f'{name} keeps {attribute}, which is not accounted for')


def _store(model, cache, i: int) -> Store:
    """What layer `i` stores for itself."""
    config, layer = model.config, cache.layers[i] if i < len(cache.layers) else None
    config = config.per_layer_config[i] if config.is_heterogeneous else config
    parts, window = [], getattr(layer, 'sliding_window', None) or 0
    trimmed = config.model_type != 'gpt_neo'
    if not trimmed and config.attention_layers[i] == 'local':
        window = config.window_size
    names = ('latent', 'RoPE key') if getattr(config, 'kv_lora_rank', None) else ('K', 'V')
    tensors = [getattr(layer, 'keys', None), getattr(layer, 'values', None)]
    if getattr(layer, 'compressed_kv', None):  # one tensor
        names, tensors = ('K = V',), tensors[:1]
    for name, tensor in zip(names, tensors):
        if tensor is not None and tensor.dim() == 4:
            heads = tensor.shape[1]
            if getattr(config, 'new_decoder_architecture', False):
                heads = config.num_kv_heads  # Falcon 40B: stored once for each query head
            parts.append(Part(name, heads, tensor.shape[-1]))
    indexer = getattr(layer, 'indexer_keys', None)
    if indexer is not None:
        parts.append(Part('indexer key', 1, indexer.shape[-1]))

    states = [State(CONV, (tensor.shape[1], tensor.shape[2] - 1), spare=1)
              for tensor in getattr(layer, 'conv_states', {}).values() if tensor is not None]
    recurrent = [*getattr(layer, 'recurrent_states', {}).values(),
                 *getattr(cache, 'linear_cache', [])[i:i + 1]]  # MiniMax
    states += [State(RECURRENT, tuple(x.shape[1:]), float32=x.dtype == torch.float32)
               for x in recurrent if torch.is_tensor(x)]

    if not parts:
        return Store(STATE, (i,), states=tuple(states))
    types = getattr(config, 'layer_types', None) or []
    chunked = i < len(types) and types[i] == 'chunked_attention'
    kind = CHUNK if chunked else WINDOW if window else FULL
    return Store(kind, (i,), tuple(parts), window, tuple(states), trimmed=trimmed)


def _blocks(layer, i: int) -> list[Store]:
    """The entries of blocks that layer `i` stores beside its window, as DeepSeek-V4 does."""
    names = {'compressor': 'entry', 'indexer': 'indexer entry'}
    overlaps = bool(getattr(layer, 'overlap_kv', None))
    return [Store(BLOCKS, (i,), (Part(names[name], 1, entries.shape[-1]),), 0, (),
                  layer.compress_rate, 2 * layer.buffer_kv[name].shape[-1], overlaps)
            for name, entries in getattr(layer, 'compressed_kv', {}).items()]
