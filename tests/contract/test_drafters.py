"""One suite over every drafter: the protocol's guarantees, and that the engine's output does not depend on it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support import tiny_decoder, tiny_dspark, tiny_head

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.dspark import DSparkDrafter
from paceline.drafters.eagle3 import Eagle3Drafter
from paceline.drafters.head_drafter import HeadDrafter
from paceline.drafters.hybrid import HybridDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.attention import PackedAttention
from paceline.model.decoder import first_layers
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.speculation.batch import Commits, Drafter, Rows
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams
from paceline.verify.drafters import AdversarialDrafter

VOCAB = 61
TARGET = tiny_decoder()


def eagle3() -> Eagle3Drafter:
    return Eagle3Drafter(tiny_head(TARGET), TARGET.embed, Sampler(), 64)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NgramDrafter(1, 3),
    "suffix": SuffixDrafter,
    "draft_model": lambda: DraftModelDrafter(PagedDecoder(first_layers(tiny_decoder(), 2), 64), Sampler()),
    "eagle3": eagle3,
    "dspark": lambda: DSparkDrafter(tiny_dspark(TARGET), TARGET.embed, Sampler(), 64),
    "hybrid": lambda: HybridDrafter(SuffixDrafter(), eagle3(), head_cost=0.1),
    "adversarial": lambda: AdversarialDrafter(VOCAB),
}
REPETITIVE = (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3)


@pytest.fixture(params=DRAFTERS)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return DRAFTERS[request.param]()


class Script:
    """Drives a drafter as an engine would, with scripted commits."""

    def __init__(self, drafter: Drafter, num: int, prompt: tuple[int, ...] = REPETITIVE) -> None:
        self.drafter = drafter
        self.requests = [Request(i, prompt, SamplingParams(), 100 + i, "problem") for i in range(num)]
        self.tokens = {i: list(prompt) for i in range(num)}
        for request in self.requests:
            drafter.begin(request)

    def rows(self, ids: list[int]) -> Rows:
        return Rows(
            np.array(ids, np.int64),
            [np.array(self.tokens[i], np.int32) for i in ids],
            np.array([100 + i for i in ids], np.uint64),
            [self.requests[i].sampling for i in ids],
            num_computed=np.array([len(self.tokens[i]) - 1 for i in ids]),
            aux_hidden_states=lambda spans: torch.cat(
                [self.aux_hidden_states(ids[row], start, end) for row, start, end in spans]
            ),
        )

    def aux_hidden_states(self, i: int, start: int, end: int) -> torch.Tensor:
        tokens = torch.tensor(self.tokens[i][:end])
        states = TARGET(tokens, torch.arange(end), PackedAttention([end]), self.drafter.aux_layers).aux_hidden_states
        return torch.cat([states[layer][start:] for layer in self.drafter.aux_layers], -1)

    def commit(self, ids: list[int], tokens: list[list[int]], accepted: list[int], drafted: list[int]) -> None:
        width = max(map(len, tokens))
        padded = np.array([t + [0] * (width - len(t)) for t in tokens], np.int32)
        self.drafter.observe(
            Commits(
                np.array(ids, np.int64),
                padded,
                np.array([len(t) for t in tokens], np.int32),
                np.array(drafted, np.int32),
                np.array(accepted, np.int32),
            )
        )
        for i, new in zip(ids, tokens, strict=True):
            self.tokens[i] += new


def test_drafts_are_well_formed(drafter: Drafter) -> None:
    script = Script(drafter, 3)
    caps = np.array([4, 0, 2], np.int32)
    drafts = drafter.propose(script.rows([0, 1, 2]), caps)
    assert drafts.tokens.shape == drafts.scores.shape
    assert drafts.tokens.dtype == np.int32
    assert (drafts.num <= caps).all()
    assert drafts.num[1] == 0
    for i in range(3):
        used = drafts.tokens[i, : drafts.num[i]]
        assert ((used >= 0) & (used < VOCAB)).all()
        confidence = drafts.scores[i, : drafts.num[i]]
        assert ((confidence >= 0) & (confidence <= 1)).all()


def test_any_row_may_be_skipped_and_any_draft_cut(drafter: Drafter) -> None:
    """Rows join and leave, drafts are shortened or rejected: a drafter's state must follow the committed tokens. A
    second drafter that observes the same commits and proposes nothing must propose the same afterwards."""
    if drafter.name == "hybrid":
        pytest.skip("it calibrates on its own proposals; its two drafters are tested separately")
    rng = np.random.default_rng(0)
    script, other = Script(drafter, 4), Script(DRAFTERS[drafter.name](), 4)
    for _ in range(12):
        ids = sorted(rng.choice(4, rng.integers(1, 5), replace=False).tolist())
        drafts = drafter.propose(script.rows(ids), rng.integers(0, 5, len(ids)).astype(np.int32))
        kept = [int(rng.integers(0, n + 1)) for n in drafts.num]
        accepted = [int(rng.integers(0, k + 1)) for k in kept]
        emitted = [
            [*drafts.tokens[row, :a].tolist(), int(rng.integers(0, VOCAB - 1))] for row, a in enumerate(accepted)
        ]
        for each in (script, other):
            each.commit(ids, emitted, accepted, kept)
    caps = np.full(4, 5, np.int32)
    found, expected = (each.drafter.propose(each.rows([0, 1, 2, 3]), caps) for each in (script, other))
    assert found.num.tolist() == expected.num.tolist()
    for i, n in enumerate(found.num):
        assert found.tokens[i, :n].tolist() == expected.tokens[i, :n].tolist()


def test_a_proposal_may_be_dropped(drafter: Drafter) -> None:
    """The row is preempted after the drafter proposed: no commit follows, and the next proposal is the same."""
    script, caps = Script(drafter, 2), np.array([4, 3], np.int32)
    first = drafter.propose(script.rows([0, 1]), caps)
    again = drafter.propose(script.rows([0, 1]), caps)
    assert first.num.tolist() == again.num.tolist()
    for i, n in enumerate(first.num):
        assert first.tokens[i, :n].tolist() == again.tokens[i, :n].tolist()


def test_requests_end_and_ids_are_used_again(drafter: Drafter) -> None:
    for _ in range(3):
        script = Script(drafter, 2)
        drafter.propose(script.rows([0, 1]), np.array([3, 3], np.int32))
        script.commit([0, 1], [[7], [8]], [0, 0], [0, 0])
        drafter.end(0)
        drafter.end(1)
    if isinstance(drafter, DraftModelDrafter):
        assert not any(drafter.paged.pool.ref_counts)
    if isinstance(drafter, HeadDrafter):
        assert not any(drafter.memory.pool.ref_counts)


def test_output_does_not_depend_on_the_drafter(drafter: Drafter) -> None:
    requests = [
        Request(i, REPETITIVE[: 5 + i], SamplingParams(max_tokens=24, temperature=[1.0, 0.0, 0.7][i % 3]), i, "p")
        for i in range(6)
    ]
    plain = LocalEngine(PagedDecoder(tiny_decoder(), 64)).generate(requests)
    for k in (1, 5):
        drafter_k = DRAFTERS[drafter.name]()
        engine = LocalEngine(PagedDecoder(tiny_decoder(), 64), drafter=drafter_k, policy=StaticPolicy(k))
        for _ in range(2):  # the second time there is history
            found = engine.generate(requests)
            assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in plain]
        traces = engine.drain_trace()
        assert sum(t.num_draft_tokens for t in traces) > 0
        assert sum(t.num_accepted_tokens for t in traces) > 0


def test_state_dict(drafter: Drafter) -> None:
    """A new drafter that loads the state dict proposes the same tokens with the same confidences, also later."""
    rng = np.random.default_rng(0)
    for _ in range(2):
        script = Script(drafter, 3)
        for _ in range(10):
            emitted = [rng.integers(0, 4, rng.integers(1, 4)).tolist() for _ in range(3)]
            script.commit([0, 1, 2], emitted, [0, 0, 0], [0, 0, 0])
        for i in range(3):
            drafter.end(i)
    restored = DRAFTERS[drafter.name]()
    restored.load_state_dict(drafter.state_dict())
    scripts = Script(drafter, 3), Script(restored, 3)
    for _ in range(10):
        caps = np.full(3, 5, np.int32)
        expected, found = (script.drafter.propose(script.rows([0, 1, 2]), caps) for script in scripts)
        assert expected.num.tolist() == found.num.tolist()
        for i, n in enumerate(expected.num):
            assert expected.tokens[i, :n].tolist() == found.tokens[i, :n].tolist()
            assert expected.scores[i, :n].tolist() == found.scores[i, :n].tolist()
        emitted = [rng.integers(0, 4, rng.integers(1, 4)).tolist() for _ in range(3)]
        for script in scripts:
            script.commit([0, 1, 2], emitted, [0, 0, 0], [0, 0, 0])
    assert all(np.array_equal(drafter.state_dict()[key], value) for key, value in restored.state_dict().items())


def test_a_state_dict_of_another_drafter_is_refused(drafter: Drafter) -> None:
    name = "suffix" if drafter.name == "hybrid" else drafter.name  # the hybrid's state is its history's
    for foreign in ({"weights": np.zeros(3)}, SuffixDrafter().state_dict()):
        if foreign.keys() != drafter.state_dict().keys():
            with pytest.raises(ValueError, match=f"not a state of the {name} drafter"):
                drafter.load_state_dict(foreign)


def test_weights(drafter: Drafter) -> None:
    if drafter.name in ("draft_model", "eagle3", "dspark", "hybrid"):
        pytest.skip("has weights; the engine tests update them")
    with pytest.raises(ValueError, match="no weights"):
        drafter.update([], 1)
