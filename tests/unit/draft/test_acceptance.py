"""Acceptance on recorded sequences, compared with brute force, closed forms, hand-made cases and the engine."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scripts import load_script
from support import tiny_decoder, tiny_head
from torch import Tensor

from paceline.draft.acceptance import (
    KINDS,
    Acceptance,
    _coupled,
    _sampled,
    correct_drafts,
    count_acceptance,
    measure,
)
from paceline.draft.head_batch import Example, make_head_batch
from paceline.drafters.eagle3 import Eagle3Drafter
from paceline.engine.engine import LocalEngine
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.speculation.policy import StaticPolicy
from paceline.types import Completion, Request, SamplingParams, noise_key

STEPS = 4
NUM = 200_000  # draws
SIGMAS = 5.0  # random failures are one in a million
DRAFT_IDS = torch.tensor([0, 2, 3, 5])  # 4 of 6 tokens


def distributions(seed: int) -> tuple[Tensor, Tensor]:
    """p over the target's 6 tokens, and a similar q over the head's 4."""
    noise = torch.Generator().manual_seed(seed)
    z = 1.5 * torch.randn(6, generator=noise)
    return z.softmax(-1), (z[DRAFT_IDS] + 0.7 * torch.randn(4, generator=noise)).softmax(-1)


def sample_coupled(p: Tensor, q: Tensor, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    """Coupled sampling by brute force, with the same noise for target and draft: tokens, and whether the drafts are
    correct."""
    exponential = torch.empty(NUM, 6).exponential_(generator=noise)
    token = (exponential / p).argmin(-1)
    return token, DRAFT_IDS[(exponential[:, DRAFT_IDS] / q).argmin(-1)] == token


def to_draft(token: Tensor) -> Tensor:
    """Indices in the draft vocabulary; -1 for tokens that are not in it."""
    index = torch.full((6,), -1)
    index[DRAFT_IDS] = torch.arange(4)
    return index[token]


def sigmas(one: Tensor, other: Tensor) -> float:
    """The difference of the means of two boolean samples, in standard deviations."""
    a, b = one.double().mean(), other.double().mean()
    both = torch.cat([one, other]).double().mean()
    deviation = math.sqrt(float(both * (1 - both)) * (1 / len(one) + 1 / len(other)))
    return abs(float(a - b)) / max(deviation, 1e-12)


def rows(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    return p[DRAFT_IDS].expand(NUM, -1), q.expand(NUM, -1)


@pytest.mark.parametrize("seed", [0, 1])
def test_posterior_noise_gives_the_acceptance_of_the_true_noise(seed: int) -> None:
    """In all, and for each token."""
    p, q = distributions(seed)
    noise = torch.Generator().manual_seed(seed)
    token, correct = sample_coupled(p, q, noise)
    measured = _coupled(*rows(p, q), to_draft(token), noise)
    assert sigmas(correct, measured) < SIGMAS
    for v in range(6):
        at = token == v
        assert sigmas(correct[at], measured[at]) < SIGMAS
        assert (v in DRAFT_IDS.tolist()) == bool(measured[at].any()), "a token outside the draft vocabulary"


def test_coupled_acceptance_has_its_closed_form() -> None:
    """P(both draw v) = 1 / Σ_u max(p_u / p_v, q_u / q_v)."""
    p, q = distributions(2)
    full_q = torch.zeros(6).index_copy(0, DRAFT_IDS, q)
    probabilities = [1 / torch.maximum(p / p[v], full_q / full_q[v]).sum() for v in DRAFT_IDS.tolist()]
    noise = torch.Generator().manual_seed(2)
    token = p.multinomial(NUM, replacement=True, generator=noise)
    measured = _coupled(*rows(p, q), to_draft(token), noise).double()
    expected = float(sum(probabilities))
    assert abs(float(measured.mean()) - expected) < SIGMAS * math.sqrt(expected * (1 - expected) / NUM)


def test_independent_noise_gives_another_acceptance() -> None:
    """A deliberately broken implementation."""
    p, q = distributions(0)
    noise = torch.Generator().manual_seed(0)
    token, correct = sample_coupled(p, q, noise)
    independent = q.multinomial(NUM, replacement=True, generator=noise) == to_draft(token)
    assert sigmas(correct, independent) > 10 * SIGMAS


@pytest.mark.parametrize("seed", [0, 1])
def test_acceptance_of_sampled_drafts_is_the_overlap_of_p_and_q(seed: int) -> None:
    p, q = distributions(seed)
    noise = torch.Generator().manual_seed(seed)
    token = p.multinomial(NUM, replacement=True, generator=noise)
    measured = _sampled(*rows(p, q), to_draft(token), noise).double()
    overlap = float(torch.minimum(p[DRAFT_IDS], q).sum())
    assert abs(float(measured.mean()) - overlap) < SIGMAS * math.sqrt(overlap * (1 - overlap) / NUM)
    assert abs(overlap - float((p[DRAFT_IDS] * q).sum())) > 0.05, "the probability of equal independent samples differs"


# ---- count_acceptance ----


def flags(*steps: str) -> np.ndarray:
    return np.array([[mark == "x" for mark in step] for step in steps])


@pytest.mark.parametrize(
    ("correct", "first", "end", "drafted", "accepted", "num_tokens"),
    [
        # Tokens 2 … 7 are the completion. 2 is sampled; drafts for 3, 4 | 5, 6 have bases 1 and 4; 7 is the last.
        (flags("xxxxxxxx", "xxxxxxxx"), 2, 8, [2, 1], [2, 1], 5),
        (flags("........", "xxxxxxxx"), 2, 8, [4, 3], [0, 0], 4),  # after a wrong first step the second does not count
        (flags("xxxxxxxx", "........"), 2, 8, [2, 2], [2, 0], 4),  # 3 correct, 4 wrong | 5 correct, 6 wrong | 7
        (flags(".x..x...", "xxxxxxxx"), 2, 8, [2, 1], [2, 1], 5),  # only the bases of actual drafts count
        (flags("xxxxxxxx", "xxxxxxxx"), 7, 8, [0, 0], [0, 0], 0),  # one token: nothing is drafted
        (flags("xxxxxxxx", "xxxxxxxx"), 6, 8, [0, 0], [0, 0], 0),  # two: the last is sampled, not drafted
        (flags("xxxxxxxx", "xxxxxxxx"), 0, 4, [1, 0], [1, 0], 2),  # text without a prompt: token 2 is drafted first
        (flags("xxxxxxxx", "xxxxxxxx"), 5, 8, [1, 0], [1, 0], 2),  # one draft token
    ],
)  # fmt: skip
def test_count_acceptance(
    correct: np.ndarray, first: int, end: int, drafted: list[int], accepted: list[int], num_tokens: int
) -> None:
    found = count_acceptance(correct, first, end)
    assert (found.drafted.tolist(), found.accepted.tolist()) == (drafted, accepted)
    assert found.num_drafts == drafted[0] and found.num_drafts + found.accepted.sum() == num_tokens


def test_means() -> None:
    found = Acceptance(np.array([4, 4]), np.array([3, 1]), num_drafts=4)
    assert found.mean_length == 2.0 and found.per_position == [0.75, 0.25]
    found.add(found)
    assert found.num_drafts == 8 and found.mean_length == 2.0
    assert Acceptance.zeros(3).mean_length == 1.0 and Acceptance.zeros(2).per_position == [0.0, 0.0]


def test_acceptance_by_depth() -> None:
    """Correct in the first 100 tokens of a completion that starts at 10, then wrong."""
    correct = np.zeros((3, 400), bool)
    correct[:, :108] = True
    found = count_acceptance(correct, 10, 400)
    drafts, accepted = found.by_depth.T.tolist()
    assert (sum(drafts), sum(accepted)) == (found.num_drafts, found.accepted.sum()) and drafts[3] == 0
    assert found.length_per_depth == {"0": 4.0, "64": pytest.approx(1 + accepted[1] / drafts[1]), "256": 1.0}
    assert 1 < found.length_per_depth["64"] < 2


# ---- against the engine ----


def generate(temperature: float, num: int, max_tokens: int = 24) -> tuple[list[Completion], dict[str, Acceptance]]:
    """Completions that were generated with a head, and the head's acceptance measured on them."""
    decoder = tiny_decoder()
    head = tiny_head(decoder)
    drafter = Eagle3Drafter(head, decoder.embed, Sampler(), 128, True)
    engine = LocalEngine(
        PagedDecoder(decoder, 128), drafter=drafter, policy=StaticPolicy(STEPS), rule="coupled", max_num_seqs=32
    )
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
    requests = [
        Request(i, tuple(rng.integers(0, 60, rng.integers(3, 9)).tolist()), params, noise_key(i)) for i in range(num)
    ]
    completions = engine.generate(requests)
    examples = [
        Example(
            np.concatenate([np.array(c.request.prompt_ids, np.int32), c.token_ids]),
            np.arange(len(c.request.prompt_ids) + len(c.token_ids)) >= len(c.request.prompt_ids),
        )
        for c in completions
    ]
    total = {kind: Acceptance.zeros(STEPS) for kind in KINDS}
    for start in range(0, num, 50):
        head_batch = make_head_batch(decoder, examples[start : start + 50], head.config.aux_layers)
        for kind, part in measure(head, decoder.embed, head_batch, STEPS, temperature, seed=start).items():
            total[kind].add(part)
    return completions, total


def test_greedy_acceptance_is_exactly_the_engines() -> None:
    completions, measured = generate(0.0, 16)
    for kind in KINDS:
        assert measured[kind].num_drafts == sum(c.num_drafts for c in completions)
        assert measured[kind].accepted.sum() == sum(c.num_accepted_tokens for c in completions) > 0
        assert measured[kind].drafted.sum() == sum(c.num_draft_tokens for c in completions)


def test_coupled_acceptance_is_the_engines_on_average() -> None:
    """The noise differs, so only the mean is the same, within the standard deviation over sequences."""
    completions, measured = generate(1.0, 64)
    lengths = np.array([c.num_accepted_tokens / c.num_drafts for c in completions])
    drafts = np.array([c.num_drafts for c in completions])
    engine = (lengths * drafts).sum() / drafts.sum()
    deviation = float(np.std(lengths) / math.sqrt(len(lengths))) * math.sqrt(2)  # of the difference of two means
    assert engine > 0.05
    assert abs(measured["coupled"].mean_length - 1 - engine) < 4 * deviation
    assert measured["greedy"].mean_length - 1 < engine - 4 * deviation, "greedy drafts differ measurably"


def test_the_same_seed_measures_the_same() -> None:
    decoder = tiny_decoder()
    head = tiny_head(decoder)
    tokens = np.random.default_rng(1).integers(0, 60, 40).astype(np.int32)
    head_batch = make_head_batch(decoder, [Example(tokens, np.ones(40, bool))], head.config.aux_layers)
    one, two, other = (measure(head, decoder.embed, head_batch, 3, 1.0, seed)["coupled"] for seed in (0, 0, 1))
    assert one.accepted.tolist() == two.accepted.tolist() and one.num_drafts == two.num_drafts
    assert (one.num_drafts, one.accepted.tolist()) != (other.num_drafts, other.accepted.tolist())


# ---- accepted lengths ----


@pytest.mark.parametrize("seed", [5, 6])
def test_accepted_lengths(seed: int) -> None:
    """Padded sequences of several lengths, one with two completion tokens and one with none. The lengths are compared
    with the flags, and acceptance counted from them with `count_acceptance`."""
    decoder = tiny_decoder()
    head = tiny_head(decoder)
    rng = np.random.default_rng(3)
    spans = [(9, 30), (1, 30), (0, 17), (5, 7), (8, 8)]  # of the completions
    examples = [Example(rng.integers(0, 60, end).astype(np.int32), np.arange(end) >= first) for first, end in spans]
    head_batch = make_head_batch(decoder, examples, head.config.aux_layers)
    correct = correct_drafts(head, decoder.embed, head_batch, STEPS, 1.0, seed, ("coupled",))["coupled"]
    found = load_script("history/accepted_lengths.py").accepted_lengths(
        head, decoder.embed, head_batch, STEPS, 1.0, seed
    )
    assert max(int(lengths.max(initial=0)) for lengths in found) > 1
    for flags, lengths, (first, end) in zip(correct, found, spans, strict=True):
        assert len(lengths) == end - first
        for j in range(end - first):
            drafted = first + j  # the draft's first token
            num = 0
            while j and drafted >= 2 and num < min(STEPS, end - drafted) and flags[num, drafted - 2]:
                num += 1
            assert lengths[j] == num
        expected = count_acceptance(flags, first, end) if first < end else Acceptance.zeros(STEPS)
        at, num_accepted, num_drafts = max(first + 1, 2), 0, 0
        while at < end:
            num_drafted = min(STEPS, end - 1 - at)
            accepted = min(int(lengths[at - first]), num_drafted)
            num_accepted, num_drafts = num_accepted + accepted, num_drafts + (num_drafted > 0)
            at += accepted + 1
        assert (num_drafts, num_accepted) == (expected.num_drafts, expected.accepted.sum())
