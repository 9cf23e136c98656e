"""An exception for errors that users can fix; programs print one line and exit with status 2."""
import reprlib

ITEMS = reprlib.Repr()
ITEMS.maxlevel = 2


class UserError(ValueError):
    """Invalid input: a key, value, path, file or prompt.

    The message shows the invalid value and the allowed ones. Any other exception is a bug and
    keeps its traceback.
    """


def shown(value) -> str:
    """Return `value` for use in a message: the `repr` of texts and numbers, truncated, that of the
    first items of containers, and the type of anything else. The `repr` of a nested container may
    be endless: in a pickle, each level of [x, x] doubles it."""
    try:
        if isinstance(value, (list, tuple, dict, set)):
            text = ITEMS.repr(value)
        elif isinstance(value, (str, int, float, bytes, type(None))):
            text = repr(value)
        else:
            return f'a {type(value).__name__}'
    except ValueError:  # an int of more than 4,300 digits
        return f'a very large {type(value).__name__}'
    return text if len(text) <= 60 else text[:57] + '...'


def at_least(s, **lowest) -> None:
    """Raise UserError if a setting is below its lowest value."""
    for name, low in lowest.items():
        if getattr(s, name) < low:
            raise UserError(f'{name}={getattr(s, name)}: must be at least {low}')
