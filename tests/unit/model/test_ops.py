"""TorchOps: what is rounded to 16 bits, and the hand-written gradient of silu_mul."""

from __future__ import annotations

import copy

import torch
from support import tiny_decoder
from torch import Tensor
from torch.nn import functional as F

from paceline.model.attention import PackedAttention
from paceline.model.decoder import Decoder
from paceline.model.layer import Float8Weight, Linear
from paceline.model.ops import TorchOps

TOKENS = torch.randint(0, 60, (48,), generator=torch.Generator().manual_seed(3))


def logits_of(decoder: Decoder) -> Tensor:
    with torch.no_grad():
        out = decoder(TOKENS, torch.arange(len(TOKENS)), PackedAttention([len(TOKENS)]), aux_layers=(2,))
        assert out.hidden.dtype == out.aux_hidden_states[2].dtype == decoder.dtype
        return decoder.logits(out.hidden)


class RoundsStream(TorchOps):
    def add_norm(self, x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return super().add_norm(x_TD.to(y_TD.dtype), y_TD, weight_D, eps)


class RoundsLogits(TorchOps):
    def logits(self, h_TD: Tensor, linear: Linear) -> Tensor:
        return self.linear(h_TD, linear).float()


def test_in_16_bits_neither_the_residual_stream_nor_the_logits_are_rounded() -> None:
    decoder = tiny_decoder(torch.bfloat16, num_layers=12)
    for layer in decoder.layers:  # small updates to a large residual stream, as in a real model
        for linear in (layer.o, layer.down):
            assert linear.weight is not None
            linear.weight.mul_(0.02)
    exact = logits_of(copy.deepcopy(decoder).double())

    def gap(ops: TorchOps) -> float:
        decoder.ops = ops
        found = logits_of(decoder)
        assert found.dtype == torch.float32
        return float((found - exact).abs().mean())

    least = gap(TorchOps())
    assert 2 * least < gap(RoundsStream()) and 1.05 * least < gap(RoundsLogits())


def test_silu_mul_and_its_gradient() -> None:
    given = torch.randn(5, 14, dtype=torch.float64, requires_grad=True)
    gate, up = given.chunk(2, -1)
    assert torch.equal(TorchOps().silu_mul(given), F.silu(gate) * up)
    assert torch.autograd.gradcheck(TorchOps().silu_mul, given)


def test_silu_mul_in_16_bits_is_rounded_once() -> None:
    given = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    reference = given.detach().float().requires_grad_()
    for x in (given, reference):
        TorchOps().silu_mul(x).sum().backward()
    assert given.grad is not None and reference.grad is not None
    assert torch.equal(TorchOps().silu_mul(given), TorchOps().silu_mul(reference).bfloat16())
    assert torch.equal(given.grad, reference.grad.bfloat16())


def test_a_part_of_a_linear_layer_changes_with_the_whole() -> None:
    linear = Linear(6, 10, bias=True)
    weight, bias = linear.weight, linear.bias
    assert weight is not None and bias is not None
    with torch.no_grad():
        weight.normal_()
        linear.float8 = Float8Weight(weight)
        part = linear.outputs_from(4)
        weight.normal_()
        bias.normal_()
        linear.float8.update(weight)
        x = torch.randn(3, 6)
        assert torch.equal(TorchOps().linear(x, part), TorchOps().linear(x, linear)[:, 4:])
    assert part.num_out == 6 and part.float8 is not None
    assert torch.equal(part.float8.weight.float(), linear.float8.weight[4:].float())
    assert part.float8.scale is linear.float8.scale
