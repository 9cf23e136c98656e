"""The batching engine's sampler: greedy, temperature, top-k, top-p, min-p, repetition penalty.

Each row of `sample_rows` has parameters of its own, and its random numbers depend on (seed, index
of the token) alone, so that neither the batch it is in nor an interruption changes what it draws.
(nanoGPT's sampler, which draws from torch's generators, is `generate.Sampler`.)

Notation: B rows, V tokens in the vocabulary, R rows of a group, n candidates of a row.
"""
import math
from array import array
from typing import NamedTuple

import numpy as np
import torch

from engine.params import SamplingParams, TokenLogprob, sample_seed


def sample_generators(seed: int, first: int, count: int,
                      device: torch.device) -> list[torch.Generator]:
    """Generators of samples first .. first + count - 1, each seeded from (seed, k) alone.

    Sample 0 draws what nanoGPT would: its sample.py seeds the global generator, builds the model
    from it, then draws. So call this right after `torch.manual_seed(seed)` and building the model.
    """
    generators = []
    for k in range(first, first + count):
        generator = torch.Generator(device)
        if k == 0 and device.type == 'cpu':
            generator.set_state(torch.get_rng_state())
        else:
            generator.manual_seed(sample_seed(seed, k))
        generators.append(generator)
    return generators


# -- rows with parameters of their own -------------------------------------------------------------

class SampleRow:
    """What is drawn for one request, and what that depends on beside the logits.

    Args:
        params: the request's.
        tokens: prompt and what has been generated; only the repetition penalty looks at them.
        n_drawn: how many of `tokens` were generated: the index of the next token's random number. A
            request that is taken up again with what it had, `SampleRow(params, prompt + drawn,
            len(drawn))`, goes on as if never interrupted.
    """

    def __init__(self, params: SamplingParams, tokens=(), n_drawn: int = 0):
        self.params, self.n_drawn = params, n_drawn
        self.penalised = params.repetition_penalty != 1.0
        # each token once; grows by appending, so that a step costs O(1) in Python
        self.seen_ids = array('q')
        self._seen = set()
        if self.penalised:
            self._see(tokens)

    def append(self, token: int) -> None:
        """The drawn token becomes part of the text."""
        self.n_drawn += 1
        if self.penalised:
            self._see((token,))

    def _see(self, tokens):
        for token in tokens:
            if token not in self._seen:
                self._seen.add(token)
                self.seen_ids.append(token)


class Drawn(NamedTuple):
    """What `sample_rows` returns."""
    tokens: torch.Tensor                 # (B,) int64, on the logits' device; -1 for a bad row
    logprobs: list[TokenLogprob | None]  # one per row; None where not asked for, or bad
    # rows whose logits say nothing: a NaN or +inf among them, or all -inf
    bad: list[int]


@torch.no_grad()
def sample_rows(logits: torch.Tensor, rows: list[SampleRow]) -> Drawn:
    """The next token of each row; nothing of `rows` or `logits` is changed (call `row.append` with
    what is taken).

    In this order, as in Hugging Face's `generate`; a set's members are drawn in proportion to their
    probabilities:
      repetition penalty  logits of tokens seen are divided by it if above 0, else multiplied (CTRL,
                          Keskar et al. 2019)
      temperature         divides the logits; 0 takes the likeliest, of equals that of the lowest id
      top-k               the k likeliest
      top-p               of these, the fewest likeliest that together have this probability or more
      min-p               of these, tokens with at least min_p times the likeliest's probability
    Top-k and top-p keep tokens that are exactly as likely as the least likely one kept, for nothing
    tells them apart. (So does top-k in nanoGPT and Hugging Face; top-p in Hugging Face and vLLM
    cuts among equals as its sort happens to leave them. That shows with logits in bfloat16, where
    equals are common.)

    A token is drawn by one uniform number through the inverse of the cumulative distribution over
    the ids in order, in float64: every row's result is a function of its own logits and
    `SampleRow`. On CPU that holds to the bit; on other devices sums in another order may shift a
    boundary by 1e-16.

    Args:
        logits: (B, V), of any floating dtype.
        rows: B of them.
    Raises:
        ValueError: another number of rows than of logits; IndexError: a token seen that is not
            below V.
    """
    if logits.dim() != 2 or logits.size(0) != len(rows):
        raise ValueError(f'logits of shape {tuple(logits.shape)} for {len(rows)} rows')
    raw = _readable(logits)
    scores = _penalised(raw, rows)
    tokens = _argmax(scores)
    # argmax takes a NaN if there is one, else +inf
    finite = scores.gather(1, tokens[:, None]).isfinite()[:, 0].tolist()
    bad = [b for b, good in enumerate(finite) if not good]
    drawing = [b for b, good in enumerate(finite) if good and rows[b].params.temperature > 0]
    if drawing:
        seeds = [rows[b].params.seed for b in drawing]
        uniform = dict(zip(drawing, uniforms(seeds, [rows[b].n_drawn for b in drawing])))
        for group in _groups(drawing, rows, scores.size(1)):
            members = scores if len(group) == len(rows) else scores[group]
            params = [rows[b].params for b in group]
            tokens[group] = _draw(members, params, [uniform[b] for b in group])
    tokens[bad] = -1
    return Drawn(tokens.to(logits.device), _logprobs(raw, tokens, rows, bad), bad)


@torch.no_grad()
def probabilities(logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """(B, V) float64: the distributions that `sample_rows` draws from, row by row (NaN for a bad
    row)."""
    scores = _penalised(_readable(logits), rows)
    probs = torch.zeros(scores.shape, dtype=torch.float64, device=scores.device)
    for b, row in enumerate(rows):
        if not scores[b].max().isfinite():
            probs[b] = torch.nan
        elif row.params.temperature == 0:
            probs[b, _argmax(scores[b:b + 1])] = 1
        else:
            weights, ids = _restricted(scores[b:b + 1], [row.params])
            probs[b, slice(None) if ids is None else ids[0]] = weights[0] / weights.sum()
    return probs


def uniforms(seeds: list[int], positions: list[int]) -> np.ndarray:
    """Numbers in [0, 1), each a function of its seed (modulo 2**64) and position alone: (B,)
    float64.

    Philox4x64-10 (Salmon et al. 2011) turns a key and a counter into random bits without any state
    between: what `np.random.Philox(key=seed, counter=position).random_raw()` gives, at 1.5 us a
    number instead of 12.
    """
    philox = np.random.Philox(key=0)
    # a copy; with its buffer at the end, so that the next number is made from the counter
    state = philox.state
    bits = np.empty(len(seeds), np.uint64)
    for i, (seed, position) in enumerate(zip(seeds, positions)):
        state['state']['key'][0] = seed % 2 ** 64
        state['state']['counter'][0] = position
        philox.state = state
        bits[i] = philox.random_raw()
    return (bits >> np.uint64(11)) * 2.0 ** -53


def _readable(logits):
    """On a device that has float64 (MPS has not), in float32 or float64, which NumPy has too."""
    logits = logits.detach().cpu() if logits.device.type == 'mps' else logits.detach()
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _penalised(scores, rows):
    """(B, V) with the logits of tokens seen made less likely; `scores` itself where no row asks."""
    asking = [b for b, row in enumerate(rows) if row.penalised and row.seen_ids]
    if not asking:
        return scores
    ids = [np.array(rows[b].seen_ids) for b in asking]
    counts = [len(seen) for seen in ids]
    at = (torch.from_numpy(np.repeat(asking, counts)).to(scores.device),
          torch.from_numpy(np.concatenate(ids)).to(scores.device))
    penalty = np.repeat([rows[b].params.repetition_penalty for b in asking], counts)
    penalty = torch.from_numpy(penalty).to(scores.device)
    seen = scores[at].double()
    scores = scores.clone()
    scores[at] = torch.where(seen > 0, seen / penalty, seen * penalty).to(scores.dtype)
    return scores


def _groups(drawing, rows, n_vocab):
    """Rows that `_draw` takes in one go: with few candidates; all tokens, but to be sorted for
    top-p; all tokens."""
    groups = [], [], []
    for b in drawing:
        params = rows[b].params
        groups[0 if 0 < params.top_k < n_vocab else 1 if params.top_p < 1 else 2].append(b)
    return [group for group in groups if group]


def _draw(scores, params, uniform):
    """(R, V) scores, their parameters and R uniform numbers -> (R,) token ids."""
    weights, ids = _restricted(scores, params)
    cumulative = weights.cumsum_(-1)
    u = torch.from_numpy(np.array(uniform)).to(scores.device)[:, None]
    # u <= 1 - 2**-53, so u * total rounds to less than the total: a token of weight above 0 is
    # found, and no other
    drawn = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
    drawn = drawn.clamp(max=weights.size(1) - 1)
    return (drawn if ids is None else ids.gather(1, drawn))[:, 0]


def _restricted(scores, params):
    """(R, n) float64, n >= 1: probabilities relative to the likeliest token's, 0 where not kept;
    and the ids (R, n), in order, or None for all V. The rows are of one of `_groups`, without bad
    ones."""
    asked = [(p.temperature, p.top_p if p.top_p < 1 else np.inf, p.min_p) for p in params]
    temperature, top_p, min_p = torch.from_numpy(np.array(asked)).to(scores.device).T[..., None]
    ids = None
    if 0 < params[0].top_k < scores.size(1):
        scores, ids = _candidates(scores, [p.top_k for p in params])
    weights = _weights(scores, temperature)
    if any(p.top_p < 1 for p in params):
        ordered = _sorted(scores)
        cumulative = _weights(ordered, temperature).cumsum_(-1)
        # the first at which that much is reached
        last = torch.searchsorted(cumulative, cumulative[:, -1:] * top_p)
        # the very last, where top_p is infinite
        lowest = ordered.gather(1, last.clamp(max=scores.size(1) - 1))
        weights.masked_fill_(scores < lowest, 0)
    if any(p.min_p for p in params):
        weights.masked_fill_(weights < min_p, 0)
    return weights, ids


def _weights(scores, temperature):
    """Probabilities relative to the likeliest token's, (R, n) float64: exact enough, and never more
    than 1."""
    likeliest = scores.amax(-1, keepdim=True)
    return scores.to(torch.float64, copy=True).sub_(likeliest).div_(temperature).exp_()


def _candidates(scores, top_k):
    """The k likeliest of each row with their ids, in the order of the ids: (R, n) both, filled up
    with -inf and 0."""
    row, ids = _at_least(scores, _kth_largest(scores, top_k))
    counts = torch.bincount(row, minlength=scores.size(0))
    column = torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]
    shape = scores.size(0), int(counts.max())
    padded_ids = ids.new_zeros(shape).index_put_((row, column), ids)
    padded = scores.new_full(shape, -torch.inf).index_put_((row, column), scores[row, ids])
    return padded, padded_ids


def _logprobs(raw, tokens, rows, bad):
    """A TokenLogprob for each row that asks and is not bad, from the logits as the model gave
    them."""
    found: list[TokenLogprob | None] = [None] * len(rows)
    asking = [b for b, row in enumerate(rows) if row.params.logprobs >= 0 and b not in bad]
    if not asking:
        return found
    # each by itself: which equals are in the top depends on it alone
    for b, token in zip(asking, tokens[asking].tolist()):
        logits, top = raw[b], ()
        normaliser = float(logits.max()) + math.log(_weights(logits[None], 1.0).sum())
        if rows[b].params.logprobs:
            values, ids = logits.topk(min(rows[b].params.logprobs, len(logits)))
            pairs = zip(ids.tolist(), values.tolist())
            top = tuple((i, v - normaliser) for i, v in pairs if v > -np.inf)
        found[b] = TokenLogprob(token, float(logits[token]) - normaliser, top)
    return found


# On CPU, NumPy's vectorised selection and sorting take a tenth of the time of torch's (V = 50,304).

def _on_cpu(x):
    return x.device.type == 'cpu'


def _argmax(scores):
    """(B,) ids of the largest, the lowest of equals; of a NaN if there is one."""
    return torch.from_numpy(scores.numpy().argmax(-1)) if _on_cpu(scores) else scores.argmax(-1)


def _kth_largest(scores, ks):
    """(R, 1): in row r the ks[r]-th largest."""
    if _on_cpu(scores):
        n = scores.size(1)
        found = [np.partition(row, n - k)[n - k:n - k + 1] for row, k in zip(scores.numpy(), ks)]
        return torch.from_numpy(np.stack(found))
    largest = torch.topk(scores, max(ks)).values
    return largest.gather(1, torch.tensor(ks, device=scores.device)[:, None] - 1)


def _at_least(scores, lowest):
    """Rows and columns of the scores that are at least their row's `lowest` (R, 1), ordered by row,
    then column."""
    if _on_cpu(scores):
        flat = np.flatnonzero(scores.numpy() >= lowest.numpy())
        return torch.from_numpy(flat // scores.size(1)), torch.from_numpy(flat % scores.size(1))
    return (scores >= lowest).nonzero().unbind(1)


def _sorted(scores):
    """(R, n) in falling order."""
    if _on_cpu(scores):
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1)[:, ::-1].copy())
    return scores.sort(-1, descending=True).values
