"""The decode step's C++ extension (decode.cpp): matmuls and whole decode steps at memory speed."""
import ctypes
import functools
import sys
from pathlib import Path

import torch

import extension
from extension import Unavailable

SOURCE = Path(__file__).with_name('decode.cpp')
_wanted = True  # see `use`


def use(on: bool) -> None:
    """Enable or disable the extension in this process; False = plain torch."""
    global _wanted
    _wanted = on


def library() -> ctypes.CDLL | None:
    """Return the extension, compiled if necessary. None if it is disabled or unavailable."""
    return _library() if _wanted else None


@functools.cache
def _library():
    return extension.opened(SOURCE, _checked)


def _checked(dll: ctypes.CDLL) -> ctypes.CDLL:
    dll.nanokv_sizes.restype = ctypes.c_int64
    for k, struct in enumerate((Linear, Slot, Layer, Model, Step, Chunk)):
        if dll.nanokv_sizes(ctypes.c_int64(k)) != ctypes.sizeof(struct):
            raise Unavailable(f'{struct.__name__} has a different size in the extension')
    for name in ('nanokv_decode', 'nanokv_linear', 'nanokv_attend'):
        getattr(dll, name).restype = None
    dll.tiles = bool(dll.nanokv_tiles(1))
    if dll.tiles and not _tiles_agree(dll):
        print('Note: results on AMX tiles are wrong here and not used, slower', file=sys.stderr)
        dll.tiles = bool(dll.nanokv_tiles(0))
    return dll


def _tiles_agree(dll: ctypes.CDLL) -> bool:
    """Whether matmuls and attention on tiles (AMX) give what they give without them, for tiles of
    every shape."""
    generator, k = torch.Generator().manual_seed(0), 128

    def both(call, *shape):
        y = torch.empty(2, *shape)
        for on in (0, 1):
            dll.nanokv_tiles(on)
            call(y[on])
        return y

    for m, n in ((40, 48), (33, 40), (8, 48), (2, 16)):  # 2 x 2 to 1 x 1, 1 x 3, ragged ends
        # in bfloat16, since without tiles up to three rows are not rounded; blocks of 16 are whole
        x, floats = (torch.randn(rows, k, generator=generator).bfloat16().float()
                     for rows in (m, -(-n // 16) * 16))
        scale = torch.ones(len(floats))
        weights = {INT8: floats.mul(30).add(128).byte(), BFLOAT16: floats.bfloat16()}
        for dtype, weight in weights.items():
            linear = Linear(weight.data_ptr(), scale.data_ptr(), None, n, k, dtype, k)
            y = both(lambda y: dll.nanokv_linear(
                ctypes.byref(linear), ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(m),
                ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(1)), m, n)
            bound = 0 if dtype == INT8 else 1e-4  # sums of whole numbers are exact
            if not torch.allclose(*y, rtol=bound, atol=bound):
                return False

    H, t, D, S = 2, 40, 32, 150
    q, kv = (torch.randn(*shape, D, generator=generator) for shape in ((H, t), (2, S)))
    kv = kv.bfloat16()
    before, n_new = torch.tensor([S - t]), torch.tensor([t])
    slot = Slot(kv[0].data_ptr(), kv[1].data_ptr(), None, None, None, 1, D, S, BFLOAT16)
    strides = H * t * D, t * D, D
    y = both(lambda y: dll.nanokv_attend(ctypes.byref(Chunk(
        slot, q.data_ptr(), y.data_ptr(), before.data_ptr(), n_new.data_ptr(), None, None,
        *strides, *strides, 1, H, t, 0, 0, 1))), H, t, D)
    return torch.allclose(*y, rtol=1e-4, atol=1e-4)


# -- the structs of kernels.h, slots.h and chunks.h ------------------------------------------------

FLOAT32, BFLOAT16, INT8, INT4 = range(4)
DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}  # of weights in floats
STORE, ADD, GELU_EXACT, GELU_TANH, RELU2 = range(5)


def _fields(pointers='', int64='', int32=''):
    """Fields in this order: pointers, then int64, then int32."""
    kinds = ((pointers, ctypes.c_void_p), (int64, ctypes.c_int64), (int32, ctypes.c_int32))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class Linear(ctypes.Structure):
    _fields_ = _fields('weight scale bias', 'n k', 'dtype group')


class Slot(ctypes.Structure):
    _fields_ = _fields('k v k_scale v_scale last_key', 'n_kv_head head_dim capacity',
                       'dtype ring paged transposed')


class Layer(ctypes.Structure):
    _fields_ = [*_fields('ln_1 ln_1_bias ln_2 ln_2_bias q_norm k_norm cos sin k_up v_up sink'),
                *((name, Linear) for name in ('c_attn', 'attn_proj', 'c_fc', 'mlp_proj', 'gate')),
                *_fields(int32='slot owns')]


class Model(ctypes.Structure):
    _fields_ = [*_fields('layers slots wte wpe ln_f ln_f_bias'), ('lm_head', Linear),
                *_fields(int64='n_layer n_slot n_embd n_head head_dim',
                         int32='wte_dtype wpe_dtype activation round_kv')]


class Step(ctypes.Structure):
    _fields_ = [*_fields('tokens positions rows later wanted table',
                         'm n_wanted table_width threads'),
                ('logits', ctypes.c_void_p)]


class Chunk(ctypes.Structure):
    _fields_ = [('slot', Slot), *_fields('q y before n table sink',
                                         'q_b q_h q_t y_b y_h y_t B H t table_width window threads',
                                         'half')]
