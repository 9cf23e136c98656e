"""README.md and docs/ have the numbers of results/, and results/ supports their claims."""
import json
import re
from statistics import mean, stdev

import pytest

from lab.benchmarks import table as benchmark_table
from lab.pages import __main__ as pages
from lab.pages import blocks
from lab.pages.blocks import ROOT, cells, load, rows_of

PRICES, SOURCE, RECALL, LOOKUP = map(rows_of, (
    'ablate_prices', 'ablate_pysource', 'ablate_recall', 'ablate_lookup'))


@pytest.mark.parametrize('page', pages.pages(), ids=lambda path: path.name)
def test_the_blocks_of_the_pages_are_up_to_date(page):
    text = page.read_text()
    assert pages.rewritten(text) == text, 'run `make docs`'


def test_a_changed_number_is_rewritten(tmp_path, monkeypatch, capsys):
    page = tmp_path / 'README.md'
    page.write_text('before\n<!-- begin kv-bytes -->\n| 1 |\n<!-- end -->\nafter\n')
    monkeypatch.setattr(pages, 'ROOT', tmp_path)
    pages.main()
    pages.main()
    assert capsys.readouterr().out.splitlines() == ['README.md: rewritten']
    text = page.read_text()
    assert text.startswith('before\n<!-- begin') and text.endswith('<!-- end -->\nafter\n')
    assert '| vanilla GPT-2, bfloat16 | 37,748,736 |' in text


def test_each_block_is_used_once_and_the_page_of_benchmarks_has_those_of_their_json_files():
    used = [m[1] for page in pages.pages() for m in pages.BLOCK.finditer(page.read_text())]
    assert sorted(used) == sorted(blocks.TABLES | blocks.REPORTS)
    text = (ROOT / 'results/cpu/README.md').read_text()
    names = re.findall('^## (.*)', text, re.MULTILINE)
    assert text == benchmark_table.page({name: load(f'cpu/{name}') for name in names})


# -- claims in words -------------------------------------------------------------------------------

def difference(row: dict, name: str) -> str:
    """'0.0123 ±0.0045', without the sign: words say which loss is the lower."""
    found = row[f'against_{name}']
    return f"{abs(found['mean']):.4f} ±{found['half_95']:.4f}"


def sentences() -> list[tuple[str, str]]:
    """(page, words that must stand there with the numbers of results/)"""
    kv = {T: load(f'kv/gpt2_mqa_local-T{T}') for T in (1024, 8192)}
    gemma = {T: load(f'kv/gemma_shaped-T{T}')['bfloat16']['kv_bytes'] for T in (1024, 8192)}
    full, names = PRICES['+ int8 KV'], SOURCE['+ int8 KV']
    facts = {name: row['lookup'] for name, row in LOOKUP.items()}
    far = {name: 100 * row['recall']['accuracy']['47']['mean'] for name, row in RECALL.items()}
    right = {name: 100 * found['accuracy']['64']['mean'] for name, found in facts.items()}
    [budget], seeds = cells('decode-1GB'), load_seeds()
    recomputed, lengths = cells('recompute')[0], cells('lengths')
    return [
        ('README.md', f"{kv[1024]['bfloat16']['kv_bytes_vanilla'] // 1024:,} bytes per token"),
        ('README.md', f"its cache is {kv[1024]['bfloat16']['kv_ratio_bf16']:.0f} times smaller "
                      "than GPT-2's at 1,024 tokens, and "
                      f"{kv[8192]['bfloat16']['kv_ratio_bf16']:.0f} times smaller at 8,192"),
        ('README.md', f"In int8 it is {kv[1024]['int8']['kv_ratio_bf16']:.0f} and "
                      f"{kv[8192]['int8']['kv_ratio_bf16']:.0f} times smaller"),
        ('README.md', f"{gemma[1024] / kv[1024]['bfloat16']['kv_bytes']:.1f} times the bytes "
                      "of our bfloat16 cache at 1,024 tokens, and "
                      f"{gemma[8192] / kv[8192]['bfloat16']['kv_bytes']:.1f} times at 8,192"),
        ('README.md', f"held-out works with {seeds['mqa_local']} bits per byte"),
        ('README.md', f"The baseline reaches {seeds['rope_mha']} after"),
        ('README.md', f"(`config/train_vanilla.py`) reaches {seeds['vanilla']},"),
        ('README.md', f"than that of `+ qk_norm` by {difference(full, 'baseline')}"),
        ('README.md', f"{PRICES['+ wider heads and MLP']['kv']['smaller']:.0f} times fewer bytes "
                      f"in the same dtype and {full['kv']['smaller']:.0f} times fewer in int8"),
        ('README.md', 'Sharing caches among neighbouring layers raises the loss by '
                      + difference(PRICES['+ KV shared by 2/3'], 'above')),
        ('README.md', 'One slot for both global layers raises it by '
                      + difference(PRICES['+ global KV tied'], 'above')),
        ('README.md', f"window lowers the loss by {difference(PRICES['+ window'], 'above')}"),
        ('README.md', f"MQA adds {difference(SOURCE['+ MQA'], 'above')} to its loss"),
        ('README.md', f"sharing adds {difference(SOURCE['+ KV shared by 2'], 'above')}"),
        ('README.md', f"window lowers the loss by {difference(SOURCE['+ window'], 'above')}"),
        ('README.md', f"the model without savings, by {difference(names, 'baseline')}"),
        ('README.md', f"is {blocks.far_back(names):.2f} nats for the full stack, "
                      f"{blocks.far_back(SOURCE['+ key offset']):.2f} for the model without "
                      f"savings, and {blocks.far_back(SOURCE['local layers only']):.2f} for local"),
        ('README.md', f"full stack (three seeds) | {far['+ int8 KV']:.1f}% |"),
        ('README.md', f"local layers alone (one seed) | {far['local layers only']:.1f}% |"),
        *(('README.md', f"{words} | {right[name]:.1f}% | {facts[name]['kv_bytes']:,} |")
          for words, name in (
              ('int8 (five seeds)', 'global last, tied, int8 KV'),
              ('the same in float32 (five seeds)', 'global last, tied'),
              ('MHA with `key_offset`, float32 (five seeds)', 'MHA with key offset'),
              ('MHA, float32 (two seeds; not learned in so few steps)', 'MHA'),
              ('local layers alone, float32 (two seeds)', 'local layers only'))),
        ('README.md', f"1 GB holds {budget['sides']['ours']['batch']:,} sequences in int8. It "
                      f"holds {budget['sides']['vanilla float32']['batch']} of vanilla"),
        ('docs/results.md', f"at the peak from {memory(recomputed, 'whole logits')} to "
                            f"{memory(recomputed, 'none')} MB"),
        ('docs/results.md', f"{lengths[-1]['ratios']['tokens_per_second']['vanilla']['median']:.2f}"
                            " times vanilla's tokens per second at T=8,192"),
    ]


def load_seeds() -> dict[str, str]:
    """{config: mean (sd) of the bits per byte of the demo and its baselines}"""
    rows = list(map(json.loads, (ROOT / 'results/demo/seeds.jsonl').read_text().splitlines()))
    found = {name: [row['bits_per_byte'] for row in rows if f'/{name}-' in row['model']]
             for name in ('mqa_local', 'rope_mha', 'vanilla')}
    return {name: f'{mean(each):.3f} ({stdev(each):.3f})' for name, each in found.items()}


def memory(cell: dict, side: str) -> str:
    return f"{cell['sides'][side]['memory']['loss_peak'] / 1e6:.0f}"


@pytest.mark.parametrize('page, words', sentences())
def test_the_numbers_of_a_sentence_are_those_of_results(page, words):
    assert words in ' '.join((ROOT / page).read_text().split())


def test_the_full_stack_loses_nothing_against_the_baseline():
    for rows in (PRICES, SOURCE):
        against = rows['+ int8 KV']['against_baseline']
        assert against['mean'] + against['half_95'] < 0 and against['stands']
    assert abs(PRICES['+ int8 KV']['params'] / PRICES['+ qk_norm']['params'] - 1) < 0.01
    steps = [row for row in PRICES.values() if not row['side']]
    assert len(steps) == 9 and all(row['seeds'] == [*range(1, 9)] for row in steps)


def test_all_rows_with_global_layers_recall_everything():
    far = {name: row['recall']['accuracy']['47']['mean'] for name, row in RECALL.items()}
    steps = [name for name in RECALL if name.startswith('+ ')]
    orders = ['untied', 'global first: GLLLLL/ABBCCC', 'global first, untied']
    assert all(far[name] > 0.9995 for name in steps[steps.index('+ MQA'):] + orders)
    assert RECALL['+ int8 KV']['recall']['local_reach'] < 47


def test_facts_and_names_are_looked_up_with_the_global_layer_last_or_a_key_offset():
    facts = {name: row['lookup']['facts'] for name, row in LOOKUP.items()}
    for row in ('tied', 'untied'):
        for stored in ('', ', int8 KV', ', int4 KV'):
            assert facts[f'global last, {row}{stored}'] == [64] * 5
            assert facts[f'global first, {row}{stored}'] == [0] * 5
    assert facts['MHA with key offset'] == [64] * 5
    assert facts['global first, tied, key offset'] == [64]
    nats = {name: blocks.far_back(row) for name, row in SOURCE.items() if row['seeds']}
    assert nats['local layers only'] - nats['+ key offset'] > 3  # of which rows keep a share
    assert abs(nats['no key offset'] - nats['local layers only']) < 0.3
    assert nats['+ int8 KV'] < nats['+ key offset'] < nats['+ MQA']


def test_recomputation_changes_no_gradient_and_no_run_differed_after_kills():
    for cell in cells('recompute'):
        for policy in ('selective', 'mlp', 'block', 'sqrt'):
            assert cell['sides'][policy]['gradient_difference'] == 0
    soak = load('cpu/soak')
    assert soak['rows_that_differ'] == 0 and soak['same_weights'] and soak['same_checkpoints']
