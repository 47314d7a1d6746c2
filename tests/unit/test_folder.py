"""The run folder: one writer, streams that can be truncated, settings that survive a round trip."""

from __future__ import annotations

import datetime
import json
import math
import os
import signal
import types
import typing
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.build.config import load_config
from paceline.build.run import build_sinks
from paceline.config import Config, MixedTaskSection, SpeculationSection, TaskSection
from paceline.config_io import as_section, dump_config
from paceline.files import RUN_FORMAT
from paceline.rl.folder import RunFolder, read_stream
from paceline.rl.logs import TensorBoardSink, WandbSink, scalars


def test_a_new_run(tmp_path: Path) -> None:
    config = dump_config(Config())
    with closing(RunFolder.create(tmp_path / "a" / "b", config, {"machine": "ours", "reward": math.nan})) as run:
        assert load_config(run.path / "config.toml") == Config()
        assert json.loads((run.path / "run.json").read_text()) == {
            "format": RUN_FORMAT,
            "machine": "ours",
            "reward": None,
        }
    with pytest.raises(ValueError, match=f"already holds a run.*--resume {run.path}"):
        RunFolder.create(run.path, config, {})
    with closing(RunFolder.open(run.path)) as again:
        assert again.path == run.path
    with pytest.raises(ValueError, match="holds no run"):
        RunFolder.open(tmp_path)
    with pytest.raises(ValueError, match="not empty"):
        RunFolder.create(tmp_path, config, {})
    with pytest.raises(ValueError, match="is a file"):
        RunFolder.create(run.path / "config.toml", config, {})


def test_every_run_gets_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = []
    for task in ("chain_sum", "chain_sum", "my data/gsm8k.jsonl", "module:Env", "..", "/"):
        config = Config(task=TaskSection(name=task))
        with closing(RunFolder.create(None, dump_config(config), {})) as run:
            paths.append(run.path)
            assert run.path.parent == Path("runs")
    assert len(set(paths)) == len(paths)
    tasks = [path.name.split("-2")[0] for path in paths]
    assert tasks == ["chain_sum", "chain_sum", "gsm8k", "module-Env", "run", "run"]


def test_one_writer(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "", {})
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"):
        RunFolder.open(run.path)
    run.close()
    RunFolder.open(run.path).close()


def test_the_lock_ends_with_its_process_even_if_a_child_lives(tmp_path: Path) -> None:
    """The process is killed, and its forked worker keeps running."""
    RunFolder.create(tmp_path / "run", "", {}).close()
    reader, writer = os.pipe()
    holder = os.fork()
    if not holder:
        run = RunFolder.open(tmp_path / "run")
        worker = os.fork()
        if worker:
            os.write(writer, b"%d\n" % worker)
        while True:
            signal.pause()
            assert run
    worker = int(os.read(reader, 20))
    with pytest.raises(ValueError, match=f"in use by process {holder}"):
        RunFolder.open(tmp_path / "run")
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    os.kill(worker, 0)  # it is alive
    try:
        RunFolder.open(tmp_path / "run").close()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_streams_are_truncated(tmp_path: Path) -> None:
    with closing(RunFolder.create(tmp_path / "run", "", {})) as run:
        run.append("metrics", [{"step": 1}, {"step": 2, "text": "ü"}])
        offsets = run.offsets()
        assert offsets == {"metrics": 38, "rollouts": 0, "trace": 0}
        run.append("metrics", [{"step": 3}])
        run.append("trace", [{"step": 3}])
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "to')
    assert [record["step"] for record in read_stream(run.path, "metrics")] == [1, 2, 3], "an incomplete line is skipped"
    with closing(RunFolder.open(run.path)) as run:
        run.truncate(offsets)
        assert list(run.read("metrics")) == [{"step": 1}, {"step": 2, "text": "ü"}]
        assert list(run.read("trace")) == []
        run.append("metrics", [{"step": 3, "again": True}])
        assert list(run.read("metrics"))[2:] == [{"step": 3, "again": True}]
        run.truncate({})
        assert run.offsets() == {"metrics": 0, "rollouts": 0, "trace": 0}
    assert list(read_stream(tmp_path, "metrics")) == [], "no file: no records"


def test_a_stream_that_is_shorter_than_its_checkpoint(tmp_path: Path) -> None:
    with closing(RunFolder.create(tmp_path / "run", "", {})) as run:
        run.append("rollouts", [{"step": 1}, {"step": 2}])
        offsets = run.offsets()
        os.truncate(run.path / "rollouts.jsonl", 15)
        with pytest.warns(RuntimeWarning, match=r"rollouts\.jsonl has 15 bytes, but the checkpoint recorded 24"):
            run.truncate(offsets)
        assert list(run.read("rollouts")) == [{"step": 1}]
        assert run.offsets()["rollouts"] == 12


def test_streams_are_valid_json(tmp_path: Path) -> None:
    odd = {
        "loss": math.nan,
        "deep": {"x": [1.0, -math.inf]},
        "n": np.float32(2),
        "a": np.array([1.5, np.nan]),
        "s": "\ud800",
    }
    with closing(RunFolder.create(tmp_path / "run", "", {})) as run:
        run.append("metrics", [odd])
        text = (run.path / "metrics.jsonl").read_text()
        found = json.loads(text, parse_constant=lambda value: pytest.fail(f"{value} is not JSON"))
        assert found == {"loss": None, "deep": {"x": [1.0, None]}, "n": 2.0, "a": [1.5, None], "s": "\ud800"}
        run.write_json("summary.json", odd | {"s": "ü"})
        assert json.loads((run.path / "summary.json").read_text())["a"] == [1.5, None]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with closing(RunFolder.create(tmp_path / "run", "", {})) as run:
        stream = run._stream("trace")
        os.dup2(os.open("/dev/full", os.O_WRONLY), stream.fileno())
        with pytest.raises(OSError, match=r"trace\.jsonl: can't write \(No space left on device\)"):
            run.append("trace", [{"step": 1}])


# ---- settings ----


def test_settings_round_trip(tmp_path: Path) -> None:
    config = load_config(
        None,
        [
            "speculation.num_speculative_tokens={1=6, 8=3}",
            'task.params={min_terms=2, deep={"odd key" = [1, 2.5, {x=true}], "" = []}, day=2026-01-02}',
            "task.params.when=2026-01-02T03:04:05Z",
            r'reward.answer_pattern="(?s)\\\\boxed\\{(.*)\"\\}\n\u007f\U0001F3B2"',
            "learner.learning_rate=3e-7",
            "sampling.seed=-5",
        ],
    )
    (tmp_path / "config.toml").write_text(dump_config(config), "utf-8")
    assert load_config(tmp_path / "config.toml") == config
    assert config.task.params["when"] == datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


texts = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    params=st.dictionaries(texts, values, max_size=4),
    name=texts,
    tokens=st.dictionaries(st.integers(1), st.integers(0, 256), min_size=1),
)
def test_random_settings_round_trip(
    tmp_path_factory: pytest.TempPathFactory, params: dict[str, Any], name: str, tokens: dict[int, int]
) -> None:
    config = Config(
        task=TaskSection(name=name, template=name, params=params),
        speculation=SpeculationSection(policy="static", num_speculative_tokens=tokens),
    )
    path = tmp_path_factory.getbasetemp() / "config.toml"
    path.write_bytes(dump_config(config).encode())
    assert load_config(path) == config
    assert repr(load_config(path)) == repr(config), "1, 1.0 and True are equal, but not the same"


def test_none_is_always_the_default() -> None:
    """Otherwise leaving the setting out would change it."""
    sections = [as_section(field.annotation) for field in Config.model_fields.values()]
    for section in filter(None, [*sections, MixedTaskSection]):
        for name, field in section.model_fields.items():
            if types.NoneType in typing.get_args(field.annotation):
                assert field.default is None, name


# ---- sinks ----


def test_scalars_are_flat_and_finite() -> None:
    metrics = {"reward": 1, "stages": {"generation": {"s": 2.5}, "x": math.nan}, "name": "a", "list": [1], "none": None}
    assert dict(scalars(metrics)) == {"reward": 1.0, "stages/generation/s": 2.5}


def test_tensorboard_logs_no_step_twice(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = TensorBoardSink(tmp_path)
    for step in range(1, 6):
        first.write(step, {"stages": {"generation": float(step)}})
    first.close()
    second = TensorBoardSink(tmp_path, purge_step=4)  # resumed from the checkpoint of step 3
    for step in range(4, 7):
        second.write(step, {"stages": {"generation": 10.0 * step}})
    second.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("stages/generation")]
    assert found == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0)]


def test_wandb_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    run = types.SimpleNamespace(log=lambda data, step: calls.append(("log", (step, data))), finish=lambda: None)
    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: calls.append(("init", settings)) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    for step in (1, 2):
        sink = WandbSink(tmp_path / "run", "project", "name", {"a": 1})
        sink.write(step, {"x": {"y": 3}})
        sink.close()
    ids = [settings["id"] for call, settings in calls if call == "init"]
    assert len(ids) == 2
    assert ids[0] == ids[1] != ""
    assert [logged for call, logged in calls if call == "log"] == [(1, {"x/y": 3.0}), (2, {"x/y": 3.0})]


@pytest.mark.parametrize(
    ("given", "project", "name"),
    [((), "paceline", "run"), (("train.wandb_project=sums", "train.wandb_name=first"), "sums", "first")],
)
def test_project_and_name_in_wandb(
    given: tuple[str, ...], project: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: calls.append(settings)  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    build_sinks(load_config(None, ["train.tensorboard=false", "train.wandb=true", *given]), tmp_path / "run", 1)
    assert [(call["project"], call["name"]) for call in calls] == [(project, name)]


def test_without_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ValueError, match=r"train\.wandb = true.*pip install wandb"):
        WandbSink(tmp_path, "project", "name", {})
