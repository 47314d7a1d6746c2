"""RayEngine with replicas that fail or die."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray_faulty_engines
import torch
from ray_processes import kill, processes
from tiny_run import settings, write_head

from paceline.build.engine import build_engine
from paceline.cluster.ray_cluster import RayCluster, plan
from paceline.config import Config
from paceline.engine.engine import LocalEngine
from paceline.model.head_files import head_state
from paceline.model.weights import checksum, hf_state, load
from paceline.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.cluster
ENGINES = ("working", "working", "flips_a_bit", "dies_in_a_broadcast")


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    return settings(folder, *write_head(folder), "cluster.kind=ray", f"cluster.num_engines={len(ENGINES)}")


@pytest.fixture(scope="module")
def actors(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """One for each of ENGINES."""
    placement_plan = plan(config.cluster, 0, 0)
    marker = tmp_path_factory.mktemp("marker") / "died"
    makes = [partial(getattr(ray_faulty_engines, name), config) for name in ENGINES]
    makes[3] = partial(makes[3], marker)
    with contextlib.closing(RayCluster(config.cluster, placement_plan)) as cluster:
        from paceline.cluster.ray_engine_actor import EngineActor

        placements = placement_plan.engines
        yield [cluster.actor(EngineActor, placements[i], makes[i], i) for i in range(len(ENGINES))]


Make = Callable[..., Any]


@pytest.fixture
def make(actors: list[Any], config: Config) -> Iterator[Make]:
    """make(0, 1, …) returns a RayEngine over these actors. Its attribute `notes` has the notes it wrote."""
    from paceline.cluster.ray_engine import RayEngine

    made = []

    def make_engine(*indices: int) -> RayEngine:
        notes: list[str] = []
        engine = RayEngine([actors[i] for i in indices], None, config.cluster, "gloo", notes.append)
        engine.notes = notes  # type: ignore[attr-defined]
        made.append(engine)
        return engine

    yield make_engine
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def local(config: Config) -> LocalEngine:
    return build_engine(config)


def weights(config: Config, scale: float = 1.01) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor * scale) for name, tensor in hf_state(load(config.model.name, torch.float64, "cpu"))]


def requests(num_problems: int = 4, samples: int = 3, max_tokens: int = 30) -> list[Request]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [
        Request(10 * i + j, tuple(f"say {chr(97 + i)}".encode()), sampling, 100 * i + j, f"problem {i}")
        for i in range(num_problems)
        for j in range(samples)
    ]


def generate(
    engine: Any, wanted: list[Request], before_step: Callable[[int], Any] = lambda n: None
) -> dict[int, Completion]:
    for request in wanted:
        engine.submit(request)
    done: dict[int, Completion] = {}
    for n in range(10_000):
        if len(done) == len(wanted):
            break
        before_step(n)
        for completion in engine.step():
            assert completion.request.request_id not in done, "finished twice"
            done[completion.request.request_id] = completion
    assert engine.step() == []
    return done


def tokens(done: dict[int, Completion]) -> dict[int, list[int]]:
    return {i: done[i].token_ids.tolist() for i in sorted(done)}


def test_same_tokens_as_one_engine(make: Make, local: LocalEngine, config: Config) -> None:
    engine, sent = make(0, 1), weights(config)
    receipt = engine.update_weights(sent, 3)
    assert receipt.checksum == checksum(sent) == local.update_weights(sent, 3).checksum
    assert (receipt.version, receipt.num_tensors) == (3, len(sent)) and engine.version == 3
    found, expected = generate(engine, requests()), generate(local, requests())
    assert tokens(found) == tokens(expected)
    for i, completion in found.items():
        assert np.allclose(completion.logprobs, expected[i].logprobs)
        assert set(completion.versions.tolist()) == {3}
    traces = engine.drain_trace()
    assert sum(t.num_emitted for t in traces) == sum(len(c.token_ids) for c in found.values())
    assert {t.engine for t in traces} == {0, 1} and engine.drain_trace() == []


def test_requests_of_a_problem_share_a_replica_and_all_replicas_have_work(make: Make) -> None:
    engine = make(0, 1)
    wanted = requests(8, 2)
    replicas: dict[str, set[int]] = {}
    for request in wanted:
        engine.submit(request)
    for replica in engine._replicas:
        for request in replica.requests.values():
            replicas.setdefault(request.problem or "", set()).add(replica.index)
    assert all(len(indices) == 1 for indices in replicas.values())
    assert sorted(len(replica.requests) for replica in engine._replicas) in ([8, 8], [6, 10])


def test_invalid_requests_are_rejected(make: Make) -> None:
    engine = make(0, 1)
    with pytest.raises(ValueError, match="request 1: token id 999 is not in the vocabulary"):
        engine.submit(Request(1, (5, 999)))
    request = requests()[0]
    engine.submit(request)
    with pytest.raises(ValueError, match="still running"):
        engine.submit(request)
    engine.abort(request.request_id)
    with pytest.raises(ValueError, match="not running"):
        engine.abort(request.request_id)
    assert len(generate(engine, requests())) == 12


def test_aborted_requests_are_not_returned(make: Make) -> None:
    engine = make(0, 1)
    wanted = requests(max_tokens=100)
    handles = [engine.submit(request) for request in wanted]
    for _ in range(2):
        assert engine.step() == []
    for request in wanted[::2]:
        engine.abort(request.request_id)
    for handle in handles[::2]:
        assert handle.completion is not None and handle.completion.finish_reason == "abort"
    left = {request.request_id for request in wanted[1::2]}
    while left:
        left -= {completion.request.request_id for completion in engine.step()}
    assert [handle.completion.finish_reason for handle in handles[1::2]] == ["length"] * 6


@pytest.mark.parametrize("busy", [True, False])
def test_killed_replica_is_recovered(make: Make, local: LocalEngine, config: Config, busy: bool) -> None:
    """Killed while it runs, or before its first call. It gets the weights of policy and head again and finishes."""
    engine, sent = make(0, 1), weights(config, 1.02)
    head = [(name, tensor * 0.5) for name, tensor in head_state(local.drafter.head)]
    engine.update_weights(sent, 7)
    engine.update_drafter(head, 5)
    local.update_weights(sent, 7)
    pids = [replica.info.pid for replica in engine._replicas]
    victim = pids.index(next(process for process in processes("EngineActor") if process in pids))
    action = {2 if busy else 0: lambda: kill("EngineActor", processes("EngineActor").index(pids[victim]))}
    found = generate(engine, requests(max_tokens=60), lambda n: action.pop(n, lambda: None)())
    assert tokens(found) == tokens(generate(local, requests(max_tokens=60)))
    assert engine.num_restarts == 1 and f"engine {victim} died" in engine.notes[0]
    traces = engine.drain_trace()
    assert {(t.engine, t.version, t.drafter_version) for t in traces} == {(0, 7, 5), (1, 7, 5)}
    assert engine.update_weights(sent, 8).checksum == checksum(sent)


def test_state_dict_has_a_part_per_replica(make: Make) -> None:
    engine = make(0, 1)
    generate(engine, requests())
    state_dict = engine.state_dict()
    parts = {"drafter", "policy", "acceptance", "lengths"}
    assert set(state_dict) == parts | {f"{part}-1" for part in parts}
    lengths = [state_dict[name]["lengths"] for name in ("lengths", "lengths-1")]
    assert sum(map(len, lengths)) == 12 and all(map(len, lengths))
    other = make(0, 1)
    assert len(other.state_dict()["lengths"]["lengths"]) == 0
    other.load_state_dict(state_dict)
    for name, state in other.state_dict().items():
        assert all(np.array_equal(state[key], state_dict[name][key]) for key in state)


def test_wrong_weights_are_detected(make: Make, config: Config) -> None:
    """The replicas' receipts differ. With one replica, its receipt differs from the checksum of the sent weights."""
    sent = weights(config)
    assert make(2).update_weights(sent, 1).checksum != checksum(sent)
    with pytest.raises(ValueError, match=r"hold different ones \(engine 0 [0-9a-f]{12}, engine 1 .* training stops"):
        make(0, 2).update_weights(sent, 1)


def test_replica_dies_during_a_broadcast(make: Make, local: LocalEngine, config: Config) -> None:
    """It has received some of the tensors. Neither the other replica nor the sender waits for the timeout: everything
    is sent again at once."""
    engine, sent = make(0, 3), weights(config, 1.03)
    assert config.cluster.sync_timeout_s == 60
    started = time.monotonic()
    assert engine.update_weights(sent, 9).checksum == checksum(sent)
    assert time.monotonic() - started < 45 and engine.num_restarts == 1
    local.update_weights(sent, 9)
    assert tokens(generate(engine, requests())) == tokens(generate(local, requests()))


def test_new_session_ends_the_old_one(make: Make) -> None:
    """A learner that was replaced can no longer use the engines."""
    first = make(0, 1)
    first.submit(requests()[0])
    make(0, 1)
    from paceline.cluster.ray_calls import get_result
    from paceline.cluster.ray_engine_actor import UnknownSession

    with pytest.raises(UnknownSession):
        get_result(first._replicas[0].actor.ping.remote(first._session))
