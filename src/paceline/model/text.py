"""Decode token ids to text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

MAX_CACHED = 1 << 20  # windows, about 200 MB


class Pieces:
    """Splits the decoded text into one piece per token. A character of several tokens belongs to the last of them.
    Decodes a short window at a time (a token's text may depend on the token before it), so the time is linear in the
    number of tokens. Windows are cached, because texts repeat themselves."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._decode = lru_cache(MAX_CACHED)(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True))

    def __call__(self, ids: Sequence[int]) -> list[str]:
        pieces: list[str] = []
        start = done = 0  # the window begins at `start`; the text up to `done` is in `pieces`
        for end in range(1, len(ids) + 1):
            text = self._decode(tuple(ids[start:end]))
            if text.endswith("\ufffd") and end < len(ids):
                pieces.append("")
                continue
            before = self._decode(tuple(ids[start:done])) if start < done else ""
            pieces.append(text[len(before) :])
            start, done = done, end
        return pieces
