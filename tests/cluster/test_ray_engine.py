"""Several engines behind one, in processes that go wrong and die."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray_twins
import torch
from ray_processes import kill, processes
from tiny_run import settings, write_head

from paceline.build import build_engine
from paceline.cluster.ray_cluster import RayCluster, plan
from paceline.config import Config
from paceline.engine.engine import LocalEngine
from paceline.model.head_files import head_state
from paceline.model.weights import checksum, hf_state, load
from paceline.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.cluster
MAKES = ("good", "good", "flips_a_bit", "dies_in_a_broadcast")


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    return settings(folder, *write_head(folder), "cluster.kind=ray", f"cluster.num_engines={len(MAKES)}")


@pytest.fixture(scope="module")
def actors(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """One for each of MAKES."""
    places = plan(config.cluster, 0, 0)
    once = tmp_path_factory.mktemp("dead") / "once"
    makes = [partial(getattr(ray_twins, name), config) for name in MAKES]
    makes[3] = partial(makes[3], once)
    with contextlib.closing(RayCluster(config.cluster, places)) as cluster:
        from paceline.cluster.ray_engine_actor import EngineActor

        yield [cluster.actor(EngineActor, places.engines[i], makes[i], i) for i in range(len(MAKES))]


Make = Callable[..., Any]


@pytest.fixture
def make(actors: list[Any], config: Config) -> Iterator[Make]:
    """make(0, 1, …) -> a RayEngine over these, and the notes it wrote are its `notes`."""
    from paceline.cluster.ray_engine import RayEngine

    made = []

    def call(*numbers: int) -> RayEngine:
        notes: list[str] = []
        engine = RayEngine([actors[i] for i in numbers], None, config.cluster, "gloo", notes.append)
        engine.notes = notes  # type: ignore[attr-defined]
        made.append(engine)
        return engine

    yield call
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


def finish(engine: Any, wanted: list[Request], between: Callable[[int], Any] = lambda n: None) -> dict[int, Completion]:
    for request in wanted:
        engine.submit(request)
    done: dict[int, Completion] = {}
    for n in range(10_000):
        if len(done) == len(wanted):
            break
        between(n)
        for completion in engine.step():
            assert completion.request.request_id not in done, "twice"
            done[completion.request.request_id] = completion
    assert engine.step() == []
    return done


def tokens(done: dict[int, Completion]) -> dict[int, list[int]]:
    return {i: done[i].token_ids.tolist() for i in sorted(done)}


def test_the_same_tokens_as_one_engine(make: Make, local: LocalEngine, config: Config) -> None:
    engine, sent = make(0, 1), weights(config)
    receipt = engine.update_weights(sent, 3)
    assert receipt.checksum == checksum(sent) == local.update_weights(sent, 3).checksum
    assert (receipt.version, receipt.num_tensors) == (3, len(sent)) and engine.version == 3
    found, expected = finish(engine, requests()), finish(local, requests())
    assert tokens(found) == tokens(expected)
    for i, completion in found.items():
        assert np.allclose(completion.logprobs, expected[i].logprobs)
        assert set(completion.versions.tolist()) == {3}
    traces = engine.drain_trace()
    assert sum(t.num_emitted for t in traces) == sum(len(c.token_ids) for c in found.values())
    assert {t.engine for t in traces} == {0, 1} and engine.drain_trace() == []


def test_siblings_stay_together_and_all_have_work(make: Make) -> None:
    engine = make(0, 1)
    wanted = requests(8, 2)
    where: dict[str, set[int]] = {}
    for request in wanted:
        engine.submit(request)
    for seat in engine._seats:
        for request in seat.live.values():
            where.setdefault(request.problem or "", set()).add(seat.number)
    assert all(len(numbers) == 1 for numbers in where.values())
    assert sorted(len(seat.live) for seat in engine._seats) in ([8, 8], [6, 10])


def test_what_an_engine_refuses(make: Make) -> None:
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
    assert len(finish(engine, requests())) == 12


def test_aborted_requests_do_not_come_back(make: Make) -> None:
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
def test_an_engine_is_killed(make: Make, local: LocalEngine, config: Config, busy: bool) -> None:
    """While it works, or before it is asked anything: it has the weights of policy and head, and does its part."""
    engine, sent = make(0, 1), weights(config, 1.02)
    head = [(name, tensor * 0.5) for name, tensor in head_state(local.drafter.head)]
    engine.update_weights(sent, 7)
    engine.update_drafter(head, 5)
    local.update_weights(sent, 7)
    pids = [seat.greeting.process for seat in engine._seats]
    victim = pids.index(next(process for process in processes("EngineActor") if process in pids))
    deed = {2 if busy else 0: lambda: kill("EngineActor", processes("EngineActor").index(pids[victim]))}
    found = finish(engine, requests(max_tokens=60), lambda n: deed.pop(n, lambda: None)())
    assert tokens(found) == tokens(finish(local, requests(max_tokens=60)))
    assert engine.num_restarts == 1 and f"engine {victim} died" in engine.notes[0]
    traces = engine.drain_trace()
    assert {(t.engine, t.version, t.drafter_version) for t in traces} == {(0, 7, 5), (1, 7, 5)}
    assert engine.update_weights(sent, 8).checksum == checksum(sent)


def test_what_was_learned_goes_where_it_belongs(make: Make) -> None:
    engine = make(0, 1)
    finish(engine, requests())
    learned = engine.learned()
    parts = {"drafter", "policy", "lengths"}
    assert set(learned) == parts | {f"{part}-1" for part in parts}
    lengths = [learned[name]["lengths"] for name in ("lengths", "lengths-1")]
    assert sum(map(len, lengths)) == 12 and all(map(len, lengths))
    other = make(0, 1)
    assert len(other.learned()["lengths"]["lengths"]) == 0
    other.teach(learned)
    for name, state in other.learned().items():
        assert all(np.array_equal(state[key], learned[name][key]) for key in state)


def test_wrong_bytes_are_noticed(make: Make, config: Config) -> None:
    """By the engines' disagreement; where there is but one, its receipt is not what was sent."""
    sent = weights(config)
    assert make(2).update_weights(sent, 1).checksum != checksum(sent)
    with pytest.raises(ValueError, match=r"hold different ones \(engine 0 [0-9a-f]{12}, engine 1 .* training stops"):
        make(0, 2).update_weights(sent, 1)


def test_a_death_within_a_broadcast(make: Make, local: LocalEngine, config: Config) -> None:
    """It has some tensors and not the end. The other engine does not wait for that, nor does the sender: all is sent
    again, long before the timeout."""
    engine, sent = make(0, 3), weights(config, 1.03)
    assert config.cluster.sync_timeout_s == 60
    started = time.monotonic()
    assert engine.update_weights(sent, 9).checksum == checksum(sent)
    assert time.monotonic() - started < 45 and engine.num_restarts == 1
    local.update_weights(sent, 9)
    assert tokens(finish(engine, requests())) == tokens(finish(local, requests()))


def test_a_session_ends_when_another_begins(make: Make) -> None:
    """A learner that was thought dead can't meddle: it would have to take the engines back, and is not let."""
    first = make(0, 1)
    first.submit(requests()[0])
    make(0, 1)
    from paceline.cluster.ray_calls import answer
    from paceline.cluster.ray_engine_actor import Stranger

    with pytest.raises(Stranger):
        answer(first._seats[0].actor.ping.remote(first._session))
