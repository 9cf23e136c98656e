"""The batching engine's sampler: greedy, temperature, top-k, top-p, min-p, repetition penalty.

Random numbers depend only on (seed, index of the token), so neither the rest of the batch nor an
interruption changes what is sampled for a request.

B rows, V tokens in the vocabulary, R rows in a group, n candidates per row.
"""
import math
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from engine.requests.params import TokenLogprob, sample_seed
from engine.requests.request import Request
from generate import Sampler, kth_largest
from kv.cache import on_device


def is_on_cpu(x: torch.Tensor) -> bool:
    return x.device.type == 'cpu'


class TopPSampler(Sampler):
    """`generate.Sampler` with top-p; see `lowest_kept`."""

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
                 generators=None):
        super().__init__(temperature, top_k, generators)
        self.top_p = top_p

    def lowest(self, logits):
        return lowest_kept(logits, self.top_k, self.top_p)


def lowest_kept(logits, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """(B, V) logits after temperature -> (B, 1): tokens with at least this logit may be sampled.

    top_k  the k most likely tokens; 0 = all
    top_p  of these, the fewest whose probabilities sum to at least top_p (Holtzman et al. 2019)
    min_p  of these, those at least min_p times as likely as the top token (Nguyen et al. 2024)

    Tokens that tie with the least likely one kept are also kept, as in nanoGPT's top-k. (Top-p in
    Hugging Face and vLLM breaks ties by sort order.)
    """
    on_cpu, lowest = is_on_cpu(logits), kth_largest(logits, top_k)
    if top_p < 1:
        ordered = torch.from_numpy(np.sort(logits.numpy())) if on_cpu else logits.sort().values
        probs = ordered.masked_fill(ordered < lowest, -torch.inf) if top_k else ordered
        n_dropped = (probs.softmax(-1).cumsum_(-1) <= 1 - top_p).sum(-1, keepdim=True)
        lowest = ordered.gather(-1, n_dropped.clamp(max=logits.size(-1) - 1))
    if min_p > 0:
        lowest = torch.maximum(lowest, logits.amax(-1, keepdim=True) + math.log(min_p))
    return lowest


def sample_generators(seed: int, count: int, device: torch.device) -> list[torch.Generator]:
    """Make generators for `generate.Sampler`, the k-th seeded with `sample_seed(seed, k)`. Sample 0
    equals nanoGPT's: on CPU its generator copies the current state of the global RNG."""
    generators = [torch.Generator(device).manual_seed(sample_seed(seed, k)) for k in range(count)]
    if device.type == 'cpu':
        generators[0].set_state(torch.get_rng_state())
    return generators


class Drawn(NamedTuple):
    """Result of `sample_rows`."""
    # (B,) int64, on the logits' device; -1 where logits include NaN or +inf, or are all -inf
    tokens: torch.Tensor
    logprobs: list[TokenLogprob | None]  # one per row; None if not requested, or no token


@torch.no_grad()
def sample_rows(logits: torch.Tensor, requests: list[Request],
                at: list[int] | None = None) -> Drawn:
    """Sample the next token of each request, and change none of them.
    at: the row of each request in `logits`, if those have more rows.

    Applied in this order, as in Hugging Face's `generate`:
      repetition penalty  logits of previous tokens are divided by it if positive, or multiplied
                          (CTRL, Keskar et al. 2019)
      temperature         divides the logits; 0 picks the most likely, the lowest id among ties
      top-k, top-p, min-p see `lowest_kept`

    A token is sampled by applying the inverse cumulative distribution, over ids in order and in
    float64, to one uniform number: each row's result depends only on its own logits and
    request. On CPU this is bit-exact; on other devices a different order of summation may
    shift a boundary by 1e-16. There, only log-probabilities wait for the device.

    logits: (B, V), of any floating dtype.
    Raises ValueError unless there are B requests, IndexError if a previous token is >= V.
    """
    if at is not None and len(at) < len(logits):
        logits = logits[on_device(at, logits.device)]
    if logits.dim() != 2 or logits.size(0) != len(requests):
        raise ValueError(f'logits of shape {tuple(logits.shape)} for {len(requests)} rows')
    raw = logits.cpu() if logits.device.type == 'mps' else logits  # MPS has no float64
    raw = _at_least_float32(raw.detach())
    scores = _penalised(raw, requests)
    on_cpu, tokens = is_on_cpu(scores), most_likely(scores)
    # argmax picks a NaN if there is one, otherwise +inf
    good = scores.gather(1, tokens[:, None]).isfinite()                        # (B, 1)
    if not (on_cpu and good.all()):
        scores = scores.masked_fill(~good, 0.0)
    groups = {}
    for b, request in enumerate(requests):
        p = request.params
        if p.temperature > 0:
            # on CPU it is faster to sort one row at a time, which fits into the cache
            alone = b if on_cpu and p.top_p < 1 and not p.top_k else None
            groups.setdefault((p.top_k, p.top_p, p.min_p, alone), []).append(b)
    for (*restriction, _), group in groups.items():
        if len(group) == len(requests):
            tokens = _draw(scores, requests, *restriction)
        else:
            index = on_device(group, scores.device)
            tokens[index] = _draw(scores[index], [requests[b] for b in group], *restriction)
    tokens = tokens.where(good[:, 0], -1)
    logprobs = [_logprobs(raw[b], int(tokens[b]), request.params.logprobs)
                if request.params.logprobs >= 0 else None for b, request in enumerate(requests)]
    if tokens.device != logits.device:
        tokens = tokens.to(logits.device)
    return Drawn(tokens, logprobs)


def most_likely(scores: torch.Tensor) -> torch.Tensor:
    """(B, V) -> (B,). NumPy's argmax is ten times faster on a CPU."""
    if not is_on_cpu(scores):
        return scores.argmax(-1)
    return torch.from_numpy(_at_least_float32(scores).numpy().argmax(-1))


def draw_plain(logits, temperature=None, u=None) -> torch.Tensor:
    """What `sample_rows` gives for `plain` requests, in operations that a CUDA graph captures.

    logits: (B, V). temperature, u: (B, 1) float64, of each request; its `uniform()`, unless it is
    greedy. None = all are. Returns (B,) int64.
    """
    scores = _at_least_float32(logits)
    tokens = scores.argmax(-1, keepdim=True)
    good = scores.gather(1, tokens).isfinite()
    if temperature is not None:
        positive = temperature > 0
        scaled = _scaled(scores.masked_fill(~good, 0.0), temperature.where(positive, 1.0))
        tokens = _inverse_cdf(scaled.exp_(), u).where(positive, tokens)
    return tokens.where(good, -1)[:, 0]


def _at_least_float32(x):
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _penalised(scores, requests):
    """(B, V) scores after the repetition penalty; `scores` itself if no request has one."""
    penalised = [b for b, request in enumerate(requests) if request.seen]
    if not penalised:
        return scores
    ids = [np.fromiter(requests[b].seen, np.int64) for b in penalised]
    counts = [len(seen) for seen in ids]
    at = (on_device(np.repeat(penalised, counts), scores.device),
          on_device(np.concatenate(ids), scores.device))
    penalty = np.repeat([requests[b].params.repetition_penalty for b in penalised], counts)
    penalty = on_device(penalty, scores.device, torch.float64)
    seen = scores[at].double()
    scores = scores.clone()
    scores[at] = torch.where(seen > 0, seen / penalty, seen * penalty).to(scores.dtype)
    return scores


def _draw(scores, requests, top_k, top_p, min_p):
    """(R, V) scores of R requests that share these restrictions -> (R,) token ids."""
    weights, ids = _weights(scores, requests, top_k, top_p, min_p)
    u = on_device([[request.uniform()] for request in requests], scores.device, torch.float64)
    drawn = _inverse_cdf(weights, u)
    return (drawn if ids is None else ids.gather(1, drawn))[:, 0]


def _inverse_cdf(weights, u):
    """(R, n) weights, overwritten, and (R, 1) uniform numbers -> (R, 1) places in a row."""
    cumulative = weights.cumsum_(-1)
    # u <= 1 - 2**-53: u * total rounds to less than the total, so the token's weight is not 0
    return torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)


def _scaled(scores, temperature):
    """(R, n) float64 scores relative to the largest, divided by temperature (R, 1)."""
    scaled = scores.to(torch.float64, copy=True).sub_(scores.amax(-1, keepdim=True))
    return scaled.div_(temperature)


def _weights(scores, requests, top_k, top_p, min_p):
    """(R, n) float64 probabilities relative to the most likely token's, 0 if not kept; and their
    ids (R, n) in ascending order, or None for all V."""
    ids = None
    if 0 < top_k < scores.size(1):
        scores, ids = _candidates(scores, lowest_kept(scores, top_k))
    temperatures = [[request.params.temperature] for request in requests]
    scaled = _scaled(scores, on_device(temperatures, scores.device, torch.float64))
    if top_p < 1 or min_p > 0:
        scaled, kept = _candidates(scaled, lowest_kept(scaled, 0, top_p, min_p))
        ids = kept if ids is None else ids.gather(1, kept)
    return scaled.exp_(), ids


def _candidates(scores, lowest):
    """The scores of at least `lowest` (R, 1) and their ids in ascending order: both (R, n),
    padded with -inf and 0. On other devices than a CPU, where their number is not known without
    waiting: all scores, with -inf in place of lower ones, and None."""
    if not is_on_cpu(scores):
        return scores.masked_fill(scores < lowest, -torch.inf), None
    rows = zip(scores.numpy(), lowest.numpy())  # NumPy is five times faster
    ids = [torch.from_numpy(np.flatnonzero(row >= least)) for row, least in rows]
    ids = pad_sequence(ids, batch_first=True, padding_value=-1)
    padding, ids = ids < 0, ids.clamp(min=0)
    return scores.gather(1, ids).masked_fill_(padding, -torch.inf), ids


def _logprobs(logits, token, n_top) -> TokenLogprob | None:
    """The TokenLogprob of one row, from the model's unmodified logits; None for token -1."""
    if token < 0:
        return None
    logits = logits.double()
    normaliser = float(logits.logsumexp(-1))
    values, ids = logits.topk(min(n_top, len(logits)))
    pairs = zip(ids.tolist(), values.tolist())
    top = tuple((i, v - normaliser) for i, v in pairs if v > -math.inf)
    return TokenLogprob(token, float(logits[token]) - normaliser, top)
