"""Trains the EAGLE-3 heads of the study with the code of `paceline train-draft`, on the model's own samples: a general
one, an in-domain one, and one with random weights.

The in-domain head is trained on problems that no RL run of the study trains on or evaluates.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shipped_head"))

from settings import LimitReached, Study, free_memory
from topics import TEMPLATES, TOPICS

from paceline.bench.prompts import read_prompts
from paceline.build.draft_run import build_draft_trainer
from paceline.build.task import build_task
from paceline.files import read_lines, replace_file
from paceline.model.eagle3 import init_head
from paceline.model.head_files import load_head, save_head
from paceline.model.provenance import Provenance
from paceline.model.store import resolve
from paceline.model.weights import checkpoint_checksum, read_config
from paceline.rl.folder import read_stream

HEADS = ("general", "in-domain", "random")
RESERVE_S = 20  # for a checkpoint
NUM_WARM_UP = 3  # optimizer steps that are not timed
RANDOM_SEED = 1


def train_heads(study: Study) -> None:
    wanted = study.args.only.split(",") if study.args.only else HEADS
    for name in wanted:
        if name not in HEADS:
            raise ValueError(f"--only {name}: not one of {', '.join(HEADS)}")
        if (study.folder("heads", name) / "head" / "config.json").exists():
            continue
        if name == "random":
            make_random(study)
        else:
            train_head(study, name)
        free_memory()


def train_head(study: Study, name: str) -> None:
    file = study.folder("prompts", f"{name}.jsonl")
    if not file.exists():
        write_prompts(study, name, file)
    num = len(file.read_text("utf-8").splitlines())
    overrides = [f"task.name={str(file)!r}", f"task.held_out={max(1, min(256, num // 8))}"]
    if name == "general":
        overrides.append("task.template='{prompt}'")
    folder, watch, reserve_s = study.folder("heads", name), Watch(), study.reserve_s(RESERVE_S)
    run, resume = (None, folder) if (folder / "config.toml").exists() else (folder, None)

    def is_over() -> bool:
        return study.left_s < reserve_s

    try:
        trainer = build_draft_trainer(study.config(*overrides), watch, run=run, resume=resume, stopping=is_over)
    except KeyboardInterrupt:
        if is_over():
            raise LimitReached from None
        raise
    with closing(trainer):
        summary = trainer.run(is_over)
    if not summary["finished"]:
        raise LimitReached
    row = describe(folder, summary) | watch.generation(folder)
    checksum = checkpoint_checksum(folder / "head")
    study.append("head", {"name": name, "num_prompts": num, "checksum": checksum, **row})
    after = row["acceptance_after"]["coupled"]
    print(f"head {name}: acceptance length {after['mean_acceptance_length']:.2f}, {row['tokens_per_s']:.0f} tokens/s")


def write_prompts(study: Study, name: str, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if name == "general":
        prompts = read_prompts(study.args.prompts) if study.args.prompts else general_prompts()
        lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
    else:
        task = build_task(study.config(f"task.size={study.args.problems}"))
        used = {int(problem.name.rpartition("/")[2]) for problem in [*task.train, *task.held_out]}
        rows = [bytes(line).decode() if isinstance(line, bytes) else line for _, line in read_lines(study.args.data)]
        lines = [row.strip() for i, row in enumerate(rows) if i not in used]
    if len(lines) < 2:
        raise ValueError(f"the {name} head has {len(lines)} prompts to train on; lower --problems or task.held_out")
    replace_file(file, "".join(f"{line}\n" for line in lines).encode())


def general_prompts() -> list[Any]:
    return [*read_prompts(), *(template.format(topic) for topic in TOPICS for template in TEMPLATES)]


def describe(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """The summary without paths, and the median speed of training."""
    updates = list(read_stream(folder, "metrics"))
    updates = updates[NUM_WARM_UP:] or updates
    kept = {key: value for key, value in summary.items() if key not in ("run", "head")}
    return kept | {"tokens_per_s": statistics.median(m["num_tokens"] / m["seconds"] for m in updates)}


def make_random(study: Study) -> None:
    """Random weights, and the shape and vocabulary of the in-domain head."""
    directory = resolve(study.args.model)
    trained = load_head(study.head("in-domain"), read_config(directory), any_target=True)
    head = init_head(trained.config, trained.draft_ids, seed=RANDOM_SEED)
    provenance = Provenance(study.args.model, checkpoint_checksum(directory), "none: random weights", RANDOM_SEED, 0, 0)
    save_head(head, study.folder("heads", "random") / "head", provenance, dtype=torch.float32)
    print("head random: random weights")


class Watch:
    """Prints what a run says, and times how long its sequences are generated in this process."""

    def __init__(self) -> None:
        self.times: list[tuple[float, int]] = []  # (when, sequences done)

    def progress(self, stage: str, done: int, total: int) -> None:
        if stage == "generating":
            self.times.append((time.perf_counter(), done))

    def note(self, text: str) -> None:
        print(text, flush=True)

    def step(self, metrics: Mapping[str, Any]) -> None:
        pass

    def generation(self, folder: Path) -> dict[str, Any]:
        num_tokens = sum(len(record["token_ids"]) for record in read_stream(folder, "rollouts"))
        if not self.times:  # everything was generated by an earlier process
            return {"num_generated_tokens": num_tokens, "generation_s": None, "num_generated_in_s": 0}
        # The first call comes before the engine is built.
        (first, before), (last, after) = self.times[min(1, len(self.times) - 1)], self.times[-1]
        return {
            "num_generated_tokens": num_tokens,
            "generation_s": last - first,
            "num_generated_in_s": after - before,
        }
