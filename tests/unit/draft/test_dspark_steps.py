"""The training forward pass of a DSpark head compared with a reference implementation that drafts one block at a time,
in plain torch. The comparison must detect a deliberately broken reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from head_reference import enlarge, norm, rotated, some_examples, some_ids
from support import tiny_decoder
from torch import Tensor
from torch.nn import functional as F

from paceline.draft.head_batch import Example, make_head_batch
from paceline.draft.unroll import draft_steps
from paceline.model.attention import PackedAttention
from paceline.model.decoder import Decoder
from paceline.model.dspark import DSparkHead, dspark_config, init_dspark

STEPS = 4


def make_head(decoder: Decoder, seed: int = 1, **changes: object) -> DSparkHead:
    """A random head with large weights, and norm weights that differ from one."""
    config = replace(dspark_config(decoder.config, 40, (1, 3), num_layers=2, markov_rank=5), **changes)
    head = init_dspark(config, some_ids(seed), seed=seed, dtype=torch.float64)
    enlarge(head, seed)
    return head


class ReferenceBlocks:
    """Computes one block at a time. The options break it."""

    def __init__(
        self, head: DSparkHead, decoder: Decoder, *, position_shift: int = 0, is_causal: bool = False,
        context_shift: int = 0, token_shift: int = 0,
    ) -> None:  # fmt: skip
        self.head, self.embed = head, decoder.embed.weight
        self.position_shift, self.is_causal = position_shift, is_causal
        self.context_shift, self.token_shift = context_shift, token_shift

    def draft(self, tokens: list[int], aux_hidden_states: Tensor, base: int, num_steps: int) -> list[Tensor]:
        """The logits of each step of the draft that starts at `base`."""
        head, c = self.head, self.head.config.layer
        fused = [norm(head.fc.weight @ f, head.hidden_norm, c.norm_eps) for f in aux_hidden_states]
        context = fused[: base + 1 + self.context_shift]
        inputs = [tokens[base + 1]] + [head.config.mask_token_id] * (num_steps - 1)
        xs = [self.embed[token] for token in inputs]
        positions = [base + 1 + i + self.position_shift for i in range(num_steps)]
        for layer in head.layers:
            hs = [norm(x, layer.input_norm, c.norm_eps) for x in xs]
            own = [self.qkv(layer, h, at) for h, at in zip(hs, positions, strict=True)]
            keys = [self.qkv(layer, h, at)[1:] for at, h in enumerate(context)]
            out = []
            for i, (x, (q, _, _)) in enumerate(zip(xs, own, strict=True)):
                seen = [*keys, *((k, v) for _, k, v in (own[: i + 1] if self.is_causal else own))]
                x = x + layer.o.weight @ attend(q, seen)
                gate, up = (layer.gate_up.weight @ norm(x, layer.post_norm, c.norm_eps)).chunk(2)
                out.append(x + layer.down.weight @ (F.silu(gate) * up))
            xs = out
        before = tokens[base + 1 + self.token_shift : base + 1 + self.token_shift + num_steps]
        markov = [head.markov_out.weight @ head.markov_in.weight[token] for token in before]
        return [head.lm_head.weight @ norm(x, head.norm, c.norm_eps) + m for x, m in zip(xs, markov, strict=False)]

    def qkv(self, layer: torch.nn.Module, h: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        c = self.head.config.layer
        heads = (layer.qkv.weight @ h).view(-1, c.head_dim)
        q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads])
        q, k = (
            torch.stack([rotated(norm(row, weight, c.norm_eps), position, self.head) for row in x])
            for x, weight in ((q, layer.q_norm), (k, layer.k_norm))
        )
        return q, k, v


def attend(q_HE: Tensor, keys_values: list[tuple[Tensor, Tensor]]) -> Tensor:
    outs = []
    for i, row in enumerate(q_HE):
        group = i // (len(q_HE) // len(keys_values[0][0]))
        weights = torch.stack([row @ k[group] for k, _ in keys_values]).div(math.sqrt(q_HE.shape[1])).softmax(0)
        outs.append(sum(w * v[group] for w, (_, v) in zip(weights, keys_values, strict=True)))
    return torch.cat(outs)


@torch.no_grad()
def largest_difference(
    head: DSparkHead, decoder: Decoder, examples: list[Example], reference: ReferenceBlocks
) -> float:
    """Between the logits of `draft_steps` and those of the reference."""
    head_batch = make_head_batch(decoder, examples, head.config.aux_layers)
    length = head_batch.tokens_SL.shape[1]
    expected: dict[tuple[int, int, int], Tensor] = {}
    for row, example in enumerate(examples):
        num = len(example.tokens)
        out = decoder(
            torch.from_numpy(example.tokens).long(), torch.arange(num), PackedAttention([num]), head.config.aux_layers
        )
        aux_hidden_states = torch.cat([out.aux_hidden_states[layer] for layer in head.config.aux_layers], -1)
        for base in range(num - 2):
            drafted = reference.draft(example.tokens.tolist(), aux_hidden_states, base, STEPS)
            for step, logits in enumerate(drafted):
                if base + step + 2 < num and example.loss_mask[base + step + 2]:
                    expected[row, base, step] = logits
    worst, seen = 0.0, set()
    for step, (features, base_P, at_P) in enumerate(draft_steps(head, decoder.embed, head_batch, STEPS)):
        assert (at_P - base_P == step + 2).all()
        for logits, flat in zip(features @ head.output_weight().T, base_P.tolist(), strict=True):
            row, base = divmod(flat, length)
            seen.add((row, base, step))
            worst = max(worst, float((logits - expected[row, base, step]).abs().max()))
    assert seen == expected.keys(), "exactly the tokens in the loss mask are predicted, from all bases"
    return worst


@pytest.mark.parametrize("changes", [{}, {"mask_token_id": 3}, {"markov_rank": 1}], ids=str)
def test_equals_the_reference(changes: dict[str, object]) -> None:
    decoder = tiny_decoder()
    head = make_head(decoder, **changes)
    assert largest_difference(head, decoder, some_examples(), ReferenceBlocks(head, decoder)) < 1e-9


@pytest.mark.parametrize(
    "broken", [{"position_shift": 1}, {"is_causal": True}, {"context_shift": 1}, {"token_shift": -1}], ids=str
)
def test_a_broken_reference_is_detected(broken: dict[str, object]) -> None:
    """`context_shift` 1: the head sees the target's state of the block's first token, which is not computed yet."""
    decoder = tiny_decoder()
    head = make_head(decoder)
    reference = ReferenceBlocks(head, decoder, **broken)  # type: ignore[arg-type]
    assert largest_difference(head, decoder, some_examples((9,)), reference) > 1e-3


def test_steps_beyond_the_models_context_length_are_not_in_the_loss() -> None:
    decoder = tiny_decoder(max_positions=12)
    head = make_head(decoder)
    head_batch = make_head_batch(decoder, some_examples((12,)), head.config.aux_layers)
    assert all(int(at.max()) < 12 for _, _, at in draft_steps(head, decoder.embed, head_batch, STEPS))


def test_all_parameters_get_a_gradient_and_the_target_none() -> None:
    decoder = tiny_decoder()
    head = make_head(decoder).requires_grad_(True)
    head_batch = make_head_batch(decoder, some_examples(), head.config.aux_layers)
    total = torch.zeros((), dtype=torch.float64)
    for features, _, _ in draft_steps(head, decoder.embed, head_batch, STEPS):
        acceptance = head.acceptance_logits(features)
        assert acceptance is not None and acceptance.shape == (len(features),)
        total = total + (features @ head.output_weight().T).square().mean() + acceptance.mean()
    total.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in head.parameters())
    assert all(p.grad is None for p in decoder.parameters())
