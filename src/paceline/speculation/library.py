"""What was said to each problem, as it was said: the texts that a device reads for itself (`model/cuda/recall.py`).

A text begins with the end of its prompt, so that the first words of an answer have a context too, and grows as its
request speaks. A problem keeps those of its last few policy versions; all of them together keep to `max_bytes`, those
that were begun least recently go first, but for those of live requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np

from paceline.speculation.batch import Commits
from paceline.types import Request

TAIL = 16  # tokens of a prompt
STATE = {"names", "name_ends", "problems", "versions", "tokens", "ends"}  # what `Library.state` holds


@dataclass(slots=True, eq=False)
class Text:
    problem: str | None  # None: nobody else hears it
    version: int
    room: int  # tokens that it may come to
    words: np.ndarray  # int32, of which …
    num: int = 0  # … so many are said
    is_live: bool = True

    @property
    def said(self) -> np.ndarray:
        return self.words[: self.num]

    def say(self, tokens: np.ndarray) -> None:
        end = self.num + len(tokens)
        if end > len(self.words):
            self.words = np.concatenate([self.words, np.empty(max(end, 64), np.int32)])
        self.words[self.num : end] = tokens
        self.num = end


@dataclass(slots=True)
class Library:
    max_versions: int = 4
    max_bytes: int = 1 << 30
    problems: dict[str, list[Text]] = field(default_factory=dict)  # those begun last come last
    live: dict[int, Text] = field(default_factory=dict)  # by request
    num_bytes: int = 0
    _order: dict[Text, None] = field(default_factory=dict)  # of all that are kept, least recently begun first

    def begin(self, request: Request, version: int) -> Text:
        tail = np.array(request.prompt_ids[-TAIL:], np.int32)
        text = Text(request.problem, version, len(tail) + request.sampling.max_tokens, tail.copy(), len(tail))
        self.live[request.request_id] = text
        if request.problem is not None:
            self._keep(text)
            self._fit(request.problem)
        return text

    def hear(self, commits: Commits) -> None:
        for i, (request_id, num) in enumerate(zip(commits.request_ids.tolist(), commits.num.tolist(), strict=True)):
            text = self.live[request_id]
            before = text.num
            text.say(commits.tokens[i, :num])
            if text in self._order:
                self.num_bytes += 4 * (text.num - before)

    def end(self, request_id: int) -> None:
        text = self.live.pop(request_id)
        text.is_live, text.words = False, text.said.copy()
        if text.problem is not None:
            self._fit(text.problem)

    def texts(self, problem: str | None) -> list[Text]:
        """The newest first; of no problem none."""
        return [] if problem is None else self.problems.get(problem, [])[::-1]

    def remove(self, version: int) -> int:
        """Forget what was said under a policy version, but by those who still speak; how many texts that were."""
        gone = [text for text in self._order if text.version == version and not text.is_live]
        for text in gone:
            self._drop(text)
        return len(gone)

    def _keep(self, text: Text) -> None:
        assert text.problem is not None
        self.problems.setdefault(text.problem, []).append(text)
        self._order[text] = None
        self.num_bytes += 4 * text.num

    def _fit(self, problem: str) -> None:
        texts = self.problems.get(problem, [])
        versions = sorted({text.version for text in texts}, reverse=True)[: self.max_versions]
        for text in [text for text in texts if text.version not in versions and not text.is_live]:
            self._drop(text)
        gone, num_bytes = [], self.num_bytes
        for text in self._order if num_bytes > self.max_bytes else ():
            if not text.is_live:
                gone.append(text)
                num_bytes -= 4 * text.num
                if num_bytes <= self.max_bytes:
                    break
        for text in gone:
            self._drop(text)

    def _drop(self, text: Text) -> None:
        assert text.problem is not None
        del self._order[text]
        texts = self.problems[text.problem]
        texts.remove(text)
        if not texts:
            del self.problems[text.problem]
        self.num_bytes -= 4 * text.num

    def state(self) -> dict[str, np.ndarray]:
        names = list(self.problems)
        number, encoded = {name: i for i, name in enumerate(names)}, [name.encode() for name in names]
        texts = list(self._order)
        return {
            "names": np.frombuffer(b"".join(encoded), np.uint8).copy(),
            "name_ends": np.cumsum([len(name) for name in encoded], dtype=np.int64),
            "problems": np.array([number[text.problem or ""] for text in texts], np.int64),
            "versions": np.array([text.version for text in texts], np.int64),
            "tokens": np.concatenate([text.said for text in texts]) if texts else np.zeros(0, np.int32),
            "ends": np.cumsum([text.num for text in texts], dtype=np.int64),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Know what was known when this state was taken, and nothing else."""
        assert not self.live, "restored while requests run"
        if state.keys() != STATE:
            raise ValueError(
                f"not a state of the history on a device: it holds {sorted(state) or 'nothing'}; was "
                "speculation.method or model.device changed?"
            )
        self.problems, self._order, self.num_bytes = {}, {}, 0
        ends = [0, *state["name_ends"].tolist()]
        names = [state["names"][a:b].tobytes().decode() for a, b in pairwise(ends)]
        start = 0
        for problem, version, end in zip(
            state["problems"].tolist(), state["versions"].tolist(), state["ends"].tolist(), strict=True
        ):
            words = state["tokens"][start:end].astype(np.int32)
            self._keep(Text(names[problem], version, len(words), words, len(words), is_live=False))
            start = end


@runtime_checkable
class Historian(Protocol):
    """A drafter whose drafts a device makes of what the library has, where at least `min_match` tokens are alike. Of
    two versions the newer's texts count as much as the older's divided by `recency`."""

    library: Library
    recency: float
    min_match: int
