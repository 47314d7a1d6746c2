"""The examples run, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from serving import serving
from tiny_run import write_head, write_model

ROOT = Path(__file__).parents[2]


def run(folder: Path, *command: str) -> str:
    """Run it in a temporary folder with links to `configs` and `examples`, so that runs/ is not the project's."""
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rollouts(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    printed = run(tmp_path, "examples/rollouts.py", str(tmp_path / "model"))
    assert printed.count("version 0, logprob") == printed.count("version 1, logprob") == 8
    assert "version 2 is in place" in printed


def test_generate(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    printed = run(tmp_path, "examples/generate.py", str(tmp_path / "model"))
    assert printed.count("'The capital of France is' → ") == printed.count("'1, 2, 3, 4,' → ") == 2
    assert printed.count(" of them drafted") == 4


def test_the_notebook(tmp_path: Path) -> None:
    """Its code, as a program. Its last cell but one shows a value."""
    write_model(tmp_path / "model")
    cells = json.loads((ROOT / "examples/generate.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert code.count('"smollm2-135m"') == 1
    (tmp_path / "notebook.py").write_text(code.replace('"smollm2-135m"', repr(str(tmp_path / "model"))))
    printed = run(tmp_path, "notebook.py")
    assert printed.count("tokens were drafted") == 8 and "s without drafts" in printed


def test_evaluate(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    problems = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(3)]
    problems[0]["answer"], problems[1]["answer"] = 1, "1,002.0"
    (tmp_path / "problems.jsonl").write_text("\n\n".join(map(json.dumps, problems)) + "\n\n")
    with serving(tmp_path / "model") as served:
        printed = run(tmp_path, "examples/evaluate.py", "problems.jsonl", served.url)
    assert printed.startswith("3 problems × 4 samples: accuracy 0.")


@pytest.mark.parametrize(
    ("text", "message"), [("\n", "has no problems"), ('{"prompt": "a", "answer": "yes"}', "'yes' is not a number")]
)
def test_evaluate_without_numbers(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "problems.jsonl").write_text(text)
    command = [sys.executable, str(ROOT / "examples/evaluate.py"), "problems.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_train(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    settings = f"model.name={str(tmp_path / 'model')!r}", "model.dtype=float64", "train.tensorboard=false"
    small = "train.groups_per_step=2", "algorithm.num_generations=2", "speculation.audit_every=0"
    printed = run(tmp_path, "examples/train.py", *settings, *small, *write_head(tmp_path))
    assert (
        "step 1: reward" in printed
        and "step 2: reward" in printed
        and "step 0" not in printed
        and "'finished': True" in printed
    )
