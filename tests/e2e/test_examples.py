"""The examples run, on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
