from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from conftest import VOCAB_SIZE, write_tokenizer
from support import tiny_decoder, tiny_head
from typer.testing import CliRunner

from paceline.bench import rollout
from paceline.bench.process import WorkerError, WorkerProcess
from paceline.bench.rollout import Bench, Case, Settings
from paceline.build.config import load_config
from paceline.cli import app
from paceline.cluster import vllm_python
from paceline.report import plot
from paceline.report.table import write_json

ECHO = """
import os, subprocess, sys, time
print("noise on stdout")
class Worker:
    def load(self, **settings):
        return {"pid": os.getpid(), **settings}
    def run(self, what, **_):
        print("more noise")
        if what == "child":
            return {"pid": subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid}
        if what == "user":
            raise ValueError("a user's mistake")
        if what == "bug":
            raise KeyError("a bug")
        if what == "die":
            print("last message", file=sys.stderr); os._exit(3)
        if what == "hang":
            time.sleep(600)
"""


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def exits(pid: int, timeout_s: float = 10) -> bool:
    end = time.monotonic() + timeout_s
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


@pytest.fixture
def echo(tmp_path):
    path = tmp_path / "echo.py"
    path.write_text(ECHO)
    with contextlib.closing(WorkerProcess(path)) as worker:
        yield worker


def test_output_of_libraries_does_not_disturb_replies(echo):
    assert echo.call("load", a=[1, "é"])["a"] == [1, "é"]


def test_worker_errors_reach_the_parent_and_the_worker_goes_on(echo):
    with pytest.raises(WorkerError, match=r"^a user's mistake$"):
        echo.call("run", what="user")
    with pytest.raises(WorkerError, match="KeyError: 'a bug'"):
        echo.call("run", what="bug")
    assert echo.call("load")


def test_the_error_of_a_dead_worker_has_the_end_of_its_log(echo):
    with pytest.raises(WorkerError, match=r"exit code 3.*last message"):
        echo.call("run", what="die")
    with pytest.raises(WorkerError, match="exit code 3"):
        echo.call("load")


def test_close_ends_the_worker_and_its_children(echo):
    worker = echo.call("load")["pid"]
    child = echo.call("run", what="child")["pid"]
    assert alive(worker) and alive(child)
    echo.close()
    assert exits(worker) and exits(child)


class Scripted(WorkerProcess):
    """A worker with invented results. `log` records the calls."""

    log: ClassVar[list] = []

    def __init__(self, engine: str) -> None:
        self.engine = engine

    def call(self, cmd, **params):
        if cmd == "load":
            if self.engine == "vllm":
                raise WorkerError("no vLLM here")
            return {}
        self.log.append((self.engine, params))
        if self.engine == "hf" and params["mode"] == "suffix":
            raise WorkerError("hf has no suffix drafter")
        num = len(params["prompts"]) * params["max_tokens"]
        speed = {"paceline": 100, "hf": 50}[self.engine] * (2 if params["mode"] == "suffix" else 1)
        reply = {"seconds": num / speed, "num_tokens": num, "step_s": [1 / speed * (1.5 if params["k"] else 1)]}
        if self.engine == "paceline":
            drafts = {"num_drafts": 10, "num_draft_tokens": 40, "num_accepted_tokens": 15} if params["k"] else {}
            reply |= {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0} | drafts
            reply["accepted_per_position"] = [9, 4, 2] if params["k"] else []
        return reply

    def close(self):
        pass


@pytest.fixture
def scripted(monkeypatch, checkpoint):
    Scripted.log = []
    monkeypatch.setattr(Bench, "_start", lambda self, engine: Scripted(engine))
    settings = Settings(models=(str(checkpoint("llama")),), modes=("plain", "suffix"), batches=(1, 4), max_tokens=10)
    return Bench(settings, [f"prompt {i}" for i in range(40)])


def test_rows_have_results_or_notes(scripted):
    scripted.run()
    rows = {(r["engine"], r["mode"], r["batch"]): r for r in scripted.rows()}
    assert len(rows) == 12
    fast = rows["paceline", "suffix", 4]
    assert fast["tokens_per_s"] == pytest.approx(200)
    assert fast["speedup"] == pytest.approx(2)
    assert fast["mean_acceptance_length"] == pytest.approx(2.5)
    assert fast["acceptance_rate_per_position"] == pytest.approx([0.9, 0.4, 0.2])
    assert fast["step_cost"] == pytest.approx(0.75)
    assert fast["num_speculative_tokens"] == 4
    assert rows["paceline", "plain", 1]["num_speculative_tokens"] == 0
    assert rows["paceline", "plain", 1]["mean_acceptance_length"] == 1
    assert rows["hf", "plain", 4]["tokens_per_s"] == pytest.approx(50)
    assert rows["hf", "suffix", 4]["tokens_per_s"] is None
    assert rows["hf", "suffix", 4]["note"] == "hf has no suffix drafter"
    assert {rows["vllm", mode, batch]["note"] for mode in ("plain", "suffix") for batch in (1, 4)} == {"no vLLM here"}
    json.dumps(scripted.rows(), allow_nan=False)


def test_rounds_are_fair(scripted):
    """All engines get the same prompts. Every repeat has new prompts and starts with a different case."""
    scripted.run()
    rounds = [(engine, p["batch"] if "batch" in p else len(p["prompts"]), p) for engine, p in Scripted.log]
    by_cell: dict = {}
    for engine, batch, p in rounds:
        if p["mode"] == "plain":
            by_cell.setdefault((p["seed"], batch), {})[engine] = p["prompts"]
    assert all(cell["paceline"] == cell["hf"] for cell in by_cell.values())
    prompts = [tuple(map(tuple, cell["hf"])) for (_, batch), cell in by_cell.items() if batch == 4]
    assert len(prompts) == 4 and len({p for group in prompts for p in group}) == 16
    measured = [(engine, p["seed"]) for engine, batch, p in rounds if batch == 1 and p["mode"] == "plain" and p["seed"]]
    assert [engine for engine, _ in measured[:4]].count("hf") == 2
    firsts = {next(i for i, (_, _, p) in enumerate(rounds) if p["seed"] == seed) for seed in (1, 2, 3)}
    assert len({(rounds[i][0], rounds[i][1], rounds[i][2]["mode"]) for i in firsts}) > 1


def test_an_engine_that_stops_early_is_not_measured(scripted, monkeypatch):
    call = Scripted.call
    monkeypatch.setattr(Scripted, "call", lambda self, cmd, **p: call(self, cmd, **p) | {"num_tokens": 1})
    scripted.run()
    assert all(row["tokens_per_s"] is None for row in scripted.rows())
    assert any("stopped before" in row["note"] for row in scripted.rows())


def test_idle_workers_are_closed_if_memory_is_short(scripted, monkeypatch):
    monkeypatch.setattr(rollout, "available_memory", lambda: 0)
    sizes = []
    scripted.run(lambda case, what: sizes.append(len(scripted._pool)))
    assert max(sizes) == 1
    assert all(row["tokens_per_s"] for row in scripted.rows() if row["engine"] == "paceline")


def test_groups_share_prompts_and_problems(monkeypatch, checkpoint):
    Scripted.log = []
    monkeypatch.setattr(Bench, "_start", lambda self, engine: Scripted(engine))
    model = str(checkpoint("llama"))
    settings = Settings(models=(model,), engines=("paceline",), batches=(4,), num_generations=2, repeats=2)
    bench = Bench(settings, ["a", "b", "c"])
    bench.run()
    for _, params in Scripted.log:
        first, second, third, fourth = params["prompts"]
        assert first == second != third == fourth
        assert params["problems"][0] == params["problems"][1] != params["problems"][2]
    assert len({p["problems"][0] for _, p in Scripted.log}) == len(Scripted.log), (
        "a round used the history of an earlier round"
    )
    assert bench._paceline_config(Case(model, "paceline", "plain", 0, 4), Path(model)).engine.prefix_sharing
    with pytest.raises(ValueError, match="multiple"):
        Settings(models=(model,), batches=(1, 4), num_generations=2)


def test_modes_are_methods_with_or_without_a_policy(monkeypatch, checkpoint, tmp_path):
    """The worker gets the method; the config for its engine has the policy."""
    Scripted.log = []
    monkeypatch.setattr(Bench, "_start", lambda self, engine: Scripted(engine))
    monkeypatch.setattr(Scripted, "loaded", [], raising=False)
    call = Scripted.call

    def recorded(self, cmd, **params):
        if cmd == "load" and self.engine == "paceline":
            speculation = params["config"]["speculation"]
            self.loaded.append((speculation["method"], speculation["policy"], speculation["head"]))
        return call(self, cmd, **params)

    monkeypatch.setattr(Scripted, "call", recorded)
    head = tmp_path / "head"
    head.mkdir()
    modes = ("plain", "suffix", "suffix+auto", "hybrid+das", "eagle3")
    config = load_config(None, [f"speculation.head={str(head)!r}"])
    settings = Settings(models=(str(checkpoint("llama")),), modes=modes, batches=(1,), repeats=1, config=config)
    bench = Bench(settings, ["a", "b"])
    bench.run()
    assert Scripted.loaded == [
        ("none", "auto", str(head)),
        ("suffix", "auto", str(head)),
        ("suffix", "auto", str(head)),
        ("hybrid", "das", str(head)),
        ("eagle3", "auto", str(head)),
    ]
    assert {params["mode"] for _, params in Scripted.log} == {"plain", "suffix", "hybrid", "eagle3"}
    rows = {(row["engine"], row["mode"]): row for row in bench.rows()}
    assert [rows["paceline", mode]["policy"] for mode in modes] == [None, "auto", "auto", "das", "auto"]
    assert rows["paceline", "hybrid+das"]["mean_acceptance_length"] == pytest.approx(2.5)
    assert rows["hf", "suffix+auto"]["note"] == "hf has no policies: its draft length is fixed"
    assert rows["vllm", "hybrid+das"]["tokens_per_s"] is None


@pytest.mark.parametrize(
    ("mode", "overrides", "message"),
    [
        ("auto", [], r"--modes 'auto': a policy needs a method, such as suffix\+auto"),
        ("suffix+fast", [], "A mode is one of plain, ngram, suffix, draft_model, eagle3, dspark, hybrid"),
        ("plain+auto", [], "all but plain"),
        ("eagle", [], "A mode is one of"),
        ("draft_model", [], "--modes draft_model: speculation.draft_model is not set"),
        ("suffix+auto", ["speculation.rule=rejection"], r"--modes suffix\+auto: .*biases rule"),
    ],
)
def test_an_invalid_mode_is_refused(checkpoint, mode, overrides, message):
    with pytest.raises(ValueError, match=message):
        Settings(models=(str(checkpoint("llama")),), modes=("plain", mode), config=load_config(None, overrides))


@pytest.mark.parametrize("mode", ["eagle3", "hybrid", "hybrid+auto"])
def test_a_missing_head_is_an_error_before_any_work(monkeypatch, checkpoint, mode):
    monkeypatch.setattr(Bench, "_start", lambda self, engine: pytest.fail("an engine was started"))
    arguments = [
        "bench",
        "rollout",
        "--engines",
        "paceline",
        "--modes",
        f"plain,{mode}",
        "--model",
        str(checkpoint("llama")),
        "--max-tokens",
        "8",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert f"--modes {mode}: no EAGLE-3 head" in result.output and "paceline train-draft" in result.output


def test_finding_the_python_of_vllm(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(vllm_python, "__file__", str(tmp_path / "a/b/c/d.py"))
    monkeypatch.setattr(vllm_python.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="make setup-vllm"):
        vllm_python.find_python()
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert vllm_python.find_python() == str(python)
    monkeypatch.setenv("PACELINE_VLLM_PYTHON", "/no/python")
    with pytest.raises(ValueError, match="/no/python"):
        vllm_python.find_python()


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_real_bench(checkpoint, tmp_path):
    """paceline and transformers, in their own processes, on a tiny model."""
    out, page, picture = (tmp_path / f"out.{kind}" for kind in ("json", "html", "png"))
    arguments = [
        "bench",
        "rollout",
        "--model",
        str(checkpoint("llama")),
        "--engines",
        "paceline,hf",
        "--modes",
        "plain,ngram",
    ]
    arguments += ["--batch", "1,2", "--max-tokens", "6", "--repeats", "1", "--threads", "1"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(out), "--plot", str(page)])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["interrupted"] is False
    assert [r["note"] for r in report["rows"] if r["tokens_per_s"] is None] == [
        "transformers speculates at batch size 1 only"
    ]
    assert "data:image/png;base64," in page.read_text()
    plot.save(report["rows"], rollout.COLUMNS, picture, "title")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_real_bench_of_every_method_and_policy(tmp_path, monkeypatch):
    """In this process, on a tiny model with a head. `load` measures the cost table, so it is in no round's time."""
    from paceline.bench import paceline_worker
    from paceline.model.head_files import save_head
    from paceline.model.provenance import Provenance
    from paceline.model.weights import save

    class InProcess(Scripted):
        def __init__(self, engine: str) -> None:
            self.worker = paceline_worker.Worker()

        def call(self, cmd, **params):
            return getattr(self.worker, cmd)(**params)

    monkeypatch.setattr("paceline.build.cost.native", SimpleNamespace(cache_dir=lambda: tmp_path))  # no cached costs
    monkeypatch.setattr("paceline.build.cost.BUDGET_S", 0.1)
    monkeypatch.setattr("paceline.build.cost.REPEAT_BUDGET_S", 0.1)
    monkeypatch.setattr(Bench, "_start", lambda self, engine: InProcess(engine))
    decoder = tiny_decoder(torch.float32, vocab_size=VOCAB_SIZE, eos_token_ids=(VOCAB_SIZE - 1,))
    save(decoder, tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    head = tiny_head(decoder, VOCAB_SIZE)
    save_head(head, tmp_path / "head", Provenance("tiny", None, "nothing", 0, 0, 0), dtype=torch.float32)
    overrides = [f"speculation.head={str(tmp_path / 'head')!r}", "speculation.draft_model='layers:1'"]
    methods = ("ngram", "suffix", "draft_model", "eagle3", "hybrid")
    modes = [f"{method}{policy}" for method in methods for policy in ("+static", "+das", "+auto")]
    settings = Settings(
        models=(str(tmp_path / "model"),),
        engines=("paceline",),
        modes=("plain", *modes),
        draft_lengths=(3,),
        batches=(2,),
        num_generations=2,
        max_tokens=24,
        repeats=1,
        temperature=0.0,
        threads=1,
        config=load_config(None, overrides),
    )
    bench = Bench(settings, ["a b c a b c", "d e f d e f"])
    bench.run()
    rows = {row["mode"]: row for row in bench.rows()}
    assert {mode: row["note"] for mode, row in rows.items() if row["note"]} == {}
    for mode in ("plain", *modes):
        assert rows[mode]["tokens_per_s"] > 0 and rows[mode]["mean_acceptance_length"] >= 1
    for method in methods:  # the static policy always drafts
        row = rows[f"{method}+static"]
        assert row["num_drafts"] > 0
        rates = row["acceptance_rate_per_position"]
        assert row["mean_acceptance_length"] == pytest.approx(1 + sum(rates)) and rates == sorted(rates, reverse=True)
    json.dumps(list(rows.values()), allow_nan=False)


@pytest.mark.slow
def test_ctrl_c_reports_the_cases_measured_so_far(checkpoint, tmp_path):
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "paceline.cli", "bench", "rollout", "--model", str(checkpoint("llama"))]
    command += ["--engines", "paceline", "--batch", "1", "--max-tokens", "4", "--repeats", "1000000", "--threads", "1"]
    process = subprocess.Popen(
        [*command, "--json", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if "repeat 3" in line:
            break
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    workers = [int(pid) for pid in children.stdout.split()]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "tokens/s" in out
    report = json.loads(path.read_text())
    assert report["interrupted"] is True
    assert report["rows"][0]["tokens_per_s"] > 0
    assert len(workers) == 1 and exits(workers[0])


@pytest.mark.parametrize("mode", ["hybrid", "dspark"])
def test_vllm_has_no_such_drafter(mode: str) -> None:
    with pytest.raises(ValueError, match=f"paceline runs no {mode} drafter with vllm"):
        rollout._check_engine(Case("m", "vllm", mode, 3, 1))
    rollout._check_engine(Case("m", "paceline", mode, 3, 1))
