"""The hybrid drafter: each row gets the source that promises more, and learns what promises are worth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import tiny_decoder, tiny_head

from paceline.drafters.eagle3 import Eagle3Drafter
from paceline.drafters.hybrid import HybridAhead, HybridDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.speculation.batch import Commits, DraftBatch, Rows
from paceline.speculation.calibration import Calibration, of_positions, of_probabilities
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams

VOCAB, K = 61, 3


class Scripted(SuffixDrafter):
    """Says what it is told to."""

    def __init__(self, name: str, num: list[int], confidence: float, token: int) -> None:
        super().__init__()
        self.name, self.num, self.confidence, self.token = name, num, confidence, token
        self.caps: list[list[int]] = []
        self.seen: list[list[int]] = []

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        self.caps.append(caps.tolist())
        num = np.minimum(np.array(self.num, np.int32), caps)
        width = int(caps.max(initial=0))
        full = np.full((len(rows), width), self.confidence, np.float32)
        return DraftBatch(np.full((len(rows), width), self.token, np.int32), num, full)

    def observe(self, commits: Commits) -> None:
        self.seen.append(commits.num_drafted.tolist())


def rows(num: int) -> Rows:
    return Rows(
        np.arange(num), [np.arange(5, dtype=np.int32)] * num, np.zeros(num, np.uint64), [SamplingParams()] * num
    )


def commits(drafted: list[int], accepted: list[int]) -> Commits:
    num = len(drafted)
    of = lambda values: np.array(values, np.int32)  # noqa: E731
    return Commits(np.arange(num), np.zeros((num, 8), np.int32), of(accepted) + 1, of(drafted), of(accepted))


def hybrid(history: Scripted, head: Scripted, choice: str = "before", cost: float = 0.1) -> HybridDrafter:
    return HybridDrafter(history, head, cost, choice)  # type: ignore[arg-type]


def test_history_drafts_where_it_is_sure_and_the_head_is_spared() -> None:
    history, head = Scripted("suffix", [K, 0], 0.95, 7), Scripted("eagle3", [K, K], 0.6, 9)
    drafts = hybrid(history, head).propose(rows(2), np.array([K, K], np.int32))
    assert head.caps == [[0, K]]  # not asked about the first row
    assert drafts.tokens.tolist() == [[7] * K, [9] * K]
    assert [drafts.names[i] for i in drafts.sources] == ["suffix", "eagle3"]
    assert drafts.num.tolist() == [K, K]


def test_a_match_stays_with_history_s_rows() -> None:
    history, head = Scripted("suffix", [K, 0, K], 0.95, 7), Scripted("eagle3", [K, K, 0], 0.6, 9)
    it, caps = hybrid(history, head), np.array([K, K, K], np.int32)
    assert it.propose(rows(3), caps).match is None
    propose = history.propose

    def matched(rows: Rows, caps: np.ndarray) -> DraftBatch:
        drafts = propose(rows, caps)
        drafts.match = np.array([5, 2, 8], np.int32)
        return drafts

    history.propose = matched  # type: ignore[method-assign]
    drafts = it.propose(rows(3), caps)
    assert drafts.match.tolist() == [5, 0, 8] and drafts.match.dtype == np.int32
    assert [drafts.names[i] for i in drafts.sources] == ["suffix", "eagle3", "suffix"]


def test_rows_sent_back_to_wait_are_not_mistaken_for_others() -> None:
    """Of three rows the first does not come back; the head's is the second, which was right."""
    history, head = Scripted("suffix", [K, 0, K], 0.95, 7), Scripted("eagle3", [K, K, K], 0.6, 9)
    it, twin = hybrid(history, head), hybrid(history, head)
    it.propose(rows(3), np.array([K] * 3, np.int32))
    some = commits([0, K, K], [0, K, 0])
    columns = ("request_ids", "tokens", "num", "num_drafted", "num_accepted")
    it.observe(Commits(*(getattr(some, name)[1:] for name in columns)))
    twin.calibrations["positions"].observe(np.arange(K), K)
    twin.calibrations["history"].observe(np.full(K, 0.95), 0)
    for name, calibration in it.calibrations.items():
        np.testing.assert_allclose(calibration.counts, twin.calibrations[name].counts)
    assert history.seen == [[0, K]] and head.seen == [[K, 0]]


def test_a_draft_that_its_sequence_s_end_cut_short_was_not_wrong() -> None:
    history, head = Scripted("suffix", [0], 0.95, 7), Scripted("eagle3", [K], 0.6, 9)
    it, twin = hybrid(history, head), of_positions(16, 0.6)
    it.propose(rows(1), np.array([K], np.int32))
    ended = commits([K], [2])
    ended.num[0] = 2
    assert ended.num_known.tolist() == [2] and commits([K], [2]).num_known.tolist() == [3]
    it.observe(ended)
    twin.observe(np.arange(2), 2)
    np.testing.assert_array_equal(it.calibrations["positions"].counts, twin.counts)


def test_history_that_lies_loses_its_say() -> None:
    history, head = Scripted("suffix", [K], 0.95, 7), Scripted("eagle3", [K], 0.6, 9)
    it = hybrid(history, head)
    caps = np.array([K], np.int32)
    assert it.propose(rows(1), caps).tokens[0, 0] == 7
    for _ in range(60):
        it.observe(commits([K], [0]))
        it.propose(rows(1), caps)
    drafts = it.propose(rows(1), caps)
    assert drafts.tokens[0, 0] == 9
    assert history.seen[0] == [K]  # each source hears of its own drafts only
    assert head.seen[0] == [0]
    assert [K] in head.seen


def test_ahead_it_learns_of_a_step_when_it_is_asked_for_more() -> None:
    class Asked(Scripted):
        def ask(self, rows: Rows, caps: np.ndarray) -> int:
            return K

    caps, stood = np.full(2, K, np.int32), commits([3, 3], [2, 1])
    parts = [(Scripted("history", [3, 0], 0.9, 1), Asked("head", [3, 3], 0.5, 2)) for _ in range(3)]
    at_once, waits, fresh = hybrid(*parts[0]), HybridAhead(*parts[1], 0.1), hybrid(*parts[2])  # type: ignore[arg-type]

    def learned(drafter: HybridDrafter) -> list[list[list[float]]]:
        return [calibration.counts.tolist() for calibration in drafter.calibrations.values()]

    for drafter in (at_once, waits):
        drafter.propose(rows(2), caps)
        drafter.observe(stood)
    assert learned(waits) == learned(fresh) != learned(at_once)
    parts[1][0].num = [0, 3]  # the step that is drafted for meanwhile, the other way round
    waits.propose(rows(2), caps)
    waits.ask(rows(2), caps)
    assert learned(waits) == learned(at_once)
    waits.ask(rows(2), caps)
    assert learned(waits) == learned(at_once)

    parts[0][0].num = [0, 3]
    at_once.propose(rows(2), caps)
    for drafter in (at_once, waits):
        drafter.observe(stood)
    for key, array in at_once.state().items():  # what waits is part of it
        assert (waits.state()[key] == array).all(), key


def test_after_seeing_both_it_takes_the_better_one_for_its_cost() -> None:
    for confidence, cost, token in ((0.9, 0.1, 9), (0.9, 2.0, 7), (0.3, 0.1, 7)):
        history, head = Scripted("suffix", [K], 0.65, 7), Scripted("eagle3", [K], confidence, 9)
        it = hybrid(history, head, "after", cost)
        assert it.reads_drafts
        assert it.propose(rows(1), np.array([K], np.int32)).tokens[0, 0] == token


def test_certain_guesses_and_sampled_ones_share_a_q() -> None:
    """Under the rejection rules: the head's rows keep what they were sampled from, history's are one-hot."""
    history, head = Scripted("suffix", [2, 0], 0.95, 7), Scripted("eagle3", [K, K], 0.6, 9)
    it = hybrid(history, head)
    propose = head.propose

    def with_q(rows: Rows, caps: np.ndarray) -> DraftBatch:
        drafts = propose(rows, caps)
        drafts.q = torch.full((2, K, VOCAB), 1 / VOCAB)
        return drafts

    head.propose = with_q  # type: ignore[method-assign]
    drafts = it.propose(rows(2), np.array([K, K], np.int32))
    assert torch.equal(drafts.q[1], torch.full((K, VOCAB), 1 / VOCAB))
    assert drafts.q[0, :2, 7].tolist() == [1, 1]
    assert drafts.q[0].sum() == 2


def test_completions_say_who_drafted() -> None:
    decoder, sampler = tiny_decoder(), Sampler()
    eagle3 = Eagle3Drafter(tiny_head(decoder), decoder.embed, sampler, 64)
    it = HybridDrafter(SuffixDrafter(), eagle3, 0.1)
    engine = LocalEngine(PagedDecoder(decoder, 64), sampler=sampler, drafter=it, policy=StaticPolicy(K))
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.3)
    found = engine.generate([Request(i, (1, 2, 3, 1, 2), sampling, 3, "p") for i in range(3)])
    assert {name for c in found for name in c.drafters} == {"suffix", "eagle3"}


def test_its_state_is_that_of_its_parts_and_what_it_learned() -> None:
    decoder = tiny_decoder()

    def make() -> HybridDrafter:
        return HybridDrafter(SuffixDrafter(), Eagle3Drafter(tiny_head(decoder), decoder.embed, Sampler(), 8), 0.1)

    one, two = make(), make()
    one.calibrations["history"].observe(np.array([0.9, 0.9]), 0)
    one.calibrations["positions"].observe(np.arange(3), 2)
    one.head.calibration.observe(np.array([0.3]), 1)
    two.restore(one.state())
    assert all(np.array_equal(two.state()[key], value) for key, value in one.state().items())
    assert not np.array_equal(make().state()["calibration.positions"], one.state()["calibration.positions"])
    with pytest.raises(ValueError, match="not a state of the hybrid drafter"):
        two.restore(SuffixDrafter().state())


def test_calibration_counts_up_to_the_first_mistake_and_fades() -> None:
    it = of_positions(4, 0.5)
    for _ in range(400):
        it.observe(np.arange(4), 2)  # positions 0 and 1 right, 2 wrong, 3 never known
    chances = it(np.arange(4))
    assert chances[0] > 0.95 and chances[1] > 0.95 and chances[2] < 0.05 and chances[3] == 0.5
    before = chances[0]
    it.fade()
    assert 0.5 < it(np.arange(1))[0] < before
    assert of_probabilities()(np.array([0.0, 0.5, 1.0])).tolist() == pytest.approx([0.05, 0.55, 0.95])
    with pytest.raises(AssertionError):
        Calibration(np.arange(3), np.ones(3))


def test_many_drafts_are_counted_as_one_by_one() -> None:
    """Where no bin sees more than one of them, to the bit; else but for the fading of these few among themselves."""
    rng = np.random.default_rng(0)
    said = rng.random((24, 5))
    num_known = rng.integers(0, 6, 24)
    num_right = np.maximum(0, num_known - rng.integers(0, 2, 24))
    many, slow = of_probabilities(), of_probabilities()
    many.observe_many(said, num_right, num_known)
    for i in range(24):
        for j in range(num_known[i]):
            at = int(np.digitize(said[i, j], slow.edges))
            slow.counts[:, at] = slow.counts[:, at] * (1 - 1 / 256) + (j < num_right[i], 1)
    assert num_known.sum() > 40
    np.testing.assert_allclose(many.counts, slow.counts, rtol=0.02)
    np.testing.assert_allclose(many(said), slow(said), atol=0.005)
    one, other = of_positions(4, 0.5), of_positions(4, 0.5)
    one.observe_many(np.arange(4)[None], np.array([2]), np.array([3]))
    other.counts[:, :3] = other.counts[:, :3] * (1 - 1 / 256) + [[1, 1, 0], [1, 1, 1]]
    np.testing.assert_array_equal(one.counts, other.counts)
