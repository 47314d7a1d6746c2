"""The rollouts that a report carries: whole groups, spread evenly over the steps, within a budget.

A record holds per token what the page shows, in few bytes: provenance, mask and source are strings with a character
per token. A prompt is stored once however many samples it has.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.files import MAX_LINE, open_run_file

MAX_SAMPLES = 2000
MAX_BYTES = 8_000_000

Key = tuple[int, int, int]  # step, group, sample


@dataclass(slots=True)
class Rollouts:
    records: list[dict[str, Any]] = field(default_factory=list)  # by step, group, sample
    prompts: list[str] = field(default_factory=list)  # `record["p"]` is an index into these
    num_total: int = 0  # in the file, embedded or not


def choose(
    path: Path, places: Sequence[tuple[Key, int]], max_samples: int = MAX_SAMPLES, max_bytes: int = MAX_BYTES
) -> Rollouts:
    """The first group of every step, then the second of every step, and so on until the budget is spent. Within a
    round steps come in an order that is spread at any point, so that a budget too small for a round stays even."""
    offsets = dict(places)  # a sample written twice: the later line counts
    groups: defaultdict[tuple[int, int], list[Key]] = defaultdict(list)
    for key in sorted(offsets):
        groups[key[:2]].append(key)
    by_step: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for group in groups:
        by_step[group[0]].append(group)
    turn = {step: i for i, step in enumerate(spread(sorted(by_step)))}
    queue = sorted((rank, turn[step], group) for step in by_step for rank, group in enumerate(by_step[step]))

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
                        break  # nearly full: no use in looking for a smaller one
                    continue
                num_bytes += size
                chosen |= members
    places_of: dict[str, int] = {}
    records = []
    for key in sorted(chosen):
        record, prompt = chosen[key]
        records.append(record | {"p": places_of.setdefault(prompt, len(places_of))})
    return Rollouts(records, list(places_of), len(offsets))


def spread(items: Sequence[int]) -> list[int]:
    """First, last, then the middle of every gap in turn: any beginning of it is about even over the items."""
    if len(items) <= 2:
        return list(items)
    order = [items[0], items[-1]]
    gaps = [(0, len(items) - 1)]
    for low, high in gaps:  # grows while it is read: breadth first
        middle = (low + high) // 2
        if middle > low:
            order.append(items[middle])
            gaps += [(low, middle), (middle, high)]
    return order


def encode(content: Any) -> str:
    """JSON that may stand inside <script>: pure ASCII, and nothing in it that HTML could take for markup."""
    text = json.dumps(finite(content), separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def finite(value: Any) -> Any:
    """The same with None for every number that JSON can't hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def _line_at(file: Any, offset: int) -> dict[str, Any]:
    file.seek(offset)
    return json.loads(file.readline(MAX_LINE).decode("utf-8", errors="replace"))


def _compact(record: dict[str, Any], key: Key) -> tuple[dict[str, Any], str]:
    """(what the page needs, the prompt). Per-token fields that don't fit the tokens are left out, not guessed."""
    token_ids = _list(record, "token_ids")
    num_tokens = len(token_ids)

    def per_token(name: str) -> list[Any] | None:
        values = _list(record, name)
        return values if values and len(values) == num_tokens else None

    pieces, mask, logprobs = per_token("pieces"), per_token("mask"), per_token("logprobs")
    provenance, sources = per_token("provenance"), per_token("sources")
    compact: dict[str, Any] = {
        "s": key[0],
        "g": key[1],
        "i": key[2],
        "problem": str(record.get("problem") or ""),
        "ids": [value if isinstance(value, int) else None for value in token_ids],
        "versions": [span for span in _list(record, "versions") if _is_span(span)],
        "drafters": [str(name) for name in _list(record, "drafters")],
        "reward": _number(record.get("reward")),
        "rewards": {str(name): _number(value) for name, value in _dict(record, "rewards").items()},
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
    if sources:  # one character: the drafter's number, "-" for nobody
        compact["sources"] = "".join(str(value) if value in range(10) else "-" for value in sources)
    return compact, str(record.get("prompt") or "")


def _number(value: Any) -> float | None:
    """None for what is no number, or is beyond all measure."""
    return value if isinstance(value, int | float) and abs(value) < 1e100 else None


def _is_span(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, int) for part in value)


def _dict(record: dict[str, Any], name: str) -> dict[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def _list(record: dict[str, Any], name: str) -> list[Any]:
    value = record.get(name)
    return value if isinstance(value, list) else []
