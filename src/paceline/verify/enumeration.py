"""Rung 1: the exact distribution of whole sequences, by walking every path of chance through the real engine.

Every place where the engine consults its noise becomes a fork; each run takes one way at every fork, its probability
is the product of the ways taken, and depth-first search takes them all. No statistics: the sum over runs is the
engine's distribution, to rounding. Brute force multiplies the target's own probabilities.

Forks count as independent, which holds only if no noise is consulted twice: so every consultation is remembered by
(key, position, round, stream), and repeated ones are counted. Under `coupled` a drafter reads the target's own noise
by design (stream SAMPLE, not counted); there the output does not depend on drafts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.engine.engine import LocalEngine
from paceline.engine.sequence import Sequence
from paceline.model.sample import Noise, Sampler, Stream
from paceline.types import Request
from paceline.verify.reference import processed_logprobs
from paceline.verify.table import TableDecoder

Distribution = dict[tuple[int, ...], float]


class Enumerator(Noise):
    """A noise that takes the scripted way at every fork, and the first possible one beyond the script."""

    def __init__(self) -> None:
        self.script: list[int] = []
        self.ways: list[np.ndarray] = []  # the chances at each fork of this run
        self.consulted: set[tuple[int, int, int]] = set()  # key, position with its round, stream: in this run
        self.num_reused = 0  # consultations of noise that an earlier fork of the same run had consulted; over all runs

    def begin(self) -> None:
        self.ways = []
        self.consulted = set()

    @property
    def probability(self) -> float:
        return float(np.prod([chances[way] for chances, way in zip(self.ways, self.script, strict=True)]))

    def advance(self) -> bool:
        """Script the next path; False when all have been taken."""
        while self.script:
            later = np.flatnonzero(self.ways[len(self.script) - 1][self.script[-1] + 1 :] > 0)
            if len(later):
                self.script[-1] += 1 + int(later[0])
                return True
            self.script.pop()
        return False

    def _fork(self, chances: np.ndarray) -> int:
        at = len(self.ways)
        self.ways.append(chances)
        if at == len(self.script):
            self.script.append(int(np.flatnonzero(chances > 0)[0]))
        return self.script[at]

    def _remember(self, keys: np.ndarray, positions: np.ndarray, stream: int) -> None:
        if stream == Stream.SAMPLE:
            return
        for key, position in zip(keys.tolist(), positions.tolist(), strict=True):
            self.num_reused += (key, position, stream) in self.consulted
            self.consulted.add((key, position, stream))

    def race(self, weights_PV: Tensor, keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray:
        self._remember(keys, positions, stream)
        chances = (weights_PV.double() / weights_PV.double().sum(-1, keepdim=True)).numpy()
        return np.array([self._fork(row) for row in chances], np.int32)

    def ahead(
        self, weights_PV: Tensor, tokens: np.ndarray, keys: np.ndarray, positions: np.ndarray, stream: int
    ) -> np.ndarray:
        return np.zeros(len(tokens))  # all happens: nobody leads

    def coin(self, chances: np.ndarray, keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray:
        self._remember(keys, positions, stream)
        return np.array([self._fork(np.array([c, 1 - c])) == 0 for c in np.clip(chances, 0, 1)])


@dataclass(slots=True)
class Enumeration:
    """The exact distribution of a request's tokens, and what happened on all paths together."""

    distribution: Distribution = field(default_factory=dict)
    num_paths: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_reused: int = 0  # noise consulted twice: above 0 the distribution is not to be trusted


def enumerate_engine(
    make: Callable[[Sampler], LocalEngine],
    request: Request,
    others: tuple[Request, ...] = (),
    noise: Enumerator | None = None,
) -> Enumeration:
    """Run the request on every path of chance. `make` gives a fresh engine that uses this sampler. `others` run beside
    it and must be greedy (no chance of their own), with noise keys of their own."""
    noise = noise or Enumerator()
    found: Distribution = defaultdict(float)
    result = Enumeration()
    while True:
        noise.begin()
        engine = make(Sampler(noise))
        completion = engine.generate([request, *others])[0]
        found[tuple(completion.token_ids.tolist())] += noise.probability
        result.num_paths += 1
        result.num_draft_tokens += completion.num_draft_tokens
        result.num_accepted_tokens += completion.num_accepted_tokens
        if not noise.advance():
            result.distribution, result.num_reused = dict(found), noise.num_reused
            return result


def brute_force(target: TableDecoder, request: Request) -> Distribution:
    """The same from the definition: probabilities multiplied along every sequence."""
    found: Distribution = {}

    def walk(emitted: tuple[int, ...], chance: float) -> None:
        sequence = Sequence(request, 0, target.config.max_positions, target.config.eos_token_ids)
        for token in emitted:
            sequence.take([token], None)
        if sequence.finish_reason is not None:
            found[emitted] = chance
            return
        logits = torch.from_numpy(target.table.logits_after(sequence.tokens))
        for token, p in enumerate(processed_logprobs(logits.unsqueeze(0), request.sampling)[0].exp().tolist()):
            if p > 0:
                walk((*emitted, token), chance * p)

    walk((), 1.0)
    return found


def total_variation(a: Distribution, b: Distribution) -> float:
    return sum(abs(a.get(x, 0) - b.get(x, 0)) for x in a.keys() | b.keys()) / 2
