"""`paceline simulate`: what speculation would bring on machines that one does not have."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.app import JsonFile, app, err, friendly, out
from paceline.report.table import check_writable, render, write_json

if TYPE_CHECKING:
    from paceline.sim.scenario import Result

STAGES = {"stage": "", "ar": "plain, s", "spec": "speculative, s", "speedup": "speed-up"}
SWEEP = {"generation_s": "generation, s", "step_s": "step, s", "rollout_speedup": "rollout", "step_speedup": "step",
         "step_cost": "cost", "acceptance_length": "accept"}  # fmt: skip
MOST_CELLS = 10_000


@app.command()
@friendly
def simulate(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="A name, or a .toml file; `list` names all.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[A.B=C]…", help="Settings; `k=5` will do.")] = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="KEY=VALUES", help="k=1:7 or batch=64,128; further words are swept too.")
    ] = None,
    fit: Annotated[Path | None, typer.Option("--fit", metavar="TRACE", help="Measured steps to calibrate by.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Of a sweep: a .png file.")] = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="Who does what when, in steady steps.")] = False,
    json_file: JsonFile = None,
) -> None:
    """What a decode step, a rollout and an RL step take, with speculation and without, from hardware and model cards.

    Everything is derived in docs/simulator.md, with how far it is off from what was published and measured.

    Examples:

    - `paceline simulate nvidia-8b-zero`
    - `paceline simulate nvidia-235b-512 k=5 acceptance=4 --json out.json`
    - `paceline simulate nvidia-235b-512 --sweep k=1:7 batch=1024,4096`
    - `paceline simulate nvidia-8b-zero hardware=h200 --fit steps.json`
    """
    from paceline.sim import scenario

    check_writable(json_file)
    check_writable(plot_file)
    if plot_file is not None and (plot_file.suffix != ".png" or sweep is None):
        raise ValueError(f"--plot {plot_file}: the picture of a sweep, as .png")
    if sweep is not None and fit is not None:
        raise ValueError(f"--sweep {sweep} with --fit {fit}: two commands; give one of them")
    if timeline and (sweep is not None or fit is not None):
        raise ValueError(f"--timeline with {'--sweep' if fit is None else '--fit'}: of one simulation; leave it out")
    if preset == "list":
        if words or sweep is not None or fit is not None or json_file is not None or timeline:
            raise ValueError("list: names the presets, and takes nothing else; to simulate one, give its name")
        for name in scenario.presets():
            out.print(f"{name:20} {scenario.load(name).about}", soft_wrap=True)
        return
    words = list(words or ())
    if sweep is not None:
        axes = [word for word in words if _is_axis(word)]
        rows = _sweep(preset, [word for word in words if word not in axes], [sweep, *axes], plot_file)
        content: dict[str, Any] = {"preset": preset, "rows": rows}
    elif fit is not None:
        content = _fit(scenario.load(preset, words), fit)
    else:
        result = scenario.simulate(scenario.load(preset, words))
        content = {"preset": preset, **result.figures()}
        _show(preset, result, timeline)
    if json_file is not None:
        write_json(json_file, content)


def _show(preset: str, result: Result, timeline: bool) -> None:
    figures, ar = result.figures(), result.figures()["ar"]
    lag = result.scenario.pipeline.lag
    rows = [
        {"stage": stage, "ar": ar["stages"][stage], "spec": seconds}
        for stage, seconds in figures["stages"].items()
        if seconds or ar["stages"][stage]
    ]
    if lag:
        rows.append({"stage": "exposed", "ar": ar["exposed_generation_s"], "spec": figures["exposed_generation_s"]})
    rows.append({"stage": "step", "ar": ar["step_s"], "spec": figures["step_s"]})
    for row in rows:
        if row["stage"] in ("generation", "step"):
            row["speedup"] = row["ar"] / row["spec"]
    out.print(render(rows, STAGES, f"{preset}: {result.scenario.about}"))
    out.print(
        f"engine step {ar['engine_step_ms']:.2f} → {figures['engine_step_ms']:.2f} ms (x {figures['step_cost']:.2f}), "
        f"{figures['acceptance_length']:.2f} tokens a row and step, {ar['mean_rows']:.1f} rows on average; "
        f"{ar['gpu_hours_per_step']:.2f} → {figures['gpu_hours_per_step']:.2f} GPU hours a step"
        + (f", ${ar['usd_per_step']:.0f} → ${figures['usd_per_step']:.0f}" if ar["usd_per_step"] else ""),
        soft_wrap=True,
    )
    if timeline:
        spans = [span for span in result.run.step.timeline if 8 <= span.step < 11 and span.end_s > span.start_s]
        begin = min(span.start_s for span in spans)
        columns = {"who": "devices", "step": "step", "stage": "stage", "start": "from, s", "end": "to, s"}
        shown = [
            {"who": s.who, "step": s.step, "stage": s.stage, "start": s.start_s - begin, "end": s.end_s - begin}
            for s in spans
        ]
        out.print(render(shown, columns))


# ---- sweeps ----


def _is_axis(word: str) -> bool:
    value = word.partition("=")[2]
    return ("," in value or ":" in value) and not value.lstrip().startswith(("[", "{"))  # those are one value


def _values(axis: str) -> tuple[str, list[str]]:
    """`k=1:7` is 1 … 7, `k=1:7:2` every other one, `batch=64,128` those."""
    key, equals, text = axis.partition("=")
    if not equals or not key or not text:
        raise ValueError(f"--sweep {axis!r}: write KEY=FROM:TO, KEY=FROM:TO:STEP or KEY=A,B,C")
    if ":" not in text:
        return key, [value for value in text.split(",") if value]
    parts = text.split(":")
    if not (len(parts) in (2, 3) and all(part.isdecimal() for part in parts) and int(parts[-1]) > 0):
        raise ValueError(f"--sweep {axis!r}: a range is FROM:TO or FROM:TO:STEP, in whole numbers")
    numbers = range(int(parts[0]), int(parts[1]) + 1, int(parts[2]) if len(parts) == 3 else 1)
    if not 0 < len(numbers) <= MOST_CELLS:
        raise ValueError(f"--sweep {axis!r}: FROM must not be above TO, and a range has at most {MOST_CELLS} numbers")
    return key, [str(n) for n in numbers]


def _sweep(preset: str, words: list[str], axes: list[str], plot_file: Path | None) -> list[dict[str, Any]]:
    from paceline.sim import scenario

    keys = [scenario.whole_key(word.partition("=")[0].strip()) for word in [*axes, *words]]
    if twice := [key for key in keys[: len(axes)] if keys.count(key) > 1]:
        raise ValueError(f"--sweep {' '.join([*axes, *words])}: {twice[0]} is given more than once; give it once")
    values = dict(_values(axis) for axis in axes)
    num_cells = 1
    for each in values.values():
        num_cells *= len(each)
    if not 0 < num_cells <= MOST_CELLS:
        raise ValueError(f"--sweep {' '.join(axes)}: {num_cells} cells; from 1 to {MOST_CELLS}")
    rows = []
    for cell in itertools.product(*values.values()):
        settings = [f"{key}={value}" for key, value in zip(values, cell, strict=True)]
        figures = scenario.simulate(scenario.load(preset, [*words, *settings])).figures()
        rows.append(dict(zip(values, cell, strict=True)) | {key: figures[key] for key in SWEEP})
    out.print(render(rows, {key: key for key in values} | SWEEP, f"{preset} {' '.join(words)}".strip()))
    if plot_file is not None:
        from paceline.sim.plot import save_sweep

        save_sweep(rows, list(values), plot_file, preset)
    return rows


# ---- calibration ----


def _fit(chosen: Any, path: Path) -> dict[str, Any]:
    from dataclasses import asdict

    from paceline.sim.scenario import Simulator
    from paceline.sim.trace import calibrate, read_trace

    simulator = Simulator(chosen)
    measured = read_trace(path)
    found = calibrate(measured, simulator.hardware, simulator.model, simulator.efficiency, chosen.engine)
    rows: list[dict[str, Any]] = []
    for which, many, errors in (
        ("fitted", found.used, [float(e) for e in found.fitted.errors]),
        ("held out", found.held_out, list(found.errors)),
    ):
        rows += [
            {"row": row.name, "which": which, "measured_ms": 1e3 * row.seconds, "error": f"{100 * error:+.1f}%"}
            for row, error in zip(many, errors, strict=True)
        ]
    out.print(render(rows, {"row": "", "which": "", "measured_ms": "measured, ms", "error": "simulated"}))
    values = found.fitted.values
    out.print(render([{"name": k, "value": v} for k, v in values.items()], {"name": "", "value": "fitted"}))
    if found.fitted.at_bounds:
        err.print(
            f"at the end of what is possible: {', '.join(found.fitted.at_bounds)}; the rows say little of it, or are "
            "not of this model, hardware and precision",
            style="yellow", soft_wrap=True,
        )  # fmt: skip
    worst = max(map(abs, found.errors), default=0.0)
    style = "green" if worst <= 0.1 else "yellow"
    err.print(f"the half that was not fitted on is off by {100 * worst:.1f}% at most", style=style)
    return {
        "trace": str(path), "values": values, "worst_error": worst, "rows": rows,
        "at_bounds": list(found.fitted.at_bounds),
        "efficiency": asdict(found.efficiency), "software": asdict(found.software),
    }  # fmt: skip
