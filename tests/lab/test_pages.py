"""README.md and docs/ have the numbers of results/, and results/ supports their claims."""
import json
import re

import pytest

from kv import capacity
from lab.benchmarks import table
from lab.pages import __main__ as pages
from lab.pages import blocks, cost, memory


@pytest.mark.parametrize('page', pages.pages(), ids=lambda path: path.name)
def test_the_blocks_of_the_pages_are_up_to_date(page):
    text = page.read_text()
    assert pages.rewritten(text) == text, 'run `make docs`'


def test_each_block_is_used_once():
    names = [m[1] for page in pages.pages() for m in pages.BLOCK.finditer(page.read_text())]
    assert sorted(names) == sorted(blocks.BLOCKS)


def test_a_changed_number_is_noticed_and_rewritten(tmp_path, monkeypatch, capsys):
    page = tmp_path / 'README.md'
    page.write_text('before\n<!-- begin kv-bytes -->\n| 1 |\n<!-- end -->\nafter\n')
    (tmp_path / 'docs').mkdir()
    monkeypatch.setattr(pages, 'ROOT', tmp_path)
    for argv, status in ((['--check'], 1), ([], 0), (['--check'], 0)):
        with pytest.raises(SystemExit) as exit_:
            pages.main(argv)
        assert exit_.value.code == status
    said = capsys.readouterr().out.splitlines()
    assert said == ['README.md: out of date', 'README.md: rewritten']
    text = page.read_text()
    assert text.startswith('before\n<!-- begin') and text.endswith('<!-- end -->\nafter\n')
    assert '| vanilla GPT-2, bfloat16 | 37,748,736 bytes |' in text


def test_the_page_of_benchmarks_is_made_from_their_json_files():
    text = (blocks.RESULTS / 'cpu/README.md').read_text()
    names = re.findall('^## (.*)', text, re.MULTILINE)
    assert text == table.page({name: blocks.load(f'cpu/{name}') for name in names})


def test_the_example_of_capacity(capsys):
    command = memory.capacity_example().partition('config/')[2].partition('\n```')[0]
    config, *options = command.replace('\\\n', ' ').split()
    capacity.main([str(blocks.ROOT / 'config' / config), *options, '--json=True'])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == blocks.load('capacity/example')


# -- claims in words -------------------------------------------------------------------------------

def test_the_full_stack_loses_nothing_against_the_baseline():
    rows = blocks.rows_of('ablate_prices')
    full, baseline = rows['+ int8 KV'], rows['+ qk_norm']
    against = full['against_baseline']
    assert against['mean'] + against['half_95'] < 0 and against['stands']
    assert abs(full['params'] / baseline['params'] - 1) < 0.01
    steps = [row for row in rows.values() if not row['side']]
    assert len(steps) == 9 and all(row['seeds'] == [*range(1, 9)] for row in steps)
    assert max(row['against_above']['half_95'] for row in steps[3:]) < 0.015


def test_the_demo_is_not_above_the_baseline_with_all_of_the_memory():
    seeds = memory.demo_seeds_of()
    demo, baseline = seeds['mqa_local'], seeds['rope_mha']
    assert {len(each) for each in seeds.values()} == {3} and max(demo) <= 2.2
    assert sum(demo) <= sum(baseline)


def test_other_learning_rates_are_no_better():
    rows = blocks.rows_of('ablate_prices')
    for name in ('qk_norm', 'wider heads and MLP'):
        for rate in ('0.006', '0.024'):
            other = rows[f'{name} at learning rate {rate}']
            assert blocks.mean(other) > blocks.first_seed(rows['+ ' + name])


def test_longer_training_narrows_the_gap():
    short, long = (blocks.rows_of(name) for name in ('ablate_prices', 'ablate_long'))
    full, baseline = long['+ int8 KV'], long['RoPE + qk_norm MHA']
    gap = blocks.mean(baseline) - blocks.mean(full)
    before = blocks.first_seed(short['+ qk_norm']) - blocks.first_seed(short['+ int8 KV'])
    assert 0 < gap < before
    assert full['tokens'] > 12 * short['+ int8 KV']['tokens']


def test_all_rows_with_global_layers_recall_everything():
    rows = blocks.rows_of('ablate_recall')
    far = {name: row['recall']['accuracy']['47']['mean'] for name, row in rows.items()}
    steps = [name for name in rows if name.startswith('+ ')]
    orders = ['untied', 'global first: GLLLLL/ABBCCC', 'global first, untied']
    assert all(far[name] > 0.9995 for name in steps[steps.index('+ MQA'):] + orders)
    assert all(rows[name]['seeds'] == [1, 2, 3] for name in steps)
    assert rows['+ int8 KV']['recall']['local_reach'] < 47
    apart = blocks.rows_of('ablate_prices')['global first: GLLLLL/ABBCCC']['against_above']
    assert abs(apart['mean']) < apart['half_95']


def test_facts_are_looked_up_with_the_global_layer_last_and_not_first():
    facts = {name: row['lookup'] for name, row in blocks.rows_of('ablate_lookup').items()}
    alone, chance = facts['local layers only'], 1 / facts['local layers only']['n_values']
    for name in ('MHA with key offset', 'global last, tied', 'global last, untied',
                 'global first, tied', 'global first, untied'):
        stored = [''] if name.startswith('MHA') else ['', ', int8 KV', ', int4 KV']
        for found in (facts[name + dtype] for dtype in stored):
            first = name.startswith('global first')
            assert found['facts'] == [0 if first else 64] * 5
            for n, share in found['accuracy'].items():
                # guessing among the facts not yet asked: (1/n + 1/(n-1) + ... + 1) / n
                guessing = sum(1 / k for k in range(1, int(n) + 1)) / int(n)
                assert share['mean'] <= guessing + 0.01 if first else (
                    min(share['each']) >= (0.98 if n == '64' else 0.99))
    assert min(facts['global first, tied, key offset']['facts']) == 64
    # 256 sequences for each number of facts: 5 standard deviations of guessing
    for n, share in alone['accuracy'].items():
        answers = 256 * int(n) * len(share['each'])
        assert abs(share['mean'] - chance) < 5 * (chance / answers) ** 0.5
    for n in ('2', '4', '8'):  # among the facts seen
        assert facts['MHA']['accuracy'][n]['mean'] == pytest.approx(1 / int(n), rel=0.15)


def test_prices_on_source_code():
    rows = blocks.rows_of('ablate_pysource')
    mechanisms = 'NoPE on global layers', 'attention sinks', 'K = V on global layers, NoPE'
    steps = [name for name, row in rows.items() if not row['side']]
    assert len(steps) == 10 and all(rows[name]['seeds'] == [1, 2, 3, 4]
                                    for name in (*steps, *mechanisms, 'local layers only'))
    price = {name: rows[name]['against_above'] for name in steps if name != 'vanilla GPT-2'}
    assert price['+ MQA']['mean'] > price['+ MQA']['half_95']
    assert price['+ window']['mean'] < -price['+ window']['half_95']
    full = rows['+ int8 KV']['against_baseline']
    assert full['mean'] + full['half_95'] < 0 and full['stands']


def test_names_from_far_back_are_looked_up_with_a_key_offset():
    rows = blocks.rows_of('ablate_pysource')
    nats = {name: cost.far_back(row) for name, row in rows.items() if row['seeds']}
    assert nats['local layers only'] - nats['+ key offset'] > 3  # of which rows keep a share
    assert abs(nats['no key offset'] - nats['local layers only']) < 0.3
    assert nats['+ int8 KV'] < nats['+ key offset'] < nats['+ MQA']
    assert min(nats, key=nats.get) == 'NoPE on global layers'


def test_muon_needs_half_the_steps_at_most():
    rows = blocks.rows_of('ablate_prices')
    adamw, full = rows['AdamW, twice the steps'], rows['+ wider heads and MLP']
    apart = adamw['against_above']
    assert adamw['iterations'] == 2 * full['iterations'] and apart['mean'] > apart['half_95']


def test_recomputation_changes_no_gradient_and_no_run_differed_after_kills():
    for cell in blocks.cells('recompute'):
        for policy in ('selective', 'mlp', 'block', 'sqrt'):
            assert cell['sides'][policy]['gradient_difference'] == 0
    soak = blocks.load('cpu/soak')
    assert soak['rows_that_differ'] == 0 and soak['same_weights'] and soak['same_checkpoints']


def test_the_verdict_at_the_top_of_readme():
    text = ' '.join((blocks.ROOT / 'README.md').read_text().split())
    full = blocks.rows_of('ablate_prices')['+ int8 KV']
    kv = {T: blocks.load(f'kv/gpt2_mqa_local-T{T}') for T in (1024, 8192)}
    low = kv[1024]['bfloat16']['kv_ratio_bf16']
    high = kv[8192]['int8']['kv_ratio_bf16']
    per_token = kv[1024]['bfloat16']['kv_bytes_vanilla'] // 1024
    assert f"{full['kv']['smaller']:.0f} times less memory with no loss detected" in text
    assert f"{low:.0f} to {high:.0f} times less in GPT-2's shape" in text
    assert f'{per_token:,} bytes per token' in text
