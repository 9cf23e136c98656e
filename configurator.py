"""Command lines and config files, read left to right, later wins; nanoGPT's habits with its sharp edges mended.

    python train.py config/train_mqa_local.py --batch_size=32 --learning_rate=1e-3

An argument without '--' is a folder with a checkpoint (for the programs that read one), or a config file: plain Python
assignments, run with the settings so far as variables (so `lr_decay_iters = max_iters` works). Unlike in nanoGPT a misspelt key
is refused in files too, with the nearest one named.
"""
import ast
import difflib
import math
import numbers
import shutil
import symtable
import sys
import textwrap
import warnings
from collections import deque
from pathlib import Path
from types import ModuleType, SimpleNamespace

from config import missing  # noqa: F401  programs import this module, or that one, before packages
from config.errors import UserError
from config.schema import ALL_KEYS, PROGRAMS, Key

ROOT = Path(__file__).resolve().parent


class Settings(SimpleNamespace):
    """One attribute per key. `given` names those that a config file or flag set (it is no setting: `vars` omits it)."""
    __slots__ = ('given',)


def parse(program: str, argv: list[str] | None = None, usage: str = '', echo: bool = True) -> Settings:
    """The settings of `program` ('train', 'sample', ...) after config files and flags, one attribute per key.

    Flags are written --key=value or --key value; --key alone means True.
    Prints what it overrides, in nanoGPT's words (not when `echo` is False); the text of a config
    file only where it belongs into a log, in train.py's. `--help` prints every key and exits.

    Raises:
        UserError: unknown key, value of another type or not among the choices, unreadable or failing config file.
    """
    keys = {key.name: key for key in PROGRAMS[program]}
    values, given = {name: key.default for name, key in (ALL_KEYS | keys).items()}, set()
    argv = sys.argv[1:] if argv is None else argv
    if '--help' in argv or '-h' in argv:
        print(help_text(program, usage))
        raise SystemExit(0)
    args = deque(argv)
    while args:
        arg = args.popleft()
        if arg.startswith('-'):
            name, value = _flag(arg, args, keys)
            values[name] = value
            given.add(name)
            if echo:
                print(f'Overriding: {name} = {value if str(value).isprintable() else repr(value)}')
        elif Path(arg).is_dir() and 'out_dir' in keys:
            if program == 'train':
                raise UserError(f'{arg!r} is a folder: to train into it give --out_dir={arg}, to go on with what '
                                'is in it --init_from=resume too')
            values['out_dir'] = arg
            given.add('out_dir')
        else:
            path = _find(arg, runs=program != 'train' and 'out_dir' in keys)
            text = _read(arg, path)
            if echo:
                print(f'Overriding config with {arg}' + f':\n{text}' * (program == 'train'))
            changed = _run_file(arg, path, text, values, keys)
            values.update(changed)
            given.update(changed)
    settings = Settings(**{name: values[name] for name in keys})
    settings.given = frozenset(given)
    return settings


def help_text(program: str, usage: str = '') -> str:
    """Every key with its default and meaning, as wide as the terminal."""
    lines = [usage.strip(), '', 'Keys (give them as --key=value, or as assignments in a config file):', '']
    fill = textwrap.TextWrapper(max(40, shutil.get_terminal_size().columns), break_on_hyphens=False,
                                initial_indent=' ' * 8, subsequent_indent=' ' * 8).fill
    for key in PROGRAMS[program]:
        choices = f' [{_allowed(key)}]' if key.choices else ''
        lines += [f'  --{key.name}={key.default!r}', fill(key.meaning + choices)]
    return '\n'.join(lines)


def coerce(key: Key, value, where: str):
    """`value` as the type of the key's default (an int will do for a float), checked against its choices."""
    wanted = type(key.default)
    if wanted is float and not isinstance(value, bool) and isinstance(value, numbers.Real) and abs(value) < 2 ** 1023:
        value = float(value)  # an int, a NumPy number
    if wanted is int and not isinstance(value, bool) and isinstance(value, numbers.Real) and value == value // 1:
        value = int(value)    # 1e4
    if type(value) is not wanted:
        raise UserError(f'{where}: {key.name}={value!r} is {type(value).__name__}, but {key.name} takes '
                        f'{_type_words(wanted)} (default {key.default!r})')
    if wanted is float and not math.isfinite(value):
        raise UserError(f'{where}: {key.name}={value!r} is not a finite number')
    if key.choices and value not in key.choices and not (key.folder and value and Path(value).is_dir()):
        raise UserError(f'{where}: {key.name}={value!r}: allowed are {_allowed(key)}')
    return value


def _allowed(key: Key) -> str:
    return ', '.join(map(repr, key.choices)) + (f', or a folder with {key.folder}' if key.folder else '')


def _type_words(wanted: type) -> str:
    return {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'text',
            dict: 'a dict, as {\'name\': value}'}[wanted]


def _flag(arg: str, rest: deque, keys: dict[str, Key]):
    """The key and value of `arg`; a value apart from it is taken from the `rest` of the arguments."""
    name, equals, text = arg.lstrip('-').partition('=')
    if not arg.startswith('--'):
        raise UserError(f'{arg!r}: flags are written --key=value, as in --{name or "key"}={text or "value"}')
    if name == 'config':
        raise UserError(f'a config file is given without --config=, as {text or "config/train_mqa_local.py"}')
    if name not in keys:
        raise UserError(_unknown([name], keys, 'command line'))
    if not equals and isinstance(keys[name].default, bool):
        if rest and rest[0].lower() in ('true', 'false', 'yes', 'no', '0', '1'):
            text = rest.popleft()
            if text not in ('True', 'False'):
                raise UserError(f'--{name} takes True or False, not {text!r}')
        else:
            text = 'True'
    elif not equals:
        if not rest or rest[0].startswith('--'):
            raise UserError(f'--{name} needs a value, as in --{name}={keys[name].default or "VALUE"}')
        text = rest.popleft()
    key = keys[name]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = text
    if isinstance(key.default, str) and not isinstance(value, str):
        value = text  # --start=123 is the text '123'
    return name, coerce(key, value, 'command line')


def _unknown(names: list[str], keys, where: str) -> str:
    found = []
    for name in names:
        near = difflib.get_close_matches(name, keys, n=1)
        found.append(repr(name) + (f' (did you mean {near[0]!r}?)' if near else ''))
    return f"{where}: unknown key{'s' * (len(names) > 1)} {', '.join(found)}; --help lists all keys"


def _find(arg: str, runs: bool) -> Path:
    """A config file, seen from the working directory or else from the checkout. runs: a run's folder may have been meant."""
    for path in (Path(arg), ROOT / arg):
        if path.is_file():
            return path
    there = sorted(f'config/{p.name}' for p in (ROOT / 'config').glob('*_*.py')
                   if p.name not in ('gpt_config.py', '__init__.py'))
    what = 'config file'
    if runs and not arg.endswith('.py'):
        there, what = sorted(str(path.parent) for path in Path().glob('out*/ckpt.pt')), 'folder of a run'
    near = difflib.get_close_matches(arg, there, n=1)
    raise UserError(f'{what} {arg!r} not found' + (
        f', did you mean {near[0]}?' if near else f"; there are {', '.join(there) or 'none here'}"))


def _read(arg: str, path: Path) -> str:
    try:
        return path.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f'config file {arg!r} cannot be read as UTF-8 text: {e}') from e


def _run_file(arg, path, text, values, keys):
    """The keys that a config file assigns, checked. Names with an underscore in front, imports and functions are its own."""
    namespace = dict(values, __file__=str(path), __name__='config')
    try:
        names = symtable.symtable(text, str(path), 'exec').get_symbols()
        assigned = {name.get_name() for name in names if name.is_assigned()}  # also those that repeat a default
        imported = {name.get_name() for name in names if name.is_imported()}
        exec(compile(text, str(path), 'exec'), namespace)  # the user's own file, as in nanoGPT
    except Exception as e:
        line = e.lineno if isinstance(e, SyntaxError) else _line_in(e, str(path))
        raise UserError(f"{arg}, line {line}: {type(e).__name__}: {' '.join(str(e).split())}") from e
    changed, unknown = {}, []
    for name, value in namespace.items():
        if name.startswith('_') or (name in values and name not in assigned and value is values[name]):
            continue
        if name in imported or callable(value) or isinstance(value, ModuleType):
            continue
        if name in ALL_KEYS:
            if name in keys and not _meant_for_another(keys[name], value):
                changed[name] = coerce(keys[name], value, arg)
        else:
            unknown.append(name)
    if unknown:
        advice = '; start helper names with an underscore'
        raise UserError(_unknown(unknown, ALL_KEYS, arg) + advice)
    return changed


def _meant_for_another(key: Key, value) -> bool:
    """Files are shared: init_from = 'scratch' is train.py's business, and sample.py keeps its own."""
    theirs = {choice for keys in PROGRAMS.values() for other in keys if other.name == key.name for choice in other.choices}
    return value not in key.choices and isinstance(value, str) and value in theirs


def _line_in(error, filename):
    line, tb = '?', error.__traceback__
    while tb:
        if tb.tb_frame.f_code.co_filename == filename:
            line = tb.tb_lineno
        tb = tb.tb_next
    return line


def run_program(main) -> None:
    """Run `main()` as a script: a UserError is one line on stderr and exit status 2, without a
    traceback; a warning is one line, without the source that warns."""
    plain = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: (
        f"warning: {' '.join(str(message).split())}\n")
    try:
        main()
    except UserError as e:
        print('error:', ' '.join(str(e).splitlines()), file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        end_of_line = '\n' * sys.stderr.isatty()  # after the ^C that a terminal shows
        print(end_of_line + 'interrupted', file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # e.g. `sample.py | head`
        sys.stderr.close()
        raise SystemExit(1) from None
    finally:
        warnings.formatwarning = plain
