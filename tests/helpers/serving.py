"""Helpers for tests of the batching engine: tiny models, random requests, and their expected
results."""
import functools

import tiktoken
import torch
from hypothesis import strategies as st

from data.tokenizer import BPETokenizer, CharTokenizer
from engine.engine import Engine
from engine.pages.page_table import page_nbytes, rows_nbytes
from engine.requests.params import SamplingParams
from engine.requests.request import Request
from engine.requests.sampler import sample_rows
from model import GPT, GPTConfig
from tests.helpers.mechanisms import MECHANISMS
from tests.helpers.models import FULL_STACK, VOCAB, full_logits, random_model

SMALL = dict(n_head=2, n_embd=16, block_size=64, vocab_size=VOCAB)
KINDS = {
    'full stack': FULL_STACK,
    'vanilla': dict(SMALL, n_layer=2),  # learned positions
    'unshared': dict(SMALL, n_layer=3, layer_pattern='LG', window_size=6, pos_embedding='rope',
                     n_kv_head=1),
    'all local': dict(SMALL, n_layer=2, layer_pattern='L', window_size=7, pos_embedding='rope',
                      qk_norm=True),
}
ALPHABET = 'abcdefghijklmnopqrstuvw'
TOKENIZER = CharTokenizer({c: i for i, c in enumerate(ALPHABET)}, dict(enumerate(ALPHABET)))


@functools.cache
def model_of(kind: str) -> GPT:
    """A model in float64, in which the batch size changes no token. Its final weights are small, so
    that samples vary."""
    model = random_model(GPTConfig(**(KINDS | MECHANISMS)[kind]))
    with torch.no_grad():
        model.lm_head.weight *= 0.5
    return model


@functools.cache
def ending() -> tuple[GPT, BPETokenizer]:
    """A model whose likeliest token is always '<|endoftext|>', and its tokenizer of bytes."""
    ranks = {bytes([i]): i for i in range(256)}
    tokenizer = BPETokenizer(tiktoken.Encoding('tiny', pat_str=r'\S+|\s+', mergeable_ranks=ranks,
                                                special_tokens={'<|endoftext|>': 256}))
    model = random_model(GPTConfig(**KINDS['vanilla'] | dict(vocab_size=257, bias=True)))
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight[256] = 9.0
    return model, tokenizer


def prompt(n, seed=0) -> list[int]:
    return torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def needed(requests) -> int:
    """Positions of the longest of [(prompt, params)]; the last sampled token is not cached."""
    return max(len(ids) + params.max_new_tokens - 1 for ids, params in requests)


def budget_for(model, rows, max_seq_len, n_pages, page_size, kv_dtype='float64') -> int:
    rings = rows_nbytes(model.plan, rows, max_seq_len, kv_dtype)
    return rings + n_pages * page_nbytes(model.plan, page_size, kv_dtype)


def assert_as_full_forwards_say(model, completion, params):
    """Check that each token is what `sample_rows` returns for the logits of a full forward over all
    previous tokens, and that the completion ends where it must."""
    tokens, n_prompt = completion.tokens, len(completion.prompt_tokens)
    logits = full_logits(model, torch.tensor([completion.prompt_tokens + tokens[:-1]]))
    logits = logits[0, n_prompt - 1:]
    request, ends = Request(0, completion.prompt_tokens, params), []
    for t, token in enumerate(tokens):
        drawn = sample_rows(logits[t:t + 1], [request])
        assert drawn.tokens.tolist() == [token], f'token {t} of {tokens}'
        request.take(token)
        ends.append(token in params.stop_tokens)
    assert True not in ends[:-1] and len(tokens) <= params.max_new_tokens
    assert completion.finish_reason == ('stop' if ends[-1] else 'length') and completion.error == ''
    assert ends[-1] or len(tokens) == params.max_new_tokens
    assert (completion.logprobs is None) == (params.logprobs < 0)
    assert completion.logprobs is None or len(completion.logprobs) == len(tokens)
    for entry, token, expected in zip(completion.logprobs or [], tokens, logits.log_softmax(-1)):
        assert entry.token == token and abs(entry.logprob - expected[token]) < 1e-9
        likeliest = expected.topk(max(params.logprobs, 0)).values.tolist()
        for (i, lp), best in zip(entry.top, likeliest, strict=True):
            assert abs(lp - expected[i]) < 1e-9 and abs(lp - best) < 1e-9


def alone(model, ids, params, **kinds):
    """The completion from an engine with one row and no other requests."""
    n_prompt = len(TOKENIZER.encode(ids) if isinstance(ids, str) else ids)
    length = min(n_prompt + params.max_new_tokens, model.config.block_size)
    return Engine(model, 1, length, **kinds).generate([ids], params)[0]


def said(completion):
    """The parts that must not depend on other requests (except last bits of log-probabilities)."""
    c = completion
    return c.prompt_tokens, c.tokens, c.text, c.finish_reason, c.error


def assert_same(a, b):
    assert said(a) == said(b)
    for x, y in zip(a.logprobs or [], b.logprobs or [], strict=True):
        assert x.token == y.token and abs(x.logprob - y.logprob) < 1e-9


def assert_idle(engine):
    """Check that nothing runs or waits, and no page is in use except by the prefix cache."""
    table, store = engine.cache.table, engine.prefix
    assert engine.n_unfinished == 0 and engine.step() == [] and not engine.requests
    assert not engine.scheduler.running and not engine.scheduler.waiting
    assert not any(table.rows) and table.n_free + table.n_evictable == table.n_pages
    blocks = store.blocks if store else ()
    assert table.pinned == {block.page for block in blocks if block.page >= 0}
    assert not any(block.users for block in blocks)
    assert not store or store.nbytes <= store.budget
    assert engine.cache.lengths.tolist() == [0] * engine.cache.batch_size


@st.composite
def params(draw, most_new=12, **fixed):
    return SamplingParams(**dict(
        max_new_tokens=draw(st.integers(1, most_new)),
        temperature=draw(st.sampled_from([0, 0.7, 1.5])),
        top_k=draw(st.sampled_from([0, 0, 4])), top_p=draw(st.sampled_from([1.0, 0.8])),
        min_p=draw(st.sampled_from([0.0, 0.05])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.4])),
        seed=draw(st.integers(0, 99)), stop_tokens=draw(st.sampled_from([(), (), (3, 8, 11)])),
        logprobs=draw(st.sampled_from([-1, 0, 2]))) | fixed)


@st.composite
def requests(draw, most=6, longest=25, **fixed):
    """[(prompt, params)]"""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=most))
    return [(prompt(n, seed=draw(st.integers(0, 9))), draw(params(**fixed))) for n in lengths]


@st.composite
def engines(draw, model, wanted, **fixed):
    """An engine just large enough for the longest of `wanted`, often with few pages to spare."""
    rows, page_size = draw(st.integers(1, 4)), draw(st.sampled_from([1, 3, 4, 16]))
    max_seq_len, kv_dtype = needed(wanted), fixed.get('kv_dtype', 'float64')
    least = -(-max_seq_len // page_size)
    n_pages = least + draw(st.sampled_from([0, 1, least // 2, 3 * least]))
    fixed = dict(asynchronous=draw(st.booleans())) | fixed
    return Engine(model, rows, max_seq_len, page_size=page_size,
                  prefill_chunk=draw(st.sampled_from([1, 2, 5, 8, 30, 256])),
                  kv_budget=budget_for(model, rows, max_seq_len, n_pages, page_size, kv_dtype),
                  **fixed)
