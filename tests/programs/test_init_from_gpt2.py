"""train.py and sample.py with GPT-2 weights from a folder: `--init_from=FOLDER`."""
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.programs.support import ALPHABET, VANILLA, load, run_sample, run_train

GIVEN = {name: value for name, value in VANILLA.items()
         if name not in ('n_layer', 'n_head', 'n_embd')}


@pytest.fixture(scope='module')
def hub_model(tmp_path_factory):
    """A tiny random GPT-2 saved by Hugging Face, with weights so large that all parts matter."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=16,
                                       vocab_size=len(ALPHABET), initializer_range=0.5,
                                       bos_token_id=0, eos_token_id=0)).eval()
    folder = tmp_path_factory.mktemp('gpt2')
    model.save_pretrained(folder)
    return folder, model


def args_of(run):
    return load(run.path)['model_args']


def test_finetuning(tmp_path, hub_model, capsys):
    folder, _ = hub_model
    run = run_train(tmp_path, GIVEN, init_from=folder, max_iters=20)
    assert args_of(run) == dict(n_layer=2, n_head=2, n_embd=8, block_size=16, bias=True,
                                vocab_size=len(ALPHABET), dropout=0.0, gelu='tanh')
    evaluated = [row['val_loss'] for row in run.rows if 'val_loss' in row]
    assert evaluated[-1] < evaluated[0] - 0.1
    assert f'Initializing from OpenAI GPT-2 weights: {folder}' in capsys.readouterr().out


def test_settings_change_the_model(tmp_path, hub_model):
    """With exact GELU, the checkpoint is one for nanoGPT."""
    settings = dict(block_size=8, dropout=0.1)
    run = run_train(tmp_path, GIVEN, init_from=hub_model[0], max_iters=2, eval_interval=2,
                    gelu='exact', **settings)
    assert args_of(run) == dict(n_layer=2, n_head=2, n_embd=8, bias=True,
                                vocab_size=len(ALPHABET)) | settings
    assert len(load(run.path)['model']['transformer.wpe.weight']) == 8
    resumed = run_train(tmp_path, GIVEN, init_from='resume', max_iters=4, eval_interval=2,
                        block_size=8)
    assert [row['iter'] for row in resumed.rows] == list(range(5))


def test_sampling(hub_model, capsys):
    folder, theirs = hub_model
    out = run_sample(capsys, init_from=folder, dataset='tiny', temperature=0, max_new_tokens=8,
                     report=False)
    ids = theirs.generate(torch.tensor([[ALPHABET.index(c) for c in 'ab']]), max_new_tokens=8,
                          do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
    assert ''.join(ALPHABET[i] for i in ids) + '\n---------------\n' in out
