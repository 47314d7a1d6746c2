"""What to set, from what replays came to, in plain words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.files import open_run_file, parse_json
from paceline.replay.rounds import Round
from paceline.replay.run import Result

WORTH = 1.02  # less than this is not worth turning on
SAFE = 0.98  # `auto` is preferred where it brings this much of what the best fixed length brings
FEW = 64  # completions, about those of a small step of RL
TOKENS_PER_ROW, FEWEST_TOKENS, MOST_TOKENS = 5_000, 30_000, 160_000  # looked at, unless all are asked for


@dataclass(slots=True)
class Sample:
    """Some problems of what was recorded, in all of their epochs."""

    rounds: list[Round]
    num_problems: int
    num_problems_recorded: int
    num_tokens: int
    num_tokens_recorded: int


def sample(rounds: Sequence[Round], num_tokens: int | None) -> Sample:
    """The first problems whose completions together have num_tokens tokens; None: all."""
    sizes: dict[str, int] = {}
    for recorded in rounds:
        emitted = (recorded.num_total - recorded.num_prompt).tolist()
        for problem, size in zip(recorded.problems, emitted, strict=True):
            sizes[problem] = sizes.get(problem, 0) + size
    taken: dict[str, int] = {}
    for problem, size in sizes.items():
        if num_tokens is not None and taken and sum(taken.values()) + size > num_tokens:
            break
        taken[problem] = size
    kept = [some for recorded in rounds if (some := recorded.only(set(taken))) is not None]
    return Sample(kept, len(taken), len(sizes), sum(taken.values()), sum(sizes.values()))


def tokens_to_look_at(batch: int) -> int:
    """Small batches take many steps, large ones need many rows."""
    return min(max(TOKENS_PER_ROW * batch, FEWEST_TOKENS), MOST_TOKENS)


def bounded(rounds: Iterable[Round], num_tokens: int | None) -> tuple[list[Round], bool]:
    """Rounds until so many tokens were emitted (None: all), and whether that was everything."""
    held: list[Round] = []
    total = 0
    for recorded in rounds:
        if num_tokens is not None and held and total + recorded.num_emitted > num_tokens:
            return held, False
        held.append(recorded)
        total += recorded.num_emitted
    return held, True


def caution(rounds: Sequence[Round]) -> str | None:
    """A sentence, where what was recorded is too little to stand for a run."""
    num = sum(map(len, rounds))
    one_version = len({recorded.version for recorded in rounds}) == 1
    one_epoch = not any(recorded.epochs.any() for recorded in rounds)
    if num >= FEW and not one_version and not one_epoch:
        return None
    version = " of one version of the policy" if one_version else ""
    epoch = ", where no problem comes back" if one_epoch else ""
    return f"Based on {num} completion{'s' if num > 1 else ''}{version}{epoch}; record more before trusting it."


def step_speedup(generation_speedup: float, share: float) -> float:
    """Of a whole RL step, of which generation was a share (Amdahl)."""
    return 1 / (share / generation_speedup + 1 - share)


def generation_share(metrics: Path) -> float | None:
    """Of a run's time, from its metrics.jsonl; None where it does not say."""
    generation_s = total_s = 0.0
    try:
        with open_run_file(metrics) as file:
            for line in file:
                stages = parse_json(line).get("stages", {})
                generation_s += stages.get("generation", 0.0)
                total_s += stages.get("total", 0.0)
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return generation_s / total_s if 0 < generation_s <= total_s else None


def best_of(results: Sequence[Result]) -> Result:
    """The fastest; `auto` where it is about as good, since it also knows when to stop."""
    best = max(results, key=lambda result: result.speedup)
    automatic = [r for r in results if r.cell.policy.startswith("auto") and r.speedup >= SAFE * best.speedup]
    return max(automatic, key=lambda result: result.speedup, default=best)


def in_words(result: Result) -> str:
    kind, _, k = result.cell.policy.partition(":")
    return f"{result.cell.drafter}, " + (f"k = {k}" if kind == "static" else f'policy "{kind}"')


def advise(results: Sequence[Result], share: float) -> dict[str, Any]:
    """A sentence for every batch size, then what to set."""
    batches = list(dict.fromkeys(result.cell.batch for result in results))
    rows = [_at_batch([r for r in results if r.cell.batch == batch], share) for batch in batches]
    return {"generation_share": share, "batches": rows, "settings": _settings(results, batches), "text": _text(rows)}


def _at_batch(results: Sequence[Result], share: float) -> dict[str, Any]:
    best = best_of(results)
    whole = best.figures()
    cold = best.figures(slice(0, 1))["speedup"]
    warm = best.figures(slice(1, None))["speedup"] if best.tally.num_epochs > 1 else None
    worth = best.speedup > WORTH
    return {
        "batch": best.cell.batch,
        "speculate": worth,
        "drafter": best.cell.drafter,
        "policy": best.cell.policy,
        "words": in_words(best),
        "mean_acceptance_length": whole["mean_acceptance_length"],
        "generation_speedup": best.speedup,
        "cold": cold,
        "warm": warm,
        "step_speedup": step_speedup(best.speedup, share),
        "auto_speedup": max((r.speedup for r in results if r.cell.policy.startswith("auto")), default=None),
    }


def _text(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        if not row["speculate"]:
            auto = row["auto_speedup"]
            line = (
                f"batch {row['batch']}: leave it off here. The best of all ({row['words']}) would bring "
                f"{row['generation_speedup']:.2f}x."
            )
            lines.append(line + (f' Policy "auto" stops by itself ({auto:.2f}x).' if auto is not None else ""))
            continue
        epochs = (
            f" (cold epoch {row['cold']:.2f}x, warm {row['warm']:.2f}x)" if row["warm"] else " (one epoch only, cold)"
        )
        lines.append(
            f"batch {row['batch']}: {row['words']}. Generation {row['generation_speedup']:.2f}x{epochs}, "
            f"a whole step {row['step_speedup']:.2f}x; {row['mean_acceptance_length']:.2f} tokens per draft."
        )
    return lines


def _settings(results: Sequence[Result], batches: Sequence[int]) -> dict[str, Any]:
    """One setting for all batch sizes: the one whose speed-ups' product is largest."""

    def product(cell: tuple[str, str]) -> float:
        total = 1.0
        for result in results:
            if (result.cell.drafter, result.cell.policy) == cell:
                total *= result.speedup
        return total

    cells = list(dict.fromkeys((r.cell.drafter, r.cell.policy) for r in results))
    drafter, policy = max(cells, key=product)
    floor = SAFE ** len(batches) * product((drafter, policy))
    automatic = [cell for cell in cells if cell[1].startswith("auto") and product(cell) >= floor]
    if automatic:
        drafter, policy = max(automatic, key=product)
    if max(result.speedup for result in results) <= WORTH:
        return {"speculation.method": "none"}
    kind, _, k = policy.partition(":")
    settings: dict[str, Any] = {"speculation.method": drafter, "speculation.policy": kind}
    return settings | ({"speculation.num_speculative_tokens": int(k)} if k else {})
