"""Many clients at once, some of which disconnect: the others get all tokens, and nothing leaks."""
import asyncio
import functools
import gc
import json
import random
import socket
import time
from collections import Counter

import pytest

from engine.prefix.blocks import OVERHEAD
from engine.requests.job import Job
from engine.requests.params import SamplingParams
from serving.app import Generation
from serving.replies import Reply
from tests.helpers.serving import TOKENIZER, alone, model_of, prompt
from tests.serving.conftest import assert_free, eventually
from tests.serving.test_server import request

CLIENTS, LEAVING, SECONDS = 64, 0.1, 60
TEXTS = [TOKENIZER.decode(prompt(n, seed=seed)) for n in (3, 24, 40) for seed in (1, 2)]
TEXTS += [text + TOKENIZER.decode(prompt(5, seed=3)) for text in TEXTS]  # some continue others


@functools.cache
def expected(text: str, seed: int) -> str:
    params = SamplingParams(12, seed=seed)
    return alone(model_of('full stack'), text, params, tokenizer=TOKENIZER).text


class Client:
    """One client: sends a request, reads its stream to the end or disconnects, and repeats."""

    def __init__(self, server, number: int, tally: Counter):
        self.server, self.random, self.tally = server, random.Random(number), tally

    async def run(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            text, seed = self.random.choice(TEXTS), self.random.randrange(3)
            document = dict(prompt=text, seed=seed, max_tokens=12, stream=True)
            reader, writer = await asyncio.open_connection('127.0.0.1', self.server.port)
            writer.write(request(document, Connection='close'))
            if self.random.random() < LEAVING:
                await self.leave(reader, writer)
            else:
                self.check(await reader.read(), expected(text, seed))
                writer.close()

    async def leave(self, reader, writer) -> None:
        """Disconnect before a response or in the middle of one, cleanly or with a reset."""
        for _ in range(self.random.randrange(12)):
            await reader.readline()
        await asyncio.sleep(self.random.random() / 20)
        writer.close() if self.random.random() < 0.5 else writer.transport.abort()
        self.tally['left'] += 1

    def check(self, data: bytes, text: str) -> None:
        head, _, body = data.partition(b'\r\n\r\n')
        assert head.split()[1] == b'200', data[:500]
        events = [piece.partition(b'data: ')[2] for piece in body.split(b'\n\n')
                  if b'"text"' in piece]
        said = ''.join(json.loads(event[:event.rindex(b'}') + 1])['choices'][0]['text']
                       for event in events)
        assert said == text and b'[DONE]' in body
        self.tally['whole'] += 1


@pytest.mark.slow
def test_64_streams_of_which_a_tenth_leave_for_a_minute(running):
    for text in TEXTS:  # before the clock starts
        [expected(text, seed) for seed in range(3)]
    server, tally = running(rows=16, max_waiting=2 * CLIENTS, prefix_budget=20_000), Counter()

    async def all_of_them():
        deadline = time.monotonic() + SECONDS
        clients = [Client(server, number, tally) for number in range(CLIENTS)]
        await asyncio.gather(*(client.run(deadline) for client in clients))
    asyncio.run(all_of_them())
    assert tally['whole'] > CLIENTS and tally['left'] > 0.05 * tally['whole']
    state = server.server.server_state
    eventually(lambda: not (state.connections or state.tasks))
    assert_free(server.worker)
    samples = [sample for family in server.metrics.registry.collect()
               for sample in family.samples]
    counted = {sample.labels['status'] for sample in samples
               if sample.name == 'nanokv_requests_total'}
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
        for _ in range(20):
            with socket.create_connection(('127.0.0.1', server.port)) as sock:
                sock.sendall(request(dict(prompt=TEXTS[0]) | more, Connection='close'))
                while sock.recv(65536):
                    pass
        assert_free(server.worker)
        kinds = Generation, Reply, Job
        eventually(lambda: sum(type(x) in kinds for x in gc.get_objects()) <= 3)
    finally:
        gc.enable()
