"""Names of hosts, bodies that do not arrive, and clients that do not read."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import uvicorn

from paceline.serve.event_stream import EventStream
from paceline.serve.limits import Guard, Limits, host_name, is_loopback
from paceline.serve.server import EscapedFormatter, Protocol, api_key_of, bind, check_address

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


def test_a_blank_api_key_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", " ")
    assert api_key_of(None) is None and api_key_of(" \n") is None and api_key_of(" a ") == "a"
    monkeypatch.setenv("PACELINE_API_KEY", "b\n")
    assert api_key_of(None) == "b"


def test_a_connection_without_a_whole_head_is_closed() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await asyncio.sleep(1.5)  # longer than a head may take
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, http=Protocol, lifespan="off", timeout_keep_alive=1, log_config=None)
    server = uvicorn.Server(config)
    bound = bind("127.0.0.1", 0)
    bound.listen()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n"
    try:
        for sent in (b"", head[:20], head + b"{}" + head[:20]):  # the last: a second request on the same connection
            with socket.create_connection(bound.getsockname(), timeout=30) as connection:
                connection.sendall(sent)
                started, received = time.monotonic(), b""
                for byte in head[20:]:  # slowly
                    connection.settimeout(0.2 if sent else 30)
                    try:
                        if not (piece := connection.recv(100)):
                            break
                        received += piece
                    except TimeoutError:
                        connection.sendall(bytes([byte]))
                else:
                    pytest.fail("it is still open")
                assert time.monotonic() - started < 9
                assert received.startswith(b"HTTP/1.1 200") == (len(sent) > 20)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


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
