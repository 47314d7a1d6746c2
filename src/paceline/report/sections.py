"""The sections of a run's page. Each function returns HTML, or "" if the run has no data for it.

All text from the run goes through `escape`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.files import number
from paceline.report.chart import bars, key, lines, shares, show, stacked
from paceline.report.curves import CURVES
from paceline.report.elements import charts, definitions, factor, folded, paragraph, seconds, section, table
from paceline.report.figures import (
    audits,
    held_out_rewards,
    identical_audits,
    speedup,
    stage_seconds,
    tail_speedup,
    warnings,
)
from paceline.report.markup import escape
from paceline.report.run import OUTCOMES, ROW_BOUNDS, Run, mean
from paceline.report.series import STYLES, Series, color_and_style
from paceline.report.table import cell

# Stage -> (name on the page, colour), from bottom to top. Together the stages are the whole time of a step.
STAGES = {
    "generation": ("generation", 0),
    "training": ("training", 1),
    "head_training": ("draft training", 8),
    "logprob": ("logprobs", 4),
    "reward": ("rewards", 2),
    "draft": ("drafter", 5),
    "sync": ("weight sync", 3),
    "data": ("data", 6),
    "other": ("other", 7),
}
METHOD = (
    "Coupled rollouts do not depend on the drafter, so an audited step is generated twice more: once with drafts and "
    "once without, the same tokens by the same kernels at the same batch size. The speed-up is the ratio of the two "
    "measured times, plain ÷ speculative. Above 1, speculation was faster."
)
RULES = {
    "coupled": "every token is drawn from the policy with noise keyed by position; drafts change no token",
    "rejection": "draft tokens are accepted or replaced so that the distribution is the policy's",
    "block": "drafts are accepted up to a position so that the distribution is the policy's",
}


def by_index(rows: Sequence[Any]) -> list[list[float | None]]:
    """For each index of a metric that is a list: its values over the steps."""
    lists = [row if isinstance(row, list) else [] for row in rows]
    return [[number(row[i]) if i < len(row) else None for row in lists] for i in range(max(map(len, lists), default=0))]


def metric_lines(
    run: Run, title: str, unit: str, paths: Mapping[str, str], *, style: str | None = None, colour: int = 0,
    **options: Any,
) -> str:  # fmt: skip
    """A line for each metric. `paths`: name -> path in a record of metrics.jsonl, with dots."""
    series = [
        Series(name, run.series(*path.split(".")), colour + i, style or STYLES[i % 3])
        for i, (name, path) in enumerate(paths.items())
    ]
    return lines(title, unit, run.numbers, series, **options)


def curve(run: Run, path: str, name: str = "", more: Mapping[str, str] | None = None, **options: Any) -> str:
    """The chart of a metric in CURVES. `name`: of its line; `more`: name -> path of other metrics in the same chart."""
    shown = CURVES[path]
    paths = {name or shown.line or shown.title.lower(): path, **(more or {})}
    return metric_lines(run, shown.title, shown.unit, paths, **{**shown.options, **options})


# The sections, from top to bottom


def heading(run: Run) -> str:
    labels = ("task", "model", "device", "seed", "sandbox", "started", "paceline", "torch")
    facts = definitions("facts", ((name, escape(str(run.info[name]))) for name in labels if name in run.info))
    return f'<header><p class="kind">Paceline run</p><h1>{escape(run.name)}</h1>{facts}</header>'


def messages(run: Run) -> str:
    def box(kind: str, title: str, texts: Sequence[str]) -> str:
        items = "".join(f"<li>{escape(text)}</li>" for text in texts)
        return f'<aside class="{kind}" id="{kind}s"><b>{title}</b><ul>{items}</ul></aside>' if items else ""

    return box("warning", "Warnings", warnings(run)) + box("note", "About this report", run.notes)


def reward(run: Run) -> str:
    names = list(dict.fromkeys(name for r in run.steps if isinstance(r.get("rewards"), dict) for name in r["rewards"]))
    by_function = [Series(name, run.series("rewards", name), *color_and_style(i)) for i, name in enumerate(names)]
    is_reward = len(names) == 1 and by_function[0].values == run.series("reward_mean")
    evals = [(f"{r['step']} (before)", r["eval_before"]) for r in run.steps if isinstance(r.get("eval_before"), dict)]
    evals += [(str(r["step"]), r["eval"]) for r in run.steps if isinstance(r.get("eval"), dict)]
    columns = {"reward": "mean reward", "avg_at_n": "avg@n", "pass_at_k": "pass@k", "n": "n", "k": "k"}
    columns["length_mean"] = "mean length (tokens)"
    rows = [[step, *(show(number(result, name)) for name in columns)] for step, result in evals]
    mean_reward = Series("training, mean", run.series("reward_mean"), 0, band=run.series("reward_std"))
    return section(
        "reward",
        "Reward and length",
        charts(
            lines(CURVES["reward_mean"].title, CURVES["reward_mean"].unit, run.numbers,
                  [mean_reward, Series("held out", held_out_rewards(run), 1, "points")]),
            curve(run, "length_mean", more={"longest": "length_max"}),
            lines("Reward by function", "mean, without weights", run.numbers, [] if is_reward else by_function),
            curve(run, "truncated_ratio", colour=1),
        ),
        table(["step", *columns.values()], rows, caption="Held-out problems"),
    )  # fmt: skip


def time(run: Run) -> str:
    per_step = stage_seconds(run, STAGES)
    totals = {name: sum(value or 0 for value in values) for name, values in per_step.items()}
    whole = sum(totals.values())
    if not whole:
        return ""
    names = {name: text for name, (text, _) in STAGES.items()}
    note = ""
    if run.max_staleness > 0:
        names["generation"] = "exposed generation"
        idle_s, reward_s = run.total("stages", "idle"), run.total("stages", "reward")
        note = paragraph(
            f"Generation overlaps training (train.max_staleness = {run.max_staleness}). It took "
            f"{seconds(run.total('stages', 'generation'))}. Training waited for rollouts for "
            f"{seconds(totals['generation'])}, {totals['generation'] / whole:.0%} of the time. The engine had nothing "
            f"to generate for {seconds(idle_s + reward_s)}, {(idle_s + reward_s) / whole:.0%} of the time: it waited "
            f"{seconds(idle_s)} for newer weights, and {seconds(reward_s)} for rewards."
        )
    colours = {name: colour for name, (_, colour) in STAGES.items()}
    present = [name for name in totals if totals[name]]
    rows = [(key(f"block c{colours[name]}") + escape(names[name]), totals[name]) for name in present]
    return section(
        "time",
        "Time",
        note,
        charts(
            stacked(CURVES["stages.total"].title, CURVES["stages.total"].unit, run.numbers,
                    {names[name]: (colours[name], per_step[name]) for name in per_step}),
            curve(run, "tokens_per_s", "tokens per second"),
        ),
        shares("Shares", "of the whole run's time",
               {names[name]: (colours[name], totals[name] / whole) for name in present}),
        table(
            ["stage", "seconds", "per step", "share"],
            [[name, f"{total:,.1f}", f"{total / len(run.steps):.2f}", f"{total / whole:.1%}"]
             for name, total in [*rows, ("<b>total</b>", whole)]],
            caption="Time by stage",
        ),
    )  # fmt: skip


def speculation(run: Run) -> str:
    rates = [record.get("acceptance_rate_per_position") for record in run.steps]
    at = by_index(rates)
    depth = len(at)
    # The mean over the run weighs each step by its number of drafts. Positions that a step did not draft count as 0.
    drafted = [isinstance(row, list) and len(row) > 0 for row in rates]
    drafts = [(value or 1.0) if some else 0.0 for value, some in zip(run.series("num_drafts"), drafted, strict=True)]
    whole = sum(drafts)
    by_depth = acceptance_by_depth(run)
    by_position: dict[str, float | None] = {
        str(j + 1): sum((rate or 0.0) * n for rate, n in zip(at[j], drafts, strict=True)) / whole for j in range(depth)
    }
    audited = audits(run)
    tails = list(tail_speedup(run))
    rows = [
        [
            str(step),
            show(number(audit, "num_tokens")),
            *(f"{number(audit, name) or 0:.2f}" for name in ("plain_s", "speculative_s")),
            factor(number(audit, "speedup")),
            *(factor(number(audit, "tail_speedup", name)) for name in tails),
            escape(cell(audit.get("identical"))),
        ]
        for step, audit in audited
    ]
    running = [f"at {n} running" for n in tails]
    up_to, audited_speedup = "share of drafts accepted up to it", CURVES["audit.speedup"]
    return section(
        "speculation",
        "Speculation",
        charts(
            curve(run, "mean_acceptance_length"),
            bars("Acceptance by position", up_to, "position in the draft", by_position, limits=(0.0, 1.0)),
            bars("Acceptance length by depth", "tokens per verified draft", "tokens of the completion before the draft",
                 by_depth if len(by_depth) > 1 else {}, colour=1),
            lines("By position over time", up_to, run.numbers,
                  [Series(f"position {j + 1}", at[j], j, STYLES[j % 3]) for j in range(depth)[:4]],
                  from_zero=True, limits=(0.0, 1.0)),
            curve(run, "draft_acceptance_rate", "accepted", colour=2),
        ),
        head_training(run),
        f"<h3>Measured speed-up</h3>{paragraph(METHOD)}" if audited or speedup(run) is not None else "",
        charts(
            curve(run, "audit.speedup", "audited step", colour=1, style="points"),
            bars("Speed-up by running sequences", audited_speedup.unit, "running sequences", tail_speedup(run),
                 colour=1, suffix="×", **audited_speedup.options),
        ),
        table(["step", "tokens", "plain, s", "speculative, s", "speed-up", *running, "identical"], rows,
              caption="Audits"),
    )  # fmt: skip


def acceptance_by_depth(run: Run) -> dict[str, float | None]:
    """The mean over the steps that have drafts in a range."""
    found = [record.get("acceptance_length_per_depth") for record in run.steps]
    starts = {start for lengths in found if isinstance(lengths, dict) for start in lengths if start.isdecimal()}
    means: dict[str, float | None] = {}
    for start in sorted(starts, key=int):
        lengths = [length for each in found if (length := number(each, start)) is not None]
        means[f"from {start}"] = sum(lengths) / len(lengths) if lengths else None
    return means


def head_training(run: Run) -> str:
    """Online training of the head."""
    overlaps = [r["head_training"].get("overlap") for r in run.steps if isinstance(r.get("head_training"), dict)]
    depth = max((len(overlap) for overlap in overlaps if isinstance(overlap, dict)), default=0)
    if not overlaps:
        return ""
    by_step = {f"step {k + 1}": f"head_training.overlap.{k + 1}" for k in range(depth)[:4]}
    return "<h3>Online draft training</h3>" + charts(
        metric_lines(run, "Drafter version", "updates of the head before the step", {"version": "drafter_version"},
                     from_zero=True, small=True),
        metric_lines(run, "Loss of the head", "at its updates", {"loss": "head_training.loss"}, colour=8,
                     style="points", small=True),
        metric_lines(run, "Overlap of head and policy", "Σ min(p, q), by step of the unroll", by_step, style="points",
                     from_zero=True, limits=(0.0, 1.0), small=True),
        small=True,
    )  # fmt: skip


def exactness(run: Run) -> str:
    rule = str(run.setting("speculation", "rule") or ("coupled" if run.settings else "unknown"))
    rows = [["acceptance rule", escape(f"{rule}: {RULES[rule]}" if rule in RULES else rule)]]
    if audits(run):
        rows.append(["audits with identical tokens", identical_audits(run)])
    largest = max((value for value in run.series("mismatch_max") if value is not None), default=None)
    for name, value in (
        ("mean |Δ logprob|, engine and learner", mean(run.series("mismatch_mean"))),
        ("KL of engine and learner (k3), mean", mean(run.series("mismatch_k3"))),
        ("largest |Δ logprob|", largest),
        ("alarm if the mean |Δ logprob| exceeds", number(run.settings, "train", "mismatch_alarm")),
    ):
        if value is not None:
            rows.append([escape(name), show(value)])
    figures = [("mean", "|Δ logprob|", "mean"), ("k3", "nats", "k3"), ("largest", "|Δ logprob|", "max")]
    return section(
        "exactness",
        "Exactness",
        table(["figure", "value"], rows, num_text=2, caption="Engine and learner") if len(rows) > 1 else "",
        charts(
            *(metric_lines(run, f"Mismatch, {name}", unit, {name: f"mismatch_{end}"}, from_zero=True, small=True)
              for name, unit, end in figures),
            small=True,
        ),
    )  # fmt: skip


def staleness(run: Run) -> str:
    limit = (float(run.max_staleness), "limit") if run.max_staleness else None
    groups = {"trained on": "num_groups", "filtered": "num_groups_filtered", "too stale": "num_groups_stale"}
    return section(
        "staleness",
        "Staleness and groups",
        charts(
            curve(run, "staleness_mean", more={"largest": "staleness_max"}, reference=limit),
            metric_lines(run, "Groups", "per step", groups, from_zero=True),
            metric_lines(run, "Effective sample size", "of the importance ratios of learner to engine; 1: on-policy",
                         {"share": "effective_sample_size"}, from_zero=True, limits=(0.0, 1.0)),
        ),
    )  # fmt: skip


def learning(run: Run) -> str:
    paths = ("loss", "grad_norm", "kl", "entropy", "clip_ratio", "learning_rate")
    return section("learning", "Learning", charts(*(curve(run, path, small=True) for path in paths), small=True))


def engine(run: Run) -> str:
    """Times and outcomes of drafting from trace.jsonl, by number of rows in a step."""
    timings, decisions = [], []
    for bound, totals in run.engine.items():
        name = f"> {ROW_BOUNDS[-1]}" if bound == 0 else (str(bound) if bound <= 2 else f"{bound // 2 + 1}–{bound}")
        num_steps, num_emitted, total_s = totals["num_steps"], totals["num_emitted"], totals["total_s"]
        whole, expected = total_s or 1.0, totals["expected_accepted"]
        timings.append([
            name, f"{num_steps:,}", f"{num_emitted:,}", f"{num_emitted / max(num_steps, 1):.2f}", f"{total_s:,.1f}",
            f"{num_emitted / whole:,.0f}",
            *(f"{totals[part] / whole:.0%}" for part in ("draft_s", "forward_s", "sample_s")),
        ])  # fmt: skip
        counts = (*OUTCOMES, "num_proposed", "num_draft_tokens", "num_accepted_tokens")
        decisions.append([name, *(f"{totals[key]:,}" for key in counts), f"{expected:,.0f}" if expected else "–"])
    head = ["rows per step", "steps", "tokens", "tokens per step", "seconds", "tokens/s", "draft", "forward", "sample"]
    inner = table(head, timings, caption="By number of rows")
    if any(totals["num_proposed"] for totals in run.engine.values()):
        head = ["rows per step", *OUTCOMES, "tokens proposed", "tokens verified", "accepted", "expected"]
        inner += table(head, decisions, caption="Drafting: number of steps by outcome, and draft tokens")
    if history_bytes := [int(size) for size in run.series("num_history_bytes") if size]:
        inner += paragraph(f"The drafter's history takes {history_bytes[-1] / 1e6:,.1f} MB at the end.")
    return section("engine", "Engine steps", inner)


def engines(run: Run) -> str:
    """For runs with several engines: how busy each one was, and how often workers restarted."""
    busy = [r["cluster"].get("engine_busy") if isinstance(r.get("cluster"), dict) else None for r in run.steps]
    each = by_index(busy)
    if len(each) < 2:
        return ""
    figures = [[f"engine {i}, busy", f"{mean(values) or 0:.0%}"] for i, values in enumerate(each)]
    figures.append(["idle, of all engines' time", f"{mean(run.series('cluster', 'engine_idle')) or 0:.0%}"])
    figures.append(["weight sync, per step", seconds(mean(run.series("stages", "sync")))])
    for kind, name in (("engine", "engines"), ("reward", "reward workers"), ("learner", "learner")):
        num_restarts = sum(int(value or 0) for value in run.series("cluster", f"{kind}_restarts"))
        figures.append([f"{name} restarted", str(num_restarts)])
    return section(
        "engines",
        "Engines",
        paragraph("Shares of the time in which rollouts are generated. Idle engines wait for the longest rollout."),
        charts(
            lines("Busy", "share of generation time", run.numbers,
                  [Series(f"engine {i}", values, *color_and_style(i)) for i, values in enumerate(each)],
                  from_zero=True, limits=(0.0, 1.0)),
            metric_lines(run, "Weight sync", "seconds per step", {"weight sync": "stages.sync"}, colour=3,
                         from_zero=True),
        ),
        table(["figure", "value"], figures, caption="Over the run"),
    )  # fmt: skip


def every_step(run: Run) -> str:
    columns = {
        "reward_mean": "reward", "reward_std": "± std", "length_mean": "length", "loss": "loss",
        "grad_norm": "grad norm", "kl": "KL", "entropy": "entropy", "mean_acceptance_length": "acceptance length",
        "num_tokens": "tokens", "tokens_per_s": "tokens/s", "staleness_max": "staleness", "num_failures": "not scored",
        "num_zero_scored": "scored 0", "mismatch_mean": "mismatch",
    }  # fmt: skip
    present = {path: name for path, name in columns.items() if any(v is not None for v in run.series(path))}
    rows = [[str(r["step"]), *(show(number(r, path)) for path in present)] for r in run.steps]
    return folded("steps", "Figures of every step", table(["step", *present.values()], rows, caption="Every step"))


def config(run: Run) -> str:
    if not run.config:
        return ""
    return folded("config", "Configuration", f'<pre class="config" tabindex="0">{escape(run.config)}</pre>')
