"""One file out of many: it runs by itself, holds what it needs and no more, and says what it cannot follow."""
import subprocess
import sys
import types

import pytest

from interop import bundle as bundling
from interop.bundle import BundleError, bundle

FILES = {
    'kv/low.py': '''
import math
from math import sqrt as root

# why it is seven
SEVEN = 7
UNUSED = 8


def length(x):
    """Of x."""
    return root(x * x) + SEVEN


def unused():
    return UNUSED


A, B = 1, 2
''',
    'kv/__init__.py': 'from kv.low import length\n',
    'attention/high.py': '''
import math

from kv import length
from kv.low import SEVEN


def late():
    return 'late'


@staticmethod
def decorated():
    return math.pi


class Base:
    """A base."""

    def kept(self):
        return length(-3)

    # about the next one
    @property
    def dropped(self):
        return late()

    def also_kept(self):
        from kv.low import B  # only here
        return B


class Top(Base):
    def value(self):
        return [self.kept(), self.also_kept(), SEVEN]
''',
    'attention/again.py': 'from attention.high import Top\n\n\ndef length():\n    return Top\n',
    'attention/renamed.py': 'from kv.low import SEVEN as six\n\n\ndef f():\n    return six\n',
    'attention/lazy.py': 'def area(x):\n    from kv.other import times_seven  # slow to load\n    return times_seven(2 * x)\n',
    'kv/other.py': 'from kv.low import SEVEN\n\n\ndef times_seven(x):\n    return SEVEN * x\n',
    'attention/whole.py': 'import kv.low\n\n\ndef f():\n    return kv.low.SEVEN\n',
}


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(bundling, 'ROOT', tmp_path)
    return tmp_path


def run(text):
    module = types.ModuleType('bundled')
    exec(compile(text, 'bundled', 'exec'), module.__dict__)
    return module


def test_what_is_needed_comes_in_order_and_runs_alone():
    text = bundle('attention.high', ['Top'])
    assert run(text).Top().value() == [10.0, 2, 7]
    for there in ('# why it is seven\nSEVEN = 7', 'class Base:', '"""Of x."""', 'from math import sqrt as root', 'A, B = 1, 2'):
        assert text.count(there) == 1
    for gone in ('UNUSED', 'def unused', 'decorated', 'from kv', 'import math\n', '# only here'):
        assert gone not in text
    assert text.index('SEVEN = 7') < text.index('class Base') < text.index('class Top')


def test_methods_are_left_out_with_what_only_they_need():
    text = bundle('attention.high', ['Top'], without={'attention.high.Base': {'dropped'}})
    assert 'dropped' not in text and '# about' not in text and 'late' not in text and '@property' not in text
    assert run(text).Top().value() == [10.0, 2, 7]
    assert 'late' in bundle('attention.high', ['Top'])


def test_what_only_a_function_imports_comes_too():
    """From a module that is imported nowhere else."""
    text = bundle('attention.lazy', ['area'])
    assert run(text).area(2) == 28 and 'from kv' not in text
    assert text.index('def times_seven') < text.index('def area')


def test_names_handed_on_by_a_package_are_followed():
    assert run(bundle('kv', ['length'])).length(2) == 9


@pytest.mark.parametrize('module, name, named', [
    ('attention.again', 'length', "'length' is in kv.low and in attention.again"), ('attention.renamed', 'f', "as 'six'"),
    ('attention.whole', 'f', "'import kv.low'"), ('kv.low', 'nothing', "kv.low has no 'nothing'")])
def test_what_cannot_be_followed_is_named(module, name, named):
    with pytest.raises(BundleError) as caught:
        bundle(module, [name])
    assert named in str(caught.value)


def test_a_bundle_needs_nothing_of_ours(tmp_path):
    (tmp_path / 'alone.py').write_text(bundle('attention.high', ['Top']) + '\nprint(Top().value())\n')
    done = subprocess.run([sys.executable, '-I', str(tmp_path / 'alone.py')], capture_output=True, text=True)
    assert done.stdout == '[10.0, 2, 7]\n', done.stderr
