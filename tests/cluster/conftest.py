from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ray_runs import BASE
from tiny_run import make, settings

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """For Ray's processes: the path of the tests' reward functions, and one thread as in this process, so that sums
    are added in the same order."""
    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    settings(folder)  # writes the model and the task
    return folder


@pytest.fixture(scope="session")
def single_process_run(folder: Path) -> Path:
    """The same run without Ray."""
    trainer = make(folder, "single", *BASE)
    with contextlib.closing(trainer):
        assert trainer.run()["finished"]
    return folder / "single"
