"""The policy that never loses: an auction that is the best choice, zero when nothing pays, and small bets to learn."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters.ahead import HistoryAhead
from paceline.speculation.auto import PROBATION, PROBES, AutoPolicy, margin
from paceline.speculation.batch import Commits, DraftBatch, Load, Rows
from paceline.speculation.library import Library
from paceline.types import SamplingParams

K = 4


class Line:
    """Costs on a line: a step, each further token, each token that a head drafts."""

    def __init__(self, step: float = 10.0, token: float = 1.0, draft: float = 2.0) -> None:
        self.step, self.token, self.draft = step, token, draft

    def step_s(self, load: Load) -> float:
        return self.step

    def steps_s(self, load: Load, num_extra: int) -> np.ndarray:
        return self.step + self.token * np.arange(num_extra + 1)

    def draft_s(self, drafter: str, num_rows: int, k: int) -> float:
        return 0.0 if drafter == "suffix" else self.draft * k

    def observe(self, trace: Any, k: int, drafter: str | None, num_rows: int | None, draft_s: float | None) -> None:
        pass


def rows(num: int, version: int = 0) -> Rows:
    ids = np.arange(num, dtype=np.int64)
    tokens = [np.zeros(4, np.int32)] * num
    return Rows(ids, tokens, ids.astype(np.uint64), [SamplingParams()] * num, version, Load(num, num, 100 * num))


def offered(confidence: np.ndarray, num: np.ndarray | None = None) -> DraftBatch:
    num_rows, k = confidence.shape
    num = np.full(num_rows, k, np.int32) if num is None else num.astype(np.int32)
    return DraftBatch(np.ones((num_rows, k), np.int32), num, confidence.astype(np.float32))


def told(policy: AutoPolicy, drafts: DraftBatch, lengths: np.ndarray, accepted: np.ndarray) -> None:
    """The step's outcome: so much of each draft stood."""
    accepted = np.minimum(accepted, lengths).astype(np.int32)
    num_rows = len(lengths)
    commits = Commits(np.arange(num_rows), np.zeros((num_rows, K + 1), np.int32), accepted + 1, lengths, accepted)
    policy.commit(policy.decision)
    trace: Any = SimpleNamespace(total_s=10.0, num_guessed=0)
    policy.observe(commits, trace, policy.decision)


def known(policy: AutoPolicy) -> None:
    """Past probation, with every word worth what it says."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        said = rng.random((100, K))
        stood = np.cumprod(rng.random((100, K)) < said, axis=1).sum(1)
        policy.chances.observe(policy.chances.cells(offered(said)), stood, np.minimum(stood + 1, K))


@pytest.mark.parametrize("method", ["suffix", "ngram", "eagle3", "hybrid"])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_discarded_step_changes_no_later_one(method: str, is_ahead: bool) -> None:
    """Neither planned nor selected: credit for probes is spent on steps that run."""
    line = Line(draft=3.0, token=0.1) if method in ("eagle3", "hybrid") else Line(draft=0.5, token=0.1)
    once, often = (AutoPolicy(line, K, method) for _ in range(2))  # type: ignore[arg-type]
    num_probed = 0
    for step in range(400):
        drafts = []
        for policy, times in ((once, 1), (often, 3)):
            for _ in range(times):
                batch = replace(rows(3), is_ahead=is_ahead)
                caps = policy.plan(batch)
                made = offered(np.full((3, int(caps.max())), 0.1), caps)
                lengths = policy.select(made) if caps.any() else caps
            head_caps = None if batch.head_caps is None else batch.head_caps.tolist()
            drafts.append((caps.tolist(), head_caps, lengths.tolist(), policy.decision.reason))
            told(policy, made, lengths, np.full(3, step % 2))
            assert policy._step.credit_s <= 0.1
        assert drafts[0] == drafts[1]
        num_probed += "probes" in drafts[0][3]
    assert num_probed, "or there was nothing to spend"


@pytest.mark.parametrize("method", ["suffix", "eagle3"])
def test_the_best_slots_of_all_rows_are_taken_within_the_budget(method: str) -> None:
    """The last rows' drafts are the surest; there is room for six tokens."""
    policy = AutoPolicy(Line(token=0.01, draft=0.01), K, method)  # type: ignore[arg-type]
    known(policy)
    batch = rows(8)
    batch.draft_budget, batch.draft_limits = 6, np.full(8, 9, np.int32)
    caps = policy.plan(batch)
    said = np.where(np.arange(8) >= 6, 0.95, 0.35)[:, None].repeat(K, 1)
    lengths = policy.select(offered(said[:, : caps.max()], caps))
    assert lengths.sum() == 6 and lengths[6:].tolist() == [min(3, caps[-1])] * 2
    batch.draft_budget = 0
    assert not policy.plan(batch).any() and "max_num_batched_tokens" in policy.decision.reason
    batch.draft_budget, batch.draft_limits = 100, np.array([0, 1] * 4, np.int32)
    assert (policy.plan(batch) <= batch.draft_limits).all()


def brute_force(policy: AutoPolicy, drafts: DraftBatch) -> float:
    """The best rate of all ways to cut every row's draft."""
    survival = np.cumprod(policy.chances(policy.chances.cells(drafts)), axis=1)
    best = 0.0
    for cut in product(*(range(n + 1) for n in drafts.num.tolist())):
        brings = len(cut) + sum(survival[i, :n].sum() for i, n in enumerate(cut))
        best = max(best, brings / float(policy.costs.steps_s(Load(), sum(cut))[-1]))
    return best


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(0.01, 5))
def test_the_auction_finds_the_best_of_all_cuts(seed: int, num_rows: int, token: float) -> None:
    rng = np.random.default_rng(seed)
    policy = AutoPolicy(Line(token=token), K)  # type: ignore[arg-type]
    known(policy)
    policy._credit_s = -1e9  # no probes
    policy.plan(rows(num_rows))
    drafts = offered(rng.random((num_rows, K)), rng.integers(0, K + 1, num_rows))
    best = brute_force(policy, drafts)
    lengths = policy.select(drafts)
    assert (lengths <= drafts.num).all()
    survival = np.cumprod(policy.chances(policy.chances.cells(drafts)), axis=1)
    rate = (num_rows + sum(survival[i, :n].sum() for i, n in enumerate(lengths))) / (10 + token * lengths.sum())
    assert rate <= best + 1e-12
    assert rate >= best / margin(num_rows) - 1e-12
    assert rate >= num_rows / 10  # never below plain, by its own estimate
    assert policy.decision.expected_s == pytest.approx(10 + token * lengths.sum())


def test_a_greedy_twin_that_takes_all_is_caught() -> None:
    policy = AutoPolicy(Line(token=5.0), K)  # type: ignore[arg-type]
    known(policy)
    policy._credit_s = -1e9
    policy.plan(rows(2))
    drafts = offered(np.full((2, K), 0.15))
    best = brute_force(policy, drafts)
    survival = np.cumprod(policy.chances(policy.chances.cells(drafts)), axis=1)
    everything = (2 + survival.sum()) / (10 + 5.0 * 2 * K)
    assert everything < best / margin(2)
    assert policy.select(drafts).tolist() == [0, 0]


def test_an_unknown_drafter_is_tried_slot_by_slot_however_sure_it_is() -> None:
    policy = AutoPolicy(Line(token=0.1), K)  # type: ignore[arg-type]
    sure = offered(np.full((4, K), 0.95))
    steps = 0
    while True:
        policy.plan(rows(4))
        lengths = policy.select(sure)
        if lengths.sum() > 1:
            break
        assert lengths.sum() == 1
        told(policy, sure, lengths, np.full(4, K))
        steps += 1
        assert steps <= PROBATION + 1  # older outcomes fade a little
    assert steps >= PROBATION and lengths.sum() == 4 * K


def test_a_useless_drafter_costs_next_to_nothing() -> None:
    policy = AutoPolicy(Line(), K)  # type: ignore[arg-type]
    rng, spent, num_steps = np.random.default_rng(1), 0, 4000
    for _ in range(num_steps):
        policy.plan(rows(2))
        drafts = offered(rng.random((2, K)))
        lengths = policy.select(drafts)
        told(policy, drafts, lengths, np.zeros(2))
        spent += int(lengths.sum())
    assert spent * 1.0 <= (PROBES + 0.003) * 10 * num_steps + 5
    assert spent > PROBATION  # but it is still given a chance now and then


def test_a_drafter_that_becomes_good_is_taken_up_again() -> None:
    policy = AutoPolicy(Line(token=0.5), K)  # type: ignore[arg-type]
    drafts = offered(np.full((1, K), 0.5))
    for accepted, num_steps in ((0, 500), (K, 3000)):
        for _ in range(num_steps):
            policy.plan(rows(1))
            lengths = policy.select(drafts)
            told(policy, drafts, lengths, np.array([accepted]))
    assert lengths.tolist() == [K]


@pytest.mark.parametrize(("draft", "token", "expected"), [(0.1, 0.1, K), (100.0, 0.1, 0), (0.1, 100.0, 0)])
def test_a_head_drafts_as_far_as_its_time_pays(draft: float, token: float, expected: int) -> None:
    policy = AutoPolicy(Line(token=token, draft=draft), K, "eagle3")  # type: ignore[arg-type]
    batch = rows(4)
    assert policy.plan(batch).tolist() == [expected] * 4
    assert batch.head_caps is not None and batch.head_caps.tolist() == [expected] * 4
    assert ("would not pay" in policy.decision.reason) == (expected == 0)


class Reading(Line):
    """And each row of a head's pass, as what it has to compute before its first draft is priced by that."""

    def draft_s(self, drafter: str, num_rows: int, k: int) -> float:
        return 0.0 if drafter == "suffix" else self.draft * k + 0.05 * num_rows


def unread(num: int, num_computed: int, num_left: int, num_query: int = 0) -> Rows:
    """Rows of which the head has computed nothing yet."""
    batch = rows(num)
    batch.load = Load(num, num + num_query, 100 * num)
    batch.num_computed = np.full(num, num_computed, np.int64)
    batch.num_tokens = batch.num_computed + 1
    batch.draft_limits = np.full(num, num_left, np.int32)
    return batch


def test_a_head_computes_prompts_only_where_what_is_left_to_emit_repays_it() -> None:
    policy = AutoPolicy(Reading(draft=1.0, token=0.2), K, "eagle3")  # type: ignore[arg-type]
    assert not policy.plan(unread(4, num_computed=400, num_left=5)).any()  # 80 s of prompts, 60 s left to emit
    caps = policy.plan(unread(4, num_computed=400, num_left=500))
    assert caps.all()
    policy.select(offered(np.full((4, K), 0.9), caps))
    policy.commit(policy.decision)
    assert policy.plan(unread(4, num_computed=402, num_left=5)).all()  # now they are computed
    changed = unread(4, num_computed=402, num_left=5)
    changed.version = 1  # the head starts again
    assert not policy.plan(changed).any()


def test_what_was_not_drafted_was_not_computed() -> None:
    policy = AutoPolicy(Reading(draft=1.0, token=0.2), K, "hybrid")  # type: ignore[arg-type]
    batch = unread(4, num_computed=400, num_left=500)
    caps = policy.plan(batch)
    drafts = offered(np.full((4, K), 0.9), caps)
    drafts.names, drafts.sources = ("suffix", "eagle3"), np.array([0, 1, 1, 0], np.uint8)
    policy.select(drafts)
    policy.commit(policy.decision)
    batch = unread(4, num_computed=402, num_left=500)
    policy.plan(batch)
    assert policy._num_unread(batch).tolist() == [402, 2, 2, 402]
    batch.num_tokens = batch.num_tokens + 60  # of its prompt the target has not computed all: the head can't begin
    assert not policy._num_unread(batch).any()


def test_prompts_in_a_step_do_not_make_a_head_look_cheap() -> None:
    class Prompts(Reading):
        def step_s(self, load: Load) -> float:
            return self.step + 10 * (load.num_query_tokens - load.num_rows)

        def steps_s(self, load: Load, num_extra: int) -> np.ndarray:
            return self.step_s(load) + self.token * np.arange(num_extra + 1)

    policy = AutoPolicy(Prompts(draft=10.0, token=0.1), K, "eagle3")  # type: ignore[arg-type]
    assert not policy.plan(unread(4, num_computed=400, num_left=500)).any()
    assert not policy.plan(unread(4, num_computed=400, num_left=500, num_query=100)).any()


def test_a_probe_takes_the_row_that_costs_least_and_pays_for_it() -> None:
    policy = AutoPolicy(Reading(draft=10.0), K, "eagle3")  # type: ignore[arg-type]
    probed = []
    for step in range(8000):
        batch = unread(3, num_computed=400, num_left=500)
        batch.num_computed = np.array([400, 300, 350])
        batch.num_tokens = batch.num_computed + 1
        caps = policy.plan(batch)
        assert batch.head_caps is not None
        if batch.head_caps.any():
            probed.append((step, int(batch.head_caps.argmax())))
            policy.select(offered(np.full((3, K), 0.1), caps))
        policy.commit(policy.decision)
    assert [row for _, row in probed[:2]] == [1, 1]
    # Two tokens cost 20.05 to draft and 2 to verify, and what the head computed before the first of them 24.95.
    assert probed[0][0] >= 46.9 / (PROBES * 10) - 2 > probed[1][0] - probed[0][0]


def test_a_head_that_does_not_pay_is_probed_on_credit_and_history_goes_on_beside_it() -> None:
    policy = AutoPolicy(Line(draft=10.0), K, "hybrid")  # type: ignore[arg-type]
    probes = 0
    for _ in range(3000):
        batch = rows(3)
        assert policy.plan(batch).tolist() == [K] * 3
        assert batch.head_caps is not None
        assert sorted(batch.head_caps.tolist()) in ([0, 0, 0], [0, 0, 2])
        probes += int(batch.head_caps.any())
        policy.commit(policy.decision)
    assert 0 < probes * 20 <= PROBES * 3000 * 10 + 22


def ahead(
    policy: AutoPolicy, made: np.ndarray, stands: int, width: int = 0, version: int = 0
) -> tuple[np.ndarray, int]:
    """A step of rows whose drafts, made[i] tokens each, were made at the end of the one before, with room for `width`
    or more: how many the next one finds, and how many were verified."""
    num_rows = len(made)
    batch = replace(rows(num_rows, version), is_ahead=True)
    batch.request_ids += 10_000 * version
    caps = policy.plan(batch)
    width = max(width, int(made.max(initial=0)))
    lengths = policy.select(offered(np.full((num_rows, width), 0.5), np.minimum(caps, made)))
    accepted = np.minimum(lengths, stands).astype(np.int32)
    commits = Commits(
        batch.request_ids, np.zeros((num_rows, K + 1), np.int32), accepted + 1, lengths.astype(np.int32), accepted,
        offered(np.full((num_rows, width), 0.5) * (made > 0)[:, None], made),
    )  # fmt: skip
    policy.commit(policy.decision)
    policy.observe(commits, SimpleNamespace(total_s=10.0, num_guessed=0), policy.decision)  # type: ignore[arg-type]
    return np.full(num_rows, caps.max()), int(lengths.sum())


def test_a_head_that_drafts_for_the_next_step_is_probed_too() -> None:
    policy = AutoPolicy(Line(token=0.5, draft=0.5), K, "eagle3")  # type: ignore[arg-type]
    made, num_tried = np.zeros(2, int), {0: 0, K: 0}
    for stands, num_steps in ((0, 500), (K, 4000)):
        for _ in range(num_steps):
            made, num = ahead(policy, made, stands)
            num_tried[stands] += num
    assert 0 < num_tried[0] < 100  # found out, and tried now and then
    assert made.tolist() == [K, K] and num_tried[K] > 1000


@pytest.mark.parametrize(("token", "least", "most"), [(0.001, 1.0, 1.0), (0.06, 0.3, 0.8), (4.0, 0.0, 0.0)])
def test_drafts_that_lie_on_the_device_are_chosen_from_as_if_they_were_seen(
    token: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For those who have drafts as many slots as bring, by the drafts themselves, nearly what an auction of these would
    bring, and no more of any row than it has. What brings next to nothing is left."""
    dice, num_rows, found, rates = np.random.default_rng(0), 64, list[np.ndarray](), list[float]()
    said = np.where(dice.random((num_rows, K)) < 0.5, 0.95, 0.55)
    num = np.where(np.arange(num_rows) % 8, K, 0)
    for is_seen in (False, True):
        policy = AutoPolicy(Line(token=token, draft=0.01), K, "eagle3")  # type: ignore[arg-type]
        known(policy)
        if is_seen:
            monkeypatch.setattr(policy, "_is_blind", lambda step: False)
        for _ in range(300):
            stood = np.cumprod(dice.random((num_rows, K)) < said, axis=1).sum(1).astype(np.int32)
            policy.depths.observe(stood, np.minimum(stood + 1, K))
            policy.worth.hear(said)
        policy.worth.renew()
        policy._credit_s = -1e9
        policy.plan(replace(rows(num_rows), is_ahead=True))
        policy._step.draft_s, policy._step.probing = 0.04, False
        found.append(policy.select(offered(said, num)))
        assert (found[-1] <= num).all() and policy.decision.reason.startswith(f"takes {found[-1].sum()} of {num.sum()}")
        assert policy.decision.expected_s == pytest.approx(10.04 + token * found[-1].sum())
        survival = -np.sort(-np.cumprod(said[num > 0], axis=1), axis=None)
        rates.append((num_rows + survival[: found[-1].sum()].sum()) / policy.decision.expected_s)
    assert least <= found[0].sum() / num.sum() <= most and rates[0] > 0.98 * rates[1]


def test_of_many_drafts_on_the_device_only_some_are_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once enough was heard for the next curves; what steps bring and take is always accounted for."""
    policy = AutoPolicy(Line(token=0.001, draft=0.01), K, "eagle3")  # type: ignore[arg-type]
    known(policy)
    made, num_learned, num_accounted = np.full(64, K), list[int](), list[int]()
    learn, observe = policy._learn, policy.yields.observe
    monkeypatch.setattr(policy, "_learn", lambda *step: num_learned.append(1) or learn(*step))
    monkeypatch.setattr(policy.yields, "observe", lambda *step: num_accounted.append(1) or observe(*step))
    for _ in range(160):
        made, num = ahead(policy, made, K)
    assert num == 64 * K and 10 < len(num_learned) < 60 and len(num_accounted) == 160


@pytest.mark.parametrize("num_rows", [8, 64, 512])
def test_rows_that_come_from_their_prompts_are_no_misses_of_a_head(num_rows: int) -> None:
    """Rollout after rollout begins with rows for which nothing can have been drafted, be there room for it or not."""
    policy = AutoPolicy(Line(step=100.0, token=0.01, draft=20.0), K, "eagle3")  # type: ignore[arg-type]
    for version in range(6):
        made, _ = ahead(policy, np.zeros(num_rows, int), K, K * (version % 2), version)
        assert version == 0 or policy.depths(1)[0] > 0.75
        for _ in range(40):
            made, num = ahead(policy, made, K, 0, version)
            assert version == 0 or num == num_rows * K


def test_a_draft_cut_by_its_sequences_end_was_not_wrong() -> None:
    policy = AutoPolicy(Line(), K)  # type: ignore[arg-type]
    policy.plan(rows(1))
    drafts = offered(np.full((1, K), 0.5))
    lengths = policy.select(drafts)
    commits = Commits(np.arange(1), np.zeros((1, 5), np.int32), np.array([1]), np.array([K]), np.array([1]))
    policy.observe(commits, None, policy.decision)  # type: ignore[arg-type]
    stood, seen = policy.chances.state()["counts"].sum(1)
    assert (stood, seen) == (1, 1) and lengths.sum() <= K


def test_rows_that_were_sent_back_to_wait_are_told_apart() -> None:
    policy = AutoPolicy(Line(), K)  # type: ignore[arg-type]
    policy.plan(rows(3))
    drafts = offered(np.array([[0.05] * K, [0.45] * K, [0.95] * K]))
    policy.select(drafts)
    two = np.full(1, 2, np.int32)
    policy.observe(Commits(np.array([2]), np.zeros((1, 5), np.int32), two + 1, two, two), None, policy.decision)  # type: ignore[arg-type]
    counts = policy.chances.state()["counts"]
    assert counts[1].reshape(-1, 10).sum(0).tolist() == [0] * 9 + [2]


class Crowded(Line):
    """A step takes by its rows."""

    def step_s(self, load: Load) -> float:
        return self.step * load.num_rows

    def steps_s(self, load: Load, num_extra: int) -> np.ndarray:
        return self.step_s(load) + self.token * np.arange(num_extra + 1)


@pytest.mark.parametrize("method", ["suffix", "eagle3"])
def test_what_a_step_takes_is_that_of_its_own_rows(method: str) -> None:
    policy = AutoPolicy(Crowded(token=0.1, draft=0.1), K, method)  # type: ignore[arg-type]
    known(policy)
    for num_rows in (3, 5, 2):
        policy.plan(rows(num_rows))
        draft_s = policy.decision.about.draft_s
        lengths = policy.select(offered(np.full((num_rows, K), 0.95)))
        assert lengths.sum() == num_rows * K
        assert policy.decision.expected_s == pytest.approx(10 * num_rows + 0.1 * lengths.sum() + draft_s)


@dataclass(frozen=True)
class Trace:
    total_s: float
    draft_s: float
    num_guessed: int = 0
    num_rows: int = 2


class Heard(Line):
    draft_s_heard, k_heard = -1.0, -1

    def observe(self, trace: Any, k: int, drafter: str | None, num_rows: int | None, draft_s: float | None) -> None:
        self.draft_s_heard, self.k_heard = trace.draft_s if draft_s is None else draft_s, k


def test_a_step_is_learned_from_by_what_it_verified_though_others_were_planned_meanwhile() -> None:
    """As where drafts are made and chosen on a device: what was looked at when the step was planned were others."""

    costs = Heard(draft=0.1)
    policy = AutoPolicy(costs, K, "eagle3")  # type: ignore[arg-type]
    policy.plan(replace(rows(2), is_ahead=True))
    policy.select(offered(np.full((2, K), 0.05)))
    first = policy.decision
    policy.plan(replace(rows(3), is_ahead=True))
    policy.select(offered(np.full((3, K), 0.35)))
    verified = offered(np.array([[0.95] * K, [0.45] * K]))
    stood, drafted = np.array([2, 0], np.int32), np.array([3, 1], np.int32)
    commits = Commits(np.arange(2), np.zeros((2, 5), np.int32), stood + 1, drafted, stood, verified)
    policy.observe(commits, Trace(20.0, 0.0), first)  # type: ignore[arg-type]
    stood_W, seen_W = policy.chances.state()["counts"].reshape(2, -1, 10).sum(1)
    assert seen_W.tolist() == [0] * 4 + [1] + [0] * 4 + [3] and stood_W.tolist() == [0] * 9 + [2]
    assert costs.draft_s_heard == pytest.approx(first.about.draft_s) and first.about.draft_s > 0
    assert costs.k_heard == first.about.drafted_k < 7
    policy.observe(commits, Trace(20.0, 0.0, 7), first)  # type: ignore[arg-type]
    assert costs.k_heard == 7 and costs.draft_s_heard == pytest.approx(0.7), "a wide graph that drafts seven"
    policy.plan(rows(2))  # by the host, whose clock tells
    policy.observe(commits, Trace(20.0, 3.0), policy.decision)  # type: ignore[arg-type]
    assert costs.draft_s_heard == 3.0


def test_new_weights_halve_what_is_known_and_state_round_trips() -> None:
    policy = AutoPolicy(Line(), K)  # type: ignore[arg-type]
    known(policy)
    policy.plan(rows(1))
    before = policy.chances.state()["counts"].sum()
    policy.plan(rows(1, version=1))
    assert policy.chances.state()["counts"].sum() == pytest.approx(before / 2)
    again = AutoPolicy(Line(), K)  # type: ignore[arg-type]
    again.restore(policy.state())
    drafts = offered(np.random.default_rng(3).random((4, K)))
    for each in (policy, again):
        each._credit_s = 0.0
        each.plan(rows(4, version=1))
    assert again.select(drafts).tolist() == policy.select(drafts).tolist()
    with pytest.raises(ValueError, match="not a state of the auto policy"):
        again.restore({"logs": np.zeros(1)})
    for name in ("counts", "depths", "yields", "version"):
        with pytest.raises(ValueError, match="damaged"):
            again.restore(policy.state() | {name: np.zeros((3, 3, 3))})


def test_no_token_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least 1"):
        AutoPolicy(Line(), 0)  # type: ignore[arg-type]


def test_history_that_takes_too_long_is_left_alone_but_for_probes() -> None:
    policy = AutoPolicy(Line(draft=2.0, token=0.1), K, "ngram")  # type: ignore[arg-type]
    drafts = offered(np.full((2, K), 0.35))
    asked = 0
    for _ in range(2000):
        if policy.plan(rows(2)).any():
            asked += 1
            told(policy, drafts, policy.select(drafts), np.zeros(2))
        else:
            assert "would not pay" in policy.decision.reason
            told(policy, drafts, np.zeros(2, np.int32), np.zeros(2))
    assert 2 <= asked <= 60


def test_history_that_was_useless_is_found_out_to_be_so_no_more() -> None:
    policy = AutoPolicy(Line(draft=0.02, token=0.1), K, "ngram")  # type: ignore[arg-type]
    asked = list[bool]()
    for step in range(4000):
        asked.append(bool(policy.plan(rows(2)).any()))
        drafts = offered(np.full((2, K if asked[-1] else 0), 0.35))
        told(policy, drafts, policy.select(drafts), np.full(2, K if step > 2000 else 0))
    assert 2 <= sum(asked[1000:2000]) < 100 and all(asked[3000:])


def test_history_that_is_cold_is_not_given_up_at_once() -> None:
    """When little was said yet, few rows find something. Later nearly all do."""
    policy = AutoPolicy(Line(draft=0.1, token=0.05), K, "ngram")  # type: ignore[arg-type]
    known(policy)
    for step in range(200):
        assert policy.plan(rows(16)).any()
        some = np.arange(16) < 1 if step < 10 else np.arange(16) < 14
        drafts = offered(np.full((16, K), 0.9), np.where(some, 1 if step < 10 else K, 0))
        told(policy, drafts, policy.select(drafts), np.full(16, K))


@pytest.mark.parametrize("num", [1, 2, 16])
def test_so_it_is_on_a_device(num: int) -> None:
    """What it drafts at the end of a step is verified in the next, and what it is sure of known in the one after that:
    a probe takes three. Steps overlap: one is planned before the outcome of the one before it is heard."""
    policy = AutoPolicy(Line(draft=0.01, token=0.05), K, "ngram")  # type: ignore[arg-type]
    drafter, ids = HistoryAhead(Library()), np.arange(num)
    found, flying = np.zeros((num, 0)), list[tuple[Any, ...]]()
    asked, verified = list[bool](), list[int]()
    for step in range(3000):
        batch = rows(num)
        batch.is_ahead = True
        caps = policy.plan(batch)
        drafter.ask(batch, caps)
        drafts = drafter.propose(batch, caps)
        lengths = policy.select(drafts)
        worth = found.cumprod(1) * (np.arange(found.shape[1]) < drafts.num[:, None])  # an auction on the device
        best = (-worth.ravel()).argsort(kind="stable")[: min(int(lengths.sum()), int((worth > 0).sum()))]
        taken = np.bincount(best // max(1, found.shape[1]), minlength=num).astype(np.int32)
        k, stood = drafter.num_asked, taken if step > 2000 else 0 * taken
        found = np.full((num, k), 0.6 if step > 2000 else 0.0)
        drafter.made(ids, k)
        policy.commit(policy.decision)
        flying.append((taken, stood, found, policy.decision))
        asked.append(k > 0)
        verified.append(int(taken.sum()))
        if len(flying) > 1:
            taken, stood, chances, decision = flying.pop(0)
            drafter.told(ids, chances)
            commits = Commits(ids, np.zeros((num, K + 1), np.int32), stood + 1, taken, stood)
            commits.drafts = drafter.verified(ids)
            trace: Any = SimpleNamespace(num_guessed=chances.shape[1], num_rows=num, total_s=10.0)
            policy.observe(commits, trace, decision)
    assert 2 <= sum(asked[1000:2000]) < 200 and not any(verified[:2000])
    assert all(asked[2700:]) and np.mean(verified[2700:]) > 0.9 * num * K


@pytest.mark.parametrize("comes", [True, False])
def test_a_head_whose_guesses_are_refused_is_not_asked_on_and_on(comes: bool) -> None:
    """It would be paid for at every step, and nothing learned of it: not even where nothing comes at all."""
    policy = AutoPolicy(Line(token=1.0, draft=0.5), K, "eagle3")  # type: ignore[arg-type]
    asked = 0
    for step in range(1000):
        batch = rows(4, version=step // 200)
        caps = policy.plan(batch)
        if not caps.any():
            told(policy, offered(np.zeros((4, 0))), np.zeros(4, np.int32), np.zeros(4))
            continue
        asked += 1
        drafts = offered(np.full((4, int(caps.max())), 0.3), caps if comes else np.zeros(4))
        told(policy, drafts, policy.select(drafts), np.zeros(4))
    assert 1 <= asked < 60


class Stairs(Line):
    """A GPU's 128 rows: tokens are computed by 128, whether there are as many or not."""

    def step_s(self, load: Load) -> float:
        return 9.0

    def steps_s(self, load: Load, num_extra: int) -> np.ndarray:
        return 9.0 + np.array([0, 2.3, 5.2, 8.4, 11.6, 14.8, 18.0, 21.2])[-(-np.arange(num_extra + 1) // 128)]


def drafted(policy: AutoPolicy, spread: float, num_steps: int, blind: bool = False) -> list[tuple[int, int]]:
    """Steps of 128 rows: how deep drafts are, and how many slots are taken. Tokens stand with 0.877 in the mean, and
    the head says with how much each. `blind`: the auction is held where the drafts are."""
    dice, size, found = np.random.default_rng(0), 1 / max(spread, 1e-9) - 1, []
    before = np.full((128, 7), 0.877)
    for _ in range(num_steps):
        k = int(policy.plan(replace(rows(128), is_ahead=blind)).max())
        chances = dice.beta(0.877 * size, 0.123 * size, (128, 7)).clip(0, 0.999) if spread else before
        drafts = offered(chances[:, :k])
        lengths = policy.select(offered(before[:, :k]) if blind else drafts)
        if blind:
            best = (-chances[:, :k].cumprod(1).ravel()).argsort()[: lengths.sum()]
            lengths = np.bincount(best // max(k, 1), minlength=128).astype(np.int32)
        stood = np.minimum((dice.random((128, k)) < chances[:, :k]).cumprod(1).sum(1), lengths).astype(np.int32)
        commits = Commits(np.arange(128), np.zeros((128, 1), np.int32), stood + 1, lengths, stood)
        commits.drafts = drafts if blind else None
        policy.commit(policy.decision)
        policy.observe(commits, Trace(20.0, 0.0), policy.decision)  # type: ignore[arg-type]
        found.append((k, int(lengths.sum())))
        before = chances
    return found


@pytest.mark.parametrize("blind", [False, True])
def test_where_chances_differ_a_head_drafts_deeper_than_is_verified(blind: bool) -> None:
    policy = AutoPolicy(Stairs(draft=0.3), 7, "eagle3")  # type: ignore[arg-type]
    last = drafted(policy, 0.2, 200, blind)[-64:]
    assert all(4 <= k <= 6 and num_slots < 128 * k for k, num_slots in last)
    assert np.mean([num_slots == 384 for _, num_slots in last]) > 0.7
    assert policy.depths(3) == pytest.approx(np.full(3, 0.877), abs=0.06)


def test_drafts_on_the_device_are_on_probation_no_longer_than_others() -> None:
    """A slot at a time is little to learn from: so all of it is."""
    policy = AutoPolicy(Stairs(draft=0.3), 7, "eagle3")  # type: ignore[arg-type]
    found = drafted(policy, 0.2, 40, blind=True)
    assert max(num_slots for _, num_slots in found[:4]) < 128 and all(num_slots >= 256 for _, num_slots in found[30:])


def test_where_chances_are_alike_all_that_is_drafted_is_verified() -> None:
    policy = AutoPolicy(Stairs(draft=0.3), 7, "eagle3")  # type: ignore[arg-type]
    last = drafted(policy, 0.0, 200)[-64:]
    assert all(num_slots == 128 * k for k, num_slots in last) and np.mean([k == 3 for k, _ in last]) > 0.7


def test_rows_that_nothing_was_drafted_for_do_not_blot_out_what_others_said() -> None:
    policy = AutoPolicy(Stairs(draft=0.3), 7, "eagle3")  # type: ignore[arg-type]
    drafted(policy, 0.2, 200)
    policy.worth.renew()
    depths = deepcopy(policy.depths)
    before = policy.worth(depths)
    one = offered(np.full((128, 3), 0.5), 3 * (np.arange(128) == 5))
    policy.plan(rows(128))
    told(policy, one, policy.select(one), np.zeros(128))
    policy.worth.renew()
    assert policy.worth(depths) == pytest.approx(before, rel=0.02)


def test_a_head_that_is_asked_is_tried_though_the_first_slot_costs_most() -> None:
    """On probation a few slots may bid, and none of them pays for a stair: it was asked, and paid for, for ever."""
    policy = AutoPolicy(Stairs(draft=0.3), 7, "eagle3")  # type: ignore[arg-type]
    taken = [num_slots for _, num_slots in drafted(policy, 0.2, 40)]
    assert 1 <= taken.index(max(taken[:20])) <= PROBATION + 1 and min(taken[20:]) >= 128
