"""The results of the study: one jsonl file per part, in one folder.

Every measurement is a row, which is on disk when `append` returns. If the process is killed while it writes a row, that
row is ignored, and removed by the next one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.report.table import finite

Row = dict[str, Any]


class Results:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def rows(self, part: str, kind: str) -> list[Row]:
        """The rows of this kind, in the order of their measurement."""
        path = self._path(part)
        content = path.read_bytes() if path.exists() else b""
        rows = [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
        return [row for row in rows if row["kind"] == kind]

    def append(self, part: str, kind: str, row: Mapping[str, Any]) -> None:
        line = json.dumps(finite({"kind": kind, **row}), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        path = self._path(part)
        if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)
        with path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def _path(self, part: str) -> Path:
        return self.folder / f"{part}.jsonl"


def measured_rows(results: Results, part: str) -> list[Row]:
    """The audits of a part, without those that emitted other tokens than they must: they are measured again."""
    return [row for row in results.rows(part, "audit") if not row.get("failed")]
