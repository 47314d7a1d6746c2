"""The OpenAI-compatible endpoint of a training run, on the loopback interface.

Every sample has a key of its own, which is both its API key and a part of its base URL: a client needs only one of
them. A key is valid while its sample runs. Invariant: a request reaches the sample of its key only, and nothing that an
agent sends costs more than its own sample.
"""

from __future__ import annotations

import asyncio
import resource
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import uvicorn

from paceline.agents.policy_backend import PolicyBackend, ended
from paceline.serve.api import Api
from paceline.serve.errors import ApiError
from paceline.serve.limits import Limits, Receive, Send
from paceline.serve.metrics import ServerMetrics
from paceline.serve.server import Protocol, bind
from paceline.tasks.agent import AgentFailed, Policy

HOST, MODEL = "127.0.0.1", "policy"
LIMITS = Limits(max_body_bytes=4 << 20, max_requests=64, max_samples=64)  # of each sample
MAX_OTHER_REQUESTS = 1000  # of a sample, besides those that got a completion; more are a flood
MAX_CONNECTIONS = 4096  # or half of the files that the process may open; then idle ones are closed
BACKLOG = 128  # connections that are accepted at once
UNKNOWN_KEY_S = 0.1  # before the answer to a request with an unknown key: who tries keys waits


@dataclass(frozen=True, slots=True)
class Client:
    """What an agent needs to reach the policy: `AsyncOpenAI(**client.options)`."""

    base_url: str
    api_key: str
    model: str = MODEL

    @property
    def options(self) -> dict[str, str]:
        return {"base_url": self.base_url, "api_key": self.api_key}

    def hidden(self, text: str) -> str:
        """A text for the records, without URL and key, which differ from run to run."""
        return text.replace(self.base_url, "$OPENAI_BASE_URL").replace(self.api_key, "$OPENAI_API_KEY")


class Session:
    """One sample at the endpoint. `failed` gets an AgentFailed if the agent abuses it."""

    def __init__(self, client: Client, backend: PolicyBackend, api: Api, loop: asyncio.AbstractEventLoop) -> None:
        self.client, self.backend, self.api, self._loop = client, backend, api, loop
        self.failed: asyncio.Future[None] = loop.create_future()
        self._num_requests = 0

    def count_request(self) -> None:
        """Raises ApiError if there were too many. On the endpoint's thread."""
        self._num_requests += 1
        if self._num_requests - self.backend.num_answered > MAX_OTHER_REQUESTS:
            self.backend.end()
            self._loop.call_soon_threadsafe(self._fail)
            raise ended()

    def _fail(self) -> None:
        if not self.failed.done():
            reason = f"its agent sent more than {MAX_OTHER_REQUESTS} requests that got no completion"
            self.failed.set_exception(AgentFailed(reason))


class Endpoint:
    """Starts with the first sample, in a thread of its own, and ends with the process, or with `close`."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._limits = limits
        self._sessions: dict[str, Session] = {}
        self._metrics = ServerMetrics()
        self._lock = threading.Lock()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._tokenizing: ThreadPoolExecutor | None = None
        self._port = 0

    @contextmanager
    def session(self, policy: Policy, template_kwargs: Mapping[str, Any] = {}) -> Iterator[Session]:
        """A sample, for as long as it runs. To be called in the loop in which the policy is called. `template_kwargs`:
        further variables of the chat template."""
        self._start()
        assert self._tokenizing is not None
        key, loop = f"sk-{secrets.token_urlsafe(24)}", asyncio.get_running_loop()
        client = Client(f"http://{HOST}:{self._port}/{key}/v1", key)
        backend = PolicyBackend(policy, loop, self._tokenizing, template_kwargs)
        api = Api(backend, MODEL, self._limits, metrics=self._metrics, for_agent=True)
        session = Session(client, backend, api, loop)
        self._sessions[key] = session
        try:
            yield session
        finally:
            del self._sessions[key]
            backend.end()
            session.failed.cancel()
            if session.failed.done() and not session.failed.cancelled():
                session.failed.exception()  # somebody has seen it, or nobody needs to

    def close(self) -> None:
        with self._lock:
            if self._server is None or self._thread is None or self._tokenizing is None:
                return
            self._server.should_exit = self._server.force_exit = True
            self._thread.join(10)
            self._tokenizing.shutdown(cancel_futures=True)
            self._server = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        session, path = self._find(scope)
        try:
            if session is None:
                await asyncio.sleep(UNKNOWN_KEY_S)
                message = "Incorrect API key provided: it is not the key of a sample that runs"
                raise ApiError(401, message)
            session.count_request()
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
        await session.api.app(inner, receive, send)

    def _find(self, scope: MutableMapping[str, Any]) -> tuple[Session | None, str]:
        """The sample of a request, and the path below its URL. A key in the path goes before the API key."""
        path = scope["path"]
        first, _, rest = path.removeprefix("/").partition("/")
        if first.startswith("sk-"):
            return self._sessions.get(first), f"/{rest}"
        authorization = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        scheme, _, key = authorization.partition(" ")
        return (self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None), path

    def _start(self) -> None:
        with self._lock:
            if self._server is not None:
                return
            bound = bind(HOST, 0)
            bound.listen(BACKLOG)  # now: the thread may start later than the first agent
            self._port = bound.getsockname()[1]
            config = uvicorn.Config(
                self, http=Connection, backlog=BACKLOG, log_config=None, log_level="critical", access_log=False,
                server_header=False, lifespan="off", timeout_keep_alive=30, timeout_graceful_shutdown=1, ws="none",
            )  # fmt: skip
            self._server = uvicorn.Server(config)
            self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="paceline-agent-tokenizer")
            arguments = self._server, bound
            self._thread = threading.Thread(target=_serve, args=arguments, name="paceline-endpoint", daemon=True)
            self._thread.start()


class Connection(Protocol):
    """Closes the oldest idle connection if there are too many: an agent that opens many must not take all files that
    the trainer may open. A connection that has sent no whole head of a request is idle too."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.opened_s = time.monotonic()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 2)
        if len(self.connections) <= most:
            return
        found = [each for each in self.connections if isinstance(each, Connection)]
        connections = [each for each in found if not each.transport.is_closing()]
        idle = [each for each in connections if each.cycle is None or each.cycle.response_complete]
        if len(connections) > most and idle:
            min(idle, key=lambda each: each.opened_s).transport.close()


def _serve(server: uvicorn.Server, bound: socket.socket) -> None:
    with suppress(asyncio.CancelledError), bound:
        asyncio.run(server.serve(sockets=[bound]))
