"""The exception for errors that the user can fix: programs print it as one line, exit status 2."""


class UserError(ValueError):
    """Bad input: a key, value, path, file or prompt.

    The message names the offending value and the allowed ones. Any other exception is a bug and
    keeps its traceback.
    """


def at_least(s, **lowest) -> None:
    """Raise UserError if a setting is below its lowest value."""
    for name, low in lowest.items():
        if getattr(s, name) < low:
            raise UserError(f'{name}={getattr(s, name)}: must be at least {low}')
