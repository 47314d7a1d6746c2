"""Training runs with agents: hostile ones, concurrent calls, and the examples, on a tiny model."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import TEMPLATES, sampled, tokenizer_of
from scripted_policy import ScriptedPolicy
from tiny_run import lines, make, policy, write_model
from typer.testing import CliRunner

from paceline.agents import policy_backend
from paceline.agents.endpoint import Endpoint
from paceline.agents.process import ProcessAgent
from paceline.build.config import load_config
from paceline.chat.conversation import Conversations, Rendered
from paceline.chat.template import encode_rendered
from paceline.cli import app

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
AGENT = (
    "task.kind=agent",
    "task.chat=true",
    "task.held_out=0",
    'reward.functions=["env"]',
    "sampling.max_tokens=24",
    "algorithm.num_generations=2",
    "train.num_steps=1",
    "train.checkpoint_every=0",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_model(tmp_path / "model", max_positions=1024)
    monkeypatch.syspath_prepend(str(TESTS))
    return tmp_path


@pytest.fixture(autouse=True)
def ended_threads() -> Iterator[None]:
    """A run that is closed leaves no threads behind."""
    before = set(threading.enumerate())
    yield
    assert not [each for each in set(threading.enumerate()) - before if each.name.startswith("paceline")]


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def by_problem(run: Path) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for rollout in lines(run, "rollouts"):
        found[rollout["problem"]].append(rollout)
    return dict(found)


# ---- broken and hostile agents ----

BEHAVIOURS = {  # and what becomes of their samples: the failure, or None
    "good": None,
    "hang": r"took more than task.timeout_s = 12 s",
    "crash": r"was ended by signal 6",
    "flood": r"sent more than 1000 requests that got no completion",
    "late": None,
    "forge": None,
    "garbage": None,
    "nonsense": r"returned reward 'everything'",
    "fork_bomb": r"took more than task.timeout_s = 12 s",
    "good too": None,
}


def test_each_hostile_agent_costs_its_own_sample(folder: Path) -> None:
    mark = folder / "mark"
    write_rows(
        folder,
        [{"prompt": f"say {name}", "behaviour": name.split()[0], "mark": str(mark)} for name in BEHAVIOURS],
    )
    command = json.dumps([sys.executable, str(TESTS / "hostile_agent.py")])
    settings = (
        f"task.command={command}",
        "task.timeout_s=12",
        "task.max_calls=8",
        "train.groups_per_step=10",
        "reward.max_failures=1",
    )
    trainer = make(folder, "run", *AGENT, *settings)
    before = policy(trainer)
    started = time.monotonic()
    trainer.run()
    assert time.monotonic() - started < 100
    found = by_problem(folder / "run")
    for name, failure in BEHAVIOURS.items():
        index = list(BEHAVIOURS).index(name)
        samples = [rollout for key, rollouts in found.items() if key == f"task/{index}" for rollout in rollouts]
        assert len(samples) in (2, 4), name  # groups that failed as a whole are replaced
        for sample in samples:
            if failure is None:
                assert sample["failure"] is None and sample["reward"] is not None, (name, sample["failure"])
                assert len(sample["token_ids"]) > 0
            else:
                assert re.search(failure, sample["failure"] or ""), (name, sample["failure"])
                assert sample["reward"] is None
        if name == "forge":
            assert {sample["reward"] for sample in samples} == {0.0}, "it reached another sample"
    time.sleep(max(0.0, 3 - (time.monotonic() - started)))
    assert not mark.exists(), "a child of an agent lived on"
    assert not processes_of("hostile_agent.py")
    assert any((before[key] != value).any() for key, value in policy(trainer).items()), "the others were trained on"
    trainer.close()


def processes_of(name: str) -> list[str]:
    deadline, found = time.monotonic() + 5, list[str]()
    while time.monotonic() < deadline:
        found = [text for path in Path("/proc").glob("[0-9]*/cmdline") if name in (text := read(path))]
        if not found:
            break
        time.sleep(0.1)
    return found


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# ---- the same tokens and weights ----


def test_concurrent_calls_repeat_with_and_without_drafts(folder: Path) -> None:
    write_rows(folder, [{"prompt": f"say {letter}"} for letter in "abcd"])
    settings = "task.agent=agent_functions:concurrent", "train.num_steps=2", "task.size=4"
    drafts = "speculation.method=suffix", "speculation.num_speculative_tokens=3", "speculation.suffix_min_match=1"
    runs = {}
    for name, more in (("plain", ()), ("again", ()), ("drafts", drafts)):
        trainer = make(folder, name, *AGENT, *settings, *more)
        trainer.run()
        runs[name] = lines(folder / name, "rollouts"), policy(trainer)
        trainer.close()
    rollouts, weights = runs["plain"]
    keys = "prompt_ids", "token_ids", "mask", "reward", "branch", "sample", "group", "logprobs"
    assert max(rollout.get("branch", 0) for rollout in rollouts) >= 2 and len(rollouts) >= 16
    for name in ("again", "drafts"):
        others, other_weights = runs[name]
        for key in keys:
            assert [each.get(key) for each in others] == [each.get(key) for each in rollouts], (name, key)
        assert all(torch.equal(weights[key], value) for key, value in other_weights.items()), name
    assert sum(trace["num_accepted_tokens"] for trace in lines(folder / "drafts", "trace")) > 0


class Retokenising(Conversations):
    """Deliberately broken: it tokenizes earlier answers again."""

    def render(self, messages: Any, tools: Any = ()) -> Rendered:
        text = self._text(messages, tools)
        return Rendered(tuple(messages), text, encode_rendered(self._tokenizer, text))


@pytest.mark.parametrize("is_broken", [False, True])
def test_turns_are_one_sequence_of_sampled_ids(folder: Path, monkeypatch: pytest.MonkeyPatch, is_broken: bool) -> None:
    """A random model samples bytes that are no text, which a tokenizer would not give back."""
    if is_broken:
        monkeypatch.setattr(policy_backend, "Conversations", Retokenising)
    write_rows(folder, [{"prompt": f"say {letter}", "behaviour": "good"} for letter in "abcd"])
    command = json.dumps([sys.executable, str(TESTS / "hostile_agent.py")])
    trainer = make(folder, "run", *AGENT, f"task.command={command}", "train.groups_per_step=4")
    trainer.run()
    trainer.close()
    rollouts = lines(folder / "run", "rollouts")
    assert all(rollout["failure"] is None for rollout in rollouts)
    has_branches = any(rollout.get("branch", 0) for rollout in rollouts)
    assert has_branches is is_broken
    if not is_broken:
        assert len(rollouts) == 8 and all(rollout["num_turns"] == 2 for rollout in rollouts)


# ---- the coding agent of the documentation ----

PROGRAM = "print(sum(range(5)))"
CALL = json.dumps({"name": "run_python", "arguments": {"source": PROGRAM}})


def test_the_coding_agent_runs_programs() -> None:
    tokenizer = tokenizer_of("qwen2.5-coder")
    answers = [f"<tool_call>\n{CALL}\n</tool_call>", "It is 10.\n```python\ndef add(a, b):\n    return a + b\n```"]
    spoken = ScriptedPolicy(tokenizer, lambda ids: sampled(tokenizer, answers[len(spoken.calls)]))
    endpoint = Endpoint()
    agent = ProcessAgent(endpoint, ["python", "examples/agents/coder.py"], {}, {"prompt": "Write add(a, b)."})
    outcome = asyncio.run(asyncio.wait_for(agent.run(spoken), 60))
    endpoint.close()
    assert outcome.reward is None and outcome.messages[-1]["content"] == answers[1]
    result = next(message for message in outcome.messages if message["role"] == "tool")
    assert result["content"] == "10\n"
    (first, said), (second, _) = spoken.calls
    assert second[: len(first) + len(said)] == (*first, *said)


def test_the_documentation_has_the_coding_agent() -> None:
    page = (ROOT / "docs/how-to/agents.md").read_text()
    for name in ("coder.py", "coder.toml"):
        assert (ROOT / "examples/agents" / name).read_text() in page, name
    code = (ROOT / "examples/agents/coder.py").read_text().splitlines()
    settings = (ROOT / "examples/agents/coder.toml").read_text().splitlines()
    written = [line for line in [*code, *settings] if line.strip() and not line.startswith(("#", '"""'))]
    assert len(written) <= 45


@pytest.mark.parametrize("config", ["examples/agents/coder.toml", "configs/agent.toml"])
def test_the_examples_train(config: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps with a tiny model, as from the command line. A dry run starts the agent before."""
    monkeypatch.chdir(ROOT)
    write_model(folder / "large", max_positions=4096)
    small = (
        f"model.name={str(folder / 'large')!r}", "model.dtype=float64", "sampling.max_tokens=8", "train.num_steps=2",
        f"model.chat_template={str(TEMPLATES / 'qwen2.5-coder.jinja')!r}", "train.groups_per_step=2",
        "algorithm.num_generations=2", "train.tensorboard=false", "train.eval_every=0", "speculation.method=none",
    )  # fmt: skip
    run = folder / "run"
    for option in (["--dry-run"], ["--run", str(run)]):
        result = CliRunner().invoke(app, ["train", config, *small, *option], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        assert ("1 calls" in result.output) is (option == ["--dry-run"])
    assert len(lines(run, "metrics")) == 2
    rollouts = lines(run, "rollouts")
    assert len(rollouts) == 8 and all(rollout["failure"] is None for rollout in rollouts)
    assert load_config(run / "config.toml").tasks[0].section.kind == "agent"


# ---- many agents ----


@pytest.mark.parametrize(
    ("num", "minutes"), [(16, "0"), pytest.param(64, "10", marks=pytest.mark.soak)], ids=["one round", "ten minutes"]
)
def test_many_agents_do_not_wait_for_each_other(folder: Path, num: int, minutes: str) -> None:
    """Two turns each, with a tool that takes a while between them. A round that does not end is an error."""
    model = str(folder / "model") if minutes == "0" else "smollm2-135m"
    options = ["--agents", str(num), "--minutes", minutes, "--deadline-s", "240", "--out", str(folder / "out")]
    script = [sys.executable, str(ROOT / "benchmarks/agents/utilisation.py"), "--model", model]
    done = subprocess.run([*script, *options], capture_output=True, text=True, timeout=60 * float(minutes) + 400)
    assert done.returncode == 0, done.stderr[-2000:]
    rounds = done.stdout.splitlines()
    assert len(rounds) >= 1 + 2 * (minutes != "0")
    assert all(f"{num} agents" in line and f"{num} sequences, 0 failures" in line for line in rounds), rounds
