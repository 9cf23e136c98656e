"""The KV plan: which layers are local, which layers share keys and values, and what that costs in
bytes. No torch here.

    layer_pattern = 'LLLLLG'     layer   0  1  2  3  4  5 | 6  7  8  9 10 11
    kv_share      = 'AABBBC'     kind    L  L  L  L  L  G | L  L  L  L  L  G
    share_global_kv = True       slot    0  0  1  1  1  2 | 3  3  4  4  4  2
                                         *     *        *   *     *           * owns: computes K/V;
                                                                                others read it
All code gets a layer's window and the owner of its KV from the plan.

Sources: multi-query attention (Shazeer 2019), sliding windows with few global layers (Beltagy et
al. 2020, Gemma 3), KV shared across layers (CLA, Brandon et al. 2024), and all of these combined
(Character.AI, "Optimizing inference", 2024).
"""
import warnings
from dataclasses import dataclass

from common.errors import UserError
from common.gpt_config import GPTConfig

GLOBAL, LOCAL = 'global', 'local'
KIND_OF_LETTER = {'G': GLOBAL, 'L': LOCAL}

# kv_dtype -> (bytes per stored element, bytes of the scale of one head's K or V at one position)
KV_DTYPES = {'float64': (8, 0), 'float32': (4, 0), 'bfloat16': (2, 0), 'float16': (2, 0),
             'int8': (1, 2), 'int4': (0.5, 2)}


@dataclass(frozen=True)
class Layer:
    """KV settings of one transformer block. `window` is 0 in global layers. mask: 0, or
    in a global layer a function (q_pos, k_pos) -> which of the keys up to its own a query sees, for
    ints and tensors."""
    index: int
    kind: str
    window: int
    slot: int
    owns: bool
    mask: object = 0


@dataclass(frozen=True)
class Slot:
    """One KV cache: layer `owner` writes it, all of `layers` (one kind and window) read it.

    tied: K = V, one tensor. latent: that tensor is a latent of width head_dim, from which each
    layer makes K and V. offset: half of a key is of the token before, which needs a state.
    """
    index: int
    kind: str
    window: int
    owner: int
    layers: tuple[int, ...]
    n_kv_head: int
    head_dim: int
    tied: bool = False
    latent: bool = False
    offset: bool = False

    def capacity(self, max_seq_len: int) -> int:
        """Positions stored for a sequence of `max_seq_len`: all, or a ring of the last `window`."""
        return min(self.window, max_seq_len) if self.kind == LOCAL else max_seq_len

    def positions(self, length: int, max_seq_len: int) -> list[int]:
        """Position at each index in use after `length` tokens; a ring has p at p % capacity."""
        n = self.capacity(max_seq_len)
        return [length - 1 - (length - 1 - i) % n for i in range(min(length, n))]

    def position_nbytes(self, kv_dtype: str) -> int:
        """Bytes of K and V (and their scales) of one position: 2 * Hkv * (D * element + scale)."""
        element, scale = KV_DTYPES[checked_dtype(kv_dtype)]
        n_tensors = 1 if self.tied else 2
        return n_tensors * self.n_kv_head * int(self.head_dim * element + scale)

    def state_nbytes(self, kv_dtype: str) -> int:
        """Bytes per sequence of half a key, in float32 if the cache is quantized."""
        element, scale = KV_DTYPES[checked_dtype(kv_dtype)]
        return self.offset * self.n_kv_head * self.head_dim // 2 * (4 if scale else element)

    def nbytes(self, batch: int, max_seq_len: int, kv_dtype: str) -> int:
        """Bytes for `batch` sequences of up to `max_seq_len` tokens."""
        held = self.capacity(max_seq_len) * self.position_nbytes(kv_dtype)
        return batch * (held + self.state_nbytes(kv_dtype))


@dataclass(frozen=True)
class KVPlan:
    """KV layout of a model: `layers[i]` describes each block, and `slots[s]` each cache. n_kv_head
    is the largest number of K/V heads of a layer."""
    layers: tuple[Layer, ...]
    slots: tuple[Slot, ...]
    n_head: int
    n_kv_head: int
    head_dim: int

    @property
    def last_owner(self) -> int:
        """The last layer that computes K and V. Later layers need only a prompt's last token."""
        return self.slots[-1].owner

    @property
    def local_reach(self) -> int:
        """The distance in tokens that all local layers bridge together."""
        return sum(layer.window - 1 for layer in self.layers if layer.kind == LOCAL)

    @property
    def heads_of_kv(self) -> str:
        """The K/V heads of a layer, in words: '2', or '1 to 4' if layers differ."""
        return span({self.n_kv_head, *(s.n_kv_head for s in self.slots if not s.latent)})

    @property
    def windows(self) -> str:
        """The windows of local layers, in words; '' without any."""
        return span({slot.window for slot in self.slots if slot.kind == LOCAL})

    def nbytes(self, batch: int, max_seq_len: int, kv_dtype: str) -> int:
        """Bytes of the entire cache: exactly what `kv.cache.KVCache` allocates."""
        return sum(slot.nbytes(batch, max_seq_len, kv_dtype) for slot in self.slots)

    def vanilla(self) -> 'KVPlan':
        """The plan of GPT-2 of the same shape: all layers global, K/V of its own for every head."""
        n, shape = range(len(self.layers)), dict(n_kv_head=self.n_head, head_dim=self.head_dim)
        layers = tuple(Layer(i, GLOBAL, 0, slot=i, owns=True) for i in n)
        slots = tuple(Slot(i, GLOBAL, 0, owner=i, layers=(i,), **shape) for i in n)
        return KVPlan(layers, slots, self.n_head, **shape)

    def factors(self, max_seq_len: int, kv_dtype: str,
                against: str = 'bfloat16') -> dict[str, float]:
        """The factor by which each setting shrinks the cache, relative to vanilla GPT-2.

        heads * window * sharing is the ratio at equal dtype; times dtype, the ratio against vanilla
        in `against`. 'heads' includes tied K and V and latents. The window precedes
        sharing; if max_seq_len <= window, it saves nothing.
        """
        vanilla, slots = self.vanilla(), [self.slots[layer.slot] for layer in self.layers]
        full = vanilla.nbytes(1, max_seq_len, kv_dtype)
        unlimited = max_seq_len * sum(slot.position_nbytes(kv_dtype) for slot in slots)
        unshared = sum(slot.nbytes(1, max_seq_len, kv_dtype) for slot in slots)
        return {'heads': full / unlimited, 'window': unlimited / unshared,
                'sharing': unshared / self.nbytes(1, max_seq_len, kv_dtype),
                'dtype': vanilla.nbytes(1, max_seq_len, against) / full}


def plan_kv(config: GPTConfig) -> KVPlan:
    """Turn a config's memory settings into the plan that all other code uses.

    Warns:
        UserWarning: if the pattern's global layers are beyond n_layer, or the global slot shared by
            all periods is owned by layer 0, whose K/V depend on single tokens only.
    """
    pattern, share, windows = config.layer_pattern, config.kv_share, config.windows
    layers, members, slot_of = [], [], {}
    for i in range(config.n_layer):
        period, place = divmod(i, len(pattern))
        kind = KIND_OF_LETTER[pattern[place]]
        key = (period, share[place]) if share else (i,)
        if kind == GLOBAL and config.share_global_kv:
            key = (GLOBAL,)
        owns = key not in slot_of
        if owns:
            slot_of[key] = len(members)
            members.append([])
        slot = slot_of[key]
        members[slot].append(i)
        layers.append(Layer(i, kind, windows[place], slot, owns))
    slots = tuple(_slot(config, index, [layers[i] for i in of_slot])
                  for index, of_slot in enumerate(members))
    n_kv_head = max((slot.n_kv_head for slot in slots if not slot.latent),
                    default=config.n_kv_head or config.n_head)
    plan = KVPlan(tuple(layers), slots, config.n_head, n_kv_head, config.resolved_head_dim)
    _warn(plan, config)
    return plan


def _slot(config: GPTConfig, index: int, layers: list[Layer]) -> Slot:
    owner = layers[0]
    latent = config.kv_latent if owner.kind == GLOBAL else 0
    heads = config.kv_heads[owner.index % len(config.layer_pattern)]
    return Slot(index, owner.kind, owner.window, owner.index, tuple(x.index for x in layers),
                n_kv_head=1 if latent else heads,
                head_dim=latent or config.resolved_head_dim, latent=latent > 0,
                tied=latent > 0 or config.kv_tied in ('all', owner.kind),
                offset=config.key_offset and owner.kind == GLOBAL)


def span(numbers: set[int]) -> str:
    """'16', '16 to 64', or ''."""
    return ' to '.join(f'{n:,}' for n in sorted({min(numbers), max(numbers)})) if numbers else ''


def checked_dtype(kv_dtype: str) -> str:
    if kv_dtype not in KV_DTYPES:
        raise UserError(f"kv_dtype={kv_dtype!r}: allowed are {', '.join(map(repr, KV_DTYPES))}")
    return kv_dtype


def _warn(plan, config):
    pattern, first = config.layer_pattern, plan.slots[0]
    if 'G' in pattern and not any(layer.kind == GLOBAL for layer in plan.layers):
        warnings.warn(f'layer_pattern={pattern!r} is longer than n_layer={config.n_layer}: no '
                      f'layer is global, so nothing is remembered beyond {config.n_layer} windows',
                      stacklevel=3)
    if config.share_global_kv and first.kind == GLOBAL and len(first.layers) > 1:
        warnings.warn(f'layer_pattern={pattern!r}: layer 0 owns the KV shared by global layers '
                      f'{list(first.layers)}, so all long-range memory is a function of single '
                      'token embeddings; put G last in the period', stacklevel=3)
