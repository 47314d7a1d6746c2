"""Find the interpreter that can import vLLM, and set the environment that vLLM runs in.

vLLM pins its own torch version, so it usually has a virtual environment of its own (`make setup-vllm` makes
`.venv-vllm`).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.cluster.probe import last_line

IMPORT_TIMEOUT_S = 300.0
WORKER = Path(__file__).with_name("vllm_worker.py")
REMEDY = "run `make setup-vllm` once (it makes .venv-vllm), or set PACELINE_VLLM_PYTHON to an interpreter that has vLLM"


def find_python() -> str:
    """The interpreter to run vLLM with. Raise ValueError with the remedy if there is none."""
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
    """That interpreter's vLLM version. It imports vLLM; raise ValueError with the reason if that fails."""
    try:
        return last_line([python, "-c", "import vllm; print(vllm.__version__)"], IMPORT_TIMEOUT_S)
    except ValueError as error:
        raise ValueError(f"{python} can't import vLLM: {error}; {REMEDY}") from None


def environment(threads: int) -> dict[str, str]:
    """For the benchmark's worker: one process with this many OpenMP threads. vLLM's own thread binding is off, because
    it is meant for vLLM's worker processes."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
    }


@contextmanager
def in_this_process() -> Iterator[None]:
    """Import vLLM and build its engine inside this context; vLLM reads its environment then. It runs in this process,
    except for tensor-parallel workers, logs only errors, sends no usage reports, and takes its KV size from
    engine.kv_tokens, not from VLLM_CPU_KVCACHE_SPACE."""
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
    """None removes a variable."""
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
