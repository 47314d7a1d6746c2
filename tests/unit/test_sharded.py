"""A learner of several ranks equals a learner of one process: the same losses, norms, weights and checkpoints."""

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

from paceline.build.config import load_config
from paceline.build.run import build_online_head_trainer
from paceline.config import LearnerSection
from paceline.model.decoder import Decoder
from paceline.model.weights import read_config
from paceline.rl.batch import scored
from paceline.rl.checkpoint import Checkpoints
from paceline.rl.learner import Learner
from paceline.rl.packing import microbatches, microbatches_per_rank, pack
from paceline.rl.shards import Shards
from paceline.rl.stored_policy import StoredPolicy
from paceline.rl.worker_group import WorkerGroup

from .test_learner import some_groups

TESTS = Path(__file__).parents[1]
# Losses and norms sum a few hundred float32 terms in another order. AdamW divides gradients by their size, so rounding
# of the smallest gradients is visible in the weights. A gradient's norm differed by 1.2e-5 of itself on an AMD EPYC, by
# less elsewhere.
CLOSE = {"float32": {"rel": 5e-5, "abs": 1e-5}, "float64": {"rel": 1e-12, "abs": 1e-12}}
WEIGHTS = {"float32": 2e-3, "float64": 1e-9}
FIGURES = ("losses", "norms", "entropies", "stats", "logprobs")
SAME_CUTS = 2  # seed of rollouts that one process cuts into the microbatches of two ranks
CISPO = {"name": "cispo"}  # on-policy, its loss depends on the logprobs; those of the others only on the advantages
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
    """drive(size=…, …) -> the result of rank 0; see rank_driver.py."""
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
def test_two_ranks_equal_one(flavour: str, drive: Drive, tmp_path: Path) -> None:
    job = FLAVOURS[flavour]
    found = [drive(size=size, out=str(tmp_path / str(size)), **job) for size in (1, 2)]
    assert [f["status"] for f in found] == [[0], [0, 0]], found[1]["output"]
    one, two = found
    dtype = job.get("dtype", "float32")
    compare(two, one, dtype)
    assert max(map(abs, one["losses"])) > 0.1 and min(one["norms"]) > 0.1
    assert 0.4 * one["all"] < two["held"] < 0.6 * one["all"] == 0.6 * two["all"]  # each holds about half
    mine, theirs = (load_file(tmp_path / name) for name in ("2", "1"))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=WEIGHTS[dtype] * (10 if name == "logprobs" else 1))


@pytest.mark.parametrize("lora_rank", [0, 3])
@pytest.mark.parametrize("broken", [None, "rounded"])
def test_the_gradients_of_bfloat16_ranks_are_summed_in_float32(
    broken: str | None, lora_rank: int, drive: Drive, tmp_path: Path
) -> None:
    """Each of two ranks computes one microbatch. A single process that computes the same two has the same bits: in
    float32 a sum of two terms does not depend on their order. A large eps keeps AdamW's step linear in the gradient."""
    rollouts = scored(some_groups(SAME_CUTS))
    parts = microbatches_per_rank(rollouts, 2, 1000)
    (_, middle), max_tokens = parts[0][0], max(len(pack(rollouts[start:end])) for ((start, end),) in parts)
    assert list(microbatches(rollouts, max_tokens)) == [(0, middle), (middle, len(rollouts))]
    settings = {"tokens_per_microbatch": max_tokens, "eps": 1.0, "max_grad_norm": 1e9, "lora_rank": lora_rank}
    job = {"dtype": "bfloat16", "algorithm": CISPO, "updates": [SAME_CUTS, SAME_CUTS + 1], "learner": settings}
    job |= {"num_groups": 3}
    one = drive(size=1, save=str(tmp_path / "1"), out=str(tmp_path / "weights-1"), **job)
    two = drive(size=2, save=str(tmp_path / "2"), out=str(tmp_path / "weights-2"), broken=broken, **job)
    assert two["status"] == [0, 0], two["output"]
    assert two["losses"] == one["losses"] and two["norms"][0] > 0.1
    assert two["dtype"] == "bfloat16", "attention is chosen by the dtype of the computation"
    with Shards(tmp_path / "2") as mine, Shards(tmp_path / "1") as theirs:
        assert mine.keys() == theirs.keys()
        is_same = all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    assert is_same == (broken is None)
    found, expected = load_file(tmp_path / "weights-2"), load_file(tmp_path / "weights-1")
    assert found.keys() == expected.keys()
    assert {tensor.dtype for name, tensor in found.items() if name != "logprobs"} == {torch.bfloat16}
    assert broken or all(torch.equal(found[name], tensor) for name, tensor in expected.items() if name != "logprobs")


def test_two_ranks_shard_float32_parameters_of_a_bfloat16_model(drive: Drive, tmp_path: Path) -> None:
    """The results are only similar: each microbatch's gradients have 16 bits. The float32 parameters are saved."""
    job = {"dtype": "bfloat16", "algorithm": CISPO, "updates": [0, 3], "learner": {"learning_rate": 1e-3}}
    one, two = (drive(size=size, save=str(tmp_path / str(size)), **job) for size in (1, 2))
    assert two["status"] == [0, 0], two["output"]
    for key in ("losses", "norms", "entropies"):
        assert two[key] == pytest.approx(one[key], rel=0.02, abs=0.01)
    with Shards(tmp_path / "2") as mine, Shards(tmp_path / "1") as theirs:
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - {"version", "num_skipped_in_a_row"}:
            assert mine[name].dtype == theirs[name].dtype == torch.float32
        weight = "parameter.layers.1.down.weight"
        assert not torch.equal(mine[weight], mine[weight].bfloat16().float())
        start = tiny_decoder(torch.bfloat16).layers[1].down.weight
        assert start is not None
        moved, apart = (mine[weight] - start.float()).abs().mean(), (mine[weight] - theirs[weight]).abs().mean()
        assert apart < 0.2 * moved and moved > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_shard_a_transformers_model(drive: Drive, checkpoint: Callable[..., Path], dtype: str) -> None:
    """With tied embeddings: a parameter with two names is sharded once."""
    job = {"directory": str(checkpoint("llama")), "hf": True, "updates": [0, 3], "algorithm": CISPO, "dtype": dtype}
    job["learner"] = {"activation_checkpointing": True}
    one, two = (drive(size=size, **job) for size in (1, 2))
    assert two["status"] == [0, 0], two["output"]
    if dtype == "float32":  # as transformers computes norms
        compare(two, one, "float32")
    for key in ("losses", "norms", "entropies"):
        assert two[key] == pytest.approx(one[key], rel=0.02, abs=0.01)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_policy_in_a_checkpoint_of_two_ranks(
    rank: int, drive: Drive, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Read without a learner, it has the same bits as the ranks' weights and adapters, merged or not."""
    source, section = checkpoint("llama", tie=False), {"lora_rank": rank}
    job = {"directory": str(source), "updates": [0, 2], "algorithm": CISPO, "learner": section}
    found = drive(size=2, save=str(tmp_path / "state"), out=str(tmp_path / "out"), **job)
    assert found["status"] == [0, 0], found["output"]
    assert len(list((tmp_path / "state").iterdir())) == 2
    expected = {name: tensor for name, tensor in load_file(tmp_path / "out").items() if name != "logprobs"}
    with torch.device("meta"):
        decoder = Decoder(read_config(source))
    with StoredPolicy(tmp_path / "state", source, decoder, LearnerSection(**section), torch.float32) as policy:
        weights = dict(policy.weights(torch.float32)) | (dict(policy.adapters(torch.float32)) if rank else {})
    assert any("lora_B" in name and tensor.any() for name, tensor in expected.items()) == (rank > 0)
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], x) for name, x in expected.items())


def test_a_rank_without_rollouts(drive: Drive) -> None:
    job = {"dtype": "float64", "algorithm": CISPO, "num_groups": 1, "updates": [0, 3]}
    one, three = drive(size=1, **job), drive(size=3, learner={"tokens_per_microbatch": 1000}, **job)
    assert three["status"] == [0, 0, 0], three["output"]
    compare(three, one, "float64")
    groups = some_groups(0, 1)
    groups[0].rollouts = groups[0].rollouts[:1]
    assert microbatches_per_rank(scored(groups), 3, 1000).count([(0, 0)]) == 2


@pytest.mark.parametrize("broken, key", [("averaged", "norms"), ("dropped", "losses")])
def test_a_broken_implementation_is_caught(broken: str, key: str, drive: Drive) -> None:
    job = {"algorithm": CISPO, "updates": [0, 3]}
    one, two = drive(size=1, **job), drive(size=2, broken=broken, **job)
    assert two["status"] == [0, 0], two["output"]
    assert all(a != pytest.approx(b, rel=1e-2) for a, b in zip(one[key], two[key], strict=True))
    with pytest.raises(AssertionError):
        compare(two, one, "float32")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("num", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("max_tokens", [1, 57, 1000])
def test_microbatches_per_rank_are_complete_and_balanced(num: int, max_tokens: int, padded: bool) -> None:
    rollouts = scored(some_groups(num_groups=6))
    found = microbatches_per_rank(rollouts, num, max_tokens, padded)
    assert len(found) == num and len({len(cuts) for cuts in found}) == 1
    taken = [i for cuts in found for start, end in cuts for i in range(start, end)]
    assert taken == list(range(len(rollouts)))
    lengths = [len(r.prompt_ids) + len(r.token_ids) for r in rollouts]
    if padded:
        own, whole = [sum(lengths[i] for start, end in cuts for i in range(start, end)) for cuts in found], sum(lengths)
    else:
        own = [sum(len(pack(rollouts[start:end])) for start, end in cuts) for cuts in found]
        whole = len(pack(rollouts))
    if max_tokens == 1000:
        assert max(own) <= whole / num + 2 * max(lengths)


# ---- checkpoints ----


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 3), (2, 2)])
def test_any_number_of_ranks_can_load_a_checkpoint(before: int, after: int, drive: Drive, tmp_path: Path) -> None:
    job = {"dtype": "float64", "algorithm": CISPO, "learner": {"weight_decay": 0.1}}
    saved = tmp_path / "learner"
    first = drive(size=before, updates=[0, 2], save=str(saved), **job)
    second = drive(size=after, updates=[2, 4], load=str(saved), out=str(tmp_path / "out"), **job)
    whole = drive(size=before, updates=[0, 4], out=str(tmp_path / "whole"), **job)
    assert [first["status"], second["status"]] == [[0] * before, [0] * after], (first["output"], second["output"])
    assert sorted(first["files"]) == [f"shard-{i + 1:05d}-of-{before:05d}.safetensors" for i in range(before)]
    parts = {key: first[key] + second[key] for key in FIGURES}
    compare(parts | {"version": second["version"]}, whole, "float64")
    mine, theirs = (load_file(tmp_path / name) for name in ("out", "whole"))
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=0 if before == after else 1e-9)


def test_torch_reads_the_shards_without_a_pickle(drive: Drive, tmp_path: Path) -> None:
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
    (tmp_path / "two" / "shard-00002-of-00002.safetensors").unlink()  # an incomplete state is rejected
    with pytest.raises(ValueError, match="learner state"):
        it.load(tmp_path / "two")


def test_a_full_disk_of_one_rank_fails_the_save(drive: Drive, tmp_path: Path) -> None:
    found = drive(size=2, updates=[0, 1], save=str(tmp_path / "two"), full=True)
    assert found["status"] == [1, 0] and "rank 1: No space left on device" in found["output"][0]


# ---- errors ----


def test_unsupported_settings_are_rejected(drive: Drive, tmp_path: Path) -> None:
    found = drive(size=2, learner={"optimizer": "muon"})
    assert found["status"] == [1, 1] and 'learner.optimizer = "muon"' in found["output"][0]
    it = Learner(tiny_decoder(), LearnerSection(), num_steps=5)
    it.worker_group = WorkerGroup(0, 2)
    config = load_config(None, ["draft.online=every", "speculation.method=eagle3"])
    with pytest.raises(ValueError, match=r'draft.online = "every".*2 ranks share it'):
        build_online_head_trainer(config, it)


def test_all_ranks_skip_a_loss_that_is_not_finite(drive: Drive, tmp_path: Path) -> None:
    job = {"dtype": "float64", "algorithm": CISPO, "updates": [0, 3], "bad": 1}
    one, two = (drive(size=size, out=str(tmp_path / str(size)), **job) for size in (1, 2))
    assert two["status"] == [0, 0] and two["output"] == ["", ""], two["output"]
    assert one["skipped"] == two["skipped"] == ["the loss is nan"] and two["in_a_row"] == 0
    assert len(two["losses"]) == 2 and two["version"] == 3
    assert two["listens"] == ["0100007F"] or sys.platform != "linux"  # only 127.0.0.1
    compare(two, one, "float64")
    same_weights(tmp_path / "2", tmp_path / "1")


@pytest.mark.parametrize("broken", [None, "own norm"])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_skip_a_gradient_that_one_rank_has(
    rank: int, broken: str | None, drive: Drive, tmp_path: Path
) -> None:
    job = {"dtype": "float64", "algorithm": CISPO, "updates": [0, 4], "bad": 2, "learner": {"max_grad_norm": 1e9}}
    one = drive(size=1, bad_rank=0, out=str(tmp_path / "1"), **job)
    two = drive(size=2, bad_rank=rank, broken=broken, out=str(tmp_path / "2"), **job)
    assert two["status"] == [0, 0], two["output"]
    if broken:
        with pytest.raises(AssertionError):
            same_weights(tmp_path / "2", tmp_path / "1")
        return
    assert one["skipped"] == two["skipped"] == ["the gradient norm is nan"]
    compare(two, one, "float64")
    same_weights(tmp_path / "2", tmp_path / "1")


def same_weights(mine: Path, theirs: Path, atol: float = 1e-9) -> None:
    found, expected = load_file(mine), load_file(theirs)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol * (10 if name == "logprobs" else 1))


def test_a_rank_that_dies_ends_the_others(drive: Drive) -> None:
    found = drive(size=3, algorithm=CISPO, dies=2)
    assert found["status"][:2] == [1, -9]
    assert "ConnectionError: one of the learner's 3 ranks is gone" in found["output"][0]
    assert "--resume" in found["output"][0]


# ---- runs ----

TIMES = ("stages", "tokens_per_s", "generation_tokens_per_s", "draft_s", "memory_gib")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    settings(folder)
    return folder


@pytest.fixture(scope="module")
def argv(folder: Path) -> list[str]:
    where = [f"model.name={str(folder / 'model')!r}", f"task.name={str(folder / 'task.jsonl')!r}"]
    return ["train", *where, *SETTINGS, "algorithm.beta=0.05", "train.checkpoint_every=2", "train.eval_every=2"]


@pytest.fixture(scope="module")
def alone(folder: Path, argv: list[str], drive: Drive) -> list[dict[str, Any]]:
    """The metrics of the run in one process."""
    end = drive(size=1, argv=[*argv, "--run", str(folder / "alone")])
    assert end["status"] == [0], end["output"]
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
            elif not isinstance(value, dict) and key != "weights_checksum":  # ranks round differently
                assert mine[key] == value, key
    ours, others = lines(run, "rollouts"), lines(run.parent / "alone", "rollouts")
    assert [r["token_ids"] for r in ours] == [r["token_ids"] for r in others]


@pytest.mark.slow
def test_torchrun(folder: Path, argv: list[str], alone: list[dict[str, Any]]) -> None:
    """With the real torchrun; the tests below start ranks in the same way."""
    run = folder / "two"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), "COLUMNS": "200"}
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--", "paceline"]
    done = subprocess.run(
        [sys.executable, *start, *argv, "--run", str(run)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step 4/4") == 1 and "error" not in done.stderr.lower()
    same_run(run, alone)


def test_a_run_with_a_lost_rank_is_resumed_by_any_number_of_ranks(
    folder: Path, argv: list[str], alone: list[dict[str, Any]], drive: Drive, tmp_path: Path
) -> None:
    run = folder / "killed"
    end = drive(size=2, dies=3, argv=[*argv, "--run", str(run)])
    assert end["status"][0] == 2 and end["status"][1] == -9
    assert "error: one of the learner's 2 ranks is gone" in end["output"][0]
    last = Checkpoints(run / "checkpoints", 2).latest()
    assert last is not None and last.step == 2 and len(list((last.path / "learner").iterdir())) == 2
    end = drive(size=1, argv=["train", "--resume", str(run)])
    assert end["status"] == [0], end["output"]
    same_run(run, alone)
    end = drive(size=1, argv=["export", str(run), str(tmp_path / "exported")])
    assert end["status"] == [0] and (tmp_path / "exported" / "model.safetensors").exists(), end["output"]


def test_other_ranks_print_nothing_and_end_with_rank_0(
    folder: Path, argv: list[str], alone: list[dict[str, Any]], drive: Drive
) -> None:
    run = folder / "stopped"
    end = drive(size=2, argv=[*argv, "--run", str(run), "train.num_steps=2"])
    assert end["status"] == [0, 0] and end["output"][1] == "", end["output"]
    end = drive(size=3, argv=["train", "--resume", str(run), "train.num_steps=4"])
    assert end["status"] == [0, 0, 0], end["output"]
    same_run(run, alone)
    end = drive(size=2, argv=[*argv, "--run", str(run)])  # rank 0 fails: the folder exists
    assert end["status"] == [2, 0] and end["output"][1] == "", end["output"]
