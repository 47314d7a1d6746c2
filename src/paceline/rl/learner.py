"""The learner: rollouts and a loss in, new weights out. It knows nothing of algorithms, tasks or engines.

What always holds: the same rollouts, weights and number of threads give the same bits (on a GPU in 16 bits: up to the
order in which flash attention sums gradients of sequences beyond 128 tokens); how rollouts are packed and cut into
microbatches changes results only in rounding; `state` and `restore` go on bit for bit. Streams are as in TokenBatch: T
tokens after the prompts, float64, on the CPU.

Several ranks may share a learner (`world.py`): each has a part of every parameter, and computes a share of every batch.
Rank 0 is called as if it were alone; the others `follow`. What it returns is of the whole.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from paceline.config import LearnerSection
from paceline.model import lora
from paceline.model.decoder import Decoder, Output
from paceline.model.hf_decoder import HFDecoder
from paceline.model.optim import Optimizer
from paceline.model.sharding import local, rest
from paceline.model.weights import Home, decoder_homes, read_homes
from paceline.rl import head
from paceline.rl.batch import TokenBatch
from paceline.rl.packing import Packed, filler, minibatches, pack, shares
from paceline.rl.shards import Shards, write_shard
from paceline.rl.work import pack_work, unpack_work
from paceline.rl.world import Order, World
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
    """Trains `decoder`, in place. The reference policy is the decoder as it is given here. In a world of several ranks
    each gives the same decoder, whole and on the CPU, which is divided here."""

    def __init__(
        self,
        decoder: Decoder | HFDecoder,
        section: LearnerSection,
        *,
        num_steps: int,
        temperature: float = 1.0,
        keep_reference: bool = False,
        seed: int = 0,
        world: World | None = None,
    ) -> None:
        if not temperature > 0:
            raise ValueError(
                f"sampling.temperature = {temperature}: greedy samples teach nothing; train with a temperature above 0"
            )
        self.decoder, self.section, self.temperature = decoder, section, temperature
        self.world = world or World()
        self.version = 0  # updates made
        self.reference: Decoder | HFDecoder | None = None
        if keep_reference:
            # With adapters the base stays as it is, so there is nothing to copy.
            self.reference = decoder if section.lora_rank else copy.deepcopy(decoder).requires_grad_(False)
        if section.lora_rank:
            assert isinstance(decoder, Decoder)
            lora.attach(decoder, section.lora_rank, section.lora_alpha, section.lora_targets, seed)
        else:
            decoder.requires_grad_(True)
        decoder.checkpointing = section.activation_checkpointing
        self.world.shard(decoder, decoder.layers)
        if self.reference is not None and self.reference is not decoder:
            self.world.shard(self.reference, self.reference.layers)
        self.optimizer = Optimizer(decoder, decoder.config, section, num_steps)

    def logprobs(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Of every token that the policy chose, under its present weights; 0 at the others. No gradient."""
        self._tell("logprobs", rollouts)
        with self.world.together():
            return self._logprobs(self.decoder, rollouts)

    def reference_logprobs(self, rollouts: Sequence[Rollout]) -> Tensor:
        assert self.reference is not None, "made without keep_reference"
        self._tell("reference_logprobs", rollouts)
        base: AbstractContextManager[None] = nullcontext()
        if self.reference is self.decoder:
            base = lora.adapters_off(self.decoder)
        with self.world.together(), base:
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
        assert observer is None or self.world.size == 1, "an observer would see a share of the states"
        self._tell("update", rollouts, batch, version=self.version)
        with self.world.together():
            return self._update(rollouts, batch, loss, weights, observer)

    def _update(
        self,
        rollouts: Sequence[Rollout],
        batch: TokenBatch,
        loss: Loss,
        weights: Weights | None,
        observer: Observer | None,
    ) -> UpdateReport:
        self.optimizer.clear()  # of what an update that failed may have left
        cuts = list(minibatches(batch.group_S, self.section.num_minibatches))
        before_T: Tensor | None = None
        if len(cuts) > 1:  # all but the first minibatch will see weights that have moved on
            before_T = self._logprobs(self.decoder, rollouts) if batch.old_logprobs_T is None else batch.old_logprobs_T
            batch = replace(batch, old_logprobs_T=before_T)
        sums: Counter[str] = Counter()
        losses: list[float] = []
        norms: list[float] = []
        for _ in range(self.section.num_iterations):
            for start, end in cuts:
                mini = batch.sequences(start, end)
                if weights is not None:
                    mini = replace(mini, weights_T=weights(mini))
                found, logprobs_T = self._backward(rollouts[start:end], mini, loss, observer)
                if observer is not None:
                    observer.learn()
                losses.append(found.pop("loss"))
                sums.update(found)
                norms.append(self.optimizer.step(self.version))
                before_T = logprobs_T if before_T is None else before_T
            if batch.old_logprobs_T is None:
                batch = replace(batch, old_logprobs_T=before_T)
            observer = None  # later passes see the same rollouts again
        assert before_T is not None
        self._check_finite()
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
        """Every tensor under its Hugging Face name, whole, adapters merged: what an engine takes. Each is made, or
        gathered from the ranks, when its turn comes."""
        for index, home in enumerate(self._homes()):
            self.world.tell("gather", index=index)  # each by itself: who takes them may give up half-way
            with self.world.together():
                pairs = list(read_homes([home]))
            yield from pairs

    def state(self) -> dict[str, Tensor]:
        """All that is needed to go on bit for bit, as far as this rank has it: live tensors, to be written or copied
        before the next update."""
        return {"version": torch.tensor(self.version), **self.optimizer.state()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state` of whole tensors, with the model (for the reference, or the adapters' base) and
        settings it was made of. To be called on all ranks."""
        self.optimizer.restore(state, others=["version"])
        self.version = int(state["version"])

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the state into this folder, which all ranks see, each its part; the files, with their sizes and
        hashes."""
        self.world.tell("save", folder=str(folder.resolve()))
        said: dict[str, Any]
        try:
            said = {"files": write_shard(folder, self.world.rank, self.world.size, self.state())}
        except OSError as error:  # told to all, so that nobody waits for who can't write
            said = {"errno": error.errno, "error": error.strerror or str(error)}
        with self.world.together():
            all_said = self.world.gather(said)
        for rank, each in enumerate(all_said):
            if "error" in each and not self.world.rank:
                raise OSError(each["errno"], f"rank {rank}: {each['error']}" if rank else each["error"])
        return {name: written for each in all_said for name, written in each.get("files", {}).items()}

    def load(self, folder: Path) -> None:
        """Go on from what any number of ranks saved there."""
        self.world.tell("load", folder=str(folder.resolve()))
        with Shards(folder) as state:
            self.restore(state)

    def follow(self, loss: Loss, weights: Weights | None = None) -> None:
        """What a rank above 0 does: the same as rank 0, with its own share, until that one closes. `loss` and
        `weights` are those that rank 0 is given; no code goes from rank to rank."""
        while (order := self.world.hear()) is not None:
            with suppress(ValueError):  # rank 0 has met the same, and says so
                self._obey(order, loss, weights)

    def _obey(self, order: Order, loss: Loss, weights: Weights | None) -> None:
        labels = order.labels
        if order.name == "gather":
            list(read_homes([list(self._homes())[labels["index"]]]))
        elif order.name in ("save", "load"):
            getattr(self, order.name)(Path(labels["folder"]))
        else:
            rollouts, batch = unpack_work(order.tensors, labels["work"])
            if order.name == "update":
                assert batch is not None
                self.version = labels["version"]
                self.update(rollouts, batch, loss, weights)
            else:
                assert order.name in ("logprobs", "reference_logprobs"), order.name
                getattr(self, order.name)(rollouts)

    def close(self) -> None:
        """Let the other ranks go."""
        self.world.close()

    def _tell(self, name: str, rollouts: Sequence[Rollout], batch: TokenBatch | None = None, **labels: Any) -> None:
        if self.world.size > 1 and self.world.rank == 0:
            tensors, work = pack_work(rollouts, batch)
            self.world.tell(name, tensors, work=work, **labels)

    def _homes(self) -> Iterator[Home]:
        decoder = self.decoder
        return decoder.homes() if isinstance(decoder, HFDecoder) else decoder_homes(decoder)

    def _check_finite(self) -> None:
        finite = torch.stack([local(parameter).isfinite().all() for parameter in self.decoder.parameters()])
        if self.world.sum((~finite.all()).long().cpu()):
            raise ValueError(
                f"step {self.version}: after the update some weights are not finite; training stops and the last "
                "checkpoint is kept. Lower learner.learning_rate, then go on with --resume"
            )

    def _cuts(self, rollouts: Sequence[Rollout]) -> list[tuple[int, int, slice]]:
        """This rank's microbatches: rollouts start … end-1, and where their tokens are in the stream."""
        cuts = shares(rollouts, self.world.size, self.section.tokens_per_microbatch)[self.world.rank]
        at = [0, *accumulate(len(rollout.token_ids) for rollout in rollouts)]
        return [(start, end, slice(at[start], at[end])) for start, end in cuts]

    def _backward(
        self, rollouts: Sequence[Rollout], mini: TokenBatch, loss: Loss, observer: Observer | None
    ) -> tuple[Counter[str], Tensor]:
        """Gradients of the loss's sum over a minibatch, microbatch by microbatch; that sum and others, and the
        logprobs."""
        sums: Counter[str] = Counter()
        stream_T = torch.zeros(len(mini.mask_T), dtype=torch.float64)
        taps = observer.taps if observer is not None else ()
        for start, end, tokens in self._cuts(rollouts):
            part = mini.sequences(start, end)
            logprobs_T, entropy_T, packed, states = self._forward(self.decoder, rollouts[start:end], taps)
            out = loss(part, logprobs_T)
            out.loss.backward()
            if observer is not None and packed.spans:  # now that the backward pass has let go of its memory
                tapped = {layer: x_ND.detach() for layer, x_ND in states.taps.items()}
                observer.observe(rollouts[start:end], packed, Output(states.hidden.detach(), tapped))
            stream_T[tokens] = logprobs_T.detach()
            sums.update(out.stats)
            sums.update(
                {
                    "loss": float(out.loss.detach()),
                    "entropy": float(entropy_T[part.mask_T].sum()),
                    "trained": int(part.mask_T.sum()),
                }
            )
        names = sorted(sums)
        totals = self.world.sum(torch.tensor([sums[name] for name in names], dtype=torch.float64)).tolist()
        return Counter(dict(zip(names, totals, strict=True))), self.world.sum(stream_T)

    @torch.no_grad()
    def _logprobs(self, decoder: Decoder | HFDecoder, rollouts: Sequence[Rollout]) -> Tensor:
        stream_T = torch.zeros(sum(len(rollout.token_ids) for rollout in rollouts), dtype=torch.float64)
        for start, end, tokens in self._cuts(rollouts):
            stream_T[tokens] = self._forward(decoder, rollouts[start:end])[0]
        rest(decoder)
        return self.world.sum(stream_T)

    def _forward(
        self, decoder: Decoder | HFDecoder, rollouts: Sequence[Rollout], taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor, Packed, Output]:
        """Logprobs and entropies of these rollouts' tokens in one forward, 0 where the policy did not choose; and what
        they were computed from. Where there are none the forward is made all the same, for the other ranks' sake."""
        packed = pack(rollouts) or filler()
        zeros_T = torch.zeros(sum(len(rollout.token_ids) for rollout in rollouts), dtype=torch.float64)
        device = decoder.device
        tokens, positions, row_P, target_P = (
            x.to(device) for x in (packed.tokens_N, packed.positions_N, packed.row_P, packed.target_P)
        )
        states = decoder(tokens, positions, decoder.attention(packed.lengths, packed.prefixes), taps)
        logprobs_P, entropy_P = head.logprobs(decoder, states.hidden[row_P], target_P, self.temperature)
        at, num = (packed.index_P,), len(packed.index_P)  # none in a filler
        return (
            zeros_T.index_put(at, logprobs_P[:num].cpu()),
            zeros_T.index_put(at, entropy_P[:num].cpu()),
            packed,
            states,
        )
