"""The taskset of letters.py, with keys of its own."""

from __future__ import annotations

from letters import ChatHarness, LetterConfig, LetterData, LetterTask, LetterTaskset


class KeyedTask(LetterTask):
    @property
    def key(self) -> str:
        return f"letter-{self.data.letter}"


class KeyedTaskset(LetterTaskset):
    def load(self):
        for task in super().load():
            yield KeyedTask(task.data)


__all__ = ["ChatHarness", "KeyedTaskset", "LetterConfig", "LetterData"]
