"""Observers of the policy's update. They see the hidden states of its first pass, which are computed anyway."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from paceline.model.decoder import Output
from paceline.rl.packing import Packed
from paceline.rl.stage_timer import StageTimer
from paceline.types import Rollout


class Observer(Protocol):
    """What the learner calls. An observer must not change the decoder."""

    aux_layers: tuple[int, ...]  # layers whose outputs `observe` gets

    def observe(self, rollouts: Sequence[Rollout], packed: Packed, output: Output) -> None:
        """Called after the backward pass of a microbatch, with its detached hidden states."""

    def before_optimizer_step(self) -> None:
        """Called while the decoder still has the weights that computed the observed states."""

    def discard(self) -> None:
        """Called instead if the loss is not finite: the states observed since the last call may not be finite."""


class HeadTrainer(Observer, Protocol):
    """Trains a draft head online. `draft/online.py` implements it; this package does not import `draft`."""

    @property
    def version(self) -> int: ...  # the drafter version: updates of the head

    def should_train(self, step: int, length: float | None) -> bool:
        """Whether to train the head in this step. `length` is the mean acceptance length of the step's batch, None for
        too few drafts. Call it at every step."""

    def begin_update(self, rollouts: Sequence[Rollout], groups: Sequence[int], timer: StageTimer) -> None:
        """Call it before an update of the policy. `groups` has the group of each rollout."""

    def metrics(self) -> dict[str, Any]:
        """Of the last update."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The head's tensors under their names in files, as `Engine.update_drafter` takes them."""

    def state_dict(self) -> dict[str, Tensor]:
        """Live tensors: write or copy them before the next update."""

    def metadata(self) -> dict[str, Any]:
        """The remaining state, as JSON."""

    def load_state_dict(self, state_dict: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None: ...
