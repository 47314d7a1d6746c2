"""The learner: computes logprobs and gradients of rollouts, and updates the weights.

It does not know algorithms, tasks or engines.

Invariants:
  - The same rollouts, weights and number of threads give bit-identical results, on GPUs of one type. Exception:
    learner.deterministic = false; and on a GPU float32 and transformers' models, whose attention is torch's choice.
  - Packing and microbatching change results only by rounding.
  - Training continues bit for bit after `state_dict` and `load_state_dict`.
  - An optimizer step whose loss or gradient is not finite is skipped: it changes neither weights nor optimizer state.
Per-token tensors are as in TokenBatch: T tokens after the prompts, float64, on the CPU.

A learner may have several ranks (`worker_group.py`). Each rank holds a shard of every parameter and computes a part of
every batch. Rank 0 is called like a learner of one process and returns results of the whole batch; the others run
`run_worker`.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.config import LearnerSection
from paceline.model import lora
from paceline.model.decoder import Decoder, Output
from paceline.model.hf_decoder import HFDecoder, parameter_views
from paceline.model.optim import Optimizer
from paceline.model.sharding import local_tensor, reshard
from paceline.model.weights import read_views
from paceline.rl.batch import TokenBatch
from paceline.rl.logprobs import token_logprobs
from paceline.rl.observer import Observer
from paceline.rl.packing import Packed, dummy_packed, microbatches_per_rank, minibatches, pack
from paceline.rl.payload import pack_payload, unpack_payload
from paceline.rl.shards import Shards, write_shard
from paceline.rl.worker_group import Command, WorkerGroup
from paceline.types import Rollout

if TYPE_CHECKING:
    from paceline.rl.algorithms import LossOutput

LossFunction = Callable[[TokenBatch, Tensor], "LossOutput"]
LossWeights = Callable[[TokenBatch], Tensor]  # the weights_T of a minibatch


@dataclass(slots=True)
class UpdateReport:
    loss: float  # mean over the applied optimizer steps; NaN without any
    grad_norm: float  # the same mean, before clipping
    learning_rate: float
    entropy: float  # mean over tokens of the applied steps, at the sampling temperature; NaN without any
    stats: dict[str, float]  # of the loss function, the same mean; empty without any
    logprobs_T: Tensor  # before the update; 0 for tokens of the environment
    num_optimizer_steps: int  # applied
    skipped: list[str]  # why, for each skipped optimizer step


class Learner:
    """Trains `decoder` in place. The reference policy is the decoder as passed here. With several ranks, each rank
    passes the same full decoder on the CPU; the learner shards it."""

    def __init__(
        self,
        decoder: Decoder | HFDecoder,
        section: LearnerSection,
        *,
        num_steps: int,
        temperature: float = 1.0,
        keep_reference: bool = False,
        seed: int = 0,
        worker_group: WorkerGroup | None = None,
    ) -> None:
        if not temperature > 0:
            raise ValueError(
                f"sampling.temperature = {temperature}: greedy samples have no advantage to learn from; set it above 0"
            )
        self.decoder, self.section, self.temperature = decoder, section, temperature
        self.worker_group = worker_group or WorkerGroup()
        self.version = 0  # the policy version: updates done, skipped ones included
        self.num_skipped_in_a_row = 0  # optimizer steps
        self.reference: Decoder | HFDecoder | None = None
        if keep_reference:
            # With LoRA the base weights do not change: no copy needed.
            self.reference = decoder if section.lora_rank else copy.deepcopy(decoder).requires_grad_(False)
        if section.lora_rank:
            assert isinstance(decoder, Decoder)
            lora.attach(decoder, section.lora_rank, section.lora_alpha, section.lora_targets, seed)
        else:
            decoder.requires_grad_(True)
        decoder.checkpointing = section.activation_checkpointing
        if isinstance(decoder, Decoder):
            decoder.deterministic = section.deterministic
        decoder.compute_dtype = decoder.dtype  # shards hold trained parameters in float32
        self.worker_group.shard(decoder, decoder.layers)
        if self.reference is not None and self.reference is not decoder:
            self.worker_group.shard(self.reference, self.reference.layers)
        self.optimizer = Optimizer(decoder, decoder.config, section, num_steps)

    def logprobs(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Logprobs under the current weights, without gradients; 0 for tokens of the environment."""
        self._broadcast_command("logprobs", rollouts)
        with self.worker_group.collective():
            return self._logprobs(self.decoder, rollouts)

    def reference_logprobs(self, rollouts: Sequence[Rollout]) -> Tensor:
        assert self.reference is not None, "the learner was made without keep_reference"
        self._broadcast_command("reference_logprobs", rollouts)
        base_weights = lora.adapters_off(self.decoder) if self.reference is self.decoder else nullcontext()
        with self.worker_group.collective(), base_weights:
            return self._logprobs(self.reference, rollouts)

    def update(
        self,
        rollouts: Sequence[Rollout],
        batch: TokenBatch,
        loss: LossFunction,
        loss_weights: LossWeights | None = None,
        observer: Observer | None = None,
    ) -> UpdateReport:
        """Make the next policy version: num_iterations passes over the batch, each with num_minibatches optimizer
        steps. `loss` gets one microbatch of whole sequences at a time; an optimizer step minimizes the sum of its
        microbatch losses. `loss_weights` gets the whole minibatch and returns its weights_T. An optimizer step whose
        loss or gradient is not finite is skipped, and the update goes on with the next one."""
        assert observer is None or self.worker_group.size == 1, "with several ranks an observer sees only its own shard"
        self._broadcast_command("update", rollouts, batch, version=self.version)
        with self.worker_group.collective():
            self.optimizer.clear()  # gradients of a failed update
            spans = list(minibatches(batch.group_S, self.section.num_minibatches, batch.sample_S))
            before_T: Tensor | None = None
            if len(spans) > 1:  # the weights change before the second minibatch
                old_T = batch.old_logprobs_T
                before_T = self._logprobs(self.decoder, rollouts) if old_T is None else old_T
                batch = replace(batch, old_logprobs_T=before_T)
            sums: Counter[str] = Counter()
            losses: list[float] = []
            norms: list[float] = []
            skipped: list[str] = []
            for _ in range(self.section.num_iterations):
                for start, end in spans:
                    minibatch = batch.sequences(start, end)
                    if loss_weights is not None:
                        minibatch = replace(minibatch, weights_T=loss_weights(minibatch))
                    minibatch_sums, logprobs_T = self._backward(rollouts[start:end], minibatch, loss, observer)
                    before_T = logprobs_T if before_T is None else before_T
                    minibatch_loss = minibatch_sums.pop("loss")
                    norm, problem = self._optimizer_step(minibatch_loss, observer)
                    if problem is not None:
                        skipped.append(problem)
                        continue
                    losses.append(minibatch_loss)
                    sums.update(minibatch_sums)
                    norms.append(norm)
                if batch.old_logprobs_T is None:
                    batch = replace(batch, old_logprobs_T=before_T)
                observer = None  # later passes repeat the same rollouts
            assert before_T is not None
            self._check_finite()
        report = UpdateReport(
            loss=sum(losses) / len(losses) if losses else math.nan,
            grad_norm=sum(norms) / len(norms) if norms else math.nan,
            learning_rate=self.optimizer.learning_rate(self.version),
            entropy=sums.pop("entropy", math.nan) / max(1, sums.pop("trained", 0)),
            stats={key: value / max(1.0, sums["num_tokens"]) for key, value in sums.items() if key != "num_tokens"},
            logprobs_T=before_T,
            num_optimizer_steps=len(norms),
            skipped=skipped,
        )
        self.version += 1
        return report

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The full tensors under their Hugging Face names, LoRA merged, as `Engine.update_weights` takes them. Each
        tensor is computed, or gathered from the ranks, when the iterator reaches it."""
        for index, view in enumerate(parameter_views(self.decoder)):
            self.worker_group.broadcast_command("gather", index=index)  # one by one: the caller may stop early
            with self.worker_group.collective():
                pairs = list(read_views([view], self.decoder.dtype))
            yield from pairs

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's part of the state. Live tensors: write or copy them before the next update."""
        counts = {"version": self.version, "num_skipped_in_a_row": self.num_skipped_in_a_row}
        return {**{name: torch.tensor(count) for name, count in counts.items()}, **self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load full tensors, saved with the same model and settings. Call it on all ranks."""
        self.optimizer.load_state_dict(state_dict, others=["version", "num_skipped_in_a_row"])
        self.version = int(state_dict["version"])
        self.num_skipped_in_a_row = int(state_dict["num_skipped_in_a_row"])

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the state to a folder that all ranks see, one shard per rank. Returns the files with size and hash."""
        group = self.worker_group
        group.broadcast_command("save", folder=str(folder.resolve()))
        result: dict[str, Any]
        try:
            result = {"files": write_shard(folder, group.rank, group.size, self.state_dict())}
        except OSError as error:  # sent to all ranks: otherwise the others would wait for this one
            result = {"errno": error.errno, "error": error.strerror or str(error)}
        with group.collective():
            results = group.all_gather_object(result)
        for rank, each in enumerate(results):
            if "error" in each and not group.rank:
                raise OSError(each["errno"], f"rank {rank}: {each['error']}" if rank else each["error"])
        return {name: file for each in results for name, file in each.get("files", {}).items()}

    def load(self, folder: Path) -> None:
        """Load what any number of ranks saved there."""
        self.worker_group.broadcast_command("load", folder=str(folder.resolve()))
        with Shards(folder) as state_dict:
            self.load_state_dict(state_dict)

    def run_worker(self, loss: LossFunction, loss_weights: LossWeights | None = None) -> None:
        """On ranks above 0: execute rank 0's commands until it closes. `loss` and `loss_weights` are the same functions
        that rank 0 passes to `update`; no code is sent between ranks."""
        while (command := self.worker_group.receive_command()) is not None:
            with suppress(ValueError):  # rank 0 raises the same error and reports it
                self._execute(command, loss, loss_weights)

    def _execute(self, command: Command, loss: LossFunction, loss_weights: LossWeights | None) -> None:
        name, arguments, tensors = command
        if name == "gather":
            list(read_views([list(parameter_views(self.decoder))[arguments["index"]]], self.decoder.dtype))
        elif name in ("save", "load"):
            getattr(self, name)(Path(arguments["folder"]))
        else:
            rollouts, batch = unpack_payload(tensors, arguments["payload"])
            if name == "update":
                assert batch is not None
                self.version = arguments["version"]
                self.update(rollouts, batch, loss, loss_weights)
            else:
                assert name in ("logprobs", "reference_logprobs"), name
                getattr(self, name)(rollouts)

    def close(self) -> None:
        """End the other ranks."""
        self.worker_group.close()

    def _broadcast_command(
        self, name: str, rollouts: Sequence[Rollout], batch: TokenBatch | None = None, **arguments: Any
    ) -> None:
        if self.worker_group.size > 1 and self.worker_group.rank == 0:
            tensors, payload = pack_payload(rollouts, batch)
            self.worker_group.broadcast_command(name, tensors, payload=payload, **arguments)

    def _check_finite(self) -> None:
        finite = torch.stack([local_tensor(parameter).isfinite().all() for parameter in self.decoder.parameters()])
        if self.worker_group.all_reduce((~finite.all()).long().cpu()):
            raise ValueError(
                f"step {self.version + 1}: after the update some weights are not finite; training stops and the last "
                "checkpoint is kept. Lower learner.learning_rate, then continue with --resume"
            )

    def _microbatches(self, rollouts: Sequence[Rollout]) -> list[tuple[int, int, slice]]:
        """This rank's microbatches: rollouts start … end-1, and the slice of their tokens among the T."""
        group, max_tokens = self.worker_group, self.section.tokens_per_microbatch
        if max_tokens == "auto":
            raise ValueError(
                'learner.tokens_per_microbatch = "auto": only a run chooses it, by its memory plan; a learner needs a '
                "number, such as 2048"
            )
        padded = isinstance(self.decoder, HFDecoder)
        spans = microbatches_per_rank(rollouts, group.size, max_tokens, padded)[group.rank]
        at = [0, *accumulate(len(rollout.token_ids) for rollout in rollouts)]
        return [(start, end, slice(at[start], at[end])) for start, end in spans]

    def _backward(
        self, rollouts: Sequence[Rollout], minibatch: TokenBatch, loss: LossFunction, observer: Observer | None
    ) -> tuple[Counter[str], Tensor]:
        """Accumulate the gradients of a minibatch. Returns the sums of losses and stats, and the logprobs."""
        sums: Counter[str] = Counter()
        all_logprobs_T = torch.zeros(len(minibatch.mask_T), dtype=torch.float64)
        aux_layers = observer.aux_layers if observer is not None else ()
        for start, end, tokens in self._microbatches(rollouts):
            part = minibatch.sequences(start, end)
            logprobs_T, entropy_T, packed, states = self._forward(self.decoder, rollouts[start:end], aux_layers)
            out = loss(part, logprobs_T)
            out.loss.backward()
            if observer is not None and packed.spans:  # the backward pass has freed its memory
                aux_hidden_states = {layer: x_ND.detach() for layer, x_ND in states.aux_hidden_states.items()}
                observer.observe(rollouts[start:end], packed, Output(states.hidden.detach(), aux_hidden_states))
            all_logprobs_T[tokens] = logprobs_T.detach()
            sums.update(out.stats)
            sums.update(
                {
                    "loss": float(out.loss.detach()),
                    "entropy": float(entropy_T[part.mask_T].sum()),
                    "trained": int(part.mask_T.sum()),
                }
            )
        names = sorted(sums)
        values = torch.tensor([sums[name] for name in names], dtype=torch.float64)
        totals = self.worker_group.all_reduce(values).tolist()
        return Counter(dict(zip(names, totals, strict=True))), self.worker_group.all_reduce(all_logprobs_T)

    def _optimizer_step(self, loss: float, observer: Observer | None) -> tuple[float, str | None]:
        """Apply the accumulated gradients, or discard them if they or the loss are not finite. Returns their norm, and
        why the step was skipped. Loss and norm are those of all ranks, so all ranks decide alike."""
        if math.isfinite(loss):
            if observer is not None:
                observer.before_optimizer_step()
            norm = self.optimizer.step(self.version)
            problem = None if math.isfinite(norm) else f"the gradient norm is {norm}"
        else:
            if observer is not None:
                observer.discard()
            self.optimizer.clear()
            norm, problem = math.nan, f"the loss is {loss}"
        self.num_skipped_in_a_row = 0 if problem is None else self.num_skipped_in_a_row + 1
        return norm, problem

    @torch.no_grad()
    def _logprobs(self, decoder: Decoder | HFDecoder, rollouts: Sequence[Rollout]) -> Tensor:
        logprobs_T = torch.zeros(sum(len(rollout.token_ids) for rollout in rollouts), dtype=torch.float64)
        for start, end, tokens in self._microbatches(rollouts):
            logprobs_T[tokens] = self._forward(decoder, rollouts[start:end])[0]
        reshard(decoder)
        return self.worker_group.all_reduce(logprobs_T)

    def _forward(
        self, decoder: Decoder | HFDecoder, rollouts: Sequence[Rollout], aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor, Packed, Output]:
        """One forward pass: logprobs and entropies of the rollouts' tokens (0 for tokens of the environment), and the
        packed input and hidden states. Without rollouts it runs on a dummy token: FSDP needs every rank to take part.
        """
        packed = pack(rollouts) or dummy_packed()
        zeros_T = torch.zeros(sum(len(rollout.token_ids) for rollout in rollouts), dtype=torch.float64)
        device = decoder.device
        tokens, positions, row_P, target_P = (
            x.to(device) for x in (packed.tokens_N, packed.positions_N, packed.row_P, packed.target_P)
        )
        states = decoder(tokens, positions, decoder.attention(packed.lengths, packed.prefixes), aux_layers)
        logprobs_P, entropy_P = token_logprobs(decoder, states.hidden[row_P], target_P, self.temperature)
        at, num = (packed.index_P,), len(packed.index_P)  # 0 for the dummy
        logprobs_T, entropy_T = (zeros_T.index_put(at, x_P[:num].cpu()) for x_P in (logprobs_P, entropy_P))
        return logprobs_T, entropy_T, packed, states
