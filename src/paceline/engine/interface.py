"""The protocol of engines: a local engine, vLLM, or several engines behind Ray. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from paceline.types import Completion, Receipt, Request, StepTrace

if TYPE_CHECKING:
    import torch

Weights = Iterable[tuple[str, "torch.Tensor"]]
SpeculationState = Mapping[str, Mapping[str, np.ndarray]]  # of "drafter", "policy", "acceptance", "lengths"


class Handle:
    """A submitted request. `completion` is set when it has finished."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.completion: Completion | None = None

    @property
    def done(self) -> bool:
        return self.completion is not None


class Engine(Protocol):
    """`step` returns the completions that finished in it, perhaps none. Weights are updated between two steps, in
    `dtype` and under Hugging Face names; the receipt's checksum is of the weights that the engine then holds."""

    tokenizer: Any
    version: int  # of the policy

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def max_model_len(self) -> int: ...  # most tokens of a prompt and its completion
    @property
    def wants_sleep(self) -> bool: ...  # the KV cache takes memory that a learner on the same device needs

    def submit(self, request: Request) -> Handle: ...
    def step(self) -> list[Completion]: ...
    def abort(self, request_id: int) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def update_weights(self, weights: Weights, version: int, inflight: str = "recompute") -> Receipt: ...
    def update_drafter(self, weights: Weights, version: int) -> Receipt: ...
    def reset_prefix_cache(self) -> None: ...
    def state_dict(self) -> SpeculationState: ...  # may be empty
    def load_state_dict(self, state_dict: SpeculationState) -> None: ...  # parts that are missing stay as they are
    def drain_trace(self) -> list[StepTrace]: ...
    def close(self) -> None: ...
