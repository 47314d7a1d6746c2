"""The cost table of a replay, and what a replay of a run takes from the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.build.replay import MODEL_FREE, frozen_costs
from paceline.files import number, read_metrics
from paceline.replay.run import Cell
from paceline.sim.recorded_run import RecordedRun
from paceline.sim.run_costs import RunCosts
from paceline.speculation.cost import CostTable

# Settings of a replay that do not choose the drafter or the policy, so that the run's own values hold for any of them.
SHARED_SETTINGS = (
    "engine.prefix_sharing", "speculation.prompt_lookup_max", "speculation.prompt_lookup_min",
    "speculation.suffix_max_bytes", "speculation.suffix_max_versions", "speculation.suffix_min_match",
    "speculation.suffix_recency",
)  # fmt: skip


def shared_settings(run: RecordedRun) -> tuple[str, ...]:
    """The run's values of SHARED_SETTINGS, as overrides."""
    found = []
    for setting in SHARED_SETTINGS:
        section, _, key = setting.partition(".")
        value = getattr(getattr(run.config, section), key)
        found.append(f"{setting}={str(value).lower() if isinstance(value, bool) else value}")
    return tuple(found)


def cell_of_run(run: RecordedRun) -> Cell | None:
    """The run's own drafter and policy; None if a replay can't have them."""
    speculation = run.config.speculation
    k = speculation.num_speculative_tokens
    if speculation.method not in MODEL_FREE or not isinstance(k, int) or speculation.min_confidence:
        return None
    return Cell(speculation.method, f"{speculation.policy}:{k}", run.max_num_seqs)


def audited_s(run: RecordedRun) -> list[tuple[float, float]]:
    """(seconds without drafts, with drafts) of each audit. Empty if the metrics can't be read."""
    try:
        steps = read_metrics(run.folder / "metrics.jsonl")
    except (OSError, ValueError):
        return []
    times = [(number(step, "audit", "plain_s"), number(step, "audit", "speculative_s")) for step in steps]
    return [(a, b) for a, b in times if a is not None and b is not None and a > 0 and b > 0]


def recorded_run(rollouts: Sequence[str]) -> RecordedRun | None:
    """The run whose folder or rollouts.jsonl this is; None if it is not one run of Paceline."""
    if len(rollouts) != 1 or rollouts[0] == "-":
        return None
    path = Path(rollouts[0])
    if path.is_dir():
        return RecordedRun.open(path)
    return RecordedRun.open(path.parent) if path.name.startswith("rollouts.jsonl") else None


@dataclass(frozen=True, slots=True)
class ReplayCosts:
    """The cost table of a replay, and where it is from."""

    table: CostTable
    run: RunCosts | None = None  # if the table is fitted to the run's own steps
    option: str = ""  # --cost or --hardware with its value
    problem: str = ""  # why the run's own steps can't be used

    def describe(self) -> str:
        """For which hardware and model the results are."""
        source = self.table.source or self.table.name
        if self.run is not None:
            return f"Costs: {source}."
        if self.option.startswith("--cost"):
            return f"Costs: {source} ({self.option})."
        shipped = f"Costs: {source.partition(';')[0]}."
        if self.option:
            return f"{shipped} Your hardware and model will differ."
        if self.problem:
            return (
                f"{shipped} Your hardware and model will differ: pass --cost FILE. This run's own step times can't be "
                f"used: {self.problem}."
            )
        return f"{shipped} Your hardware and model will differ: pass --cost FILE, or the folder of a run."


def choose_costs(cost: str | None, hardware: str | None, run: RecordedRun | None) -> ReplayCosts:
    """The table of --cost or --hardware; without them, that of the run's own steps, and last the default."""
    if cost is not None or hardware is not None:
        option = f"--cost {cost}" if cost is not None else f"--hardware {hardware}"
        return ReplayCosts(frozen_costs(cost, hardware), option=option)
    if run is None:
        return ReplayCosts(frozen_costs(None, None))
    try:
        own = run.costs()
    except ValueError as error:
        return ReplayCosts(frozen_costs(None, None), problem=str(error))
    return ReplayCosts(own.table, own)
