"""The ASGI application: routes, keys, limits, streams.

    AccessMiddleware -> Generation: body -> api -> worker.submit -> events -> replies
"""
import asyncio
import base64
import contextlib
import functools
import hashlib
import json
import re
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import anyio
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
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
from serving.api import ApiError
from serving.replies import ChatReply, Reply
from serving.watch import CacheEvent, WatchedChatReply, WatchedReply, plan_document
from serving.worker import Ticket, Worker

MAX_CONTAINERS = 20_000  # lists and objects in a request
LAST_SEND_TIMEOUT = 1.0  # seconds to send the error that ends a stream; the client may not read it
STREAM_HEADERS = [(b'content-type', b'text/event-stream'), (b'cache-control', b'no-cache'),
                  (b'x-accel-buffering', b'no')]  # the last is for nginx
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


def make_app(worker: Worker, services: list[api.Service], keys: Sequence[str] = (),
             request_log: Callable[[str], None] | None = None, page: bool = True,
             cors: str = '', shared_prefix: bool = False) -> Starlette:
    """Return the ASGI application. The worker must be running; the application does not stop it.

    services: one for each of the worker's engines, the first for requests that name no model.
    keys: accepted as `Authorization: Bearer KEY`; empty = no key is needed.
    request_log: called on the event loop with one line per finished request; it must not block.
    page: also serve the page, and the routes that it needs beside OpenAI's.
    cors: origin whose pages may use the server from a browser; '*' = all, '' = none.
    shared_prefix: requests with different keys reuse each other's prompts, and so can find out
        what these are.
    """
    models, service, parsers = [*map(model_document, services)], services[0], Parsers()

    async def retrieve_model(request):
        found = api.service_for(request.path_params['model'], services)
        return json_response(models[found.engine])

    async def retrieve_plan(request):
        return plans[api.service_for(request.query_params.get('model'), services).engine]

    async def health(request):
        status, code = ('ok', 200) if worker.alive else ('stopping', 503)
        return json_response({'status': status}, code)

    async def metrics(request):
        return Response(generate_latest(worker.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def get(path, response):
        return Route(path, response, methods=['GET'])

    def generate(path, *how):
        async def endpoint(request):
            make_reply = functools.partial(reply_to, services, *how)
            return Generation(worker, service, functools.partial(parsers.run, make_reply))
        return Route(path, endpoint, methods=['POST'])
    routes = [generate('/v1/completions', api.parse_completion, Reply),
              generate('/v1/chat/completions', api.parse_chat, ChatReply),
              get('/v1/models', json_response({'object': 'list', 'data': models})),
              Route('/v1/models/{model:path}', retrieve_model),
              Route('/health', health), Route('/metrics', metrics)]
    if page:
        plans = [json_response(plan_document(engine, each, services))
                 for engine, each in zip(worker.engines, services)]
        routes += [get('/', Response(PAGE, headers=_page_headers(), media_type='text/html')),
                   Route('/nanokv/plan', retrieve_plan),
                   generate('/nanokv/completions', api.parse_completion, WatchedReply),
                   generate('/nanokv/chat/completions', api.parse_chat, WatchedChatReply)]
    paths = {route.path for route in routes if '{' not in route.path}
    middleware = [Middleware(AccessMiddleware, worker.metrics, keys, request_log, paths,
                             shared_prefix)]
    if cors:  # outside of keys: a preflight has none, and refusals can be read too
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=[cors], allow_headers=['*'],
                                        allow_methods=['GET', 'POST'], allow_private_network=True))
    handlers = dict.fromkeys((HTTPException, ApiError, Exception), _on_error)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


def reply_to(services, parse, reply_type, body: bytes) -> Reply:
    document = decoded(body)
    service = api.service_for(api.model_of(document), services)
    return reply_type(parse(document, service), service.model, service.tokenizer)


def model_document(service: api.Service) -> dict:
    return {'id': service.model, 'object': 'model', 'created': service.created,
            'owned_by': 'nanokv'}


async def _on_error(request, error):
    if isinstance(error, HTTPException):
        message = f'{request.method} {request.url.path}: {error.detail}'
        error = ApiError(error.status_code, message, headers=error.headers)
    elif not isinstance(error, ApiError):
        error = ApiError(500, 'internal error')
    request.scope['error'] = error
    return error_response(error)


def decoded(body: bytes):
    """The JSON document of a request. Many small lists take far longer than their bytes suggest."""
    if body.count(b'[') + body.count(b'{') > MAX_CONTAINERS:
        raise ApiError(400, f'the body has more than {MAX_CONTAINERS:,} lists and objects')
    try:
        return encodable(json.loads(body))
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f'the body is not JSON: {str(e)[:200]}') from e


async def body_of(request: Request, most: int) -> bytes:
    """Read a body of JSON of at most so many bytes."""
    kind = request.headers.get('content-type', '').partition(';')[0].strip().lower()
    if kind != 'application/json':  # browsers let any page send other types
        raise ApiError(415, f'content-type is {kind!r}: must be application/json')
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise ApiError(413, f'the body is larger than {most:,} bytes')
    return bytes(body)


class Parsers:
    """Two threads that parse and encode requests. A client has at most one of them."""

    def __init__(self):
        self.threads, self.locks = anyio.CapacityLimiter(2), weakref.WeakValueDictionary()

    async def run(self, parse: Callable, client: str, body: bytes):
        async with self.locks.setdefault(client, asyncio.Lock()):
            return await anyio.to_thread.run_sync(parse, body, limiter=self.threads,
                                                  abandon_on_cancel=True)


class Generation:
    """The response to one request for text. make_reply: (client, body) -> Reply, in a thread, so
    that it does not block other requests. received: `perf_counter` time."""

    def __init__(self, worker: Worker, service: api.Service,
                 make_reply: Callable[[str, bytes], Awaitable[Reply]]):
        self.worker, self.service, self.make_reply = worker, service, make_reply
        self.reply = self.ticket = None
        self.received = time.perf_counter()
        self.started = False          # the head of the response was sent
        self.inbox = asyncio.Queue()  # deliveries of the worker; None: client left

    async def __call__(self, scope, receive, send) -> None:
        """Respond. Raises ApiError only before the response has started."""
        self.scope, self.receive, self.send = scope, receive, send
        scope['generation'], watch = self, None
        try:
            async with asyncio.timeout(self.service.timeout):
                body = await body_of(Request(scope, receive), self.service.max_body)
                self.worker.check(scope['nanokv_client'])  # before parsing: it may take long
                watch = asyncio.create_task(self._watch())
                await self._respond(body)
        except ClientDisconnect:
            pass
        except (TimeoutError, ApiError) as e:
            error = e if isinstance(e, ApiError) else ApiError(
                504 if watch else 408, f'not done within {self.service.timeout:g} s: cancelled',
                headers={'x-should-retry': 'false'})  # for OpenAI's client
            if not self.started:
                raise error from None
            scope['error'] = error
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._send_events([error.document()], more=False),
                                       LAST_SEND_TIMEOUT)
        finally:
            if watch:
                watch.cancel()
            if self.ticket and not self.reply.complete:
                self.worker.cancel(self.ticket)
            self.ticket = None  # it refers to this object

    async def _watch(self):
        while (await self.receive())['type'] != 'http.disconnect':
            pass
        self.inbox.put_nowait(None)

    async def _respond(self, body):
        client = self.scope['nanokv_client']
        self.reply = await self.make_reply(client, body)
        loop = asyncio.get_running_loop()
        ticket = Ticket(self.reply.request.choices,
                        lambda items: loop.call_soon_threadsafe(self.inbox.put_nowait, items),
                        self.reply.watched, client, self.scope['nanokv_salt'],
                        self.reply.request.engine)
        self.worker.submit(ticket)
        self.ticket = ticket
        await (self._stream() if self.reply.request.stream else self._send_whole())

    async def _next_documents(self) -> list[dict]:
        """Of the next delivery, which has the events of one step."""
        documents, items = [], await self.inbox.get()
        if items is None:
            raise ClientDisconnect
        for choice, event in items:
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, RowView):
                documents.append(self.reply.cache_event(event, self.received))
            else:
                documents += self.reply.take(choice, event)
        return documents

    async def _send_whole(self):
        while not self.reply.complete:
            await self._next_documents()
        # in pieces: `json.dumps` of many log-probabilities would keep all other threads waiting
        encode = json.JSONEncoder().iterencode
        text = await anyio.to_thread.run_sync(lambda: ''.join(encode(self.reply.document())))
        self.started = True
        await Response(text, media_type='application/json')(self.scope, self.receive, self.send)

    async def _stream(self):
        """Server-sent events. The head waits for the first event: an error changes its status."""
        while not self.reply.complete:
            documents = await self._next_documents()
            if not self.started:
                self.started = True
                await self.send({'type': 'http.response.start', 'status': 200,
                                 'headers': STREAM_HEADERS})
            if documents:
                await self._send_events(documents)
        await self._send_events([*self.reply.last(), '[DONE]'], more=False)

    async def _send_events(self, documents, more=True):
        body = ''
        for document in documents:
            name = 'event: cache\n' if isinstance(document, CacheEvent) else ''
            text = document if isinstance(document, str) else json.dumps(document)
            body += f'{name}data: {text}\n\n'
        await self.send({'type': 'http.response.body', 'body': body.encode(), 'more_body': more})
