"""One Python file out of many: some definitions of this project and all that they need of it, in an order that works.

Hugging Face loads a model's code from a single file beside its weights. It is cut out of our own source as it stands, comments
included, so that there is no second copy to keep in step: names are followed from definition to definition, imports of our own
modules fall away (all names share one file, so no two may be alike), and methods that are not needed can be left out.

    bundle('interop.modeling', ['NanoKVForCausalLM'], without={'model.GPT': {'forward'}})
"""
import ast
import builtins
import symtable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = ('attention', 'config', 'data', 'engine', 'generate', 'interop', 'kv', 'model', 'training')


class BundleError(Exception):
    """The source is written in a way that cannot be bundled."""


@dataclass
class Module:
    """A file of ours: its definitions by name, and where the other names that it uses come from."""
    name: str
    lines: list[str]
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    ours: dict[str, tuple[str, str]] = field(default_factory=dict)  # name here -> (module, name there)
    others: dict[str, str] = field(default_factory=dict)            # name here -> import statement

    @classmethod
    def read(cls, name: str) -> 'Module':
        path = ROOT.joinpath(*name.split('.'))
        path = path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
        text = path.read_text(encoding='utf-8')
        module = cls(name, text.splitlines())
        for node in ast.parse(text).body:
            module._take(node)
        return module

    def _take(self, node):
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.others[alias.asname or alias.name.partition('.')[0]] = _statement(alias)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if is_ours(node.module):
                    self.ours[alias.asname or alias.name] = node.module, alias.name
                else:
                    self.others[alias.asname or alias.name] = f'from {node.module} import {_with_name(alias)}'
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self.definitions[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        self.definitions[name.id] = node

    def first_line(self, node) -> int:
        """Of a definition with its decorators and the comments right above it; counted from 0."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, 'decorator_list', []))]) - 1
        while first and self.lines[first - 1].lstrip().startswith('#'):
            first -= 1
        return first


def is_ours(module: str | None) -> bool:
    return bool(module) and module.partition('.')[0] in OURS


def bundle(module: str, names: list[str], without: dict[str, set[str]] | None = None) -> str:
    """The source of `names` of a module of ours, and of all that they need.

    Args:
        without: 'module.Class' -> methods that are left out.
    Raises:
        BundleError: two definitions have one name, a name is found nowhere, or one is imported in a way that is not followed.
    """
    return _Bundle(without or {}).made(module, names)


class _Bundle:

    def __init__(self, without):
        self.without = without
        self.modules: dict[str, Module] = {}
        self.order: list[str] = []                      # modules, those that others need first
        self.needed: dict[str, set[str]] = {}           # module -> names of its definitions
        self.imports: dict[str, str] = {}               # name -> import statement
        self.owner: dict[str, str] = {}                 # name -> module
        self.within: dict[str, list[str]] = {}          # module -> those that its functions import

    def made(self, module, names):
        for name in names:
            self._need(module, name)
        self._arrange(module, set())
        parts = [self._text(name) for name in self.order if self.needed.get(name)]
        text = '\n'.join(_grouped(self.imports.values())) + '\n\n\n' + '\n\n\n'.join(parts) + '\n'
        unknown = sorted(_unknown(symtable.symtable(text, module, 'exec')))
        if unknown:
            raise BundleError(f'{unknown[0]!r} is found nowhere')
        return text

    def _module(self, name) -> Module:
        if name not in self.modules:
            self.modules[name] = Module.read(name)
        return self.modules[name]

    def _need(self, module, name):
        """A definition is to be in the bundle, and so is what it needs."""
        found = self._module(module)
        if name in found.ours:  # handed on from another module
            return self._need(*found.ours[name])
        if name not in found.definitions:
            raise BundleError(f'{module} has no {name!r}')
        if self.owner.setdefault(name, module) != module:
            raise BundleError(f'{name!r} is in {module} and in {self.owner[name]}')
        if name in self.needed.setdefault(module, set()):
            return
        self.needed[module].add(name)
        for used in self._used(module, name):
            self._follow(found, used)

    def _follow(self, module, name):
        if name in module.definitions:
            self._need(module.name, name)
        elif name in module.ours:
            origin, there = module.ours[name]
            if there != name:
                raise BundleError(f'{module.name} imports {origin}.{there} as {name!r}')
            self._need(origin, there)
        elif name in module.others:
            line = module.others[name]
            if self.imports.setdefault(name, line) != line:
                raise BundleError(f'{name!r} is imported as {line!r} and as {self.imports[name]!r}')
            if line.startswith('import ') and is_ours(line.split()[1]):
                raise BundleError(f'{module.name} has {line!r}: name what is needed of it')

    def _used(self, module, name) -> set[str]:
        """Names that a definition may look up in its module."""
        node = self._node(module, name)
        used = set()
        for part in self._walk(node, f'{module}.{name}'):
            if isinstance(part, ast.Name):
                used.add(part.id)
            elif isinstance(part, ast.ImportFrom) and is_ours(part.module):  # inside of a function
                self.within.setdefault(module, []).append(part.module)
                for alias in part.names:
                    self._need(part.module, alias.name)
        return used - {name} - set(dir(builtins)) | (used & self._module(module).definitions.keys()) - {name}

    def _node(self, module, name):
        return self._module(module).definitions[name]

    def _walk(self, node, path):
        left_out = self.without.get(path, set())
        for child in ast.iter_child_nodes(node):
            if not (isinstance(child, ast.FunctionDef) and child.name in left_out):
                yield child
                yield from self._walk(child, '')

    def _arrange(self, name, seen):
        """Modules behind those that they import from."""
        if name in seen:
            return
        seen.add(name)
        imported = [origin for origin, _ in self._module(name).ours.values()]
        for origin in imported + self.within.get(name, []):
            if origin in self.modules:
                self._arrange(origin, seen)
        self.order.append(name)

    def _text(self, name) -> str:
        """The definitions of a module that are needed, as they stand there."""
        module, nodes = self._module(name), {}
        for each in self.needed[name]:
            nodes.setdefault(id(module.definitions[each]), (module.definitions[each], each))
        pieces = [self._source(module, node, each) for node, each in sorted(nodes.values(), key=lambda x: x[0].lineno)]
        gap = [''] + ['\n\n' if '\n' in piece else '' for piece in pieces[1:]]
        return f'# -- {name.replace(".", "/")}.py ' + '-' * (100 - len(name)) + '\n\n' + '\n'.join(
            g + piece for g, piece in zip(gap, pieces))

    def _source(self, module, node, name) -> str:
        key = f'{module.name}.{name}'
        dropped = set()
        for child in ast.walk(node):
            drop = isinstance(child, ast.ImportFrom) and is_ours(child.module)
            drop |= isinstance(child, ast.FunctionDef) and child.name in self.without.get(key, ()) and child in node.body
            if drop:
                dropped |= set(range(module.first_line(child), child.end_lineno))
        whole = range(module.first_line(node), node.end_lineno)
        lines = []
        for line in (module.lines[i] for i in whole if i not in dropped):  # what stood around a method that is gone
            if line.strip() or not (lines and not lines[-1].strip()):
                lines.append(line)
        return '\n'.join(lines).rstrip()


def _grouped(imports) -> list[str]:
    """Import statements, those from one package as one."""
    plain, of = [], {}
    for line in sorted(set(imports)):
        package, _, names = line.removeprefix('from ').partition(' import ')
        if line.startswith('from '):
            of.setdefault(package, []).append(names)
        else:
            plain.append(line)
    return plain + [f"from {package} import {', '.join(names)}" for package, names in of.items()]


def _statement(alias) -> str:
    """An import; `import a.b as b` as `from a import b`, so that the two are one."""
    package, _, last = alias.name.rpartition('.')
    if package and alias.asname:
        return f'from {package} import {last}' + (f' as {alias.asname}' if alias.asname != last else '')
    return f'import {_with_name(alias)}'


def _with_name(alias) -> str:
    return alias.name + (f' as {alias.asname}' if alias.asname else '')


def _unknown(table, known=None) -> set[str]:
    """Names that a scope, or one within it, looks up in the module, which does not have them."""
    known = known or {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()
                      } | set(dir(builtins)) | {'__file__', '__name__'}
    here = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and symbol.is_global()}
    return (here - known).union(*(_unknown(child, known) for child in table.get_children()))
