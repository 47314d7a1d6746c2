"""AdamW and Muon against implementations from their papers; schedules; clipping."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from support import tiny_decoder
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config import LearnerSection
from paceline.model.decoder import Decoder
from paceline.model.lora import attach
from paceline.model.optim import Muon, Optimizer, schedule
from paceline.model.weights import hf_state


def section(**settings: Any) -> LearnerSection:
    return LearnerSection(**{"max_grad_norm": 1e9, **settings})


def decoder(**changes: object) -> Decoder:
    return tiny_decoder(torch.float64, **changes).requires_grad_(True)


def random_gradients(it: Decoder, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    for parameter in it.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=noise).to(parameter)


def by_name(it: Decoder) -> dict[str, Tensor]:
    """Weights under their Hugging Face names, which are not fused."""
    return {name: tensor.clone() for name, tensor in hf_state(it)}


def gradients_by_name(it: Decoder) -> dict[str, Tensor]:
    shadow = tiny_decoder(torch.float64, qkv_bias=it.config.qkv_bias, family=it.config.family)
    for mine, theirs in zip(shadow.parameters(), it.parameters(), strict=True):
        assert theirs.grad is not None
        mine.data = theirs.grad.clone()
    return by_name(shadow)


class Reference:
    """Muon (Jordan et al., 2024) and AdamW (arXiv 1711.05101), line by line, one unfused matrix at a time."""

    def __init__(self, optimizer: str, lr: float, muon_lr: float, decay: float, betas: tuple[float, float]) -> None:
        self.optimizer, self.lr, self.muon_lr, self.decay, self.betas = optimizer, lr, muon_lr, decay, betas
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}
        self.num = 0

    def step(self, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        self.num += 1
        for name, w in weights.items():
            if self.optimizer == "muon" and w.ndim == 2 and name.startswith("model.layers."):
                self.muon(name, w, gradients[name])
            else:
                self.adamw(name, w, gradients[name])

    def muon(self, name: str, w: Tensor, g: Tensor) -> None:
        m = self.first[name] = 0.95 * self.first.get(name, torch.zeros_like(w)) + 0.05 * g
        u = 0.05 * g + 0.95 * m  # Nesterov
        x = u / u.norm()
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
        w *= 1 - self.muon_lr * self.decay
        w -= self.muon_lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * x

    def adamw(self, name: str, w: Tensor, g: Tensor) -> None:
        b1, b2 = self.betas
        m = self.first[name] = b1 * self.first.get(name, torch.zeros_like(w)) + (1 - b1) * g
        v = self.second[name] = b2 * self.second.get(name, torch.zeros_like(w)) + (1 - b2) * g * g
        w *= 1 - self.lr * (self.decay if w.ndim == 2 else 0)
        w -= self.lr * (m / (1 - b1**self.num)) / ((v / (1 - b2**self.num)).sqrt() + 1e-8)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_steps_are_the_papers(optimizer: str) -> None:
    it = decoder(family="qwen2", qkv_bias=True)
    settings = {"learning_rate": 3e-3, "muon_learning_rate": 2e-2, "weight_decay": 0.1, "betas": [0.8, 0.95]}
    ours = Optimizer(it, it.config, section(optimizer=optimizer, **settings), 10)
    reference = Reference(optimizer, 3e-3, 2e-2, 0.1, (0.8, 0.95))
    weights = by_name(it)
    for step in range(4):
        random_gradients(it, step)
        reference.step(weights, gradients_by_name(it))
        ours.step(step)
    for name, tensor in hf_state(it):
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-10)


def test_muon_on_a_fused_matrix_is_detected() -> None:
    it, fused = decoder(), decoder()
    ours = Optimizer(it, it.config, section(optimizer="muon"), 10)
    qkv = fused.layers[0].qkv.weight
    assert qkv is not None
    other = Muon([qkv], lr=1e-3, weight_decay=0.0)
    other.state[qkv] = {"momentum_buffer": torch.zeros_like(qkv)}
    for one in (it, fused):
        random_gradients(one, 0)
    ours.step(0)
    other.step()
    assert (it.layers[0].qkv.weight - qkv).abs().max() > 1e-4


def test_muon_equals_torchs_except_for_rounding() -> None:
    """torch iterates in bfloat16 with 8 bits; the updates agree to a few percent."""
    noise = torch.Generator().manual_seed(0)
    for shape in ((24, 16), (16, 24)):
        weight = torch.randn(shape, generator=noise)
        leaves = [torch.nn.Parameter(weight.clone()) for _ in range(2)]
        optimizers = [kind([leaf], lr=0.1) for kind, leaf in zip((Muon, torch.optim.Muon), leaves, strict=True)]
        optimizers[0].state[leaves[0]] = {"momentum_buffer": torch.zeros(shape)}
        for _ in range(3):
            grad = torch.randn(shape, generator=noise)
            for leaf, optimizer in zip(leaves, optimizers, strict=True):
                leaf.grad = grad.clone()
                optimizer.step()
        moved = (leaves[0] - weight).norm()
        assert (leaves[0] - leaves[1]).norm() < 0.03 * moved


def test_which_parameters_are_matrices() -> None:
    it = decoder(qkv_bias=True, family="qwen2", tie_embeddings=False)
    parts = Optimizer(it, it.config, section(optimizer="muon"), 1).parts
    matrices = {name for name, part in parts.items() if part.is_matrix}
    assert {name for name in matrices if name.startswith("layers.1.")} == {
        *(f"layers.1.qkv.weight.{i}" for i in range(3)),
        *(f"layers.1.gate_up.weight.{i}" for i in range(2)),
        "layers.1.o.weight.0",
        "layers.1.down.weight.0",
    }
    others = parts.keys() - matrices
    assert {"embed.weight", "lm_head.weight", "norm", "layers.1.input_norm", "layers.1.qkv.bias"} <= others


def test_schedules_are_functions_of_the_step() -> None:
    linear = section(schedule="linear", warmup_steps=4)
    assert [schedule(i, linear, 8) for i in range(8)] == [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]
    cosine = section(schedule="cosine", warmup_steps=2)
    expected = [0.5, 1.0, *(0.5 * (1 + math.cos(math.pi * i / 6)) for i in range(6))]
    assert [schedule(i, cosine, 8) for i in range(8)] == pytest.approx(expected)
    constant = section(warmup_steps=2)
    assert [schedule(i, constant, 3) for i in range(5)] == [0.5, 1, 1, 1, 1]
    assert [schedule(i, section(schedule="linear"), 1) for i in range(3)] == [1, 0, 0]
    assert schedule(0, section(schedule="cosine", warmup_steps=9), 4) == pytest.approx(1 / 9)


def test_the_schedule_is_applied_to_both_optimizers() -> None:
    for optimizer in ("adamw", "muon"):
        settings = {"optimizer": optimizer, "schedule": "linear", "learning_rate": 1e-3}
        moved = []
        for step in (0, 6):  # the same gradients from the same weights, at another step
            it = decoder()
            before = by_name(it)
            ours = Optimizer(it, it.config, section(**settings), 8)
            assert ours.learning_rate(step) == 1e-3 * (8 - step) / 8
            random_gradients(it, 0)
            ours.step(step)
            moved.append({name: tensor - before[name] for name, tensor in hf_state(it)})
        for name in moved[0]:
            torch.testing.assert_close(moved[1][name], moved[0][name] / 4, rtol=1e-9, atol=1e-12)


def test_gradients_are_clipped_by_their_global_norm() -> None:
    it, reference = decoder(), decoder()
    # A large eps, so that AdamW's update depends on the scale of the gradients.
    clipped = Optimizer(it, it.config, section(max_grad_norm=0.5, eps=1.0), 1)
    plain = Optimizer(reference, reference.config, section(eps=1.0), 1)
    for one in (it, reference):
        random_gradients(one, 0)
    norm = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None]).norm()
    for parameter in reference.parameters():
        assert parameter.grad is not None
        parameter.grad *= 0.5 / norm
    assert clipped.step(0) == pytest.approx(float(norm)) and plain.step(0) == pytest.approx(0.5)
    for name, tensor in hf_state(it):
        torch.testing.assert_close(tensor, by_name(reference)[name], rtol=0, atol=1e-9)
    assert all(p.grad is None for p in it.parameters())


def test_parts_cover_adapters_too() -> None:
    it = tiny_decoder()
    attach(it, 3, 6.0, ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj"))
    parts = Optimizer(it, it.config, section(optimizer="muon"), 1).parts
    for name, parameter in it.named_parameters():
        if parameter.requires_grad:
            rows = [part.leaf.shape[0] for part in parts.values() if part.of == name]
            _, _, kind = name.split(".", 2)
            assert sum(rows) == len(parameter) and len(rows) == {"qkv.lora": 3}.get(kind.rpartition(".")[0], 1)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, optimizer: str) -> None:
    """Neither weights nor moments nor the step counters of AdamW."""
    it = decoder()
    ours = Optimizer(it, it.config, section(optimizer=optimizer), 5)
    random_gradients(it, 0)
    assert math.isfinite(ours.step(0))
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    assert any(name.startswith("step.") and tensor == 1 for name, tensor in before.items())
    random_gradients(it, 1)
    it.norm.grad[0] = bad  # type: ignore[index]
    assert not math.isfinite(ours.step(1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())
    assert all(p.grad is None for p in it.parameters())


def test_masters_are_rounded_to_the_weights_in_one_call() -> None:
    it = tiny_decoder(torch.bfloat16).requires_grad_(True)
    ours = Optimizer(it, it.config, section(learning_rate=1e-2), 1)
    before = by_name(it)
    random_gradients(it, 0)
    for parameter, master in zip(it.parameters(), ours.masters.values(), strict=True):
        assert parameter.grad is not None
        master.grad, parameter.grad = parameter.grad.float(), None
    counted: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    with Count():
        ours.step(0)
    assert counted["_foreach_copy_"] == 1 and not counted["copy_"]
    for parameter, master in zip(it.parameters(), ours.masters.values(), strict=True):
        assert master.dtype == torch.float32 and torch.equal(parameter, master.bfloat16())
    assert not any(torch.equal(tensor, before[name]) for name, tensor in hf_state(it))
