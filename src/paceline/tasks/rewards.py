"""Rewards: the weighted sum of reward functions with TRL's signature, built in or the user's own.

Invariants: `score` returns one Score per sample, in order, and always returns. Several threads may call it at once; a
slow sample delays only the samples of its own call. Everything that could hang or crash runs in worker processes
(`pool`), regular expressions too; only the reward model runs in this process.

A failure costs only its own sample:
  - The answer makes a function hang, crash or run out of memory: `reward.on_failure` decides. "zero": the value of this
    function is 0, others count as usual; "exclude": as below; "stop": `score` raises ValueError.
  - Any other failure is not the answer's: a function that can't be loaded, raises or returns no number, no function
    applies, the sum is not finite. The sample is excluded: its reward is NaN.
In both cases `failure` has the reason. A function that does not return one value per sample is an error, because its
values can't be assigned to samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from paceline.chat.messages import Message, Prompt
from paceline.config import RewardSection, TaskSection
from paceline.tasks import checks, sandbox
from paceline.tasks.pool import Factory, Failed, Pool, describe_error
from paceline.tasks.reward_model import RewardModel

BUILT_IN = ("exact", "format", "math", "code", "gym", "model", "env")
MAX_BATCH_TIMEOUTS = 16  # a batch may take `timeout_s` per sample, but at most this many times


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion to be scored."""

    name: str  # for error messages, e.g. "step 3, chain_sum/17, sample 2"
    prompt: Prompt
    completion: str  # the policy's last message
    completion_ids: tuple[int, ...]  # all tokens after the prompt
    columns: dict[str, Any]  # `answer` and all other columns of the problem
    env_reward: float | None = None  # of an environment or agent
    task: str | None = None  # label of the task, if there are several
    messages: list[Message] | None = None  # of several turns: all after the prompt


@dataclass(frozen=True, slots=True)
class Score:
    reward: float  # the weighted sum; NaN: the sample could not be scored
    parts: dict[str, float]  # by function name, without weights; only functions that apply
    # One line with sample, function and reason: why there is no reward, or why a function's value is 0.
    failure: str | None = None


Value = float | None | Failed  # None: the function does not apply
Scorer = Callable[[Sequence[Sample]], list[Value]]


class Rewarder(Protocol):
    """Scores samples: on this machine (`LocalRewarder`) or on others."""

    @property
    def num_parallel(self) -> int: ...  # calls of `score` that may run at the same time
    @property
    def by_sample(self) -> bool: ...  # every sample may be scored in a call of its own, as no function compares them
    @property
    def sandbox(self) -> str | None: ...  # how programs are isolated; None: no programs are run
    def score(self, samples: Sequence[Sample]) -> list[Score]: ...
    def close(self) -> None: ...


class LocalRewarder:
    def __init__(self, section: RewardSection, task: TaskSection | None = None) -> None:
        self._section = section
        self._task = task
        self.num_parallel = section.workers  # each call keeps at least one worker busy
        self.by_sample = not any(map(self._takes_groups, section.functions))
        self.sandbox: str | None = None
        self._pool = Pool(section.workers)
        self._weights = section.weights or [1.0] * len(section.functions)
        try:
            if len(set(section.functions)) < len(section.functions):
                raise ValueError(
                    f"reward.functions = {section.functions}: a function is listed twice; list it once, with the sum "
                    "of its weights"
                )
            self._scorers = {name: self._scorer(name) for name in section.functions}
        except BaseException:
            self.close()
            raise

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        values = {name: scorer(samples) for name, scorer in self._scorers.items()} if samples else {}
        return [self._sum(sample, {name: values[name][i] for name in values}) for i, sample in enumerate(samples)]

    def close(self) -> None:
        self._pool.close()

    def _sum(self, sample: Sample, values: dict[str, Value]) -> Score:
        parts: dict[str, float] = {}
        failure = zeroed = None
        for name, value in values.items():
            if isinstance(value, Failed):
                reason = f"{sample.name}: reward {name} {value.reason}"
                if value.by_arguments and self._section.on_failure == "stop":
                    raise ValueError(
                        f'{reason}; reward.on_failure = "stop" ends the run at an answer that makes a reward fail: '
                        'correct the function, raise reward.timeout_s, or set reward.on_failure to "zero" or "exclude"'
                    )
                if value.by_arguments and self._section.on_failure == "zero":
                    zeroed = zeroed or f"{reason}: scored 0"
                    parts[name] = 0.0
                else:
                    failure = failure or reason
            elif value is not None and not math.isfinite(value):
                failure = failure or f"{sample.name}: reward {name} returned {value}"
            elif value is not None:
                parts[name] = value
        if failure:
            return Score(math.nan, parts, failure)
        if not parts:  # not 0, which would be a reward
            return Score(math.nan, parts, f"{sample.name}: no reward function applies to it")
        weights = dict(zip(self._scorers, self._weights, strict=True))
        terms = [weights[name] * value for name, value in parts.items()]
        if not math.isfinite(sum(terms)):
            return Score(math.nan, parts, f"{sample.name}: the weighted sum of its rewards is not finite")
        return Score(math.fsum(terms), parts, zeroed)

    def _scorer(self, name: str) -> Scorer:
        section, pattern = self._section, self._section.answer_pattern
        if name == "exact":
            return self._score_each(checks.exact_check, (pattern,))
        if name == "format":
            return self._score_each(checks.format_check, (section.format_pattern,))
        if name == "math":
            return self._score_each(checks.math_check, (pattern,))
        if name == "gym":
            if self._task is None or self._task.kind != "reasoning_gym":
                kind = self._task.kind if self._task else None
                raise ValueError(
                    f'reward.functions has "gym", but task.kind = {kind!r}; it scores only "reasoning_gym"'
                )
            return self._score_each(checks.gym_check, (self._task.name, self._task.params, pattern))
        if name == "code":
            self.sandbox = str(sandbox.isolation(section.sandbox))
            limits = (section.code_cpu_s, section.code_memory_mb, section.timeout_s, section.sandbox)
            # The check enforces `timeout_s` itself and gives a slow program reward 0. The pool's timeout is only for a
            # check that hangs, for which the program in its sandbox is not to blame.
            score = self._score_each(checks.code_check, limits, section.timeout_s + 2 * sandbox.SETUP_S)
            return lambda samples: [
                replace(value, by_arguments=False) if isinstance(value, Failed) else value for value in score(samples)
            ]
        if name == "model":
            assert section.model is not None
            model = RewardModel(section.model)
            return lambda samples: self._score_with_model(model, samples)
        if name == "env":
            return lambda samples: [sample.env_reward for sample in samples]
        if ":" not in name:
            raise ValueError(
                f"reward.functions has {name!r}: not one of {', '.join(BUILT_IN)}; write your own as module:function"
            )
        _check_module(name)
        loaded = self._pool.map(checks.import_only, (name,), [()], section.timeout_s)[0]
        if isinstance(loaded, Failed):
            raise ValueError(
                f"reward.functions has {name!r}, which {loaded.reason}{_where_to_look(name, loaded.reason)}"
            )
        score_user = self._score_group if self._takes_groups(name) else self._score_alone
        return lambda samples: score_user(name, samples)

    def _score_each(self, factory: Factory, setup: tuple[Any, ...], timeout_s: float | None = None) -> Scorer:
        """One call per sample."""
        call_timeout_s = timeout_s or self._section.timeout_s

        def score(samples: Sequence[Sample]) -> list[Value]:
            calls = [(sample.completion, sample.columns) for sample in samples]
            return [_value(reply) for reply in self._pool.map(factory, setup, calls, call_timeout_s)]

        return score

    @staticmethod
    def _score_with_model(model: RewardModel, samples: Sequence[Sample]) -> list[Value]:
        try:
            return list(model.score([sample.prompt for sample in samples], [sample.completion for sample in samples]))
        except RuntimeError as error:  # mostly out of memory; a model that can't be loaded raises ValueError: run ends
            return [Failed(f"raised {describe_error(error)}") for _ in samples]

    def _takes_groups(self, name: str) -> bool:
        """The reward model is faster for batches; a user's function may compare samples."""
        return name == "model" or (name not in BUILT_IN and self._section.call_per == "group")

    def _score_group(self, path: str, samples: Sequence[Sample]) -> list[Value]:
        """One call of the user's function with all samples, since it may compare them. If the call fails: one call per
        sample to find those that fail, then one call with all others."""
        values = self._call_function(path, [samples])[0]
        if not isinstance(values, Failed):
            return values
        found = self._score_alone(path, samples)
        succeeded = [i for i, value in enumerate(found) if not isinstance(value, Failed)]
        if succeeded:
            values = self._call_function(path, [[samples[i] for i in succeeded]])[0]
            if not isinstance(values, Failed):
                for i, value in zip(succeeded, values, strict=True):
                    found[i] = value
        return found

    def _score_alone(self, path: str, samples: Sequence[Sample]) -> list[Value]:
        """One call of the user's function per sample."""
        replies = self._call_function(path, [[sample] for sample in samples])
        return [reply if isinstance(reply, Failed) else reply[0] for reply in replies]

    def _call_function(self, path: str, batches: Sequence[Sequence[Sample]]) -> list[list[Value] | Failed]:
        largest = max(len(batch) for batch in batches)
        timeout_s = self._section.timeout_s * min(largest, MAX_BATCH_TIMEOUTS)
        replies = self._pool.map(checks.user_check, (path,), [(_arguments(batch),) for batch in batches], timeout_s)
        for reply in replies:
            if isinstance(reply, str):
                raise ValueError(
                    f"reward.functions: {path} {reply[:300]}; return one number per completion, or None for a "
                    f"completion that it does not apply to: def {path.rpartition(':')[2]}(prompts, completions, "
                    "**columns) -> list[float | None]"
                )
        return [_values(reply, len(batch)) for reply, batch in zip(replies, batches, strict=True)]


class TaskRewarder:
    """Scores each sample by the rewarder of its task. All samples of a call are of one group, so of one task."""

    def __init__(self, rewarders: Mapping[str | None, Rewarder]) -> None:
        self._rewarders = rewarders
        self.num_parallel = sum(rewarder.num_parallel for rewarder in rewarders.values())
        self.by_sample = all(rewarder.by_sample for rewarder in rewarders.values())

    @property
    def sandbox(self) -> str | None:
        kinds = {rewarder.sandbox for rewarder in self._rewarders.values()}
        return "; ".join(sorted(kind for kind in kinds if kind is not None)) or None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        (task,) = {sample.task for sample in samples} or {next(iter(self._rewarders))}
        return self._rewarders[task].score(samples)

    def close(self) -> None:
        for rewarder in self._rewarders.values():
            rewarder.close()


def _check_module(name: str) -> None:
    """Raise ValueError if module:function has a file in place of the module."""
    module, _, function = name.partition(":")
    if not module.endswith(".py") and "/" not in module:
        return
    path = Path(module.removesuffix(".py"))
    is_below = not path.is_absolute() and ".." not in path.parts
    right = f"{'.'.join(path.parts) if is_below else path.name}:{function}"
    raise ValueError(
        f"reward.functions has {name!r}: a file, not a module; write {right}, without .py"
        + ("" if is_below else ", and change to the file's folder")
    )


def _where_to_look(name: str, reason: str) -> str:
    """What to add to the reason why module:function could not be imported: "" if the module was found."""
    module = name.partition(":")[0]
    if not any(f"No module named {part!r}" in reason for part in (module, module.partition(".")[0])):
        return ""
    return f"; modules are looked for in the current folder, {Path.cwd()}, and among the installed packages"


def _value(reply: Any) -> Value:
    """The value in a worker's reply for one sample. Workers are not trusted: a reply may be any JSON."""
    if reply is None or isinstance(reply, Failed):
        return reply
    if isinstance(reply, str):
        return Failed(reply)
    try:
        return float(reply)
    except (TypeError, OverflowError):
        return Failed(f"returned a {type(reply).__name__}, not a number")


def _values(reply: Any, num_samples: int) -> list[Value] | Failed:
    """The values in a worker's reply for a batch."""
    if isinstance(reply, Failed):
        return reply
    if isinstance(reply, list) and len(reply) == num_samples:
        return [_value(value) for value in reply]
    return Failed(f"returned no list of {num_samples} values")


def _arguments(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """The keyword arguments that TRL passes for a batch: completions of chats as messages, every column as a list. The
    completion of a conversation is all messages after the prompt."""
    names = dict.fromkeys(name for sample in samples for name in sample.columns)
    return {name: [sample.columns.get(name) for sample in samples] for name in names} | {
        "prompts": [sample.prompt for sample in samples],
        "completions": [_completion(sample) for sample in samples],
        "completion_ids": [list(sample.completion_ids) for sample in samples],
    }


def _completion(sample: Sample) -> str | list[Message]:
    if sample.messages is not None:
        return sample.messages
    return (
        sample.completion if isinstance(sample.prompt, str) else [{"role": "assistant", "content": sample.completion}]
    )
