"""Several tasks as one: names, labels and held-out problems."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.tasks.mixture import Mixture
from paceline.tasks.rewards import Sample, Score, TaskRewarder
from paceline.tasks.task import Problem


def task(train: str, held_out: str) -> SimpleNamespace:
    of = lambda prompts: [Problem(f"t/{i}", prompt) for i, prompt in enumerate(prompts)]  # noqa: E731
    return SimpleNamespace(name="t", train=of(train), held_out=of(held_out))


def test_problems_have_the_label_and_the_limit_of_their_task() -> None:
    found = Mixture({"x": task("abc", "d"), "y": task("abc", "e")}, {"x": 5, "y": 9})
    assert [p.name for p in found.train] == ["x/t/0", "x/t/1", "x/t/2", "y/t/0", "y/t/1", "y/t/2"]
    assert len({p.name for p in found.train}) == 6, "tasks do not share history"
    assert [(p.name, p.task, p.max_tokens) for p in found.held_out] == [("x/t/0", "x", 5), ("y/t/0", "y", 9)]
    assert found.name == "x, y"


def test_no_task_trains_on_a_held_out_problem_of_another() -> None:
    found = Mixture({"x": task("abc", "d"), "y": task("ade", "b")}, {"x": 5, "y": 5})
    assert [(p.task, p.prompt) for p in found.train] == [("x", "a"), ("x", "c"), ("y", "a"), ("y", "e")]
    with pytest.raises(ValueError, match=r"task\.y: all its problems are held out by other tasks.*lower their"):
        Mixture({"x": task("a", "bc"), "y": task("cb", "z")}, {"x": 5, "y": 5})


def test_each_sample_is_scored_by_the_rewarder_of_its_task() -> None:
    def rewarder(reward: float, sandbox: str | None) -> SimpleNamespace:
        score = lambda samples: [Score(reward, {}) for _ in samples]  # noqa: E731
        return SimpleNamespace(score=score, sandbox=sandbox, num_parallel=1, by_sample=False)

    both = TaskRewarder({"x": rewarder(1.0, None), "y": rewarder(2.0, "namespaces")})
    for label, reward in (("x", 1.0), ("y", 2.0)):
        sample = Sample("s", "p", "c", (1,), {}, task=label)
        assert [score.reward for score in both.score([sample, sample])] == [reward, reward]
    assert both.score([]) == [] and both.sandbox == "namespaces"
    assert TaskRewarder({"x": rewarder(1.0, None)}).sandbox is None
