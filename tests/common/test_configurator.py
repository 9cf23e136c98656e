"""Command lines and config files: order, types, echo, and specific error messages."""
import dataclasses
import json
import subprocess
import sys

import pytest

import configurator
from common.errors import UserError
from common.removed import COMMIT, KEYS, VALUES
from configurator import default_of, keys_of
from tests.helpers.programs import SETTINGS
from training.checkpoint.file import config_of

ROOT = configurator.ROOT


def parse(*argv, program='train'):
    return configurator.parse(SETTINGS[program], list(argv), echo=False)


def refused(*argv, program='train'):
    """The error message, which must be one line."""
    with pytest.raises(UserError) as caught:
        parse(*argv, program=program)
    assert '\n' not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def file(tmp_path):
    def write(text, name='c.py'):
        path = tmp_path / name
        path.write_text(text, encoding='utf-8')
        return str(path)
    return write


# -- order -----------------------------------------------------------------------------------------

def test_without_arguments_every_key_has_its_default():
    for program, settings in SETTINGS.items():
        s = parse(program=program)
        assert s == settings() and not s.given
        assert s.values() == settings().values()


def test_settings_are_read_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse().max_iters = 1


def test_the_keys_of_all_programs_are_found_in_their_sources():
    """So that config files may set them, whichever program reads the file."""
    found = configurator.defaults_of_programs()
    keys = {name: default_of(key) for settings in SETTINGS.values()
            for name, key in keys_of(settings).items()}
    assert found.keys() == keys.keys()
    differ = {name for name in keys if found[name] != keys[name]}
    assert all(any(default_of(keys_of(settings)[name]) == found[name]
                   for settings in SETTINGS.values() if name in keys_of(settings))
               for name in differ)


def test_the_later_of_flags_and_files_wins(file):
    a, b = file('\ufeffbatch_size = 5', 'a.py'), file('batch_size = 6', 'b.py')
    for argv, last in ((['--batch_size=3', a], 5), ([a, '--batch_size=3'], 3), ([a, b], 6),
                       (['--batch_size=3', '--batch_size=4'], 4)):
        assert parse(*argv).batch_size == last


def test_later_settings_of_a_file_may_use_earlier_ones_flags_and_defaults(file):
    path = file('lr_decay_iters = max_iters\nmin_lr = learning_rate / 10\nmax_iters = 7')
    s = parse('--max_iters=50', path)
    assert (s.lr_decay_iters, s.max_iters, s.min_lr) == (50, 7, 6e-4 / 10)


# -- types -----------------------------------------------------------------------------------------

@pytest.mark.parametrize('flag, key, value', [
    ('--dropout=0', 'dropout', 0.0),
    ('--learning_rate=1e-3', 'learning_rate', 1e-3),
    ('--max_iters=1e4', 'max_iters', 10000),
    ('--bias=True', 'bias', True),
    ('--dtype="float32"', 'dtype', 'float32'),
    ('--kv_share=', 'kv_share', ''),
    ('--seed=-1', 'seed', -1),
    # text, whatever it looks like
    *((f'--out_dir={text}', 'out_dir', text)
      for text in ('007', 'None', 'a=b=c', 'ROMEO: a = b', "it's", '(1, 2)')),
    (r"--out_dir='a\nb'", 'out_dir', 'a\nb'),
])
def test_flag_value(flag, key, value):
    got = getattr(parse(flag), key)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize('program', SETTINGS)
def test_imports_and_functions_named_like_a_key_are_not_meant(file, program):
    path = file('import json\nfrom math import pi\ndef report(): pass\ndef stop(): pass\n'
                'learning_rate = pi / 1000')
    assert not {'json', 'report', 'stop'} & parse(path, program=program).given.keys()


def test_other_numbers_of_a_file_are_converted_and_docstrings_calls_and_types_are_no_idle_lines(
        file):
    s = parse(file('"about"\nimport numpy as np\nprint(end="")\nlearning_rate = np.float64(0.5)\n'
                   'max_iters: int = np.int64(7)\n(batch_size := 1e1)\ndropout = 0'))
    found = s.learning_rate, s.max_iters, s.batch_size, s.dropout
    assert found == (0.5, 7, 10, 0.0)
    assert [type(x) for x in found] == [float, int, int, float]


def test_given_are_the_keys_that_were_set_also_to_their_default(file):
    path = file("gelu = 'exact'\nif True:\n    n_layer = 12\n_width = 64\nn_embd = 2 * _width")
    s = parse('--dropout=0', path)
    assert s.given.keys() == {'gelu', 'n_layer', 'n_embd', 'dropout'} and 'given' not in s.values()


@pytest.mark.parametrize('program, name, choices', [
    (program, name, key.metadata['choices']) for program, settings in SETTINGS.items()
    for name, key in keys_of(settings).items() if key.metadata['choices']])
def test_every_choice_is_named_when_none_was_met(program, name, choices):
    message = refused(f'--{name}=other', program=program)
    assert "'other'" in message and all(repr(choice) in message for choice in choices)
    for choice in choices:
        assert getattr(parse(f'--{name}={choice}', program=program), name) == choice


# -- refusals --------------------------------------------------------------------------------------

LOCALE = 'config/train_mqa_locale.py'


@pytest.mark.parametrize('argv, words', [
    # another type
    *(([f'--{name}={value}'], [f'{name}=', value[:50], kind]) for name, value, kind in (
        ('batch_size', '1.5', 'a whole number'), ('batch_size', 'abc', 'a whole number'),
        ('batch_size', 'True', 'a whole number'), ('dropout', 'False', 'a number'),
        ('bias', '1', 'True or False'), ('learning_rate', '1' + '0' * 400, 'number'),
        ('learning_rate', 'nan', 'number'), ('learning_rate', '-inf', 'number'))),
    # an unknown key, or one of another program
    (['--learnin_rate=1'], ["'learnin_rate'", "did you mean 'learning_rate'"]),
    (['--xyzzy=1'], ['--help']), (['--temperature=1.0'], ["'temperature'"]),
    # a malformed argument
    (['--batch_size'], ['--batch_size needs a value']),
    (['-batch_size=3'], ['as in --batch_size=3']), (['-x'], ['--x=value']),
    (['--=3'], ["unknown key ''"]), (['max_iters=5'], ['as in --max_iters=5']),
    (['--compile', 'false'], ["--compile takes True or False, not 'false'"]),
    (['--compile', '0'], ["--compile takes True or False, not '0'"]),
    ([''], ['an argument is empty']), (['nothing.py'], ['there are config/', 'char_vanilla.py']),
    ([LOCALE], [f"'{LOCALE}'", 'train_mqa_local.py'])])
def test_an_argument_that_is_refused_is_named_with_the_remedy(argv, words):
    message = refused(*argv)
    assert [word for word in words if word not in message] == []
    assert ('did you mean' in message) == (argv in (['--learnin_rate=1'], [LOCALE]))
    assert 'gpt_config' not in message and 'folder_lock' not in message  # no config files


@pytest.mark.parametrize('name, value', [
    *((name, 4) for name in KEYS),
    *((name, value) for name, values in VALUES.items() for value in values if name != 'recompute')])
def test_a_removed_setting_names_the_commit(file, name, value):
    program = 'bench' if name in ('mode', 'against') else 'train'
    for argument in (f'--{name}={value}', file(f'{name} = {value!r}')):
        assert f'was removed; commit {COMMIT} has it' in refused(argument, program=program)


@pytest.mark.parametrize('name', ['kv_stride', 'act_clamp'])
def test_a_checkpoint_of_a_removed_field_names_the_commit(name):
    with pytest.raises(UserError, match=f'{name} was removed; commit {COMMIT} has it'):
        config_of({'model_args': {name: 2}}, 'ckpt.pt')


def test_all_unknown_keys_of_a_file_are_named(file):
    path = file('learnin_rate = 1e-3\nn_experts = 8\nbatch_size = 5\nzzzz = 1')
    message = refused(path)
    for words in (path, "unknown keys 'learnin_rate' (did you mean 'learning_rate'?), 'n_experts'",
                  "'zzzz'", 'underscore'):
        assert words in message
    assert 'batch_size' not in message


def test_value_may_follow_its_key_and_key_alone_means_true(file):
    s = parse('--eval_only', file('batch_size = 5'), '--compile', 'False', '--data_seed', '-1',
              '--out_dir', 'x', '--wandb_log', '--learning_rate=2')
    found = s.eval_only, s.batch_size, s.compile, s.data_seed, s.out_dir, s.wandb_log
    assert found == (True, 5, False, -1, 'x', True) and s.learning_rate == 2.0
    assert s.given.keys() == {'eval_only', 'batch_size', 'compile', 'data_seed', 'out_dir',
                              'wandb_log', 'learning_rate'}


# -- files -----------------------------------------------------------------------------------------

def test_a_config_file_is_found_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse('config/train_mqa_local.py').n_kv_head == 1


@pytest.mark.parametrize('text, line, what', [
    ('batch_size = 5\nlearning_rate = = 3\n', 2, 'SyntaxError'),
    ('batch_size = 5\n\nmin_lr = learning_rat / 10\n', 3, 'NameError'),
    ('def _f():\n    return 1 / 0\nbatch_size = _f()\n', 2, 'ZeroDivisionError'),
    ('raise ValueError("two\\nlines")\n', 1, 'ValueError'),
    ('{"max_iters": 5}\n', 1, 'this sets nothing'),
    ('batch_size = 5\nmax_iters: 5\n', 2, 'this sets nothing'),
    ('max_iters == 5\n', 1, 'this sets nothing'),
])
def test_failing_config_file_names_file_line_and_reason(text, line, what, file):
    path = file(text)
    assert f'{path}, line {line}: {what}' in refused(path)


@pytest.mark.parametrize('content', [b"out_dir = '\xe9'\n", b'batch_size = 5\0'])
def test_config_file_that_is_not_text_is_named(tmp_path, content):
    path = tmp_path / 'binary.py'
    path.write_bytes(content)
    assert str(path) in refused(str(path))


def test_keys_and_choices_of_another_program_in_a_file_are_passed_over(file):
    path = file('eval_iters = 3\nout_dir = "o"\ntemperature = 0.5\nbudget = "1GB"\n'
                'init_from = "scratch"')
    s, t = parse(path, program='sample'), parse(path)
    assert (s.out_dir, s.temperature, s.init_from) == ('o', 0.5, 'resume')
    assert (t.out_dir, t.eval_iters, t.init_from) == ('o', 3, 'scratch')
    assert not hasattr(s, 'eval_iters') and not hasattr(t, 'temperature')
    for program in ('train', 'sample'):
        assert "'scrach'" in refused(file("init_from = 'scrach'"), program=program)


# -- what is printed -------------------------------------------------------------------------------

def test_overrides_are_echoed_in_nanogpts_words(file, capsys):
    path = file('batch_size = 5\n# note\n')
    configurator.parse(SETTINGS['train'], [path, '--dropout=0'], echo_files=True)
    assert capsys.readouterr().out == (f'Overriding config with {path}:\nbatch_size = 5\n# note\n\n'
                                       'Overriding: dropout = 0.0\n')
    # the text of a file only if logs need it
    configurator.parse(SETTINGS['sample'], [path, '--stop=\n\n'])
    assert capsys.readouterr().out == (f'Overriding config with {path}\n'
                                       "Overriding: stop = '\\n\\n'\n")


@pytest.mark.parametrize('program', SETTINGS)
def test_help_lists_every_key_with_default_meaning_and_choices(program, capsys):
    with pytest.raises(SystemExit) as caught:
        configurator.parse(SETTINGS[program], ['--bogus=1', '--help'], usage='how to run it')
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == 'how to run it'
    text = ' '.join(' '.join(lines).split())  # descriptions wrap
    for name, key in keys_of(SETTINGS[program]).items():
        meaning, default = key.metadata['meaning'], repr(default_of(key))
        assert meaning
        _, _, below = text.partition(f' --{name}={" ".join(default.split())} ')
        assert below.startswith(' '.join(meaning.split()))
        below = below.partition(' --')[0]
        assert all(repr(c) in below for c in key.metadata['choices'])


# -- nanoGPT's ------------------------------------------------------------------------------------

NANOGPT_TRAIN = dict(
    out_dir='out', eval_interval=2000, log_interval=1, eval_iters=200, eval_only=False,
    always_save_checkpoint=True,
    init_from='scratch', wandb_log=False, wandb_project='owt', wandb_run_name='gpt2',
    dataset='openwebtext',
    gradient_accumulation_steps=40, batch_size=12, block_size=1024, n_layer=12, n_head=12,
    n_embd=768, dropout=0.0,
    bias=False, learning_rate=6e-4, max_iters=600000, weight_decay=1e-1, beta1=0.9, beta2=0.95,
    grad_clip=1.0,
    decay_lr=True, warmup_iters=2000, lr_decay_iters=600000, min_lr=6e-5, backend='nccl',
    compile=True)
NANOGPT_SAMPLE = dict(init_from='resume', out_dir='out', start='\n', num_samples=10,
                      max_new_tokens=500, temperature=0.8, top_k=200, seed=1337, compile=False)


@pytest.mark.parametrize('program, keys', [('train', NANOGPT_TRAIN), ('sample', NANOGPT_SAMPLE)])
def test_nanogpts_keys_keep_their_defaults(program, keys):
    assert {name: getattr(parse(program=program), name) for name in keys} == keys


# -- run_program -----------------------------------------------------------------------------------

@pytest.mark.parametrize('error, terminal, status, stderr', [
    (UserError('n=1:\nmust be 2'), False, 2, 'error: n=1: must be 2\n'),
    (KeyboardInterrupt(), False, 130, 'interrupted\n'),
    (KeyboardInterrupt(), True, 130, '\ninterrupted\n')])  # a new line, after the ^C
def test_run_program_turns_errors_into_one_line_and_a_status(
        error, terminal, status, stderr, capsys, monkeypatch):
    def main():
        raise error
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: terminal)
    with pytest.raises(SystemExit) as caught:
        configurator.run_program(main)
    assert (caught.value.code, capsys.readouterr().err) == (status, stderr)
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        configurator.run_program(lambda: 1 / 0)


def test_torchrun_is_told_the_reason(tmp_path, monkeypatch, capsys):
    """Its report, which it prints last, has the contents of this file."""
    monkeypatch.setenv('TORCHELASTIC_ERROR_FILE', str(tmp_path / 'error.json'))

    def main():
        raise UserError('batch_size=0\nis wrong')
    with pytest.raises(SystemExit):
        configurator.run_program(main)
    written = json.loads((tmp_path / 'error.json').read_text())
    assert written['message'] == capsys.readouterr().err.strip() == 'error: batch_size=0 is wrong'
    assert written['timestamp'] > 0  # of the first process that failed, the cause


@pytest.mark.parametrize('program', ['sample', 'chat', 'serve', 'evaluate'])
def test_a_folder_is_accepted_and_two_are_refused(tmp_path, program):
    for name in ('a', 'b'):
        (tmp_path / name).mkdir()
    a, b = str(tmp_path / 'a'), str(tmp_path / 'b')
    for argv in ([a, b], [a, f'--out_dir={b}'], [f'--out_dir={b}', a]):
        with pytest.raises(UserError, match='two folders are given, .*/a and .*/b'):
            parse(*argv, program=program)
    for argv in ([a], ['--seed=1', f'{a}/'], [a, f'--out_dir={a}/', a]):
        s = parse(*argv, program=program)
        assert s.out_dir.rstrip('/') == a and 'out_dir' in s.given


def test_run_program_shows_warnings_as_one_line_without_their_source():
    code = ("import warnings, configurator; "
            "configurator.run_program(lambda: warnings.warn('two\\nlines', stacklevel=1))")
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, 'warning: two lines\n')
