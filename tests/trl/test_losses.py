"""The losses equal TRL's, in value and gradient: its own `_compute_loss` on the same random batches."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import AlgorithmSection
from paceline.rl.algorithms import make_algorithm
from paceline.rl.batch import TokenBatch

pytestmark = pytest.mark.trl
with pytest.MonkeyPatch.context() as patch:  # tests/ is on the path: its trl and vllm would be taken for the real ones
    patch.setattr(sys, "path", [entry for entry in sys.path if Path(entry) != Path(__file__).parents[1]])
    trl = pytest.importorskip("trl")
    GRPOTrainer, RLOOTrainer = trl.GRPOTrainer, trl.RLOOTrainer

MAX_TOKENS = 12
# What a user of TRL writes for each algorithm.
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    "dapo": {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_low": 0.2, "epsilon_high": 5.0},
}


def make_batch(seed: int, off_policy: bool, spread: float) -> tuple[TokenBatch, Tensor]:
    """Two groups of four with 1 to 12 tokens each, one in five of them not the policy's; and current logprobs."""
    g = torch.Generator().manual_seed(seed)
    sequence_T = torch.repeat_interleave(torch.arange(8), torch.randint(1, MAX_TOKENS + 1, (8,), generator=g))
    mask_T = torch.rand(len(sequence_T), generator=g) < 0.8
    base_T = -3 * torch.rand(len(sequence_T), generator=g, dtype=torch.float64)

    def near(logprobs_T: Tensor) -> Tensor:
        return logprobs_T + spread * torch.randn(len(logprobs_T), generator=g, dtype=torch.float64)

    batch = TokenBatch(
        sequence_T=sequence_T,
        mask_T=mask_T,
        group_S=torch.arange(8) // 4,
        reward_S=torch.rand(8, generator=g, dtype=torch.float64),
        length_S=torch.bincount(sequence_T[mask_T], minlength=8),
        truncated_S=torch.rand(8, generator=g) < 0.3,
        engine_logprobs_T=near(base_T),
        version_T=torch.zeros(len(sequence_T), dtype=torch.long),
        old_logprobs_T=near(base_T) if off_policy else None,
        ref_logprobs_T=near(base_T),
    )
    return batch, near(base_T)


def padded(values_T: Tensor, batch: TokenBatch) -> Tensor:
    rows = [values_T[batch.sequence_T == i] for i in range(batch.num_sequences)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def trainer(kind: type, logprobs: Tensor, **changes: Any) -> Any:
    """One of TRL's trainers with just what its loss reads; the model's logprobs are given."""
    values = {
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": MAX_TOKENS,
        "model": SimpleNamespace(training=True),
        "args": SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        "accelerator": SimpleNamespace(
            num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
        ),
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (logprobs, torch.zeros_like(logprobs), None),
    }
    made = kind.__new__(kind)
    made.__dict__.update(values | changes)
    return made


def trl_inputs(batch: TokenBatch) -> dict[str, Tensor]:
    """A prepared batch as TRL holds it: padded, what the policy did not write under the tool mask."""
    assert batch.advantages_T is not None and batch.ref_logprobs_T is not None
    completion_mask = padded(torch.ones_like(batch.sequence_T), batch)
    inputs = {
        "prompt_ids": torch.zeros(batch.num_sequences, 1, dtype=torch.long),
        "prompt_mask": torch.ones(batch.num_sequences, 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(completion_mask),
        "completion_mask": completion_mask,
        "tool_mask": padded(batch.mask_T.long(), batch),
        "advantages": padded(batch.advantages_T, batch).sum(1) / padded(batch.mask_T.long(), batch).sum(1).clamp(min=1),
        "ref_per_token_logps": padded(batch.ref_logprobs_T, batch),
        "num_items_in_batch": batch.mask_T.sum(),
    }
    if batch.old_logprobs_T is not None:
        inputs["old_per_token_logps"] = padded(batch.old_logprobs_T, batch)
    return inputs


def check(name: str, seed: int, off_policy: bool, spread: float, trl_settings: dict[str, Any], **settings: Any) -> None:
    batch, logprobs_T = make_batch(seed, off_policy, spread)
    algorithm = make_algorithm(AlgorithmSection(name=name, **settings), MAX_TOKENS)
    algorithm.prepare(batch)
    leaf_T = logprobs_T.clone().requires_grad_()
    ours = algorithm.loss(batch, leaf_T).loss
    (our_gradient_T,) = torch.autograd.grad(ours, leaf_T)

    their_leaf_T = logprobs_T.clone().requires_grad_()
    made = trainer(GRPOTrainer, padded(their_leaf_T, batch), **trl_settings, beta=algorithm.beta)
    inputs = trl_inputs(batch)
    if algorithm.correction != "none":
        made.use_vllm = made.vllm_importance_sampling_correction = True
        inputs["importance_sampling_ratio"] = sampling_ratio(algorithm.correction, batch, logprobs_T)
    theirs = made._compute_loss(None, inputs)
    (their_gradient_T,) = torch.autograd.grad(theirs, their_leaf_T)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(our_gradient_T, their_gradient_T, rtol=1e-10, atol=1e-12)
    assert batch.advantages_T is not None and batch.advantages_T.any() and ours != 0


def sampling_ratio(correction: str, batch: TokenBatch, logprobs_T: Tensor) -> Tensor:
    """As TRL makes it before the loss, for its modes token_truncate, sequence_truncate and token_mask."""
    old_T = logprobs_T if batch.old_logprobs_T is None else batch.old_logprobs_T
    difference = padded((old_T - batch.engine_logprobs_T) * batch.mask_T, batch)
    if correction == "sequence_tis":
        return difference.sum(1, keepdim=True).exp().clamp(max=2.0)
    ratio = difference.exp()
    return ratio.clamp(max=2.0) if correction == "token_tis" else ratio * ((ratio >= 0.5) & (ratio <= 2.0))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": 0.3, "kl": "k3"},
        {"mask_truncated_completions": True},
        {"correction": "token_tis", "beta": 0.3},
        {"correction": "sequence_tis"},
        {"correction": "icepop"},
    ],
    ids=lambda settings: ",".join(map(str, settings.values())) or "plain",
)
@pytest.mark.parametrize(("off_policy", "spread"), [(False, 0.3), (True, 0.3), (True, 1.5), (True, 1e-3)])
@pytest.mark.parametrize("name", list(TRL_SETTINGS))
def test_loss_equals_trl(name: str, off_policy: bool, spread: float, settings: dict[str, Any], seed: int) -> None:
    check(name, seed, off_policy, spread, TRL_SETTINGS[name], **settings)


def test_another_loss_is_caught() -> None:
    for name, other in (
        ("grpo", "dapo"),
        ("dapo", "dr_grpo"),
        ("dr_grpo", "grpo"),
        ("gspo", "grpo"),
        ("cispo", "dapo"),
    ):
        with pytest.raises(AssertionError):
            check(name, 0, True, 0.3, TRL_SETTINGS[other])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_rloo_equals_trl(seed: int, spread: float) -> None:
    batch, logprobs_T = make_batch(seed, off_policy=True, spread=spread)
    algorithm = make_algorithm(AlgorithmSection(name="rloo"), MAX_TOKENS)
    algorithm.prepare(batch)
    leaf_T, their_leaf_T = logprobs_T.clone().requires_grad_(), logprobs_T.clone().requires_grad_()
    ours = algorithm.loss(batch, leaf_T).loss
    inputs = trl_inputs(batch)
    inputs["completion_mask"] = inputs.pop("tool_mask")
    inputs["old_logps"] = (inputs["old_per_token_logps"] * inputs["completion_mask"]).sum(1)
    made = trainer(RLOOTrainer, padded(their_leaf_T, batch), epsilon_low=0.2, epsilon_high=0.2)
    theirs = made._compute_loss(None, inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(ours, leaf_T), torch.autograd.grad(theirs, their_leaf_T))
