"""train.py on tiny models: log lines, metrics and checkpoints in nanoGPT's format."""
import math
import re
from types import SimpleNamespace

import pytest
import torch

import train
from common.gpt_config import GPTConfig
from model import GPT
from tests.programs.support import FULL_STACK, VANILLA, load, run_train
from training.loop.log import StepClock
from training.step.flops import flops_per_token

NANOGPT_KEYS = {'model', 'optimizer', 'model_args', 'iter_num', 'best_val_loss', 'config'}
# on a CPU in float32: no loss scale, and no known peak for MFU
ROW = {'iter', 'loss', 'lr', 'time_ms', 'tokens_per_second', 'grad_norm', 'skipped',
       'model_tflops_per_second', 'memory_bytes', 'memory_peak_bytes', 'memory_share',
       'data_wait_share'}
VANILLA_ARGS = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, bias=False, vocab_size=12,
                    dropout=0.0)


def test_log_lines_are_nanogpts(tmp_path, capsys):
    run_train(tmp_path, max_iters=7, eval_interval=4, gradient_accumulation_steps=2)
    out = capsys.readouterr().out
    wanted = [r'tokens per iteration will be: 128',
              r'found vocab_size = 12 \(inside data/tiny/meta.pkl\)',
              r'Initializing a new model from scratch',
              r'number of parameters: 0\.01M',
              r'num decayed parameter tensors: 10, with 6,592 parameters',
              r'num non-decayed parameter tensors: 5, with 80 parameters',
              r'using fused AdamW: (True|False)',
              r'step 4: train loss \d\.\d{4}, val loss \d\.\d{4}',
              f'saving checkpoint to {tmp_path}']
    assert re.search('^' + r'$(?s:.*)^'.join(wanted) + '$', out, re.M)  # in this order
    steps = re.findall(r'^step (\d+): train loss \d+\.\d{4}, val loss \d+\.\d{4}$', out, re.M)
    assert steps == ['0', '4', '7']
    losses = re.findall(r'val loss (\d+\.\d{4})\nthat val loss is (.*) bits per byte of text', out)
    assert len(losses) == 3  # characters of one byte each
    assert all(abs(float(nats) / math.log(2) - float(bits)) < 1e-3 for nats, bits in losses)
    iters = re.findall(r'^iter (\d+): loss \d+\.\d{4}, time \d+\.\d{2}ms, [\d,]+ tokens/s'
                       r'(?:, 0:00:\d\d left)?$', out, re.M)
    assert [int(i) for i in iters] == list(range(8))  # max_iters + 1 iterations, as in nanoGPT


def test_log_lines_end_with_mfu_on_cuda_and_pace_elsewhere(tmp_path, capsys, monkeypatch):
    """The time left does not count a slow first iteration. MFU is of the device's peak, if that is
    known."""
    monkeypatch.setattr('training.loop.run.peak_tflops', lambda name, dtype: 0.5)
    assert train.pace_words(torch.device('cuda', 1), -1.0, 12345.6, 4000.4) == 'mfu -100.00%'
    seconds = iter([1000.0] + [1.0] * 50)
    monkeypatch.setattr(train.StepClock, 'read', lambda clock: next(seconds))
    rows = run_train(tmp_path, max_iters=5, eval_interval=100).rows
    flops = sum(flops_per_token(GPT(GPTConfig(**VANILLA_ARGS))))
    for row in rows:
        tflops = flops * row['tokens_per_second'] / 1e12
        assert row['model_tflops_per_second'] == pytest.approx(tflops) == row['mfu'] * 0.5
    lines = re.findall('^iter .*', capsys.readouterr().out, re.M)
    assert 'left' not in lines[0] and lines[1].endswith(', 64 tokens/s, 0:00:04 left')
    assert lines[4].endswith('0:00:01 left')


def test_a_data_set_without_meta_and_thin_logs(tmp_path, capsys, own_data_root):
    (own_data_root / 'tiny' / 'meta.pkl').unlink()
    run = run_train(tmp_path / 'out', n_layer=1, n_embd=2, max_iters=8,
                    eval_interval=5, log_interval=4, tf32=False)
    out = capsys.readouterr().out
    wanted = 'defaulting to vocab_size of GPT-2 to 50304 (50257 rounded up for efficiency)'
    assert wanted in out and load(run.path)['model_args']['vocab_size'] == 50304
    assert re.findall(r'^iter (\d+):', out, re.M) == ['0', '4', '8']
    assert [row['iter'] for row in run.rows] == [0, 4, 5, 8]  # evaluated steps always have a row
    assert torch.get_float32_matmul_precision() == 'highest'


def test_metrics_have_every_step_with_full_precision_and_the_evaluations(tmp_path, capsys):
    run = run_train(tmp_path, lr_decay_iters=4)
    assert [row['iter'] for row in run.rows] == list(range(21))
    half = 1e-3 + 0.5 * (1e-2 - 1e-3)
    expected = [1e-2 / 3, 2e-2 / 3, 1e-2, half, *[1e-3] * 17]  # that were used
    assert [row['lr'] for row in run.rows] == pytest.approx(expected, rel=1e-12)
    for row in run.rows:
        evaluated = {'train_loss', 'val_loss'} if row['iter'] % 10 == 0 else set()
        assert row.keys() == ROW | evaluated
        assert row['grad_norm'] > 0 and row['skipped'] == 0 and row['model_tflops_per_second'] > 0
        assert 0 < row['memory_bytes'] <= row['memory_peak_bytes'] and 0 < row['memory_share'] < 1
        assert 0 <= row['data_wait_share'] < 1 and math.isfinite(row['loss'])
    printed = dict(re.findall(r'^iter (\d+): loss (\S+),', capsys.readouterr().out, re.M))
    assert all(printed[str(row['iter'])] == f"{row['loss']:.4f}" for row in run.rows)
    assert sum(row['loss'] != round(row['loss'], 6) for row in run.rows) > 15
    assert run.rows[-1]['loss'] < run.rows[0]['loss'] - 0.3  # it learns


@pytest.mark.parametrize('config, wanted', [
    (VANILLA, VANILLA_ARGS),
    (FULL_STACK, VANILLA_ARGS | {name: FULL_STACK[name] for name in (
        'n_layer', 'n_kv_head', 'layer_pattern', 'window_size', 'kv_share', 'share_global_kv',
        'pos_embedding', 'qk_norm')})], ids=['vanilla', 'full stack'])
def test_a_checkpoint_is_nanogpts(tmp_path, config, wanted):
    """Its keys, its model_args with only non-default additions, weights that load, its settings."""
    run = run_train(tmp_path, config, max_iters=3, eval_interval=2, learning_rate=0.5)
    checkpoint = load(run.path)
    assert checkpoint.keys() >= NANOGPT_KEYS and checkpoint['iter_num'] == 3
    assert checkpoint['model_args'] == wanted
    best = checkpoint['best_val_loss']
    assert torch.is_tensor(best) and best.shape == ()
    lowest = min(row['val_loss'] for row in run.rows if 'val_loss' in row)
    assert best.item() == pytest.approx(lowest, rel=1e-6)
    settings = checkpoint['config']
    assert (settings['dataset'], settings['eval_interval'], settings['learning_rate']) == (
        'tiny', 2, 0.5)
    assert all(type(value) in (int, float, bool, str) for value in settings.values())
    weights = checkpoint['model']
    GPT(GPTConfig(**checkpoint['model_args'])).load_state_dict(weights)
    head, embedding = weights['lm_head.weight'], weights['transformer.wte.weight']
    assert head.data_ptr() == embedding.data_ptr()


def test_gradient_accumulation_is_one_bigger_batch(tmp_path, final_weights):
    """Two micro-batches of 4 have the windows of one batch of 8: same gradients except rounding."""
    def trained_on(batch_size, n):
        run_train(tmp_path / f'{batch_size}x{n}', max_iters=0, batch_size=batch_size,
                  gradient_accumulation_steps=n, beta2=0.99, dtype='float32')
        return final_weights()
    one, two, half = trained_on(8, 1), trained_on(4, 2), trained_on(4, 1)
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-4
    assert max((one[name] - half[name]).abs().max().item() for name in one) > 1e-4


def test_evaluation_uses_the_same_windows_every_time_and_no_dropout(tmp_path):
    rows = run_train(tmp_path, dropout=0.5, max_iters=2, eval_interval=1, learning_rate=0.0,
                     min_lr=0.0).rows
    assert len({row['val_loss'] for row in rows}) == len({row['train_loss'] for row in rows}) == 1
    assert len({row['loss'] for row in rows}) == 3


def test_means_of_the_clock_follow_nanogpts_weights():
    """A tenth of the newest; MFU from the sixth iteration on, seconds from the second."""
    steps = iter([0.5, 0.7, 0.1])
    clock, run = StepClock(first=3), SimpleNamespace(
        iter_num=3, ranks=SimpleNamespace(world_size=2),
        s=SimpleNamespace(batch_size=3, gradient_accumulation_steps=4, plan_passes=2),
        model=SimpleNamespace(estimate_mfu=lambda n, dt: next(steps) if n == 12 else 9.9))
    found = []
    for run.iter_num, seconds in zip(range(3, 11), (9.0, 1.0, *[2.0] * 6)):
        clock.measured(run, seconds)
        found.append((clock.mfu, clock.mean_dt))
    assert found[0] == (-1.0, 0.0) and found[1] == (-1.0, 1.0)
    assert found[2] == (-1.0, pytest.approx(1.1))
    assert [mfu for mfu, _ in found[5:]] == pytest.approx([0.5, 0.52, 0.478])
