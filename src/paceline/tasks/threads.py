"""Calls in threads that do not keep the program alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_in_daemon_thread(function: Callable[..., Result], *args: Any) -> Future[Result]:
    """Unlike the threads of a ThreadPoolExecutor, a daemon thread does not delay the end of the program."""
    future: Future[Result] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()  # from now on it can't be cancelled
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
