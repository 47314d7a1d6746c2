"""benchmarks/host.py runs with and without a GPU, and its phases add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "host.py"


def test_it_times_every_kind_of_step(tmp_path: Path) -> None:
    args = ["--rows", "3", "--rounds", "1", "--steps", "60", "--length", "60", "--json", str(tmp_path / "host.json")]
    subprocess.run([sys.executable, str(SCRIPT), *args], check=True, capture_output=True, timeout=120)
    rows = json.loads((tmp_path / "host.json").read_text())
    assert [row["kind"] for row in rows] == ["plain", "static", "auto"]
    for row in rows:
        phases = [row[name] for name in ("schedule", "propose", "reserve", "launch", "commit", "finish", "else")]
        assert min(phases) > 0 and abs(sum(phases) - row["step_us"]) < 1e-6 * row["step_us"]
    plain, static, auto = (row["emitted"] for row in rows)
    assert 0.9 < plain <= 1 and static > 2.5 and auto > 2  # rows that are in their prefill emit less
