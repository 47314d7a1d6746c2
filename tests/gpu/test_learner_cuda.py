"""The learner on a CUDA device: the CPU's numbers in float64, bfloat16 with float32 masters, the same bits again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_decoder
from torch import Tensor

from paceline.config import LearnerSection
from paceline.rl.batch import TokenBatch, scored
from paceline.rl.learner import Learner
from paceline.types import Group, Rollout

pytestmark = pytest.mark.gpu


@dataclass(slots=True)
class Loss:
    loss: Tensor
    stats: dict[str, float]


def loss(batch: TokenBatch, logprobs_T: Tensor) -> Loss:
    token_T = batch.reward_S[batch.sequence_T] * logprobs_T * batch.mask_T
    return Loss(-token_T.mean(), {"tokens": float(batch.mask_T.sum())})


def groups(seed: int = 0) -> list[Group]:
    dice = np.random.default_rng(seed)

    def rollout(prompt: tuple[int, ...], num: int) -> Rollout:
        return Rollout(
            sample=0,
            prompt_ids=prompt,
            token_ids=dice.integers(0, 60, num).astype(np.int32),
            mask=np.ones(num, bool),
            logprobs=np.zeros(num),
            versions=np.zeros(num, np.int32),
            provenance=np.zeros(num, np.uint8),
            sources=np.full(num, 255, np.uint8),
            drafters=(),
            finish_reason="stop",
            reward=float(dice.normal()),
        )

    made = []
    for index in range(3):
        prompt = tuple(dice.integers(0, 60, dice.integers(1, 30)).tolist())
        made.append(Group(index, str(index), "", [rollout(prompt, int(n)) for n in dice.integers(1, 40, 5)]))
    return made


def learner(device: str, dtype: torch.dtype, **settings: Any) -> Learner:
    settings = {"learning_rate": 1e-2, "tokens_per_microbatch": 150, **settings}
    return Learner(tiny_decoder(dtype).to(device), LearnerSection(**settings), num_steps=5, keep_reference=True)


def train(it: Learner, num_updates: int = 3) -> list[float]:
    return [it.update(scored(g), TokenBatch.of(g), loss).loss for g in map(groups, range(num_updates))]


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 3}, {"activation_checkpointing": True}], ids=str)
def test_float64_is_the_cpus(settings: dict[str, Any]) -> None:
    cpu, cuda = (learner(device, torch.float64, **settings) for device in ("cpu", "cuda"))
    rollouts = scored(groups())
    torch.testing.assert_close(cuda.logprobs(rollouts), cpu.logprobs(rollouts), rtol=0, atol=1e-10)
    assert train(cuda) == pytest.approx(train(cpu), abs=1e-8)
    for (name, mine), (_, theirs) in zip(cuda.weights(), cpu.weights(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=0, atol=1e-5, msg=name)
    torch.testing.assert_close(cuda.reference_logprobs(rollouts), cpu.reference_logprobs(rollouts), rtol=0, atol=1e-10)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bfloat16_with_masters_repeats_and_restores(optimizer: str) -> None:
    straight, again, half = (learner("cuda", torch.bfloat16, optimizer=optimizer) for _ in range(3))
    assert train(straight, 4) == train(again, 4)
    train(half, 2)
    saved = {name: tensor.cpu().clone() for name, tensor in half.state().items()}
    resumed = learner("cuda", torch.bfloat16, optimizer=optimizer)
    resumed.restore(saved)
    for g in (groups(2), groups(3)):
        resumed.update(scored(g), TokenBatch.of(g), loss)
    for one in (again, resumed):
        state = one.state()
        assert all(torch.equal(tensor, state[name]) for name, tensor in straight.state().items())
    for name, master in straight.optimizer.masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), straight.optimizer.parameters[name])


def test_bfloat16_logprobs_are_near_float64s() -> None:
    rollouts = scored(groups())
    exact = learner("cpu", torch.float64).logprobs(rollouts)
    near = learner("cuda", torch.bfloat16).logprobs(rollouts)
    assert near.dtype == torch.float64 and near.device.type == "cpu"
    assert (near - exact).abs().median() < 0.15 < exact.std()
