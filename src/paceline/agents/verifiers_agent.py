"""Runs episodes of a `verifiers` environment, as agents.

The environment has a thread with an event loop of its own: its code may block, and must not stop the agents of other
tasks. Its resources, such as shared tool servers, live as long as the thread.

Invariants:
  - An episode that fails costs its sample only, whose failure names the cause.
  - If the environment's code blocks its event loop, the samples in it run into their time limit. The next sample gets
    a new thread, with a new environment.
"""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.dialects.chat import message_to_wire

from paceline.agents.verifiers_client import MODEL, POLICY, PolicyClient, PolicyInterception
from paceline.chat.messages import Message
from paceline.config import TaskSection
from paceline.rl.agent_loop import cancel_others
from paceline.tasks.agent import AgentFailed, Outcome, Policy

BLOCKED_S = 10.0  # an event loop that does not answer for so long is blocked
CLOSE_S = 5.0
LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens")  # reasons why a trace stops
Result = TypeVar("Result")


class VerifiersAgent:
    """One sample: an episode of one task."""

    def __init__(self, environment: Environment, task: Any) -> None:
        self._environment, self._task = environment, task

    async def run(self, policy: Policy) -> Outcome:
        thread = await self._environment.thread()
        # Its calls come from the thread's event loop.
        client = PolicyClient(policy, self._environment.template_kwargs)
        episode = await across(thread.loop, lambda: thread.episode(self._task, client))
        return outcome(episode, client)


def outcome(episode: Any, client: PolicyClient) -> Outcome:
    """The reward of the trace that the policy made."""
    if not episode.ok:
        if client.error is not None:
            raise client.error
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "is not complete"
        raise AgentFailed(f"its episode failed: {reason}")
    traces = [trace for trace in episode.traces if trace.id in client.traces]
    if len(traces) > 1:
        raise AgentFailed(
            f"the policy played {len(traces)} agents of one episode, and it is not known which reward is whose; use an "
            "environment in which it plays one"
        )
    trace = (traces or episode.traces)[0]
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    return Outcome(
        reward=trace.reward if rewards else None,
        messages=longest(trace),
        metrics=metrics | {f"reward/{name}": value for name, value in rewards.items()},
        finish_reason="budget" if trace.stop_condition in LIMITS else None,
    )


def longest(trace: Any) -> list[Message]:
    """The messages of the longest branch. The order of the branches in a trace depends on timing; this one does not."""
    branches = [[message_to_wire(message) for message in branch.messages] for branch in trace.branches]
    return max(branches, key=lambda messages: (len(messages), json.dumps(messages, sort_keys=True)), default=[])


class Environment:
    """A `verifiers` environment by its configuration. `environment`: the one that the tasks were read from."""

    def __init__(self, config: Any, environment: Any, section: TaskSection) -> None:
        self.config, self.template_kwargs = config, section.chat_template_kwargs
        self._unused = environment  # for the first thread
        self._thread: EnvironmentThread | None = None
        self._lock = threading.Lock()

    async def thread(self) -> EnvironmentThread:
        """One whose event loop is not blocked."""
        thread = self._thread
        if thread is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(across(thread.loop, lambda: asyncio.sleep(0)), BLOCKED_S)
                return thread
        with self._lock:
            if self._thread is thread:
                environment, self._unused = self._unused or vf.load_environment(self.config), None
                self._thread = EnvironmentThread(environment)
                weakref.finalize(self, self._thread.close)  # at the latest at the end of the program
            found = self._thread
        assert found is not None
        return found

    def close(self) -> None:
        with self._lock:
            if self._thread is not None:
                self._thread.close()


class EnvironmentThread:
    """Runs episodes. Its daemon thread does not delay the end of the program."""

    def __init__(self, environment: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self._environment = environment
        self._clients: dict[str, PolicyClient] = {}  # by trace
        self._context = ModelContext(model=MODEL, client=POLICY)
        self._serving: asyncio.Task[None] | None = None
        self._is_open: asyncio.Future[None] | None = None
        self._thread = threading.Thread(target=self.loop.run_forever, name="verifiers", daemon=True)
        self._thread.start()

    async def episode(self, task: Any, client: PolicyClient) -> Any:
        """Runs in this thread's event loop, as do all methods below."""
        await self._open()
        traces: list[str] = []

        def on_trace(trace: Any) -> None:
            traces.append(trace.id)
            self._clients[trace.id] = client

        try:
            return await self._environment.run_episode(task, self._context, on_trace=on_trace)
        finally:
            for trace in traces:
                del self._clients[trace]

    async def _open(self) -> None:
        if self._is_open is None or (self._is_open.done() and self._is_open.exception() is not None):
            self._is_open = self.loop.create_future()
            self._serving = self.loop.create_task(self._serve(self._is_open))
        await asyncio.shield(self._is_open)

    async def _serve(self, is_open: asyncio.Future[None]) -> None:
        """Holds the environment's resources until it is cancelled. Only one task may enter and leave them."""
        try:
            async with self._environment.serving():
                # verifiers chooses clients by their configuration only, so its interception is wrapped.
                inner = self._environment._interception
                self._environment._interception = PolicyInterception(inner, self._clients)
                is_open.set_result(None)
                await asyncio.Event().wait()
        except BaseException as error:
            if not is_open.done():
                is_open.set_exception(AgentFailed(f"its environment does not start: {type(error).__name__}: {error}"))
            elif not isinstance(error, asyncio.CancelledError):
                raise

    def close(self) -> None:
        """Release the environment's resources and end the thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self.loop)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    async def _close(self) -> None:
        await cancel_others()
        self.loop.stop()


async def across(loop: asyncio.AbstractEventLoop, call: Callable[[], Awaitable[Result]]) -> Result:
    """Await a coroutine in another event loop. Cancelling it does not wait for that loop."""

    async def run() -> Result:
        return await call()

    future: Future[Result] = asyncio.run_coroutine_threadsafe(run(), loop)
    return await asyncio.wrap_future(future)
