"""Files from untrusted sources: archive bombs, links, paths outside of the folder, JSON of another type. Each gives an
error message that names the file, within seconds, without a traceback and with little memory."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB_SIZE, write_tokenizer
from fake_run import make_run
from safetensors.torch import load_file, save_file
from support import tiny_decoder, tiny_head
from typer.testing import CliRunner

from paceline.build.config import load_config
from paceline.cli import app
from paceline.config_io import ConfigError
from paceline.files import replace_file
from paceline.model.head_files import load_head, save_head
from paceline.model.hf_decoder import load_hf
from paceline.model.hf_directory import INDEX, SINGLE
from paceline.model.provenance import Provenance
from paceline.model.weights import ModelError, load, read_config
from paceline.model.weights import save as save_model
from paceline.report.html import write_report
from paceline.rl.checkpoint import STATE, Checkpoints
from paceline.rl.folder import RunFolder
from paceline.rl.resume import find_checkpoint

DEEP = "[" * 100_000
SECONDS = 10.0  # generous: the machine may be busy


@pytest.fixture(autouse=True)
def within_seconds() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 6 * SECONDS


@pytest.fixture
def model(tmp_path: Path) -> Path:
    decoder = tiny_decoder(torch.float32, vocab_size=VOCAB_SIZE, eos_token_ids=(VOCAB_SIZE - 1,))
    save_model(decoder, tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    save_head(tiny_head(decoder, VOCAB_SIZE), tmp_path / "head", Provenance("tiny", None, "none", 0, 0, 0))
    return tmp_path / "model"


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def error_of(*arguments: object) -> str:
    """The output of a command that must exit with 2, without a traceback."""
    start = time.monotonic()
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert time.monotonic() - start < SECONDS
    return " ".join(result.output.split())


# ---- models ----


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**12),
        ("hidden_size", 10**12),
        ("intermediate_size", 10**18),
        ("num_attention_heads", 10**9),
        ("head_dim", 10**9 * 2),
        ("max_position_embeddings", 10**10),
        ("vocab_size", 10**400),
    ],
)
def test_a_model_with_impossible_sizes(model: Path, key: str, value: int) -> None:
    change(model / "config.json", **{key: value})
    with pytest.raises(ModelError, match=rf"model: config\.json: {key} = 10*….*|model: config\.json: {key} = "):
        read_config(model)
    with pytest.raises(ModelError, match=key):
        load(model)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_hidden_layers", 999, r"missing tensors.*model\.layers\.3\."),
        ("vocab_size", 9_000_000, r"wrong shapes.*embed_tokens"),
        ("intermediate_size", 9_000_000, r"wrong shapes.*mlp"),
    ],
)
def test_a_config_with_larger_sizes_than_the_files(
    model: Path, key: str, value: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Possible sizes that do not match the files: detected before memory is allocated."""
    monkeypatch.setattr("paceline.model.weights._empty", lambda *_: pytest.fail("memory was allocated"))
    change(model / "config.json", **{key: value})
    with pytest.raises(ModelError, match=message):
        load(model)
    with pytest.raises(ModelError, match=r"model"):
        load_hf(model, torch.float32, "cpu")


def test_transformers_does_not_build_a_billion_layers(model: Path) -> None:
    change(model / "config.json", num_hidden_layers=10**9)
    with pytest.raises(ModelError, match=r"model: .*num_hidden_layers = 1000000000: must be at most"):
        load_hf(model, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("key", "value"),
    [("architectures", [[]]), ("rope_parameters", {"rope_type": {}}), ("layer_types", 5), ("vocab_size", [])],
)
def test_a_config_with_wrong_types(model: Path, key: str, value: object) -> None:
    change(model / "config.json", **{key: value})
    with pytest.raises(ModelError, match=r"model: config\.json: (architecture|rope_type|layer_types|vocab_size)"):
        load(model)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", [DEEP, "[]", '{"a": ' * 50_000, "\x00", "1" * 5000])
def test_a_config_that_is_not_an_object(model: Path, name: str, text: str) -> None:
    (model / name).write_text(text)
    assert name in error_of("generate", "hi", "--model", model)


def test_a_huge_json_document(model: Path) -> None:
    with (model / "config.json").open("wb") as file:
        file.truncate(40 << 30)  # a sparse file of zeros
    with pytest.raises(ModelError, match=r"config\.json: larger than 64 MB"):
        read_config(model)


def sharded(directory: Path, name: object) -> None:
    """Moves the tensors to the file `name`, which the index then names for every tensor."""
    tensors = load_file(directory / SINGLE)
    (directory / SINGLE).unlink()
    if isinstance(name, str):
        place = directory / name
        place.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, place)
    (directory / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))


@pytest.mark.parametrize("kind", ["model", "head"])
@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "ABSOLUTE", "inner/../../elsewhere.safetensors", 7, ""])
def test_shards_outside_the_directory(model: Path, tmp_path: Path, kind: str, name: object) -> None:
    target = read_config(model)
    directory = tmp_path / kind
    where = str(tmp_path / "elsewhere.safetensors") if name == "ABSOLUTE" else name
    sharded(directory, where if where != "" else None)
    with pytest.raises(ModelError, match=rf"{INDEX}: weight_map has .* not a file name in this directory"):
        load(directory) if kind == "model" else load_head(directory, target)


def test_shards_may_be_links_into_the_hub_cache(model: Path, tmp_path: Path) -> None:
    sharded(model, "model-00001-of-00001.safetensors")
    shard = model / "model-00001-of-00001.safetensors"
    (tmp_path / "blobs").mkdir()
    shutil.move(shard, tmp_path / "blobs" / "abc")
    shard.symlink_to(tmp_path / "blobs" / "abc")
    load(model)


@pytest.mark.parametrize(
    "template",
    ["{% include 'etc/passwd' %}", "{% import 'x' as y %}", "{{ 1 / 0 }}", "{{ messages[9].role }}", "{% for %}"],
)
def test_a_chat_template_that_fails(model: Path, tmp_path: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    output = error_of("generate", "hi", "--model", model)
    assert "chat template refuses" in output and str(model) in output and "--raw" in output
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text(json.dumps({"prompt": [{"role": "user", "content": "hi"}], "completion": "ho"}) + "\n")
    output = error_of("replay", rollouts, "--tokenizer", model, "--batch", "1", "--policy", "static:1")
    assert "rollouts.jsonl, line 1" in output and "chat template refuses" in output


# ---- tasks, prompts, rollouts ----


def bomb(path: Path, line: bytes, num_bytes: int) -> None:
    """A gzip file of many equal members, which is quick to make."""
    chunk = line * ((8 << 20) // len(line))
    path.write_bytes(gzip.compress(chunk) * (num_bytes // len(chunk)))


def test_an_archive_bomb(tmp_path: Path) -> None:
    """Rows, one endless line, blank lines. Read in a process with a limit of 1 GB of additional memory; each archive
    expands to 3 GB."""
    paths = [tmp_path / f"{name}.jsonl.gz" for name in ("rows", "line", "blank")]
    for path, line in zip(paths, (b'{"prompt": "a"}\n', b" ", b"\n"), strict=True):
        bomb(path, line, 3 << 30)
        assert path.stat().st_size < 16 << 20
    program = """
import resource, sys, time
from pathlib import Path
from paceline.bench.prompts import read_prompts
from paceline.config import TaskSection
from paceline.draft.data import Reader
from paceline.tasks.table import TableTask

class Plain(Reader):
    def example(self, record, where):
        return record

held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 30),) * 2)
for path in sys.argv[1:]:
    for read in (
        lambda: TableTask(TaskSection(kind="jsonl", name=path)),
        lambda: read_prompts(path),
        lambda: list(Plain(None, 9).read(Path(path))),
    ):
        start = time.monotonic()
        try:
            read()
        except ValueError as error:
            print(error)
        assert time.monotonic() - start < 10
"""
    done = subprocess.run([sys.executable, "-c", program, *map(str, paths)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    output = done.stdout.splitlines()
    expected = [f"{path}: the archive unpacks to more than 200 times its size" for path in paths for _ in range(3)]
    assert all(line.startswith(start) for line, start in zip(output, expected, strict=True))


def test_an_endless_line_is_detected_before_it_is_read(tmp_path: Path) -> None:
    """By the replay, which reads files of any size: at most the maximum length of a line is read."""
    path = tmp_path / "long.jsonl.gz"
    bomb(path, b" ", 3 << 30)
    reads = 0

    class Counted(gzip.GzipFile):
        def readline(self, size: int | None = -1) -> bytes:
            nonlocal reads
            reads += 1
            return super().readline(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gzip, "GzipFile", Counted)
        output = error_of("replay", path, "--batch", "1", "--policy", "static:1")
    assert "long.jsonl.gz, line 1: longer than 64 MB" in output and reads == 1


def test_real_archives_are_read(tmp_path: Path) -> None:
    from paceline.config import TaskSection
    from paceline.tasks.table import TableTask

    path = tmp_path / "real.jsonl.gz"
    rows = [json.dumps({"prompt": f"What is {i} + {i * i}?", "answer": str(i + i * i)}) for i in range(20_000)]
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    assert len(TableTask(TaskSection(kind="jsonl", name=str(path))).train) == 20_000 - 64


@pytest.mark.parametrize("text", [DEEP, "[]", "\x00", '{"prompt": ' * 50_000])
def test_lines_that_are_not_rows(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text + "\n")
    assert "rows.jsonl, line 1" in error_of("train", "task.kind=jsonl", f"task.name={path}", "--dry-run")
    assert "rows.jsonl, line 1" in error_of("generate", "--prompts", path)
    assert "rows.jsonl, line 1" in error_of("replay", path)


def test_toml_that_is_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("a = " + DEEP)
    assert "deep.toml is not valid TOML: nested too deep" in error_of("train", path)
    assert "deep.toml is not valid TOML: nested too deep" in error_of("simulate", "nvidia-8b-zero", f"hardware={path}")
    trace = tmp_path / "steps.json"
    trace.write_text(DEEP)
    assert "steps.json: neither JSON nor jsonl" in error_of("simulate", "nvidia-8b-zero", "--fit", trace)


# ---- runs ----


@pytest.mark.parametrize("text", ["[]", "null", DEEP, "{", "7"])
def test_a_run_json_that_is_not_an_object(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path / "run", 2)
    (run / "run.json").write_text(text)
    for arguments in (["report", run], ["train", "--resume", run], ["train-draft", "--resume", run]):
        assert f"{run / 'run.json'}: " in error_of(*arguments)
    assert "run.json is left out" in write_report(run).read_text()


@pytest.mark.parametrize(("found", "message"), [
    (None, "an older version of Paceline (format 1; this one reads 3)"), (4, "a newer version of Paceline (format 4;")
])  # fmt: skip
def test_a_run_of_another_format(tmp_path: Path, found: int | None, message: str) -> None:
    run = make_run(tmp_path / "run", 2)
    info = json.loads((run / "run.json").read_text())
    del info["format"]
    (run / "run.json").write_text(json.dumps(info | ({} if found is None else {"format": found})))
    for arguments in (
        ["report", run], ["train", "--resume", run], ["train-draft", "--resume", run], ["replay", run], ["advise", run],
        ["simulate", "nvidia-8b-zero", f"rollouts={run}"], ["export", run, tmp_path / "model"],
    ):  # fmt: skip
        assert f"{run} was written by {message}" in error_of(*arguments), arguments
    with pytest.raises(ValueError, match="start a new run, or use the version that wrote it"):
        RunFolder.open(run)


def test_a_report_of_invalid_records(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    deep: Any = 1
    for _ in range(400):
        deep = {"a": [deep]}
    for name in ("metrics", "rollouts", "trace"):
        path = run / f"{name}.jsonl"
        first = json.loads(path.read_text().splitlines()[0])
        with path.open("a") as file:
            file.write(DEEP + "\n")
            for value in (deep, 10**400, -(10**400), "\x1b[2J", [None]):
                for key in first:
                    file.write(json.dumps(first | {key: value}) + "\n")
    assert "(cut off or damaged)" in write_report(run).read_text()


def test_a_report_replaces_a_link_and_not_its_target(tmp_path: Path) -> None:
    run, victim = make_run(tmp_path / "run", 2), tmp_path / "victim"
    victim.write_text("precious")
    (run / "report.html").symlink_to(victim)
    result = CliRunner().invoke(app, ["report", str(run)])
    assert result.exit_code == 0, result.output
    assert victim.read_text() == "precious"
    assert not (run / "report.html").is_symlink() and "<!doctype html>" in (run / "report.html").read_text()
    (run / "report.html").unlink()
    (run / "report.html").symlink_to(tmp_path / "nowhere")
    write_report(run)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "name", ["run.json", "config.toml", "metrics.jsonl", "rollouts.jsonl", "trace.jsonl", "summary.json"]
)
def test_a_report_contains_nothing_from_outside_the_run(tmp_path: Path, name: str) -> None:
    run, private = make_run(tmp_path / "run", 2), tmp_path / "private"
    text = (run / name).read_text()
    marked = (
        f"# S3CRET\n{text}" if name == "config.toml" else text.replace("suffix", "S3CRET").replace("grpo", "S3CRET")
    )
    private.write_text(marked.replace("chain_sum", "S3CRET"))
    (run / name).unlink()
    (run / name).symlink_to(private)
    page = write_report(run).read_text()
    assert "S3CRET" not in page
    assert f"{name} is left out: a link" in page


def test_a_report_does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    (run / "trace.jsonl").unlink()
    os.mkfifo(run / "trace.jsonl")
    assert "trace.jsonl is left out: not a plain file" in write_report(run).read_text()


def test_a_resume_does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    with closing(RunFolder.create(tmp_path / "run", "", {})) as folder:
        os.mkfifo(folder.path / "checkpoint.json")
        with pytest.raises(ValueError, match=r"checkpoint\.json is damaged"):
            folder.last_checkpoint()
        checkpoint = folder.checkpoints / "step-000001"
        checkpoint.mkdir(parents=True)
        os.mkfifo(checkpoint / "state.json")
        with (
            pytest.warns(RuntimeWarning, match="step-000001"),
            pytest.raises(ValueError, match="every checkpoint is damaged"),
        ):
            Checkpoints(folder.checkpoints, keep=1).latest()


def test_a_config_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match=r"config\.toml: not a plain file"):
        load_config(tmp_path / "config.toml")


@pytest.mark.parametrize("text", ["", '{"step": Infinity}', "[]"])
def test_a_damaged_note_about_checkpoints_stops_no_run_that_has_one(tmp_path: Path, text: str) -> None:
    with closing(RunFolder.create(tmp_path / "run", "", {})) as folder:
        checkpoints = Checkpoints(folder.checkpoints, keep=1)
        checkpoints.save(3, {}, {})
        (folder.path / "checkpoint.json").write_text(text)
        notes: list[str] = []
        found = find_checkpoint(folder, checkpoints, notes.append)
        assert found is not None and found.step == 3
        assert "checkpoint.json is damaged" in notes[0] and "step 3" in notes[0]


def test_a_disk_that_fails_for_a_moment_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (2, 4):
        checkpoints.save(step, {"a": {"x": torch.ones(2)}}, {})

    def fails(*args: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hashlib, "file_digest", fails)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoints.latest()
    monkeypatch.undo()
    found = checkpoints.latest()
    assert found is not None and found.step == 4


def test_a_file_is_replaced_without_a_look_at_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting it for a moment makes other threads' files writable for all."""
    monkeypatch.setattr(os, "umask", None)
    (tmp_path / "a").write_text("old")
    replace_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new" and list(tmp_path.iterdir()) == [tmp_path / "a"]
    monkeypatch.undo()
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "a", b"new")
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_a_run_does_not_write_through_links(tmp_path: Path) -> None:
    """Otherwise the target would be appended to, truncated or overwritten."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with closing(RunFolder.create(tmp_path / "run", "", {})) as run:
        for name in ("metrics.jsonl", "summary.json"):
            (run.path / name).symlink_to(victim)
        (run.path / "config.toml").unlink()
        (run.path / "config.toml").symlink_to(victim)
        for write in (lambda: run.append("metrics", [{"step": 0}]), lambda: run.truncate({})):
            with pytest.raises(ValueError, match=r"metrics\.jsonl: a link; links in a run's folder are not followed"):
                write()
        run.write_json("summary.json", {"a": 1})
        run.write_config("b = 2\n")
        assert json.loads((run.path / "summary.json").read_text()) == {"a": 1}
        assert (run.path / "config.toml").read_text() == "b = 2\n"
    (run.path / ".lock").unlink()
    (run.path / ".lock").symlink_to(victim)
    with pytest.raises(ValueError, match=r"\.lock: a link"):
        RunFolder(run.path)
    assert victim.read_text() == "precious"


# ---- checkpoints ----


def saved(tmp_path: Path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    checkpoints.save(1, {"head": {"a": torch.zeros(2)}}, {"x": 1, "alarms": {"length": None}})
    return checkpoints


def rewrite(checkpoints: Checkpoints, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edits a checkpoint and updates its checksum."""
    path = checkpoints.folder / "step-000001" / STATE
    content = json.loads(path.read_text())
    content.pop("checksum")
    edit(content)
    content["checksum"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.pop("files"), "lacks 'files'"),
        (lambda c: c.pop("step"), "lacks 'step'"),
        (lambda c: c.update(state=[]), "lacks 'state'"),
        (lambda c: c["files"].update({"head.safetensors": {}}), "has no size and hash of head.safetensors"),
        (lambda c: c["files"].update({"head.safetensors": 3}), "has no size and hash of head.safetensors"),
        (lambda c: c["files"].update({"../../secret": c["files"]["head.safetensors"]}), "outside of the checkpoint"),
        (lambda c: c["files"].update({"/etc/passwd": c["files"]["head.safetensors"]}), "outside of the checkpoint"),
    ],
)
def test_an_invalid_checkpoint(tmp_path: Path, edit: Callable[[dict[str, Any]], object], message: str) -> None:
    checkpoints = saved(tmp_path)
    rewrite(checkpoints, edit)
    with (
        pytest.warns(RuntimeWarning, match=f"step-000001 is damaged.*{message}"),
        pytest.raises(ValueError, match=r"checkpoints: every checkpoint is damaged \(step-000001\)"),
    ):
        checkpoints.latest()


def test_a_state_that_is_nested_too_deeply(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path)
    (checkpoints.folder / "step-000001" / STATE).write_text(DEEP)
    with pytest.warns(RuntimeWarning, match="not as it was written"), pytest.raises(ValueError, match="damaged"):
        checkpoints.latest()


def test_missing_keys_are_named_when_restoring(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path).latest()
    assert checkpoint is not None
    for look_up, missing in (
        (lambda: checkpoint.state["alarms"]["below_floor"], "lacks 'below_floor'"),
        (lambda: checkpoint.tensors("head")["version"], "lacks 'version'"),
        (lambda: checkpoint.tensors("buffer"), "can't be read"),
    ):
        with pytest.raises(ValueError, match=f"step-000001: the checkpoint {missing}"), checkpoint.loading():
            look_up()
