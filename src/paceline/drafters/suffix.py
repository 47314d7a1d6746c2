"""Drafts from history: what siblings and earlier rollouts of the same problem said after the same words.

One suffix automaton per problem (csrc/suffix.c) holds its prompts and every token that any of its rollouts
emitted, while they still run. A row is a state of that automaton, so a step costs O(new tokens) and never walks a
sequence again. A request without a problem has an automaton of its own, gone when the request ends.

Every automaton keeps the log of what it was told, in order (csrc/suffix.c), which is what a checkpoint holds: told
again, it becomes the same automaton.

SlowHistory is the same automaton in plain Python: the fallback where there is no C compiler, and the twin that the
tests hold the fast one against. Both propose the same tokens with the same confidences, to the bit.
"""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.native import NativeUnavailable, load
from paceline.speculation.batch import Commits, DraftBatch, Rows
from paceline.types import Receipt, Request

MAX_STATES = 2**31 - 1  # int32
MAX_COUNTED = 64  # csrc/suffix.c says why
INT, FLOAT = np.dtype(np.int32), np.dtype(np.float32)
STATE = {"names", "name_ends", "logs", "log_ends"}  # what `SuffixDrafter.state` holds
ROOT, LOST = 0, -1  # `last` of a sequence that said nothing, and of one whose automaton could not grow


class _Sequences:
    """Sequences by slot: `automata[slot]` is the handle of a sequence's automaton, `last[slot]` its state there."""

    automata = np.zeros(0, np.uint64)
    last = np.zeros(0, np.int32)

    def resize(self, num_slots: int) -> None:
        """Room for num_slots sequences; those there stay."""
        num_kept = len(self.last)
        automata, last = np.zeros(num_slots, np.uint64), np.zeros(num_slots, np.int32)
        automata[:num_kept], last[:num_kept] = self.automata, self.last
        self.automata, self.last = automata, last
        self._sequences_at = automata.ctypes.data, last.ctypes.data


class NativeHistory(_Sequences):
    """csrc/suffix.c. Arrays go in as bytes: that copies them, yet costs a tenth of asking numpy for an address."""

    def __init__(self, max_states: int = MAX_STATES) -> None:
        self._lib = _library()
        self._max_states = max_states
        self.resize(64)

    def new(self) -> int:
        automaton = self._lib.suffix_new(self._max_states)
        if not automaton:
            raise MemoryError("suffix drafter: no memory for another problem; lower max_bytes")
        return automaton

    def free(self, automaton: int) -> None:
        self._lib.suffix_free(automaton)

    def num_bytes(self, automaton: int) -> int:
        return self._lib.suffix_num_bytes(automaton)

    def num_tokens(self, automaton: int) -> int:
        return self._lib.suffix_num_tokens(automaton)

    def prompt(self, automaton: int, tokens: np.ndarray) -> int:
        """A sequence's beginning; the state of its end, or LOST."""
        return self._lib.suffix_prompt(automaton, tokens.tobytes(), len(tokens))

    def log(self, automaton: int) -> np.ndarray:
        """All it was told: int32, a token, or ~state where another sequence speaks."""
        num = self._lib.suffix_num_log(automaton)
        return np.frombuffer(ctypes.string_at(self._lib.suffix_log(automaton), 4 * num), INT)

    def replay(self, automaton: int, log: np.ndarray) -> bool:
        """Tell it the rest of a log, after the prompts; whether that was possible."""
        return bool(self._lib.suffix_replay(automaton, log.tobytes(), len(log)))

    def observe(self, slots: np.ndarray, tokens: np.ndarray, num: np.ndarray) -> int:
        """Row i, the sequence slots[i], said tokens[i, :num[i]]. Returns how many bytes the history grew, or LOST if
        one of the sequences found no memory."""
        assert tokens.dtype == num.dtype == INT
        return self._lib.suffix_observe(
            *self._sequences_at, slots.tobytes(), len(slots), tokens.tobytes(), tokens.shape[1], num.tobytes()
        )

    def propose(self, slots: np.ndarray, caps: np.ndarray, k: int, min_match: int) -> DraftBatch:
        """At most caps[i] <= k tokens for row i, the sequence slots[i]."""
        assert caps.dtype == INT
        num_rows, size = len(slots), 4 * len(slots) * k
        # One block for all three results, since asking for an address costs more than drafting.
        block = bytearray(2 * size + 4 * num_rows)
        at = ctypes.addressof(ctypes.c_char.from_buffer(block))
        self._lib.suffix_propose(
            *self._sequences_at, slots.tobytes(), num_rows, caps.tobytes(), k, min_match, at, at + 2 * size, at + size
        )
        tokens, confidence = np.ndarray((num_rows, k), INT, block), np.ndarray((num_rows, k), FLOAT, block, size)
        return DraftBatch(tokens, np.ndarray(num_rows, INT, block, 2 * size), confidence)


def _library() -> ctypes.CDLL:
    lib = load("suffix")
    pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    for name, result, *arguments in (
        ("new", pointer, int32),
        ("free", None, pointer),
        ("num_bytes", int64, pointer),
        ("num_tokens", int64, pointer),
        ("num_log", int64, pointer),
        ("log", pointer, pointer),
        ("prompt", int32, pointer, pointer, int64),
        ("replay", ctypes.c_int, pointer, pointer, int64),
        ("observe", int64, pointer, pointer, pointer, int64, pointer, int64, pointer),
        ("propose", None, pointer, pointer, pointer, int64, pointer, int64, int32, pointer, pointer, pointer),
    ):
        function = getattr(lib, f"suffix_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


class _SlowAutomaton:
    """csrc/suffix.c, line for line, with a dictionary of edges per state."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.length: list[int] = []
        self.link: list[int] = []
        self.count: list[int] = []
        self.num_next: list[int] = []
        self.best: list[int] = []  # token
        self.edges: list[dict[int, int]] = []
        self.log: list[int] = []
        self.tail = -1
        self._state(0, -1, 0, 0, -1, {})

    def _state(self, length: int, link: int, count: int, num_next: int, best: int, edges: dict[int, int]) -> int:
        self.length.append(length)
        self.link.append(link)
        self.count.append(count)
        self.num_next.append(num_next)
        self.best.append(best)
        self.edges.append(edges)
        return len(self.length) - 1

    def say(self, last: int, tokens: list[int]) -> int:
        for token in tokens:
            now = self._extend(last, token)
            self._count(last, token, now)
            if last != self.tail:
                self.log.append(~last)
            self.log.append(token)
            last = self.tail = now
        self.num_tokens += len(tokens)
        return last

    def _extend(self, last: int, token: int) -> int:
        if token in self.edges[last]:
            return self._exact(last, token)
        now = self._state(self.length[last] + 1, ROOT, 0, 0, -1, {})
        p = last
        while p >= 0 and token not in self.edges[p]:
            self.edges[p][token] = now
            if self.best[p] < 0:
                self.best[p] = token
            p = self.link[p]
        if p >= 0:
            self.link[now] = self._exact(p, token)
        return now

    def _exact(self, p: int, token: int) -> int:
        """The state whose longest string is p's longest and then token, split off from a longer one's if need be."""
        q, length = self.edges[p][token], self.length[p] + 1
        return q if self.length[q] == length else self._split(p, token, q, length)

    def _split(self, p: int, token: int, q: int, length: int) -> int:
        clone = self._state(length, self.link[q], self.count[q], self.num_next[q], self.best[q], dict(self.edges[q]))
        self.link[q] = clone
        while p >= 0 and self.edges[p].get(token) == q:
            self.edges[p][token] = clone
            p = self.link[p]
        return clone

    def _count(self, last: int, token: int, now: int) -> None:
        u, v = last, now
        self.count[v] += 1
        for _ in range(MAX_COUNTED):
            if u < 0:
                break
            if self.length[self.link[v]] > self.length[u]:
                v = self.link[v]
                self.count[v] += 1
            self.num_next[u] += 1
            if self.count[v] >= self.count[self.edges[u][self.best[u]]]:
                self.best[u] = token
            u = self.link[u]

    def propose(self, last: int, cap: int, min_match: int) -> list[tuple[int, float]]:
        draft: list[tuple[int, float]] = []
        u, length = last, self.length[last]
        while len(draft) < cap:
            while u != ROOT and not self.edges[u]:
                u = self.link[u]
                length = self.length[u]
            if u == ROOT or length < min_match:
                break
            best = self.edges[u][self.best[u]]
            draft.append((self.best[u], confidence(self.count[best], self.num_next[u], length)))
            u, length = best, length + 1
        return draft


def confidence(count: int, num: int, length: int) -> float:
    """How sure a draft is of a token said `count` of the `num` times that something followed a context of `length`
    tokens: a discount for what was said only now and then, and less faith in short contexts. Given the positions
    before, so not a product. Fitted to rollouts of SmolLM2-135M at temperature 1, where a token said 1 time of 1 was
    right in 21% of cases after 1 token, 37% after 3, 54% after 7; 4 of 4 in 58%, 78% and more."""
    num = max(num, count)  # contexts past MAX_COUNTED may have missed some
    return (count - 0.4) / (num + 2 / length)


class SlowHistory(_Sequences):
    """NativeHistory in plain Python, a hundred times slower and ten times larger."""

    def __init__(self) -> None:
        self._automata: dict[int, _SlowAutomaton] = {}
        self._num_made = 0
        self.resize(64)

    def new(self) -> int:
        self._num_made += 1
        self._automata[self._num_made] = _SlowAutomaton()
        return self._num_made

    def free(self, automaton: int) -> None:
        del self._automata[automaton]

    def num_bytes(self, automaton: int) -> int:
        told = self._automata[automaton]
        return 500 * len(told.length) + 36 * len(
            told.log
        )  # what CPython takes: five numbers and a small dict, a number

    def num_tokens(self, automaton: int) -> int:
        return self._automata[automaton].num_tokens

    def prompt(self, automaton: int, tokens: np.ndarray) -> int:
        told = self._automata[automaton]
        told.tail = -1
        end = told.say(ROOT, tokens.tolist())
        told.tail = -1
        return end

    def log(self, automaton: int) -> np.ndarray:
        return np.array(self._automata[automaton].log, INT)

    def replay(self, automaton: int, log: np.ndarray) -> bool:
        told, last = self._automata[automaton], -1
        for word in log.tolist():
            if word >= 0 and last < 0:
                return False
            last = ~word if word < 0 else told.say(last, [word])
            if last >= len(told.length):
                return False
        return True

    def observe(self, slots: np.ndarray, tokens: np.ndarray, num: np.ndarray) -> int:
        grown = 0
        for slot, row, n in zip(slots, tokens, num, strict=True):
            automaton = int(self.automata[slot])
            before = self.num_bytes(automaton)
            self.last[slot] = self._automata[automaton].say(int(self.last[slot]), row[:n].tolist())
            grown += self.num_bytes(automaton) - before
        return grown

    def propose(self, slots: np.ndarray, caps: np.ndarray, k: int, min_match: int) -> DraftBatch:
        drafts = DraftBatch.empty(len(slots), k)
        for i, slot in enumerate(slots):
            draft = self._automata[int(self.automata[slot])].propose(int(self.last[slot]), caps[i], min_match)
            drafts.num[i] = len(draft)
            for j, (token, sure) in enumerate(draft):
                drafts.tokens[i, j], drafts.confidence[i, j] = token, sure
        return drafts


@dataclass(slots=True)
class _Problem:
    """One automaton and who uses it. (Shards per policy version would be several of them.)"""

    automaton: int
    prompts: dict[bytes, int] = field(default_factory=dict)  # digest -> state of the prompt's end
    num_live: int = 0


@dataclass(slots=True)
class _Live:
    slot: int
    problem: _Problem
    private: bool


class SuffixDrafter:
    """Proposes how the longest known context of a row's end went on most often, most recently on ties.

    `min_match` is the shortest context that may speak. When the history takes more than `max_bytes`, the problems
    that were begun least recently and have no live request are dropped whole."""

    name = "suffix"
    version = 0
    wants_hidden: tuple[int, ...] = ()
    reads_drafts = False

    def __init__(
        self, min_match: int = 1, max_bytes: int = 1 << 30, history: NativeHistory | SlowHistory | None = None
    ) -> None:
        if min_match < 1:
            raise ValueError(f"suffix.min_match = {min_match}: must be >= 1, the tokens of the shortest context")
        if max_bytes < 1:
            raise ValueError(f"suffix.max_bytes = {max_bytes}: must be >= 1")
        self._problems: dict[str, _Problem] = {}  # least recently begun first
        self._live: dict[int, _Live] = {}
        self._history = history or make_history()
        self._min_match, self._max_bytes = min_match, max_bytes
        self._num_bytes = 0
        self._free_slots = list(range(len(self._history.last)))
        # The rows and caps of one step are mostly those of the step before.
        self._slots_of: dict[bytes, np.ndarray] = {}
        self._k_of: tuple[bytes, int] = b"", 0

    @property
    def is_native(self) -> bool:
        return isinstance(self._history, NativeHistory)

    @property
    def num_problems(self) -> int:
        return len(self._problems)

    @property
    def num_bytes(self) -> int:
        """What the history takes, the requests without a problem included."""
        return self._num_bytes

    @property
    def num_tokens(self) -> int:
        """How many tokens the problems' histories have been told."""
        return sum(self._history.num_tokens(problem.automaton) for problem in self._problems.values())

    def begin(self, request: Request, version: int = 0) -> None:
        assert request.request_id not in self._live, f"request {request.request_id} began twice"
        private = request.problem is None
        problem = None if request.problem is None else self._problems.pop(request.problem, None)
        if problem is None:
            problem = _Problem(self._history.new())
            self._num_bytes += self._history.num_bytes(problem.automaton)
        if request.problem is not None:
            self._problems[request.problem] = problem
        problem.num_live += 1
        if not self._free_slots:
            num_slots = len(self._history.last)
            self._history.resize(2 * num_slots)
            self._free_slots += range(num_slots, 2 * num_slots)
        slot = self._free_slots.pop()
        self._history.automata[slot] = problem.automaton
        self._history.last[slot] = self._end_of_prompt(problem, request)
        self._live[request.request_id] = _Live(slot, problem, private)
        self._slots_of.clear()
        self._fit()

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        key = caps.tobytes()
        if not key:
            return DraftBatch.empty(0)
        if key != self._k_of[0]:
            self._k_of = key, int(caps.max())
        return self._history.propose(self._slots(rows.request_ids), caps, self._k_of[1], self._min_match)

    def observe(self, commits: Commits) -> None:
        slots = self._slots(commits.request_ids)
        grown = self._history.observe(slots, commits.tokens, commits.num)
        if grown == LOST:
            _warn_lost()
            grown = sum(map(self._history.num_bytes, self._automata())) - self._num_bytes
        if grown:
            self._num_bytes += grown
            self._fit()

    def end(self, request_id: int) -> None:
        live = self._live.pop(request_id)
        self._free_slots.append(live.slot)
        self._slots_of.clear()
        live.problem.num_live -= 1
        if live.private:
            self._drop(live.problem)
        self._fit()

    def update(self, weights: Any, version: int) -> Receipt:
        raise ValueError("the suffix drafter has no weights to update; it learns from what it observes")

    def state(self) -> dict[str, np.ndarray]:
        """Every problem's log, least recently begun first. What a live request has said is in it; that it lives, and
        what requests without a problem say, is not."""
        names = [np.frombuffer(name.encode(), np.uint8) for name in self._problems]
        logs = [self._history.log(problem.automaton) for problem in self._problems.values()]
        return {
            "names": np.concatenate([np.zeros(0, np.uint8), *names]),
            "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
            "logs": np.concatenate([np.zeros(0, np.int32), *logs]),
            "log_ends": np.cumsum([len(log) for log in logs], dtype=np.int64),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Know what the drafter knew whose state this is, and nothing else."""
        assert not self._live, "restored while requests run"
        if state.keys() != STATE:
            raise ValueError(
                f"not a state of the suffix drafter: it holds {sorted(state) or 'nothing'}; "
                "was speculation.method changed?"
            )
        self.close()
        names = np.split(state["names"], state["name_ends"])[:-1]
        logs = np.split(state["logs"].astype(INT, copy=False), state["log_ends"])[:-1]
        for name, log in zip(names, logs, strict=True):
            problem = self._problems[name.tobytes().decode()] = _Problem(self._history.new())
            self._retell(problem, log)
            self._num_bytes += self._history.num_bytes(problem.automaton)
        self._fit()

    def _retell(self, problem: _Problem, log: np.ndarray) -> None:
        for part in np.split(log, np.flatnonzero(log == ~ROOT))[1:]:  # only prompts begin at the root
            end = int(np.argmax(np.append(part[1:], LOST) < 0)) + 1
            prompt = part[1:end]
            problem.prompts[_digest(prompt)] = self._history.prompt(problem.automaton, prompt)
            if not self._history.replay(problem.automaton, part[end:]):
                raise ValueError("the suffix drafter's state is damaged, or there is no memory to restore it")

    def close(self) -> None:
        """Forget everything. Also happens when the drafter is collected."""
        for automaton in self._automata():
            self._history.free(automaton)
        self._free_slots += [live.slot for live in self._live.values()]
        self._problems.clear()
        self._live.clear()
        self._slots_of.clear()
        self._num_bytes = 0

    def __del__(self) -> None:
        if hasattr(self, "_history"):
            self.close()

    def _automata(self) -> set[int]:
        problems = (*self._problems.values(), *(live.problem for live in self._live.values()))
        return {problem.automaton for problem in problems}

    def _end_of_prompt(self, problem: _Problem, request: Request) -> int:
        """The state after the prompt, which is said once however many samples are drawn from it."""
        prompt = np.array(request.prompt_ids, np.int32)
        key = _digest(prompt)
        if key not in problem.prompts:
            before = self._history.num_bytes(problem.automaton)
            problem.prompts[key] = self._history.prompt(problem.automaton, prompt)
            self._num_bytes += self._history.num_bytes(problem.automaton) - before
            if problem.prompts[key] == LOST:
                _warn_lost()
        return problem.prompts[key]

    def _slots(self, request_ids: np.ndarray) -> np.ndarray:
        key = request_ids.tobytes()
        slots = self._slots_of.get(key)
        if slots is None:
            if len(self._slots_of) > 8:
                self._slots_of.clear()
            slots = np.array([self._live[i].slot for i in request_ids.tolist()], np.int32)
            self._slots_of[key] = slots
        return slots

    def _drop(self, problem: _Problem) -> None:
        self._num_bytes -= self._history.num_bytes(problem.automaton)
        self._history.free(problem.automaton)

    def _fit(self) -> None:
        if self._num_bytes <= self._max_bytes:
            return
        for name in [name for name, problem in self._problems.items() if not problem.num_live]:
            self._drop(self._problems.pop(name))
            if self._num_bytes <= self._max_bytes:
                return


def _digest(prompt: np.ndarray) -> bytes:
    return hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()


def make_history() -> NativeHistory | SlowHistory:
    """The fast one where there is a C compiler."""
    try:
        return NativeHistory()
    except NativeUnavailable:
        return SlowHistory()


def _warn_lost() -> None:
    warnings.warn(
        "suffix drafter: no memory to grow a problem's history; its rows are not drafted for any more. "
        "Lower suffix.max_bytes.",
        RuntimeWarning,
        stacklevel=3,
    )
