"""configs/gsm8k.toml and configs/gpu-gsm8k.toml get their problems from the hub; without access to it, the error says
what to do. In new processes, because the libraries read the hub's address when they are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import fake_hub

ROOT = Path(__file__).parents[2]
LOAD = """
import sys
from paceline.build.config import load_config
from paceline.build.task import build_task
task = build_task(load_config(sys.argv[1]))
print(len(task.train), len(task.held_out), task.train[0].columns["answer"].isdecimal(), "boxed" in task.train[0].prompt)
"""


def load(config: str, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    environment.pop("HF_HUB_OFFLINE", None)
    arguments = [sys.executable, "-c", LOAD, f"configs/{config}.toml"]
    return subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("config", "held_out"), [("gsm8k", 128), ("gpu-gsm8k", 512)])
def test_a_dataset_of_the_hub(config: str, held_out: int, tmp_path: Path) -> None:
    with fake_hub(num_problems=held_out + 40) as endpoint:
        result = load(config, endpoint, tmp_path)
    assert result.stdout.split() == ["40", str(held_out), "True", "True"], result.stderr[-2000:]


def test_without_access_to_the_hub(tmp_path: Path) -> None:
    result = load("gsm8k", "http://127.0.0.1:9", tmp_path)
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    assert "task.name = 'openai/gsm8k'" in message and "can't be loaded" in message
    assert "task.kind=jsonl task.name=FILE.jsonl task.params={}" in message
