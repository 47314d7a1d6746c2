"""What a replay of a run takes from the run's folder: its step times, settings and measured speed-ups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.build.config import load_config
from paceline.build.replay import MODEL_FREE, frozen_costs
from paceline.config import Config
from paceline.files import open_run_file, parse_json, read_run_json
from paceline.replay.run import Cell
from paceline.sim.run_costs import RunCosts, costs_of_run
from paceline.speculation.cost import CostTable

# Settings of a replay that do not choose the drafter or the policy, so that the run's own values hold for any of them.
TAKEN_SETTINGS = (
    "engine.prefix_sharing", "speculation.prompt_lookup_max", "speculation.prompt_lookup_min",
    "speculation.suffix_max_bytes", "speculation.suffix_max_versions", "speculation.suffix_min_match",
    "speculation.suffix_recency",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RecordedRun:
    folder: Path
    config: Config
    info: dict[str, Any]  # run.json

    @property
    def setup(self) -> str:
        """Hardware, model and dtype."""
        hardware = self.info.get("hardware", self.config.model.device)
        return f"{hardware}; {Path(self.config.model.name).name}, {self.config.model.dtype}"

    def costs(self) -> RunCosts:
        return costs_of_run(self.folder, f"run {self.folder.resolve().name}", f"measured in this run ({self.setup})")

    @property
    def max_num_seqs(self) -> int:
        return self.config.engine.max_num_seqs

    @property
    def overrides(self) -> tuple[str, ...]:
        """The run's values of TAKEN_SETTINGS."""
        found = []
        for setting in TAKEN_SETTINGS:
            section, _, key = setting.partition(".")
            value = getattr(getattr(self.config, section), key)
            found.append(f"{setting}={str(value).lower() if isinstance(value, bool) else value}")
        return tuple(found)

    @property
    def cell(self) -> Cell | None:
        """The run's own drafter and policy; None if a replay can't have them."""
        speculation = self.config.speculation
        k = speculation.num_speculative_tokens
        if speculation.method not in MODEL_FREE or not isinstance(k, int) or speculation.min_confidence:
            return None
        return Cell(speculation.method, f"{speculation.resolved_policy}:{k}", self.max_num_seqs)

    def audits(self) -> list[float]:
        """Plain time / time with drafts, of each audit."""
        found = []
        try:
            with open_run_file(self.folder / "metrics.jsonl") as file:
                for line in file:
                    audit = parse_json(line).get("audit")
                    if audit is not None:
                        found.append((float(audit["plain_s"]), float(audit["speculative_s"])))
        except (OSError, ValueError, AttributeError, TypeError, KeyError):
            return []
        return found


def recorded_run(rollouts: Sequence[str]) -> RecordedRun | None:
    """The run whose folder or rollouts.jsonl this is; None if it is not one run of Paceline."""
    if len(rollouts) != 1 or rollouts[0] == "-":
        return None
    path = Path(rollouts[0])
    folder = path if path.is_dir() else path.parent
    if not path.is_dir() and not path.name.startswith("rollouts.jsonl"):
        return None
    if not (folder / "run.json").exists() or not (folder / "config.toml").exists():
        return None
    return RecordedRun(folder, load_config(folder / "config.toml"), read_run_json(folder / "run.json"))


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
