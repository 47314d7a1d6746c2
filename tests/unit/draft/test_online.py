"""Online training of a head during the policy's updates does not affect the policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import head_checksum, tiny_decoder, tiny_dspark, tiny_head
from tiny_run import LeakyOps
from torch import Tensor

from paceline.build.config import load_config
from paceline.config import DraftSection, LearnerSection
from paceline.config_io import ConfigError
from paceline.draft.head_batch import Example, HeadBatch, make_head_batch
from paceline.draft.online import OnlineHeadTrainer, online_section, select_rollouts
from paceline.model.decoder import Decoder, Output
from paceline.model.head_files import assign_head, head_state
from paceline.model.paged import receipt_of
from paceline.rl.batch import TokenBatch, scored
from paceline.rl.batch_producer import BatchProducer
from paceline.rl.learner import Learner
from paceline.rl.produce import Producer, PublishedWeights
from paceline.rl.stage_timer import StageTimer
from paceline.types import Group, Receipt, Rollout

FLAVOURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "microbatches": {"tokens_per_microbatch": 40},
    "minibatches, twice": {"num_minibatches": 2, "num_iterations": 2},
    "checkpointed": {"activation_checkpointing": True},
    "lora": {"lora_rank": 4},
    "muon": {"optimizer": "muon"},
}


def rollout(prompt: Sequence[int], tokens: Sequence[int], mask: Sequence[bool] | None = None) -> Rollout:
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
        reward=float(num % 5 - 2),
    )


def some_groups(seed: int = 0) -> list[Group]:
    """Shared prompts; completions of different lengths, one without a token of the policy; an environment's turn."""
    rng = np.random.default_rng(seed)
    groups = []
    for index in range(3):
        prompt = rng.integers(0, 60, 3 + index).tolist()
        rollouts = [rollout(prompt, rng.integers(0, 60, n).tolist()) for n in (1, 7, 19, 12)]
        rollouts[1].mask[2:4] = False
        rollouts[3].mask[-2:] = False  # the environment's last turn is not packed
        groups.append(Group(index, str(index), "", rollouts))
    groups[1].rollouts.append(rollout(prompt, [5, 6], [False, False]))
    return groups


def loss(batch: TokenBatch, logprobs_T: Tensor) -> Any:
    token_T = batch.reward_S[batch.sequence_T] * logprobs_T * batch.mask_T
    return SimpleNamespace(loss=-token_T.sum(), stats={"tokens": float(batch.mask_T.sum())})


def pair(
    decoder: Decoder | None = None, draft: dict[str, Any] | None = None, **settings: Any
) -> tuple[Learner, OnlineHeadTrainer]:
    """A policy in training, and its online head trainer."""
    decoder = decoder or tiny_decoder()
    settings = {"learning_rate": 1e-2, "tokens_per_microbatch": 2048, **settings}
    learner = Learner(decoder, LearnerSection(**settings), num_steps=10)
    section = DraftSection(online="every", online_learning_rate=1e-2, unroll=3, **(draft or {}))
    return learner, OnlineHeadTrainer(tiny_head(decoder), decoder, section, 1.0)


def update(learner: Learner, head_trainer: OnlineHeadTrainer | None, groups: list[Group]) -> None:
    rollouts, batch = scored(groups), TokenBatch.of(groups)
    if head_trainer is not None:
        head_trainer.begin_update(rollouts, batch.group_S.tolist(), StageTimer())
    learner.update(rollouts, batch, loss, None, head_trainer)


def weights_of(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- the policy ----


def trained(flavour: str, training_head: bool, leaking: bool = False, **model: Any) -> dict[str, Tensor]:
    learner, head_trainer = pair(tiny_decoder(**model), **FLAVOURS[flavour])
    if leaking:
        head_trainer.learner.head.ops = LeakyOps()
    before = head_checksum(head_trainer.learner.head)
    for seed in range(3):
        update(learner, head_trainer if training_head else None, some_groups(seed))
    assert (head_checksum(head_trainer.learner.head) != before) == training_head
    return weights_of(learner)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("tie", [True, False])
def test_the_policy_is_bit_identical(flavour: str, tie: bool) -> None:
    before = torch.get_rng_state()
    assert same(trained(flavour, True, tie_embeddings=tie), trained(flavour, False, tie_embeddings=tie))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_policy_in_half_precision() -> None:
    """The head trains in float32."""
    found = []
    for training_head in (True, False):
        decoder = tiny_decoder(torch.bfloat16)
        learner = Learner(decoder, LearnerSection(learning_rate=1e-2, tokens_per_microbatch=2048), num_steps=10)
        section = DraftSection(online_learning_rate=1e-2)
        head_trainer = OnlineHeadTrainer(tiny_head(decoder).float(), decoder, section, 1.0)
        update(learner, head_trainer if training_head else None, some_groups())
        assert (head_checksum(head_trainer.learner.head) != head_trainer.base) == training_head
        found.append(weights_of(learner))
    assert same(*found) and all(tensor.dtype == torch.bfloat16 for tensor in found[0].values())


@pytest.mark.parametrize("flavour", ["plain", "minibatches, twice"])
def test_a_gradient_that_reaches_the_policy_is_caught(flavour: str) -> None:
    """Deliberately broken: the head's loss has a gradient for the policy's embedding."""
    assert not same(trained(flavour, True, leaking=True), trained(flavour, False))


def test_states_with_gradients_are_rejected() -> None:
    """Deliberately broken: hidden states that are not detached."""
    learner, head_trainer = pair()
    observe = head_trainer.observe

    def attached(rollouts: Any, packed: Any, output: Any) -> None:
        output.aux_hidden_states = {layer: x.requires_grad_(True) for layer, x in output.aux_hidden_states.items()}
        observe(rollouts, packed, output)

    head_trainer.observe = attached  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        update(learner, head_trainer, some_groups())


# ---- the head's batches ----


@pytest.mark.parametrize("max_tokens", [20, 10_000])
def test_a_head_batch_equals_one_from_a_separate_forward_pass(max_tokens: int) -> None:
    learner, head_trainer = pair(tokens_per_microbatch=max_tokens)
    before = tiny_decoder()
    head_batches: list[HeadBatch] = []
    head_trainer.learner.update = lambda head_batch, embed: head_batches.append(head_batch)  # type: ignore[method-assign,assignment,return-value]
    groups = some_groups()
    update(learner, head_trainer, groups)
    (head_batch,) = head_batches
    trained_on = [r for group in groups for r in group.rollouts if r.mask.any()]
    trained_on.sort(key=lambda r: len(r.prompt_ids) + np.flatnonzero(r.mask)[-1])
    assert len(head_batch.tokens_SL) == len(trained_on) == 12
    for row, r in enumerate(trained_on):
        needed = np.flatnonzero(r.mask)[-1] + 1
        tokens = np.array([*r.prompt_ids, *r.token_ids[:needed]], np.int32)
        loss_mask = np.array([*[False] * len(r.prompt_ids), *r.mask[:needed]])
        n = len(tokens)
        expected = make_head_batch(before, [Example(tokens, loss_mask)], head_trainer.aux_layers)
        assert torch.equal(head_batch.tokens_SL[row, :n], expected.tokens_SL[0])
        assert torch.equal(head_batch.loss_mask_SL[row, :n], expected.loss_mask_SL[0])
        assert not head_batch.loss_mask_SL[row, n:].any()
        for mine, theirs in (
            (head_batch.aux_hidden_SLF, expected.aux_hidden_SLF),
            (head_batch.hidden_SLD, expected.hidden_SLD),
        ):
            torch.testing.assert_close(mine[row, : n - 1], theirs[0, : n - 1], rtol=0, atol=1e-12)


def test_the_target_distribution_is_the_policy_before_its_update() -> None:
    learner, head_trainer = pair()
    before = tiny_decoder()
    found = []

    def record(head_batch: HeadBatch, embed: Any) -> None:
        found.append(head_batch.logits(head_batch.hidden_SLD[0]).detach() - before.logits(head_batch.hidden_SLD[0]))

    head_trainer.learner.update = record  # type: ignore[method-assign,assignment]
    update(learner, head_trainer, some_groups())
    assert found and all(gap.abs().max() == 0 for gap in found)


@pytest.mark.parametrize(("num_minibatches", "num_updates"), [(1, 1), (3, 3)])
def test_only_the_first_pass_trains_the_head(num_minibatches: int, num_updates: int) -> None:
    learner, head_trainer = pair(num_minibatches=num_minibatches, num_iterations=2)
    update(learner, head_trainer, some_groups())
    assert head_trainer.version == num_updates and head_trainer.num_tokens == sum(head_trainer._lengths.values())


def test_microbatches_change_the_head_only_by_rounding() -> None:
    heads = []
    for max_tokens in (20, 10_000):
        learner, head_trainer = pair(draft={"tokens_per_batch": 60}, tokens_per_microbatch=max_tokens)
        update(learner, head_trainer, some_groups())
        assert head_trainer.version > 1
        heads.append(dict(head_trainer.weights()))
    for name, tensor in heads[0].items():
        torch.testing.assert_close(tensor, heads[1][name], rtol=0, atol=1e-9)


def test_the_head_improves_and_reports_it() -> None:
    learner, head_trainer = pair(learning_rate=0.0)
    reports = []
    for _ in range(12):
        update(learner, head_trainer, some_groups())
        reports.append(head_trainer.metrics())
    assert reports[-1]["loss"] < reports[0]["loss"] and list(reports[0]["overlap"]) == ["1", "2", "3"]
    assert reports[-1]["overlap"]["1"] > 1.1 * reports[0]["overlap"]["1"]
    assert reports[-1]["version"] == 12 and reports[0]["num_tokens"] == sum(head_trainer._lengths.values())
    assert head_trainer.num_tokens == 12 * reports[0]["num_tokens"]


def test_select_rollouts() -> None:
    groups = some_groups()
    rollouts, owner = scored(groups), TokenBatch.of(groups).group_S.tolist()
    by_id = {id(r): (group, r) for r, group in zip(rollouts, owner, strict=True)}
    everything = select_rollouts(rollouts, owner, 10_000)
    assert len(everything) == 12 and rollouts[1].mask.any()
    some = select_rollouts(rollouts, owner, 15)
    assert sum(some.values()) <= 15 and some == select_rollouts(rollouts, owner, 15)
    assert {by_id[i][0] for i in some} == {0, 1, 2}, "of every group"
    assert all(everything[i] == length for i, length in some.items()), "whole sequences"
    assert list(select_rollouts(rollouts, owner, 2).values()) == [2], "the beginning of the first"
    assert select_rollouts(rollouts[-1:], [1], 100).keys() <= everything.keys()
    assert select_rollouts([], [], 100) == {}


def test_head_batches_respect_tokens_per_batch() -> None:
    """Including padding."""
    learner, head_trainer = pair(draft={"tokens_per_batch": 64})
    sizes: list[int] = []
    update_head = head_trainer.learner.update

    def record(head_batch: HeadBatch, embed: Any) -> Any:
        sizes.append(head_batch.tokens_SL.numel())
        return update_head(head_batch, embed)

    head_trainer.learner.update = record  # type: ignore[method-assign]
    update(learner, head_trainer, some_groups())
    assert len(sizes) == head_trainer.version > 2 and max(sizes) <= 64


def test_a_truncated_sequence_is_trained_on() -> None:
    learner, head_trainer = pair()
    # All sequences have at least 4 tokens.
    head_trainer.section = head_trainer.section.model_copy(update={"online_tokens": 3})
    update(learner, head_trainer, some_groups())
    assert head_trainer.version == 1 and head_trainer.num_tokens == 3


# ---- when to train ----


def test_should_train_off_and_every() -> None:
    _, head_trainer = pair(draft={"online_every": 3})
    assert [head_trainer.should_train(step, None) for step in range(6)] == [False, False, True, False, False, True]
    head_trainer.section = DraftSection(online="off")
    assert not any(head_trainer.should_train(step, 1.0) for step in range(6))


def test_should_train_only_after_a_drop() -> None:
    _, head_trainer = pair()
    head_trainer.section = DraftSection(online="drop", online_drop=0.1)
    lengths = [2.0, 1.9, None, 2.5, 2.26, 2.24, 2.2, None, 2.4, 2.6, 2.33]
    trains = [head_trainer.should_train(step, length) for step, length in enumerate(lengths)]
    assert trains == [False, False, False, False, False, True, True, False, False, False, True]


def test_only_heads_can_be_trained_online() -> None:
    with pytest.raises(ConfigError, match=r'draft\.online = "every".*"suffix".*"eagle3", "dspark" or "hybrid"'):
        load_config(None, ["draft.online=every", "speculation.method=suffix"])
    for method in ("eagle3", "dspark", "hybrid"):
        load_config(None, ["draft.online=drop", f"speculation.method={method}"])


def test_online_section() -> None:
    decoder = tiny_decoder()
    head = tiny_head(decoder)
    given = DraftSection(learning_rate=1e-3, muon_learning_rate=2e-2, online_learning_rate=1e-4)
    section = online_section(given, head)
    assert section.learning_rate == 1e-4 and section.muon_learning_rate == pytest.approx(2e-3)
    assert section.schedule == "constant"
    default = DraftSection(learning_rate=0.0)
    assert online_section(default, head).muon_learning_rate == default.muon_learning_rate
    assert section.unroll == given.unroll
    assert online_section(given, tiny_dspark(decoder, block_size=7)).unroll == 7


# ---- state ----


def test_training_continues_bit_for_bit() -> None:
    learner, head_trainer = pair()
    for seed in range(2):
        update(learner, head_trainer, some_groups(seed))
    head_trainer.should_train(0, 2.5)
    state = {name: tensor.clone() for name, tensor in head_trainer.state_dict().items()}
    policy = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    other_learner, other = pair()
    other_learner.load_state_dict(policy)
    other.load_state_dict(state, head_trainer.metadata())
    assert (other.version, other.best, other.num_tokens) == (2, 2.5, head_trainer.num_tokens)
    for each in ((learner, head_trainer), (other_learner, other)):
        update(*each, some_groups(2))
    assert head_checksum(head_trainer.learner.head) == head_checksum(other.learner.head)


def test_another_head_or_optimizer_is_rejected() -> None:
    _, head_trainer = pair()
    state, metadata = head_trainer.state_dict(), head_trainer.metadata()
    decoder = tiny_decoder()
    other = OnlineHeadTrainer(tiny_head(decoder, seed=4), decoder, DraftSection(), 1.0)
    with pytest.raises(ValueError, match=r"speculation\.head: its weights are not those"):
        other.load_state_dict(state, metadata)
    muon = OnlineHeadTrainer(tiny_head(decoder), decoder, DraftSection(optimizer="muon"), 1.0)
    with pytest.raises(ValueError, match=r"draft\.optimizer = 'muon'.*'adamw'"):
        muon.load_state_dict(state, metadata)


def test_states_of_a_loss_that_is_not_finite_do_not_train_the_head() -> None:
    """The next minibatch does. Its states are finite."""
    groups = some_groups()
    for rollout in groups[0].rollouts:
        rollout.reward = float("inf")  # NaN means that there is none
    learner, head_trainer = pair(num_minibatches=3)
    rollouts, batch = scored(groups), TokenBatch.of(groups)
    head_trainer.begin_update(rollouts, batch.group_S.tolist(), StageTimer())
    observed = head_trainer.observe

    def spoil(rollouts: Any, packed: Any, output: Output) -> None:
        if rollouts[0] in groups[0].rollouts:
            output.hidden.fill_(torch.nan)
        observed(rollouts, packed, output)

    head_trainer.observe = spoil  # type: ignore[method-assign]
    report = learner.update(rollouts, batch, loss, None, head_trainer)
    assert report.skipped == ["the loss is nan"] and report.num_optimizer_steps == 2
    assert head_trainer.version == 2 and all(p.isfinite().all() for p in head_trainer.learner.head.parameters())


def test_a_failed_update_names_the_setting() -> None:
    learner, head_trainer = pair()
    with torch.no_grad():
        head_trainer.learner.head.norm.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"draft\.online_learning_rate = 0\.01: .* norm is nan"):
        update(learner, head_trainer, some_groups())


# ---- receipts ----


class Engine:
    """Has a head. `transfer` changes its weights on the way; None: they do not arrive."""

    def __init__(self, transfer: Any) -> None:
        self.head, self.transfer, self.versions = tiny_head(tiny_decoder(), seed=9), transfer, list[int]()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def update_weights(self, weights: Any, version: int, inflight: str) -> Receipt:
        return Receipt(version, "policy", 0, 0, 0.0)

    def update_drafter(self, weights: Iterator[tuple[str, Tensor]], version: int) -> Receipt:
        pairs = self.transfer([(name, tensor.clone()) for name, tensor in weights])
        if pairs is not None:
            assign_head(self.head, pairs)
        self.versions.append(version)
        return receipt_of(head_state(self.head), version, 0.0)


def corrupted(pairs: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    pairs[0][1][0, 0] += 1e-12
    return pairs


def make_producer(transfer: Any) -> tuple[Producer, Engine, OnlineHeadTrainer]:
    engine, (_, head_trainer) = Engine(transfer), pair()
    collector: Any = SimpleNamespace(engine=engine)
    producer = BatchProducer(collector, SimpleNamespace(train=[1]), None, load_config(None))  # type: ignore[arg-type]
    return producer, engine, head_trainer


def publish(producer: Producer, version: int, head_trainer: OnlineHeadTrainer) -> None:
    head = PublishedWeights(head_trainer.version, head_trainer.weights, head_checksum(head_trainer.learner.head))
    producer.publish(PublishedWeights(version, list, "policy", head))
    producer._update_engine(version, StageTimer(), "recompute")


def test_an_unchanged_head_is_not_sent_again() -> None:
    producer, engine, head_trainer = make_producer(lambda pairs: pairs)
    publish(producer, 0, head_trainer)
    publish(producer, 1, head_trainer)
    head_trainer.learner.version = 5
    publish(producer, 3, head_trainer)
    assert engine.versions == [0, 5] and head_checksum(engine.head) == head_checksum(head_trainer.learner.head)


@pytest.mark.parametrize("transfer", [corrupted, lambda pairs: None])
def test_a_failed_transfer_ends_the_run(transfer: Any) -> None:
    producer, _, head_trainer = make_producer(transfer)
    sent = head_checksum(head_trainer.learner.head)[:12]
    message = rf"drafter's weights of version 0: the engine has checksum \w{{12}}, .* sent {sent}"
    with pytest.raises(ValueError, match=message):
        publish(producer, 0, head_trainer)
