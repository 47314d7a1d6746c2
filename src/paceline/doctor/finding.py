"""The result of one check: ok, degraded (slower, or incomplete) or missing, with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

Progress = Callable[[str], None]  # called with what is checked next
OK, DEGRADED, MISSING = "ok", "degraded", "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    status: str
    detail: str
    remedy: str = ""
    required: bool = False

    @property
    def text(self) -> str:
        return f"{self.detail}; {self.remedy}" if self.remedy else self.detail


def no_progress(what: str) -> None:
    """The default `Progress`."""


def as_json(findings: list[Finding]) -> dict[str, Any]:
    return {"ok": is_ok(findings), "rows": [asdict(finding) for finding in findings]}


def is_ok(findings: list[Finding]) -> bool:
    return not any(finding.required and finding.status == MISSING for finding in findings)
