"""The hybrid drafter: each row gets the draft of which more is expected for its cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import tiny_decoder, tiny_head

from paceline.drafters.eagle3 import Eagle3Drafter
from paceline.drafters.hybrid import HybridDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.speculation.acceptance import AcceptanceModel
from paceline.speculation.batch import Commits, Rows
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams

VOCAB, K = 61, 3


class ScriptedDrafter(SuffixDrafter):
    """Row i gets a draft of num[i] times the same token."""

    def __init__(self, name: str, num: list[int], score: float, token: int) -> None:
        super().__init__()
        self.name, self.num, self.score, self.token = name, num, score, token
        self.caps: list[list[int]] = []

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        self.caps.append(caps.tolist())
        num, shape = np.minimum(np.array(self.num, np.int32), caps), (len(rows), int(caps.max(initial=0)))
        return DraftBatch(np.full(shape, self.token, np.int32), num, np.full(shape, self.score, np.float32))

    def observe(self, commits: Commits) -> None:
        pass


def rows(num: int, acceptance: AcceptanceModel | None = None) -> Rows:
    tokens, sampling = [np.arange(5, dtype=np.int32)] * num, [SamplingParams()] * num
    return Rows(np.arange(num), tokens, np.zeros(num, np.uint64), sampling, acceptance=acceptance or AcceptanceModel())


def caps_of(num: int) -> np.ndarray:
    return np.full(num, K, np.int32)


def drafters_of(drafts: DraftBatch) -> list[str]:
    assert drafts.sources is not None
    return [drafts.names[i] for i in drafts.sources]


def hybrid(history: ScriptedDrafter, head: ScriptedDrafter, choice: str = "before", cost: float = 0.1) -> HybridDrafter:
    return HybridDrafter(history, head, cost, choice)


def test_history_drafts_if_more_is_expected_of_it_and_the_head_does_not_compute_the_row() -> None:
    history, head = ScriptedDrafter("suffix", [K, 0], 0.95, 7), ScriptedDrafter("eagle3", [K, K], 0.6, 9)
    drafts = hybrid(history, head).propose(rows(2), caps_of(2))
    assert head.caps == [[0, K]]
    assert drafts.tokens.tolist() == [[7] * K, [9] * K]
    assert drafters_of(drafts) == ["suffix", "eagle3"]
    assert drafts.num.tolist() == [K, K]


def test_the_match_length_is_of_rows_with_a_draft_from_history() -> None:
    history, head = ScriptedDrafter("suffix", [K, 0, K], 0.95, 7), ScriptedDrafter("eagle3", [K, K, 0], 0.6, 9)
    it = hybrid(history, head)
    assert it.propose(rows(3), caps_of(3)).match is None
    propose = history.propose

    def matched(rows: Rows, caps: np.ndarray) -> DraftBatch:
        drafts = propose(rows, caps)
        drafts.match = np.array([5, 2, 8], np.int32)
        return drafts

    history.propose = matched  # type: ignore[method-assign]
    drafts = it.propose(rows(3), caps_of(3))
    assert drafts.match is not None and drafts.match.tolist() == [5, 0, 8] and drafts.match.dtype == np.int32
    assert drafters_of(drafts) == ["suffix", "eagle3", "suffix"]


def test_the_head_is_limited_by_its_own_caps() -> None:
    """A row that the head may not draft for gets history's draft. The caps are those of the drafter that drafted."""
    history, head = ScriptedDrafter("suffix", [1, 1, 1], 0.2, 7), ScriptedDrafter("eagle3", [K] * 3, 0.6, 9)
    view = rows(3)
    view.head_caps = np.array([0, 2, 9], np.int32)
    drafts = hybrid(history, head).propose(view, caps_of(3))
    assert head.caps == [[0, 2, K]] and drafts.num.tolist() == [1, 2, K]
    assert drafters_of(drafts) == ["suffix", "eagle3", "eagle3"]
    assert drafts.caps is not None and drafts.caps.tolist() == [K, 2, K]


@pytest.mark.parametrize("choice", ["before", "after"])
def test_a_probe_is_a_draft_of_the_head(choice: str) -> None:
    """Whatever history has: else the head would never be tried again."""
    history, head = ScriptedDrafter("suffix", [K, K], 0.95, 7), ScriptedDrafter("eagle3", [K, K], 0.1, 9)
    for is_probe in (False, True):
        view = rows(2)
        view.head_caps, view.is_head_probe = np.array([0, 2], np.int32), is_probe
        drafts = hybrid(history, head, choice).propose(view, caps_of(2))
        assert drafters_of(drafts) == ["suffix", "eagle3" if is_probe else "suffix"]
        assert drafts.num.tolist() == [K, 2 if is_probe else K]


def test_outcomes_count_for_the_drafter_of_each_row() -> None:
    """Of three rows the first was preempted. The second has a draft of the head, which is accepted."""
    history, head = ScriptedDrafter("suffix", [K, 0, K], 0.95, 7), ScriptedDrafter("eagle3", [K] * 3, 0.6, 9)
    it, acceptance = hybrid(history, head), AcceptanceModel()
    drafts = it.propose(rows(3, acceptance), caps_of(3))
    acceptance.rate(drafts, it.name)
    acceptance.observe(drafts, it.name, np.array([1, 2]), np.array([K, 0]), np.array([K, 1]))
    state = acceptance.state_dict()
    counts = {key.split(".")[2]: array.sum(1).tolist() for key, array in state.items() if key.startswith("counts.")}
    assert {name: counts[name] for name in ("suffix", "eagle3")} == {"suffix": [0, 1], "eagle3": [K, K]}
    assert acceptance.num_drafts("suffix") == 2 and acceptance.num_drafts("eagle3") == 1


@pytest.mark.parametrize("choice", ["before", "after"])
def test_history_with_rejected_drafts_is_replaced_by_the_head(choice: str) -> None:
    """Whatever its scores; and the head by history if the head's drafts are rejected."""
    for good, bad in (("eagle3", "suffix"), ("suffix", "eagle3")):
        history, head = ScriptedDrafter("suffix", [K], 0.9, 7), ScriptedDrafter("eagle3", [K], 0.9, 9)
        it, acceptance, found = hybrid(history, head, choice), AcceptanceModel(), list[str]()
        for _ in range(60):
            drafts = it.propose(rows(1, acceptance), caps_of(1))
            found += drafters_of(drafts)
            acceptance.rate(drafts, it.name)
            accepted = np.array([0 if found[-1] == bad else K])
            acceptance.observe(drafts, it.name, None, accepted, np.minimum(accepted + 1, K))
        assert set(found[-40:]) == {good}


def test_after_both_have_drafted_the_better_draft_for_its_cost_is_taken() -> None:
    for score, cost, token in ((0.9, 0.1, 9), (0.9, 2.0, 7), (0.3, 0.1, 7)):
        history, head = ScriptedDrafter("suffix", [K], 0.65, 7), ScriptedDrafter("eagle3", [K], score, 9)
        it = hybrid(history, head, "after", cost)
        assert it.reads_drafts and not hybrid(history, head).reads_drafts
        assert it.propose(rows(1), caps_of(1)).tokens[0, 0] == token


def test_one_q_for_deterministic_and_sampled_drafts() -> None:
    """For the rejection rules: the head's rows keep the distributions they were sampled from, history's are one-hot."""
    history, head = ScriptedDrafter("suffix", [2, 0], 0.95, 7), ScriptedDrafter("eagle3", [K, K], 0.6, 9)
    it, propose = hybrid(history, head), head.propose

    def with_q(rows: Rows, caps: np.ndarray) -> DraftBatch:
        drafts = propose(rows, caps)
        drafts.q = torch.full((2, K, VOCAB), 1 / VOCAB)
        return drafts

    head.propose = with_q  # type: ignore[method-assign]
    drafts = it.propose(rows(2), caps_of(2))
    assert torch.equal(drafts.q[1], torch.full((K, VOCAB), 1 / VOCAB))
    assert drafts.q[0, :2, 7].tolist() == [1, 1]
    assert drafts.q[0].sum() == 2


def test_completions_have_the_names_of_both_drafters() -> None:
    decoder, sampler = tiny_decoder(), Sampler()
    eagle3 = Eagle3Drafter(tiny_head(decoder), decoder.embed, sampler, 64)
    it = HybridDrafter(SuffixDrafter(), eagle3, 0.1)
    engine = LocalEngine(PagedDecoder(decoder, 64), sampler=sampler, drafter=it, policy=StaticPolicy(K))
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.3)
    found = engine.generate([Request(i, (1, 2, 3, 1, 2), sampling, 3, "p") for i in range(3)])
    assert {name for c in found for name in c.drafters} == {"suffix", "eagle3"}


def test_its_state_is_that_of_history() -> None:
    """The head's weights have files of their own; outcomes are in the acceptance model."""
    decoder = tiny_decoder()

    def make() -> HybridDrafter:
        return HybridDrafter(SuffixDrafter(), Eagle3Drafter(tiny_head(decoder), decoder.embed, Sampler(), 8), 0.1)

    one, two = make(), make()
    one.begin(Request(0, (1, 2), problem="p"))
    one.observe(Commits(np.arange(1), np.array([[3, 4]], np.int32), *(np.array([n], np.int32) for n in (2, 0, 0))))
    one.end(0)
    two.load_state_dict(one.state_dict())
    assert all(np.array_equal(two.state_dict()[key], value) for key, value in one.state_dict().items())
    assert any(not np.array_equal(make().state_dict()[key], value) for key, value in one.state_dict().items())
    with pytest.raises(ValueError, match="not a state of the suffix drafter"):
        two.load_state_dict({"counts": np.zeros(1)})
