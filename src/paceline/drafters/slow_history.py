"""csrc/suffix.c in plain Python: the fallback where there is no C compiler, and the twin that tests hold it against.

Both propose the same tokens with the same confidences, to the bit: sums are taken in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.drafters.history import INT, ROOT, Sequences
from paceline.speculation.batch import DraftBatch

MAX_COUNTED = 64  # csrc/suffix.c says why

# A context of so many tokens votes though another shard knows a longer one. Tokens per step of k = 4 if it needs 1, 2,
# 4, 8 tokens, or the very longest: 1.338, 1.356, 1.359, 1.360, 1.360 on rollouts of SmolLM2-135M with one sample in
# each of three older shards; 2.064, 2.076, 2.067, 2.057, 2.052 on synthetic plans that drift, 16 in each of four.
LONG = 4


class SlowAutomaton:
    """csrc/suffix.c, line for line, with a dictionary of edges per state."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.length: list[int] = []
        self.link: list[int] = []
        self.count: list[int] = []
        self.num_next: list[int] = []
        self.best: list[int] = []  # token
        self.edges: list[dict[int, int]] = []
        self.log: list[int] = []
        self.tail = -1
        self._state(0, -1, 0, 0, -1, {})

    def _state(self, length: int, link: int, count: int, num_next: int, best: int, edges: dict[int, int]) -> int:
        self.length.append(length)
        self.link.append(link)
        self.count.append(count)
        self.num_next.append(num_next)
        self.best.append(best)
        self.edges.append(edges)
        return len(self.length) - 1

    def say(self, last: int, tokens: list[int]) -> int:
        for token in tokens:
            now = self._extend(last, token)
            self._count(last, token, now)
            if last != self.tail:
                self.log.append(~last)
            self.log.append(token)
            last = self.tail = now
        self.num_tokens += len(tokens)
        return last

    def _extend(self, last: int, token: int) -> int:
        if token in self.edges[last]:
            return self._exact(last, token)
        now = self._state(self.length[last] + 1, ROOT, 0, 0, -1, {})
        p = last
        while p >= 0 and token not in self.edges[p]:
            self.edges[p][token] = now
            if self.best[p] < 0:
                self.best[p] = token
            p = self.link[p]
        if p >= 0:
            self.link[now] = self._exact(p, token)
        return now

    def _exact(self, p: int, token: int) -> int:
        """The state whose longest string is p's longest and then token, split off from a longer one's if need be."""
        q, length = self.edges[p][token], self.length[p] + 1
        return q if self.length[q] == length else self._split(p, token, q, length)

    def _split(self, p: int, token: int, q: int, length: int) -> int:
        clone = self._state(length, self.link[q], self.count[q], self.num_next[q], self.best[q], dict(self.edges[q]))
        self.link[q] = clone
        while p >= 0 and self.edges[p].get(token) == q:
            self.edges[p][token] = clone
            p = self.link[p]
        return clone

    def _count(self, last: int, token: int, now: int) -> None:
        u, v = last, now
        self.count[v] += 1
        for _ in range(MAX_COUNTED):
            if u < 0:
                break
            if self.length[self.link[v]] > self.length[u]:
                v = self.link[v]
                self.count[v] += 1
            self.num_next[u] += 1
            if self.count[v] >= self.count[self.edges[u][self.best[u]]]:
                self.best[u] = token
            u = self.link[u]

    def settle(self, u: int, length: int) -> int:
        """Since a cursor was set, its string may have been split off from its state's longer ones."""
        while u > 0 and self.length[self.link[u]] >= length:
            u = self.link[u]
        return u

    def follow(self, u: int, length: int, token: int) -> tuple[int, int]:
        """Move on by a token: to the longest end of the old string that it followed."""
        while token not in self.edges[u]:
            if u == ROOT:
                return ROOT, 0
            u = self.link[u]
            length = self.length[u]
        return self.edges[u][token], length + 1


@dataclass(slots=True)
class Voice:
    """A shard's say in a draft: where it stands, and what its counts weigh."""

    shard: SlowAutomaton
    state: int  # ROOT: silent
    length: int
    weight: float

    def turn_to_what_went_on(self) -> None:
        while self.state != ROOT and not self.shard.edges[self.state]:
            self.state = self.shard.link[self.state]
            self.length = self.shard.length[self.state]


def vote(voices: list[Voice], min_match: int) -> tuple[int, float, int, list[Voice]] | None:
    """The next token, its confidence, the longest context, and the voices that are left. Those with the longest
    context, or one of LONG tokens, vote for the token that they think likeliest, the newest first on ties. Who has no
    vote, or voted otherwise, is silent from then on."""
    for voice in voices:
        voice.turn_to_what_went_on()
    longest = max((voice.length for voice in voices if voice.state != ROOT), default=0)
    if longest < min_match:
        return None
    least = max(min(longest, LONG), min_match)
    votes: dict[int, float] = {}
    num = 0.0
    voting = [voice for voice in voices if voice.state != ROOT and voice.length >= least]
    for voice in voting:
        shard, token = voice.shard, voice.shard.best[voice.state]
        num += voice.weight * shard.num_next[voice.state]
        votes[token] = votes.get(token, 0.0) + voice.weight * shard.count[shard.edges[voice.state][token]]
    chosen = max(votes, key=votes.__getitem__)
    left = [voice for voice in voting if voice.shard.best[voice.state] == chosen]
    for voice in left:
        voice.state, voice.length = voice.shard.edges[voice.state][chosen], voice.length + 1
    return chosen, confidence(votes[chosen], num, longest), longest, left


def confidence(count: float, num: float, length: int) -> float:
    """How sure a draft is of a token said `count` of the `num` times that something followed a context of `length`
    tokens: a discount for what was said only now and then, and less faith in short contexts. Given the positions
    before, so not a product. Fitted to rollouts of SmolLM2-135M at temperature 1, where a token said 1 time of 1 was
    right in 21% of cases after 1 token, 37% after 3, 54% after 7; 4 of 4 in 58%, 78% and more."""
    num = max(num, count)  # contexts past MAX_COUNTED may have missed some
    return (count - 0.4 * min(count, 1)) / (num + 2 / length)


class SlowHistory(Sequences):
    """NativeHistory in plain Python, a hundred times slower and ten times larger."""

    def __init__(self) -> None:
        self._shards: dict[int, SlowAutomaton] = {}
        self._num_made = 0

    def new(self) -> int:
        self._num_made += 1
        self._shards[self._num_made] = SlowAutomaton()
        return self._num_made

    def free(self, shard: int) -> None:
        del self._shards[shard]

    def num_bytes(self, shard: int) -> int:
        told = self._shards[shard]
        # What CPython takes: five numbers and a small dict, a number.
        return 500 * len(told.length) + 36 * len(told.log)

    def num_tokens(self, shard: int) -> int:
        return self._shards[shard].num_tokens

    def prompt(self, shard: int, tokens: np.ndarray) -> int:
        told = self._shards[shard]
        told.tail = -1
        end = told.say(ROOT, tokens.tolist())
        told.tail = -1
        return end

    def find(self, shard: int, tokens: np.ndarray) -> tuple[int, int]:
        state, length = ROOT, 0
        for token in tokens.tolist():
            state, length = self._shards[shard].follow(state, length, token)
        return state, length

    def log(self, shard: int) -> np.ndarray:
        return np.array(self._shards[shard].log, INT)

    def replay(self, shard: int, log: np.ndarray) -> bool:
        told, last = self._shards[shard], -1
        for word in log.tolist():
            if word >= 0 and last < 0:
                return False
            last = ~word if word < 0 else told.say(last, [word])
            if last >= len(told.length):
                return False
        return True

    def observe(self, slots: np.ndarray, tokens: np.ndarray, num: np.ndarray) -> int:
        grown = 0
        for slot, row, n in zip(slots, tokens, num, strict=True):
            own = self.cursors[slot, 0]
            shard = int(own["shard"])
            before = self.num_bytes(shard)
            own["state"] = self._shards[shard].say(int(own["state"]), row[:n].tolist())
            own["length"] += n
            grown += self.num_bytes(shard) - before
        for slot, row, n in zip(slots, tokens, num, strict=True):
            for cursor in self.cursors[slot, 1:]:
                if not cursor["shard"]:
                    continue
                told, length = self._shards[int(cursor["shard"])], int(cursor["length"])
                state = told.settle(int(cursor["state"]), length)
                for token in row[:n].tolist():
                    state, length = told.follow(state, length, token)
                cursor["state"], cursor["length"] = state, length
        return grown

    def propose(self, slots: np.ndarray, caps: np.ndarray, k: int, min_match: int, weights: np.ndarray) -> DraftBatch:
        drafts = DraftBatch.empty(len(slots), k)
        drafts.match = np.zeros(len(slots), np.int32)
        for i, slot in enumerate(slots):
            voices = []
            for cursor, weight in zip(self.cursors[slot].tolist(), weights.tolist(), strict=True):
                shard, state, length = cursor[:3]
                if shard and state > ROOT:
                    told = self._shards[shard]
                    voices.append(Voice(told, told.settle(state, length), length, weight))
            for n in range(caps[i]):
                said = vote(voices, min_match)
                if said is None:
                    break
                drafts.tokens[i, n], drafts.confidence[i, n], longest, voices = said
                drafts.num[i] = n + 1
                if n == 0:
                    drafts.match[i] = longest
        return drafts
