"""The folder of a run that was not trained but replayed: a replay with known step times writes its trace and audits, so
that a test knows what the run would have measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from paceline.build.config import load_config
from paceline.build.replay import build_replay
from paceline.config_io import dump_config
from paceline.files import RUN_FORMAT
from paceline.replay.reader import Reader
from paceline.replay.rounds import RoundSplitter
from paceline.replay.run import Cell
from paceline.speculation.batch import Load
from paceline.types import StepTrace

NUM_STEPS, NUM_PROBLEMS, NUM_SAMPLES, MAX_TOKENS, BATCH = 3, 2, 4, 36, 8
TRAINING_S = 20.0


class CpuCosts:
    """Step times like those of a small model on two cores: every query token takes time, so most drafts do not pay."""

    frozen = True

    def step_s(self, load: Load) -> float:
        return float(self.steps_s(load, 0)[0])

    def steps_s(self, load: Load, num_extra: int) -> np.ndarray:
        query = load.num_query_tokens + np.arange(num_extra + 1)
        return 0.05 + 0.012 * query + 1e-5 * (load.num_context_tokens + np.arange(num_extra + 1))

    def draft_s(self, drafter: str, num_rows: int, k: int) -> float:
        return 0.0005 * num_rows if k else 0.0


def write_run(folder: Path, policy: str = "static:3", method: str = "suffix", noise: float = 0.1) -> float:
    """Returns the speed-up that the run's audits measured. `noise`: share of the steps that other processes make up to
    three times as long."""
    folder.mkdir(parents=True, exist_ok=True)
    kind, _, k = policy.partition(":")
    config = load_config(None, [
        f"speculation.method={method}", f"speculation.policy={kind}", f"speculation.num_speculative_tokens={k}",
        f"engine.max_num_seqs={BATCH}", "engine.max_num_batched_tokens=256", f"sampling.max_tokens={MAX_TOKENS}",
        f"algorithm.num_generations={NUM_SAMPLES}", f"train.groups_per_step={NUM_PROBLEMS}",
    ])  # fmt: skip
    (folder / "config.toml").write_text(dump_config(config))
    info = {"format": RUN_FORMAT, "name": "mine", "device": "cpu", "hardware": "Abacus 3000, 2 threads"}
    (folder / "run.json").write_text(json.dumps(info))
    random = np.random.default_rng(0)
    _write_rollouts(folder / "rollouts.jsonl", random)
    traces: list[StepTrace] = []
    seconds = {}
    for name, cell in (("plain", Cell(method, "static:0", BATCH)), ("speculative", Cell(method, policy, BATCH))):
        engine = build_replay(cell, CpuCosts(), prefill=True, max_num_batched_tokens=256)  # type: ignore[arg-type]
        if name == "speculative":
            engine.on_step = traces.append
        for recorded in RoundSplitter(MAX_TOKENS).split(Reader([str(folder)])):
            engine.run_round(recorded)
        seconds[name] = engine.now_s
    with (folder / "trace.jsonl").open("w") as file:
        for trace in traces:
            delay = random.uniform(1, 3) if random.random() < noise else 1.0
            factor = delay * random.uniform(0.97, 1.03)
            line = dataclasses.asdict(trace) | {"total_s": factor * trace.total_s, "draft_s": factor * trace.draft_s}
            file.write(json.dumps({"rl_step": trace.version, **line}) + "\n")
    generation_s = seconds["speculative"] / NUM_STEPS
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(NUM_STEPS):
            stages = {"generation": generation_s, "training": TRAINING_S, "total": generation_s + TRAINING_S}
            audit = {"plain_s": seconds["plain"], "speculative_s": seconds["speculative"]}
            line = {"step": step, "stages": stages, "num_tokens": NUM_PROBLEMS * NUM_SAMPLES * MAX_TOKENS * 0.8}
            file.write(json.dumps(line | ({"audit": audit} if step == NUM_STEPS - 1 else {})) + "\n")
    return seconds["plain"] / seconds["speculative"]


def _write_rollouts(path: Path, random: np.random.Generator) -> None:
    """Samples of a problem are similar to each other, and to those of earlier steps."""
    base = random.integers(0, 500, (NUM_PROBLEMS, MAX_TOKENS))
    with path.open("w") as file:
        for step in range(NUM_STEPS):
            for problem in range(NUM_PROBLEMS):
                for _ in range(NUM_SAMPLES):
                    num = int(random.integers(MAX_TOKENS // 2, MAX_TOKENS + 1))
                    other = random.integers(0, 500, num)
                    ids = np.where(random.random(num) < 0.8, base[problem, :num], other).tolist()
                    prompt_ids = [problem, *range(20)]
                    line = {"step": step, "problem": f"p{problem}", "prompt_ids": prompt_ids, "token_ids": ids,
                            "finish_reason": "stop", "versions": [[step, num]]}  # fmt: skip
                    file.write(json.dumps(line) + "\n")
