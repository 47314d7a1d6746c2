"""Problems, harnesses and rewards of the `verifiers` library: `task.kind = "verifiers"`.

`task.name` is a taskset as `verifiers` names it, `task.params` the table `[env]` of its configuration files. Every task
of the taskset is a problem, an episode of the environment is a sample, and the environment's reward is the sample's.

Problems are named by the taskset's own keys if it defines some, else by their positions. Tasks that differ only in
their position are one problem.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline.chat.messages import Message
from paceline.config import TaskSection
from paceline.tasks.pool import describe_error
from paceline.tasks.split import DEFAULT_SIZE, MAX_REPEATS, split
from paceline.tasks.task import Problem
from paceline.types import noise_key

VERSION = "0.4"
INSTALL = f'pip install "verifiers~={VERSION}.0"'
NO_PROMPT = "(the environment opens the conversation)"
RESERVED = ("prompts", "completions", "completion_ids")  # arguments of every reward function besides the columns


class VerifiersTask:
    def __init__(self, section: TaskSection) -> None:
        check_version()
        _check_section(section)
        if (here := str(Path.cwd())) not in sys.path:  # so that a taskset in the current folder is found
            sys.path.insert(0, here)
        from verifiers.v1 import load_environment

        from paceline.agents.verifiers_agent import Environment

        config = _environment_config(section)
        try:
            environment = load_environment(config)
            self.name = section.name.rsplit("/", 1)[-1].split("@")[0]
            self._environment = Environment(config, environment, section)
            self.train, self.held_out = _split(environment.taskset, self.name, self._environment, section)
        except Exception as error:  # this runs the user's code
            raise ValueError(
                f"task.name = {section.name!r}: its tasks can't be loaded: {describe_error(error)}"
            ) from error
        found = len({problem.name for problem in [*self.train, *self.held_out]})
        if len(self.held_out) < section.held_out or not self.train:
            raise ValueError(
                f"task.held_out = {section.held_out}: {section.name} has only {found} different tasks, and training "
                f"needs some; set it to at most {max(found - 1, 0)}"
            )
        if section.size and len(self.train) < section.size:
            raise ValueError(
                f"task.size = {section.size}: {section.name} leaves only {len(self.train)} tasks for training; lower "
                "it, or leave it out to use all"
            )

    def close(self) -> None:
        self._environment.close()


def check_version() -> None:
    try:
        found = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        raise ValueError(f'task.kind = "verifiers" needs the verifiers library; {INSTALL}') from None
    if not found.startswith(f"{VERSION}."):
        raise ValueError(f'task.kind = "verifiers" needs verifiers {VERSION}, but {found} is installed; {INSTALL}')


def _check_section(section: TaskSection) -> None:
    if not section.chat:
        raise ValueError("task.chat = false: environments of verifiers use the chat template; remove the setting")
    default = TaskSection()
    for key, remedy in (
        ("system", "set task.params.taskset.system_prompt to a file with the system prompt"),
        ("template", "change the prompts in the taskset"),
    ):
        if (value := getattr(section, key)) != getattr(default, key):
            raise ValueError(f'task.{key} = {value!r}: not for task.kind = "verifiers"; {remedy}')


def _environment_config(section: TaskSection) -> Any:
    """The configuration of the environment, with one agent that plays the policy."""
    from verifiers.v1 import resolve_env_config
    from verifiers.v1.configs.agent import agent_config_fields

    taskset = section.params.get("taskset", {})
    if not isinstance(taskset, dict) or "id" in taskset:
        raise ValueError(f"task.params.taskset = {taskset!r}: must be a table without `id`; set task.name instead")
    try:
        config = resolve_env_config({**section.params, "taskset": {**taskset, "id": section.name}})
    except ImportError as error:
        raise ValueError(f"task.name = {section.name!r}: {error}") from error
    except Exception as error:  # importing a taskset runs the user's code
        raise ValueError(
            f"task.name = {section.name!r}, task.params = {section.params!r}: verifiers refuses them: "
            f"{describe_error(error)}"
        ) from error
    agents = agent_config_fields(config)
    played = [name for name, agent in agents.items() if agent.client is None]
    if len(played) != 1:
        raise ValueError(
            f"task.name = {section.name!r}: the policy must play one agent of the environment, but {len(played)} of "
            f"{', '.join(agents)} have no client of their own; give one to the others, such as "
            'task.params.NAME.client = {type = "eval", base_url = "…"}'
        )
    _check_agent(f"task.params.{played[0]}", agents[played[0]])
    return config


def _check_agent(key: str, agent: Any) -> None:
    """What the settings of the policy's agent may not be."""
    sampling = agent.sampling.model_dump(exclude_none=True) if agent.sampling is not None else {}
    if unknown := [name for name in sampling if name != "max_tokens"]:
        raise ValueError(
            f"{key}.sampling.{unknown[0]} = {sampling[unknown[0]]!r}: the policy samples as the run does; set it under "
            "[sampling], and only max_tokens of a call here"
        )
    if agent.retries.max_retries or agent.retries.rules:
        raise ValueError(
            f"{key}.retries: the calls of an abandoned attempt would be trained on; remove it, as a sample that fails "
            "costs only itself"
        )
    has_key = os.environ.get("PRIME_API_KEY") or (Path.home() / ".prime" / "config.json").exists()
    if agent.runtime.type == "prime" and not has_key:
        raise ValueError(
            f'{key}.runtime.type = "prime", which is the default of verifiers, needs PRIME_API_KEY; set another, such '
            'as "docker", or "subprocess" without isolation'
        )


def _split(taskset: Any, stem: str, environment: Any, section: TaskSection) -> tuple[list[Problem], list[Problem]]:
    contents: dict[str, str] = {}  # by name of the problem

    def problems() -> Iterator[Problem]:
        for task in taskset:
            problem = _problem(task, stem, environment, section)
            contents[problem.name] = _content(task)
            yield problem

    def identity(problem: Problem) -> str:
        return contents[problem.name]

    if not taskset.bounded:
        size = section.size or DEFAULT_SIZE
        return split(problems(), problems(), size, section.held_out, MAX_REPEATS, identity)
    found = list(problems())
    # Held-out tasks are random, as tasksets are often sorted. The order depends on seed and contents, not on positions.
    first = {identity(problem): problem for problem in reversed(found)}
    shuffled = [first[key] for key in sorted(first, key=lambda key: noise_key(section.seed, "held_out", key))]
    return split(found, shuffled, section.size, section.held_out, identity=identity)


def _problem(task: Any, stem: str, environment: Any, section: TaskSection) -> Problem:
    from verifiers.v1 import Task, TaskData

    from paceline.agents.verifiers_agent import VerifiersAgent

    data = task.data
    has_key = type(task).key is not Task.key
    own = set(type(data).model_fields) - set(TaskData.model_fields) - set(RESERVED)
    return Problem(
        name=f"{stem}/{task.key if has_key else data.idx}",
        prompt=_prompt(data),
        columns=data.model_dump(mode="json", include=own),
        make_agent=partial(VerifiersAgent, environment, task),
        chat_template_kwargs=section.chat_template_kwargs,
        timeout_s=section.timeout_s,
        max_calls=section.max_calls,
        max_parallel=section.max_parallel,
    )


def _prompt(data: Any) -> list[Message]:
    """For records; the harness decides what it sends. A list of messages, as the chat template is always used."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if data.prompt is None or isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt or NO_PROMPT}]
    from verifiers.v1.types import content_text

    return [*system, *({"role": message.role, "content": content_text(message.content)} for message in data.prompt)]


def _content(task: Any) -> str:
    return json.dumps(task.data.model_dump(mode="json", exclude={"idx"}), sort_keys=True)
