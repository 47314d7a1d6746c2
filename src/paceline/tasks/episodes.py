"""Problems from an environment class, `module:EnvClass`.

`EnvClass.problems(seed, **task.params)` yields a dictionary of keyword arguments for every problem, finitely or
infinitely many. `EnvClass(**arguments)` is one episode; here it is reset and closed once, for the problem's prompt. The
same seed must give the same problems. Problems with equal prompts count as one problem, even if their other arguments
differ: training never uses the prompt of a held-out problem. The arguments are also the columns that rewards get.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config import TaskSection
from paceline.tasks.env_agent import EnvAgent
from paceline.tasks.isolated_env import IsolatedEnv
from paceline.tasks.pool import LOAD_TIMEOUT_S, describe_error
from paceline.tasks.prompt import PROMPT_FORMAT, apply_template, is_prompt
from paceline.tasks.split import DEFAULT_SIZE, HELD_OUT_SEED, MAX_REPEATS, split
from paceline.tasks.task import Env, Problem


class EnvTask:
    def __init__(self, section: TaskSection, step_timeout_s: float = 30.0) -> None:
        env_class = _env_class(section)
        self.name = env_class.__name__
        self.train, self.held_out = split(
            _problems(env_class, section, self.name, section.seed, step_timeout_s),
            _problems(env_class, section, f"{self.name}/held_out", section.seed + HELD_OUT_SEED, step_timeout_s),
            section.size or DEFAULT_SIZE,
            section.held_out,
            MAX_REPEATS,
        )
        if len(self.held_out) < section.held_out or not self.train:
            raise ValueError(
                f"task.held_out = {section.held_out}: {section.name} makes too few different prompts for it with "
                f"these task.params ({len({p.name for p in [*self.train, *self.held_out]})} were found); lower it"
            )
        if section.size and len(self.train) < section.size:
            raise ValueError(
                f"task.size = {section.size}: {section.name} leaves only {len(self.train)} problems for training; "
                "lower it, or leave it out to take them all"
            )

    def close(self) -> None:
        pass


def _problems(env_class: Any, section: TaskSection, stem: str, seed: int, step_timeout_s: float) -> Iterator[Problem]:
    for index, arguments in enumerate(_arguments(env_class, section, seed)):
        try:
            prompt = _first_prompt(env_class, arguments)
        except Exception as error:
            raise ValueError(
                f"task.name = {section.name!r}: the problem {arguments!r} raised {describe_error(error)}"
            ) from error
        if not is_prompt(prompt):
            raise ValueError(f"task.name = {section.name!r}: the prompt of {arguments!r} must be {PROMPT_FORMAT}")
        make_env: Callable[[], Env] = partial(env_class, **arguments)
        if section.isolation == "process":
            make_env = partial(IsolatedEnv, section.name, dict(arguments), step_timeout_s)
        make_agent = partial(
            EnvAgent,
            make_env,
            chat=section.chat,
            chat_template_kwargs=section.chat_template_kwargs,
            template=partial(apply_template, section=section),
            step_timeout_s=step_timeout_s,
            start_timeout_s=LOAD_TIMEOUT_S if section.isolation == "process" else 0.0,
        )
        yield Problem(
            f"{stem}/{index}",
            apply_template(prompt, section),
            dict(arguments),
            make_agent,
            section.chat,
            section.chat_template_kwargs,
            timeout_s=section.timeout_s,
            max_calls=section.max_calls,
        )


def _first_prompt(env_class: Any, arguments: Mapping[str, Any]) -> Any:
    env = env_class(**arguments)
    try:
        prompt = env.reset()
        return asyncio.run(_wait_for(prompt)) if inspect.isawaitable(prompt) else prompt
    finally:
        closed = env.close() if hasattr(env, "close") else None
        if inspect.isawaitable(closed):
            asyncio.run(_wait_for(closed))


async def _wait_for(value: Any) -> Any:
    return await value


def _arguments(env_class: Any, section: TaskSection, seed: int) -> Iterator[Any]:
    try:
        yield from env_class.problems(seed, **section.params)
    except Exception as error:
        raise ValueError(
            f"task.name = {section.name!r}: {env_class.__name__}.problems() raised {describe_error(error)}"
        ) from error


def _env_class(section: TaskSection) -> type:
    name = section.name
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ValueError(f"task.name = {name!r}: write an environment as module:EnvClass")
    if (here := str(Path.cwd())) not in sys.path:  # so that a file in the current folder is found
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        remedy = "install it, or change to its folder" if isinstance(error, ImportError) else "fix it"
        raise ValueError(
            f"task.name = {name!r}: {module_name} can't be imported ({describe_error(error)}); {remedy}"
        ) from error
    env_class = getattr(module, class_name, None)
    if not isinstance(env_class, type):
        raise ValueError(f"task.name = {name!r}: {module_name} has no class {class_name}")
    if missing := [method for method in ("problems", "reset", "step") if not callable(getattr(env_class, method, 0))]:
        raise ValueError(
            f"task.name = {name!r}: the class has no {missing[0]}(); for an example see paceline.tasks.calculator"
        )
    signature = inspect.signature(env_class.problems)  # type: ignore[attr-defined]
    try:
        signature.bind(section.seed, **section.params)
    except TypeError as error:
        raise ValueError(
            f"task.params = {section.params!r}: {error}; the signature is {class_name}.problems{signature}"
        ) from None
    return env_class
