"""The event loop in which agents run, in a daemon thread.

An agent that raises anything costs only its own task. One that blocks the loop, for example with time.sleep, holds up
all others until it returns: blocking code belongs into asyncio.to_thread or a process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from paceline.tasks.agent import Agent, Outcome, Policy

Ended = Outcome | BaseException  # what an agent returned or raised


class AgentLoop:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="agents").start()

    def start(self, make_agent: Callable[[], Agent], policy: Policy) -> Future[Ended]:
        return asyncio.run_coroutine_threadsafe(_run(make_agent, policy), self._loop)


async def _run(make_agent: Callable[[], Agent], policy: Policy) -> Ended:
    try:
        outcome = await make_agent().run(policy)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit would end the loop
        return error
    return (
        outcome if isinstance(outcome, Outcome) else TypeError(f"returned a {type(outcome).__name__}, not an Outcome")
    )
