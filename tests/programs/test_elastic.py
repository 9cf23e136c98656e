"""The plan at which an elastic model runs: budgets, sample.py, and its checkpoints."""
import contextlib
import io
import json
import random
import re
import shutil
import signal

import pytest
import torch

import chat
import sample
import serve
from common.errors import UserError
from common.gpt_config import GPTConfig
from engine.engine import Engine
from interop import convert
from interop.choose import Budget, choose
from kv import __main__ as plan_program
from model import GPT
from tests.programs.support import (
    HARD, TINY, assert_same_weights, flags, load, losses, metrics, raise_signal, run_train)
from training.checkpoint.file import config_of, load_checkpoint
from training.checkpoint.load_model import model_of
from training.elastic.plans import of_checkpoint, plans_of
from training.elastic.step import Elastic

PLANS = 'n_kv_head=1; layer_pattern=LG,window_size=4; n_kv_head=1,layer_pattern=LG,window_size=4'
TALK = dict(user='a', reply_as='b', turn='{name}{text}\n')
ROPE = dict(TINY, n_layer=4, pos_embedding='rope', qk_norm=True)


@pytest.fixture(scope='module')
def elastic(tmp_path_factory, data_root):
    out = tmp_path_factory.mktemp('elastic') / 'out'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('train.DATA_ROOT', data_root)
        run_train(out, ROPE, plans=PLANS)
    return out


def run_sample(out, **settings):
    return sample.main(flags(dict(out_dir=out, device='cpu', num_samples=1, start='a', json=True)
                             | settings))


def test_a_budget_is_kept_and_no_better_plan_fits():
    """200 random budgets of all forms, lengths, rows and dtypes."""
    base = GPTConfig(n_layer=6, n_head=4, n_embd=32, block_size=64, vocab_size=23,
                     pos_embedding='rope')
    plans, rng, refused = plans_of('auto', base), random.Random(1), 0
    for _ in range(200):
        losses_ = [rng.choice((1.0, 1.1, 1.2, 1.3)) for _ in plans]
        rows, tokens, kv_dtype = rng.randint(1, 4), rng.randint(1, 200), rng.choice(
            ('float32', 'bfloat16', 'int8'))
        at = f'@{rng.randint(1, 300)}'
        form = rng.choice(('', '/token', at, f'/token{at}'))
        budget = Budget.parse(f'{round(2 ** rng.uniform(4, 18))}{form}')
        needed = []
        for plan in plans:
            T = int(form.partition('@')[2] or 64) if form else tokens
            cache = GPT(plan.config).new_cache(1 if form else rows, T, kv_dtype)
            needed.append(cache.nbytes / (T if '/token' in form else 1))
            assert needed[-1] == budget.needed(plan, kv_dtype, lambda plan: plan.nbytes(
                rows, tokens, kv_dtype))
        fitting = [loss for loss, n in zip(losses_, needed) if n <= budget.nbytes]
        if not fitting:
            refused += 1
            with pytest.raises(UserError, match='less than the smallest plan'):
                choose(plans, losses_, budget, needed)
            continue
        i, line = choose(plans, losses_, budget, needed)
        assert needed[i] <= budget.nbytes and losses_[i] == min(fitting)
        better = [n for n, loss in zip(needed, losses_) if loss < losses_[i]]
        assert ('the next better one takes' in line) == bool(better)
    assert 20 < refused < 150


@pytest.mark.parametrize('text', ['', 'x', '64KB@', '64KB@0', '64KB/tokens', '64KB@5/token', '0'])
def test_other_forms_of_a_budget_are_refused(text):
    with pytest.raises(UserError, match='kv_budget='):
        Budget.parse(text)


def test_sample_runs_at_the_best_plan_within_the_budget(elastic, data_root, capsys):
    config = config_of(load(elastic / 'ckpt.pt'), elastic)
    plans, losses_ = of_checkpoint(load(elastic / 'ckpt.pt')['plans'], config)
    tokens = 1 + 30
    for plan in plans:
        budget = plan.nbytes(1, tokens, 'float32')
        run_sample(elastic, kv_budget=str(budget), max_new_tokens=30)
        out = capsys.readouterr().out
        sizes = {loss: each.nbytes(1, tokens, 'float32') for each, loss in zip(plans, losses_)
                 if each.nbytes(1, tokens, 'float32') <= budget}
        report = json.loads(out.splitlines()[-1])
        assert report['kv_bytes'] == sizes[min(sizes)] and 'KV plan within' in out
    with pytest.raises(UserError, match='is less than the smallest plan'):
        run_sample(elastic, kv_budget='100', max_new_tokens=30)
    run_sample(elastic, n_kv_head=1, max_new_tokens=30)  # by fields: also one without a budget
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report['kv_bytes'] == plans_of('n_kv_head=1', config)[1].nbytes(
        1, tokens, 'float32')


def test_the_converted_checkpoint_of_a_plan_gives_the_elastic_models_logits(elastic, tmp_path):
    """To the bit, by its budget and by its fields."""
    saved = load_checkpoint(elastic / 'ckpt.pt')
    base = model_of(saved, elastic).eval()
    plans, _ = of_checkpoint(saved['plans'], base.config)
    whole, idx = Elastic(base, plans).eval(), torch.arange(12)[None] % 12
    by_fields = [f'--{name}={value}' for name, value in plans[3].changes.items()]
    smallest = f'--kv_budget={plans[3].nbytes()}'
    for arguments, words in (([smallest, *by_fields], 'does not go with n_kv_head'),
                             (['--kv_budget=10'], 'less than the smallest plan')):
        with pytest.raises(UserError, match=words):
            convert.main([str(elastic), str(tmp_path / 'c'), *arguments])
    for name, argument in (('a', [smallest]), ('b', by_fields)):
        convert.main([str(elastic), str(tmp_path / name), *argument])
        small = load_checkpoint(tmp_path / name / 'ckpt.pt')
        logits = model_of(small, tmp_path).eval()(idx, idx)[0]
        assert torch.equal(logits, whole.under(3, idx, idx)[0]) and 'plans' not in small


def test_the_plans_of_a_run_are_listed(elastic, capsys):
    plan_program.main([str(elastic)])
    lines = capsys.readouterr().out.split('its plans')[1].splitlines()
    assert [line.rpartition('  ')[2] for line in lines[1:5]][0] == 'base'
    assert len([line for line in lines if 'val loss' in line]) == 4


def test_a_run_with_plans_resumes_exactly_and_keeps_them(tmp_path, at_step, capsys):
    run_train(tmp_path / 'whole', ROPE, plans=PLANS, **HARD)
    at_step(7, raise_signal(signal.SIGTERM))
    run_train(tmp_path / 'parts', ROPE, plans=PLANS, **HARD)
    at_step(8, raise_signal(signal.SIGTERM))  # before it evaluates again
    run_train(tmp_path / 'parts', ROPE, init_from='resume', **HARD)
    assert None not in [each['loss'] for each in load(tmp_path / 'parts' / 'ckpt.pt')['plans']]
    # the plans are the checkpoint's
    run_train(tmp_path / 'parts', ROPE, init_from='resume', **HARD)
    assert losses(tmp_path / 'parts') == losses(tmp_path / 'whole')
    whole, parts = (load(tmp_path / name / 'ckpt.pt') for name in ('whole', 'parts'))
    assert_same_weights(parts['model'], whole['model'])
    assert whole['plans'] == parts['plans'] and len(whole['plans']) == 4
    assert all(isinstance(each['loss'], float) for each in whole['plans'])
    out = capsys.readouterr().out
    assert out.count('x smaller  val loss') >= 4 * 3


def test_a_trained_model_becomes_elastic(tmp_path, capsys):
    """Resumed with plans: at its first iteration they are the base, cut; later they are better."""
    run_train(tmp_path, ROPE, optimizer='muon')
    run_train(tmp_path, ROPE, optimizer='muon', plans=PLANS, init_from='resume', max_iters=60,
              lr_decay_iters=60, eval_interval=20)
    found = re.findall(r'val loss (\d\.\d+)  (.*)', capsys.readouterr().out)
    cut, *_, last = [dict((name, float(n)) for n, name in found[i:i + 4])
                     for i in range(0, len(found), 4)]
    assert len(cut) == 4 and all(last[name] < cut[name] for name in cut)
    run_train(tmp_path, ROPE, optimizer='muon', init_from='resume', plans='n_kv_head=1',
              max_iters=61)  # others on the command line
    assert len(load(tmp_path / 'ckpt.pt')['plans']) == 2


def test_a_teacher_is_learned_from(elastic, tmp_path):
    """Its divergence from itself is 0, and grows where it is cut."""
    shutil.copytree(elastic, tmp_path / 'out')
    run_train(tmp_path / 'out', ROPE, init_from='resume', max_iters=41, log_interval=1,
              teacher=str(elastic), plans='layer_pattern=LLLG, window_size=2')
    assert 1e-6 < metrics(tmp_path / 'out')[-1]['loss'] < 0.5
    convert.main([str(elastic), str(tmp_path / 'cut'), '--n_kv_head=1'])
    run_train(tmp_path / 'cut', dict(ROPE, n_kv_head=1), init_from='resume', max_iters=41,
              log_interval=1, plans='', teacher=str(elastic / 'ckpt.pt'))
    assert 1e-6 < metrics(tmp_path / 'cut')[-1]['loss'] < 0.5 and 'plans' not in load(
        tmp_path / 'cut' / 'ckpt.pt')


@pytest.mark.parametrize('teacher, plans, words', [
    ('none.pt', PLANS, 'none.pt.* is no run'), ('none', '', 'none.* is no run'),
    ('wide.pt', '', 'tokens and a context of'),
    ('other.pt', PLANS, 'tokens that are not those of the teacher')])
def test_teachers_that_cannot_teach_are_refused(teacher, plans, words, elastic, tmp_path):
    saved = load(elastic / 'ckpt.pt')
    wide = GPTConfig(**saved['model_args'] | dict(vocab_size=70))
    torch.save(saved | {'model_args': vars(wide), 'plans': None, 'model': GPT(wide).state_dict()},
               tmp_path / 'wide.pt')
    torch.save(saved | {'tokens': 'of other texts'}, tmp_path / 'other.pt')
    with pytest.raises(UserError, match=words):
        run_train(tmp_path / 'out', ROPE, teacher=str(tmp_path / teacher), plans=plans)
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('settings, words', [
    (dict(plans='n_kv_head=7'), 'n_kv_head'),
    (dict(batch_size=3), 'batch_size=3 is less than the 4'),
    (dict(plan_passes=5), 'plan_passes=5: must be from 1 to the number of plans, 4'),
    (dict(plan_passes=0), 'plan_passes=0'), (dict(plans='', plan_passes=2), 'plan_passes=2'),
    (dict(parallel='fsdp'), "plans and teachers do not go with parallel='fsdp'")])
def test_plans_that_cannot_be_trained_are_refused_before_anything_is_written(tmp_path, settings,
                                                                             words):
    with pytest.raises(UserError, match=words):
        run_train(tmp_path / 'out', ROPE, **dict(plans=PLANS) | settings)
    assert not (tmp_path / 'out').exists()


def test_plans_without_losses_or_of_another_form_are_refused(elastic, tmp_path, capsys):
    for plans, words in (([{'changes': {}, 'loss': None},
                           {'changes': {'n_kv_head': 1}, 'loss': 1.0}], 'never evaluated'),
                         (['x'], 'plans of the checkpoint are invalid')):
        saved = load(elastic / 'ckpt.pt')
        torch.save(saved | {'plans': plans}, tmp_path / 'ckpt.pt')
        with pytest.raises(UserError, match=words):
            run_sample(tmp_path, kv_budget='1MB')


def test_chat_serve_and_prompts_stay_within_the_budget(elastic, tmp_path, capsys, monkeypatch):
    made = []
    plain = Engine.__init__

    def init(engine, *args, **kwargs):
        plain(engine, *args, **kwargs)
        made.append(engine)
    monkeypatch.setattr(Engine, '__init__', init)
    (tmp_path / 'prompts.txt').write_text('ab\nabc\n')
    monkeypatch.setattr('sys.stdin', io.StringIO(''))
    for budget in (8_000, 20_000, 300_000):
        common = dict(out_dir=elastic, device='cpu', kv_budget=budget)
        with contextlib.suppress(UserError):  # the smallest of a conversation of 512 tokens
            chat.main(flags(common | TALK | dict(history=tmp_path / f'{budget}.json')))
        with contextlib.suppress(UserError):
            sample.main(flags(common | dict(prompts=tmp_path / 'prompts.txt', max_new_tokens=9)))
        assert all(engine.cache.nbytes <= budget for engine in made)
    assert len(made) == 4  # the conversation takes 65 kB and more
    with pytest.raises(UserError, match='less than'):
        chat.main(flags(common | TALK | dict(kv_budget=100)))


def test_the_work_of_two_passes_is_counted(tmp_path):
    work = []
    for passes in (1, 2):
        [*_, row] = run_train(tmp_path / str(passes), ROPE, plans=PLANS, plan_passes=passes).rows
        work.append(row['model_tflops_per_second'] / row['tokens_per_second'])
    assert work[1] == pytest.approx(2 * work[0])


def test_the_program_serves_all_plans_of_a_run(elastic, monkeypatch, capsys):
    made = []

    def run(server, sockets):
        made.append(server)
        server.worker.drain(0)
    monkeypatch.setattr('serving.server.Server.run', run)
    talk = TALK | dict(out_dir=elastic, device='cpu', port=0)
    serve.main(flags(talk | dict(all_plans=True)))
    [server] = made
    sizes = [engine.model.plan.nbytes(1, 16, 'float32') for engine in server.worker.engines]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == 4
    assert all(f"'out:{serve.name_for(n)}'" in server.greeting for n in sizes[1:])
    for wrong in (dict(kv_budget='1MB'), dict(n_kv_head=1), dict(init_from='random')):
        with pytest.raises(UserError, match='all_plans'):
            serve.main(flags(talk | wrong | dict(all_plans=True)))


@pytest.mark.parametrize('nbytes, name', [
    (9, '9B'), (999, '999B'), (1000, '1KB'), (1001, '1.1KB'), (73_728, '73.8KB'),
    (294_912, '295KB'), (10 ** 6, '1MB'), (10 ** 9 + 1, '1.1GB')])
def test_the_name_of_a_plan_is_a_size_that_holds_it(nbytes, name):
    assert serve.name_for(nbytes) == name
