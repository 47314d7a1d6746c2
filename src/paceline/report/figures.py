"""A run in few numbers: those that its summary gives at the end, and its steps give before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.report.run import Record, Run, mean, number


def latest(run: Run, *path: str) -> float | None:
    return next((value for value in reversed(run.series(*path)) if value is not None), None)


def reward_before(run: Run) -> float | None:
    found = number(run.summary, "reward_before")
    return found if found is not None else latest(run, "eval_before", "reward")


def reward_after(run: Run) -> float | None:
    found = number(run.summary, "reward_after")
    return found if found is not None else latest(run, "eval", "reward")


def acceptance_length(run: Run) -> float | None:
    if (found := number(run.summary, "mean_acceptance_length")) is not None:
        return found
    num_drafts = sum(value or 0 for value in run.series("num_drafts"))
    num_accepted = sum(value or 0 for value in run.series("num_accepted_tokens"))
    return 1 + num_accepted / num_drafts if num_drafts else None


def audits(run: Run) -> list[tuple[int, Record]]:
    return [(r["step"], r["audit"]) for r in run.steps if isinstance(r.get("audit"), dict)]


def speedup(run: Run) -> float | None:
    """Of all audited steps together: total time over total time."""
    if (found := number(run.summary, "generation_speedup")) is not None:
        return found
    plain = sum(number(audit, "plain_s") or 0 for _, audit in audits(run))
    speculative = sum(number(audit, "speculative_s") or 0 for _, audit in audits(run))
    return plain / speculative if speculative else None


def tail_speedup(run: Run) -> dict[str, float | None]:
    """By number of running sequences."""
    found = run.summary.get("tail_speedup")
    tails = [found] if isinstance(found, dict) else [audit.get("tail") for _, audit in audits(run)]
    tails = [tail for tail in tails if isinstance(tail, dict)]
    names = sorted({str(name) for tail in tails for name in tail}, key=lambda name: (len(name), name))
    return {name: mean([number(tail, name) for tail in tails]) for name in names}


def stage_seconds(run: Run, stages: Iterable[str]) -> dict[str, list[float | None]]:
    """Stage -> seconds per step. Where generation overlaps training, a step only pays for what it waited."""
    waited = "exposed" if run.max_staleness > 0 else "generation"
    return {name: run.series("stages", waited if name == "generation" else name) for name in stages}


def warnings(run: Run) -> list[str]:
    found = []
    alarms = [str(r["step"]) for r in run.steps if r.get("mismatch_alarm") is True]
    if alarms:
        found.append(f"Engine and learner logprobs disagreed beyond the alarm at {_steps(alarms)}.")
    for alarm, what in (
        ("acceptance_drop_alarm", "Acceptance fell at the weight sync before"),
        ("acceptance_floor_alarm", "Next to nothing that was drafted stood at"),
        ("acceptance_record_alarm", "The head accepted far less than its provenance file records at"),
    ):
        if raised := [str(r["step"]) for r in run.steps if r.get(alarm) is True]:
            found.append(f"{what} {_steps(raised)}.")
    sandboxes = {str(r["step"]): str(r["sandbox"]) for r in run.steps if r.get("sandbox") not in (None, "namespaces")}
    if sandboxes:
        kinds = ", ".join(sorted(set(sandboxes.values())))
        found.append(f"Programs ran without namespaces, as {kinds}, at {_steps(list(sandboxes))}.")
    if failures := int(sum(value or 0 for value in run.series("failures"))):
        where = _steps([str(r["step"]) for r in run.steps if (number(r, "failures") or 0) > 0])
        samples = "1 sample" if failures == 1 else f"{failures} samples"
        found.append(f"{samples} could not be scored and trained nothing, at {where}.")
    differing = [str(step) for step, audit in audits(run) if audit.get("identical") is False]
    if differing:
        found.append(f"The audit's two generations gave different tokens at {_steps(differing)}.")
    late = [str(r["step"]) for r in run.steps if (number(r, "lag_max") or 0) > run.max_staleness]
    if late:
        found.append(f"Policy lag went beyond train.max_staleness = {run.max_staleness} at {_steps(late)}.")
    return found


def _steps(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"step {shown}" if len(names) == 1 else f"steps {shown}"
