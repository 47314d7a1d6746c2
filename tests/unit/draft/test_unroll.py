"""Training-time test against a naive twin: it drafts from one base after the other, one step after the other, with
its own arithmetic. Broken in one place it must be told apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import tiny_decoder
from torch import Tensor
from torch.nn import functional as F

from paceline.draft.lesson import Example, Lesson, teach
from paceline.draft.unroll import UnrollAttention, _Steps, unroll
from paceline.model.attention import PackedAttention
from paceline.model.decoder import Decoder
from paceline.model.eagle3 import Eagle3Head, head_config, init_head

STEPS = 4
VOCAB = 61


def make_head(decoder: Decoder, seed: int = 1, layer_ids: tuple[int, ...] = (1, 2, 3), **changes: bool) -> Eagle3Head:
    """Random, and far from the beginning of training: nothing in it is small, no norm is one."""
    config = replace(head_config(decoder.config, 40, layer_ids), **changes)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:40].sort().values
    head = init_head(config, ids, seed=seed, dtype=torch.float64)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("norm"):
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=noise, dtype=torch.float64))
            else:
                parameter.mul_(10)
    return head


def some_examples(lengths: Sequence[int] = (13, 7, 10), seed: int = 0) -> list[Example]:
    """A prompt each, and something in the middle that the target did not choose."""
    dice = np.random.default_rng(seed)
    found = []
    for length in lengths:
        chosen = np.arange(length) >= dice.integers(1, 4)
        chosen[length // 2] = False
        found.append(Example(dice.integers(0, VOCAB, length).astype(np.int32), chosen))
    return found


# ---- the twin ----


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean() + eps).sqrt()


def rotated(x: Tensor, position: int, head: Eagle3Head) -> Tensor:
    """One head's vector [E] at a position, the angles rounded as the model's are."""
    half = x.shape[-1] // 2
    exponents = torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half)
    angles = torch.tensor(float(position)) * (1 / head.config.layer.rope_theta**exponents)
    cos, sin = angles.cos().double(), angles.sin().double()
    return torch.cat([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])


class Naive:
    """One position after the other. `token_shift`, `position_shift` and `sees` break it."""

    def __init__(
        self, head: Eagle3Head, decoder: Decoder, token_shift: int = 0, position_shift: int = 0, sees: str = "own"
    ) -> None:
        self.head, self.embed = head, decoder.embed.weight
        self.token_shift, self.position_shift, self.sees = token_shift, position_shift, sees

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
        """The state to go on with, its norm, and this position's own keys and values [G, E]."""
        head, layer, c = self.head, self.head.layer, self.head.config.layer
        e = norm(self.embed[token], layer.input_norm, c.norm_eps)
        h = norm(x, head.hidden_norm, c.norm_eps)
        qkv = (layer.qkv.weight @ torch.cat([e, h])).view(-1, c.head_dim)
        q, k, v = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads])
        q = torch.stack([rotated(row, position, head) for row in q])
        k = torch.stack([rotated(row, position, head) for row in k])
        seen = [*past, (k, v)]
        outs = []
        for i, row in enumerate(q):
            group = i // (c.num_heads // c.num_kv_heads)
            weights = torch.stack([row @ key[group] for key, _ in seen]).div(math.sqrt(c.head_dim)).softmax(0)
            outs.append(sum(w * value[group] for w, (_, value) in zip(weights, seen, strict=True)))
        x = (h if head.config.norm_before_residual else x) + layer.o.weight @ torch.cat(outs)
        gate, up = (layer.gate_up.weight @ norm(x, layer.post_norm, c.norm_eps)).chunk(2)
        x = x + layer.down.weight @ (F.silu(gate) * up)
        return x, norm(x, head.norm, c.norm_eps), (k, v)

    def draft(self, tokens: list[int], features: Tensor, num_steps: int) -> dict[tuple[int, int], Tensor]:
        """(base, step) -> the normed state that predicts token base + step + 2."""
        found: dict[tuple[int, int], Tensor] = {}
        true: list[tuple[Tensor, Tensor]] = []  # keys and values of the bases, from the target's features
        for base in range(len(tokens) - 1):
            x, h, own = self.step(self.fuse(features[base]), self.token(tokens, base), base, true)
            true.append(own)
            found[base, 0] = h
            past = list(true)
            for s in range(1, num_steps):
                if base + s + 1 >= len(tokens):
                    break
                x, h, own = self.step(x, self.token(tokens, base + s), base + s + self.position_shift, past)
                found[base, s] = h
                if self.sees == "own":
                    past.append(own)
        return found

    def token(self, tokens: list[int], position: int) -> int:
        return tokens[min(position + 1 + self.token_shift, len(tokens) - 1)]


@torch.no_grad()
def largest_difference(head: Eagle3Head, decoder: Decoder, examples: list[Example], naive: Naive) -> float:
    """Between all states that `unroll` gives and those of the twin, which sees one sequence at a time."""
    lesson = teach(decoder, examples, head.config.taps)
    length = lesson.tokens_SL.shape[1]
    expected: dict[tuple[int, int, int], Tensor] = {}
    for row, example in enumerate(examples):
        num = len(example.tokens)
        tokens = torch.from_numpy(example.tokens).long()
        out = decoder(tokens, torch.arange(num), PackedAttention([num]), head.config.taps)
        features = torch.cat([out.taps[tap] for tap in head.config.taps], -1)
        drafted = naive.draft(example.tokens.tolist(), features, STEPS)
        for (base, step), h in drafted.items():
            if base + step + 2 < num and example.chosen[base + step + 2]:
                expected[row, base, step] = h
    worst, seen = 0.0, set()
    for step, (h_PD, base_P, at_P) in enumerate(unroll(head, decoder.embed, lesson, STEPS)):
        assert (at_P - base_P == step + 2).all()
        for h, flat in zip(h_PD, base_P.tolist(), strict=True):
            row, base = divmod(flat, length)
            seen.add((row, base, step))
            worst = max(worst, float((h - expected[row, base, step]).abs().max()))
    assert seen == expected.keys(), "exactly the tokens that the target chose are guessed, from all bases"
    return worst


# ---- tests ----


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True}, {"fc_norm": True}], ids=str)
def test_equals_the_twin(changes: dict[str, bool]) -> None:
    decoder = tiny_decoder()
    head = make_head(decoder, **changes)
    assert largest_difference(head, decoder, some_examples(), Naive(head, decoder)) < 1e-10


def test_layers_and_their_order_count() -> None:
    decoder = tiny_decoder()
    head = make_head(decoder, layer_ids=(1, 3))
    assert largest_difference(head, decoder, some_examples(), Naive(head, decoder)) < 1e-10
    other = make_head(decoder, layer_ids=(2, 3))
    assert largest_difference(head, decoder, some_examples((9,)), Naive(head, decoder)) < 1e-10
    lessons = [teach(decoder, some_examples((9,)), h.config.taps) for h in (head, other)]
    assert not lessons[0].features_SLF.equal(lessons[1].features_SLF)


@pytest.mark.parametrize(
    "broken", [{"token_shift": -1}, {"token_shift": 1}, {"position_shift": -1}, {"sees": "bases only"}], ids=str
)
def test_a_broken_twin_is_told_apart(broken: dict[str, object]) -> None:
    decoder = tiny_decoder()
    head = make_head(decoder)
    naive = Naive(head, decoder, **broken)  # type: ignore[arg-type]
    assert largest_difference(head, decoder, some_examples(), naive) > 1e-3


def test_what_is_padded_is_not_seen() -> None:
    decoder = tiny_decoder()
    head = make_head(decoder)
    short, long = some_examples((7, 13))
    alone, beside = teach(decoder, [short], head.config.taps), teach(decoder, [short, long], head.config.taps)
    for one, two in zip(*(unroll(head, decoder.embed, lesson, STEPS) for lesson in (alone, beside)), strict=True):
        kept = two[1] < 13
        assert torch.allclose(one[0], two[0][kept], atol=1e-12)
        assert one[1].equal(two[1][kept]) and one[2].equal(two[2][kept])


def test_no_step_beyond_the_models_context() -> None:
    """Positions past the last of the rotary tables predict nothing, and must not be looked up."""
    decoder = tiny_decoder(max_positions=12)
    head = make_head(decoder)
    examples = some_examples((12,))
    steps = list(unroll(head, decoder.embed, teach(decoder, examples, head.config.taps), STEPS))
    assert all(int(at.max()) < 12 for _, _, at in steps)


class Dense:
    """What the flash kernel promises, spelled out."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, None]:
        scores = self.scores(q, k)
        total = scores.logsumexp(-1)
        return (scores - total.unsqueeze(-1)).exp() @ self.wide(v, q), total, None

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, kept: None
    ) -> tuple[Tensor, Tensor, Tensor]:
        shares = (self.scores(q, k) - total.unsqueeze(-1)).exp()
        by_score = shares * (grad @ self.wide(v, q).mT - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        each = k.shape[1]
        k_grad, v_grad = (x.unflatten(1, (each, -1)).sum(2) for x in (by_score.mT @ q, shares.mT @ grad))
        return by_score @ self.wide(k, q), k_grad, v_grad

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ self.wide(k, q).mT / math.sqrt(q.shape[-1])
        return scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, -torch.inf)

    def wide(self, x: Tensor, q: Tensor) -> Tensor:
        return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def test_the_attention_without_a_mask_is_the_same() -> None:
    """What a GPU computes, a causal kernel joined with one key per step, against the masked attention: with gradients.
    Later steps' arithmetic is in float32."""
    noise = torch.Generator().manual_seed(0)
    sequences, length = 2, 9
    rows = [
        [torch.randn(sequences * length, heads, 8, generator=noise).requires_grad_() for heads in (4, 2, 2)]
        for _ in range(3)
    ]
    attention = UnrollAttention(sequences)
    masked = [attention(0, *row) for row in rows][-1]

    def split(x: Tensor) -> Tensor:
        return x.unflatten(0, (sequences, -1)).transpose(1, 2)

    keys, values = ([split(row[i]) for row in rows] for i in (1, 2))
    joined = _Steps.apply(Dense(), split(rows[-1][0]), *keys, *values).transpose(1, 2).flatten(0, 1).flatten(1)
    assert torch.allclose(masked, joined, atol=1e-5)
    weights = torch.randn(masked.shape, generator=noise)
    leaves = [rows[-1][0], *(row[i] for row in rows for i in (1, 2))]
    for one, other in zip(*(torch.autograd.grad((x * weights).sum(), leaves) for x in (masked, joined)), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_lesson_keeps_no_graph() -> None:
    decoder = tiny_decoder().requires_grad_(True)
    lesson = teach(decoder, some_examples(), (0, 1))
    assert not lesson.features_SLF.requires_grad and not lesson.hidden_SLD.requires_grad
    with pytest.raises(AssertionError):  # the broken twin: states with their graph
        Lesson(
            lesson.tokens_SL,
            lesson.chosen_SL,
            decoder.norm * lesson.features_SLF[..., :32],
            lesson.hidden_SLD,
            decoder.logits,
        )
