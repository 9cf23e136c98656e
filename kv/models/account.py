"""The account of any model's memory: bytes by layer and dtype, what engines allocate, how many
sequences fit, and what the same model would hold with nanoKV's plan. Torch and transformers are
needed only for models that are not nanoKV's own (`kv.models.build`)."""
import json
import math
import re
from dataclasses import replace

from common.errors import UserError
from common.gpt_config import GPTConfig
from kv.models import engines
from kv.models.memory import NANOKV, Memory, Store, memory_of_plan
from kv.plan import plan_kv
from kv.report import REPORTED_DTYPES

LIKE_WINDOW = 1024  # of `like_nanokv`, where the model has no windows


def account(config: dict, batch: int = 1, max_seq_len: int = 4096, kv_dtype: str = 'bfloat16',
            budget: int = 0, like: str = '', **vllm) -> dict:
    """Account for the memory of `batch` sequences of `max_seq_len` tokens, ready for JSON.

    config: the contents of a config.json (`kv.models.config.read_config` finds one). kv_dtype: of K
    and V, as in `python -m kv`; recurrent states that follow the model are in bfloat16 if it is
    quantized. budget: bytes, for `fit`. like='nanokv' adds the same shape with nanoKV's plan.
    vllm: `page_size`, `step_tokens` of `kv.models.engines.vllm`.

    Returns a dict with
        stores      kind ('full', 'window', 'blocks', 'state'), layers, holds, states,
                    parts {name: [heads, width]}, bytes_per_position, bytes
        bytes, bytes_per_token, bytes_per_further_token   of all stores together
        by_dtype    {kv_dtype: bytes}
        engines     {engine: bytes allocated}; None: not known, or it cannot run the model
        assumed     what the config does not say, in words
        defaults    where settings that the config leaves out come from; '' = it leaves out none
        fit         (with budget) {engine, 'needed', or 'needed, KV_DTYPE': sequences}
        like        (with like) bytes, smaller, window, head_dim

    UserError: if the config contradicts itself, or transformers is missing or cannot run it.
    """
    for name, value in (('max_seq_len', max_seq_len), ('batch', batch), *vllm.items()):
        if value < 1:
            raise UserError(f'{name}={value}: must be at least 1')
    if like not in ('', NANOKV):
        raise UserError(f"like={like!r}: allowed are '', 'nanokv'")
    memory = _memory(config)
    dtype = kv_dtype if kv_dtype in ('float32', 'float16') else 'bfloat16'

    def total(length, stored=kv_dtype, batch=batch):
        return engines.needed(memory, batch, length, stored, dtype)
    nbytes = total(max_seq_len)
    n = math.lcm(*(store.stride for store in memory.stores))  # a block of each store, or more
    found = {
        'model_type': memory.model_type, 'n_layer': memory.n_layer,
        'defaults': memory.defaults, 'assumed': list(memory.assumed),
        'batch': batch, 'max_seq_len': max_seq_len, 'kv_dtype': kv_dtype, 'dtype': dtype,
        'stores': [_row(store, batch, max_seq_len, kv_dtype, dtype) for store in memory.stores],
        'bytes': nbytes, 'bytes_per_token': nbytes / batch / max_seq_len,
        'bytes_per_further_token': (total(max_seq_len + n) - nbytes) / n / batch,
        'by_dtype': {name: total(max_seq_len, name) for name in REPORTED_DTYPES},
        'engines': engines.allocated(memory, batch, max_seq_len, dtype, **vllm)}
    if budget:
        one = {'needed': total(max_seq_len, dtype, 1),
               f'needed, {kv_dtype}': total(max_seq_len, kv_dtype, 1),
               **engines.allocated(memory, 1, max_seq_len, dtype, **vllm)}
        found['budget'] = budget
        found['fit'] = {name: n and budget // n for name, n in one.items()}
    if like:
        found['like'] = like_nanokv(memory, batch, max_seq_len, nbytes)
    return found


def _memory(config: dict) -> Memory:
    if isinstance(config.get(NANOKV), dict):
        try:
            ours = GPTConfig(**config[NANOKV])
        except TypeError as e:  # an unknown field
            raise UserError(f'this config is not of a model of this version: {e}') from e
        return replace(memory_of_plan(plan_kv(ours)), defaults='GPTConfig')
    try:
        from kv.models.build import memory_of
        memory = memory_of(config)
    except ImportError as e:
        raise UserError(f"this needs {e.name}: pip install 'transformers>=5.23'") from e
    # compressed-tensors, ModelOpt and Quark
    quantized = re.findall(r'"(kv_cache_\w+)": (?!null|false|{}|\[\])', json.dumps(config))
    notes = [f'{name} is not applied: kv_dtype says how K and V are counted' for name in quantized]
    return replace(memory, assumed=(*memory.assumed, *notes))


def like_nanokv(memory: Memory, batch: int, length: int, nbytes: int) -> dict:
    """The bytes of this shape with five local layers to one global, caches shared by two or three
    layers, one for all global layers, one K/V head, int8; and how many times smaller that is."""
    window = min((store.window for store in memory.stores if store.window), default=LIKE_WINDOW)
    heads, width = max(memory.n_head, 1), memory.head_dim
    if not width:
        raise UserError("like='nanokv': this model has no attention heads to compare")
    ours = plan_kv(GPTConfig(
        n_layer=memory.n_layer, n_head=heads, n_embd=heads * width, head_dim=width, n_kv_head=1,
        layer_pattern='LLLLLG', kv_share='AABBBC', share_global_kv=True, window_size=window,
        pos_embedding='rope', qk_norm=True)).nbytes(batch, length, 'int8')
    return {'bytes': ours, 'smaller': nbytes / ours, 'window': window, 'head_dim': width}


def _row(store: Store, batch: int, length: int, kv_dtype: str, dtype: str) -> dict:
    per_position = store.position_nbytes(kv_dtype)
    holds = store.positions(length) if store.parts else 0
    return {'kind': store.kind, 'layers': list(store.layers), 'window': store.window,
            'holds': holds, 'parts': {part.name: [part.heads, part.width] for part in store.parts},
            'states': {state.kind: list(state.shape) for state in store.states},
            'bytes_per_position': per_position,
            'bytes': batch * (holds * per_position + store.states_nbytes(dtype, kv_dtype, length))}
