"""Inspect vLLM in this interpreter: whether it can be imported with everything that the engine needs."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from paceline.cluster.probe import run_module
from paceline.cluster.vllm_python import IMPORT_TIMEOUT_S, in_this_process


def vllm_facts() -> dict[str, Any]:
    """`version`, and whether it has a `weight_transfer` API. Raise ValueError with the reason if vLLM is unusable."""
    return run_module(__name__, timeout_s=IMPORT_TIMEOUT_S)


if __name__ == "__main__":
    with in_this_process():
        import vllm

        import_module("paceline.cluster.vllm_engine")  # imports all that the engine needs
        from paceline.cluster.vllm_extension import HAS_WEIGHT_TRANSFER

    print(json.dumps({"version": vllm.__version__, "weight_transfer": HAS_WEIGHT_TRANSFER}))
