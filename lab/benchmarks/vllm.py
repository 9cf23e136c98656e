"""--against=vllm, modes serve and prefill: our engine and vLLM on a CPU with one exported model.

vLLM uses its default, compiled bfloat16. prefill: time to the first token of a new prompt (cold),
of the same prompt followed by `message` more tokens (again), and of the first prompt with its last
2% replaced, followed by `message` more tokens (edited). Both have a prefix cache.
"""
import os
import tempfile
from pathlib import Path

import torch

from common.errors import UserError
from interop.export import hf_model
from lab.benchmarks import clock, serve, setting
from model import GPT
from training.device import pick_device

DTYPE = 'bfloat16'
PREFIXES = 2 ** 30  # bytes of our engine's prefix cache


def through_vllm(vllm, folder: str, rows: int, max_seq_len: int, lengths):
    """Return a function of prompts that serves them with the model in `folder`."""
    llm = vllm.LLM(model=folder, skip_tokenizer_init=True, dtype=DTYPE, max_model_len=max_seq_len,
                   max_num_seqs=rows)
    params = [vllm.SamplingParams(temperature=0, max_tokens=n, detokenize=False, ignore_eos=True)
              for n in lengths]

    def generate(prompts) -> serve.Served:
        start = clock.now()
        answers = llm.generate([{'prompt_token_ids': ids} for ids in prompts], params,
                               use_tqdm=False)
        seconds = clock.now() - start
        return serve.Served(seconds, [], [list(each.outputs[0].token_ids) for each in answers], 0)
    return generate


def imported():
    """Import the package vllm. UserError: if it is not installed."""
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


def run(s, data_root: Path) -> dict:
    """The document with all cells."""
    lengths = serve.output_lengths(s) if s.mode == 'serve' else [1]
    further = max(lengths) if s.mode == 'serve' else s.message + 1
    shapes, config = setting.begin(s, data_root, prefill_chunk=0, message=1)
    if pick_device(s.device).type != 'cpu':
        raise UserError(f"device={s.device!r}: against='vllm' needs --device=cpu")
    longest = max(shapes)[0] + further
    config.block_size = max(config.block_size, longest)  # vLLM's limit
    vllm, model = imported(), GPT(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        hf_model(model, torch.bfloat16).save_pretrained(folder)
        theirs = through_vllm(vllm, folder, max(rows for _, rows in shapes), longest, lengths)
        model = setting.prepared(model, s)
        cells = served if s.mode == 'serve' else first_tokens
        return setting.facts(s, {'ours': model}) | {
            'vllm': vllm.__version__, 'vllm_dtype': DTYPE, 'message': s.message,
            'requests': len(lengths), 'output_lengths': lengths,
            'cells': [cell for context, rows in shapes
                      for cell in cells(model, theirs, lengths, context, rows, s)]}


def served(model, theirs, lengths, context: int, rows: int, s) -> list[dict]:
    """The cell of mode serve."""
    _, found = serve.rounds(model, {'vllm': theirs}, lengths, context, rows, s)
    return [serve.measure(found, sum(lengths)) | {'context': context, 'rows': rows}]


def first_tokens(model, theirs, lengths, context: int, rows: int, s) -> list[dict]:
    """A cell for each kind of prompt. Each engine gets the prompts of a round in this order."""
    kept = context - context // 50
    ours = serve.through_engine(model, rows, context + s.message + 1, lengths, s,
                                prefix_budget=PREFIXES)
    rounds = []
    for _ in range(s.repeats + 1):
        whole, further, other = (setting.random_tokens(model, 1, n)[0].tolist()
                                 for n in (context, s.message, context - kept + s.message))
        rounds.append({'cold': whole, 'again': whole + further, 'edited': whole[:kept] + other})

    def each_kind(side):
        return lambda prompts: {kind: side([prompt]) for kind, prompt in prompts.items()}
    found = clock.alternate({'ours': each_kind(ours), 'vllm': each_kind(theirs)}, s.repeats,
                            f'prompts of {context}', rounds)
    return [serve.measure({name: [each[kind] for each in runs] for name, runs in found.items()},
                          context) | {'context': context, 'prompt': kind} for kind in rounds[0]]
