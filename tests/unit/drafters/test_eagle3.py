"""The EAGLE-3 drafter computes, in batches and step by step over paged memory, what training unrolls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import check_blocks, tiny_decoder, tiny_head
from torch import Tensor

from paceline.draft.head_batch import Example, make_head_batch
from paceline.draft.unroll import unroll
from paceline.drafters.eagle3 import Eagle3Drafter
from paceline.engine.engine import LocalEngine
from paceline.model.decoder import Decoder
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


class Recording(Eagle3Drafter):
    """Keeps what it drafted: the row's tokens and drafts, and the logits over the draft vocabulary."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
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

    def _draw(self, rows: Rows, active: list[int], h: Tensor, step: int, *rest: object) -> None:
        self._logits.append((list(active), self.head.logits(h).clone()))
        super()._draw(rows, active, h, step, *rest)  # type: ignore[arg-type]


def run(
    decoder: Decoder, head: Eagle3Head, num_blocks: int = 64, max_num_seqs: int = 8, rule: str = "coupled"
) -> tuple[LocalEngine, Recording]:
    sampler = Sampler(native=decoder.embed.panels is not None)
    drafter = Recording(head, decoder.embed, sampler, num_blocks, rule == "coupled")
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


def largest_gap(decoder: Decoder, head: Eagle3Head, drafts: list[tuple[np.ndarray, Tensor]]) -> float:
    """Between the drafter's logits and the unrolled ones of the same sequences."""
    gaps = []
    for sequence, logits in drafts:
        # Two more tokens at the end, so that the batch has the last prediction.
        tokens = np.concatenate([sequence, [0, 0]]).astype(np.int32)
        head_batch = make_head_batch(decoder, [Example(tokens, np.ones(len(tokens), bool))], head.config.aux_layers)
        base = len(sequence) - len(logits) - 2
        for step, (h, base_P, _) in enumerate(unroll(head, decoder.embed, head_batch, len(logits))):
            (at,) = torch.nonzero(base_P == base, as_tuple=True)
            gaps.append(float((head.logits(h[at[0]][None])[0] - logits[step]).abs().max()))
    return max(gaps)


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True}, {"fc_norm": True}])
def test_drafting_is_the_unrolling_that_was_trained(changes: dict[str, bool]) -> None:
    decoder = tiny_decoder()
    head = tiny_head(decoder, **changes)
    engine, drafter = run(decoder, head, num_blocks=24)
    assert len(drafter.drafts) > 40
    assert largest_gap(decoder, head, drafter.drafts) < 1e-9  # float64
    check_blocks(engine)
    assert not any(drafter.memory.pool.ref_counts)


def test_the_kernels_draft_the_same() -> None:
    decoder = tiny_decoder(torch.float32)
    head = tiny_head(decoder)
    packed, packed_head = tiny_decoder(torch.float32), tiny_head(tiny_decoder(torch.float32))
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


def test_its_tokens_are_the_targets_and_never_outside_its_vocabulary() -> None:
    decoder = tiny_decoder()
    head = tiny_head(decoder)
    _, drafter = run(decoder, head)
    known = set(head.draft_ids.tolist())
    for sequence, logits in drafter.drafts:
        assert set(sequence[-len(logits) :].tolist()) <= known


def test_a_head_with_the_targets_logits_is_always_accepted() -> None:
    """If q = p at every position, the same noise gives the same tokens."""
    decoder = tiny_decoder()
    head = tiny_head(decoder, draft_vocab_size=61)

    class TargetLogits(Recording):
        def _draw(self, rows, active, h, step, drafts, distributions):
            sequences = [[*rows.tokens[i], *drafts.tokens[i, :step]] for i in active]
            logits = []
            for tokens in sequences:
                length = len(tokens)
                from paceline.model.attention import PackedAttention

                out = decoder(torch.tensor(tokens), torch.arange(length), PackedAttention([length]))
                logits.append(decoder.logits(out.hidden[-1:])[0])
            self.head.logits = lambda _: torch.stack(logits)
            self.head.to_target_vocab = lambda given: given
            try:
                Eagle3Drafter._draw(self, rows, active, h, step, drafts, distributions)
            finally:
                del self.head.logits, self.head.to_target_vocab

    sampler = Sampler()
    drafter = TargetLogits(head, decoder.embed, sampler, 64)
    engine = LocalEngine(PagedDecoder(decoder, 64), sampler=sampler, drafter=drafter, policy=StaticPolicy(K))
    (completion,) = engine.generate([Request(0, (1, 2, 3), SamplingParams(max_tokens=25, ignore_eos=True), 9)])
    assert completion.num_accepted_tokens == completion.num_draft_tokens > 15


def test_new_policy_weights_and_new_head_weights_drop_its_kv() -> None:
    decoder = tiny_decoder()
    head = tiny_head(decoder)
    engine, drafter = run(decoder, head)
    other = tiny_head(decoder, seed=9)
    receipt = engine.update_drafter(list(head_state(other)), 5)
    assert drafter.version == 5
    assert receipt.num_tensors == len(list(head_state(other)))
    drafter.drafts.clear()
    engine.update_weights(hf_state(tiny_decoder(seed=1)), 1)
    engine.generate([Request(9, (1, 2, 3), SamplingParams(max_tokens=20, ignore_eos=True), 3)])
    assert len(drafter.drafts) > 5
    assert largest_gap(tiny_decoder(seed=1), other, drafter.drafts) < 1e-9
    assert {trace.drafter_version for trace in engine.drain_trace()} == {0, 5}


def test_with_too_little_memory_there_are_fewer_drafts_but_the_same_tokens() -> None:
    decoder = tiny_decoder()
    sampler = Sampler()
    wanted = [Request(i, tuple(range(1, 30)), SamplingParams(max_tokens=20, ignore_eos=True), i) for i in range(4)]
    plain = LocalEngine(PagedDecoder(decoder, 64), sampler=sampler).generate(wanted)
    drafter = Eagle3Drafter(tiny_head(decoder), decoder.embed, sampler, 4)
    engine = LocalEngine(PagedDecoder(decoder, 64), sampler=sampler, drafter=drafter, policy=StaticPolicy(K))
    found = engine.generate(wanted)
    assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in plain]
    assert sum(c.num_drafts for c in found) > 0


def test_a_head_that_begins_late_starts_within_its_window() -> None:
    """It drafts without the tokens before: the same as training unrolls from there."""
    decoder, sampler, window = tiny_decoder(), Sampler(), 8
    drafter = Recording(tiny_head(decoder), decoder.embed, sampler, 64, True, 0.0, window)
    engine = LocalEngine(PagedDecoder(decoder, 64), sampler=sampler, drafter=drafter, policy=StaticPolicy(K))
    wanted = [Request(0, tuple(range(1, 30)), SamplingParams(max_tokens=20, ignore_eos=True), 3)]
    plain = LocalEngine(PagedDecoder(decoder, 64), sampler=sampler).generate(wanted)
    assert [c.token_ids.tolist() for c in engine.generate(wanted)] == [c.token_ids.tolist() for c in plain]
    assert len(drafter.drafts) > 5
    head = tiny_head(decoder)
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
        for step, (h, base_P, _) in enumerate(unroll(head, decoder.embed, late, len(logits))):
            (at,) = torch.nonzero(base_P == base, as_tuple=True)
            assert float((head.logits(h[at[0]][None])[0] - logits[step]).abs().max()) < 1e-9


def test_min_confidence_ends_a_draft_and_is_refused_with_the_rejection_rules() -> None:
    decoder = tiny_decoder()
    sampler = Sampler()
    wanted = [Request(i, (1, 2, 3 + i), SamplingParams(max_tokens=30, ignore_eos=True), i) for i in range(4)]
    plain = LocalEngine(PagedDecoder(decoder, 64), sampler=sampler).generate(wanted)
    lengths = []
    for least in (0.0, 0.5):
        drafter = Eagle3Drafter(tiny_head(decoder), decoder.embed, sampler, 64, min_confidence=least)
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


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_damaged_head_is_an_error_with_the_rejection_rules(rule: str) -> None:
    """A q of NaN would compare as accepted. With `coupled` only its drafts are lost."""
    decoder = tiny_decoder()
    head = tiny_head(decoder)
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
