"""An exception for errors that users can fix; programs print one line and exit with status 2."""
import reprlib

REPR = reprlib.Repr()
REPR.maxlevel, REPR.maxstring, REPR.maxother, REPR.maxlong = 2, 200, 200, 200


class UserError(ValueError):
    """Invalid input: a key, value, path, file or prompt.

    The message shows the invalid value and the allowed ones. Any other exception is a bug and
    keeps its traceback.
    """


def shown(value) -> str:
    """Return the `repr` of `value` for use in a message, truncated."""
    try:
        text = REPR.repr(value)
    except ValueError:  # an int of more than 4,300 digits
        return f'a very large {type(value).__name__}'
    return text if len(text) <= 60 else text[:57] + '...'


def at_least(s, **lowest) -> None:
    """Raise UserError if a setting is below its lowest value."""
    for name, low in lowest.items():
        if getattr(s, name) < low:
            raise UserError(f'{name}={getattr(s, name)}: must be at least {low}')
