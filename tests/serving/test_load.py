"""Many clients at once, some of which disconnect: the others get all tokens, and nothing leaks."""
import asyncio
import gc
import json
import random
import socket
import time
from collections import Counter

import pytest

from engine.prefix.blocks import OVERHEAD
from engine.requests.job import Job
from serving.app import Generation
from serving.replies import Reply
from tests.helpers.serving import TOKENIZER, prompt
from tests.serving.conftest import assert_free, eventually, expected
from tests.serving.test_server import request

CLIENTS, LEAVING, SECONDS = 64, 0.1, 20
TEXTS = [TOKENIZER.decode(prompt(n, seed=seed)) for n in (3, 24, 40) for seed in (1, 2)]
TEXTS += [text + TOKENIZER.decode(prompt(5, seed=3)) for text in TEXTS]  # some continue others


async def client(server, number: int, deadline: float, tally: Counter) -> None:
    """Send a request, read its stream to the end or disconnect within it, and repeat."""
    choose = random.Random(number)
    while time.monotonic() < deadline:
        text, seed = choose.choice(TEXTS), choose.randrange(3)
        document = dict(prompt=text, seed=seed, max_tokens=12, stream=True)
        reader, writer = await asyncio.open_connection('127.0.0.1', server.port)
        writer.write(request(document, Connection='close'))
        if choose.random() < LEAVING:
            for _ in range(choose.randrange(12)):
                await reader.readline()
            await asyncio.sleep(choose.random() / 20)
            writer.close() if choose.random() < 0.5 else writer.transport.abort()
            tally['left'] += 1
        else:
            head, _, body = (await reader.read()).partition(b'\r\n\r\n')
            assert head.split()[1] == b'200' and b'[DONE]' in body, head
            events = [piece.partition(b'data: ')[2] for piece in body.split(b'\n\n')
                      if b'"text"' in piece]
            said = ''.join(json.loads(event[:event.rindex(b'}') + 1])['choices'][0]['text']
                           for event in events)
            assert said == expected(text, 12, seed=seed).text
            tally['whole'] += 1
            writer.close()


@pytest.mark.slow
def test_64_streams_of_which_a_tenth_leave(running):
    for text in TEXTS:  # before the clock starts
        [expected(text, 12, seed=seed) for seed in range(3)]
    server, tally = running(rows=16, max_waiting=2 * CLIENTS, prefix_budget=20_000), Counter()

    async def all_of_them():
        deadline = time.monotonic() + SECONDS
        await asyncio.gather(*(client(server, k, deadline, tally) for k in range(CLIENTS)))
    asyncio.run(all_of_them())
    assert tally['whole'] > CLIENTS and tally['left'] > 0.05 * tally['whole']
    state = server.server.server_state
    eventually(lambda: not (state.connections or state.tasks))
    assert_free(server.worker)
    counted = {sample.labels['status'] for family in server.metrics.registry.collect()
               for sample in family.samples if sample.name == 'nanokv_requests_total'}
    assert counted <= {'200', '499'}
    store = server.engine.prefix
    assert store.stats.found and store.stats.evicted
    assert store.nbytes <= 20_000 and store.nbytes == sum(
        OVERHEAD + len(block.tokens) + sum(x.numel() for x in (block.copy, block.local)
                                           if x is not None)
        for block in store.blocks)


@pytest.mark.parametrize('more', [dict(), dict(stream=True, logprobs=2), dict(max_tokens=10 ** 6)],
                         ids=['whole', 'stream', 'refused'])
def test_an_ended_request_is_freed_without_the_garbage_collector(running, more):
    """It rarely runs in a process with as many objects as torch has: prompts would pile up."""
    server = running()
    gc.collect()
    gc.disable()
    try:
        for _ in range(8):
            with socket.create_connection(('127.0.0.1', server.port)) as sock:
                sock.sendall(request(dict(prompt=TEXTS[0]) | more, Connection='close'))
                while sock.recv(65536):
                    pass
        assert_free(server.worker)
        kinds = Generation, Reply, Job
        eventually(lambda: sum(type(x) in kinds for x in gc.get_objects()) <= 3)
    finally:
        gc.enable()
