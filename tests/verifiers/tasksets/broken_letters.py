"""A taskset that can't be loaded."""

from __future__ import annotations

from letters import ChatHarness, LetterTaskset


class BrokenTaskset(LetterTaskset):
    def load(self):
        yield from super().load()
        raise ZeroDivisionError("the last row is broken")


__all__ = ["BrokenTaskset", "ChatHarness"]
