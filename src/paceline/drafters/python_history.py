"""csrc/suffix.c in Python: the fallback without a C compiler, and the reference implementation for tests.

Both propose the same tokens with the same confidences, bit for bit: sums are computed in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.drafters.history import INT, ROOT, CursorTable
from paceline.speculation.draft_batch import DraftBatch

MAX_COUNTED = 64  # see csrc/automaton.h

# A match of this length votes even if another shard has a longer one. Tokens per step at k = 4 if a vote takes 1, 2, 4,
# 8 tokens, or the longest match: 1.338, 1.356, 1.359, 1.360, 1.360 on rollouts of SmolLM2-135M with one sample in each
# of three older shards; 2.064, 2.076, 2.067, 2.057, 2.052 on synthetic token sequences that drift, 16 in each of four.
LONG_MATCH = 4


class PythonAutomaton:
    """csrc/automaton.h, line for line, with a dict of edges per state."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.length: list[int] = []
        self.link: list[int] = []
        self.count: list[int] = []
        self.num_next: list[int] = []
        self.best: list[int] = []  # token
        self.edges: list[dict[int, int]] = []
        self.log: list[int] = []
        self.tail = -1  # the state after the log's last token
        self._state(0, -1, 0, 0, -1, {})

    def _state(self, length: int, link: int, count: int, num_next: int, best: int, edges: dict[int, int]) -> int:
        self.length.append(length)
        self.link.append(link)
        self.count.append(count)
        self.num_next.append(num_next)
        self.best.append(best)
        self.edges.append(edges)
        return len(self.length) - 1

    def append(self, last: int, tokens: list[int]) -> int:
        """Append tokens to the sequence in state `last`, and return its new state."""
        for token in tokens:
            state = self._extend(last, token)
            self._count(last, token, state)
            if last != self.tail:
                self.log.append(~last)
            self.log.append(token)
            last = self.tail = state
        self.num_tokens += len(tokens)
        return last

    def _extend(self, last: int, token: int) -> int:
        if token in self.edges[last]:
            return self._exact_target(last, token)
        state = self._state(self.length[last] + 1, ROOT, 0, 0, -1, {})
        p = last
        while p >= 0 and token not in self.edges[p]:
            self.edges[p][token] = state
            if self.best[p] < 0:
                self.best[p] = token
            p = self.link[p]
        if p >= 0:
            self.link[state] = self._exact_target(p, token)
        return state

    def _exact_target(self, p: int, token: int) -> int:
        """The state whose longest string is p's longest string plus the token. Splits it off from the edge's target if
        that has longer strings."""
        q, length = self.edges[p][token], self.length[p] + 1
        return q if self.length[q] == length else self._split(p, token, q, length)

    def _split(self, p: int, token: int, q: int, length: int) -> int:
        clone = self._state(length, self.link[q], self.count[q], self.num_next[q], self.best[q], dict(self.edges[q]))
        self.link[q] = clone
        while p >= 0 and self.edges[p].get(token) == q:
            self.edges[p][token] = clone
            p = self.link[p]
        return clone

    def _count(self, last: int, token: int, state: int) -> None:
        u, v = last, state
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

    def resolve_splits(self, u: int, length: int) -> int:
        """The state of a cursor's string, which may have been split off since the cursor was set."""
        while u > 0 and self.length[self.link[u]] >= length:
            u = self.link[u]
        return u

    def advance(self, u: int, length: int, token: int) -> tuple[int, int]:
        """Move a cursor by a token, to the longest suffix of its string that the token has followed."""
        while token not in self.edges[u]:
            if u == ROOT:
                return ROOT, 0
            u = self.link[u]
            length = self.length[u]
        return self.edges[u][token], length + 1


@dataclass(slots=True)
class ShardMatch:
    """A shard's match with the end of a sequence, and the weight of the shard's counts."""

    shard: PythonAutomaton
    state: int  # ROOT: no match
    length: int
    weight: float

    def shorten_until_continued(self) -> None:
        """To the longest suffix of the match that a token has followed."""
        while self.state != ROOT and not self.shard.edges[self.state]:
            self.state = self.shard.link[self.state]
            self.length = self.shard.length[self.state]


def vote(matches: list[ShardMatch], min_match: int) -> tuple[int, float, int, list[ShardMatch]] | None:
    """Returns the next token, its confidence, the length of the longest match, and the matches that voted for the
    token, moved on by it. The longest matches, and all of at least LONG_MATCH tokens, vote for their most frequent next
    token. The newest shard wins ties. All other matches are dropped."""
    for match in matches:
        match.shorten_until_continued()
    longest = max((match.length for match in matches if match.state != ROOT), default=0)
    if longest < min_match:
        return None
    least = max(min(longest, LONG_MATCH), min_match)
    votes: dict[int, float] = {}
    num = 0.0
    voting = [match for match in matches if match.state != ROOT and match.length >= least]
    for match in voting:
        shard, token = match.shard, match.shard.best[match.state]
        num += match.weight * shard.num_next[match.state]
        votes[token] = votes.get(token, 0.0) + match.weight * shard.count[shard.edges[match.state][token]]
    chosen = max(votes, key=votes.__getitem__)
    remaining = [match for match in voting if match.shard.best[match.state] == chosen]
    for match in remaining:
        match.state, match.length = match.shard.edges[match.state][chosen], match.length + 1
    return chosen, confidence(votes[chosen], num, longest), longest, remaining


def confidence(count: float, num: float, length: int) -> float:
    """Probability that a draft token is accepted, given that those before it are. The token followed a context of
    `length` tokens `count` times of `num`. Rare tokens are discounted, and short contexts count less. Fitted to
    rollouts of SmolLM2-135M at temperature 1: with 1 of 1, 21% were accepted after 1 token, 37% after 3, 54% after 7;
    with 4 of 4, 58%, 78% and more."""
    num = max(num, count)  # not all contexts are counted, see MAX_COUNTED
    return (count - 0.4 * min(count, 1)) / (num + 2 / length)


class PythonHistory(CursorTable):
    """NativeHistory in Python: a hundred times slower, and takes ten times the memory."""

    def __init__(self) -> None:
        self._shards: dict[int, PythonAutomaton] = {}
        self._num_created = 0

    def new(self) -> int:
        self._num_created += 1
        self._shards[self._num_created] = PythonAutomaton()
        return self._num_created

    def free(self, shard: int) -> None:
        del self._shards[shard]

    def num_bytes(self, shard: int) -> int:
        automaton = self._shards[shard]
        # CPython's objects: per state five ints and a small dict, per log entry an int.
        return 500 * len(automaton.length) + 36 * len(automaton.log)

    def num_tokens(self, shard: int) -> int:
        return self._shards[shard].num_tokens

    def insert_prompt(self, shard: int, tokens: np.ndarray) -> int:
        automaton = self._shards[shard]
        automaton.tail = -1
        end = automaton.append(ROOT, tokens.tolist())
        automaton.tail = -1
        return end

    def find(self, shard: int, tokens: np.ndarray) -> tuple[int, int]:
        state, length = ROOT, 0
        for token in tokens.tolist():
            state, length = self._shards[shard].advance(state, length, token)
        return state, length

    def log(self, shard: int) -> np.ndarray:
        return np.array(self._shards[shard].log, INT)

    def replay(self, shard: int, log: np.ndarray) -> bool:
        automaton, last = self._shards[shard], -1
        for entry in log.tolist():
            if entry >= 0 and last < 0:
                return False
            last = ~entry if entry < 0 else automaton.append(last, [entry])
            if last >= len(automaton.length):
                return False
        return True

    def observe(self, slots: np.ndarray, tokens: np.ndarray, num: np.ndarray) -> int:
        growth = 0
        for slot, row, n in zip(slots, tokens, num, strict=True):
            own = self.cursors[slot, 0]
            shard = int(own["shard"])
            before = self.num_bytes(shard)
            own["state"] = self._shards[shard].append(int(own["state"]), row[:n].tolist())
            own["length"] += n
            growth += self.num_bytes(shard) - before
        for slot, row, n in zip(slots, tokens, num, strict=True):
            for cursor in self.cursors[slot, 1:]:
                if not cursor["shard"]:
                    continue
                automaton, length = self._shards[int(cursor["shard"])], int(cursor["length"])
                state = automaton.resolve_splits(int(cursor["state"]), length)
                for token in row[:n].tolist():
                    state, length = automaton.advance(state, length, token)
                cursor["state"], cursor["length"] = state, length
        return growth

    def propose(self, slots: np.ndarray, caps: np.ndarray, k: int, min_match: int, weights: np.ndarray) -> DraftBatch:
        drafts = DraftBatch.empty(len(slots), k)
        drafts.match = np.zeros(len(slots), np.int32)
        for i, slot in enumerate(slots):
            matches = []
            for cursor, weight in zip(self.cursors[slot].tolist(), weights.tolist(), strict=True):
                shard, state, length = cursor[:3]
                if shard and state > ROOT:
                    automaton = self._shards[shard]
                    matches.append(ShardMatch(automaton, automaton.resolve_splits(state, length), length, weight))
            for n in range(caps[i]):
                result = vote(matches, min_match)
                if result is None:
                    break
                drafts.tokens[i, n], drafts.scores[i, n], longest, matches = result
                drafts.num[i] = n + 1
                if n == 0:
                    drafts.match[i] = longest
        return drafts
