"""The rollouts that are embedded in a report: whole groups, spread evenly over the steps, within a size limit.

Records are compact: provenance, mask and sources are strings with one character per token. A prompt is stored once for
all its samples.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.files import MAX_LINE, open_run_file
from paceline.report.table import finite

MAX_SAMPLES = 2000
MAX_BYTES = 8_000_000

Key = tuple[int, int, int, int]  # step, group, sample, branch


@dataclass(slots=True)
class Rollouts:
    records: list[dict[str, Any]] = field(default_factory=list)  # by step, group, sample, branch
    prompts: list[str] = field(default_factory=list)  # `record["p"]` is an index into these
    num_total: int = 0  # samples in the file, embedded or not

    @property
    def num_embedded(self) -> int:
        """Samples."""
        return sum(not record["b"] for record in self.records)


def choose(
    path: Path, offsets_by_key: Sequence[tuple[Key, int]], max_samples: int = MAX_SAMPLES, max_bytes: int = MAX_BYTES
) -> Rollouts:
    """Takes the first group of every step, then the second of every step, and so on up to the limits. The steps of a
    round come in the order of `spread`, so that the chosen steps are even if a limit is reached within a round."""
    offsets = dict(offsets_by_key)  # if a sample was written twice, the later line counts
    groups: defaultdict[tuple[int, int], list[Key]] = defaultdict(list)
    for key in sorted(offsets):
        groups[key[:2]].append(key)
    by_step: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for group in groups:
        by_step[group[0]].append(group)
    order = {step: i for i, step in enumerate(spread(sorted(by_step)))}
    queue = sorted((rank, order[step], group) for step in by_step for rank, group in enumerate(by_step[step]))

    chosen: dict[Key, tuple[dict[str, Any], str]] = {}
    num_bytes = 0
    if queue:
        with open_run_file(path) as file:
            for _, _, group in queue:
                keys = groups[group]
                if len(chosen) + len(keys) > max_samples:
                    continue
                members = {key: _compact(_line_at(file, offsets[key]), key) for key in keys}
                prompts = {prompt for _, prompt in members.values()}
                size = sum(len(encode(record)) for record, _ in members.values()) + sum(map(len, map(encode, prompts)))
                if num_bytes + size > max_bytes:
                    if num_bytes > 0.9 * max_bytes:
                        break  # nearly full: do not search for a smaller group
                    continue
                num_bytes += size
                chosen |= members
    prompt_indices: dict[str, int] = {}
    records = []
    for key in sorted(chosen):
        record, prompt = chosen[key]
        records.append(record | {"p": prompt_indices.setdefault(prompt, len(prompt_indices))})
    return Rollouts(records, list(prompt_indices), len({key[:3] for key in offsets}))


def spread(items: Sequence[int]) -> list[int]:
    """First, last, then the middle of every gap, breadth first. Every prefix is about evenly spread over the items."""
    if len(items) <= 2:
        return list(items)
    order = [items[0], items[-1]]
    gaps = [(0, len(items) - 1)]
    for low, high in gaps:  # the loop appends to it
        middle = (low + high) // 2
        if middle > low:
            order.append(items[middle])
            gaps += [(low, middle), (middle, high)]
    return order


def encode(content: Any) -> str:
    """JSON that is safe inside <script>: ASCII only, without characters that HTML parses as markup."""
    text = json.dumps(finite(content), separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _line_at(file: Any, offset: int) -> dict[str, Any]:
    file.seek(offset)
    return json.loads(file.readline(MAX_LINE).decode("utf-8", errors="replace"))


def _compact(record: dict[str, Any], key: Key) -> tuple[dict[str, Any], str]:
    """(the fields that the page needs, the prompt). Per-token fields of the wrong length are left out."""
    token_ids = _list(record, "token_ids")
    per_token = (_list(record, name) for name in ("pieces", "mask", "logprobs", "provenance", "sources"))
    pieces, mask, logprobs, provenance, sources = (x if len(x) == len(token_ids) else [] for x in per_token)
    rewards = record.get("rewards")
    compact: dict[str, Any] = {
        "s": key[0],
        "g": key[1],
        "i": key[2],
        "b": key[3],
        "problem": str(record.get("problem") or ""),
        "ids": [value if isinstance(value, int) else None for value in token_ids],
        "versions": [span for span in _list(record, "versions") if _is_span(span)],
        "drafters": [str(name) for name in _list(record, "drafters")],
        "reward": _number(record.get("reward")),
        "rewards": {str(name): _number(value) for name, value in rewards.items()} if isinstance(rewards, dict) else {},
        "advantage": _number(record.get("advantage")),
        "finish": str(record.get("finish_reason") or ""),
        "turns": _number(record.get("num_turns")),
        "failure": str(record["failure"]) if record.get("failure") else None,
    }
    if pieces:
        compact["pieces"] = [str(piece) for piece in pieces]
    else:
        compact["text"] = str(record.get("completion") or "")
    if mask and not all(mask):
        compact["mask"] = "".join("1" if chosen else "0" for chosen in mask)
    if logprobs:
        numeric = map(_number, logprobs)
        compact["logprobs"] = [round(value, 4) if value is not None else None for value in numeric]
    if provenance:
        compact["provenance"] = "".join(str(value) if value in (0, 1, 2, 3) else "0" for value in provenance)
    if sources:  # one character per token: the drafter's index, "-" for none
        compact["sources"] = "".join(str(value) if value in range(10) else "-" for value in sources)
    return compact, str(record.get("prompt") or "")


def _number(value: Any) -> float | None:
    """None if it is not a number, or too large to display."""
    return value if isinstance(value, int | float) and abs(value) < 1e100 else None


def _is_span(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, int) for part in value)


def _list(record: dict[str, Any], name: str) -> list[Any]:
    value = record.get(name)
    return value if isinstance(value, list) else []
