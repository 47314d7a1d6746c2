"""The prefix cache of a live engine without its memory: a trie of KV blocks, as in model/kv.py.

Nothing is evicted before `clear`, so prefixes that a live engine evicts are still found here.
"""

from __future__ import annotations

import numpy as np

BLOCK = 16  # tokens, as in model/kv.py


class Prefixes:
    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._next: dict[tuple[int, bytes], int] = {}  # (node, a block of tokens) -> node
        self._chunks: dict[int, dict[bytes, np.ndarray]] = {}  # node -> the chunks that follow it, at most a block long

    def add(self, tokens: np.ndarray) -> None:
        node = 0
        for at in range(0, len(tokens), BLOCK):
            chunk = tokens[at : at + BLOCK]
            key = chunk.tobytes()
            self._chunks.setdefault(node, {})[key] = chunk
            if len(chunk) == BLOCK:
                node = self._next.setdefault((node, key), len(self._next) + 1)

    def match(self, tokens: np.ndarray) -> int:
        """Length of the longest prefix of `tokens` that is in the cache."""
        node = num_matched = 0
        while num_matched + BLOCK <= len(tokens):
            child = self._next.get((node, tokens[num_matched : num_matched + BLOCK].tobytes()))
            if child is None:
                break
            node, num_matched = child, num_matched + BLOCK
        remaining = tokens[num_matched : num_matched + BLOCK]
        longest = 0
        for chunk in self._chunks.get(node, {}).values():
            size = min(len(chunk), len(remaining))
            differs = chunk[:size] != remaining[:size]
            longest = max(longest, int(differs.argmax()) if differs.any() else size)
        return num_matched + longest
