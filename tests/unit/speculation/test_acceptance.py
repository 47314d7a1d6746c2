"""The acceptance model: probabilities follow outcomes, and the latest drafts say what the next ones will bring."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.speculation.acceptance import (
    CELL_PRIOR,
    MEMORY,
    MIN_RECENT,
    NUM_CELLS,
    NUM_RECENT,
    NUM_SCORES,
    SCORE_PRIOR,
    SCORE_PRIOR_WITH_PROBES,
    AcceptanceModel,
)
from paceline.speculation.draft_batch import DraftBatch


def drafts(
    scores: list[list[float]] | np.ndarray,
    num: list[int] | None = None,
    match: list[int] | None = None,
    sources: list[int] | None = None,
    caps: list[int] | None = None,
) -> DraftBatch:
    array = np.array(scores, np.float32)
    num_rows, k = array.shape
    lengths = np.array([k] * num_rows if num is None else num, np.int32)
    made = DraftBatch(np.zeros((num_rows, k), np.int32), lengths, array)
    made.match = None if match is None else np.array(match, np.int32)
    made.caps = None if caps is None else np.array(caps, np.int32)
    if sources is not None:
        made.names, made.sources = ("suffix", "eagle3"), np.array(sources, np.uint8)
    return made


def probabilities(model: AcceptanceModel, batch: DraftBatch, name: str = "suffix") -> np.ndarray:
    model.rate(batch, name)
    assert batch.probabilities is not None
    return batch.probabilities


def observe(
    model: AcceptanceModel, batch: DraftBatch, accepted: list[int], known: list[int], name: str = "suffix"
) -> None:
    model.rate(batch, name)
    model.observe(batch, name, None, np.array(accepted, np.int32), np.array(known, np.int32))


# ---- probabilities ----


@pytest.mark.parametrize("has_probes", [False, True])
def test_without_outcomes_the_probability_is_the_score(has_probes: bool) -> None:
    found = probabilities(AcceptanceModel(has_probes), drafts([[0.12, 0.57, 0.93, 0.99, 1.0]]))
    assert found[0].tolist() == pytest.approx([0.15, 0.55, 0.91, 0.99, 0.99])  # the middles of their buckets


def test_nothing_is_expected_after_a_drafts_end() -> None:
    batch = drafts([[0.5, 0.5, 0.5]] * 3, num=[3, 1, 0])
    found = probabilities(AcceptanceModel(), batch)
    assert (found > 0).tolist() == [[True] * 3, [True, False, False], [False] * 3]
    assert batch.cells is not None and ((batch.cells >= 0) == (found > 0)).all()


def test_scores_that_are_far_too_high_are_found_out_after_a_handful_of_tokens() -> None:
    """With probes, and whatever the scores: eight outcomes with eight other scores are enough."""
    boasting, honest = AcceptanceModel(has_probes=True), AcceptanceModel(has_probes=True)
    for score in np.linspace(0.05, 0.85, 8):
        observe(boasting, drafts([[score]]), [0], [1])
        observe(honest, drafts([[score]]), [round(score)], [1])
    new = drafts([[0.97]])
    assert probabilities(boasting, new)[0, 0] < 0.3
    assert probabilities(honest, new)[0, 0] > 0.6


def test_without_probes_a_few_rejected_tokens_do_not_exclude_a_drafter() -> None:
    """It would not be tried again. The first tokens of several rows are often rejected together."""
    patient, strict, batch = AcceptanceModel(), AcceptanceModel(has_probes=True), drafts([[0.65]] * 8)
    for model in (patient, strict):
        observe(model, batch, [0] * 8, [1] * 8)
    assert probabilities(patient, batch)[0, 0] > 0.2 and probabilities(strict, batch)[0, 0] < 0.05
    patient.set_probes(True)
    assert probabilities(patient, batch)[0, 0] == probabilities(strict, batch)[0, 0]
    patient.set_probes(False)
    for _ in range(20):
        observe(patient, batch, [0] * 8, [1] * 8)
    assert probabilities(patient, batch)[0, 0] < 0.02  # many are enough


def test_outcomes_outweigh_scores() -> None:
    model = AcceptanceModel(has_probes=True)
    for _ in range(20):
        observe(model, drafts([[0.9, 0.9]] * 50), [0] * 50, [1] * 50)  # the first token is always rejected
    found = probabilities(model, drafts([[0.9, 0.9, 0.5]]))[0]
    assert found[0] < 0.01
    assert found[1] < 0.02  # without own outcomes, it has the mean of its drafter and score
    assert found[2] < 0.05  # another score, but the same drafter


def test_outcomes_are_counted_by_drafter_match_and_position() -> None:
    model, batch = AcceptanceModel(), drafts([[0.5, 0.5]] * 2, match=[1, 20], sources=[0, 1])
    for _ in range(200):  # history: the first token is accepted, the second rejected; the head: all are rejected
        observe(model, batch, [1, 0], [2, 1], "hybrid")
    found = probabilities(model, batch, "hybrid")
    assert found[0, 0] > 0.9 and found[0, 1] < 0.1 and found[1, 0] < 0.1
    other_match = probabilities(model, drafts([[0.5]], match=[20], sources=[0]), "hybrid")[0, 0]
    assert 0.3 < other_match < 0.7  # between the two
    assert model.num_outcomes("suffix") == pytest.approx(2 * 166, rel=0.1)  # older ones count less
    assert model.num_outcomes("eagle3") == pytest.approx(166, rel=0.1)
    assert model.num_outcomes() == pytest.approx(model.num_outcomes("suffix") + model.num_outcomes("eagle3"))
    assert model.num_outcomes("ngram") == 0
    alone = probabilities(model, drafts([[0.5]], match=[1]), "suffix")[0, 0]
    assert alone == found[0, 0]  # a drafter has the same cells within a hybrid and alone


@pytest.mark.parametrize(("has_probes", "weight"), [(False, SCORE_PRIOR), (True, SCORE_PRIOR_WITH_PROBES)])
def test_priors_count_as_many_outcomes_as_their_weight(has_probes: bool, weight: float) -> None:
    model, batch = AcceptanceModel(has_probes), drafts([[0.5]])
    observe(model, batch, [1], [1])
    by_score = (1 + weight * 0.55) / (1 + weight)
    assert probabilities(model, batch)[0, 0] == pytest.approx((1 + CELL_PRIOR * by_score) / (1 + CELL_PRIOR))


def test_each_position_has_its_own_rate() -> None:
    model, rng, rates = AcceptanceModel(), np.random.default_rng(0), [0.9, 0.7, 0.2]
    for _ in range(500):
        accepted = (rng.random((4, 3)) < rates).cumprod(1).sum(1)
        observe(model, drafts([[0.6] * 3] * 4), accepted.tolist(), np.minimum(accepted + 1, 3).tolist())
    assert probabilities(model, drafts([[0.6] * 3]))[0] == pytest.approx(rates, abs=0.08)


def test_many_drafts_are_counted_as_one_by_one() -> None:
    """Except that the outcomes of one step do not make each other older."""
    rng = np.random.default_rng(0)
    scores, known = rng.random((24, 5)), rng.integers(0, 6, 24)
    accepted = np.maximum(0, known - rng.integers(0, 2, 24))
    many, one_by_one = AcceptanceModel(), AcceptanceModel()
    observe(many, drafts(scores), accepted.tolist(), known.tolist())
    for i in range(24):
        observe(one_by_one, drafts(scores[i : i + 1]), [accepted[i]], [known[i]])
    assert known.sum() > 40
    counts = [model.state_dict()["counts.0.suffix"] for model in (many, one_by_one)]
    np.testing.assert_allclose(counts[0], counts[1], rtol=0.02)
    assert counts[0].sum(1).tolist() == [accepted.sum(), known.sum()]


def test_outcomes_are_those_of_the_given_rows() -> None:
    """Of three rows the first was preempted, and the others come in another order."""
    model, batch = AcceptanceModel(), drafts([[0.05] * 3, [0.45] * 3, [0.97] * 3])
    model.rate(batch, "suffix")
    model.observe(batch, "suffix", np.array([2, 1]), np.array([2, 0], np.int32), np.array([2, 1], np.int32))
    accepted, seen = model.state_dict()["counts.0.suffix"].reshape(2, -1, 12).sum(1)
    assert seen.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 2, 0] and accepted.tolist() == [0] * 10 + [2, 0]


def test_an_outcome_without_a_score_is_ignored() -> None:
    """A device may verify tokens whose scores are not numbers: a damaged head costs drafts, not the run."""
    model, batch = AcceptanceModel(), drafts([[np.nan, 0.5]], num=[0])
    observe(model, batch, [1], [2])
    assert model.num_outcomes() == 0


# ---- versions ----


def test_a_new_policy_version_halves_the_counts_and_a_rejected_drafter_is_tried_again() -> None:
    model, batch = AcceptanceModel(), drafts([[0.8]] * 50)
    model.set_version(3)
    for _ in range(4):
        observe(model, batch, [0] * 50, [1] * 50)
    before, count = probabilities(model, batch)[0, 0], model.num_outcomes()
    model.set_version(3)
    assert probabilities(model, batch)[0, 0] == before < 0.05
    model.set_version(4)
    assert model.num_outcomes() == pytest.approx(count / 2)
    assert before < probabilities(model, batch)[0, 0]
    for version in range(5, 16):
        model.set_version(version)
    assert probabilities(model, batch)[0, 0] > 0.6


# ---- drafts to come ----


def test_before_any_draft_all_positions_are_like_the_prior() -> None:
    survival = AcceptanceModel().survival("eagle3", 4)
    assert survival.shape == (MIN_RECENT, 4)
    np.testing.assert_allclose(survival, np.tile(0.65 ** np.arange(1, 5), (MIN_RECENT, 1)))


def test_calibration_makes_scores_probabilities() -> None:
    model = AcceptanceModel()
    np.testing.assert_allclose(model.calibration("eagle3", 9), np.ones((9, NUM_SCORES)))
    batch = drafts([[0.65, 0.65, 0.65, 0.65, 0.65, 0.65]] * 400)  # the middle of its bucket
    observe(model, batch, [1] * 200 + [6] * 200, [6] * 400, "eagle3")
    factors, found = model.calibration("eagle3", 9), probabilities(model, drafts([[0.65] * 6]), "eagle3")[0]
    bucket = 6
    for position in range(6):
        assert 0.65 * factors[position, bucket] == pytest.approx(found[position])
    assert found[0] > 0.9 and found[1] < 0.6, "the first token was always accepted"
    np.testing.assert_allclose(model.calibration("suffix", 9), np.ones((9, NUM_SCORES)))


def test_survival_is_that_of_the_latest_drafts() -> None:
    model, rng = AcceptanceModel(), np.random.default_rng(0)
    scores = rng.random((NUM_RECENT, 3))
    observe(model, drafts(rng.random((99, 3))), [0] * 99, [0] * 99)
    batch = drafts(scores)
    observe(model, batch, [0] * NUM_RECENT, [0] * NUM_RECENT)
    expected = probabilities(model, batch).cumprod(1)
    np.testing.assert_allclose(np.sort(model.survival("suffix", 3), 0), np.sort(expected, 0))
    observe(model, drafts(scores[:40]), [0] * 40, [1] * 40)  # 40 first tokens were rejected
    assert model.survival("suffix", 3).mean() < probabilities(AcceptanceModel(), batch).cumprod(1).mean()


def test_few_drafts_are_completed_by_average_ones() -> None:
    model = AcceptanceModel()
    observe(model, drafts([[0.99]] * 4), [0] * 4, [0] * 4)
    assert sorted(model.survival("suffix", 1)[:, 0]) == pytest.approx([0.65] * (MIN_RECENT - 4) + [0.99] * 4)


def test_of_many_rows_some_are_kept() -> None:
    model, rng = AcceptanceModel(), np.random.default_rng(0)
    num = 10 * NUM_RECENT + 1
    observe(model, drafts(rng.random((num, 2))), [0] * num, [0] * num)
    survival = model.survival("suffix", 2)
    assert MIN_RECENT < len(survival) <= NUM_RECENT and abs(survival[:, 0].mean() - 0.5) < 0.1


def test_positions_that_were_not_asked_for_have_the_score_before_them() -> None:
    model = AcceptanceModel()
    observe(model, drafts([[0.99, 0.5]] * 20, caps=[2] * 20), [0] * 20, [0] * 20)
    assert model.survival("suffix", 4)[0] == pytest.approx(np.cumprod([0.99, 0.55, 0.55, 0.55]))
    assert model.is_drafted("suffix", 4).all()
    # Longer drafts follow: of the old ones the third position stays unknown.
    observe(model, drafts([[0.99, 0.5, 0.15, 0.15]] * 20, caps=[4] * 20), [0] * 20, [0] * 20)
    assert sorted(model.survival("suffix", 3)[:, 2]) == pytest.approx([0.99 * 0.55 * 0.15] * 20 + [0.99 * 0.55**2] * 20)


def test_what_was_asked_for_and_not_drafted_counts_as_nothing() -> None:
    model = AcceptanceModel()
    batch = drafts([[0.9, 0.9]] * 30, num=[2] * 10 + [1] * 10 + [0] * 10, caps=[2] * 30)
    observe(model, batch, [0] * 30, [0] * 30)
    drafted = model.is_drafted("suffix", 3)
    assert drafted.mean(0) == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert ((model.survival("suffix", 3) > 0) == drafted).all()


def test_rows_that_were_not_asked_for_count_neither_way() -> None:
    model = AcceptanceModel()
    observe(model, drafts([[0.99]] * 40, num=[1] * 20 + [0] * 20, caps=[1] * 20 + [0] * 20), [0] * 40, [0] * 40)
    assert len(model.survival("suffix", 1)) == 20 and model.is_drafted("suffix", 1).all()
    observe(model, drafts([[0.99]] * 40, num=[0] * 40, caps=[0] * 40), [0] * 40, [0] * 40)
    assert len(model.survival("suffix", 1)) == 20


def test_several_drafters_have_latest_drafts_of_their_own() -> None:
    model = AcceptanceModel()
    observe(model, drafts([[0.99]] * 20 + [[0.15]] * 20, sources=[0] * 20 + [1] * 20), [0] * 40, [0] * 40, "hybrid")
    assert model.survival("suffix", 1).ravel().tolist() == pytest.approx([0.99] * 20)
    assert model.survival("eagle3", 1).ravel().tolist() == pytest.approx([0.15] * 20)
    assert len(model.survival("hybrid", 1)) == 40
    assert model.num_outcomes("hybrid") == 0  # outcomes are the drafters' own


def test_survival_is_that_of_all_drafts_though_only_the_most_probable_are_verified() -> None:
    """Counting the outcomes of verified tokens by position alone would overestimate the others."""
    model, rng, outcomes = AcceptanceModel(), np.random.default_rng(0), np.zeros(2)
    for _ in range(400):
        rates = np.repeat(rng.choice([0.55, 0.91], (8, 1)), 3, axis=1)
        num_verified = (rates.cumprod(1) > 0.4).sum(1)
        accepted = np.minimum((rng.random((8, 3)) < rates).cumprod(1).sum(1), num_verified)
        known = np.minimum(accepted + 1, num_verified)
        observe(model, drafts(rates), accepted.tolist(), known.tolist())
        outcomes += (accepted > 1).sum(), (known > 1).sum()
    truth = (0.55**2 + 0.91**2) / (0.55 + 0.91)  # of the second position, given the first
    survival = model.survival("suffix", 2)
    assert abs(survival[:, 1].sum() / survival[:, 0].sum() - truth) < 0.05
    assert outcomes[0] / outcomes[1] > truth + 0.1


def test_outcomes_are_needed_until_the_latest_drafts_are_all_new() -> None:
    model = AcceptanceModel()
    assert model.num_drafts("suffix") == 0 and model.needs_outcomes("suffix")
    for num in range(1, NUM_RECENT + 1):
        assert model.needs_outcomes("suffix")
        observe(model, drafts([[0.5]]), [0], [1])
        assert model.num_drafts("suffix") == num
    assert not model.needs_outcomes("suffix")
    model.survival("suffix", 2)
    assert model.needs_outcomes("suffix") and model.num_drafts("suffix") == NUM_RECENT
    for _ in range(2 * NUM_RECENT):
        observe(model, drafts([[0.5]]), [0], [0], "ngram")  # without an outcome
    assert model.needs_outcomes("ngram")


def test_longer_drafts_than_any_before() -> None:
    model = AcceptanceModel()
    for k in (2, 30, 5):
        observe(model, drafts([[0.6] * k] * 20), [k] * 20, [k] * 20)
    assert model.survival("suffix", 40).shape == (60, 40)
    assert (np.diff(model.survival("suffix", 40), axis=1) <= 0).all()


# ---- checkpoints ----


def test_state_round_trip() -> None:
    model, again = AcceptanceModel(), AcceptanceModel()
    batch = drafts([[0.3, 0.8]], match=[4], sources=[1])
    model.set_version(7)
    observe(model, batch, [1], [2], "hybrid")
    observe(again, drafts([[0.5]]), [1], [1], "ngram")
    state = model.state_dict()
    observe(model, batch, [1], [2], "hybrid")  # does not change the saved state
    model.load_state_dict(state)
    again.load_state_dict(state)
    assert again.version == 7 and again.num_outcomes() == 2
    assert probabilities(again, batch, "hybrid").tolist() == probabilities(model, batch, "hybrid").tolist()
    again.set_version(7)
    assert again.num_outcomes() == 2
    for name in ("suffix", "eagle3", "hybrid"):
        assert again.survival(name, 3).tolist() == model.survival(name, 3).tolist()
    empty = AcceptanceModel()
    empty.load_state_dict(AcceptanceModel().state_dict())
    assert empty.version == -1 and empty.num_outcomes() == 0


def test_the_latest_drafts_are_part_of_the_state() -> None:
    """Also if there were more than are kept, and if the keys come back in another order."""
    model, again, rng = AcceptanceModel(), AcceptanceModel(), np.random.default_rng(0)
    for num in (3, NUM_RECENT - 1, 20):
        for name in ("suffix", "ngram"):
            observe(model, drafts(rng.choice([0.3, 0.9], (num, 3))), [3] * num, [3] * num, name)
    again.load_state_dict(dict(sorted(model.state_dict().items(), reverse=True)))
    for _ in range(2):
        for name in ("suffix", "ngram"):
            assert again.survival(name, 4).tolist() == model.survival(name, 4).tolist()
            for each in (model, again):
                observe(each, drafts([[0.5, 0.1]]), [1], [2], name)


def test_a_damaged_state_is_refused() -> None:
    model = AcceptanceModel()
    observe(model, drafts([[0.5]]), [1], [1])
    for damaged in (
        {},
        {"counts": np.zeros((2, NUM_CELLS))},
        {"counts.0.suffix": np.zeros((2, NUM_CELLS))},
        model.state_dict() | {"recent.suffix": np.full((NUM_RECENT, 1), NUM_CELLS)},
        model.state_dict() | {"recent.suffix": np.full((NUM_RECENT, 1), -3)},
        model.state_dict() | {"recent.suffix": np.full((NUM_RECENT, 1), np.nan)},
        model.state_dict() | {"recent.suffix": np.full((NUM_RECENT, 1), "1")},
        model.state_dict() | {"recent.suffix": np.full((NUM_RECENT, 0), 1)},
        model.state_dict() | {"counts.0.suffix": np.full((2, NUM_CELLS), np.inf)},
        model.state_dict() | {"counts.1": np.zeros((2, NUM_CELLS))},
        model.state_dict() | {"counts.a.b": np.zeros((2, NUM_CELLS))},
        model.state_dict() | {"counts.0.suffix": np.zeros((2, NUM_CELLS - 1))},
        model.state_dict() | {"version": np.zeros(0)},
        model.state_dict() | {"yields": np.zeros((2, NUM_CELLS))},
    ):
        with pytest.raises(ValueError, match="damaged"):
            model.load_state_dict(damaged)
    assert model.num_outcomes() == 1


def test_older_outcomes_count_less() -> None:
    model, batch = AcceptanceModel(), drafts([[0.5]] * 8)
    for _ in range(2000):
        observe(model, batch, [1] * 8, [1] * 8)
    assert model.num_outcomes() == pytest.approx(MEMORY, rel=0.02)
    for _ in range(round(2 * MEMORY / 8)):
        observe(model, batch, [0] * 8, [1] * 8)
    assert probabilities(model, batch)[0, 0] < 0.2
