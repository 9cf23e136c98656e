"""Replays a trace on the prefix cache alone, without a model: what is recomputed at which size."""
import numpy as np

from lab.benchmarks.clock import progress
from lab.benchmarks.dialogues import Served
from lab.sessions.known import Known
from lab.sessions.trace import Trace

UNLIMITED = 10 ** 15  # bytes


def texts(trace: Trace):
    """Yield (tokens of the prompt, tokens of the reply) by time of arrival."""
    for session, i in trace.in_order():
        parts = [trace.system(session)]
        for k in session.lineage(i)[:-1]:
            parts += trace.message(session, k), trace.reply(session, k)
        yield np.concatenate([*parts, trace.message(session, i)]), trace.reply(session, i)


def unavoidable(trace: Trace) -> dict:
    """Totals of a trace: prompt tokens, those that no cache could have saved, and reply tokens."""
    known, totals = Known(), np.zeros(3, dtype=int)
    for prompt, reply in texts(trace):
        totals += len(prompt), known.unavoidable(prompt), len(reply)
        known.add(np.concatenate([prompt, reply[:-1]]))  # the last one is never an input
    return dict(zip(('prompt_tokens', 'unavoidable', 'reply_tokens'), map(int, totals)))


def replay(trace: Trace, plan, kv_dtype: str, page_size: int, budget: int, title='') -> dict:
    """Serve one request after the other with so many bytes of prefix cache."""
    served = Served(plan, trace.longest + page_size, page_size, kv_dtype, budget)
    computed = most = 0
    for prompt, reply in progress(list(texts(trace)), title):
        computed += len(prompt) - served.serve(prompt.tolist(), reply.tolist())
        most = max(most, served.held_nbytes)
    return {'budget': budget, 'most_nbytes': most, 'computed': computed,
            'evicted': served.store.stats.evicted}


def simulate(trace: Trace, plan, kv_dtype: str, page_size: int, shares: list[int]) -> dict:
    """Replay with unlimited memory, and with shares (in percent) of what that takes."""
    totals, cells, most = unavoidable(trace), [], UNLIMITED
    for share in [100, *(share for share in shares if share != 100)]:
        budget = most if share == 100 else cells[0]['most_nbytes'] * share // 100
        cell = replay(trace, plan, kv_dtype, page_size, budget, f'{trace.name}, {share}%')
        cells.append({'share': share} | cell | {
            'over_unavoidable': cell['computed'] / totals['unavoidable']})
    return {'trace': trace.name, 'seed': trace.seed, 'sessions': len(trace.sessions),
            'requests': trace.n_requests, 'longest': trace.longest, 'kv_dtype': kv_dtype,
            'page_size': page_size} | totals | {'cells': cells}
