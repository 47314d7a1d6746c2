"""Chooses the sizes of a run's KV cache and microbatches before it is built, by its memory plan."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.build.memory_plan import GIB, MemoryPlan, RunShape, plan_memory, plan_parts
from paceline.build.memory_text import refusal
from paceline.build.model import check_device, default_kv_tokens
from paceline.config import Config
from paceline.files import read_run_json
from paceline.model.config import ModelConfig, with_yarn
from paceline.model.draft_head import HeadConfig
from paceline.model.head_files import read_head_config, resolve_head
from paceline.model.store import resolve
from paceline.model.weights import read_config
from paceline.rl.worker_group import WorkerGroup

UNPLANNED_TOKENS = 2048  # tokens_per_microbatch = "auto" without a plan


def resolve_memory(config: Config, worker_group: WorkerGroup | None = None) -> tuple[Config, MemoryPlan | None]:
    """The config with numbers in place of "auto", and the plan that they come from: None if there is none. Numbers that
    are set stay, so the config of a resumed run does not change. engine.sleep stays unset: it changes no result, so a
    resumed run plans it again. Raises ValueError if the plan does not fit in the GPU's memory. Call it on all ranks."""
    if not is_planned(config):
        if config.learner.tokens_per_microbatch == "auto":
            config = config.changed(learner={"tokens_per_microbatch": UNPLANNED_TOKENS})
        return config, None
    check_device(config)
    group = worker_group or WorkerGroup()
    with group.collective():  # all ranks must cut the same microbatches
        totals = group.all_gather_object({"total_bytes": device_bytes(config, group)})
    total = min(each["total_bytes"] for each in totals)
    shape = read_shape(config, total, group.size)
    plan = plan_memory(config, shape)
    if not plan.fits:
        raise ValueError(refusal(config, shape, plan))
    learner = {"tokens_per_microbatch": plan.tokens_per_microbatch}
    return config.changed(engine={"kv_tokens": plan.kv_tokens}, learner=learner), plan


def is_planned(config: Config) -> bool:
    """Whether a run has a memory plan: engine and learner share one GPU, and the model's shape is known."""
    return (
        config.model.device.startswith("cuda")
        and config.cluster.kind == "none"
        and config.learner.model == "paceline"
        and config.engine.tensor_parallel_size == 1
    )


def cpu_plan(config: Config) -> MemoryPlan | None:
    """The memory of a run in one process on a CPU, only to show it: it decides nothing. None for other runs."""
    engine, tokens = config.engine, config.learner.tokens_per_microbatch
    if config.model.device != "cpu" or config.cluster.kind != "none" or config.learner.model != "paceline":
        return None
    assert tokens != "auto", "resolve_memory comes first"
    shape = read_shape(config, None)
    return plan_parts(config, shape, engine.kv_tokens or default_kv_tokens(config, shape.model), tokens, has_room=False)


def read_shape(config: Config, total_bytes: int | None, num_ranks: int = 1) -> RunShape:
    model = read_model(config)
    return RunShape(model, total_bytes, num_ranks, read_draft_model(config, model), read_head(config, model))


def read_model(config: Config) -> ModelConfig:
    model = read_config(resolve(config.model.name))
    return model if config.model.yarn_factor is None else with_yarn(model, config.model.yarn_factor)


def read_draft_model(config: Config, target: ModelConfig) -> ModelConfig | None:
    """The shape of the draft model, if it is used."""
    name = config.speculation.draft_model
    if config.speculation.method != "draft_model" or name is None:
        return None
    kind, _, count = name.partition(":")
    if kind == "layers":  # a wrong number is an error when the drafter is built
        return replace(target, num_layers=int(count)) if count.isdecimal() else None
    return read_config(resolve(name))


def read_head(config: Config, target: ModelConfig) -> HeadConfig | None:
    """The shape of the head, if it is used."""
    if not config.speculation.uses_head:
        return None
    return read_head_config(resolve_head(config.speculation.head, config.model.name), target)


def device_bytes(config: Config, worker_group: WorkerGroup) -> int:
    """The total memory of this process's GPU."""
    import torch

    device = config.model.device if worker_group.size == 1 else worker_group.device
    return torch.cuda.get_device_properties(device).total_memory


def recorded_plan(plan: MemoryPlan | None) -> dict[str, Any]:
    """The part of run.json about memory."""
    return {} if plan is None else {"memory_plan": asdict(plan)}


def other_memory_note(run: Path, plan: MemoryPlan | None) -> str | None:
    """A note for a run that is resumed on a GPU with other memory than it started on."""
    if plan is None or not (run / "run.json").exists():
        return None
    recorded = read_run_json(run / "run.json").get("memory_plan")
    started = recorded.get("total_bytes") if isinstance(recorded, dict) else None
    if not isinstance(started, int) or started == plan.total_bytes:
        return None
    assert plan.total_bytes is not None
    kv = f" and engine.kv_tokens = {plan.kv_tokens}" if plan.kv_tokens is not None else ""
    return (
        f"this GPU has {plan.total_bytes // GIB} GiB, but the run started on one with {started // GIB} GiB: it keeps "
        f"learner.tokens_per_microbatch = {plan.tokens_per_microbatch}{kv}; to choose again, set "
        f'learner.tokens_per_microbatch = "auto"{" and another engine.kv_tokens" if kv else ""}'
    )
