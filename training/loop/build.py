"""The model of a run: a new one, a checkpoint's, or OpenAI's GPT-2; and what it trains with."""
from pathlib import Path

import torch

from common.errors import UserError
from common.gpt_config import GPTConfig, unknown_field
from common.settings import COMMAND_LINE
from model import GPT
from training.checkpoint.adapt import adapt, adapted_config, differences, keep_trained, wishes
from training.checkpoint.file import config_of, load_checkpoint, load_weights
from training.checkpoint.load_model import check_weights, model_of
from training.elastic.plans import of_checkpoint, plans_of, table
from training.elastic.step import Elastic
from training.memory.recompute import set_recompute
from training.native.loading import wanted
from training.native.modules import speed_up
from training.parallel import fsdp
from training.step.kernels import describe_attention
from training.step.loss import linear_cross_entropy


def print_tokens(s, block_size: int) -> None:
    n = s.gradient_accumulation_steps * s.batch_size * block_size
    print(f'tokens per iteration will be: {n:,}')


def check_tokens(data, config: GPTConfig, origin, trained: str) -> None:
    """Raise UserError if the data set's tokens are not the model's. trained: the `tokens_id` of the
    data that it was trained on; '' = not known."""
    vocab_size = data.vocab_size or 50257
    if vocab_size > config.vocab_size or trained not in ('', data.tokens):
        raise UserError(f'dataset {data.name!r} has {vocab_size} tokens that are not those of '
                        f'{origin} (it has {config.vocab_size}): go on with the data set it '
                        'was trained on, prepared as it was')


def build_model(s, data, saved: dict | None, origin: Path, new_on: str) -> tuple[GPT, bool]:
    """Return the initial model, and whether settings differ from those it was trained with.

    data: the run's `DataSet`. saved: the checkpoint to resume, read from `origin`, which is adapted
    in place; None = another model. new_on: the device of a new model ('meta': no weights).
    """
    if s.init_from == 'scratch':
        print_tokens(s, s.block_size)
    if data.vocab_size:
        print(f'found vocab_size = {data.vocab_size} ({data.source})')
    if s.init_from == 'scratch':
        print('Initializing a new model from scratch')
        if not data.vocab_size:
            print('defaulting to vocab_size of GPT-2 to 50304 (50257 rounded up for efficiency)')
        with torch.device(new_on):
            return GPT(s.config(data.vocab_size or 50304)), False
    if saved:
        print(f"Resuming training from {s.out_dir if s.resume_from == 'ckpt.pt' else origin}")
        old = config_of(saved, origin, dropout=s.dropout)
    else:
        origin = s.init_from
        print(f'Initializing from OpenAI GPT-2 weights: {origin}')
        model = GPT.from_pretrained(origin, dict(dropout=s.dropout))
        old = model.config

    config = adapted_config(old, wishes(s), s.asked)
    check_tokens(data, config, origin, saved.get('tokens', '') if saved else '')
    if not saved and data.vocab_size:
        print(f"Note: dataset {data.name!r} has an alphabet of its own, which GPT-2's weights "
              'know nothing of')
    keep_trained(s, config)
    print_tokens(s, config.block_size)
    changes = differences(old, config)
    for change in changes:
        print(change)
    if saved:
        check_weights(old, saved, origin)
    elif changes:
        saved = {'model': model.state_dict()}
    else:
        return model, False
    adapt(saved, old, config, origin)
    model = GPT(config)
    load_weights(model, saved, origin)
    return model, bool(changes)


def elastic_of(model: GPT, s, data, saved: dict | None, changed: bool) -> Elastic | None:
    """The model under the settings' plans, or, unless the command line has others, under those of
    the checkpoint that is resumed, whose losses hold unless the model has `changed`; None without
    plans and teacher. UserError: if it cannot have them."""
    kept = (saved or {}).get('plans') if s.given.get('plans') != COMMAND_LINE else None
    plans, losses = (of_checkpoint(kept, model.config) if kept
                     else (plans_of(s.plans, model.config), []))
    if not 1 <= s.plan_passes <= len(plans):
        raise UserError(f'plan_passes={s.plan_passes}: must be from 1 to the number of plans, '
                        f'{len(plans)}')
    if len(plans) == 1 and not s.teacher:
        return None
    if s.parallel == 'fsdp':
        raise UserError("plans and teachers do not go with parallel='fsdp', whose weights are in "
                        'shards')
    if s.memory_report:
        print('Note: the memory report is of a step of the base alone, without plans and teacher')
    if s.batch_size < len(plans):
        raise UserError(f'batch_size={s.batch_size} is less than the {len(plans)} plans (with the '
                        "model's own), each of which takes a part of every batch")
    if len(plans) > 1:
        print('plans, in bytes of one sequence in bfloat16:', *table(plans), sep='\n  ')
    return Elastic(model, plans, [] if changed else losses, teacher_of(s, data, model.config),
                   s.plan_passes)


def teacher_of(s, data, config: GPTConfig) -> GPT | None:
    """The model named by `s.teacher`: of a run, a checkpoint, or GPT-2. It uses no random numbers.
    UserError: if there is none, or its tokens or its context are not those of `config`."""
    if not s.teacher:
        return None
    path = Path(s.teacher)
    path = path / 'ckpt.pt' if (path / 'ckpt.pt').is_file() else path
    if not (path.is_file() if path.suffix == '.pt' else
            (path / 'config.json').is_file() or s.teacher.startswith('gpt2')):
        raise UserError(f'teacher={s.teacher!r} is no run, no checkpoint and not GPT-2')
    saved = load_checkpoint(path) if path.suffix == '.pt' else {}
    with torch.random.fork_rng(devices=[]):
        model = (model_of(saved, path, dropout=0.0) if saved else
                 GPT.from_pretrained(s.teacher, dict(dropout=0.0)))
    of = model.config
    if of.vocab_size != config.vocab_size or of.block_size < config.block_size:
        raise UserError(f'teacher={s.teacher!r} has {of.vocab_size} tokens and a context of '
                        f'{of.block_size}, the model {config.vocab_size} and {config.block_size}')
    check_tokens(data, of, f'the teacher {s.teacher}', saved.get('tokens', ''))
    return model


def move_to_device(model, elastic, s, ranks, dtype: torch.dtype, sharded: bool) -> None:
    """Move the model to its device, or shard it, with recomputation and kernels as set, also for
    its plans."""
    if not sharded:
        model.to(ranks.device)
    for teacher in elastic.teachers if elastic else ():
        teacher.to(ranks.device)
    for each in elastic.models if elastic else [model]:
        set_recompute(each, s.recompute)
        each.loss_fn = linear_cross_entropy if s.chunked_loss else None
        each.attention_backend = s.attention_backend
    if sharded:
        fsdp.shard(model, ranks, dtype, s.compile)
    for each in elastic.models[1:] if elastic else ():
        describe_attention(each, dtype, model.config.dropout)
    print(describe_attention(model, dtype, model.config.dropout))
    if wanted(s.dtype, s.compile, ranks.device):
        for each in elastic.all_models if elastic else [model]:
            speed_up(each)
        matmuls = ', matmuls in bfloat16' if dtype == torch.bfloat16 else ''
        unknown = unknown_field(model.config, 'fast')
        attention = f'attention in torch, for {unknown};' if unknown else 'attention,'
        print(f'training on a CPU: {attention} QK-norm, GELU and loss in C++{matmuls} '
              "(dtype='float32' uses torch's)")
    print(f'number of parameters: {model.get_num_params() / 1e6:.2f}M')
