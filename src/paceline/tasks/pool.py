"""Worker processes for calls that may hang, crash or use too much memory. Such a worker is killed and replaced.

A call is `factory(*setup)(*args)`. `factory` is an importable function that loads what the call needs, once per worker
and with a timeout of its own. The function that it returns is called with the caller's timeout.

Invariants: results come in the order of the calls; a call that fails costs only its own result; `map` always returns.
Several threads may call `map` at once: they share the workers, and a slow call holds only its own worker. A call whose
worker ends is repeated once in a new worker, because something else may have killed the first one.

Workers are fresh interpreters: not forks, because the parent has threads, and not multiprocessing's, which would run
the user's main script again. Each has its own session, so that Ctrl-C reaches only the parent, and ends when the parent
ends.

Calls are sent as pickles, answers come back as lines of JSON: code in a worker may be hostile, and the parent must
never execute what a worker sends. An invalid message costs the call and the worker.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOAD_TIMEOUT_S = 180.0  # for a worker to start and load: imports from a cold disk are slow
POLL_S = 0.5  # how often a worker that sends nothing is checked
MAX_REPLY_BYTES = 64 << 20  # a worker that sends more is killed
MAX_LOST_CALLS = 16  # after so many calls hung or crashed and none succeeded, the function itself is broken: give up

Factory = Callable[..., Callable[..., Any]]

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from paceline.tasks.pool import run_worker; run_worker(int(sys.argv[1]))"
)


@dataclass(frozen=True, slots=True)
class Failed:
    """A call without a result. `reason` continues a sentence that begins with the function's name."""

    reason: str
    # Its arguments are to blame: the loaded function hung, crashed or ran out of memory. False: the function could not
    # be loaded, the call could not be sent, or the function raised an exception.
    by_arguments: bool = False


class BadArguments(Exception):
    """Raised by a function from another exception for which the call's arguments are to blame."""


class WorkerLost(Exception):
    """A call failed and cost its worker: it hung, crashed or sent an invalid message. The text is the reason."""

    by_arguments = False  # as in `Failed`


class WorkerEnded(WorkerLost):
    """The worker's process ended during the call."""


class Worker:
    """The parent's side of a worker: its process and the connection to it."""

    def __init__(self) -> None:
        self.connection, workers_end = socket.socketpair()
        with workers_end:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(workers_end.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=[workers_end.fileno()],
                start_new_session=True,
            )
        self.incoming = bytearray()
        self.state = "idle"  # during a call: "taken", "loading" or "calling"
        self.loaded_jobs: set[bytes] = set()

    def call(self, job: bytes, data: bytes, timeout_s: float) -> Any:
        """The result of a call, or `Failed`. Raises WorkerLost if this worker can't be used again."""
        is_new = job not in self.loaded_jobs
        self.loaded_jobs.add(job)
        self._enter("loading" if is_new else "calling", LOAD_TIMEOUT_S if is_new else timeout_s)
        with contextlib.suppress(OSError):  # a dead worker is detected when its reply is read
            self.connection.settimeout(self.limit_s)
            self.connection.sendall(data)
        kind, value = self._receive_message()
        if has_loaded := kind == "loaded":
            self._enter("calling", timeout_s)
            kind, value = self._receive_message()
        if kind in ("loaded", "result") and (kind == "loaded") == has_loaded:
            raise WorkerLost(f"sent {kind!r} unexpectedly")
        self.state = "idle"
        return value if kind == "result" else Failed(value, by_arguments=kind == "bad arguments")

    def _enter(self, state: str, limit_s: float) -> None:
        self.state, self.limit_s, self.deadline_s = state, limit_s, time.monotonic() + limit_s

    def _receive_message(self) -> tuple[str, Any]:
        searched = 0
        while (end := self.incoming.find(b"\n", searched)) < 0:
            searched = len(self.incoming)
            self._receive()
        line = bytes(self.incoming[:end])
        del self.incoming[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WorkerLost(f"sent an invalid message: not JSON ({describe_error(error)})") from None
        match message:
            case ["loaded", None] | ["result", _] | ["error" | "bad arguments", str()]:
                return message[0], message[1]
        raise WorkerLost("sent an invalid message")

    def _receive(self) -> None:
        """Receive some bytes, or none after `POLL_S`."""
        # Checked before reading: what a worker sent before its end still counts. The connection of an ended worker
        # stays open if a child of the worker holds it.
        has_ended = self.process.poll() is not None
        left_s = self.deadline_s - time.monotonic()
        try:
            self.connection.settimeout(1e-3 if has_ended else max(1e-3, min(left_s, POLL_S)))
            part: bytes | None = self.connection.recv(1 << 20)
        except TimeoutError:
            part = b"" if has_ended else None
        except OSError:
            part = b""
        if part == b"":
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL_S)
            raise WorkerEnded(_exit_of(self.process))
        self.incoming += part or b""
        if len(self.incoming) > MAX_REPLY_BYTES:
            raise WorkerLost("sent an invalid message: too long")
        if left_s < 0 and b"\n" not in (part or b""):
            verb = "took more than {:g} s to load" if self.state == "loading" else "did not return within {:g} s"
            raise WorkerLost(verb.format(self.limit_s))

    def is_usable(self) -> bool:
        """Whether this idle worker is alive and sent nothing after its last reply."""
        try:
            self.connection.setblocking(False)
            self.connection.recv(1, socket.MSG_PEEK)  # it sent more, or closed the connection
        except BlockingIOError:
            return not self.incoming and self.process.poll() is None
        except OSError:
            pass
        return False

    def kill(self) -> None:
        """Kills the worker and the processes that it started in its session. May be called again."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.returncode is None:  # not yet reaped, so the process id is not reused
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Pool:
    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._workers: list[Worker] = []
        self._free = threading.BoundedSemaphore(num_workers)  # held during a call
        self._lock = threading.RLock()  # held to choose or start a worker, and to close
        self._is_closed = False
        atexit.register(self.close)

    def map(
        self, factory: Factory, setup: tuple[Any, ...], calls: Sequence[tuple[Any, ...]], timeout_s: float
    ) -> list[Any]:
        """The result of every call, or `Failed`. Each call may take `timeout_s`."""
        assert not self._is_closed
        job = pickle.dumps((factory, setup))
        results: list[Any] = [None] * len(calls)
        # Samples of one problem are similar and adjacent. Shuffled, they do not all fail first and make `map` give up.
        waiting = iter(random.Random(0).sample(range(len(calls)), len(calls)))
        lost: list[Failed] = []
        succeeded: list[int] = []
        calling: list[Worker] = []
        errors: list[BaseException] = []
        is_interrupted = False

        def call(data: bytes) -> Any:
            with self._lock:
                if is_interrupted:
                    raise RuntimeError("the calls were interrupted")
                worker = self._take_worker()
                calling.append(worker)
            try:
                return worker.call(job, data, timeout_s)
            except WorkerLost as error:
                error.by_arguments = worker.state == "calling"
                self._discard([worker])
                raise
            finally:
                calling.remove(worker)

        def run(index: int) -> Any:
            if len(lost) >= MAX_LOST_CALLS and not succeeded:
                reason = f"was not called: {len(lost)} calls hung or crashed, none succeeded"
                return Failed(reason, by_arguments=lost[0].by_arguments)
            try:
                data = pickle.dumps((job, calls[index]))
            except Exception as error:  # pickle may raise any exception
                return Failed(f"can't be sent to a worker: {describe_error(error)}")
            try:
                try:
                    result = call(data)
                except WorkerEnded:  # something else may have killed it
                    result = call(data)
            except WorkerLost as error:
                lost.append(Failed(str(error), error.by_arguments))
                return lost[-1]
            if not isinstance(result, Failed):
                succeeded.append(index)
            return result

        def run_calls() -> None:
            try:
                has_more = True
                while has_more:
                    with self._free:
                        if has_more := (index := next(waiting, None)) is not None:  # shared by the threads
                            results[index] = run(index)
            except BaseException as error:
                errors.append(error)

        # Daemons, so that the interpreter can exit during a call.
        threads = [threading.Thread(target=run_calls, daemon=True) for _ in calls[: self._num_workers]]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if self._is_closed:
                raise RuntimeError("the pool was closed")
            if errors:
                raise errors[0]
        except BaseException:  # for example Ctrl-C
            with self._lock:
                is_interrupted = True
            self._discard(list(calling))
            raise
        return results

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._discard(list(self._workers))
        atexit.unregister(self.close)

    def _take_worker(self) -> Worker:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the pool was closed")
            idle = [worker for worker in self._workers if worker.state == "idle"]
            usable = [worker for worker in idle if worker.is_usable()]
            self._discard([worker for worker in idle if worker not in usable])
            if not usable:
                usable = [Worker()]
                self._workers += usable
            usable[0].state = "taken"
            return usable[0]

    def _discard(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            worker.kill()
            with contextlib.suppress(ValueError):  # another thread has removed it
                self._workers.remove(worker)


def _exit_of(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    if code is None:
        return "closed its connection"
    return f"killed its process (signal {-code})" if code < 0 else f"ended its process (exit code {code})"


def run_worker(fd: int) -> None:
    """The main loop of a worker: load, call, answer, until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(fd, False)  # processes that the function starts must not keep the connection open
    os.dup2(2, 1)  # the function's prints go to standard error
    with contextlib.suppress(OSError):  # when memory runs out, the kernel kills this process before the trainer
        Path("/proc/self/oom_score_adj").write_text("700")
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    pid = os.getpid()
    connection = socket.socket(fileno=fd)
    calls = connection.makefile("rb")
    functions: dict[bytes, Callable[..., Any]] = {}  # by job
    while True:
        try:
            job, args = pickle.load(calls)
        except (EOFError, OSError, pickle.UnpicklingError):
            os._exit(0)  # the parent has ended, or has closed the pool
        try:
            if job not in functions:
                factory, setup = pickle.loads(job)
                functions[job] = factory(*setup)
            connection.sendall(b'["loaded", null]\n')
            reply = json.dumps(["result", functions[job](*args)])
        except BaseException as error:  # also SystemExit: it must not end the worker
            is_loaded = job in functions
            is_bad = is_loaded and isinstance(error, MemoryError | BadArguments)
            raised = error.__cause__ if isinstance(error, BadArguments) and error.__cause__ is not None else error
            what = f"{'raised' if is_loaded else 'could not be loaded:'} {describe_error(raised)}{user_line(raised)}"
            reply = json.dumps(["bad arguments" if is_bad else "error", what])
        if os.getpid() != pid:
            os._exit(1)  # the function forked and the child returned: only the parent may answer
        connection.sendall(reply.encode() + b"\n")


def _exit_with_parent(parent: int) -> None:
    """Ends this worker when the parent was killed, even if the function never returns."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)


def user_line(error: BaseException) -> str:
    """Where an exception was raised, ` (rewards.py, line 7)`: the innermost frame that is neither Paceline's nor a
    library's. Empty if there is none."""
    libraries = (Path(__file__).parents[1], *map(Path, sysconfig.get_paths().values()))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        if path.is_file() and not any(path.is_relative_to(folder.resolve()) for folder in libraries):
            shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            return f" ({shown}, line {frame.lineno})"
    return ""


def describe_error(error: BaseException) -> str:
    """An exception in one line of bounded length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]}"
