"""The policy `auto` is never slower than plain decoding: it selects the best tokens, or none if none pays, and spends
little on probes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters.device import DeviceHistoryDrafter
from paceline.speculation.acceptance import MIN_OUTCOMES, AcceptanceModel
from paceline.speculation.auto import PROBE_LENGTH, PROBES, AutoPolicy, margin
from paceline.speculation.batch import Commits, Load, Rows
from paceline.speculation.cost import CostTable, Point
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.draft_curves import MAX_AGE
from paceline.speculation.history_store import HistoryStore
from paceline.speculation.pauses import FIRST_PAUSE, MIN_AWAKE, PAUSE_FACTOR
from paceline.types import Request, SamplingParams

K = 4


class LinearCosts:
    """Seconds of a step, of each further token, and of each position that a model drafts."""

    def __init__(self, step: float = 10.0, token: float = 1.0, draft: float = 2.0) -> None:
        self.step, self.token, self.draft = step, token, draft
        self.observed: tuple[int, float] | None = None  # draft length and drafting time of the last step

    def step_s(self, load: Load) -> float:
        return self.step

    def steps_s(self, load: Load, num_extra: int) -> np.ndarray:
        return self.step_s(load) + self.token * np.arange(num_extra + 1)

    def draft_s(self, drafter: str, num_rows: int, k: int) -> float:
        return 0.0 if drafter == "suffix" else self.draft * k

    def needs_plain_step(self, num_rows: int, num_others: int) -> bool:
        return False

    def knows_plain(self, num_rows: int) -> bool:
        return True

    def observe(self, trace: Any, draft_s: float) -> None:
        self.observed_step_s = trace.total_s - draft_s

    def observe_drafting(self, drafter: str, num_rows: int, k: int, seconds: float) -> None:
        self.observed = k, seconds


def trace_of(
    num_rows: int, total_s: float, num_draft_tokens: int = 0, draft_s: float = 0.0, num_drafted_on_device: int = 0
) -> Any:
    return SimpleNamespace(
        num_rows=num_rows, num_query_tokens=num_rows + num_draft_tokens, num_draft_tokens=num_draft_tokens,
        num_context_tokens=64 * num_rows + num_draft_tokens, num_captured=0, num_outside_graph=0,
        total_s=total_s, draft_s=draft_s, num_drafted_on_device=num_drafted_on_device,
    )  # fmt: skip


def rows(num: int, version: int = 0, on_device: bool = False) -> Rows:
    ids = np.arange(num, dtype=np.int64)
    tokens = [np.zeros(4, np.int32)] * num
    load = Load(num, num, 100 * num)
    return Rows(ids, tokens, ids.astype(np.uint64), [SamplingParams()] * num, version, load, on_device=on_device)


def drafts_of(scores: np.ndarray, num: np.ndarray | None = None) -> DraftBatch:
    num_rows, k = scores.shape
    num = np.full(num_rows, k, np.int32) if num is None else num.astype(np.int32)
    return DraftBatch(np.ones((num_rows, k), np.int32), num, scores.astype(np.float32))


class Engine:
    """What the engine does with a policy, an acceptance model and drafts."""

    def __init__(self, costs: LinearCosts, method: str = "suffix", k: int = K) -> None:
        model = {"hybrid": "eagle3", "eagle3": "eagle3", "draft_model": "draft_model"}.get(method)
        self.policy = AutoPolicy(costs, k, method, model)  # type: ignore[arg-type]
        self.acceptance = AcceptanceModel(self.policy.has_probes)
        self.method, self.caps = method, np.zeros(0, np.int32)

    def plan(self, batch: Rows) -> np.ndarray:
        batch.acceptance, batch.drafter = self.acceptance, self.method
        self.acceptance.set_version(batch.version)
        self.caps = self.policy.plan(batch)
        return self.caps

    def select(self, drafts: DraftBatch) -> np.ndarray:
        self.acceptance.rate(drafts, self.method)
        if drafts.caps is None and len(drafts.num) == len(self.caps):
            drafts.caps = self.caps
        return self.policy.select(drafts)

    def commit(self, drafts: DraftBatch, lengths: np.ndarray, accepted: Any, draft_s: float = 0.0) -> None:
        """The step is launched, and has this outcome."""
        decision = self.policy.decision
        self.policy.launched(decision)
        accepted = np.minimum(accepted, lengths).astype(np.int32)
        ids = np.arange(len(lengths))
        width = int(lengths.max(initial=0)) + 1
        commits = Commits(ids, np.zeros((len(ids), width), np.int32), accepted + 1, lengths, accepted)
        if drafts.cells is not None:
            self.acceptance.observe(drafts, self.method, None, accepted, commits.num_known)
        self.policy.observe(commits, trace_of(len(ids), 10.0, int(lengths.sum()), draft_s), decision)

    def step(self, batch: Rows, drafts: DraftBatch, accepted: Any) -> np.ndarray:
        """Plan, select and commit with these drafts, if the policy wants any. Returns how many tokens were verified."""
        if self.plan(batch).any():
            lengths = self.select(drafts)
        else:
            drafts, lengths = drafts_of(np.zeros((len(batch), 0))), np.zeros(len(batch), np.int32)
        self.commit(drafts, lengths, accepted)
        return lengths

    def calibrate(self) -> None:
        """Many outcomes, with scores that are true."""
        rng = np.random.default_rng(0)
        for _ in range(20):
            scores = rng.random((100, K))
            accepted = np.cumprod(rng.random((100, K)) < scores, axis=1).sum(1)
            drafts = drafts_of(scores)
            self.acceptance.rate(drafts, self.method)
            self.acceptance.observe(drafts, self.method, None, accepted, np.minimum(accepted + 1, K))


# ---- discarded steps, budgets, selection ----


@pytest.mark.parametrize("method", ["suffix", "ngram", "eagle3", "hybrid"])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_discarded_step_changes_no_later_one(method: str, on_device: bool) -> None:
    """Neither after `plan` nor after `select`: credit for probes is spent on steps that run."""
    model = method in ("eagle3", "hybrid")
    costs = LinearCosts(draft=1.0 if model else 0.1, token=0.5)
    once, often = Engine(costs, method), Engine(costs, method)
    num_probed = 0
    for step in range(600):
        found = []
        for engine, times in ((once, 1), (often, 3)):
            for _ in range(times):
                batch = rows(3, on_device=on_device)
                caps = engine.plan(batch)
                drafts = drafts_of(np.full((3, int(caps.max())), 0.1), caps)
                lengths = engine.select(drafts) if caps.any() else caps
            head_caps = None if batch.head_caps is None else batch.head_caps.tolist()
            found.append((caps.tolist(), head_caps, lengths.tolist(), engine.policy.decision))
            engine.commit(drafts, lengths, int(step % 40 == 0))
            assert engine.policy._step.credit_s <= 0.1
        assert found[0] == found[1]
        num_probed += found[0][3].is_probe
    assert num_probed, "no credit was spent"


@pytest.mark.parametrize("method", ["suffix", "eagle3"])
def test_the_best_tokens_of_all_rows_are_selected_within_the_budget(method: str) -> None:
    """The last rows' drafts are the most probable; the budget is six tokens."""
    engine = Engine(LinearCosts(token=0.01, draft=0.01), method)
    engine.calibrate()
    batch = rows(8)
    batch.draft_budget, batch.draft_limits = 6, np.full(8, 9, np.int32)
    caps = engine.plan(batch)
    scores = np.where(np.arange(8) >= 6, 0.95, 0.35)[:, None].repeat(K, 1)
    lengths = engine.select(drafts_of(scores[:, : caps.max()], caps))
    assert lengths.sum() == 6 and lengths[6:].tolist() == [min(3, caps[-1])] * 2
    batch.draft_budget = 0
    assert not engine.plan(batch).any() and "max_num_batched_tokens" in engine.policy.decision.reason
    batch.draft_budget, batch.draft_limits = 100, np.array([0, 1] * 4, np.int32)
    assert (engine.plan(batch) <= batch.draft_limits).all()


def best_of_all_cuts(engine: Engine, drafts: DraftBatch) -> float:
    """The best rate of all ways to cut every row's draft."""
    engine.acceptance.rate(drafts, engine.method)
    assert drafts.probabilities is not None
    survival = drafts.probabilities.cumprod(1)
    best = 0.0
    for cut in product(*(range(n + 1) for n in drafts.num.tolist())):
        emitted = len(cut) + sum(survival[i, :n].sum() for i, n in enumerate(cut))
        best = max(best, emitted / float(engine.policy.costs.steps_s(Load(), sum(cut))[-1]))
    return best


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(0.01, 5))
def test_the_selection_is_the_best_of_all_cuts(seed: int, num_rows: int, token: float) -> None:
    rng, engine = np.random.default_rng(seed), Engine(LinearCosts(token=token))
    engine.calibrate()
    engine.policy._credit_s = -1e9  # no probes
    engine.plan(rows(num_rows))
    drafts = drafts_of(rng.random((num_rows, K)), rng.integers(0, K + 1, num_rows))
    best = best_of_all_cuts(engine, drafts)
    lengths = engine.select(drafts)
    assert (lengths <= drafts.num).all() and drafts.probabilities is not None
    survival = drafts.probabilities.cumprod(1)
    rate = (num_rows + sum(survival[i, :n].sum() for i, n in enumerate(lengths))) / (10 + token * lengths.sum())
    assert rate <= best + 1e-12
    assert rate >= best / margin(num_rows) - 1e-12
    assert rate >= num_rows / 10  # never below plain decoding, by its own estimate
    assert engine.policy.decision.expected_s == pytest.approx(10 + token * lengths.sum())


def test_a_selection_of_everything_would_be_worse() -> None:
    """So the test above can fail."""
    engine = Engine(LinearCosts(token=5.0))
    engine.calibrate()
    engine.policy._credit_s = -1e9
    engine.plan(rows(2))
    drafts = drafts_of(np.full((2, K), 0.15))
    best = best_of_all_cuts(engine, drafts)
    assert drafts.probabilities is not None
    everything = (2 + drafts.probabilities.cumprod(1).sum()) / (10 + 5.0 * 2 * K)
    assert everything < best / margin(2)
    assert engine.select(drafts).tolist() == [0, 0]


class CostsByRows(LinearCosts):
    def step_s(self, load: Load) -> float:
        return self.step * load.num_rows


@pytest.mark.parametrize("method", ["suffix", "eagle3"])
def test_the_expected_time_is_that_of_the_steps_own_rows(method: str) -> None:
    engine = Engine(CostsByRows(token=0.1, draft=0.1), method)
    engine.calibrate()
    for num_rows in (3, 5, 2):
        engine.plan(rows(num_rows))
        draft_s = engine.policy.decision.about.draft_s
        lengths = engine.select(drafts_of(np.full((num_rows, K), 0.95)))
        assert lengths.sum() == num_rows * K
        assert engine.policy.decision.expected_s == pytest.approx(10 * num_rows + 0.1 * lengths.sum() + draft_s)


def test_at_least_one_token_is_needed() -> None:
    with pytest.raises(ValueError, match="needs at least 1"):
        AutoPolicy(LinearCosts(), 0)  # type: ignore[arg-type]


def test_it_keeps_no_state_and_refuses_another_policys() -> None:
    """What it learns is in the acceptance model and the cost table."""
    policy = AutoPolicy(LinearCosts(), K)  # type: ignore[arg-type]
    assert policy.state_dict() == {}
    policy.load_state_dict({})
    with pytest.raises(ValueError, match="not a state of the auto policy"):
        policy.load_state_dict({"counts": np.zeros(1)})


# ---- unknown, useless and improved drafters ----


def test_an_unknown_drafter_is_tried_token_by_token_however_high_its_scores() -> None:
    engine, drafts = Engine(LinearCosts(token=0.1)), drafts_of(np.full((4, K), 0.95))
    num_steps = 0
    while True:
        engine.plan(rows(4))
        lengths = engine.select(drafts)
        if lengths.sum() > 1:
            break
        assert lengths.sum() == 1
        engine.commit(drafts, lengths, np.full(4, K))
        num_steps += 1
        assert num_steps <= MIN_OUTCOMES + 1  # older outcomes count a little less
    assert num_steps >= MIN_OUTCOMES and lengths.sum() == 4 * K


def test_a_useless_drafter_costs_next_to_nothing() -> None:
    engine, rng, spent, num_steps = Engine(LinearCosts()), np.random.default_rng(1), 0, 4000
    for _ in range(num_steps):
        spent += int(engine.step(rows(2), drafts_of(rng.random((2, K))), np.zeros(2)).sum())
    assert spent * 1.0 <= (PROBES + 0.003) * 10 * num_steps + 5
    assert spent > MIN_OUTCOMES  # but it is still probed now and then


def test_a_drafter_that_becomes_good_is_used_again() -> None:
    engine, drafts = Engine(LinearCosts(token=0.5)), drafts_of(np.full((1, K), 0.5))
    for accepted, num_steps in ((0, 500), (K, 3000)):
        for _ in range(num_steps):
            lengths = engine.step(rows(1), drafts, accepted)
    assert lengths.tolist() == [K]


@pytest.mark.parametrize("method", ["suffix", "eagle3"])
def test_a_rejected_drafter_is_tried_again_after_each_new_policy_version(method: str) -> None:
    """And found out after a handful of tokens, or, if it takes time to draft, after MIN_OUTCOMES: it would otherwise be
    given up after a few tokens that are rejected together. There is no credit for probes."""
    engine, drafts = Engine(LinearCosts(token=0.1, draft=0.1), method), drafts_of(np.full((4, K), 0.7))
    num_verified = [0] * 12
    for step in range(12 * 100):
        engine.policy._credit_s = -1e9
        num_verified[step // 100] += int(engine.step(rows(4, version=step // 100), drafts, 0).sum())
    most = MIN_OUTCOMES + 1 if method == "eagle3" else 4
    assert 1 <= min(num_verified) <= max(num_verified) <= most and max(num_verified[1:]) <= most / 2 + 1


# ---- models ----


@pytest.mark.parametrize(("draft", "token", "expected"), [(0.1, 0.1, K), (100.0, 0.1, 0), (0.1, 100.0, 0)])
def test_a_model_drafts_as_far_as_its_time_pays(draft: float, token: float, expected: int) -> None:
    for method in ("eagle3", "draft_model", "hybrid"):
        engine, batch = Engine(LinearCosts(token=token, draft=draft), method), rows(4)
        caps = engine.plan(batch)
        if method == "hybrid":  # history may always draft
            assert batch.head_caps is not None and caps.tolist() == [K] * 4
            caps = batch.head_caps
        assert caps.tolist() == [expected] * 4
        assert ("would not pay" in engine.policy.decision.reason) == (expected == 0)


class CostsOfReading(LinearCosts):
    """A model's time also depends on the rows, and so on the positions that it computes before its first draft."""

    def draft_s(self, drafter: str, num_rows: int, k: int) -> float:
        return 0.0 if drafter == "suffix" else self.draft * k + 0.05 * num_rows


def unread(num: int, num_computed: int, num_left: int, num_query: int = 0) -> Rows:
    """Rows of which the model has computed nothing yet."""
    batch = rows(num)
    batch.load = Load(num, num + num_query, 100 * num)
    batch.num_computed = np.full(num, num_computed, np.int64)
    batch.num_tokens = batch.num_computed + 1
    batch.draft_limits = np.full(num, num_left, np.int32)
    return batch


def test_a_head_computes_prompts_only_if_the_tokens_left_repay_it() -> None:
    engine = Engine(CostsOfReading(draft=1.0, token=0.2), "eagle3")
    assert not engine.plan(unread(4, num_computed=400, num_left=5)).any()  # 80 s of prompts, 60 s left to emit
    caps = engine.plan(unread(4, num_computed=400, num_left=500))
    assert caps.all()
    engine.select(drafts_of(np.full((4, K), 0.9), caps))
    engine.policy.launched(engine.policy.decision)
    assert engine.plan(unread(4, num_computed=402, num_left=5)).all()  # now they are computed
    changed = unread(4, num_computed=402, num_left=5)
    changed.version = 1  # its KV is dropped
    assert not engine.plan(changed).any()


def test_rows_that_the_head_did_not_draft_for_are_not_computed() -> None:
    engine = Engine(CostsOfReading(draft=1.0, token=0.2), "hybrid")
    caps = engine.plan(unread(4, num_computed=400, num_left=500))
    drafts = drafts_of(np.full((4, K), 0.9), caps)
    drafts.names, drafts.sources = ("suffix", "eagle3"), np.array([0, 1, 1, 0], np.uint8)
    engine.select(drafts)
    engine.policy.launched(engine.policy.decision)
    batch = unread(4, num_computed=402, num_left=500)
    engine.plan(batch)
    assert engine.policy._num_unread(batch).tolist() == [402, 2, 2, 402]
    batch.num_tokens = batch.num_tokens + 60  # the target has not computed all of its prompt: the head can't begin
    assert not engine.policy._num_unread(batch).any()


def test_prompts_in_a_step_do_not_make_a_head_look_cheap() -> None:
    class CostsOfPrompts(CostsOfReading):
        def step_s(self, load: Load) -> float:
            return self.step + 10 * (load.num_query_tokens - load.num_rows)

    engine = Engine(CostsOfPrompts(draft=10.0, token=0.1), "eagle3")
    assert not engine.plan(unread(4, num_computed=400, num_left=500)).any()
    assert not engine.plan(unread(4, num_computed=400, num_left=500, num_query=100)).any()


def test_a_probe_is_for_the_cheapest_row_and_is_paid_for() -> None:
    engine = Engine(CostsOfReading(draft=10.0), "eagle3")
    probed = []
    for step in range(8000):
        batch = unread(3, num_computed=400, num_left=500)
        batch.num_computed = np.array([400, 300, 350])
        batch.num_tokens = batch.num_computed + 1
        caps = engine.plan(batch)
        if caps.any():
            probed.append((step, int(caps.argmax())))
            engine.select(drafts_of(np.full((3, K), 0.1), caps))
        engine.policy.launched(engine.policy.decision)
    assert [row for _, row in probed[:2]] == [1, 1]
    # Two tokens take 20.05 s to draft and 2 s to verify, and before the first of them the head computes for 24.95 s.
    assert probed[0][0] >= 46.9 / (PROBES * 10) - 2 > probed[1][0] - probed[0][0]


def test_a_head_that_does_not_pay_is_probed_on_credit_while_history_drafts() -> None:
    engine, num_probes = Engine(LinearCosts(draft=10.0), "hybrid"), 0
    for _ in range(3000):
        batch = rows(3)
        assert engine.plan(batch).tolist() == [K] * 3
        assert batch.head_caps is not None
        assert sorted(batch.head_caps.tolist()) in ([0, 0, 0], [0, 0, PROBE_LENGTH])
        num_probes += int(batch.head_caps.any())
        engine.policy.launched(engine.policy.decision)
    assert 0 < num_probes * 20 <= PROBES * 3000 * 10 + 22


def test_a_probe_of_a_hybrid_verifies_the_heads_tokens() -> None:
    """Although history's are more probable, and no head token would be selected."""
    engine, num_verified = Engine(LinearCosts(draft=1.0), "hybrid"), 0
    for _ in range(40):  # all tokens of the head are rejected
        drafts = drafts_of(np.full((3, K), 0.5))
        drafts.names, drafts.sources = ("suffix", "eagle3"), np.ones(3, np.uint8)
        engine.acceptance.rate(drafts, "hybrid")
        engine.acceptance.observe(drafts, "hybrid", None, np.zeros(3, int), np.ones(3, int))
    for _ in range(1000):
        batch = rows(3)
        batch.draft_budget = 4
        engine.plan(batch)
        assert batch.head_caps is not None and batch.is_head_probe == batch.head_caps.any()
        drafts = drafts_of(np.full((3, K), 0.95))
        from_head = batch.head_caps > 0
        drafts.names, drafts.sources = ("suffix", "eagle3"), from_head.astype(np.uint8)
        drafts.num[from_head] = PROBE_LENGTH
        lengths = engine.select(drafts)
        assert lengths.sum() <= 4 and lengths[from_head].tolist() == [PROBE_LENGTH] * int(from_head.sum())
        engine.commit(drafts, lengths, np.where(from_head, 0, K))
        num_verified += int(from_head.sum())
    assert 1 <= num_verified < 100


@pytest.mark.parametrize(("method", "on_device"), [("eagle3", False), ("eagle3", True), ("hybrid", False)])
def test_a_head_is_not_given_up_after_a_few_rejected_tokens(method: str, on_device: bool) -> None:
    """The first tokens of many rows are often rejected. There is no credit for probes. In a hybrid, history drafts for
    half of the rows, with more probable tokens."""
    engine, from_head, num_verified = Engine(LinearCosts(token=0.1, draft=0.3), method), np.arange(8) % 2 == 0, []

    def drafts_with(k: int) -> DraftBatch:
        drafts = drafts_of(np.full((8, K), 0.6), np.full(8, k))
        drafts.caps = np.full(8, k, np.int32)
        if method == "hybrid":
            drafts.names, drafts.sources = ("suffix", "eagle3"), from_head.astype(np.uint8)
            drafts.scores[~from_head], drafts.num[~from_head], drafts.caps[~from_head] = 0.97, K, K
        return drafts

    history = drafts_with(0)
    engine.acceptance.rate(history, method)
    for _ in range(20):
        engine.acceptance.observe(history, method, None, history.num, history.num)
    for step in range(100):
        engine.policy._credit_s = -1e9
        batch = rows(8, on_device=on_device)
        caps = engine.plan(batch)
        drafts = drafts_with(int((caps if batch.head_caps is None else batch.head_caps).max()))
        lengths = engine.select(drafts)
        engine.commit(drafts, lengths, np.where(from_head | (method != "hybrid"), 0, K) if step < 4 else K)
        num_verified.append(int(lengths[from_head].sum()))
    assert 1 <= sum(num_verified[:4]) <= 8 and np.mean(num_verified[50:]) == 4 * K


@pytest.mark.parametrize("drafts_come", [True, False])
def test_a_head_whose_drafts_are_not_selected_is_not_asked_on_and_on(drafts_come: bool) -> None:
    """It would take its time at every step without any outcome. The same if it drafts nothing at all."""
    engine, num_asked = Engine(LinearCosts(token=1.0, draft=0.5), "eagle3"), 0
    for step in range(1000):
        caps = engine.plan(rows(4, version=step // 200))
        drafts = drafts_of(np.full((4, int(caps.max())), 0.3), caps if drafts_come else np.zeros(4))
        lengths = engine.select(drafts) if caps.any() else caps
        engine.commit(drafts, lengths, 0)
        num_asked += bool(caps.any())
    assert 1 <= num_asked < 60


class CostsInStairs(LinearCosts):
    """128 rows on a GPU: tokens are computed in blocks of 128, however many there are."""

    def step_s(self, load: Load) -> float:
        return 9.0

    def steps_s(self, load: Load, num_extra: int) -> np.ndarray:
        return 9.0 + np.array([0, 2.3, 5.2, 8.4, 11.6, 14.8, 18.0, 21.2])[-(-np.arange(num_extra + 1) // 128)]


def run_head(engine: Engine, variance: float, num_steps: int, on_device: bool = False) -> list[tuple[int, int]]:
    """Steps of 128 rows: draft lengths and numbers of verified tokens. A token is accepted with a probability of 0.877
    in the mean, and its score is its probability. With `on_device` the device selects the tokens."""
    rng, size, found = np.random.default_rng(0), 1 / max(variance, 1e-9) - 1, []
    before = np.full((128, 7), 0.877)
    for _ in range(num_steps):
        k = int(engine.plan(rows(128, on_device=on_device)).max())
        scores = rng.beta(0.877 * size, 0.123 * size, (128, 7)).clip(1e-6, 0.999) if variance else before
        drafts = drafts_of(scores[:, :k])
        lengths = engine.select(drafts_of(before[:, :k]) if on_device else drafts)
        if on_device:
            best = (-scores[:, :k].cumprod(1).ravel()).argsort()[: lengths.sum()]
            lengths = np.bincount(best // max(k, 1), minlength=128).astype(np.int32)
            engine.acceptance.rate(drafts, engine.method)
        accepted = np.minimum((rng.random((128, k)) < scores[:, :k]).cumprod(1).sum(1), lengths)
        engine.commit(drafts, lengths, accepted)
        found.append((k, int(lengths.sum())))
        before = scores
    return found


@pytest.mark.parametrize("on_device", [False, True])
def test_with_different_probabilities_drafts_are_longer_than_what_is_verified(on_device: bool) -> None:
    engine = Engine(CostsInStairs(draft=0.3), "eagle3", 7)
    last = run_head(engine, 0.2, 200, on_device)[-64:]
    assert all(4 <= k <= 6 and num < 128 * k for k, num in last)
    assert np.mean([num == 384 for _, num in last]) > 0.7
    survival = engine.acceptance.survival("eagle3", 3).mean(0)
    assert survival[1:] / survival[:-1] == pytest.approx(np.full(2, 0.877), abs=0.06)


def test_with_equal_probabilities_all_that_is_drafted_is_verified() -> None:
    last = run_head(Engine(CostsInStairs(draft=0.3), "eagle3", 7), 0.0, 200)[-64:]
    assert all(num == 128 * k for k, num in last) and np.mean([k == 3 for k, _ in last]) > 0.7


def test_an_unknown_head_gets_outcomes_though_the_first_token_costs_most() -> None:
    """Only a few tokens of it may be selected, which do not pay for a stair. Without outcomes it would be asked, and
    take its time, for ever."""
    num_verified = [num for _, num in run_head(Engine(CostsInStairs(draft=0.3), "eagle3", 7), 0.2, 40)]
    assert 1 <= num_verified.index(max(num_verified[:20])) <= MIN_OUTCOMES + 1 and min(num_verified[20:]) >= 128


def test_an_unknown_head_on_the_device_is_known_as_fast() -> None:
    found = run_head(Engine(CostsInStairs(draft=0.3), "eagle3", 7), 0.2, 40, on_device=True)
    assert max(num for _, num in found[:4]) < 128 and all(num >= 256 for _, num in found[30:])


def test_rows_without_a_draft_that_were_not_asked_for_do_not_change_the_estimate() -> None:
    engine = Engine(CostsInStairs(draft=0.3), "eagle3", 7)
    run_head(engine, 0.2, 200)
    before = engine.acceptance.survival("eagle3", 7).mean(0)
    only = 3 * (np.arange(128) == 5)
    engine.plan(rows(128))
    drafts = drafts_of(np.full((128, 3), 0.5), only)
    drafts.caps = only.astype(np.int32)
    engine.commit(drafts, engine.select(drafts), 0)
    assert engine.acceptance.survival("eagle3", 7).mean(0) == pytest.approx(before, rel=0.02)


# ---- drafters on the device ----


def step_on_device(
    engine: Engine, drafted: np.ndarray, accepted: int, width: int = 0, version: int = 0
) -> tuple[np.ndarray, int]:
    """A step of rows whose drafts, drafted[i] tokens each, were made at the end of the step before, in arrays of
    `width` or more. Returns how many tokens are drafted for the next step, and how many were verified."""
    num_rows, batch = len(drafted), rows(len(drafted), version, on_device=True)
    batch.request_ids += 10_000 * version
    caps = engine.plan(batch)
    width = max(width, int(drafted.max(initial=0)))
    lengths = engine.policy.select(drafts_of(np.full((num_rows, width), 0.5), np.minimum(caps, drafted)))
    verified = drafts_of(np.full((num_rows, width), 0.5) * (drafted > 0)[:, None], drafted)
    verified.caps = np.where(drafted > 0, width, 0).astype(np.int32)
    engine.acceptance.rate(verified, engine.method)
    engine.commit(verified, lengths, accepted)
    return np.full(num_rows, caps.max()), int(lengths.sum())


def test_a_head_that_drafts_for_the_next_step_is_probed_too() -> None:
    engine = Engine(LinearCosts(token=0.5, draft=0.5), "eagle3")
    drafted, num_verified = np.zeros(2, int), {0: 0, K: 0}
    for accepted, num_steps in ((0, 500), (K, 4000)):
        for _ in range(num_steps):
            drafted, num = step_on_device(engine, drafted, accepted)
            num_verified[accepted] += num
    assert 0 < num_verified[0] < 100  # found out, and probed now and then
    assert drafted.tolist() == [K, K] and num_verified[K] > 1000


def test_a_head_that_would_not_pay_for_a_single_row_is_paused() -> None:
    """For longer and longer, but it is probed in between. New weights, and a new round of requests, end a pause."""
    engine, drafted, paused = Engine(LinearCosts(token=0.5, draft=0.5), "eagle3"), np.zeros(2, int), list[bool]()
    for _ in range(6000):
        drafted, num = step_on_device(engine, drafted, 0)
        assert not (paused and paused[-1] and num)
        paused.append(engine.policy.pauses_drafter)
    changes = np.flatnonzero(np.diff(paused))
    awake, pauses = np.diff(changes)[1::2], np.diff(changes)[::2]
    assert pauses.tolist()[:2] == [PAUSE_FACTOR * FIRST_PAUSE, 2 * PAUSE_FACTOR * FIRST_PAUSE]
    assert changes[0] >= MIN_AWAKE - 2 and awake.min() >= MIN_AWAKE and np.mean(paused) > 0.9
    policy, request = engine.policy, Request(0, (1,), SamplingParams(), 0)
    while policy.pauses_drafter:
        drafted, _ = step_on_device(engine, drafted, 0)
    while not policy.pauses_drafter:
        drafted, _ = step_on_device(engine, drafted, 0)
    policy.begin(request)
    assert policy.pauses_drafter, "a pause lasts for some steps"
    policy.end(0)
    policy.drafter_updated()
    policy.begin(request)
    assert not policy.pauses_drafter


@pytest.mark.parametrize("accepted", [2, K])
def test_a_head_that_pays_for_few_rows_is_not_paused(accepted: int) -> None:
    """With many rows it does not pay, and would have to read all their tokens again later."""
    engine, drafted = Engine(LinearCosts(token=0.5, draft=0.5), "eagle3"), np.zeros(2, int)
    for _ in range(200):  # its acceptance becomes known
        drafted, _ = step_on_device(engine, drafted, accepted)
    drafted = np.zeros(400, int)
    for _ in range(400):
        drafted, num = step_on_device(engine, drafted, accepted)
        assert not engine.policy.pauses_drafter
    assert num < 40


@pytest.mark.parametrize(("token", "least", "most"), [(0.001, 1.0, 1.0), (0.06, 0.3, 0.8), (4.0, 0.0, 0.0)])
def test_on_the_device_as_many_tokens_are_selected_as_if_the_host_knew_the_drafts(
    token: float, least: float, most: float
) -> None:
    """For rows with drafts. By the drafts themselves, that brings nearly as much as selecting them on the host, and no
    row gets more than it has. Tokens that bring next to nothing are left."""
    rng, num_rows, found, rates = np.random.default_rng(0), 64, list[np.ndarray](), list[float]()
    scores = np.where(rng.random((num_rows, K)) < 0.5, 0.95, 0.55)
    num = np.where(np.arange(num_rows) % 8, K, 0)
    for on_device in (True, False):
        engine = Engine(LinearCosts(token=token, draft=0.01), "eagle3")
        engine.calibrate()
        for _ in range(300):
            accepted = np.cumprod(rng.random((num_rows, K)) < scores, axis=1).sum(1).astype(np.int32)
            drafts = drafts_of(scores)
            engine.acceptance.rate(drafts, "eagle3")
            engine.acceptance.observe(drafts, "eagle3", None, accepted, np.minimum(accepted + 1, K))
        policy = engine.policy
        policy._credit_s = -1e9
        engine.plan(rows(num_rows, on_device=on_device))
        policy._step.draft_s, policy._step.is_probe = 0.04, False
        found.append(engine.select(drafts_of(scores, num)))
        reason, expected_s = policy.decision.reason, policy.decision.expected_s
        assert (found[-1] <= num).all() and reason.startswith(f"verifies {found[-1].sum()} of {num.sum()}")
        assert expected_s == pytest.approx(10.04 + token * found[-1].sum())
        survival = -np.sort(-np.cumprod(scores[num > 0], axis=1), axis=None)
        rates.append((num_rows + survival[: found[-1].sum()].sum()) / expected_s)
    assert least <= found[0].sum() / num.sum() <= most and rates[0] > 0.98 * rates[1]


@pytest.mark.parametrize("num_rows", [8, 64, 512])
def test_rows_that_come_from_their_prompts_do_not_count_against_a_head(num_rows: int) -> None:
    """Every rollout begins with rows that nothing can have been drafted for."""
    engine = Engine(LinearCosts(step=100.0, token=0.01, draft=20.0), "eagle3")
    for version in range(6):
        drafted, _ = step_on_device(engine, np.zeros(num_rows, int), K, K * (version % 2), version)
        assert version == 0 or engine.acceptance.survival("eagle3", 1).mean() > 0.75
        for _ in range(40):
            drafted, num = step_on_device(engine, drafted, K, 0, version)
            assert version == 0 or num == num_rows * K


def test_the_cost_table_observes_the_length_and_the_time_of_each_steps_own_drafts() -> None:
    """Other steps were planned meanwhile. On the device the time is what a step without drafts to verify takes longer
    than a plain one of 10 s; otherwise it is assumed to be as estimated."""
    costs = LinearCosts(token=0.1, draft=0.1)
    engine = Engine(costs, "eagle3")
    engine.plan(rows(2, on_device=True))
    first = engine.policy.decision
    engine.plan(rows(3, on_device=True))
    none = np.zeros(2, np.int32)
    commits = Commits(np.arange(2), np.zeros((2, 5), np.int32), none + 1, none, none)
    for num_drafted_on_device, k in ((0, K), (7, 7)):  # 7: a graph that drafts more than asked for
        engine.policy.observe(commits, trace_of(2, 12.5, 0, 0.0, num_drafted_on_device), first)
        assert costs.observed == (k, 2.5)
        engine.policy.observe(commits, trace_of(2, 20.0, 3, 0.0, num_drafted_on_device), first)
        assert costs.observed == (k, 2.5) and costs.observed_step_s == pytest.approx(20.0 - 0.1 * k)
    engine.plan(rows(2))  # on the host, where the time is measured
    engine.commit(drafts_of(np.zeros((2, 0))), none, 0, draft_s=3.0)
    assert costs.observed == (K, 3.0) and costs.observed_step_s == 7.0


# ---- history ----


def test_history_that_takes_too_long_drafts_only_in_probes() -> None:
    engine, drafts = Engine(LinearCosts(draft=2.0, token=0.1), "ngram"), drafts_of(np.full((2, K), 0.35))
    num_asked = 0
    for _ in range(2000):
        engine.step(rows(2), drafts, 0)
        num_asked += bool(engine.caps.any())
        assert engine.caps.any() or "would not pay" in engine.policy.decision.reason
    assert 2 <= num_asked <= 60


def test_history_that_was_useless_is_used_again() -> None:
    engine, was_asked = Engine(LinearCosts(draft=0.02, token=0.1), "ngram"), list[bool]()
    for step in range(4000):
        engine.step(rows(2), drafts_of(np.full((2, K), 0.35)), K if step > 2000 else 0)
        was_asked.append(bool(engine.caps.any()))
    assert 2 <= sum(was_asked[1000:2000]) < 100 and all(was_asked[3000:])


def test_history_is_not_given_up_at_once_while_it_is_short() -> None:
    """In the beginning few rows find a match. Later nearly all do."""
    engine = Engine(LinearCosts(draft=0.1, token=0.05), "ngram")
    engine.calibrate()
    for step in range(200):
        some = np.arange(16) < 1 if step < 10 else np.arange(16) < 14
        drafts = drafts_of(np.full((16, K), 0.9), np.where(some, 1 if step < 10 else K, 0))
        engine.step(rows(16), drafts, K)
        assert engine.caps.any(), step


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_history_is_tried_again_in_a_new_rollout(method: str) -> None:
    """It has the tokens of the one before. A head has not changed, so it is not tried again."""
    engine, was_asked = Engine(LinearCosts(draft=0.1, token=0.1), method), list[bool]()
    for rollout in range(3):
        for i in range(2):
            engine.policy.begin(Request(2 * rollout + i, (1,)))
        for _ in range(100):
            engine.policy._credit_s = -1e9  # no probes
            engine.step(rows(2), drafts_of(np.full((2, K), 0.5), np.zeros(2)), 0)
            was_asked.append(bool(engine.caps.any()))
        for i in range(2):
            engine.policy.end(2 * rollout + i)
    found = [sum(was_asked[start : start + 100]) for start in (0, 100, 200)]
    assert all(1 <= num <= 2 * MAX_AGE for num in (found if method == "ngram" else found[:1]))
    assert method == "ngram" or found[1:] == [0, 0]


def run_history(
    engine: Engine, num: int, num_steps: int, has_match: Callable[[int], bool], is_right: Callable[[int], bool]
) -> tuple[list[bool], list[int]]:
    """A draft is made at the end of a step, verified in the next, and its scores are known in the one after that. Steps
    overlap: one is planned before the outcome of the one before it is known. Returns for each step whether it drafted
    and how many tokens it verified."""
    policy, acceptance = engine.policy, engine.acceptance
    drafter, ids = DeviceHistoryDrafter(HistoryStore()), np.arange(num)
    found, in_flight = np.zeros((num, 0)), list[tuple[Any, ...]]()
    was_asked, num_verified = list[bool](), list[int]()
    for step in range(num_steps):
        batch = rows(num, on_device=True)
        caps = engine.plan(batch)
        drafter.set_draft_length(batch, caps)
        drafts = drafter.propose(batch, caps)
        lengths = policy.select(drafts)
        survival = found.cumprod(1) * (np.arange(found.shape[1]) < drafts.num[:, None])  # the device selects
        best = (-survival.ravel()).argsort(kind="stable")[: min(int(lengths.sum()), int((survival > 0).sum()))]
        selected = np.bincount(best // max(1, found.shape[1]), minlength=num).astype(np.int32)
        k, accepted = drafter.draft_length, selected if is_right(step) else 0 * selected
        found = np.full((num, k), 0.6 if has_match(step) else 0.0)
        drafter.launched(ids, k)
        policy.launched(policy.decision)
        in_flight.append((selected, accepted, found, policy.decision))
        was_asked.append(k > 0)
        num_verified.append(int(selected.sum()))
        if len(in_flight) > 1:
            selected, accepted, scores, decision = in_flight.pop(0)
            drafter.drafted(ids, scores, np.zeros(num))
            commits = Commits(ids, np.zeros((num, K + 1), np.int32), accepted + 1, selected, accepted)
            verified = drafter.verified(ids)
            if verified.scores.size and acceptance.needs_outcomes(engine.method):
                acceptance.rate(verified, engine.method)
                acceptance.observe(verified, engine.method, None, accepted, commits.num_known)
            trace = trace_of(num, 10.0, int(selected.sum()), num_drafted_on_device=scores.shape[1])
            policy.observe(commits, trace, decision)
    return was_asked, num_verified


@pytest.mark.parametrize("num", [1, 2, 16])
def test_history_on_the_device_is_given_up_and_used_again(num: int) -> None:
    def is_later(step: int) -> bool:
        return step > 2000

    engine = Engine(LinearCosts(draft=0.01, token=0.05), "suffix_on_device")
    was_asked, num_verified = run_history(engine, num, 3000, is_later, is_later)
    assert 2 <= sum(was_asked[1000:2000]) < 200 and not any(num_verified[:2000])
    assert all(was_asked[2700:]) and np.mean(num_verified[2700:]) > 0.9 * num * K


@pytest.mark.parametrize("num", [1, 8, 64])
def test_history_on_the_device_gets_a_trial_in_a_new_rollout(num: int) -> None:
    """The drafts of the first rollout were all rejected. Those of the next ones come from it, under the same policy
    version, so they are right. If they are not, the trial is short."""
    for is_right in (True, False):
        engine = Engine(LinearCosts(draft=0.01, token=0.8 / num), "suffix_on_device")
        found = list[int]()
        for rollout in range(3):
            engine.policy._credit_s = -1e9  # no probes
            engine.policy.begin(Request(rollout, (1,)))
            right = is_right and rollout > 0
            found.append(sum(run_history(engine, num, 100, lambda _: True, lambda _, right=right: right)[1]))
            engine.policy.end(rollout)
        assert 1 <= found[0] <= 2 * (MIN_OUTCOMES + num)
        if is_right:
            assert min(found[1:]) > 0.7 * 100 * num * K
        else:
            assert 1 <= min(found[1:]) <= max(found[1:]) <= MIN_OUTCOMES + num


# ---- wrong cost tables ----


def speed(
    table_plain_s: float, table_draft_s: float, chance: float, on_device: bool, plain_s: float = 2.5e-3,
    draft_s: float = 0.3e-3, k: int = 3, double: int = 128,
) -> float:  # fmt: skip
    """Tokens per second relative to plain decoding, over 1500 steps of a head whose tokens are right with this chance.
    `double` tokens more truly double the time of a step, and draft_s is the time of drafting a token. The table has
    other times of a step without drafts and of drafting."""
    rng, num_rows, token_s = np.random.default_rng(0), 64, plain_s / double
    points = [
        Point(
            num_rows,
            num_rows * (1 + q),
            num_rows * (64 + q),
            (q * num_rows * token_s + plain_s) if q else table_plain_s,
        )
        for q in range(k + 1)
    ]
    costs = CostTable("wrong", points, {"eagle3": [(num_rows, n, n * table_draft_s) for n in (1, k)]})
    engine: Any = Engine(costs, "eagle3", k)  # type: ignore[arg-type]
    drafted, emitted, seconds = 0, 0, 0.0
    ids = np.arange(num_rows)
    for _ in range(1500):
        batch = rows(num_rows, on_device=on_device)
        batch.load = Load(num_rows, num_rows, 64 * num_rows)
        caps = engine.plan(batch)
        drafts = drafts_of(np.full((num_rows, k), chance), np.minimum(caps, drafted if on_device else k))
        engine.acceptance.rate(drafts, "eagle3")
        drafts.caps = drafts.num.copy()
        lengths = engine.policy.select(drafts) if caps.any() else caps
        accepted = np.cumprod(rng.random((num_rows, k)) < chance, axis=1).sum(1)
        accepted = np.minimum(accepted, lengths).astype(np.int32)
        decision, num = engine.policy.decision, int(lengths.sum())
        engine.policy.launched(decision)
        drafting_s = int(caps.max()) * draft_s
        total_s = (plain_s + num * token_s + drafting_s) * (1 + 0.02 * rng.random())
        commits = Commits(ids, np.zeros((num_rows, k + 1), np.int32), accepted + 1, lengths, accepted)
        if drafts.num.any():
            engine.acceptance.observe(drafts, "eagle3", None, accepted, commits.num_known)
        draft_lengths = int(caps.max()) * on_device
        trace = trace_of(num_rows, total_s, num, 0.0 if on_device else drafting_s, draft_lengths)
        engine.policy.observe(commits, trace, decision)
        drafted, emitted, seconds = int(caps.max()), emitted + num_rows + int(accepted.sum()), seconds + total_s
    return emitted / seconds / (num_rows / plain_s / 1.01)


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("table_plain_s", [2.5e-3, 8e-3])
def test_a_wrong_cost_table_does_not_make_it_slower(table_plain_s: float, on_device: bool) -> None:
    """With few right tokens, drafts do not pay; with many they do."""
    assert speed(table_plain_s, 0.03e-3, 0.4, on_device) > 0.98
    assert speed(table_plain_s, 0.03e-3, 0.95, on_device) > 1.25


def test_a_head_whose_drafts_take_longer_than_in_the_table_is_not_given_up() -> None:
    """What its drafts take is not measured apart from the steps, and is counted once."""

    def found(table_draft_s: float) -> float:
        return speed(1e-3, table_draft_s, 0.8, True, plain_s=1e-3, draft_s=0.4e-3, k=7, double=1024)

    right = found(0.4e-3)
    assert right > 1.2 and found(0.02e-3) > 0.95 * right
