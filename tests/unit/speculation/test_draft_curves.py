"""What drafts will bring: as much as selecting the most probable tokens of such drafts does."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.speculation.acceptance import MIN_RECENT, NUM_RECENT, SCORES, AcceptanceModel
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.draft_curves import MAX_AGE, DraftCurves

NUM = 4


def record(acceptance: AcceptanceModel, scores: np.ndarray, cap: int = NUM, num_accepted: int | None = None) -> None:
    """Drafts with these scores; num_accepted tokens of each were accepted, or none was verified."""
    num_rows, k = scores.shape
    num = np.full(num_rows, k, np.int32)
    drafts = DraftBatch(np.zeros(scores.shape, np.int32), num, scores.astype(np.float32), caps=0 * num + cap)
    acceptance.rate(drafts, "eagle3")
    accepted = np.full(num_rows, num_accepted or 0)
    acceptance.observe(drafts, "eagle3", None, accepted, 0 * num if num_accepted is None else accepted + 1)


def at(found: DraftCurves, curves: np.ndarray, k: int, tokens_per_row: float) -> float:
    return float(curves[k - 1, found.num_verified(100).tolist().index(round(100 * tokens_per_row))])


def selected(probabilities: np.ndarray, num_tokens: int) -> float:
    """Tokens that a row emits if the most probable tokens are verified."""
    survival = probabilities.cumprod(1)
    return 1 + float(np.sort(survival, axis=None)[::-1][:num_tokens].sum()) / len(probabilities)


def test_before_any_draft_all_rows_are_alike() -> None:
    found = DraftCurves("eagle3", NUM)
    curves, survival = found.tokens_per_row(AcceptanceModel()), 0.65 ** np.arange(1, NUM + 1)
    for k in range(1, NUM + 1):
        for num in range(1, NUM + 1):
            assert at(found, curves, k, num) == pytest.approx(1 + survival[: min(k, num)].sum())
    assert at(found, curves, 2, 1.5) == pytest.approx(1 + survival[0] + survival[1] / 2)


def test_so_are_rows_with_the_same_scores() -> None:
    acceptance = AcceptanceModel()
    record(acceptance, np.full((MIN_RECENT, NUM), 0.65))
    assert DraftCurves("eagle3", NUM).tokens_per_row(acceptance) == pytest.approx(
        DraftCurves("eagle3", NUM).tokens_per_row(AcceptanceModel())
    )


def test_the_curves_are_those_of_the_latest_drafts() -> None:
    acceptance, found = AcceptanceModel(), DraftCurves("eagle3", NUM)
    scores = np.random.default_rng(0).choice(SCORES, (NUM_RECENT, NUM))
    record(acceptance, scores)
    curves = found.tokens_per_row(acceptance)
    for k in range(1, NUM + 1):
        for num in (0.5, 1, 1.5, 2, 3, 4):
            expected = selected(scores[:, :k], int(num * NUM_RECENT))
            assert at(found, curves, k, num) == pytest.approx(expected, rel=1e-6)
    assert at(found, curves, 4, 2) > at(found, curves, 2, 2) + 0.02  # there are more tokens to select from
    assert (curves <= 1 + np.arange(1, NUM + 1)[:, None]).all() and (np.diff(curves, axis=1) >= -1e-12).all()


@pytest.mark.parametrize("num_accepted", [0, 1, 3])
def test_outcomes_count_for_more_than_scores(num_accepted: int) -> None:
    acceptance, found = AcceptanceModel(), DraftCurves("eagle3", NUM)
    for _ in range(40):
        record(acceptance, np.random.default_rng(0).choice(SCORES[5:], (NUM_RECENT, NUM)), NUM, num_accepted)
    curves = found.tokens_per_row(acceptance)
    # The two last positions share their outcomes.
    assert at(found, curves, min(num_accepted + 1, 2), 2) == pytest.approx(1 + min(num_accepted, 2), abs=0.05)


def test_positions_that_were_never_drafted_are_like_the_one_before() -> None:
    scores = np.random.default_rng(0).choice([0.55, 0.96], (NUM_RECENT, 1)).repeat(NUM, 1)
    short, whole = AcceptanceModel(), AcceptanceModel()
    record(short, scores[:, :2], 2)
    record(whole, scores)
    curves = [DraftCurves("eagle3", NUM).tokens_per_row(acceptance) for acceptance in (short, whole)]
    assert curves[0] == pytest.approx(curves[1])


def test_curves_are_used_for_a_while_and_then_computed_again() -> None:
    acceptance, found = AcceptanceModel(), DraftCurves("eagle3", NUM)
    for _ in range(MAX_AGE * MAX_AGE):
        record(acceptance, np.full((1, NUM), 0.5))
        found.tokens_per_row(acceptance)
        found.step_launched()
    before = found.tokens_per_row(acceptance)
    record(acceptance, np.full((64, NUM), 0.5), NUM, 0)
    num_steps = 0
    while found.tokens_per_row(acceptance) is before:
        found.step_launched()
        num_steps += 1
    assert 1 <= num_steps <= MAX_AGE
    again = found.tokens_per_row(acceptance)
    assert again.max() < before.max()
    for _ in range(2 * MAX_AGE):
        found.step_launched()
        assert found.tokens_per_row(acceptance) is again  # there are no new drafts
    found.reset()
    assert found.tokens_per_row(acceptance) is not again


def test_the_last_point_of_each_draft_length_is_all_its_tokens() -> None:
    for num, num_rows in ((1, 1), (3, 7), (7, 128), (40, 3)):
        points = DraftCurves("eagle3", num).num_verified(num_rows)
        assert set(num_rows * np.arange(1, num + 1)) <= set(points.tolist()) and points[-1] == num * num_rows
