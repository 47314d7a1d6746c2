"""Drafters with a head compute, in batches and over paged memory, what training computes for all bases at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import check_blocks, tiny_decoder, tiny_dspark, tiny_head
from torch import Tensor

from paceline.build.config import load_config
from paceline.build.drafter import build_drafter
from paceline.draft.head_batch import Example, make_head_batch
from paceline.draft.unroll import draft_steps
from paceline.drafters.dspark import DSparkDrafter
from paceline.drafters.eagle3 import Eagle3Drafter
from paceline.engine.engine import LocalEngine
from paceline.model.attention import PackedAttention
from paceline.model.decoder import Decoder
from paceline.model.draft_head import DraftHead
from paceline.model.dspark import DSparkHead
from paceline.model.eagle3 import Eagle3Head
from paceline.model.head_files import head_state
from paceline.model.kernels import pack_for_inference
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.model.weights import hf_state
from paceline.speculation.acceptance import AcceptanceModel
from paceline.speculation.batch import Rows
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams

K = 4


HEADS = {"eagle3": tiny_head, "dspark": tiny_dspark}


def recording(head: DraftHead, *args: object) -> Any:
    """A drafter that keeps what it drafted: the row's tokens and drafts, and the logits over the draft vocabulary."""

    class Recording(Eagle3Drafter if isinstance(head, Eagle3Head) else DSparkDrafter):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(head, *args)
            self.drafts: list[tuple[np.ndarray, Tensor]] = []
            self._logits: list[tuple[list[int], Tensor]] = []

        def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
            self._logits = []
            drafts = super().propose(rows, caps)
            for i in range(len(rows)):
                of_row = [logits[active.index(i)] for active, logits in self._logits if i in active]
                if of_row:
                    sequence = np.concatenate([rows.tokens[i], drafts.tokens[i, : drafts.num[i]]])
                    self.drafts.append((sequence, torch.stack(of_row)))
            return drafts

        def draw(self, rows: Rows, active: list[int], logits: Tensor, step: int, *rest: object) -> None:
            self._logits.append((list(active), logits.clone()))
            super().draw(rows, active, logits, step, *rest)

    return Recording()


def run(
    decoder: Decoder, head: DraftHead, num_blocks: int = 64, max_num_seqs: int = 8, rule: str = "coupled"
) -> tuple[LocalEngine, Any]:
    sampler = Sampler(native=decoder.embed.panels is not None)
    drafter = recording(head, decoder.embed, sampler, num_blocks, rule == "coupled")
    engine = LocalEngine(
        PagedDecoder(decoder, num_blocks),
        sampler=sampler,
        drafter=drafter,
        policy=StaticPolicy(K),
        rule=rule,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=48,
    )
    prompts = [(1, 2, 3), tuple(range(4, 40)), tuple(range(4, 40)), (7, 8)]
    engine.generate(
        [Request(i, p, SamplingParams(max_tokens=30, ignore_eos=True), i) for i, p in enumerate(prompts * 2)]
    )
    return engine, drafter


def largest_gap(decoder: Decoder, head: DraftHead, drafts: list[tuple[np.ndarray, Tensor]]) -> float:
    """Between the drafter's logits and the unrolled ones of the same sequences."""
    gaps = []
    for sequence, logits in drafts:
        # Two more tokens at the end, so that the batch has the last prediction.
        tokens = np.concatenate([sequence, [0, 0]]).astype(np.int32)
        head_batch = make_head_batch(decoder, [Example(tokens, np.ones(len(tokens), bool))], head.config.aux_layers)
        base = len(sequence) - len(logits) - 2
        for step, (features, base_P, _) in enumerate(draft_steps(head, decoder.embed, head_batch, len(logits))):
            (at,) = torch.nonzero(base_P == base, as_tuple=True)
            gaps.append(float((head.output_weight() @ features[at[0]] - logits[step]).abs().max()))
    return max(gaps)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("eagle3", {}), ("eagle3", {"norm_before_residual": True}), ("eagle3", {"fc_norm": True}),
        ("dspark", {}), ("dspark", {"has_confidence": False}),
    ],
)  # fmt: skip
def test_drafting_is_what_was_trained(kind: str, changes: dict[str, bool]) -> None:
    decoder = tiny_decoder()
    head = HEADS[kind](decoder, **changes)
    engine, drafter = run(decoder, head, num_blocks=24)
    assert len(drafter.drafts) > 40
    assert largest_gap(decoder, head, drafter.drafts) < 1e-9  # float64
    check_blocks(engine)
    assert not any(drafter.memory.pool.ref_counts)


@pytest.mark.parametrize("kind", HEADS)
def test_the_kernels_draft_the_same(kind: str) -> None:
    decoder = tiny_decoder(torch.float32)
    head = HEADS[kind](decoder)
    packed, packed_head = tiny_decoder(torch.float32), HEADS[kind](tiny_decoder(torch.float32))
    pack_for_inference(packed)
    pack_for_inference(packed_head)
    _, drafter = run(packed, packed_head)
    assert largest_gap(decoder, head, drafter.drafts) < 2e-4  # float32, logits of size 10: other summation orders


def swapped_kv(head: Eagle3Head, decoder: Decoder) -> None:
    c = head.config.layer
    q, k, v = head.layer.qkv.weight.data.split([c.num_heads * c.head_dim, *[c.num_kv_heads * c.head_dim] * 2])
    head.layer.qkv.weight.data = torch.cat([q, v, k])


def other_layers(head: Eagle3Head, decoder: Decoder) -> None:
    aux_layers = (0, 1, 1)
    object.__setattr__(head.config, "layer_ids", tuple(i + 1 for i in aux_layers))


def swapped_inputs(head: Eagle3Head, decoder: Decoder) -> None:
    a, b = head.layer.qkv.weight.data.chunk(2, 1)
    head.layer.qkv.weight.data = torch.cat([b, a], 1)


@pytest.mark.parametrize("damage", [swapped_kv, other_layers, swapped_inputs])
def test_a_wrong_layout_is_caught(damage: Callable[[Eagle3Head, Decoder], None]) -> None:
    decoder = tiny_decoder()
    damaged = tiny_head(decoder)
    damage(damaged, decoder)
    _, drafter = run(decoder, damaged)
    assert largest_gap(decoder, tiny_head(decoder), drafter.drafts) > 1e-3


def peeks(head: DSparkHead, decoder: Decoder) -> None:
    """Broken: the block begins one position too late, as if its first token were verified already."""
    forward = head.forward
    head.forward = lambda tokens, positions, *rest: forward(tokens, positions + 1, *rest)  # type: ignore[method-assign]


def swapped_context(head: DSparkHead, decoder: Decoder) -> None:
    context = head.context
    head.context = lambda *args: ((v, k) for k, v in context(*args))  # type: ignore[method-assign]


def no_markov_term(head: DSparkHead, decoder: Decoder) -> None:
    head.markov_out.weight.data.zero_()


@pytest.mark.parametrize("damage", [peeks, swapped_context, no_markov_term])
def test_a_wrong_block_is_caught(damage: Callable[[DSparkHead, Decoder], None]) -> None:
    decoder = tiny_decoder()
    damaged = tiny_dspark(decoder)
    damage(damaged, decoder)
    _, drafter = run(decoder, damaged)
    assert largest_gap(decoder, tiny_dspark(decoder), drafter.drafts) > 1e-3


def test_an_embedding_that_is_not_shifted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: hidden state i goes with token i instead of token i + 1."""
    forward = Eagle3Drafter._forward

    def unshifted(self: Eagle3Drafter, spans: list, x: Tensor) -> tuple[Tensor, Tensor]:
        for span in spans:
            if len(span.tokens) > 1:
                span.tokens = np.roll(span.tokens, 1)
        return forward(self, spans, x)

    monkeypatch.setattr(Eagle3Drafter, "_forward", unshifted)
    decoder = tiny_decoder()
    _, drafter = run(decoder, tiny_head(decoder))
    assert largest_gap(decoder, tiny_head(decoder), drafter.drafts) > 1e-3


@pytest.mark.parametrize("kind", HEADS)
def test_its_tokens_are_the_targets_and_never_outside_its_vocabulary(kind: str) -> None:
    decoder = tiny_decoder()
    head = HEADS[kind](decoder)
    _, drafter = run(decoder, head)
    known = set(head.draft_ids.tolist())
    for sequence, logits in drafter.drafts:
        assert set(sequence[-len(logits) :].tolist()) <= known


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_with_the_targets_logits_is_always_accepted(kind: str) -> None:
    """If q = p at every position, the same noise gives the same tokens."""
    decoder = tiny_decoder()
    head = HEADS[kind](decoder, draft_vocab_size=61)
    sampler = Sampler()
    drafter = recording(head, decoder.embed, sampler, 64)
    draw = drafter.draw

    def draw_as_the_target(rows, active, logits, step, drafts, distributions):
        sequences = [torch.tensor([*rows.tokens[i], *drafts.tokens[i, :step]]) for i in active]
        outs = [decoder(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)])) for tokens in sequences]
        draw(rows, active, torch.cat([decoder.logits(out.hidden[-1:]) for out in outs]), step, drafts, distributions)

    drafter.draw = draw_as_the_target
    engine = LocalEngine(PagedDecoder(decoder, 64), sampler=sampler, drafter=drafter, policy=StaticPolicy(K))
    (completion,) = engine.generate([Request(0, (1, 2, 3), SamplingParams(max_tokens=25, ignore_eos=True), 9)])
    assert completion.num_accepted_tokens == completion.num_draft_tokens > 15


@pytest.mark.parametrize("kind", HEADS)
def test_new_policy_weights_and_new_head_weights_drop_its_kv(kind: str) -> None:
    decoder = tiny_decoder()
    head = HEADS[kind](decoder)
    engine, drafter = run(decoder, head)
    other = HEADS[kind](decoder, seed=9)
    receipt = engine.update_drafter(list(head_state(other)), 5)
    assert drafter.version == 5
    assert receipt.num_tensors == len(list(head_state(other)))
    drafter.drafts.clear()
    engine.update_weights(hf_state(tiny_decoder(seed=1)), 1)
    engine.generate([Request(9, (1, 2, 3), SamplingParams(max_tokens=20, ignore_eos=True), 3)])
    assert len(drafter.drafts) > 5
    assert largest_gap(tiny_decoder(seed=1), other, drafter.drafts) < 1e-9
    assert {trace.drafter_version for trace in engine.drain_trace()} == {0, 5}


@pytest.mark.parametrize("kind", HEADS)
def test_with_too_little_memory_there_are_fewer_drafts_but_the_same_tokens(kind: str) -> None:
    decoder = tiny_decoder()
    sampler = Sampler()
    wanted = [Request(i, tuple(range(1, 30)), SamplingParams(max_tokens=20, ignore_eos=True), i) for i in range(4)]
    plain = LocalEngine(PagedDecoder(decoder, 64), sampler=sampler).generate(wanted)
    drafter = recording(HEADS[kind](decoder), decoder.embed, sampler, 4)
    engine = LocalEngine(PagedDecoder(decoder, 64), sampler=sampler, drafter=drafter, policy=StaticPolicy(K))
    found = engine.generate(wanted)
    assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in plain]
    assert sum(c.num_drafts for c in found) > 0


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_begins_late_starts_within_its_window(kind: str) -> None:
    """It drafts without the tokens before: the same as training unrolls from there."""
    decoder, sampler, window = tiny_decoder(), Sampler(), 8
    drafter = recording(HEADS[kind](decoder), decoder.embed, sampler, 64, True, 0.0, window)
    engine = LocalEngine(PagedDecoder(decoder, 64), sampler=sampler, drafter=drafter, policy=StaticPolicy(K))
    wanted = [Request(0, tuple(range(1, 30)), SamplingParams(max_tokens=20, ignore_eos=True), 3)]
    plain = LocalEngine(PagedDecoder(decoder, 64), sampler=sampler).generate(wanted)
    assert [c.token_ids.tolist() for c in engine.generate(wanted)] == [c.token_ids.tolist() for c in plain]
    assert len(drafter.drafts) > 5
    head = HEADS[kind](decoder)
    assert largest_gap(decoder, head, drafter.drafts) > 1e-3  # it did not see the beginning
    first = len(drafter.drafts[0][0]) - K - 1 - window  # where it starts
    for sequence, logits in drafter.drafts:
        tokens = np.concatenate([sequence, [0, 0]]).astype(np.int32)
        head_batch = make_head_batch(decoder, [Example(tokens, np.ones(len(tokens), bool))], head.config.aux_layers)
        late = replace(
            head_batch,
            tokens_SL=head_batch.tokens_SL[:, first:],
            loss_mask_SL=head_batch.loss_mask_SL[:, first:],
            aux_hidden_SLF=head_batch.aux_hidden_SLF[:, first:],
            hidden_SLD=head_batch.hidden_SLD[:, first:],
        )
        base = len(sequence) - len(logits) - 2 - first
        for step, (features, base_P, _) in enumerate(draft_steps(head, decoder.embed, late, len(logits))):
            (at,) = torch.nonzero(base_P == base, as_tuple=True)
            assert float((head.output_weight() @ features[at[0]] - logits[step]).abs().max()) < 1e-9


@pytest.mark.parametrize("kind", HEADS)
def test_min_confidence_ends_a_draft_and_is_refused_with_the_rejection_rules(kind: str) -> None:
    decoder = tiny_decoder()
    sampler = Sampler()
    wanted = [Request(i, (1, 2, 3 + i), SamplingParams(max_tokens=30, ignore_eos=True), i) for i in range(4)]
    plain = LocalEngine(PagedDecoder(decoder, 64), sampler=sampler).generate(wanted)
    lengths = []
    for least in (0.0, 0.5):
        drafter = recording(HEADS[kind](decoder), decoder.embed, sampler, 64, True, least)
        policy = StaticPolicy(K, least)
        engine = LocalEngine(PagedDecoder(decoder, 64), sampler=sampler, drafter=drafter, policy=policy)
        found = engine.generate(wanted)
        assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in plain]
        drafts, tokens = (sum(getattr(c, key) for c in found) for key in ("num_drafts", "num_draft_tokens"))
        lengths.append(tokens / drafts)
    assert lengths[1] < lengths[0] - 0.5
    with pytest.raises(ValueError, match="chooses among drafts"):
        LocalEngine(PagedDecoder(decoder, 64), drafter=drafter, rule="rejection")


def test_a_random_heads_probabilities_fall_below_its_scores() -> None:
    """It is hardly ever right. The acceptance model keeps that, also in a checkpoint; the drafter keeps nothing."""
    decoder = tiny_decoder()
    engine, drafter = run(decoder, tiny_head(decoder))
    scores = np.array([[0.03, 0.15, 0.6, 0.99]], np.float32)

    def probabilities(acceptance: AcceptanceModel) -> np.ndarray:
        return acceptance.probabilities(acceptance.cells_of(scores, np.arange(4), ("eagle3",)))[0]

    restored = AcceptanceModel()
    before = probabilities(restored)
    state = engine.state_dict()
    restored.load_state_dict(state["acceptance"])
    assert (probabilities(restored) < before - 0.1).any() and (probabilities(restored) <= before + 0.02).all()
    assert state["drafter"] == {}
    drafter.load_state_dict({})
    with pytest.raises(ValueError, match="not a state of the eagle3 drafter"):
        drafter.load_state_dict({"names": np.zeros(1)})


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_damaged_head_is_an_error_with_the_rejection_rules(rule: str, kind: str) -> None:
    """A q of NaN would compare as accepted. With `coupled` only its drafts are lost."""
    decoder = tiny_decoder()
    head = HEADS[kind](decoder)
    head.norm.data.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"distribution is invalid .* lower draft\.online_learning_rate"):
        run(decoder, head, rule=rule)
    run(decoder, head)


def test_a_drafter_may_change_while_the_engine_sleeps() -> None:
    decoder, sampler = tiny_decoder(), Sampler()
    engine = LocalEngine(PagedDecoder(decoder, 64), sampler=sampler, policy=StaticPolicy(K))
    engine.sleep()
    engine.set_drafter(Eagle3Drafter(tiny_head(decoder), decoder.embed, sampler, 64))
    engine.wake()
    (completion,) = engine.generate([Request(0, (1, 2, 3), SamplingParams(max_tokens=20, ignore_eos=True), 3)])
    assert completion.num_drafts > 5


@pytest.mark.parametrize("kind", HEADS)
def test_a_given_head_of_another_architecture_is_an_error(kind: str) -> None:
    """As in a sweep over drafters: it would draft under the other one's name."""
    (other,) = HEADS.keys() - {kind}
    decoder = tiny_decoder()
    config = load_config(None, [f"speculation.method={other}", "engine.kv_tokens=512"])
    with pytest.raises(ValueError, match=f'speculation.method = "{other}", but speculation.head is a head of the arch'):
        build_drafter(config, decoder, None, HEADS[kind](decoder))
    for method in (kind, "hybrid"):
        assert build_drafter(config.changed(speculation={"method": method}), decoder, None, HEADS[kind](decoder))


def test_a_dspark_draft_is_at_most_as_long_as_trained_blocks() -> None:
    decoder = tiny_decoder()
    engine, drafter = run(decoder, tiny_dspark(decoder, block_size=2))
    assert max(len(logits) for _, logits in drafter.drafts) == 2 < K
    check_blocks(engine)
