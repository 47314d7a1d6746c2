"""The loss compared with a reference implementation by autograd, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.draft import loss
from paceline.draft.loss import draft_loss

KINDS = ["kl", "acceptance", "tv", "coupled"]
P, D, N, V = 11, 6, 9, 14  # positions, hidden, draft vocabulary, the target's


def reference_loss(h: Tensor, weight: Tensor, p: Tensor, temperature: float, kind: str) -> tuple[Tensor, Tensor]:
    log_q = (h @ weight.T / temperature).log_softmax(-1)
    q = log_q.exp()
    overlap = torch.minimum(p, q).sum(-1)
    if kind == "coupled":
        rest = (1 - p.sum(-1))[:, None, None] / p.unsqueeze(-1)
        ratios = torch.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None])
        return -(1 / (ratios.sum(-1, keepdim=True) + rest)).sum((1, 2)).log().mean(), overlap
    cross_entropy = -(p * log_q).sum(-1)
    losses = {"kl": cross_entropy, "acceptance": -overlap.log(), "tv": 1 - overlap + 0.1 * cross_entropy}
    return losses[kind].mean(), overlap


def case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, LM head, and p of the draft vocabulary's tokens, which sums to less than one."""
    noise = torch.Generator().manual_seed(seed)
    h, weight = (torch.randn(shape, generator=noise, dtype=torch.float64) for shape in ((P, D), (N, D)))
    p = (2 * torch.randn(P, V, generator=noise, dtype=torch.float64)).softmax(-1)[:, :N]
    return h.requires_grad_(), weight.requires_grad_(), p


def difference(reference_kind: str, kind: str, temperature: float, reference_temperature: float | None = None) -> float:
    """The largest difference of loss, overlap and both gradients."""
    h, weight, p = case()
    found = draft_loss(h, weight, p, temperature, kind)
    expected = reference_loss(h, weight, p, reference_temperature or temperature, reference_kind)
    grads = [torch.autograd.grad(3 * loss_, (h, weight)) for loss_, _ in (found, expected)]
    pairs = [*zip(found, expected, strict=True), *zip(*grads, strict=True)]
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize("chunk", [3, 8192])
def test_equals_the_reference(kind: str, temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK", chunk)
    assert difference(kind, kind, temperature) < 1e-12


def test_another_loss_or_temperature_differs() -> None:
    assert difference("acceptance", "kl", 1.0) > 1e-3
    assert difference("kl", "kl", 0.6, reference_temperature=1.0) > 1e-3


def test_a_perfect_head_has_no_gradient() -> None:
    """q = p over the whole vocabulary. (The `acceptance` loss is not differentiable there.)"""
    h, weight, _ = case()
    p = (h @ weight.T).detach().softmax(-1)
    found, overlap = draft_loss(h, weight, p, 1.0, "kl")
    assert overlap.min() == pytest.approx(1, abs=1e-12)
    assert max(float(g.abs().max()) for g in torch.autograd.grad(found, (h, weight))) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_steps_increase_the_overlap(kind: str) -> None:
    h, weight, p = case()
    first = float(draft_loss(h, weight, p, 1.0, kind)[1].mean())
    for _ in range(50):
        (grad,) = torch.autograd.grad(draft_loss(h, weight, p, 1.0, kind)[0], h)
        h = (h - grad).detach().requires_grad_()
    assert float(draft_loss(h, weight, p, 1.0, kind)[1].mean()) > first + 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_no_positions_and_no_overlap(kind: str) -> None:
    h, weight, p = case()
    found, overlap = draft_loss(h[:0], weight, p[:0], 1.0, kind)
    assert float(found.detach()) == 0 and overlap.shape == (0,)
    found, _ = draft_loss(h, weight, torch.zeros_like(p), 1.0, kind)
    assert all(g.isfinite().all() for g in torch.autograd.grad(found, (h, weight)))


def test_the_coupled_loss_is_how_often_two_races_agree() -> None:
    _, _, p = case()
    q = (2 * torch.randn(P, N, generator=torch.Generator().manual_seed(5), dtype=torch.float64)).softmax(-1)
    probability, _ = loss.agreement_probability(p, q)
    noise = torch.empty(200_000, V, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(6))
    whole = torch.cat([p, (1 - p.sum(-1, keepdim=True)) / (V - N) * torch.ones(P, V - N)], -1)
    for i in range(P):
        same = (noise / whole[i]).argmin(-1) == (noise[:, :N] / q[i]).argmin(-1)
        assert float(same.double().mean()) == pytest.approx(float(probability[i]), abs=0.006)  # five standard errors
