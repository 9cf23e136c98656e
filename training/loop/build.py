"""The model of a run: a new one, a checkpoint's, or OpenAI's GPT-2; and what it trains with."""
import torch

from common.errors import UserError
from common.gpt_config import unknown_field
from data.recall.tasks import TASKS
from model import GPT
from training.checkpoint.adapt import adapt, adapted_config, differences, keep_trained, wishes
from training.checkpoint.file import config_of, load_weights
from training.checkpoint.load_model import check_weights
from training.checkpoint.manager import checkpoint_in
from training.memory.recompute import set_recompute
from training.native.loading import wanted
from training.native.modules import speed_up
from training.parallel import fsdp
from training.step.kernels import describe_attention
from training.step.loss import linear_cross_entropy


def count_tokens(s, block_size: int) -> int:
    """Print and return the tokens of an iteration."""
    n = s.gradient_accumulation_steps * s.batch_size * block_size
    print(f'tokens per iteration will be: {n:,}')
    return n


def build_model(s, saved: dict | None, meta: dict | None, tokens: str,
                new_on: str) -> tuple[GPT, bool, int]:
    """Return the initial model, whether settings differ from those it was trained with, and the
    tokens of an iteration.

    saved: the checkpoint to resume, which is adapted in place; None = another model. meta, tokens:
    of the data set, and its `tokens_id`. new_on: the device of a new model ('meta': no weights).
    """
    if s.init_from == 'scratch':
        n_tokens = count_tokens(s, s.block_size)
    if meta is not None:
        is_task = s.dataset in TASKS
        source = f'of {s.dataset}_task' if is_task else f'inside data/{s.dataset}/meta.pkl'
        print(f"found vocab_size = {meta['vocab_size']} ({source})")
    if s.init_from == 'scratch':
        print('Initializing a new model from scratch')
        if meta is None:
            print('defaulting to vocab_size of GPT-2 to 50304 (50257 rounded up for efficiency)')
        config = s.config(50304 if meta is None else meta['vocab_size'])
        with torch.device(new_on):
            return GPT(config), False, n_tokens
    if saved:
        origin = checkpoint_in(s.out_dir, s.resume_from)
        print(f"Resuming training from {s.out_dir if s.resume_from == 'ckpt.pt' else origin}")
        old = config_of(saved, origin, dropout=s.dropout)
    else:
        origin = s.init_from
        print(f'Initializing from OpenAI GPT-2 weights: {origin}')
        model = GPT.from_pretrained(origin, dict(dropout=s.dropout))
        old = model.config

    config = trained_config(s, old, meta, origin, tokens, saved.get('tokens', '') if saved else '')
    n_tokens = count_tokens(s, config.block_size)
    changes = differences(old, config)
    for change in changes:
        print(change)
    if saved:
        check_weights(old, saved, origin)
    elif changes:
        saved = {'model': model.state_dict()}
    else:
        return model, False, n_tokens
    adapt(saved, old, config, origin)
    model = GPT(config)
    load_weights(model, saved, origin)
    return model, bool(changes), n_tokens


def trained_config(s, old, meta, origin, tokens: str, trained_tokens: str):
    """Return the config `old` of a trained model with the given settings applied."""
    config = adapted_config(old, wishes(s), s.asked)
    vocab_size = 50257 if meta is None else meta['vocab_size']
    if vocab_size > config.vocab_size or trained_tokens not in ('', tokens):
        raise UserError(f'dataset {s.dataset!r} has {vocab_size} tokens that are not those of '
                        f'{origin} (it has {config.vocab_size}): go on with the data set it '
                        'was trained on, prepared as it was')
    if s.init_from != 'resume' and meta is not None:
        print(f"Note: dataset {s.dataset!r} has an alphabet of its own, which GPT-2's weights "
              'know nothing of')
    keep_trained(s, config)
    return config


def move_to_device(model, s, ranks, dtype: torch.dtype, sharded: bool) -> None:
    """Move the model to its device, or shard it, with recomputation and kernels as set."""
    if not sharded:
        model.to(ranks.device)
    set_recompute(model, s.recompute)
    model.loss_fn = linear_cross_entropy if s.chunked_loss else None
    model.attention_backend = s.attention_backend
    if sharded:
        fsdp.shard(model, ranks, dtype, s.compile)
    print(describe_attention(model, dtype, model.config.dropout))
    if wanted(s.dtype, s.compile, ranks.device):
        speed_up(model)
        matmuls = ', matmuls in bfloat16' if dtype == torch.bfloat16 else ''
        unknown = unknown_field(model.config, 'fast')
        attention = f'attention in torch, for {unknown};' if unknown else 'attention,'
        print(f'training on a CPU: {attention} QK-norm, GELU and loss in C++{matmuls} '
              "(dtype='float32' uses torch's)")
    print(f'number of parameters: {model.get_num_params() / 1e6:.2f}M')
