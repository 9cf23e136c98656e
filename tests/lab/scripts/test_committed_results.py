"""The committed figures: pages are what their JSON files make, and what README and the guide quote stands in them."""
import json
import re
from pathlib import Path

import pytest

from kv import capacity
from lab.ablation.tables import plus_minus, short
from lab.benchmarks import table
from lab.scripts import bench_cpu, loss_forms, nanogpt_parity, rope_finetune

ROOT = Path(nanogpt_parity.__file__).resolve().parents[2]
PARTS = {part: json.loads((nanogpt_parity.RESULTS / f'{part}.json').read_text()) for part in nanogpt_parity.PARTS}
RUNS = [json.loads(path.read_text()) for path in sorted(rope_finetune.RESULTS.glob('*-seed*.json'))]


def prose(name):
    return ' '.join((ROOT / name).read_text().split())


@pytest.mark.parametrize('page, table', [(nanogpt_parity.RESULTS, lambda: nanogpt_parity.table(PARTS)),
                                         (rope_finetune.RESULTS, lambda: rope_finetune.table(RUNS))], ids=['nanogpt', 'rope'])
def test_pages_are_made_from_their_json_files(page, table):
    assert (page / 'README.md').read_text() == table()


def test_parts_were_measured_in_one_setting():
    for part in PARTS.values():
        assert {**part, **nanogpt_parity.setting()} == part
    assert len({(part['hardware'], part['torch'], part['nanogpt']) for part in PARTS.values()}) == 1


def test_readme_quotes_the_comparison_with_nanogpt():
    ratio, recipe, exchange = PARTS['speed']['ratio'], PARTS['recipe'], PARTS['exchange']
    logits = max(exchange[writer]['max_logit_difference'] for writer in ('nanoGPT', 'ours'))
    wanted = (r'over (\d+) steps .* agree to (\S+), logits of exchanged checkpoints to (\S+), .* does ([\d.]+) times '
              r'.* runs, ([\d.]+) to ([\d.]+)\); .* ends at ([\d.]+) .* ends at ([\d.]+) \(')
    quoted = re.search(wanted, prose('README.md')).groups()
    assert [float(x) for x in quoted] == [
        PARTS['curves']['steps'], pytest.approx(PARTS['curves']['max_loss_difference'], rel=1e-6),
        pytest.approx(logits, rel=0.05), pytest.approx(ratio['median'], abs=0.005), pytest.approx(ratio['min'], abs=0.005),
        pytest.approx(ratio['max'], abs=0.005), pytest.approx(recipe['ours']['val_loss'], abs=5e-4),
        pytest.approx(recipe['nanoGPT']['val_loss'], abs=5e-4)]


def test_the_guide_quotes_the_rope_runs():
    loss = {run['run']: run['val_loss'] for run in RUNS}
    wanted = (r'stands at ([\d.]+) after .* it is ([\d.]+), where vanilla trained on has ([\d.]+), and at T=128 \(B=6\) '
              r'([\d.]+)\. RoPE from scratch .* has ([\d.]+) \(T=128: ([\d.]+)\)')
    quoted = re.search(wanted, prose('docs/from_nanogpt.md')).groups()
    names = ('vanilla', 'into-rope', 'vanilla-more', 'into-rope-T128', 'rope', 'rope-T128')
    assert [float(x) for x in quoted] == [pytest.approx(loss[name], abs=5e-4) for name in names]


CPU = ROOT / 'results' / 'cpu'


def cpu(name):
    return json.loads((CPU / f'{name}.json').read_text())


def test_the_page_of_cpu_benchmarks_is_made_from_their_json_files():
    names = [name for name in bench_cpu.BENCHES if (CPU / f'{name}.json').exists()]
    assert (CPU / 'README.md').read_text() == table.page({name: cpu(name) for name in names})
    assert (CPU / 'loss' / 'README.md').read_text() == loss_forms.table(json.loads((CPU / 'loss' / 'loss.json').read_text()))


def test_readme_quotes_the_decode_benchmarks():
    wanted = r'\| batch (\d+), context ([\d,]+) \| ([\d.]+) ms \| ([\d.]+) ms \| ([\d.]+)x \|'
    rows = re.findall(wanted, (ROOT / 'README.md').read_text())
    assert len(rows) >= 6
    for batch, context, ours, vanilla, ratio in rows:
        [cell] = [cell for cell in cpu(f'decode-int8-b{batch}')['cells'] if cell['context'] == int(context.replace(',', ''))
                  and cell['sides']['ours']['batch'] == int(batch)]
        assert [float(ours), float(vanilla), float(ratio)] == [
            pytest.approx(cell['sides']['ours']['tpot_ms']['median'], abs=0.06),
            pytest.approx(cell['sides']['vanilla float32']['tpot_ms']['median'], abs=0.06),
            pytest.approx(cell['ratios']['tokens_per_second']['vanilla float32']['median'], abs=0.06)]


def test_readme_quotes_the_budget_the_engine_and_transformers():
    [cell] = cpu('decode-1GB')['cells']
    sides = cell['sides']
    wanted = (r'room for ([\d,]+) sequences against (\d+), and together they make ([\d.]+) times the tokens per second '
              r'\(([\d.,]+) against ([\d.]+)\)')
    assert [float(x.replace(',', '')) for x in re.search(wanted, prose('README.md')).groups()] == [
        sides['ours']['batch'], sides['vanilla float32']['batch'],
        pytest.approx(cell['ratios']['tokens_per_second']['vanilla float32']['median'], abs=0.06),
        pytest.approx(sides['ours']['tokens_per_second']['median'], abs=0.6),
        pytest.approx(sides['vanilla float32']['tokens_per_second']['median'], abs=0.06)]
    [cell] = cpu('serve')['cells']
    wanted = r'continuous batching makes ([\d.]+) times the tokens per second of static batches \(([\d.]+) times'
    assert [float(x) for x in re.search(wanted, prose('README.md')).groups()] == [
        pytest.approx(cell['ratios']['tokens_per_second'][name]['median'], abs=0.006) for name in ('static', 'static engine')]
    wanted = r'`generate` of transformers .* ([\d.]+) times its tokens per second at batch 1, ([\d.]+) at batch 16'
    assert [float(x) for x in re.search(wanted, prose('README.md')).groups()] == [
        pytest.approx(cell['ratios']['tokens_per_second'][cell['fastest']]['median'], abs=0.06)
        for cell in cpu('against-hf')['cells']]
    [cell] = cpu('against-nanogpt')['cells']
    wanted = r"nanoGPT's own `generate`, .*: (\d+) times at batch 1"
    assert int(re.search(wanted, prose('README.md'))[1]) == round(cell['ratios']['tokens_per_second']['nanogpt']['median'])


def test_readme_quotes_other_engines():
    def ratio(name, cell, side):
        return cpu(name)['cells'][cell]['ratios']['tokens_per_second'][side]['median']
    text, llama = prose('README.md'), cpu('against-llama.cpp-int8-b1')['cells'][1]
    assert llama['context'] == 900
    wanted = r'([\d.]+) ms a token in int8 at batch 1, ([\d.]+) ms in its Q8_0; .* ([\d.]+) times its .* stack takes ([\d.]+) ms\. vLLM'
    ours, q8_0, faster, full = map(float, re.search(wanted, text).groups())
    tpot = [llama['sides'][side]['tpot_ms']['median'] for side in ('ours', 'llama.cpp q8_0', 'full stack')]
    assert [ours, q8_0, full] == pytest.approx(tpot, abs=0.06)
    assert faster == pytest.approx(ratio('against-llama.cpp-int8-b16', 0, 'llama.cpp q8_0'), abs=0.06)
    wanted = (r'are ([\d.]+) times as fast here in int8 \(([\d,]+) tokens per second against (\d+)\), ([\d.]+) times in '
              r'bfloat16; prompts of 4,096 tokens ([\d.]+) times; .* known ones comes ([\d.]+) times sooner')
    found = [float(x.replace(',', '')) for x in re.search(wanted, text).groups()]
    prompts = cpu('against-vllm-prefill')['cells']
    assert [(cell['context'], cell['prompt']) for cell in prompts[3:5]] == [(4096, 'cold'), (4096, 'again')]
    assert found[1:3] == [round(side['tokens_per_second']['median'])
                          for side in cpu('against-vllm')['cells'][0]['sides'].values()]
    assert [found[0], *found[3:]] == pytest.approx([
        ratio(name, cell, 'vllm') for name, cell in (
            ('against-vllm', 0), ('against-vllm-bfloat16', 0), ('against-vllm-prefill', 3), ('against-vllm-prefill', 4))], abs=0.06)
    wanted = r'CTranslate2 in int8: ([\d.]+) times its tokens per second at batch 1, ([\d.]+) times at 16'
    assert [float(x) for x in re.search(wanted, text).groups()] == pytest.approx(
        [ratio('against-ctranslate2-int8', cell, 'ctranslate2 int8') for cell in (0, 1)], abs=0.06)
    prefill = {cell['context']: cell['sides']['ours']['tokens_per_second']['median'] for cell in cpu('prefill-int8')['cells']}
    wanted = r'\*\*Prompts\*\* of 1,024 tokens are computed at ([\d,]+) tokens per second, of 8,192 at ([\d,]+)'
    assert [int(x.replace(',', '')) for x in re.search(wanted, text).groups()] == [round(prefill[n]) for n in (1024, 8192)]


def test_readme_quotes_the_recomputation_policies_and_the_soak():
    cells = {cell['model']: cell for cell in cpu('recompute')['cells']}
    rows = re.findall(r'\| `(\w+)` \| (\d+)% \| ([\d.]+)x \| (\d+)% \| ([\d.]+)x \|', (ROOT / 'README.md').read_text())
    assert [row[0] for row in rows] == ['selective', 'mlp', 'block', 'sqrt']
    for policy, *figures in rows:
        for cell, saved, time in zip((cells['ours'], cells['vanilla']), figures[::2], figures[1::2]):
            assert int(saved) == round(100 * cell['sides'][policy]['activations_saved'])
            assert float(time) == pytest.approx(cell['ratios']['step_time'][policy]['median'], abs=0.006)
            assert cell['sides'][policy]['gradient_difference'] == 0
    whole, chunked = map(int, re.search(r'at most from (\d+) to (\d+) MB', prose('README.md')).groups())
    for cell in cells.values():
        peaks = [cell['sides'][name]['memory']['loss_peak'] for name in ('whole logits', 'none')]
        assert [round(n / 1e6) for n in peaks] == [whole, chunked]
    soak = cpu('soak')
    assert (soak['kills'], soak['kills_inside_checkpoint_writing'], soak['rows_that_differ']) == (20, 10, 0)
    assert 'killed 20 times, ten of them while it wrote a checkpoint' in prose('README.md')
    lengths = {cell['context']: cell for cell in cpu('lengths')['cells']}
    wanted = (r"at ([\d.]+) times vanilla's tokens per second at T=8,192 \(batch 1, (\d+) against (\d+)\), "
              r'at ([\d.]+) times at 2,048 and ([\d.]+) times at 1,024; from 512 down neither is faster '
              r'\(([\d.]+) to ([\d.]+) times\)')
    at_8192, ours, vanilla, at_2048, at_1024, *short = map(float, re.search(wanted, prose('README.md')).groups())
    ratio = {T: cell['ratios']['tokens_per_second']['vanilla']['median'] for T, cell in lengths.items()}
    assert [at_8192, at_2048, at_1024, *short] == [pytest.approx(ratio[T], abs=0.006) for T in (8192, 2048, 1024, 256, 512)]
    assert [ours, vanilla] == [pytest.approx(lengths[8192]['sides'][name]['tokens_per_second']['median'], abs=0.6)
                               for name in ('ours', 'vanilla')]


def test_the_guide_quotes_the_optimizers_and_the_loader():
    text, found, loader = prose('docs/training.md'), cpu('optimizers')['optimizers'], cpu('loader')
    state = re.search(r'state (\d+), (\d+) and (\d+) MB, .* none \(([\d.]+) GB there\)', text).groups()
    adamw, muon, eight, host = (found[name] for name in ('adamw', 'muon', 'adamw8bit', 'adamw, offload_optimizer'))
    assert [int(x) for x in state[:3]] == [round(row['state_bytes'] / 1e6) for row in (adamw, muon, eight)]
    assert host['state_bytes'] == 0 and float(state[3]) == round(host['host_bytes'] / 1e9, 2)
    times = re.search(r'update takes (\d+) ms, ([\d.]+) s .* ([\d.]+) s \(8 bits, too\) and (\d+) ms', text).groups()
    assert [float(x) for x in times] == [round(1000 * adamw['update_seconds']), round(muon['update_seconds'], 1),
                                         round(eight['update_seconds'], 1), round(1000 * host['update_seconds'])]
    quoted = re.search(r'T=1,024, ([\d.]+) s\) waits ([\d.]+)% .* often ([\d.]+) to ([\d.]+)%, .* adds (\d+) MB', text).groups()
    shares = [row['share'] for row in loader['alone'].values()]
    assert [float(x) for x in quoted] == [
        round(loader['step']['seconds'], 1), round(100 * loader['step']['share'], 3), round(100 * min(shares), 2),
        round(100 * max(shares), 2), round(loader['memory']['growth_bytes'] / 1e6)]
    assert max(*shares, loader['step']['share']) < 0.01 and loader['faster'] == 20 and loader['bytes'] == 10 ** 10


def test_the_guide_has_the_worked_example_of_capacity(capsys):
    text = (ROOT / 'docs' / 'scaling.md').read_text()
    command = re.search(r'python -m kv\.capacity (config/(?:.|\n)*?)\n```', text)[1].replace('\\\n', ' ').split()
    capacity.main([str(ROOT / command[0]), *command[1:], '--json=True'])
    *shown, document = capsys.readouterr().out.splitlines()
    assert json.loads(document) == json.loads((ROOT / 'results' / 'capacity' / 'example.json').read_text())
    quoted = [line.split() for line in text.partition('```\n\n```\n')[2].partition('```')[0].splitlines()]
    assert [line.split() for line in shown] == quoted and len(quoted) > 10


def test_the_guide_quotes_what_vllm_keeps():
    rows = re.findall(r'\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+)x \| ([\d,]+), ([\d.]+)x \|', prose('docs/interop.md'))
    assert len(rows) == 2
    for tokens, *quoted in rows:
        T = tokens.replace(',', '')
        found = json.loads((ROOT / 'results' / 'vllm' / f'kv-T{T}.json').read_text())
        assert [float(x.replace(',', '')) for x in quoted] == [
            found['vanilla']['bytes_per_request'], found['ours']['bytes_per_request'],
            pytest.approx(found['smaller_bytes_per_request'], abs=0.05), found['ours']['planned'],
            pytest.approx(found['smaller_planned'], abs=0.05)]
        assert (found['max_model_len'], found['max_num_batched_tokens'], found['dtype']) == (int(T), 512, 'bfloat16')


def rows_of(ladder):
    return json.loads((ROOT / 'results' / ladder / 'results.json').read_text())['rows']


def test_readme_has_the_ladder():
    ladder = json.loads((ROOT / 'results' / 'ablate_shakespeare' / 'results.json').read_text())
    assert short(ladder).markdown() in (ROOT / 'README.md').read_text()
    rows = {row['name']: row for row in ladder['rows']}
    assert all(rows[name]['seeds'] == [1, 2, 3] and rows[name]['n_layer'] == 12 for name in rows if not rows[name]['side'])
    [low] = rows['vanilla GPT-2 at learning rate 0.0015']['val_loss']['each']
    assert float(re.search(r'lower one \(([\d.]+) at 1\.5e-3, seed 1\)', prose('README.md'))[1]) == round(low, 3)
    ours, others = (rows[name]['val_loss']['each'][0] for name in ('Muon', 'qk_norm, Muon'))
    wanted = r'baseline by (-[\d.]+) \(n=1: seed 1 of both, ([\d.]+) and ([\d.]+)\)'
    assert re.search(wanted, prose('README.md')).groups() == (f'{ours - others:.4f}', f'{ours:.3f}', f'{others:.3f}')
    window = plus_minus(rows['+ window']['against_above'])
    assert f'its interval ({window})' in prose('README.md') and f'is {window}, which' in prose('docs/ablations.md')
    apart = plus_minus(rows['+ int8 KV']['against_baseline'])
    for page in ('README.md', 'docs/ablations.md'):
        assert re.search(re.escape(apart) + '.* all three differences (are )?negative', prose(page))
    assert max(rows['+ int8 KV']['against_baseline']['each']) < 0
    for name in ('qk_norm', 'wider heads and MLP'):  # neither rate is better by more than rounding
        [first] = [loss for seed, loss in zip(rows['+ ' + name]['seeds'], rows['+ ' + name]['val_loss']['each']) if seed == 1]
        assert all(rows[f'{name} at learning rate {lr}']['val_loss']['mean'] > first - 5e-4 for lr in ('0.003', '0.009'))
    wanted = r'by at most ([\d.]+) nats, .* on top of it .* add ([\d.]+) \(three seeds'
    most, added = map(float, re.search(wanted, prose('README.md')).groups())
    assert max(map(abs, rows['+ int8 KV']['against_above']['each'])) <= most
    assert added == pytest.approx(rows['int8 weights']['against_above']['mean'], abs=6e-6)
    full, baseline, vanilla = (rows[name] for name in ('+ int8 KV', ladder['baseline'], ladder['first']))
    assert full['kv']['smaller'] >= 70 and full['val_loss']['mean'] < vanilla['val_loss']['mean']
    assert full['val_loss']['mean'] <= baseline['val_loss']['mean']
    assert abs(full['params'] / baseline['params'] - 1) < 0.01


def test_readme_quotes_the_long_runs():
    long, short_ = ({row['name']: row for row in rows_of(name)} for name in ('ablate_long', 'ablate_shakespeare'))
    full, baseline = long['+ int8 KV'], long['RoPE + qk_norm MHA']
    quoted = re.search(r'\(([\d.]+)M tokens, seed 1, .* the full stack comes to ([\d.]+), the baseline to ([\d.]+): the gap '
                       r'narrows from ([\d.]+) to ([\d.]+), too little', prose('README.md')).groups()
    before = [short_[name]['val_loss']['each'][0] for name in ('+ qk_norm', '+ int8 KV')]
    assert [float(x) for x in quoted] == [round(full['tokens'] / 1e6, 1), round(full['val_loss']['mean'], 4),
                                          round(baseline['val_loss']['mean'], 4), round(before[0] - before[1], 3),
                                          round(baseline['val_loss']['mean'] - full['val_loss']['mean'], 3)]
    assert 0 < baseline['val_loss']['mean'] - full['val_loss']['mean'] < before[0] - before[1]
    assert full['iterations'] == 5 * short_['+ int8 KV']['iterations'] and full['kv']['smaller'] > 70


def test_the_guide_quotes_muon_and_int8_products():
    rows = rows_of('ablate_shakespeare')
    mean = {row['name']: f"{row['val_loss']['mean']:.3f}" for row in rows}
    first = {row['name']: f"{row['val_loss']['each'][0]:.3f}" for row in rows}
    seeds = {row['name']: row['seeds'] for row in rows}
    text, full = prose('docs/training.md'), '+ wider heads and MLP'
    wanted = (r'comes to a loss of ([\d.]+) in 1,000 steps, Muon in 400 steps.* to ([\d.]+), in 500 to ([\d.]+), in 1,000 to '
              r'([\d.]+):.* comes to ([\d.]+) \(seed 1; AdamW: ([\d.]+)\)')
    muon = ('Muon, 400 steps', 'Muon, 500 steps', 'Muon')
    assert re.search(wanted, text).groups() == (mean[full], *(mean[name] for name in muon), first['qk_norm, Muon'],
                                                first['+ qk_norm'])
    assert all(seeds[name] == [1, 2, 3] for name in (full, *muon)) and float(mean['Muon, 500 steps']) < float(mean[full])
    wanted = r'loss of ([\d.]+) with seed 1, where K and V alone are rounded in training to ([\d.]+), and where nothing is to'
    assert re.search(wanted + r' ([\d.]+)\.', text).groups() == tuple(
        first[name] for name in ('int8 products', 'int8 in training', full))


def test_readme_quotes_the_conversations():
    chat = cpu('chat')
    [cell] = [cell for cell in chat['cells'] if cell['context'] == 8192]
    [bytes_] = [row for row in chat['bytes'] if row['page_size'] == 64 and row['prune']]
    found = {row['share']: row['hit_rate'] for row in chat['workload'] if row['page_size'] == 64 and row['prune']}
    wanted = (r'first token after (\d+) ms in place of ([\d.]+) s \(median of ratios (\d+), (\d+) to (\d+) in five rounds\), '
              r'and the ([\d.]+) MB .*, are (\d+) '
              r'times less .* Of (\d+) such dialogues \((\d+) requests;.* (\d+)% of the prompt tokens .*, '
              r'(\d+)% in half the memory, (\d+)% in')
    quoted = [float(x) for x in re.search(wanted, prose('README.md')).groups()]
    ttft = {name: side['ttft_ms']['median'] for name, side in cell['sides'].items()}
    assert quoted == [round(ttft['ours']), pytest.approx(ttft['without a store'] / 1000, abs=0.05),
                      *(round(cell['ratios']['ttft']['without a store'][key]) for key in ('median', 'min', 'max')),
                      pytest.approx(bytes_['held_nbytes'] / 1e6, abs=0.05), round(bytes_['smaller']), chat['dialogues'],
                      chat['requests'], *(round(100 * found[share]) for share in (100, 50, 25))]
    assert chat['kv_dtype'] == 'int8' and chat['message'] == 20


def test_readme_has_the_bytes_of_gpt2s_shape():
    found = {T: json.loads((ROOT / 'results' / 'kv' / f'gpt2_mqa_local-T{T}.json').read_text()) for T in (1024, 8192)}
    lines = re.search(r'\| vanilla GPT-2, bfloat16 .*\n.*\n.*\n', (ROOT / 'README.md').read_text())[0].splitlines()
    vanilla, ours, int8 = ([cell.strip().replace('*', '') for cell in line.split('|')[2:5]] for line in lines)
    assert vanilla == [*(f"{x['bfloat16']['kv_bytes_vanilla']:,} bytes" for x in found.values()),
                       str(found[8192]['bfloat16']['fit_vanilla'])]
    for quoted, dtype in ((ours, 'bfloat16'), (int8, 'int8')):
        for cell, by_dtype in zip(quoted, found.values()):
            nbytes, ratio = re.match(r'([\d,]+)(?: bytes)?, ([\d.]+)x', cell).groups()
            assert int(nbytes.replace(',', '')) == by_dtype[dtype]['kv_bytes']
            assert float(ratio) == round(by_dtype[dtype]['kv_ratio_bf16'], 1 if '.' in ratio else 0)
        assert int(quoted[2]) == found[8192][dtype]['fit']


def test_readme_has_what_the_demo_printed():
    printed, readme = ((ROOT / name).read_text() for name in ('results/demo/sample.txt', 'README.md'))
    text, report = re.findall(r'```\n(.*?)```', readme.partition('## The demo')[2].partition('### ')[0], re.DOTALL)
    assert text in printed and report in printed and 'KV cache, as allocated' in report
    minutes = re.search(r'(\d+ min \d+ s) in all', printed)[1]
    assert f'took {minutes} there' in prose('README.md')


def test_readme_quotes_recall_and_the_layer_orders():
    recall = {row['name']: row['recall'] for row in rows_of('ablate_recall')}
    text, far = prose('README.md'), {name: each['accuracy']['47'] for name, each in recall.items()}
    wanted = (r'(\d+) positions back, where all ten local layers together reach (\d+) .* names ([\d.]+)% right, .* local '
              r'layers alone ([\d.]+)% .* comes to (\d+)% in these steps, with RoPE alone to (\d+)%\. '
              r'.* name (\d+)%, (\d+)% or (\d+)%')
    distance, reach, *quoted = re.search(wanted, text).groups()
    percent = [100 * far[name]['mean'] for name in ('+ qk_norm', 'local layers only', 'vanilla GPT-2', '+ RoPE')]
    assert int(distance) == 47 > int(reach) == recall['+ int8 KV']['local_reach']
    assert [float(x) for x in quoted[:2]] == [round(x, 1) for x in percent[:2]]
    assert [int(x) for x in quoted[2:]] == [round(x) for x in percent[2:]] + [
        round(100 * x) for x in far['tied at inference only']['each']]
    ladder = [name for name in recall if name.startswith('+ ')]
    everything = ladder[ladder.index('+ MQA'):] + ['untied', 'global first: GLLLLL/ABBCCC', 'global first, untied']
    assert all(far[name]['mean'] > 0.9995 for name in everything)
    assert all(recall[name]['seeds'] == [1, 2, 3] for name in ladder)
    rows = {row['name']: row for row in rows_of('ablate_shakespeare')}
    first, full = rows['global first: GLLLLL/ABBCCC'], rows['+ wider heads and MLP']
    quoted = re.search(r'seeds, ([\d.]+) against ([\d.]+), a difference of -([\d.]+) ±([\d.]+), all three', text).groups()
    apart = first['against_above']
    assert [float(x) for x in quoted] == [round(first['val_loss']['mean'], 4), round(full['val_loss']['mean'], 4),
                                          round(-apart['mean'], 4), round(apart['half_95'], 4)]
    assert max(apart['each']) < 0 and apart['half_95'] > -apart['mean']
    apart = rows['tied at inference only']['against_above']
    assert re.search(r'cost ([\d.]+) ±([\d.]+) nats on', text).groups() == (f"{apart['mean']:.3f}", f"{apart['half_95']:.3f}")


def test_readme_quotes_the_contexts_longer_than_trained():
    lines = (ROOT / 'results' / 'demo' / 'contexts.jsonl').read_text().splitlines()
    found = {(row['model'], row['context']): row['bits_per_byte'] for row in map(json.loads, lines)}
    text = prose('README.md')
    demo, baseline = ([f"{found[model, context]:.4f}" for context in (256, 8192)]
                      for model in ('out-mqa-local', 'out-rope-mha'))
    assert f'with 8,192 in view: {demo[1]} bits per byte against {demo[0]}.' in text
    assert f'goes from {baseline[0]} to {baseline[1]} (' in text
