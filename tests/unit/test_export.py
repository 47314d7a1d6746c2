"""Exports: of a checkpoint (`paceline export`), and during a run (train.export_every)."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import tiny_config
from tiny_run import SETTINGS, make, outcome, policy, settings, write_model, write_task
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from paceline.build.config import load_config
from paceline.build.engine import build_engine
from paceline.build.export import export_policy, load_policy_into, open_policy
from paceline.build.learner import build_learner
from paceline.build.run import run_toml
from paceline.cli import app
from paceline.config import Config
from paceline.model import hf_directory, tensor_file
from paceline.model.hf_directory import INDEX, SINGLE
from paceline.model.weights import load, tensors_in
from paceline.rl.batch import TokenBatch, scored
from paceline.rl.checkpoint import Checkpoint, Checkpoints, write_tensors
from paceline.rl.learner import Learner
from paceline.rl.shards import OFFSETS, Shards, write_shard
from paceline.types import Request, SamplingParams

from .test_learner import linear_loss, some_groups

TESTS = Path(__file__).parents[1]
FLAVOURS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "tied": ({}, []),
    "untied": ({"tie_embeddings": False}, []),
    "qwen3": ({"family": "qwen3", "qk_norm": True}, ["learner.optimizer=muon"]),
    "qwen2, longer context": ({"family": "qwen2", "qkv_bias": True}, ["model.yarn_factor=2.0"]),
    "lora": ({}, ["learner.lora_rank=4", "learner.lora_alpha=20.0"]),
    "lora of two matrices": (
        {"tie_embeddings": False},
        ["learner.lora_rank=3", 'learner.lora_targets=["o_proj", "q_proj", "v_proj"]'],
    ),
    "transformers": ({}, ["learner.model=transformers"]),
}


def trained(folder: Path, config: Config) -> tuple[Learner, Checkpoint]:
    """A learner after an update, and its checkpoint, in a run's folder."""
    learner = build_learner(config, folder / "model")
    groups = some_groups(vocab=259)
    learner.update(scored(groups), TokenBatch.of(groups), linear_loss)
    checkpoints = Checkpoints(folder / "run" / "checkpoints", 2)
    checkpoints.save(1, {"learner": learner.save}, {"head": None})
    (folder / "run" / "config.toml").write_text(run_toml(config))
    checkpoint = checkpoints.latest()
    assert checkpoint is not None
    return learner, checkpoint


def made(folder: Path, flavour: str, dtype: str) -> Config:
    shape, overrides = FLAVOURS[flavour]
    write_model(folder / "model", **shape)
    write_task(folder / "task.jsonl")
    return settings(folder, f"model.dtype={dtype}", "learner.tokens_per_microbatch=2048", *overrides)


def weights_in(directory: Path) -> dict[str, Tensor]:
    with tensors_in(directory) as (shapes, fetch):
        return {name: fetch(name) for name in shapes}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], x) for name, x in expected.items())


def learner_weights(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.weights()}


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner in bfloat16 on a CPU, which a run may not have."""
    monkeypatch.setattr("paceline.build.model.check_device", lambda config: None)


# ---- the weights ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_an_export_has_the_weights_of_the_learner(
    flavour: str, dtype: str, no_kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and without a learner."""
    config = made(tmp_path, flavour, dtype)
    learner, _ = trained(tmp_path, config)
    expected = learner_weights(learner)
    initial = weights_in(tmp_path / "model")
    assert not all(torch.equal(initial[name].to(x), x) for name, x in expected.items())
    monkeypatch.setattr(Learner, "__init__", lambda *_: 1 / 0)
    export_policy(config, tmp_path / "run", tmp_path / "out")
    assert same(weights_in(tmp_path / "out"), expected)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["dtype"] == dtype and len(written["architectures"]) == 1
    assert written["max_position_embeddings"] == (512 if "longer" in flavour else 256)
    ids = [AutoTokenizer.from_pretrained(tmp_path / name).encode("say b") for name in ("model", "out")]
    assert ids[0] == ids[1] and len(ids[0]) == 5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == getattr(torch, dtype)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("flavour", ["tied", "lora"])
def test_the_dtype_of_an_export(flavour: str, no_kernels: None, tmp_path: Path) -> None:
    """A bfloat16 run can be exported with the float32 weights of its optimizer, and a float32 run in bfloat16."""
    config = made(tmp_path, flavour, "bfloat16")
    learner, _ = trained(tmp_path, config)
    export_policy(config, tmp_path / "run", tmp_path / "wide", dtype="float32")
    wide, rounded = weights_in(tmp_path / "wide"), learner_weights(learner)
    assert wide.keys() == rounded.keys() and {x.dtype for x in wide.values()} == {torch.float32}
    assert not all(torch.equal(x, x.bfloat16().float()) for x in wide.values()), "the optimizer's weights are rounded"
    for name, tensor in wide.items():
        torch.testing.assert_close(tensor, rounded[name].float(), rtol=2**-7, atol=2e-3)
    if flavour == "tied":
        masters = dict(learner.optimizer.masters)
        assert torch.equal(wide["model.embed_tokens.weight"], masters["embed.weight"].detach())
        assert all(torch.equal(tensor.bfloat16(), rounded[name]) for name, tensor in wide.items())


def test_lora_is_merged_in_float32_and_rounded_once(tmp_path: Path) -> None:
    config = made(tmp_path, "lora", "float32")
    learner, _ = trained(tmp_path, config)
    export_policy(config, tmp_path / "run", tmp_path / "half", dtype="bfloat16")
    assert same(weights_in(tmp_path / "half"), {name: x.bfloat16() for name, x in learner_weights(learner).items()})


def split_in_ranks(folder: Path, size: int) -> None:
    """Rewrite the state of one rank as the state of several, with uneven rows. A short tensor is on few ranks."""
    with Shards(folder) as shards:
        state = {name: shards[name].clone() for name in shards}
    for path in folder.iterdir():
        path.unlink()
    for rank in range(size):
        parts: dict[str, Tensor] = {}
        offsets = {}
        for name, tensor in state.items():
            if not tensor.ndim:
                if rank == 0:
                    parts[name], offsets[name] = tensor, {"saved_offsets": []}
                continue
            rows = -(-len(tensor) // size)
            part = tensor[rank * rows : (rank + 1) * rows]
            if len(part):
                parts[name], offsets[name] = part, {"saved_offsets": [rank * rows, *[0] * (tensor.ndim - 1)]}
        path = folder / f"shard-{rank + 1:05d}-of-{size:05d}.safetensors"
        write_tensors(path, parts, {"format": "pt", OFFSETS: json.dumps(offsets)})


@pytest.mark.parametrize("flavour", ["untied", "lora", "transformers"])
def test_a_checkpoint_of_several_ranks(flavour: str, tmp_path: Path) -> None:
    config = made(tmp_path, flavour, "float32")
    learner, checkpoint = trained(tmp_path, config)
    shutil.copytree(checkpoint.path / "learner", tmp_path / "ranks" / "learner")
    split_in_ranks(tmp_path / "ranks" / "learner", 5)
    with open_policy(config, Checkpoint(1, tmp_path / "ranks", {})) as policy:
        assert same(dict(policy.weights(torch.float32)), learner_weights(learner))


def test_several_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = made(tmp_path, "untied", "float32")
    learner, _ = trained(tmp_path, config)
    monkeypatch.setattr("paceline.build.export.write_directory", small_shards)
    seen: list[tuple[int, int]] = []
    export_policy(config, tmp_path / "run", tmp_path / "out", progress=lambda *done: seen.append(done))
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 3 and not (tmp_path / "out" / SINGLE).exists()
    where = {name: file for file in files for name in load_file(tmp_path / "out" / file)}
    assert index["weight_map"] == where
    expected = learner_weights(learner)
    size = sum(x.nbytes for x in expected.values())
    assert index["metadata"]["total_size"] == size and same(weights_in(tmp_path / "out"), expected)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen}) and seen[-1] == (size, size)
    assert {total for _, total in seen} == {size} and len(seen) == len(expected)
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def small_shards(*args: Any, **kwargs: Any) -> None:
    hf_directory.write_directory(*args, max_shard_bytes=20_000, **kwargs)


def test_another_model_is_rejected(tmp_path: Path) -> None:
    config = made(tmp_path, "tied", "float32")
    trained(tmp_path, config)
    shutil.rmtree(tmp_path / "model")
    write_model(tmp_path / "model", intermediate_size=40)
    with pytest.raises(ValueError, match=r"gate_up.weight is \[96, 32\], but the model has \[80, 32\]; restore the"):
        export_policy(config, tmp_path / "run", tmp_path / "out")
    write_model(tmp_path / "model", num_layers=4)
    with pytest.raises(ValueError, match=r"lacks 'parameter.layers.2"):
        export_policy(config, tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run", "task.jsonl"]


def test_a_gpu_is_not_needed(tmp_path: Path) -> None:
    config = made(tmp_path, "tied", "float32")
    learner, _ = trained(tmp_path, config)
    on_gpu = config.changed(model={"device": "cuda:3"})
    export_policy(on_gpu, tmp_path / "run", tmp_path / "out")
    assert same(weights_in(tmp_path / "out"), learner_weights(learner))


# ---- tokens ----


def greedy(directory: Path, prompt: list[int], num_tokens: int, engine: Any = None) -> list[int]:
    """By our engine."""
    overrides = [f"model.name={str(directory)!r}", "speculation.method=none", "speculation.policy=static"]
    engine = engine or build_engine(load_config(None, overrides))
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    (completion,) = engine.generate([Request(0, tuple(prompt), params, 0, "")])
    engine.close()
    return completion.token_ids.tolist()


def greedy_hf(directory: Path, prompt: list[int], num_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokens = torch.tensor([prompt])
    new = dict(do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens, eos_token_id=None)
    with torch.no_grad():
        return model.generate(tokens, attention_mask=torch.ones_like(tokens), **new)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("flavour", ["tied", "untied", "lora", "qwen3"])
def test_greedy_tokens_in_transformers(flavour: str, tmp_path: Path) -> None:
    """The exported model in transformers and in our engine, and our engine with the checkpoint itself."""
    config = made(tmp_path, flavour, "float32")
    _, checkpoint = trained(tmp_path, config)
    export_policy(config, tmp_path / "run", tmp_path / "out")
    prompt = [*b"say b"]
    theirs = greedy_hf(tmp_path / "out", prompt, 24)
    assert theirs == greedy(tmp_path / "out", prompt, 24) != greedy(tmp_path / "model", prompt, 24)
    engine = build_engine(config)
    load_policy_into(engine, config, checkpoint)
    assert theirs == greedy(tmp_path, prompt, 24, engine)


@pytest.mark.slow
def test_greedy_tokens_of_smollm2(smollm2: Path, tmp_path: Path) -> None:
    """With changed weights, as training leaves them."""
    config = load_config(None, ["model.name=smollm2-135m"])
    noise = torch.Generator().manual_seed(0)
    decoder = load(smollm2)
    state = {}
    for name, parameter in decoder.named_parameters():
        step = 0.1 * parameter.detach().std() * torch.randn(parameter.shape, generator=noise)
        state[f"parameter.{name}"] = parameter.detach() + (step if parameter.ndim == 2 else 0)
    save_run(tmp_path / "run", config, state)
    export_policy(config, tmp_path / "run", tmp_path / "out")
    prompt = AutoTokenizer.from_pretrained(tmp_path / "out").encode("The capital of France is")
    tokens = greedy_hf(tmp_path / "out", prompt, 16)
    assert tokens == greedy(tmp_path / "out", prompt, 16) != greedy(smollm2, prompt, 16)


def save_run(run: Path, config: Config, state: dict[str, Tensor]) -> None:
    """A run with one checkpoint, with this state of the learner."""
    checkpoints = Checkpoints(run / "checkpoints", 2)
    state = {"version": torch.tensor(1), **state}
    checkpoints.save(1, {"learner": lambda folder: write_shard(folder, 0, 1, state)}, {"head": None})
    (run / "config.toml").write_text(run_toml(config))


# ---- memory ----


@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    """Exporting a checkpoint of 0.4 GB needs memory for a few of its tensors; broken implementations need all of it."""
    write_model(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    shape = tiny_config(vocab_size=8192, hidden_size=512, intermediate_size=2048, num_layers=24, num_heads=8,
                        num_kv_heads=8, head_dim=64)  # fmt: skip
    path.write_text(json.dumps(shape.to_hf()))
    d, m = shape.hidden_size, shape.intermediate_size
    sizes = {"qkv.weight": (3 * d, d), "o.weight": (d, d), "gate_up.weight": (2 * m, d), "down.weight": (d, m),
             "input_norm": (d,), "post_norm": (d,)}  # fmt: skip
    full = {f"layers.{i}.{name}": size for i in range(24) for name, size in sizes.items()}
    full |= {"embed.weight": (8192, d), "norm": (d,)}
    # Expanded rows: this process needs no memory for them.
    state = {f"parameter.{name}": torch.randn(size[-1]).expand(size) for name, size in full.items()}
    largest, total = 8192 * d * 4, sum(x.numel() for x in state.values()) * 4
    assert total > 20 * largest
    config = load_config(None, [f"model.name={str(tmp_path / 'model')!r}"])
    save_run(tmp_path / "run", config, state)
    rises = {}
    for variant in ("right", "maps", "collects"):
        command = [sys.executable, TESTS / "export_driver.py", tmp_path / "run", tmp_path / variant, variant]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        rises[variant] = int(done.stdout)
        assert (tmp_path / variant / SINGLE).stat().st_size > total
        shutil.rmtree(tmp_path / variant)
    bound = 4 * largest + (32 << 20)
    assert rises["right"] < bound, rises
    assert rises["maps"] > 0.8 * total > bound and rises["collects"] > 0.8 * total, rises


# ---- failures ----


def forked(work: Callable[[], object]) -> int:
    """The exit status of a child process that only does this."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_full_disk(tmp_path: Path) -> None:
    """With a file size limit the kernel writes a part and rejects the next write, as on a full disk."""
    config = made(tmp_path, "tied", "float32")
    trained(tmp_path, config)

    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        try:
            export_policy(config, tmp_path / "run", tmp_path / "out")
        except OSError as error:
            (tmp_path / "error").write_text(str(error))

    forked(fill)
    error = (tmp_path / "error").read_text()
    assert f"{tmp_path / 'out'}: can't be written (File too large); it needs 0.00 GB, and {tmp_path} has " in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["error", "model", "run", "task.jsonl"]
    export_policy(config, tmp_path / "run", tmp_path / "out")


def test_free_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = made(tmp_path, "tied", "float32")
    learner, _ = trained(tmp_path, config)
    needed = sum(x.nbytes for x in learner_weights(learner).values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(OSError, match=rf"{tmp_path / 'out'}: it needs 0.00 GB, but {tmp_path} has 0.00 GB free; free"):
        export_policy(config, tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    export_policy(config, tmp_path / "run", tmp_path / "out")


def test_a_small_file_system(tmp_path: Path) -> None:
    """A real one, which a user may mount in a namespace."""
    config = made(tmp_path, "tied", "float32")
    trained(tmp_path, config)
    (tmp_path / "small").mkdir()
    start = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=50k tmpfs {tmp_path / 'small'}"
    if shutil.which("unshare") is None or subprocess.run([*start, mount], capture_output=True).returncode:
        pytest.skip("no user namespaces")
    command = f"{sys.executable} -m paceline export {tmp_path / 'run'} {tmp_path / 'small' / 'out'}"
    shown = f"{mount} && ({command}; echo status $?; ls -A {tmp_path / 'small'} | wc -l)"
    done = subprocess.run([*start, shown], capture_output=True, text=True, env=os.environ | {"COLUMNS": "400"})
    assert "status 2" in done.stdout and done.stdout.split()[-1] == "0", done.stdout
    assert f"{tmp_path / 'small' / 'out'}: it needs 0.00 GB, but " in done.stderr and "free disk space" in done.stderr


def die_at(instant: int) -> None:
    """SIGKILL at this write or rename of an export."""
    count, write, rename = 0, tensor_file._write, Path.rename

    def tick() -> None:
        nonlocal count
        if count == instant:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def half_written(file: Any, content: Any) -> None:
        write(file, memoryview(content)[: len(content) // 2])
        tick()
        write(file, memoryview(content)[len(content) // 2 :])

    def renamed(path: Path, target: Any) -> Any:
        tick()
        result = rename(path, target)
        tick()
        return result

    tensor_file._write = half_written
    Path.rename = renamed  # type: ignore[method-assign]


def test_a_killed_export_leaves_no_directory(tmp_path: Path) -> None:
    config = made(tmp_path, "tied", "float32")
    learner, _ = trained(tmp_path, config)
    out, scratch = tmp_path / "out", tmp_path / ".new-out"
    died = []
    for instant in (0, 1, 7, 20, 21, 22, 23, 24, 25, 26):

        def work(instant: int = instant) -> None:
            die_at(instant)
            export_policy(config, tmp_path / "run", out)

        status = forked(work)
        died.append(status == -signal.SIGKILL)
        if out.exists():
            assert same(weights_in(out), learner_weights(learner)) and (out / "config.json").exists()
            assert not scratch.exists()
            shutil.rmtree(out)
        else:
            assert died[-1] and scratch.exists()
    assert died[0] and not died[-1]
    (scratch / "tmp").mkdir(parents=True, exist_ok=True)
    (scratch / "model-00001-of-00002.safetensors").touch()
    export_policy(config, tmp_path / "run", out)
    assert not scratch.exists() and not (out / "tmp").exists() and len(list(out.glob("model*"))) == 1


def test_two_exports_to_one_directory(tmp_path: Path) -> None:
    config = made(tmp_path, "tied", "float32")
    trained(tmp_path, config)
    with (
        pytest.raises(ValueError, match=rf"in use by process {os.getpid()}"),
        hf_directory.new_directory(tmp_path / "out", 0),
    ):
        export_policy(config, tmp_path / "run", tmp_path / "out")
    with pytest.raises(ValueError, match=r"model exists and is not empty; give another directory"):
        export_policy(config, tmp_path / "run", tmp_path / "model")
    (tmp_path / "out").mkdir()  # empty
    export_policy(config, tmp_path / "run", tmp_path / "out")


def test_a_checkpoint_that_is_deleted_meanwhile(tmp_path: Path) -> None:
    """A run that goes on deletes its old checkpoints."""
    config = made(tmp_path, "tied", "float32")
    learner, checkpoint = trained(tmp_path, config)
    with open_policy(config, checkpoint) as policy:
        shutil.rmtree(checkpoint.path)
        assert same(dict(policy.weights(torch.float32)), learner_weights(learner))


# ---- during a run ----


def exported(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "exports").iterdir())


def test_exports_of_a_run(tmp_path: Path) -> None:
    """Every export is the policy after its step, and the run is the same as without exports."""
    plain = make(tmp_path, "plain", "train.num_steps=5")
    plain.run()
    plain.close()
    trainer = make(tmp_path, "run", "train.num_steps=5", "train.export_every=2", "train.checkpoint_every=1")
    after: dict[int, dict[str, Tensor]] = {}
    step = trainer.callback.step
    trainer.callback.step = lambda metrics: (after.update({trainer.step: policy(trainer)}), step(metrics))
    trainer.run()
    trainer.close()
    run = tmp_path / "run"
    assert exported(run) == ["step-000002", "step-000004", "step-000005"]
    assert outcome(run) == outcome(tmp_path / "plain")
    for number in (2, 4, 5):
        assert same(weights_in(run / "exports" / f"step-{number:06d}"), after[number])
    export_policy(trainer.config, run, tmp_path / "out")
    files = {path.name for path in (tmp_path / "out").iterdir()}
    last = run / "exports" / "step-000005"
    assert {path.name for path in last.iterdir()} == files
    assert all((last / name).read_bytes() == (tmp_path / "out" / name).read_bytes() for name in files)


def test_a_run_keeps_the_last_exports(tmp_path: Path) -> None:
    trainer = make(tmp_path, "run", "train.num_steps=5", "train.export_every=1", "train.keep_exports=2")
    trainer.run()
    trainer.close()
    assert exported(tmp_path / "run") == ["step-000004", "step-000005"]


def test_a_resumed_run_replaces_exports_of_later_steps(tmp_path: Path) -> None:
    """The run had gone on to step 3, and is resumed from step 2: those of step 3 and later are not its own."""
    trainer = make(tmp_path, "run", "train.num_steps=2", "train.export_every=1")
    trainer.run()
    trainer.close()
    exports = tmp_path / "run" / "exports"
    kept = (exports / "step-000002" / SINGLE).stat().st_mtime_ns
    for stale in ("step-000003", "step-000007", ".new-step-000003", ".drop-step-000001"):
        (exports / stale).mkdir()
    trainer = make(tmp_path, "run", "train.num_steps=3", "train.export_every=1", resume=True)
    trainer.run()
    trainer.close()
    assert exported(tmp_path / "run") == ["step-000001", "step-000002", "step-000003"]
    assert same(weights_in(exports / "step-000003"), policy(trainer))
    assert (exports / "step-000002" / SINGLE).stat().st_mtime_ns == kept


def test_a_run_goes_on_if_the_disk_has_no_room_for_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is left for the next checkpoint. Later exports are written if there is room again."""
    plain = make(tmp_path, "plain")
    plain.run()
    plain.close()
    overrides = "train.export_every=1", "train.checkpoint_every=1"
    trainer = make(tmp_path, "run", *overrides)
    usage = shutil.disk_usage(tmp_path)
    size = sum(x.nbytes for x in policy(trainer).values())

    def free(path: Path) -> Any:
        spare = trainer.checkpoints.num_bytes()
        assert spare > 3 * size, "weights and moments"
        return usage._replace(free=size + spare - (trainer.step in (1, 2)))

    monkeypatch.setattr(shutil, "disk_usage", free)
    trainer.run()
    trainer.close()
    run = tmp_path / "run"
    assert exported(run) == ["step-000003", "step-000004"] and outcome(run) == outcome(tmp_path / "plain")
    alarms = [note for note in trainer.callback.notes if note.startswith("ALARM")]
    assert len(alarms) == 2 and "step 1 is not exported, training goes on: " in alarms[0]
    assert "GB must be left for the next checkpoint" in alarms[0] and f"paceline export {run} DIR" in alarms[0]


def test_a_disk_that_becomes_full_while_a_run_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, "run", "train.export_every=2", "train.num_steps=4")

    def full(file: Any, content: Any) -> None:
        file.write(content[: len(content) // 2])
        if trainer.step == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(content[len(content) // 2 :])

    monkeypatch.setattr(tensor_file, "_write", full)
    assert trainer.run()["finished"]
    trainer.close()
    assert exported(tmp_path / "run") == ["step-000004"]
    (alarm,) = [note for note in trainer.callback.notes if note.startswith("ALARM")]
    assert "step 2 is not exported" in alarm and "step-000002: can't be written (No space left on device)" in alarm


def test_a_lost_rank_during_an_export_is_not_a_full_disk(tmp_path: Path) -> None:
    trainer = make(tmp_path, "run", "train.export_every=2", "train.num_steps=4", "train.checkpoint_every=1")

    def write(weights: Any, directory: Path, **options: Any) -> None:
        raise ConnectionError("one of the learner's 2 ranks is gone")

    assert trainer.exports is not None
    trainer.exports._write = write
    with pytest.raises(ConnectionError, match="one of the learner's"):
        trainer.run()
    trainer.close()
    last = trainer.checkpoints.latest()
    assert last is not None and last.step == 2


@pytest.mark.parametrize("instant", [3, 27, 34, 50])
def test_a_run_that_is_killed_while_it_exports(instant: int, tmp_path: Path) -> None:
    """No half export has a name, and the resumed run makes all of them."""
    overrides = "train.export_every=1", "train.num_steps=3", "train.checkpoint_every=2"
    whole = make(tmp_path, "whole", *overrides)
    whole.run()
    whole.close()

    def work() -> None:
        trainer = make(tmp_path, "run", *overrides)
        die_at(instant)
        trainer.run()

    assert forked(work) == -signal.SIGKILL
    run = tmp_path / "run"
    complete = [name for name in exported(run) if name.startswith("step-")]
    assert len(complete) < 3
    for name in complete:
        assert same(weights_in(run / "exports" / name), weights_in(tmp_path / "whole" / "exports" / name))
    trainer = make(tmp_path, "run", *overrides, resume=True)
    trainer.run()
    trainer.close()
    assert exported(run) == exported(tmp_path / "whole")
    for name in exported(run):
        assert same(weights_in(run / "exports" / name), weights_in(tmp_path / "whole" / "exports" / name))
    assert outcome(run)["rollouts"] == outcome(tmp_path / "whole")["rollouts"]


def test_exports_of_a_run_that_starts_again(tmp_path: Path) -> None:
    """It was interrupted before its first checkpoint: its exports are moved aside with its records."""
    overrides = "train.export_every=1", "train.num_steps=2", "train.checkpoint_every=0"

    def work() -> None:
        trainer = make(tmp_path, "run", *overrides)
        trainer.callback.step = lambda metrics: os.kill(os.getpid(), signal.SIGKILL)
        trainer.run()

    assert forked(work) == -signal.SIGKILL
    assert exported(tmp_path / "run") == ["step-000001"]
    trainer = make(tmp_path, "run", *overrides, resume=True)
    assert not (tmp_path / "run" / "exports").exists()
    assert exported(tmp_path / "run" / "interrupted-1") == ["step-000001"]
    trainer.run()
    trainer.close()
    assert exported(tmp_path / "run") == ["step-000001", "step-000002"]


# ---- commands ----


def command(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def test_eval_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a learner; the same as of its export."""
    trainer = make(tmp_path, "run", "train.eval_every=1", "train.num_steps=3", "train.keep_checkpoints=1")
    best = trainer.run()["best"]["step"]
    trainer.close()
    export_policy(trainer.config, tmp_path / "run", tmp_path / "last")
    export_policy(trainer.config, tmp_path / "run", tmp_path / "best", best=True)
    monkeypatch.setattr(Learner, "__init__", lambda *_: 1 / 0)
    task = tmp_path / "task.jsonl"
    given = [s for s in SETTINGS if s.partition(".")[0] in ("task", "reward", "sampling", "engine", "speculation")]
    given = [s for s in given if not s.startswith(("task.kind", "task.held_out"))] + ["task.held_out=6"]
    found = {}
    for name, model, options in (
        ("run", tmp_path / "run", []),
        ("best run", tmp_path / "run", ["--best"]),
        ("last", tmp_path / "last", ["model.dtype=float64"]),
        ("best", tmp_path / "best", ["model.dtype=float64"]),
        ("initial", tmp_path / "model", ["model.dtype=float64"]),
    ):
        out = tmp_path / f"{name}.json"
        command("eval", model, task, *given, *options, "--json", out, "-n", 4)
        found[name] = {key: x for key, x in json.loads(out.read_text()).items() if key not in ("model", "task")}
    assert found["run"] == found["last"] != found["initial"] and found["best run"] == found["best"]
    assert best in (1, 2, 3)
    assert "--best: " in command("eval", tmp_path / "last", task, "--best", code=2).stderr


def test_a_run_is_no_model(tmp_path: Path) -> None:
    trainer = make(tmp_path, "run", "train.num_steps=1")
    trainer.run()
    trainer.close()
    run = tmp_path / "run"
    for arguments in (
        ["generate", "hello", "--model", run],
        ["serve", run, "--port", 0],
        ["verify", f"model.name={run}"],
    ):
        error = command(*arguments, code=2).stderr.replace("\n", "")
        assert f"is a run; first: paceline export {run} DIR, then use DIR" in error, error
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(info | {"command": "train-draft"}))
    for arguments in (["eval", run, "chain_sum"], ["export", run, tmp_path / "out"]):
        assert "a run of `paceline train-draft`, which trains no policy" in command(*arguments, code=2).stderr


def test_dtypes_of_the_command(tmp_path: Path) -> None:
    trainer = make(tmp_path, "run", "train.num_steps=1")
    trainer.run()
    trainer.close()
    command("export", tmp_path / "run", tmp_path / "half", "--dtype", "bfloat16")
    assert {x.dtype for x in load_file(tmp_path / "half" / SINGLE).values()} == {torch.bfloat16}
    assert (
        "--dtype 'int8': not one of float32"
        in command("export", tmp_path / "run", tmp_path / "x", "--dtype", "int8", code=2).stderr
    )
