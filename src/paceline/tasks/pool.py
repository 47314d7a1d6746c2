"""Worker processes for calls that may hang, crash or eat memory: each is killed and replaced when it does.

A call is `make(*setup)(*args)`: `make` is an importable function that loads what is needed (once per worker, with a
patience of its own), what it returns is called with a timeout. Always: results come in the order of the calls; a call
that fails costs its own result only; `map` ends. Workers are fresh interpreters, not forks (the parent has threads)
and not multiprocessing's (which would run the user's main script again). They have their own session, so that Ctrl-C
reaches the parent alone, and end when the parent does.

Calls go to a worker as pickles, answers come back as JSON: what runs in a worker may have been taken over, and the
parent must not run what it says. A message that is not an answer costs the call and the worker.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOAD_S = 180.0  # for a worker to start and load: imports from a cold disk take their time
TICK_S = 0.5  # how often a silent worker is looked at
MAX_REPLY_BYTES = 64 << 20  # a worker that announces more is not waited for
HOPELESS = 16  # so many calls hung or died and none succeeded: it is the function, not the samples

Make = Callable[..., Callable[..., Any]]

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from paceline.tasks.pool import serve; serve(int(sys.argv[1]))"
)
_HEADER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Failed:
    """A call without a result; the reason reads on from the name of what was called."""

    reason: str


class Worker:
    """A process and the wire to it, as the parent sees them. Nothing here waits."""

    def __init__(self) -> None:
        self.wire, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.wire.setblocking(False)
        self.outgoing = bytearray()
        self.incoming = bytearray()
        self.loaded: set[bytes] = set()  # jobs
        self.index = -1  # the call it is busy with; -1: idle
        self.deadline_s = 0.0
        self.is_loading = False
        self.has_begun = False  # the function is loaded, and called

    def start(self, index: int, job: bytes, frame: bytes, timeout_s: float) -> None:
        assert self.index == -1 and not self.outgoing
        self.index = index
        self.is_loading, self.has_begun = job not in self.loaded, False
        self.loaded.add(job)
        self.deadline_s = time.monotonic() + (LOAD_S if self.is_loading else timeout_s)
        self.outgoing += frame

    def push(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # a dead worker is noticed where replies are read
            sent = self.wire.send(self.outgoing)
            del self.outgoing[:sent]

    def pull(self) -> list[tuple[str, Any]] | None:
        """The messages that have come; None: the worker is gone. ValueError: what came is no message of a worker's."""
        try:
            data = self.wire.recv(1 << 16)
        except BlockingIOError:
            data = None
        except OSError:
            data = b""
        if data is not None:
            self.incoming += data
        messages = []
        while len(self.incoming) >= _HEADER.size:
            end = _HEADER.size + _HEADER.unpack_from(self.incoming)[0]
            if end > MAX_REPLY_BYTES:
                raise ValueError(f"a message of {end} bytes")
            if len(self.incoming) < end:
                break
            messages.append(_parse(bytes(self.incoming[_HEADER.size : end])))
            del self.incoming[:end]
        return None if data == b"" and not messages else messages

    def has_more_to_say(self) -> bool:
        """Though its call has ended, or it has hung up: it can't be used again."""
        try:
            return bool(self.incoming) or self.wire.recv(1, socket.MSG_PEEK) is not None
        except BlockingIOError:
            return False
        except OSError:
            return True

    def kill(self) -> None:
        """The worker and what it started in its session; idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.returncode is None:  # not yet reaped, so the number is still its own
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.wire.close()


class Pool:
    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._workers: list[Worker] = []
        self._is_closed = False
        atexit.register(self.close)

    def map(self, make: Make, setup: tuple[Any, ...], calls: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        """The result of every call, or Failed; at most `timeout_s` each."""
        assert not self._is_closed
        job = pickle.dumps((make, setup))
        results: list[Any] = [None] * len(calls)
        # Neighbours are much alike (samples of one problem): shuffled, they can't make all look hopeless.
        waiting = deque(random.Random(0).sample(range(len(calls)), len(calls)))
        num_lost, any_success = 0, False
        try:
            while waiting or any(worker.index >= 0 for worker in self._workers):
                if self._is_closed:  # by another thread: nobody waits for the results any more
                    raise RuntimeError("the pool was closed")
                if num_lost >= HOPELESS and not any_success:
                    for index in waiting:
                        results[index] = Failed(f"was not called: {num_lost} calls hung or died, none succeeded")
                    waiting.clear()
                for worker in self._idle(len(waiting)):
                    index = waiting.popleft()
                    try:
                        frame = _frame(pickle.dumps((job, calls[index])))
                    except Exception as error:  # pickle raises what it likes
                        results[index] = Failed(f"can't be sent to a worker: {describe(error)}")
                        continue
                    worker.start(index, job, frame, timeout_s)
                for index, result in self._wait(timeout_s):
                    results[index] = result
                    if isinstance(result, _Lost):
                        num_lost += 1
                        results[index] = Failed(result.reason)
                    elif not isinstance(result, Failed):
                        any_success = True
        except BaseException:  # Ctrl-C in the middle: answers to these calls must not be taken for later ones'
            self._discard([worker for worker in self._workers if worker.index >= 0])
            raise
        return results

    def close(self) -> None:
        self._is_closed = True
        self._discard(list(self._workers))
        atexit.unregister(self.close)

    def _idle(self, num_wanted: int) -> list[Worker]:
        idle = [worker for worker in self._workers if worker.index < 0]
        self._discard([worker for worker in idle if worker.process.poll() is not None or worker.has_more_to_say()])
        idle = [worker for worker in self._workers if worker.index < 0]
        while len(idle) < num_wanted and len(self._workers) < self._num_workers:
            self._workers.append(Worker())
            idle.append(self._workers[-1])
        return idle[:num_wanted]

    def _discard(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            worker.kill()
            with contextlib.suppress(ValueError):  # `close` in another thread was quicker
                self._workers.remove(worker)

    def _wait(self, timeout_s: float) -> list[tuple[int, Any]]:
        """Let things happen for a moment: (call, result) of those that ended, well or badly."""
        busy = [worker for worker in self._workers if worker.index >= 0]
        if not busy:
            return []
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                writes = selectors.EVENT_WRITE if worker.outgoing else 0
                selector.register(worker.wire, selectors.EVENT_READ | writes, worker)
            next_s = min(worker.deadline_s for worker in busy) - time.monotonic()
            ready = selector.select(max(0.0, min(next_s, TICK_S)))
        ended: list[tuple[int, Any]] = []
        for key, events in ready:
            worker = key.data
            if events & selectors.EVENT_WRITE:
                worker.push()
            if events & selectors.EVENT_READ:
                ended += self._read(worker, timeout_s)
        for worker in busy:
            if worker.index < 0 or worker not in self._workers:
                continue
            if worker.process.poll() is not None:  # its end of the wire may live on in a child of its own
                ended += self._read(worker, timeout_s) or [self._lose(worker, _death(worker.process))]
            elif time.monotonic() > worker.deadline_s:
                limit_s = LOAD_S if worker.is_loading else timeout_s
                what = "took more than {:g} s to load" if worker.is_loading else "did not return within {:g} s"
                ended.append(self._lose(worker, what.format(limit_s)))
        return ended

    def _read(self, worker: Worker, timeout_s: float) -> list[tuple[int, Any]]:
        try:
            messages = worker.pull()
        except ValueError as error:
            return [self._lose(worker, f"sent something else than an answer: {describe(error)}")]
        if messages is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(TICK_S)
            return [self._lose(worker, _death(worker.process))]
        ended: list[tuple[int, Any]] = []
        for kind, value in messages:
            if worker.index < 0:  # its call has ended already
                self._discard([worker])
                break
            if kind != "error" and (kind == "loaded") == worker.has_begun:
                return [self._lose(worker, f"sent {kind!r} out of turn")]
            if kind == "loaded":
                worker.is_loading, worker.has_begun = False, True
                worker.deadline_s = time.monotonic() + timeout_s
            else:
                ended.append((worker.index, value if kind == "result" else Failed(value)))
                worker.index = -1
        return ended

    def _lose(self, worker: Worker, reason: str) -> tuple[int, Any]:
        self._discard([worker])
        return worker.index, _Lost(reason)


@dataclass(frozen=True, slots=True)
class _Lost:
    """Failed, and took its worker along."""

    reason: str


def _death(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    if code is None:
        return "closed its connection"
    return f"killed its process (signal {-code})" if code < 0 else f"ended its process (exit code {code})"


def _frame(data: bytes) -> bytes:
    return _HEADER.pack(len(data)) + data


def _parse(data: bytes) -> tuple[str, Any]:
    """A worker's message: ("loaded", None), ("result", plain data) or ("error", text)."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error})") from None
    match message:
        case ["loaded", None] | ["result", _] | ["error", str()]:
            return message[0], message[1]
    raise ValueError("no message of a worker's")


def serve(fd: int) -> None:
    """A worker's life: load, call, answer, until the parent hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(fd, False)  # what the function starts must not keep the wire open
    os.dup2(2, 1)  # what it prints is no answer
    with contextlib.suppress(OSError):  # short of memory, this process goes before the trainer
        Path("/proc/self/oom_score_adj").write_text("700")
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    pid = os.getpid()
    wire = socket.socket(fileno=fd)
    made: dict[bytes, Callable[..., Any]] = {}
    while True:
        header = _receive(wire, _HEADER.size)
        job, args = pickle.loads(_receive(wire, _HEADER.unpack(header)[0]))
        try:
            if job not in made:
                make, setup = pickle.loads(job)
                made[job] = make(*setup)
            wire.sendall(_frame(json.dumps(["loaded", None]).encode()))
            reply = json.dumps(["result", made[job](*args)])
        except BaseException as error:  # SystemExit too: it must not end the worker
            what = "could not be loaded: " if job not in made else "raised "
            reply = json.dumps(["error", f"{what}{describe(error)}"])
        if os.getpid() != pid:
            os._exit(1)  # a fork that came back from the function has nothing to say here
        wire.sendall(_frame(reply.encode()))


def _end_with(parent: int) -> None:
    """A function that never returns would outlive a parent that was killed."""
    while os.getppid() == parent:
        time.sleep(TICK_S)
    os._exit(1)


def describe(error: BaseException) -> str:
    """An exception in one line of bounded length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]}"


def _receive(wire: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = wire.recv(min(1 << 20, num_bytes - len(data)))
        if not part:
            os._exit(0)  # the parent is gone, or done with us
        data += part
    return bytes(data)
