"""The pickle of a checkpoint, checked before torch reads it.

`torch.load(weights_only=True)` calls some 200 functions and classes, and a few bytes of a pickle
can make many of them allocate any amount of memory, as `bytearray(10 ** 11)` does. The checkpoints
of this project and of nanoGPT need those in `ALLOWED` only.
"""
import io
import math
import pickle
import re

MAX_DIMS = 16
ITEM_BYTES = {'Byte': 1, 'Char': 1, 'Bool': 1, 'Half': 2, 'BFloat16': 2, 'Short': 2, 'Int': 4,
              'Float': 4, 'Long': 8, 'Double': 8, 'ComplexFloat': 8, 'ComplexDouble': 16}


class _Tensor:
    """Stands for a tensor. It has no more elements than its storage."""

    def __init__(self, storage, offset, size, stride, requires_grad, hooks):
        plain = type(size) is type(stride) is tuple and len(size) <= MAX_DIMS
        if not plain or not all(type(n) is int and n >= 0 for n in size + stride):
            raise pickle.UnpicklingError('it has a tensor of invalid size')
        if math.prod(size) > storage:
            raise pickle.UnpicklingError('its tensors share memory, or repeat their elements; '
                                         'allowed are tensors as torch.save writes them')

    def __setstate__(self, state):
        raise pickle.UnpicklingError('it has a tensor with a state')


class _Parameter(_Tensor):
    def __init__(self, tensor, requires_grad, hooks):
        pass


class _OrderedDict(dict):
    """It is created empty: each call with items would copy them."""

    def __init__(self):
        super().__init__()

    def __setstate__(self, state):
        if type(state) is not dict or len(state) > 1:  # it is copied, too
            raise pickle.UnpicklingError('it has an OrderedDict with an invalid state')


ALLOWED = {'collections.OrderedDict': _OrderedDict, 'torch._utils._rebuild_tensor_v2': _Tensor,
           'torch._utils._rebuild_parameter': _Parameter,
           **{f'torch.{kind}Storage': n for kind, n in ITEM_BYTES.items()}}


class PickleChecker(pickle.Unpickler):
    """Its `load` runs the pickle with the stand-ins above. Raises an error of nearly any type if
    torch might allocate more than the file has bytes, or must not call what the pickle asks for.

    sizes: names of the entries of the zip file, in their order -> bytes.
    """

    def __init__(self, data: bytes, sizes: dict[str, int]):
        super().__init__(io.BytesIO(data))
        self.sizes, self.folder = sizes, next(iter(sizes)).partition('/')[0]

    def find_class(self, module, name):
        if f'{module}.{name}' not in ALLOWED:
            raise pickle.UnpicklingError(f'GLOBAL {module}.{name} is not allowed')
        return ALLOWED[f'{module}.{name}']

    def persistent_load(self, pid):
        """The number of elements of a storage."""
        _, item_bytes, key, _, n = pid
        # torch finds entries in any case, so letters would be many names of one
        if type(key) is not str or not re.fullmatch('[0-9]+', key):
            raise pickle.UnpicklingError('it has a storage without a number')
        size = self.sizes[f'{self.folder}/data/{key}']
        if type(n) is not int or n * item_bytes != size:
            raise pickle.UnpicklingError(f'data/{key} has {size:,} bytes, and should have '
                                         f'{n * item_bytes:,}')
        return n
