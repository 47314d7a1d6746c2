"""LoRA adapters: attaching them changes nothing, only they are trained, and merged weights give the same outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny_decoder
from torch import Tensor

from paceline.config import LearnerSection
from paceline.model.attention import PackedAttention
from paceline.model.decoder import Decoder
from paceline.model.lora import adapters_off, attach
from paceline.model.optim import Optimizer
from paceline.model.weights import assign, hf_state, load, save

TOKENS = torch.arange(24) * 7 % 60
ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv", "o", "gate_up", "down")


def logits(decoder: Decoder) -> Tensor:
    return decoder.logits(decoder(TOKENS, torch.arange(24), PackedAttention([24])).hidden)


def with_adapters(
    dtype: torch.dtype = torch.float64, targets: tuple[str, ...] = ALL_TARGETS, **changes: Any
) -> Decoder:
    decoder = tiny_decoder(dtype, **changes)
    attach(decoder, rank=3, alpha=6.0, targets=targets, seed=1)
    return decoder


def trained(decoder: Decoder) -> Decoder:
    optimizer = Optimizer(decoder, decoder.config, LearnerSection(learning_rate=0.05), 5)
    for step in range(5):
        logits(decoder).log_softmax(-1)[:, 3].mean().neg().backward()
        optimizer.step(step)
    return decoder


def test_attaching_changes_nothing_and_freezes_all_other_parameters() -> None:
    decoder = with_adapters()
    assert torch.equal(logits(decoder), logits(tiny_decoder()))
    assert {name.rpartition(".lora.")[2] for name, p in decoder.named_parameters() if p.requires_grad} == {"down", "up"}
    ups = [p for name, p in decoder.named_parameters() if name.endswith("lora.up")]
    downs = [p for name, p in decoder.named_parameters() if name.endswith("lora.down")]
    assert len(ups) == len(downs) == 3 * 4 and not any(p.any() for p in ups) and all(p.any() for p in downs)


def test_the_seed_determines_the_adapters() -> None:
    one, again = with_adapters(), with_adapters()
    other = tiny_decoder()
    attach(other, 3, 6.0, ALL_TARGETS, seed=2)
    first = [d.layers[0].o.lora.down for d in (one, again, other)]  # type: ignore[union-attr]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])


@pytest.mark.parametrize(
    "targets", [ALL_TARGETS, ("q_proj", "v_proj"), ("k_proj", "up_proj"), ("o_proj", "down_proj")], ids="-".join
)
def test_only_targets_are_trained(targets: tuple[str, ...]) -> None:
    decoder, base = trained(with_adapters(targets=targets)), dict(hf_state(tiny_decoder()))
    for name, tensor in hf_state(decoder):
        is_target = any(target in name for target in targets)
        assert torch.equal(tensor, base[name]) != is_target, name


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"])
def test_merged_weights_give_the_adapted_outputs(dtype: torch.dtype, atol: float, tmp_path: Any) -> None:
    decoder = trained(with_adapters(dtype, family="qwen2", qkv_bias=True))
    merged = tiny_decoder(dtype, seed=9, family="qwen2", qkv_bias=True)
    assign(merged, hf_state(decoder))
    with torch.no_grad():
        adapted = logits(decoder)
        assert (adapted - logits(tiny_decoder(dtype, family="qwen2", qkv_bias=True))).abs().max() > 0.1
        torch.testing.assert_close(logits(merged), adapted, rtol=0, atol=atol * float(adapted.abs().max()))
        save(decoder, tmp_path)
        torch.testing.assert_close(logits(load(tmp_path, dtype)), logits(merged), rtol=0, atol=0)


def test_adapters_off_gives_the_base_outputs() -> None:
    decoder = trained(with_adapters())
    with torch.no_grad():
        with pytest.raises(RuntimeError), adapters_off(decoder):
            assert torch.equal(logits(decoder), logits(tiny_decoder()))
            raise RuntimeError
        assert (logits(decoder) - logits(tiny_decoder())).abs().max() > 0.1


def test_gradients_of_the_adapters() -> None:
    """dA and dB from dW: dB = s dW A^T, dA = s B^T dW."""
    decoder = trained(with_adapters())
    merged = tiny_decoder()
    assign(merged, hf_state(decoder))
    merged.requires_grad_(True)
    for one in (decoder, merged):
        logits(one).log_softmax(-1)[:, 3].sum().backward()
    for adapted, plain in zip(decoder.layers, merged.layers, strict=True):
        for name in FUSED:
            lora, grad = getattr(adapted, name).lora, getattr(plain, name).weight.grad
            ups, up_grads, downs = lora.ups(lora.up), lora.ups(lora.up.grad), lora.down.split(lora.rank)
            for part, up, up_grad, down, down_grad in zip(
                lora.parts, ups, up_grads, downs, lora.down.grad.split(lora.rank), strict=True
            ):
                own = grad[part.first : part.end]
                torch.testing.assert_close(up_grad, 2.0 * own @ down.T, rtol=0, atol=1e-9)
                torch.testing.assert_close(down_grad, 2.0 * up.T @ own, rtol=0, atol=1e-9)
