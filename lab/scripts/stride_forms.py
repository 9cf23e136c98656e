"""Forms of `kv_stride`: how an entry is made from its block, how a query sees the tokens that are in
no complete block, and where RoPE goes. Trains each form and prints a line of Markdown.

    python -m lab.scripts.stride_forms source --seed=1 FORM...   # Python source
    python -m lab.scripts.stride_forms lookup --seed=1 FORM...   # facts looked up by content

A FORM is ENTRY/OWN/ROPE, for example gated/ring4/none.
ENTRY: mean; place (one weight for each place of a head's block); channel (one for each place and
    channel, random at first); same (the model's own: channel's, but at first alike in all
    channels); token, gated (channel's, same's, plus a projection of the layer's input to channels,
    as in DeepSeek-V4); score (place's, plus a projection to one number for each head).
OWN: mean (of the own block so far); ringN (the last N tokens one by one).
ROPE: none; first (an entry is rotated as its block's first token is).
Or a FORM is `every`: an entry for every token, without RoPE.

The forms change training alone, so losses are of the forward pass.
"""
import argparse
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import configurator
import train
from attention.rope import RotaryTable, apply_rope
from data.datasets import ensure_dataset
from data.recall.tasks import task_of
from data.tokenfiles import open_split, read_meta
from data.tokenizer import load_tokenizer
from lab.ablation.identifiers import find_identifiers, loss_by_distance
from lab.ablation.lookup import SEED
from model import GPT, CausalSelfAttention
from training.checkpoint import config_of, load_checkpoint
from training.evaluate import forward, judge, spread_windows, window_starts

FULL = ['--layer_pattern=LLG', '--kv_share=AAB', '--n_kv_head=1', '--share_global_kv=True',
        '--rope_fraction_global=0', '--pos_embedding=rope', '--qk_norm=True', '--key_offset=True']
TASKS = {
    'source': ['config/code_vanilla.py', *FULL, '--window_size=16', '--head_dim=40',
               '--mlp_hidden=584', '--eval_interval=600'],
    'lookup': ['config/train_lookup.py', *FULL, '--window_size=4', '--max_iters=2500',
               '--lr_decay_iters=2500', '--eval_interval=2500'],
    'lookup500': ['config/train_lookup.py', *FULL, '--window_size=4', '--eval_interval=500']}
INITIAL = CausalSelfAttention.__init__
FORWARD = CausalSelfAttention.queries_keys_values


class Form:
    """Replaces what `CausalSelfAttention` does in layers with a stride."""

    def __init__(self, entry: str, own: str, rope: str, stride: int):
        self.entry, self.rope, self.stride = entry, rope == 'first', stride
        self.ring = int(own.removeprefix('ring')) if own != 'mean' else 0
        self.table = None

    def install(self):
        form = self

        def init(self, config, layer, slot):
            INITIAL(self, config, layer, slot)
            if slot.stride > 1 and layer.owns:
                if form.entry == 'mean':
                    del self.block_bias
                elif form.entry in ('place', 'score'):
                    self.block_bias = nn.Parameter(torch.randn(slot.n_kv_head * slot.stride))
                elif form.entry in ('channel', 'token'):
                    size = slot.n_kv_head * slot.stride * slot.width
                    self.block_bias = nn.Parameter(torch.randn(size))
                if form.entry in ('token', 'gated', 'score'):
                    width = 1 if form.entry == 'score' else slot.width
                    self.block_gate = nn.Linear(config.n_embd, slot.n_kv_head * width, bias=False)

        def queries(self, x, rope=None, cache=None):
            self.inputs = x
            return FORWARD(self, x, rope, cache)

        CausalSelfAttention.__init__ = init
        CausalSelfAttention.queries_keys_values = queries
        CausalSelfAttention.block_means = lambda self, kv, cache: form.means(self, kv)
        CausalSelfAttention.attend_to_sequence = form.attend_or(
            CausalSelfAttention.attend_to_sequence)

    def means(self, attn, kv):
        """The running means of blocks, beside the tokens themselves if the ring needs them."""
        x, slot, m = torch.cat(kv, -1).float(), attn.slot, self.stride
        B, heads, t, D = x.shape
        logits = x.new_zeros(1, heads, 1, m, 1)
        if self.entry in ('channel', 'same', 'token', 'gated'):
            logits = attn.block_bias.float().view(1, heads, 1, m, D)
        elif self.entry in ('place', 'score'):
            logits = attn.block_bias.float().view(1, heads, 1, m, 1)
        if self.entry in ('token', 'gated', 'score'):
            own = attn.block_gate(attn.inputs).float().view(B, t, heads, -1).transpose(1, 2)
            logits = logits + F.pad(own, (0, 0, 0, -t % m)).unflatten(2, (-1, m))
        blocks = F.pad(x, (0, 0, 0, -t % m)).unflatten(2, (-1, m))
        weights = logits.clamp(-30, 30).exp().expand(B, heads, blocks.size(2), m, D)
        means = ((blocks * weights).cumsum(3) / weights.cumsum(3)).flatten(2, 3)[:, :, :t]
        k, v = means.split(slot.head_dim, dim=-1)
        token_k, token_v = (each.float() for each in kv)
        if self.rope:
            k, token_k = self.rotate(k, blocks=True), self.rotate(token_k)
        return torch.cat([k, token_k], -1).to(kv[0].dtype), torch.cat([v, token_v], -1).to(
            kv[0].dtype)

    def rotate(self, x, blocks=False):
        if self.table is None:
            self.table = RotaryTable(x.size(-1), 10_000.0)
        cos, sin = self.table(0, x.size(2), x.device, x.dtype)
        if blocks:
            at = torch.arange(x.size(2)) // self.stride * self.stride
            cos, sin = cos[at], sin[at]
        return apply_rope(x, cos, sin)

    def attend_or(self, ordinary):
        def attend(attn, q, k, v):
            if attn.slot.stride == 1:
                return ordinary(attn, q, k, v)
            q, k, v = q.float(), k.float(), v.float()
            if self.rope:
                q = self.rotate(q)
            y = self.attention(q, *k.chunk(2, -1), *v.chunk(2, -1))
            return y.to(attn.c_proj.weight.dtype)
        return attend

    def attention(self, q, mean_k, token_k, mean_v, token_v):
        """One softmax over the entries of complete blocks and the tokens (or the mean) beside."""
        t, m = q.size(2), self.stride
        i, entries = torch.arange(t), slice(m - 1, None, m)
        blocks = torch.arange(t // m) < i[:, None] // m                  # (t, blocks)
        if self.ring:
            beside = (i[:, None] >= i) & (i[:, None] - i < self.ring)
            k, v = (torch.cat([x[:, :, entries], y], 2)
                    for x, y in ((mean_k, token_k), (mean_v, token_v)))
        else:
            beside = i[:, None] == i
            k, v = (torch.cat([x[:, :, entries], x], 2) for x in (mean_k, mean_v))
        mask = torch.cat([blocks, beside], 1)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def source_result(s, model) -> str:
    folder = ensure_dataset(s.dataset)
    tokens, tokenizer = open_split(folder, 'val', model.config.vocab_size), load_tokenizer(
        read_meta(folder))
    nats = judge(forward(model), spread_windows(tokens, s.block_size, 500))
    found = find_identifiers(tokens.window(0, len(tokens)), tokenizer)
    starts = np.array(window_starts(len(tokens), s.block_size, 500))
    far = [x for d, x in loss_by_distance(nats.numpy(), starts, found).items()
           if d != 'new' and int(d) >= 128]
    count = sum(x['count'] for x in far)
    return f"{nats.mean():.4f} | {sum(x['count'] * x['nats'] for x in far) / count:.3f}"


@torch.inference_mode()
def lookup_result(s, model) -> str:
    task, found = task_of(s), []
    for n in sorted(task.pairs):
        x, y, distance = (torch.from_numpy(a) for a in task.batch(
            np.random.default_rng((SEED, n)), 256, n))
        right = torch.cat([model(some, all_logits=True)[0].argmax(-1) for some in x.split(32)]) == y
        found.append(f'{right[distance > 0].float().mean():.1%}')
    return ' | '.join(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('task', choices=TASKS)
    parser.add_argument('forms', nargs='+')
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--stride', type=int, default=4)
    args = parser.parse_args()
    (name,) = args.forms
    out_dir = f"out-forms/{args.task}-{name.replace('/', '-')}-{args.stride}-{args.seed}"
    shutil.rmtree(out_dir, ignore_errors=True)
    stride = [] if name == 'every' else [f'--kv_stride={args.stride}']
    if stride:
        Form(*name.split('/'), args.stride).install()
    given = [*TASKS[args.task], *stride, f'--seed={args.seed}', f'--data_seed={args.seed}',
             f'--out_dir={out_dir}']
    train.main(given)
    s = configurator.parse('train', given, echo=False)
    path = Path(out_dir) / 'ckpt.pt'
    saved = load_checkpoint(path)
    model = GPT(config_of(saved, path)).eval()
    model.load_state_dict(saved['model'])
    result = {'source': source_result, 'lookup': lookup_result, 'lookup500': lookup_result}[args.task](s, model)
    print(f'| {args.task} | {name} | {args.stride} | {args.seed} | {result} |', file=sys.stderr)


if __name__ == '__main__':
    main()
