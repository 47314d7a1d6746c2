"""Training runs with rollouts from vLLM: without drafts, with n-grams, with a head and with the history drafter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from overlap import Overlap, assert_overlapped
from tiny_run import RecordingCallback, lines, make, write_head, write_model, write_task

pytest.importorskip("vllm.v1", reason="needs vLLM", exc_type=ImportError)

from paceline.build.config import load_config
from paceline.build.run import build_trainer
from paceline.cluster import vllm_transfer
from paceline.cluster.vllm_engine import VllmEngine

pytestmark = pytest.mark.vllm
NUM_STEPS = 10
VLLM = [
    "model.dtype=float32",
    "engine.kind=vllm",
    "engine.graphs=false",
    "speculation.num_speculative_tokens=3",
    f"train.num_steps={NUM_STEPS}",
    "train.checkpoint_every=0",
    "algorithm.num_generations=8",
    "learner.threads=1",
    "engine.threads=1",
]
METHODS = {
    "none": [],
    "ngram": ["speculation.method=ngram", "speculation.prompt_lookup_min=1", "speculation.rule=rejection"],
    "eagle3": ["draft.online=every", "draft.online_learning_rate=0.003", "speculation.rule=rejection"],
    "suffix": ["speculation.method=suffix", "speculation.rule=rejection"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for vLLM's attention (head sizes are multiples of 32), a head for it, and a task."""
    folder = tmp_path_factory.mktemp("vllm-run")
    write_model(folder / "model", hidden_size=64, head_dim=32, num_layers=3)
    write_task(folder / "task.jsonl")
    METHODS["eagle3"] += write_head(folder, layers=(1, 2, 3))
    return folder


def check_reward_rises(folder: Path, method: str) -> None:
    trainer = make(folder, method, *VLLM, *METHODS[method])
    assert isinstance(trainer.engine, VllmEngine)
    try:
        summary = trainer.run()
        # After the last update vLLM holds the weights that the learner published; so does the head.
        held, published = trainer.engine._call_workers("paceline_receipt", 0, False), trainer.producer._published
        assert held.checksum == published[trainer.producer._engine_version].checksum
        if trainer.head_trainer is not None:
            assert trainer.head_trainer.version == NUM_STEPS and trainer.engine.drafter_version == NUM_STEPS - 1
    finally:
        trainer.close()
    metrics = lines(folder / method, "metrics")
    rewards = [step["reward_mean"] for step in metrics]
    assert len(rewards) == NUM_STEPS and np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3
    # Every step trains on rollouts of the current weights: the logprobs of vLLM and of the learner agree.
    assert max(step["mismatch_max"] for step in metrics) < 1e-3
    assert (summary["mean_acceptance_length"] > 1.02) == (method != "none")
    assert {trace["drafter"] for trace in lines(folder / method, "trace")} == {method}


@pytest.mark.parametrize("method", ["none", "eagle3", "suffix"])
def test_reward_rises(folder: Path, method: str) -> None:
    check_reward_rises(folder, method)


def test_shipped_config_trains(folder: Path) -> None:
    small = [
        f"model.name={str(folder / 'model')!r}",
        "engine.max_num_seqs=8",
        "sampling.max_tokens=8",
        "task.size=16",
        "task.held_out=2",
        "train.num_steps=2",
        "train.groups_per_step=2",
        "train.eval_every=0",
    ]
    config = load_config(Path(__file__).parents[2] / "configs" / "vllm.toml", small)
    trainer = build_trainer(config, RecordingCallback(), run=folder / "shipped")
    try:
        summary = trainer.run()
    finally:
        trainer.close()
    assert summary["finished"] and [step["version"] for step in lines(folder / "shipped", "metrics")] == [1, 2]
    assert {trace["drafter"] for trace in lines(folder / "shipped", "trace")} == {"suffix"}


def test_transformers_architecture_trains_with_vllm(folder: Path) -> None:
    """transformers computes it for the learner and vLLM for the rollouts; their logprobs agree."""
    from conftest import VOCAB_SIZE, write_tokenizer
    from transformers import GemmaConfig, GemmaForCausalLM

    torch.manual_seed(0)
    config = GemmaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, pad_token_id=0, eos_token_id=VOCAB_SIZE - 1,
    )  # fmt: skip
    GemmaForCausalLM(config).save_pretrained(folder / "other" / "model")
    write_tokenizer(folder / "other" / "model")
    write_task(folder / "other" / "task.jsonl")
    short = ["learner.model=transformers", "train.num_steps=2"]
    trainer = make(folder / "other", "none", *VLLM, *short)
    try:
        trainer.run()
    finally:
        trainer.close()
    metrics = lines(folder / "other" / "none", "metrics")
    assert [step["version"] for step in metrics] == [1, 2] and metrics[-1]["grad_norm"] > 0
    assert max(step["mismatch_max"] for step in metrics) < 1e-3


def test_learner_with_classes_that_vllm_patches_is_rejected(folder: Path) -> None:
    from conftest import VOCAB_SIZE, write_tokenizer
    from transformers import Olmo2Config, Olmo2ForCausalLM

    config = Olmo2Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=256, pad_token_id=0, eos_token_id=VOCAB_SIZE - 1,
    )  # fmt: skip
    Olmo2ForCausalLM(config).save_pretrained(folder / "third" / "model")
    write_tokenizer(folder / "third" / "model")
    write_task(folder / "third" / "task.jsonl")
    with pytest.raises(ValueError, match=r"which it patches for the whole process; put the learner into another"):
        make(folder / "third", "none", *VLLM, "learner.model=transformers")


def test_drafter_update_that_is_lost_stops_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receive = vllm_transfer.SharedMemoryTransfer.receive_weights

    def policy_only(self: vllm_transfer.SharedMemoryTransfer, info: vllm_transfer.BucketInfo) -> None:
        if self.model is self._default_model:
            receive(self, info)

    monkeypatch.setattr(vllm_transfer.SharedMemoryTransfer, "receive_weights", policy_only)
    trainer = make(folder, "missed", *VLLM, *METHODS["eagle3"])
    try:
        with pytest.raises(ValueError, match=r"the drafter's weights of version 1: the engine has checksum"):
            trainer.run()
    finally:
        trainer.close()
    assert len(lines(folder / "missed", "metrics")) == 1  # at the first update after the head was trained


def test_resumes_and_overlaps(folder: Path) -> None:
    """Generation overlaps with training; the history is restored from the checkpoint."""
    settings = [*VLLM, *METHODS["suffix"], "train.max_staleness=1", "train.inflight=recompute"]
    first = make(folder, "resumed", *settings, "train.num_steps=2")
    overlap = Overlap(first)
    try:
        first.run()
        assert_overlapped(folder / "resumed", overlap, "recompute", 2)
        history = first.engine.state_dict()["drafter"]["logs"]
    finally:
        first.close()
    second = make(folder, "resumed", *settings, "train.num_steps=4", resume=True)
    try:
        assert np.array_equal(second.engine.state_dict()["drafter"]["logs"], history) and len(history)
        assert second.run()["num_steps"] == 4
    finally:
        second.close()


def test_reward_rises_with_ngrams(folder: Path) -> None:
    """Must be the last test in this process. vLLM's n-grams import numba; after that vLLM 0.32 can't start another
    engine on a CPU, because its search for kernels in all modules fails in llvmlite."""
    check_reward_rises(folder, "ngram")
