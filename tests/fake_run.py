"""Writes the folder of a made-up run: rewards and acceptance increase, and stages add up to the step."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.files import RUN_FORMAT

CONFIG = """\
[model]
name = "smollm2-135m"

[speculation]
method = "suffix"
num_speculative_tokens = 4
rule = "coupled"
audit_every = 5

[train]
num_steps = {num_steps}
groups_per_step = 4
max_staleness = {max_staleness}
mismatch_alarm = 0.02
eval_every = 5
"""
PIECES = ["<think>", "\n", "The", " sum", " of", " 3", " and", " 4", " is", " 7", ".", "</think>",
          "<answer>", "7", "</answer>"]  # fmt: skip
WORDS = [
    " Let",
    " me",
    " add",
    " first",
    ",",
    " then",
    " carry",
    " the",
    " one",
    ":",
    " 12",
    " +",
    " 30",
    " =",
    " 42",
    "\n",
]


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def make_run(
    folder: Path,
    num_steps: int = 20,
    *,
    groups: int = 2,
    samples: int = 4,
    max_staleness: int = 0,
    seed: int = 0,
    prompt: str = "What is 3 + 4? Think first, then answer.",
    hostile: str | None = None,
) -> Path:
    """`hostile` replaces every text that could come from a model, a dataset or a user."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG.format(num_steps=num_steps, max_staleness=max_staleness)
    (folder / "config.toml").write_text(
        config + (f"[task]\nname = {json.dumps(hostile)}\n" if hostile else ""), encoding="utf-8"
    )
    info = {
        "format": RUN_FORMAT,
        "name": hostile or "chain_sum-grpo",
        "task": hostile or "reasoning_gym/chain_sum",
        "model": "smollm2-135m",
        "started": "2026-01-05T09:30:00Z",
        "paceline": "0.1.0",
        "torch": "2.13.0",
        "device": "cpu",
        "seed": seed,
    }
    (folder / "run.json").write_text(json.dumps(info), encoding="utf-8")
    steps = [_step(rng, step, num_steps, groups * samples, max_staleness, hostile) for step in range(num_steps)]
    write_lines(folder / "metrics.jsonl", steps)
    write_lines(
        folder / "rollouts.jsonl",
        (
            _rollout(rng, step, step * groups + group, sample, prompt, hostile, max_staleness)
            for step in range(num_steps)
            for group in range(groups)
            for sample in range(samples)
        ),
    )
    write_lines(folder / "trace.jsonl", (_trace(rng, i, i * num_steps // 200) for i in range(200)))
    audits = [step["audit"] for step in steps if "audit" in step]
    plain, speculative = (sum(audit[key] for audit in audits) for key in ("plain_s", "speculative_s"))
    stages = {name: sum(step["stages"][name] for step in steps) for name in steps[0]["stages"]}
    summary = {
        "finished": True,
        "reward_before": steps[0]["eval_before"]["reward"],
        "reward_after": [step["eval"]["reward"] for step in steps if "eval" in step][-1],
        "generation_speedup": plain / speculative,
        "tail_speedup": {n: sum(a["tail_speedup"][n] for a in audits) / len(audits) for n in ("1", "2", "4")},
        "mean_acceptance_length": sum(step["mean_acceptance_length"] for step in steps) / num_steps,
        "stages": {name: {"seconds": s, "share": s / stages["total"]} for name, s in stages.items()},
        "num_steps": num_steps,
        "num_tokens": sum(step["num_tokens"] for step in steps),
        "wall_s": stages["total"] * 1.04,
    }
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def _step(
    rng: random.Random, step: int, num_steps: int, num_samples: int, staleness: int, hostile: str | None
) -> dict[str, Any]:
    progress = 1 / (1 + math.exp(-8 * (step / max(num_steps - 1, 1) - 0.4)))
    reward = 0.15 + 0.5 * progress + rng.gauss(0, 0.03)
    generation = 9 - 2 * progress + rng.gauss(0, 0.5)
    stages = {
        "data": 0.02,
        "sync": 0.3 + 0.05 * rng.random(),
        "generation": generation,
        "exposed_generation": generation * (0.3 if staleness else 1.0),
        "reward": 0.4 + 0.2 * rng.random(),
        "logprob": 2.1 + 0.2 * rng.random(),
        "training": 6.5 + rng.gauss(0, 0.3),
        "draft": 0.1,
        "other": 0.15,
    }
    hidden = ("generation", "data", "sync", "reward", "draft") if staleness else ("generation",)
    stages["total"] = sum(stages.values()) - sum(stages[name] for name in hidden)
    if staleness:
        stages["idle"] = 1.25
    num_drafts = 300
    rates = [min(0.95, (0.45 + 0.3 * progress) ** (j + 1) + 0.02 * rng.random()) for j in range(4)]
    accepted = round(num_drafts * sum(rates))
    tokens = num_samples * 60
    record: dict[str, Any] = {
        "step": step, "epoch": 0, "version": step,
        "reward_mean": reward, "reward_std": 0.35 - 0.15 * progress,
        "rewards": {hostile or "gym": reward * 0.9, "format": min(1.0, reward * 1.3)},
        "length_mean": 60 + 25 * progress + rng.gauss(0, 3), "length_max": 128,
        "truncated_ratio": 0.1 * (1 - progress), "loss": rng.gauss(0, 0.02), "grad_norm": 0.4 + 0.2 * rng.random(),
        "learning_rate": 1e-5 * min(1.0, (step + 1) / 5), "kl": 0.002 * step, "entropy": 1.1 - 0.6 * progress,
        "clip_ratio": 0.01 * rng.random(), "num_groups": 4, "num_groups_filtered": rng.randrange(2),
        "num_groups_stale": rng.randrange(2) if staleness else 0, "num_failures": 1 if step == 7 else 0,
        "num_optimizer_steps": 1, "num_skipped_optimizer_steps": 0,
        "staleness_mean": staleness * 0.6, "staleness_max": min(step, staleness), "num_tokens": tokens,
        "tokens_per_s": tokens / generation, "mean_acceptance_length": 1 + accepted / num_drafts,
        "draft_acceptance_rate": accepted / (num_drafts * 4), "acceptance_rate_per_position": rates,
        "acceptance_length_per_depth": {"0": 1 + accepted / num_drafts} | ({"64": 1.5} if step % 2 else {}),
        "num_drafts": num_drafts, "num_draft_tokens": num_drafts * 4, "num_accepted_tokens": accepted,
        "memory_gib": 2.5, "mismatch_mean": 2e-6 * (1 + rng.random()), "mismatch_k3": 1e-11 * (1 + rng.random()),
        "mismatch_max": 4e-5 * (1 + rng.random()), "mismatch_alarm": False, "stages": stages,
    }  # fmt: skip
    if step == 0:
        record["eval_before"] = {
            "reward": 0.14,
            "avg_at_n": 0.14,
            "pass_at_k": 0.3,
            "n": 4,
            "k": 4,
            "length_mean": 64.0,
        }
    if step % 5 == 4 or step == num_steps - 1:
        average = 0.15 + 0.5 * progress
        record["eval"] = {"reward": average, "avg_at_n": average, "pass_at_k": average + 0.2, "n": 4, "k": 4}
        record["eval"]["length_mean"] = 70.0
    if step % 5 == 0:
        gain = 1.0 + 0.12 * progress + 0.02 * rng.random()
        record["audit"] = {
            "plain_s": generation * gain, "speculative_s": generation, "speedup": gain, "num_tokens": tokens,
            "identical": True, "must_be_identical": True,
            "tail_speedup": {"1": gain + 0.4, "2": gain + 0.22, "4": gain + 0.05},
        }  # fmt: skip
    return record


def _rollout(
    rng: random.Random, step: int, group: int, sample: int, prompt: str, hostile: str | None, staleness: int
) -> dict[str, Any]:
    pieces = PIECES[:2] + [rng.choice(WORDS) for _ in range(rng.randrange(10, 60))] + PIECES[2:]
    if hostile:
        pieces[5] = hostile
    num = len(pieces)
    provenance = [rng.choices((0, 1, 2, 3), (3, 6, 1, 1))[0] for _ in range(num)]
    mask = [True] * num
    if sample == 1:  # with an environment's turn
        mask[8:12] = [False] * 4
    failed = sample == 2 and step == 7
    first = max(0, step - staleness)
    return {
        "step": step,
        "group": group,
        "problem": f"chain_sum:{group}",
        "sample": sample,
        "prompt": hostile or f"{prompt} (problem {group})",
        "prompt_ids": list(range(12)),
        "completion": "".join(pieces),
        "token_ids": [rng.randrange(49152) for _ in range(num)],
        "pieces": pieces,
        "mask": mask,
        "logprobs": [-rng.expovariate(2.0) for _ in range(num)],
        "reward": math.nan if failed else float(rng.random() < 0.5),
        "rewards": {"gym": 0.0 if failed else 1.0, "format": 0.5},
        "advantage": rng.gauss(0, 1),
        "versions": [[first, num // 2], [step, num - num // 2]] if staleness else [[step, num]],
        "provenance": provenance,
        "sources": [rng.randrange(2) if p in (1, 2) else 255 for p in provenance],
        "drafters": [hostile or "suffix", "ngram"],
        "finish_reason": "length" if sample == 3 else "stop",
        "num_turns": 2 if sample == 1 else 1,
        "failure": (hostile or "reward gym: took longer than reward.timeout_s = 10") if failed else None,
    }


def _trace(rng: random.Random, index: int, rl_step: int) -> dict[str, Any]:
    """Of every ten steps one each plans no drafts, has no proposal, selects no draft token, and probes."""
    rows = rng.choice((1, 2, 3, 8, 16))
    forward = 0.01 + 0.003 * rows
    is_planned, is_proposed, is_verified = (index % 10 > n for n in range(3))
    probes = index % 10 == 3
    drafts = (1 if probes else rows) if is_verified else 0
    reason = f"{'probes' if probes else 'takes'} {drafts * 3} of {rows * 4}" if is_proposed else "nothing was drafted"
    return {
        "rl_step": rl_step, "step": index, "start_s": index * 0.05, "num_rows": rows,
        "num_query_tokens": rows + drafts * 3, "num_context_tokens": rows * 80, "num_emitted": rows + drafts,
        "num_drafts": drafts, "num_draft_tokens": drafts * 3, "num_accepted_tokens": drafts,
        "accepted_per_position": [drafts, 0, 0] if is_verified else [],
        "drafted_per_position": [drafts] * 3 if is_verified else [],
        "num_preempted": 0, "num_free_blocks": 100, "draft_s": 0.001, "forward_s": forward, "sample_s": 0.002,
        "total_s": forward + 0.0035, "version": rl_step, "drafter_version": 0, "drafter": "suffix",
        "policy": "auto", "reason": reason, "is_probe": probes, "num_planned": rows * 5 * is_planned,
        "num_proposed": rows * 4 * is_proposed, "expected_accepted": 1.2 * drafts, "expected_s": forward + 0.003,
        "per_drafter": [["suffix", drafts * 3, drafts]] if is_verified else [],
    }  # fmt: skip
