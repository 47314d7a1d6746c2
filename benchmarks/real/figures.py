"""The tables of the study, and its figure, from what is measured so far. What is missing is listed at the end."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from results import Results, Row, measured_rows
from runs import difference, rows_of
from settings import NUM_AUDITS, Study

NUM_WARM_UP = 4  # steps of a run whose times do not count: most CUDA graphs are captured in them
WINDOW = 10  # RL steps
LEAST_MEDIAN, LEAST_ROUND = 0.98, 0.02  # what `auto` must reach: in the median, and below the noise in one audit
RL_RUNS = (("record", "plain"), ("curves", "eagle3"), ("online", "general"), ("online", "in-domain"))


def table(study: Study) -> None:
    results, sections, missing = study.results, [], []
    for title, make in PARTS.items():
        found = make(results)
        (sections if found else missing).append(f"## {title}\n\n{found}" if found else title)
    text = "\n\n".join([*machines(results), *sections, "Missing: " + (", ".join(missing) or "nothing")]) + "\n"
    print(text)
    (study.args.out / "tables.md").write_text(text, "utf-8")
    plot(results, study.args.out / "study.svg")


def machines(results: Results) -> list[str]:
    rows = [row for part in ("record", "heads", "audit", "long", "step") for row in results.rows(part, "machine")]
    kinds = {f"{row['device']}, torch {row['torch']}, {row['model']} in {row['dtype']}" for row in rows}
    return ["\n".join(sorted(kinds))] if kinds else []


def markdown(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heading, ["---"] + ["---:"] * (len(heading) - 1), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def median(values: Iterable[float | None]) -> float:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else math.nan


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})" if values else "–"


# ---- RL runs ----


def rl_runs(results: Results) -> str | None:
    rows = []
    plain = rows_of(results.rows("record", "step"), "plain")
    for part, name in RL_RUNS:
        steps = rows_of(results.rows(part, "step"), name)
        if not steps:
            continue
        late = steps[NUM_WARM_UP:] or steps
        rewards = [step["reward_mean"] for step in steps]
        drafted = [step["mean_acceptance_length"] for step in steps if step["num_drafts"]]
        rows.append([
            f"{part}: {name}", len(steps), f"{seconds(late, 'exposed_generation'):.2f}",
            f"{seconds(late, 'training'):.2f}", f"{seconds(late, 'total'):.2f}",
            *(f"{statistics.mean(some):.3f}" for some in (rewards[:WINDOW], rewards[-WINDOW:])),
            *(f"{statistics.mean(some):.2f}" if some else "–" for some in (drafted[:WINDOW], drafted[-WINDOW:])),
        ])  # fmt: skip
    heading = [
        "run", "steps", "generation, s", "training, s", "step, s", f"reward, first {WINDOW}", f"last {WINDOW}",
        f"acceptance length, first {WINDOW}", f"last {WINDOW}",
    ]  # fmt: skip
    if not rows:
        return None
    notes = [f"{part}: {name} and plain: {identical(results, part, name, plain)}" for part, name in RL_RUNS[1:]]
    return "\n\n".join([markdown(heading, rows), "\n".join(f"- {note}" for note in notes), accuracy(results)])


def seconds(steps: Sequence[Row], stage: str) -> float:
    return median(step["stages"][stage] for step in steps)


def identical(results: Results, part: str, name: str, plain: Sequence[Row]) -> str:
    steps = rows_of(results.rows(part, "step"), name)
    if not steps or not plain:
        return "not measured"
    found = difference(plain, steps)
    num = min(len(plain), len(steps))
    tokens = [
        {row["run"]: row["tokens"] for row in results.rows(where, "finished")}.get(run)
        for where, run in (("record", "plain"), (part, name))
    ]
    if found is None and None not in tokens and tokens[0] != tokens[1]:
        found = "the tokens of a step"
    return (
        f"differ in {found}"
        if found
        else f"identical in {num} steps, {sum(s['num_tokens'] for s in plain[:num])} tokens"
    )


def accuracy(results: Results) -> str:
    rows = []
    for part, name in RL_RUNS:
        for step in rows_of(results.rows(part, "step"), name):
            for when in ("eval_before", "eval"):
                if found := step.get(when):
                    num = found["num_problems"] * found["n"]
                    low, high = wilson(found["reward"], num)
                    number = 0 if when == "eval_before" else step["step"] + 1
                    rows.append([f"{part}: {name}", number, num, f"{found['reward']:.4f}", f"{low:.3f}–{high:.3f}"])
    return markdown(["held-out accuracy", "after steps", "samples", "accuracy", "95% interval"], rows)


def wilson(share: float, num: int) -> tuple[float, float]:
    """The 95% interval of a share of `num` samples."""
    z = 1.96
    middle = (share + z * z / (2 * num)) / (1 + z * z / num)
    half = z / (1 + z * z / num) * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return middle - half, middle + half


def acceptance_by_step(results: Results) -> str | None:
    runs = {name: rows_of(results.rows(part, "step"), name) for part, name in RL_RUNS[1:]}
    num = max(map(len, runs.values()))
    if not num:
        return None
    rows = []
    for start in range(0, num, WINDOW):
        means = []
        for steps in runs.values():
            lengths = [s["mean_acceptance_length"] for s in steps[start : start + WINDOW] if s["num_drafts"]]
            means.append(f"{statistics.mean(lengths):.2f}" if lengths else "–")
        rows.append([f"{start + 1} to {min(start + WINDOW, num)}", *means])
    return markdown(["RL steps", "in-domain, not trained online", "general, online", "in-domain, online"], rows)


def short_runs(part: str) -> Callable[[Results], str | None]:
    """Times of the short runs of a part, relative to the first."""

    def make(results: Results) -> str | None:
        steps = results.rows(part, "step")
        rows = []
        for name in dict.fromkeys(row["run"] for row in steps):
            late = rows_of(steps, name)[NUM_WARM_UP:]
            if not late:
                continue
            generation, whole = (sum(s["stages"][key] for s in late) for key in ("exposed_generation", "total"))
            own = sum(s["stages"]["generation"] + s["stages"]["draft"] for s in late)
            rows.append([
                name, len(late), f"{own / len(late):.3f}", f"{generation / len(late):.3f}", f"{whole / len(late):.3f}",
                f"{generation / whole:.0%}", accepted(late),
            ])  # fmt: skip
        if not rows:
            return None
        heading = ["run", "steps", "generation, s", "exposed, s", "whole step, s", "share", "acceptance length"]
        return "\n\n".join([markdown(heading, rows), *step_speedups(steps)])

    return make


def step_speedups(steps: list[Row]) -> list[str]:
    """Plain run divided by the run with drafts, over the same steps of both."""
    found = []
    for name in dict.fromkeys(row["run"] for row in steps):
        mode, _, rest = name.partition("-")
        plain, other = rows_of(steps, f"plain-{rest}"), rows_of(steps, name)
        if mode == "plain" or not plain or len(plain) != len(other):
            continue
        plain_late, late = plain[NUM_WARM_UP:], other[NUM_WARM_UP:]
        ratios = [
            f"{sum(s['stages'][key] for s in plain_late) / sum(s['stages'][key] for s in late):.2f}x"
            for key in ("exposed_generation", "total") if late
        ]  # fmt: skip
        same = difference(plain, other)
        found.append(
            f"- {name} against plain-{rest}: generation and whole step {', '.join(ratios) or '–'}; "
            f"{'identical' if same is None else 'differ in ' + same}"
        )
    return ["\n".join(found)] if found else []


# ---- heads ----


def heads(results: Results) -> str | None:
    rows, notes, found = [], [], results.rows("heads", "head")
    for head in {row["name"]: row for row in found}.values():
        coupled = head["acceptance_after"]["coupled"]
        positions = " ".join(f"{share:.2f}" for share in coupled["acceptance_per_position"])
        rows.append([
            head["name"], head["num_train"], head["num_tokens"],
            f"{head['tokens_per_s']:.0f}", f"{head['seconds']:.0f}",
            "–" if head["generation_s"] is None else f"{head['generation_s']:.0f}",
            f"{coupled['mean_acceptance_length']:.2f}", positions,
        ])  # fmt: skip
        depths = ", ".join(f"{at}: {x:.2f}" for at, x in coupled["acceptance_length_per_depth"].items())
        notes.append(f"- {head['name']}, acceptance length by tokens in the completion: {depths}")
        if num := len({row["checksum"] for row in found if row["name"] == head["name"]}) - 1:
            notes.append(f"- {head['name']} was trained again {num} times with other bits; audits use all of them")
    heading = [
        "head", "sequences", "trained tokens", "tokens/s", "training, s", "generation, s", "acceptance length",
        "accepted up to position 1, 2, …",
    ]  # fmt: skip
    return "\n\n".join([markdown(heading, rows), "\n".join(notes)]) if rows else None


# ---- audits ----


def audits(results: Results) -> str | None:
    rows = measured_rows(results, "audit")
    if not rows:
        return None
    captured = f"{sum(row['num_captured'] > 0 for row in rows)} of {len(rows)} audits captured a CUDA graph."
    auto = auto_check(rows, chosen_rounds(results))
    notes = [captured, *about_rounds(results, "audit")]
    return "\n\n".join([*speedups(rows), *notes, auto, lengths_by_rows(rows), cold(results)])


def about_rounds(results: Results, part: str) -> list[str]:
    """What a reader of the speed-ups must know: few rounds, and audits that failed."""
    rows, found = measured_rows(results, part), []
    counts = Counter((row["step"], row["batch_size"], row["drafter"], row["length"]) for row in rows)
    if few := sum(num < NUM_AUDITS for num in counts.values()):
        found.append(f"{few} of {len(counts)} cells were measured in fewer than {NUM_AUDITS} rounds.")
    if num_failed := len(results.rows(part, "audit")) - len(rows):
        found.append(f"{num_failed} audits emitted other tokens than they must. They are in no table.")
    return found


def chosen_rounds(results: Results) -> int:
    """Of the last start of `audit`: --rounds."""
    starts = results.rows("audit", "machine")
    given = starts[-1]["options"].get("rounds", "None") if starts else "None"
    return NUM_AUDITS if given in ("None", "0") else int(given)


def speedups(rows: list[Row]) -> list[str]:
    """A table per RL step: drafters by batch size."""
    tables = []
    for step in sorted({row["step"] for row in rows}):
        own = [row for row in rows if row["step"] == step]
        batch_sizes = sorted({row["batch_size"] for row in own})
        lines = []
        for drafter, length in dict.fromkeys((row["drafter"], row["length"]) for row in own):
            of = [row for row in own if (row["drafter"], row["length"]) == (drafter, length)]
            cells = [spread([row["speedup"] for row in of if row["batch_size"] == n]) for n in batch_sizes]
            same = sum(row["identical"] for row in of)
            lines.append([f"{drafter} {length}", *cells, accepted(of), f"{same} of {len(of)}"])
        heading = [f"step {step}", *(f"batch size {n}" for n in batch_sizes), "acceptance length", "identical"]
        tables.append(markdown(heading, lines))
    return tables


def accepted(rows: list[Row]) -> str:
    """The median acceptance length of rows in which something was drafted."""
    lengths = [row["mean_acceptance_length"] for row in rows if row["num_drafts"]]
    return f"{statistics.median(lengths):.2f}" if lengths else "–"


def auto_check(rows: list[Row], num_rounds: int) -> str:
    """For each cell with `auto`: its median, and its lowest audit relative to the lowest of plain against plain."""
    found, num_held = [], 0
    cells = dict.fromkeys((row["step"], row["batch_size"], row["drafter"]) for row in rows if row["length"] == "auto")
    for step, n, drafter in cells:
        here = [row for row in rows if (row["step"], row["batch_size"]) == (step, n)]
        own = [row["speedup"] for row in here if row["drafter"] == drafter and row["length"] == "auto"]
        noise = [row["speedup"] for row in here if row["drafter"] == "plain"]
        where = f"step {step}, batch size {n}, {drafter}"
        if min(len(own), len(noise)) < num_rounds:
            found.append(
                f"- {where}: {len(own)} audits and {len(noise)} of plain against plain; {num_rounds} of each are needed"
            )
        elif median(own) >= LEAST_MEDIAN and min(own) >= min(noise) - LEAST_ROUND:
            num_held += 1
        else:
            found.append(f"- {where}: MISSED: {spread(own)}, plain against plain {spread(noise)}")
    heading = (
        f"`auto`, median at least {LEAST_MEDIAN} and no audit more than {LEAST_ROUND} below the lowest of plain "
        f"against plain: holds in {num_held} of {len(cells)} cells"
    )
    return "\n".join([heading, *found])


def lengths_by_rows(rows: list[Row]) -> str:
    """How many tokens `auto` drafted per row, over all audits, by number of rows."""
    auto = [row for row in rows if row["length"] == "auto"]
    buckets = sorted({int(at) for row in auto for at in row["by_rows"]})
    lines = []
    for drafter in dict.fromkeys(row["drafter"] for row in auto):
        parts = [row["by_rows"] for row in auto if row["drafter"] == drafter]
        cells = []
        for bucket in buckets:
            found = [part[str(bucket)] for part in parts if str(bucket) in part]
            steps = sum(each["steps"] for each in found)
            cells.append(f"{sum(e['steps'] * e['drafted'] for e in found) / steps:.2f}" if steps else "–")
        lines.append([drafter, *cells])
    return markdown(["draft tokens per row with `auto`, up to … rows", *buckets], lines)


def cold(results: Results) -> str:
    rows = results.rows("audit", "cold")
    lines = []
    for drafter in dict.fromkeys(row["drafter"] for row in rows):
        own = [row for row in rows if row["drafter"] == drafter]
        times, captured = [row["seconds"] for row in own], sum(row["num_captured"] for row in own)
        setup_s = max(row["setup_s"] for row in own)
        lines.append([drafter, len(own), f"{setup_s:.1f}", f"{times[0]:.1f}", f"{median(times):.1f}", captured])
    heading = ["first run of a cell", "cells", "longest setup, s", "the very first, s", "median, s", "captured graphs"]
    return markdown(heading, lines)


def long(results: Results) -> str | None:
    rows = measured_rows(results, "long")
    if not rows:
        return None
    first, lines = rows[0], []
    for drafter, length in dict.fromkeys((row["drafter"], row["length"]) for row in rows):
        of = [row for row in rows if (row["drafter"], row["length"]) == (drafter, length)]
        lines.append([
            f"{drafter} {length}", f"{median(r['plain_s'] for r in of):.2f}",
            f"{median(r['speculative_s'] for r in of):.2f}", spread([r["speedup"] for r in of]), accepted(of),
            f"{sum(r['identical'] for r in of)} of {len(of)}",
        ])  # fmt: skip
    heading = ["drafter", "plain, s", "with drafts, s", "speed-up", "acceptance length", "identical"]
    about = (
        f"{first['num_samples']} samples, batch size {first['batch_size']}, {first['num_tokens']} tokens. Lengths at "
        f"0, 10, 25, 50, 75, 90, 99, 100%: {', '.join(map(str, first['lengths']))}; {first['truncated']:.0%} reach "
        "the limit."
    )
    return "\n\n".join([about, markdown(heading, lines), *about_rounds(results, "long")])


# ---- the figure ----


def plot(results: Results, path: Path) -> None:
    """Speed-up of `auto` by batch size; acceptance length and reward by RL step."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "paceline"  # the same bytes in every run
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 3.8), layout="constrained")
    rows = [row for row in measured_rows(results, "audit") if row["length"] in ("auto", "0")]
    for drafter in dict.fromkeys(row["drafter"] for row in rows):
        own = [row for row in rows if row["drafter"] == drafter]
        batch_sizes = sorted({row["batch_size"] for row in own})
        values = [median(row["speedup"] for row in own if row["batch_size"] == n) for n in batch_sizes]
        left.plot(batch_sizes, values, marker="o", label=drafter)
    left.set(xscale="log", xlabel="batch size", ylabel="speed-up of generation, `auto`")
    for part, name in RL_RUNS:
        steps = rows_of(results.rows(part, "step"), name)
        if drafted := [step for step in steps if step["num_drafts"]]:
            lengths = [step["mean_acceptance_length"] for step in drafted]
            middle.plot([step["step"] + 1 for step in drafted], lengths, label=f"{part}: {name}")
        if steps:
            width = {"linewidth": 5, "alpha": 0.3} if part == "record" else {"linewidth": 1.2}
            rewards = [step["reward_mean"] for step in steps]
            right.plot([step["step"] + 1 for step in steps], rewards, label=f"{part}: {name}", **width)
    middle.set(xlabel="RL step", ylabel="acceptance length")
    right.set(xlabel="RL step", ylabel="mean reward")
    for axes in (left, middle, right):
        axes.grid(alpha=0.2)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


PARTS: dict[str, Callable[[Results], str | None]] = {
    "RL runs": rl_runs,
    "Acceptance length by RL step": acceptance_by_step,
    "Heads": heads,
    "Audits": audits,
    "Long completions": long,
    "Whole steps with small batches": short_runs("step"),
    "Synchronous and one version behind": short_runs("stale"),
}
