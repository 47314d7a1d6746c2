"""Every algorithm equals its reference implementation in value and gradient, for random batches; and invariants."""

from __future__ import annotations

import copy
import inspect
import itertools
from dataclasses import replace
from typing import Any, get_args

import naive_algorithms
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.build.config import load_config
from paceline.config import AlgorithmSection
from paceline.config_io import ConfigError
from paceline.rl import algorithms
from paceline.rl.algorithms import ALGORITHMS, Algorithm, make_algorithm
from paceline.rl.batch import TokenBatch

MAX_TOKENS = 6
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def make_batch(
    sizes: list[int],
    seed: int,
    off_policy: bool = True,
    constant: bool = False,
    spread: float = 0.3,
    branches: bool = False,
    turns: bool = False,
) -> tuple[TokenBatch, Tensor]:
    """Random sequences of 0 to 8 tokens, some of them masked, in groups of these sizes; and current logprobs.
    `branches`: some samples have several sequences. `turns`: sequences have up to three turns with rewards."""
    g = torch.Generator().manual_seed(seed)
    num_sequences = sum(sizes)
    counts_S = torch.randint(0, 9, (num_sequences,), generator=g)
    sequence_T = torch.repeat_interleave(torch.arange(num_sequences), counts_S)
    num_tokens = len(sequence_T)

    def near(logprobs_T: Tensor) -> Tensor:
        return logprobs_T + spread * torch.randn(num_tokens, generator=g, dtype=torch.float64)

    base_T = -3 * torch.rand(num_tokens, generator=g, dtype=torch.float64)
    mask_T = torch.rand(num_tokens, generator=g) < 0.8
    reward_S = torch.randint(0, 3, (num_sequences,), generator=g).double() / 2
    batch = TokenBatch(
        sequence_T=sequence_T,
        mask_T=mask_T,
        group_S=torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
        reward_S=torch.ones_like(reward_S) if constant else reward_S,
        length_S=torch.bincount(sequence_T[mask_T], minlength=num_sequences),
        truncated_S=torch.rand(num_sequences, generator=g) < 0.3,
        engine_logprobs_T=near(base_T),
        version_T=torch.zeros(num_tokens, dtype=torch.long),
        old_logprobs_T=near(base_T) if off_policy else None,
        ref_logprobs_T=near(base_T),
    )
    if branches:
        begins_S = torch.rand(num_sequences, generator=g) < 0.6
        begins_S[batch.group_S.diff(prepend=torch.tensor([-1])) != 0] = True
        batch.sample_S = begins_S.cumsum(0) - 1
        batch.reward_S = batch.reward_S[begins_S][batch.sample_S]
    if turns:
        rewards_S = torch.randint(0, 3, (num_sequences, 3), generator=g).double()
        starts_T = torch.rand(num_tokens, generator=g) < 0.4
        starts_T[sequence_T.diff(prepend=torch.tensor([-1])) != 0] = False
        so_far_T = starts_T.long().cumsum(0)
        before_S = torch.cat([torch.zeros(1, dtype=torch.long), so_far_T])[(counts_S.cumsum(0) - counts_S)]
        batch.turn_T = (so_far_T - torch.where(counts_S > 0, before_S, 0)[sequence_T]).clamp(max=2)
        past_S = torch.cat([torch.zeros(num_sequences, 1, dtype=torch.float64), rewards_S.cumsum(1)], 1)
        batch.past_rewards_T = past_S[sequence_T, batch.turn_T]
    return batch, near(base_T)


BATCHES = st.builds(
    make_batch,
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    constant=st.booleans(),
    spread=st.sampled_from([0.01, 0.3]),
    branches=st.booleans(),
    turns=st.booleans(),
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "epsilon": st.sampled_from([0.0, 0.1]),
        "epsilon_high": st.sampled_from([0.05, 1.5]),
        "beta": st.just(0.3),
        "kl": st.sampled_from(["k1", "k2", "k3"]),
        "kl_in": st.sampled_from(["loss", "reward"]),
        "scale_rewards": st.sampled_from(["group", "batch", "none"]),
        "loss_type": st.sampled_from(["grpo", "dapo", "dr_grpo"]),
        "mask_truncated_completions": st.booleans(),
        "overlong_buffer": st.integers(1, MAX_TOKENS),
        "overlong_penalty": st.just(0.7),
        "correction": st.sampled_from(["none", "token_tis", "sequence_tis", "icepop", "decoupled_ppo"]),
        "correction_cap": st.sampled_from([1.1, 2.0]),
        "turn_rewards": st.just("to_go"),
    },
)


def allowed(name: str, given: dict[str, Any]) -> AlgorithmSection:
    """These settings, with k2 instead of k1 in the loss, which the config rejects, and the KL in the loss if turns are
    compared."""
    if "turn_rewards" in given:
        given = given | {"kl_in": "loss"}
    composed = replace(ALGORITHMS[name], **{key: given[key] for key in ("kl", "kl_in") if key in given})
    rejected = (composed.kl, composed.kl_in) == ("k1", "loss")
    return AlgorithmSection(name=name, **given | ({"kl": "k2"} if rejected else {}))


def value_and_gradient(loss: Any, logprobs_T: Tensor) -> tuple[Tensor, Tensor]:
    leaf_T = logprobs_T.clone().requires_grad_()
    value = loss(leaf_T)
    (gradient_T,) = torch.autograd.grad(value, leaf_T)
    return value.detach(), gradient_T


def run(algorithm: Algorithm, batch: TokenBatch, logprobs_T: Tensor) -> tuple[Tensor, Tensor]:
    batch = copy.copy(batch)
    algorithm.prepare(batch)
    return value_and_gradient(lambda leaf_T: algorithm.loss(batch, leaf_T).loss, logprobs_T)


def check_against_reference(section: AlgorithmSection, batch: TokenBatch, logprobs_T: Tensor) -> None:
    algorithm = make_algorithm(section, MAX_TOKENS)
    if not algorithm.needs_old and len(batch.group_S) % 2:  # every other batch is on-policy
        batch = replace(batch, old_logprobs_T=None)
    prepared = copy.copy(batch)
    algorithm.prepare(prepared)
    assert prepared.advantages_T is not None
    expected_T = torch.tensor(naive_algorithms.advantages(section, MAX_TOKENS, batch), dtype=torch.float64)
    torch.testing.assert_close(prepared.advantages_T, expected_T, **TOLERANCE)
    found = run(algorithm, batch, logprobs_T)
    expected = value_and_gradient(lambda leaf_T: naive_algorithms.loss(section, MAX_TOKENS, batch, leaf_T), logprobs_T)
    torch.testing.assert_close(found, expected, **TOLERANCE)


# --- the reference implementation ---


@pytest.mark.parametrize("name", list(ALGORITHMS))
@settings(max_examples=40, deadline=None)
@given(case=BATCHES, options=SETTINGS)
def test_equals_the_reference(name: str, case: tuple[TokenBatch, Tensor], options: dict[str, Any]) -> None:
    check_against_reference(allowed(name, options), *case)


@pytest.mark.parametrize("name", list(ALGORITHMS))
@pytest.mark.parametrize("seed", range(3))
def test_published_settings_equal_the_reference(name: str, seed: int) -> None:
    check_against_reference(AlgorithmSection(name=name), *make_batch([4, 3, 1, 2], seed))


BROKEN = {
    "the advantages are not centred": replace(ALGORITHMS["grpo"], advantages=lambda b, r_S, p_T, s: r_S[b.sequence_T]),
    "the objective is not clipped": replace(
        ALGORITHMS["grpo"], objective=lambda b, lp_T, lr_T, lo, hi: (-lr_T.exp() * b.advantages_T, lr_T > hi)
    ),
    "another loss_type": replace(ALGORITHMS["grpo"], loss_type="dapo"),
    "the upper clip is DAPO's": replace(ALGORITHMS["grpo"], epsilon_high=0.28),
    "another KL": replace(ALGORITHMS["grpo"], kl="k2"),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_algorithm_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_batch([4, 2], seed=0)
    section = AlgorithmSection(name="grpo", beta=0.1)
    check_against_reference(section, *case)
    monkeypatch.setitem(ALGORITHMS, "grpo", BROKEN[name])
    with pytest.raises(AssertionError):
        check_against_reference(section, *case)


# --- invariants ---


@pytest.mark.parametrize("name", list(ALGORITHMS))
@settings(max_examples=25, deadline=None)
@given(case=BATCHES, options=SETTINGS, cuts=st.lists(st.integers(0, 12), max_size=3))
def test_microbatches_add_up(
    name: str, case: tuple[TokenBatch, Tensor], options: dict[str, Any], cuts: list[int]
) -> None:
    batch, logprobs_T = case
    algorithm = make_algorithm(allowed(name, options), MAX_TOKENS)
    algorithm.prepare(batch)
    whole = algorithm.loss(batch, logprobs_T)
    edges = sorted({0, batch.num_sequences, *(c for c in cuts if c < batch.num_sequences)})
    loss, stats = torch.zeros((), dtype=torch.float64), dict.fromkeys(whole.stats, 0.0)
    for start, end in itertools.pairwise(edges):
        first, last = torch.searchsorted(batch.sequence_T, torch.tensor([start, end])).tolist()
        part = algorithm.loss(batch.sequences(start, end), logprobs_T[first:last])
        loss = loss + part.loss
        stats = {key: stats[key] + part.stats[key] for key in stats}
    torch.testing.assert_close(loss, whole.loss, **TOLERANCE)
    assert stats == pytest.approx(whole.stats)


@pytest.mark.parametrize("name", list(ALGORITHMS))
@settings(max_examples=15, deadline=None)
@given(case=BATCHES, options=SETTINGS)
def test_masked_tokens_contribute_nothing(name: str, case: tuple[TokenBatch, Tensor], options: dict[str, Any]) -> None:
    batch, logprobs_T = case
    algorithm = make_algorithm(allowed(name, options), MAX_TOKENS)
    before = run(algorithm, batch, logprobs_T)
    assert (before[1][~batch.mask_T] == 0).all()
    assert batch.old_logprobs_T is not None and batch.ref_logprobs_T is not None

    def spoil(values_T: Tensor) -> Tensor:
        return values_T.masked_fill(~batch.mask_T, float("nan"))

    spoilt = replace(
        batch,
        old_logprobs_T=spoil(batch.old_logprobs_T),
        ref_logprobs_T=spoil(batch.ref_logprobs_T),
        engine_logprobs_T=spoil(batch.engine_logprobs_T),
    )
    after = run(algorithm, spoilt, spoil(logprobs_T))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_engine_logprobs_matter_only_with_a_correction(name: str) -> None:
    batch, logprobs_T = make_batch([4, 4], seed=1, off_policy=False)
    other = replace(batch, engine_logprobs_T=batch.engine_logprobs_T - 1)
    for correction in ("none", "token_tis", "sequence_tis", "icepop", "decoupled_ppo"):
        algorithm = make_algorithm(AlgorithmSection(name=name, correction=correction), MAX_TOKENS)
        same = torch.equal(run(algorithm, batch, logprobs_T)[1], run(algorithm, other, logprobs_T)[1])
        assert same == (correction == "none"), correction


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_model_precision_is_kept(name: str) -> None:
    batch, logprobs_T = make_batch([4, 4], seed=2)
    algorithm = make_algorithm(AlgorithmSection(name=name), MAX_TOKENS)
    algorithm.prepare(batch)
    leaf_T = logprobs_T.float().requires_grad_()
    output = algorithm.loss(batch, leaf_T)
    output.loss.backward()
    assert leaf_T.grad is not None and leaf_T.grad.dtype == torch.float32
    assert output.loss.dtype == torch.float64 and output.loss.shape == ()


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_equal_rewards_and_groups_of_one_have_no_gradient(name: str) -> None:
    for sizes, constant in (([4, 3], True), ([1], False)):
        batch, logprobs_T = make_batch(sizes, seed=5, constant=constant)
        gradient_T = run(make_algorithm(AlgorithmSection(name=name), MAX_TOKENS), batch, logprobs_T)[1]
        assert gradient_T.abs().max() < 1e-10


def test_rloo_on_policy_is_the_papers_gradient() -> None:
    """∇ = -1/S sum_i A_i ∇ log π(completion_i): every token of a sequence gets the same."""
    batch, logprobs_T = make_batch([3, 2], seed=3, off_policy=False)
    algorithm = make_algorithm(AlgorithmSection(name="rloo"), MAX_TOKENS)
    gradient_T = run(algorithm, batch, logprobs_T)[1]
    algorithm.prepare(batch)
    assert batch.advantages_T is not None and batch.advantages_T.abs().sum() > 0
    torch.testing.assert_close(gradient_T, -batch.advantages_T / batch.num_sequences)


def test_minibatches_are_weighted_on_their_own() -> None:
    batch, _ = make_batch([4, 4], seed=4)
    for name in ALGORITHMS:
        algorithm = make_algorithm(AlgorithmSection(name=name), MAX_TOKENS)
        algorithm.prepare(batch)
        for part in (batch.sequences(0, 4), batch.sequences(4, 8)):
            alone_T = algorithm.weights(part)
            assert part.weights_T is not None
            assert part.mask_T.any() and (alone_T[part.mask_T] > part.weights_T[part.mask_T]).all()


def test_stats() -> None:
    batch = flat_batch(rewards=[1.0, 0.0], lengths=[2, 2])
    batch.old_logprobs_T = torch.full((4,), -1.0, dtype=torch.float64)
    batch.engine_logprobs_T = torch.tensor([-1.0, -3.0, -1.0, -1.0], dtype=torch.float64)
    batch.ref_logprobs_T = torch.full((4,), -1.0, dtype=torch.float64)
    section = AlgorithmSection(correction="token_tis", beta=0.1, kl="k2")
    algorithm = make_algorithm(section, MAX_TOKENS)
    algorithm.prepare(batch)
    up_and_down_T = torch.tensor([-0.5, -1.0, -0.5, -1.5], dtype=torch.float64)
    stats = algorithm.loss(batch, up_and_down_T).stats
    # Clipped: the first token of the sequence with the positive advantage (its ratio is above the upper clip), and the
    # second token of the other (below the lower clip).
    assert stats == pytest.approx(
        {
            "num_tokens": 4,
            "ratio": 2 * 2.718281828**0.5 + 1 + 2.718281828**-0.5,
            "clip_ratio": 2,
            "correction_weight": 1 + 2 + 1 + 1,
            "correction_clip_ratio": 1,
            "kl": 0.5 * (0.5**2 + 0.5**2 + 0.5**2),
        }
    )


# --- rewards, groups, filters ---


def flat_batch(rewards: list[float], lengths: list[int]) -> TokenBatch:
    num_tokens = sum(lengths)
    return TokenBatch(
        sequence_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        mask_T=torch.ones(num_tokens, dtype=torch.bool),
        group_S=torch.zeros(len(lengths), dtype=torch.long),
        reward_S=torch.tensor(rewards, dtype=torch.float64),
        length_S=torch.tensor(lengths),
        truncated_S=torch.zeros(len(lengths), dtype=torch.bool),
        engine_logprobs_T=torch.zeros(num_tokens, dtype=torch.float64),
        version_T=torch.zeros(num_tokens, dtype=torch.long),
    )


def test_soft_overlong_penalty() -> None:
    """No penalty up to 6 of 10 tokens, then 0.25 more for each token."""
    algorithm = make_algorithm(AlgorithmSection(name="dapo", overlong_buffer=4), max_tokens=10)
    batch = flat_batch([1.0] * 6, [3, 6, 7, 9, 10, 12])
    assert algorithm.shape_rewards(batch).tolist() == [1, 1, 0.75, 0.25, 0, 0]
    assert batch.reward_S.tolist() == [1.0] * 6


def test_dynamic_sampling_is_the_default_of_dapo() -> None:
    dapo, grpo = (make_algorithm(AlgorithmSection(name=name), MAX_TOKENS) for name in ("dapo", "grpo"))
    assert [dapo.keeps(r) for r in ([1, 1], [0, 0, 0], [1, 0], [0.5], [])] == [False, False, True, False, False]
    assert grpo.keeps([1, 1])
    for name in ALGORITHMS:
        for section in (AlgorithmSection(name=name), AlgorithmSection(name=name, dynamic_sampling=name == "grpo")):
            assert section.samples_dynamically == make_algorithm(section, MAX_TOKENS).dynamic_sampling
    on = make_algorithm(AlgorithmSection(name="grpo", dynamic_sampling=True), MAX_TOKENS)
    off = make_algorithm(AlgorithmSection(name="dapo", dynamic_sampling=False), MAX_TOKENS)
    assert not on.keeps([1, 1]) and off.keeps([1, 1])


def test_masking_truncated_completions_does_not_change_the_baseline() -> None:
    batch = flat_batch([1.0, 0.0, 0.0], [2, 2, 3])
    batch.truncated_S[2] = True
    plain = copy.copy(batch)
    make_algorithm(AlgorithmSection(), MAX_TOKENS).prepare(plain)
    make_algorithm(AlgorithmSection(mask_truncated_completions=True), MAX_TOKENS).prepare(batch)
    assert batch.mask_T.tolist() == [True] * 4 + [False] * 3
    assert batch.advantages_T is not None and plain.advantages_T is not None
    assert batch.weights_T is not None and not batch.weights_T[4:].any() and not batch.advantages_T[4:].any()
    assert torch.equal(batch.advantages_T[:4], plain.advantages_T[:4])


def test_reinforce_pp_charges_the_kl_from_each_token_on() -> None:
    batch = flat_batch([1.0, 0.0], [3, 1])
    batch.old_logprobs_T = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    batch.ref_logprobs_T = torch.tensor([-2.0, -3.0, -1.0, -1.0], dtype=torch.float64)
    algorithm = make_algorithm(AlgorithmSection(name="reinforce_pp", beta=0.1, scale_rewards="none"), MAX_TOKENS)
    assert algorithm.needs_old and algorithm.needs_reference
    algorithm.prepare(batch)
    returns_T = torch.tensor([1 - 0.1 * (1 + 2), 1 - 0.1 * 2, 1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(batch.advantages_T, returns_T - returns_T.mean())


# --- settings ---


def test_names_are_those_of_the_config() -> None:
    assert set(ALGORITHMS) == set(get_args(AlgorithmSection.model_fields["name"].annotation))
    assert all(name == algorithm.name for name, algorithm in ALGORITHMS.items())


def test_settings_override_the_published_ones() -> None:
    assert make_algorithm(AlgorithmSection(name="gspo"), 7) == replace(ALGORITHMS["gspo"], max_tokens=7)
    made = make_algorithm(AlgorithmSection(name="dapo", epsilon=0.1, loss_type="grpo", beta=0.5), 7)
    assert (made.epsilon, made.epsilon_high, made.loss_type, made.needs_reference) == (0.1, 0.28, "grpo", True)
    assert not made.needs_old


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"overlong_buffer": 8}, "algorithm.overlong_buffer"),
        ({"correction": "icepop", "correction_floor": 3.0}, "algorithm.correction_floor"),
    ],
)
def test_impossible_settings_name_their_key(given: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        make_algorithm(AlgorithmSection(**given), MAX_TOKENS)


@pytest.mark.parametrize("name", list(ALGORITHMS))
@pytest.mark.parametrize("kl", [None, "k1", "k2", "k3"])
@pytest.mark.parametrize("kl_in", [None, "loss", "reward"])
def test_k1_in_the_loss_is_rejected(name: str, kl: str | None, kl_in: str | None) -> None:
    published = ALGORITHMS[name]
    composed = (kl or published.kl, kl_in or published.kl_in)
    overrides = [
        f"algorithm.name={name}",
        *([f"algorithm.kl={kl}"] if kl else []),
        *([f"algorithm.kl_in={kl_in}"] * bool(kl_in)),
    ]
    if composed == ("k1", "loss"):
        with pytest.raises(ConfigError, match=r'algorithm\.kl = "k1".*expected gradient.*zero.*kl = "k2".*"reward"'):
            load_config(None, overrides)
    else:
        algorithm = make_algorithm(load_config(None, overrides).algorithm, MAX_TOKENS)
        assert (algorithm.kl, algorithm.kl_in) == composed


def test_expected_gradient_of_the_kl_in_the_loss() -> None:
    """Over all tokens of a small vocabulary, weighted by the policy's probabilities: k1 has no gradient, k2 that of
    KL(policy, reference), k3 that of KL(reference, policy)."""
    g = torch.Generator().manual_seed(0)
    logits_V, ref_V = (torch.randn(8, generator=g, dtype=torch.float64) for _ in range(2))
    leaf_V = logits_V.clone().requires_grad_()
    log_p_V, log_r_V = leaf_V.log_softmax(0), ref_V.log_softmax(0)
    (true_V,) = torch.autograd.grad((log_p_V.exp() * (log_p_V - log_r_V)).sum(), leaf_V)

    def expected(kind: str) -> Tensor:
        batch = flat_batch(rewards=[1.0] * 8, lengths=[1] * 8)  # equal rewards: only the KL has a gradient
        batch.ref_logprobs_T = log_r_V
        algorithm = replace(ALGORITHMS["grpo"], beta=1.0, kl=kind)
        algorithm.prepare(batch)
        batch.weights_T = log_p_V.detach().exp()
        return torch.autograd.grad(algorithm.loss(batch, leaf_V.log_softmax(0)).loss, leaf_V)[0]

    torch.testing.assert_close(expected("k1"), torch.zeros(8, dtype=torch.float64), **TOLERANCE)
    assert true_V.norm() > 0.1
    torch.testing.assert_close(expected("k2"), true_V, **TOLERANCE)
    torch.testing.assert_close(expected("k3"), log_p_V.detach().exp() - log_r_V.exp(), **TOLERANCE)


# --- a new algorithm ---


def add_toy(table: Any) -> None:
    """Advantages are ranks within the group; the objective is a plain policy gradient."""

    def ranks(batch: TokenBatch, reward_S: Tensor, penalty_T: Tensor, scale: str) -> Tensor:
        same_SS = batch.group_S[:, None] == batch.group_S
        rank_S = (torch.sign(reward_S[:, None] - reward_S) * same_SS).sum(1) / same_SS.sum(1)
        return rank_S[batch.sequence_T]

    def policy_gradient(
        batch: TokenBatch, logprobs_T: Tensor, log_ratio_T: Tensor, epsilon: float, epsilon_high: float
    ) -> tuple[Tensor, Tensor]:
        assert batch.advantages_T is not None
        return -batch.advantages_T * logprobs_T, torch.zeros_like(batch.mask_T)

    table("toy", Algorithm("toy", ranks, policy_gradient, loss_type="dapo"))


def test_a_new_algorithm_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    add_toy(lambda name, algorithm: monkeypatch.setitem(ALGORITHMS, name, algorithm))
    section = AlgorithmSection().model_copy(update={"name": "toy"})
    batch = flat_batch([1.0, 0.0, 3.0], [2, 1, 1])
    _, gradient_T = run(make_algorithm(section, MAX_TOKENS), batch, torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(gradient_T * -12, torch.tensor([0, 0, -2, 2.0], dtype=torch.float64))
    assert len(inspect.getsourcelines(add_toy)[0]) < 50
    for function in (algorithms.group_mean, algorithms.sequence_mean_clip, algorithms.capped_weight):
        assert len(inspect.getsourcelines(function)[0]) < 15
