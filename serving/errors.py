"""Errors of the HTTP API, as OpenAI's error documents."""

TYPES = {401: 'authentication_error', 429: 'rate_limit_error', 500: 'server_error',
         503: 'service_unavailable', 504: 'timeout_error'}


class ApiError(Exception):
    """An error response. param: the invalid field, or None. code: for programs, or None."""

    def __init__(self, status: int, message: str, param: str | None = None,
                 code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    @property
    def kind(self) -> str:
        return TYPES.get(self.status, 'invalid_request_error')

    def document(self) -> dict:
        return {'error': {'message': str(self), 'type': self.kind, 'param': self.param,
                          'code': self.code}}
