"""`task.kind = "agent"`: problems from a jsonl table, each driven by a program of the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.agents.endpoint import Endpoint
from paceline.agents.function import FunctionAgent, import_agent
from paceline.agents.process import ProcessAgent, check_command
from paceline.config import TaskSection
from paceline.tasks.agent import Agent
from paceline.tasks.table import TableTask
from paceline.tasks.task import Problem


class AgentTask(TableTask):
    """Invariant: all samples of a task have the same endpoint."""

    def __init__(self, section: TaskSection) -> None:
        super().__init__(section)
        self._section, self.endpoint = section, Endpoint()
        if section.agent is not None:
            self._function = import_agent(section.agent)
        else:
            check_command(section.command or [])
        self.train = [self._with_agent(problem) for problem in self.train]
        self.held_out = [self._with_agent(problem) for problem in self.held_out]

    def close(self) -> None:
        self.endpoint.close()

    def _with_agent(self, problem: Problem) -> Problem:
        return replace(
            problem,
            make_agent=partial(self._make, {**problem.columns, "prompt": problem.prompt}),
            timeout_s=self._section.timeout_s,
            max_calls=self._section.max_calls,
            max_parallel=self._section.max_parallel,
        )

    def _make(self, problem: Mapping[str, Any]) -> Agent:
        section = self._section
        options: dict[str, Any] = {"template_kwargs": section.chat_template_kwargs}
        if section.agent is not None:
            return FunctionAgent(self.endpoint, self._function, problem, **options)
        return ProcessAgent(self.endpoint, section.command or [], section.env, problem, **options)
