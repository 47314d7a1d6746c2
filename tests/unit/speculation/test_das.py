"""Length-aware budgets: who gets drafts, what is learned of them, and that tokens stay the same."""

from __future__ import annotations

import numpy as np
import pytest
from support import tiny_decoder

from paceline.drafters.ngram import NgramDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.paged import PagedDecoder
from paceline.speculation import budgets, das
from paceline.speculation.batch import Commits, DraftBatch, Load, Rows
from paceline.speculation.cost import CostTable, Point
from paceline.speculation.das import DasPolicy
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams, StepTrace

K = 6


def table(token_s: float = 0.01, free: int = 0, head_s: float = 0.0) -> CostTable:
    """A plain step takes a second, a further token token_s, the first `free` ones nothing."""
    points = [
        Point(rows, rows + extra, 10_000, 1 + token_s * max(0, extra - free))
        for rows in (1, 512)
        for extra in sorted({0, free, free + 1, 4096})
    ]
    drafts = {"head": [(1, 1, head_s), (1, K, K * head_s), (512, 1, head_s), (512, K, K * head_s)]}
    return CostTable("test", points, drafts, frozen=True)


def rows(left: list[float], first: int = 0, version: int = 0) -> Rows:
    num = len(left)
    return Rows(
        np.arange(first, first + num),
        [np.zeros(1, np.int32)] * num,
        np.zeros(num, np.uint64),
        [SamplingParams()] * num,
        version,
        Load(num, num, 10_000),
        np.array(left, np.float64),
    )


def policy(costs: CostTable | None = None, num: int = 64, **options: object) -> DasPolicy:
    made = DasPolicy(costs or table(), K, **options)  # type: ignore[arg-type]
    for i in range(num):
        made.begin(Request(i, (1,)))
    return made


def trace(commits: Commits, drafter: str = "suffix") -> StepTrace:
    num, num_draft_tokens = len(commits.num), int(commits.num_drafted.sum())
    return StepTrace(
        step=0, start_s=0, num_rows=num, num_query_tokens=num + num_draft_tokens, num_context_tokens=0,
        num_emitted=int(commits.num.sum()), num_drafts=0, num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=int(commits.num_accepted.sum()), accepted_per_position=(), drafted_per_position=(),
        num_preempted=0, num_free_blocks=0, draft_s=0, forward_s=0, sample_s=0, total_s=0, version=0,
        drafter_version=0, drafter=drafter,
    )  # fmt: skip


def launched(made: DasPolicy, view: Rows) -> np.ndarray:
    """The caps of a step that is planned and launched."""
    caps = made.plan(view)
    made.commit(made.decision)
    return caps


def step(made: DasPolicy, view: Rows, stands: int, drafts: int = K, drafter: str = "suffix") -> np.ndarray:
    """One step in which the first `stands` positions stand, of drafts of `drafts` tokens."""
    caps = launched(made, view)
    num_drafted = np.minimum(caps, drafts).astype(np.int32)
    num_accepted = np.minimum(num_drafted, stands)
    num = len(view)
    commits = Commits(view.request_ids, np.zeros((num, K + 1), np.int32), num_accepted + 1, num_drafted, num_accepted)
    made.observe(commits, trace(commits, drafter), made.decision)
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


def test_carried_parts_keep_the_mean_within_the_budget() -> None:
    """Room for two tokens, and three rows that want six, six and three: shared out in proportion, none of it lost."""
    made, view = policy(table(0.0)), rows([900, 900, 900])
    view.draft_budget, view.draft_limits = 2, np.array([100, 100, 3], np.int32)
    found = np.array([launched(made, view) for _ in range(300)])
    assert found.sum(1).max() == 2 and found.sum(1).mean() > 1.9
    np.testing.assert_allclose(found.mean(0), [0.8, 0.8, 0.4], atol=0.05)


def test_no_draft_is_longer_than_was_asked_for_after_a_step_with_little_room() -> None:
    """What a tight step leaves over is carried, but never more than a part of a token."""
    made, dice, view = policy(table(0.0)), np.random.default_rng(0), rows([900] * 8)
    for _ in range(400):
        view.draft_budget = int(dice.choice([0, 1, 2, 5, 9, 17, 1000]))
        caps = launched(made, view)
        assert caps.max() <= K and caps.sum() <= view.draft_budget and made._carried.max() < 1


# ---- who gets what ----


def test_longer_rows_get_more_and_short_ones_nothing() -> None:
    caps = caps_of(policy(table(0.05)), rows([900, 700, 600, 40, 5]))
    assert caps[0] > caps[1] > caps[2] > caps[3] == caps[4] == 0


def test_the_budgets_are_the_solvers() -> None:
    made, left = policy(table(0.1)), [800.0, 500.0, 90.0]
    caps = caps_of(made, rows(left))
    standing = das.PRIOR ** np.arange(1, K + 1)
    alpha, k = das.fit(standing[None], np.ones((1, K)))
    found = budgets.solve(left, alpha[0], k[0], 1.0, 0.1)
    np.testing.assert_allclose(caps, found.budgets / found.num_steps, atol=0.01)
    other = caps_of(policy(table(0.1), solve=budgets.printed), rows(left))
    assert np.abs(other - caps).max() > 0.1


def test_nothing_where_a_token_costs_more_than_it_saves() -> None:
    made = policy(table(1.0))
    assert not caps_of(made, rows([900, 300])).any()
    assert made.decision.expected_accepted == 0 and made.decision.expected_s == pytest.approx(1)
    assert "0 for 0 of 2 rows" in made.decision.reason


def test_everything_where_tokens_are_free_and_never_more() -> None:
    made = policy(table(0.0))
    assert caps_of(made, rows([900, 900])).tolist() == [K, K]
    assert (policy(table(1e-12)).plan(rows([1e6, 1e6])) <= K).all()
    assert launched(made, rows([900, 900])).dtype == np.int32


def test_the_price_is_that_of_the_tokens_used() -> None:
    """The first 12 tokens of a step are free, the others very dear: so one long row among 40 gets all it can use, which
    a price averaged over all that might be drafted would deny it."""
    left = [1000.0] + [400.0] * 39
    assert caps_of(policy(table(0.5, free=12)), rows(left))[0] > 3
    assert not caps_of(policy(table(0.5)), rows(left))[1:].any()


def test_nobody_hurries_where_the_longest_cannot() -> None:
    """Full drafts get the longest row down to some steps; with tokens next to free, the others get what brings them
    there too, and no more."""
    left = np.array([900.0, 700.0, 600.0])
    made = policy(table(1e-6))
    caps = caps_of(made, rows(left.tolist()))
    standing = das.PRIOR ** np.arange(1, K + 1)
    least = 900 / (1 + standing.sum())
    assert caps[0] == pytest.approx(K, abs=0.01) and f"{least:.0f} steps to go instead of 900" in made.decision.reason
    alpha, k = das.fit(standing[None], np.ones((1, K)))
    num_left = left - budgets.accepted(left, alpha[0], k[0], caps * least)
    np.testing.assert_allclose(num_left, least, rtol=0.01)


def test_a_drafters_own_time_counts() -> None:
    cheap, dear = policy(table(0.02)), policy(table(0.02, head_s=1.0))
    view = rows([500, 100])
    for made in (cheap, dear):
        step(made, view, stands=2, drafter="head")
        for _ in range(das.EVERY):
            launched(made, view)
    assert caps_of(cheap, view)[0] > 2 and not caps_of(dear, view).any()


def test_rows_do_not_all_draft_in_the_same_step() -> None:
    """With half a token each per step, about half of the rows draft at each."""
    made = policy(table(0.03), num=40)
    launched(made, rows([500] * 40))
    made._depths[:] = 0.5
    sums = [launched(made, rows([500] * 40)).sum() for _ in range(das.EVERY - 2)]
    assert 17 <= min(sums) <= max(sums) <= 23


# ---- what is learned ----


def test_good_drafts_earn_more_and_useless_ones_nothing() -> None:
    view = rows([600, 500, 80, 10])
    before = caps_of(policy(table(0.2)), view)[0]
    good, bad, empty = (policy(table(0.2)) for _ in range(3))
    for _ in range(150):
        step(good, view, stands=K)
        step(bad, view, stands=0)
        step(empty, view, stands=0, drafts=0)
    assert caps_of(good, view)[0] > 1.5 * before
    assert not caps_of(bad, view).any()
    # Nothing was drafted, so nothing was wrong. Asking costs nothing, and what a step would take is known.
    assert caps_of(empty, view)[0] > 2 * before
    assert empty.decision.expected_accepted < 0.5 and empty.decision.expected_s < 1.1


def test_positions_never_tried_are_judged_by_those_that_were() -> None:
    counts = np.zeros((3, 3))
    assert das.chance(counts) == das.PRIOR
    counts[:, 0] = 1e6, 8e5, 6e5  # offered, drafted, stood
    assert das.chance(counts) == pytest.approx(0.75, rel=1e-3)
    found = das.shares(counts, np.array([[0.75] * 3, [1.0] * 3]), 16.0)
    np.testing.assert_allclose(found, [[0.6, 0.45, 0.3375], [0.8, 0.8, 0.8]], rtol=1e-3)
    counts[:, 1] = 1e6, 1e5, 5e4  # of the second position now its own outcomes
    np.testing.assert_allclose(das.shares(counts, np.ones((2, 3)), 16.0)[:, 1], [0.05, 0.1], rtol=1e-3)
    counts[:, 2] = 1e3, 1e3, 1e3  # offered where drafts are better: still no more than the second has
    np.testing.assert_allclose(das.shares(counts, np.ones((2, 3)), 16.0)[:, 2], [0.05, 0.1], rtol=1e-3)


def test_a_draft_that_the_end_cut_short_was_not_wrong() -> None:
    made, view = policy(), rows([600, 500])
    caps = launched(made, view)
    accepted = np.array([1, 1], np.int32)
    commits = Commits(view.request_ids, np.zeros((2, K + 1), np.int32), np.array([1, 2], np.int32), caps, accepted)
    made.observe(commits, trace(commits), made.decision)
    assert (caps > 1).all() and made.counts[das.ACCEPTED, 0] == 1, "the first row's last token was a drafted one"
    assert made.counts[das.DRAFTED].sum() == caps[1]


def test_a_request_is_known_by_its_own_drafts() -> None:
    """Two rows of one length: the drafts of the first stand, those of the second do not."""
    made, view = policy(table(0.02)), rows([600, 600])
    for _ in range(60):
        step(made, view, stands=np.array([K, 0]))  # type: ignore[arg-type]
    expected = made._standing[made._slots_of(view.request_ids)].sum(1)
    assert expected[0] > 2 * expected[1]
    made.end(0)
    made.begin(Request(0, (1,)))
    for _ in range(das.EVERY):
        launched(made, view)
    assert made._standing[made._slots[0]].sum() < expected[0], "a new request has no past"


def test_a_new_policy_version_fades_what_was_learned() -> None:
    made, view = policy(table(0.2)), rows([600, 500, 80, 10])
    for _ in range(150):
        step(made, view, stands=0)
    assert not launched(made, view).any()
    counted = made.counts.sum()
    launched(made, rows([600, 500, 80, 10], version=1))
    assert made.counts.sum() == pytest.approx(counted * das.FADE)
    for version in range(2, 12):
        launched(made, rows([600, 500, 80, 10], version=version))
    assert launched(made, rows([600, 500, 80, 10], version=12)).any(), "it tries again in the end"


def test_the_fit_meets_the_first_token_and_the_whole_draft() -> None:
    standing = np.array([0.5, 0.7]) [:, None] ** np.arange(1, 9)  # fmt: skip
    filled = np.stack([np.ones(8), np.linspace(0.9, 0.8, 8)])
    standing[1] *= filled[1]
    alpha, k = das.fit(standing, filled)
    np.testing.assert_allclose(alpha * k, standing[:, 0] / filled[:, 0])
    brings, takes = standing.sum(1), filled.sum(1)
    np.testing.assert_allclose(k * (1 - np.exp(-alpha * takes / (1 + brings))), brings / (1 + brings), rtol=1e-6)
    alpha, k = das.fit(np.ones((1, 8)), np.ones((1, 8)))  # all stand: the steepest that the model has
    assert (alpha[0], k[0]) == (1, 1)
    alpha, k = das.fit(np.full((1, 8), 1e-9), np.ones((1, 8)))
    assert np.isfinite([alpha, k]).all()


def test_depths_are_what_fills_the_rate() -> None:
    filled = np.array([[1, 1, 1], [0.5, 0.25, 0.25], [1, 1, 1], [0.5, 0.25, 0.25]])
    assert das._depths(np.array([1.5, 0.625, 0, 1.0]), filled).tolist() == [1.5, 1.5, 0, 3]


# ---- a policy among policies ----


def test_the_same_inputs_give_the_same_caps() -> None:
    def run() -> list[list[int]]:
        made, rng = policy(table(0.03)), np.random.default_rng(0)
        return [step(made, rows(rng.uniform(1, 900, 9).tolist()), int(rng.integers(K))).tolist() for _ in range(80)]

    assert run() == run()


def test_it_solves_when_rows_change_and_now_and_then() -> None:
    solved: list[int] = []

    def counting(lengths, alpha, k, c_base, c_tok):  # type: ignore[no-untyped-def]
        solved.append(len(lengths))
        return budgets.solve(lengths, alpha, k, c_base, c_tok)

    made = policy(table(0.1), solve=counting)
    for _ in range(das.EVERY):
        launched(made, rows([90.0, 50.0]))
    assert solved == [2]
    launched(made, rows([90.0, 50.0]))
    assert solved == [2, 2]
    for _ in range(das.CHANGED):
        launched(made, rows([90.0, 50.0, 300.0]))
    assert solved == [2, 2, 3]


def test_select_looks_at_nothing() -> None:
    class Blind:
        num = np.array([2, 0], np.int32)

        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"it read {name}")

    made = policy()
    drafts: DraftBatch = Blind()  # type: ignore[assignment]
    assert made.select(drafts).tolist() == [2, 0] and not made.reads_drafts


def test_state_comes_back() -> None:
    made, view = policy(table(0.2)), rows([600, 500, 80, 10])
    for _ in range(30):
        step(made, view, stands=K)
    again, fresh = policy(table(0.2)), policy(table(0.2))
    again.restore(made.state())
    np.testing.assert_array_equal(again.counts, made.counts)
    assert caps_of(again, view)[0] > caps_of(fresh, view)[0]
    for k in (K - 1, K + 3):  # another num_speculative_tokens: what is known of the positions that both have
        other = DasPolicy(table(0.2), k)
        other.restore(made.state())
        np.testing.assert_array_equal(other.counts[:, :K], made.counts[:, :k])
        assert other.counts.shape == (3, k) and not other.counts[:, K:].any()
        other.begin(Request(0, (1,)))
        assert caps_of(other, rows([600]))[0] > 0
    for wrong in ({}, {"counts": np.zeros((3, K))}, {"depths": np.zeros(2)}):
        with pytest.raises(ValueError, match="not a state of the das policy"):
            fresh.restore(wrong)
    for name in ("counts", "version"):
        with pytest.raises(ValueError, match="damaged"):
            fresh.restore(made.state() | {name: np.zeros((2, 3))})


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
    assert any("steps to go instead of" in t.reason for t in traces) and all(t.expected_s > 0 for t in traces)
    assert not made._slots and len(made._free) == len(made._own), "every request has ended"


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_it_may_be_used_with_every_rule(rule: str) -> None:
    drafted, traces = generate(DasPolicy(table(0.01), K), rule)
    assert all(drafted) and sum(t.num_draft_tokens for t in traces) > 20
    with pytest.raises(ValueError, match=r"speculation\.rule"):
        generate(StaticPolicy(3, min_confidence=0.1), rule)
