"""What goes wrong with a request over HTTP: a status, and OpenAI's error document."""


class ApiError(Exception):
    """An answer in place of the one that was asked for.

    status: of HTTP. message: for people. param: the field that is meant, or None. code: for programs, or None. headers: to go
    with it.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}

    TYPES = {401: 'authentication_error', 429: 'rate_limit_error', 500: 'server_error', 503: 'service_unavailable',
             504: 'timeout_error'}

    def document(self) -> dict:
        return {'error': {'message': self.message, 'type': self.TYPES.get(self.status, 'invalid_request_error'),
                          'param': self.param, 'code': self.code}}


class ClientGone(Exception):
    """Nobody is there to be answered."""
