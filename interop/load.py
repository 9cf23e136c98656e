"""Load a model to run it, from a checkpoint of train.py, GPT-2's weights or an exported folder, or
with random weights, together with its tokenizer."""
import difflib
from dataclasses import replace
from pathlib import Path

import torch

from common.errors import UserError, shown
from common.terminal import visible
from data.datasets import DATA_ROOT, available_datasets, by_hand, ensure_dataset
from data.tokenfiles import meta_problem, read_meta, used_keys
from data.tokenizer import load_tokenizer
from engine import native
from engine.weights.linear import speed_up_on_cpu
from engine.weights.quantize import compile_for_decode, quantize_weights
from interop.choose import at_plan, plan_of
from interop.huggingface import noted_source
from interop.tokenizer_files import tokenizer_in
from model import GPT
from training.checkpoint.adapt import keep_trained
from training.checkpoint.convert import MEMORY
from training.checkpoint.file import tokens_id
from training.checkpoint.manager import checkpoint_in, load_to_resume
from training.device import pick_device, pick_dtype
from training.elastic.plans import Plan
from training.checkpoint.load_model import model_of


def load(s, size=None, cache=Plan.nbytes, engine=False):
    """Return the model given by the settings of sample.py, chat.py or serve.py, ready to run, its
    tokenizer, and the name of the data set that it was trained on ('' = unknown).

    size: (config, tokenizer) -> the (rows, tokens) of the cache that the program will allocate, of
    `cache(plan, rows, tokens, kv_dtype)` bytes: an elastic model runs at its best plan for which
    that is within `s.kv_budget`. None = at the largest. engine: see `plan_of`.

    The global random generator is seeded just before the model is built and used for nothing else:
    sample 0 continues from that state, as in nanoGPT. UserError: if the device, model or data set
    does not exist, or they do not match."""
    device, path = pick_device(s.device), checkpoint_in(s.out_dir, s.resume_from)
    checkpoint = load_to_resume(path) if s.init_from == 'resume' else None
    torch.manual_seed(s.seed)
    dataset, known, stored, tokenizer = s.dataset, '', None, None
    if checkpoint is not None:
        dataset, known = checkpoint['config'].get('dataset', ''), checkpoint.get('tokens', '')
        stored = checkpoint.get('meta')
        model = model_of(checkpoint, path, dropout=0.0)
    elif s.init_from == 'random':
        meta = read_meta(known_dataset(dataset))
        model = GPT(s.config(meta['vocab_size'] if meta else 50304))
    else:
        model = GPT.from_pretrained(s.init_from, dict(dropout=0.0))
        if 'dataset' not in s.given:
            dataset, known = noted_source(s.init_from)
            tokenizer = tokenizer_in(Path(s.init_from), model.config.vocab_size)
    if tokenizer is None:
        tokenizer = tokenizer_of(dataset, model.config.vocab_size, known, DATA_ROOT, stored)
    dtype = pick_dtype(s.dtype, device)
    base = model
    if size:
        stored_in = str(dtype).removeprefix('torch.') if s.kv_dtype == 'auto' else s.kv_dtype
        plan = plan_of(checkpoint or {}, base.config, s, stored_in, lambda plan: cache(
            plan, *size(plan.config, tokenizer), stored_in), engine)
        model = at_plan(base, plan)
    if s.init_from != 'random':
        chosen = MEMORY if model is not base else ()
        given = {name: source for name, source in s.given.items() if name not in chosen}
        keep_trained(replace(s, given=given), base.config)
    native.use(s.native)
    model = model.eval().to(device, dtype)
    quantize_weights(model, s.weight_dtype, s.int4_group)
    speed_up_on_cpu(model)
    if s.compile:
        compile_for_decode(model)
    return model, tokenizer, '' if s.init_from == 'random' else dataset


def with_newest_run(s):
    """The settings, with the newest run as out_dir if none was given and the default has none."""
    there = Path(s.out_dir, s.resume_from).exists()
    if s.init_from != 'resume' or 'out_dir' in s.given or there:
        return s
    found = sorted(Path().glob(f'out*/{s.resume_from}'), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(f'there is no {s.out_dir}/{s.resume_from}, and no out*/{s.resume_from} in '
                        'this folder: train a model first, as python train.py '
                        'config/train_mqa_local.py does, or name its folder')
    *others, newest = (str(path.parent) for path in found)
    others = f" (others: {', '.join(reversed(others))})" if others else ''
    print(visible(f'Using {newest}, the newest run here{others}'))
    return replace(s, out_dir=newest)


def known_dataset(name: str) -> Path:
    """Return a data set's folder, prepared if needed. One that does not exist, or is too large to
    prepare only for its alphabet, means GPT-2 BPE, unless the name looks misspelled."""
    folder = DATA_ROOT / name
    here = (folder / 'meta.pkl').is_file() or by_hand(folder / 'prepare.py')
    if not here and difflib.get_close_matches(name, available_datasets(DATA_ROOT), n=1):
        ensure_dataset(name, DATA_ROOT)
    return folder


def tokenizer_of(dataset: str, vocab_size: int, known: str, data_root: Path, stored=None):
    """The tokenizer of the data set that the model was trained on: its characters, or GPT-2 BPE.
    known: the `tokens_id` at that time; '' for checkpoints without one (nanoGPT's). stored: the
    metadata in the checkpoint, used if the data set is missing or has other tokens by now."""
    if dataset in ('.', '..') or set(dataset) & set('/\\\0'):
        raise UserError(f'dataset={shown(dataset)} is not the name of a folder under data/')
    meta, source = read_meta(data_root / dataset) if dataset else None, f'data/{dataset}/meta.pkl'
    if stored is not None and known != tokens_id(meta):
        if problem := meta_problem(stored):
            raise UserError(f'the checkpoint has an invalid meta: {problem}')
        meta, source = used_keys(stored), 'the checkpoint'
    if meta is None and vocab_size < 50257:
        raise UserError(f'the model has {vocab_size} tokens, but data/{dataset}/meta.pkl, which '
                        f'says what they are, is missing: run python data/{dataset}/prepare.py')
    if meta is not None and 'stoi' not in meta and vocab_size < 50257:
        raise UserError(f'the model has {vocab_size} tokens, but {source} does not say what they '
                        'are (stoi, itos)')
    print('No meta.pkl found, assuming GPT-2 encodings...' if meta is None
          else visible(f'Loading meta from {source}...'))
    tokenizer = load_tokenizer(meta)
    if tokenizer.vocab_size > vocab_size or known not in ('', tokens_id(meta)):
        raise UserError(f'data/{dataset} has {tokenizer.vocab_size} tokens that are not those of '
                        f'the model (it has {vocab_size}): the data set was prepared again since '
                        'the model was trained; prepare it as it was')
    return tokenizer
