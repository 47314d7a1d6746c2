"""Makes a Config from defaults, a TOML file and `a.b=c` overrides. Later values win."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.build.defaults import fill, with_defaults
from paceline.cluster.check_settings import cluster_problems, engine_problems
from paceline.config import Config, Section
from paceline.config_io import ConfigError, read_settings, validate
from paceline.draft.check_settings import online_problems
from paceline.other_names import HINTS
from paceline.rl.check_settings import audit_problems, training_problems

# Each takes a Config and yields a message for every setting that does not go with the other sections.
CHECKS = (engine_problems, audit_problems, cluster_problems, online_problems, training_problems)


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
    task = config.task
    changed = {
        "model": _absolute(config.model, "name", exists=Path.is_dir),
        "task": _absolute(task, "name") if task.kind in ("jsonl", "dataset") else task,
        "reward": _absolute(config.reward, "model", exists=Path.is_dir),
        "speculation": _absolute(config.speculation, "head", "draft_model", "cost_table"),
        "draft": _absolute(config.draft, "data", "init"),
    }
    return config.model_copy(update=changed)


def _absolute(section: Section, *keys: str, exists: Callable[[Path], bool] = Path.exists) -> Section:
    """Resolve those of the keys that name an existing file or directory."""
    given = {key: getattr(section, key) for key in keys}
    found = {key: str(Path(name).resolve()) for key, name in given.items() if name is not None and exists(Path(name))}
    return section.model_copy(update=found)
