"""Paceline: RL post-training for language models with exact speculative rollouts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM as AsyncLLM
    from paceline.llm import LLM as LLM
    from paceline.outputs import CompletionChunk as CompletionChunk
    from paceline.outputs import CompletionOutput as CompletionOutput
    from paceline.outputs import RequestOutput as RequestOutput
    from paceline.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from paceline.tasks.sandbox import run_python as run_python
    from paceline.types import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionChunk",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "run_python",
]

# Imported when they are used: `import paceline` imports no torch.
_MODULES = {
    "LLM": "paceline.llm",
    "AsyncLLM": "paceline.async_llm",
    "CompletionChunk": "paceline.outputs",
    "CompletionOutput": "paceline.outputs",
    "RequestOutput": "paceline.outputs",
    "SamplingParams": "paceline.types",
    "StructuredOutputsParams": "paceline.structured_outputs",
    "run_python": "paceline.tasks.sandbox",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
