"""The order of the rooms (docs/architecture.md), their sizes, and that the core stands alone.

Tests marked `house` are the project's own rules. `make house` and CI run them, `make test` does
not: a change that someone tries out must not fail for its size.
"""
import ast
import io
import re
import subprocess
import sys
import tokenize
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from lab.ablation.results import CORE

ROOT = Path(__file__).resolve().parents[1]
# Lines of the core are not limited, since a limit on lines makes lines dense.
CORE_TOKENS = 15_660

# The largest number of lines of Python in each room. A change that makes a room smaller lowers its
# number. Before the elastic models they were 23,791 lines without tests, and 21,370 of tests.
BUDGETS = {
    'nanokv.py': 250,
    'train.py sample.py chat.py serve.py ablate.py bench.py': 1_194,
    'lab/': 4_347,
    'serving/': 1_340,
    'interop/': 1_700,
    'training/': 3_784,
    'extension/': 90,
    'engine/': 4_592,
    'attention/': 864,  # without the core, like kv/
    'kv/': 1_107,
    'data/': 1_889,
    'common/ config/ configurator.py': 1_886,
    'tests/': 22_247,
}
house = pytest.mark.house

# From the top down; a room imports only from rooms below it. Programs never import each other.
ORDER = ['measuring', 'lab', 'programs', 'serving', 'interop',
         'training.plot', 'training.loop', 'training.memory', 'training.elastic', 'training.native',
         'training.step', 'training.parallel', 'training.checkpoint', 'training.evaluate',
         'training.device', 'training',
         'engine.text', 'engine.engine', 'engine.steps', 'engine.prefix', 'engine.requests',
         'engine.weights', 'engine.pages', 'engine.native', 'engine',
         'generate', 'model', 'kv', 'attention', 'data', 'configurator', 'extension', 'config',
         'common']
PROGRAMS = {'train', 'sample', 'chat', 'serve', 'nanokv', 'kv.__main__'}
MEASURING = {'ablate', 'bench'}  # they use lab/, which reads the settings of the programs
# the thin methods of GPT that nanoGPT's API requires
METHODS = {('model', 'interop.huggingface'), ('model', 'generate'),
           ('model', 'training.step.optim'), ('model', 'training.step.flops'),
           ('model', 'training.checkpoint.adapt')}


def sources() -> dict[str, str]:
    """{path: text} of all Python files of the project."""
    if (ROOT / '.git').exists():
        found = subprocess.run(['git', 'ls-files', '*.py'], cwd=ROOT, capture_output=True,
                               text=True)
        paths = [path for path in found.stdout.split() if (ROOT / path).is_file()]
    else:  # a downloaded archive
        own = [path.relative_to(ROOT) for path in ROOT.rglob('*.py')]
        paths = [str(path) for path in own if not any(part[0] == '.' for part in path.parts)]
    assert len(paths) > 100
    return {path: (ROOT / path).read_text(encoding='utf-8') for path in paths}


FILES = sources()
MODULES = {path[:-3].replace('/', '.').removesuffix('.__init__'): ast.parse(text)
           for path, text in FILES.items() if not path.startswith('tests/')}


def imported(name) -> set[str]:
    """Modules of the project that a module imports, including imports within functions."""
    found = set()
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            parts = {f'{node.module}.{alias.name}' for alias in node.names}
            found |= parts & MODULES.keys() or {node.module}
    return {each for each in found if each in MODULES and each != name}


def room(name) -> str:
    first, _, rest = name.partition('.')
    if name in MEASURING or name.startswith('lab.scripts.'):
        return 'measuring'
    if name in PROGRAMS:
        return 'programs'
    if rest and first in ('engine', 'training'):
        return f"{first}.{rest.partition('.')[0]}"
    return first


EDGES = {(name, other) for name in MODULES for other in imported(name)} - METHODS


@house
def test_no_room_imports_from_one_above_it():
    upward = [(a, b) for a, b in sorted(EDGES) if ORDER.index(room(a)) > ORDER.index(room(b))]
    assert upward == []


@house
def test_what_rooms_know_nothing_of():
    unknown = {'serving': {'training'}, 'training': {'engine', 'serving'}, 'interop': {'programs'},
               'engine': {'training', 'interop', 'serving'}, 'attention': {'kv', 'model'},
               'kv': {'model', 'engine'}, 'model': {'engine'}, 'generate': {'engine'}}
    known = [(a, b) for a, b in sorted(EDGES)
             if b.partition('.')[0] in unknown.get(a.partition('.')[0], ())]
    assert known == []


def test_no_module_imports_itself_by_way_of_others():
    try:
        tuple(TopologicalSorter({name: {b for a, b in EDGES if a == name} for name in MODULES}
                                ).static_order())
    except CycleError as e:
        pytest.fail(' -> '.join(e.args[1]))


@house
def test_the_methods_of_gpt_are_the_only_ones_let_through():
    for name, other in METHODS:
        assert other in imported(name), f'{name} no longer imports {other}'


def test_the_core_stands_alone():
    """Imported in a new process, it loads no other part of the project."""
    names = [path[:-3].replace('/', '.').removesuffix('.__init__') for path in CORE]
    program = (f'import sys, importlib\nfor name in {names!r}: importlib.import_module(name)\n'
               'print(*sys.modules)')
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    ours = loaded & MODULES.keys()
    assert ours == {*names, 'common', 'common.errors', 'common.gpt_config'}
    assert not loaded & {'triton', 'transformers', 'rich', 'tiktoken', 'flash_attn'}


# -- sizes -----------------------------------------------------------------------------------------

LAYOUT = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT,
          tokenize.ENDMARKER}
# Python 3.12 and later split an f-string into tokens; it counts as one, as before
F_STRING = {getattr(tokenize, 'FSTRING_START', -1): 1, getattr(tokenize, 'FSTRING_END', -1): -1}


def n_tokens(text) -> int:
    """Number of Python tokens, without comments, docstrings, line ends and indentation."""
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        inside = depth > 0
        depth += F_STRING.get(token.type, 0)
        if not inside and token.type not in LAYOUT:
            count += 1

    docstrings = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)
                  and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]
    return count - len(docstrings)


@house
@pytest.mark.parametrize('text, n', [
    ('"""A module."""\n\n\nx = 1  # a comment\n', 3),
    ('def f(a):\n    """A function."""\n\n    return [a,\n            -1]\n', 13),
    ("print(f'{a:>{b}} {f(a)}', 'c')\n", 6),
])
def test_what_counts_as_a_token(text, n):
    assert n_tokens(text) == n


@house
def test_the_core_is_small():
    assert sum(n_tokens(FILES[path]) for path in CORE) <= CORE_TOKENS


@house
def test_no_room_is_larger_than_its_budget():
    sizes = dict.fromkeys(BUDGETS, 0)
    for path in FILES.keys() - set(CORE):
        room = next((room for room in BUDGETS if path.startswith(tuple(room.split()))), None)
        assert room, f'{path} is in no room'
        sizes[room] += len(FILES[path].splitlines())
    over = {room: n for room, n in sizes.items() if n > BUDGETS[room]}
    assert over == {}


@house
def test_files_functions_and_lines_are_short():
    long = []
    for path, text in FILES.items():
        lines = text.splitlines()
        if len(lines) >= 500:
            long.append(path)
        long += [f'{path}:{i}' for i, line in enumerate(lines, 1) if len(line) > 100]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if node.end_lineno - first + 1 >= 60 and not path.startswith('tests/'):
                    long.append(f'{path}: {node.name}')
    assert long == []


@house
def test_the_commands_that_test_a_change_leave_these_out():
    pages = [ROOT / 'README.md', ROOT / 'Makefile', ROOT / '.ci/run', *ROOT.glob('docs/*.md')]
    text = ''.join(path.read_text(encoding='utf-8') for path in pages)
    chosen = re.findall(r"-m '(not slow[^']*)'", text)
    assert len(chosen) > 1 and set(chosen) == {'not slow and not house'}
    assert '\nmake house ' in (ROOT / '.ci/run').read_text()
