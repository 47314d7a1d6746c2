"""How long the engine has nothing to do, and how long the learner waits for rollouts, if groups start all the time
(train.inflight = "keep" or "recompute") and batch by batch ("drain").

    python benchmarks/async/idle.py [--staleness 1,2] [--ratio 0.1,0.25,0.5] [--steps 32] [--out FILE]

The episodes of the environment have a long tail (long_tail.py), so a batch waits for its longest one. Trainer, producer
and engine are Paceline's, with a tiny random model; the engine has as many slots as a batch has episodes. Time is
counted in engine steps (virtual_clock.py), so the machine does not matter. An update takes --ratio times as long as the
generation of a batch takes on average without overlap, which is measured first. "keep" and "recompute" differ only in
what they compute, so only "keep" runs.

Engine idle: engine steps per RL step in which a slot generates nothing, on average over the slots. All slots: of these,
the steps in which no slot generates anything. Counted from the end of the second RL step to the end of the last one
that the engine generates during.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

import long_tail  # noqa: E402
import tiny_run  # noqa: E402
from virtual_clock import VirtualClock  # noqa: E402

from paceline.build.config import load_config  # noqa: E402
from paceline.build.run import build_trainer  # noqa: E402

FIRST = 2  # step of the measurement
GROUPS, SAMPLES = 8, 4  # of an RL step
STOP = list(range(0, 256, 4))  # all tokens are about equally probable, so a turn has about four
SETTINGS = (
    "model.dtype=float32",
    f"engine.max_num_seqs={GROUPS * SAMPLES}",
    "engine.kv_tokens=262144",
    "speculation.method=none",
    "speculation.policy=static",
    "speculation.audit_every=0",
    "sampling.max_tokens=2000",
    "sampling.ignore_eos=true",
    f"sampling.stop_token_ids={STOP}",
    "task.kind=env",
    "task.name=long_tail:LongTail",
    "task.chat=false",
    "task.held_out=0",
    'reward.functions=["env"]',
    f"algorithm.num_generations={SAMPLES}",
    "learner.learning_rate=1e-4",
    f"train.groups_per_step={GROUPS}",
    "train.checkpoint_every=0",
    "train.tensorboard=false",
)


def measure(folder: Path, num_steps: int, staleness: int, inflight: str, update_ticks: int) -> dict[str, Any]:
    run = folder / f"{staleness} {inflight} {update_ticks}"
    settings = [f"model.name={str(folder / 'model')!r}", *SETTINGS, f"train.num_steps={num_steps}"]
    settings += [f"train.max_staleness={staleness}", f"train.inflight={inflight}"]
    callback = tiny_run.RecordingCallback()
    with closing(build_trainer(load_config(None, settings), callback, run=run)) as trainer:
        long_tail.STARTED.clear()  # the task has made an environment of each problem
        clock = VirtualClock(trainer, update_ticks)
        trainer.run()
    with (run / "rollouts.jsonl").open() as file:
        rollouts = [json.loads(line) for line in file]
    last = num_steps - 1 - staleness
    rows = clock.rows[clock.ends[FIRST - 1] : clock.ends[last]]
    counted, samples = last + 1 - FIRST, [(r["group"], r["sample"]) for r in rollouts]
    return {
        "staleness": staleness,
        "inflight": inflight,
        "step": len(rows) / counted,
        "idle": (len(rows) - sum(rows) / (GROUPS * SAMPLES)) / counted,
        "stopped": rows.count(0) / counted,
        "wait": sum(clock.waits[FIRST : last + 1]) / counted,
        "lengths": sorted(len(r["token_ids"]) for r in rollouts),
        "max_lag": max(r["step"] - version for r in rollouts for version, _ in r["versions"]),
        "num_stale": sum(m["num_groups_stale"] for m in callback.metrics),
        "num_twice": len(samples) - len(set(samples)),
        "num_missing": len(set(range(GROUPS * num_steps)) - {r["group"] for r in rollouts}),
    }


COLUMNS = "staleness, inflight   step  idle  all slots  learner waits  max lag   stale   twice missing"


def show(found: dict[str, Any], drain: dict[str, Any] | None = None) -> None:
    changes = ""
    if drain is not None:
        changes = "  " + ", ".join(f"{name} {found[name] / drain[name] - 1:+.0%}" for name in ("idle", "wait", "step"))
    counts = "".join(f"{found[name]:8}" for name in ("max_lag", "num_stale", "num_twice", "num_missing"))
    print(
        f"{found['staleness']} {found['inflight']:16} {found['step']:8.1f} {found['idle']:5.1f} "
        f"{found['stopped']:10.1f} {found['wait']:14.1f} {counts}{changes}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", default="1,2")
    parser.add_argument("--ratio", default="0.1,0.25,0.5", help="time of an update / generation time of a batch")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tiny_run.SCALE = 1.0
        tiny_run.write_model(folder / "model", max_positions=8192)
        alone = measure(folder, args.steps, 0, "drain", 0)
        lengths = alone["lengths"]
        print(
            f"{len(lengths)} episodes: {sum(lengths) / len(lengths):.0f} tokens on average, median "
            f"{lengths[len(lengths) // 2]}, longest {lengths[-1]}; a batch takes {alone['step']:.1f} engine steps"
        )
        for ratio in map(float, args.ratio.split(",")):
            update_ticks = round(ratio * alone["step"])
            print(f"an update takes {update_ticks} engine steps\n{COLUMNS}")
            for staleness in map(int, args.staleness.split(",")):
                drain, keep = (measure(folder, args.steps, staleness, each, update_ticks) for each in ("drain", "keep"))
                show(drain)
                show(keep, drain)
                results += [{"ratio": ratio, **drain}, {"ratio": ratio, **keep}]
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
