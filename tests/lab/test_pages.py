"""README.md and docs/ have the numbers of results/, and results/ supports their claims."""
import json
import re
from statistics import mean, stdev

import pytest

from lab import pages
from lab.benchmarks import table as benchmark_table
from lab.pages import RESULTS, ROOT, cells, far_back, load, rows_of

PRICES, SOURCE, RECALL, LOOKUP = map(rows_of, (
    'ablate_prices', 'ablate_pysource', 'ablate_recall', 'ablate_lookup'))


def test_the_tables_are_those_of_results_and_a_changed_number_is_rewritten(tmp_path, monkeypatch):
    texts = {page: page.read_text() for page in pages.pages()}
    for text in texts.values():
        assert pages.rewritten(text) == text, 'run `make docs`'
    used = [m[1] for text in texts.values() for m in pages.BLOCK.finditer(text)]
    assert sorted(used) == sorted(pages.TABLES)
    names = re.findall('^## (.*)', (RESULTS / 'cpu/README.md').read_text(), re.MULTILINE)
    assert (RESULTS / 'cpu/README.md').read_text() == benchmark_table.page(
        {name: load(f'cpu/{name}') for name in names})

    page = tmp_path / 'README.md'
    page.write_text('before\n<!-- begin kv-bytes -->\n| 1 |\n<!-- end -->\nafter\n')
    monkeypatch.setattr(pages, 'ROOT', tmp_path)
    pages.main()
    text = page.read_text()
    assert text.startswith('before\n<!-- begin') and text.endswith('<!-- end -->\nafter\n')
    assert '| vanilla GPT-2, bfloat16 | 37,748,736 |' in text


# -- claims in words -------------------------------------------------------------------------------

def difference(row: dict, name: str) -> str:
    """'0.0123 ±0.0045', without the sign: words say which loss is the lower."""
    found = row[f'against_{name}']
    return f"{abs(found['mean']):.4f} ±{found['half_95']:.4f}"


def bits(name: str) -> str:
    """Mean (sd) of the bits per byte of the demo or one of its baselines."""
    rows = map(json.loads, (RESULTS / 'demo/seeds.jsonl').read_text().splitlines())
    found = [row['bits_per_byte'] for row in rows if f'/{name}-' in row['model']]
    return f'{mean(found):.3f} ({stdev(found):.3f})'


def sentences() -> list[str]:
    """Words of README.md that have numbers of results/."""
    kv = {T: load(f'kv/gpt2_mqa_local-T{T}') for T in (1024, 8192)}
    full, names = PRICES['+ int8 KV'], SOURCE['+ int8 KV']
    [budget] = cells('decode-1GB')
    ratios = {dtype: [round(kv[T][dtype]['kv_ratio_bf16']) for T in kv]
              for dtype in ('bfloat16', 'int8')}
    tasks = [(f'{words} | {100 * RECALL[name]["recall"]["accuracy"]["47"]["mean"]:.1f}% |')
             for words, name in (('full stack (three seeds)', '+ int8 KV'),
                                 ('local layers alone (one seed)', 'local layers only'))]
    for words, name in (('int8 (five seeds)', 'global last, tied, int8 KV'),
                        ('the same in float32 (five seeds)', 'global last, tied'),
                        ('MHA with `key_offset`, float32 (five seeds)', 'MHA with key offset'),
                        ('local layers alone, float32 (two seeds)', 'local layers only')):
        found = LOOKUP[name]['lookup']
        right = 100 * found['accuracy']['64']['mean']
        tasks.append(f"{words} | {right:.1f}% | {found['kv_bytes']:,} |")
    return tasks + [
        f"{kv[1024]['bfloat16']['kv_bytes_vanilla'] // 1024:,} bytes per token",
        "its cache is {} times smaller than GPT-2's at 1,024 tokens, and {} times smaller at "
        '8,192'.format(*ratios['bfloat16']),
        'In int8 it is {} and {} times smaller'.format(*ratios['int8']),
        f"held-out works with {bits('mqa_local')} bits per byte",
        f"The baseline reaches {bits('rope_mha')} after",
        f"than that of `+ qk_norm` by {difference(full, 'baseline')}",
        f"{PRICES['+ wider heads and MLP']['kv']['smaller']:.0f} times fewer bytes in the same "
        f"dtype and {full['kv']['smaller']:.0f} times fewer in int8",
        f"layers raises the loss by {difference(PRICES['+ KV shared by 2/3'], 'above')}",
        f"global layers raises it by {difference(PRICES['+ global KV tied'], 'above')}",
        f"window lowers the loss by {difference(PRICES['+ window'], 'above')}",
        f"MQA adds {difference(SOURCE['+ MQA'], 'above')} to its loss",
        f"the model without savings, by {difference(names, 'baseline')}",
        f"is {far_back(names):.2f} nats for the full stack, "
        f"{far_back(SOURCE['+ key offset']):.2f} for the model without savings, and "
        f"{far_back(SOURCE['local layers only']):.2f} for local",
        f"1 GB holds {budget['sides']['ours']['batch']:,} sequences in int8. It holds "
        f"{budget['sides']['vanilla float32']['batch']} of vanilla"]


@pytest.mark.parametrize('words', sentences())
def test_the_numbers_of_a_sentence_are_those_of_results(words):
    assert words in ' '.join((ROOT / 'README.md').read_text().split())


def test_claims_that_have_no_number():
    for rows in (PRICES, SOURCE):
        against = rows['+ int8 KV']['against_baseline']
        assert against['mean'] + against['half_95'] < 0 and against['stands']
    assert abs(PRICES['+ int8 KV']['params'] / PRICES['+ qk_norm']['params'] - 1) < 0.01
    facts = {name: row['lookup']['facts'] for name, row in LOOKUP.items()}
    for stored in ('tied', 'untied', 'tied, int8 KV', 'tied, int4 KV'):
        assert facts[f'global last, {stored}'] == [64] * 5
        assert facts[f'global first, {stored}'] == [0] * 5
    for cell in cells('recompute'):
        for policy in ('selective', 'mlp', 'block', 'sqrt'):
            assert cell['sides'][policy]['gradient_difference'] == 0
    soak = load('cpu/soak')
    assert soak['rows_that_differ'] == 0 and soak['same_weights'] and soak['same_checkpoints']
