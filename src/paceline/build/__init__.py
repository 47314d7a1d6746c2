"""The composition root: configuration in, objects out. The only place that branches on a `kind`."""

from paceline.build.cluster import ClusterRun
from paceline.build.draft_run import build_draft_trainer, build_start
from paceline.build.drafter import available_drafters, build_drafter, build_head, drafting_head, head_cost, pack_head
from paceline.build.engine import (
    build_decoder,
    build_engine,
    build_paged,
    build_runner,
    build_sampler,
    check_device,
    default_kv_tokens,
    load_decoder,
)
from paceline.build.export import export_policy, save_adapted
from paceline.build.learner import build_learner, build_world, follow, torchrun_rank
from paceline.build.run import (
    build_adapter,
    build_collector,
    build_loop,
    build_rewarder,
    build_sinks,
    build_task,
    check_prompts,
    describe_run,
    with_absolute_paths,
)

__all__ = [
    "ClusterRun",
    "available_drafters",
    "build_adapter",
    "build_collector",
    "build_decoder",
    "build_draft_trainer",
    "build_drafter",
    "build_engine",
    "build_head",
    "build_learner",
    "build_loop",
    "build_paged",
    "build_rewarder",
    "build_runner",
    "build_sampler",
    "build_sinks",
    "build_start",
    "build_task",
    "build_world",
    "check_device",
    "check_prompts",
    "default_kv_tokens",
    "describe_run",
    "drafting_head",
    "export_policy",
    "follow",
    "head_cost",
    "load_decoder",
    "pack_head",
    "save_adapted",
    "torchrun_rank",
    "with_absolute_paths",
]
