"""Recommended speculation settings, from the results of replays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.files import number, read_metrics
from paceline.replay.rounds import Round
from paceline.replay.run import Result

MIN_SPEEDUP = 1.02  # below it, speculation is not recommended
AUTO_SHARE = 0.98  # `auto` is preferred if it reaches this share of the best setting's speed-up
MIN_COMPLETIONS = 64  # about the size of a small RL step
TOKENS_PER_ROW, MIN_TOKENS, MAX_TOKENS = 5_000, 30_000, 160_000  # of a sample


@dataclass(slots=True)
class Sample:
    """The recorded rollouts of some problems, in all of their epochs."""

    rounds: list[Round]
    num_problems: int
    num_problems_recorded: int
    num_tokens: int
    num_tokens_recorded: int


def sample(rounds: Sequence[Round], num_tokens: int | None) -> Sample:
    """The first problems, up to num_tokens completion tokens in all; None: all problems."""
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
    kept = [some for recorded in rounds if (some := recorded.select_problems(set(taken))) is not None]
    return Sample(kept, len(taken), len(sizes), sum(taken.values()), sum(sizes.values()))


def default_sample_tokens(batch: int) -> int:
    """Sample size for a batch size: small batches need many steps, large ones many rows."""
    return min(max(TOKENS_PER_ROW * batch, MIN_TOKENS), MAX_TOKENS)


def take_rounds(rounds: Iterable[Round], num_tokens: int | None) -> tuple[list[Round], bool]:
    """The first rounds, up to num_tokens emitted tokens (None: all), and whether these are all rounds."""
    taken: list[Round] = []
    total = 0
    for recorded in rounds:
        if num_tokens is not None and taken and total + recorded.num_emitted > num_tokens:
            return taken, False
        taken.append(recorded)
        total += recorded.num_emitted
    return taken, True


def small_sample_warning(rounds: Sequence[Round]) -> str | None:
    """A warning if the recording is too small to represent a run."""
    num = sum(map(len, rounds))
    one_version = len({recorded.version for recorded in rounds}) == 1
    one_epoch = not any(recorded.epochs.any() for recorded in rounds)
    if num >= MIN_COMPLETIONS and not one_version and not one_epoch:
        return None
    version = " of one policy version" if one_version else ""
    epoch = ", each problem in one epoch only" if one_epoch else ""
    return f"Based on {num} completion{'s' if num > 1 else ''}{version}{epoch}; record more for a reliable result."


def generation_share(metrics: Path) -> float | None:
    """Share of a run's time that generation takes, from its metrics.jsonl; None if it is not recorded there."""
    try:
        steps = read_metrics(metrics)
    except (OSError, ValueError):
        return None
    generation_s = sum(number(step, "stages", "generation") or 0.0 for step in steps)
    total_s = sum(number(step, "stages", "total") or 0.0 for step in steps)
    return generation_s / total_s if 0 < generation_s <= total_s else None


def without_draft_times(drafters: Sequence[str], timed: Collection[str]) -> list[str]:
    """The drafters whose time is not among the measured ones. Replays assume 0 for it, so they favour these drafters.
    The time of `hybrid` is that of its parts."""
    parts = {"hybrid": ("suffix", "eagle3")}
    return [drafter for drafter in drafters if not all(part in timed for part in parts.get(drafter, (drafter,)))]


def untimed_text(results: Sequence[Result], untimed: Sequence[str]) -> list[str]:
    """A sentence for each drafter that can't be recommended because its draft time is unknown."""
    lines = []
    for drafter in untimed:
        own = [result for result in results if result.cell.drafter == drafter]
        speedups = [
            f"{max(r.speedup for r in own if r.cell.batch == batch):.2f}x at batch {batch}"
            for batch in dict.fromkeys(result.cell.batch for result in own)
        ]
        lines.append(
            f"{drafter} is not recommended: its draft time is unknown, because the run never drafted with it. Without "
            f"that time its best setting gives {', '.join(speedups)}."
        )
    return lines


def best_of(results: Sequence[Result]) -> Result:
    """The fastest setting; `auto` if it is almost as fast, because it stops drafting when drafts do not pay."""
    best = max(results, key=lambda result: result.speedup)
    auto = [r for r in results if r.cell.policy.startswith("auto") and r.speedup >= AUTO_SHARE * best.speedup]
    return max(auto, key=lambda result: result.speedup, default=best)


def advise(
    results: Sequence[Result], share: float, own_batch: int | None = None, untimed: Collection[str] = ()
) -> dict[str, Any]:
    """The best setting for every batch size (`batches`, as text in `text`), and one for all of them, or only for
    `own_batch` (`settings`). The text says which drafters are `untimed`."""
    batches = list(dict.fromkeys(result.cell.batch for result in results))
    rows = [_at_batch([r for r in results if r.cell.batch == batch], share, untimed) for batch in batches]
    chosen = [r for r in results if own_batch in (None, r.cell.batch)]
    return {"generation_share": share, "batches": rows, "settings": _settings(chosen), "text": _text(rows)}


def _at_batch(results: Sequence[Result], share: float, untimed: Collection[str]) -> dict[str, Any]:
    best = best_of(results)
    kind, _, k = best.cell.policy.partition(":")
    cold = best.summary(slice(0, 1))["speedup"]
    warm = best.summary(slice(1, None))["speedup"] if best.stats.num_epochs > 1 else None
    return {
        "batch": best.cell.batch,
        "speculate": best.speedup > MIN_SPEEDUP,
        "drafter": best.cell.drafter,
        "policy": best.cell.policy,
        "description": f"{best.cell.drafter}, "
        + (f"k = {k}" if kind == "static" else f'policy "{kind}"')
        + (" (draft time unknown)" if best.cell.drafter in untimed else ""),
        "mean_acceptance_length": best.summary()["mean_acceptance_length"],
        "generation_speedup": best.speedup,
        "cold": cold,
        "warm": warm,
        "step_speedup": 1 / (share / best.speedup + 1 - share),  # Amdahl's law; generation takes `share` of a step
        "auto_speedup": max((r.speedup for r in results if r.cell.policy.startswith("auto")), default=None),
    }


def _text(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        if not row["speculate"]:
            auto = row["auto_speedup"]
            line = (
                f"batch {row['batch']}: do not speculate. The best setting ({row['description']}) gives "
                f"{row['generation_speedup']:.2f}x."
            )
            lines.append(line + (f' Policy "auto" stops drafting ({auto:.2f}x).' if auto is not None else ""))
            continue
        epochs = (
            f" (cold epoch {row['cold']:.2f}x, warm {row['warm']:.2f}x)"
            if row["warm"]
            else " (one epoch; the history was empty at the start)"
        )
        lines.append(
            f"batch {row['batch']}: {row['description']}. Generation {row['generation_speedup']:.2f}x{epochs}, "
            f"whole step {row['step_speedup']:.2f}x; acceptance length {row['mean_acceptance_length']:.2f}."
        )
    return lines


def _settings(results: Sequence[Result]) -> dict[str, Any]:
    """One setting for all batch sizes: the one with the largest product of speed-ups."""
    num_batches = len({result.cell.batch for result in results})

    def product(cell: tuple[str, str]) -> float:
        total = 1.0
        for result in results:
            if (result.cell.drafter, result.cell.policy) == cell:
                total *= result.speedup
        return total

    cells = list(dict.fromkeys((r.cell.drafter, r.cell.policy) for r in results))
    drafter, policy = max(cells, key=product)
    floor = AUTO_SHARE**num_batches * product((drafter, policy))
    auto = [cell for cell in cells if cell[1].startswith("auto") and product(cell) >= floor]
    if auto:
        drafter, policy = max(auto, key=product)
    if max(result.speedup for result in results) <= MIN_SPEEDUP:
        return {"speculation.method": "none"}
    kind, _, k = policy.partition(":")
    settings: dict[str, Any] = {"speculation.method": drafter, "speculation.policy": kind}
    return settings | ({"speculation.num_speculative_tokens": int(k)} if k else {})
