"""The learner: rollouts and a loss in, new weights out. It knows nothing of algorithms, tasks or engines.

What always holds: the same rollouts, weights and number of threads give the same bits (on a GPU in 16 bits: up to the
order in which flash attention sums gradients of sequences beyond 128 tokens); how rollouts are packed and cut into
microbatches changes results only in rounding; `state` and `restore` go on bit for bit. Streams are as in TokenBatch: T
tokens after the prompts, float64, on the CPU.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline.config import LearnerSection
from paceline.model import lora
from paceline.model.attention import Attention, PackedAttention, VarlenAttention, has_varlen
from paceline.model.decoder import Decoder, Output
from paceline.model.optim import Optimizer
from paceline.model.weights import hf_state
from paceline.rl import head
from paceline.rl.batch import TokenBatch
from paceline.rl.packing import Packed, microbatches, minibatches, pack
from paceline.types import Rollout

if TYPE_CHECKING:
    from paceline.rl.algorithms import LossOutput

Loss = Callable[[TokenBatch, Tensor], "LossOutput"]
Weights = Callable[[TokenBatch], Tensor]


@dataclass(slots=True)
class UpdateReport:
    loss: float  # mean over the update's optimiser steps, as is the norm
    grad_norm: float  # before clipping
    learning_rate: float
    entropy: float  # mean over trained tokens, at the sampling temperature
    stats: dict[str, float]  # the loss's own, means over trained tokens
    logprobs_T: Tensor  # before the update; 0 where the policy did not choose the token


class Observer(Protocol):
    """Who learns from the states of an update's first pass, which are computed anyway. It must leave alone whatever is
    the decoder's."""

    taps: tuple[int, ...]  # layers whose outputs it wants to see

    def observe(self, rollouts: Sequence[Rollout], packed: Packed, output: Output) -> None:
        """The states of these rollouts, detached."""
        ...

    def learn(self) -> None:
        """Before the weights that gave what was observed move on."""
        ...


class Learner:
    """Trains `decoder`, in place. The reference policy is the decoder as it is given here."""

    def __init__(
        self,
        decoder: Decoder,
        section: LearnerSection,
        *,
        num_steps: int,
        temperature: float = 1.0,
        keep_reference: bool = False,
        seed: int = 0,
    ) -> None:
        if not temperature > 0:
            raise ValueError(
                f"sampling.temperature = {temperature}: greedy samples teach nothing; train with a temperature above 0"
            )
        assert decoder.embed.weight is not None, "a packed decoder is for inference"
        self.decoder, self.section, self.temperature = decoder, section, temperature
        self.version = 0  # updates made
        self.reference: Decoder | None = None
        if keep_reference:
            # With adapters the base stays as it is, so there is nothing to copy.
            self.reference = decoder if section.lora_rank else copy.deepcopy(decoder).requires_grad_(False)
        if section.lora_rank:
            lora.attach(decoder, section.lora_rank, section.lora_alpha, section.lora_targets, seed)
        else:
            decoder.requires_grad_(True)
        decoder.checkpointing = section.activation_checkpointing
        self.optimizer = Optimizer(decoder, decoder.config, section, num_steps)

    def logprobs(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Of every token that the policy chose, under its present weights; 0 at the others. No gradient."""
        return self._logprobs(self.decoder, rollouts)

    def reference_logprobs(self, rollouts: Sequence[Rollout]) -> Tensor:
        assert self.reference is not None, "made without keep_reference"
        plain: AbstractContextManager[None] = nullcontext()
        with lora.adapters_off(self.decoder) if self.reference is self.decoder else plain:
            return self._logprobs(self.reference, rollouts)

    def update(
        self,
        rollouts: Sequence[Rollout],
        batch: TokenBatch,
        loss: Loss,
        weights: Weights | None = None,
        observer: Observer | None = None,
    ) -> UpdateReport:
        """One version further: num_iterations passes over the batch, each in num_minibatches optimiser steps. `loss`
        sees whole sequences, a microbatch at a time, and its sum over an optimiser step is what is minimised;
        `weights` sees an optimiser step's whole minibatch and gives the weights_T that its microbatches carry."""
        self.optimizer.clear()  # of what an update that failed may have left
        cuts = list(minibatches(batch.group_S, self.section.num_minibatches))
        before_T: Tensor | None = None
        if len(cuts) > 1:  # all but the first minibatch will see weights that have moved on
            before_T = self.logprobs(rollouts) if batch.old_logprobs_T is None else batch.old_logprobs_T
            batch = replace(batch, old_logprobs_T=before_T)
        sums: Counter[str] = Counter()
        losses: list[float] = []
        norms: list[float] = []
        for _ in range(self.section.num_iterations):
            for start, end in cuts:
                mini = batch.sequences(start, end)
                if weights is not None:
                    mini = replace(mini, weights_T=weights(mini))
                total, logprobs_T = self._backward(rollouts[start:end], mini, loss, sums, observer)
                if observer is not None:
                    observer.learn()
                losses.append(total)
                norms.append(self.optimizer.step(self.version))
                before_T = logprobs_T if before_T is None else before_T
            if batch.old_logprobs_T is None:
                batch = replace(batch, old_logprobs_T=before_T)
            observer = None  # later passes see the same rollouts again
        assert before_T is not None
        report = UpdateReport(
            loss=sum(losses) / len(losses),
            grad_norm=sum(norms) / len(norms),
            learning_rate=self.optimizer.learning_rate(self.version),
            entropy=sums.pop("entropy") / max(1, sums.pop("trained")),
            stats={key: value / max(1.0, sums["tokens"]) for key, value in sums.items() if key != "tokens"},
            logprobs_T=before_T,
        )
        self.version += 1
        return report

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor under its Hugging Face name, adapters merged: what an engine takes."""
        return hf_state(self.decoder)

    def state(self) -> dict[str, Tensor]:
        """All that is needed to go on bit for bit: live tensors, to be written or copied before the next update."""
        return {"version": torch.tensor(self.version), **self.optimizer.state()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state`, with the model (for the reference, or the adapters' base) and settings it was made of."""
        rest = dict(state)
        version = rest.pop("version", None)
        self.optimizer.restore(rest)
        assert version is not None
        self.version = int(version)

    def _backward(
        self,
        rollouts: Sequence[Rollout],
        mini: TokenBatch,
        loss: Loss,
        sums: Counter[str],
        observer: Observer | None,
    ) -> tuple[float, Tensor]:
        """Gradients of the loss's sum over a minibatch, microbatch by microbatch; that sum, and the logprobs."""
        total, parts = 0.0, []
        for start, end in microbatches(rollouts, self.section.tokens_per_microbatch):
            part = mini.sequences(start, end)
            taps = observer.taps if observer is not None else ()
            logprobs_T, entropy_T, packed, states = self._forward(self.decoder, rollouts[start:end], taps)
            out = loss(part, logprobs_T)
            if out.loss.requires_grad:  # not where there is no token that the policy chose
                out.loss.backward()
            if observer is not None and states is not None:  # now that the backward pass has let go of its memory
                tapped = {layer: x_ND.detach() for layer, x_ND in states.taps.items()}
                observer.observe(rollouts[start:end], packed, Output(states.hidden.detach(), tapped))
            total += float(out.loss.detach())
            parts.append(logprobs_T.detach())
            sums.update(out.stats)
            sums.update({"entropy": float(entropy_T[part.mask_T].sum()), "trained": int(part.mask_T.sum())})
        return total, torch.cat(parts)

    @torch.no_grad()
    def _logprobs(self, decoder: Decoder, rollouts: Sequence[Rollout]) -> Tensor:
        cuts = microbatches(rollouts, self.section.tokens_per_microbatch)
        return torch.cat([self._forward(decoder, rollouts[start:end])[0] for start, end in cuts])

    def _forward(
        self, decoder: Decoder, rollouts: Sequence[Rollout], taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor, Packed, Output | None]:
        """Logprobs and entropies of these rollouts' tokens in one forward, 0 where the policy did not choose; and what
        they were computed from, None where there are none."""
        packed = pack(rollouts)
        zeros_T = torch.zeros(sum(len(rollout.token_ids) for rollout in rollouts), dtype=torch.float64)
        if not len(packed):
            return zeros_T, zeros_T, packed, None
        in_one_kernel = has_varlen(decoder.device, decoder.dtype, decoder.config.head_dim)
        attention: Attention = (
            VarlenAttention(packed.lengths, packed.prefixes, decoder.device)
            if in_one_kernel
            else PackedAttention(packed.lengths, packed.prefixes)
        )
        tokens, positions, row_P, target_P = (
            x.to(decoder.device) for x in (packed.tokens_N, packed.positions_N, packed.row_P, packed.target_P)
        )
        states = decoder(tokens, positions, attention, taps)
        logprobs_P, entropy_P = head.logprobs(decoder, states.hidden[row_P], target_P, self.temperature)
        at = (packed.index_P,)
        return zeros_T.index_put(at, logprobs_P.cpu()), zeros_T.index_put(at, entropy_P.cpu()), packed, states
