"""The policy `das`: which rows get drafts, how outcomes change that, and that tokens stay the same."""

from __future__ import annotations

import numpy as np
import pytest
from scripts import load_script
from support import tiny_decoder

from paceline.drafters.ngram import NgramDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.paged import PagedDecoder
from paceline.speculation import budgets, das
from paceline.speculation.acceptance import NUM_RECENT, AcceptanceModel
from paceline.speculation.batch import Commits, Load, Rows
from paceline.speculation.cost import CostTable, Point
from paceline.speculation.das import DasPolicy
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams, StepTrace

K = 6
PRIOR = 0.65  # probability of a draft token before any outcome


def table(token_s: float = 0.01, free: int = 0, head_s: float = 0.0) -> CostTable:
    """A plain step takes a second, a further token token_s, the first `free` ones nothing."""
    points = [
        Point(rows, rows + extra, 10_000, 1 + token_s * max(0, extra - free))
        for rows in (1, 512)
        for extra in sorted({0, free, free + 1, 4096})
    ]
    drafts = {"head": [(1, 1, head_s), (1, K, K * head_s), (512, 1, head_s), (512, K, K * head_s)]}
    return CostTable("test", points, drafts, frozen=True)


def rows(
    left: list[float], version: int = 0, acceptance: AcceptanceModel | None = None, drafter: str = "suffix"
) -> Rows:
    num = len(left)
    return Rows(
        np.arange(num),
        [np.zeros(1, np.int32)] * num,
        np.zeros(num, np.uint64),
        [SamplingParams()] * num,
        version,
        Load(num, num, 10_000),
        drafter,
        acceptance or AcceptanceModel(),
        np.array(left, np.float64),
    )


def policy(costs: CostTable | None = None, num: int = 64, **options: object) -> DasPolicy:
    made = DasPolicy(costs or table(), K, **options)  # type: ignore[arg-type]
    for i in range(num):
        made.begin(Request(i, (1,)))
    return made


def trace(commits: Commits) -> StepTrace:
    num, num_draft_tokens = len(commits.num), int(commits.num_drafted.sum())
    return StepTrace(
        step=0, start_s=0, num_rows=num, num_query_tokens=num + num_draft_tokens, num_context_tokens=0,
        num_emitted=int(commits.num.sum()), num_drafts=0, num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=int(commits.num_accepted.sum()), accepted_per_position=(), drafted_per_position=(),
        num_preempted=0, num_free_blocks=0, draft_s=0, forward_s=0, sample_s=0, total_s=0, version=0,
        drafter_version=0, drafter="suffix",
    )  # fmt: skip


def launched(made: DasPolicy, view: Rows) -> np.ndarray:
    """The caps of a step that is planned and launched."""
    view.acceptance.set_version(view.version)
    caps = made.plan(view)
    made.launched(made.decision)
    return caps


def step(made: DasPolicy, view: Rows, accepted: int | np.ndarray, drafted: int = K) -> np.ndarray:
    """One step in which drafts have up to `drafted` tokens, and the first `accepted` of these are accepted."""
    caps = launched(made, view)
    num, width = len(view), int(caps.max())
    num_drafted = np.minimum(caps, drafted).astype(np.int32)
    num_accepted = np.minimum(num_drafted, accepted).astype(np.int32)
    commits = Commits(view.request_ids, np.zeros((num, K + 1), np.int32), num_accepted + 1, num_drafted, num_accepted)
    drafts = DraftBatch(
        np.zeros((num, width), np.int32), num_drafted, np.full((num, width), 0.6, np.float32), caps=caps
    )
    view.acceptance.rate(drafts, view.drafter)
    view.acceptance.observe(drafts, view.drafter, None, num_accepted, commits.num_known)
    made.observe(commits, trace(commits), made.decision)
    return caps


def caps_of(made: DasPolicy, view: Rows, num: int = 160) -> np.ndarray:
    """Mean caps of many steps."""
    return np.mean([launched(made, view) for _ in range(num)], 0)


# ---- a plan that is discarded ----


def test_a_discarded_plan_changes_no_later_one() -> None:
    once, often = policy(table(0.05)), policy(table(0.05))
    view, other = rows([900, 700, 600, 40, 5]), rows([900, 700])
    for _ in range(40):
        for _ in range(3):
            often.plan(other)
            often.plan(view)
        assert launched(once, view).tolist() == launched(often, view).tolist()


def test_carried_fractions_keep_the_mean_within_the_budget() -> None:
    """A budget of two tokens for three rows that want six, six and three: in proportion, and all of it is used."""
    made, view = policy(table(0.0)), rows([900, 900, 900])
    view.draft_budget, view.draft_limits = 2, np.array([100, 100, 3], np.int32)
    found = np.array([launched(made, view) for _ in range(300)])
    assert found.sum(1).max() == 2 and found.sum(1).mean() > 1.9
    np.testing.assert_allclose(found.mean(0), [0.8, 0.8, 0.4], atol=0.05)


def test_less_than_one_token_is_carried_over_from_a_step_with_a_small_budget() -> None:
    made, rng, view = policy(table(0.0)), np.random.default_rng(0), rows([900] * 8)
    for _ in range(400):
        view.draft_budget = int(rng.choice([0, 1, 2, 5, 9, 17, 1000]))
        caps = launched(made, view)
        assert caps.max() <= K and caps.sum() <= view.draft_budget and made._carried.max() < 1


# ---- budgets ----


def test_longer_rows_get_more_and_short_ones_nothing() -> None:
    caps = caps_of(policy(table(0.05)), rows([900, 700, 600, 40, 5]))
    assert caps[0] > caps[1] > caps[2] > caps[3] == caps[4] == 0


def test_the_mean_caps_are_the_solvers_budgets() -> None:
    made, left = policy(table(0.1)), [800.0, 500.0, 90.0]
    caps = caps_of(made, rows(left))
    survival = PRIOR ** np.arange(1, K + 1)
    alpha, k = das.fit(survival[None], np.ones((1, K)))
    found = budgets.solve(left, alpha[0], k[0], 1.0, 0.1)
    np.testing.assert_allclose(caps, found.budgets / found.num_steps, atol=0.01)
    other = caps_of(policy(table(0.1), solve=load_script("history/printed_budgets.py").printed), rows(left))
    assert np.abs(other - caps).max() > 0.1


def test_nothing_is_drafted_if_a_token_costs_more_than_it_saves() -> None:
    made = policy(table(1.0))
    assert not caps_of(made, rows([900, 300])).any()
    assert made.decision.expected_accepted == 0 and made.decision.expected_s == pytest.approx(1)
    assert "0 for 0 of 2 rows" in made.decision.reason


def test_all_rows_draft_as_much_as_allowed_if_tokens_are_free() -> None:
    made = policy(table(0.0))
    assert caps_of(made, rows([900, 900])).tolist() == [K, K]
    assert (policy(table(1e-12)).plan(rows([1e6, 1e6])) <= K).all()
    assert launched(made, rows([900, 900])).dtype == np.int32


def test_the_cost_per_token_is_that_of_the_tokens_used() -> None:
    """The first 12 tokens of a step are free, the others very expensive: so one long row among 40 gets all it can use.
    With the mean cost of all tokens that might be drafted it would get nothing."""
    left = [1000.0] + [400.0] * 39
    assert caps_of(policy(table(0.5, free=12)), rows(left))[0] > 3
    assert not caps_of(policy(table(0.5)), rows(left))[1:].any()


def test_no_row_ends_before_the_longest_can() -> None:
    """With tokens that are next to free, full drafts reduce the longest row to some steps. The other rows get what
    reduces them to as many, and no more."""
    left = np.array([900.0, 700.0, 600.0])
    made = policy(table(1e-6))
    caps = caps_of(made, rows(left.tolist()))
    survival = PRIOR ** np.arange(1, K + 1)
    least = 900 / (1 + survival.sum())
    assert caps[0] == pytest.approx(K, abs=0.01) and f"{least:.0f} steps left instead of 900" in made.decision.reason
    alpha, k = das.fit(survival[None], np.ones((1, K)))
    num_left = left - budgets.accepted(left, alpha[0], k[0], caps * least)
    np.testing.assert_allclose(num_left, least, rtol=0.01)


def test_a_drafters_own_time_counts() -> None:
    cheap, slow = policy(table(0.02)), policy(table(0.02, head_s=1.0))
    view = rows([500, 100], drafter="head")
    assert caps_of(cheap, view)[0] > 2 and not caps_of(slow, view).any()


def test_rows_do_not_all_draft_in_the_same_step() -> None:
    """With half a token each per step, about half of the rows draft at each."""
    made = policy(table(0.03), num=40)
    launched(made, rows([500] * 40))
    made._lengths[:] = 0.5
    sums = [launched(made, rows([500] * 40)).sum() for _ in range(das.SOLVE_EVERY - 2)]
    assert 17 <= min(sums) <= max(sums) <= 23


# ---- outcomes ----


def test_good_drafts_get_more_and_useless_ones_nothing() -> None:
    good, bad, empty, new = (policy(table(0.2)) for _ in range(4))
    views = [rows([600, 500, 80, 10]) for _ in range(4)]
    before = caps_of(new, views[3])[0]
    for _ in range(150):
        step(good, views[0], accepted=K)
        step(bad, views[1], accepted=0)
        step(empty, views[2], accepted=0, drafted=0)
    assert caps_of(good, views[0])[0] > 1.5 * before
    assert not caps_of(bad, views[1]).any()
    # If nothing is drafted, nothing is verified and nothing is rejected: asking for more costs nothing.
    assert caps_of(empty, views[2])[0] > 2 * before
    assert empty.decision.expected_accepted < 0.5 and empty.decision.expected_s < 1.1


def test_the_expected_acceptance_is_that_of_the_latest_drafts() -> None:
    made, view = policy(table(0.0)), rows([600])
    scores = np.tile([0.91, 0.55, 0.15], (NUM_RECENT, 1))
    num = np.where(np.arange(NUM_RECENT) % 2, 3, 1).astype(np.int32)  # every other draft has one token only
    drafts = DraftBatch(np.zeros((NUM_RECENT, 3), np.int32), num, scores.astype(np.float32), caps=0 * num + 3)
    view.acceptance.rate(drafts, "suffix")
    view.acceptance.observe(drafts, "suffix", None, 0 * num, 0 * num)
    survival, drafted = made._acceptance(view, made._indices_of(view.request_ids))
    np.testing.assert_allclose(drafted[0], [1, *[0.5] * (K - 1)])
    # Positions that were never asked for have the score before them.
    expected = np.array([0.91, *(0.5 * 0.91 * 0.55 * 0.15 ** np.arange(K - 1))])
    np.testing.assert_allclose(survival[0], np.maximum(expected, das.MIN_ACCEPTED * drafted[0]))


def test_a_draft_that_ended_with_its_sequence_was_not_rejected() -> None:
    made, view = policy(), rows([600, 500])
    caps = launched(made, view)
    accepted = np.array([1, 1], np.int32)
    commits = Commits(view.request_ids, np.zeros((2, K + 1), np.int32), np.array([1, 2], np.int32), caps, accepted)
    made.observe(commits, trace(commits), made.decision)
    assert (caps > 1).all()
    # The last token of the first row was a draft token, so its next one was not rejected.
    assert made._outcomes[made._indices_of(view.request_ids)].tolist() == [[1, 1], [1, 2]]


def test_a_request_is_estimated_by_its_own_drafts() -> None:
    """Two rows of one length: the drafts of the first are accepted, those of the second are not."""
    made, view = policy(table(0.02)), rows([600, 600])
    for _ in range(60):
        step(made, view, accepted=np.array([K, 0]))
    expected = made._survival[made._indices_of(view.request_ids)].sum(1)
    assert expected[0] > 2 * expected[1]
    made.end(0)
    made.begin(Request(0, (1,)))
    for _ in range(das.SOLVE_EVERY):
        launched(made, view)
    assert made._survival[made._indices[0]].sum() < expected[0], "a new request has no outcomes"


def test_requests_that_do_alike_have_the_estimate_of_all() -> None:
    """Their own outcomes then say nothing new."""
    made, view, rng = policy(table(0.02)), rows([600] * 4), np.random.default_rng(0)
    for _ in range(200):
        step(made, view, accepted=(rng.random((4, K)) < 0.7).cumprod(1).sum(1))
    survival, _ = made._acceptance(view, made._indices_of(view.request_ids))
    of_all = view.acceptance.survival("suffix", K).mean(0)
    np.testing.assert_allclose(survival[:, 0], of_all[0], rtol=0.1)
    np.testing.assert_allclose(survival.mean(0), of_all, rtol=0.15)


def test_a_rejected_drafter_is_tried_again_after_new_policy_versions() -> None:
    acceptance = AcceptanceModel()
    made, left = policy(table(0.2)), [600.0, 500.0, 80.0, 10.0]
    for _ in range(150):
        step(made, rows(left, 0, acceptance), accepted=0)
    assert not launched(made, rows(left, 0, acceptance)).any()
    counted = made._outcomes.sum()
    launched(made, rows(left, 1, acceptance))
    assert made._outcomes.sum() == pytest.approx(counted * das.KEPT_BY_NEW_VERSION)
    for version in range(2, 12):
        launched(made, rows(left, version, acceptance))
    assert launched(made, rows(left, 12, acceptance)).any()


def test_the_fit_meets_the_first_token_and_the_whole_draft() -> None:
    survival = np.array([0.5, 0.7])[:, None] ** np.arange(1, 9)
    drafted = np.stack([np.ones(8), np.linspace(0.9, 0.8, 8)])
    survival[1] *= drafted[1]
    alpha, k = das.fit(survival, drafted)
    np.testing.assert_allclose(alpha * k, survival[:, 0] / drafted[:, 0])
    accepted, verified = survival.sum(1), drafted.sum(1)
    expected = accepted / (1 + accepted)
    np.testing.assert_allclose(k * (1 - np.exp(-alpha * verified / (1 + accepted))), expected, rtol=1e-6)
    alpha, k = das.fit(np.ones((1, 8)), np.ones((1, 8)))  # all are accepted: the steepest curve that the model has
    assert (alpha[0], k[0]) == (1, 1)
    alpha, k = das.fit(np.full((1, 8), 1e-9), np.ones((1, 8)))
    assert np.isfinite([alpha, k]).all()


def test_draft_lengths_are_those_with_the_wanted_number_of_tokens() -> None:
    drafted = np.array([[1, 1, 1], [0.5, 0.25, 0.25], [1, 1, 1], [0.5, 0.25, 0.25]])
    assert das._draft_lengths(np.array([1.5, 0.625, 0, 1.0]), drafted).tolist() == [1.5, 1.5, 0, 3]


# ---- the protocol of policies ----


def test_the_same_inputs_give_the_same_caps() -> None:
    def run() -> list[list[int]]:
        made, rng, acceptance = policy(table(0.03)), np.random.default_rng(0), AcceptanceModel()
        views = [rows(rng.uniform(1, 900, 9).tolist(), 0, acceptance) for _ in range(80)]
        return [step(made, view, int(rng.integers(K))).tolist() for view in views]

    assert run() == run()


def test_budgets_are_computed_when_rows_change_and_every_few_steps() -> None:
    solved: list[int] = []

    def counting(lengths, alpha, k, c_base, c_tok):  # type: ignore[no-untyped-def]
        solved.append(len(lengths))
        return budgets.solve(lengths, alpha, k, c_base, c_tok)

    made = policy(table(0.1), solve=counting)
    for _ in range(das.SOLVE_EVERY):
        launched(made, rows([90.0, 50.0]))
    assert solved == [2]
    launched(made, rows([90.0, 50.0]))
    assert solved == [2, 2]
    for _ in range(das.SOLVE_CHANGED):
        launched(made, rows([90.0, 50.0, 300.0]))
    assert solved == [2, 2, 3]


def test_select_reads_no_drafts() -> None:
    class OnlyLengths:
        num = np.array([2, 0], np.int32)

        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"it read {name}")

    made = policy()
    drafts: DraftBatch = OnlyLengths()  # type: ignore[assignment]
    assert made.select(drafts).tolist() == [2, 0] and not made.reads_drafts


def test_it_keeps_no_state_and_refuses_another_policys() -> None:
    """What it learns is in the acceptance model and the cost table; a checkpoint has no running requests."""
    made, view = policy(table(0.2)), rows([600, 500, 80, 10])
    for _ in range(30):
        step(made, view, accepted=K)
    assert made.state_dict() == {}
    again, fresh, restored = policy(table(0.2)), policy(table(0.2)), AcceptanceModel()
    again.load_state_dict({})
    restored.load_state_dict(view.acceptance.state_dict())
    left = view.expected_left.tolist()
    assert caps_of(again, rows(left, 0, restored))[0] > caps_of(fresh, rows(left))[0]
    with pytest.raises(ValueError, match="not a state of the das policy"):
        fresh.load_state_dict({"counts": np.zeros((3, K))})


def test_no_tokens_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"speculation\.num_speculative_tokens = 0"):
        DasPolicy(table(), 0)


# ---- in an engine ----


def requests() -> list[Request]:
    rng = np.random.default_rng(4)
    return [
        Request(
            i,
            tuple(rng.integers(0, 4, 12).tolist()),
            SamplingParams(temperature=0.0 if i % 2 else 0.7, max_tokens=6 + 12 * (i % 5)),
            7 * i,
            "p",
        )
        for i in range(10)
    ]


def generate(policy: DasPolicy | StaticPolicy, rule: str = "coupled") -> tuple[list[list[int]], list[StepTrace]]:
    engine = LocalEngine(
        PagedDecoder(tiny_decoder(), 64), drafter=NgramDrafter(1, 3), policy=policy, rule=rule, max_num_seqs=6
    )
    found = engine.generate(requests())
    return [c.token_ids.tolist() for c in found], engine.drain_trace()


def test_tokens_are_those_of_plain_decoding() -> None:
    plain, _ = generate(StaticPolicy(0))
    made = DasPolicy(table(0.01), K)
    drafted, traces = generate(made)
    assert drafted == plain
    assert sum(t.num_draft_tokens for t in traces) > 20 and sum(t.num_accepted_tokens for t in traces) > 0
    assert {t.policy for t in traces} == {"das"}
    assert any("steps left instead of" in t.reason for t in traces) and all(t.expected_s > 0 for t in traces)
    assert not made._indices and len(made._free) == len(made._lengths), "every request has ended"


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_it_may_be_used_with_every_rule(rule: str) -> None:
    drafted, traces = generate(DasPolicy(table(0.01), K), rule)
    assert all(drafted) and sum(t.num_draft_tokens for t in traces) > 20
    with pytest.raises(ValueError, match=r"speculation\.rule"):
        generate(StaticPolicy(3, min_confidence=0.1), rule)
