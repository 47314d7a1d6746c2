"""How many requests a step of RL has, and how long they become."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.config import ConfigError
from paceline.sim.settings import number


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths are log-normal, with this mean before they are cut at max_tokens, or those of recorded rollouts."""

    batch: int = number(low=1, high=10_000_000)  # requests of a step
    group: int = number(16, low=1, high=100_000)  # of one problem
    prompt_tokens: int = number(256, low=1, high=10_000_000)
    cached_tokens: int = number(0, low=0, high=10_000_000)  # of every prompt: there already, read but not computed
    mean_tokens: float = number(2048.0, low=1, high=10_000_000)
    sigma: float = number(0.8, low=0, high=5)  # of the logarithm; within a problem and between problems together
    shared_sigma: float = number(0.0, low=0, high=5)  # of it, between problems: siblings are alike
    max_tokens: int = number(8192, low=1, high=10_000_000)
    rollouts: str | None = None  # a rollouts.jsonl, whose lengths are drawn from instead
    seed: int = number(0, low=0, high=1 << 31)

    def __post_init__(self) -> None:
        if self.batch % self.group:
            raise ConfigError(f"workload.batch = {self.batch}: no multiple of workload.group = {self.group}")
        if self.cached_tokens > self.prompt_tokens:
            raise ConfigError(
                f"workload.cached_tokens = {self.cached_tokens}: more than "
                f"workload.prompt_tokens = {self.prompt_tokens}"
            )
        if self.shared_sigma > self.sigma:
            raise ConfigError(f"workload.shared_sigma = {self.shared_sigma}: more than workload.sigma = {self.sigma}")

    @property
    def fresh_share(self) -> float:
        """Of prompts, what is computed."""
        return 1 - self.cached_tokens / self.prompt_tokens


def lengths_of(workload: Workload, num_batches: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Tokens emitted, and prompt tokens, of every request: int64 [num_batches, batch]. The same seed gives the same."""
    w, random = workload, np.random.default_rng(workload.seed)
    shape = num_batches, w.batch
    if w.rollouts is not None:
        lengths, prompts = _recorded(w.rollouts)
        drawn = random.integers(len(lengths), size=shape)
        return np.minimum(lengths[drawn], w.max_tokens), prompts[drawn]
    own = np.sqrt(w.sigma**2 - w.shared_sigma**2) * random.standard_normal(shape)
    shared = w.shared_sigma * random.standard_normal((num_batches, w.batch // w.group)).repeat(w.group, 1)
    lengths = np.exp(np.log(w.mean_tokens) - w.sigma**2 / 2 + own + shared)
    return np.clip(np.rint(lengths), 1, w.max_tokens).astype(np.int64), np.full(shape, w.prompt_tokens)


def _recorded(path: str) -> tuple[np.ndarray, np.ndarray]:
    from paceline.replay.reader import Reader

    found = [(len(record.token_ids), len(record.prompt_ids)) for record in Reader([path]) if len(record.token_ids)]
    if not found:
        raise ConfigError(f"workload.rollouts = {path!r}: none of the rollouts has a completion")
    lengths, prompts = np.array(found, np.int64).T
    return lengths, prompts
