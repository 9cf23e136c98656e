"""Who may use the server: the Host header, API keys; and what is logged of a request."""
import contextlib
import hashlib
import hmac
import json
import socket
import time
from urllib.parse import urlsplit

from starlette.responses import Response

from serving.api import ApiError

CLOSING = (401, 403, 408, 413, 415)  # sent before the body was read: the connection is closed
UNLOGGED = ('/health', '/metrics', '/v1/models', '/nanokv/plan')  # polled by probes and by the page
OPEN = ('/health', '/')  # need no key
MAX_LOGGED = 200  # characters of a method and a path


def json_response(document: dict, status: int = 200, headers: dict | None = None) -> Response:
    # ASCII, since a message may quote half a surrogate pair
    return Response(json.dumps(document), status, headers, 'application/json')


def error_response(error: ApiError) -> Response:
    close = {'Connection': 'close'} if error.status in CLOSING else {}
    return json_response(error.document(), error.status, error.headers | close)


class AccessMiddleware:
    """Checks the Host header and the key, counts requests, and writes the request log.

    Adds to the scope nanokv_client, the client as the worker counts its requests (by key, or by
    address without keys), and nanokv_salt, the salt of its prefix cache.
    """

    def __init__(self, app, metrics, keys, request_log, paths: set[str], shared_prefix: bool):
        self.app, self.metrics = app, metrics
        self.keys = [key.encode(errors='surrogateescape') for key in keys]
        self.request_log, self.paths, self.shared_prefix = request_log, paths, shared_prefix

    async def __call__(self, scope, receive, send):
        if scope['type'] != 'http':
            return await self.app(scope, receive, send)
        start, status = time.perf_counter(), 499  # client closed request, if no response starts

        async def watching_status(message):
            nonlocal status
            status = message.get('status', status)
            await send(message)
        try:
            scope['error'] = error = self._denied(scope)
            await (error_response(error) if error else self.app)(scope, receive, watching_status)
        except Exception:
            status, scope['error'] = 500, ApiError(500, 'internal error')
            raise
        finally:
            route = scope['path'] if scope['path'] in self.paths else 'other'
            self.metrics.requests.labels(route, str(status)).inc()
            if self.request_log and not (status == 200 and scope['path'] in UNLOGGED):
                with contextlib.suppress(OSError):  # stdout is closed
                    self.request_log(log_line(scope, status, start))
            # cycles with the scope, which would keep prompts until the garbage collector runs
            error, _ = scope.pop('error'), scope.pop('generation', None)
            if error:
                error.__traceback__ = None

    def _denied(self, scope) -> ApiError | None:
        headers = dict(reversed(scope['headers']))  # the first of each name
        scope['nanokv_client'] = scope['client'][0] if scope['client'] else ''
        scope['nanokv_salt'] = b''
        if not self.keys:
            host, address = headers.get(b'host', b'').decode('latin-1'), scope['server'][0]
            if names_this_machine(host, address):
                return None
            return ApiError(403, f'the Host header does not name this server, which is {address} '
                                 'here: use that, or start the server with an API key')
        scheme, _, key = headers.get(b'authorization', b'').partition(b' ')
        key = key.strip() if scheme.lower() == b'bearer' else b''
        # compared with every key, so that the time does not depend on which one matches
        if sum(hmac.compare_digest(key, known) for known in self.keys):
            digest = hashlib.sha256(key).digest()
            scope['nanokv_client'] = digest.hex()
            scope['nanokv_salt'] = b'' if self.shared_prefix else digest
        elif scope['path'] not in OPEN:
            why = 'the key is not valid' if key else 'a key is needed: Authorization: Bearer KEY'
            return ApiError(401, why, code='invalid_api_key',
                            headers={'WWW-Authenticate': 'Bearer'})
        return None


def names_this_machine(host: str, address: str) -> bool:
    """Whether a Host header names the socket's own address, `address`, or this machine.

    Where no key is needed, this protects from DNS rebinding: a page in the user's browser whose
    name resolves to this machine sends its own name. An address cannot be rebound.
    """
    try:
        name = (urlsplit(f'//{host}').hostname or '').removesuffix('.')
    except ValueError:
        return False
    is_loopback = address == '::1' or address.startswith('127.')
    return (name in (address.lower(), socket.gethostname().lower())
            or name == 'localhost' and is_loopback)


def log_line(scope, status, start) -> str:
    """Return a line of the request log, in printable ASCII so that clients cannot forge lines. Of a
    refused request it says only the kind of the error, since messages quote requests."""
    error, generation, parts = scope['error'], scope.get('generation'), []
    reply = generation and generation.reply
    complete = reply and reply.complete
    if complete:
        usage = reply.usage()
        cached = usage['prompt_tokens_details']['cached_tokens']
        first_token = min(completion.ttft_s for completion in reply.completions)
        parts = [f"{usage['prompt_tokens']} prompt tokens ({cached} cached)",
                 f"{usage['completion_tokens']} completion tokens", f'TTFT {first_token:.3f} s']
    parts.append(f'{time.perf_counter() - start:.3f} s')
    if error:
        parts.append(error.code or error.kind if error.status < 500 else str(error))
    elif complete:
        parts += dict.fromkeys(completion.finish_reason for completion in reply.completions)
    elif generation or status == 499:
        parts.append('client left')
    address = scope['client'][0] if scope['client'] else '-'
    asked = f"{scope['method']} {scope['path']}"[:MAX_LOGGED]
    line = f"{address} {asked} {status}: {', '.join(parts)}"
    return time.strftime('%Y-%m-%d %H:%M:%S ') + line.encode('unicode_escape').decode()
