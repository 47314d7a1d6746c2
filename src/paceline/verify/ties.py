"""Near-ties: the first token in which two runs of a request differ, and how close the scores of both tokens are.

In 16 bits, and on a GPU, two implementations round differently, and without batch-invariant kernels the last bits of a
matrix product depend on its number of rows. So the order of two tokens with nearly equal scores may change. A token's
score is log p - log E with the request's noise E (computed as logits / temperature - log E, which differs by a
constant), at temperature 0 its logit. Given the tokens that both runs share, the scores are computed in float32 and in
the engine's precision. A difference with a wide float32 gap is a bug. P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.model.decoder import Decoder
from paceline.model.paged import PagedDecoder
from paceline.types import Completion, Request
from paceline.verify.identity import Difference, learner_logits, prefill_logits
from paceline.verify.reference import race_scores
from paceline.verify.result import CheckResult

# The widest gap of a near-tie, in units of `rounding`: both runs round, and runs differ where rounding is worst.
NEAR_TIE_FACTOR = 4


@dataclass(frozen=True, slots=True)
class ScoredDifference:
    """The first token in which a run differs from the expected one, with scores. If one of the runs had ended there is
    no gap, and it is not a near-tie: rounding does not end a run."""

    run: str
    request: int
    position: int
    tokens: tuple[int | None, int | None]  # expected, found
    near: bool = False  # a near-tie
    gap_float32: float | None = None  # the expected token's score less the found one's
    gap: float | None = None  # the same in the engine's precision
    ranks_float32: tuple[int, int] | None = None  # how many tokens score higher than each
    ranks: tuple[int, int] | None = None


class ReferenceScorer:
    """Decides which differences are near-ties. `exact` has the weights in float32, `paged` in the engine's precision.
    `rounding`: how much the engine's precision changes the gap between the two best tokens of a position, as the 99th
    percentile over all tokens of `completions`."""

    def __init__(self, exact: Decoder, paged: PagedDecoder, completions: Sequence[Completion]) -> None:
        self.exact, self.paged = exact, paged
        self.rounding = float(np.quantile(np.concatenate([self._gap_changes(c) for c in completions]), 0.99))

    def score_differences(
        self, run: str, requests: Sequence[Request], expected: Sequence[Sequence[int]], found: Sequence[Difference]
    ) -> list[ScoredDifference]:
        return [self._score(run, requests[d.request], expected[d.request], d) for d in found]

    def _score(self, run: str, request: Request, expected: Sequence[int], found: Difference) -> ScoredDifference:
        a, b = found.expected, found.found
        if a is None or b is None:
            return ScoredDifference(run, found.request, found.position, (a, b))
        shared = [*request.prompt_ids, *expected[: found.position]]
        float32, own = (scores_PV[0] for scores_PV in self._scores(request, shared, 1))
        gap = float(float32[a] - float32[b])
        return ScoredDifference(
            run,
            found.request,
            found.position,
            (a, b),
            near=abs(gap) <= NEAR_TIE_FACTOR * self.rounding,
            gap_float32=gap,
            gap=float(own[a] - own[b]),
            ranks_float32=(_rank(float32, a), _rank(float32, b)),
            ranks=(_rank(own, a), _rank(own, b)),
        )

    def _gap_changes(self, c: Completion) -> np.ndarray:
        tokens = [*c.request.prompt_ids, *c.token_ids.tolist()]
        float32, own = self._scores(c.request, tokens[:-1], len(c.token_ids))
        first, second = float32.topk(2).indices.T[:, :, None]
        changes = (own - float32).gather(-1, first) - (own - float32).gather(-1, second)
        return changes[:, 0].abs().cpu().numpy()

    def _scores(self, request: Request, tokens: Sequence[int], num: int) -> tuple[Tensor, Tensor]:
        """Scores of all tokens after each of the last `num` ones, in float32 and in the engine's precision: [P, V]."""
        with _without_tf32():
            float32 = learner_logits(self.exact, tokens, num)
        own = prefill_logits(self.paged, tokens, num)
        positions = np.arange(len(tokens) - num, len(tokens)) + 1
        return score(float32, request, positions), score(own, request, positions)


def compare_tokens(
    scorer: ReferenceScorer | None,
    requests: Sequence[Request],
    expected: Sequence[Sequence[int]],
    runs: Mapping[str, Sequence[Difference]],
) -> CheckResult:
    """Without a scorer any difference is a problem, else those that are no near-ties."""
    if scorer is None:
        messages = [f"{run}: {d}" for run, differences in runs.items() for d in differences[:2]]
        return {"problems": messages, "first_differences": messages}
    scored = [d for run, found in runs.items() for d in scorer.score_differences(run, requests, expected, found)]
    wide = [d for d in scored if not d.near]
    messages = [str(d) for d in wide[:8]]
    return {
        "problems": messages,
        "rounding": scorer.rounding,
        "near_ties": [asdict(d) for d in scored if d.near],
        "not_near_ties": len(wide),
        "first_differences": messages,
    }


def score(logits_PV: Tensor, request: Request, positions: np.ndarray) -> Tensor:
    """Race scores at these positions, without truncation."""
    return race_scores(logits_PV / (request.sampling.temperature or 1.0), request, positions)


def _rank(scores_V: Tensor, token: int) -> int:
    return int((scores_V > scores_V[token]).sum())


@contextmanager
def _without_tf32() -> Iterator[None]:
    """TF32 has no more mantissa bits than float16; an environment may have switched it on."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
