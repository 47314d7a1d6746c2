"""The event loop in which agents run, in a daemon thread.

An agent that raises anything costs only its own task. One that blocks the loop, for example with time.sleep, holds up
all others: `blocked_by` finds it. Blocking code belongs into asyncio.to_thread or a process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from paceline.tasks.agent import Agent, AgentFailed, Outcome, Policy

BLOCKED_S = 30.0  # how long an agent may block the loop
CLOSE_S = 10.0

Ended = Outcome | BaseException  # what an agent returned or raised

_policy: ContextVar[Policy | None] = ContextVar("policy", default=None)  # of the agent; tasks that it starts inherit it


class AgentLoop:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._make_task)
        self._policies: WeakKeyDictionary[asyncio.Task[Any], Policy | None] = WeakKeyDictionary()
        self._asked_at: float | None = None  # when the loop was asked for a sign of life that it has not given
        self._is_closing = False
        self._thread = threading.Thread(target=self._run_loop, daemon=True, name="paceline-agents")
        self._thread.start()

    def start(self, make_agent: Callable[[], Agent], policy: Policy) -> Future[Ended]:
        return asyncio.run_coroutine_threadsafe(self._run(make_agent, policy), self._loop)

    def blocked_by(self) -> Policy | None:
        """The policy of the agent that has blocked the loop for BLOCKED_S. Call it regularly, from one thread."""
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            self._loop.call_soon_threadsafe(self._answer)
        elif now - self._asked_at > BLOCKED_S and (task := asyncio.current_task(self._loop)) is not None:
            return self._policies.get(task)
        return None

    def close(self) -> None:
        """Cancel what still runs, and end the thread. Waits at most CLOSE_S: an agent may block the loop."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        self._thread.join(CLOSE_S)

    async def _close(self) -> None:
        await cancel_others()
        self._is_closing = True
        self._loop.stop()

    def _run_loop(self) -> None:
        while not self._is_closing:
            with suppress(SystemExit, KeyboardInterrupt):  # of a task that an agent has started: it stops the loop
                self._loop.run_forever()

    def _answer(self) -> None:
        self._asked_at = None

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **settings: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **settings)
        self._policies[task] = _policy.get()
        return task

    async def _run(self, make_agent: Callable[[], Agent], policy: Policy) -> Ended:
        _policy.set(policy)
        if (task := asyncio.current_task()) is not None:
            self._policies[task] = policy
        try:
            outcome = await make_agent().run(policy)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit would end the loop
            return error
        return outcome if isinstance(outcome, Outcome) else TypeError(f"returned {type(outcome).__name__}, no Outcome")


async def cancel_others() -> None:
    """Cancel all other tasks of the event loop, and wait for their end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def ended(future: Future[Ended]) -> Ended:
    """What an agent returned or raised."""
    return AgentFailed("its agent was cancelled") if future.cancelled() else future.result()  # it cancelled itself
