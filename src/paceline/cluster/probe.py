"""Questions that are better asked in a process of their own: a library may take long to import, hang, or end it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

TIMEOUT_S = 120.0


def ask(module: str, *words: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """What `python -m MODULE WORDS…` prints last, as JSON; ValueError with what it said last where it fails."""
    command = [sys.executable, "-m", module, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ValueError(f"no answer within {timeout_s:g} s") from None
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])
