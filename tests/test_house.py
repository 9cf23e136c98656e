"""The order of the rooms (docs/architecture.md), and that the core is small and independent."""
import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ['model.py', 'generate.py', *(f'kv/{name}.py' for name in (
    '__init__', 'plan', 'slots', 'cache', 'quantize', 'report'))]
CORE += sorted(str(path.relative_to(ROOT)) for path in (ROOT / 'attention').glob('*.py'))
CORE_LINES = 1_800

# From the top down; a room imports only from rooms below it. Programs never import each other.
ORDER = ['programs', 'lab', 'serving', 'interop', 'training', 'engine', 'generate', 'model', 'kv',
         'attention', 'data', 'configurator', 'config']
PROGRAMS = {'train', 'sample', 'chat', 'serve', 'ablate', 'bench', 'kv.__main__'}
# the thin methods of GPT that nanoGPT's API requires
METHODS = {('model', 'interop.huggingface'), ('model', 'generate'), ('model', 'training.optim'),
           ('model', 'training.flops'), ('model', 'training.adapt')}


def sources():
    """{module: parsed source} of the project without tests."""
    found = subprocess.run(['git', 'ls-files', '*.py'], cwd=ROOT, capture_output=True, text=True)
    paths = [path for path in found.stdout.split() if (ROOT / path).is_file()]
    assert len(paths) > 100
    return {path[:-3].replace('/', '.').removesuffix('.__init__'): ast.parse(
        (ROOT / path).read_text(encoding='utf-8')) for path in paths
        if not path.startswith(('tests/', 'results/'))}


MODULES = sources()


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
    program = name in PROGRAMS or name.startswith('lab.scripts.')
    return 'programs' if program else name.partition('.')[0]


EDGES = {(name, other) for name in MODULES for other in imported(name)} - METHODS


def test_no_room_imports_from_one_above_it():
    upward = [(a, b) for a, b in sorted(EDGES) if ORDER.index(room(a)) > ORDER.index(room(b))]
    assert upward == []


def test_what_rooms_know_nothing_of():
    unknown = {'serving': {'training'}, 'training': {'engine', 'serving'}, 'interop': {'programs'},
               'engine': {'training', 'interop', 'serving'}, 'attention': {'kv', 'model'},
               'kv': {'model', 'engine'}, 'model': {'engine'}, 'generate': {'engine'}}
    known = [(a, b) for a, b in sorted(EDGES) if room(b) in unknown.get(room(a), ())]
    assert known == []


def test_no_module_imports_itself_by_way_of_others():
    try:
        tuple(TopologicalSorter({name: {b for a, b in EDGES if a == name} for name in MODULES}
                                ).static_order())
    except CycleError as e:
        pytest.fail(' -> '.join(e.args[1]))


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
    assert ours == {*names, 'config', 'config.errors', 'config.gpt_config'}
    assert not loaded & {'triton', 'transformers', 'rich', 'tiktoken', 'flash_attn'}


def test_the_core_is_small():
    lines = {path: (ROOT / path).read_text(encoding='utf-8').splitlines() for path in CORE}
    assert sum(map(len, lines.values())) <= CORE_LINES
    assert [path for path, text in lines.items() if any(len(line) > 100 for line in text)] == []


def test_files_and_functions_are_short():
    found = subprocess.run(['git', 'ls-files', '*.py'], cwd=ROOT, capture_output=True, text=True)
    long = []
    for path in filter(lambda path: (ROOT / path).is_file(), found.stdout.split()):
        text = (ROOT / path).read_text(encoding='utf-8')
        if len(text.splitlines()) >= 400:
            long.append(path)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if node.end_lineno - first + 1 >= 60 and not path.startswith('tests/'):
                    long.append(f'{path}: {node.name}')
    assert long == []
