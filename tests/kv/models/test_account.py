"""The account of other people's models: by hand, without their packages, with damaged configs."""
import contextlib
import json
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.gpt_config import GPTConfig
from kv import account
from kv.__main__ import main
from kv.models import engines
from kv.models.config import read_config
from kv.models.memory import CHUNK, FULL, WINDOW, Memory, Part, Store
from kv.plan import plan_kv
from tests.helpers.hf_families import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
LLAMA = dict(model_type='llama', hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
             num_key_value_heads=8)
# what its config.json says: the rest are defaults of its class (8 heads, 4 for K/V, of 256; five
# windows to one global layer)
GEMMA_3 = dict(model_type='gemma3', torch_dtype='bfloat16', text_config=dict(
    model_type='gemma3_text', hidden_size=2560, num_hidden_layers=34, sliding_window=1024))
STATES = dict(model_type='qwen3_next', num_hidden_layers=4, num_attention_heads=4, head_dim=8,
              num_key_value_heads=4, hidden_size=32, linear_num_value_heads=2,
              linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
              linear_conv_kernel_dim=4, layer_types=['linear_attention', 'full_attention'] * 2)
STACK = dict(n_layer=12, n_head=12, n_embd=768, n_kv_head=1, layer_pattern='LLLLLG',
             kv_share='AABBBC', share_global_kv=True, window_size=256, pos_embedding='rope')


def test_llama_by_hand():
    found = account(LLAMA, batch=3, max_seq_len=1000, kv_dtype='bfloat16')
    assert found['bytes'] == 3 * 1000 * 32 * 2 * 8 * 128 * 2
    assert found['by_dtype']['int8'] == 3 * 1000 * 32 * 2 * 8 * (128 + 2)
    assert found['bytes_per_further_token'] == 32 * 2 * 8 * 128 * 2
    assert found['engines']['vLLM, decode'] == 3 * 1008 * 32 * 2 * 8 * 128 * 2
    assert found['assumed'] == []


def test_gemma_3_by_hand():
    found = account(GEMMA_3, max_seq_len=32768)
    position = 2 * 4 * 256 * 2
    assert found['bytes'] == (5 * 32768 + 29 * 1024) * position
    assert [row['layers'] for row in found['stores'] if row['kind'] == 'full'] == [
        [5], [11], [17], [23], [29]]
    # seven groups of five layers, one of them padded; a step of 8,192 tokens
    pages = 32768 // 16 + 6 * (-(-(1023 + 8192) // 16) + 1)
    assert found['engines']['vLLM, prefill'] == pages * 5 * 16 * position


def test_states_by_hand():
    for kv_dtype, conv, element, scale in (('int8', 2, 1, 2), ('float16', 2, 2, 0),
                                           ('float32', 4, 4, 0)):
        found = account(STATES, batch=2, max_seq_len=10, kv_dtype=kv_dtype)
        state = 3 * 2 * 8 * 3 * conv + 2 * 8 * 8 * 4  # the recurrent ones are always float32
        assert found['bytes'] == 2 * (2 * state + 2 * 10 * 2 * 4 * (8 * element + scale))
        assert found['engines']['vLLM, decode'] is None


SMALL = dict(hidden_size=48, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, head_dim=12, vocab_size=99, pad_token_id=0)
LISTED = dict(num_experts_per_tok=1, n_routed_experts=2, mlp_layer_types=['dense'] * 4)


@pytest.mark.parametrize('config, nbytes', [
    (dict(model_type='gpt_neo', num_layers=12, num_heads=12, hidden_size=768,
          attention_types=[[['global', 'local'], 6]]), 6 * (2048 + 256) * 2 * 12 * 64 * 2),
    (dict(model_type='dots3_note'), 13 * 2048 * (512 + 64 + 128) * 2 + 33 * 512 * 1088 * 2),
    (SMALL | dict(model_type='minimax', attn_type_list=[0, 0, 0, 1]),
     3 * 4 * 12 * 12 * 2 + 2048 * 2 * 2 * 12 * 2),
    (SMALL | dict(model_type='mimo_v2_flash', hybrid_layer_pattern=[0, 1, 1, 1], v_head_dim=8,
                  sliding_window=7, n_routed_experts=8), (2048 + 3 * 7 * 2) * 2 * (12 + 8) * 2),
    (dict(model_type='llama4', text_config=SMALL | dict(attention_chunk_size=None)),
     4 * 2048 * 2 * 2 * 12 * 2),
    # with cross-attention in 8 of 40 layers
    (dict(model_type='mllama'), 32 * 2048 * 2 * 8 * 128 * 2),
    *[(dict(model_type=name, text_config=SMALL | LISTED), 4 * 2048 * 2 * 2 * 12 * 2)
      for name in ('emu3', 'deepseek_ocr2')],
    *[(dict(model_type=name, thinker_config=dict(text_config=SMALL | dict(
        head_dim=128, hidden_size=512))), 4 * 2048 * 2 * 2 * 128 * 2)
      for name in ('qwen2_5_omni', 'qwen3_omni_moe')],
    (dict(model_type='paddleocr_vl'), 18 * 2048 * 2 * 2 * 128 * 2),
    (dict(model_type='kosmos-2'), 24 * 2048 * 2 * 2048 * 2),
    (dict(model_type='ernie4_5_vl_moe'), 28 * 2048 * 2 * 4 * 128 * 2),
    (dict(model_type='bert', num_hidden_layers=2, is_decoder=True), 2 * 2048 * 2 * 768 * 2)])
def test_more_models_by_hand(config, nbytes):
    assert account(config, max_seq_len=2048)['bytes'] == nbytes


@pytest.mark.parametrize('change, names', [
    (dict(quantization_config=dict(kv_cache_scheme=dict(num_bits=8, type='float'))),
     ['kv_cache_scheme']),
    (dict(quantization_config=dict(kv_cache_quant_algo='FP8', kv_cache_scheme=None)),
     ['kv_cache_quant_algo'])])
def test_what_is_not_applied_is_told(change, names):
    notes = account(LLAMA | change)['assumed']
    assert [note.partition(' is not')[0] for note in notes] == names


@pytest.mark.parametrize('change', [
    {}, dict(kv_tied='all'), dict(key_offset=True), dict(kv_latent=64, rope_fraction_global=0.0)])
def test_our_own_models(change):
    plan = plan_kv(GPTConfig(**STACK | change))
    for kv_dtype in ('bfloat16', 'int8', 'int4'):
        found = account({'nanokv': STACK | change}, batch=2, max_seq_len=1000, kv_dtype=kv_dtype)
        assert found['bytes'] == plan.nbytes(2, 1000, kv_dtype)
        assert sum(row['bytes'] for row in found['stores']) == found['bytes']
    assert [row['layers'] for row in found['stores']] == [list(slot.layers) for slot in plan.slots]
    assert (found['engines']['vLLM, decode'] is None) == bool(change)


def test_like_nanokv():
    found = account(GEMMA_3, batch=2, max_seq_len=8192, like='nanokv')
    plan = plan_kv(GPTConfig(n_layer=34, n_head=8, n_embd=2048, n_kv_head=1, window_size=1024,
                             layer_pattern='LLLLLG', kv_share='AABBBC', share_global_kv=True))
    assert plan.head_dim == 256
    assert found['like']['bytes'] == plan.nbytes(2, 8192, 'int8')
    assert found['like']['smaller'] == found['bytes'] / found['like']['bytes']
    assert account(LLAMA, like='nanokv')['like']['window'] == 1024
    latents = dict(model_type='deepseek_v3', num_hidden_layers=2, v_head_dim=128)
    assert account(latents, like='nanokv')['like']['head_dim'] == 128


def test_a_budget_of_exactly_n_sequences_holds_n():
    one = account(GEMMA_3, max_seq_len=5000, kv_dtype='int8')
    found = account(GEMMA_3, max_seq_len=5000, kv_dtype='int8', budget=7 * one['bytes'])
    assert found['fit']['needed, int8'] == 7
    for name, nbytes in one['engines'].items():
        assert found['fit'][name] == 7 * one['bytes'] // nbytes


def test_what_is_refused_before_anything_is_built(monkeypatch):
    monkeypatch.setitem(sys.modules, 'transformers', None)
    monkeypatch.delitem(sys.modules, 'kv.models.build', raising=False)
    with pytest.raises(UserError, match="needs transformers: pip install 'transformers>="):
        account(LLAMA)
    with pytest.raises(UserError, match='not of a model of this version'):
        account({'nanokv': {'n_layer': 3, 'colour': 2}})


def test_an_encoder_is_refused():
    whisper = dict(model_type='whisper', encoder_layers=6, decoder_layers=4, d_model=64,
                   decoder_attention_heads=2, encoder_attention_heads=2,
                   max_source_positions=64)
    with pytest.raises(UserError, match='an encoder beside the decoder'):
        account(whisper)


def test_a_config_runs_no_code_of_its_own(monkeypatch):
    import transformers
    monkeypatch.setattr('transformers.dynamic_module_utils.get_class_from_dynamic_module', None)
    odd = dict(auto_map={'AutoModel': 'evil--model.Model', 'AutoConfig': 'evil--config.Config'},
               attn_implementation='evil/kernel', _attn_implementation='evil/kernel',
               experts_implementation='evil/kernel')
    assert transformers.LlamaConfig
    assert account(LLAMA | odd)['bytes'] == account(LLAMA)['bytes']


@pytest.mark.parametrize('config, options, message', [
    (dict(model_type='gemma3n_text', num_hidden_layers=4, num_kv_shared_layers=4,
          layer_types=['sliding_attention', 'full_attention'] * 2), {},
     'cannot build or run this gemma3n_text'),
    (dict(model_type='bert'), {}, 'has no KV cache'),
    (LLAMA | dict(model_type='unheard of'), {}, "does not know model_type='unheard of'"),
    (LLAMA | dict(num_hidden_layers='many'), {}, "not valid for transformers' LlamaConfig"),
    (LLAMA, dict(batch=0), 'batch=0'), (LLAMA, dict(max_seq_len=0), 'max_seq_len=0'),
    (LLAMA, dict(kv_dtype='fp3'), "kv_dtype='fp3'"), (LLAMA, dict(like='magic'), "like='magic'"),
    (LLAMA, dict(page_size=0), 'page_size=0'), (LLAMA, dict(step_tokens=-1), 'step_tokens=-1')])
def test_what_is_refused(config, options, message):
    with pytest.raises(UserError, match=message):
        account(config, **options)


def test_names_of_labels_take_no_memory():
    tracemalloc.start()
    account(LLAMA | dict(num_hidden_layers=1, num_labels=3 * 10 ** 5))
    assert tracemalloc.get_traced_memory()[1] < 20 * 2 ** 20
    tracemalloc.stop()


def test_our_own_models_need_the_standard_library_alone():
    program = ("import sys\nfor name in ('torch', 'transformers', 'rich', 'numpy'):\n"
               "    sys.modules[name] = None\nfrom kv import account\n"
               "print(account({'nanokv': {}}, max_seq_len=10)['bytes'])")
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f'{10 * 12 * 2 * 768 * 2}\n', '')


EXAMPLES = {  # of docs/accounting.md, a layer of each
    'Llama 3.1 8B': LLAMA,
    'MiMo-V2-Flash': dict(model_type='mimo_v2_flash', num_attention_heads=64, head_dim=192,
                          num_key_value_heads=4, v_head_dim=128,
                          layer_types=['full_attention'] * 2),
    'Gemma 3 4B': dict(model_type='gemma3_text', sliding_window=1024,
                       layer_types=['sliding_attention'] * 2),
    'DeepSeek V3': dict(model_type='deepseek_v3'),
    'Qwen3-Next 80B': dict(
        model_type='qwen3_next', layer_types=['linear_attention', 'full_attention']),
    '128 heads of 64': dict(model_type='mamba2', hidden_size=4096, num_heads=128, head_dim=64,
                            state_size=128, n_groups=1),
    'Jamba': dict(model_type='jamba', attn_layer_period=2, attn_layer_offset=1),
    'LFM2 1.2B': dict(model_type='lfm2', hidden_size=2048,
                      layer_types=['conv', 'full_attention']),
    'MiniMax-Text-01': dict(model_type='minimax', num_attention_heads=64, head_dim=128,
                            layer_types=['linear_attention', 'full_attention'])}


@pytest.mark.parametrize('name', EXAMPLES)
def test_the_worked_examples(name):
    found = account(EXAMPLES[name] | dict(num_hidden_layers=2), max_seq_len=32768)
    nbytes = found['stores'][0]['bytes']
    [line] = [line for line in (ROOT / 'docs' / 'accounting.md').read_text().splitlines()
              if re.search(f'\\| {name}[:,]', line)]
    assert f'= {nbytes:,}' in line


JUNK = st.sampled_from([None, 0, -1, 3, 2.5, True, 'x', '', [], [1], ['x'], {}, {'a': 1}])


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_damaged_values_are_errors_that_say_what_is_wrong(data):
    family = data.draw(st.sampled_from(['llama', 'gemma3n_text', 'deepseek_v3', 'qwen3_next']))
    config = FAMILIES[family] | dict(model_type=family)
    names = data.draw(st.lists(st.sampled_from([*config, 'layer_types']),
                               min_size=1, max_size=3))
    damaged = config | {name: data.draw(JUNK) for name in names}
    with contextlib.suppress(UserError):
        found = account(damaged, max_seq_len=9, like='nanokv')
        assert found['bytes'] == sum(row['bytes'] for row in found['stores'])
        assert found['bytes'] >= 0


# -- what engines allocate: groups, pages and cells ------------------------------------------------

POSITION = 2 * 2 * 8 * 2


def mixed(full: int, windows: int, window_heads: int = 2, kind: str = WINDOW):
    parts = {heads: (Part('K', heads, 8), Part('V', heads, 8)) for heads in (2, window_heads)}
    stores = [Store(FULL, (i,), parts[2]) for i in range(full)]
    stores += [Store(kind, (full + i,), parts[window_heads], 32) for i in range(windows)]
    return Memory(tuple(stores), len(stores), 8, 8, 'mixed')


@pytest.mark.parametrize('full, windows, group_size, groups', [
    (2, 6, 2, (1, 3)), (2, 5, 2, (1, 3)), (10, 14, 14, (1, 1)), (10, 15, 10, (1, 2)),
    (4, 1, 1, (4, 1))])
def test_groups_of_layers_in_vllm(full, windows, group_size, groups):
    pages = groups[0] * -(-1000 // 16) + groups[1] * (-(-(31 + 64) // 16) + 1)
    assert engines.vllm(mixed(full, windows), 3, 1000, 'bfloat16', step_tokens=64) == (
        3 * pages * group_size * 16 * POSITION)


def test_pages_of_different_sizes():
    """Twice the heads in the windows: pages of the others have twice the positions. Widths that do
    not divide each other are refused by vLLM."""
    full, window = -(-1000 // 32), -(-32 // 16) + 1
    twice = mixed(2, 2, window_heads=4)
    assert engines.vllm(twice, 3, 1000, 'bfloat16', step_tokens=1) == (
        3 * (full + window) * 2 * 16 * 2 * POSITION)
    assert engines.vllm(mixed(2, 2, window_heads=3), 1, 1000, 'bfloat16') is None


def test_pages_of_chunks():
    """They begin where the chunk does."""
    chunked = mixed(0, 2, kind=CHUNK)
    assert engines.vllm(chunked, 3, 1000, 'bfloat16', step_tokens=64) == 3 * 2 * 6 * 16 * POSITION


# -- the program `python -m kv` --------------------------------------------------------------------

def write(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / 'config.json').write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


def test_the_program(tmp_path, capsys):
    main([write(tmp_path / 'model', GEMMA_3), '--max_seq_len=32768', '--budget=80GB',
          '--like=nanokv', '--page_size=32', '--step_tokens=512', '--json=True'])
    *lines, last = capsys.readouterr().out.splitlines()
    found, text = json.loads(last), ' '.join(' '.join(lines).split())
    assert found == account(GEMMA_3, max_seq_len=32768, budget=80 * 10 ** 9, like='nanokv',
                            page_size=32, step_tokens=512)
    assert '5 11 17 23 29' in text and f"{found['bytes']:,}" in text
    assert "with nanoKV's plan" in text and '34x smaller' in text
    assert 'has the defaults of transformers' in text


def test_shared_caches_are_shown(tmp_path, capsys):
    main([write(tmp_path / 'model', FAMILIES['gemma3n_text'] | dict(model_type='gemma3n_text'))])
    assert '3, read by 4' in ' '.join(capsys.readouterr().out.split())


def test_only_our_own_lines(tmp_path):
    """Packages of others print their warnings elsewhere."""
    odd = dict(attention_types=[[['global', 'local'], 1]], num_layers=2, torch_dtype='float16',
               rope_scaling=dict(type='linear', factor=2.0, odd=1))
    done = subprocess.run([sys.executable, '-m', 'kv', write(
        tmp_path / 'model', odd | dict(model_type='gpt_neo'))], cwd=ROOT, capture_output=True,
        text=True)
    assert (done.returncode, done.stderr) == (0, '') and done.stdout.startswith('gpt_neo: 2 layers')


@pytest.mark.parametrize('config, message', [
    ('{', 'cannot be read'), ('[]', 'holds list, not an object'), ({}, 'model_type=None')])
def test_damaged_files(config, message, tmp_path):
    with pytest.raises(UserError, match=message) as caught:
        main([write(tmp_path / 'model', config)])
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('argv, message', [
    (['nowhere/config.json'], 'no such folder or config.json'),
    (['MODEL', '--n_head=3'], 'is in its config'), (['MODEL', '--svg=x.svg'], 'is in its config'),
    (['MODEL', 'MODEL'], 'one model at a time'), (['--like=nanokv'], 'models of Hugging Face'),
    (['config/train_gpt2.py', '--page_size=32'], 'models of Hugging Face'),
    (['config/train_gpt2x'], 'did you mean config/train_gpt2.py'),
    (['config/x.json'], 'no such folder'),
    (['--svg', 'no/where.svg', 'config/train_gpt2.py'], 'cannot be written')])
def test_mistakes(argv, message, tmp_path):
    model = write(tmp_path / 'model', LLAMA)
    with pytest.raises(UserError, match=message):
        main([model if arg == 'MODEL' else arg for arg in argv])


def test_a_name_on_the_hub(tmp_path, monkeypatch):
    """`owner/name` is looked up; without a connection, or the model, the hub's words are shown."""
    import huggingface_hub

    def not_there(url, timeout):
        raise ConnectionError('no connection')
    path = Path(write(tmp_path / 'model', LLAMA)) / 'config.json'
    monkeypatch.setattr(huggingface_hub, 'hf_hub_download',
                        lambda name, file, **_: {('some/llama', 'config.json'): path}[name, file])
    monkeypatch.setattr(huggingface_hub, 'get_hf_file_metadata', not_there)
    assert read_config('some/llama') == LLAMA
    with pytest.raises(UserError, match="'some/other': no such folder, and the hub's config.json.*"
                                        'no connection'):
        read_config('some/other')
