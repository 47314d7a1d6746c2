"""Problems that are environments: `module:EnvClass`, a class that knows how to make its own.

`EnvClass.problems(seed, **task.params)` gives keyword arguments, a dictionary for every problem, as many as it likes or
without end; `EnvClass(**arguments)` is one episode. The same seed must give the same problems. Problems with the same
arguments are the same problem. The arguments are also the columns that rewards see.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config import TaskSection
from paceline.tasks.prompt import NEEDED, dress, is_prompt
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
            lambda problem: json.dumps(problem.columns, sort_keys=True, default=repr),
            PATIENCE,
        )
        if len(self.held_out) < section.held_out or not self.train:
            raise ValueError(
                f"task.held_out = {section.held_out}: {section.name} makes too few different problems for it with "
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
    for index, arguments in enumerate(env_class.problems(seed, **section.params)):
        make_env = partial(DressedEnv, env_class, arguments, section)
        prompt = make_env().prompt()
        if not is_prompt(prompt):
            raise ValueError(f"task.name = {section.name!r}: the prompt of {arguments!r} must be {NEEDED}")
        yield Problem(f"{stem}/{index}", prompt, dict(arguments), make_env)


def _env_class(section: TaskSection) -> type:
    name = section.name
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise ValueError(f"task.name = {name!r}: an environment is written module:EnvClass")
    if (here := str(Path.cwd())) not in sys.path:  # a file beside the user's config
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"task.name = {name!r}: {module_name} can't be imported ({error}); install it, or go to its folder"
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
