"""Token ids back into text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_KNOWN = 1 << 20  # windows: some 200 MB


class Pieces:
    """Each token's share of the text. A character made of several tokens belongs to the last of them. Decodes a short
    window at a time (what a token adds may depend on the one before it), so that long texts take linear time; and each
    window once, since texts repeat themselves."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[tuple[int, ...], str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        shares: list[str] = []
        start = read = 0  # the window begins at `start`; up to `read` its text has been shared out
        for end in range(1, len(ids) + 1):
            text = self._decode(ids[start:end])
            if text.endswith("\ufffd") and end < len(ids):
                shares.append("")
                continue
            shares.append(text[len(self._decode(ids[start:read])) :])
            start, read = read, end
        return shares

    def _decode(self, ids: Sequence[int]) -> str:
        key = tuple(ids)
        text = self._known.get(key)
        if text is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            text = self._known[key] = self.tokenizer.decode(list(key), skip_special_tokens=True) if key else ""
        return text
