"""The ASGI application: routes, keys, limits, streams.

    AccessMiddleware -> GenerateEndpoint: body -> api -> worker.submit -> events -> replies
"""
import asyncio
import base64
import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from engine.requests.params import encodable
from engine.pages.view import RowView
from serving import api
from serving.access import AccessMiddleware, error_response, json_response
from serving.errors import ApiError
from serving.replies import ChatReply, Reply
from serving.watch import CacheEvent, WatchedChatReply, WatchedReply, newest_view, plan_document
from serving.worker import Worker

PARSERS = 2             # threads that parse and encode requests
LAST_SEND_TIMEOUT = 1.0  # seconds to send the error that ends a stream; the client may not read it
PAGE = Path(__file__).with_name('page.html').read_text(encoding='utf-8')


def _page_headers() -> dict[str, str]:
    """Allow only the page's own script and style, by hash."""
    def source(tag):
        [text] = re.findall(rf'<{tag}>(.*?)</{tag}>', PAGE, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    policy = ("default-src 'none'; connect-src 'self'; img-src data:; "
              f"script-src {source('script')}; style-src {source('style')}; "
              "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
    return {'Content-Security-Policy': policy, 'X-Content-Type-Options': 'nosniff',
            'Cache-Control': 'no-cache'}


class Limits(NamedTuple):
    max_body: int   # bytes
    timeout: float  # seconds from the head of a request to the end of its response


def make_app(worker: Worker, service: api.Service, limits: Limits, keys: Sequence[str] = (),
             request_log: Callable[[str], None] | None = None, page: bool = True,
             cors: str = '', shared_prefix: bool = False) -> Starlette:
    """Return the ASGI application. The worker must be running; the application does not stop it.

    keys: accepted as `Authorization: Bearer KEY`; empty = no key is needed.
    request_log: called on the event loop with one line per finished request; it must not block.
    page: also serve the page, and the routes that it needs beside OpenAI's.
    cors: origin whose pages may use the server from a browser; '*' = all, '' = none.
    shared_prefix: requests with different keys reuse each other's prompts, and so can find out
        what these are.
    """
    model = {'id': service.model, 'object': 'model', 'created': service.created,
             'owned_by': 'nanokv'}

    async def list_models(request):
        return json_response({'object': 'list', 'data': [model]})

    async def retrieve_model(request):
        if request.path_params['model'] != service.model:
            raise ApiError(404, f'there is no such model: this server has {service.model!r}',
                           'model', 'model_not_found')
        return json_response(model)

    async def health(request):
        status, code = ('ok', 200) if worker.alive else ('stopping', 503)
        return json_response({'status': status}, code)

    async def prometheus(request):
        return Response(worker.metrics.text(), media_type=worker.metrics.content_type)

    def generate(path, parse, reply_type):
        endpoint = GenerateEndpoint(worker, service, limits, parse, reply_type)
        return Route(path, endpoint, methods=['POST'])
    routes = [generate('/v1/completions', api.parse_completion, Reply),
              generate('/v1/chat/completions', api.parse_chat, ChatReply),
              Route('/v1/models', list_models), Route('/v1/models/{model:path}', retrieve_model),
              Route('/health', health), Route('/metrics', prometheus)]
    if page:
        routes += [*_page_routes(plan_document(worker.engine, service)),
                   generate('/nanokv/completions', api.parse_completion, WatchedReply),
                   generate('/nanokv/chat/completions', api.parse_chat, WatchedChatReply)]
    paths = {route.path for route in routes if '{' not in route.path}
    middleware = [Middleware(AccessMiddleware, worker.metrics, keys, request_log, paths,
                             shared_prefix)]
    if cors:  # outermost: a preflight has no key, and refusals can be read too
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=[cors], allow_headers=['*'],
                                        allow_methods=['GET', 'POST'], allow_private_network=True))
    handlers = dict.fromkeys((HTTPException, ApiError, Exception), _on_error)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


async def _on_error(request, error):
    if isinstance(error, HTTPException):
        message = f'{request.method} {request.url.path}: {error.detail}'
        error = ApiError(error.status_code, message, headers=error.headers)
    elif not isinstance(error, ApiError):
        error = ApiError(500, 'internal error')
    request.scope['error'] = error
    return error_response(error)


def _page_routes(plan: dict) -> list[Route]:
    page_headers = _page_headers()

    async def show_page(request):
        return Response(PAGE, headers=page_headers, media_type='text/html')

    async def show_plan(request):
        return json_response(plan)
    return [Route('/', show_page), Route('/nanokv/plan', show_plan)]


class GenerateEndpoint:
    """A route that generates text. parse: document -> GenerationRequest."""

    def __init__(self, worker: Worker, service: api.Service, limits: Limits, parse: Callable,
                 reply_type: type[Reply]):
        self.worker, self.service, self.limits = worker, service, limits
        self.parse, self.reply_type = parse, reply_type
        self.parsers = anyio.CapacityLimiter(PARSERS)

    async def __call__(self, scope, receive, send):
        received = time.perf_counter()
        deadline = asyncio.get_running_loop().time() + self.limits.timeout
        try:
            async with asyncio.timeout_at(deadline):
                body = await self._body(Request(scope, receive))
        except ClientDisconnect:
            return
        except TimeoutError:
            raise ApiError(408, f'the request did not come within {self.limits.timeout:g} s'
                           ) from None
        self.worker.check(scope['nanokv_client'])  # before parsing, which may take long
        scope['generation'] = generation = Generation(self, send, received, scope)
        await generation.run(body, receive, deadline)

    async def make_reply(self, body) -> Reply:
        """Parse a request in a thread, so that it does not block the others."""
        def make():
            try:
                document = encodable(json.loads(body))
            except (ValueError, RecursionError) as e:
                raise ApiError(400, f'the body is not JSON: {str(e)[:200]}') from e
            request = self.parse(document, self.service)
            return self.reply_type(request, self.service.model, self.service.tokenizer)
        return await anyio.to_thread.run_sync(make, limiter=self.parsers, abandon_on_cancel=True)

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get('content-type', '').partition(';')[0].strip().lower()
        if kind != 'application/json':  # browsers let any page send other types
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


class Generation:
    """The state of one request. received, first_event: `perf_counter` times. error: ended its
    stream."""

    def __init__(self, endpoint: GenerateEndpoint, send, received: float, scope):
        self.endpoint, self.worker, self.send = endpoint, endpoint.worker, send
        self.client, self.salt = scope['nanokv_client'], scope['nanokv_salt']
        self.reply = self.ticket = self.first_event = self.error = None
        self.received = received
        self.started = False          # the head of the response was sent
        self.inbox = asyncio.Queue()  # batches of `Worker`'s deliveries; None: client left
        self.loop = asyncio.get_running_loop()

    async def run(self, body: bytes, receive, deadline: float) -> None:
        """Respond. Raises ApiError only before the response has started."""
        watch = asyncio.create_task(self._watch(receive))
        try:
            async with asyncio.timeout_at(deadline):
                await self._respond(body)
        except ClientDisconnect:
            pass
        except (TimeoutError, ApiError) as e:
            self.error = e if isinstance(e, ApiError) else ApiError(
                504, f'not done within {self.endpoint.limits.timeout:g} s: cancelled',
                headers={'x-should-retry': 'false'})  # for OpenAI's client
            if not self.started:
                raise self.error from None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_SEND_TIMEOUT):
                    await self._send_events([self.error.document()], more=False)
        finally:
            watch.cancel()
            if self.ticket and not self.reply.complete:
                self.worker.cancel(self.ticket)
            self.ticket = None  # it refers to this object

    async def _watch(self, receive):
        while (await receive())['type'] != 'http.disconnect':
            pass
        self.inbox.put_nowait(None)

    async def _respond(self, body):
        self.reply = await self.endpoint.make_reply(body)
        if not self.inbox.empty():
            raise ClientDisconnect
        self.ticket = self.worker.submit(
            self.reply.request.choices,
            lambda items: self.loop.call_soon_threadsafe(self.inbox.put_nowait, items),
            self.reply.watched, self.client, self.salt)
        await (self._stream() if self.reply.request.stream else self._send_whole())

    async def _next_documents(self) -> list[dict]:
        batches = [await self.inbox.get()]
        while not self.inbox.empty():
            batches.append(self.inbox.get_nowait())
        if None in batches:
            raise ClientDisconnect
        documents = []
        for choice, event in newest_view([item for batch in batches for item in batch]):
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, RowView):
                documents.append(self.reply.cache_event(event, self.received))
                continue
            self.first_event = self.first_event or time.perf_counter()
            documents += self.reply.take(choice, event)
        return documents

    async def _send_whole(self):
        while not self.reply.complete:
            await self._next_documents()
        text = await anyio.to_thread.run_sync(self._whole_text)
        await self._start({b'content-type': b'application/json',
                           b'content-length': b'%d' % len(text)})  # the text is ASCII
        await self._send(text, more=False)

    def _whole_text(self) -> str:
        # in pieces: `json.dumps` of many log-probabilities would keep all other threads waiting
        return ''.join(json.JSONEncoder().iterencode(self.reply.document()))

    async def _stream(self):
        """Server-sent events. The head waits for the first event: an error changes its status."""
        while not self.reply.complete:
            documents = await self._next_documents()
            if not self.started:  # the last header is for nginx: no buffering
                await self._start({b'content-type': b'text/event-stream',
                                   b'cache-control': b'no-cache', b'x-accel-buffering': b'no'})
            if documents:
                await self._send_events(documents)
        await self._send_events([*self.reply.last(), '[DONE]'], more=False)

    async def _start(self, headers):
        self.started = True
        await self.send({'type': 'http.response.start', 'status': 200,
                         'headers': list(headers.items())})

    async def _send_events(self, documents, more=True):
        names = ['event: cache\n' * isinstance(d, CacheEvent) for d in documents]
        texts = [d if isinstance(d, str) else json.dumps(d) for d in documents]
        events = (f'{name}data: {text}\n\n' for name, text in zip(names, texts))
        await self._send(''.join(events), more)

    async def _send(self, text, more):
        await self.send({'type': 'http.response.body', 'body': text.encode(), 'more_body': more})
