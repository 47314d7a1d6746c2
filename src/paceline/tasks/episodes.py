"""Problems that are environments: `module:EnvClass`, a class that knows how to make its own.

`EnvClass.problems(seed, **task.params)` gives keyword arguments, a dictionary for every problem, as many as it likes or
without end; `EnvClass(**arguments)` is one episode. The same seed must give the same problems. Problems with the same
prompt are the same problem, as anywhere: whatever else their arguments hold, none is trained on while another is held
out. The arguments are also the columns that rewards see.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config import TaskSection
from paceline.tasks.pool import describe
from paceline.tasks.prompt import NEEDED, dress, identity, is_prompt
from paceline.tasks.split import DEFAULT_SIZE, HELD_OUT_SEED, PATIENCE, split
from paceline.tasks.task import Env, Problem, Prompt, Turn


class EnvTask:
    def __init__(self, section: TaskSection) -> None:
        env_class = _env_class(section)
        self.name = env_class.__name__
        self.train, self.held_out = split(
            _problems(env_class, section, self.name, section.seed),
            _problems(env_class, section, f"{self.name}/held_out", section.seed + HELD_OUT_SEED),
            section.size or DEFAULT_SIZE,
            section.held_out,
            lambda problem: identity(problem.prompt),
            PATIENCE,
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


class DressedEnv:
    """An environment whose prompt wears `task.template` and `task.system`."""

    def __init__(self, env_class: type[Env], arguments: Mapping[str, Any], section: TaskSection) -> None:
        self.env = env_class(**arguments)
        self.section = section

    def prompt(self) -> Prompt:
        return dress(self.env.prompt(), self.section)

    def step(self, completion: str) -> Turn:
        return self.env.step(completion)


def _problems(env_class: Any, section: TaskSection, stem: str, seed: int) -> Iterator[Problem]:
    for index, arguments in enumerate(_arguments(env_class, section, seed)):
        try:
            prompt = env_class(**arguments).prompt()
        except Exception as error:
            raise ValueError(
                f"task.name = {section.name!r}: the problem {arguments!r} raised {describe(error)}"
            ) from error
        if not is_prompt(prompt):
            raise ValueError(f"task.name = {section.name!r}: the prompt of {arguments!r} must be {NEEDED}")
        make_env = partial(DressedEnv, env_class, arguments, section)
        yield Problem(f"{stem}/{index}", dress(prompt, section), dict(arguments), make_env)


def _arguments(env_class: Any, section: TaskSection, seed: int) -> Iterator[Any]:
    try:
        yield from env_class.problems(seed, **section.params)
    except Exception as error:
        raise ValueError(
            f"task.name = {section.name!r}: {env_class.__name__}.problems() raised {describe(error)}"
        ) from error


def _env_class(section: TaskSection) -> type:
    name = section.name
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ValueError(f"task.name = {name!r}: an environment is written module:EnvClass")
    if (here := str(Path.cwd())) not in sys.path:  # a file beside the user's config
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module may do anything
        remedy = "install it, or go to its folder" if isinstance(error, ImportError) else "mend it"
        raise ValueError(
            f"task.name = {name!r}: {module_name} can't be imported ({describe(error)}); {remedy}"
        ) from error
    env_class = getattr(module, class_name, None)
    if not isinstance(env_class, type):
        raise ValueError(f"task.name = {name!r}: {module_name} has no class {class_name}")
    if missing := [method for method in ("problems", "prompt", "step") if not callable(getattr(env_class, method, 0))]:
        raise ValueError(f"task.name = {name!r}: has no {missing[0]}(); see paceline.tasks.calculator for an example")
    signature = inspect.signature(env_class.problems)  # type: ignore[attr-defined]
    try:
        signature.bind(section.seed, **section.params)
    except TypeError as error:
        raise ValueError(f"task.params = {section.params!r}: {error}; it is {class_name}.problems{signature}") from None
    return env_class
