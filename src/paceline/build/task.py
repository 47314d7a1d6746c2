"""Builds the tasks of a run, and what computes their rewards. Does not import torch: reward workers need none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from paceline.agents.verifiers_task import VerifiersTask
from paceline.config import Config, TaskSection, TaskSettings
from paceline.tasks.episodes import EnvTask
from paceline.tasks.gym import GymTask
from paceline.tasks.mixture import Mixture
from paceline.tasks.rewards import LocalRewarder, Rewarder, TaskRewarder
from paceline.tasks.table import TableTask
from paceline.tasks.task import Problem, Task


def build_task(config: Config) -> Task:
    """The run's task, or all of them as one."""
    built: dict[str, Task] = {}
    for settings in config.tasks:
        with named_errors(settings):
            task = _build_task(settings.section, config.train.env_timeout_s)
        if settings.label is None:
            return task
        built[settings.label] = task
    return Mixture(built, {str(settings.label): settings.max_tokens for settings in config.tasks})


def _build_task(section: TaskSection, env_timeout_s: float) -> Task:
    if section.kind == "reasoning_gym":
        return GymTask(section)
    if section.kind == "verifiers":
        return VerifiersTask(section)
    if section.kind == "agent":
        return _agent_task(section)
    return EnvTask(section, env_timeout_s) if section.kind == "env" else TableTask(section)


def _agent_task(section: TaskSection) -> Task:
    missing = [name for name in ("starlette", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise ValueError(f"task.kind = \"agent\" needs {' and '.join(missing)}; run: pip install 'paceline[serve]'")
    from paceline.agents.task import AgentTask

    return AgentTask(section)


def build_rewarder(config: Config) -> Rewarder:
    """What scores all samples of a run."""
    built: dict[str | None, LocalRewarder] = {}
    try:
        for settings in config.tasks:
            built[settings.label] = build_task_rewarder(settings)
    except BaseException:
        for rewarder in built.values():
            rewarder.close()
        raise
    return built[None] if None in built else TaskRewarder(built)


def build_task_rewarder(settings: TaskSettings) -> LocalRewarder:
    """What scores the samples of one task."""
    with named_errors(settings):
        return LocalRewarder(settings.reward, settings.section)


@contextmanager
def named_errors(settings: TaskSettings) -> Iterator[None]:
    """With several tasks, a user's error names the task."""
    try:
        yield
    except ValueError as error:
        if settings.label is None:
            raise
        raise ValueError(f"{settings.key}: {error}") from error


def problems_of(settings: TaskSettings, problems: list[Problem]) -> list[Problem]:
    """Those of one task."""
    return [problem for problem in problems if problem.task == settings.label]


def check_prompts(task: Task, tokenizer: Any) -> None:
    """Raise ValueError if a prompt is a list of messages and there is no chat template, or if the template does not
    know a variable of `task.chat_template_kwargs`."""
    _check_template_kwargs([*task.train, *task.held_out], tokenizer)
    for problem in [*task.train, *task.held_out]:
        if isinstance(problem.prompt, str) or (problem.chat and tokenizer.chat_template):
            continue
        why = "the model has no chat template" if problem.chat else "task.chat = false"
        raise ValueError(f"task {problem.name}: its prompt is a list of messages, but {why}; give strings")


def _check_template_kwargs(problems: list[Problem], tokenizer: Any) -> None:
    first_of_task = {problem.task: problem for problem in reversed(problems)}
    for problem in first_of_task.values():
        template = str(tokenizer.chat_template or "") if problem.chat else ""
        for name in problem.chat_template_kwargs:
            if not re.search(rf"\b{re.escape(name)}\b", template):  # a template ignores what it does not know
                why = "the model's chat template has no such variable" if template else "there is no chat template"
                raise ValueError(
                    f"{'task' if problem.task is None else f'task.{problem.task}'}.chat_template_kwargs.{name} = "
                    f"{problem.chat_template_kwargs[name]!r}: {why}; remove it"
                )
