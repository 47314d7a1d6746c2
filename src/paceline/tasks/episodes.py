"""Problems from an environment class, `module:EnvClass`.

`EnvClass.problems(seed, **task.params)` yields a dictionary of keyword arguments for every problem, finitely or
infinitely many. `EnvClass(**arguments)` is one episode. The same seed must give the same problems. Problems with equal
prompts count as one problem, even if their other arguments differ: training never uses the prompt of a held-out
problem. The arguments are also the columns that rewards get.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline.chat.messages import Prompt
from paceline.config import TaskSection
from paceline.tasks.pool import describe_error
from paceline.tasks.prompt import PROMPT_FORMAT, apply_template, is_prompt
from paceline.tasks.split import DEFAULT_SIZE, HELD_OUT_SEED, MAX_REPEATS, split
from paceline.tasks.task import Env, Problem, Turn


class EnvTask:
    def __init__(self, section: TaskSection) -> None:
        env_class = _env_class(section)
        self.name = env_class.__name__
        self.train, self.held_out = split(
            _problems(env_class, section, self.name, section.seed),
            _problems(env_class, section, f"{self.name}/held_out", section.seed + HELD_OUT_SEED),
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


class TemplatedEnv:
    """An environment with `task.template` and `task.system` applied to its prompt."""

    def __init__(self, env_class: type[Env], arguments: Mapping[str, Any], section: TaskSection) -> None:
        self.env = env_class(**arguments)
        self.section = section

    def prompt(self) -> Prompt:
        return apply_template(self.env.prompt(), self.section)

    def step(self, completion: str) -> Turn:
        return self.env.step(completion)


def _problems(env_class: Any, section: TaskSection, stem: str, seed: int) -> Iterator[Problem]:
    for index, arguments in enumerate(_arguments(env_class, section, seed)):
        try:
            prompt = env_class(**arguments).prompt()
        except Exception as error:
            raise ValueError(
                f"task.name = {section.name!r}: the problem {arguments!r} raised {describe_error(error)}"
            ) from error
        if not is_prompt(prompt):
            raise ValueError(f"task.name = {section.name!r}: the prompt of {arguments!r} must be {PROMPT_FORMAT}")
        make_env = partial(TemplatedEnv, env_class, arguments, section)
        yield Problem(f"{stem}/{index}", apply_template(prompt, section), dict(arguments), make_env, section.chat)


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
    if missing := [method for method in ("problems", "prompt", "step") if not callable(getattr(env_class, method, 0))]:
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
