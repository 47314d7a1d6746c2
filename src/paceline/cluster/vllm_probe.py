"""What there is of vLLM in this interpreter: whether all that our engine needs of it can be imported."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from paceline.cluster.probe import ask
from paceline.cluster.vllm_python import in_this_process

IMPORT_S = 300.0


def vllm_facts() -> dict[str, Any]:
    """`version`, and whether it has the weight-transfer `seam`; ValueError with the reason where it can't be used."""
    return ask(__name__, timeout_s=IMPORT_S)


if __name__ == "__main__":
    with in_this_process():
        import vllm

        import_module("paceline.cluster.vllm_engine")  # and with it all that it needs
        from paceline.cluster.vllm_extension import HAS_SEAM

    print(json.dumps({"version": vllm.__version__, "seam": HAS_SEAM}))
