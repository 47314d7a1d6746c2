"""Training runs of agents with concurrent calls, branches and deterministic tools: speculation changes nothing, runs
repeat, and resumed runs continue bit for bit."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import lines, make, outcome, policy

from paceline.rl.trainer import Trainer
from paceline.tasks.agent import Outcome, Policy

KEYS = (
    "step", "group", "sample", "branch", "prompt_ids", "token_ids", "mask", "reward", "advantage", "finish_reason",
    "turn_lengths", "turn_rewards",
)  # fmt: skip
SETTINGS = ('reward.functions=["env"]', "train.num_steps=8", "sampling.max_tokens=20", "algorithm.turn_rewards=to_go")


class Team:
    """Two workers at a time, each with a tool between its two turns; then a summary, which is a branch. Tools take
    random time: that must not matter."""

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt

    async def run(self, policy: Policy) -> Outcome:
        rewards: dict[int, float] = {}

        async def turn(said: str) -> str:
            completion = await policy.generate(list(said.encode()), max_tokens=8)
            new_ids = completion.token_ids.tolist()
            rewards[completion.request.request_id] = max(map(new_ids.count, new_ids))  # repetitions can be drafted
            ids = [*said.encode(), *completion.token_ids.tolist()]
            return bytes(i for i in ids if i < 128).decode()

        async def worker(name: str) -> str:
            first = await turn(f"{self.prompt} {name}:")
            await asyncio.sleep(0.001 * (id(first) % 5))
            return await turn(f"{first}[{tool(first)}]")

        one, two = await asyncio.gather(worker("x"), worker("x"))
        await turn(f"{tool(one)}+{tool(two)}=")
        return Outcome(call_rewards=rewards)


def tool(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:3]


def with_agents(trainer: Trainer) -> Trainer:
    for problems in (trainer.task.train, trainer.task.held_out):
        problems[:] = [replace(p, make_agent=lambda p=p: Team(str(p.prompt)), timeout_s=120.0) for p in problems]
    return trainer


def finish(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert trainer.run()["finished"]
    weights = policy(trainer)
    trainer.close()
    return weights


def rollouts(run: Path) -> list[list[Any]]:
    return [[record.get(key) for key in KEYS] for record in lines(run, "rollouts")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agents")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, torch.Tensor]:
    return finish(with_agents(make(folder, "plain", *SETTINGS)))


def test_branches_are_recorded(folder: Path, plain: Any) -> None:
    records, metrics = lines(folder / "plain", "rollouts"), lines(folder / "plain", "metrics")
    branches = sum(record.get("branch", 0) > 0 for record in records)
    assert branches >= 8 * 2 * 4, "the summary at least"
    assert [m["num_samples"] for m in metrics] == [8] * 8 == [m["num_rollouts_logged"] for m in metrics]
    assert sum(m["num_branches"] for m in metrics) == branches
    assert any(record["advantage"] != 0 for record in records)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_speculation_changes_nothing(folder: Path, plain: dict[str, torch.Tensor], method: str) -> None:
    trainer = make(folder, method, *SETTINGS, f"speculation.method={method}", "speculation.prompt_lookup_min=1")
    weights = finish(with_agents(trainer))
    assert sum(m["num_accepted_tokens"] for m in lines(folder / method, "metrics")) > 0
    assert rollouts(folder / method) == rollouts(folder / "plain")
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.items())


def test_another_seed_gives_another_run(folder: Path, plain: dict[str, torch.Tensor]) -> None:
    """Otherwise the test above would compare too little."""
    weights = finish(with_agents(make(folder, "seed", *SETTINGS, "train.seed=1")))
    assert rollouts(folder / "seed") != rollouts(folder / "plain")
    assert not all(torch.equal(weights[name], tensor) for name, tensor in plain.items())


def test_a_resumed_run_continues_bit_for_bit(folder: Path, plain: dict[str, torch.Tensor]) -> None:
    finish(with_agents(make(folder, "resumed", *SETTINGS, "train.num_steps=3")))
    weights = finish(with_agents(make(folder, "resumed", *SETTINGS, resume=True)))
    assert rollouts(folder / "resumed") == rollouts(folder / "plain")
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.items())
    learner = [
        {name: sha for name, sha in outcome(folder / run)["files"].items() if name.startswith("learner")}
        for run in ("resumed", "plain")
    ]
    assert learner[0] == learner[1] != {}, "not the length model, which sees completions in the order of time"


@pytest.mark.parametrize("inflight", ["drain", "keep", "recompute"])
def test_asynchronous_runs(folder: Path, inflight: str) -> None:
    """Batches of earlier versions are pending in the checkpoint when the first half ends. With "drain" runs repeat."""
    settings = (
        *SETTINGS, "train.max_staleness=2", f"train.inflight={inflight}", "speculation.method=suffix",
        "algorithm.correction=none",  # with one, weights agree up to rounding
    )  # fmt: skip
    weights = finish(with_agents(make(folder, inflight, *settings)))
    metrics, records = lines(folder / inflight, "metrics"), lines(folder / inflight, "rollouts")
    assert [m["num_samples"] for m in metrics] == [8] * 8 and max(m["staleness_max"] for m in metrics) <= 2
    assert {r["finish_reason"] for r in records} <= {"stop", "length", "budget"}
    assert all(r["failure"] is None for r in records)
    if inflight == "drain":
        finish(with_agents(make(folder, "drain again", *settings, "train.num_steps=3")))
        again = finish(with_agents(make(folder, "drain again", *settings, resume=True)))
        assert rollouts(folder / "drain again") == rollouts(folder / "drain")
        assert all(torch.equal(weights[name], tensor) for name, tensor in again.items())
