"""The calls of a sample's agent to the policy: `SamplePolicy` is what the agent sees.

Calls come from the agents' event loop, from an endpoint's, or from others; the collector answers them from the thread
that steps the engine.

Invariants:
  - The request of a call does not depend on timing, only on the prompts of the sample's calls. Its noise key is made of
    (seed, group, sample, hash of the prompt's ids, how many calls with this prompt came before). `max_tokens` limits
    what the policy samples along a chain of calls, each of which extends the one before.
  - After `end`, no call is answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.tasks.agent import BudgetExhausted, ContextOverflow, PolicyError, SampleEnded
from paceline.types import Completion, Request, SamplingParams, noise_key

Ids = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Call:
    request: Request
    occurrence: int  # how many calls of the sample with this prompt came before
    num_before: int  # tokens that the policy sampled in the calls that this one extends
    at_limit: str  # the finish reason if max_tokens ends it: "length" if the agent gave it, else "budget" or "context"
    future: asyncio.Future[Completion] | None = None  # None: of a sample without an agent
    completion: Completion | None = None
    ids: Ids = ()  # prompt and completion, when it is answered

    def complete(self, completion: Completion) -> None:
        self.completion = completion
        self.ids = (*self.request.prompt_ids, *completion.token_ids.tolist())

    @property
    def num_sampled(self) -> int:
        return len(self.ids) - len(self.request.prompt_ids)

    @property
    def finish_reason(self) -> str:
        assert self.completion is not None
        reason = self.completion.finish_reason
        return self.at_limit if reason == "length" else reason


class SamplePolicy:
    """The policy as one sample's agent sees it: see `tasks.agent.Policy`."""

    def __init__(
        self,
        key: tuple[object, ...],
        problem: str,
        sampling: SamplingParams,
        max_calls: int | None,
        max_model_len: int,
        tokenizer: Any,
        request_ids: Iterator[int],
        submit: Callable[[Call], None],
        cancel: Callable[[Call], None],
    ) -> None:
        """`key`: (seed, group, sample). `submit` and `cancel` are called in the caller's thread."""
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self._key, self._problem, self._sampling, self._max_calls = key, problem, sampling, max_calls
        self._request_ids, self._submit, self._cancel = request_ids, submit, cancel
        self._lock = threading.Lock()
        self._occurrences: Counter[Ids] = Counter()
        self._open: set[Call] = set()
        self._has_ended = False
        self.answered: list[Call] = []
        self.refusals: set[str] = set()  # finish reasons of calls that were not begun

    async def generate(
        self, prompt_ids: Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        try:
            call = self._begin(tuple(map(int, prompt_ids)), max_tokens, tuple(stop))
        except (ValueError, TypeError) as error:  # of the arguments
            raise PolicyError(str(error)) from error
        self._submit(call)
        assert call.future is not None
        try:
            return await call.future
        except asyncio.CancelledError:
            with self._lock:
                self._open.discard(call)
            self._cancel(call)
            raise

    def _begin(self, ids: Ids, max_tokens: int | None, stop: tuple[str, ...]) -> Call:
        with self._lock:
            if self._has_ended:
                raise SampleEnded("the sample has ended")
            if self._max_calls is not None and self._occurrences.total() >= self._max_calls:
                self.refusals.add("budget")
                raise BudgetExhausted(f"the sample has made task.max_calls = {self._max_calls} calls")
            num_before = self._num_before(ids)
            room, left = self.max_model_len - len(ids), self._sampling.max_tokens - num_before
            if left < 1:
                self.refusals.add("budget")
                raise BudgetExhausted(f"the sample has sampled its {self._sampling.max_tokens} tokens")
            if room < 1:
                self.refusals.add("context")
                raise ContextOverflow(
                    f"the prompt has {len(ids)} tokens, but the model's context is {self.max_model_len} and must hold "
                    "at least one more"
                )
            num = min(left, room) if max_tokens is None else min(left, room, max_tokens)
            # A client that gives no max_tokens may get all that is left of the context as its own limit.
            is_own = num == max_tokens and num < room
            at_limit = "length" if is_own else "budget" if num == left else "context"
            sampling = replace(self._sampling, max_tokens=num, stop=(*self._sampling.stop, *stop))
            occurrence = self._occurrences[ids]
            key = noise_key(*self._key, "call", ids_hash(ids), occurrence)
            request = Request(next(self._request_ids), ids, sampling, key, self._problem)
            self._occurrences[ids] += 1
            call = Call(request, occurrence, num_before, at_limit, asyncio.get_running_loop().create_future())
            self._open.add(call)
            return call

    def _num_before(self, ids: Ids) -> int:
        """Tokens that the policy sampled in the longest chain of calls that this prompt extends."""
        chains = [(len(c.ids), c.num_before + c.num_sampled) for c in self.answered if extends(ids, c.ids)]
        return max(chains, default=(0, 0))[1]

    def is_open(self, call: Call) -> bool:
        """Whether someone waits for its answer."""
        with self._lock:
            return call in self._open

    def answer(self, call: Call, completion: Completion) -> None:
        with self._lock:
            if call not in self._open:
                return
            self._open.discard(call)
            call.complete(completion)
            self.answered.append(call)
        _resolve(call, completion)

    def refuse(self, call: Call, error: PolicyError) -> None:
        with self._lock:
            self._open.discard(call)
        _resolve(call, error)

    def end(self) -> list[Call]:
        """Returns the calls that are not answered."""
        with self._lock:
            self._has_ended = True
            left, self._open = list(self._open), set()
        for call in left:
            _resolve(call, SampleEnded("the sample has ended"))
        return left


def extends(ids: Ids, others: Ids) -> bool:
    """Whether `ids` begin with all of `others`."""
    num = len(others)
    return num <= len(ids) and ids[num - 1 : num] == others[-1:] and ids[:num] == others


def ids_hash(ids: Ids) -> str:
    return hashlib.blake2b(np.array(ids, np.int64).tobytes(), digest_size=16).hexdigest()


def _resolve(call: Call, result: Completion | PolicyError) -> None:
    """Wake the caller, in its own event loop."""
    future = call.future
    assert future is not None

    def resolve() -> None:
        if future.done():  # cancelled
            return
        if isinstance(result, PolicyError):
            future.set_exception(result)
        else:
            future.set_result(result)

    with suppress(RuntimeError):  # the loop is closed: nobody waits
        future.get_loop().call_soon_threadsafe(resolve)
