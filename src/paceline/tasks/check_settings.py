"""Finds settings of several tasks that do not go together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from paceline.config import Config, TaskSection


def task_problems(config: Config) -> Iterator[str]:
    if isinstance(config.task, TaskSection):
        return
    if not config.task:
        yield "task = []: the list of tasks is empty; write at least one [[task]], or one [task]"
        return
    labels = [task.label for task in config.task]
    for label, count in Counter(labels).items():
        if count > 1:
            yield f'task.label = "{label}": {count} tasks have this label; give each its own'
    if config.reward is not None:
        yield (
            f"reward: with [[task]] each task has its own; write [task.reward] below each [[task]], or set "
            f"task.{labels[0]}.reward.functions (the tasks are {', '.join(labels)})"
        )
    longest, overlong_buffer = config.sampling.max_tokens, config.algorithm.overlong_buffer
    for task in config.task:
        key = f"task.{task.label}.max_tokens = {task.max_tokens}"
        if task.max_tokens is not None and task.max_tokens > longest:
            yield (
                f"{key}: must be at most sampling.max_tokens = {longest}, which is the maximum of all tasks; raise "
                "that, or lower this"
            )
        if task.max_tokens is not None and task.max_tokens < longest and overlong_buffer:
            yield (
                f"{key}: the penalty of algorithm.overlong_buffer = {overlong_buffer} is for lengths near "
                "sampling.max_tokens, which this task never reaches; remove one of the two"
            )
