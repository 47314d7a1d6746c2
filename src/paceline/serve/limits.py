"""What a client may ask for, and who may ask: size of the body, Host header, content type and API key."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from paceline.serve.errors import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Limits:
    max_body_bytes: int = 8 << 20
    max_requests: int = 1024  # that run or wait at the same time; more get 429
    max_samples: int = 128  # of one request: prompts times n
    max_tokens: int | None = None  # per sample; None: the model's context
    max_stop_strings: int = 16
    max_stop_chars: int = 256  # of a stop string
    max_logprobs: int = 20
    max_listed: int = 1024  # entries of logit_bias, bad_words, allowed_token_ids and stop_token_ids
    max_tools: int = 128
    max_grammar_chars: int = 1 << 15  # of a schema, a regular expression or a grammar
    compile_timeout_s: float = 10.0  # of these
    body_timeout_s: float = 30.0  # for the whole body to arrive
    send_timeout_s: float = 60.0  # a client that does not read for so long is disconnected


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """The name in a Host header, without the port."""
    name, _, port = header.strip().lower().rpartition(":")
    if not name or not port.isdecimal():
        name = header.strip().lower()
    return name.removeprefix("[").removesuffix("]")


class Guard:
    """Middleware in front of all routes.

    Without an API key the server is bound to the loopback interface, and only requests for a loopback name are
    answered: a web page of another host, whose name was made to resolve to 127.0.0.1, sends its own name. A web page
    can't send JSON to another origin without asking first, which this server does not allow, so the type of a body must
    be JSON.
    """

    def __init__(self, app: App, limits: Limits, api_key: str | None) -> None:
        self._app, self._limits, self._num_posts = app, limits, 0
        self._api_key = api_key.encode() if api_key is not None else None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        is_post = scope["method"] == "POST"
        try:
            self._check(scope)
            if not is_post:  # a body is not read
                await self._app(scope, receive, send)
                return
            if self._num_posts >= self._limits.max_requests:
                raise ApiError(429, "Too many requests are in progress; try again later")
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        self._num_posts += 1
        try:
            await self._post(scope, receive, send)
        finally:
            self._num_posts -= 1

    async def _post(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                messages = await self._read_body(scope, receive)
        except TimeoutError:
            await ApiError(408, "The body did not arrive in time").response()(scope, receive, send)
            return
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if messages is None:
            return  # the client has gone

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)

    def _check(self, scope: MutableMapping[str, Any]) -> None:
        headers = Headers(scope=scope)
        if self._api_key is None:
            hosts = headers.getlist("host")
            if len(hosts) != 1 or not is_loopback(host_name(hosts[0])):
                raise ApiError(403, "The Host header does not name this machine's loopback interface")
        elif scope["path"] != "/health":
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self._api_key):
                raise ApiError(401, "Incorrect API key provided; send it as Authorization: Bearer KEY")
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(415, "The content type must be application/json")

    async def _read_body(self, scope: MutableMapping[str, Any], receive: Receive) -> list[Message] | None:
        """The whole body as one message."""
        limit, body = self._limits.max_body_bytes, bytearray()
        too_large = ApiError(413, f"The body is larger than {limit} bytes")
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise too_large
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > limit:
                raise too_large
            if not message.get("more_body", False):
                return [{"type": "http.request", "body": bytes(body), "more_body": False}]
