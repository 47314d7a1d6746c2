"""Prompt lookup: drafts what followed the last few tokens at an earlier position of the same sequence.

Stateless: it reads only the row's own tokens. The most recent match is used, since a rollout tends to repeat what it
emitted last (the current sum, not the first one). A copy that reaches the end of the sequence continues with the draft
itself, so a recent match gives as many draft tokens as an old one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from paceline.native import NativeUnavailable, load
from paceline.speculation.batch import Drafter, Rows
from paceline.speculation.draft_batch import DraftBatch

# By tokens matched (the last one for all longer matches): how often SmolLM2-135M at temperature 1 accepted the draft.
CONFIDENCE = np.array([0, 0.27, 0.41, 0.44, 0.48, 0.54], np.float32)


class NgramDrafter(Drafter):
    """Matches the longest suffix of prompt_lookup_min to prompt_lookup_max tokens that occurs earlier in the row."""

    name = "ngram"

    def __init__(self, prompt_lookup_min: int = 2, prompt_lookup_max: int = 5, native: bool = True) -> None:
        if prompt_lookup_min < 1:
            raise ValueError(f"speculation.prompt_lookup_min = {prompt_lookup_min}: must be >= 1 token")
        if prompt_lookup_max < prompt_lookup_min:
            raise ValueError(f"speculation.prompt_lookup_max = {prompt_lookup_max}: must be >= {prompt_lookup_min}")
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

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        if not len(rows):
            return DraftBatch.empty(0)
        drafts = DraftBatch.empty(len(rows), int(caps.max()))
        matched = np.zeros(len(rows), np.int32)
        if self._native is None:
            for i, sequence in enumerate(rows.tokens):
                tokens, matched[i] = lookup(sequence.tolist(), *self._bounds, int(caps[i]))
                drafts.num[i] = len(tokens)
                drafts.tokens[i, : len(tokens)] = tokens
        else:
            sequences = list(rows.tokens)
            assert all(tokens.dtype == np.int32 and tokens.flags.c_contiguous for tokens in sequences)
            # `tokens.ctypes` would give the same address, but takes several times as long.
            addresses = np.array([tokens.__array_interface__["data"][0] for tokens in sequences], np.uint64)
            lengths = np.array([len(tokens) for tokens in sequences], np.int64)
            self._native(
                addresses.tobytes(), lengths.tobytes(), len(rows), caps.tobytes(), drafts.tokens.shape[1],
                *self._bounds, drafts.tokens.ctypes.data, drafts.num.ctypes.data, matched.ctypes.data,
            )  # fmt: skip
        drafts.scores[:] = self._confidence[matched][:, None]
        drafts.match = np.where(drafts.num > 0, matched, 0).astype(np.int32)
        return drafts


def lookup(tokens: list[int], shortest: int, longest: int, cap: int) -> tuple[list[int], int]:
    """csrc/ngram.c in Python: up to `cap` draft tokens, and the number of matched tokens."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = tokens[-n:]
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == suffix:
                copied = list(tokens)
                for _ in range(cap):
                    copied.append(copied[start + n + len(copied) - len(tokens)])
                return copied[len(tokens) :], n
    return [], 0
