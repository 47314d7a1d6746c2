"""What generates the completions of the API: `AsyncLLM` in `paceline serve`, the policy of a sample during training."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from paceline.chat.messages import Message, Tool
from paceline.outputs import CompletionChunk, RequestOutput
from paceline.types import SamplingParams

TokenIds = Sequence[int]
Encoded = tuple[str | None, tuple[int, ...]]  # a prompt's text, if it is known, and its token ids


class Backend(Protocol):
    """Cancelling a call aborts it. Errors of the caller are ValueErrors, or ApiErrors with a status of their own."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def max_model_len(self) -> int: ...  # most tokens of a prompt and its completion
    @property
    def refuses_long_prompts(self) -> bool: ...  # by itself, with an error of its own
    @property
    def is_alive(self) -> bool: ...
    async def encode(self, prompt: str | TokenIds | Sequence[Message], tools: Sequence[Tool] = ()) -> Encoded: ...
    def is_compiled(self, params: SamplingParams) -> bool: ...
    async def compile(self, params: SamplingParams) -> None:
        """Prepare a structured output."""
        ...

    async def generate(self, prompt: TokenIds, sampling_params: SamplingParams) -> RequestOutput:
        """All samples of a prompt."""
        ...

    def stream(self, prompt: TokenIds, sampling_params: SamplingParams) -> AsyncGenerator[CompletionChunk]:
        """The same in pieces, as they come."""
        ...

    async def close(self, drain_s: float = 0.0) -> None: ...
