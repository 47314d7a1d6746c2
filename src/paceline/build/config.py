"""Makes a Config from defaults, a TOML file and `a.b=c` overrides. Later values win."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from paceline.build.defaults import fill, with_defaults
from paceline.cluster.check_settings import cluster_problems, engine_problems
from paceline.config import Config, MixedTaskSection, RewardSection, Section, TaskSection
from paceline.config_io import ConfigError, read_settings, validate
from paceline.draft.check_settings import online_problems
from paceline.other_names import HINTS
from paceline.rl.check_settings import audit_problems, training_problems
from paceline.tasks.check_settings import task_problems

# Each takes a Config and yields a message for every setting that does not go with the other sections.
CHECKS = (task_problems, engine_problems, audit_problems, cluster_problems, online_problems, training_problems)
AnySection = TypeVar("AnySection", bound=Section)


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] = (), defaults: Mapping[str, Mapping[str, Any]] = {}
) -> Config:
    """The settings of a TOML file (or the defaults), with `a.b=c` overrides applied in order. `defaults`: what a
    command uses instead of the usual defaults, by section and key."""
    settings: Mapping[str, Any] = read_settings(path, overrides)
    for section, values in defaults.items():
        settings = fill(settings, section, values)
    return make_config(settings)


def make_config(settings: Mapping[str, Any]) -> Config:
    """A Config from nested sections, keys and values. Raises ConfigError for wrong or incompatible settings."""
    config = validate(Config, with_defaults(settings), HINTS)
    for check in CHECKS:
        for problem in check(config):
            raise ConfigError(problem)
    return config


def with_absolute_paths(config: Config) -> Config:
    """Resolve relative paths, so that a run can be resumed from any folder."""
    task, reward = config.task, config.reward
    changed: dict[str, Any] = {
        "model": _absolute(_absolute(config.model, "name", exists=Path.is_dir), "chat_template"),
        "task": _absolute_task(task) if isinstance(task, TaskSection) else [_absolute_task(each) for each in task],
        "reward": None if reward is None else _absolute_reward(reward),
        "speculation": _absolute(config.speculation, "head", "draft_model", "cost_table"),
        "draft": _absolute(config.draft, "data", "init"),
    }
    return config.model_copy(update=changed)


def _absolute_task(task: TaskSection) -> TaskSection:
    if task.kind in ("jsonl", "dataset", "agent"):
        task = _absolute(task, "name")
    if task.command is not None:  # scripts among its arguments
        program, *arguments = task.command or [""]
        found = [str(Path(each).resolve()) if Path(each).is_file() else each for each in arguments]
        task = task.model_copy(update={"command": [program, *found]})
    if isinstance(task, MixedTaskSection):
        task = task.model_copy(update={"reward": _absolute_reward(task.reward)})
    return task


def _absolute_reward(reward: RewardSection) -> RewardSection:
    return _absolute(reward, "model", exists=Path.is_dir)


def _absolute(section: AnySection, *keys: str, exists: Callable[[Path], bool] = Path.exists) -> AnySection:
    """Resolve those of the keys that name an existing file or directory."""
    given = {key: getattr(section, key) for key in keys}
    found = {key: str(Path(name).resolve()) for key, name in given.items() if name is not None and exists(Path(name))}
    return section.model_copy(update=found)
