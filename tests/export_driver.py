"""Exports a run in a process of its own and prints how much its peak memory rose, in bytes.

    python tests/export_driver.py RUN DIRECTORY VARIANT

VARIANT is "right", or one of these broken implementations: "maps" maps the checkpoint to memory, "collects" reads all
tensors before it writes the first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig  # noqa: F401  (imported by an export; not to be counted)

from paceline.build.config import load_config
from paceline.build.export import export_policy
from paceline.model.store import load_tokenizer
from paceline.rl import shards, stored_policy


def resident_bytes(key: str) -> int:
    """VmRSS or VmHWM, the peak. Not getrusage: its peak is inherited from the process that started this one."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(key)).split()[1]) << 10


def break_it(variant: str) -> None:
    if variant == "maps":
        stored_policy.Shards = lambda folder, mapped: shards.Shards(folder)  # type: ignore[assignment,misc]
    elif variant == "collects":
        weights = stored_policy.StoredPolicy.weights

        def all_weights(self: Any, dtype: Any) -> Iterator[Any]:
            return iter(list(weights(self, dtype)))

        stored_policy.StoredPolicy.weights = all_weights  # type: ignore[method-assign]


if __name__ == "__main__":
    run, directory, variant = sys.argv[1:]
    config = load_config(Path(run) / "config.toml")
    load_tokenizer(config.model.name)
    break_it(variant)
    before = resident_bytes("VmRSS")
    export_policy(config, Path(run), Path(directory))
    print(resident_bytes("VmHWM") - before)
