"""Where vLLM lives: the interpreter that can import it, and the environment it runs in.

vLLM pins its own torch, so it usually has a virtual environment of its own (`make setup-vllm` makes `.venv-vllm`).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

WORKER = Path(__file__).with_name("vllm_worker.py")
REMEDY = "run `make setup-vllm` once (it makes .venv-vllm), or set PACELINE_VLLM_PYTHON to an interpreter that has vLLM"


def find_python() -> str:
    """The interpreter to run vLLM with; ValueError with the remedy where there is none."""
    if chosen := os.environ.get("PACELINE_VLLM_PYTHON"):
        if not Path(chosen).exists():
            raise ValueError(f"PACELINE_VLLM_PYTHON = {chosen!r}: no such file; {REMEDY}")
        return chosen
    project = Path(__file__).parents[3]
    for folder in dict.fromkeys((Path.cwd(), project)):
        for name in ("bin/python", "Scripts/python.exe"):
            if (python := folder / ".venv-vllm" / name).exists():
                return str(python)
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    raise ValueError(f"vLLM was not found; {REMEDY}")


def version(python: str) -> str:
    """vLLM's version there, by really importing it; ValueError with the reason where that fails."""
    done = subprocess.run(
        [python, "-c", "import vllm; print(vllm.__version__)"], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"{python} can't import vLLM: {reason}; {REMEDY}")
    return done.stdout.strip().splitlines()[-1]


def environment(threads: int) -> dict[str, str]:
    """One process, whose OpenMP threads are ours to set: vLLM's own binding belongs to its worker processes."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
    }


@contextmanager
def in_this_process() -> Iterator[None]:
    """vLLM reads its environment when it is imported and when an engine is made: here, without processes of its own
    but for workers that a model is cut over, without talk, without reports to its makers, and without a variable that
    would make nothing of engine.kv_tokens."""
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_CPU_KVCACHE_SPACE": None,
    }
    before = {name: os.environ.get(name) for name in wanted}
    _set(wanted)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    """None: it is not there."""
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
