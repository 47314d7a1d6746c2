"""What was said, by shard, and where every running sequence stands in it: csrc/suffix.c from Python.

A shard is one suffix automaton. A sequence has a slot and, in it, a row of cursors: the first in the shard that it
speaks in, the others in older shards of its problem, which it only follows. `SlowHistory` has the same methods.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from paceline.native import load
from paceline.speculation.batch import DraftBatch

MAX_STATES = 2**31 - 1  # int32
MAX_WIDTH = 64  # cursors of a sequence; csrc/suffix.c has it too
INT, FLOAT = np.dtype(np.int32), np.dtype(np.float32)
ROOT, LOST = 0, -1  # the state of a sequence that said nothing, and of one whose shard could not grow
CURSOR = np.dtype(
    [("shard", np.uint64), ("state", INT), ("length", INT), ("num_states", INT), ("unused", INT)]
)  # as in csrc/suffix.c; shard 0: none


class Sequences:
    """`cursors[slot]` are a sequence's: CURSOR [width], its own shard's first, then the newest older one's."""

    cursors = np.zeros((0, 1), CURSOR)

    def resize(self, num_slots: int, width: int) -> None:
        """Room for num_slots sequences; those there stay."""
        assert 1 <= width <= MAX_WIDTH
        cursors = np.zeros((num_slots, width), CURSOR)
        cursors[: len(self.cursors)] = self.cursors
        self.cursors = cursors
        self._cursors_at = cursors.ctypes.data, width


class NativeHistory(Sequences):
    """Arrays go in as bytes: that copies them, yet costs a tenth of asking numpy for an address."""

    def __init__(self, max_states: int = MAX_STATES) -> None:
        self._lib = _library()
        self._max_states = max_states

    def new(self) -> int:
        shard = self._lib.suffix_new(self._max_states)
        if not shard:
            raise MemoryError("suffix drafter: no memory for another problem; lower speculation.suffix_max_bytes")
        return shard

    def free(self, shard: int) -> None:
        self._lib.suffix_free(shard)

    def num_bytes(self, shard: int) -> int:
        return self._lib.suffix_num_bytes(shard)

    def num_tokens(self, shard: int) -> int:
        return self._lib.suffix_num_tokens(shard)

    def prompt(self, shard: int, tokens: np.ndarray) -> int:
        """A sequence's beginning; the state of its end, or LOST."""
        return self._lib.suffix_prompt(shard, tokens.tobytes(), len(tokens))

    def find(self, shard: int, tokens: np.ndarray) -> tuple[int, int]:
        """State and length of the longest end of these tokens that the shard knows."""
        state, length = ctypes.c_int32(), ctypes.c_int32()
        self._lib.suffix_find(shard, tokens.tobytes(), len(tokens), ctypes.byref(state), ctypes.byref(length))
        return state.value, length.value

    def log(self, shard: int) -> np.ndarray:
        """All it was told: int32, a token, or ~state where another sequence speaks."""
        num = self._lib.suffix_num_log(shard)
        return np.frombuffer(ctypes.string_at(self._lib.suffix_log(shard), 4 * num), INT)

    def replay(self, shard: int, log: np.ndarray) -> bool:
        """Tell it the rest of a log, after the prompts; whether that was possible."""
        return bool(self._lib.suffix_replay(shard, log.tobytes(), len(log)))

    def observe(self, slots: np.ndarray, tokens: np.ndarray, num: np.ndarray) -> int:
        """Row i, the sequence slots[i], said tokens[i, :num[i]]; older shards' cursors move when all have spoken.
        Returns how many bytes the history grew, or LOST if one of the sequences found no memory."""
        assert tokens.dtype == num.dtype == INT
        return self._lib.suffix_observe(
            *self._cursors_at, slots.tobytes(), len(slots), tokens.tobytes(), tokens.shape[1], num.tobytes()
        )

    def propose(self, slots: np.ndarray, caps: np.ndarray, k: int, min_match: int, weights: np.ndarray) -> DraftBatch:
        """At most caps[i] <= k tokens for row i, the sequence slots[i]. weights[n]: what the cursor n counts."""
        assert caps.dtype == INT
        num_rows, size = len(slots), 4 * len(slots) * k
        # One block for all four results, since asking for an address costs more than drafting.
        block = bytearray(2 * size + 8 * num_rows)
        self._lib.suffix_propose(
            *self._cursors_at, weights.tobytes(), slots.tobytes(), num_rows, caps.tobytes(), k, min_match,
            ctypes.addressof(ctypes.c_char.from_buffer(block)),
        )  # fmt: skip
        tokens, confidence = np.ndarray((num_rows, k), INT, block), np.ndarray((num_rows, k), FLOAT, block, size)
        num = np.ndarray(num_rows, INT, block, 2 * size)
        match = np.ndarray(num_rows, INT, block, 2 * size + 4 * num_rows)
        return DraftBatch(tokens, num, confidence, match=match)


def _library() -> Any:
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
        ("find", None, pointer, pointer, int64, pointer, pointer),
        ("replay", ctypes.c_int, pointer, pointer, int64),
        ("observe", int64, pointer, int64, pointer, int64, pointer, int64, pointer),
        ("propose", None, pointer, int64, pointer, pointer, int64, pointer, int64, int32, pointer),
    ):
        function = getattr(lib, f"suffix_{name}")
        function.restype, function.argtypes = result, arguments
    return lib
