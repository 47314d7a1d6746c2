"""Runs the API in this process, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import types
from collections.abc import Callable

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.console import escape_controls
from paceline.serve.api import Api
from paceline.serve.limits import is_loopback


class Server(uvicorn.Server):
    """On SIGTERM or Ctrl-C it takes no more requests and finishes those in progress. A second signal ends it now."""

    def __init__(self, api: Api, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._api = api

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self._api.close())
        await super().shutdown(sockets)
        await closing

    def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
        # Not the base's, which raises the signal again at the end: a stop that was asked for is not an error.
        self._api.is_draining = True
        self.force_exit = self.should_exit
        self.should_exit = True


class Protocol(H11Protocol):
    """Closes a connection on which no whole head of a request arrives within `timeout_keep_alive`. The base class waits
    forever after the first byte."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None  # the base class would cancel it
        super().data_received(data)
        if timer is not None and self.conn.their_state is h11.IDLE:
            self.timeout_keep_alive_task = timer
        elif timer is not None:
            timer.cancel()


class EscapedFormatter(logging.Formatter):
    """Control characters become escapes, and lines after the first are indented: a traceback may hold text of a client,
    which must not look like another entry."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record)).replace("\n", "\n    ")


def check_address(host: str, api_key: str | None) -> None:
    """Raise ValueError for an address that others can reach, without an API key."""
    if not is_loopback(host) and not api_key:
        raise ValueError(
            f"--host {host}: other machines can reach this address; give an API key, in the environment variable "
            "PACELINE_API_KEY or with --api-key, or bind to 127.0.0.1"
        )


def bind(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded: a port that is taken is an error at once. Port 0: any free port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise ValueError(f"can't listen on {host}:{port}: {reason}; choose another --host or --port") from None
    return bound


def run(api: Api, bound: socket.socket, ready: Callable[[str], None]) -> None:
    """`ready` is called with the URL when clients can connect."""
    host, port = bound.getsockname()[:2]
    config = uvicorn.Config(
        api.app,
        http=Protocol,
        log_config=None,
        log_level="error",
        access_log=False,  # paths of clients must not get into logs
        server_header=False,
        lifespan="off",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=round(api.drain_s) + 5,  # requests end before, see `Api.close`
        ws="none",
    )
    handler = logging.StreamHandler()
    handler.setFormatter(EscapedFormatter("%(levelname)s: %(message)s"))
    for name in ("uvicorn", "asyncio", "paceline"):
        logging.getLogger(name).addHandler(handler)
    server = Server(api, config)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # for clients that do not read: connections inherit it
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * api.limits.send_timeout_s))
    bound.listen(2048)
    ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")
    server.run(sockets=[bound])


def api_key_of(option: str | None) -> str | None:
    """None for a blank one: it would be no key."""
    return (option or os.environ.get("PACELINE_API_KEY") or "").strip() or None
