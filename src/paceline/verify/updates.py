"""Weight updates while requests run: each token must come from the policy version that is recorded for it.

With `recompute` the engine computes all KV again with the new weights. A sequence's later tokens are then those of the
new version given all tokens before them, whatever the position of the update. A learner with the weights of each
version checks the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.engine.engine import LocalEngine
from paceline.engine.interface import Handle
from paceline.model.decoder import Decoder
from paceline.model.lora import assign_policy, policy_state
from paceline.model.weights import checksum
from paceline.types import Completion, Provenance, Request
from paceline.verify import identity

PERTURBATION = 0.02  # of each tensor's root mean square: far more than rounding, and the model still works
Weights = list[tuple[str, Tensor]]


class WeightUpdate:
    """Weights for an engine, with their checksum."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.checksum = weights, checksum(weights)


def clone_weights(weights: Iterable[tuple[str, Tensor]]) -> Weights:
    return [(name, tensor.clone()) for name, tensor in weights]


def perturbed(weights: Iterable[tuple[str, Tensor]], seed: int = 0) -> Weights:
    """Weights in which every element of every tensor differs, so that a tensor that was not updated is detected."""
    noise = torch.Generator().manual_seed(seed)

    def change(tensor: Tensor) -> Tensor:
        float32 = tensor.to("cpu", torch.float32)
        scale = PERTURBATION * (float32.square().mean().sqrt().item() or 1.0)
        return (float32 + scale * torch.randn(float32.shape, generator=noise)).to(tensor.device, tensor.dtype)

    return [(name, change(tensor)) for name, tensor in weights]


def generate_through_update(
    engine: LocalEngine, requests: Sequence[Request], sent: WeightUpdate, inflight: str = "recompute"
) -> tuple[list[Completion], list[str]]:
    """Run the requests. Update the weights when each has emitted a token, and all together a third of their tokens.
    Returns the completions, and problems with the weights that the engine then has."""
    handles: list[Handle] = [engine.submit(request) for request in requests]
    version, problems = engine.version + 1, []
    wanted, updated = sum(r.sampling.max_tokens for r in requests) // 3, False
    while engine.has_work:
        engine.step()
        emitted = [len(sequence.emitted) for sequence in engine.sequences]
        if not updated and min(emitted, default=0) > 0 and sum(emitted) >= wanted:
            problems = update(engine, sent, version, inflight)
            updated = True
    found = [handle.completion for handle in handles if handle.completion is not None]
    if len(found) < len(requests):
        problems.append(f"{len(requests) - len(found)} of {len(requests)} requests have no completion")
    if not all((c.versions < version).any() and (c.versions == version).any() for c in found):
        problems.append("a request has tokens of one version only: the update did not happen while it ran")
    return found, problems


def update(engine: LocalEngine, sent: WeightUpdate, version: int, inflight: str = "recompute") -> list[str]:
    """Update the engine's weights, then compare its tensors with those that were sent; its receipt may be wrong."""
    receipt = engine.update_weights(sent.weights, version, inflight)
    tensors = dict(sent.weights)
    wrong = [name for name, tensor in policy_state(engine.paged.decoder) if not torch.equal(tensor, tensors[name])]
    problems = [f"update_weights: {name} is not the tensor that was sent" for name in wrong[:4]]
    if receipt.checksum != sent.checksum:
        problems.append("update_weights: the receipt's checksum is not that of the weights that were sent")
    return problems


def num_accepted_tokens_of(completions: Sequence[Completion], version: int) -> int:
    """Draft tokens that were accepted under this version."""
    return sum(int(((c.versions == version) & (c.provenance == Provenance.ACCEPTED)).sum()) for c in completions)


def learner_scores(
    learner: Decoder, versions: Sequence[Weights], completions: Sequence[Completion]
) -> list[identity.TokenScores]:
    """Scores of each token by a learner that has the weights of the token's version."""
    logits: list[Tensor] = []
    for version, weights in enumerate(versions):
        assign_policy(learner, weights)
        for i, c in enumerate(completions):
            found_PV = identity.completion_logits(learner, c)
            if version == 0:
                logits.append(found_PV)
            else:
                own = torch.as_tensor(c.versions == version, device=found_PV.device)
                logits[i] = torch.where(own[:, None], found_PV, logits[i])
    return [identity.score(logits_PV, c) for logits_PV, c in zip(logits, completions, strict=True)]
