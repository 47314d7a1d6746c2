"""Figures of a run: from its summary if it has finished, else from its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from paceline.files import number
from paceline.report.run import Record, Run, mean


def latest(run: Run, *path: str) -> float | None:
    return next((value for value in reversed(run.series(*path)) if value is not None), None)


def reward_before(run: Run) -> float | None:
    found = number(run.summary, "reward_before")
    return found if found is not None else latest(run, "eval_before", "reward")


def reward_after(run: Run) -> float | None:
    """Of a run that has ended: only if it was evaluated after its last step. Before that: the newest one."""
    if "reward_after" in run.summary:
        return number(run.summary, "reward_after")
    return latest(run, "eval", "reward")


def held_out_rewards(run: Run, task: str | None = None) -> list[float | None]:
    """Of every step; the evaluation before the first step stands in for a missing one after it. `task`: the label of
    one of several."""
    path = ("reward",) if task is None else ("tasks", task, "reward")
    values = run.series("eval", *path)
    if values and values[0] is None:
        values[0] = number(run.steps[0], "eval_before", *path)
    return values


def acceptance_length(run: Run) -> float | None:
    if (found := number(run.summary, "mean_acceptance_length")) is not None:
        return found
    num_drafts = run.total("num_drafts")
    return 1 + run.total("num_accepted_tokens") / num_drafts if num_drafts else None


def audits(run: Run) -> list[tuple[int, Record]]:
    return [(r["step"], r["audit"]) for r in run.steps if isinstance(r.get("audit"), dict)]


def speedup(run: Run) -> float | None:
    """Of all audited steps together: total plain time ÷ total speculative time."""
    if (found := number(run.summary, "generation_speedup")) is not None:
        return found
    plain = sum(number(audit, "plain_s") or 0 for _, audit in audits(run))
    speculative = sum(number(audit, "speculative_s") or 0 for _, audit in audits(run))
    return plain / speculative if speculative else None


def identical_audits(run: Run) -> str:
    audited = audits(run)
    return f"{sum(audit.get('identical') is True for _, audit in audited)} of {len(audited)}"


def audited_speedups(run: Run) -> list[float]:
    """Of each audited step."""
    return [ratio for _, audit in audits(run) if (ratio := number(audit, "speedup")) is not None]


def audited_tails(run: Run, name: str) -> list[float]:
    """The speed-up with `name` running sequences, of each audited step."""
    return [ratio for _, audit in audits(run) if (ratio := number(audit, "tail_speedup", name)) is not None]


def tail_speedup(run: Run) -> dict[str, float | None]:
    """By number of running sequences."""
    found = run.summary.get("tail_speedup")
    tails = [found] if isinstance(found, dict) else [audit.get("tail_speedup") for _, audit in audits(run)]
    tails = [tail for tail in tails if isinstance(tail, dict)]
    names = sorted({str(name) for tail in tails for name in tail}, key=lambda name: (len(name), name))
    return {name: mean([number(tail, name) for tail in tails]) for name in names}


HIDDEN_STAGES = ("data", "sync", "reward", "draft")  # with overlap they are part of the generation


def stage_seconds(run: Run, stages: Iterable[str]) -> dict[str, list[float | None]]:
    """Stage -> seconds per step. If generation overlaps training, only the time that the step waited for it counts."""
    if run.max_staleness == 0:
        return {name: run.series("stages", name) for name in stages}
    exposed = {"generation": "exposed_generation"}
    return {name: run.series("stages", exposed.get(name, name)) for name in stages if name not in HIDDEN_STAGES}


def warnings(run: Run) -> list[str]:
    def steps_with(condition: Callable[[Record], object]) -> list[int]:
        return [record["step"] for record in run.steps if condition(record)]

    found = [
        f"{message} {_steps(raised)}."
        for alarm, message in (
            ("mismatch_alarm", "Engine and learner logprobs differed by more than train.mismatch_alarm at"),
            ("reward_failure_alarm", "Rewards failed for a larger share of samples than reward.max_failures at"),
            ("zero_advantages_alarm", "All advantages were zero, so rewards did not change the policy, at"),
            ("acceptance_drop_alarm", "Acceptance fell at the weight sync before"),
            ("acceptance_floor_alarm", "Almost no draft tokens were accepted at"),
            ("acceptance_record_alarm", "Acceptance was far below the head's provenance file at"),
        )
        if (raised := [record["step"] for record in run.steps if record.get(alarm) is True])
    ]
    if weak := steps_with(lambda record: record.get("sandbox") not in (None, "namespaces")):
        kinds = sorted({str(record["sandbox"]) for record in run.steps if record["step"] in weak})
        found.append(f"Programs ran without namespaces, in sandbox {', '.join(kinds)}, at {_steps(weak)}.")
    if num_failures := int(run.total("num_failures")):
        steps = _steps(steps_with(lambda record: (number(record, "num_failures") or 0) > 0))
        samples = "1 sample" if num_failures == 1 else f"{num_failures} samples"
        found.append(f"{samples} could not be scored and were not trained on, at {steps}.")
    if num_skipped := int(run.total("num_skipped_optimizer_steps")):
        steps = _steps(steps_with(lambda record: (number(record, "num_skipped_optimizer_steps") or 0) > 0))
        skipped = "1 optimizer step was" if num_skipped == 1 else f"{num_skipped} optimizer steps were"
        found.append(f"{skipped} skipped, because the loss or the gradient was not finite, at {steps}.")
    if num_zero := int(run.total("num_zero_scored")):
        steps = _steps(steps_with(lambda record: (number(record, "num_zero_scored") or 0) > 0))
        samples = "1 sample" if num_zero == 1 else f"{num_zero} samples"
        found.append(f"{samples} scored 0 because a reward failed (reward.on_failure), at {steps}.")
    if differing := [step for step, audit in audits(run) if audit.get("identical") is False]:
        text = f"The two generations of the audit have different tokens at {_steps(differing)}."
        if not any(audit.get("must_be_identical") for _, audit in audits(run)):
            text += " The kernels are not batch-invariant, so tokens may differ at near-ties."
        found.append(text)
    if stale := steps_with(lambda record: (number(record, "staleness_max") or 0) > run.max_staleness):
        found.append(f"Staleness exceeded train.max_staleness = {run.max_staleness} at {_steps(stale)}.")
    return found


def _steps(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"step {shown}" if len(numbers) == 1 else f"steps {shown}"
