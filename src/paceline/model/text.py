"""Token ids back into text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token's share of the text. A character made of several tokens belongs to the last of them. Decodes a short
    window at a time (what a token adds may depend on the one before it), so that long texts take linear time."""
    shares: list[str] = []
    start = read = 0  # the window begins at `start`; up to `read` its text has been shared out
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[start:read], skip_special_tokens=True) if read > start else ""
        text = tokenizer.decode(ids[start:end], skip_special_tokens=True)
        if text.endswith("\ufffd") and end < len(ids):
            shares.append("")
            continue
        shares.append(text[len(before) :])
        start, read = read, end
    return shares
