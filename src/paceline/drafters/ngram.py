"""Prompt lookup: drafts what followed the last few tokens when the sequence said them before.

Stateless: all it knows of a row is the row's own tokens. The most recent earlier place wins, since a rollout tends
to take up what it said last (the current sum, not the first one); a copy that reaches the end of the text goes on in
the draft itself, so recent places draft as many tokens as old ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.native import NativeUnavailable, load
from paceline.speculation.batch import Commits, DraftBatch, Rows
from paceline.types import Receipt, Request

# By tokens matched, the last for all that are longer: how often SmolLM2-135M at temperature 1 went on as drafted.
CONFIDENCE = np.array([0, 0.27, 0.41, 0.44, 0.48, 0.54], np.float32)


class NgramDrafter:
    """The longest suffix of prompt_lookup_min to prompt_lookup_max tokens that occurs earlier in the row."""

    name = "ngram"
    version = 0
    wants_hidden: tuple[int, ...] = ()
    reads_drafts = False
    num_bytes = 0  # keeps nothing of ended requests

    def __init__(self, prompt_lookup_min: int = 2, prompt_lookup_max: int = 5, native: bool = True) -> None:
        if prompt_lookup_min < 1:
            raise ValueError(f"ngram.prompt_lookup_min = {prompt_lookup_min}: must be >= 1 token")
        if prompt_lookup_max < prompt_lookup_min:
            raise ValueError(
                f"ngram.prompt_lookup_max = {prompt_lookup_max}: must be >= prompt_lookup_min = {prompt_lookup_min}"
            )
        self._bounds = prompt_lookup_min, prompt_lookup_max
        self._confidence = CONFIDENCE[np.minimum(np.arange(prompt_lookup_max + 1), len(CONFIDENCE) - 1)]
        self._native: Any = None
        if native:
            try:
                self._native = load("ngram").ngram_propose
            except NativeUnavailable:
                return
            pointer, int64 = ctypes.c_void_p, ctypes.c_int64
            self._native.restype = None
            self._native.argtypes = [
                pointer, pointer, int64, pointer, int64, int64, int64, pointer, pointer, pointer
            ]  # fmt: skip

    @property
    def is_native(self) -> bool:
        return self._native is not None

    def begin(self, request: Request, version: int = 0) -> None:
        pass

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        if not len(rows):
            return DraftBatch.empty(0)
        drafts = DraftBatch.empty(len(rows), int(caps.max()))
        matched = np.zeros(len(rows), np.int32)
        if self._native is None:
            for i, text in enumerate(rows.tokens):
                tokens, matched[i] = lookup(text.tolist(), *self._bounds, int(caps[i]))
                drafts.num[i] = len(tokens)
                drafts.tokens[i, : len(tokens)] = tokens
        else:
            texts = list(rows.tokens)
            assert all(text.dtype == np.int32 and text.flags.c_contiguous for text in texts)
            # `text.ctypes` would say the same, at several times the cost.
            addresses = np.array([text.__array_interface__["data"][0] for text in texts], np.uint64)
            lengths = np.array([len(text) for text in texts], np.int64)
            self._native(
                addresses.tobytes(), lengths.tobytes(), len(rows), caps.tobytes(), drafts.tokens.shape[1],
                *self._bounds, drafts.tokens.ctypes.data, drafts.num.ctypes.data, matched.ctypes.data,
            )  # fmt: skip
        drafts.confidence[:] = self._confidence[matched][:, None]
        drafts.match = np.where(drafts.num > 0, matched, 0).astype(np.int32)
        return drafts

    def observe(self, commits: Commits) -> None:
        pass

    def end(self, request_id: int) -> None:
        pass

    def update(self, weights: Any, version: int) -> Receipt:
        raise ValueError("the ngram drafter has no weights to update; it looks up the sequence's own tokens")

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        if state:
            raise ValueError(f"not a state of the ngram drafter, which keeps none: it holds {sorted(state)}")


def lookup(text: list[int], shortest: int, longest: int, cap: int) -> tuple[list[int], int]:
    """csrc/ngram.c in plain Python: up to cap tokens, and how many were matched."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        suffix = text[-n:]
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == suffix:
                copied = list(text)
                for _ in range(cap):
                    copied.append(copied[start + n + len(copied) - len(text)])
                return copied[len(text) :], n
    return [], 0
