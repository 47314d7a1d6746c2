"""Which prompts a live engine would find in its memory: a trie of blocks, as model/kv.py keeps it, without the memory.

It never forgets before `clear`, so what a live engine evicts is still found here.
"""

from __future__ import annotations

import numpy as np

BLOCK = 16  # tokens, as in model/kv.py


class Prefixes:
    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._next: dict[tuple[int, bytes], int] = {}  # (node, a block of tokens) -> node
        self._chunks: dict[int, dict[bytes, np.ndarray]] = {}  # node -> what is known to follow it, at most a block

    def add(self, tokens: np.ndarray) -> None:
        node = 0
        for at in range(0, len(tokens), BLOCK):
            chunk = tokens[at : at + BLOCK]
            key = chunk.tobytes()
            self._chunks.setdefault(node, {})[key] = chunk
            if len(chunk) == BLOCK:
                node = self._next.setdefault((node, key), len(self._next) + 1)

    def match(self, tokens: np.ndarray) -> int:
        """How many of these tokens, from the first on, are known."""
        node = covered = 0
        while covered + BLOCK <= len(tokens):
            found = self._next.get((node, tokens[covered : covered + BLOCK].tobytes()))
            if found is None:
                break
            node, covered = found, covered + BLOCK
        rest = tokens[covered : covered + BLOCK]
        best = 0
        for chunk in self._chunks.get(node, {}).values():
            size = min(len(chunk), len(rest))
            differs = chunk[:size] != rest[:size]
            best = max(best, int(differs.argmax()) if differs.any() else size)
        return covered + best
