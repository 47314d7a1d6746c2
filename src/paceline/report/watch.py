"""`paceline watch RUN`: serves a run's page on 127.0.0.1 while the run trains. It only reads.

The page contains prompts and completions, so it must not leak to other users of the machine, or to web pages that are
open in the same browser. A request must have the token of the address, which is new at every start, and a Host header
that names this server (a page of another host whose name resolves to 127.0.0.1 has another one). There is one resource.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from urllib.parse import urlsplit

from paceline.report.html import page_policy, render_page, to_bytes
from paceline.report.run import read_run

ADDRESS = "127.0.0.1"
FILES = ("run.json", "config.toml", "metrics.jsonl", "rollouts.jsonl", "trace.jsonl", "summary.json")
MIN_INTERVAL_S = 1.0  # between two readings of the run
MAX_SHARE = 0.1  # of the time spent on reading the run: training needs the cores
REFUSED = (  # the body of a 403; live.js says the same
    "Refused (403). Open the address that `paceline watch` printed; if you forward the port, use the same number on "
    "both sides"
)


class LivePage:
    """The page of a run, made again when a file of the run has changed. Raises ValueError if the folder has no run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._render()

    def current(self) -> tuple[str, bytes]:
        """(ETag, content)"""
        with self._lock:
            if time.monotonic() >= self._next_s and self._stamps() != self._rendered:
                # A run that resumes truncates its files; one that is removed has none. Then the last page stays, and
                # the next reading is after the usual interval.
                with contextlib.suppress(ValueError, OSError):
                    self._render()
            return self._tag, self._content

    def _render(self) -> None:
        started_s = time.monotonic()
        stamps = self._stamps()  # before reading: what is written meanwhile is a change
        try:
            content = to_bytes(render_page(read_run(self._folder, growing=True), live=True))
        finally:  # a failed reading takes time too
            now_s = time.monotonic()
            self._next_s = now_s + max(MIN_INTERVAL_S, (now_s - started_s) / MAX_SHARE)
        self._rendered, self._content = stamps, content
        self._tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        """Changes if a file changes."""
        stamps: list[tuple[int, int, int] | None] = []
        for name in FILES:
            try:
                found = os.lstat(self._folder / name)
                stamps.append((found.st_ino, found.st_size, found.st_mtime_ns))
            except OSError:
                stamps.append(None)
        return stamps


class WatchServer(ThreadingHTTPServer):
    """Serves a live page at `url`. Raises ValueError if the port can't be used."""

    daemon_threads = True

    def __init__(self, page: LivePage, port: int = 0) -> None:
        self.page = page
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"can't be used ({error.strerror})"
            raise ValueError(f"--port {port} {reason}: give another port, or leave out --port for a free one") from None
        port = self.server_address[1]
        self.hosts = {f"{ADDRESS}:{port}", f"localhost:{port}"}
        if port == 80:  # which browsers leave out
            self.hosts |= {ADDRESS, "localhost"}
        self.url = f"http://{ADDRESS}:{port}/{self.token}/"

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's looks up the host's name, which may wait for a name server
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that goes away is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version = "paceline"
    sys_version = ""
    timeout = 10  # seconds for a request's headers

    def do_GET(self) -> None:
        if not self._is_allowed():
            self._refuse(HTTPStatus.FORBIDDEN)
        elif self._path()[2:] not in ([], [""]):
            self._refuse(HTTPStatus.NOT_FOUND)
        else:
            tag, content = self.server.page.current()
            is_known = self.headers.get("If-None-Match") == tag
            status = HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK
            self._reply(status, b"" if is_known else content, "text/html; charset=utf-8", ETag=tag)

    do_HEAD = do_GET

    def _path(self) -> list[str]:
        """["", token, …]"""
        try:
            return urlsplit(self.path).path.split("/")
        except ValueError:
            return []

    def _is_allowed(self) -> bool:
        hosts = self.headers.get_all("Host", [])
        token = (self._path()[1:2] or [""])[0]
        has_token = hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        return has_token and len(hosts) == 1 and hosts[0] in self.server.hosts

    def _refuse(self, status: HTTPStatus) -> None:
        text = REFUSED if status == HTTPStatus.FORBIDDEN else f"{status.value} {status.phrase}"
        self._reply(status, f"{text}\n".encode(), "text/plain; charset=utf-8")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """For what BaseHTTPRequestHandler refuses: other methods, and requests that it can't read."""
        status = HTTPStatus(code)
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED if status == HTTPStatus.NOT_IMPLEMENTED else status)

    def _reply(self, status: HTTPStatus, content: bytes, kind: str, **headers: str) -> None:
        self.send_response_only(status)
        fixed = {
            "Server": self.server_version,
            "Date": self.date_time_string(),
            "Connection": "close",
            "Cache-Control": "no-store",
            "Content-Security-Policy": f"{page_policy(live=True)}; frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            fixed["Allow"] = "GET, HEAD"
        if status != HTTPStatus.NOT_MODIFIED:
            fixed |= {"Content-Type": kind, "Content-Length": str(len(content))}
        for name, value in (fixed | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """No log: paths have the token."""
