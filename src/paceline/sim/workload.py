"""The requests of an RL step: how many, and their prompt and completion lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.config_io import ConfigError
from paceline.sim.settings import number


@dataclass(frozen=True, slots=True)
class Workload:
    """Completion lengths are log-normal with mean `mean_tokens` and then cut at `max_tokens`, or are drawn from
    recorded rollouts."""

    batch: int = number(low=1, high=10_000_000)  # requests per RL step
    group: int = number(16, low=1, high=100_000)  # requests per problem
    prompt_tokens: int = number(256, low=1, high=10_000_000)
    cached_tokens: int = number(0, low=0, high=10_000_000)  # of every prompt: in the prefix cache
    mean_tokens: float = number(2048.0, low=1, high=10_000_000)
    sigma: float = number(0.8, low=0, high=5)  # standard deviation of the logarithm of the length
    shared_sigma: float = number(0.0, low=0, high=5)  # the part of `sigma` that requests of one problem share
    max_tokens: int = number(8192, low=1, high=10_000_000)
    rollouts: str | None = None  # a rollouts.jsonl to draw lengths from
    seed: int = number(0, low=0, high=1 << 31)

    def __post_init__(self) -> None:
        if self.batch % self.group:
            raise ConfigError(f"workload.batch = {self.batch}: not a multiple of workload.group = {self.group}")
        if self.cached_tokens > self.prompt_tokens:
            raise ConfigError(
                f"workload.cached_tokens = {self.cached_tokens}: more than "
                f"workload.prompt_tokens = {self.prompt_tokens}"
            )
        if self.shared_sigma > self.sigma:
            raise ConfigError(f"workload.shared_sigma = {self.shared_sigma}: more than workload.sigma = {self.sigma}")

    @property
    def uncached_share(self) -> float:
        """Share of prompt tokens that is computed."""
        return 1 - self.cached_tokens / self.prompt_tokens


def sample_lengths(workload: Workload, num_batches: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Emitted tokens and prompt tokens of every request: int64 [num_batches, batch]. Depends only on the workload."""
    w, random = workload, np.random.default_rng(workload.seed)
    shape = num_batches, w.batch
    if w.rollouts is not None:
        lengths, prompts = _recorded_lengths(w.rollouts)
        drawn = random.integers(len(lengths), size=shape)
        return np.minimum(lengths[drawn], w.max_tokens), prompts[drawn]
    own = np.sqrt(w.sigma**2 - w.shared_sigma**2) * random.standard_normal(shape)
    shared = w.shared_sigma * random.standard_normal((num_batches, w.batch // w.group)).repeat(w.group, 1)
    lengths = np.exp(np.log(w.mean_tokens) - w.sigma**2 / 2 + own + shared)
    return np.clip(np.rint(lengths), 1, w.max_tokens).astype(np.int64), np.full(shape, w.prompt_tokens)


def _recorded_lengths(path: str) -> tuple[np.ndarray, np.ndarray]:
    from paceline.replay.reader import Reader

    found = [(len(record.token_ids), len(record.prompt_ids)) for record in Reader([path]) if len(record.token_ids)]
    if not found:
        raise ConfigError(f"workload.rollouts = {path!r}: no rollout has a completion")
    lengths, prompts = np.array(found, np.int64).T
    return lengths, prompts
