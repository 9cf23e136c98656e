"""bench.py --mode=decode and prefill on tiny shapes: figures that fit together, tables, saved files, and what is refused."""
import json
import os
import shlex

import pytest
import torch

import bench
from config.errors import UserError
from config.gpt_config import GPTConfig
from kv.plan import plan_kv
from lab.benchmarks import bandwidth, generation, report, table
from tests.programs.support import ALPHABET, FULL_STACK, flags

SHAPE = dict(n_layer=2, n_head=2, n_embd=16, block_size=32)
VANILLA = dict(SHAPE, dataset='tiny', device='cpu', contexts=12, steps=3)
MEMORY = ('n_layer', 'n_kv_head', 'layer_pattern', 'window_size', 'kv_share', 'share_global_kv', 'pos_embedding', 'qk_norm')
SMALL = VANILLA | {name: FULL_STACK[name] for name in MEMORY}
# nanoGPT's names, on our model: what is computed anew for every token
NANOGPT = '''
import torch
from model import GPT as Base, GPTConfig

class GPT(Base):
    def __init__(self, config):
        super().__init__(config)
        print('nanoGPT says something')

    def generate(self, idx, n, temperature=1.0, top_k=None):
        for _ in range(n):
            idx = torch.cat([idx, self(idx)[0][:, -1].argmax(-1, keepdim=True)], dim=1)
        return idx
'''


def plan_of(settings):
    return plan_kv(GPTConfig(**{name: settings[name] for name in (*SHAPE, *MEMORY) if name in settings}))


@pytest.fixture(autouse=True)
def _in_tiny_data(monkeypatch, data_root, tmp_path):
    monkeypatch.setattr(bench, 'DATA_ROOT', data_root)
    monkeypatch.setattr(bandwidth, 'BUFFER_BYTES', 2 ** 20)
    monkeypatch.chdir(tmp_path)


def run_bench(capsys, settings, **overrides):
    """The JSON document, and the lines of the tables before it."""
    capsys.readouterr()
    bench.main(flags(settings | overrides | dict(json=True)))
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith('Overriding')]
    assert max(map(len, lines[:-1])) <= 100
    return json.loads(lines[-1]), lines[:-1]


def test_decode_against_vanilla(capsys):
    found, lines = run_bench(capsys, SMALL, mode='decode', against='vanilla', batch_sizes='1,3', contexts='12,40')
    cells = [(cell['context'], cell['sides']['ours']['batch']) for cell in found['cells']]
    assert cells == [(12, 1), (12, 3), (40, 1), (40, 3)]
    assert (found['steps'], found['repeats'], found['threads'], found['dtype']) == (3, 5, torch.get_num_threads(), 'float32')
    ours, theirs = found['models']['ours'], found['models']['vanilla']
    assert (ours['window_size'], ours['layer_pattern'], ours['vocab_size']) == (4, 'LLLLLG', len(ALPHABET))
    assert (theirs['block_size'], theirs['pos_embedding'], theirs['n_kv_head'], theirs['qk_norm']) == (43, 'learned', 0, False)
    plan = plan_of(SMALL)
    for cell in found['cells']:
        assert (cell['held'], cell['max_seq_len']) == (cell['context'], cell['context'] + 3)
        for side, p in ((cell['sides']['ours'], plan), (cell['sides']['vanilla'], plan.vanilla())):
            B, n = side['batch'], cell['context']
            assert side['kv_bytes'] == p.nbytes(B, n + 3, 'float32')
            per_layer = [n + 2 if layer.window == 0 else layer.window for layer in p.layers]  # the mean of n + 1 .. n + 3
            assert side['kv_read_bytes_per_step'] == sum(per_layer) * p.position_nbytes('float32') * B
            assert side['tokens_per_second']['each'] == pytest.approx([1000 * B / ms for ms in side['tpot_ms']['each']])
            assert len(side['tpot_ms']['each']) == 5 and side['bandwidth_share']['min'] > 0
        sides = [cell['sides'][name]['tokens_per_second']['each'] for name in ('ours', 'vanilla')]
        ratio = cell['ratios']['tokens_per_second']['vanilla']
        assert ratio['each'] == pytest.approx([a / b for a, b in zip(*sides)])
        assert ratio['min'] <= ratio['median'] <= ratio['max']
    rates = found['bandwidth']['bytes_per_second']['each']
    assert len(rates) == 4 * 5  # a measurement in every round
    assert sum('vanilla' in line for line in lines) == 2 + 2 * 4  # two lines of heading, a row per cell in two tables


def test_decode_alone_and_in_int8(capsys):
    found, _ = run_bench(capsys, SMALL, mode='decode', kv_dtype='int8', dtype='bfloat16')
    cell, = found['cells']
    assert cell['ratios'] == {'tokens_per_second': {}} and (found['kv_dtype'], found['dtype']) == ('int8', 'bfloat16')
    assert cell['sides']['ours']['kv_bytes'] == plan_of(SMALL).nbytes(1, 15, 'int8')


def test_decode_within_a_budget(capsys):
    found, lines = run_bench(capsys, SMALL, mode='decode', against='vanilla', budget='50kB', contexts='24,20')
    plan = plan_of(SMALL)
    assert found['models']['vanilla']['block_size'] == SHAPE['block_size']  # the contexts are shorter
    for cell in found['cells']:
        T = cell['context']
        assert (cell['held'], cell['max_seq_len']) == (T - 3, T)  # full when the last timed token is in
        for name, p in (('ours', plan), ('vanilla', plan.vanilla())):
            fit, one = 50_000 // p.nbytes(1, T, 'float32'), p.nbytes(1, T, 'float32')
            assert cell['capacity'][name] == {'sequences': fit, 'kv_bytes': fit * one, 'kv_bytes_of_one_more': (fit + 1) * one}
            assert (cell['sides'][name]['batch'], cell['sides'][name]['kv_bytes']) == (fit, fit * one)
    assert any('sequences within 50,000 bytes' in line for line in lines)


@pytest.mark.parametrize('chunk', [0, 5])
def test_prefill(capsys, chunk):
    found, lines = run_bench(capsys, SMALL, mode='prefill', against='vanilla', batch_sizes='2', prefill_chunk=chunk)
    cell, = found['cells']
    ours, vanilla = cell['sides']['ours'], cell['sides']['vanilla']
    assert ours['kv_bytes'] == plan_of(SMALL).nbytes(2, 12, 'float32') and found['prefill_chunk'] == chunk
    assert ours['tokens_per_second']['each'] == pytest.approx([2 * 12 * 1000 / ms for ms in ours['ttft_ms']['each']])
    assert cell['ratios']['ttft']['vanilla']['each'] == pytest.approx(
        [b / a for a, b in zip(ours['ttft_ms']['each'], vanilla['ttft_ms']['each'])])
    assert any('in one piece' in line for line in lines) == (chunk == 0)


def test_against_transformers(capsys):
    pytest.importorskip('transformers')
    found, lines = run_bench(capsys, VANILLA, mode='decode', against='hf', batch_sizes='2', gelu='tanh')
    cell, = found['cells']
    assert list(cell['sides']) == ['ours', 'hf dynamic', 'hf static']
    assert cell['fastest'] == min(('hf dynamic', 'hf static'), key=lambda name: cell['sides'][name]['tpot_ms']['median'])
    assert found['max_logit_difference'] < 1e-4 and found['activation_function'] == 'gelu_new'
    assert found['models']['ours']['bias'] is True
    for name in ('hf dynamic', 'hf static'):
        side = cell['sides'][name]
        assert (side['rows_equal'], side['rows']) == (2, 2)
        for ratio, field in (('tokens_per_second', 'tpot_ms'), ('ttft', 'ttft_ms')):
            times = zip(side[field]['each'], cell['sides']['ours'][field]['each'])
            assert cell['ratios'][ratio][name]['each'] == pytest.approx([a / b for a, b in times])
    assert sum('*' in line for line in lines) == 2  # the title, the faster cache


def test_nothing_is_timed_where_the_logits_differ(monkeypatch):
    pytest.importorskip('transformers')
    build = generation.hugging_face

    def slightly_wrong(ours):
        model = build(ours)
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.bias += 0.1
        return model
    monkeypatch.setattr(generation, 'hugging_face', slightly_wrong)
    with pytest.raises(UserError, match="against='hf'.* logits that differ by"):
        bench.main(flags(VANILLA | dict(mode='decode', against='hf')))


def test_against_nanogpt(capsys, tmp_path):
    (tmp_path / 'nano').mkdir()
    (tmp_path / 'nano' / 'model.py').write_text(NANOGPT)
    found, lines = run_bench(capsys, VANILLA, mode='decode', against='nanogpt', nanogpt='nano', batch_sizes='2')
    assert found['cells'][0]['sides']['nanogpt']['rows_equal'] == 2 and found['max_logit_difference'] < 1e-5
    assert not any('says something' in line for line in lines)


def test_training_against_nanogpt(capsys, tmp_path):
    (tmp_path / 'nano').mkdir()
    (tmp_path / 'nano' / 'model.py').write_text(NANOGPT)
    found, lines = run_bench(capsys, VANILLA, mode='train', against='nanogpt', nanogpt='nano', batch_size=2)
    assert sum(line.startswith('19/20') or line.startswith('3/4 ') for line in lines) == 10  # five turns of each
    assert found['faster']['min'] <= found['faster']['median'] <= found['faster']['max'] and 'times its tokens/s' in lines[-3]
    with pytest.raises(UserError, match="against='vanilla'.*mode='train' is compared with 'nanogpt'; 'vanilla' goes with"):
        bench.main(flags(VANILLA | dict(mode='train', against='vanilla')))
    with pytest.raises(UserError, match='qk_norm=True'):
        bench.main(flags(VANILLA | dict(mode='train', against='nanogpt', nanogpt='nano', qk_norm=True)))


def test_saved_files_become_the_page(capsys, tmp_path):
    runs = dict(decode=dict(mode='decode', against='vanilla'), budget=dict(mode='decode', budget='50kB'),
                prompts=dict(mode='prefill'))
    documents = {name: run_bench(capsys, SMALL, save=f'{name}.json', **run)[0] for name, run in runs.items()}
    assert {name: json.loads((tmp_path / f'{name}.json').read_text()) for name in runs} == documents
    table.main([f'{name}.json' for name in runs])
    page = capsys.readouterr().out
    assert page == table.page(documents) and page.startswith('# ') and 'W=4' in page
    for name, document in documents.items():
        assert f'## {name}\n\n`{document["command"]}`' in page
        for grid in report.TABLES[document['mode']](document):
            for row in grid.rows:
                assert len(row) == len(grid.columns) and '| ' + ' | '.join(row) + ' |' in page
    capsys.readouterr()
    bench.main(shlex.split(documents['budget']['command'])[2:] + ['--json=True'])  # the command makes it again
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again['command'] == documents['budget']['command'] and again['models'] == documents['budget']['models']


def test_training_can_be_saved_too_but_has_no_table(capsys):
    bench.main(flags(SHAPE | dict(dataset='tiny', device='cpu', compile=False, batch_size=2, save='t.json')))
    with pytest.raises(UserError, match="t.json.*'decode', 'prefill'"):
        table.main(['t.json'])


def test_a_file_is_replaced_whole_or_stays(capsys, tmp_path, monkeypatch):
    (tmp_path / 'a.json').write_text('old')

    def full(*_):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(os, 'replace', full)
    with pytest.raises(UserError, match="save='a.json'.*No space"):
        run_bench(capsys, SMALL, mode='prefill', save='a.json')
    assert [path.name for path in tmp_path.iterdir()] == ['a.json'] and (tmp_path / 'a.json').read_text() == 'old'


# -- what is refused --------------------------------------------------------------------------------------------------

DECODE, PREFILL = dict(VANILLA, mode='decode'), dict(VANILLA, mode='prefill')


@pytest.mark.parametrize('settings, named', [
    (dict(DECODE, against='vllm'), ["against='vllm'", "'vanilla'", "'hf'", "'nanogpt'", "mode='serve' or mode='prefill'"]),
    (dict(DECODE, against='others'), ["against='others'", "'vanilla'", "'hf'", "'nanogpt'"]),
    (dict(VANILLA, mode='chat', against='hf'), ["against='hf'", "mode='chat' is compared with nothing", "mode='decode'"]),
    (dict(VANILLA, against='vanilla'), ["against='vanilla'", "mode='train'"]),
    (dict(PREFILL, against='hf'), ["against='hf'", "'vanilla'", "mode='decode'"]),
    (dict(PREFILL, budget='1GB'), ["budget='1GB'", "mode='decode'"]),
    (dict(DECODE, batch_sizes='0'), ["batch_sizes='0'", 'at least 1']),
    (dict(DECODE, batch_sizes='1,x'), ["batch_sizes='1,x'", "'x'", "'1,4,16'"]),
    (dict(DECODE, batch_sizes=''), ["batch_sizes=''", 'no whole number']),
    (dict(DECODE, batch_sizes='4,4'), ["batch_sizes='4,4'", 'twice']),
    (dict(DECODE, contexts='1.5'), ["contexts='1.5'", "'1.5'"]), (dict(DECODE, contexts='-3'), ["contexts='-3'", '-3']),
    (dict(DECODE, contexts='8,30'), ['30 and 3 steps', 'block_size=32', 'at most 29']),
    (dict(PREFILL, contexts='8,33'), ['contexts: 33 is', 'block_size=32', 'at most 32']),
    (dict(DECODE, contexts='33', budget='1GB'), ['contexts: 33 is', 'block_size=32', 'at most 32']),
    (dict(DECODE, contexts='30', against='hf'), ['30 and 3 steps', 'block_size=32']),
    (dict(DECODE, steps=0), ['steps=0', 'at least 1']), (dict(DECODE, repeats=4), ['repeats=4', 'at least 5']),
    (dict(DECODE, repeats=4, against='hf'), ['repeats=4', 'at least 5']),
    (dict(PREFILL, repeats=4), ['repeats=4']), (dict(PREFILL, prefill_chunk=-1), ['prefill_chunk=-1', 'at least 0']),
    (dict(DECODE, steps=1, against='hf'), ['steps=1', '2 or more']), (dict(DECODE, kv_dtype='int3'), ["'int3'", "'int8'"]),
    (dict(DECODE, budget='lots'), ["budget='lots'", "'1GB'"]), (dict(DECODE, budget='100'), ["budget='100'", '12 tokens']),
    (dict(DECODE, budget='1GB', batch_sizes='4'), ["batch_sizes='4'", "budget='1GB'"]),
    (dict(DECODE, budget='1GB', steps=12), ['12 tokens', 'steps=12']),
    (dict(DECODE, budget='1GB', against='hf'), ["budget='1GB'", "against='hf'"]),
    (dict(DECODE, kv_dtype='int8', against='hf'), ["kv_dtype='int8'", "against='hf'"]),
    (dict(SMALL, mode='decode', against='hf'), ["against='hf'", 'vanilla', "layer_pattern='LLLLLG'"]),
    (dict(DECODE, against='nanogpt'), ["nanogpt=''", 'model.py']),
    (dict(DECODE, against='nanogpt', nanogpt='nowhere'), ["nanogpt='nowhere'"]),
    (dict(DECODE, nanogpt='x'), ["nanogpt='x'", "against='nanogpt'"]),
    (dict(DECODE, save='nowhere/a.json'), ["save='nowhere/a.json'", 'no folder nowhere/']),
    (dict(DECODE, save='.'), ["save='.'", 'folder']), (dict(DECODE, device='abacus'), ["device='abacus'"]),
], ids=str)
def test_bad_settings(settings, named):
    with pytest.raises(UserError) as caught:
        bench.main(flags(settings))
    assert '\n' not in str(caught.value)
    for text in named:
        assert text in str(caught.value)


@pytest.mark.parametrize('text', ['{', '[]', '{"mode": "train"}', None])
def test_pages_are_made_of_documents(tmp_path, text):
    if text is not None:
        (tmp_path / 'x.json').write_text(text)
    with pytest.raises(UserError, match='x.json'):
        table.main(['x.json'])


def test_conversations(capsys):
    found, lines = run_bench(capsys, SMALL, mode='chat', contexts='64,128', requests=12, dialogues=3, message=5,
                             page_sizes='4,8', shares='100,5')
    assert [(cell['page_size'], cell['prune'], cell['share']) for cell in found['workload']] == [
        (size, prune, share) for size in (4, 8) for prune in (True, False) for share in (100, 5)]
    for whole, part in zip(found['workload'][::2], found['workload'][1::2]):
        assert whole['requests'] == part['requests'] == 12 and whole['looked_up'] == part['looked_up']  # the same requests
        assert whole['evicted'] == 0 < part['evicted'] and whole['hit_rate'] >= part['hit_rate']
        assert part['held_nbytes'] < 0.5 * whole['held_nbytes']  # pages in the pool are held, too
        assert whole['found'] + whole['computed_per_request'] * 12 == pytest.approx(whole['looked_up'])
    assert sum(cell['found'] for cell in found['workload'][::2]) > sum(cell['found'] for cell in found['workload'][1::2])
    pruned, kept, *_ = found['bytes']
    assert pruned['held_nbytes'] < kept['held_nbytes'] and pruned['tokens'] == kept['tokens'] > 100
    assert pruned['vanilla_nbytes'] == plan_of(SMALL).vanilla().nbytes(1, pruned['tokens'], 'bfloat16')
    assert [(cell['context'], cell['n_cached']) for cell in found['cells']] == [(64, 64), (128, 128)]
    assert all(cell['sides']['ours']['ttft_ms']['median'] > 0 for cell in found['cells'])
    assert any('without a store' in line for line in lines) and any('all kept' in line for line in lines)


@pytest.mark.parametrize('wrong, named', [(dict(dialogues=0), 'dialogues=0'), (dict(shares='0'), "shares='0'"),
                                          (dict(budget='1GB'), "budget='1GB'"), (dict(contexts='100'), "contexts='100'"),
                                          (dict(page_sizes='x'), "page_sizes='x'")])
def test_conversations_that_cannot_be(wrong, named):
    with pytest.raises(UserError, match=named):
        bench.main(flags(SMALL | dict(mode='chat') | wrong))


def test_a_picture_of_conversations(capsys, tmp_path):
    from lab.benchmarks import chat_plot
    found, _ = run_bench(capsys, SMALL, mode='chat', contexts='32,64', requests=3, dialogues=2, page_sizes=8,
                         save=tmp_path / 'chat.json')
    chat_plot.main([str(tmp_path / 'chat.json'), str(tmp_path / 'chat.png')])
    assert (tmp_path / 'chat.png').read_bytes().startswith(b'\x89PNG')
    (tmp_path / 'other.json').write_text('{"mode": "train"}')
    with pytest.raises(UserError, match='other.json is no document'):
        chat_plot.main([str(tmp_path / 'other.json'), 'x.png'])
    with pytest.raises(UserError, match='cannot be written'):
        chat_plot.main([str(tmp_path / 'chat.json'), str(tmp_path / 'none' / 'x.png')])
