"""An agent that is a Python function of the user: `async def agent(problem, client)`, or without `async`.

It runs in a thread with an event loop of its own, so that one that blocks costs only its sample. A thread can't be
killed: one that hangs after its deadline keeps running. Programs that may hang are better run as a command.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.agents.endpoint import Client, Endpoint
from paceline.agents.result import outcome_of
from paceline.tasks.agent import AgentFailed, Outcome, Policy
from paceline.tasks.pool import describe_error, user_line

Function = Callable[[dict[str, Any], Client], Any]


class FunctionAgent:
    """`problem`: the columns of its row, and the prompt."""

    def __init__(
        self,
        endpoint: Endpoint,
        function: Function,
        problem: Mapping[str, Any],
        *,
        template_kwargs: Mapping[str, Any] = {},
    ) -> None:
        self._endpoint, self._function, self._problem = endpoint, function, problem
        self._template_kwargs = template_kwargs

    async def run(self, policy: Policy) -> Outcome:
        with self._endpoint.session(policy, self._template_kwargs) as session:
            call = _Call(self._function, dict(self._problem), session.client)
            running = asyncio.wrap_future(call.result)
            try:
                await asyncio.wait((running, session.failed), return_when=asyncio.FIRST_COMPLETED)
                if session.failed.done():
                    session.failed.result()
                value, error = running.result()
            finally:
                call.cancel()
            if error is not None and session.backend.was_refused:
                return outcome_of(None, session)
            if error is not None:
                reason = session.client.hidden(describe_error(error))
                raise AgentFailed(f"its agent raised {reason}{user_line(error)}") from error
            return outcome_of(value, session)


class _Call:
    """One call of the function, in a daemon thread."""

    def __init__(self, function: Function, *args: Any) -> None:
        self.result: Future[tuple[Any, BaseException | None]] = Future()  # a future can't hold every exception
        self._function, self._args = function, args
        self._is_cancelled = False
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._run, name="paceline-agent", daemon=True).start()

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # the loop is closed: the function has ended
                self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self) -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = asyncio.run(self._main())
        except BaseException as raised:  # also SystemExit: it must not end the run silently
            error = raised
        with suppress(Exception):  # nobody waits any more
            self.result.set_result((value, error))

    async def _main(self) -> Any:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._is_cancelled:  # before its loop ran
            raise asyncio.CancelledError
        result = self._function(*self._args)
        return await result if inspect.isawaitable(result) else result


def import_agent(path: str) -> Function:
    """`module:function` with two arguments. Raises ValueError."""
    if (here := str(Path.cwd())) not in sys.path:  # so that a file in the current folder is found
        sys.path.insert(0, here)
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"task.agent = {path!r}: write a function as module:function")
    try:
        function: Any = importlib.import_module(module_name)
        for part in name.split("."):
            function = getattr(function, part)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        remedy = "install it, or change to its folder" if isinstance(error, ImportError) else "fix it"
        raise ValueError(f"task.agent = {path!r}: can't be imported ({describe_error(error)}); {remedy}") from error
    if not callable(function):
        raise ValueError(f"task.agent = {path!r}: is not a function; write async def {name}(problem, client)")
    try:
        inspect.signature(function).bind({}, None)
    except (TypeError, ValueError) as error:
        raise ValueError(f"task.agent = {path!r}: {error}; write async def {name}(problem, client)") from None
    return function
