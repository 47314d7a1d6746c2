"""The head learns from the policy's own update, and the policy never knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_decoder, tiny_head
from tiny_run import Attached
from torch import Tensor

from paceline.config import ConfigError, DraftSection, LearnerSection, load_config
from paceline.draft.lesson import Example, Lesson, teach
from paceline.model.decoder import Decoder
from paceline.model.head_files import assign_head, head_checksum, head_state
from paceline.model.paged import receipt_of
from paceline.rl import figures
from paceline.rl.adapt import Adapter, choose, online_section
from paceline.rl.alarms import DROP, FLOOR, MIN_DRAFTS, Alarms
from paceline.rl.batch import TokenBatch, scored
from paceline.rl.learner import Learner
from paceline.rl.produce import Producer, Published
from paceline.rl.stopwatch import Stopwatch
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
    """Shared prompts; completions of many lengths, of one token and none of the policy's own; an environment's turn."""
    dice = np.random.default_rng(seed)
    groups = []
    for index in range(3):
        prompt = dice.integers(0, 60, 3 + index).tolist()
        rollouts = [rollout(prompt, dice.integers(0, 60, n).tolist()) for n in (1, 7, 19, 12)]
        rollouts[1].mask[2:4] = False
        rollouts[3].mask[-2:] = False  # what an environment said last is never laid out
        groups.append(Group(index, str(index), "", rollouts))
    groups[1].rollouts.append(rollout(prompt, [5, 6], [False, False]))
    return groups


def loss(batch: TokenBatch, logprobs_T: Tensor) -> Any:
    token_T = batch.reward_S[batch.sequence_T] * logprobs_T * batch.mask_T
    return SimpleNamespace(loss=-token_T.sum(), stats={"tokens": float(batch.mask_T.sum())})


def pair(
    decoder: Decoder | None = None, draft: dict[str, Any] | None = None, **settings: Any
) -> tuple[Learner, Adapter]:
    """A policy in training and the head that follows it."""
    decoder = decoder or tiny_decoder()
    learner = Learner(decoder, LearnerSection(**{"learning_rate": 1e-2, **settings}), num_steps=10)
    section = DraftSection(online="every", online_learning_rate=1e-2, unroll=3, **(draft or {}))
    return learner, Adapter(tiny_head(decoder), decoder, section, 1.0)


def update(learner: Learner, adapter: Adapter | None, groups: list[Group]) -> None:
    rollouts, batch = scored(groups), TokenBatch.of(groups)
    if adapter is not None:
        adapter.begin(rollouts, batch.group_S.tolist(), Stopwatch())
    learner.update(rollouts, batch, loss, None, adapter)


def weights_of(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- the policy ----


def trained(flavour: str, adapting: bool, leaking: bool = False, **model: Any) -> dict[str, Tensor]:
    learner, adapter = pair(tiny_decoder(**model), **FLAVOURS[flavour])
    if leaking:
        adapter.learner.head.ops = Attached()
    before = head_checksum(adapter.learner.head)
    for seed in range(3):
        update(learner, adapter if adapting else None, some_groups(seed))
    assert (head_checksum(adapter.learner.head) != before) == adapting
    return weights_of(learner)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("tie", [True, False])
def test_the_policy_is_the_same_bits(flavour: str, tie: bool) -> None:
    before = torch.get_rng_state()
    assert same(trained(flavour, True, tie_embeddings=tie), trained(flavour, False, tie_embeddings=tie))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_policy_in_half_precision() -> None:
    """Its head learns in float32."""
    found = []
    for adapting in (True, False):
        decoder = tiny_decoder(torch.bfloat16)
        learner = Learner(decoder, LearnerSection(learning_rate=1e-2), num_steps=10)
        adapter = Adapter(tiny_head(decoder).float(), decoder, DraftSection(online_learning_rate=1e-2), 1.0)
        update(learner, adapter if adapting else None, some_groups())
        assert (head_checksum(adapter.learner.head) != adapter.base) == adapting
        found.append(weights_of(learner))
    assert same(*found) and all(tensor.dtype == torch.bfloat16 for tensor in found[0].values())


@pytest.mark.parametrize("flavour", ["plain", "minibatches, twice"])
def test_one_gradient_that_reaches_the_policy_is_seen(flavour: str) -> None:
    """The broken twin: the head's loss has a way into the policy's embedding."""
    assert not same(trained(flavour, True, leaking=True), trained(flavour, False))


def test_states_with_a_way_back_are_refused() -> None:
    """The other broken twin: features that were not detached."""
    learner, adapter = pair()
    observe = adapter.observe

    def attached(rollouts: Any, packed: Any, output: Any) -> None:
        output.taps = {layer: x.requires_grad_(True) for layer, x in output.taps.items()}
        observe(rollouts, packed, output)

    adapter.observe = attached  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        update(learner, adapter, some_groups())


# ---- the lessons ----


@pytest.mark.parametrize("max_tokens", [20, 10_000])
def test_a_lesson_is_what_a_forward_of_its_own_would_teach(max_tokens: int) -> None:
    learner, adapter = pair(tokens_per_microbatch=max_tokens)
    before = tiny_decoder()
    lessons: list[Lesson] = []
    adapter.learner.update = lambda lesson, embed: lessons.append(lesson)  # type: ignore[method-assign,assignment,return-value]
    groups = some_groups()
    update(learner, adapter, groups)
    (lesson,) = lessons
    told = [r for group in groups for r in group.rollouts if r.mask.any()]
    told.sort(key=lambda r: len(r.prompt_ids) + np.flatnonzero(r.mask)[-1])
    assert len(lesson.tokens_SL) == len(told) == 12
    for row, r in enumerate(told):
        needed = np.flatnonzero(r.mask)[-1] + 1
        tokens = np.array([*r.prompt_ids, *r.token_ids[:needed]], np.int32)
        chosen = np.array([*[False] * len(r.prompt_ids), *r.mask[:needed]])
        n = len(tokens)
        expected = teach(before, [Example(tokens, chosen)], adapter.taps)
        assert torch.equal(lesson.tokens_SL[row, :n], expected.tokens_SL[0])
        assert torch.equal(lesson.chosen_SL[row, :n], expected.chosen_SL[0]) and not lesson.chosen_SL[row, n:].any()
        for mine, theirs in (
            (lesson.features_SLF, expected.features_SLF),
            (lesson.hidden_SLD, expected.hidden_SLD),
        ):
            torch.testing.assert_close(mine[row, : n - 1], theirs[0, : n - 1], rtol=0, atol=1e-12)


def test_the_teacher_is_the_policy_before_its_step() -> None:
    learner, adapter = pair()
    before = tiny_decoder()
    found = []

    def look(lesson: Lesson, embed: Any) -> None:
        found.append(lesson.logits(lesson.hidden_SLD[0]).detach() - before.logits(lesson.hidden_SLD[0]))

    adapter.learner.update = look  # type: ignore[method-assign,assignment]
    update(learner, adapter, some_groups())
    assert found and all(gap.abs().max() == 0 for gap in found)


@pytest.mark.parametrize(("num_minibatches", "num_updates"), [(1, 1), (3, 3)])
def test_further_passes_teach_nothing(num_minibatches: int, num_updates: int) -> None:
    learner, adapter = pair(num_minibatches=num_minibatches, num_iterations=2)
    update(learner, adapter, some_groups())
    assert adapter.version == num_updates and adapter.num_tokens == sum(adapter._lengths.values())


def test_microbatches_change_the_head_in_rounding_only() -> None:
    heads = []
    for max_tokens in (20, 10_000):
        learner, adapter = pair(draft={"tokens_per_batch": 60}, tokens_per_microbatch=max_tokens)
        update(learner, adapter, some_groups())
        assert adapter.version > 1
        heads.append(dict(adapter.weights()))
    for name, tensor in heads[0].items():
        torch.testing.assert_close(tensor, heads[1][name], rtol=0, atol=1e-9)


def test_the_head_gets_better_and_tells() -> None:
    learner, adapter = pair(learning_rate=0.0)
    reports = []
    for _ in range(12):
        update(learner, adapter, some_groups())
        reports.append(adapter.report())
    assert reports[-1]["loss"] < reports[0]["loss"] and list(reports[0]["overlap"]) == ["1", "2", "3"]
    assert reports[-1]["overlap"]["1"] > 1.1 * reports[0]["overlap"]["1"]
    assert reports[-1]["version"] == 12 and reports[0]["num_tokens"] == sum(adapter._lengths.values())
    assert adapter.num_tokens == 12 * reports[0]["num_tokens"]


def test_choose() -> None:
    groups = some_groups()
    rollouts, owner = scored(groups), TokenBatch.of(groups).group_S.tolist()
    by_id = {id(r): (group, r) for r, group in zip(rollouts, owner, strict=True)}
    everything = choose(rollouts, owner, 10_000)
    assert len(everything) == 12 and rollouts[1].mask.any()
    some = choose(rollouts, owner, 15)
    assert sum(some.values()) <= 15 and some == choose(rollouts, owner, 15)
    assert {by_id[i][0] for i in some} == {0, 1, 2}, "every group has a say"
    assert all(everything[i] == length for i, length in some.items()), "whole sequences"
    assert list(choose(rollouts, owner, 2).values()) == [2], "at least something"
    assert choose(rollouts[-1:], [1], 100).keys() <= everything.keys()
    assert choose([], [], 100) == {}


def test_no_lesson_is_larger_than_it_may_be() -> None:
    """Padding counts: a long sequence among short ones must not blow up."""
    learner, adapter = pair(draft={"tokens_per_batch": 64})
    sizes: list[int] = []
    learn = adapter.learner.update

    def look(lesson: Lesson, embed: Any) -> Any:
        sizes.append(lesson.tokens_SL.numel())
        return learn(lesson, embed)

    adapter.learner.update = look  # type: ignore[method-assign]
    update(learner, adapter, some_groups())
    assert len(sizes) == adapter.version > 2 and max(sizes) <= 64


def test_a_sequence_that_is_cut_teaches_what_is_left() -> None:
    learner, adapter = pair()
    adapter.section = adapter.section.model_copy(update={"online_tokens": 3})  # these sequences have 4 and more
    update(learner, adapter, some_groups())
    assert adapter.version == 1 and adapter.num_tokens == 3


# ---- when ----


def test_off_and_every() -> None:
    _, adapter = pair(draft={"online_every": 3})
    assert [adapter.wants(step, None) for step in range(6)] == [False, False, True, False, False, True]
    adapter.section = DraftSection(online="off")
    assert not any(adapter.wants(step, 1.0) for step in range(6))


def test_only_after_a_drop() -> None:
    _, adapter = pair()
    adapter.section = DraftSection(online="drop", online_drop=0.1)
    lengths = [2.0, 1.9, None, 2.5, 2.26, 2.24, 2.2, None, 2.4, 2.6, 2.33]
    wanted = [adapter.wants(step, length) for step, length in enumerate(lengths)]
    assert wanted == [False, False, False, False, False, True, True, False, False, False, True]


def test_only_a_head_can_learn() -> None:
    with pytest.raises(ConfigError, match=r'draft\.online = "every".*"suffix".*"eagle3" or "hybrid"'):
        load_config(None, ["draft.online=every", "speculation.method=suffix"])
    for method in ("eagle3", "hybrid"):
        load_config(None, ["draft.online=drop", f"speculation.method={method}"])


def test_its_own_settings() -> None:
    section = online_section(DraftSection(learning_rate=1e-3, muon_learning_rate=2e-2, online_learning_rate=1e-4))
    assert section.learning_rate == 1e-4 and section.muon_learning_rate == pytest.approx(2e-3)
    assert section.schedule == "constant"
    assert online_section(DraftSection(learning_rate=0.0)).muon_learning_rate == DraftSection().muon_learning_rate


# ---- again ----


def test_goes_on_bit_for_bit() -> None:
    learner, adapter = pair()
    for seed in range(2):
        update(learner, adapter, some_groups(seed))
    adapter.wants(0, 2.5)
    state = {name: tensor.clone() for name, tensor in adapter.state().items()}
    policy = {name: tensor.clone() for name, tensor in learner.state().items()}
    other_learner, other = pair()
    other_learner.restore(policy)
    other.restore(state, adapter.labels())
    assert (other.version, other.best, other.num_tokens) == (2, 2.5, adapter.num_tokens)
    for each in ((learner, adapter), (other_learner, other)):
        update(*each, some_groups(2))
    assert head_checksum(adapter.learner.head) == head_checksum(other.learner.head)


def test_another_head_or_optimiser_is_refused() -> None:
    _, adapter = pair()
    state, labels = adapter.state(), adapter.labels()
    decoder = tiny_decoder()
    other = Adapter(tiny_head(decoder, seed=4), decoder, DraftSection(), 1.0)
    with pytest.raises(ValueError, match=r"speculation\.head: its weights are not those"):
        other.restore(state, labels)
    muon = Adapter(tiny_head(decoder), decoder, DraftSection(optimizer="muon"), 1.0)
    with pytest.raises(ValueError, match=r"draft\.optimizer = 'muon'.*'adamw'"):
        muon.restore(state, labels)


def test_an_update_that_fails_names_its_setting() -> None:
    learner, adapter = pair()
    with torch.no_grad():
        adapter.learner.head.norm.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"draft\.online_learning_rate = 0\.01: .* norm is nan"):
        update(learner, adapter, some_groups())


# ---- receipts ----


class Engine:
    """Holds a head; `spoil` is what happens to it on the way."""

    def __init__(self, spoil: Any) -> None:
        self.head, self.spoil, self.taken = tiny_head(tiny_decoder(), seed=9), spoil, list[int]()

    def learned(self) -> dict[str, Any]:
        return {}

    def update_weights(self, weights: Any, version: int, inflight: str) -> Receipt:
        return Receipt(version, "policy", 0, 0, 0.0)

    def update_drafter(self, weights: Iterator[tuple[str, Tensor]], version: int) -> Receipt:
        pairs = self.spoil([(name, tensor.clone()) for name, tensor in weights])
        if pairs is not None:
            assign_head(self.head, pairs)
        self.taken.append(version)
        return receipt_of(head_state(self.head), version, 0.0)


def garbled(pairs: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    pairs[0][1][0, 0] += 1e-12
    return pairs


def taking(spoil: Any) -> tuple[Producer, Engine, Adapter]:
    engine, (_, adapter) = Engine(spoil), pair()
    collector: Any = SimpleNamespace(engine=engine)
    settings: dict[str, Any] = dict.fromkeys(("num_steps", "groups_per_step", "num_generations"), 1)
    producer = Producer(
        collector, SimpleNamespace(train=[1]), None, max_sampling_rounds=1, max_staleness=0, inflight="drain", seed=0,
        **settings,
    )  # type: ignore[arg-type]  # fmt: skip
    return producer, engine, adapter


def publish(producer: Producer, version: int, adapter: Adapter) -> None:
    head = Published(adapter.version, adapter.weights, head_checksum(adapter.learner.head))
    producer.publish(Published(version, list, "policy", head))
    producer._take(version, Stopwatch(), "recompute")


def test_a_head_that_did_not_change_is_not_sent_again() -> None:
    producer, engine, adapter = taking(lambda pairs: pairs)
    publish(producer, 0, adapter)
    publish(producer, 1, adapter)
    adapter.learner.version = 5
    publish(producer, 3, adapter)
    assert engine.taken == [0, 5] and head_checksum(engine.head) == head_checksum(adapter.learner.head)


@pytest.mark.parametrize("spoil", [garbled, lambda pairs: None])
def test_a_transfer_that_went_wrong_ends_the_run(spoil: Any) -> None:
    producer, _, adapter = taking(spoil)
    sent = head_checksum(adapter.learner.head)[:12]
    with pytest.raises(ValueError, match=rf"drafter's weights of version 0: the engine holds \w{{12}}, .* sent {sent}"):
        publish(producer, 0, adapter)


# ---- alarms ----


def alarms(*overrides: str) -> Alarms:
    return Alarms(load_config(None, ["draft.alarm_drop=0.2", "draft.alarm_floor=1.05", *overrides]))


def test_a_fall_at_a_weight_sync() -> None:
    watch = alarms("speculation.method=eagle3")
    assert watch.check(2.0, 0) == ({DROP: False, FLOOR: False}, [])
    assert watch.check(1.61, 1) == ({DROP: False, FLOOR: False}, [])
    assert watch.check(None, 2) == ({DROP: False, FLOOR: False}, []), "too few drafts to tell"
    flags, said = watch.check(1.2, 2)
    assert flags == {DROP: True, FLOOR: False}
    assert len(said) == 1 and "1.61 -> 1.20" in said[0] and 'draft.online = "every"' in said[0]
    assert watch.check(1.2, 3) == ({DROP: False, FLOOR: False}, [])
    assert watch.check(2.0, 4)[1] == []


def test_no_sync_no_alarm() -> None:
    watch = alarms()
    watch.check(2.0, 3)
    assert watch.check(1.2, 3) == ({DROP: False, FLOOR: False}, [])


def test_wasted_drafts_are_said_once() -> None:
    watch = alarms("speculation.method=ngram")
    said = [watch.check(length, i)[1] for i, length in enumerate([1.04, 1.03, None, 1.02, 1.06, 1.01])]
    assert [len(texts) for texts in said] == [1, 0, 0, 0, 0, 1]
    assert "draft.alarm_floor = 1.05" in said[0][0] and "speculation.min_confidence" in said[0][0]
    again = alarms("speculation.method=ngram")
    again.restore(watch.state())
    assert again.check(1.01, 9) == ({DROP: False, FLOOR: True}, [])


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["speculation.method=hybrid"], 'draft.online = "every"'),
        (["speculation.method=hybrid", "draft.online=every"], "train-draft"),
        (["speculation.method=suffix"], "speculation.min_confidence"),
    ],
)
def test_remedies_fit(overrides: list[str], word: str) -> None:
    assert word in alarms(*overrides).check(1.0, 0)[1][0]


def test_few_drafts_say_nothing() -> None:
    def batch(num_drafts: int) -> Any:
        trace = SimpleNamespace(
            num_drafts=num_drafts, num_draft_tokens=num_drafts, num_accepted_tokens=num_drafts, drafted_per_position=(),
            accepted_per_position=(), num_emitted=0, draft_s=0, forward_s=0, sample_s=0, total_s=0, version=4,
        )  # fmt: skip
        return SimpleNamespace(traces=[trace])

    assert figures.acceptance(batch(MIN_DRAFTS)) == (2.0, 4)
    assert figures.acceptance(batch(MIN_DRAFTS - 1)) == (None, 4)
    empty: Any = SimpleNamespace(traces=[])
    assert figures.acceptance(empty) == (None, None)


# ---- time ----


def test_a_stage_within_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 4.0, 5.0, 10.0, 20.0, 21.0])
    monkeypatch.setattr("paceline.rl.stopwatch.time.perf_counter", lambda: next(clock))
    watch = Stopwatch()
    with watch.stage("training"):  # 0 … 10
        for _ in range(2):  # 1 … 3, 4 … 5
            with watch.stage("adaptation"):
                pass
    with watch.stage("training"):  # 20 … 21
        pass
    assert watch.seconds == {"training": 8.0, "adaptation": 3.0}
