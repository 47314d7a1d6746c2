"""The unrolled head compared with a reference implementation that drafts one base and one step at a time. The
comparison must detect a deliberately broken reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from head_reference import enlarge, norm, rotated, some_examples, some_ids
from support import tiny_decoder
from torch import Tensor
from torch.nn import functional as F

from paceline.draft.head_batch import Example, HeadBatch, make_head_batch
from paceline.draft.unroll import draft_steps
from paceline.model.attention import PackedAttention
from paceline.model.decoder import Decoder
from paceline.model.eagle3 import Eagle3Head, head_config, init_head

STEPS = 4


def make_head(decoder: Decoder, seed: int = 1, layer_ids: tuple[int, ...] = (1, 2, 3), **changes: bool) -> Eagle3Head:
    """A random head with large weights, and norm weights that differ from one."""
    config = replace(head_config(decoder.config, 40, layer_ids), **changes)
    head = init_head(config, some_ids(seed), seed=seed, dtype=torch.float64)
    enlarge(head, seed)
    return head


# ---- the reference ----


class ReferenceHead:
    """Computes one position at a time. `token_shift`, `position_shift` and `attends_to_steps` break it."""

    def __init__(
        self,
        head: Eagle3Head,
        decoder: Decoder,
        token_shift: int = 0,
        position_shift: int = 0,
        attends_to_steps: bool = True,
    ) -> None:
        self.head, self.embed = head, decoder.embed.weight
        self.token_shift, self.position_shift = token_shift, position_shift
        self.attends_to_steps = attends_to_steps

    def fuse(self, feature: Tensor) -> Tensor:
        head = self.head
        parts = feature.chunk(len(head.config.layer_ids))
        if head.fc_norm is not None:
            eps = head.config.layer.norm_eps
            parts = tuple(norm(part, weight, eps) for part, weight in zip(parts, head.fc_norm, strict=True))
        return head.fc.weight @ torch.cat(parts)

    def step(
        self, x: Tensor, token: int, position: int, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """The next hidden state, the normalized one, and this position's keys and values [G, E]."""
        head, layer, c = self.head, self.head.layer, self.head.config.layer
        e = norm(self.embed[token], layer.input_norm, c.norm_eps)
        h = norm(x, head.hidden_norm, c.norm_eps)
        qkv = (layer.qkv.weight @ torch.cat([e, h])).view(-1, c.head_dim)
        q, k, v = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads])
        q = torch.stack([rotated(row, position, head) for row in q])
        k = torch.stack([rotated(row, position, head) for row in k])
        context = [*past, (k, v)]
        outs = []
        for i, row in enumerate(q):
            group = i // (c.num_heads // c.num_kv_heads)
            weights = torch.stack([row @ key[group] for key, _ in context]).div(math.sqrt(c.head_dim)).softmax(0)
            outs.append(sum(w * value[group] for w, (_, value) in zip(weights, context, strict=True)))
        x = (h if head.config.norm_before_residual else x) + layer.o.weight @ torch.cat(outs)
        gate, up = (layer.gate_up.weight @ norm(x, layer.post_norm, c.norm_eps)).chunk(2)
        x = x + layer.down.weight @ (F.silu(gate) * up)
        return x, norm(x, head.norm, c.norm_eps), (k, v)

    def draft(self, tokens: list[int], aux_hidden_states: Tensor, num_steps: int) -> dict[tuple[int, int], Tensor]:
        """(base, step) -> the normalized hidden state that predicts token base + step + 2."""
        found: dict[tuple[int, int], Tensor] = {}
        bases: list[tuple[Tensor, Tensor]] = []  # keys and values of the bases, from the target's features
        for base in range(len(tokens) - 1):
            x, h, own = self.step(self.fuse(aux_hidden_states[base]), self.token(tokens, base), base, bases)
            bases.append(own)
            found[base, 0] = h
            past = list(bases)
            for s in range(1, num_steps):
                if base + s + 1 >= len(tokens):
                    break
                x, h, own = self.step(x, self.token(tokens, base + s), base + s + self.position_shift, past)
                found[base, s] = h
                if self.attends_to_steps:
                    past.append(own)
        return found

    def token(self, tokens: list[int], position: int) -> int:
        return tokens[min(position + 1 + self.token_shift, len(tokens) - 1)]


@torch.no_grad()
def largest_difference(head: Eagle3Head, decoder: Decoder, examples: list[Example], reference: ReferenceHead) -> float:
    """Between the hidden states of `draft_steps` and those of the reference, which gets one sequence at a time."""
    head_batch = make_head_batch(decoder, examples, head.config.aux_layers)
    length = head_batch.tokens_SL.shape[1]
    expected: dict[tuple[int, int, int], Tensor] = {}
    for row, example in enumerate(examples):
        num = len(example.tokens)
        tokens = torch.from_numpy(example.tokens).long()
        out = decoder(tokens, torch.arange(num), PackedAttention([num]), head.config.aux_layers)
        aux_hidden_states = torch.cat([out.aux_hidden_states[layer] for layer in head.config.aux_layers], -1)
        drafted = reference.draft(example.tokens.tolist(), aux_hidden_states, STEPS)
        for (base, step), h in drafted.items():
            if base + step + 2 < num and example.loss_mask[base + step + 2]:
                expected[row, base, step] = h
    worst, seen = 0.0, set()
    for step, (h_PD, base_P, at_P) in enumerate(draft_steps(head, decoder.embed, head_batch, STEPS)):
        assert (at_P - base_P == step + 2).all()
        for h, flat in zip(h_PD, base_P.tolist(), strict=True):
            row, base = divmod(flat, length)
            seen.add((row, base, step))
            worst = max(worst, float((h - expected[row, base, step]).abs().max()))
    assert seen == expected.keys(), "exactly the tokens in the loss mask are predicted, from all bases"
    return worst


# ---- tests ----


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True}, {"fc_norm": True}], ids=str)
def test_equals_the_reference(changes: dict[str, bool]) -> None:
    decoder = tiny_decoder()
    head = make_head(decoder, **changes)
    assert largest_difference(head, decoder, some_examples(), ReferenceHead(head, decoder)) < 1e-10


def test_auxiliary_layers() -> None:
    decoder = tiny_decoder()
    head = make_head(decoder, layer_ids=(1, 3))
    assert largest_difference(head, decoder, some_examples(), ReferenceHead(head, decoder)) < 1e-10
    other = make_head(decoder, layer_ids=(2, 3))
    assert largest_difference(head, decoder, some_examples((9,)), ReferenceHead(head, decoder)) < 1e-10
    head_batches = [make_head_batch(decoder, some_examples((9,)), h.config.aux_layers) for h in (head, other)]
    assert not head_batches[0].aux_hidden_SLF.equal(head_batches[1].aux_hidden_SLF)


@pytest.mark.parametrize(
    "broken", [{"token_shift": -1}, {"token_shift": 1}, {"position_shift": -1}, {"attends_to_steps": False}], ids=str
)
def test_a_broken_reference_is_detected(broken: dict[str, object]) -> None:
    decoder = tiny_decoder()
    head = make_head(decoder)
    reference = ReferenceHead(head, decoder, **broken)  # type: ignore[arg-type]
    assert largest_difference(head, decoder, some_examples(), reference) > 1e-3


def test_padding_does_not_change_the_result() -> None:
    decoder = tiny_decoder()
    head = make_head(decoder)
    short, long = some_examples((7, 13))
    layers = head.config.aux_layers
    batches = make_head_batch(decoder, [short], layers), make_head_batch(decoder, [short, long], layers)
    for one, two in zip(*(draft_steps(head, decoder.embed, batch, STEPS) for batch in batches), strict=True):
        kept = two[1] < 13
        assert torch.allclose(one[0], two[0][kept], atol=1e-12)
        assert one[1].equal(two[1][kept]) and one[2].equal(two[2][kept])


def test_no_step_beyond_the_models_context_length() -> None:
    """Positions beyond the rotary tables must not be looked up."""
    decoder = tiny_decoder(max_positions=12)
    head = make_head(decoder)
    examples = some_examples((12,))
    steps = list(draft_steps(head, decoder.embed, make_head_batch(decoder, examples, head.config.aux_layers), STEPS))
    assert all(int(at.max()) < 12 for _, _, at in steps)


def test_a_head_batch_is_detached() -> None:
    decoder = tiny_decoder().requires_grad_(True)
    head_batch = make_head_batch(decoder, some_examples(), (0, 1))
    assert not head_batch.aux_hidden_SLF.requires_grad and not head_batch.hidden_SLD.requires_grad
    with pytest.raises(AssertionError):  # deliberately broken: hidden states with their graph
        HeadBatch(
            head_batch.tokens_SL,
            head_batch.loss_mask_SL,
            decoder.norm * head_batch.aux_hidden_SLF[..., :32],
            head_batch.hidden_SLD,
            decoder.logits,
        )
