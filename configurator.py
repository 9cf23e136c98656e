"""Command lines and config files, like nanoGPT's but checked. Later settings override earlier ones.

An argument without '--' is a folder with a checkpoint (for programs that read one) or a config
file: Python assignments that may use earlier settings (`lr_decay_iters = max_iters`).
Unknown keys are errors, even in files, where nanoGPT ignores them; the message suggests a key.
"""
import ast
import dataclasses
import difflib
import functools
import inspect
import json
import math
import numbers
import os
import shutil
import symtable
import sys
import textwrap
import time
import traceback
import warnings
from collections import deque
from dataclasses import Field
from pathlib import Path
from types import ModuleType

from common import settings as groups
from common import startup  # noqa: F401  programs import this or `startup` before packages
from common.errors import UserError
from common.files import read_text, use_own_compiler_cache
from common.removed import removed
from common.settings import COMMAND_LINE, Base, Source
from common.terminal import visible

ROOT = Path(__file__).resolve().parent
# each has a class Settings
PROGRAMS = ('train.py', 'sample.py', 'chat.py', 'serve.py', 'bench.py', 'kv/__main__.py',
            'interop/evaluate.py', 'training/memory/__main__.py', 'lab/conform.py',
            'lab/ablation/ladder.py')
TYPES = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'text',
         dict: "a dict, as {'name': value}"}


def keys_of(settings: type[Base]) -> dict[str, Field]:
    """{name: field}, those of the program's own class first."""
    fields = {f.name: f for f in dataclasses.fields(settings) if f.name not in settings.hidden}
    names = [name for cls in settings.__mro__ for name in inspect.get_annotations(cls)]
    return {name: fields[name] for name in names if name in fields}


@functools.cache
def defaults_of_programs() -> dict:
    """{name: default} of the keys of all programs. They are read in the sources, because an import
    would take time, and packages that may be missing."""
    shared = [cls for cls in vars(groups).values() if isinstance(cls, type)]
    defaults = {name: default_of(field) for cls in shared if issubclass(cls, Base)
                for name, field in keys_of(cls).items()}
    for path in PROGRAMS:
        tree = ast.parse((ROOT / path).read_text(encoding='utf-8'))
        [settings] = [node for node in tree.body
                      if isinstance(node, ast.ClassDef) and node.name == 'Settings']
        defaults |= {node.target.id: ast.literal_eval(node.value.args[0])
                     for node in settings.body if isinstance(node, ast.AnnAssign)
                     and isinstance(node.value, ast.Call)}
    return defaults


def default_of(key: Field):
    return key.default if key.default is not dataclasses.MISSING else key.default_factory()


def parse(settings: type[Base], argv: list[str] | None = None, usage: str = '',
          echo: bool = True, echo_files: bool = False) -> Base:
    """Return the settings of a program, of its class `settings`, after config files and flags.

    Flags are written --key=value or --key value; --key by itself means True. With `echo`, overrides
    are printed in nanoGPT's words, with `echo_files` also the texts of config files.

    Raises UserError if a key is unknown, a value has the wrong type or is not among the choices, or
    a config file cannot be read or fails.
    """
    keys, takes_run = keys_of(settings), issubclass(settings, Source)
    values = {name: default_of(key) for name, key in keys.items()}
    given, folder, out_dirs = {}, '', set()
    args = deque(sys.argv[1:] if argv is None else argv)
    if '--help' in args or '-h' in args:
        print(help_text(settings, usage))
        raise SystemExit(0)
    while args:
        arg = args.popleft()
        if not arg:
            raise UserError('an argument is empty, such as that of a shell variable without a '
                            'value: leave it out')
        if arg.startswith('-'):
            name, value = _flag(arg, args, keys)
            source, changed = COMMAND_LINE, {name: value}
            if name == 'out_dir':
                out_dirs.add(Path(value))
            if echo:
                print(f'Overriding: {name} = {value if str(value).isprintable() else repr(value)}')
        elif Path(arg).is_dir() and 'out_dir' in keys:
            if not takes_run:
                raise UserError(f'{arg!r} is a folder: to train into it use --out_dir={arg}, '
                                'and to continue from its checkpoint also --init_from=resume')
            folder = arg
            out_dirs.add(Path(arg))
            source, changed = COMMAND_LINE, {'out_dir': arg}
        else:
            path = _find(arg, takes_run)
            text = read_text(path, f'config file {arg!r}')
            if echo:
                shown = f':\n{text}' if echo_files else ''
                print(visible(f'Overriding config with {arg}{shown}'))
            source, changed = arg, _run_file(arg, path, text, values, keys)
        values.update(changed)
        given.update(dict.fromkeys(changed, source))
    if folder and len(out_dirs) > 1:
        raise UserError(f'two folders are given, {" and ".join(sorted(map(str, out_dirs)))}: '
                        'leave one out')
    return settings(given=given, **{name: values[name] for name in keys})


def help_text(settings: type[Base], usage: str = '') -> str:
    """List every key with its default and description, wrapped to the terminal's width."""
    lines = [usage.strip(), '',
             'Keys (give them as --key=value, or as assignments in a config file):', '']
    indent, width = ' ' * 8, max(40, shutil.get_terminal_size().columns)
    fill = textwrap.TextWrapper(width, indent, indent, break_on_hyphens=False).fill
    for name, key in keys_of(settings).items():
        choices = f' [{_allowed(key)}]' if key.metadata['choices'] else ''
        lines += [f'  --{name}={default_of(key)!r}', fill(key.metadata['meaning'] + choices)]
    return '\n'.join(lines)


def coerce(key: Field, value, where: str):
    """Convert `value` to the type of the key's default, and check it against its choices. Floats
    accept any real number, ints also 1e4; NumPy's numbers work as well."""
    default, choices = default_of(key), key.metadata['choices']
    wanted = type(default)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        if wanted is float and abs(value) < 2 ** 1023:
            value = float(value)
        if wanted is int and value == value // 1:
            value = int(value)
    given = f'{where}: {key.name}={value!r}'
    if type(value) is not wanted:
        raise UserError(f'{given} is {type(value).__name__}, but {key.name} takes '
                        f'{TYPES[wanted]} (default {default!r})')
    if wanted is float and not math.isfinite(value):
        raise UserError(f'{given} is not a finite number')
    is_folder = key.metadata['folder'] and value and Path(value).is_dir()
    if choices and value not in choices and not is_folder:
        raise UserError(removed(key.name, value) or f'{given}: allowed are {_allowed(key)}')
    return value


def _allowed(key: Field) -> str:
    folder = key.metadata['folder']
    or_folder = f', or a folder with {folder}' if folder else ''
    return ', '.join(map(repr, key.metadata['choices'])) + or_folder


def _flag(arg: str, rest: deque, keys: dict[str, Field]):
    """Return the key and value of flag `arg`. A separate value is popped from `rest`."""
    name, equals, text = arg.lstrip('-').partition('=')
    if not arg.startswith('--'):
        raise UserError(f'{arg!r}: flags are written --key=value, '
                        f'as in --{name or "key"}={text or "value"}')
    if name == 'config':
        raise UserError('a config file is given without --config=, as '
                        + (text or 'config/train_mqa_local.py'))
    if name not in keys:
        raise UserError(_unknown([name], keys, COMMAND_LINE))
    default = default_of(keys[name])
    if not equals and isinstance(default, bool):
        text = 'True'
        if rest and rest[0].lower() in ('true', 'false', 'yes', 'no', '0', '1'):
            text = rest.popleft()
            if text not in ('True', 'False'):
                raise UserError(f'--{name} takes True or False, not {text!r}')
    elif not equals:
        if not rest or rest[0].startswith('--'):
            raise UserError(f'--{name} needs a value, as in --{name}={default or "VALUE"}')
        text = rest.popleft()
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = text
    if isinstance(default, str) and not isinstance(value, str):
        value = text  # --start=123 is the text '123'
    return name, coerce(keys[name], value, COMMAND_LINE)


def _unknown(names: list[str], keys, where: str) -> str:
    found = []
    for name in names:
        if removed(name):
            return f'{where}: {removed(name)}'
        near = difflib.get_close_matches(name, keys, n=1)
        found.append(repr(name) + (f' (did you mean {near[0]!r}?)' if near else ''))
    plural = 's' if len(names) > 1 else ''
    return f"{where}: unknown key{plural} {', '.join(found)}; --help lists all keys"


def _find(arg: str, takes_folder: bool) -> Path:
    """Find a config file, relative to the working directory or to the checkout. takes_folder: `arg`
    may also be a misspelt run folder, for the message."""
    for path in (Path(arg), ROOT / arg):
        if path.is_file():
            return path
    name, _, value = arg.partition('=')
    if name != arg and name.isidentifier():
        raise UserError(f'{arg!r}: flags are written --key=value, as in --{name}={value}')
    if takes_folder and not arg.endswith('.py'):
        kind, known = 'folder of a run', [path.parent for path in Path().glob('out*/ckpt.pt')]
    else:
        kind, known = 'config file', [f'config/{path.name}' for path in ROOT.glob('config/*.py')]
    known = sorted(map(str, known))
    near = difflib.get_close_matches(arg, known, n=1)
    if near:
        raise UserError(f'{kind} {arg!r} not found, did you mean {near[0]}?')
    raise UserError(f"{kind} {arg!r} not found; there are {', '.join(known) or 'none here'}")


def _run_file(arg, path, text, values, keys):
    """Return this program's keys as assigned in a config file, checked. Names that start with an
    underscore, imports and functions are private to the file."""
    known = defaults_of_programs() | values  # config files may set keys of any program
    namespace = dict(known, __file__=str(path), __name__='config')
    try:
        symbols = symtable.symtable(text, str(path), 'exec').get_symbols()
        _check_statements(arg, text)
        exec(compile(text, str(path), 'exec'), namespace)  # the user's own file, as in nanoGPT
    except UserError:
        raise
    except Exception as e:
        frames = traceback.extract_tb(e.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = (e.lineno or '?') if isinstance(e, SyntaxError) else (lines or '?')[-1]
        reason = f"{type(e).__name__}: {' '.join(str(e).split())}"
        raise UserError(f'{arg}, line {line}: {reason}') from e
    assigned = {name.get_name() for name in symbols if name.is_assigned()}
    imported = {name.get_name() for name in symbols if name.is_imported()}
    changed, unknown = {}, []
    for name, value in namespace.items():
        unchanged = name in known and name not in assigned and value is known[name]
        own = name.startswith('_') or name in imported or callable(value)
        if unchanged or own or isinstance(value, ModuleType):
            continue
        if name not in known:
            unknown.append(name)
        elif name in keys and value not in keys[name].metadata.get('others', ()):
            changed[name] = coerce(keys[name], value, arg)
    if unknown:
        raise UserError(_unknown(unknown, known, arg)
                        + '; start helper names with an underscore')
    return changed


def _check_statements(arg: str, text: str) -> None:
    """Raise UserError for a statement of a config file that sets nothing and calls nothing, such
    as JSON, YAML (`key: 1`) or a comparison (`key == 1`)."""
    for node in ast.parse(text).body:
        declared = isinstance(node, ast.AnnAssign) and node.value is None
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        lone = isinstance(node, ast.Expr) and not is_text and not any(
            isinstance(part, (ast.Call, ast.NamedExpr)) for part in ast.walk(node))
        if declared or lone:
            raise UserError(f'{arg}, line {node.lineno}: this sets nothing; a config file has '
                            'lines of Python such as max_iters = 100')


def run_program(main) -> None:
    """Run `main()` as a script: a UserError is one line on stderr and exit status 2, without a
    traceback; a warning is one line, without its source line."""
    use_own_compiler_cache()
    original = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: visible(
        f"warning: {' '.join(str(message).split())}\n", sys.stderr)
    try:
        main()
    except UserError as e:
        message = visible(f"error: {' '.join(str(e).splitlines())}", sys.stderr)
        print(message, file=sys.stderr)
        if file := os.environ.get('TORCHELASTIC_ERROR_FILE'):  # torchrun's report ends with it
            Path(file).write_text(json.dumps({'message': message, 'timestamp': int(time.time())}))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        end_of_line = '\n' if sys.stderr.isatty() else ''  # after the ^C that it shows
        print(end_of_line + 'interrupted', file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # e.g. `sample.py | head`
        sys.stderr.close()
        raise SystemExit(1) from None
    finally:
        warnings.formatwarning = original
