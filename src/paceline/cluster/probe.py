"""Run a check in a process of its own: importing a library may be slow, hang, or crash."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

TIMEOUT_S = 120.0


def run_module(module: str, *args: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Run `python -m MODULE ARGS…` and parse its last line of output as JSON."""
    return json.loads(last_line([sys.executable, "-m", module, *args], timeout_s))


def last_line(command: list[str], timeout_s: float) -> str:
    """Run a command and return its last line of output. Raise ValueError with the last line of stderr if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ValueError(f"no answer within {timeout_s:g} s") from None
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"])[-1])
    return done.stdout.strip().splitlines()[-1]
