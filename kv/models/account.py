"""The account of any model's memory: bytes by layer and dtype, what engines allocate, how many
sequences fit, and what the same model would hold with nanoKV's plan. No torch here."""
from dataclasses import replace

from config.errors import UserError
from config.gpt_config import GPTConfig
from kv.models import engines
from kv.models.config import completed, stated
from kv.models.memory import FULL, WINDOW, Memory, Part, Store, memory_of
from kv.models.states import RECURRENT, State
from kv.plan import KVPlan, plan_kv
from kv.report import REPORTED_DTYPES

LIKE_WINDOW = 1024  # of `like_nanokv`, where the model has no windows
LADDER_ROW = '+ int8 KV'
NANOKV = 'nanokv'


def account(config: dict, batch: int = 1, max_seq_len: int = 4096, kv_dtype: str = 'bfloat16',
            dtype: str = '', budget: int = 0, like: str = '', **vllm) -> dict:
    """Account for the memory of `batch` sequences of `max_seq_len` tokens, ready for JSON.

    config: the contents of a config.json (`kv.models.config.read_config` finds one). kv_dtype: of K
    and V, as in `python -m kv`. dtype: of recurrent states that follow the model; '' = kv_dtype,
    or bfloat16 beside quantized K and V. budget: bytes, for `fit`. like='nanokv' adds the same
    shape with nanoKV's plan. vllm: `page_size`, `step_tokens` of `kv.models.engines.vllm`.

    Returns a dict with
        stores      kind ('full', 'window', 'state'), layers, holds, parts {name: [heads, width]},
                    states, bytes_per_position, bytes
        bytes, bytes_per_token, bytes_per_further_token   of all stores together
        by_dtype    {kv_dtype: bytes}
        engines     {engine: bytes allocated}; None: not known, or it cannot run the model
        unread      keys of the config that may describe memory that is not counted
        assumed     what the config does not say, in words
        filled      settings that the config leaves out, with the values they were given
        defaults    where settings that the config leaves out come from; '' = unknown
        fit         (with budget) {engine, 'needed', or 'needed, KV_DTYPE': sequences}
        like        (with like) bytes, smaller, window, and the row of the ladder that prices it

    Raises:
        UserError: if the config lacks a fact, contradicts itself, or has layers of an unknown kind.
    """
    for name, value in (('max_seq_len', max_seq_len), ('batch', batch), *vllm.items()):
        if value < 1:
            raise UserError(f'{name}={value}: must be at least 1')
    if like not in ('', NANOKV):
        raise UserError(f"like={like!r}: allowed are '', 'nanokv'")
    memory, defaults = _memory(config)
    given = config[NANOKV] if memory.model_type == NANOKV else stated(config)
    dtype = dtype or (kv_dtype if kv_dtype in ('float32', 'float16') else 'bfloat16')

    def total(length, stored=kv_dtype):
        return engines.needed(memory, batch, length, stored, dtype)
    nbytes = total(max_seq_len)
    found = {
        'model_type': memory.model_type, 'n_layer': memory.n_layer, 'defaults': defaults,
        'batch': batch, 'max_seq_len': max_seq_len, 'kv_dtype': kv_dtype, 'dtype': dtype,
        'stores': [_row(store, batch, max_seq_len, kv_dtype, dtype) for store in memory.stores],
        'bytes': nbytes, 'bytes_per_token': nbytes / batch / max_seq_len,
        'bytes_per_further_token': (total(max_seq_len + 1) - nbytes) // batch,
        'by_dtype': {name: total(max_seq_len, name) for name in REPORTED_DTYPES},
        'engines': allocated(memory, batch, max_seq_len, dtype, **vllm),
        'filled': {name: value for name, value in memory.facts.items() if name not in given},
        'unread': memory.unread, 'assumed': list(memory.assumed)}
    if budget:
        one = {name: engines.needed(memory, 1, max_seq_len, stored, dtype)
               for name, stored in (('needed', dtype), (f'needed, {kv_dtype}', kv_dtype))}
        one |= allocated(memory, 1, max_seq_len, dtype, **vllm)
        found['budget'] = budget
        found['fit'] = {name: n and budget // n for name, n in one.items()}
    if like:
        found['like'] = like_nanokv(memory, batch, max_seq_len, nbytes)
    return found


def _memory(config: dict) -> tuple[Memory, str]:
    if isinstance(config.get(NANOKV), dict):
        try:
            ours = GPTConfig(**config[NANOKV])
            sizes = {name: getattr(ours, name) for name in ('n_layer', 'n_head', 'n_embd')}
            return replace(memory_of_plan(plan_kv(ours)), facts=sizes), 'GPTConfig'
        except TypeError as e:  # an unknown field
            raise UserError(f'this config is not of a model of this version: {e}') from e
    settings, defaults = completed(config)
    try:
        return memory_of(settings, complete=bool(defaults)), defaults
    except UserError as e:
        if defaults:
            raise
        raise UserError(f'{e}; what a config leaves to its class is filled in if transformers '
                        "knows it: pip install 'transformers>=5.23'") from e


def memory_of_plan(plan: KVPlan) -> Memory:
    """A KV plan as the memory of a model."""
    stores = []
    for slot in plan.slots:
        one = Part('latent' if slot.latent else 'K = V' if slot.tied else 'K', slot.n_kv_head,
                   slot.head_dim)
        parts = (one,) if slot.tied else (one, Part('V', slot.n_kv_head, slot.head_dim))
        half = (State(RECURRENT, (slot.n_kv_head, slot.head_dim // 2)),) * slot.offset
        stores.append(Store(WINDOW if slot.window else FULL, slot.layers, parts, slot.window, half))
    return Memory(tuple(stores), len(plan.layers), plan.n_head, plan.head_dim, NANOKV, {})


def allocated(memory: Memory, batch: int, length: int, dtype: str, **vllm) -> dict:
    """{engine: bytes for K and V in `dtype`}; llama.cpp's are always in f16. None where it is not
    known, or the engine cannot run the model."""
    found = {
        'transformers, dynamic': engines.transformers_dynamic(memory, batch, length, dtype),
        'transformers, static': engines.transformers_static(memory, batch, length, dtype),
        'vLLM, prefill': engines.vllm(memory, batch, length, dtype, **vllm),
        'vLLM, decode': engines.vllm(memory, batch, length, dtype, **vllm | {'step_tokens': 1}),
        'llama.cpp': engines.llama_cpp(memory, batch, length),
        'llama.cpp --swa-full': engines.llama_cpp(memory, batch, length, swa_full=True)}
    if memory.model_type == NANOKV:
        tied = any(len(store.parts) == 1 for store in memory.stores)  # our plugin stores it twice
        unknown = ('llama.cpp', *['vLLM'] * tied)
        found |= {name: None for name in found if name.startswith(unknown)}
    return found


def like_nanokv(memory: Memory, batch: int, length: int, nbytes: int) -> dict:
    """The bytes of this shape with five local layers to one global, caches shared by two or three
    layers, one for all global layers, one K/V head, int8; and how many times smaller that is."""
    windows = [store.window for store in memory.stores if store.window]
    window = min(windows, default=LIKE_WINDOW)
    heads, width = max(memory.n_head, 1), memory.head_dim
    if not width:
        raise UserError("like='nanokv': this model has no attention heads to compare")
    plan = plan_kv(GPTConfig(
        n_layer=memory.n_layer, n_head=heads, n_embd=heads * width, head_dim=width, n_kv_head=1,
        layer_pattern='LLLLLG', kv_share='AABBBC', share_global_kv=True, window_size=window,
        pos_embedding='rope', qk_norm=True))
    ours = plan.nbytes(batch, length, 'int8')
    return {'bytes': ours, 'smaller': nbytes / ours, 'window': window, 'head_dim': width,
            'priced_by': LADDER_ROW}


def _row(store: Store, batch: int, length: int, kv_dtype: str, dtype: str) -> dict:
    per_position = engines.position_nbytes(store, kv_dtype)
    holds = store.positions(length) if store.parts else 0
    states = engines.states_nbytes(store, dtype)
    return {'kind': store.kind, 'layers': list(store.layers), 'window': store.window,
            'holds': holds, 'parts': {part.name: [part.heads, part.width] for part in store.parts},
            'states': {state.kind: list(state.shape) for state in store.states},
            'bytes_per_position': per_position, 'bytes': batch * (holds * per_position + states)}
