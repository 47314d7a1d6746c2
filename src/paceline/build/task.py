"""Builds the task of a run, and what computes its rewards. Does not import torch: reward workers need none."""

from __future__ import annotations

from typing import Any

from paceline.config import Config
from paceline.tasks.episodes import EnvTask
from paceline.tasks.gym import GymTask
from paceline.tasks.rewards import LocalRewarder
from paceline.tasks.table import TableTask
from paceline.tasks.task import Task


def build_task(config: Config) -> Task:
    if config.task.kind == "reasoning_gym":
        return GymTask(config.task)
    return EnvTask(config.task) if config.task.kind == "env" else TableTask(config.task)


def build_rewarder(config: Config) -> LocalRewarder:
    return LocalRewarder(config.reward, config.task)


def check_prompts(config: Config, task: Task, tokenizer: Any) -> None:
    """Raise ValueError if a prompt is a list of messages and there is no chat template."""
    if config.task.chat and tokenizer.chat_template:
        return
    why = "the model has no chat template" if config.task.chat else "task.chat = false"
    for problem in [*task.train, *task.held_out]:
        if not isinstance(problem.prompt, str):
            raise ValueError(f"task {problem.name}: its prompt is a list of messages, but {why}; give strings")
