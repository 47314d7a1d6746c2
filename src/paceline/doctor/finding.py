"""What was found, one thing a row: ok, degraded (works, slower or partly) or missing, with the remedy beside it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK, DEGRADED, MISSING = "ok", "degraded", "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    status: str
    detail: str
    remedy: str = ""
    required: bool = False


def as_json(findings: list[Finding]) -> dict[str, Any]:
    return {"ok": healthy(findings), "rows": [asdict(finding) for finding in findings]}


def healthy(findings: list[Finding]) -> bool:
    return not any(finding.required and finding.status == MISSING for finding in findings)
