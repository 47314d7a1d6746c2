"""What speculation brings in a real RL run on one GPU. README.md describes the parts.

    python benchmarks/real/study.py PART --model DIR --data gsm8k-train.jsonl --out DIR [options] [A.B=C …]

Parts: record, heads, audit, online, long, step, stale, curves, table. Every part continues where it was stopped or
killed, and repeats nothing that is measured. Exit code 3: it was stopped by --limit-s; the same command continues it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import audits
import figures
import heads
import runs
from results import Results
from settings import NUM_AUDITS, LimitReached, Study

PARTS = {
    "record": runs.record, "heads": heads.train_heads, "audit": audits.audit, "online": runs.online,
    "long": audits.long, "step": runs.step, "stale": runs.stale, "curves": runs.curves, "table": figures.table,
}  # fmt: skip
STOPPED = 3  # exit code


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_intermixed_args(argv)
    args.work = args.work or args.out / "work"
    study = Study(args, args.part, Results(args.out))
    if args.part != "table":
        study.append("machine", study.describe())
    try:
        PARTS[args.part](study)
    except LimitReached:
        print(f"{args.part}: stopped by --limit-s {args.limit_s:g}; the same command continues it", flush=True)
        return STOPPED
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("part", choices=PARTS)
    found.add_argument("settings", nargs="*", metavar="A.B=C", help="config overrides, the same for all parts")
    found.add_argument("--model", default="qwen2.5-coder-1.5b-instruct-q4_k_m", help="a name or a directory")
    found.add_argument("--data", type=Path, default=Path("gsm8k-train.jsonl"), help="problems: question and answer")
    found.add_argument("--prompts", type=Path, help="jsonl with general prompts for the general head")
    found.add_argument("--out", type=Path, required=True, help="folder of the results: small files")
    found.add_argument("--work", type=Path, help="folder of runs, weights and heads: large (default: OUT/work)")
    found.add_argument("--limit-s", type=float, default=float("inf"), help="stop before so many seconds have passed")
    found.add_argument("--only", help="heads, online, step, stale, curves: these runs or heads, by name")
    found.add_argument("--num-steps", type=int, default=60, help="RL steps of record, online and curves")
    found.add_argument("--problems", type=int, default=1280, help="training problems of a run: one epoch")
    found.add_argument("--steps", type=numbers, default=[1, 20, 40, 60], help="RL steps that are audited")
    found.add_argument("--short-steps", type=int, default=24, help="step, stale: RL steps")
    found.add_argument("--batch", type=numbers, help="audit, step: batch sizes; long: one")
    found.add_argument("--drafters", help=f"audit, long: of {', '.join(audits.DRAFTERS)}")
    found.add_argument("--lengths", help="audit: of auto,1,3,5,7; long: of auto,das,1,3,5,7")
    found.add_argument(
        "--rounds",
        type=int,
        help=f"audit, long: audits of a cell ({NUM_AUDITS}); step: runs of a mode ({runs.NUM_ROUNDS})",
    )
    found.add_argument("--requests", type=int, default=32, help="audit: at least so many samples in one; long: 4 times")
    return found


def numbers(text: str) -> list[int]:
    return sorted({int(number) for number in text.split(",")})


if __name__ == "__main__":
    sys.exit(main())
