"""Level 1: the exact distribution of whole sequences, by running the real engine with every outcome of its noise.

Each random draw of the engine is a branching point. One run takes one outcome at each draw; its probability is the
product of the probabilities of these outcomes. Depth-first search runs the engine once per combination of outcomes.
There is no statistical error: the sum over all runs is the engine's distribution, up to rounding. `brute_force`
multiplies the target's own probabilities instead, and the two must agree.

The product assumes independent draws. This holds only if no noise is used twice, so each use is recorded by (key,
position, round, stream) and repeated uses are counted. Under `coupled` a drafter uses the target's own noise by design
(stream SAMPLE, not counted); under that rule the output does not depend on drafts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.engine.engine import LocalEngine
from paceline.model.sample import Noise, Sampler, Stream
from paceline.types import Request
from paceline.verify.reference import changed_logits, processed_logprobs
from paceline.verify.table import TableDecoder

Distribution = dict[tuple[int, ...], float]


class Enumerator(Noise):
    """Noise with draws that follow `path`. Beyond its end each draw takes the first outcome with a positive
    probability, which is appended to the path."""

    def __init__(self) -> None:
        self.path: list[int] = []  # the outcome of each draw
        self.draws: list[np.ndarray] = []  # the outcomes' probabilities at each draw of this run
        self.used: set[tuple[int, int, int]] = set()  # (key, position with its round, stream) in this run
        self.num_reused = 0  # draws with noise that the same run had used before; over all runs

    def begin(self) -> None:
        self.draws = []
        self.used = set()

    @property
    def probability(self) -> float:
        return float(np.prod([probabilities[i] for probabilities, i in zip(self.draws, self.path, strict=True)]))

    def advance(self) -> bool:
        """Set the next path; False if every path has been run."""
        while self.path:
            later = np.flatnonzero(self.draws[len(self.path) - 1][self.path[-1] + 1 :] > 0)
            if len(later):
                self.path[-1] += 1 + int(later[0])
                return True
            self.path.pop()
        return False

    def _draw(self, probabilities: np.ndarray) -> int:
        at = len(self.draws)
        self.draws.append(probabilities)
        if at == len(self.path):
            self.path.append(int(np.flatnonzero(probabilities > 0)[0]))
        return self.path[at]

    def _record_use(self, keys: np.ndarray, positions: np.ndarray, stream: int) -> None:
        if stream == Stream.SAMPLE:
            return
        for key, position in zip(keys.tolist(), positions.tolist(), strict=True):
            self.num_reused += (key, position, stream) in self.used
            self.used.add((key, position, stream))

    def race(self, weights_PV: Tensor, keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray:
        self._record_use(keys, positions, stream)
        probabilities = (weights_PV.double() / weights_PV.double().sum(-1, keepdim=True)).numpy()
        return np.array([self._draw(row) for row in probabilities], np.int32)

    def log_margins(
        self, weights_PV: Tensor, tokens: np.ndarray, keys: np.ndarray, positions: np.ndarray, stream: int
    ) -> np.ndarray:
        return np.zeros(len(tokens))  # every outcome is taken, so no token has a margin

    def bernoulli(self, probabilities: np.ndarray, keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray:
        self._record_use(keys, positions, stream)
        return np.array([self._draw(np.array([p, 1 - p])) == 0 for p in np.clip(probabilities, 0, 1)])


@dataclass(slots=True)
class Enumeration:
    """The exact distribution of a request's tokens, and counts over all paths."""

    distribution: Distribution = field(default_factory=dict)
    num_paths: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_reused: int = 0  # draws with noise that was used before; above 0 the distribution is not valid


def enumerate_engine(
    make: Callable[[Sampler], LocalEngine],
    request: Request,
    others: tuple[Request, ...] = (),
    noise: Enumerator | None = None,
) -> Enumeration:
    """Run the request with every outcome of the noise. `make` returns a new engine that uses the given sampler.
    `others` run in the same batch. They must be greedy, so that they add no draws, and have their own noise keys."""
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


def brute_force(
    target: TableDecoder, request: Request, allows: Callable[[tuple[int, ...]], bool] | None = None
) -> Distribution:
    """The same distribution from its definition: the product of the target's probabilities along each sequence.
    `allows`: whether a structured output may begin with these tokens. A sequence ends where no token is left."""
    found: Distribution = {}
    sampling, config = request.sampling, target.config
    assert not sampling.stop, "needs a tokenizer"
    stop_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else config.eos_token_ids)}
    limit = min(sampling.max_tokens, config.max_positions - len(request.prompt_ids))

    def extend(emitted: tuple[int, ...], probability: float) -> None:
        if len(emitted) == limit or (emitted and emitted[-1] in stop_ids):
            found[emitted] = probability
            return
        tokens = np.array([*request.prompt_ids, *emitted], np.int32)
        logits = changed_logits(target.table.logits_after(tokens), sampling, request.prompt_ids, emitted, stop_ids)
        if allows is not None:
            logits = np.where([allows((*emitted, token)) for token in range(len(logits))], logits, -np.inf)
        if np.isneginf(logits).all():
            found[emitted] = probability
            return
        logprobs = processed_logprobs(torch.from_numpy(logits).unsqueeze(0), sampling)[0]
        for token, p in enumerate(logprobs.exp().tolist()):
            if p > 0:
                extend((*emitted, token), probability * p)

    extend((), 1.0)
    return found


def total_variation(a: Distribution, b: Distribution) -> float:
    return sum(abs(a.get(x, 0) - b.get(x, 0)) for x in a.keys() | b.keys()) / 2
