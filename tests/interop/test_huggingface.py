"""GPT-2 from Hugging Face: the same logits as in transformers, for any layout of the files."""
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from config.errors import UserError
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


def saved(folder, model=None, dtype=None, **how):
    model = theirs() if model is None else model
    (model if dtype is None else model.to(dtype)).save_pretrained(folder, **how)
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

@pytest.mark.parametrize('settings, gelu, other', [
    (dict(), 'tanh', 'exact'), (dict(activation_function='gelu_pytorch_tanh'), 'tanh', 'exact'),
    (dict(activation_function='gelu', n_inner=40), 'exact', 'tanh'),
    (dict(vocab_size=61, n_head=4, n_layer=3, n_positions=33, resid_pdrop=0.5, embd_pdrop=0.5,
          attn_pdrop=0.5), 'tanh', 'exact')], ids=str)
def test_logits_are_transformers_own(tmp_path, settings, gelu, other):
    """The two forms of GELU differ little: each matches its own reference, but not the other's."""
    hf = theirs(**settings)
    folder = str(saved(tmp_path, hf))
    ours = from_pretrained(folder)
    assert ours.config.gelu == gelu
    idx = ids(hf.config.n_positions, vocab=hf.config.vocab_size)
    assert gap(ours, hf, idx) < 1e-4
    wrong = from_pretrained(folder, dict(gelu=other)).double()
    assert gap(wrong, hf.double(), idx) > 1e-6
    assert gap(ours.double(), hf, idx) < 1e-9


@pytest.mark.parametrize('kind', ['sharded', 'one tensor a file', 'without prefix', 'with masks',
                                  'with lm_head', 'nothing but sizes'])
def test_every_layout_of_the_files(tmp_path, kind):
    hf = theirs()
    sizes = {'sharded': dict(max_shard_size='20KB'), 'one tensor a file': dict(max_shard_size=1)}
    saved(tmp_path, hf.transformer if kind == 'without prefix' else hf, **sizes.get(kind, {}))
    if kind in sizes:
        assert len(list(tmp_path.glob('model-*.safetensors'))) > 1
        assert not (tmp_path / 'model.safetensors').exists()
    elif kind == 'without prefix':
        assert 'wte.weight' in load_file(tmp_path / 'model.safetensors')
    elif kind == 'with masks':
        masks = {'bias': torch.ones(1, 1, 32, 32), 'masked_bias': torch.tensor(-1e4)}
        edit_tensors(tmp_path, lambda tensors: tensors.update(
            {f'transformer.h.{i}.attn.{name}': x.clone()
             for i in range(2) for name, x in masks.items()}))
    elif kind == 'with lm_head':
        edit_tensors(tmp_path, lambda tensors: tensors.update(
            {'lm_head.weight': tensors['transformer.wte.weight'].clone()}))
        edit(tmp_path, tie_word_embeddings=False)
    else:  # the shortest possible config.json: the rest are GPT2Config's defaults
        (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'gpt2', **SMALL}))
    assert gap(from_pretrained(str(tmp_path)), hf, ids()) < 1e-4


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_load_to_float32(tmp_path, dtype):
    hf = theirs()
    ours = from_pretrained(str(saved(tmp_path, hf, dtype)))
    assert load_file(tmp_path / 'model.safetensors')['transformer.wte.weight'].dtype == dtype
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert gap(ours, hf.float(), ids()) < 1e-4


# -- the hub ---------------------------------------------------------------------------------------

def hub(monkeypatch, download):
    monkeypatch.setitem(sys.modules, 'huggingface_hub', SimpleNamespace(hf_hub_download=download))


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
    names = 'config.json', 'model.safetensors'
    assert asked == [('openai-community/gpt2-medium', name, local)
                     for local in (True, False) for name in names]
    assert 'loading weights from pretrained gpt: gpt2-medium\n' in capsys.readouterr().out


def test_without_the_hub_the_way_around_is_named(monkeypatch):
    def download(*_, **__):
        cause = ConnectionError('Name or service not known\nand more lines')
        raise FileNotFoundError('try again. And so on') from cause
    hub(monkeypatch, download)
    refused('gpt2', 'openai-community/gpt2', 'Name or service not known', 'folder',
            'save_pretrained')


@pytest.mark.parametrize('name', ['safetensors.torch', 'huggingface_hub'])
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    refused('gpt2', name.partition('.')[0], 'pip install safetensors huggingface_hub', '[hf]')


def test_a_source_is_one_of_four_names_or_a_folder():
    refused('gpt3', "'gpt3'", "'gpt2-medium'", 'folder')


# -- what is refused -------------------------------------------------------------------------------

@pytest.mark.parametrize('overrides, named', [
    (dict(n_layer=3), ['n_layer=3', 'dropout']), (dict(bias=False), ['bias=False']),
    (dict(dropout=1.0), ['dropout=1.0']), (dict(dropout='no'), ["dropout='no'"]),
    (dict(gelu='new'), ["gelu='new'"]),
], ids=str)
def test_only_dropout_and_gelu_can_be_overridden(good, overrides, named):
    refused(good, *named, **overrides)


@pytest.mark.parametrize('settings', [
    dict(scale_attn_by_inverse_layer_idx=True), dict(reorder_and_upcast_attn=True),
    dict(layer_norm_epsilon=1e-6),
    dict(scale_attn_weights=False), dict(add_cross_attention=True), dict(model_type='gpt_neo'),
    dict(activation_function='relu'), dict(activation_function=None), dict(n_embd=0),
    dict(n_embd='16'), dict(n_head=3),
    dict(n_positions=None), dict(n_inner=-4), dict(vocab_size=5.5), dict(n_layer=True),
], ids=str)
def test_options_that_the_model_does_not_have(folder, settings):
    edit(folder, **settings)
    (name, value), = settings.items()
    refused(folder, folder / 'config.json', f'{name}={value!r}')


def test_an_lm_head_of_its_own(folder, tmp_path):
    edit_tensors(folder, lambda tensors: tensors.update(
        {'lm_head.weight': tensors['transformer.wte.weight'] + 1}))
    refused(folder, folder, 'lm_head.weight differs', 'tie_word_embeddings')
    saved(tmp_path / 'base', GPT2Model(GPT2Config(**SMALL)))
    edit(tmp_path / 'base', tie_word_embeddings=False)
    refused(tmp_path / 'base', 'lack lm_head.weight')


@pytest.mark.parametrize('change, named', [
    (lambda t: t.pop('transformer.h.1.ln_2.bias'), ['lack h.1.ln_2.bias', '1 such']),
    (lambda t: t.pop('transformer.wte.weight'), ['lack wte.weight']),
    (lambda t: t.clear(), ['lack h.0.attn.c_attn.bias', '28 such']),
    (lambda t: t.update(score=torch.ones(3)), ['unknown score']),
    (lambda t: t.update({'wpe.weight': t['transformer.wpe.weight'].clone()}),
     ['wpe.weight', 'a second time']),
    (lambda t: t.update({'transformer.h.0.attn.c_attn.weight': torch.ones(48, 16)}),
     [': h.0.attn.c_attn.weight is (48, 16)', '(16, 48)']),
    (lambda t: t.update({'lm_head.weight': torch.ones(VOCAB, 15)}),
     ['lm_head.weight is (53, 15)', '(53, 16)']),
    (lambda t: t.update({'transformer.ln_f.bias': torch.ones(16, dtype=torch.int8)}),
     ['ln_f.bias', 'int8', 'bfloat16']),
])
def test_tensors_that_do_not_fit(folder, change, named):
    edit_tensors(folder, change)
    refused(folder, folder, *named)


@pytest.mark.parametrize('text, named', [
    (None, ['no config.json in', '*.safetensors']), ('', ['JSON']), ('{"n_layer": 2', ['JSON']),
    ('[1]', ['list']),
    ('\xff', ['JSON']),
], ids=str)
def test_config_files_that_cannot_be_read(folder, text, named):
    path = folder / 'config.json'
    path.unlink()
    if text is not None:
        path.write_text(text, encoding='latin-1')
    refused(folder, folder, *named)


@pytest.mark.parametrize('cut', [0, 5, 1000, -1])
def test_a_truncated_file_is_damaged(folder, cut):
    path = folder / 'model.safetensors'
    path.write_bytes(path.read_bytes()[:cut])
    refused(folder, path, 'damaged')


def test_no_weights_or_only_pickled_ones(folder):
    (folder / 'model.safetensors').unlink()
    refused(folder, 'no model.safetensors', folder)
    (folder / 'pytorch_model.bin').write_bytes(b'cos\nsystem\n')
    refused(folder, 'pytorch_model.bin', 'safe_serialization=True')


def test_shards_that_do_not_fit_their_index(tmp_path):
    saved(tmp_path, max_shard_size='20KB')
    index = tmp_path / 'model.safetensors.index.json'
    shard = sorted(tmp_path.glob('model-*.safetensors'))[-1]
    content = shard.read_bytes()
    shard.unlink()
    refused(tmp_path, shard, 'missing')
    shard.write_bytes(content[:-7])
    refused(tmp_path, shard, 'damaged')
    shard.write_bytes(content)
    for weight_map in (None, [], {}, {'wte.weight': '../model.safetensors'}):
        index.write_text(json.dumps({'weight_map': weight_map}))
        refused(tmp_path, index, 'weight_map')
