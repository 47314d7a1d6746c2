"""Acceptance on recorded sequences: against brute force, closed forms, hand-made cases and the engine itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support import tiny_decoder, tiny_head
from torch import Tensor

from paceline.draft.acceptance import KINDS, Acceptance, _coupled, _sampled, judge, match_lengths, measure, walk
from paceline.draft.lesson import Example, teach
from paceline.drafters.eagle3 import Eagle3Drafter
from paceline.engine.engine import LocalEngine
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.speculation.policy import StaticPolicy
from paceline.types import Completion, Request, SamplingParams, noise_key

STEPS = 4
NUM = 200_000  # draws
SIGMAS = 5.0  # by chance one in a million
DRAFT_IDS = torch.tensor([0, 2, 3, 5])  # the head knows 4 of 6 tokens


def distributions(seed: int) -> tuple[Tensor, Tensor]:
    """p over the target's 6 tokens, q over the head's 4; alike, as a trained head's is."""
    noise = torch.Generator().manual_seed(seed)
    z = 1.5 * torch.randn(6, generator=noise)
    return z.softmax(-1), (z[DRAFT_IDS] + 0.7 * torch.randn(4, generator=noise)).softmax(-1)


def race(p: Tensor, q: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    """The engine's coupling by brute force: one noise for both, the first arrival wins. Tokens, and who drafted them
    right."""
    arrival = torch.empty(NUM, 6).exponential_(generator=noise)
    token = (arrival / p).argmin(-1)
    return token, DRAFT_IDS[(arrival[:, DRAFT_IDS] / q).argmin(-1)] == token


def to_draft(token: Tensor) -> Tensor:
    places = torch.full((6,), -1)
    places[DRAFT_IDS] = torch.arange(4)
    return places[token]


def sigmas(one: Tensor, other: Tensor) -> float:
    """How many deviations two samples of yes and no are apart."""
    a, b = one.double().mean(), other.double().mean()
    both = torch.cat([one, other]).double().mean()
    deviation = math.sqrt(float(both * (1 - both)) * (1 / len(one) + 1 / len(other)))
    return abs(float(a - b)) / max(deviation, 1e-12)


def rows(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    return p[DRAFT_IDS].expand(NUM, -1), q.expand(NUM, -1)


@pytest.mark.parametrize("seed", [0, 1])
def test_noise_of_the_posterior_is_as_good_as_the_noise_itself(seed: int) -> None:
    """Token by token: what was drafted right in a race, and what is judged right from the token alone."""
    p, q = distributions(seed)
    noise = torch.Generator().manual_seed(seed)
    token, right = race(p, q, noise)
    judged = _coupled(*rows(p, q), to_draft(token), noise)
    assert sigmas(right, judged) < SIGMAS
    for v in range(6):
        at = token == v
        assert sigmas(right[at], judged[at]) < SIGMAS
        assert (v in DRAFT_IDS.tolist()) == bool(judged[at].any()), "it can't draft what it can't say"


def test_the_races_closed_form() -> None:
    """P(both draw v) = 1 / Σ_u max(p_u / p_v, q_u / q_v)."""
    p, q = distributions(2)
    whole = torch.zeros(6).index_copy(0, DRAFT_IDS, q)
    shares = [1 / torch.maximum(p / p[v], whole / whole[v]).sum() for v in DRAFT_IDS.tolist()]
    noise = torch.Generator().manual_seed(2)
    token = p.multinomial(NUM, replacement=True, generator=noise)
    judged = _coupled(*rows(p, q), to_draft(token), noise).double()
    expected = float(sum(shares))
    assert abs(float(judged.mean()) - expected) < SIGMAS * math.sqrt(expected * (1 - expected) / NUM)


def test_noise_that_knows_nothing_is_told_apart() -> None:
    """The broken twin: fresh noise for the draft."""
    p, q = distributions(0)
    noise = torch.Generator().manual_seed(0)
    token, right = race(p, q, noise)
    fresh = q.multinomial(NUM, replacement=True, generator=noise) == to_draft(token)
    assert sigmas(right, fresh) > 10 * SIGMAS


@pytest.mark.parametrize("seed", [0, 1])
def test_sampled_drafts_are_accepted_as_often_as_p_and_q_overlap(seed: int) -> None:
    p, q = distributions(seed)
    noise = torch.Generator().manual_seed(seed)
    token = p.multinomial(NUM, replacement=True, generator=noise)
    judged = _sampled(*rows(p, q), to_draft(token), noise).double()
    overlap = float(torch.minimum(p[DRAFT_IDS], q).sum())
    assert abs(float(judged.mean()) - overlap) < SIGMAS * math.sqrt(overlap * (1 - overlap) / NUM)
    assert abs(overlap - float((p[DRAFT_IDS] * q).sum())) > 0.05, "agreement by chance is something else"


# ---- walk ----


def flags(*steps: str) -> np.ndarray:
    return np.array([[mark == "x" for mark in step] for step in steps])


@pytest.mark.parametrize(
    ("right", "first", "end", "drafted", "accepted", "num_tokens"),
    [
        # Tokens 2 … 7 are the target's. 2 is drawn; drafts for 3, 4 | 5, 6 begin at bases 1 and 4; 7 is the last.
        (flags("xxxxxxxx", "xxxxxxxx"), 2, 8, [2, 1], [2, 1], 5),
        (flags("........", "xxxxxxxx"), 2, 8, [4, 3], [0, 0], 4),  # a second step is worth nothing without the first
        (flags("xxxxxxxx", "........"), 2, 8, [2, 2], [2, 0], 4),  # 3 right, 4 wrong | 5 right, 6 wrong | 7
        (flags(".x..x...", "xxxxxxxx"), 2, 8, [2, 1], [2, 1], 5),  # only the bases where drafts begin count
        (flags("xxxxxxxx", "xxxxxxxx"), 7, 8, [0, 0], [0, 0], 0),  # one token: nothing is drafted
        (flags("xxxxxxxx", "xxxxxxxx"), 6, 8, [0, 0], [0, 0], 0),  # two: the last is drawn, not drafted
        (flags("xxxxxxxx", "xxxxxxxx"), 0, 4, [1, 0], [1, 0], 2),  # text without a prompt: token 2 is the first guess
        (flags("xxxxxxxx", "xxxxxxxx"), 5, 8, [1, 0], [1, 0], 2),  # room for one draft
    ],
)  # fmt: skip
def test_walk(
    right: np.ndarray, first: int, end: int, drafted: list[int], accepted: list[int], num_tokens: int
) -> None:
    found = walk(right, first, end)
    assert (found.drafted.tolist(), found.accepted.tolist()) == (drafted, accepted)
    assert found.num_drafts == drafted[0] and found.num_tokens == num_tokens


def test_figures() -> None:
    found = Acceptance(np.array([4, 4]), np.array([3, 1]), num_drafts=4, num_tokens=8)
    assert found.mean_length == 2.0 and found.per_position == [0.75, 0.25]
    found.add(found)
    assert found.num_drafts == 8 and found.mean_length == 2.0
    assert Acceptance.none(3).mean_length == 1.0 and Acceptance.none(2).per_position == [0.0, 0.0]


# ---- against the engine ----


def generate(temperature: float, num: int, max_tokens: int = 24) -> tuple[list[Completion], dict[str, Acceptance]]:
    """Completions that a head drafted for, and its acceptance measured on them afterwards."""
    decoder = tiny_decoder()
    head = tiny_head(decoder)
    drafter = Eagle3Drafter(head, decoder.embed, Sampler(), 128, True)
    engine = LocalEngine(
        PagedDecoder(decoder, 128), drafter=drafter, policy=StaticPolicy(STEPS), rule="coupled", max_num_seqs=32
    )
    dice = np.random.default_rng(0)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
    requests = [
        Request(i, tuple(dice.integers(0, 60, dice.integers(3, 9)).tolist()), params, noise_key(i)) for i in range(num)
    ]
    completions = engine.generate(requests)
    examples = [
        Example(
            np.concatenate([np.array(c.request.prompt_ids, np.int32), c.token_ids]),
            np.arange(len(c.request.prompt_ids) + len(c.token_ids)) >= len(c.request.prompt_ids),
        )
        for c in completions
    ]
    total = {kind: Acceptance.none(STEPS) for kind in KINDS}
    for start in range(0, num, 50):
        lesson = teach(decoder, examples[start : start + 50], head.config.taps)
        for kind, part in measure(head, decoder.embed, lesson, STEPS, temperature, seed=start).items():
            total[kind].add(part)
    return completions, total


def test_greedy_is_what_the_engine_did() -> None:
    """To the last draft: the sequences tell everything."""
    completions, measured = generate(0.0, 16)
    for kind in KINDS:
        assert measured[kind].num_drafts == sum(c.num_drafts for c in completions)
        assert measured[kind].accepted.sum() == sum(c.num_accepted_tokens for c in completions) > 0
        assert measured[kind].drafted.sum() == sum(c.num_draft_tokens for c in completions)


def test_coupled_is_what_the_engine_does_on_average() -> None:
    """Sequence by sequence the noise is another; over many it is the same share. Judged by the spread of the engine's
    own sequences."""
    completions, measured = generate(1.0, 64)
    lengths = np.array([c.num_accepted_tokens / c.num_drafts for c in completions])
    drafts = np.array([c.num_drafts for c in completions])
    engine = (lengths * drafts).sum() / drafts.sum()
    deviation = float(np.std(lengths) / math.sqrt(len(lengths))) * math.sqrt(2)  # both are such a mean
    assert engine > 0.05
    assert abs(measured["coupled"].mean_length - 1 - engine) < 4 * deviation
    assert measured["greedy"].mean_length - 1 < engine - 4 * deviation, "another kind of draft is told apart"


def test_the_same_seed_measures_the_same() -> None:
    decoder = tiny_decoder()
    head = tiny_head(decoder)
    tokens = np.random.default_rng(1).integers(0, 60, 40).astype(np.int32)
    lesson = teach(decoder, [Example(tokens, np.ones(40, bool))], head.config.taps)
    one, two, other = (measure(head, decoder.embed, lesson, 3, 1.0, seed)["coupled"] for seed in (0, 0, 1))
    assert one.accepted.tolist() == two.accepted.tolist() and one.num_drafts == two.num_drafts
    assert (one.num_drafts, one.accepted.tolist()) != (other.num_drafts, other.accepted.tolist())


# ---- match lengths ----


@pytest.mark.parametrize("seed", [5, 6])
def test_match_lengths_are_what_drafts_from_every_token_bring(seed: int) -> None:
    """Padded sequences of several lengths, one of two tokens and one of none. Each digit by hand from the flags; then
    an engine that goes by the digits drafts and accepts what `walk` does."""
    decoder = tiny_decoder()
    head = tiny_head(decoder)
    dice = np.random.default_rng(3)
    spans = [(9, 30), (1, 30), (0, 17), (5, 7), (8, 8)]  # first token that the target chose, and its end
    examples = [Example(dice.integers(0, 60, end).astype(np.int32), np.arange(end) >= first) for first, end in spans]
    lesson = teach(decoder, examples, head.config.taps)
    right = judge(head, decoder.embed, lesson, STEPS, 1.0, seed, ("coupled",))["coupled"]
    found = match_lengths(head, decoder.embed, lesson, STEPS, 1.0, seed)
    assert max(int(lengths.max(initial=0)) for lengths in found) > 1
    for flags, lengths, (first, end) in zip(right, found, spans, strict=True):
        assert len(lengths) == end - first
        for j in range(end - first):
            drafted = first + j  # the draft's first token
            num = 0
            while j and drafted >= 2 and num < min(STEPS, end - drafted) and flags[num, drafted - 2]:
                num += 1
            assert lengths[j] == num
        walked = walk(flags, first, end) if first < end else Acceptance.none(STEPS)
        at, num_accepted, num_drafts = max(first + 1, 2), 0, 0
        while at < end:
            room = min(STEPS, end - 1 - at)
            accepted = min(int(lengths[at - first]), room)
            num_accepted, num_drafts = num_accepted + accepted, num_drafts + (room > 0)
            at += accepted + 1
        assert (num_drafts, num_accepted) == (walked.num_drafts, walked.accepted.sum())
