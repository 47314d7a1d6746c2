"""History shards and cursors: a ctypes wrapper of csrc/suffix.c.

A shard is one suffix automaton. A running sequence has a slot with a row of cursors. The first cursor is in the shard
that the sequence's tokens are appended to. The others are in older shards of its problem, which are only read.
`PythonHistory` has the same methods.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from paceline.native import load
from paceline.speculation.draft_batch import DraftBatch

MAX_STATES = 2**31 - 1  # int32
MAX_WIDTH = 64  # cursors of a sequence; the same constant is in csrc/suffix.c
INT, FLOAT = np.dtype(np.int32), np.dtype(np.float32)
ROOT = 0  # state of the empty string
OUT_OF_MEMORY = -1  # state of a sequence whose shard could not grow
CURSOR = np.dtype(
    [("shard", np.uint64), ("state", INT), ("length", INT), ("num_states", INT), ("unused", INT)]
)  # as in csrc/suffix.c; shard 0: none


class CursorTable:
    """`cursors[slot]`: the cursors of a sequence, CURSOR [width]: in its own shard first, then from the newest older
    shard to the oldest."""

    cursors = np.zeros((0, 1), CURSOR)

    def resize(self, num_slots: int, width: int) -> None:
        """Make room for num_slots sequences. Existing cursors are kept."""
        assert 1 <= width <= MAX_WIDTH
        cursors = np.zeros((num_slots, width), CURSOR)
        cursors[: len(self.cursors)] = self.cursors
        self.cursors = cursors
        self._cursor_args = cursors.ctypes.data, width


class NativeHistory(CursorTable):
    """Arrays are passed as bytes. That copies them, but takes a tenth of the time that numpy takes for an address."""

    def __init__(self, max_states: int = MAX_STATES) -> None:
        self._lib = _load_library()
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

    def insert_prompt(self, shard: int, tokens: np.ndarray) -> int:
        """Returns the state of the prompt's end, or OUT_OF_MEMORY."""
        return self._lib.suffix_prompt(shard, tokens.tobytes(), len(tokens))

    def find(self, shard: int, tokens: np.ndarray) -> tuple[int, int]:
        """State and length of the longest suffix of these tokens that occurs in the shard."""
        state, length = ctypes.c_int32(), ctypes.c_int32()
        self._lib.suffix_find(shard, tokens.tobytes(), len(tokens), ctypes.byref(state), ctypes.byref(length))
        return state.value, length.value

    def log(self, shard: int) -> np.ndarray:
        """All tokens of the shard in the order in which they were appended, int32. ~state: the next tokens continue the
        sequence in that state."""
        num = self._lib.suffix_num_log(shard)
        return np.frombuffer(ctypes.string_at(self._lib.suffix_log(shard), 4 * num), INT)

    def replay(self, shard: int, log: np.ndarray) -> bool:
        """Append the part of a log that follows a prompt. Returns False if the log is corrupt or memory ran out."""
        return bool(self._lib.suffix_replay(shard, log.tobytes(), len(log)))

    def observe(self, slots: np.ndarray, tokens: np.ndarray, num: np.ndarray) -> int:
        """Append tokens[i, :num[i]] to the sequence in slots[i]. Cursors in older shards move after all rows are
        appended. Returns the growth in bytes, or OUT_OF_MEMORY if a shard could not grow."""
        assert tokens.dtype == num.dtype == INT
        return self._lib.suffix_observe(
            *self._cursor_args, slots.tobytes(), len(slots), tokens.tobytes(), tokens.shape[1], num.tobytes()
        )

    def propose(self, slots: np.ndarray, caps: np.ndarray, k: int, min_match: int, weights: np.ndarray) -> DraftBatch:
        """Draft at most caps[i] <= k tokens for the sequence in slots[i]. weights[n]: the weight of cursor n's
        counts."""
        assert caps.dtype == INT
        num_rows, size = len(slots), 4 * len(slots) * k
        # One buffer for all four results: numpy takes longer for an address than the drafting takes.
        buffer = bytearray(2 * size + 8 * num_rows)
        self._lib.suffix_propose(
            *self._cursor_args, weights.tobytes(), slots.tobytes(), num_rows, caps.tobytes(), k, min_match,
            ctypes.addressof(ctypes.c_char.from_buffer(buffer)),
        )  # fmt: skip
        tokens, confidence = np.ndarray((num_rows, k), INT, buffer), np.ndarray((num_rows, k), FLOAT, buffer, size)
        num = np.ndarray(num_rows, INT, buffer, 2 * size)
        match = np.ndarray(num_rows, INT, buffer, 2 * size + 4 * num_rows)
        return DraftBatch(tokens, num, confidence, match=match)


def _load_library() -> Any:
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
