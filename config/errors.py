"""The one exception that means "the user can fix this": programs print it as one line and exit with status 2."""


class UserError(ValueError):
    """Bad input from a person: a key, value, path, file or prompt.

    The message names the offending value and what is allowed instead. Everything else that is raised is a bug and
    keeps its traceback.
    """


def at_least(s, **lowest) -> None:
    """Raises UserError for a setting below its lowest value."""
    for name, low in lowest.items():
        if getattr(s, name) < low:
            raise UserError(f'{name}={getattr(s, name)}: must be at least {low}')
