"""A running `paceline serve`, for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI

SPECULATION = {"method": "suffix", "policy": "static", "num_speculative_tokens": 3}


@dataclass(slots=True)
class Served:
    process: subprocess.Popen[str]
    url: str  # ends with /v1
    name: str  # of the model

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(**{"base_url": self.url, "api_key": "none", "max_retries": 0, "timeout": 120, **options})

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def serving(
    model: Path | str,
    *options: str,
    speculation: Mapping[str, Any] = SPECULATION,
    environment: dict[str, str] | None = None,
) -> Iterator[Served]:
    chosen = [f"speculation.{key}={value}" for key, value in speculation.items()]
    settings = [*chosen, "engine.max_num_seqs=16", "engine.kv_tokens=16384"]
    command = [sys.executable, "-m", "paceline", "serve", str(model), *settings, "--port", "0", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"serving (.+) at (http://\S+/v1)\n", line)
        assert found, f"the server did not start: {line!r}"
        yield Served(process, found[2], found[1])
    finally:
        process.kill()
        process.wait()
