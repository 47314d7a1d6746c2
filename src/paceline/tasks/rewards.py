"""Rewards: functions in TRL's signature, built in or the user's, summed by weight.

Always: `score` gives one Score per sample, in order, and ends. What hangs, raises, crashes or returns no number costs
the sample it was about, as does a sum that is no number, or of nothing: its reward is NaN and `failure` says why.
Everything that could hang or crash runs in worker processes (`pool`), regular expressions too; only the reward model
lives here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.config import RewardSection, TaskSection
from paceline.tasks import checks, sandbox
from paceline.tasks.pool import Failed, Make, Pool, describe
from paceline.tasks.reward_model import RewardModel
from paceline.tasks.task import Prompt

BUILT_IN = ("exact", "format", "math", "code", "gym", "model", "env")
BATCH_PATIENCE = 16  # a batch may take `timeout_s` per sample, but for no more samples than this


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion to be scored."""

    name: str  # for messages, e.g. "step 3, chain_sum/17, sample 2"
    prompt: Prompt
    completion: str
    completion_ids: tuple[int, ...]
    columns: dict[str, Any]  # `answer` and all other columns of the problem
    env_reward: float | None = None


@dataclass(frozen=True, slots=True)
class Score:
    reward: float  # weighted sum; NaN when failed
    parts: dict[str, float]  # by function name, those that apply
    failure: str | None = None  # one line naming sample, function and reason


Value = float | None | Failed  # None: the function does not apply
Scorer = Callable[[Sequence[Sample]], list[Value]]


class Judge(Protocol):
    """Who scores: a Rewarder, or several of them elsewhere."""

    @property
    def num_parallel(self) -> int: ...  # calls of `score` that may be under way at a time
    @property
    def sandbox(self) -> str | None: ...  # how programs are isolated; None: none are run
    def score(self, samples: Sequence[Sample]) -> list[Score]: ...
    def close(self) -> None: ...


class Rewarder:
    num_parallel = 1  # the pool's workers share the samples of one call

    def __init__(self, section: RewardSection, task: TaskSection | None = None) -> None:
        self._section = section
        self._task = task
        self.sandbox: str | None = None
        self._pool = Pool(section.workers)
        self._weights = section.weights or [1.0] * len(section.functions)
        try:
            if len(set(section.functions)) < len(section.functions):
                raise ValueError(f"reward.functions = {section.functions}: a function is named twice; add its weights")
            self._scorers = {name: self._scorer(name) for name in section.functions}
        except BaseException:
            self.close()
            raise

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        columns = {name: scorer(samples) for name, scorer in self._scorers.items()} if samples else {}
        return [self._sum(sample, {name: columns[name][i] for name in columns}) for i, sample in enumerate(samples)]

    def close(self) -> None:
        self._pool.close()

    def _sum(self, sample: Sample, values: dict[str, Value]) -> Score:
        parts: dict[str, float] = {}
        failure = None
        for name, value in values.items():
            if isinstance(value, Failed):
                failure = failure or f"{sample.name}: reward {name} {value.reason}"
            elif value is not None and not math.isfinite(value):
                failure = failure or f"{sample.name}: reward {name} returned {value}"
            elif value is not None:
                parts[name] = value
        if failure:
            return Score(math.nan, parts, failure)
        if not parts:  # 0 would be a judgement, and nobody judged
            return Score(math.nan, parts, f"{sample.name}: no reward function applies to it")
        weights = dict(zip(self._scorers, self._weights, strict=True))
        terms = [weights[name] * value for name, value in parts.items()]
        if not math.isfinite(sum(terms)):
            return Score(math.nan, parts, f"{sample.name}: the weighted sum of its rewards is not finite")
        return Score(math.fsum(terms), parts)

    def _scorer(self, name: str) -> Scorer:
        section, pattern = self._section, self._section.answer_pattern
        if name == "exact":
            return self._each(checks.exact, (pattern,))
        if name == "format":
            return self._each(checks.shape, (section.format_pattern,))
        if name == "math":
            return self._each(checks.symbolic, (pattern,))
        if name == "gym":
            if self._task is None or self._task.kind != "reasoning_gym":
                kind = self._task.kind if self._task else None
                raise ValueError(
                    f'reward.functions has "gym", but task.kind = {kind!r}; it scores "reasoning_gym" alone'
                )
            return self._each(checks.gym, (self._task.name, self._task.params, pattern))
        if name == "code":
            self.sandbox = str(sandbox.isolation(section.sandbox))
            limits = (section.code_cpu_s, section.code_memory_mb, section.timeout_s, section.sandbox)
            # A program too slow is a wrong program: the check sees to that itself, the pool only to what is stuck.
            return self._each(checks.program, limits, section.timeout_s + 2 * sandbox.SETUP_S)
        if name == "model":
            assert section.model is not None
            model = RewardModel(section.model)
            return lambda samples: self._judge(model, samples)
        if name == "env":
            return lambda samples: [sample.env_reward for sample in samples]
        if ":" not in name:
            raise ValueError(
                f"reward.functions has {name!r}: not one of {', '.join(BUILT_IN)}; write your own as module:function"
            )
        loaded = self._pool.map(checks.ping, (name,), [()], section.timeout_s)[0]
        if isinstance(loaded, Failed):
            raise ValueError(f"reward.functions has {name!r}, which {loaded.reason}")
        return lambda samples: self._user(name, samples)

    def _each(self, make: Make, setup: tuple[Any, ...], timeout_s: float | None = None) -> Scorer:
        """One call per sample."""
        patience_s = timeout_s or self._section.timeout_s

        def score(samples: Sequence[Sample]) -> list[Value]:
            calls = [(sample.completion, sample.columns) for sample in samples]
            return [_value(reply) for reply in self._pool.map(make, setup, calls, patience_s)]

        return score

    @staticmethod
    def _judge(model: RewardModel, samples: Sequence[Sample]) -> list[Value]:
        try:
            return list(model.score([sample.prompt for sample in samples], [sample.completion for sample in samples]))
        except RuntimeError as error:  # out of memory, mostly; a model that can't be loaded is a ValueError and ends it
            return [Failed(f"raised {describe(error)}") for _ in samples]

    def _user(self, path: str, samples: Sequence[Sample]) -> list[Value]:
        """One call with all samples, as a reward may compare them. If it fails: one call each to find the guilty, then
        all the others together once more."""
        values = self._call(path, [samples])[0]
        if not isinstance(values, Failed):
            return values
        singles = self._call(path, [[sample] for sample in samples])
        alone: list[Value] = [single if isinstance(single, Failed) else single[0] for single in singles]
        innocent = [i for i, value in enumerate(alone) if not isinstance(value, Failed)]
        if innocent:
            values = self._call(path, [[samples[i] for i in innocent]])[0]
            if not isinstance(values, Failed):
                for i, value in zip(innocent, values, strict=True):
                    alone[i] = value
        return alone

    def _call(self, path: str, batches: Sequence[Sequence[Sample]]) -> list[list[Value] | Failed]:
        largest = max(len(batch) for batch in batches)
        timeout_s = self._section.timeout_s * min(largest, BATCH_PATIENCE)
        replies = self._pool.map(checks.batch, (path,), [(_arguments(batch),) for batch in batches], timeout_s)
        return [_values(reply, len(batch)) for reply, batch in zip(replies, batches, strict=True)]


def _value(reply: Any) -> Value:
    """A worker's answer about one sample. Workers are not trusted: it may be any JSON."""
    if reply is None or isinstance(reply, Failed):
        return reply
    if isinstance(reply, str):
        return Failed(reply)
    try:
        return float(reply)
    except (TypeError, OverflowError):
        return Failed(f"returned a {type(reply).__name__} that is no reward")


def _values(reply: Any, num_samples: int) -> list[Value] | Failed:
    """And about a batch."""
    if isinstance(reply, Failed):
        return reply
    if isinstance(reply, list) and len(reply) == num_samples:
        return [_value(value) for value in reply]
    return Failed(reply if isinstance(reply, str) else f"returned no list of {num_samples} values")


def _arguments(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """A batch as TRL passes it: completions of chats as messages, every column as a list."""
    names = dict.fromkeys(name for sample in samples for name in sample.columns)
    return {name: [sample.columns.get(name) for sample in samples] for name in names} | {
        "prompts": [sample.prompt for sample in samples],
        "completions": [
            sample.completion
            if isinstance(sample.prompt, str)
            else [{"role": "assistant", "content": sample.completion}]
            for sample in samples
        ],
        "completion_ids": [list(sample.completion_ids) for sample in samples],
    }
