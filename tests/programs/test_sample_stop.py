"""sample.py --stop: the text ends before the first stop text. Details: engine/test_stopping.py."""
import pytest

import sample
from engine.requests.stopping import SampleText
from tests.programs.support import run_sample
from tests.programs.test_sample import KINDS, figures, texts

LONG = dict(max_new_tokens=60, start='fg')


def cut(text, *stops, n_prompt=2):
    """`text` up to the first stop text after the prompt (none of these overlap)."""
    ends = [i for i in (text.find(stop, n_prompt) for stop in stops) if i >= 0]
    return text[:min(ends, default=len(text))]


@KINDS
@pytest.mark.parametrize('parallel', [1, 3])
@pytest.mark.parametrize('stop, stops', [("['de', ' a', 'j\\n']", ['de', ' a', 'j\n']),
                                         ("'\\n'", ['\n']), ('aaaaaa', ['aaaaaa'])])
def test_the_text_ends_before_the_first_stop_text(capsys, trained, kind, parallel, stop, stops):
    settings = dict(num_samples=3, parallel=parallel, **LONG)
    whole = texts(capsys, trained[kind], **settings)
    expected = [cut(text, *stops) for text in whole]
    assert texts(capsys, trained[kind], stop=stop, **settings) == expected
    assert (expected == whole) == (stop == 'aaaaaa') and len(set(expected)) > 1


def test_a_stop_text_in_the_prompt_does_not_count(capsys, trained):
    text, = texts(capsys, trained['full'], start='abcdab', max_new_tokens=3, stop='cd',
                  temperature=0)
    assert text == texts(capsys, trained['full'], start='abcdab', max_new_tokens=3,
                         temperature=0)[0]
    assert len(text) == 9
    # nor one that begins in the prompt
    whole, = texts(capsys, trained['full'], start='abc', max_new_tokens=1, temperature=0)
    assert texts(capsys, trained['full'], start='abc', max_new_tokens=1, temperature=0,
                 stop=whole[2:]) == [whole]


@pytest.mark.parametrize('parallel', [1, 3])
def test_a_batch_ends_with_its_longest_sample_and_counts_only_needed_tokens(
        capsys, trained, monkeypatch, parallel):
    steps, plain = [], sample.Generation.__next__
    monkeypatch.setattr(sample.Generation, '__next__', lambda g: steps.append(1) or plain(g))
    settings = dict(num_samples=3, parallel=parallel, **LONG)
    whole = texts(capsys, trained['full'], **settings)
    used = [len(cut(text, 'd')) - 2 + 1 for text in whole]  # the stop text's token included
    steps.clear()
    f = figures(capsys, trained['full'], stop='d', **settings)
    assert max(used) < 60 and len(set(used)) > 1
    assert len(steps) == (max(used) + 1 if parallel == 3 else sum(used) + 3)  # plus the final calls
    assert f['tokens'] == sum(used)
    assert f['tpot_ms'] > 0 and f['tokens_per_second'] > 0


def test_text_is_printed_as_it_is_made_and_ctrl_c_prints_what_was_held_back(
        capsys, trained, monkeypatch):
    whole, = texts(capsys, trained['full'], temperature=0, **LONG)
    n = whole.index('c', 3) - 2 + 1  # the first n new characters end with 'c'
    plain, before = SampleText.add, []

    def add(text, token):
        if text.n_tokens == n:
            before.append(capsys.readouterr().out)
            raise KeyboardInterrupt
        return plain(text, token)
    monkeypatch.setattr(SampleText, 'add', add)
    with pytest.raises(KeyboardInterrupt):
        run_sample(capsys, out_dir=trained['full'], stop='cX', temperature=0, **LONG)
    assert before[0].endswith(whole[:1 + n]) and capsys.readouterr().out == 'c'


def test_an_impossible_stop_text_is_noted(capsys, trained):
    out = run_sample(capsys, out_dir=trained['full'], stop='\\n')  # not a newline
    assert "Note: the stop text '\\\\n' cannot come up" in out
