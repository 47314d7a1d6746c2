"""How long the checks take, to show the share that is done and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from paceline.types import SamplingParams
from paceline.verify.model import CheckedModel

# Seconds of each check with SmolLM2-135M and five drafters on two cores: quick, which is measured, and full, which is
# estimated from the number of tokens; and whether the time depends on the model.
REFERENCE_S = {
    "1 enumeration": (10.0, 20.0, False),
    "2 chi-square, known distribution": (6.0, 54.0, False),
    "2 chi-square, this model": (35.0, 140.0, True),
    "3 seeded identity": (33.0, 330.0, True),
    "3 weight update": (22.0, 90.0, True),
    "4 greedy identity with transformers": (13.0, 180.0, True),
    "5 logprob parity": (32.0, 190.0, True),
}
REFERENCE_PROBE_S = 0.5  # of `_probe_s` there
REFERENCE_DRAFTERS = 5
PROBE_TOKENS, PROBE_REQUESTS = 8, 4
FULL_WEIGHT = 3.0  # a third of the work done corrects the estimate in full


class Estimate:
    def __init__(self, names: Sequence[str], seconds: Sequence[float]) -> None:
        self.names, self.seconds = list(names), list(seconds)

    @property
    def total_s(self) -> float:
        return sum(self.seconds)

    def share(self, name: str, share_of_check: float) -> float:
        """Share of all checks that is done, when so much of this one is."""
        i = self.names.index(name)
        return (sum(self.seconds[:i]) + share_of_check * self.seconds[i]) / self.total_s

    def left_s(self, share: float, elapsed_s: float) -> float:
        """The estimate of the rest, corrected by how wrong that of the part that is done was. At first this says
        little: the first checks do not depend on the model."""
        wrong = elapsed_s / (share * self.total_s) if share else 1.0
        weight = min(1.0, FULL_WEIGHT * share)
        return (1 - share) * self.total_s * (1 + weight * (wrong - 1))


class CheckObserver(Protocol):
    """Receives the progress of checks."""

    def begin(self, make_estimate: Callable[[], Estimate]) -> None: ...  # making the estimate takes a moment
    def progress(self, check: str, detail: str, share: float) -> None: ...  # `share` of this check is done


def estimate(model: CheckedModel, names: Sequence[str], quick: bool) -> Estimate:
    """From the reference times, and from how fast this model generates a few tokens on this machine."""
    factor = _probe_s(model) / REFERENCE_PROBE_S
    drafters = (1 + len(model.drafters)) / (1 + REFERENCE_DRAFTERS)
    seconds = []
    for name in names:
        quick_s, full_s, depends_on_model = REFERENCE_S[name]
        seconds.append((quick_s if quick else full_s) * (factor * drafters if depends_on_model else 1.0))
    return Estimate(names, seconds)


def _probe_s(model: CheckedModel) -> float:
    engine = model.engine()
    params = SamplingParams(ignore_eos=True)
    requests = [
        replace(r, sampling=replace(params, max_tokens=PROBE_TOKENS)) for r in model.requests(params)[:PROBE_REQUESTS]
    ]
    engine.generate(requests)  # warm-up
    started = time.perf_counter()
    engine.generate(requests)
    return time.perf_counter() - started
