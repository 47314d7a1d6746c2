"""Acceptance length, speed-up and reward of RL runs with an EAGLE-3 head from general text or from the run's domain,
with and without online training, and with other draft lengths (docs/how-to/heads.md).

    python benchmarks/adaptation/grid.py --general DIR --in-domain DIR [--jobs N] [--out DIR] [a.b=c …]

Each run is `paceline train run.toml` with a few overrides. benchmarks/shipped_head trains the heads. Prints one line
per run and writes all results to grid.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def cells(general: str, in_domain: str) -> dict[str, list[str]]:
    """The config overrides of each run, by name."""

    def cell(head: str, k: int, online: str) -> list[str]:
        return [f"speculation.head={head!r}", f"speculation.num_speculative_tokens={k}", f"draft.online={online}"]

    found = {
        f"{name}, {'online' if online == 'every' else 'offline'}, k=3": cell(head, 3, online)
        for name, head in (("general", general), ("in-domain", in_domain))
        for online in ("off", "every")
    }
    return found | {f"in-domain, offline, k={k}": cell(in_domain, k, "off") for k in (1, 5, 7)}


def run(name: str, overrides: list[str], out: Path, threads: int) -> dict[str, Any]:
    folder = out / name.replace(", ", "-").replace("=", "")
    started = time.perf_counter()
    command = [sys.executable, "-m", "paceline.cli", "train", str(HERE / "run.toml"), *overrides]
    with (out / f"{folder.name}.log").open("w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        subprocess.run([*command, "--run", str(folder)], stdout=log, stderr=log, env=environment, check=True)
    summary = json.loads((folder / "summary.json").read_text())
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    quarter = max(1, len(metrics) // 4)

    def length(part: list[dict[str, Any]]) -> float:
        drafts, accepted = (sum(m[key] for m in part) for key in ("num_drafts", "num_accepted_tokens"))
        return 1 + accepted / max(1, drafts)

    return {
        "name": name,
        "acceptance": length(metrics),
        "first_quarter": length(metrics[:quarter]),
        "last_quarter": length(metrics[-quarter:]),
        "speedup": summary["generation_speedup"],
        "tail_speedup": summary["tail_speedup"],
        "identical": summary["identical"],
        "reward": [summary["reward_before"], summary["reward_after"]],
        "num_tokens": summary["num_tokens"],
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--general", required=True)
    parser.add_argument("--in-domain", required=True)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; more than 1 makes speed-ups less exact")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/adaptation"))
    parser.add_argument("overrides", nargs="*", help="config overrides for every run, as in `paceline train`")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        started = [
            pool.submit(run, name, [*own, *args.overrides], args.out, args.threads)
            for name, own in cells(args.general, args.in_domain).items()
        ]
        results = [each.result() for each in started]
    for result in results:
        tail = " ".join(f"{rows}: {ratio:.2f}x" for rows, ratio in result["tail_speedup"].items())
        print(
            f"{result['name']:32} accepted {result['acceptance']:.2f} ({result['first_quarter']:.2f} -> "
            f"{result['last_quarter']:.2f})  whole {result['speedup']:.2f}x  running {tail}  "
            f"identical {result['identical']}  {result['seconds']:.0f} s"
        )
    (args.out / "grid.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
