"""Tasksets of `verifiers` as problems: names, columns, the split, and errors in the settings."""

from __future__ import annotations

import pytest
from verifiers_support import section

from paceline.agents.verifiers_task import VerifiersTask

pytestmark = pytest.mark.verifiers


def test_problems_are_the_tasks_of_the_taskset():
    task = VerifiersTask(section(taskset={"num_tasks": 30}))
    assert task.name == "letters"
    assert (len(task.train), len(task.held_out)) == (27, 3)
    problem = next(problem for problem in task.train if problem.prompt[0]["content"] == "say c")
    assert problem.name in ("letters/2", "letters/28")
    assert problem.prompt == [{"role": "user", "content": "say c"}]
    assert problem.columns == {"letter": "c"}, "the taskset's own fields"
    assert problem.make_agent is not None


def test_the_split_repeats_and_depends_on_the_seed():
    first, again, other = (VerifiersTask(section(seed=seed)) for seed in (0, 0, 1))
    names = [[problem.name for problem in task.held_out] for task in (first, again, other)]
    assert names[0] == names[1] != names[2]
    for task in (first, other):
        assert not {problem.name for problem in task.train} & {problem.name for problem in task.held_out}


def test_tasks_with_one_prompt_are_different_problems_if_their_data_differ():
    """Tasks 0 and 26 both say "say a"; one prompt may have many secrets."""
    task = VerifiersTask(section(taskset={"num_tasks": 52}, held_out=1))
    assert len({problem.name for problem in [*task.train, *task.held_out]}) == 52


def test_equal_tasks_are_one_problem():
    task = VerifiersTask(section(taskset={"num_tasks": 12, "copies": 2}, held_out=4))
    held_out = {problem.columns["letter"] for problem in task.held_out}
    assert len(held_out) == 4
    assert len(task.train) == 16, "two copies of eight"
    assert not held_out & {problem.columns["letter"] for problem in task.train}
    assert len({problem.name for problem in task.train}) == 8


def test_an_infinite_taskset_gives_as_many_tasks_as_asked_for():
    task = VerifiersTask(section(taskset={"infinite": True}, size=40, held_out=5))
    assert [problem.name for problem in task.held_out] == [f"letters/{i}" for i in range(5)]
    assert [problem.name for problem in task.train] == [f"letters/{i}" for i in range(5, 45)]


def test_keys_of_the_taskset_name_its_problems():
    task = VerifiersTask(section(name="keyed_letters", params={"agent": {"runtime": {"type": "subprocess"}}}))
    assert {problem.name for problem in task.held_out} <= {f"keyed_letters/letter-{c}" for c in "abcdefghijkl"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"name": "no_such_taskset", "params": {}},
            r"task.name = 'no_such_taskset': taskset 'no_such_taskset' not found",
        ),
        ({"taskset": {"num_task": 3}}, r"task.params = .*num_task"),
        ({"params": {"taskset": {"id": "letters"}}}, r"task.params.taskset = .*: must be a table without `id`"),
        ({"params": {"agnet": {}}}, r"task.params = .*agnet"),
        ({"held_out": 12}, r"task.held_out = 12: letters has only 12 different tasks"),
        ({"size": 10}, r"task.size = 10: letters leaves only 9 tasks"),
        ({"chat": False}, r"task.chat = false"),
        ({"system": "Be brief."}, r"task.system = 'Be brief.': not for task.kind = \"verifiers\""),
        ({"template": "Q: {prompt}"}, r"task.template = 'Q: \{prompt\}': not for"),
        ({"params": {}}, r'task.params.agent.runtime.type = "prime".*needs PRIME_API_KEY'),
        (
            {"params": {"agent": {"runtime": {"type": "subprocess"}, "sampling": {"temperature": 0.3}}}},
            r"task.params.agent.sampling.temperature = 0.3",
        ),
        (
            {"params": {"agent": {"runtime": {"type": "subprocess"}, "retries": {"max_retries": 2}}}},
            r"task.params.agent.retries",
        ),
        ({"name": "two_players", "params": {}}, r"the policy must play one agent .* but 2 of first, second"),
        ({"name": "broken_letters"}, r"task.name = 'broken_letters'.*ZeroDivisionError"),
    ],
)
def test_wrong_settings_are_named(changes, message, monkeypatch, tmp_path):
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=message):
        VerifiersTask(section(**changes))
