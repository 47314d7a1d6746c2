"""For tests of `verifiers`: a policy with scripted answers, a chat template with tools, and task settings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.config import TaskSection
from paceline.engine.sequence import NO_SOURCE
from paceline.types import Completion, Request

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "For each call: <tool_call>{...}</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}\n<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ScriptedPolicy:
    """Answers call i with `answers[i]`, a text or an error; with the last one when there are no more."""

    max_model_len = 4096

    def __init__(self, tokenizer: Any, *answers: str | Exception, delay_s: float = 0.0) -> None:
        self.tokenizer, self.answers, self.delay_s = tokenizer, answers, delay_s
        self.calls: list[tuple[list[int], list[int]]] = []  # prompt and completion
        self.limits: list[tuple[int | None, tuple[str, ...]]] = []

    async def generate(
        self, prompt_ids: Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        answer = self.answers[min(len(self.calls), len(self.answers) - 1)]
        if isinstance(answer, Exception):
            raise answer
        # One token for each byte, while the tokenizer would write the marks of a message as one.
        ids = [*self.tokenizer.encode(answer, add_special_tokens=False), self.tokenizer.eos_token_id]
        self.calls.append((list(prompt_ids), ids))
        self.limits.append((max_tokens, tuple(stop)))
        await asyncio.sleep(self.delay_s)
        num = len(ids)
        return Completion(
            request=Request(len(self.calls), tuple(prompt_ids)),
            token_ids=np.array(ids, np.int32),
            logprobs=-np.arange(num, dtype=float),
            raw_logprobs=-np.arange(num, dtype=float),
            versions=np.zeros(num, np.int32),
            provenance=np.zeros(num, np.uint8),
            sources=np.full(num, NO_SOURCE, np.uint8),
            drafters=(),
            finish_reason="stop",
            stop_reason=ids[-1],
        )


def section(**changes: Any) -> TaskSection:
    """Of the taskset in letters.py. `harness` and `taskset` are their settings."""
    harness, taskset = changes.pop("harness", {}), changes.pop("taskset", {})
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "letters", **harness}}
    params = {"agent": agent, "taskset": taskset}
    return TaskSection(**({"kind": "verifiers", "name": "letters", "held_out": 3, "params": params} | changes))
