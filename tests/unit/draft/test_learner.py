"""The draft learner: acceptance rises, resumed training is bit-identical, and the target gets no change or gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_decoder
from torch import Tensor

from paceline.config import ARCHITECTURES, DraftSection
from paceline.draft.acceptance import measure
from paceline.draft.head_batch import Example, HeadBatch, make_head_batch
from paceline.draft.learner import DraftLearner
from paceline.draft.unroll import draft_steps
from paceline.model.attention import PaddedAttention
from paceline.model.decoder import Decoder
from paceline.model.draft_head import DraftHead
from paceline.model.dspark import dspark_config, init_dspark
from paceline.model.eagle3 import head_config, init_head
from paceline.model.layer import Linear

SECTION = {"warmup_steps": 2, "learning_rate": 1e-2, "unroll": 2}


def sampled(decoder: Decoder, num: int, length: int, seed: int) -> list[Example]:
    """Sequences that the target samples after one random token."""
    noise = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 60, (num, 1), generator=noise)
    for _ in range(length - 1):
        at = torch.arange(tokens.shape[1]).repeat(num)
        hidden = decoder(tokens.flatten(), at, PaddedAttention(num)).hidden.view(num, -1, 32)[:, -1]
        p = decoder.logits(hidden).softmax(-1)
        tokens = torch.cat([tokens, p.multinomial(1, generator=noise)], 1)
    loss_mask = np.arange(length) > 0
    return [Example(row.numpy().astype(np.int32), loss_mask) for row in tokens]


def learner(decoder: Decoder, num_steps: int = 100, architecture: str = "eagle3", **changes: Any) -> DraftLearner:
    config = head_config(decoder.config, 61, (1, 2, 3))
    head: DraftHead = init_head(config, torch.arange(61), seed=0, dtype=torch.float64)
    if architecture == "dspark":
        shape = dspark_config(decoder.config, 61, (1, 2, 3), block_size=SECTION["unroll"], markov_rank=8)
        head = init_dspark(shape, torch.arange(61), seed=0, dtype=torch.float64)
    return DraftLearner(head, DraftSection(**(SECTION | changes)), num_steps=num_steps, temperature=1.0)


def bits(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """With a sharper distribution, so that there is something to predict."""
    decoder = tiny_decoder()
    with torch.no_grad():
        decoder.norm.mul_(3)
    return decoder


@pytest.fixture(scope="module")
def head_batches(decoder: Decoder) -> list[HeadBatch]:
    return [make_head_batch(decoder, sampled(decoder, 16, 16, seed), (0, 1, 2)) for seed in range(6)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("loss", ["kl", "acceptance", "tv", "coupled"])
def test_training_raises_acceptance(
    decoder: Decoder, head_batches: list[HeadBatch], loss: str, architecture: str
) -> None:
    """On held-out sequences, for every kind of draft."""
    held_out, train = head_batches[0], head_batches[1:]
    num_steps = 150 if loss == "tv" else 60  # its gradients are small as long as nothing is accepted
    trained = learner(decoder, num_steps, architecture, loss=loss)
    before = measure(trained.head, decoder.embed, held_out, 2, 1.0)
    reports = [trained.update(train[step % len(train)], decoder.embed) for step in range(num_steps)]
    after = measure(trained.head, decoder.embed, held_out, 2, 1.0)
    assert reports[-1].loss < reports[0].loss and trained.version == num_steps
    assert reports[-1].overlap[0] > reports[0].overlap[0] + 0.1
    for kind in ("coupled", "greedy", "sampled"):
        assert after[kind].mean_length > before[kind].mean_length + 0.1, kind


def test_the_confidence_output_learns_the_acceptance(decoder: Decoder, head_batches: list[HeadBatch]) -> None:
    """On sequences that it is trained on: there are too few for others. An untrained output has a correlation of 0."""
    trained, head_batch = learner(decoder, 60, "dspark"), head_batches[1]
    for step in range(60):
        trained.update(head_batches[1 + step % 5], decoder.embed)
    with torch.no_grad():
        features, _, at = next(draft_steps(trained.head, decoder.embed, head_batch, 1))
        q = (features @ trained.head.output_weight().T).softmax(-1)
        p = decoder.logits(head_batch.hidden_SLD.flatten(0, 1)[at - 1]).softmax(-1)
        overlap, found = torch.minimum(p, q).sum(-1), trained.head.acceptance_logits(features)
    assert found is not None
    assert float(torch.corrcoef(torch.stack([overlap, found.sigmoid()]))[0, 1]) > 0.3
    assert float(found.sigmoid().mean()) == pytest.approx(float(overlap.mean()), abs=0.05)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_resumed_training_is_bit_identical(decoder: Decoder, head_batches: list[HeadBatch], architecture: str) -> None:
    whole, first, second = (learner(decoder, 6, architecture) for _ in range(3))
    reports = [whole.update(head_batch, decoder.embed) for head_batch in head_batches]
    for head_batch in head_batches[:3]:
        first.update(head_batch, decoder.embed)
    second.load_state_dict(bits(first.state_dict()))
    later = [second.update(head_batch, decoder.embed) for head_batch in head_batches[3:]]
    assert later == reports[3:]
    one, other = whole.state_dict(), second.state_dict()
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
    weights = dict(second.head.named_parameters())
    assert all(weights[name].equal(parameter) for name, parameter in whole.head.named_parameters())
    # Deliberately broken: without the optimizer's averages or the step number, training differs.
    for lost in ("exp_avg.", "version"):
        broken = learner(decoder, 6, architecture)
        fresh, saved = broken.state_dict(), bits(first.state_dict())
        broken.load_state_dict({k: fresh[k] if k.startswith(lost) else v for k, v in saved.items()})
        assert [broken.update(head_batch, decoder.embed) for head_batch in head_batches[3:]] != reports[3:]


# ---- isolation ----


def frozen(embed: Linear) -> Linear:
    """A view without gradients."""
    view = Linear(embed.num_in, embed.num_out)
    assert embed.weight is not None
    view.weight = torch.nn.Parameter(embed.weight.detach(), requires_grad=False)
    return view


def test_no_gradient_reaches_the_target() -> None:
    """Even if all of its parameters require gradients."""
    target = tiny_decoder().requires_grad_(True)
    before = {name: p.detach().clone() for name, p in target.named_parameters()}
    trained = learner(target)
    head_batch = make_head_batch(target, sampled(tiny_decoder(), 4, 12, 0), (0, 1, 2))
    for _ in range(3):
        trained.update(head_batch, frozen(target.embed))
    assert all(p.grad is None for p in target.parameters())
    assert all(p.detach().equal(before[name]) for name, p in target.named_parameters())
    assert all(p.grad is None for p in trained.head.parameters()), "gradients are cleared after the step"


def test_a_gradient_that_reaches_the_target_is_detected() -> None:
    """Deliberately broken: hidden states that keep their graph."""
    target = tiny_decoder().requires_grad_(True)
    trained = learner(target)
    head_batch = make_head_batch(target, sampled(tiny_decoder(), 4, 12, 0), (0, 1, 2))
    at = torch.arange(12).repeat(4)
    out = target(head_batch.tokens_SL.flatten(), at, PaddedAttention(4), (0, 1, 2))
    head_batch.aux_hidden_SLF = torch.cat([out.aux_hidden_states[i] for i in range(3)], -1).view(4, 12, -1)
    trained.update(head_batch, frozen(target.embed))
    assert target.layers[0].qkv.weight is not None and target.layers[0].qkv.weight.grad is not None


def test_target_probabilities_have_the_sampling_temperature(decoder: Decoder, head_batches: list[HeadBatch]) -> None:
    """Temperature 0 trains at 1."""
    config = head_config(decoder.config, 20, (1, 2, 3))
    ids = torch.arange(0, 60, 3)
    for temperature, used in ((0.5, 0.5), (1.0, 1.0), (0.0, 1.0)):
        head = init_head(config, ids, dtype=torch.float64)
        trained = DraftLearner(head, DraftSection(), num_steps=1, temperature=temperature)
        logits = decoder.logits(head_batches[0].hidden_SLD.flatten(0, 1))
        expected = (logits / used).softmax(-1)[:, ids]
        assert torch.allclose(trained._target_probabilities(head_batches[0]), expected, atol=1e-12)
