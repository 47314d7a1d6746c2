"""Names of hosts, bodies that do not arrive, and clients that do not read."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from paceline.serve.event_stream import EventStream
from paceline.serve.limits import Guard, Limits, host_name, is_loopback
from paceline.serve.server import EscapedFormatter, bind, check_address

JSON = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]


@pytest.mark.parametrize(
    ("header", "name", "loopback"),
    [
        ("127.0.0.1:8000", "127.0.0.1", True),
        ("localhost", "localhost", True),
        ("[::1]:80", "::1", True),
        ("[::1]", "::1", True),
        ("127.1.2.3", "127.1.2.3", True),
        ("0.0.0.0", "0.0.0.0", False),
        ("10.0.0.1:80", "10.0.0.1", False),
        ("localhost.evil.com", "localhost.evil.com", False),
        ("evil.com:127.0.0.1", "evil.com:127.0.0.1", False),
        ("", "", False),
    ],
)
def test_host_names(header: str, name: str, loopback: bool) -> None:
    assert host_name(header) == name and is_loopback(name) == loopback


def answer_of(messages: list[dict[str, Any]], limits: Limits) -> int:
    """The status that the guard answers with, to a body that stops after these messages."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"{}"
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        if not messages:
            await asyncio.sleep(60)
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": JSON}
    asyncio.run(asyncio.wait_for(Guard(app, limits, None)(scope, receive, send), 10))
    return int(sent[0]["status"])


def test_a_body_in_parts() -> None:
    limits, patient = Limits(max_body_bytes=4, body_timeout_s=0.05), Limits(max_body_bytes=4)
    parts = [{"type": "http.request", "body": part, "more_body": part != b"}"} for part in (b"{", b"}")]
    assert answer_of(parts.copy(), patient) == 200
    assert answer_of(parts[:1], limits) == 408, "the rest does not arrive"
    assert answer_of([{"type": "http.request", "body": b"12345", "more_body": False}], patient) == 413


@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_that_does_not_read_ends_the_stream(leaves: bool) -> None:
    closed: list[bool] = []

    async def items() -> AsyncGenerator[dict[str, Any]]:
        try:
            while True:
                yield {"a": 1}
        finally:
            closed.append(True)

    async def receive() -> Any:
        await asyncio.sleep(0.05 if leaves else 60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)  # the buffer is full

    stream = EventStream(items(), timeout_s=60 if leaves else 0.05)
    asyncio.run(asyncio.wait_for(stream({}, receive, send), 10))
    assert closed == [True]


def test_addresses() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check_address(host, None)
    for host in ("0.0.0.0", "::", "example.com", "10.0.0.1"):
        check_address(host, "key")
        with pytest.raises(ValueError, match="give an API key"):
            check_address(host, None)


def test_a_port_in_use_is_an_error() -> None:
    with bind("127.0.0.1", 0) as bound:
        bound.listen()
        with pytest.raises(ValueError, match="the port is in use"):
            bind("127.0.0.1", bound.getsockname()[1])


def test_logs_are_escaped() -> None:
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        record = logging.LogRecord("uvicorn", logging.ERROR, "", 1, "failed: \x9b", (), sys.exc_info())
    text = EscapedFormatter("%(message)s").format(record)
    assert "failed: \\x9b" in text and "ValueError: \\x1b[2J" in text and "\x1b" not in text
