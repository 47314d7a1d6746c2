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
    """What Ray's processes inherit: where the tests' own reward functions are, and one thread, as in this process, so
    that sums are added up in the same order."""
    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    settings(folder)  # writes model and task
    return folder


@pytest.fixture(scope="session")
def alone(folder: Path) -> Path:
    """The same run in one process."""
    loop = make(folder, "alone", *BASE)
    with contextlib.closing(loop):
        assert loop.run()["finished"]
    return folder / "alone"
