"""Cost tables by name: those shipped with Paceline, or a JSON file of one's own."""

from __future__ import annotations

from pathlib import Path

from paceline.speculation.cost import CostTable

SHIPPED = Path(__file__).parents[1] / "costs"


def shipped_tables() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def cost_table_of(name: str | Path, key: str = "speculation.cost_table") -> CostTable:
    """A shipped table by its name, or any by its path. `key`: what a mistake is called by."""
    if str(name) in shipped_tables():
        return CostTable.load(SHIPPED / f"{name}.json")
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(
            f"{key} = {str(name)!r}: no such file, and not a shipped table ({', '.join(shipped_tables())})"
        )
    return CostTable.load(path)
