"""Wrong input to train.py and sample.py gives one line with the value and the allowed ones, and
changes no file."""
import io
import os
import pickle
import shutil

import pytest
import torch

import sample
import train
from config.errors import UserError
from configurator import run_program
from data.making.writer import write_dataset
from tests.programs.support import ALPHABET, FULL_STACK, VANILLA, flags, load, tiny_tokens


def files_under(folder):
    return {str(p): p.read_bytes() for p in folder.rglob('*') if p.is_file()}


@pytest.fixture
def refused(tmp_path, own_data_root, capsys):
    """Run a program that must fail: exit status 2, one line on stderr that contains all of `named`,
    nothing sampled, no file changed and no folder created."""
    def check(main, settings, *named):
        before, folders = files_under(tmp_path), set(tmp_path.iterdir())
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            run_program(lambda: main(flags(settings)))
        out, message = capsys.readouterr()
        assert caught.value.code == 2 and message.startswith('error: ')
        assert message.count('\n') == 1 and message.endswith('\n') and len(message) < 1000
        for text in named:
            assert str(text) in message, message
        assert '-----' not in out
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
    return ' '.join(map(str, x)) if isinstance(x, dict) else ''


BOTH_PROGRAMS = pytest.mark.parametrize(
    'main, settings', [(train.main, for_train), (sample.main, for_sample)],
    ids=['train', 'sample'])


@pytest.mark.parametrize('settings, named', [
    (dict(batch_sise=3), ["'batch_sise'", "'batch_size'"]),
    (dict(batch_size=0), ['batch_size=0', 'at least 1']),
    (dict(block_size=-16), ['block_size=-16', 'at least 1']),
    (dict(gradient_accumulation_steps=0), ['gradient_accumulation_steps=0']),
    (dict(eval_interval=0), ['eval_interval=0']),
    (dict(checkpoint_interval=-1), ['checkpoint_interval=-1']),
    (dict(keep_checkpoints=0), ['keep_checkpoints=0', 'at least 1']),
    (dict(resume_from=''), ["resume_from=''", 'file in out_dir']),
    (dict(resume_from='../out/ckpt.pt'), ["'../out/ckpt.pt'", 'file in out_dir']),
    (dict(resume_from='ckpt_best.pt', init_from='scratch'),
     ["'ckpt_best.pt'", "'scratch'", '--init_from=resume']),
    (dict(max_iters=-1), ['max_iters=-1']),
    (dict(beta1=1.0), ['beta1=1.0', 'below 1']),
    (dict(seed=2 ** 64), [f'seed={2 ** 64}']),
    (dict(device='cuda:9'), ["'cuda:9'", "'cpu'"]),
    (dict(device='meta'), ["'meta'", "'cpu'"]),
    (dict(init_from='gpt3'), ["'gpt3'", "'scratch'", "'resume'"]),
    (dict(dataset='tinny'), ["'tinny'", "'tiny'"]),
    (dict(dataset='../tiny'), ["'../tiny'"]),
    (dict(block_size=5000), ['block_size=5000', '2000']),
    (dict(block_size=1000), ['block_size=1000', '400', 'val.bin']),
    (dict(out_dir=''), ["out_dir=''"]),
    (dict(n_head=3), ['n_embd=16', 'n_head=3']),
    # before looking for data
    (dict(n_head=4, n_kv_head=3, dataset='not_prepared'), ['n_head=4', 'n_kv_head=3']),
    (dict(n_kv_head=-1), ['n_kv_head=-1']),
    (dict(dropout=1.0), ['dropout=1.0']),
    (dict(layer_pattern='LG'), ['window_size=0', "'LG'"]),
    (dict(layer_pattern='LXG', window_size=4), ["'X'", 'G', 'L']),
    (dict(layer_pattern='LG', window_size=-4), ['window_size=-4']),
    (dict(layer_pattern='LLG', window_size=4, kv_share='ABB'), ["'ABB'", "'LLG'"]),
    (dict(rope_theta_global=1e6), ['rope_theta_global=1000000.0', "'rope'"]),
    (dict(pos_embedding='rope', head_dim=5), ['head_dim=5', 'even']),
    (dict(pos_embedding='rope', rope_theta=0.0), ['rope_theta=0.0']),
], ids=settings_id)
def test_train_refuses(refused, tmp_path, settings, named):
    refused(train.main, VANILLA | dict(out_dir=tmp_path / 'new') | settings, *named)


@pytest.mark.parametrize('settings, named', [
    (dict(temprature=1.0), ["'temprature'", "'temperature'"]),
    (dict(max_new_tokens=0), ['max_new_tokens=0']),
    (dict(temperature=-0.5), ['temperature=-0.5']),
    (dict(temperature='nan'), ["'nan'"]),
    (dict(top_p=1.5), ['top_p=1.5']),
    (dict(seed=2 ** 64), [f'seed={2 ** 64}']),
    (dict(kv_dtype='int3'), ["'int3'", "'int4'", "'int8'", "'bfloat16'"]),
    (dict(device='cuda:9'), ["'cuda:9'", "'cpu'"]),
    (dict(init_from='gpt3'), ["'gpt3'", "'resume'", "'random'", "'gpt2'", 'folder']),
    (dict(start='aXbY'), ["'X'", "'Y'", 'abcdefghij']),
    (dict(start='a' * 5000 + 'X'), ["'X'"]),  # the message does not repeat it
    (dict(start=''), ["start=''"]),
    (dict(start='FILE:no/such.txt'), ["'FILE:no/such.txt'"]),
    (dict(start='FILE:'), ["'FILE:'"]),
    (dict(init_from='random', dataset='tinny', n_layer=1, n_head=1, n_embd=4),
     ["'tinny'", "'tiny'"]),
    (dict(init_from='random', n_embd=10, n_head=3, dataset='tiny'), ['n_embd=10', 'n_head=3']),
    (dict(out_dir='no/such'), ['no/such/ckpt.pt']),
], ids=lambda x: settings_id(x)[:80])
def test_sample_refuses(refused, out, settings, named):
    refused(sample.main, for_sample(out, **settings), *named)


@pytest.mark.parametrize('content, named', [(b'caf\xe9', 'UTF-8'), (b'', '')])
def test_sample_refuses_a_prompt_file(refused, out, tmp_path, content, named):
    path = tmp_path / 'prompt.txt'
    path.write_bytes(content)
    refused(sample.main, for_sample(out, start=f'FILE:{path}'), path, named)


# -- folders and data ------------------------------------------------------------------------------

@pytest.mark.parametrize('below', ['', 'deeper/still'])
def test_train_refuses_an_out_dir_that_is_a_file(refused, tmp_path, below):
    (tmp_path / 'taken').write_text('mine')
    refused(train.main, VANILLA | dict(out_dir=tmp_path / 'taken' / below), tmp_path / 'taken')


def test_train_refuses_an_out_dir_it_may_not_write_to(tmp_path, own_data_root, monkeypatch):
    def forbidden(*args, **kwargs):
        raise PermissionError(13, 'Permission denied')
    monkeypatch.setattr(train, 'RunLog', forbidden)
    with pytest.raises(UserError, match='Permission denied'):
        train.main(flags(VANILLA | dict(out_dir=tmp_path / 'out')))


@pytest.mark.parametrize('name, content, named', [
    ('train.bin', b'123', ['3 bytes', 'multiple of 2']), ('train.bin', b'', ['0 bytes']),
    ('meta.pkl', b'\x80\x04junk', [])])
def test_train_refuses_damaged_data(refused, tmp_path, own_data_root, name, content, named):
    (own_data_root / 'tiny' / name).write_bytes(content)
    refused(train.main, VANILLA | dict(out_dir=tmp_path / 'new'), name, *named)


@pytest.mark.parametrize('name', ['train.bin', 'val.bin'])
def test_train_refuses_tokens_outside_the_vocabulary(refused, tmp_path, own_data_root, name):
    (own_data_root / 'tiny' / name).write_bytes(b'\x0c\x00' * 2000)
    refused(train.main, VANILLA | dict(out_dir=tmp_path / 'new'), name, 'token 12',
            'vocabulary 12', 'of another tokenizer')


@BOTH_PROGRAMS
def test_a_data_set_of_more_tokens_than_the_model_has(refused, out, own_data_root, main, settings):
    letters = [chr(97 + i) for i in range(40)]
    meta = {'vocab_size': 40, 'stoi': {c: i for i, c in enumerate(letters)},
            'itos': dict(enumerate(letters))}
    (own_data_root / 'tiny' / 'meta.pkl').write_bytes(pickle.dumps(meta))
    change(out, lambda saved: saved.pop('meta'))  # an older checkpoint
    refused(main, settings(out), '40', '12')


def test_sample_without_the_alphabet_of_a_character_model(refused, out, own_data_root):
    (own_data_root / 'tiny' / 'meta.pkl').unlink()
    change(out, lambda saved: saved.pop('meta'))  # an older checkpoint
    refused(sample.main, for_sample(out), 'data/tiny/meta.pkl', '12 tokens', 'prepare.py')


def test_a_data_set_whose_ids_have_another_meaning(refused, out, own_data_root):
    """The same token files, prepared with a different alphabet, then as BPE."""
    letters = ALPHABET.upper()
    tokens = {'train': tiny_tokens(2000), 'val': tiny_tokens(400)}
    write_dataset(own_data_root / 'tiny', tokens, {
        'vocab_size': len(letters), 'stoi': {c: i for i, c in enumerate(letters)},
        'itos': dict(enumerate(letters))})
    refused(train.main, for_train(out), "'tiny'", 'not those')
    change(out, lambda saved: saved.pop('meta'))  # an older checkpoint
    refused(sample.main, for_sample(out, start='AB'), 'data/tiny', 'prepared again')
    write_dataset(own_data_root / 'tiny', tokens, {'vocab_size': len(letters)})
    refused(train.main, for_train(out), "'tiny'", 'not those')


# -- checkpoints -----------------------------------------------------------------------------------

def change(out, act):
    checkpoint = load(out / 'ckpt.pt')
    act(checkpoint)
    torch.save(checkpoint, out / 'ckpt.pt')


class Bomb:
    """Creates a folder when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def saved(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


@BOTH_PROGRAMS
@pytest.mark.filterwarnings('ignore:Detected pickle protocol')
@pytest.mark.parametrize('content', [
    lambda bomb: None, lambda bomb: b'', lambda bomb: b'not a checkpoint',
    lambda bomb: b'PK\x03\x04 half a zip', saved, lambda bomb: saved({'model': bomb}), pickle.dumps,
    lambda bomb: saved([1, 2]), lambda bomb: saved({'a': 1}),
], ids=['none', 'empty', 'text', 'zip', 'code', 'code inside', 'pickle', 'list', 'other dict'])
def test_foreign_or_malicious_checkpoint(refused, out, tmp_path, main, settings, content):
    data = content(Bomb(tmp_path / 'went off'))
    (out / 'ckpt.pt').write_bytes(data) if data is not None else (out / 'ckpt.pt').unlink()
    refused(main, settings(out), out / 'ckpt.pt')
    assert not (tmp_path / 'went off').exists()


@BOTH_PROGRAMS
@pytest.mark.parametrize('kept', [0.1, 0.99])
def test_truncated_checkpoint(refused, out, main, settings, kept):
    data = (out / 'ckpt.pt').read_bytes()
    (out / 'ckpt.pt').write_bytes(data[:int(len(data) * kept)])
    refused(main, settings(out), out / 'ckpt.pt', 'damaged')


WEIGHT = 'transformer.h.0.attn.c_attn.weight'


@BOTH_PROGRAMS
@pytest.mark.parametrize('act, named', [
    (lambda c: c.pop('model'), ['lacks model']),
    (lambda c: c.pop('model_args'), ['lacks model_args']),
    (lambda c: c.pop('best_val_loss'), ['lacks best_val_loss']),
    (lambda c: c.update(model=None), ['model']),
    (lambda c: c.update(model_args=[1]), ['model_args']),
    (lambda c: c.update(config='x'), ['config']),
    (lambda c: c['model'].pop(WEIGHT), ['Missing', WEIGHT]),
    (lambda c: c['model'].update(zzz=torch.zeros(1)), ['Unexpected', 'zzz']),
    (lambda c: c['model'].update({WEIGHT: torch.zeros(3, 5)}), [WEIGHT, '[3, 5]', '[48, 16]']),
    (lambda c: c['model'].update({WEIGHT: 'text'}), [WEIGHT]),
    (lambda c: c['model_args'].update(n_layer=3), ['Missing', 'transformer.h.2']),
    (lambda c: c['model_args'].update(flux=3), ['flux', 'model_args']),
    (lambda c: c['model_args'].update(n_head=5), ['n_head=5']),
    (lambda c: c['model_args'].update(n_head='two'), ['ckpt.pt']),
    (lambda c: c['model_args'].update(layer_pattern=5), ['layer_pattern']),
    (lambda c: c['model_args'].update(layer_pattern='LG'), ["'LG'", 'window_size=0']),
], ids=lambda x: ' '.join(x) if isinstance(x, list) else '')
def test_checkpoint_whose_contents_do_not_fit(refused, out, main, settings, act, named):
    change(out, act)
    refused(main, settings(out), *named)


def test_a_checkpoint_may_not_name_a_data_set_outside_data(refused, out):
    change(out, lambda c: c['config'].update(dataset='../../etc'))
    refused(sample.main, for_sample(out), "'../../etc'")


@pytest.mark.parametrize('act, named', [
    (lambda c: c['optimizer']['param_groups'].pop(), ['optimizer']),
    (lambda c: c['optimizer']['state'][0].update(exp_avg=torch.zeros(2)), ['optimizer']),
    (lambda c: c.update(iter_num='ten'), ['iter_num', "'ten'"]),
    (lambda c: c.update(iter_num=-1), ['iter_num', '-1']),
    (lambda c: c.update(best_val_loss='low'), ['best_val_loss', "'low'"]),
    (lambda c: c.update(rng={}), ['rng']),
    (lambda c: c['rng'][0].update(torch=torch.zeros(3, dtype=torch.uint8)), ['rng']),
    (lambda c: c.update(data_rng=torch.zeros(3, dtype=torch.uint8)), ['data_rng']),
], ids=lambda x: '')
def test_training_state_that_does_not_fit(refused, out, act, named):
    change(out, act)
    refused(train.main, for_train(out), *named)


@pytest.mark.parametrize('settings, named', [
    (dict(block_size=32), ['block_size=32', '16', 'pos_embedding']),
    (dict(qk_norm=True), ['qk_norm=True', 'from scratch']),
    (dict(n_kv_head=1), ['--n_kv_head=1 (trained with 0)']),
    (dict(rope_theta_global=5.0), ['rope_theta_global=5.0', "'rope'"]),
    (dict(layer_pattern='LG'), ['window_size=0']),
    (dict(kv_share='A'), ['--kv_share=A']),
], ids=str)
def test_resume_with_settings_that_the_weights_cannot_follow(refused, out, settings, named):
    refused(train.main, for_train(out, **settings), *named)


@pytest.mark.filterwarnings('ignore:layer_pattern')
@pytest.mark.parametrize('settings, named', [
    (dict(pos_embedding='learned'), ['--pos_embedding=learned']),
    (dict(layer_pattern='GGGGGL'), ["'GGGGGL'", 'layer 2', "'LLLLLG'"])], ids=str)
def test_resume_with_another_shape_of_memory(refused, tmp_path, trained, settings, named):
    shutil.copytree(trained['full'], tmp_path / 'out')
    config = FULL_STACK | dict(out_dir=tmp_path / 'out', init_from='resume')
    refused(train.main, config | settings, *named)


@pytest.mark.filterwarnings('ignore:layer_pattern')
def test_resume_with_the_same_owners_but_other_sharing(refused, tmp_path, own_data_root):
    """Layers 0 and 1 are owners in both, but layer 3 would read K/V of layer 0, not of layer 1."""
    config = VANILLA | dict(n_layer=4, layer_pattern='LGLG', kv_share='', share_global_kv=True,
                            window_size=4, pos_embedding='rope', out_dir=tmp_path / 'out')
    train.main(flags(config | dict(max_iters=2, eval_interval=2)))
    changed = config | dict(init_from='resume', layer_pattern='GLLG')
    refused(train.main, changed, "'GLLG'", 'layer 3', 'layer 1')



def test_good_checkpoints_pass(out, own_data_root, trained, tmp_path):
    """The checkpoints that the cases above start from are accepted."""
    train.main(flags(for_train(out, max_iters=10)))
    sample.main(flags(for_sample(out, start=ALPHABET[:5])))
    shutil.copytree(trained['full'], tmp_path / 'full')
    resumed = dict(out_dir=tmp_path / 'full', init_from='resume', max_iters=10)
    train.main(flags(FULL_STACK | resumed))
