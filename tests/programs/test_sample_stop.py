"""sample.py --stop: the text ends before the first stop text, however its tokens lie; clocks count
what was produced."""
import codecs

import pytest

import interop.load
import sample
from engine.stopping import SampleText
from tests.programs.support import ALPHABET, run_sample
from tests.programs.test_sample import KINDS, RULE, figures, texts

LONG = dict(max_new_tokens=60, start='fg')


def cut(text, *stops, n_prompt=2):
    """`text` up to the first stop text after the prompt (none of these overlap)."""
    ends = [i for i in (text.find(stop, n_prompt) for stop in stops) if i >= 0]
    return text[:min(ends, default=len(text))]


@KINDS
@pytest.mark.parametrize('parallel', [1, 3])
@pytest.mark.parametrize('stop, stops',
                         [('cd', ['cd']), ("['de', ' a', 'j\\n']", ['de', ' a', 'j\n']),
                          ("'\\n'", ['\n']), ('aaaaaa', ['aaaaaa'])])
def test_the_text_ends_before_the_first_stop_text(capsys, trained, kind, parallel, stop, stops):
    settings = dict(num_samples=5, parallel=parallel, **LONG)
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


def letters(tokenizer):
    """A tokenizer whose ids are bytes of a made-up text: stop texts straddle tokens and
    characters."""
    text = 'Grüße an alle. Ende\n'.encode()

    class Stream:
        def __init__(self):
            self.decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')
            self.n = 0

        def __call__(self, token):
            self.n += 1
            return self.decoder.decode(text[(self.n - 1) * 3:self.n * 3])

        def end(self):
            return self.decoder.decode(b'', final=True)
    tokenizer.stream = Stream
    return tokenizer


@pytest.mark.parametrize('parallel', [1, 2])
@pytest.mark.parametrize('stop, expected',
                         [('ße', 'Grü'), ('alle.', 'Grüße an '), ("['Ende', 'lle']", 'Grüße an a'),
                          ('ü', 'Gr'), ('Endlich', 'Grüße an alle. Ende\n'),
                          ('', 'Grüße an alle. Ende\n')])
def test_stop_texts_that_straddle_tokens(capsys, trained, monkeypatch, parallel, stop, expected):
    plain = interop.load.tokenizer_of
    monkeypatch.setattr(interop.load, 'tokenizer_of', lambda *args: letters(plain(*args)))
    out = run_sample(capsys, out_dir=trained['full'], stop=stop, num_samples=2, parallel=parallel,
                     report=False)
    assert out.endswith(f'ab{expected}\n{RULE}\n' * 2)


def test_a_single_sample_is_printed_as_it_is_made_less_what_may_begin_a_stop_text(capsys, trained,
                                                                                  monkeypatch):
    """At no moment is more on the screen than what is certain, or less."""
    settings = dict(temperature=0, **LONG)
    whole, = texts(capsys, trained['full'], **settings)
    screen, plain = [], SampleText.add

    def add(text, token):
        screen.append(capsys.readouterr().out)
        return plain(text, token)
    monkeypatch.setattr(SampleText, 'add', add)
    # begins with a common letter, never complete
    run_sample(capsys, out_dir=trained['full'], stop='hia', **settings)
    assert 'hia' not in whole and 'h' in whole
    for n in range(len(screen)):  # before token n
        made = whole[:2 + n]
        certain = made if n == 0 else made[:-2] if made.endswith('hi') else made.removesuffix('h')
        assert ''.join(screen[:n + 1]).endswith(f'meta.pkl...\n{certain}')


def test_ctrl_c_leaves_what_there_is_of_a_streamed_sample(capsys, trained, monkeypatch):
    """Text held back included: whether it would have become a stop text is not known."""
    whole, = texts(capsys, trained['full'], temperature=0, **LONG)
    n, plain = whole.index('c',
                           3) - 2 + 1, SampleText.add  # the first n new characters end with 'c'

    def add(text, token):
        if text.n_tokens == n:
            raise KeyboardInterrupt
        return plain(text, token)
    monkeypatch.setattr(SampleText, 'add', add)
    with pytest.raises(KeyboardInterrupt):
        run_sample(capsys, out_dir=trained['full'], stop='cX', temperature=0, **LONG)
    assert capsys.readouterr().out.endswith(whole[:2 + n]) and whole[:2 + n].endswith('c')


# -- figures ---------------------------------------------------------------------------------------

@pytest.mark.parametrize('parallel', [1, 3, 5])
def test_only_tokens_that_a_sample_needed_are_counted(capsys, trained, parallel):
    settings = dict(num_samples=5, parallel=parallel, **LONG)
    whole = texts(capsys, trained['full'], **settings)
    f = figures(capsys, trained['full'], stop='de', **settings)
    used = [len(cut(text, 'de')) - 2 + 2 * ('de' in text[2:])
            for text in whole]  # the stop text's tokens were made too
    assert f['tokens'] == sum(used) < 5 * 60 and len(set(used)) > 1
    assert f['tpot_ms'] > 0 and f['tokens_per_second'] > 0


def test_a_batch_ends_when_all_its_samples_have_stopped(capsys, trained, monkeypatch):
    steps, plain = [], sample.Generation.__next__
    monkeypatch.setattr(sample.Generation, '__next__', lambda g: steps.append(1) or plain(g))
    settings = dict(num_samples=3, parallel=3, **LONG)
    longest = max(len(cut(text, 'd')) - 2 + 1
                  for text in texts(capsys, trained['full'], **settings))
    steps.clear()
    texts(capsys, trained['full'], stop='d', **settings)
    assert longest < 60 and len(steps) == longest + 1  # and the call that says so


# -- wrong input -----------------------------------------------------------------------------------


def test_a_stop_text_that_cannot_come_up_is_noted(capsys, trained):
    """As when a shell passes on a backslash and an n for a newline."""
    out = run_sample(capsys, out_dir=trained['full'], stop='\\n')
    assert "Note: the stop text '\\\\n' cannot come up" in out
    assert 'Note' not in run_sample(capsys, out_dir=trained['full'], stop=ALPHABET[3:])
