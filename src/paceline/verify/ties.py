"""Near-ties: where two runs of a request part, and how near a tie it was there.

In 16 bits, and on a GPU, the last bits of a matrix product depend on how many rows it has, so two tokens whose scores
are closer than that may change places. A token's score is what it races with: log p - log E under the request's noise
(of which logits / temperature - log E differs by a constant), at temperature 0 its logit. Given the tokens that both
runs share, the scores are computed in float32 and as the engine rounds them. A difference that float32 calls wide
is a bug. P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.model.decoder import Decoder
from paceline.model.paged import PagedDecoder
from paceline.types import Completion, Request
from paceline.verify.identity import Difference, learner_logits, prefill_logits
from paceline.verify.reference import race_scores

REACH = 4  # roundings: both runs round, and of many positions the worst are met where runs part


@dataclass(frozen=True, slots=True)
class Tie:
    """Where a run parted from the one expected: both tokens, the first one's score less the other's, and how many
    tokens score higher than each. No gap where one of the runs had ended: no rounding ends a run."""

    run: str
    request: int
    position: int
    tokens: tuple[int | None, int | None]
    near: bool = False
    gap_float32: float | None = None
    gap: float | None = None
    ranks_float32: tuple[int, int] | None = None
    ranks: tuple[int, int] | None = None


class Referee:
    """`exact` has the weights in float32, `paged` as the engine has them. `rounding` is what the engine's precision
    adds to the gap between a position's winner and its runner-up: the 99th percentile over the tokens of `plain`."""

    def __init__(self, exact: Decoder, paged: PagedDecoder, plain: Sequence[Completion]) -> None:
        self.exact, self.paged = exact, paged
        self.rounding = float(np.quantile(np.concatenate([self._added(c) for c in plain]), 0.99))

    def judge(
        self, run: str, requests: Sequence[Request], expected: Sequence[Sequence[int]], parted: Sequence[Difference]
    ) -> list[Tie]:
        return [self._tie(run, requests[d.request], expected[d.request], d) for d in parted]

    def _tie(self, run: str, request: Request, expected: Sequence[int], parted: Difference) -> Tie:
        a, b = parted.expected, parted.found
        if a is None or b is None:
            return Tie(run, parted.request, parted.position, (a, b))
        shared = [*request.prompt_ids, *expected[: parted.position]]
        wide, own = (scores_PV[0] for scores_PV in self._scores(request, shared, 1))
        gap = float(wide[a] - wide[b])
        return Tie(
            run,
            parted.request,
            parted.position,
            (a, b),
            near=abs(gap) <= REACH * self.rounding,
            gap_float32=gap,
            gap=float(own[a] - own[b]),
            ranks_float32=(_rank(wide, a), _rank(wide, b)),
            ranks=(_rank(own, a), _rank(own, b)),
        )

    def _added(self, plain: Completion) -> np.ndarray:
        tokens = [*plain.request.prompt_ids, *plain.token_ids.tolist()]
        wide, own = self._scores(plain.request, tokens[:-1], len(plain.token_ids))
        first, second = wide.topk(2).indices.T[:, :, None]
        added = (own - wide).gather(-1, first) - (own - wide).gather(-1, second)
        return added[:, 0].abs().cpu().numpy()

    def _scores(self, request: Request, tokens: Sequence[int], num: int) -> tuple[Tensor, Tensor]:
        """Of whatever may follow each of the last `num` tokens, in float32 and in the engine's precision: [P, V]."""
        with _whole_float32():
            wide = learner_logits(self.exact, tokens, num)
        own = prefill_logits(self.paged, tokens, num)
        positions = np.arange(len(tokens) - num, len(tokens)) + 1
        return score(wide, request, positions), score(own, request, positions)


def score(logits_PV: Tensor, request: Request, positions: np.ndarray) -> Tensor:
    """What every token races with at these positions, where nothing is truncated."""
    return race_scores(logits_PV / (request.sampling.temperature or 1.0), request, positions)


def _rank(scores_V: Tensor, token: int) -> int:
    return int((scores_V > scores_V[token]).sum())


@contextmanager
def _whole_float32() -> Iterator[None]:
    """Without TF32, which an environment can ask for: it has no more bits than float16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
