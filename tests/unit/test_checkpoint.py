"""Checkpoints: crashes at every instant of a save, damaged files, and full disks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.model.tensor_file import DTYPES
from paceline.rl import checkpoint
from paceline.rl.checkpoint import Checkpoints

ALIVE, CRASHED = 0, 9


def save(checkpoints: Checkpoints, step: int, best: bool = False, value: int | None = None) -> Path:
    """A checkpoint with the same value in all files and in the state, so that a mixture of two is caught."""
    value = step if value is None else value
    parts = {name: {"weight": torch.full((3, 5), float(value))} for name in ("policy", "optimizer")}
    return checkpoints.save(step, parts, {"value": value}, best=best)


def value_of(found: checkpoint.Checkpoint) -> int:
    values = {found.state["value"], *(int(found.tensors(name)["weight"].max()) for name in ("policy", "optimizer"))}
    assert len(values) == 1
    return values.pop()


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).tolist()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "a byte, before wider ones": torch.tensor([1], dtype=torch.int8),
        "whole": base,
        "shared": base,
        "transposed": base.T,
        "part": base[1:3, 2:],
        "expanded": torch.tensor([7.0]).expand(3, 2),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "strideless": torch.zeros(1).expand(0),
        "one": torch.tensor(2.0).expand(1),
        "nan": torch.tensor([float("nan"), -0.0]),
        "trained": torch.nn.Parameter(torch.ones(2)),
        "naïve / name": torch.tensor([True, False]),
        **{str(dtype): torch.tensor([1, 2, 100]).to(dtype) for dtype in DTYPES},
    }
    state = {
        "list": [1, 2.5, None, "ü"],
        "large": 2**100,
        "nan": float("nan"),
        "small": 1e-300,
        "deep": {"a": {"b": []}},
    }
    path = Checkpoints(tmp_path / "a" / "b", 2).save(7, {"policy": tensors, "nothing": {}}, state)
    assert path.name == "step-000007"
    found = Checkpoints(tmp_path / "a" / "b", 2).latest()
    assert found is not None
    assert (found.step, found.path) == (7, path)
    assert str(found.state) == str(state)
    assert found.tensors("nothing") == {}
    loaded = found.tensors("policy")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert bits(loaded[name]) == bits(tensor)
        assert loaded[name].data_ptr() % tensor.dtype.itemsize == 0, "aligned"
    loaded["whole"].fill_(0)
    assert torch.equal(found.tensors("policy")["whole"], base), "loaded tensors are copies"
    written = json.loads((path / "state.json").read_text())["files"]["policy.safetensors"]
    content = (path / "policy.safetensors").read_bytes()
    assert written == {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_files_of_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK", 100)
    tensor = torch.randn(1001)
    Checkpoints(tmp_path, 1).save(1, {"policy": {"x": tensor}}, {})
    found = Checkpoints(tmp_path, 1).latest()
    assert found is not None
    assert torch.equal(found.tensors("policy")["x"], tensor)


def test_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    assert checkpoints.latest() is checkpoints.best() is None
    for step in (1, 2, 3, 4, 5, 6):
        save(checkpoints, step, best=step in (1, 3))
    assert names(tmp_path) == ["step-000003", "step-000005", "step-000006"]
    best, latest = checkpoints.best(), checkpoints.latest()
    assert best is not None
    assert latest is not None
    assert (value_of(best), value_of(latest)) == (3, 6)
    save(checkpoints, 7, best=True)
    save(checkpoints, 1_000_000)
    save(checkpoints, 1_000_001)
    assert names(tmp_path) == ["step-000007", "step-1000000", "step-1000001"]
    with pytest.raises(ValueError, match="keep_checkpoints = 0"):
        Checkpoints(tmp_path, 0)


def test_saving_a_step_again_and_after_a_resume(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    save(checkpoints, 5)
    save(checkpoints, 5, value=50)
    latest = checkpoints.latest()
    assert latest is not None
    assert value_of(latest) == 50
    save(checkpoints, 8)
    (tmp_path / "step-000008" / "policy.safetensors").write_bytes(b"")
    shutil.copytree(tmp_path / "step-000008", tmp_path / "step-000009")
    save(checkpoints, 6)  # as after a resume from 5: the damaged 8 and 9 must not replace 6
    assert names(tmp_path) == ["step-000006"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path / "policy.safetensors"),
        lambda path: flip(path / "state.json"),
        lambda path: (path / "state.json").unlink(),
        lambda path: (path / "state.json").write_text("[]"),
        lambda path: (path / "optimizer.safetensors").unlink(),
        lambda path: os.truncate(path / "optimizer.safetensors", 20),
        lambda path: (path / "state.json").write_text(
            (path / "state.json").read_text().replace('"value": 2', '"value": 3')
        ),
    ],
)
def test_a_damaged_checkpoint_is_skipped(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    checkpoints = Checkpoints(tmp_path, 3)
    for step in (1, 2):
        save(checkpoints, step, best=True)
    damage(tmp_path / "step-000002")
    for look in (checkpoints.latest, checkpoints.best):
        with pytest.warns(RuntimeWarning, match="step-000002 is damaged"):
            found = look()
        assert found is not None
        assert value_of(found) == 1
    (tmp_path / "step-000001" / "policy.safetensors").write_bytes(b"")
    with (
        pytest.warns(RuntimeWarning, match="is damaged"),
        pytest.raises(ValueError, match="every checkpoint is damaged"),
    ):
        checkpoints.latest()


class DeletesFirst(Checkpoints):
    """Deliberately broken: deletes the old checkpoints first."""

    def save(self, step, tensors, state, *, best=False):  # type: ignore[no-untyped-def]
        for path in self.folder.glob("step-*"):
            shutil.rmtree(path)
        return super().save(step, tensors, state, best=best)


class InPlace(Checkpoints):
    """Deliberately broken: writes under the final name."""

    def save(self, step, tensors, state, *, best=False):  # type: ignore[no-untyped-def]
        place = self.folder / f"step-{step:06d}"
        place.mkdir(exist_ok=True)
        for name, part in tensors.items():
            checkpoint.write_tensors(place / f"{name}.safetensors", part)
        scratch = Checkpoints(self.folder / ".elsewhere", 1).save(step, tensors, state)
        shutil.copy(scratch / "state.json", place)
        return place


def forked(work: Callable[[], object]) -> int:
    """The id of a child process that only does this."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(ALIVE)
    return child


def crash_in(work: Callable[[], object], at: int) -> int:
    """Run it in a child process that exits at its at-th file system operation."""
    num = 0

    def step(event: str, _: object = None) -> None:
        nonlocal num
        if event.startswith(("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open", "fsync")):
            num += 1
            if num == at:
                os._exit(CRASHED)

    def crashing() -> None:
        fsync = os.fsync
        os.fsync = lambda handle: (fsync(handle), step("fsync"))[0]
        sys.addaudithook(step)
        work()

    return os.waitstatus_to_exitcode(os.waitpid(forked(crashing), 0)[1])


def outcomes(kind: type[Checkpoints], folder: Path, before: int, step: int) -> list[str]:
    """For a crash at every instant of saving `step`, with a checkpoint of `before`: what `latest` finds afterwards."""
    found = []
    for at in range(1, 1000):
        shutil.rmtree(folder, ignore_errors=True)
        save(Checkpoints(folder, 1), before, value=1)
        code = crash_in(lambda: save(kind(folder, 1), step, value=2), at)
        with warnings.catch_warnings(record=True) as found_warnings:
            warnings.simplefilter("always")
            try:
                latest = Checkpoints(folder, 1).latest()
            except ValueError:
                latest = None
        found.append("damaged" if found_warnings else "nothing" if latest is None else f"value {value_of(latest)}")
        save(Checkpoints(folder, 1), 9)
        assert names(folder) == ["step-000009"] or kind is InPlace, f"a crash at {at} left something behind"
        if code == ALIVE:
            return found
    raise AssertionError("the save never finishes")


@pytest.mark.parametrize(("before", "step"), [(3, 4), (4, 4)])
def test_a_crash_at_any_instant_leaves_an_intact_checkpoint(tmp_path: Path, before: int, step: int) -> None:
    found = outcomes(Checkpoints, tmp_path / "run", before, step)
    assert len(found) > 15
    assert found == sorted(found), "first the old one, then the new one"
    assert set(found) == {"value 1", "value 2"}


def test_broken_implementations_are_caught(tmp_path: Path) -> None:
    assert "nothing" in outcomes(DeletesFirst, tmp_path / "deletes-first", 3, 4)
    assert "damaged" in outcomes(InPlace, tmp_path / "in-place", 3, 4)


def test_kill_9_at_random_instants(tmp_path: Path) -> None:
    def train() -> None:
        checkpoints = Checkpoints(tmp_path, 2)
        found = checkpoints.latest()
        step = found.step if found else 0
        while True:
            step += 1
            tensors = {"policy": {"x": torch.full((300_000,), float(step))}}
            checkpoints.save(step, tensors, {}, best=step % 3 == 0)
            os.write(writer, b"%d\n" % step)

    rng, reached = random.Random(0), 0
    for _ in range(10):
        reader, writer = os.pipe()
        child = forked(train)
        os.close(writer)
        with open(reader) as saved:  # noqa: PTH123
            assert int(saved.readline()) == reached + 1, "continues after the last checkpoint"
            time.sleep(rng.random() / 20)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            steps = [reached + 1, *map(int, saved.read().split())]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            latest = Checkpoints(tmp_path, 2).latest()
        assert latest is not None
        assert latest.step in (steps[-1], steps[-1] + 1)
        assert (latest.tensors("policy")["x"] == latest.step).all()
        reached = latest.step


def test_a_full_disk_does_not_change_existing_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, 1)
    save(checkpoints, 1)
    sync, left = os.fsync, [0]

    def full(handle: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    for step in (2, 1):
        for left[0] in range(4):  # fsync calls: two files, state.json, and the folder
            with pytest.raises(OSError, match="No space left") as raised:
                save(checkpoints, step, value=2)
            assert raised.value.errno == errno.ENOSPC
            assert str(tmp_path) in str(raised.value)
            assert names(tmp_path) == ["step-000001"]
            latest = checkpoints.latest()
            assert latest is not None
            assert value_of(latest) == 1


def test_a_checkpoint_that_was_moved_aside_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is saved again, and the new checkpoint can't be renamed."""
    checkpoints, rename = Checkpoints(tmp_path, 1), Path.rename
    save(checkpoints, 1)

    def refuse(path: Path, target: Path) -> Path:
        if path.name.startswith(checkpoint.SCRATCH):
            raise OSError(errno.EIO, "broken")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="broken"):
        save(checkpoints, 1, value=2)
    assert names(tmp_path) == ["step-000001"]


def test_a_partial_write(tmp_path: Path) -> None:
    """With a file size limit the kernel writes a part and rejects the next write, as on a full disk."""
    save(Checkpoints(tmp_path, 1), 1)

    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            Checkpoints(tmp_path, 1).save(2, {"policy": {"x": torch.zeros(1_000_000)}}, {})
        except OSError as error:
            (tmp_path / "error").write_text(str(error))

    os.waitpid(forked(fill), 0)
    error = (tmp_path / "error").read_text()
    assert f"{tmp_path}: can't write the checkpoint of step 2 (File too large)" in error
    assert names(tmp_path) == ["error", "step-000001"]


def test_a_lost_rank_is_no_disk_error(tmp_path: Path) -> None:
    """The supervisor of the ranks needs the ConnectionError."""
    save(Checkpoints(tmp_path, 1), 1)

    def write(folder: Path) -> None:
        raise ConnectionError("one of the 2 ranks is gone")

    with pytest.raises(ConnectionError, match="one of the 2 ranks is gone"):
        Checkpoints(tmp_path, 1).save(2, {"learner": write}, {})
    assert names(tmp_path) == ["step-000001"]


def test_state_that_is_not_json_is_rejected_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        Checkpoints(tmp_path / "run", 1).save(1, {}, {"x": torch.zeros(1)})
    assert not (tmp_path / "run").exists()
