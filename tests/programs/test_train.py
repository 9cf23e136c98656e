"""train.py on tiny models: log lines, metrics, checkpoints as nanoGPT's users know them."""
import json
import math
import os
import re
import signal

import pytest
import torch

import train
from config.errors import UserError
from config.gpt_config import GPTConfig
from model import GPT
from tests.programs.support import BOTH, FULL_STACK, TINY, VANILLA, assert_same_weights, flags, load, losses, metrics, run_train
from training import memory_plan
from training.flops import flops_per_token
from training.memory_use import predict
from training.run import Run

NANOGPT_KEYS = {'model', 'optimizer', 'model_args', 'iter_num', 'best_val_loss', 'config'}
# on a CPU in float32: no loss scale, and no peak to take a share of
ROW = {'iter', 'loss', 'lr', 'time_ms', 'tokens_per_second', 'grad_norm', 'skipped', 'model_tflops_per_second',
       'memory_bytes', 'memory_peak_bytes', 'memory_share', 'data_wait_share'}
VANILLA_ARGS = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, bias=False, vocab_size=12, dropout=0.0)


def test_log_lines_are_nanogpts(tmp_path, capsys):
    run_train(tmp_path, max_iters=7, eval_interval=4, gradient_accumulation_steps=2)
    out = capsys.readouterr().out
    wanted = [r'tokens per iteration will be: 128', r'found vocab_size = 12 \(inside data/tiny/meta.pkl\)',
              'Initializing a new model from scratch', r'number of parameters: 0\.01M',
              r'num decayed parameter tensors: 10, with 6,592 parameters',
              r'num non-decayed parameter tensors: 5, with 80 parameters', r'using fused AdamW: (True|False)',
              r'step 4: train loss \d\.\d{4}, val loss \d\.\d{4}', f'saving checkpoint to {tmp_path}']
    assert re.search('^' + r'$(?s:.*)^'.join(wanted) + '$', out, re.M)  # in this order
    steps = re.findall(r'^step (\d+): train loss \d+\.\d{4}, val loss \d+\.\d{4}$', out, re.M)
    assert steps == ['0', '4', '7']
    iters = re.findall(r'^iter (\d+): loss \d+\.\d{4}, time \d+\.\d{2}ms, [\d,]+ tokens/s'
                       r'(?:, 0:00:\d\d left)?$', out, re.M)
    assert [int(i) for i in iters] == list(range(8))  # max_iters + 1 iterations, as in nanoGPT


def test_log_lines_end_with_mfu_on_cuda_alone():
    numbers = -1.0, 12345.6, 4000.4
    assert train.pace_words(torch.device('cuda', 1), *numbers) == 'mfu -100.00%'  # nanoGPT's, before it is known
    assert train.pace_words(torch.device('cpu'), *numbers) == '12,346 tokens/s, 1:06:40 left'
    assert train.pace_words(torch.device('cpu'), -1.0, 5.0, 0.0) == '5 tokens/s'


def test_the_time_left_does_not_count_a_slow_first_iteration(tmp_path, capsys, monkeypatch):
    seconds = iter([1000.0] + [1.0] * 50)
    monkeypatch.setattr(train.Pace, 'read', lambda pace: next(seconds))
    run_train(tmp_path, max_iters=5, eval_interval=100)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('iter ')]
    assert 'left' not in lines[0] and lines[1].endswith('0:00:04 left') and lines[4].endswith('0:00:01 left')


def test_a_step_that_will_not_fit_is_said_to_before_the_first(tmp_path, capsys, monkeypatch):
    said = 'a step is predicted to need'
    run_train(tmp_path / 'a', max_iters=1)
    assert said not in capsys.readouterr().out
    monkeypatch.setattr(memory_plan, 'available_memory', lambda: 100_000)
    monkeypatch.setattr(Run, 'step', lambda run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_train(tmp_path / 'b', batch_size=500)
    found = re.search(r'a step is predicted to need ([\d.]+) MB of memory, and 100 kB are free: lower --batch_size=500',
                      capsys.readouterr().out)
    config = GPTConfig(**VANILLA_ARGS)
    assert float(found[1]) == pytest.approx(predict(config, 500).peak / 1e6, rel=0.05)


def test_log_interval_thins_log_and_metrics_but_not_evaluated_steps(tmp_path, capsys):
    run = run_train(tmp_path, max_iters=8, eval_interval=5, log_interval=4)
    assert re.findall(r'^iter (\d+):', capsys.readouterr().out, re.M) == ['0', '4', '8']
    assert [row['iter'] for row in run.rows] == [0, 4, 5, 8]


def test_vocab_defaults_to_gpt2s_without_meta(tmp_path, capsys, own_data_root):
    (own_data_root / 'tiny' / 'meta.pkl').unlink()
    run = run_train(tmp_path / 'out', max_iters=1, eval_interval=1, n_layer=1, n_embd=2)
    assert 'defaulting to vocab_size of GPT-2 to 50304 (50257 rounded up for efficiency)' in capsys.readouterr().out
    assert load(run.path)['model_args']['vocab_size'] == 50304


@BOTH
def test_metrics_have_every_step_with_full_precision_and_the_evaluations(tmp_path, capsys, config):
    run = run_train(tmp_path, config)
    assert [row['iter'] for row in run.rows] == list(range(21))
    for row in run.rows:
        evaluated = {'train_loss', 'val_loss'} if row['iter'] % 10 == 0 else set()
        assert row.keys() == ROW | evaluated
        assert row['grad_norm'] > 0 and row['skipped'] == 0 and row['model_tflops_per_second'] > 0
        assert 0 < row['memory_bytes'] <= row['memory_peak_bytes'] and 0 < row['memory_share'] < 1
        assert 0 <= row['data_wait_share'] < 1
        assert math.isfinite(row['loss'])
    printed = dict(re.findall(r'^iter (\d+): loss (\S+),', capsys.readouterr().out, re.M))
    assert all(printed[str(row['iter'])] == f"{row['loss']:.4f}" for row in run.rows)
    assert sum(row['loss'] != round(row['loss'], 6) for row in run.rows) > 15
    assert run.rows[-1]['loss'] < run.rows[0]['loss'] - 0.3  # it learns


def test_mfu_is_of_the_devices_peak_where_that_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr('training.run.peak_tflops', lambda device, dtype: 0.5 if dtype == torch.float32 else None)
    rows = run_train(tmp_path, FULL_STACK, max_iters=3, gradient_accumulation_steps=2).rows
    flops = flops_per_token(GPT(GPTConfig(**load(tmp_path / 'ckpt.pt')['model_args']))).total
    for row in rows:
        assert row['model_tflops_per_second'] == pytest.approx(flops * row['tokens_per_second'] / 1e12)
        assert row['mfu'] == pytest.approx(row['model_tflops_per_second'] / 0.5)


@pytest.mark.parametrize('tf32, precision', [(True, 'high'), (False, 'highest')])
def test_tf32_is_a_key(tmp_path, tf32, precision):
    run_train(tmp_path, max_iters=0, tf32=tf32)
    assert torch.get_float32_matmul_precision() == precision


def test_metrics_say_the_learning_rate_that_was_used(tmp_path):
    rows = run_train(tmp_path, max_iters=6, warmup_iters=2, lr_decay_iters=4).rows
    half = 1e-3 + 0.5 * (1e-2 - 1e-3)
    expected = [1e-2 / 3, 2e-2 / 3, 1e-2, half, 1e-3, 1e-3, 1e-3]
    assert [row['lr'] for row in rows] == pytest.approx(expected, rel=1e-12)


@BOTH
def test_checkpoint_has_nanogpts_keys_and_loads_into_the_model_it_describes(tmp_path, config):
    run = run_train(tmp_path, config, max_iters=3, eval_interval=2)
    checkpoint = load(run.path)
    assert checkpoint.keys() >= NANOGPT_KEYS
    assert checkpoint['iter_num'] == 3
    best = checkpoint['best_val_loss']
    assert torch.is_tensor(best) and best.shape == ()
    assert best.item() == pytest.approx(run.rows[3]['val_loss'], rel=1e-6)
    assert {'dataset': 'tiny', 'n_layer': config['n_layer'], 'eval_interval': 2}.items() <= checkpoint['config'].items()
    model = GPT(GPTConfig(**checkpoint['model_args']))
    model.load_state_dict(checkpoint['model'])
    assert checkpoint['model']['lm_head.weight'].data_ptr() == checkpoint['model']['transformer.wte.weight'].data_ptr()


def test_vanilla_model_args_are_exactly_nanogpts_seven(tmp_path):
    run = run_train(tmp_path, max_iters=1, eval_interval=1)
    assert load(run.path)['model_args'] == VANILLA_ARGS
    state = load(run.path)['model']
    assert {name: tuple(x.shape) for name, x in state.items() if '.h.1.' in name or '.h.' not in name} == {
        'transformer.wte.weight': (12, 16), 'transformer.wpe.weight': (16, 16), 'transformer.h.1.ln_1.weight': (16,),
        'transformer.h.1.attn.c_attn.weight': (48, 16), 'transformer.h.1.attn.c_proj.weight': (16, 16),
        'transformer.h.1.ln_2.weight': (16,), 'transformer.h.1.mlp.c_fc.weight': (64, 16),
        'transformer.h.1.mlp.c_proj.weight': (16, 64), 'transformer.ln_f.weight': (16,), 'lm_head.weight': (12, 16)}


def test_full_stack_model_args_add_only_what_is_not_vanilla(tmp_path):
    run = run_train(tmp_path, FULL_STACK, max_iters=1, eval_interval=1)
    assert load(run.path)['model_args'] == VANILLA_ARGS | dict(
        n_layer=7, n_kv_head=1, layer_pattern='LLLLLG', window_size=4, kv_share='AABBBC', share_global_kv=True,
        pos_embedding='rope', qk_norm=True)


def test_config_in_the_checkpoint_keeps_what_was_asked_for(tmp_path):
    run = run_train(tmp_path, max_iters=1, eval_interval=1, gradient_accumulation_steps=2, learning_rate=0.5)
    config = load(run.path)['config']
    assert (config['gradient_accumulation_steps'], config['learning_rate']) == (2, 0.5)
    assert all(type(value) in (int, float, bool, str) for value in config.values())


def test_gradient_accumulation_is_one_bigger_batch(tmp_path, final_weights):
    """Two micro-batches of 4 are the 8 windows of one batch: the same gradients, but for rounding."""
    run_train(tmp_path / 'a', max_iters=0, batch_size=8, beta2=0.99)
    one = final_weights()
    run_train(tmp_path / 'b', max_iters=0, batch_size=4, gradient_accumulation_steps=2, beta2=0.99)
    two = final_weights()
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-4
    run_train(tmp_path / 'c', max_iters=0, batch_size=4, beta2=0.99)
    assert max((one[name] - final_weights()[name]).abs().max().item() for name in one) > 1e-4


def test_evaluation_uses_the_same_windows_every_time_and_no_dropout(tmp_path):
    rows = run_train(tmp_path, dropout=0.5, max_iters=2, eval_interval=1, learning_rate=0.0, min_lr=0.0).rows
    assert len({row['val_loss'] for row in rows}) == len({row['train_loss'] for row in rows}) == 1
    assert len({row['loss'] for row in rows}) == 3


def test_eval_only_evaluates_once_and_trains_and_saves_nothing(tmp_path, capsys):
    run = run_train(tmp_path, eval_only=True)
    out = capsys.readouterr().out
    assert len(re.findall(r'^step 0:', out, re.M)) == 1 and 'iter ' not in out.replace('per iter', '')
    assert not run.path.exists()


def test_eval_only_evaluates_a_resumed_run_wherever_it_stands(tmp_path, capsys, at_step):
    at_step(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    run = run_train(tmp_path)
    before, rows = run.path.read_bytes(), losses(tmp_path)
    capsys.readouterr()
    run_train(tmp_path, init_from='resume', eval_only=True)
    assert len(re.findall(r'^step 4:', capsys.readouterr().out, re.M)) == 1
    assert run.path.read_bytes() == before and losses(tmp_path) == rows


def test_the_first_evaluation_saves_nothing(tmp_path, at_step):
    at_step(1, lambda: (_ for _ in ()).throw(RuntimeError('stop here')))
    with pytest.raises(RuntimeError, match='stop here'):
        run_train(tmp_path)
    assert not (tmp_path / 'ckpt.pt').exists()


def test_without_always_save_only_improvements_are_saved(tmp_path, monkeypatch):
    values = iter([5.0, 4.0, 4.5, 3.0])
    monkeypatch.setattr(train.Run, 'evaluate', lambda run, stop: dict(train=1.0, val=next(values)))
    saved, plain = [], train.Run.save
    monkeypatch.setattr(train.Run, 'save', lambda run, **kw: (saved.append(run.iter_num), plain(run, **kw)))
    run = run_train(tmp_path, max_iters=3, eval_interval=1, always_save_checkpoint=False)
    assert saved == [1, 3] and load(run.path)['best_val_loss'].item() == 3.0


def test_float_types_of_cpu_autocast_train(tmp_path):
    exact = run_train(tmp_path / 'a', max_iters=3).rows
    rough = run_train(tmp_path / 'b', max_iters=3, dtype='bfloat16').rows
    assert all(a['loss'] == pytest.approx(b['loss'], abs=0.01) for a, b in zip(exact, rough))
    assert any(a['loss'] != b['loss'] for a, b in zip(exact, rough))
    state = load(tmp_path / 'b' / 'ckpt.pt')['model']
    assert all(x.dtype == torch.float32 for x in state.values())


def test_gradients_are_clipped_by_their_true_norm_whatever_the_loss_scale(tmp_path):
    """Scaled by 65536 they are far above 100, in truth far below."""
    for clip in (0.0, 100.0):
        run_train(tmp_path / str(clip), max_iters=5, dtype='float16', grad_clip=clip)
    assert losses(tmp_path / '0.0') == losses(tmp_path / '100.0')
    run_train(tmp_path / 'c', max_iters=5, dtype='float16', grad_clip=1e-8)
    assert losses(tmp_path / 'c') != losses(tmp_path / '0.0')


@BOTH
def test_checkpointing_blocks_changes_no_loss(tmp_path, config, final_weights):
    runs = []
    for value in (False, True):
        run_train(tmp_path / str(value), config, max_iters=6, dropout=0.1, checkpoint_blocks=value)
        runs.append((losses(tmp_path / str(value)), final_weights()))
    assert runs[0][0] == runs[1][0]
    assert_same_weights(runs[0][1], runs[1][1])


def test_block_checkpointing_really_recomputes(tmp_path, monkeypatch):
    import model
    calls, plain = [], model.Block.forward
    monkeypatch.setattr(model.Block, 'forward', lambda *args: (calls.append(1), plain(*args))[1])
    run_train(tmp_path / 'a', max_iters=0, eval_iters=1)
    usual = len(calls)
    run_train(tmp_path / 'b', max_iters=0, eval_iters=1, checkpoint_blocks=True)
    assert len(calls) - usual == usual + VANILLA['n_layer']


def half_write(checkpoint, f):
    f.write(b'half a checkpo')
    raise OSError(28, 'No space left on device')


def test_a_full_disk_leaves_the_last_checkpoint_whole_and_no_other_file(tmp_path, monkeypatch):
    run = run_train(tmp_path, max_iters=4, eval_interval=2)
    before = run.path.read_bytes()
    monkeypatch.setattr(torch, 'save', half_write)
    with pytest.raises(UserError, match='No space left') as caught:
        run_train(tmp_path, init_from='resume', max_iters=8, eval_interval=2)
    assert str(run.path) in str(caught.value) and '\n' not in str(caught.value)
    assert run.path.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {'ckpt.pt', 'metrics.jsonl'}


def test_a_full_disk_at_the_first_save_leaves_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, 'save', half_write)
    with pytest.raises(UserError):
        run_train(tmp_path, max_iters=4, eval_interval=2)
    assert {p.name for p in tmp_path.iterdir()} == {'metrics.jsonl'}


def test_a_run_from_scratch_starts_its_metrics_anew(tmp_path):
    run_train(tmp_path, max_iters=5)
    assert [row['iter'] for row in run_train(tmp_path, max_iters=2).rows] == [0, 1, 2]


def test_config_files_and_flags_reach_training(tmp_path):
    path = tmp_path / 'c.py'
    path.write_text('\n'.join(f'{k} = {v!r}' for k, v in TINY.items()))
    train.main([str(path), *flags(dict(out_dir=tmp_path / 'out', max_iters=2, eval_interval=1))])
    assert len(metrics(tmp_path / 'out')) == 3


def test_dataset_prepares_itself_on_first_use(tmp_path, own_data_root, capsys):
    folder = own_data_root / 'fresh'
    folder.mkdir()
    (folder / 'prepare.py').write_text('import shutil, pathlib\nhere = pathlib.Path(__file__).parent\n'
                                       'def main(argv):\n    for f in (here.parent / "tiny").iterdir():\n'
                                       '        shutil.copy(f, here / f.name)\n')
    run_train(tmp_path / 'out', dataset='fresh', max_iters=0)
    assert 'preparing dataset fresh' in capsys.readouterr().out and len(metrics(tmp_path / 'out')) == 1


def test_json_rows_are_one_object_per_line(tmp_path):
    run_train(tmp_path, max_iters=2)
    text = (tmp_path / 'metrics.jsonl').read_text()
    assert text.endswith('\n') and all(type(json.loads(line)) is dict for line in text.splitlines())
