"""Publishes new weights of the policy, and of a head that is trained online, to the producer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from torch import Tensor

from paceline.engine.interface import Engine
from paceline.model.weights import checksum
from paceline.rl.learner import Learner
from paceline.rl.observer import HeadTrainer
from paceline.rl.produce import Producer, PublishedWeights


class Publisher:
    """Weights are published in the engine's dtype; with LoRA only the adapters, if the engine has them. `copies`:
    publish copies, because the learner changes its weights while the engine reads them."""

    def __init__(
        self, producer: Producer, engine: Engine, learner: Learner, head_trainer: HeadTrainer | None, copies: bool
    ) -> None:
        self.producer, self.engine, self.learner, self.head_trainer = producer, engine, learner, head_trainer
        self.copies = copies
        self._head: PublishedWeights | None = None

    def publish(self) -> str:
        """Publish the learner's version; returns the checksum of what was published. Every version comes with the
        newest head: an engine may skip versions."""
        trainer = self.head_trainer
        if trainer is not None and (self._head is None or self._head.version != trainer.version):
            self._head = self._prepare(trainer.version, trainer.weights)
        weights = partial(self.learner.weights, adapters=self.engine.takes_adapters)
        published = self._prepare(self.learner.version, weights, self._head)
        self.producer.publish(published)
        return published.checksum

    def _prepare(
        self, version: int, weights: Callable[[], Iterable[tuple[str, Tensor]]], head: PublishedWeights | None = None
    ) -> PublishedWeights:
        dtype = self.engine.dtype

        def cast() -> Iterator[tuple[str, Tensor]]:
            return ((name, tensor.to(dtype) if tensor.is_floating_point() else tensor) for name, tensor in weights())

        if self.copies:
            return published_tensors(version, {name: tensor.clone() for name, tensor in cast()}, head)
        return PublishedWeights(version, cast, checksum(cast()), head)


def published_tensors(
    version: int, tensors: Mapping[str, Tensor], head: PublishedWeights | None = None
) -> PublishedWeights:
    return PublishedWeights(version, tensors.items, checksum(tensors.items()), head)
