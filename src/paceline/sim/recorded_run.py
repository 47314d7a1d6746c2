"""A recorded run: its folder, settings and measured step times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.config_io import read_toml, validate
from paceline.files import check_run_format, read_run_json
from paceline.sim.run_costs import RunCosts, costs_of_run


@dataclass(frozen=True, slots=True)
class RecordedRun:
    folder: Path
    config: Config
    info: dict[str, Any]  # run.json

    @staticmethod
    def open(folder: Path) -> RecordedRun | None:
        """None if this is not the folder of a run."""
        if not (folder / "run.json").exists() or not (folder / "config.toml").exists():
            return None
        check_run_format(folder)
        config = validate(Config, read_toml(folder / "config.toml"))
        return RecordedRun(folder, config, read_run_json(folder / "run.json"))

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def hardware(self) -> str:
        return str(self.info.get("hardware", self.config.model.device))

    @property
    def model(self) -> str:
        return f"{Path(self.config.model.name).name}, {self.config.model.dtype}"

    @property
    def max_num_seqs(self) -> int:
        return self.config.engine.max_num_seqs

    def costs(self) -> RunCosts:
        """Raises ValueError if its steps can't be used."""
        source = f"measured in this run ({self.hardware}; {self.model})"
        return costs_of_run(self.folder, f"run {self.name}", source)
