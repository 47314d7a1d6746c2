"""Errors of the API, in OpenAI's format."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paceline.serve.json_response import json_response

TYPES = {
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "model_not_found"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "service_unavailable"),
}


class ApiError(Exception):
    """An answer with this status. `param`: the key of the body that is wrong. `code`: other than the status' usual."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind, code = TYPES.get(self.status, ("invalid_request_error", None))
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code or code}}

    def response(self) -> Response:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        return json_response(self.body(), self.status, headers)


async def handle_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()
