"""The draft learner: it learns, it goes on bit for bit, and nothing of the target ever moves or gets a gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_decoder
from torch import Tensor

from paceline.config import DraftSection
from paceline.draft.acceptance import measure
from paceline.draft.learner import DraftLearner
from paceline.draft.lesson import Example, Lesson, teach
from paceline.model.attention import PaddedAttention
from paceline.model.decoder import Decoder
from paceline.model.eagle3 import head_config, init_head
from paceline.model.layer import Linear

SECTION = {"warmup_steps": 2, "learning_rate": 1e-2, "unroll": 2}


def sampled(decoder: Decoder, num: int, length: int, seed: int) -> list[Example]:
    """Sequences that the target draws itself, after one random token."""
    noise = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 60, (num, 1), generator=noise)
    for _ in range(length - 1):
        at = torch.arange(tokens.shape[1]).repeat(num)
        hidden = decoder(tokens.flatten(), at, PaddedAttention(num)).hidden.view(num, -1, 32)[:, -1]
        p = decoder.logits(hidden).softmax(-1)
        tokens = torch.cat([tokens, p.multinomial(1, generator=noise)], 1)
    chosen = np.arange(length) > 0
    return [Example(row.numpy().astype(np.int32), chosen) for row in tokens]


def learner(decoder: Decoder, num_steps: int = 100, **changes: Any) -> DraftLearner:
    config = head_config(decoder.config, 61, (1, 2, 3))
    head = init_head(config, torch.arange(61), seed=0, dtype=torch.float64)
    return DraftLearner(head, DraftSection(**(SECTION | changes)), num_steps=num_steps, temperature=1.0)


def bits(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """Surer of itself than most tiny ones, so that there is something to guess."""
    decoder = tiny_decoder()
    with torch.no_grad():
        decoder.norm.mul_(3)
    return decoder


@pytest.fixture(scope="module")
def lessons(decoder: Decoder) -> list[Lesson]:
    return [teach(decoder, sampled(decoder, 16, 16, seed), (0, 1, 2)) for seed in range(6)]


@pytest.mark.parametrize("loss", ["kl", "acceptance"])
def test_training_raises_acceptance(decoder: Decoder, lessons: list[Lesson], loss: str) -> None:
    """On sequences that it never saw, for every kind of draft."""
    held_out, taught = lessons[0], lessons[1:]
    ours = learner(decoder, 60, loss=loss)
    before = measure(ours.head, decoder.embed, held_out, 2, 1.0)
    reports = [ours.update(taught[step % len(taught)], decoder.embed) for step in range(60)]
    after = measure(ours.head, decoder.embed, held_out, 2, 1.0)
    assert reports[-1].loss < reports[0].loss and ours.version == 60
    assert reports[-1].overlap[0] > reports[0].overlap[0] + 0.1
    for kind in ("coupled", "greedy", "sampled"):
        assert after[kind].mean_length > before[kind].mean_length + 0.1, kind


def test_state_and_restore_go_on_bit_for_bit(decoder: Decoder, lessons: list[Lesson]) -> None:
    whole, first, second = (learner(decoder, 6) for _ in range(3))
    reports = [whole.update(lesson, decoder.embed) for lesson in lessons]
    for lesson in lessons[:3]:
        first.update(lesson, decoder.embed)
    second.restore(bits(first.state()))
    later = [second.update(lesson, decoder.embed) for lesson in lessons[3:]]
    assert later == reports[3:]
    one, other = whole.state(), second.state()
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
    weights = dict(second.weights())
    assert all(weights[name].equal(tensor) for name, tensor in whole.weights())
    # The broken twin: weights without the optimiser's averages, or without the step's number, go another way.
    for lost in ("exp_avg.", "version"):
        half = learner(decoder, 6)
        fresh = half.state()
        half.restore({k: fresh[k] if k.startswith(lost) else v for k, v in bits(first.state()).items()})
        assert [half.update(lesson, decoder.embed) for lesson in lessons[3:]] != reports[3:]


# ---- isolation ----


def frozen(embed: Linear) -> Linear:
    """The same memory, without a gradient."""
    view = Linear(embed.num_in, embed.num_out)
    assert embed.weight is not None
    view.weight = torch.nn.Parameter(embed.weight.detach(), requires_grad=False)
    return view


def test_no_gradient_reaches_the_target() -> None:
    """Though every parameter of it is being trained elsewhere."""
    target = tiny_decoder().requires_grad_(True)
    before = {name: p.detach().clone() for name, p in target.named_parameters()}
    ours = learner(target)
    lesson = teach(target, sampled(tiny_decoder(), 4, 12, 0), (0, 1, 2))
    for _ in range(3):
        ours.update(lesson, frozen(target.embed))
    assert all(p.grad is None for p in target.parameters())
    assert all(p.detach().equal(before[name]) for name, p in target.named_parameters())
    assert all(p.grad is None for p in ours.head.parameters()), "nothing is left behind for a next step either"


def test_a_gradient_that_did_would_be_seen() -> None:
    """The broken twin: features that keep their graph."""
    target = tiny_decoder().requires_grad_(True)
    ours = learner(target)
    lesson = teach(target, sampled(tiny_decoder(), 4, 12, 0), (0, 1, 2))
    at = torch.arange(12).repeat(4)
    out = target(lesson.tokens_SL.flatten(), at, PaddedAttention(4), (0, 1, 2))
    lesson.features_SLF = torch.cat([out.taps[i] for i in range(3)], -1).view(4, 12, -1)
    ours.update(lesson, frozen(target.embed))
    assert target.layers[0].qkv.weight is not None and target.layers[0].qkv.weight.grad is not None


def test_a_temperature_is_what_the_head_learns(decoder: Decoder, lessons: list[Lesson]) -> None:
    """The teacher's probabilities are those at which the engine samples; at 0 those at 1."""
    config = head_config(decoder.config, 20, (1, 2, 3))
    ids = torch.arange(0, 60, 3)
    for temperature, used in ((0.5, 0.5), (1.0, 1.0), (0.0, 1.0)):
        head = init_head(config, ids, dtype=torch.float64)
        ours = DraftLearner(head, DraftSection(), num_steps=1, temperature=temperature)
        logits = decoder.logits(lessons[0].hidden_SLD.flatten(0, 1))
        expected = (logits / used).softmax(-1)[:, ids]
        assert torch.allclose(ours._teacher(lessons[0]), expected, atol=1e-12)
