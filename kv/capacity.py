"""How many users a GPU serves, how many GPUs a service needs, and what a million tokens cost:
arithmetic from the plan alone.

    python -m kv.capacity config/train_gpt2_mqa_local.py --context=4096 --kv_dtype=int8
    python -m kv.capacity config/train_gpt2_mqa_local.py --n_layer=24 --n_head=32 --n_embd=2048 \\
        --head_dim=64 --mlp_hidden=0 --requests_per_second=20000 --memory=80GB \\
        --bandwidth=3.35TB --flops=400e12 --price=2.5
    python -m kv.capacity --help

A request adds `message_tokens` tokens to a conversation of `context` tokens, of which a share
`hit_rate` is in the prefix cache, and is answered by `new_tokens` tokens. Costs on each GPU:

    prefill    2 FLOPs per weight and token, 4 * H * D per query and visible key (a latent's width
               instead of D where layers read latents), at `flops` a second; layers after the last
               one that stores K and V compute only the last token
    decode     a step reads the weights once, and K and V of each sequence in each layer (a shared
               cache is read by all of its layers), at `bandwidth` bytes a second; or computes, 2
               FLOPs a parameter, where that takes longer
    batch      as many sequences as fit into memory beside the weights, or into a step of `tpot` ms

This is an estimate that ignores communication between GPUs. `utilization` is the share of `flops`
and `bandwidth` that is reached. Torch is not needed.
"""
import json
import math

import configurator
from config.errors import UserError
from config.gpt_config import GPTConfig, unknown_field
from config.schema import CAPACITY, MODEL
from config.sizes import parse_bytes
from data.datasets import DATA_ROOT
from data.recall.tasks import task_of
from data.tokenfiles import is_prepared, read_meta
from kv.plan import KVPlan, Layer, plan_kv

GPT2_VOCAB = 50304  # padded, as nanoGPT does
USABLE = 0.9  # share of memory; the rest is for activations and workspaces
WEIGHT_BYTES = {'bfloat16': 2, 'float32': 4, 'int8': 1}


def vocabulary(s) -> int:
    """Return the vocabulary size of the data set in the settings; GPT-2's padded one if the data
    set has GPT-2's tokens, if none is given, or with a note if it is not prepared."""
    folder = DATA_ROOT / s.dataset
    if 'dataset' not in s.given:
        return GPT2_VOCAB
    if task := task_of(s):
        return task.vocab_size
    if meta := read_meta(folder):
        return meta['vocab_size']
    if not is_prepared(folder):
        print(f'Note: data set {s.dataset!r} is not prepared, so its vocabulary is unknown; '
              f"assumed are GPT-2's {GPT2_VOCAB:,} tokens")
    return GPT2_VOCAB


def matrices(config: GPTConfig, plan: KVPlan, layer: Layer) -> list[tuple[int, int]]:
    """(inputs, outputs) of a layer's matrices: c_attn (queries, and what an owner stores), c_proj
    and the two of the MLP, which may have biases; with latents also k_up and v_up, without."""
    C, M, read = config.n_embd, config.resolved_mlp_hidden, plan.n_head * plan.head_dim
    slot = plan.slots[layer.slot]
    stored = slot.n_kv_head * (2 - slot.tied) * slot.head_dim if layer.owns else 0
    ups = [(slot.head_dim, read)] * 2 if slot.latent else []
    return [(C, read + stored), (read, C), (C, M), (M, C), *ups]


def parameters(config: GPTConfig, plan: KVPlan) -> int:
    """Number of parameters, including position embeddings; the output matrix is tied."""
    C, bias = config.n_embd, int(config.bias)
    total = config.vocab_size * C + (1 + bias) * C
    if config.pos_embedding == 'learned':
        total += config.block_size * C
    for layer in plan.layers:
        shapes = matrices(config, plan, layer)
        total += sum(n * m for n, m in shapes) + bias * sum(m for _, m in shapes[:4])
        total += 2 * (1 + bias) * C + plan.n_head * config.attn_sink
        total += plan.n_head * (C + 1) * config.attn_gate
        slot = plan.slots[layer.slot]
        total += config.qk_norm * (plan.head_dim + slot.head_dim * layer.owns)
    return total


def note_uncounted(config: GPTConfig) -> None:
    """Print a note if `parameters` does not know a setting."""
    if unknown := unknown_field(config, 'count'):
        print(f'Note: parameters of {unknown} are not counted: kv.capacity does not know them')


def attention_flops(plan: KVPlan, layer: Layer, tokens: int, before: int) -> int:
    """FLOPs of a layer's attention for `tokens` queries that follow `before` tokens: 4 * H * width
    per query and visible key. Queries are multiplied with latents directly."""
    n_keys = total_keys(layer, before + tokens) - total_keys(layer, before)
    return 4 * plan.n_head * plan.slots[layer.slot].head_dim * n_keys


def total_keys(layer: Layer, n: int) -> int:
    """Keys that n queries from the first on see: the i-th sees i keys, up to the window size."""
    growing = min(n, layer.window or n)
    return growing * (growing + 1) // 2 + (n - growing) * layer.window


def prefill_flops(config: GPTConfig, plan: KVPlan, tokens: int, before: int = 0,
                  trim: bool = True) -> int:
    """FLOPs of a prefill of `tokens` tokens after `before` cached ones, with the last logits. The
    last layer that stores K and V projects all tokens, and computes the rest only for the last one.
    trim=False: every token in every layer."""
    total = 2 * config.vocab_size * config.n_embd
    stop = plan.last_owner if trim else len(plan.layers)
    for layer in plan.layers:
        projected = tokens if layer.index <= stop else 1
        whole = tokens if layer.index < stop else 1
        first, *others = (n * m for n, m in matrices(config, plan, layer))
        total += 2 * (projected * first + whole * sum(others))
        total += attention_flops(plan, layer, whole, before + tokens - whole)
    return total


def read_nbytes(plan: KVPlan, batch: int, held: int, kv_dtype: str) -> int:
    """Bytes of K and V that a decode step reads for `batch` sequences of length `held`."""
    return batch * sum(slot.capacity(held) * slot.position_nbytes(kv_dtype) * len(slot.layers)
                       for slot in plan.slots)


def serving(config: GPTConfig, plan: KVPlan, s) -> dict:
    """Metrics of one GPU that serves this plan; without `batch` if not one sequence fits, or its
    step takes longer than `tpot`."""
    held = s.context + s.message_tokens + s.new_tokens
    n = parameters(config, plan)
    nbytes = n * WEIGHT_BYTES[s.weight_dtype]
    per_sequence = plan.nbytes(1, held, s.kv_dtype)
    room = USABLE * parse_bytes(s.memory, 'memory') - nbytes
    batch = max(0, int(room // per_sequence))
    found = {'parameters': n, 'weights_bytes': nbytes, 'kv_bytes': per_sequence, 'sequences': batch}

    middle = held - s.new_tokens // 2  # length in the middle of the answer
    read = read_nbytes(plan, 1, middle, s.kv_dtype)
    bandwidth = s.utilization * parse_bytes(s.bandwidth, 'bandwidth')
    flops = s.utilization * parse_bytes(s.flops, 'flops')
    of_a_token = 2 * n + sum(attention_flops(plan, layer, 1, middle - 1) for layer in plan.layers)
    if s.tpot:  # the largest batch whose step is fast enough
        seconds = s.tpot / 1000
        batch = min(batch, int((seconds * bandwidth - nbytes) // read),
                    int(seconds * flops // of_a_token))
    if batch < 1:
        return found

    step = max((nbytes + batch * read) / bandwidth, of_a_token * batch / flops)
    computed = s.message_tokens + round((1 - s.hit_rate) * s.context)
    cached = s.context + s.message_tokens - computed
    prefill = prefill_flops(config, plan, computed, cached) / flops
    seconds = prefill + s.new_tokens * step / batch
    kept = round(s.requests_per_second * s.away)
    return found | {
        'batch': batch, 'step_seconds': step, 'tokens_per_second': batch / step,
        'prefill_seconds': prefill, 'gpu_seconds_per_request': seconds,
        'requests_per_second': 1 / seconds, 'gpus': math.ceil(s.requests_per_second * seconds),
        'kept': kept, 'kept_bytes': kept * per_sequence,
        'cost_per_million_tokens': s.price / 3600 * seconds / s.new_tokens * 1e6}


MOST = 1e12  # larger numbers are mistakes, and would overflow
LIMITS = {'context': (1, MOST), 'message_tokens': (1, MOST), 'new_tokens': (1, MOST),
          'hit_rate': (0, 1), 'utilization': (0.01, 1), 'requests_per_second': (0, MOST),
          'away': (0, MOST), 'price': (0, MOST), 'tpot': (0, MOST)}


def compare(s) -> dict:
    """Metrics of this model and of vanilla GPT-2 of the same shape, and the settings."""
    for name, (low, high) in LIMITS.items():
        if not low <= getattr(s, name) <= high:
            raise UserError(f'{name}={getattr(s, name):g}: must be from {low:g} to {high:g}')
    s.vocab_size = s.vocab_size or vocabulary(s)
    config = GPTConfig(vocab_size=s.vocab_size, **{key.name: getattr(s, key.name) for key in MODEL})
    note_uncounted(config)
    plan = plan_kv(config)
    held = s.context + s.message_tokens + s.new_tokens
    if config.pos_embedding == 'learned' and held > config.block_size:
        raise UserError(f'a conversation of {held:,} tokens is longer than the '
                        f'block_size={config.block_size} positions that the model has learned: '
                        'make context smaller')
    vanilla = GPTConfig(vocab_size=config.vocab_size, n_layer=config.n_layer, n_head=config.n_head,
                        n_embd=config.n_embd, head_dim=plan.head_dim, pos_embedding='rope',
                        bias=config.bias)
    settings = {key.name: getattr(s, key.name) for key in CAPACITY
                if key not in MODEL and key.name != 'json'}
    return {'settings': settings, 'ours': serving(config, plan, s),
            'vanilla': serving(vanilla, plan_kv(vanilla), s)}


ROWS = {  # name: (metric, format)
    'parameters': ('parameters', '{:,}'),
    'weights, bytes': ('weights_bytes', '{:,}'),
    'K and V of a conversation, bytes': ('kv_bytes', '{:,}'),
    'conversations in memory': ('sequences', '{:,}'),
    'sequences in a step': ('batch', '{:,}'),
    'a step, ms (TPOT)': ('step_seconds', '{:,.2f}'),
    'tokens/s, decoding alone': ('tokens_per_second', '{:,.0f}'),
    'prefill of a request, ms': ('prefill_seconds', '{:,.2f}'),
    'requests/s': ('requests_per_second', '{:,.1f}'),
    'GPUs': ('gpus', '{:,}'),
    'conversations kept between messages': ('kept', '{:,}'),
    'their K and V, bytes': ('kept_bytes', '{:,}'),
    '$ a million tokens': ('cost_per_million_tokens', '{:,.3f}')}


def main(argv=None):
    from kv.console import output, print_table, table_of
    s = configurator.parse('capacity', argv, usage=__doc__, echo=False)
    found = compare(s)
    models, rows = [found['ours'], found['vanilla']], []
    for name, (key, form) in ROWS.items():
        scale = 1000 if ', ms' in name else 1
        rows.append((name, *(form.format(model[key] * scale) if key in model else '-'
                             for model in models)))
    print_table(output(), table_of(('', 'ours', 'vanilla'), rows))
    if not all('batch' in model for model in models):
        print(f'-: no conversation has room, or a step of one takes longer than tpot={s.tpot:g}')
    if s.json:
        print(json.dumps(found))


if __name__ == '__main__':
    configurator.run_program(main)
