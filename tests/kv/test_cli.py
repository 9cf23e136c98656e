"""`python -m kv`: it prints the plan's figures; bad input gives one line and exit status 2."""
import json
import pickle
from pathlib import Path
from xml.etree import ElementTree

import pytest

from common.errors import UserError
from common.gpt_config import GPTConfig
from kv.__main__ import main, parse_bytes
from kv.plan import plan_kv
from kv.svg import CHARACTER, plan_svg, slot_text

ROOT = Path(__file__).resolve().parents[2]
STACK = dict(n_kv_head=1, layer_pattern='LLLLLG', kv_share='AABBBC', share_global_kv=True,
             window_size=256, pos_embedding='rope')
FLAGS = [f'--{key}={value}' for key, value in STACK.items()]
PLAN = plan_kv(GPTConfig(**STACK))


def last_line(capsys, *argv):
    main([*argv, '--json=True'])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_json_figures_equal_the_plan(capsys):
    document = last_line(capsys, *FLAGS, '--max_seq_len=2048', '--batch=3')
    assert list(document) == ['float32', 'bfloat16', 'float16', 'int8', 'int4']
    for kv_dtype, figures in document.items():
        vanilla = PLAN.vanilla().nbytes(3, 2048, kv_dtype)
        assert figures['kv_bytes'] == PLAN.nbytes(3, 2048, kv_dtype)
        assert figures['kv_bytes_counted'] == 'planned'
        assert figures['kv_ratio'] == vanilla / figures['kv_bytes']
        assert figures['kv_ratio_bf16'] == figures['kv_bytes_vanilla_bf16'] / figures['kv_bytes']
        assert figures['factors'] == PLAN.factors(2048, kv_dtype)
        assert sum(row['bytes'] for row in figures['slots']) == figures['kv_bytes']
    # a further token costs only the slots that still grow
    for max_seq_len, n_slots in ((2048, 1), (1024, 1), (100, 5)):
        figures = last_line(capsys, *FLAGS, f'--max_seq_len={max_seq_len}')['bfloat16']
        assert figures['bytes_per_further_token'] == n_slots * 2 * 64 * 2
    figures = document['bfloat16']
    assert [(row['owner'], row['layers']) for row in figures['slots']] == [
        (0, [0, 1]), (2, [2, 3, 4]), (5, [5, 11]), (6, [6, 7]), (8, [8, 9, 10])]
    assert [row['shape'] for row in figures['slots']][1:3] == [[3, 1, 256, 64], [3, 1, 2048, 64]]


@pytest.mark.parametrize('text, n_bytes', [
    ('4096', 4096), ('1GB', 10 ** 9), ('1.5 kb', 1500), ('512MiB', 2 ** 29),
    ('2tb', 2 * 10 ** 12), ('3GiB', 3 * 2 ** 30), ('8B', 8),
    ('8G', 8 * 10 ** 9), ('1.5E+3 kB', 1_500_000), ('2Ki', 2048),
    # beyond float precision, and a decimal that a float would round
    ('9007199254740993', 9007199254740993), ('1.001GB', 1_001_000_000)])
def test_budget_units(text, n_bytes):
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize('argv, named', [
    (['--budget=lots'], ["'lots'", '1GB']),
    (['--budget=1e999999999'], ["'1e999999999'", '1GiB']), (['--budget=0.4B'], ["'0.4B'"]),
    (['--max_seq_len=-1'], ['max_seq_len=-1']),
    (['--batch=0'], ['batch=0']),
    (['--layer_pattern=LG'], ['window_size=0', "'LG'"]),
    (['no_such_file.py'], ["'no_such_file.py'"]),
    (['--kv_dtype=int3'], ["kv_dtype='int3'", "'int8'", "'int4'"]),
    (['a.pt', 'b.pt'], ['one model at a time, not a.pt and b.pt']),
])
def test_bad_input_raises_and_names_the_value(argv, named):
    with pytest.raises(UserError) as caught:
        main(argv)
    for text in named:
        assert text in str(caught.value)


def test_longer_than_learned_positions_is_counted_with_a_note(capsys):
    main(['--max_seq_len=2000', '--json=True'])
    *_, note, last = capsys.readouterr().out.splitlines()
    expected = plan_kv(GPTConfig()).nbytes(1, 2000, 'bfloat16')
    assert json.loads(last)['bfloat16']['kv_bytes'] == expected
    assert note.startswith('Note: learned positions end at block_size=1,024')
    assert '--pos_embedding=rope' in note
    main(['--max_seq_len=2000', '--pos_embedding=rope'])
    assert 'Note' not in capsys.readouterr().out


@pytest.mark.parametrize('more, fit', [(0, 7), (-1, 6)])
def test_a_budget_of_exactly_n_sequences_holds_n_in_the_asked_dtype(capsys, more, fit):
    budget = 7 * PLAN.nbytes(1, 8192, 'int8') + more
    main([*FLAGS, '--max_seq_len=8192', f'--budget={budget}', '--kv_dtype=int8'])
    out = capsys.readouterr().out
    assert 'KV plan in int8' in out and f"{PLAN.nbytes(1, 8192, 'int8'):,}" in out
    assert f'holds {fit} conversations of 8,192 tokens in int8' in out
    vanilla = budget // PLAN.vanilla().nbytes(1, 8192, 'int8')
    assert f'vanilla GPT-2 of this shape {vanilla}' in out


@pytest.mark.parametrize('others', [False, True], ids=['a plan', "anybody's model"])
def test_numbers_are_never_cut_on_a_terminal(tmp_path, monkeypatch, capsys, others):
    """They make lines longer than it."""
    for name, value in (('COLUMNS', '50'), ('FORCE_COLOR', '1'), ('TERM', 'dumb')):
        monkeypatch.setenv(name, value)
    llama = dict(model_type='llama', hidden_size=4096, num_attention_heads=32, dtype='bfloat16',
                 num_hidden_layers=32, num_key_value_heads=8, max_position_embeddings=131072)
    (tmp_path / 'config.json').write_text(json.dumps(llama))
    model = [str(tmp_path)] if others else ['--n_layer=32', '--n_head=32', '--n_embd=4096',
                                            '--pos_embedding=rope', '--n_kv_head=8']
    main([*model, '--max_seq_len=32768', '--budget=1TB', '--json=True'])
    *lines, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    numbers = ([figures['bytes'], *figures['by_dtype'].values()] if others else
               [each[key] for each in figures.values() for key in ('kv_bytes', 'fit')])
    text = '\n'.join(lines)
    assert '…' not in text and all(f'{n:,}' in text for n in numbers)
    assert 8589934592 in numbers


def test_the_vocabulary_is_the_data_set_s(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr('kv.__main__.DATA_ROOT', tmp_path)
    (tmp_path / 'mine').mkdir()
    argv = ['--dataset=mine', '--n_layer=1', '--n_embd=96', '--pos_embedding=rope']

    def parameters():
        return last_line(capsys, *argv)['int8']['weights']['parameters']
    unknown = parameters()
    main(argv)
    assert "'mine' is not prepared" in capsys.readouterr().out
    (tmp_path / 'mine' / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 2048}))
    assert parameters() == unknown - (50304 - 2048) * 96
    main(argv)
    assert 'Note' not in capsys.readouterr().out


def test_a_run_and_a_checkpoint_say_their_own_configuration(tmp_path, capsys):
    import torch
    run = tmp_path
    torch.save({'model_args': dict(STACK, n_layer=12, vocab_size=65, block_size=256), 'model': {}},
               run / 'ckpt.pt')
    figures = last_line(capsys, str(run), '--batch=2')['int8']
    assert (figures['max_seq_len'], figures['kv_bytes']) == (256, PLAN.nbytes(2, 256, 'int8'))
    assert last_line(capsys, str(run / 'ckpt.pt'), '--n_kv_head=4')['int8']['n_kv_head'] == 4
    (run / 'empty').mkdir()
    for name in ('empty', 'other.pt'):
        with pytest.raises(UserError, match=f'no checkpoint at .*{name}'):
            main([str(run / name)])
    (run / 'ckpt.pt').write_bytes(b'x')
    with pytest.raises(UserError, match='damaged or not a checkpoint'):
        main([str(run)])


def test_parameters_that_are_not_counted_have_a_note(monkeypatch, capsys):
    field = GPTConfig.__dataclass_fields__['qk_norm']
    monkeypatch.setattr(field, 'metadata', {**field.metadata, 'known': ('fast',)})
    main(FLAGS)
    assert 'Note' not in capsys.readouterr().out
    main([*FLAGS, '--qk_norm=True'])
    assert 'Note: parameters of qk_norm=True are not counted' in capsys.readouterr().out


# -- the drawing of a plan -------------------------------------------------------------------------

@pytest.mark.parametrize('fields, T, held', [
    (dict(layer_pattern='L', window_size=9), 10, 'local: 9 tokens'),
    (dict(kv_tied='all'), 8, 'global: 8 tokens, K = V'),
    (dict(kv_latent=128, rope_fraction_global=0, pos_embedding='rope'), 8,
     'global: 8 tokens, latent of 128')])
def test_what_a_slot_holds(fields, T, held):
    assert slot_text(plan_kv(GPTConfig(**fields)).slots[0], T) == f'slot 0, {held}'


def test_the_committed_drawing_is_what_the_command_makes(tmp_path):
    file = tmp_path / 'plan.svg'
    file.write_text('old')
    main(['config/train_gpt2_mqa_local.py', f'--svg={file}'])
    assert file.read_bytes() == (ROOT / 'results' / 'kv' / 'plan.svg').read_bytes()
    assert '--svg=results/kv/plan.svg' in (ROOT / 'Makefile').read_text()


@pytest.mark.parametrize('fields', [
    dict(layer_pattern='G'),  # no local layers: short lines above the drawing
    dict(layer_pattern='LLLLLG', window_size=9, kv_tied='all'), STACK | dict(n_layer=48)])
def test_a_drawing_is_large_enough_for_its_texts(fields):
    drawing = ElementTree.fromstring(plan_svg(plan_kv(GPTConfig(**fields)), 8, 'float32'))
    width, height = float(drawing.get('width')), float(drawing.get('height'))
    words = list(drawing.iter('{http://www.w3.org/2000/svg}text'))
    assert len(words) > 10
    for element in words:
        assert float(element.get('x')) + CHARACTER * len(element.text) <= width
        assert float(element.get('y')) <= height
