"""What every rung of the ladder shares: its result, and the demand that speculation really happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Progress = Callable[[str], None]
# Figures by name. `problems` says in sentences what is wrong; the rung passes where it is empty.
Rung = dict[str, Any]


def undrafted(run: str, num_draft_tokens: int, num_accepted_tokens: int) -> list[str]:
    """A run that is to show that speculation changes nothing shows nothing where nothing was drafted and accepted."""
    if num_accepted_tokens > 0:
        return []
    what = f"none of {num_draft_tokens} drafted tokens was accepted" if num_draft_tokens else "nothing was drafted"
    return [f"{run}: {what}, so this run shows nothing about speculation"]
