"""The account of other people's models: by hand, without their packages, with damaged configs."""
import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.errors import UserError
from config.gpt_config import GPTConfig
from interop.configuration_nanokv import NanoKVConfig
from kv import account
from kv.models.config import completed
from kv.plan import plan_kv
from tests.helpers.hf_families import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
LLAMA = dict(model_type='llama', hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
             num_key_value_heads=8)
# what its config.json says: the rest are defaults of its class (8 heads, 4 for K/V, of 256; five
# windows to one global layer)
GEMMA_3 = dict(model_type='gemma3', torch_dtype='bfloat16', text_config=dict(
    model_type='gemma3_text', hidden_size=2560, num_hidden_layers=34, sliding_window=1024))
MISTRAL = LLAMA | dict(model_type='mistral', sliding_window=4096)
STATES = dict(num_hidden_layers=4, num_attention_heads=4, hidden_size=32, head_dim=8,
              layer_types=['linear_attention', 'full_attention'] * 2, linear_num_heads=2,
              linear_head_dim=8, linear_conv_kernel_dim=4)
STACK = dict(n_layer=12, n_head=12, n_embd=768, n_kv_head=1, layer_pattern='LLLLLG',
             kv_share='AABBBC', share_global_kv=True, window_size=256, pos_embedding='rope')


@pytest.fixture
def without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, 'transformers', None)


def test_llama_by_hand():
    found = account(LLAMA, batch=3, max_seq_len=1000, kv_dtype='bfloat16')
    assert found['bytes'] == 3 * 1000 * 32 * 2 * 8 * 128 * 2
    assert found['by_dtype']['int8'] == 3 * 1000 * 32 * 2 * 8 * (128 + 2)
    assert found['bytes_per_further_token'] == 32 * 2 * 8 * 128 * 2
    assert found['engines']['vLLM, decode'] == 3 * 1008 * 32 * 2 * 8 * 128 * 2
    assert found['engines']['llama.cpp'] == 3072 * 32 * 2 * 8 * 128 * 2
    assert found['unread'] == {} and found['assumed'] == []


def test_gemma_3_by_hand():
    found = account(GEMMA_3, max_seq_len=32768)
    position = 2 * 4 * 256 * 2
    assert found['bytes'] == (5 * 32768 + 29 * 1024) * position
    assert [row['layers'] for row in found['stores'] if row['kind'] == 'full'] == [
        [5], [11], [17], [23], [29]]
    # seven groups of five layers, one of them padded; a step of 8,192 tokens
    pages = 32768 // 16 + 6 * (-(-(1023 + 8192) // 16) + 1)
    assert found['engines']['vLLM, prefill'] == pages * 5 * 16 * position
    cells = 5 * 32768 + 29 * (1024 + 512)
    assert found['engines']['llama.cpp'] == cells * position
    assert found['engines']['llama.cpp --swa-full'] == 34 * 32768 * position


def test_states_by_hand():
    found = account(STATES, batch=2, max_seq_len=10, kv_dtype='int8')
    state = 3 * 2 * 8 * 3 * 2 + 2 * 8 * 8 * 4  # inputs of the convolutions in bfloat16
    assert found['bytes'] == 2 * (2 * state + 2 * 10 * 2 * 4 * (8 + 2))
    assert found['engines']['vLLM, decode'] is None


def test_the_dtype_of_states_that_follow_the_model():
    conv, recurrent = 3 * 2 * 8 * 3, 2 * 8 * 8 * 4
    for kv_dtype, dtype, size in (('float32', '', 4), ('int8', 'float32', 4), ('float16', '', 2)):
        found = account(STATES, max_seq_len=10, kv_dtype=kv_dtype, dtype=dtype)
        states = [row['bytes'] for row in found['stores'] if row['kind'] == 'state']
        assert states == [conv * size + recurrent] * 2


def test_our_own_exported_models():
    plan = plan_kv(GPTConfig(**STACK))
    config = NanoKVConfig(nanokv=STACK).to_dict()
    for kv_dtype in ('bfloat16', 'int8', 'int4'):
        found = account(config, batch=2, max_seq_len=1000, kv_dtype=kv_dtype)
        assert found['bytes'] == plan.nbytes(2, 1000, kv_dtype)
    assert [row['layers'] for row in found['stores']] == [list(slot.layers) for slot in plan.slots]


@pytest.mark.parametrize('change', [dict(kv_tied='all'), dict(key_offset=True), dict(
    kv_latent=64, rope_fraction_global=0.0)])
def test_our_own_mechanisms(change):
    plan = plan_kv(GPTConfig(**STACK | change))
    found = account({'nanokv': STACK | change}, batch=2, max_seq_len=1000)
    assert found['bytes'] == plan.nbytes(2, 1000, 'bfloat16')
    assert found['engines']['vLLM, decode'] is found['engines']['llama.cpp'] is None


def test_like_nanokv():
    found = account(GEMMA_3, batch=2, max_seq_len=8192, like='nanokv')
    plan = plan_kv(GPTConfig(n_layer=34, n_head=8, n_embd=2048, n_kv_head=1, window_size=1024,
                             layer_pattern='LLLLLG', kv_share='AABBBC', share_global_kv=True))
    assert plan.head_dim == 256
    assert found['like']['bytes'] == plan.nbytes(2, 8192, 'int8')
    assert found['like']['smaller'] == found['bytes'] / found['like']['bytes']
    assert account(LLAMA, like='nanokv')['like']['window'] == 1024
    latents = dict(num_hidden_layers=2, num_attention_heads=4, kv_lora_rank=512, v_head_dim=128,
                   qk_rope_head_dim=64)
    assert account(latents, like='nanokv')['like']['head_dim'] == 128


def test_a_budget_of_exactly_n_sequences_holds_n():
    one = account(GEMMA_3, max_seq_len=5000, kv_dtype='int8')
    found = account(GEMMA_3, max_seq_len=5000, kv_dtype='int8', budget=7 * one['bytes'])
    assert found['fit']['needed, int8'] == 7
    for name, nbytes in one['engines'].items():
        assert found['fit'][name] == 7 * one['bytes'] // nbytes


def test_keys_that_may_hold_memory_are_told(without_transformers):
    odd = dict(foo_state_size=16, bar_windows=[3, 4], use_cache=True, window_decay=0.5, state=None,
               q_lora_rank=64)
    assert account(LLAMA | odd)['unread'] == {'bar_windows': [3, 4], 'foo_state_size': 16}


def test_keys_that_the_class_does_not_know_are_told():
    assert account(LLAMA | dict(foo_state_size=16))['unread'] == {'foo_state_size': 16}


def test_what_a_config_leaves_to_its_class(without_transformers):
    found = account(MISTRAL, max_seq_len=8192)
    assert found['defaults'] == '' and 'windows (4096)' in found['assumed'][0]
    assert {row['holds'] for row in found['stores']} == {8192}
    with pytest.raises(UserError, match='num_attention_heads or n_head.*pip install'):
        account(GEMMA_3)


PLAIN6 = LLAMA | dict(num_hidden_layers=6)
KDA = dict(linear_num_heads=2, linear_head_dim=8, linear_conv_kernel_dim=4)
MAMBA = dict(mamba_expand=2, mamba_d_state=16, mamba_d_conv=4)
F, W, S = 'full', 'window', 'state'


@pytest.mark.parametrize('changes, kinds', [
    (dict(sliding_window=9, sliding_window_pattern=3), [W, W, F] * 2),
    (dict(sliding_window=9, sliding_window_pattern='LLG'), [W, W, F] * 2),
    (dict(sliding_window=9, use_sliding_window=False), [F] * 6),
    (dict(sliding_window=9, use_sliding_window=True, max_window_layers=4), [F] * 4 + [W] * 2),
    (dict(full_attention_interval=3, **KDA), [S, S, F] * 2),
    (dict(attn_type_list=[0, 0, 1] * 2, **KDA), [S, S, F] * 2),              # MiniMax
    (dict(full_attn_idxs=[1, 4], conv_L_cache=3), [S, F, S] * 2),            # LFM2
    (dict(attn_layer_indices=[2, 5], **MAMBA), [S, S, F] * 2),               # Bamba
    (dict(attn_layer_period=3, attn_layer_offset=1, **MAMBA), [S, F, S] * 2),  # Jamba
    (dict(hybrid_override_pattern='M*-M*E', **MAMBA), [S, F, S, F]),         # Nemotron-H
    (dict(block_types=['recurrent', 'recurrent', 'attention'], lru_width=64, conv1d_width=4,
          attention_window_size=9), [S, S, W] * 2)])                         # RecurrentGemma
def test_forms_older_than_layer_types(changes, kinds, without_transformers):
    found = account(PLAIN6 | changes)
    assert [row['kind'] for row in found['stores']] == kinds
    assert found['unread'] == {} and found['assumed'] == []


def test_zambas_hybrid_layers_have_both(without_transformers):
    found = account(PLAIN6 | MAMBA | dict(hybrid_layer_ids=[2, 5]))
    assert [row['kind'] for row in found['stores']] == [S, S, F] * 2
    assert all(row['states'] for row in found['stores'])


@pytest.mark.parametrize('changes, heads', [
    (dict(multi_query=True), 1), (dict(multi_query=True, new_decoder_architecture=True), 8),
    (dict(multi_query_attention=True, multi_query_group_num=2), 2),  # ChatGLM
    (dict(attention_head_type='multiquery'), 1),  # SantaCoder
    (dict(num_key_value_heads=None), 32), (dict(num_key_value_heads=None, num_kv_heads=4), 4),
    (dict(num_key_value_heads=None, num_attention_groups=2), 2),
    (dict(num_key_value_heads=None, attn_config={'attn_type': 'multiquery_attention'}), 1),  # MPT
    (dict(num_key_value_heads=None, attn_config={'kv_n_heads': 4}), 4),  # DBRX
    (dict(num_key_value_heads=[2, 4, 4, 8, 8, 16]), [2, 4, 4, 8, 8, 16])])  # OpenELM
def test_names_for_the_number_of_heads(changes, heads, without_transformers):
    rows = account(PLAIN6 | changes)['stores']
    found = [row['parts']['K'] for row in rows]
    expected = heads if isinstance(heads, list) else [heads] * 6
    assert found == [[n, 128] for n in expected]


def test_shared_caches_and_indexers(without_transformers):
    base = dict(num_hidden_layers=4, num_attention_heads=4, head_dim=8, kv_lora_rank=6,
                qk_rope_head_dim=2, index_head_dim=4, layer_types=['indexed_attention'] * 4)
    found = account(base | dict(indexer_types=['full', 'shared', 'full', 'shared'],
                                kv_source_layers=[0, 0, 2, 3]), max_seq_len=10)
    assert [row['layers'] for row in found['stores']] == [[0, 1], [2], [3]]
    assert found['bytes'] == 10 * 2 * (3 * (6 + 2) + 2 * 4)
    assert found['engines']['vLLM, decode'] is None


def test_what_is_beside_the_decoder_is_told(without_transformers):
    whisper = dict(is_encoder_decoder=True, num_hidden_layers=32, decoder_layers=4, d_model=64,
                   decoder_attention_heads=2)
    found = account(whisper)
    assert len(found['stores']) == 4 and 'cross-attention' in found['assumed'][0]
    quantized = LLAMA | dict(quantization_config={'kv_cache_scheme': {'num_bits': 8}})
    assert 'kv_cache_scheme' in account(quantized)['assumed'][0]


def test_with_the_class_equals_a_config_that_says_all():
    """Llama's class adds nothing, Mistral's says that all layers have the window."""
    assert account(LLAMA)['by_dtype'] == account({**LLAMA, 'model_type': 'unheard of'})['by_dtype']
    said = MISTRAL | dict(model_type='unheard of', layer_types=['sliding_attention'] * 32)
    assert account(MISTRAL)['by_dtype'] == account(said)['by_dtype']


@pytest.mark.parametrize('config, message', [
    (dict(num_hidden_layers=2), 'num_attention_heads or n_head'),
    (LLAMA | dict(num_hidden_layers=0), 'num_hidden_layers=0'),
    (LLAMA | dict(num_key_value_heads='8'), "'8' for its K/V heads"),
    (LLAMA | dict(hidden_size=4097), 'not a multiple of its 32 heads'),
    (LLAMA | dict(layer_types=['full_attention']), 'layer_types for 1 of them'),
    (LLAMA | dict(layer_types=['full_attention'] * 33), 'layer_types for 33 of them'),
    (LLAMA | dict(layer_types=['full_attention'] * 64), 'layer_types for 64 of them'),
    (PLAIN6 | dict(num_key_value_heads=[8] * 7), 'num_key_value_heads for 7 layers, and has 6'),
    (PLAIN6 | dict(num_key_value_heads=[8] * 5), 'num_key_value_heads for 5 layers, and has 6'),
    (PLAIN6 | dict(kv_sharing_modes=['store']), 'kv_sharing_modes for 1 layers, and has 6'),
    (PLAIN6 | dict(attn_type_list=[2] * 6), r'attn_type_list=\[2.*: a 0 or 1 for each layer'),
    (PLAIN6 | dict(attn_type_list=1), 'attn_type_list=1: a list is needed'),
    (PLAIN6 | dict(full_attn_idxs=[1, 6], conv_L_cache=3), r'full_attn_idxs=\[1, 6\].* 0 to 5'),
    (PLAIN6 | dict(attn_layer_indices=[1, 1], **MAMBA), r'attn_layer_indices=\[1, 1\]: diff'),
    (PLAIN6 | dict(hybrid_layer_ids='2', **MAMBA), "hybrid_layer_ids='2': a list is needed"),
    (PLAIN6 | dict(attn_layer_period=3, attn_layer_offset=3, **MAMBA),
     'attn_layer_offset=3: must be below attn_layer_period=3'),
    (PLAIN6 | dict(sliding_window=9, use_sliding_window=True, max_window_layers=7),
     'max_window_layers=7 of 6 layers'),
    (PLAIN6 | dict(sliding_window=9, use_sliding_window=True, max_window_layers=-1),
     'max_window_layers=-1'),
    (PLAIN6 | dict(sliding_window=9, use_sliding_window='no'), "use_sliding_window='no': true or"),
    (PLAIN6 | dict(sliding_window=[]), r'sliding_window=\[\]: a whole'),
    (PLAIN6 | dict(hybrid_override_pattern=['M'] * 6), 'hybrid_override_pattern=.*: text is'),
    (PLAIN6 | dict(block_types='attention'), "block_types='attention': a list is needed"),
    (PLAIN6 | dict(block_types=[]), r'block_types=\[\]: a list is needed'),
    (PLAIN6 | dict(full_attention_interval=0), 'full_attention_interval=0'),
    (PLAIN6 | dict(multi_query='yes'), "multi_query='yes': true or false is needed"),
    (PLAIN6 | dict(attention_head_type='few'), "attention_head_type='few'"),
    (PLAIN6 | dict(attn_config=[1]), r'attn_config=\[1\]: an object is needed'),
    (PLAIN6 | dict(attn_config={'attn_type': 'few'}), "attn_type='few'"),
    (PLAIN6 | dict(per_layer_config={'6': {}}), "per_layer_config for layer '6', and has 6"),
    (PLAIN6 | dict(num_attention_heads=-32), 'num_attention_heads=-32'),
    (PLAIN6 | dict(num_attention_heads='32', head_dim=128), "num_attention_heads='32'"),
    (PLAIN6 | dict(layer_types=['mamba'] * 6, mamba_n_groups=-1, mamba_n_heads=8, **MAMBA),
     'mamba_n_groups=-1'),
    (PLAIN6 | dict(layer_types=['mamba'] * 6, mamba_n_groups=1, mamba_n_heads=8,
                   mamba_d_head=-12, **MAMBA), 'mamba_d_head=-12'),
    (PLAIN6 | dict(layer_types=['mamba'] * 6, mamba_n_groups=1, mamba_n_heads=9, **MAMBA),
     'a width of 8192, which is not a multiple of its 9 heads'),
    (PLAIN6 | dict(layer_types=['indexed_attention'] * 6, index_head_dim=4,
                   indexer_types=['full'] * 7), 'indexer_types for 7 layers, and has 6'),
    (PLAIN6 | dict(layer_types=['indexed_attention'] * 6, index_head_dim=4,
                   indexer_types=['full', 'odd', *['full'] * 4]), "indexer_types='odd'"),
    (LLAMA | dict(layer_types='full'), "layer_types='full': a list"),
    (LLAMA | dict(sliding_window=9, sliding_window_pattern='LLX'), "of type 'X'"),
    (LLAMA | dict(kv_source_layers=[0, 5]), 'kv_source_layers='),
    (LLAMA | dict(sliding_window=9, use_sliding_window=True, max_window_layers='x'),
     "max_window_layers='x'"),
    (LLAMA | dict(full_attention_interval='3'), "full_attention_interval='3'"),
    (LLAMA | dict(layer_types=['mamba'] * 32, mamba_n_groups=1, **MAMBA), 'no mamba_n_heads'),
    (LLAMA | dict(architectures=['BertForMaskedLM']), 'of an encoder'),
    (LLAMA | dict(architectures=['T5EncoderModel']), 'encoder .*T5.*, which has no KV cache'),
    (LLAMA | dict(model_type='xlm-roberta'), r'encoder \(xlm-roberta\), which has no KV cache'),
    (LLAMA | dict(model_type='clip_text_model'), 'of an encoder'),
    ({'nanokv': {'n_layer': 3, 'colour': 2}}, 'not of a model of this version'),
    (LLAMA | dict(kv_lora_rank='x'), "kv_lora_rank='x'"),
    (LLAMA | dict(layer_types=['full_attention'] * 31 + ['telepathy']), "'telepathy'"),
    (LLAMA | dict(layer_types=['sliding_attention'] * 32), 'no sliding_window'),
    (LLAMA | dict(num_kv_shared_layers=32), 'num_kv_shared_layers=32 of 32'),
    (LLAMA | dict(num_hidden_layers=2, sliding_window=4, num_kv_shared_layers=1,
                  layer_types=['full_attention', 'sliding_attention']), 'no layer before them'),
    (LLAMA | dict(layer_types=['linear_attention'] * 32), 'nothing known about their state'),
    (LLAMA | dict(num_key_value_heads=64), '64 K/V heads and 32 query heads'),
    (LLAMA | dict(kv_lora_rank=512), 'no qk_rope_head_dim')])
def test_contradictory_configs(config, message, without_transformers):
    with pytest.raises(UserError, match=message):
        account(config)


def test_what_a_property_of_a_config_class_raises_is_a_user_error():
    pytest.importorskip('transformers')
    with pytest.raises(UserError, match="not valid for transformers' Gemma3nTextConfig"):
        account(dict(model_type='gemma3n_text', num_hidden_layers=4, num_kv_shared_layers=4,
                     layer_types=['sliding_attention', 'full_attention'] * 2))


@pytest.mark.parametrize('model_type', ['bert', 'electra', 'distilbert', 'modernbert', 'clip'])
def test_encoders_have_no_cache(model_type):
    with pytest.raises(UserError, match=f'of an encoder .*{model_type}.*, which has no KV cache'):
        account(dict(model_type=model_type, architectures=['BertModel']))


def test_a_decoder_of_an_encoders_family():
    bert = dict(model_type='bert', num_hidden_layers=2, is_decoder=True)
    assert account(bert, max_seq_len=10)['bytes'] == 2 * 10 * 2 * 768 * 2


def test_longcats_layers_have_two_attentions(without_transformers):
    longcat = dict(model_type='longcat_flash', num_layers=3, num_attention_heads=4, kv_lora_rank=6,
                   qk_rope_head_dim=2)
    assert account(longcat)['n_layer'] == 6


def test_windows_in_all_layers_from_the_first(without_transformers):
    found = account(PLAIN6 | dict(sliding_window=9, use_sliding_window=True, max_window_layers=0))
    assert {row['kind'] for row in found['stores']} == {W}


@pytest.mark.parametrize('n', ['many', True])
def test_a_config_that_its_class_refuses(n):
    with pytest.raises(UserError, match="not valid for transformers' LlamaConfig|=True"):
        account(LLAMA | dict(num_hidden_layers=n))


@pytest.mark.parametrize('options, message', [
    (dict(batch=0), 'batch=0'), (dict(max_seq_len=0), 'max_seq_len=0'),
    (dict(kv_dtype='fp3'), "kv_dtype='fp3'"), (dict(like='magic'), "like='magic'"),
    (dict(page_size=0), 'page_size=0'), (dict(step_tokens=-1), 'step_tokens=-1')])
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        account(LLAMA, **options)


def test_nothing_is_needed_but_the_standard_library():
    program = ("import sys\nfor name in ('torch', 'transformers', 'rich', 'numpy'):\n"
               f'    sys.modules[name] = None\nfrom kv import account\n'
               f"print(account({LLAMA!r}, max_seq_len=10)['bytes'])")
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f'{10 * 32 * 2 * 8 * 128 * 2}\n', '')


PLAIN = dict(num_hidden_layers=1, num_attention_heads=64)
LINEAR = PLAIN | dict(layer_types=['linear_attention'])
EXAMPLES = {  # of docs/accounting.md, a layer of each
    'Llama 3.1 8B': LLAMA | dict(num_hidden_layers=1),
    'MiMo-V2-Flash': PLAIN | dict(num_key_value_heads=4, head_dim=192, v_head_dim=128),
    'Gemma 3 4B': PLAIN | dict(num_key_value_heads=4, head_dim=256, sliding_window=1024,
                               layer_types=['sliding_attention']),
    'DeepSeek V3': PLAIN | dict(kv_lora_rank=512, qk_rope_head_dim=64),
    'Qwen3-Next 80B': LINEAR | dict(
        linear_num_value_heads=32, linear_num_key_heads=16, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4),
    '128 heads of 64': LINEAR | dict(mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128,
                                     mamba_n_groups=1, mamba_d_conv=4, mamba_d_ssm=8192),
    'Jamba': LINEAR | dict(mamba_expand=2, hidden_size=4096, mamba_d_state=16, mamba_d_conv=4),
    'RecurrentGemma 2B': LINEAR | dict(lru_width=2560, conv1d_width=4),
    'LFM2 1.2B': PLAIN | dict(layer_types=['conv'], hidden_size=2048, conv_L_cache=3),
    'MiniMax-Text-01': LINEAR | dict(head_dim=128, linear_attn_alpha_factor=1)}


@pytest.mark.parametrize('name', EXAMPLES)
def test_the_worked_examples(name):
    nbytes = account(EXAMPLES[name], max_seq_len=32768)['bytes']
    [line] = [line for line in (ROOT / 'docs' / 'accounting.md').read_text().splitlines()
              if re.search(f'\\| {name}[:,]', line)]
    assert f'= {nbytes:,}' in line


def test_the_text_model_of_several_parts():
    settings, defaults = completed(GEMMA_3)
    assert settings['head_dim'] == 256 and 'Gemma3TextConfig' in defaults
    nested = dict(model_type='unheard of', dtype='float16', language_config=dict(
        text_config=LLAMA))
    settings, defaults = completed(nested)
    assert settings == LLAMA | dict(dtype='float16') and defaults == ''


JUNK = st.sampled_from([None, 0, -1, 3, 2.5, True, 'x', '', [], [1], ['x'], {}, {'a': 1}, 10 ** 9])
DAMAGED = ('num_kv_shared_layers', 'attn_type_list', 'per_layer_config', 'indexer_types',
           'attn_config', 'block_types', 'layer_types', 'quantization_config', 'head_dim',
           'full_attention_interval', 'architectures', 'hybrid_override_pattern',
           'attn_layer_period', 'attn_layer_offset', 'kv_source_layers')
RAW = [settings | dict(model_type='unheard of') for settings in FAMILIES.values()]
RAW.append(FAMILIES['deepseek_v32'] | dict(layer_types=['indexed_attention'] * 6))


@given(st.data())
def test_damaged_values_are_errors_that_say_what_is_wrong(data):
    config = data.draw(st.sampled_from(RAW))
    names = data.draw(st.lists(st.sampled_from([*config, *DAMAGED]), min_size=1, max_size=3))
    damaged = config | {name: data.draw(JUNK) for name in names}
    with contextlib.suppress(UserError):
        found = account(damaged, max_seq_len=9, like='nanokv')
        assert found['bytes'] == sum(row['bytes'] for row in found['stores'])
        assert found['bytes'] >= 0
