"""GPT-2 from Hugging Face: the same logits as in transformers, for any layout of the files."""
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from common.errors import UserError
from interop.huggingface import from_pretrained
from tests.helpers.models import full_logits, max_gap

VOCAB = 53
SMALL = dict(n_layer=2, n_head=2, n_embd=16, n_positions=32, vocab_size=VOCAB, bos_token_id=0,
             eos_token_id=0)


def theirs(**settings):
    """A random GPT2LMHeadModel with weights large enough for attention and GELU to matter."""
    generator = torch.Generator().manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(**(SMALL | settings)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return model.eval()


def saved(folder, model=None, **how):
    (model or theirs()).save_pretrained(folder, **how)
    return folder


@pytest.fixture(scope='module')
def good(tmp_path_factory):
    return saved(tmp_path_factory.mktemp('good'))


@pytest.fixture
def folder(tmp_path, good):
    """A copy of a good folder, to be damaged."""
    return shutil.copytree(good, tmp_path / 'gpt')


def edit(folder, **settings):
    path = folder / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def edit_tensors(folder, change):
    path = folder / 'model.safetensors'
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file({name: x.contiguous() for name, x in tensors.items()}, path)


def ids(T=32, B=2, vocab=VOCAB):
    return torch.randint(vocab, (B, T), generator=torch.Generator().manual_seed(2))


def gap(ours, hf, idx):
    with torch.no_grad():
        return max_gap(full_logits(ours.eval(), idx), hf(idx).logits)


def refused(source, *named, **overrides):
    with pytest.raises(UserError) as caught:
        from_pretrained(str(source), overrides)
    message = str(caught.value)
    assert '\n' not in message and len(message) < 1000
    for text in named:
        assert str(text) in message, message


# -- the same model --------------------------------------------------------------------------------

@pytest.mark.parametrize('settings', [
    {}, dict(activation_function='gelu_pytorch_tanh'),
    dict(activation_function='gelu', n_inner=40),
    dict(vocab_size=61, n_head=4, n_layer=3, n_positions=33, resid_pdrop=0.5)], ids=str)
def test_logits_are_transformers_own(tmp_path, settings):
    """In float64, where the other form of GELU would show."""
    hf = theirs(**settings)
    ours = from_pretrained(str(saved(tmp_path, hf)))
    idx = ids(hf.config.n_positions, vocab=hf.config.vocab_size)
    assert gap(ours.double(), hf.double(), idx) < 1e-9


@pytest.mark.parametrize('max_shard_size', ['20KB', 1])
def test_shards(tmp_path, max_shard_size):
    hf = theirs()
    saved(tmp_path, hf, max_shard_size=max_shard_size)
    assert not (tmp_path / 'model.safetensors').exists()
    assert gap(from_pretrained(str(tmp_path)), hf, ids()) < 1e-4


def test_masks_a_copy_of_the_embedding_and_the_shortest_config(tmp_path):
    hf = theirs()
    saved(tmp_path, hf)
    def change(tensors):
        tensors['lm_head.weight'] = tensors['transformer.wte.weight'].clone()
        for i in range(2):
            tensors[f'transformer.h.{i}.attn.bias'] = torch.ones(1, 1, 32, 32)
            tensors[f'transformer.h.{i}.attn.masked_bias'] = torch.tensor(-1e4)
    edit_tensors(tmp_path, change)
    # the rest are GPT2Config's defaults
    config = {'model_type': 'gpt2', **SMALL, 'tie_word_embeddings': False}
    (tmp_path / 'config.json').write_text(json.dumps(config))
    assert gap(from_pretrained(str(tmp_path)), hf, ids()) < 1e-4


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_load_to_float32_also_without_the_prefix(tmp_path, dtype):
    hf = theirs().to(dtype)
    ours = from_pretrained(str(saved(tmp_path, hf.transformer)))
    assert load_file(tmp_path / 'model.safetensors')['wte.weight'].dtype == dtype
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert gap(ours, hf.float(), ids()) < 1e-4


# -- the hub ---------------------------------------------------------------------------------------

def hub(monkeypatch, download, metadata=None):
    """A hub that answers; `download` without local_files_only may take long if none does."""
    monkeypatch.setitem(sys.modules, 'huggingface_hub', SimpleNamespace(
        hf_hub_download=download, hf_hub_url='{}/{}'.format,
        get_hf_file_metadata=metadata or (lambda url, timeout: None)))


def test_a_name_is_fetched_from_the_hub_as_safetensors(good, monkeypatch, capsys):
    asked = []

    def download(repo, name, local_files_only=False):
        asked.append((repo, name, local_files_only))
        if local_files_only and name == 'model.safetensors':
            raise FileNotFoundError('not in the cache')
        return str(good / name)
    hub(monkeypatch, download)
    assert from_pretrained('gpt2-medium').config.vocab_size == VOCAB
    # from the cache if it is there, otherwise from the network; nothing else is requested
    assert asked == [('openai-community/gpt2-medium', name, local)
                     for name, local in (('config.json', True), ('model.safetensors', True),
                                         ('model.safetensors', False))]
    assert 'loading weights from pretrained gpt: gpt2-medium\n' in capsys.readouterr().out


def test_what_cannot_be_fetched_is_told_with_its_remedy(monkeypatch):
    def download(*_, **__):
        cause = ConnectionError('Name or service not known\nand more lines')
        raise FileNotFoundError('try again. And so on') from cause
    refused('gpt3', "'gpt3'", "'gpt2-medium'", 'folder')
    hub(monkeypatch, download)
    refused('gpt2', 'openai-community/gpt2', 'Name or service not known', 'save_pretrained')
    def not_there(url, timeout):
        raise ConnectionError('no connection')

    def only_cached(*_, local_files_only=False):
        assert local_files_only, 'this tries for half a minute'
        raise FileNotFoundError('not in the cache')
    hub(monkeypatch, only_cached, not_there)
    refused('gpt2', 'openai-community/gpt2', 'no connection', 'save_pretrained')
    for name in ('huggingface_hub', 'safetensors'):
        monkeypatch.setitem(sys.modules, name, None)
        refused('gpt2', name, 'pip install safetensors huggingface_hub')


# -- what is refused -------------------------------------------------------------------------------

def test_only_dropout_can_be_overridden(good):
    refused(good, "'n_layer': 3", 'dropout', n_layer=3)
    refused(good, 'dropout=1.0', dropout=1.0)
    assert from_pretrained(str(good), {'dropout': 0.5}).config.dropout == 0.5


@pytest.mark.parametrize('settings', [
    dict(scale_attn_by_inverse_layer_idx=True), dict(reorder_and_upcast_attn=True),
    dict(layer_norm_epsilon=1e-6), dict(scale_attn_weights=False), dict(add_cross_attention=True),
    dict(model_type='gpt_neo'), dict(activation_function='relu'), dict(activation_function=None),
    dict(n_embd=0), dict(n_head=3), dict(n_positions=None), dict(n_inner=-4), dict(vocab_size=5.5),
    dict(n_layer=True)], ids=str)
def test_options_that_the_model_does_not_have(folder, settings):
    edit(folder, **settings)
    (name, value), = settings.items()
    refused(folder, folder / 'config.json', f'{name}={value!r}')


@pytest.mark.parametrize('change, named', [
    (lambda t: t.update({'lm_head.weight': t['transformer.wte.weight'] + 1}),
     ['lm_head.weight differs', 'tie_word_embeddings']),
    (lambda t: t.update({'wpe.weight': t['transformer.wpe.weight'].clone()}),
     ['wpe.weight', 'a second time']),
    (lambda t: t.pop('transformer.h.1.ln_2.bias'), ['Missing', 'h.1.ln_2.bias']),
    (lambda t: t.clear(), ['Missing', 'h.0.attn.c_attn.weight']),
    (lambda t: t.update(score=torch.ones(3)), ['Unexpected', 'score']),
    (lambda t: t.update({'transformer.h.0.attn.c_attn.weight': torch.ones(48, 16)}),
     ['h.0.attn.c_attn.weight', '[16, 48]', '[48, 16]']),
    (lambda t: t.update({'lm_head.weight': torch.ones(VOCAB, 15)}),
     ['lm_head.weight', '[53, 15]', '[53, 16]']),
    (lambda t: t.update({'transformer.ln_f.bias': torch.ones(16, dtype=torch.int8)}),
     ['ln_f.bias', 'int8', 'bfloat16']),
])
def test_tensors_that_do_not_fit(folder, change, named):
    edit_tensors(folder, change)
    refused(folder, folder, *named)


@pytest.mark.parametrize('name, content, named', [
    ('config.json', None, ['no config.json in', '*.safetensors']),
    ('config.json', b'{"n_layer": 2', ['JSON']), ('config.json', b'\xff', ['JSON']),
    ('config.json', b'[1]', ['list']), ('model.safetensors', b'', ['damaged'])])
def test_files_that_cannot_be_read(folder, name, content, named):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    refused(folder, folder, *named)


def test_pickles_are_not_read_and_an_untied_lm_head_must_be_there(folder):
    edit(folder, tie_word_embeddings=False)
    refused(folder, 'Missing', 'lm_head.weight')
    (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')
    refused(folder, 'no *.safetensors', 'safe_serialization=True')
