"""Blocks on the cost of the savings, from the ladders."""
import json
import statistics

from lab.ablation.cells import listed, mean_sd, plus_minus
from lab.ablation.stats import paired_difference, seeds_needed
from lab.pages.blocks import RESULTS, block, first_seed, load, mean, prose, rows_of, table

ROW_NAMES = {'+ KV shared by 2/3': '+ KV shared by 2 or 3 layers',
             '+ global KV tied': '+ both global layers share one slot',
             '+ wider heads and MLP': '+ wider heads and MLP (parameters restored)'}


@block
def ladder() -> str:
    rows = []
    for row in load('ablate_prices/results')['rows']:
        if row['side']:
            continue
        kv, loss = row['kv'], row['val_loss']
        rows.append(f"| {ROW_NAMES.get(row['name'], row['name'])} | {row['params'] / 1e6:.2f}M "
                    f"| {kv['bytes_per_token'] * kv['T']:,.0f} | {kv['smaller']:.1f}x "
                    f"| {loss['mean']:.4f} ({loss['sd']:.4f}) "
                    f"| {plus_minus(row.get('against_above'))} "
                    f"| {plus_minus(row.get('against_baseline'))} |")
    return table('| row | parameters | KV bytes | times smaller | validation loss '
                 '| minus the row above | minus `+ qk_norm` |', rows)


def effect(difference: dict) -> str:
    """What the interval of a paired difference of losses says, by itself and for all together."""
    mean, half = difference['mean'], difference['half_95']
    if abs(mean) <= half:
        return f'makes no difference that shows ({plus_minus(difference)})'
    alone = '' if difference['stands'] else " (not with Holm's correction for all rows)"
    return f"{'raises' if mean > 0 else 'lowers'} the loss by {abs(mean):.4f} ±{half:.4f}{alone}"


@block
def ladder_verdict() -> str:
    rows = rows_of('ablate_prices')
    full, baseline = rows['+ int8 KV'], rows['+ qk_norm']
    steps = {name: effect(rows[row]['against_above']) for name, row in (
        ('MQA', '+ MQA'), ('the window', '+ window'), ('sharing', '+ KV shared by 2/3'),
        ('one slot for both global layers', '+ global KV tied'))}
    largest = max(map(abs, rows['+ int8 KV']['against_above']['each']))
    return prose(
        f"""The fair baseline is `+ qk_norm`, which has RoPE and all of the memory (vanilla GPT-2
        lacks RoPE). Against it the full stack {effect(full['against_baseline'])}
        ({len(full['seeds'])} seeds, fixed beforehand) with as many parameters and
        {full['kv']['smaller'] / baseline['kv']['smaller']:.0f} times less memory. Step by step:
        {'; '.join(f'{name} {what}' for name, what in steps.items())}; int8 changes no seed by more
        than {rounded_up(largest)}. All of it *on this text*, which needs little memory: its loss is
        flat beyond 15 characters.""")


@block
def recall_short() -> str:
    rows = rows_of('ablate_recall')
    far = {name: 100 * row['recall']['accuracy']['47']['mean'] for name, row in rows.items()}
    full, local = rows['+ int8 KV'], far['local layers only']
    facts = rows_of('ablate_lookup')
    mha, small, alone = (facts[name]['lookup'] for name in (
        'MHA with key offset', 'global last, tied, int8 KV', 'local layers only'))
    most = list(small['accuracy'])[-1]
    return prose(
        f"""Memory that is needed is there: on a task that asks for a token 47 positions back, where
        local layers together reach {full['recall']['local_reach']}, the full stack names
        {far['+ int8 KV']:.0f}% right, local layers alone {local:.1f}%. And it can be searched:
        asked by key for {most} facts farther back than its local layers reach, a small model
        (`LLG`, globals tied, int8 K/V) recalls {percent(small, most)}% in {small['kv_bytes']:,}
        bytes, MHA with `key_offset` {percent(mha, most)}% in {mha['kv_bytes']:,} (float32), and
        local layers alone {percent(alone, most)}% (chance: {100 / alone['n_values']:.1f}%).""")


def percent(found: dict, facts: str) -> str:
    """Mean over the seeds of the share that a row recalls of so many facts."""
    return f"{100 * found['accuracy'][facts]['mean']:.1f}"


@block
def lookup() -> str:
    rows = rows_of('ablate_lookup')
    most = list(rows['MHA']['lookup']['accuracy'])[-1]
    lines = []
    for name, row in rows.items():
        found, seeds = row['lookup'], len(row['seeds'])
        prices = [f'{x:,.0f}' for x in found['bytes_per_fact'] if x]
        lines.append(f"| {name} | {found['kv_bytes']:,} "
                     f"| {mean_sd(found['accuracy'][most], '.1f', scale=100)} "
                     f"| {listed(found['facts'])} | {listed(prices)} "
                     f"| {listed(found['solved_at'])} | {seeds} |")
    return table(f'| row | KV bytes | right of {most} facts, % (sd) | facts | bytes a fact '
                 '| 99% at step | seeds |', lines)


RECALLING = ('attention sinks', 'NoPE on global layers', 'RoPE on a quarter of global dimensions',
             'suffix sharing', 'ReLU squared')


@block
def lookup_findings() -> str:
    facts = {name: row['lookup'] for name, row in rows_of('ablate_lookup').items()}
    mha, plain = facts['MHA with key offset'], facts['MHA']
    tied, int8, int4 = (facts[f'global last, tied{dtype}'] for dtype in (
        '', ', int8 KV', ', int4 KV'))
    halved, (few, *_, most) = facts['K = V on global layers, NoPE'], mha['accuracy']
    length = rows_of('ablate_lookup')['MHA']['T']
    rounding = paired_difference(*(dict(enumerate(found['accuracy'][most]['each']))
                                   for found in (int4, tied)))
    bytes_of = [f"{found['bytes_per_fact'][0]:,.0f}" for found in (tied, int8, int4, mha)]
    return prose(
        f"""All that is needed fits: the default plan's form (`LLG`/`AAB`, globals tied, no key
        offset) recalls {percent(tied, most)}% of {most} facts in float32,
        {percent(int8, most)}% with int8 and {percent(int4, most)}% with int4 storage, in
        {', '.join(bytes_of[:2])} and {bytes_of[2]} bytes a fact; MHA uses {bytes_of[3]}. int4 costs
        {-100 * rounding['mean']:.1f} ±{100 * rounding['half_95']:.1f} points, and int8 nothing that
        shows. {most} facts are the most that fit into T={length}: for rows that recall all of them
        the column is their cache divided by {most}; where they would fail is not known.""",
        f"""Of the mechanisms that others use (three seeds), K = V in all layers recalls
        {percent(facts['K = V'], most)}%, K = V in global layers alone, without RoPE there,
        {percent(halved, most)}% in {halved['kv_bytes'] / tied['kv_bytes']:.0%} of the bytes, and a
        latent of 16 {percent(facts['latent of 16 on global layers, NoPE'], most)}%; the others at
        least {min(float(percent(facts[name], most)) for name in RECALLING)}%. What a latent cannot
        hold and what was not learned in 500 steps look the same here.""",
        f"""The other differences are in what is learned in 500 steps. MHA without key offset stays
        at guessing among the facts that it has seen ({percent(plain, few)}% of {few},
        {percent(plain, most)}% of {most}, two seeds): a value is found by the key before it, and
        these layers do not find the token before soon enough. Local layers below the first global
        one, or keys that come from the token before, do this for them (see
        [layer order](#layer-order)). In short trials, which were not kept, AdamW stayed at chance
        far longer than Muon.""")


@block
def ladder_findings() -> str:
    rows, long = map(rows_of, ('ablate_prices', 'ablate_long'))
    full, baseline = rows['+ int8 KV'], rows['+ qk_norm']
    steps = [(name, row['against_above']) for name, row in rows.items()
             if not row['side'] and row.get('against_above')]
    standing = [f"`{name}`" for name, step in steps if step['stands']]
    widest = max(step['half_95'] for name, step in steps[2:])
    needed = max(seeds_needed(statistics.stdev(step['each']), 0.01) for _, step in steps[2:])
    rates = {row: {rate: first_seed(rows[f'{row} at learning rate {rate}'])
                   for rate in ('0.006', '0.024')} for row in ('qk_norm', 'wider heads and MLP')}
    long_full, long_baseline = long['+ int8 KV'], long['RoPE + qk_norm MHA']
    return prose(
        f"""What vanilla GPT-2 lacks here is RoPE, not memory. The full stack has as many parameters
        as the baseline `+ qk_norm` (those saved in K and V are spent on heads of 24 and a wider
        MLP), holds {full['kv']['smaller']:.0f} times fewer KV bytes than vanilla, and its loss is
        {plus_minus(full['against_baseline'])} against the baseline's. Of the {len(steps)} steps
        {', '.join(standing[:-1])} and {standing[-1]} differ from the row above, for all of them
        together too (Holm's correction; int8's {rows['+ int8 KV']['against_above']['mean']:+.5f} is
        too little to matter). Below the baseline no interval is wider than
        ±{widest:.4f}; ±0.01 for all of them would take {needed} seeds.""",
        f"""Half and twice the learning rate (6e-3, 2.4e-2, seed 1) improve neither end: the
        baseline has {first_seed(baseline):.3f}, and {rates['qk_norm']['0.006']:.3f} and
        {rates['qk_norm']['0.024']:.3f} with these; the full stack
        {first_seed(rows['+ wider heads and MLP']):.3f}, and
        {rates['wider heads and MLP']['0.006']:.3f} and
        {rates['wider heads and MLP']['0.024']:.3f}. Trained on {long_full['tokens'] / 1e6:.1f}M
        tokens (AdamW, 6e-3, B=8, {long_full['iterations']:,} steps, seed 1), the full stack reaches
        {mean(long_full):.4f} and the baseline {mean(long_baseline):.4f}: the gap narrows to
        {mean(long_baseline) - mean(long_full):.3f}, too small for one seed to tell.""",
        """That a window *helps* is probably this text's doing: its loss is flat beyond about 15
        characters, and a window leaves out what a briefly trained model would have to learn to
        ignore. The text *cannot* show what a smaller memory costs. Recall can.""")


@block
def mechanisms() -> str:
    found = {name: row for name, row in rows_of('ablate_prices').items()
             if row['side'] and len(row['seeds']) == 8}
    prices = {name: row['against_above'] for name, row in found.items()}
    standing = {sign: [f'`{name}` ({plus_minus(price)})' for name, price in prices.items()
                       if price['stands'] and sign * price['mean'] > 0] for sign in (1, -1)}
    lines = [f"| {name} | `{row['above']}` | {row['kv']['bytes_per_token']:,.0f} "
             f"| {row['kv']['smaller']:.0f}x | {plus_minus(prices[name])} |"
             for name, row in found.items()]
    widest = max(price['half_95'] for price in prices.values())
    text = prose(
        f"""Of {len(found)} mechanisms, each added alone, {len(standing[1])} raise the loss, with
        Holm's correction for all comparisons of the ladder: {', '.join(standing[1])};
        {', '.join(standing[-1]) or 'none'} lowers it. No interval is wider than ±{widest:.4f}: a
        difference of 0.01 would show. This text needs little memory, so it says nothing about what
        they recall.""")
    return text + '\n\n' + table('| mechanism | added to | KV bytes/token | times smaller '
                                 '| price in nats (8 seeds) |', lines)


@block
def source_code() -> str:
    lines = []
    for name, row in rows_of('ablate_pysource').items():
        if len(row['seeds']) == 4:
            lines.append(f"| {name} | {row['kv']['bytes_per_token']:,.0f} "
                         f"| {plus_minus(row.get('against_above'))} "
                         f"| {plus_minus(row.get('against_baseline'))} "
                         f"| {far_back(row):.2f} | {kept(row)} |")
    return table('| row | KV bytes/token | minus the row above, or that it departs from | minus '
                 '`+ key offset` | nats of a name from far back | of the gain kept |', lines)


def far_back(row: dict) -> float:
    """Mean loss of the identifiers that local layers cannot reach, over the seeds."""
    return statistics.fmean(row['identifiers']['nats_beyond'].values())


def kept(row: dict) -> str:
    """The share of the baseline's gain from long memory that a row keeps, with its 95% interval."""
    shares = dict(enumerate(row['identifiers']['kept']['each']))
    found = paired_difference(shares, dict.fromkeys(shares, 0.0))
    return f"{100 * found['mean']:.0f}% ±{100 * found['half_95']:.0f}"


@block
def source_findings() -> str:
    rows = rows_of('ablate_pysource')
    baseline, full, local = (rows[name] for name in (
        '+ key offset', '+ int8 KV', 'local layers only'))
    steps = {name: effect(rows[row]['against_above']) for name, row in (
        ('MQA', '+ MQA'), ('the window', '+ window'), ('sharing', '+ KV shared by 2'),
        ('one slot for both global layers', '+ global KV tied'),
        ('the step to wider heads and MLP', '+ wider heads and MLP'))}
    nope, far = rows['NoPE on global layers'], baseline['identifiers']
    n_far = sum(far['count'][key] for key in far['beyond'])
    return prose(
        f"""Here memory has a price. {first_upper('; '.join(f'{name} {what}'
        for name, what in steps.items()))}. All of it together {effect(full['against_baseline'])}
        against `+ key offset`, the strongest row with all of the memory, in
        {full['kv']['smaller']:.0f} times fewer bytes than vanilla GPT-2 ({len(full['seeds'])}
        seeds, fixed beforehand). To the full stack, adding attention
        sinks {effect(rows['attention sinks']['against_above'])}, and leaving
        RoPE out of global layers {effect(nope['against_above'])}, although then names
        from far back are predicted best. (K = V does not go with a key offset.)""",
        f"""{n_far:,} names of the held-out text were last used {far['beyond'][0]} or more tokens
        before, farther than local layers reach together. The baseline needs
        {far_back(baseline):.2f} nats for one of them, local layers alone {far_back(local):.2f}: a
        gain of {far_back(local) - far_back(baseline):.2f}. MQA keeps {kept(rows['+ MQA'])} of it,
        the window {kept(rows['+ window'])}, and the full stack {kept(full)}; above 100% a row
        predicts such names better than the baseline. That windows help even there is about
        learning, not about what a memory can hold. Looking a name up has to be learned: without key
        offset, the full stack has not learned it in these 1.2M tokens
        ({far_back(rows['no key offset']):.2f} nats), and models in which each layer sees everything
        have learned it less well than those with windows. How it is after long training these runs
        do not show.""")


def first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]


@block
def source_short() -> str:
    rows = rows_of('ablate_pysource')
    full = rows['+ int8 KV']
    mqa, sharing = (effect(rows[row]['against_above']) for row in ('+ MQA', '+ KV shared by 2'))
    return prose(
        f"""On Python source, where names come again from far back, single savings cost more: MQA
        {mqa}, sharing {sharing}. Yet the full stack {effect(full['against_baseline'])} against the
        baseline with all of the memory, which here has `key_offset` too
        ({len(full['seeds'])} seeds, W=16, T=512). Of what that gains over local layers alone on
        names last used {full['identifiers']['beyond'][0]} or more tokens before, the full stack
        keeps {kept(full)}.""")


@block
def int8_loss() -> str:
    rows = rows_of('ablate_prices')
    most = max(map(abs, rows['+ int8 KV']['against_above']['each']))
    added = rows['int8 weights']['against_above']
    return prose(f"""K and V in int8 (`--kv_dtype=int8`) change the loss of these models by at most
        {rounded_up(most)} nats, without training for it. Weights and activations in int8
        (`--weight_dtype=int8`) add {added['mean']:.5f} ±{added['half_95']:.5f}
        ({len(added['each'])} seeds).""")


def rounded_up(x: float) -> str:
    """Round up to five decimals."""
    return f'{-(-x * 1e5 // 1) / 1e5:.5f}'


@block
def recall() -> str:
    rows = rows_of('ablate_recall')
    far = {name: 100 * row['recall']['accuracy']['47']['mean'] for name, row in rows.items()}
    tied_later = rows['tied at inference only']['recall']['accuracy']['47']['each']
    each = ', '.join(f'{100 * x:.0f}%' for x in tied_later)
    cost = rows_of('ablate_prices')['tied at inference only']['against_above']
    reach = rows['+ int8 KV']['recall']['local_reach']
    return prose(
        f"""The task is to name a random token 47 positions back, where all ten local layers
        together reach {reach} (12 layers of 64, T=96, W=4, B=32, 400 steps, float32 on 2 CPU cores,
        three seeds; `make recall`). The baseline names {far['+ qk_norm']:.1f}% right, and so does
        every row from `+ MQA` to `+ int8 KV`; local layers alone {far['local layers only']:.1f}%
        (seed 1). The two global layers, and the one cache that they share, carry what windows
        cannot reach. Vanilla GPT-2 gets to {far['vanilla GPT-2']:.0f}% in these steps, with RoPE
        alone to {far['+ RoPE']:.0f}%.""",
        f"""Sharing caches only *after* training is a matter of luck: global K/V tied at inference
        name {each} right, by seed, and cost {cost['mean']:.4f} ±{cost['half_95']:.4f} nats on
        Shakespeare. Train with the memory that you will sample with.""")


@block
def layer_order() -> str:
    first = rows_of('ablate_prices')['global first: GLLLLL/ABBCCC']
    facts = {name: row['lookup'] for name, row in rows_of('ablate_lookup').items()}
    few, *_, most = facts['global last, tied']['accuracy']
    last, last_untied, start, start_untied, offset = (facts[f'global {name}'] for name in (
        'last, tied', 'last, untied', 'first, tied', 'first, untied', 'first, tied, key offset'))
    return prose(
        f"""On Shakespeare `LLLLLG`/`AABBBC` and `GLLLLL`/`ABBCCC` cannot be told apart:
        with the global layer first the loss differs by {plus_minus(first['against_above'])} (three
        seeds). Both name a token at a marked distance,
        tied and (seed 1) untied.""",
        f"""Looking facts up by content separates them. With the global layer last (`LLG`),
        {percent(last, most)}% of {most} facts are recalled tied and {percent(last_untied, most)}%
        untied; with it first (`GLL`), in as many steps, {percent(start, most)}% and
        {percent(start_untied, most)}% (five seeds each), and of {few} facts
        {percent(start, few)}% and {percent(start_untied, few)}%, where guessing among those not yet
        asked gives 75%. A value is found by the key
        before it, and K and V of layer 0 are functions of single tokens: local layers below the
        global one put the token before into them. Where half of each key comes from the token
        before anyway (`key_offset`), `GLL` recalls {percent(offset, most)}% (seed 1). That does
        not explain the untied row, whose second global layer has local layers below it: there the
        reason is open. The default is `LLLLLG`.""")


@block
def muon() -> str:
    rows = rows_of('ablate_prices')
    full, adamw = rows['+ wider heads and MLP'], rows['AdamW, twice the steps']
    return prose(f"""In the Shakespeare ladder (full stack, 2.4M parameters) AdamW reaches a loss of
        {mean(adamw):.3f} in {adamw['iterations']:,} steps (learning rate 6e-3, three seeds); Muon
        reaches {mean(full):.3f} in {full['iterations']:,} (1.2e-2, eight seeds; with 6e-3 and seed
        1 {first_seed(rows['wider heads and MLP at learning rate 0.006']):.3f}): it needs less than
        half the steps.""")


@block
def int8_matmuls() -> str:
    rows = rows_of('ablate_prices')
    names = ('int8 products', 'int8 in training', '+ wider heads and MLP')
    products, kv_only, full = (first_seed(rows[name]) for name in names)
    return prose(f"""In the Shakespeare ladder, with seed 1, int8 matmuls and rounded K and V reach
        a loss of {products:.3f}, rounded K and V alone {kv_only:.3f}, and float32 {full:.3f}.""")


@block
def uptraining() -> str:
    rows = rows_of('ablate_prices')
    to_mqa, to_all = (rows[f'uptrained to {name}'] for name in ('MQA', 'all but wider heads'))
    mqa, everything = (row['against_above']['mean'] for row in (to_mqa, to_all))
    share = to_mqa['iterations'] / to_mqa['recovery']['scratch']['iterations']
    return prose(f"""After {share:.0%} of the steps our small models are still {mqa:.3f} nats (MQA)
        and {everything:.3f} nats (all but wider heads) behind the same memory trained from scratch
        (seed 1, `results/ablate_prices/recovery.png`).""")


@block
def contexts() -> str:
    lines = (RESULTS / 'demo' / 'contexts.jsonl').read_text(encoding='utf-8').splitlines()
    found = {(row['model'], row['context']): row['bits_per_byte'] for row in map(json.loads, lines)}
    demo_short, demo_long = (found['out-mqa-local', T] for T in (256, 8192))
    rope_short, rope_long = (found['out-rope-mha', T] for T in (256, 8192))
    return prose(f"""The former demo, a model of characters trained on 256 of them, predicts
        held-out text as well with 8,192 characters of context ({demo_long:.4f} bits per byte) as
        with 256 ({demo_short:.4f}). The same model with RoPE and all of the memory goes from
        {rope_short:.4f} to {rope_long:.4f} (one seed each, 60,000 characters; commit 583ea03). So
        `chat.py` and `serve.py` allow models with RoPE and windows up to 32 times their
        `block_size`, at most 8,192 tokens.""")
