"""The tasks that need memory. Recall: the accuracy at each distance. Looking up facts by content:
how many facts a row recalls, and what a fact costs in KV bytes."""
import itertools

import numpy as np
import torch

from training.evaluate import through_cache

ROWS = 256          # sequences per number of facts, or per distance
# not used by training
RECALL_SEED, SEED = 10_000, 20_000
BATCH = 32
RECALLED = 0.95     # share of right answers from which facts count as recalled


def recall(model, kv_dtype: str, task, rows: int = ROWS) -> dict:
    """Greedy accuracy through the cache, by distance."""
    accuracy = {distance: share_right(model, kv_dtype, task, distance, rows, RECALL_SEED)
                for distance in task.distances}
    return {'accuracy': accuracy, 'rows': rows, 'local_reach': model.plan.local_reach}


def lookup(model, kv_dtype: str, task, rows: int = ROWS) -> dict:
    """Greedy accuracy through the cache, by number of facts; the largest number of facts recalled,
    and the allocated KV bytes for each of them."""
    right = {n: share_right(model, kv_dtype, task, n, rows, SEED) for n in sorted(task.pairs)}
    facts = max(itertools.takewhile(lambda n: right[n] >= RECALLED, right), default=0)
    nbytes = model.new_cache(1, task.block_size, kv_dtype).nbytes
    return {'accuracy': right, 'rows': rows, 'facts': facts, 'kv_bytes': nbytes,
            'bytes_per_fact': nbytes / facts if facts else None,
            'gap': task.gap, 'n_values': task.n_values, 'local_reach': model.plan.local_reach}


@torch.inference_mode()
def share_right(model, kv_dtype: str, task, n: int, rows: int, seed: int) -> float:
    """The share of right answers. n: the number of facts (look-up) or the distance (recall)."""
    rng = np.random.default_rng((seed, n))
    x, y, distance = (torch.from_numpy(a).to(model.device) for a in task.batch(rng, rows, n))
    logits_of = through_cache(model, kv_dtype, task.block_size // 2, 16)
    choices = torch.cat([logits_of(some).argmax(-1) for some in x.split(BATCH)])
    return (choices == y)[distance > 0].float().mean().item()
