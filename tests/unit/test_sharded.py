"""A learner that several ranks share is the learner of one process: the same losses, norms, weights and checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import tiny_decoder
from tiny_run import SETTINGS, lines, settings

from paceline.build import build_adapter
from paceline.config import LearnerSection, load_config
from paceline.rl.batch import scored
from paceline.rl.checkpoint import Checkpoints
from paceline.rl.learner import Learner
from paceline.rl.packing import pack, shares
from paceline.rl.shards import Shards
from paceline.rl.world import World

from .test_learner import some_groups

TESTS = Path(__file__).parents[1]
# Losses and norms are sums of a few hundred float32 terms in another order; AdamW divides gradients by their size, so
# that rounding in the smallest of them shows in the weights.
CLOSE = {"float32": {"rel": 1e-5, "abs": 1e-5}, "float64": {"rel": 1e-12, "abs": 1e-12}}
WEIGHTS = {"float32": 2e-3, "float64": 1e-9}
FIGURES = ("losses", "norms", "entropies", "stats", "logprobs")
CISPO = {"name": "cispo"}  # whose loss speaks of log π, where others on-policy know but advantages
FLAVOURS: dict[str, dict[str, Any]] = {
    "float32": {"algorithm": CISPO},
    "float64": {"algorithm": CISPO, "dtype": "float64"},
    "reference, minibatches": {
        "algorithm": {"name": "cispo", "beta": 0.1},
        "learner": {"num_minibatches": 2, "num_iterations": 2},
        "dtype": "float64",
        "updates": [0, 3],
    },
    "lora, reference": {
        "algorithm": {"name": "cispo", "beta": 0.1},
        "learner": {"lora_rank": 3, "max_grad_norm": 100.0},
        "dtype": "float64",
        "updates": [0, 3],
    },
    "untied, qk norms, biases, recomputed": {
        "algorithm": CISPO,
        "learner": {"activation_checkpointing": True, "weight_decay": 0.1},
        "model": {"family": "qwen3", "qk_norm": True, "tie_embeddings": False, "qkv_bias": True},
        "dtype": "float64",
        "updates": [0, 3],
    },
}
Drive = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def drive() -> Iterator[Drive]:
    """drive(size=…, …) -> what rank 0 found; see rank_driver.py."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), "COLUMNS": "200"}
    driver = subprocess.Popen(
        [sys.executable, TESTS / "rank_driver.py"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1,
    )  # fmt: skip
    assert driver.stdin is not None and driver.stdout is not None

    def call(**job: Any) -> dict[str, Any]:
        print(json.dumps(job), file=driver.stdin, flush=True)
        return json.loads(driver.stdout.readline())

    yield call
    driver.stdin.close()
    driver.wait(10)


def compare(one: dict[str, Any], other: dict[str, Any], dtype: str) -> None:
    assert one["version"] == other["version"]
    for key in FIGURES:
        assert len(one[key]) == len(other[key]) > 0
        for a, b in zip(one[key], other[key], strict=True):
            assert a == pytest.approx(b, **CLOSE[dtype]), key


# ---- updates ----


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_two_ranks_are_one(flavour: str, drive: Drive, tmp_path: Path) -> None:
    job = FLAVOURS[flavour]
    found = [drive(size=size, out=str(tmp_path / str(size)), **job) for size in (1, 2)]
    assert [f["status"] for f in found] == [[0], [0, 0]], found[1]["said"]
    one, two = found
    dtype = job.get("dtype", "float32")
    compare(two, one, dtype)
    assert max(map(abs, one["losses"])) > 0.1 and min(one["norms"]) > 0.1
    assert 0.4 * one["all"] < two["held"] < 0.6 * one["all"] == 0.6 * two["all"]  # each holds about half
    mine, theirs = (load_file(tmp_path / name) for name in ("2", "1"))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=WEIGHTS[dtype] * (10 if name == "logprobs" else 1))


def test_two_ranks_share_float32_masters_of_bfloat16(drive: Drive, tmp_path: Path) -> None:
    """Gradients are rounded to 8 bits where one process has a microbatch, and where two have summed theirs: alike, no
    more. What is saved are the masters."""
    job = {"dtype": "bfloat16", "algorithm": CISPO, "updates": [0, 3], "learner": {"learning_rate": 1e-3}}
    one, two = (drive(size=size, save=str(tmp_path / str(size)), **job) for size in (1, 2))
    assert two["status"] == [0, 0], two["said"]
    for key in ("losses", "norms", "entropies"):
        assert two[key] == pytest.approx(one[key], rel=0.02, abs=0.01)
    with Shards(tmp_path / "2") as mine, Shards(tmp_path / "1") as theirs:
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - {"version"}:
            assert mine[name].dtype == theirs[name].dtype == torch.float32
        weight = "parameter.layers.1.down.weight"
        assert not torch.equal(mine[weight], mine[weight].bfloat16().float())
        start = tiny_decoder(torch.bfloat16).layers[1].down.weight
        assert start is not None
        moved, apart = (mine[weight] - start.float()).abs().mean(), (mine[weight] - theirs[weight]).abs().mean()
        assert apart < 0.2 * moved and moved > 1e-3


def test_two_ranks_share_a_model_of_transformers(drive: Drive, checkpoint: Callable[..., Path]) -> None:
    """Tied, so that a parameter of two names is divided once; in float32, for transformers norms in it."""
    job = {"directory": str(checkpoint("llama")), "hf": True, "updates": [0, 3], "algorithm": CISPO}
    job["learner"] = {"activation_checkpointing": True}
    one, two = (drive(size=size, **job) for size in (1, 2))
    assert two["status"] == [0, 0], two["said"]
    compare(two, one, "float32")


def test_a_rank_without_rollouts_takes_part(drive: Drive) -> None:
    job = {"dtype": "float64", "algorithm": CISPO, "num_groups": 1, "updates": [0, 3]}
    one, three = drive(size=1, **job), drive(size=3, learner={"tokens_per_microbatch": 1000}, **job)
    assert three["status"] == [0, 0, 0], three["said"]
    compare(three, one, "float64")
    groups = some_groups(0, 1)
    groups[0].rollouts = groups[0].rollouts[:1]
    assert shares(scored(groups), 3, 1000).count([(0, 0)]) == 2


@pytest.mark.parametrize("twin, key", [("averaged", "norms"), ("dropped", "losses")])
def test_a_broken_twin_is_caught(twin: str, key: str, drive: Drive) -> None:
    one, two = (drive(size=size, algorithm=CISPO, updates=[0, 3], twin=twin if size > 1 else None) for size in (1, 2))
    assert two["status"] == [0, 0], two["said"]
    assert all(a != pytest.approx(b, rel=1e-2) for a, b in zip(one[key], two[key], strict=True))
    with pytest.raises(AssertionError):
        compare(two, one, "float32")


@pytest.mark.parametrize("num", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("max_tokens", [1, 57, 1000])
def test_shares_are_everything_once_and_about_even(num: int, max_tokens: int) -> None:
    rollouts = scored(some_groups(num_groups=6))
    found = shares(rollouts, num, max_tokens)
    assert len(found) == num and len({len(cuts) for cuts in found}) == 1
    taken = [i for cuts in found for start, end in cuts for i in range(start, end)]
    assert taken == list(range(len(rollouts)))
    own = [sum(len(pack(rollouts[start:end])) for start, end in cuts) for cuts in found]
    longest = max(len(r.prompt_ids) + len(r.token_ids) for r in rollouts)
    if max_tokens == 1000:
        assert max(own) <= len(pack(rollouts)) / num + 2 * longest


# ---- checkpoints ----


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 3), (2, 2)])
def test_a_checkpoint_goes_on_with_any_number_of_ranks(before: int, after: int, drive: Drive, tmp_path: Path) -> None:
    job = {"dtype": "float64", "algorithm": CISPO, "learner": {"weight_decay": 0.1}}
    saved = tmp_path / "learner"
    first = drive(size=before, updates=[0, 2], save=str(saved), **job)
    second = drive(size=after, updates=[2, 4], load=str(saved), out=str(tmp_path / "out"), **job)
    whole = drive(size=before, updates=[0, 4], out=str(tmp_path / "whole"), **job)
    assert [first["status"], second["status"]] == [[0] * before, [0] * after], (first["said"], second["said"])
    assert sorted(first["files"]) == [f"shard-{i + 1:05d}-of-{before:05d}.safetensors" for i in range(before)]
    parts = {key: first[key] + second[key] for key in FIGURES}
    compare(parts | {"version": second["version"]}, whole, "float64")
    mine, theirs = (load_file(tmp_path / name) for name in ("out", "whole"))
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=0 if before == after else 1e-9)


def test_torch_reads_what_ranks_wrote_without_a_pickle(drive: Drive, tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    drive(size=2, updates=[0, 2], save=str(tmp_path / "two"), algorithm=CISPO)
    assert {path.suffix for path in (tmp_path / "two").iterdir()} == {".safetensors"}
    with Shards(tmp_path / "two") as state:
        found = {name: torch.full_like(tensor, 7) for name, tensor in state.items() if tensor.ndim}
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "two")), no_dist=True)
        assert len(found) > 30 and all(torch.equal(tensor, state[name]) for name, tensor in found.items())
    it = Learner(tiny_decoder(torch.float32), LearnerSection(), num_steps=5)
    it.load(tmp_path / "two")
    assert it.version == 2
    (tmp_path / "two" / "shard-00002-of-00002.safetensors").unlink()  # and half a state is none
    with pytest.raises(ValueError, match="learner state"):
        it.load(tmp_path / "two")


def test_a_full_disk_of_one_rank_is_everybodys(drive: Drive, tmp_path: Path) -> None:
    found = drive(size=2, updates=[0, 1], save=str(tmp_path / "two"), full=True)
    assert found["status"] == [1, 0] and "rank 1: No space left on device" in found["said"][0]


# ---- what is refused, who dies ----


def test_what_ranks_can_not_share_is_refused(drive: Drive, tmp_path: Path) -> None:
    found = drive(size=2, learner={"optimizer": "muon"})
    assert found["status"] == [1, 1] and 'learner.optimizer = "muon"' in found["said"][0]
    it = Learner(tiny_decoder(), LearnerSection(), num_steps=5)
    it.world = World(0, 2)
    config = load_config(None, ["draft.online=every", "speculation.method=eagle3"])
    with pytest.raises(ValueError, match=r'draft.online = "every".*2 ranks share it'):
        build_adapter(config, it)


def test_an_update_that_fails_is_not_made_anywhere(drive: Drive) -> None:
    job = {"dtype": "float64", "algorithm": CISPO, "updates": [0, 3], "bad": 1}
    one, two = (drive(size=size, **job) for size in (1, 2))
    assert two["status"] == [0, 0] and two["said"][1] == "", two["said"]
    assert all("step 1: the gradient's norm is nan" in found["said"][0] for found in (one, two))
    assert len(two["losses"]) == two["version"] == 2
    assert two["listens"] == ["0100007F"] or sys.platform != "linux"  # to this machine alone: 127.0.0.1
    compare(two, one, "float64")


def test_a_rank_that_dies_ends_the_others(drive: Drive) -> None:
    found = drive(size=3, algorithm=CISPO, dies=2)
    assert found["status"][:2] == [1, -9]
    assert "ConnectionError: one of the 3 ranks that share the learner is gone" in found["said"][0]
    assert "--resume" in found["said"][0]


# ---- runs ----

TIMES = ("stages", "tokens_per_s", "draft_s", "memory_gib")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    settings(folder)
    return folder


@pytest.fixture(scope="module")
def words(folder: Path) -> list[str]:
    where = [f"model.name={str(folder / 'model')!r}", f"task.name={str(folder / 'task.jsonl')!r}"]
    return ["train", *where, *SETTINGS, "algorithm.beta=0.05", "train.checkpoint_every=2", "train.eval_every=2"]


@pytest.fixture(scope="module")
def alone(folder: Path, words: list[str], drive: Drive) -> list[dict[str, Any]]:
    """The metrics of the run in one process."""
    end = drive(size=1, words=[*words, "--run", str(folder / "alone")])
    assert end["status"] == [0], end["said"]
    return metrics(folder / "alone")


def metrics(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in m.items() if key not in TIMES} for m in lines(run, "metrics")]


def same_run(run: Path, alone: list[dict[str, Any]]) -> None:
    found = metrics(run)
    assert len(found) == len(alone) == 4
    for mine, theirs in zip(found, alone, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            if isinstance(value, float):
                assert mine[key] == pytest.approx(value, rel=1e-9, abs=1e-9), key
            elif not isinstance(value, dict):
                assert mine[key] == value, key
    ours, others = lines(run, "rollouts"), lines(run.parent / "alone", "rollouts")
    assert [r["token_ids"] for r in ours] == [r["token_ids"] for r in others]


@pytest.mark.slow
def test_torchrun(folder: Path, words: list[str], alone: list[dict[str, Any]]) -> None:
    """The real thing; the others below are started as it would."""
    run = folder / "two"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), "COLUMNS": "200"}
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--", "paceline"]
    done = subprocess.run(
        [sys.executable, *start, *words, "--run", str(run)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step 4/4") == 1 and "error" not in done.stderr.lower()
    same_run(run, alone)


def test_a_run_whose_rank_dies_is_resumed_by_any_number(
    folder: Path, words: list[str], alone: list[dict[str, Any]], drive: Drive, tmp_path: Path
) -> None:
    run = folder / "killed"
    end = drive(size=2, dies=3, words=[*words, "--run", str(run)])
    assert end["status"][0] == 2 and end["status"][1] == -9
    assert "error: one of the 2 ranks that share the learner is gone" in end["said"][0]
    last = Checkpoints(run / "checkpoints", 2).latest()
    assert last is not None and last.step == 2 and len(list((last.path / "learner").iterdir())) == 2
    end = drive(size=1, words=["train", "--resume", str(run)])
    assert end["status"] == [0], end["said"]
    same_run(run, alone)
    end = drive(size=1, words=["export", str(run), str(tmp_path / "exported")])
    assert end["status"] == [0] and (tmp_path / "exported" / "model.safetensors").exists(), end["said"]


def test_followers_are_silent_and_end_with_the_first(
    folder: Path, words: list[str], alone: list[dict[str, Any]], drive: Drive
) -> None:
    run = folder / "stopped"
    end = drive(size=2, words=[*words, "--run", str(run), "train.num_steps=2"])
    assert end["status"] == [0, 0] and end["said"][1] == "", end["said"]
    end = drive(size=3, words=["train", "--resume", str(run), "train.num_steps=4"])
    assert end["status"] == [0, 0, 0], end["said"]
    same_run(run, alone)
    end = drive(size=2, words=[*words, "--run", str(run)])  # refused by the first: the folder is there
    assert end["status"] == [2, 0] and end["said"][1] == "", end["said"]
