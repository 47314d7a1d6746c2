"""The learner is deterministic on a GPU: updates over the same rollouts in two processes give the same bits, with
sequences of 50 to 2000 tokens, and so does a run that is resumed from its state."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.bench.random_weights import random_decoder
from paceline.build.learner import use_train_kernels
from paceline.config import AlgorithmSection, LearnerSection
from paceline.model.config import ModelConfig
from paceline.model.weights import checksum
from paceline.rl.algorithms import make_algorithm
from paceline.rl.batch import TokenBatch, scored
from paceline.rl.learner import Learner
from paceline.types import Group, Rollout

pytestmark = pytest.mark.gpu

NUM_UPDATES = 10
SHAPE = ModelConfig(
    family="qwen3",
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=6,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=4096,
    tie_embeddings=True,
    eos_token_ids=(0,),
    qk_norm=True,
)


def groups(seed: int) -> list[Group]:
    import numpy as np

    rng = np.random.default_rng(seed)
    made = []
    for index in range(4):
        prompt = tuple(rng.integers(0, 32_000, int(rng.integers(20, 300))).tolist())
        rollouts = []
        for sample, num in enumerate(rng.integers(50, 2000, 6).tolist()):
            rollouts.append(
                Rollout(
                    sample=sample, prompt_ids=prompt, token_ids=rng.integers(0, 32_000, num).astype(np.int32),
                    mask=np.ones(num, bool), logprobs=np.zeros(num), versions=np.zeros(num, np.int32),
                    provenance=np.zeros(num, np.uint8), sources=np.full(num, 255, np.uint8), drafters=(),
                    finish_reason="stop", reward=float(rng.normal()),
                )
            )  # fmt: skip
        made.append(Group(index, str(index), "", rollouts))
    return made


def make_learner(deterministic: bool) -> Learner:
    decoder = random_decoder(SHAPE, torch.bfloat16, torch.device("cuda"))
    use_train_kernels(decoder)
    section = LearnerSection(learning_rate=1e-4, tokens_per_microbatch=8192, deterministic=deterministic)
    return Learner(decoder, section, num_steps=NUM_UPDATES)


def train(learner: Learner, first: int, last: int) -> None:
    algorithm = make_algorithm(AlgorithmSection(name="grpo"), 2000)
    for seed in range(first, last):
        made = groups(seed)
        batch = TokenBatch.of(made)
        batch.advantages_T = batch.reward_S[batch.sequence_T]
        learner.update(scored(made), batch, algorithm.loss, algorithm.weights)


def state_checksum(learner: Learner) -> str:
    return checksum((name, tensor) for name, tensor in learner.state_dict().items())


def in_a_process(deterministic: bool) -> str:
    """Train in a new process."""
    code = f"import test_determinism_cuda as t; l = t.make_learner({deterministic}); t.train(l, 0, t.NUM_UPDATES)"
    code += "; print('checksum', t.state_checksum(l))"
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split("checksum ")[1].strip()


def test_updates_are_the_same_in_two_processes_and_after_a_resume(tmp_path: Path) -> None:
    learner = make_learner(True)
    train(learner, 0, 5)
    expected = in_a_process(True)  # beside the memory of this one
    learner.save(tmp_path)
    train(learner, 5, NUM_UPDATES)
    assert state_checksum(learner) == expected
    resumed = make_learner(True)
    resumed.load(tmp_path)
    train(resumed, 5, NUM_UPDATES)
    assert state_checksum(resumed) == expected


def test_a_backward_pass_in_any_order_is_detected() -> None:
    first, second = (make_learner(False) for _ in range(2))
    for learner in (first, second):
        train(learner, 0, 2)
    assert state_checksum(first) != state_checksum(second)
