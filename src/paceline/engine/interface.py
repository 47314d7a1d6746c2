"""What the loop above knows of an engine: requests go in, completions come out, weights follow the policy.

A local engine, vLLM and several engines behind Ray all look like this. No torch is imported for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from paceline.types import Completion, Receipt, Request, StepTrace

if TYPE_CHECKING:
    import torch

Weights = Iterable[tuple[str, "torch.Tensor"]]
Learned = Mapping[str, Mapping[str, np.ndarray]]  # "drafter", "policy", "lengths": their states


class Handle:
    """A submitted request; `completion` is there once it is done."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.completion: Completion | None = None

    @property
    def done(self) -> bool:
        return self.completion is not None


class Engine(Protocol):
    """`step` does a piece of work and returns what finished in it; it may be empty. Weights come in between two steps,
    in `dtype` and under Hugging Face names; the receipt's checksum is of what is held then, not of what was sent."""

    tokenizer: Any
    version: int  # of the policy

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def crowds(self) -> bool: ...  # whether the learner, on the same device, could do with its memory: see `sleep`

    def submit(self, request: Request) -> Handle: ...
    def step(self) -> list[Completion]: ...
    def abort(self, request_id: int) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def update_weights(self, weights: Weights, version: int, inflight: str = "recompute") -> Receipt: ...
    def update_drafter(self, weights: Weights, version: int) -> Receipt: ...
    def forget(self) -> None: ...  # prompts that are still in memory: the next ones are computed anew
    def learned(self) -> Learned: ...  # by drafter, policy and length model, from what was generated; may be empty
    def teach(self, learned: Learned) -> None: ...  # what was learned once; parts that are not there stay as they are
    def drain_trace(self) -> list[StepTrace]: ...
    def close(self) -> None: ...
