"""Wrong input to a program gives one line with the value and the allowed ones, and changes no file.

What only one room can refuse is tested there, without a program.
"""
import pickle
import shutil

import pytest
import torch

import bench
import chat
import sample
import train
from configurator import run_program
from interop import evaluate
from tests.data.support import Bomb
from tests.programs.support import ALPHABET, VANILLA, flags, load, make_tiny, meta_of


def files_under(folder):
    return {str(p): p.read_bytes() for p in folder.rglob('*') if p.is_file()}


@pytest.fixture
def refused(tmp_path, own_data_root, capsys, monkeypatch):
    """Run a program in tmp_path that must fail: exit status 2, one line on stderr that contains all
    of `named`, nothing sampled, no file changed and no folder created."""
    monkeypatch.setattr(bench, 'DATA_ROOT', own_data_root)
    monkeypatch.chdir(tmp_path)

    def check(main, settings, *named):
        before, folders = files_under(tmp_path), set(tmp_path.iterdir())
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            run_program(lambda: main(flags(settings)))
        out, err = capsys.readouterr()
        *notes, message = err.splitlines(keepends=True)
        if settings.get('prompts'):  # stdout is for answers alone
            assert not out
        else:
            assert not notes and '-----' not in out
        assert caught.value.code == 2 and message.startswith('error: ')
        assert message.endswith('\n') and len(message) < 1000
        for text in named:
            assert str(text) in message, message
        assert files_under(tmp_path) == before and set(tmp_path.iterdir()) == folders
    return check


@pytest.fixture
def out(tmp_path, trained):
    """A folder with a good vanilla checkpoint, to be damaged."""
    shutil.copytree(trained['vanilla'], tmp_path / 'out')
    return tmp_path / 'out'


def for_train(out, **settings):
    config = {name: value for name, value in VANILLA.items() if name != 'n_layer'}
    return config | dict(out_dir=out, init_from='resume') | settings


def for_sample(out, **settings):
    return dict(out_dir=out, device='cpu', start='ab', max_new_tokens=3, num_samples=1) | settings


def settings_id(x):
    return ' '.join(map(str, x))[:80] if isinstance(x, dict) else x if isinstance(x, str) else ''


BOTH_PROGRAMS = (train.main, for_train), (sample.main, for_sample)


def out_of_range(**settings):
    return [({name: value}, [f'{name}={value}']) for name, value in settings.items()]


TRAIN = [
    *out_of_range(batch_size=0, gradient_accumulation_steps=0, eval_interval=0, beta1=1.0,
                  seed=2 ** 64, dropout=1.0, data_prefetch=65),
    (dict(batch_sise=3), ["'batch_sise'", "'batch_size'"]),
    (dict(resume_from='../out/ckpt.pt'), ["'../out/ckpt.pt'", 'file in out_dir']),
    (dict(resume_from='ckpt_best.pt', init_from='scratch'),
     ["'ckpt_best.pt'", "'scratch'", '--init_from=resume']),
    (dict(device='cuda:9'), ["'cuda:9'", "'cpu'"]),
    (dict(dataset='tinny'), ["'tinny'", "'tiny'"]),
    (dict(dataset='../tiny'), ["'../tiny'"]),
    (dict(block_size=1000), ['block_size=1000', '400', 'val.bin']),
    (dict(out_dir=''), ["out_dir='' is empty"]),
    (dict(out_dir='/'), ["out_dir='/' is the root of the file system"]),
    (dict(out_dir='taken'), ['taken']),
    # other changes: tests/training/test_adapt.py
    (dict(out_dir='out', init_from='resume', n_kv_head=1), ['--n_kv_head=1 (trained with 0)']),
    # before looking for data; other shapes: tests/kv/test_plan.py
    (dict(n_head=4, n_kv_head=3, dataset='not_prepared'), ['n_head=4', 'n_kv_head=3']),
    (dict(dataset='recall', data_order='shuffled', block_size=20, recall_task='distances=3'),
     ['makes its sequences']),
    (dict(lr_schedule='wsd', cooldown_iters=19),
     ['cooldown_iters=19 are more than lr_decay_iters=20']),
    (dict(recompute='offload', compile=True),
     ["recompute='offload'", 'torch.compile', '--compile=False']),
    (dict(recompute='auto'), ["recompute='auto' was removed; commit 461914ad has it"]),
]
SAMPLE = [
    *out_of_range(max_new_tokens=0, temperature=-0.5, seed=2 ** 64),
    (dict(init_from='gpt3'), ["'gpt3'", "'resume'", "'random'", "'gpt2'", 'folder']),
    (dict(start='aXbY'), ["'X'", "'Y'", 'abcdefghij']),
    (dict(start='a' * 5000 + 'X'), ["'X'"]),  # the message does not repeat it
    (dict(start=''), ["start=''"]),
    (dict(start='FILE:no/such.txt'), ["'FILE:no/such.txt'"]),
    (dict(start='FILE:latin1.txt'), ['latin1.txt', 'UTF-8']),
    (dict(out_dir='no/such'), ['no/such/ckpt.pt']),
    (dict(min_p=0.1), ['min_p=0.1', '--prompts']),  # nanoGPT's sampling does not have it
]
PROMPTS = [
    *out_of_range(min_p=1.0, repetition_penalty=0, logprobs=-2),
    (dict(kv_budget='1kB'), ['kv_budget=1,000 ']),
    (dict(stop="['']"), ['at least one character']),
    (dict(start='b'), ["start='b'", 'prompts=', 'both']),
    (dict(watch=True), ['watch=True draws one sample', "prompts='text.txt' are many"]),
]
CHAT = [
    (dict(user='Q'), ['alphabet lacks']),
    (dict(prefix_budget='much'), ['prefix_budget']),
]
EVALUATE = [
    (dict(text=''), ['give the text to evaluate on']),
    (dict(text='nowhere.txt'), ['nowhere.txt']),
    (dict(stride=17), ['stride=17 is more']),
    (dict(context=-1), ['context=-1']),
    (dict(out_dir='out', context=17), ['context=17: the model has learned 16 positions']),
]
BENCH = [
    (dict(mode='decode', repeats=4), ['repeats=4', 'at least 5']),
    (dict(dataset='nowhere'), ["'nowhere'", 'data/nowhere/prepare.py', '--real_data=False']),
    (dict(mode='train', against='vanilla'),
     ["against='vanilla'", "mode='train' is compared with 'nanogpt'"]),
    (dict(mode='decode', contexts='8,30'), ['33', 'block_size=32']),
    (dict(mode='decode', budget='100'), ['budget=100', '12 tokens']),
    (dict(mode='train', against='nanogpt', nanogpt='nowhere'), ["nanogpt='nowhere'"]),
    (dict(mode='decode', save='nowhere/a.json'), ["save='nowhere/a.json'"]),
]
PROGRAMS = {
    'train': (train, dict(VANILLA, out_dir='new'), TRAIN),
    'sample': (sample, for_sample('out'), SAMPLE),
    'prompts': (sample, dict(out_dir='full', device='cpu', prompts='text.txt'), PROMPTS),
    'chat': (chat, dict(out_dir='full', device='cpu', user='a', reply_as='b', history='chat.json',
                        turn='{name}c{text}d', max_seq_len=200), CHAT),
    'evaluate': (evaluate, dict(out_dir='full', device='cpu', text='text.txt'), EVALUATE),
    'bench': (bench, dict(dataset='tiny', device='cpu', n_layer=2, n_head=2, n_embd=16,
                          block_size=32, contexts=12, steps=3), BENCH)}


@pytest.mark.parametrize('program, changes, named', [
    (program, *row) for program, (_, _, rows) in PROGRAMS.items() for row in rows], ids=settings_id)
def test_wrong_settings_are_refused(refused, out, trained, tmp_path, program, changes, named):
    shutil.copytree(trained['full'], tmp_path / 'full')
    for name, content in (('text.txt', b'abc\n' * 10), ('taken', b'mine'),
                          ('latin1.txt', b'caf\xe9')):
        (tmp_path / name).write_bytes(content)
    module, settings, _ = PROGRAMS[program]
    refused(module.main, settings | changes, *named)


# -- folders and data ------------------------------------------------------------------------------


def test_older_checkpoints_depend_on_the_data_set(refused, out, own_data_root):
    """They do not have the alphabet, which may be missing, larger, or another one of this size."""
    meta = own_data_root / 'tiny' / 'meta.pkl'
    change(out, lambda saved: saved.pop('meta'))
    meta.unlink()
    refused(sample.main, for_sample(out), 'data/tiny/meta.pkl', '12 tokens', 'prepare.py')
    meta.write_bytes(pickle.dumps(meta_of(''.join(map(chr, range(97, 137))))))
    for main, settings in BOTH_PROGRAMS:
        refused(main, settings(out), '40', '12')
    make_tiny(own_data_root, ALPHABET.upper())
    refused(train.main, for_train(out), "'tiny'", 'not those')
    refused(sample.main, for_sample(out, start='AB'), 'data/tiny', 'prepared again')


# -- checkpoints -----------------------------------------------------------------------------------

def change(out, act):
    checkpoint = load(out / 'ckpt.pt')
    act(checkpoint)
    torch.save(checkpoint, out / 'ckpt.pt')


@pytest.mark.parametrize('content', [
    lambda path, bomb: path.unlink(), lambda path, bomb: path.write_bytes(b''),
    lambda path, bomb: path.write_bytes(b'PK\x03\x04 half a zip'),
    lambda path, bomb: torch.save({'model': bomb}, path),
    lambda path, bomb: path.write_bytes(pickle.dumps(bomb)),
    lambda path, bomb: torch.save([1, 2], path)],
    ids=['none', 'empty', 'zip', 'code inside', 'pickle', 'list'])
def test_foreign_or_malicious_checkpoint(refused, out, tmp_path, content):
    content(out / 'ckpt.pt', Bomb(tmp_path / 'went off'))
    for main, settings in BOTH_PROGRAMS:
        refused(main, settings(out), out / 'ckpt.pt')
    assert not (tmp_path / 'went off').exists()


WEIGHT = 'transformer.h.0.attn.c_attn.weight'
CONTENTS = [
    (lambda c: c.pop('model_args'), ['lacks model_args']),
    (lambda c: c['model'].pop(WEIGHT), ['Missing', WEIGHT]),
    (lambda c: c['model'].update(zzz=torch.zeros(1)), ['Unexpected', 'zzz']),
    (lambda c: c['model'].update({WEIGHT: torch.zeros(3, 5)}), [WEIGHT, '[3, 5]', '[48, 16]']),
    (lambda c: c['model_args'].update(n_layer=3), ['Missing', 'transformer.h.2']),
    (lambda c: c['model_args'].update(flux=3), ['flux', 'model_args']),
    (lambda c: c['model_args'].update(n_head=5), ['n_head=5'])]
SAMPLED = [(lambda c: c['config'].update(dataset='../../etc'), ["'../../etc'"])]
TRAINING_STATE = [
    (lambda c: c['optimizer']['param_groups'].pop(), ['optimizer']),
    (lambda c: c['optimizer']['state'][0].update(exp_avg=torch.zeros(2)), ['optimizer']),
    (lambda c: c.update(iter_num='ten'), ['iter_num', "'ten'"]),
    (lambda c: c['rng'][0].update(torch=torch.zeros(3, dtype=torch.uint8)), ['rng']),
    (lambda c: c.update(data_rng=torch.zeros(3, dtype=torch.uint8)), ['data_rng'])]


@pytest.mark.parametrize('programs, act, named', [
    (programs, *row) for programs, rows in (
        (BOTH_PROGRAMS, CONTENTS), (BOTH_PROGRAMS[:1], TRAINING_STATE),
        (BOTH_PROGRAMS[1:], SAMPLED)) for row in rows],
    ids=lambda x: ' '.join(x) if isinstance(x, list) else '')
def test_checkpoint_whose_contents_do_not_fit(refused, out, programs, act, named):
    change(out, act)
    for main, settings in programs:
        refused(main, settings(out), *named)
