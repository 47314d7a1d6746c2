"""The parts of a run's page, each a function from the run to HTML ("" where the run has nothing to say).

Every text that comes from the run goes through `escape`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from paceline.report.chart import Series, bars, key, lines, shares, show, stacked
from paceline.report.figures import (
    acceptance_length,
    audits,
    latest,
    reward_after,
    reward_before,
    speedup,
    stage_seconds,
    tail_speedup,
    warnings,
)
from paceline.report.run import OUTCOMES, ROW_BOUNDS, Run, mean, number
from paceline.report.table import cell

# Stage -> (name on the page, colour). What a step is made of, bottom to top; together they are its whole time.
STAGES = {
    "generation": ("generation", 0),
    "training": ("training", 1),
    "adaptation": ("draft training", 8),
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
    "measured times, plain ÷ speculative; above 1 speculation was faster."
)


def section(name: str, title: str, *parts: str) -> str:
    content = "".join(parts)
    return f'<section id="{name}"><h2>{escape(title)}</h2>{content}</section>' if content else ""


def charts(*figures: str, small: bool = False) -> str:
    present = "".join(figures)
    return f'<div class="charts{" small" if small else ""}">{present}</div>' if present else ""


def prose(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], num_text: int = 1, caption: str = "") -> str:
    """Cells are HTML. The first `num_text` columns are text, the others numbers, aligned at the right."""
    kinds = ["text" if i < num_text else "num" for i in range(len(head))]
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    top = "".join(f'<th class="{kind}" scope="col">{escape(name)}</th>' for kind, name in zip(kinds, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption or head[0])}">'
        f"<table{' class=words' if num_text > 1 else ''}>{title}"
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
        if body
        else ""
    )


def times(value: float | None) -> str:
    return f"{value:.2f}×" if value is not None else "–"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 90:
        return f"{show(value)} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {rest:02} s"


# The page, from top to bottom


def heading(run: Run) -> str:
    labels = ("task", "model", "device", "seed", "sandbox", "started", "paceline", "torch")
    facts = "".join(
        f"<div><dt>{name}</dt><dd>{escape(str(run.info[name]))}</dd></div>" for name in labels if name in run.info
    )
    return f'<header><p class="kind">Paceline run</p><h1>{escape(run.name)}</h1><dl class="facts">{facts}</dl></header>'


def messages(run: Run) -> str:
    def box(kind: str, title: str, lines_: Sequence[str]) -> str:
        items = "".join(f"<li>{escape(line)}</li>" for line in lines_)
        return f'<aside class="{kind}"><b>{title}</b><ul>{items}</ul></aside>' if items else ""

    return box("warning", "Warnings", warnings(run)) + box("note", "About this report", run.notes)


def key_figures(run: Run) -> str:
    tiles: list[tuple[str, str, str]] = []
    before, after = reward_before(run), reward_after(run)
    if before is not None or after is not None:
        change = f"{after - before:+.3f} on held-out problems" if before is not None and after is not None else ""
        tiles.append(("held-out reward", f"{show(before)} → {show(after)}", change or "on held-out problems"))
    elif (last := latest(run, "reward_mean")) is not None:
        tiles.append(("training reward", show(last), "mean of the last step; not validated"))
    if (length := acceptance_length(run)) is not None:
        tiles.append(("acceptance length", f"{length:.2f}", "tokens per verified draft, 1 + accepted ÷ drafts"))
    if (ratio := speedup(run)) is not None:
        tiles.append(("audited speed-up", times(ratio), "generation, the same tokens plain ÷ speculative"))
    if tail := {name: value for name, value in tail_speedup(run).items() if value is not None}:
        first, value = next(iter(tail.items()))
        sequences = "sequence" if first == "1" else "sequences"
        tiles.append(("speed-up in the tail", times(value), f"with {first} running {sequences}, audited"))
    if done := audits(run):
        same = sum(audit.get("identical") is True for _, audit in done)
        tiles.append(("identical audits", f"{same} of {len(done)}", "every token the same with and without drafts"))
    if (mismatch := mean(run.series("mismatch_mean"))) is not None:
        tiles.append(("engine and learner", show(mismatch), "mean |Δ logprob| of the same tokens"))
    if run.steps:
        planned = run.setting("train", "num_steps")
        ended = f"of {planned} planned" if isinstance(planned, int) else ""
        wall = number(run.summary, "wall_s") or sum(value or 0 for value in run.series("stages", "total"))
        tiles.append(("steps", str(len(run.steps)), ", ".join(filter(None, [ended, f"in {seconds(wall)}"]))))
        tokens = number(run.summary, "tokens") or sum(value or 0 for value in run.series("tokens"))
        rate = mean(run.series("tokens_per_s"))
        if (memory := latest(run, "memory_gib")) is not None:
            of = "of the GPU" if str(run.setting("model", "device")).startswith("cuda") else "of the process"
            tiles.append(("memory", f"{memory:.1f} GiB", f"{of}, at most"))
        tiles.append(("tokens generated", f"{tokens:,.0f}", f"{show(rate)} per second" if rate else ""))
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(figure)}<small>{escape(note)}</small></dd></div>"
        for name, figure, note in tiles
    )
    return f'<dl class="tiles">{items}</dl>' if items else ""


def reward(run: Run) -> str:
    steps = run.numbers
    held_out = run.series("eval", "reward")
    if run.steps and held_out[0] is None:
        held_out[0] = number(run.steps[0], "eval_before", "reward")
    names = list(dict.fromkeys(name for r in run.steps if isinstance(r.get("rewards"), dict) for name in r["rewards"]))
    styles = ("solid", "dashed", "dotted")
    parts = [
        Series(name, run.series("rewards", name), i % 6, styles[i % 3]) for i, name in enumerate(names)
    ] if len(names) > 1 else []  # fmt: skip
    evals = [(f"{r['step']} (before)", r["eval_before"]) for r in run.steps if isinstance(r.get("eval_before"), dict)]
    evals += [(str(r["step"]), r["eval"]) for r in run.steps if isinstance(r.get("eval"), dict)]
    columns = {"reward": "mean reward", "avg_at_n": "avg@n", "pass_at_k": "pass@k", "n": "n", "k": "k"}
    columns["length_mean"] = "mean length (tokens)"
    rows = [[step, *(show(number(result, name)) for name in columns)] for step, result in evals]
    return section(
        "reward",
        "Reward and length",
        charts(
            lines(
                "Reward",
                "per sample, mean of a step",
                steps,
                [
                    Series("training, mean", run.series("reward_mean"), 0, band=run.series("reward_std")),
                    Series("held out", held_out, 1, "points"),
                ],
            ),
            lines(
                "Completion length",
                "tokens",
                steps,
                [
                    Series("mean", run.series("length_mean"), 0),
                    Series("longest", run.series("length_max"), 1, "dashed"),
                ],
                from_zero=True,
            ),
            lines("Reward by function", "mean, before weights", steps, parts),
            lines(
                "Shares",
                "of a step's groups or samples",
                steps,
                [
                    Series("groups solved", run.series("solved"), 2),
                    Series("samples cut off", run.series("truncated"), 1, "dashed"),
                ],
                from_zero=True,
            ),
        ),
        table(["step", *columns.values()], rows, caption="Held-out problems"),
    )


def time(run: Run) -> str:
    per_step = stage_seconds(run, STAGES)
    totals = {name: sum(value or 0 for value in values) for name, values in per_step.items()}
    whole = sum(totals.values())
    if not whole:
        return ""
    overlaps = run.max_staleness > 0
    names = {name: text for name, (text, _) in STAGES.items()}
    if overlaps:
        names["generation"] = "exposed generation"
    layers = {names[name]: (STAGES[name][1], per_step[name]) for name in STAGES}
    divided = {names[name]: (STAGES[name][1], totals[name] / whole) for name in STAGES if totals[name]}
    rows = [
        [
            key(f"block c{STAGES[name][1]}") + escape(names[name]),
            f"{totals[name]:,.1f}",
            f"{totals[name] / len(run.steps):.2f}",
            f"{totals[name] / whole:.1%}",
        ]
        for name in STAGES
        if totals[name]
    ]
    rows.append(["<b>total</b>", f"{whole:,.1f}", f"{whole / len(run.steps):.2f}", "100.0%"])
    words = ""
    if overlaps:
        worked = sum(value or 0 for value in run.series("stages", "generation"))
        hidden = 1 - totals["generation"] / worked if worked else 0.0
        words = prose(
            f"Generation overlaps training (train.max_staleness = {run.max_staleness}). The engine worked "
            f"{seconds(worked)}; training waited {seconds(totals['generation'])} of it, so {hidden:.0%} was hidden."
        )
    return section(
        "time",
        "Where the time went",
        words,
        charts(
            stacked("Time per step", "seconds", run.numbers, layers),
            lines(
                "Rate", "tokens per second of the whole step", run.numbers,
                [Series("tokens per second", run.series("tokens_per_s"), 0)], from_zero=True,
            ),
        ),
        shares("Shares", "of the whole run's time", divided),
        table(["stage", "seconds", "per step", "share"], rows, caption="Time by stage"),
    )  # fmt: skip


def speculation(run: Run) -> str:
    steps = run.numbers
    rates = [r if isinstance(r := record.get("acceptance_rate_per_position"), list) else [] for record in run.steps]
    depth = max(map(len, rates), default=0)
    # The run's rates weigh each step by its drafts; a step that drafted less far got nowhere beyond.
    drafts = [(value or 1.0) if mine else 0.0 for value, mine in zip(run.series("num_drafts"), rates, strict=True)]
    whole = sum(drafts)

    def at(j: int) -> list[float | None]:
        return [number({"rate": mine[j]}, "rate") if j < len(mine) else None for mine in rates]

    by_position: dict[str, float | None] = {
        str(j + 1): sum((rate or 0.0) * n for rate, n in zip(at(j), drafts, strict=True)) / whole for j in range(depth)
    }
    audited = audits(run)
    ratio = {step: number(audit, "speedup") for step, audit in audited}
    tails = list(tail_speedup(run))
    rows = [
        [
            str(step),
            show(number(audit, "tokens")),
            f"{number(audit, 'plain_s') or 0:.2f}",
            f"{number(audit, 'speculative_s') or 0:.2f}",
            times(number(audit, "speedup")),
            *(times(number(audit, "tail", name)) for name in tails),
            escape(cell(audit.get("identical"))),
        ]
        for step, audit in audited
    ]
    head = [
        "step",
        "tokens",
        "plain, s",
        "speculative, s",
        "speed-up",
        *(f"at {n} running" for n in tails),
        "identical",
    ]
    return section(
        "speculation",
        "Speculation",
        charts(
            lines(
                "Acceptance length", "tokens per verified draft", steps,
                [Series("acceptance length", run.series("mean_acceptance_length"), 0)],
            ),
            bars(
                "Acceptance by position", "share of drafts accepted up to it", "position in the draft", by_position,
                limits=(0.0, 1.0),
            ),
            lines(
                "By position over time", "share of drafts accepted up to it", steps,
                [Series(f"position {j + 1}", at(j), j, ("solid", "dashed", "dotted")[j % 3]) for j in range(depth)[:4]],
                from_zero=True, limits=(0.0, 1.0),
            ),
            lines(
                "Draft tokens accepted", "share of those proposed", steps,
                [Series("accepted", run.series("draft_acceptance_rate"), 2)], from_zero=True, limits=(0.0, 1.0),
            ),
        ),
        adaptation(run),
        f"<h3>Measured speed-up</h3>{prose(METHOD)}" if audited or speedup(run) is not None else "",
        charts(
            lines(
                "Audited speed-up", "plain time ÷ speculative time", steps,
                [Series("audited step", [ratio.get(step) for step in steps], 1, "points")],
                reference=(1.0, "no gain"),
            ),
            bars(
                "Speed-up by running sequences", "plain time ÷ speculative time", "running sequences",
                tail_speedup(run), colour=1, reference=(1.0, "no gain"), suffix="×",
            ),
        ),
        table(head, rows, caption="Audits"),
    )  # fmt: skip


def adaptation(run: Run) -> str:
    """How the head followed the policy, where it did."""
    steps = run.numbers
    overlaps = [r["adaptation"].get("overlap") for r in run.steps if isinstance(r.get("adaptation"), dict)]
    depth = max((len(overlap) for overlap in overlaps if isinstance(overlap, dict)), default=0)
    if not overlaps:
        return ""
    return "<h3>The head follows the policy</h3>" + charts(
        lines(
            "Head's version", "updates made when the step was drafted", steps,
            [Series("version", run.series("drafter_version"), 0)], from_zero=True, small=True,
        ),
        lines(
            "Head's loss", "at its updates", steps,
            [Series("loss", run.series("adaptation", "loss"), 8, "points")], small=True,
        ),
        lines(
            "Overlap of head and policy", "Σ min(p, q), by step of the unroll", steps,
            [
                Series(f"step {k + 1}", run.series("adaptation", "overlap", str(k + 1)), k, "points")
                for k in range(depth)[:4]
            ],
            from_zero=True, limits=(0.0, 1.0), small=True,
        ),
        small=True,
    )  # fmt: skip


def exactness(run: Run) -> str:
    steps = run.numbers
    rule = run.setting("speculation", "rule") or ("coupled" if run.settings else "unknown")
    meaning = {
        "coupled": "the policy draws every token itself with noise keyed by position; a draft changes no token",
        "rejection": "drafts are accepted or replaced so that the distribution is the policy's",
        "block": "whole drafts are accepted or cut so that the distribution is the policy's",
    }.get(str(rule), "")
    alarm = run.setting("train", "mismatch_alarm")
    rows = [["acceptance rule", escape(f"{rule}: {meaning}" if meaning else str(rule))]]
    if done := audits(run):
        same = sum(audit.get("identical") is True for _, audit in done)
        rows.append(["audits with identical tokens", f"{same} of {len(done)}"])
    for name, path, fold in (
        ("mean |Δ logprob|, engine and learner", "mismatch_mean", mean),
        ("KL of engine and learner (k3), mean", "mismatch_k3", mean),
        ("largest |Δ logprob|", "mismatch_max", lambda v: max((x for x in v if x is not None), default=None)),
    ):
        if (value := fold(run.series(path))) is not None:
            rows.append([escape(name), show(value)])
    if isinstance(alarm, int | float):
        rows.append(["alarm at a mean |Δ logprob| above", show(float(alarm))])
    return section(
        "exactness",
        "Exactness",
        table(["figure", "value"], rows, num_text=2, caption="Is it the same policy?") if len(rows) > 1 else "",
        charts(
            lines(
                "Mismatch, mean", "|Δ logprob|", steps, [Series("mean", run.series("mismatch_mean"), 0)],
                from_zero=True, small=True,
            ),
            lines(
                "Mismatch, k3", "nats", steps, [Series("k3", run.series("mismatch_k3"), 0)], from_zero=True, small=True
            ),
            lines(
                "Mismatch, largest", "|Δ logprob|", steps, [Series("largest", run.series("mismatch_max"), 0)],
                from_zero=True, small=True,
            ),
            small=True,
        ),
    )  # fmt: skip


def lag(run: Run) -> str:
    bound = (float(run.max_staleness), "bound") if run.max_staleness else None
    return section(
        "lag",
        "Policy lag and groups",
        charts(
            lines(
                "Policy lag", "versions behind the learner", run.numbers,
                [Series("mean", run.series("lag_mean"), 0), Series("largest", run.series("lag_max"), 1, "dashed")],
                from_zero=True, reference=bound,
            ),
            lines(
                "Groups", "per step", run.numbers,
                [
                    Series("trained on", run.series("num_groups"), 0),
                    Series("filtered", run.series("groups_filtered"), 1, "dashed"),
                    Series("too old", run.series("groups_stale"), 3, "dotted"),
                ],
                from_zero=True,
            ),
        ),
    )  # fmt: skip


def learning(run: Run) -> str:
    small = (
        ("Loss", "", "loss", False),
        ("Gradient norm", "before clipping", "grad_norm", True),
        ("KL to the reference", "nats", "kl", False),
        ("Entropy", "nats per token", "entropy", True),
        ("Clipped", "share of tokens", "clipped", True),
        ("Learning rate", "", "learning_rate", True),
    )
    figures = [
        lines(title, unit, run.numbers, [Series(title.lower(), run.series(path), 0)], from_zero=zero, small=True)
        for title, unit, path, zero in small
    ]
    return section("learning", "Learning", charts(*figures, small=True))


def engine(run: Run) -> str:
    """trace.jsonl, by the number of rows a step had: where the time went, and what became of drafting."""
    times, decisions = [], []
    for bound, totals in run.engine.items():
        name = f"> {ROW_BOUNDS[-1]}" if bound == 0 else (str(bound) if bound <= 2 else f"{bound // 2 + 1}–{bound}")
        whole = totals.total_s or 1.0
        times.append(
            [
                name,
                f"{totals.num_steps:,}",
                f"{totals.num_emitted:,}",
                f"{totals.num_emitted / max(totals.num_steps, 1):.2f}",
                f"{totals.total_s:,.1f}",
                f"{totals.num_emitted / whole:,.0f}",
                *(f"{part / whole:.0%}" for part in (totals.draft_s, totals.forward_s, totals.sample_s)),
            ]
        )
        decisions.append(
            [
                name,
                *(f"{totals.outcomes[outcome]:,}" for outcome in OUTCOMES),
                f"{totals.num_proposed:,}",
                f"{totals.num_draft_tokens:,}",
                f"{totals.num_accepted_tokens:,}",
                f"{totals.expected_accepted:,.0f}" if totals.expected_accepted else "–",
            ]
        )
    head = ["rows in a step", "steps", "tokens", "tokens a step", "seconds", "tokens/s", "draft", "forward", "sample"]
    inner = table(head, times, caption="By number of rows")
    if any(totals.num_proposed for totals in run.engine.values()):
        head = ["rows in a step", *OUTCOMES, "offered", "tokens verified", "accepted", "expected"]
        inner += table(head, decisions, caption="Drafting: how many steps ended how, and the tokens")
    remembered = [int(size) for size in run.series("history_bytes") if size]
    if remembered:
        inner += prose(f"What the drafter remembers takes {remembered[-1] / 1e6:,.1f} MB at the end.")
    return section("engine", "Engine steps", inner)


def engines(run: Run) -> str:
    """Where several generated: how busy each of them was, and who had to start again."""
    busy = [r["cluster"].get("busy") if isinstance(r.get("cluster"), dict) else None for r in run.steps]
    rows = [row if isinstance(row, list) else [] for row in busy]
    num_engines = max(map(len, rows), default=0)
    if num_engines < 2:
        return ""
    each = [[number({"busy": row[i]}, "busy") if i < len(row) else None for row in rows] for i in range(num_engines)]
    restarts = {
        name: sum(int(value or 0) for value in run.series("cluster", f"{key}_restarts"))
        for key, name in (("engine", "engines"), ("reward", "reward workers"), ("learner", "learner"))
    }
    figures = [[f"engine {i}, busy", f"{mean(values) or 0:.0%}"] for i, values in enumerate(each)]
    figures.append(["idle, of all engines' time", f"{mean(run.series('cluster', 'bubble')) or 0:.0%}"])
    figures.append(["weight sync, per step", seconds(mean(run.series("stages", "sync")))])
    figures += [[f"{name} restarted", str(num)] for name, num in restarts.items()]
    styles = ("solid", "dashed", "dotted")
    return section(
        "engines",
        "Engines",
        prose("Of the time in which a step's rollouts were generated. What is idle waits for the longest of them."),
        charts(
            lines(
                "Busy", "share of generation time", run.numbers,
                [Series(f"engine {i}", values, i % 6, styles[i // 6 % 3]) for i, values in enumerate(each)],
                from_zero=True, limits=(0.0, 1.0),
            ),
            lines(
                "Weight sync", "seconds per step", run.numbers,
                [Series("weight sync", run.series("stages", "sync"), 3)], from_zero=True,
            ),
        ),
        table(["figure", "value"], figures, caption="Over the run"),
    )  # fmt: skip


def every_step(run: Run) -> str:
    columns = {
        "reward_mean": "reward", "reward_std": "± std", "length_mean": "length", "loss": "loss",
        "grad_norm": "grad norm", "kl": "KL", "entropy": "entropy", "mean_acceptance_length": "accepted length",
        "tokens": "tokens", "tokens_per_s": "tokens/s", "lag_max": "lag", "failures": "failures",
        "mismatch_mean": "mismatch",
    }  # fmt: skip
    present = {path: name for path, name in columns.items() if any(v is not None for v in run.series(path))}
    rows = [[str(r["step"]), *(show(number(r, path)) for path in present)] for r in run.steps]
    inner = table(["step", *present.values()], rows, caption="Every step")
    return f'<section id="steps"><details><summary>Every step in numbers</summary>{inner}</details></section>'


def config(run: Run) -> str:
    if not run.config:
        return ""
    inner = f'<pre class="config" tabindex="0">{escape(run.config)}</pre>'
    return f'<section id="config"><details><summary>Configuration</summary>{inner}</details></section>'


def rollout_browser(run: Run) -> str:
    """The frame only; report.js fills it from the embedded data."""
    shown, total = len(run.rollouts.records), run.rollouts.num_total
    if not total:
        return ""
    carried = f"All {total:,} samples are in this page."
    if shown < total:
        carried = (
            f"This page carries {shown:,} of {total:,} samples: whole groups, spread evenly over the steps, "
            "to keep the file small. rollouts.jsonl has them all."
        )
    if not shown:
        return section("rollouts", "Rollouts", prose(carried))
    orders = ("in order", "highest reward first", "lowest reward first", "failed", "cut off")
    options = "".join(f"<option>{name}</option>" for name in orders)
    return section(
        "rollouts",
        "Rollouts",
        prose(carried),
        f"""<div class="browser" id="browser">
<div class="controls">
<label>show <select id="order">{options}</select></label>
<label>step <select id="step"></select></label>
<label>group <select id="group"></select></label>
<span class="buttons"><button id="previous" type="button">← previous</button>
<button id="next" type="button">next →</button></span>
<output id="place"></output>
</div>
<p class="keys">Keys: <kbd>←</kbd> <kbd>→</kbd> sample, <kbd>[</kbd> <kbd>]</kbd> group,
<kbd>Shift</kbd> with <kbd>←</kbd> <kbd>→</kbd> step.</p>
<div class="samples" id="samples" role="group" aria-label="samples of this group, with their rewards"></div>
<dl class="facts" id="sample-facts"></dl>
<h3>Prompt</h3><pre class="prompt" id="prompt" tabindex="0"></pre>
<h3>Completion</h3><ul class="legend tokens-legend" id="legend"></ul>
<pre class="tokens" id="tokens" tabindex="0"></pre>
<output class="token-facts" id="token-facts">Point at a token, or tap it, for its figures.</output>
</div><noscript><p>The rollout browser needs JavaScript; everything above does not.</p></noscript>""",
    )
