"""Records each step: rollouts, engine trace and metrics in the run folder, metrics in the sinks. Keeps the totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from paceline.model.text import Pieces
from paceline.rl.audit import overall
from paceline.rl.callback import ProgressCallback
from paceline.rl.folder import RunFolder
from paceline.rl.logs import Sink
from paceline.rl.metrics import estimated_speedup, plain_estimate
from paceline.rl.produce import Batch
from paceline.rl.records import rollout_record
from paceline.types import Group, Rollout, first_branches

MAX_FAILURES_SHOWN = 3  # per step
TOTALS = ("num_tokens", "num_drafts", "num_accepted_tokens", *plain_estimate([]))


class Recorder:
    def __init__(
        self,
        folder: RunFolder,
        sinks: Sequence[Sink],
        callback: ProgressCallback,
        tokenizer: Any,
        log_rollouts: int | Literal["all", "none"] = "all",
    ) -> None:
        """`log_rollouts`: as the setting; a number of groups. Groups are in the order of the data, which is random, so
        the first ones are a fair sample, and the same in a resumed run."""
        self.folder, self.sinks, self.callback = folder, sinks, callback
        self.num_logged_groups = (
            log_rollouts if isinstance(log_rollouts, int) else {"all": None, "none": 0}[log_rollouts]
        )
        self.tokenizer, self.pieces = tokenizer, Pieces(tokenizer)
        self.audits: list[dict[str, Any]] = []
        self.totals = dict.fromkeys(("wall_s", *TOTALS), 0.0)
        self.stages: dict[str, float] = {}  # seconds

    def record(self, batch: Batch, metrics: Mapping[str, Any]) -> None:
        samples = first_branches(rollout for group in batch.all_groups for rollout in group.rollouts)
        logged = batch.all_groups[: self.num_logged_groups]
        records = [self._rollout_record(batch.step, group, rollout) for group in logged for rollout in group.rollouts]
        self.folder.append("rollouts", [record | {"pieces": self.pieces(record["token_ids"])} for record in records])
        self.folder.append("trace", [{"rl_step": batch.step, **asdict(trace)} for trace in batch.traces])
        self.folder.append("metrics", [{**metrics, "num_rollouts_logged": sum("branch" not in r for r in records)}])
        for sink in self.sinks:
            sink.write(batch.step + 1, metrics)
        for failure in [r.failure for r in samples if r.failure is not None][:MAX_FAILURES_SHOWN]:
            self.callback.note(failure)
        for key in TOTALS:
            self.totals[key] += metrics[key]
        self.totals["wall_s"] += metrics["stages"]["total"]
        for name, seconds in metrics["stages"].items():
            self.stages[name] = self.stages.get(name, 0.0) + seconds

    def _rollout_record(self, step: int, group: Group, rollout: Rollout) -> dict[str, Any]:
        record = rollout_record(step, group, rollout)
        if rollout.prompt_ids != group.rollouts[0].prompt_ids:  # of a branch, or of an environment's own
            record["prompt"] = self.tokenizer.decode(list(rollout.prompt_ids))
        return record

    def write_summary(self, evaluation: Mapping[str, Any], num_steps: int, finished: bool) -> dict[str, Any]:
        """Write summary.json. `evaluation` is `Evaluator.state_dict`. `reward_after` is of an evaluation after the last
        step; `last_eval` is the newest one."""
        first, last, last_step = (evaluation[key] for key in ("first_eval", "last_eval", "last_eval_step"))
        total_s = self.stages.get("total", 0.0)
        num_drafts = self.totals["num_drafts"]
        summary = {
            "finished": finished,
            "num_steps": num_steps,
            "reward_before": first["reward"] if first else None,
            "reward_after": last["reward"] if last and last_step == num_steps > 0 else None,
            "last_eval": {"step": last_step, "reward": last["reward"]} if last else None,
            "best": evaluation["best"],
            **_task_rewards(first, last if last_step == num_steps > 0 else None),
            **overall(self.audits),
            "estimated_speedup": estimated_speedup(self.totals) if num_drafts else None,
            "mean_acceptance_length": 1 + self.totals["num_accepted_tokens"] / num_drafts if num_drafts else 1.0,
            "num_tokens": int(self.totals["num_tokens"]),
            "wall_s": self.totals["wall_s"],
            "stages": {
                name: {"seconds": seconds, "share": seconds / total_s if total_s else 0.0}
                for name, seconds in self.stages.items()
                if name != "total"
            },
        }
        self.folder.write_json("summary.json", summary)
        return summary

    def state_dict(self) -> dict[str, Any]:
        return {"audits": self.audits, "totals": self.totals, "stages": self.stages}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.audits, self.totals, self.stages = (state_dict[key] for key in ("audits", "totals", "stages"))

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def _task_rewards(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> dict[str, Any]:
    """Held-out rewards by task, if there are several."""
    results = {"reward_before": (before or {}).get("tasks", {}), "reward_after": (after or {}).get("tasks", {})}
    labels = dict.fromkeys(label for tasks in results.values() for label in tasks)
    if not labels:
        return {}
    return {
        "tasks": {
            label: {name: tasks[label]["reward"] if label in tasks else None for name, tasks in results.items()}
            for label in labels
        }
    }
