"""The learner against a reference implementation: one sequence at a time, plain softmax, no packing, no chunks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_decoder
from torch import Tensor

from paceline.config import LearnerSection
from paceline.model.attention import PackedAttention, VarlenAttention
from paceline.model.config import with_yarn
from paceline.model.decoder import Decoder
from paceline.model.weights import assign, hf_state, init, load
from paceline.rl import logprobs as logprobs_module
from paceline.rl.batch import TokenBatch, scored
from paceline.rl.learner import Learner
from paceline.rl.packing import KEYS_PER_TOKEN, microbatches, minibatches, pack
from paceline.types import Group, Rollout

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
FAMILIES = {"llama": {}, "qwen3": {"family": "qwen3", "qk_norm": True, "tie_embeddings": False}}


@dataclass(slots=True)
class Loss:
    loss: Tensor
    stats: dict[str, float]


def rollout(prompt: Sequence[int], tokens: Sequence[int], mask: Sequence[bool] | None = None, **rest: Any) -> Rollout:
    num = len(tokens)
    return Rollout(
        sample=0,
        prompt_ids=tuple(prompt),
        token_ids=np.array(tokens, np.int32),
        mask=np.array([True] * num if mask is None else mask, bool),
        logprobs=np.zeros(num),
        versions=np.zeros(num, np.int32),
        provenance=np.zeros(num, np.uint8),
        sources=np.full(num, 255, np.uint8),
        drafters=(),
        finish_reason="stop",
        **{"reward": 1.0, **rest},
    )


def some_groups(seed: int = 0, num_groups: int = 3, num_samples: int = 4, vocab: int = 60) -> list[Group]:
    """Completions of very different lengths, one of them with one token; one rollout has turns of an environment."""
    rng = np.random.default_rng(seed)
    groups = []
    for index in range(num_groups):
        prompt = rng.integers(0, vocab, rng.integers(1, 12)).tolist()
        rollouts = [
            rollout(prompt, rng.integers(0, vocab, n).tolist(), reward=float(rng.normal()))
            for n in (1, *rng.integers(2, 20, num_samples - 1))
        ]
        rollouts[-1].mask[1::3] = False  # sometimes also its last token
        groups.append(Group(index, str(index), "", rollouts))
    return groups


def one_by_one(decoder: Decoder, rollouts: Sequence[Rollout], temperature: float = 1.0) -> Tensor:
    outs = []
    for r in rollouts:
        tokens = torch.tensor([*r.prompt_ids, *r.token_ids.tolist()])
        hidden = decoder(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)])).hidden
        logits = decoder.logits(hidden).double() / temperature
        logprobs = logits.log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]][len(r.prompt_ids) - 1 :]
        outs.append(torch.where(torch.from_numpy(r.mask), logprobs, 0.0))
    return torch.cat(outs)


def linear_loss(batch: TokenBatch, logprobs_T: Tensor) -> Loss:
    """Every token has its own weight. Needs only the rewards."""
    token_T = batch.reward_S[batch.sequence_T] * logprobs_T * batch.mask_T
    weight_T = 1.0 if batch.weights_T is None else batch.weights_T
    num = int(batch.mask_T.sum())
    return Loss(-(token_T * weight_T).sum(), {"num_tokens": float(num), "logprob": float(logprobs_T.detach().sum())})


def learner(decoder: Decoder | None = None, *, temperature: float = 1.0, **settings: Any) -> Learner:
    settings = {"learning_rate": 1e-2, "max_grad_norm": 1e9, "tokens_per_microbatch": 2048, **settings}
    return Learner(decoder or tiny_decoder(), LearnerSection(**settings), num_steps=10, temperature=temperature)


def gradients(it: Learner, rollouts: Sequence[Rollout], batch: TokenBatch) -> dict[str, Tensor]:
    """The gradients that the optimizer gets."""
    found: dict[str, Tensor] = {}

    def record(step: int) -> float:
        found.update({name: p.grad.clone() for name, p in it.decoder.named_parameters() if p.grad is not None})
        it.optimizer.clear()
        return 0.0

    it.optimizer.step = record  # type: ignore[method-assign]
    it.update(rollouts, batch, linear_loss)
    return found


def weights_of(it: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in it.weights()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- packing ----


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_one_by_one(family: str, dtype: torch.dtype, max_tokens: int) -> None:
    groups = some_groups()
    rollouts, batch = scored(groups), TokenBatch.of(groups)
    it = learner(tiny_decoder(dtype, **FAMILIES[family]), temperature=0.7, tokens_per_microbatch=max_tokens)
    reference = tiny_decoder(dtype, **FAMILIES[family]).requires_grad_(True)
    expected = one_by_one(reference, rollouts, 0.7)
    linear_loss(batch, expected).loss.backward()
    atol = TOLERANCE[dtype]
    assert expected.std() > 1
    torch.testing.assert_close(it.logprobs(rollouts), expected.detach(), rtol=0, atol=atol)
    found = gradients(it, rollouts, batch)
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=atol * max(1.0, largest))


def test_a_completion_that_attends_to_another_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = scored(some_groups())
    expected = one_by_one(tiny_decoder(), rollouts)

    class OneSequence(PackedAttention):  # deliberately broken: all segments are one sequence
        def __init__(self, lengths: Sequence[int], prefixes: Sequence[int | None]) -> None:
            super().__init__([sum(lengths)])

    monkeypatch.setattr("paceline.model.decoder.PackedAttention", OneSequence)
    assert (learner().logprobs(rollouts) - expected).abs().max() > 1e-2


def test_prompts_are_packed_once_and_last_tokens_never() -> None:
    rollouts = [
        rollout([1, 2, 3], [4, 5, 6]),
        rollout([1, 2, 3], [7]),
        rollout([1, 2, 3], [8, 9, 8, 9], [True, True, False, False]),
        rollout([1, 2, 3], [8, 9], [False, False]),
        rollout([2, 3], [5, 5]),
    ]
    packed = pack(rollouts)
    assert packed.tokens_N.tolist() == [1, 2, 3, 4, 5, 8, 2, 3, 5]
    assert packed.positions_N.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2]
    assert packed.lengths == [3, 2, 1, 2, 1]
    assert packed.prefixes == [None, 0, 0, None, 3]
    assert packed.row_P.tolist() == [2, 3, 4, 2, 2, 5, 7, 8]
    assert packed.target_P.tolist() == [4, 5, 6, 7, 8, 9, 5, 5]
    assert packed.index_P.tolist() == [0, 1, 2, 3, 4, 5, 10, 11]


@pytest.mark.parametrize("max_tokens", [1, 13, 30, 57, 1000])
def test_microbatches_are_in_order_and_within_max_tokens(max_tokens: int) -> None:
    rollouts = scored(some_groups(num_groups=6))
    spans = list(microbatches(rollouts, max_tokens))
    assert [i for start, end in spans for i in range(start, end)] == list(range(len(rollouts)))
    for start, end in spans:
        assert len(pack(rollouts[start:end])) <= max_tokens or sum(r.mask.any() for r in rollouts[start:end]) == 1
    for (start, _), (_, end) in pairwise(spans):  # no two of them fit into one
        first_of_next = next(i for i in range(start + 1, end + 1) if len(pack(rollouts[start:i])) > max_tokens)
        assert first_of_next <= end


@pytest.mark.parametrize("num_tokens", [1, 2, 21])
def test_copies_of_a_prompt_are_bounded(num_tokens: int) -> None:
    """Attention copies a prompt's keys for each completion: 64 of them would have 260,000 rows."""
    rollouts = [rollout([7] * 4000, [8] * num_tokens) for _ in range(64)]
    spans = list(microbatches(rollouts, 8192))
    assert [i for start, end in spans for i in range(start, end)] == list(range(64))
    packs = [pack(rollouts[start:end]) for start, end in spans]
    rows = [len(VarlenAttention(packed.lengths, packed.prefixes, "cpu").token_K) for packed in packs]
    assert max(map(len, packs)) <= 8192 and max(rows) <= KEYS_PER_TOKEN * 8192
    assert len(spans) == (1 if num_tokens == 1 else 5), "a completion of one token needs no keys"


def test_minibatches_are_whole_groups_if_possible() -> None:
    group_S = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3])
    assert list(minibatches(group_S, 1)) == [(0, 8)]
    assert list(minibatches(group_S, 2)) == [(0, 5), (5, 8)]
    assert list(minibatches(group_S, 4)) == [(0, 2), (2, 5), (5, 7), (7, 8)]
    assert list(minibatches(group_S, 8)) == [(i, i + 1) for i in range(8)]
    assert list(minibatches(group_S, 99)) == [(i, i + 1) for i in range(8)]


def test_rollouts_without_a_token_of_the_policy_train_nothing() -> None:
    rollouts = [rollout([1, 2], [3, 4], [False, False])]
    it = learner()
    before = weights_of(it)
    assert it.logprobs(rollouts).tolist() == [0, 0]
    report = it.update(rollouts, TokenBatch.of([Group(0, "", "", rollouts)]), linear_loss)
    assert report.loss == report.grad_norm == report.entropy == 0 and it.version == 1
    assert same(before, weights_of(it))


# ---- logprobs in chunks ----


@pytest.mark.parametrize("keep_bytes", [0, 600 * 61 * 8, 1 << 29], ids=["recomputed", "some kept", "kept"])
def test_logprobs_in_chunks_equal_log_softmax(keep_bytes: int) -> None:
    decoder = tiny_decoder().requires_grad_(True)
    noise = torch.Generator().manual_seed(0)
    hidden = torch.randn(logprobs_module.CHUNK * 2 + 77, 32, dtype=torch.float64, generator=noise).requires_grad_(True)
    target, weight = torch.randint(0, 61, (len(hidden),), generator=noise), torch.randn(len(hidden), generator=noise)
    ours, entropy = logprobs_module.token_logprobs(decoder, hidden, target, 1.3, keep_bytes)
    plain = (decoder.logits(hidden) / 1.3).log_softmax(-1)
    theirs = plain.gather(1, target[:, None]).squeeze(1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, -(plain.exp() * plain).sum(-1).detach(), rtol=0, atol=1e-12)
    inputs = [hidden, decoder.embed.weight]
    grads = torch.autograd.grad((ours * weight).sum(), inputs), torch.autograd.grad((theirs * weight).sum(), inputs)
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)


def test_logprobs_are_accurate_over_a_large_vocabulary() -> None:
    decoder = init(replace(tiny_decoder().config, vocab_size=49_152, num_layers=1), 0)
    noise = torch.Generator().manual_seed(0)
    hidden, target = torch.randn(64, 32, generator=noise) * 30, torch.randint(0, 49_152, (64,), generator=noise)
    logits = decoder.logits(hidden).detach()
    exact = logits.double().log_softmax(-1).gather(1, target[:, None]).squeeze(1)
    ours = logprobs_module.token_logprobs(decoder, hidden, target)[0]
    plain = logits.log_softmax(-1).gather(1, target[:, None]).squeeze(1)
    assert (ours - exact).abs().max() < 2e-6 < 1e-5 < (plain - exact).abs().max()


# ---- updates ----


def by_hand(rollouts: list[Rollout], batch: TokenBatch, cuts: list[tuple[int, int]], num: int, lr: float) -> Decoder:
    """The reference implementation: AdamW steps on the loss of unpacked rollouts."""
    decoder = tiny_decoder().requires_grad_(True)
    adamw = torch.optim.AdamW(decoder.parameters(), lr=lr, weight_decay=0.0)
    for _ in range(num):
        for start, end in cuts:
            mini = batch.sequences(start, end)
            mini.weights_T = 1.0 / mini.length_S.double()[mini.sequence_T]
            adamw.zero_grad()
            linear_loss(mini, one_by_one(decoder, rollouts[start:end])).loss.backward()
            adamw.step()
    return decoder


@pytest.mark.parametrize("num_minibatches, num_iterations", [(1, 1), (3, 2)])
def test_an_update_equals_its_optimizer_steps(num_minibatches: int, num_iterations: int) -> None:
    groups = some_groups()
    rollouts, batch = scored(groups), TokenBatch.of(groups)
    settings = {"num_minibatches": num_minibatches, "num_iterations": num_iterations, "tokens_per_microbatch": 50}
    it = learner(**settings)
    before = it.logprobs(rollouts)
    seen: list[int] = []

    def weights(mini: TokenBatch) -> Tensor:
        seen.append(mini.num_sequences)
        return 1.0 / mini.length_S.double()[mini.sequence_T]

    report = it.update(rollouts, batch, linear_loss, weights)
    cuts = list(minibatches(batch.group_S, num_minibatches))
    assert seen == [end - start for start, end in cuts] * num_iterations
    expected = by_hand(rollouts, batch, cuts, num_iterations, 1e-2)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(it.decoder.get_parameter(name), parameter, rtol=0, atol=1e-8)
    assert it.version == 1 and report.learning_rate == 1e-2
    torch.testing.assert_close(report.logprobs_T, before, rtol=0, atol=1e-12)
    assert not report.logprobs_T.requires_grad and report.logprobs_T.dtype == torch.float64
    assert batch.old_logprobs_T is None and batch.weights_T is None  # the caller's batch does not change


def test_report_gives_means_over_trained_tokens() -> None:
    groups = some_groups()
    rollouts, batch = scored(groups), TokenBatch.of(groups)
    batch.mask_T = batch.mask_T & (batch.sequence_T != 2)  # an algorithm's filter
    it = learner(temperature=1.4, tokens_per_microbatch=40)
    packed = pack(rollouts)
    hidden = it.decoder(packed.tokens_N, packed.positions_N, PackedAttention(packed.lengths, packed.prefixes)).hidden
    p = (it.decoder.logits(hidden[packed.row_P]) / 1.4).softmax(-1)
    entropy_T = torch.zeros(len(batch.mask_T), dtype=torch.float64)
    entropy_T[packed.index_P] = -(p * p.log()).sum(-1).detach()
    logprobs = it.logprobs(rollouts)
    report = it.update(rollouts, batch, linear_loss)
    num = int(batch.mask_T.sum())
    assert report.entropy == pytest.approx(float(entropy_T[batch.mask_T].mean()), rel=1e-12)
    assert report.stats == {"logprob": pytest.approx(float(logprobs.sum()) / num)}
    assert report.loss == pytest.approx(float(linear_loss(batch, logprobs).loss))


@pytest.mark.parametrize("num_minibatches, num_iterations", [(1, 2), (2, 1), (2, 2)])
def test_old_logprobs_are_those_before_the_first_step(num_minibatches: int, num_iterations: int) -> None:
    groups = some_groups(num_groups=2)
    rollouts, batch = scored(groups), TokenBatch.of(groups)
    it = learner(num_minibatches=num_minibatches, num_iterations=num_iterations)
    num_first = int((batch.sequence_T < 4).sum())
    before, gaps = it.logprobs(rollouts).split([num_first, len(batch.mask_T) - num_first]), []

    def loss(part: TokenBatch, logprobs_T: Tensor) -> Loss:
        if part.old_logprobs_T is not None:
            which = torch.cat(before) if num_minibatches == 1 else before[int(part.group_S[0])]
            torch.testing.assert_close(part.old_logprobs_T, which, rtol=0, atol=1e-12)
            gaps.append(float((logprobs_T.detach() - part.old_logprobs_T).abs().max()))
        return linear_loss(part, logprobs_T)

    it.update(rollouts, batch, loss)
    assert max(gaps) > 1e-3 and len(gaps) >= num_minibatches * num_iterations - 1


def test_the_size_of_a_microbatch_must_be_a_number() -> None:
    groups = some_groups(num_groups=1)
    it = Learner(tiny_decoder(), LearnerSection(), num_steps=1)
    with pytest.raises(ValueError, match='tokens_per_microbatch = "auto": only a run chooses it'):
        it.update(scored(groups), TokenBatch.of(groups), linear_loss)


BAD_LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "nan": (lambda x: (x * torch.nan).sum(), "the loss is nan"),
    "infinite, with a finite gradient": (lambda x: x.sum() + torch.inf, "the loss is inf"),
    # The loss is 0, its gradient 1 / 0.
    "infinite gradient": (lambda x: (x - x.detach()).sqrt().sum(), "the gradient norm is (nan|inf)"),
}


def bad_loss(kind: str) -> Callable[[TokenBatch, Tensor], Loss]:
    return lambda part, logprobs_T: Loss(BAD_LOSSES[kind][0](logprobs_T), {"num_tokens": torch.nan})


def optimizer_state(it: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in it.optimizer.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", BAD_LOSSES)
def test_an_optimizer_step_that_is_not_finite_is_skipped(kind: str, dtype: torch.dtype) -> None:
    groups = some_groups()
    rollouts, batch = scored(groups), TokenBatch.of(groups)
    it, clean = (learner(tiny_decoder(dtype), tokens_per_microbatch=40) for _ in range(2))
    for one in (it, clean):
        one.update(rollouts, batch, linear_loss)
    before, weights = optimizer_state(it), weights_of(it)
    report = it.update(rollouts, batch, bad_loss(kind))
    assert same(before, optimizer_state(it)) and same(weights, weights_of(it))
    assert it.version == 2 and it.num_skipped_in_a_row == 1
    assert report.num_optimizer_steps == 0 and len(report.skipped) == 1
    assert re.fullmatch(BAD_LOSSES[kind][1], report.skipped[0])
    assert np.isnan([report.loss, report.grad_norm, report.entropy]).all() and report.stats == {}
    for one in (it, clean):  # the skipped step has no effect on the next one
        one.update(rollouts, batch, linear_loss)
    assert same(weights_of(it), weights_of(clean)) and it.num_skipped_in_a_row == 0


@pytest.mark.parametrize("skipped", [0, 1, 2])
@pytest.mark.parametrize("kind", BAD_LOSSES)
def test_the_other_minibatches_are_applied(kind: str, skipped: int) -> None:
    groups = some_groups()
    rollouts, batch = scored(groups), TokenBatch.of(groups)
    cuts = list(minibatches(batch.group_S, 3))

    def loss(part: TokenBatch, logprobs_T: Tensor) -> Loss:
        bad = int(part.group_S[0]) == groups[skipped].index
        return bad_loss(kind)(part, logprobs_T) if bad else linear_loss(part, logprobs_T)

    it = learner(num_minibatches=3)
    report = it.update(rollouts, batch, loss, lambda mini: 1.0 / mini.length_S.double()[mini.sequence_T])
    expected = by_hand(rollouts, batch, [cut for i, cut in enumerate(cuts) if i != skipped], 1, 1e-2)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(it.decoder.get_parameter(name), parameter, rtol=0, atol=1e-8)
    assert report.num_optimizer_steps == 2 and len(report.skipped) == 1
    assert np.isfinite([report.loss, report.grad_norm, report.entropy, *report.stats.values()]).all()
    assert it.num_skipped_in_a_row == (1 if skipped == 2 else 0) and it.version == 1


def test_the_count_of_skipped_steps_is_saved() -> None:
    groups = some_groups()
    it, other = learner(num_minibatches=3, num_iterations=2), learner()
    it.update(scored(groups), TokenBatch.of(groups), bad_loss("nan"))
    assert it.num_skipped_in_a_row == 6
    other.load_state_dict({name: tensor.clone() for name, tensor in it.state_dict().items()})
    assert other.num_skipped_in_a_row == 6


def test_a_loss_that_raises_leaves_no_gradient_behind() -> None:
    groups = some_groups()
    rollouts, batch = scored(groups), TokenBatch.of(groups)
    it, clean = learner(tokens_per_microbatch=30), learner(tokens_per_microbatch=30)
    calls = []

    def loss(part: TokenBatch, logprobs_T: Tensor) -> Loss:
        calls.append(0)
        if len(calls) == 3:
            raise RuntimeError
        return linear_loss(part, logprobs_T)

    with pytest.raises(RuntimeError):
        it.update(rollouts, batch, loss)
    for one in (it, clean):
        one.update(rollouts, batch, linear_loss)
    assert same(weights_of(it), weights_of(clean))


def test_greedy_sampling_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"sampling\.temperature = 0"):
        learner(temperature=0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_activation_checkpointing_changes_nothing(dtype: torch.dtype) -> None:
    groups = some_groups()
    rollouts, batch = scored(groups), TokenBatch.of(groups)
    plain, lean = (learner(tiny_decoder(dtype), activation_checkpointing=on) for on in (False, True))
    assert torch.equal(plain.logprobs(rollouts), lean.logprobs(rollouts))
    assert same(gradients(plain, rollouts, batch), gradients(lean, rollouts, batch))


def test_activation_checkpointing_saves_memory() -> None:
    rollouts = scored(some_groups())
    kept = []
    for on in (False, True):
        it, sizes = learner(activation_checkpointing=on), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=sizes: s.append(x.nbytes) or x, lambda x: x):
            it._forward(it.decoder, rollouts)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 3


# ---- state ----


@pytest.mark.parametrize(
    "dtype, settings",
    [
        (torch.float32, {}),
        (torch.float64, {"optimizer": "muon"}),
        (torch.float32, {"lora_rank": 2}),
        (torch.float32, {"lora_rank": 2, "optimizer": "muon"}),
        (torch.bfloat16, {"lora_rank": 2}),  # for its float32 masters
    ],
    ids=["adamw", "muon", "lora", "lora-muon", "masters"],
)
def test_a_restored_learner_continues_bit_for_bit(settings: dict[str, Any], dtype: torch.dtype) -> None:
    """And the same input gives the same result twice."""
    settings = {**settings, "warmup_steps": 3, "schedule": "cosine", "tokens_per_microbatch": 40}
    data = [(scored(groups), TokenBatch.of(groups)) for groups in (some_groups(seed, 1, 3) for seed in range(5))]
    straight, first, second = (learner(tiny_decoder(dtype), **settings) for _ in range(3))
    reports = [straight.update(*one, linear_loss) for one in data]
    for one in data[:3]:
        first.update(*one, linear_loss)
    state = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    assert all(isinstance(tensor, Tensor) for tensor in state.values())
    second.load_state_dict(state)
    assert second.version == 3
    assert same(weights_of(first), weights_of(second))
    again = [second.update(*one, linear_loss) for one in data[3:]]
    assert same(weights_of(second), weights_of(straight)) and same(second.state_dict(), straight.state_dict())
    assert [r.loss for r in again] == [r.loss for r in reports[3:]]
    assert not same(weights_of(first), weights_of(second))
    short = {name: tensor for name, tensor in state.items() if not name.startswith(("exp_avg_sq.", "momentum"))}
    other = learner(tiny_decoder(dtype), **settings)
    other.load_state_dict({**short, **{name: torch.zeros_like(state[name]) for name in state.keys() - short.keys()}})
    for one in data[3:]:
        other.update(*one, linear_loss)
    assert not same(weights_of(other), weights_of(straight)), "the moments matter"


def test_a_state_of_another_optimizer_or_rank_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"learner\.optimizer"):
        learner(optimizer="muon").load_state_dict(learner().state_dict())
    with pytest.raises(ValueError, match=r"lora_"):
        learner(lora_rank=2).load_state_dict(learner(lora_rank=3).state_dict())


def test_master_weights_keep_steps_below_bfloat16_precision() -> None:
    """Small steps add up in the float32 master weights; the parameters are the rounded master weights."""
    groups = some_groups(0, 1, 2)
    rollouts, batch = scored(groups), TokenBatch.of(groups)
    it = learner(tiny_decoder(torch.bfloat16), learning_rate=1e-4)
    start = {name: master.clone() for name, master in it.optimizer.masters.items()}
    for _ in range(3):
        it.update(rollouts, batch, linear_loss)
    for name, master in it.optimizer.masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), it.optimizer.parameters[name])
    moved = start["norm"] != it.optimizer.masters["norm"]
    assert moved.all() and (start["norm"].bfloat16() == it.decoder.norm).all()


def test_reference_is_the_policy_at_the_start() -> None:
    groups = some_groups()
    rollouts, batch = scored(groups), TokenBatch.of(groups)
    for settings in ({}, {"lora_rank": 2}):
        section = LearnerSection(learning_rate=1e-2, tokens_per_microbatch=2048, **settings)
        it = Learner(tiny_decoder(), section, num_steps=3, keep_reference=True)
        before = it.logprobs(rollouts)
        it.update(rollouts, batch, linear_loss)
        it.update(rollouts, batch, linear_loss)
        assert torch.equal(it.reference_logprobs(rollouts), before)
        assert (it.logprobs(rollouts) - before).abs().max() > 1e-2


# ---- YaRN ----


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_yarn_logits_are_transformers(checkpoint: Callable[..., Any], family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = checkpoint(family, max_position_embeddings=32)
    ids = torch.randint(0, 256, (120,), generator=torch.Generator().manual_seed(0))
    config = AutoConfig.from_pretrained(path)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}
    config.rope_parameters, config.max_position_embeddings = yarn, 128
    plain = load(path)
    stretched = Decoder(with_yarn(plain.config, 4.0))
    assert stretched.config.max_positions == 128
    assign(stretched, hf_state(plain))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(path, config=config)(ids[None]).logits[0]
        ours = stretched.logits(stretched(ids, torch.arange(120), PackedAttention([120])).hidden)
        short = ids[:30]
        unscaled = plain.logits(plain(short, torch.arange(30), PackedAttention([30])).hidden)
    # float32, and fused projections multiply in another order; logits are up to some tens.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-5)
    assert (unscaled - ours[:30]).abs().max() > 1e-2
    with pytest.raises(ValueError, match=r"model\.yarn_factor = 2\.0: the model has yarn rope scaling already"):
        with_yarn(stretched.config, 2.0)
