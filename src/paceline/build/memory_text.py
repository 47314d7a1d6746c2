"""What users read of a memory plan: its parts, and why a run does not fit, with remedies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from paceline.build.memory_parts import VLLM_UTILIZATION
from paceline.build.memory_plan import GIB, MemoryPlan, RunShape, plan_memory, usable_bytes
from paceline.config import Config

# Settings with which a run may need less memory.
SWITCHES: dict[str, Any] = {
    "engine.sleep": True,
    "learner.activation_checkpointing": True,
    "learner.lora_rank": 16,
    "algorithm.beta": 0,
    "train.max_staleness": 0,
    "draft.online": "off",
    "speculation.method": "suffix",
}


def plan_rows(plan: MemoryPlan) -> dict[str, int]:
    """The parts that are shown to users, in bytes. They add up to the sum, unless the engine sleeps."""
    weights = {
        "weights of the learner": plan.learner_weights,
        "weights of the engine": plan.engine_weights,
        "published weights": plan.published_weights,
        "weights of the reference": plan.reference,
        "master weights": plan.masters,
    }
    kv = "KV cache of vLLM" if plan.kv_tokens is None else f"KV cache, {plan.kv_tokens} tokens"
    return {name: size for name, size in weights.items() if size} | {
        "optimizer moments": plan.moments,
        "gradients": plan.gradients,
        kv + (", freed in training" if plan.sleeps else ""): plan.kv,
        f"activations, {plan.packed_tokens} tokens": plan.activations,
        "logits, or gradients of a layer": plan.backward,
        "drafter": plan.drafter,
        "reserve": plan.reserve,
        "sum": plan.sum_bytes,
    }


def refusal(config: Config, shape: RunShape, plan: MemoryPlan) -> str:
    """The message for a plan that does not fit: the largest parts, and what helps."""
    assert plan.total_bytes is not None
    rows = {name: size for name, size in plan_rows(plan).items() if name != "sum"}
    largest = sorted(rows, key=lambda name: -rows[name])[:4]
    found = list(remedies(config, shape, plan))
    if enough := [text for text, other in found if other.fits]:
        advice = f"What makes it fit: {', or '.join(enough)}"
    else:
        less = [text for text, other in found if other.sum_bytes < 0.98 * plan.sum_bytes]
        advice = f"To need less: {', '.join([*less, 'use a smaller model'])}; one of these is not enough"
    return (
        f"model.device = {config.model.device!r}: this run needs {gib(plan.sum_bytes)}, but of the GPU's "
        f"{gib(plan.total_bytes)} a run may use {gib(usable_bytes(plan.total_bytes))}. It needs "
        f"{', '.join(f'{gib(rows[name])} for {name}' for name in largest)}. {advice}"
    )


def remedies(config: Config, shape: RunShape, plan: MemoryPlan) -> Iterator[tuple[str, MemoryPlan]]:
    """Changes of settings, each with the plan that it gives."""

    def planned(key: str, value: Any) -> MemoryPlan:
        section, name, *option = key.split(".")
        value = {**getattr(getattr(config, section), name), option[0]: value} if option else value
        return plan_memory(config.changed(**{section: {name: value}}), shape)

    for key, unset in (("engine.kv_tokens", None), ("learner.tokens_per_microbatch", "auto")):
        other, name = planned(key, unset), key.split(".")[1]
        chosen, given = getattr(other, name), getattr(plan, name)
        if chosen is not None and given is not None and chosen < given:
            yield f"lower {key} to {chosen}", other
    lower_values: dict[str, list[Any]] = {
        "engine.max_num_seqs": halves(config.engine.max_num_seqs),
        "sampling.max_tokens": halves(config.sampling.max_tokens),
    }
    if config.engine.kind == "vllm":
        share = config.engine.vllm.get("gpu_memory_utilization", VLLM_UTILIZATION)
        lower_values["engine.vllm.gpu_memory_utilization"] = [i / 10 for i in range(9, 0, -1) if i / 10 < share]
    for key, values in lower_values.items():
        for value in values:  # the first that is enough, else the last
            other = planned(key, value)
            if other.fits or value == values[-1]:
                yield f"lower {key} to {value}", other
                break
    for key, value in SWITCHES.items():
        yield f"set {key} = {json.dumps(value)}", planned(key, value)


def halves(number: int) -> list[int]:
    return [number >> i for i in (1, 2, 3) if number >> i]


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
