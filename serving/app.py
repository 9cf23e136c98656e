"""Routes, limits, keys and streams. The engine is behind `worker`; here is only asyncio.

    every route ── Front: key, counting ── Generate: body ── api ── worker.submit ── events ── replies ── client
"""
import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import logging
import re
import textwrap
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from serving import api
from serving.errors import ApiError, ClientGone
from serving.replies import ChatReply, Reply
from serving.worker import Busy, Fault, Stopping, Worker

READERS = 2       # requests that are read (parsed, encoded) at once, in threads
UNREAD = (401, 403, 408, 413, 415)  # of these there may be a body to come, which nobody waits for
LAST_WORDS = 1.0  # seconds to tell a client of a time-out that may not be reading
GONE = object()
PAGE = Path(__file__).with_name('page.html').read_text(encoding='utf-8')
UNLOGGED = ('/health', '/metrics', '/v1/models')  # asked for again and again, by probes and by the page

log = logging.getLogger('nanokv.serving')


def _hashed(tag: str) -> str:
    """The page's script or style as a source of its Content-Security-Policy."""
    [text] = re.findall(rf'<{tag}>(.*?)</{tag}>', PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# nothing is loaded from elsewhere, and no script or style runs but the page's own
PAGE_HEADERS = {
    'Content-Security-Policy':
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {_hashed('script')}; "
        f"style-src {_hashed('style')}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    'X-Content-Type-Options': 'nosniff', 'Cache-Control': 'no-cache'}


@dataclass(frozen=True)
class Limits:
    """max_body: bytes. timeout: seconds that a request may take, from its head to the last byte of the answer."""
    max_body: int
    timeout: float


def make_app(worker: Worker, service: api.Service, limits: Limits, keys: Sequence[str] = (),
             hosts: Sequence[str] = (),
             request_log: Callable[[str], None] | None = None) -> Starlette:
    """The ASGI application. The worker must have been started; it is not stopped here.

    keys: one of them must come as `Authorization: Bearer KEY`, but for /health and the page (/);
        none = everybody is let in.
    hosts: names by which the server may be called; none = any. A page in a browser on the same machine can have a name of its
        own point here (DNS rebinding), and then reads the answers.
    request_log: called on the event loop with a line for each finished request; it must not block.
    """
    metrics = worker.metrics

    async def models(request):
        return _json({'object': 'list', 'data': [_model(service)]})

    async def model(request):
        if request.path_params['model'] != service.model:
            raise ApiError(404, f'there is no such model: this server has {service.model!r}', 'model', 'model_not_found')
        return _json(_model(service))

    async def page(request):
        return Response(PAGE, headers=PAGE_HEADERS, media_type='text/html')

    async def health(request):
        return _json({'status': 'ok' if worker.alive else 'stopping'}, 200 if worker.alive else 503)

    async def counters(request):
        return Response(metrics.text(), media_type=metrics.content_type)

    async def failed(request, error):
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, f'{request.method} {request.url.path}: {error.detail}', headers=error.headers)
        request.scope['error'] = error
        return _refusal(error if isinstance(error, ApiError) else ApiError(500, 'internal error'))
    routes = [Route('/v1/completions', Generate(worker, service, limits, api.completion, Reply), methods=['POST']),
              Route('/v1/chat/completions', Generate(worker, service, limits, api.chat, ChatReply), methods=['POST']),
              Route('/v1/models', models), Route('/v1/models/{model:path}', model), Route('/health', health),
              Route('/metrics', counters), Route('/', page)]
    front = Middleware(Front, metrics=metrics, keys=[key.encode(errors='surrogateescape') for key in keys],
                       hosts=[host.encode() for host in hosts], request_log=request_log,
                       paths={route.path for route in routes if '{' not in route.path})
    app = Starlette(routes=routes, middleware=[front],
                    exception_handlers={HTTPException: failed, ApiError: failed, Exception: failed})
    app.router.redirect_slashes = False
    return app


def _model(service) -> dict:
    return {'id': service.model, 'object': 'model', 'created': 0, 'owned_by': 'nanokv'}


def _json(document: dict, status: int = 200, headers: dict | None = None) -> Response:
    return Response(json.dumps(document), status, headers, 'application/json')  # ASCII: half a surrogate pair can be told


def _refusal(error: ApiError) -> Response:
    close = {'Connection': 'close'} if error.status in UNREAD else {}
    return _json(error.document(), error.status, error.headers | close)


class Front:
    """What comes before all routes: the key, counting, and the request log."""

    def __init__(self, app, metrics, keys: list[bytes], hosts: list[bytes], paths: set[str],
                 request_log):
        self.app, self.metrics, self.keys, self.hosts, self.paths = app, metrics, keys, hosts, paths
        self.request_log = request_log

    async def __call__(self, scope, receive, send):
        if scope['type'] != 'http':
            return await self.app(scope, receive, send)
        status = 499  # nothing was sent: the client left
        error, start = None, time.perf_counter()

        async def counting(message):
            nonlocal status
            if message['type'] == 'http.response.start':
                status = message['status']
            await send(message)
        try:
            error = self._refused(scope)
            await (_refusal(error) if error else self.app)(scope, receive, counting)
        except Exception:
            status, error = 500, ApiError(500, 'internal error')
            raise
        finally:
            route = scope['path'] if scope['path'] in self.paths else 'other'
            self.metrics.requests.labels(route, str(status)).inc()
            if self.request_log and not (status == 200 and scope['path'] in UNLOGGED):
                self.request_log(_line(scope, status, error or scope.get('error'), start))

    def _refused(self, scope) -> ApiError | None:
        headers = dict(reversed(scope['headers']))  # the first of each name
        if self.hosts and headers.get(b'host', b'').lower().removesuffix(b':%d' % (scope['server'][1] or 0)) not in self.hosts:
            return ApiError(403, 'the Host header does not name this server; on this machine it is localhost')
        scheme, _, key = headers.get(b'authorization', b'').partition(b' ')
        # all are compared: how long it takes says nothing of which is near
        known = scheme.lower() == b'bearer' and sum(hmac.compare_digest(key.strip(), each) for each in self.keys)
        if known or not self.keys or scope['path'] in ('/health', '/'):
            return None
        return ApiError(401, 'a key is needed: Authorization: Bearer KEY', code='invalid_api_key',
                        headers={'WWW-Authenticate': 'Bearer'})


def _line(scope, status, error, start) -> str:
    """A line of the request log: printable ASCII, so that a client cannot forge one."""
    answer = scope.get('answer')
    error = error or answer and answer.error
    left = status == 499 or answer and not error and not answer.reply.complete
    usage = answer.reply.usage() if answer and not error and not left else None
    parts = ['client left' if left and not error else '']
    if usage:
        cached = usage['prompt_tokens_details']['cached_tokens']
        parts = [f"{usage['prompt_tokens']} prompt tokens ({cached} cached)",
                 f"{usage['completion_tokens']} completion tokens"]
    if answer and answer.first:
        parts.append(f'TTFT {answer.first - start:.3f} s')
    parts.append(f'{time.perf_counter() - start:.3f} s')
    if usage:
        parts += dict.fromkeys(completion.finish_reason for completion in answer.reply.completions)
    if error:
        parts.append(textwrap.shorten(str(error), 200, placeholder=' ...'))
    address = scope['client'][0] if scope['client'] else '-'
    line = f"{address} {scope['method']} {scope['path']} {status}: {', '.join(filter(None, parts))}"
    line = ''.join(c if ' ' <= c <= '~' else c.encode('unicode_escape').decode() for c in line)
    return time.strftime('%Y-%m-%d %H:%M:%S ') + line


class Generate:
    """One of the two routes that generate. read: document -> Ask; reply: makes its answer."""

    def __init__(self, worker: Worker, service: api.Service, limits: Limits, read: Callable, reply: type[Reply]):
        self.worker, self.service, self.limits, self.read, self.reply = worker, service, limits, read, reply
        self.readers = anyio.CapacityLimiter(READERS)

    async def __call__(self, scope, receive, send):
        deadline = asyncio.get_running_loop().time() + self.limits.timeout
        try:
            async with asyncio.timeout_at(deadline):
                body = await self._body(Request(scope, receive))
        except ClientDisconnect:
            return
        except TimeoutError:
            raise ApiError(408, f'the request did not come within {self.limits.timeout:g} s') from None
        with refusing():
            self.worker.check()  # before it is read, which may take a while
        scope['answer'] = answer = Answer(lambda: self._read(body), send, deadline)
        await answer.run(self.worker, receive, self.limits)

    async def _read(self, body):
        """(what is asked, its reply), in a thread: others go on meanwhile."""
        def read():
            ask = self.read(_parsed(body), self.service)
            return ask, self.reply(ask, self.service.model, self.service.tokenizer)
        return await anyio.to_thread.run_sync(read, limiter=self.readers, abandon_on_cancel=True)

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get('content-type', '').partition(';')[0].strip().lower()
        if kind != 'application/json':  # a page that is open in a browser can send others without asking
            raise ApiError(415, f'content-type is {kind!r}: must be application/json')
        most, length = self.limits.max_body, request.headers.get('content-length', '0')
        too_large = ApiError(413, f'the body is larger than {most:,} bytes')
        if length.isdecimal() and int(length[:20]) > most:
            raise too_large
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise too_large
        return bytes(body)


def _parsed(body: bytes):
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError is one; an int of too many digits
        raise ApiError(400, f'the body is not JSON: {str(e)[:200]}') from e


@contextlib.contextmanager
def refusing():
    """What the worker does not take is answered."""
    try:
        yield
    except Busy:
        raise ApiError(429, 'too many requests are waiting: try again later', code='too_many_requests',
                       headers={'Retry-After': '1'}) from None
    except Stopping:
        raise ApiError(503, 'the server is stopping', headers={'Retry-After': '5'}) from None


class Answer:
    """One request at work: its events from the engine, and whether the client is still there. read: gives what is asked, and
    the reply to it. deadline: by the loop's clock. first: when its first event came, by
    `time.perf_counter`. error: what ended its stream."""

    def __init__(self, read: Callable[[], Awaitable], send, deadline: float):
        self.read, self.send, self.deadline = read, send, deadline
        self.started, self.ticket, self.reply = False, None, None
        self.first = self.error = None
        self.inbox, self.loop = asyncio.Queue(), asyncio.get_running_loop()

    async def run(self, worker: Worker, receive, limits: Limits) -> None:
        """Raises ApiError where nothing has been sent yet."""
        watch = asyncio.create_task(self._watch(receive))
        try:
            async with asyncio.timeout_at(self.deadline):
                await self._answer(worker)
        except ClientGone:
            pass
        except (TimeoutError, ApiError) as e:
            error = e if isinstance(e, ApiError) else ApiError(504, f'not done within {limits.timeout:g} s: cancelled',
                                                               headers={'x-should-retry': 'false'})  # OpenAI's client would
            if not self.started:
                raise error from None
            self.error = error
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS):
                    await self._say([error.document()], more=False)
        finally:
            watch.cancel()
            if self.ticket and not self.reply.complete:
                worker.cancel(self.ticket)

    async def _answer(self, worker):
        ask, self.reply = await self.read()
        if not self.inbox.empty():
            raise ClientGone
        with refusing():
            self.ticket = worker.submit(ask.choices, self._deliver)
        await (self._stream() if ask.stream else self._whole())

    def _deliver(self, items):
        self.loop.call_soon_threadsafe(self.inbox.put_nowait, items)

    async def _watch(self, receive):
        while (await receive())['type'] != 'http.disconnect':
            pass
        self.inbox.put_nowait(GONE)

    async def _documents(self):
        """Those of the next events. Raises what ends the request."""
        items = await self.inbox.get()
        batches = [items] + [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]
        if any(batch is GONE for batch in batches):
            raise ClientGone
        documents = []
        for choice, event in (item for batch in batches for item in batch):
            if isinstance(event, Fault):
                raise ApiError(event.status, event.message)
            self.first = self.first or time.perf_counter()
            documents += self.reply.take(choice, event)
        return documents

    async def _whole(self):
        while not self.reply.complete:
            await self._documents()
        body = await anyio.to_thread.run_sync(lambda: json.dumps(self.reply.document()))  # ASCII: a character is a byte
        await self._start([(b'content-type', b'application/json'), (b'content-length', str(len(body)).encode())])
        await self._send(body, more=False)

    async def _stream(self):
        """Server-sent events. Nothing is sent before the first of the engine, so that what is refused has its status."""
        while not self.reply.complete:
            documents = await self._documents()
            if not self.started:
                await self._start([(b'content-type', b'text/event-stream'), (b'cache-control', b'no-cache'),
                                   (b'x-accel-buffering', b'no')])  # nginx: pass each on as it comes
            if documents:
                await self._say(documents)
        await self._say([*self.reply.last(), '[DONE]'], more=False)

    async def _start(self, headers):
        self.started = True
        await self.send({'type': 'http.response.start', 'status': 200, 'headers': headers})

    async def _say(self, documents, more=True):
        await self._send(''.join(f'data: {d if isinstance(d, str) else json.dumps(d)}\n\n' for d in documents), more)

    async def _send(self, text, more):
        await self.send({'type': 'http.response.body', 'body': text.encode(), 'more_body': more})
