"""The taskset in docs/how-to/verifiers.md works as it is written there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from verifiers_support import ScriptedPolicy, section

from paceline.agents.verifiers_task import VerifiersTask

pytestmark = pytest.mark.verifiers
PAGE = Path(__file__).parents[2] / "docs/how-to/verifiers.md"


def test_the_example_runs(tokenizer, tmp_path, monkeypatch):
    (found,) = re.findall(r"```python\n# sums.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "sums.py").write_text(found)
    monkeypatch.chdir(tmp_path)
    task = VerifiersTask(section(name="sums", params={"agent": {"runtime": {"type": "subprocess"}}}, held_out=20))
    assert (len(task.train), len(task.held_out)) == (80, 20)
    problem = next(problem for problem in task.train if problem.columns["answer"] == "9")
    policy = ScriptedPolicy(tokenizer, "It is 8.", "Yes: 9.")
    outcome = asyncio.run(problem.make_agent().run(policy))
    assert outcome.reward == 1.0
    assert len(policy.calls) == 2
