"""Policies for tests of agents: one that says given texts, and one with a real engine."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from paceline.engine.engine import LocalEngine
from paceline.tasks.agent import BudgetExhausted, ContextOverflow
from paceline.types import Completion, Request, SamplingParams, noise_key

Answer = Callable[[tuple[int, ...]], "list[int] | Exception"]


class ScriptedPolicy:
    """Answers with the ids that `answer` makes of the prompt's; an exception is raised. Records every call."""

    def __init__(self, tokenizer: Any, answer: Answer, max_model_len: int = 4096, delay_s: float = 0.0) -> None:
        self.tokenizer, self.max_model_len, self.delay_s = tokenizer, max_model_len, delay_s
        self._answer = answer
        self.calls: list[tuple[tuple[int, ...], list[int]]] = []
        self.num_cancelled = self.num_running = self.most_running = 0

    async def generate(
        self, prompt_ids: Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        ids = tuple(prompt_ids)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        found = self._answer(ids)
        if isinstance(found, Exception):
            raise found
        found = found[:max_tokens]
        self.calls.append((ids, found))
        return completion(Request(len(self.calls), ids, SamplingParams()), found)


def completion(request: Request, ids: Sequence[int]) -> Completion:
    num = len(ids)
    zeros = np.zeros(num)
    return Completion(
        request, np.array(ids, np.int32), zeros, zeros, np.zeros(num, np.int32), np.zeros(num, np.uint8),
        np.full(num, 255, np.uint8), (), "stop",
    )  # fmt: skip


class EngineThread:
    """Steps an engine in a thread, for the policies of several samples."""

    def __init__(self, engine: LocalEngine, sampling: SamplingParams) -> None:
        self.engine, self.sampling = engine, sampling
        self._calls: queue.SimpleQueue[tuple[Request, Future[Completion]] | None] = queue.SimpleQueue()
        self._waiting: dict[int, Future[Completion]] = {}
        self._num = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def call(self, ids: tuple[int, ...], key: int, max_tokens: int | None) -> Future[Completion]:
        future: Future[Completion] = Future()
        limit = min(max_tokens or self.sampling.max_tokens, self.sampling.max_tokens)
        values = {"temperature": self.sampling.temperature, "max_tokens": limit}
        with self._lock:
            self._num += 1
            self._calls.put((Request(self._num, ids, SamplingParams(**values), key), future))
        return future

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()
        self.engine.close()

    def _run(self) -> None:
        while True:
            while not self._waiting or not self._calls.empty():
                item = self._calls.get()
                if item is None:
                    return
                request, future = item
                try:
                    self.engine.submit(request)
                    self._waiting[request.request_id] = future
                except ValueError as error:
                    future.set_exception(ContextOverflow(str(error)))
            for done in self.engine.step():
                future = self._waiting.pop(done.request.request_id)
                if not future.cancelled():
                    future.set_result(done)


class EnginePolicy:
    """The policy of one sample. Its noise depends on (seed, sample, prompt ids, occurrence)."""

    def __init__(self, thread: EngineThread, seed: object, max_model_len: int, max_calls: int = 100) -> None:
        self.tokenizer, self.max_model_len, self.max_calls = thread.engine.tokenizer, max_model_len, max_calls
        self._thread, self._seed = thread, seed
        self._occurrences: Counter[tuple[int, ...]] = Counter()
        self.calls: list[tuple[tuple[int, ...], list[int]]] = []

    async def generate(
        self, prompt_ids: Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        ids = tuple(prompt_ids)
        if len(ids) >= self.max_model_len:
            raise ContextOverflow(f"the prompt has {len(ids)} tokens; the context is {self.max_model_len}")
        if len(self.calls) >= self.max_calls:
            raise BudgetExhausted(f"the sample has made its {self.max_calls} calls")
        occurrence = self._occurrences[ids]
        self._occurrences[ids] += 1
        key = noise_key(self._seed, str(ids), occurrence)
        done = await asyncio.wrap_future(self._thread.call(ids, key, max_tokens))
        self.calls.append((ids, done.token_ids.tolist()))
        return done
