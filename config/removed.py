"""Settings that earlier versions had: an old flag, config file or checkpoint gets an answer."""

COMMIT = '461914ad'  # the last one that has them
KEYS = (             # names of settings
    'keep_checkpoints', 'memory_budget',
)
VALUES = {           # name of a setting that stays -> values that it no longer takes
    'recompute': ('auto',),
}


def removed(name: str, value=None) -> str:
    """Return '' or the sentence that says which commit still has a setting, or a value of it."""
    if name in KEYS:
        return f'{name} was removed; commit {COMMIT} has it'
    if value in VALUES.get(name, ()):
        return f'{name}={value!r} was removed; commit {COMMIT} has it'
    return ''
