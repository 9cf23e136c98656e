"""Blocks on training, and on nanoGPT compared with nanoKV."""
import json

from lab.pages.blocks import RESULTS, block, cells, load, prose, ratio, speed, table


@block
def recompute() -> str:
    by_model = {cell['model']: cell for cell in cells('recompute')}
    rows = []
    for policy in ('selective', 'mlp', 'block', 'sqrt'):
        texts = []
        for name in ('ours', 'vanilla'):
            cell = by_model[name]
            saved = cell['sides'][policy]['activations_saved']
            texts.append(f"{saved:.0%} | {ratio(cell, policy, 'step_time'):.2f}x")
        rows.append(f"| `{policy}` | {' | '.join(texts)} |")
    header = '| policy | full stack: saved | step time | vanilla: saved | step time |'
    whole, chunked = (by_model['ours']['sides'][name]['memory']['loss_peak'] / 1e6
                      for name in ('whole logits', 'none'))
    return table(header, rows) + '\n\n' + prose(
        f"""(GPT-2 124M's shape, batch 1, T=1,024, W=256, float32, 2 cores of an Intel Xeon at
        2.80 GHz, medians of 5 rounds; activations without logits; gradients are equal to the last
        bit. Single steps vary by a fifth on this machine, so differences of a few percent mean
        nothing.) Computing logits in chunks cuts the peak of the loss from {whole:.0f} to
        {chunked:.0f} MB.""")


@block
def lengths() -> str:
    found = {cell['context']: cell for cell in cells('lengths')}
    at = {T: ratio(cell, 'vanilla') for T, cell in found.items()}
    ours, vanilla = (speed(found[8192], name) for name in ('ours', 'vanilla'))
    return prose(
        f"""Local layers (W=256) save training time where sequences are long: the full stack trains
        at {at[8192]:.2f} times vanilla's tokens per second at T=8,192 (batch 1, {ours:.0f} against
        {vanilla:.0f}), {at[2048]:.2f} times at 2,048 and {at[1024]:.2f} times at 1,024. At 512 and
        256 neither is faster ({at[512]:.2f} and {at[256]:.2f} times). Float32, the same Xeon.""")


@block
def optimizers() -> str:
    found = load('cpu/optimizers')['optimizers']
    adamw, muon_row, eight, host = (found[name] for name in (
        'adamw', 'muon', 'adamw8bit', 'adamw, offload_optimizer'))
    states = [f"{row['state_bytes'] / 1e6:.0f}" for row in (adamw, muon_row, eight)]
    return prose(f"""Measured with GPT-2 124M's shape (float32, 2 cores of an AMD EPYC, batch 1,
        T=256, the third step): the state takes {states[0]}, {states[1]} and {states[2]} MB, and
        with AdamW on the host none ({host['host_bytes'] / 1e9:.2f} GB there); the update takes
        {1000 * adamw['update_seconds']:.0f} ms, {muon_row['update_seconds']:.1f} s (Muon's matmuls
        are meant for GPUs), {eight['update_seconds']:.1f} s (so is the 8-bit kernel) and
        {1000 * host['update_seconds']:.0f} ms.""")


@block
def amd() -> str:
    plain, preloaded = (load(f'cpu/train-amd{name}') for name in ('', '-preloaded'))
    faster = plain['median_ms'] / preloaded['median_ms']
    return prose(f"""A step of the demo's model (8 layers of width 96, B={plain['batch_size']},
        T={plain['block_size']}, W={plain['window_size']}, AdamW, float32, {plain['threads']} cores
        of an AMD EPYC with AVX-512) then takes {preloaded['median_ms']:.0f} ms in place of
        {plain['median_ms']:.0f}: {faster:.2f} times as fast (medians of 20).""")


@block
def loader() -> str:
    found = load('cpu/loader')
    shares = [row['share'] for row in found['alone'].values()]
    step = found['step']
    return prose(f"""With 10 GB of shards that are not in the page cache (2 cores of an AMD EPYC), a
        step of GPT-2 124M's shape (float32, B=1, T=1,024, {step['seconds']:.1f} s) waits
        {100 * step['share']:.3f}% of its time for its batch. A program that only asks for batches,
        {found['faster']} times as often, waits {100 * min(shares):.2f} to {100 * max(shares):.2f}%
        in any order. Reading all of the data once adds {found['memory']['growth_bytes'] / 1e6:.0f}
        MB to the process.""")


@block
def soak() -> str:
    found = load('cpu/soak')
    return prose(f"""`make soak` kills a training run {found['kills']} times,
        {found['kills_inside_checkpoint_writing']} of them while it writes a checkpoint, and
        compares it with one left alone: {found['rows_that_differ']} of {found['rows']} logged rows
        differ.""")


@block
def nanogpt() -> str:
    parts = {part: load(f'nanogpt/{part}') for part in ('curves', 'exchange', 'speed', 'recipe')}
    logits = max(parts['exchange'][writer]['max_logit_difference']
                 for writer in ('nanoGPT', 'ours'))
    times, recipe = parts['speed']['ratio'], parts['recipe']
    return prose(f"""Beside nanoGPT itself ({parts['speed']['nanogpt'][:7]}; its CPU recipe's shape:
        4 layers, 4 heads, width 128, B=12, T=64, float32, 2 CPU cores; `make nanogpt
        NANOGPT=FOLDER`), losses logged over {parts['curves']['steps']} steps with one seed agree to
        {parts['curves']['max_loss_difference']:.0e}, logits of exchanged checkpoints to
        {logits:.1e}, and greedy text past `block_size` is the same. Training makes
        {times['median']:.2f} times its tokens per second (median of {parts['speed']['rounds']}
        interleaved runs, {times['min']:.2f} to {times['max']:.2f}). The whole recipe ends at
        {recipe['ours']['val_loss']:.3f} nats per character here and at
        {recipe['nanoGPT']['val_loss']:.3f} there (whole validation split; batches differ once
        nanoGPT's evaluations have drawn from its generator).""")


@block
def rope_finetune() -> str:
    runs = [json.loads(path.read_text()) for path in (RESULTS / 'rope_finetune').glob('*.json')]
    loss = {run['run']: run['val_loss'] for run in runs}
    [changed] = [run for run in runs if run['run'] == 'into-rope']
    at_first = dict(map(tuple, changed['evaluations']))[2000]
    return prose(f"""The vanilla model reaches {loss['vanilla']:.3f} after 2,000 steps. Converted to
        RoPE its loss is {at_first:.2f} at first; after 1,000 further steps it is
        {loss['into-rope']:.3f}, where vanilla trained for as long has {loss['vanilla-more']:.3f},
        and at T=128 (B=6) {loss['into-rope-T128']:.3f}. RoPE from scratch for the same 3,000 steps
        has {loss['rope']:.3f} (T=128: {loss['rope-T128']:.3f}).""")
