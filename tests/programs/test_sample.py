"""sample.py on tiny checkpoints: reproducible texts, and a report with consistent figures."""
import json
import math
import re

import pytest
import torch

import sample
from common.gpt_config import GPTConfig
from engine.requests.stopping import SampleText
from kv.counts import prefill_flops
from kv.plan import plan_kv
from model import GPT
from tests.programs.support import (
    ALPHABET, LAUNCH, VANILLA, flags, in_terminal, load, make_tiny, run_sample)

RULE = '---------------'
KINDS = pytest.mark.parametrize('kind', ['vanilla', 'full'])
LONG = dict(max_new_tokens=60, start='fg')
ESCAPE = re.compile(r'\x1b\[[0-9;?]*[A-Za-z]')


def texts(capsys, folder, **settings):
    """The samples, including the prompt."""
    return samples_in(run_sample(capsys, out_dir=folder, report=False, **settings))


def samples_in(out):
    body = out[out.index('meta.pkl...\n') + len('meta.pkl...\n'):]
    body = body[body.index('\n') + 1:] if body.startswith('Note:') else body
    *samples, rest = body.split(f'\n{RULE}\n')
    assert rest == ''
    return samples


def test_one_greedy_sample_of_a_prompt_in_a_file_is_drawn_and_reported(capsys, trained, tmp_path):
    (tmp_path / 'prompt.txt').write_text('abc\ndef')
    settings = dict(device='cpu', max_new_tokens=12, temperature=0)
    sample.main(flags(dict(settings, out_dir=trained['full'],
                           start=f'FILE:{tmp_path}/prompt.txt')))
    out = capsys.readouterr().out
    given, = texts(capsys, trained['full'], start='abc\ndef', **settings)
    assert out.count(RULE) == 1 and f'\n{given}\n{RULE}\n' in out
    assert 'KV cache, as allocated for 1 x 19 tokens' in out and 'TTFT' in out and 'vanilla' in out


def test_a_sample_depends_on_seed_and_number_alone(capsys, trained):
    """Logits differ in their last bits between batch sizes; these samples have no near-ties."""
    settings = dict(top_p=0.7, temperature=1.3)
    one = texts(capsys, trained['full'], num_samples=4, **settings)
    assert texts(capsys, trained['full'], num_samples=4, parallel=3, **settings) == one
    assert texts(capsys, trained['full'], num_samples=2, parallel=9, **settings) == one[:2]
    other = texts(capsys, trained['full'], num_samples=4, seed=1, **settings)
    assert len(set(one)) == 4 and all(a != b for a, b in zip(one, other))


@KINDS
def test_sample_0_is_what_nanogpts_program_prints(capsys, trained, kind):
    """nanoGPT seeds a generator, builds the model with it and then samples with it."""
    checkpoint = load(trained[kind] / 'ckpt.pt')
    torch.manual_seed(1337)
    model = GPT(GPTConfig(**checkpoint['model_args']))
    model.load_state_dict(checkpoint['model'])
    model.eval()
    idx = torch.tensor([[ALPHABET.index(c) for c in 'ab']])
    with torch.no_grad():
        for _ in range(10):
            logits = model(idx)[0][:, -1] / 0.8
            logits[logits < logits.topk(5).values[:, [-1]]] = -math.inf
            idx = torch.cat([idx, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    expected = ''.join(ALPHABET[i] for i in idx[0])
    assert texts(capsys, trained[kind], max_new_tokens=10, top_k=5) == [expected]


def test_past_block_size_learned_positions_are_recomputed(capsys, trained):
    def sampled(kind, n, start='ab'):
        out = run_sample(capsys, out_dir=trained[kind], max_new_tokens=n, start=start, report=False)
        [text] = samples_in(out)
        assert len(text) == len(start) + n
        return 'block_size=16' in out
    assert not sampled('vanilla', 15)  # 16 tokens are fed
    assert sampled('vanilla', 16)
    assert sampled('vanilla', 3, start='abcdefghij' * 3)
    assert not sampled('full', 40)


# -- the report ------------------------------------------------------------------------------------

@pytest.mark.parametrize('kind, dtype, kv_dtype, stored', [
    ('vanilla', 'float32', 'auto', 'float32'), ('full', 'bfloat16', 'auto', 'bfloat16'),
    ('full', 'float32', 'int8', 'int8')])
def test_json_figures_add_up(capsys, trained, kind, dtype, kv_dtype, stored):
    out = run_sample(capsys, out_dir=trained[kind], dtype=dtype, kv_dtype=kv_dtype, parallel=2,
                     num_samples=2, json=True)
    f = json.loads(out.splitlines()[-1])
    config = GPTConfig(**load(trained[kind] / 'ckpt.pt')['model_args'])
    plan = plan_kv(config)
    vanilla = plan.vanilla()
    assert (f['batch'], f['max_seq_len'], f['kv_dtype'], f['weights']) == (2, 14, stored, dtype)
    assert f['kv_bytes'] == plan.nbytes(2, 14, stored) == sum(slot['bytes'] for slot in f['slots'])
    assert f['kv_bytes_vanilla'] == vanilla.nbytes(2, 14, stored)
    assert f['kv_ratio'] == pytest.approx(f['kv_bytes_vanilla'] / f['kv_bytes'], rel=1e-12)
    assert f['prefill_flops'] == prefill_flops(config, plan, f['prompt_tokens'])
    assert f['ttft_ms'] > 0 and f['tpot_ms'] > 0 and f['tokens_per_second'] > 0


# -- random weights --------------------------------------------------------------------------------

def test_random_weights_from_a_shipped_config_need_no_training(capsys, tmp_path):
    settings = dict(init_from='random', dataset='tiny', out_dir=tmp_path / 'none', max_new_tokens=3,
                    device='cpu', start='ab')
    sample.main(['config/train_mqa_local.py', '--num_samples=1', '--json=True']
                + [f'--{name}={value}' for name, value in settings.items()])
    f = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(f['slots']) == 5 and sum(slot['kind'] == 'global' for slot in f['slots']) == 1
    assert not (tmp_path / 'none').exists()


@pytest.mark.parametrize('left', ['nothing', 'other tokens'])
def test_a_run_is_sampled_without_its_data_set_and_without_dropout(
        tmp_path, trained, own_data_root, capsys, left):
    text = run_sample(capsys, out_dir=trained['vanilla'], report=False)
    (own_data_root / 'tiny' / 'meta.pkl').unlink()
    if left == 'other tokens':
        make_tiny(own_data_root, ALPHABET.upper())
    saved = load(trained['vanilla'] / 'ckpt.pt')
    saved['model_args']['dropout'] = 0.9
    torch.save(saved, tmp_path / 'ckpt.pt')
    found = run_sample(capsys, out_dir=tmp_path, report=False)
    assert samples_in(found.replace('the checkpoint', 'meta.pkl')) == samples_in(text)


# -- stop texts (details: engine/test_stopping.py) -------------------------------------------------

@pytest.mark.parametrize('kind, parallel', [('vanilla', 1), ('full', 3)])
def test_samples_end_before_a_stop_text_and_a_batch_with_its_longest_sample(
        capsys, trained, recorded, kind, parallel):
    steps = recorded(sample.Generation, '__next__', lambda generation: 1)
    settings = dict(num_samples=3, parallel=parallel, **LONG)
    whole = texts(capsys, trained[kind], **settings)
    # none of them comes without a 'd' or a newline after the prompt
    expected = [re.split('[d\n]', text[2:])[0] for text in whole]
    steps.clear()
    out = run_sample(capsys, out_dir=trained[kind], stop="['d', '\\n']", json=True, **settings)
    assert [text for text in expected if f'fg{text}\n{RULE}\n' not in out] == []
    used = [len(text) + 1 for text in expected]  # the stop text's token included
    assert json.loads(out.splitlines()[-1])['tokens'] == sum(used) < 180
    # the calls that end the samples are counted, too
    assert len(steps) == (max(used) + 1 if parallel == 3 else sum(used) + 3)


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


# -- watch=True, in a terminal (frames: engine/test_lanes.py) --------------------------------------

def test_in_a_terminal_lanes_are_drawn_and_each_text_is_printed(capsys, data_root):
    """40 tokens are more than block_size: the rest is recomputed."""
    shape = {name: value for name, value in VANILLA.items() if hasattr(GPTConfig, name)}
    settings = dict(shape, init_from='random', dataset='tiny', start='ab', max_new_tokens=40,
                    num_samples=2, device='cpu')
    plain = samples_in(run_sample(capsys, **settings, native=False, report=False))
    status, out = in_terminal('-c', LAUNCH.format('sample'), data_root, *flags(settings),
                              '--parallel=2', '--watch=True', '--native=False')
    visible = ESCAPE.sub('', out)
    assert status == 0 and len(plain) == 2
    for text in plain:
        assert f'x\n{text}\n{RULE}\n' in visible  # after how many times smaller the cache is
    assert out.rindex('\x1b[?25h') > out.rindex('\x1b[?25l')  # the cursor is back
    assert 'KV cache, as allocated for 1 x ' in visible.rpartition(RULE)[2]
