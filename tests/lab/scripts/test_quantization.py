"""lab/scripts/quantization.py: formats keep their bounds, losses are paired by window, the page says what the runs say."""
import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch

from config.errors import UserError
from engine.evaluate import forward, judge, through_cache, with_rounding
from kv.int8 import fake_quantize_int8
from kv.plan import plan_kv
from lab.ablation.jobs import Job
from lab.scripts import kv_formats as kf
from lab.scripts import quantization, quantization_page
from model import GPT, GPTConfig

COMMITTED = quantization.committed()
TINY = dict(block_size=16, vocab_size=13, n_layer=3, n_head=2, n_embd=32, n_kv_head=1, layer_pattern='LLG', kv_share='AAB',
            window_size=5, pos_embedding='rope', qk_norm=True)


@pytest.fixture
def tiny(monkeypatch):
    """A random model and windows for it, and a script that asks little of them."""
    for name, value in dict(FIRST=4, CHUNK=3, PROMPTS=2, NEW=4, BATCH=2).items():
        monkeypatch.setattr(quantization, name, value)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**TINY)).eval()
    for p in model.parameters():  # larger than at the start of training, so that what is remembered matters
        p.data.mul_(4)
    return model, torch.randint(13, (5, 17))


# -- formats --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('shape', [(3, 1, 5, 16), (2, 64)])
@pytest.mark.parametrize('size', [1e-3, 1.0, 1e4])
def test_the_default_format_is_that_of_the_cache(shape, size):
    torch.manual_seed(0)
    x = torch.randn(shape) * size
    x[0] = 0
    assert torch.equal(kf.Format().round(x), fake_quantize_int8(x))


@pytest.mark.parametrize('bits', [4, 8])
@pytest.mark.parametrize('group', [4, 16, 0])
@pytest.mark.parametrize('asymmetric', [False, True], ids=['symmetric', 'asymmetric'])
def test_an_element_is_off_by_half_a_step_at_most(bits, group, asymmetric):
    torch.manual_seed(0)
    x = torch.randn(50, 2, 32)
    error = (kf.Format(bits=bits, group=group, asymmetric=asymmetric).round(x) - x).abs().unflatten(-1, (-1, group or 32))
    groups = x.unflatten(-1, (-1, group or 32))
    span = groups.amax(-1) - groups.amin(-1) if asymmetric else groups.abs().amax(-1)
    step = span / (2 ** bits - 1 if asymmetric else 2 ** (bits - 1) - 1)
    # rounding to fp16 widens the step by 2**-11 at most, and the zero point by as much of itself
    slack = 2 ** -11 * (step + (groups.amin(-1).abs() if asymmetric else 0))
    assert (error.amax(-1) <= step / 2 + slack).all()
    assert (error.amax(-1) > step / 8).float().mean() > 0.9  # and it is rounded, to no finer step


def test_groups_keep_an_outlier_to_itself():
    torch.manual_seed(0)
    x = torch.randn(20, 64)
    x[:, 5] = 30.0

    def others(form):
        return (form.round(x) - x)[:, 8:].abs().mean()
    one, sixteen, eight = (others(kf.Format(bits=4, group=g)) for g in (0, 16, 8))
    assert eight < one / 4 and sixteen < one and eight <= sixteen
    assert others(kf.Format()) < others(kf.Format(group=kf.TENSOR)) * 1.01


def test_what_is_rounded_late_is_off_by_the_rounding_of_its_scale():
    torch.manual_seed(0)
    x = torch.randn(200, 64)

    def worst(**settings):
        return ((kf.Format(**settings).round(x) - x).abs().amax(-1) / (x.abs().amax(-1) / 127)).max()
    assert worst(scale='bf16') <= 0.5 * (1 + 2 ** -8) < 0.65 < worst(scale='bf16', late=True)
    assert worst(scale='fp16', late=True) <= 0.5 + 127 * 2 ** -11


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match='groups of 5'):
        kf.Format(bits=4, group=5).round(torch.randn(2, 16))


@pytest.mark.parametrize('head_dim', [16, 64])
@pytest.mark.parametrize('n_kv_head', [1, 3])
def test_bytes_per_position(head_dim, n_kv_head):
    def n(**settings):
        return kf.bytes_per_position(kf.Format(**settings), kf.Format(**settings), n_kv_head, head_dim)
    plan = plan_kv(GPTConfig(n_layer=1, n_head=3, n_embd=6, head_dim=head_dim, n_kv_head=n_kv_head))
    assert n() == 2 * n_kv_head * (head_dim + 2) == plan.nbytes(1, 8, 'int8') / 8
    assert n(scale='fp32') == 2 * n_kv_head * (head_dim + 4)
    assert n(group=kf.TENSOR) == 2 * n_kv_head * head_dim
    assert n(bits=4, group=16) == 2 * n_kv_head * (head_dim // 2 + 2 * head_dim // 16)
    assert n(bits=4, group=16, asymmetric=True) == 2 * n_kv_head * (head_dim // 2 + 4 * head_dim // 16)


# -- measuring ------------------------------------------------------------------------------------------------------------

def test_paired_is_the_mean_and_its_standard_error():
    reference = torch.tensor([5.0, 1.0, 3.0, 2.0], dtype=torch.float64)
    change, se = kf.paired(reference + torch.tensor([0.1, 0.3, -0.1, 0.1], dtype=torch.float64), reference)
    assert change == pytest.approx(0.1)
    assert se == pytest.approx(math.sqrt((0 + 0.04 + 0.04 + 0) / 3) / 2)


def test_agreement_by_hand():
    a = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    b = torch.tensor([[1, 2, 9, 4], [1, 2, 3, 4]])
    assert kf.agreement(b, a) == {'equal': 7 / 8, 'equal_at': [1, 1, 0.5, 1], 'equal_up_to': [1, 1, 0.5, 0.5],
                                  'common_prefix': 3}


def test_greedy_texts_are_those_of_generate(tiny):
    model, windows = tiny
    wanted = model.generate(windows[:, :6], 5, top_k=1)[:, 6:]
    for chunk in (0, 4):
        assert torch.equal(kf.greedy(model, windows[:, :6], 5, 'float32', chunk), wanted)


def test_a_format_takes_the_place_of_int8_in_the_forward_pass(tiny):
    model, windows = tiny
    rounding = with_rounding(model, True)
    int8 = judge(through_cache(model, 'int8', 4, 3), windows).by_window
    with kf.rounded(kf.Format(), kf.Format()) as errors:
        same = judge(forward(rounding), windows).by_window
    assert torch.allclose(same, int8, atol=1e-5)
    assert 0.001 < errors.relative('k') < 0.01 and 0.001 < errors.relative('v') < 0.01
    with kf.rounded(kf.Format(bits=4), kf.Format()) as errors:
        judge(forward(rounding), windows)
    assert 0.05 < errors.relative('k') < 0.2 and errors.relative('v') < 0.01
    assert torch.equal(judge(forward(rounding), windows).by_window, judge(forward(rounding), windows).by_window)


def test_a_model_that_does_not_round_is_noticed(tiny):
    model, windows = tiny
    with pytest.raises(RuntimeError, match='rounded 0 tensors'), kf.rounded(kf.Format(), kf.Format()):
        judge(forward(model), windows)


def row_of(name, seed, tiny) -> dict:
    model, windows = tiny
    setting = {key: COMMITTED[0][key] for key in (*quantization_page.SAME, 'n_kv_head', 'first', 'chunk', 'eval_B', 'prompts',
                                                  'prompt_tokens')}
    ticks = []
    row = quantization.measure(model, name, windows, ticks.append)
    assert ticks[:3] == ['caches', 'forward', 'greedy'] and len(ticks) == 3 + len(row['formats'])
    return json.loads(json.dumps(setting | {'run': name, 'seed': seed, 'head_dim': 16, 'new_tokens': 4} | row))


def test_a_page_is_made_from_runs_measured_alike(tiny):
    plain, qat = row_of('plain', 1, tiny), row_of('qat', 1, tiny)
    text = quantization_page.page([qat, plain])
    assert '| plain | 1 |' in text and '## Trained with rounding' in text
    assert 'int4 asymmetric, groups of 16, K only' in plain['formats'] and 'K only' not in ' '.join(qat['formats'])
    with pytest.raises(UserError, match='qat-seed1 has tokens=7'):
        quantization_page.page([plain, qat | {'tokens': 7}])


def test_findings_follow_from_the_figures(tiny):
    row = row_of('plain', 1, tiny)
    for change, words in ((0.0099, '+0.00990, within 0.01'), (0.0101, '+0.01010, **over** 0.01'), (-0.02, '**over**')):
        row['caches']['int8']['change'] = change
        assert words in next(line for line in quantization_page.head([row]) if line.startswith('- int8'))
    for form in row['formats'].values():
        form.update(change=0.02, se=0.001)
    found = quantization_page.int4_finding([row])
    assert 'not worth offering; no format is within 0.01; not so are symmetric, groups of 16: +0.02' in found
    row['formats']['int4 asymmetric, groups of 16']['change'] = 0.0079
    found = quantization_page.int4_finding([row, copy.deepcopy(row)])
    assert ': worth offering; within 0.01' in found
    assert 'is asymmetric, groups of 16: +0.00790 ± 0.00100, 24 bytes a position (1.50x smaller than int8); not so' in found
    row['formats']['int4 asymmetric, groups of 8']['change'] = 0.001  # 32 bytes against 36 are not
    other = copy.deepcopy(row)
    for change in (0.0081, 0.02, -0.02):  # the worst seed counts, with two standard errors
        other['formats']['int4 asymmetric, groups of 16']['change'] = change
        other['formats']['int4 asymmetric, groups of 8']['change'] = 0.001
        assert ': not worth offering; within 0.01' in quantization_page.int4_finding([row, other])


# -- the command line -----------------------------------------------------------------------------------------------------

@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script with its measuring made up, in a folder of its own."""
    did = SimpleNamespace(trained=[], measured=[])
    row = COMMITTED[0]
    monkeypatch.setattr(quantization, 'RESULTS', tmp_path / 'quantization')
    monkeypatch.setattr(quantization, 'ensure_dataset', lambda name: None)
    monkeypatch.setattr(quantization, 'train_all', lambda runs, jobs: did.trained.extend(runs))
    monkeypatch.setattr(quantization, 'run', lambda name, seed, tick: did.measured.append((name, seed)) or
                        row | {'run': name, 'seed': seed})
    return did


def test_finished_runs_are_not_repeated_and_the_page_is_remade(script):
    quantization.main(['--runs', 'plain', '--seeds', '1', '2'])
    quantization.main(['--runs', 'plain', 'qat', '--seeds', '1'])
    assert script.trained == script.measured == [('plain', 1), ('plain', 2), ('qat', 1)]
    page = quantization.RESULTS / 'README.md'
    text = page.read_text()
    page.unlink()
    quantization.main(['--table'])
    assert page.read_text() == text and len(script.measured) == 3
    assert sorted(p.name for p in quantization.RESULTS.iterdir()) == [
        'README.md', 'plain-seed1.json', 'plain-seed2.json', 'qat-seed1.json']


def test_an_interrupted_measurement_leaves_the_finished_ones(script, monkeypatch):
    finished = quantization.run

    def interrupted(name, seed, tick):
        if seed == 2:
            raise KeyboardInterrupt
        return finished(name, seed, tick)
    monkeypatch.setattr(quantization, 'run', interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantization.main(['--runs', 'plain', '--seeds', '1', '2'])
    assert [p.name for p in quantization.RESULTS.iterdir()] == ['plain-seed1.json']


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """What stands in for train.py: `processes(text)` sets the Python that each run is; returns those asked for."""
    asked = []
    monkeypatch.setattr(quantization, 'is_trained', lambda name, seed: seed == 9)

    def set_to(text):
        def training(name, seed):
            asked.append((name, seed))
            return Job(f'{name}-seed{seed}', [['-c', text, name]], tmp_path / f'{name}{seed}', 1)
        monkeypatch.setattr(quantization, 'training', training)
        return asked
    return set_to


def test_what_is_not_trained_yet_is(processes):
    asked = processes('pass')
    quantization.train_all([('plain', 1), ('plain', 9), ('qat', 1), ('qat', 2)], 2)
    assert asked == [('plain', 1), ('qat', 1), ('qat', 2)]


def test_a_run_that_fails_ends_it_all(processes):
    processes("import sys; sys.exit('plain' in sys.argv[1] and 'out of luck')")
    with pytest.raises(UserError, match=r'training plain-seed2 failed: out of luck \(see .*plain2/train.log\)'):
        quantization.train_all([('qat', 1), ('plain', 2)], 1)


def test_a_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(quantization, 'RESULTS', tmp_path)
    assert '--init_from=resume' not in quantization.training('qat', 3).commands[0]
    quantization.out_dir('qat', 3).mkdir(parents=True)
    (quantization.out_dir('qat', 3) / 'ckpt.pt').touch()
    job = quantization.training('qat', 3)
    assert '--init_from=resume' in job.commands[0] and '--kv_quant_train=int8' in job.commands[0] and job.iterations == 700


@pytest.mark.parametrize('argv', [['--runs', 'plane'], ['--seeds', 'x'], ['--jobs', '0']], ids=' '.join)
def test_wrong_arguments_are_refused_before_anything_is_written(script, argv):
    with pytest.raises((SystemExit, UserError)):
        quantization.main(argv)
    assert not quantization.RESULTS.exists()


def test_settings_of_the_runs_are_known_to_train(tmp_path):
    for name in quantization.RUNS:
        s = quantization.parse('train', quantization.settings(name, 3), echo=False)
        assert s.seed == 3 and s.max_iters == 700 and not quantization.is_trained(name, 999)


# -- what is committed ----------------------------------------------------------------------------------------------------

def test_committed_runs_say_how_they_were_measured():
    wanted = {(run, seed) for run, seeds in quantization.SEEDS.items() for seed in seeds}
    assert {(r['run'], r['seed']) for r in COMMITTED} == wanted
    for r in COMMITTED:
        assert all(r[key] for key in ('hardware', 'dtype', 'torch', 'B', 'T', 'W', 'seed', 'dataset', 'threads', 'windows'))
        assert r['tokens'] == r['windows'] * r['T'] and r['forward_minus_cache']['largest'] < 1e-5
        assert r['caches']['int8']['kv_bytes'] * 4 * r['head_dim'] == r['caches']['float32']['kv_bytes'] * (r['head_dim'] + 2)
        assert r['formats']['int8']['bytes_per_position'] == 2 * r['n_kv_head'] * (r['head_dim'] + 2)


def test_int8_is_within_the_bar_without_and_with_rounding_in_training():
    for r in COMMITTED:
        c = r['caches']
        assert c['int8']['loss'] - c['float32']['loss'] == pytest.approx(c['int8']['change'], abs=1e-9)
        assert abs(c['int8']['change']) + 2 * c['int8']['se'] <= 0.01
        if r['run'] == 'qat':  # serving is what was trained
            assert abs(r['rounded_forward_minus_int8']['mean']) < 1e-5


def test_the_committed_page_is_what_the_runs_make():
    assert (quantization.RESULTS / 'README.md').read_text() == quantization_page.page(COMMITTED)
