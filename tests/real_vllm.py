"""vLLM in a process of its own, through the bench's worker, for tests that compare it with Paceline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.bench.process import WorkerProcess
from paceline.cluster import vllm_python
from paceline.model import store

# Eager: compilation takes minutes, and these tests compare tokens, not speed.
EAGER = {"options": {"enforce_eager": True}}
# vLLM's CPU attention needs head sizes that are multiples of 32.
SHAPE = {"hidden_size": 128, "head_dim": 32}


def start_vllm(directory: Path, mode: str = "plain", **settings: Any) -> WorkerProcess:
    worker = WorkerProcess(vllm_python.WORKER, vllm_python.find_python(), vllm_python.environment(2))
    common = {"model": str(directory), "dtype": "float32", "max_num_seqs": 8, "max_model_len": 128}
    try:
        worker.call("load", **{**common, "mode": mode, "k": 3, **EAGER, **settings})
    except BaseException:
        worker.close()
        raise
    return worker


def greedy(worker: WorkerProcess, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    return worker.call("run", prompts=prompts, max_tokens=max_tokens, temperature=0.0, seed=0, logprobs=True)


def pulled_models() -> Iterator[Path]:
    yield from (path for name in store.KNOWN if (path := store.native.cache_dir() / "models" / name).is_dir())
