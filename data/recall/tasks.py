"""The synthetic tasks, by the name of their data set: each is given by a setting, as
recall_task='distances=7,30 n_tokens=32' or lookup_task='pairs=2,4,8 gap=16'."""
import dataclasses

from config.errors import UserError
from data.recall.lags import LagTask
from data.recall.lookup import LookupTask

TASKS = {'recall': LagTask, 'lookup': LookupTask}


def task_of(s) -> LagTask | LookupTask | None:
    """Return the task given by the settings of train.py; None if the data set is no task."""
    if s.dataset not in TASKS:
        return None
    return read_task(s.dataset, getattr(s, f'{s.dataset}_task'), s.block_size)


def read_task(name: str, text: str, block_size: int) -> LagTask | LookupTask:
    """Parse a task for sequences of `block_size`. Raises UserError if a field is unknown or
    missing, or a value is not a number."""
    fields, given = dataclasses.fields(TASKS[name])[1:], {}
    takes_several = {f.name: f.type is not int for f in fields}
    for word in text.split():
        field, _, value = word.partition('=')
        where = f'{name}_task={text!r}: {word!r}'
        if field not in takes_several:
            raise UserError(f'{where}: allowed fields are {", ".join(takes_several)}')
        try:
            numbers = tuple(map(int, value.split(',')))
        except ValueError:
            raise UserError(f'{where}: {value!r} is no whole number') from None
        if not takes_several[field] and len(numbers) > 1:
            raise UserError(f'{where} is one number')
        given[field] = numbers if takes_several[field] else numbers[0]
    first = fields[0].name
    if first not in given:
        raise UserError(f"{name}_task={text!r}: needs {first}, as '{first}=7,30,100'")
    return TASKS[name](block_size, **given)
