"""Wrong input to train.py and sample.py: one line naming the value and what is allowed, and nothing half-written."""
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


def files_under(*folders):
    return {str(p): p.read_bytes() for folder in folders for p in folder.rglob('*') if p.is_file()}


@pytest.fixture
def refused(tmp_path, own_data_root, capsys):
    """Run a program that must refuse: exit status 2, one line on stderr with all of `named`, and no file was touched."""
    def check(main, settings, *named):
        before = files_under(tmp_path)
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            run_program(lambda: main(flags(settings)))
        message = capsys.readouterr().err
        assert caught.value.code == 2 and message.startswith('error: ')
        assert message.count('\n') == 1 and message.endswith('\n') and len(message) < 1000
        for text in named:
            assert str(text) in message, message
        assert files_under(tmp_path) == before
        return message
    return check


@pytest.fixture
def out(tmp_path, trained):
    """A folder with a good vanilla checkpoint, to be damaged."""
    shutil.copytree(trained['vanilla'], tmp_path / 'out')
    return tmp_path / 'out'


def for_train(out, **settings):
    return VANILLA | dict(out_dir=out, init_from='resume') | settings


def for_sample(out, **settings):
    return dict(out_dir=out, device='cpu', start='ab', max_new_tokens=3, num_samples=1) | settings


BOTH_PROGRAMS = pytest.mark.parametrize('main, settings', [(train.main, for_train), (sample.main, for_sample)],
                                        ids=['train', 'sample'])


@pytest.mark.parametrize('settings, named', [
    (dict(batch_sise=3), ["'batch_sise'", "'batch_size'"]),
    (dict(batch_size=0), ['batch_size=0', 'at least 1']),
    (dict(batch_size=-4), ['batch_size=-4']),
    (dict(block_size=0), ['block_size=0', 'at least 1']),
    (dict(block_size=-16), ['block_size=-16']),
    (dict(gradient_accumulation_steps=0), ['gradient_accumulation_steps=0']),
    (dict(eval_interval=0), ['eval_interval=0']),
    (dict(eval_iters=0), ['eval_iters=0']),
    (dict(log_interval=0), ['log_interval=0']),
    (dict(checkpoint_interval=-1), ['checkpoint_interval=-1']),
    (dict(keep_checkpoints=0), ['keep_checkpoints=0', 'at least 1']),
    (dict(resume_from=''), ["resume_from=''", 'file in out_dir']),
    (dict(resume_from='..'), ["resume_from='..'", 'file in out_dir']),
    (dict(resume_from='../out/ckpt.pt'), ["'../out/ckpt.pt'", 'file in out_dir']),
    (dict(resume_from='ckpt_best.pt', init_from='scratch'), ["'ckpt_best.pt'", "'scratch'", '--init_from=resume']),
    (dict(max_iters=-1), ['max_iters=-1']),
    (dict(learning_rate=-1.0), ['learning_rate=-1.0']),
    (dict(beta1=1.0), ['beta1=1.0', 'below 1']),
    (dict(beta2=-0.5), ['beta2=-0.5']),
    (dict(seed=2 ** 64), [f'seed={2 ** 64}']),
    (dict(seed=-2 ** 70), [f'seed={-2 ** 70}']),
    (dict(device='cuda:9'), ["'cuda:9'", "'cpu'"]),
    (dict(device='gpu'), ["'gpu'", "'cpu'"]),
    (dict(device='meta'), ["'meta'", "'cpu'"]),
    (dict(dtype='float8'), ["'float8'", "'bfloat16'"]),
    (dict(init_from='gpt3'), ["'gpt3'", "'scratch'", "'resume'"]),
    (dict(dataset='tinny'), ["'tinny'", "'tiny'"]),
    (dict(dataset='../tiny'), ["'../tiny'"]),
    (dict(dataset=''), ["''"]),
    (dict(block_size=5000), ['block_size=5000', '2000']),
    (dict(block_size=1000), ['block_size=1000', '400', 'val.bin']),
    (dict(out_dir=''), ["out_dir=''"]),
    (dict(n_head=3), ['n_embd=16', 'n_head=3']),
    (dict(n_head=4, n_kv_head=3), ['n_head=4', 'n_kv_head=3']),
    (dict(n_head=4, n_kv_head=3, dataset='not_prepared'), ['n_kv_head=3']),  # before any data are looked for
    (dict(n_kv_head=-1), ['n_kv_head=-1']),
    (dict(n_layer=0), ['n_layer=0']),
    (dict(n_layer=-2), ['n_layer=-2']),
    (dict(dropout=1.0), ['dropout=1.0']),
    (dict(layer_pattern='LG'), ['window_size=0', "'LG'"]),
    (dict(layer_pattern='LXG', window_size=4), ["'X'", 'G', 'L']),
    (dict(layer_pattern=''), ["layer_pattern=''"]),
    (dict(layer_pattern='LG', window_size=-4), ['window_size=-4']),
    (dict(layer_pattern='LLG', window_size=4, kv_share='AB'), ["'AB'", "'LLG'"]),
    (dict(layer_pattern='LLG', window_size=4, kv_share='ABB'), ["'ABB'", "'LLG'"]),
    (dict(rope_theta_global=1e6), ['rope_theta_global=1000000.0', "'rope'"]),
    (dict(pos_embedding='alibi'), ["'alibi'", "'learned'", "'rope'"]),
    (dict(pos_embedding='rope', head_dim=5), ['head_dim=5', 'even']),
    (dict(pos_embedding='rope', rope_theta=0.0), ['rope_theta=0.0']),
    (dict(gelu='relu'), ["'relu'", "'exact'", "'tanh'"]),
], ids=lambda x: ' '.join(map(str, x)) if isinstance(x, dict) else '')
def test_train_refuses(refused, tmp_path, settings, named):
    refused(train.main, VANILLA | dict(out_dir=tmp_path / 'new') | settings, *named)
    assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize('settings, named', [
    (dict(temprature=1.0), ["'temprature'", "'temperature'"]),
    (dict(num_samples=0), ['num_samples=0', 'at least 1']),
    (dict(num_samples=-2), ['num_samples=-2']),
    (dict(max_new_tokens=0), ['max_new_tokens=0']),
    (dict(parallel=0), ['parallel=0']),
    (dict(temperature=-0.5), ['temperature=-0.5']),
    (dict(temperature='nan'), ["'nan'"]),
    (dict(top_k=-1), ['top_k=-1']),
    (dict(top_p=0), ['top_p=0']),
    (dict(top_p=1.5), ['top_p=1.5']),
    (dict(seed=2 ** 64), [f'seed={2 ** 64}']),
    (dict(kv_dtype='int4'), ["'int4'", "'int8'", "'bfloat16'"]),
    (dict(dtype='int8'), ["'int8'", "'float16'"]),
    (dict(device='cuda:9'), ["'cuda:9'", "'cpu'"]),
    (dict(init_from='gpt3'), ["'gpt3'", "'resume'", "'random'", "'gpt2'", 'folder']),
    (dict(start='aXbY'), ["'X'", "'Y'", 'abcdefghij']),
    (dict(start=''), ["start=''"]),
    (dict(start='FILE:no/such.txt'), ["'FILE:no/such.txt'"]),
    (dict(start='FILE:'), ["'FILE:'"]),
    (dict(init_from='random', dataset='tinny', n_layer=1, n_head=1, n_embd=4), ["'tinny'", "'tiny'"]),
    (dict(init_from='random', n_embd=10, n_head=3, dataset='tiny'), ['n_embd=10', 'n_head=3']),
    (dict(out_dir='no/such'), ['no/such/ckpt.pt']),
], ids=lambda x: ' '.join(map(str, x)) if isinstance(x, dict) else '')
def test_sample_refuses(refused, out, settings, named, capsys):
    refused(sample.main, for_sample(out, **settings), *named)
    assert '-----' not in capsys.readouterr().out


def test_sample_refuses_a_prompt_file_that_is_not_utf8(refused, out, tmp_path):
    path = tmp_path / 'latin.txt'
    path.write_bytes(b'caf\xe9')
    refused(sample.main, for_sample(out, start=f'FILE:{path}'), path, 'UTF-8')


def test_sample_refuses_an_empty_prompt_file(refused, out, tmp_path):
    path = tmp_path / 'empty.txt'
    path.write_text('')
    refused(sample.main, for_sample(out, start=f'FILE:{path}'), path)


# -- folders and data -------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize('content, named', [(b'123', ['3 bytes', 'even']), (b'', ['0 bytes'])])
def test_train_refuses_a_damaged_token_file(refused, tmp_path, own_data_root, content, named):
    (own_data_root / 'tiny' / 'train.bin').write_bytes(content)
    refused(train.main, VANILLA | dict(out_dir=tmp_path / 'new'), 'train.bin', *named)
    assert not (tmp_path / 'new').exists()


def test_train_refuses_a_damaged_meta(refused, tmp_path, own_data_root):
    (own_data_root / 'tiny' / 'meta.pkl').write_bytes(b'\x80\x04junk')
    refused(train.main, VANILLA | dict(out_dir=tmp_path / 'new'), 'meta.pkl')


def test_train_refuses_a_dataset_of_more_tokens_than_the_resumed_model_has(refused, out, own_data_root):
    path = own_data_root / 'tiny' / 'meta.pkl'
    meta = {'vocab_size': 40, 'stoi': {chr(97 + i): i for i in range(40)}, 'itos': {i: chr(97 + i) for i in range(40)}}
    path.write_bytes(pickle.dumps(meta))
    refused(train.main, for_train(out), '40', '12')


def test_sample_without_the_alphabet_of_a_character_model_says_what_to_run(refused, out, own_data_root):
    (own_data_root / 'tiny' / 'meta.pkl').unlink()
    refused(sample.main, for_sample(out), 'data/tiny/meta.pkl', '12 tokens', 'prepare.py')


def test_sample_refuses_an_alphabet_larger_than_the_model(refused, out, own_data_root):
    meta = {'vocab_size': 40, 'stoi': {chr(97 + i): i for i in range(40)}, 'itos': {i: chr(97 + i) for i in range(40)}}
    (own_data_root / 'tiny' / 'meta.pkl').write_bytes(pickle.dumps(meta))
    refused(sample.main, for_sample(out), '40', '12')


def test_sample_refuses_a_data_set_name_that_leads_elsewhere(refused, out):
    change(out, lambda c: c['config'].update(dataset='../../etc'))
    refused(sample.main, for_sample(out), "'../../etc'")


# -- checkpoints ------------------------------------------------------------------------------------------------------

def change(out, act):
    checkpoint = load(out / 'ckpt.pt')
    act(checkpoint)
    torch.save(checkpoint, out / 'ckpt.pt')


class Bomb:
    """Makes a folder when it is unpickled."""

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
    lambda bomb: b'', lambda bomb: b'not a checkpoint', lambda bomb: b'PK\x03\x04 half a zip', lambda bomb: saved(bomb),
    lambda bomb: saved({'model': bomb}), lambda bomb: pickle.dumps(bomb),
], ids=['empty', 'text', 'zip', 'code', 'code inside', 'plain pickle'])
def test_foreign_or_malicious_checkpoint(refused, out, tmp_path, main, settings, content):
    (out / 'ckpt.pt').write_bytes(content(Bomb(tmp_path / 'went off')))
    refused(main, settings(out), out / 'ckpt.pt')
    assert not (tmp_path / 'went off').exists()


@BOTH_PROGRAMS
@pytest.mark.parametrize('kept', [0.1, 0.5, 0.99])
def test_truncated_checkpoint(refused, out, main, settings, kept):
    data = (out / 'ckpt.pt').read_bytes()
    (out / 'ckpt.pt').write_bytes(data[:int(len(data) * kept)])
    refused(main, settings(out), out / 'ckpt.pt', 'damaged')


@BOTH_PROGRAMS
def test_no_checkpoint(refused, tmp_path, main, settings):
    refused(main, settings(tmp_path / 'none'), tmp_path / 'none' / 'ckpt.pt')
    assert not (tmp_path / 'none').exists()


@BOTH_PROGRAMS
@pytest.mark.parametrize('key', ['model', 'model_args', 'iter_num', 'best_val_loss', 'config'])
def test_checkpoint_that_lacks_a_key(refused, out, main, settings, key):
    change(out, lambda c: c.pop(key))
    refused(main, settings(out), out / 'ckpt.pt', f'lacks {key}')


@BOTH_PROGRAMS
@pytest.mark.parametrize('thing', [[1, 2], torch.zeros(3), {'a': 1}, 5], ids=['list', 'tensor', 'dict', 'int'])
def test_checkpoint_that_is_another_thing(refused, out, main, settings, thing):
    torch.save(thing, out / 'ckpt.pt')
    refused(main, settings(out), out / 'ckpt.pt', 'lacks')


@BOTH_PROGRAMS
@pytest.mark.parametrize('key', ['model', 'model_args', 'config'])
@pytest.mark.parametrize('value', [None, [1], 'x'], ids=['none', 'list', 'text'])
def test_checkpoint_with_a_key_of_another_type(refused, out, main, settings, key, value):
    change(out, lambda c: c.update({key: value}))
    refused(main, settings(out), out / 'ckpt.pt', key)


WEIGHT = 'transformer.h.0.attn.c_attn.weight'


@BOTH_PROGRAMS
@pytest.mark.parametrize('act, named', [
    (lambda c: c['model'].pop(WEIGHT), ['lacks', WEIGHT]),
    (lambda c: c['model'].update(zzz=torch.zeros(1)), ['unknown', 'zzz']),
    (lambda c: c['model'].update({WEIGHT: torch.zeros(3, 5)}), [WEIGHT, '(3, 5)', '(48, 16)']),
    (lambda c: c['model'].update({WEIGHT: 'text'}), [WEIGHT]),
    (lambda c: c['model_args'].update(n_layer=3), ['lacks', 'transformer.h.2']),
    (lambda c: c['model_args'].update(flux=3), ['flux', 'model_args']),
    (lambda c: c['model_args'].update(n_head=5), ['n_head=5']),
    (lambda c: c['model_args'].update(n_head='two'), ['ckpt.pt']),
    (lambda c: c['model_args'].update(n_layer=2.0), ['n_layer']),
    (lambda c: c['model_args'].update(layer_pattern=5), ['layer_pattern']),
    (lambda c: c['model_args'].update(layer_pattern='LG'), ["'LG'", 'window_size=0']),
], ids=['tensor missing', 'tensor unknown', 'tensor misshapen', 'no tensor', 'more layers', 'unknown field',
        'heads that do not divide', 'text for a number', 'float for a number', 'number for text', 'no window'])
def test_checkpoint_whose_weights_or_shape_do_not_fit(refused, out, main, settings, act, named):
    change(out, act)
    refused(main, settings(out), *named)


@pytest.mark.parametrize('act, named', [
    (lambda c: c.pop('optimizer'), ['optimizer']),
    (lambda c: c.update(optimizer={}), ['optimizer']),
    (lambda c: c.update(optimizer=None), ['optimizer']),
    (lambda c: c['optimizer']['param_groups'].pop(), ['optimizer']),
    (lambda c: c['optimizer']['state'][0].update(exp_avg=torch.zeros(2)), ['optimizer']),
    (lambda c: c.update(iter_num='ten'), ['iter_num', "'ten'"]),
    (lambda c: c.update(iter_num=-1), ['iter_num', '-1']),
    (lambda c: c.update(best_val_loss='low'), ['best_val_loss', "'low'"]),
    (lambda c: c.update(rng={}), ['rng']),
    (lambda c: c['rng'][0].update(torch=torch.zeros(3, dtype=torch.uint8)), ['rng']),
    (lambda c: c.update(data_rng=torch.zeros(3, dtype=torch.uint8)), ['data_rng']),
    (lambda c: c.update(data_rng='x'), ['data_rng']),
], ids=lambda x: '')
def test_training_state_that_does_not_fit(refused, out, act, named):
    change(out, act)
    refused(train.main, for_train(out), *named)


@pytest.mark.parametrize('settings, named', [
    (dict(block_size=32), ['block_size=32', '16', 'pos_embedding']),
    (dict(qk_norm=True), ['qk_norm=True', 'from scratch']),
    (dict(n_kv_head=1), ['n_kv_head=1', 'n_kv_head=0']),
    (dict(mlp_hidden=7), ['mlp_hidden=7', 'mlp_hidden=0']),
    (dict(rope_theta_global=5.0), ['rope_theta_global=5.0', "'rope'"]),
    (dict(layer_pattern='LG'), ['window_size=0']),
    (dict(kv_share='A'), ["kv_share='A'"]),
    (dict(block_size=0), ['block_size=0']),
], ids=str)
def test_resume_with_settings_that_the_weights_cannot_follow(refused, out, settings, named):
    refused(train.main, for_train(out, **settings), *named)


def test_resume_with_learned_positions_for_rope(refused, tmp_path, trained):
    shutil.copytree(trained['full'], tmp_path / 'out')
    refused(train.main, FULL_STACK | dict(out_dir=tmp_path / 'out', init_from='resume', pos_embedding='learned'), "'learned'")


@pytest.mark.filterwarnings('ignore:layer_pattern')
def test_resume_with_a_pattern_of_other_owners(refused, tmp_path, trained):
    shutil.copytree(trained['full'], tmp_path / 'out')
    refused(train.main, FULL_STACK | dict(out_dir=tmp_path / 'out', init_from='resume', layer_pattern='GGGGGL'),
            "'GGGGGL'", 'layer 2', "'LLLLLG'")


@pytest.mark.filterwarnings('ignore:layer_pattern')
def test_resume_with_a_pattern_of_the_same_owners_that_shares_otherwise(refused, tmp_path, own_data_root):
    """Layers 0 and 1 own in both, but layer 3 would read layer 0's K/V in place of layer 1's."""
    config = VANILLA | dict(n_layer=4, layer_pattern='LGLG', kv_share='', share_global_kv=True, window_size=4,
                            pos_embedding='rope', out_dir=tmp_path / 'out')
    train.main(flags(config | dict(max_iters=10)))
    refused(train.main, config | dict(init_from='resume', layer_pattern='GLLG'), "'GLLG'", 'layer 3', 'layer 1')


def test_resume_of_another_models_optimizer(refused, out, trained):
    other = load(trained['full'] / 'ckpt.pt')
    change(out, lambda c: c.update(optimizer=other['optimizer']))
    refused(train.main, for_train(out), 'optimizer')


def reprepare(data_root, meta):
    """The same token files, of which the ids now stand for something else."""
    write_dataset(data_root / 'tiny', {'train': tiny_tokens(2000), 'val': tiny_tokens(400)}, meta)


def test_a_data_set_whose_ids_came_to_mean_something_else(refused, out, own_data_root):
    letters = ALPHABET.upper()
    reprepare(own_data_root, {'vocab_size': len(letters), 'stoi': {c: i for i, c in enumerate(letters)},
                              'itos': dict(enumerate(letters))})
    refused(train.main, for_train(out), "'tiny'", 'not those')
    refused(sample.main, for_sample(out, start='AB'), 'data/tiny', 'prepared anew')


def test_a_data_set_that_became_bpe(refused, out, own_data_root):
    reprepare(own_data_root, {'vocab_size': len(ALPHABET)})
    refused(train.main, for_train(out), "'tiny'", 'not those')


def test_good_checkpoints_pass(out, own_data_root, trained, tmp_path):
    """What the cases above start from is not refused."""
    train.main(flags(for_train(out, max_iters=10)))
    sample.main(flags(for_sample(out, start=ALPHABET[:5])))
    shutil.copytree(trained['full'], tmp_path / 'full')
    train.main(flags(FULL_STACK | dict(out_dir=tmp_path / 'full', init_from='resume', max_iters=10)))


def test_unreadable_weights_and_biases_is_named(tmp_path, own_data_root, monkeypatch):
    monkeypatch.setitem(__import__('sys').modules, 'wandb', None)
    with pytest.raises(UserError, match='pip install wandb'):
        train.main(flags(VANILLA | dict(out_dir=tmp_path / 'out', wandb_log=True)))
