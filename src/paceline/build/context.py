"""Checks that prompts and completions fit the model's context, the KV cache and vLLM's limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.build.memory import read_model
from paceline.config import Config, TaskSettings
from paceline.model.hf_shape import read_shape
from paceline.tasks.task import Problem

NUM_LONGEST = 64  # prompts with the most characters, which are tokenized to find the longest one


def longest_prompt(problems: Sequence[Problem], tokenizer: Any) -> int:
    """In tokens, of the prompts with the most characters. Environments make theirs in the run."""
    problems = sorted(problems, key=lambda problem: -len(str(problem.prompt)))
    return max(len(each.encode(tokenizer)) for each in problems[:NUM_LONGEST])


def check_context(config: Config, directory: Path, task: TaskSettings, prompt_tokens: int) -> None:
    """Raise ValueError if a completion of a task would end early where the model's context is full, or fail where the
    KV cache is."""
    key, needed = task.max_tokens_key, prompt_tokens + task.max_tokens
    is_local = config.engine.kind == "local"
    context = read_model(config).max_positions if is_local else read_shape(directory).max_positions
    limits = {
        "the model's context": (
            context,
            "set model.yarn_factor, or use another model" if is_local else "use another model",
        ),
        "engine.kv_tokens": (config.engine.kv_tokens, "raise it"),
        "engine.vllm.max_model_len": (config.engine.vllm.get("max_model_len"), "raise it"),
    }
    for name, (limit, remedy) in limits.items():
        if isinstance(limit, int) and needed > limit:
            lower = f"lower {key} to {limit - prompt_tokens}" if limit > prompt_tokens else "shorten the prompts"
            raise ValueError(
                f"{key} = {task.max_tokens}: the longest prompt has {prompt_tokens} tokens, together "
                f"{needed}, but {name} is {limit}; {lower}, or {remedy}"
            )
