"""--against=vllm, modes serve and prefill: our engine and vLLM on a CPU with one exported model.

vLLM uses its default, compiled bfloat16. prefill: time to the first token of a new prompt (cold),
of the same prompt followed by `message` more tokens (again), and of the first prompt with its last
2% replaced, followed by `message` more tokens (edited). Both have a prefix cache.
"""
import os
import tempfile
from pathlib import Path

import torch

from config.errors import UserError
from interop.export import hf_model
from lab.benchmarks import clock, setting
from model import GPT
from training.device import pick_device

DTYPE = 'bfloat16'
PREFIXES = 2 ** 30  # bytes of our engine's prefix cache
PROMPTS = 'cold', 'again', 'edited'


def their_generate(vllm, folder: str, rows: int, max_seq_len: int):
    """vLLM with the model in `folder`, as a function of prompts and their numbers of new tokens."""
    llm = vllm.LLM(model=folder, skip_tokenizer_init=True, dtype=DTYPE, max_model_len=max_seq_len,
                   max_num_seqs=rows)

    def generate(prompts, lengths) -> list[list[int]]:
        params = [vllm.SamplingParams(temperature=0, max_tokens=n, detokenize=False,
                                      ignore_eos=True) for n in lengths]
        answers = llm.generate([{'prompt_token_ids': ids} for ids in prompts], params,
                               use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]
    return generate


def our_generate(engine):
    return lambda prompts, lengths: [
        done.tokens for done in setting.greedy(engine, prompts, lengths)]


def imported():
    """Import the package vllm.

    Raises:
        UserError: if it is not installed.
    """
    # this process has threads, after which a fork may deadlock
    os.environ.setdefault('VLLM_WORKER_MULTIPROC_METHOD', 'spawn')
    os.environ.setdefault('VLLM_LOGGING_LEVEL', 'ERROR')
    os.environ.setdefault('VLLM_CPU_KVCACHE_SPACE', '4')  # GiB
    try:
        import vllm
    except ImportError as e:
        raise UserError("against='vllm' needs vLLM: lab/scripts/vllm_env.sh makes an environment "
                        'with it, .venv-vllm') from e
    return vllm


def run(s, data_root: Path, lengths: list[int] = ()) -> dict:
    """The document with all cells. lengths: the lengths of the answers in mode serve."""
    further = max(lengths) if lengths else s.message + 1
    shapes, config = setting.begin(s, data_root, further, prefill_chunk=0, message=1)
    most_rows = max(rows for _, rows in shapes)
    if s.mode == 'prefill' and most_rows > 1:
        raise UserError(f"batch_sizes={s.batch_sizes!r}: against='vllm' prompts come one by one")
    if pick_device(s.device).type != 'cpu':
        raise UserError(f"device={s.device!r}: against='vllm' both run on the CPU: give "
                        '--device=cpu')
    longest = max(shapes)[0] + further
    config.block_size = max(config.block_size, longest)  # vLLM's limit
    vllm, model = imported(), GPT(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        hf_model(model, torch.bfloat16).save_pretrained(folder)
        theirs = their_generate(vllm, folder, most_rows, longest)
        model = setting.prepared(model, s)
        document = setting.facts(s, {'ours': model}) | {
            'vllm': vllm.__version__, 'vllm_dtype': DTYPE}
        if lengths:
            cells = [served(model, theirs, lengths, context, rows, s) for context, rows in shapes]
            return document | {'requests': len(lengths), 'output_lengths': list(lengths),
                               'cells': cells}
        engine = setting.make_engine(model, 1, longest, s, prefix_budget=PREFIXES)
        cells = [cell for context, _ in shapes
                 for cell in first_tokens(our_generate(engine), theirs, model, context, s)]
        return document | {'message': s.message, 'cells': cells}


def served(model, theirs, lengths, context: int, rows: int, s) -> dict:
    """A cell of mode serve. Each round uses new prompts, so that no prefix is cached."""
    rounds = [setting.random_tokens(model, len(lengths), context).tolist()
              for _ in range(s.repeats + 1)]
    engine = setting.make_engine(model, rows, context + max(lengths), s)
    sides = {'ours': our_generate(engine), 'vllm': theirs}
    makers = {name: timed(side, rounds, lengths) for name, side in sides.items()}
    title = f'{len(lengths)} requests, {rows} rows, prompts of {context}'
    found = clock.alternate(makers, s.repeats, title)
    return cell(found, sum(lengths)) | {'context': context, 'rows': rows}


def first_tokens(ours, theirs, model, context: int, s) -> list[dict]:
    """A cell for each kind of prompt. Each engine gets the prompts of a round in this order."""
    kept = context - context // 50
    rounds = {name: [] for name in PROMPTS}
    for _ in range(s.repeats + 1):
        whole, further, other = (setting.random_tokens(model, 1, n)[0].tolist()
                                 for n in (context, s.message, context - kept + s.message))
        for name, prompt in zip(PROMPTS, (whole, whole + further, whole[:kept] + other)):
            rounds[name].append([prompt])
    sides = {'ours': ours, 'vllm': theirs}
    makers = {(prompt, name): timed(side, rounds[prompt], [1])
              for name, side in sides.items() for prompt in PROMPTS}
    found = clock.alternate(makers, s.repeats, f'prompts of {context}')
    return [cell({name: found[prompt, name] for name in sides}, context)
            | {'context': context, 'prompt': prompt} for prompt in PROMPTS]


def timed(side, rounds, lengths):
    """Callable that runs the next of `rounds` (prompts): (seconds, tokens of each request)."""
    waiting = iter(rounds)

    def run():
        prompts, start = next(waiting), clock.now()
        tokens = side(prompts, lengths)
        return clock.now() - start, tokens
    return run


def cell(found, tokens: int) -> dict:
    """Metrics of both, for `tokens` tokens per round, and the equal texts in the last round."""
    seconds = {name: [each for each, _ in runs] for name, runs in found.items()}
    pairs = list(zip(*(runs[-1][1] for runs in found.values()), strict=True))
    return {'sides': {name: {'seconds': clock.summary(each),
                             'tokens_per_second': clock.summary(tokens / x for x in each)}
                      for name, each in seconds.items()},
            'rows_equal': sum(a == b for a, b in pairs), 'requests': len(pairs),
            'ratios': {'tokens_per_second': clock.ratios(seconds)}}
