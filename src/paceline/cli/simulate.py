"""`paceline simulate`: simulate speculation on hardware that you do not have."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.app import JsonFile, Overrides, command, err, out, print_note, save_json, warn
from paceline.report.table import check_writable, render

if TYPE_CHECKING:
    from paceline.sim.simulator import Result

STAGES = {"stage": "", "ar": "plain, s", "spec": "speculative, s", "speedup": "speed-up"}
SWEEP = {"generation_s": "generation, s", "step_s": "step, s", "rollout_speedup": "rollout", "step_speedup": "step",
         "step_cost": "cost", "mean_acceptance_length": "accept"}  # fmt: skip
MAX_CELLS = 10_000
MIN_SHARE = 1e-4  # of a step; shorter stages are not printed


@command()
def simulate(
    preset: Annotated[
        str | None,
        typer.Argument(metavar="PRESET", help="Name of a preset, a .toml file, or the folder of a recorded run."),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[A.B=C]…", help="Settings; the section is optional: `k=5`.")
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="KEY=VALUES", help="Simulate several values: k=1:7 or batch=64,128.")
    ] = None,
    fit: Annotated[Path | None, typer.Option("--fit", metavar="TRACE", help="Calibrate with measured steps.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Write a plot of the sweep to a .png file.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Print the presets.")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Print when each device works on which stage.")] = False,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """Simulate decode steps, rollouts and RL steps, with and without speculation: from hardware and model specs, or
    from the step times and lengths of a recorded run.

    docs/how-to/simulator.md explains presets, settings and accuracy.

    Examples:

    - `paceline simulate --list`
    - `paceline simulate runs/mine method=eagle3 acceptance=2.5 k=3`

    - `paceline simulate nvidia-8b-zero`
    - `paceline simulate nvidia-235b-512 k=5 acceptance=4 --json out.json`
    - `paceline simulate nvidia-235b-512 --sweep k=1:7 batch=1024,4096`
    """
    from paceline.sim import simulator

    check_writable(json_file)
    check_writable(plot_file)
    if plot_file is not None and (plot_file.suffix != ".png" or sweep is None):
        raise ValueError(f"--plot {plot_file}: needs --sweep, and a .png file")
    if sweep is not None and fit is not None:
        raise ValueError(f"--sweep {sweep} with --fit {fit}: give one of them")
    if timeline and (sweep is not None or fit is not None):
        raise ValueError(f"--timeline with {'--sweep' if fit is None else '--fit'}: leave out one of them")
    if show_list:
        if preset is not None or overrides or sweep is not None or fit is not None or json_file is not None or timeline:
            raise ValueError("--list: takes no other arguments; to simulate a preset, give its name")
        _list_presets()
        return
    if preset is None:
        raise ValueError(
            "no preset; give a name of `paceline simulate --list`, a .toml file, or the folder of a recorded run"
        )
    arguments = [*(arguments or ()), *(overrides or ())]
    if sweep is not None:
        axes = [argument for argument in arguments if _is_axis(argument)]
        rows = _sweep(preset, [argument for argument in arguments if argument not in axes], [sweep, *axes], plot_file)
        content: dict[str, Any] = {"preset": preset, "rows": rows}
    elif fit is not None:
        content = _fit(simulator.load_simulation_config(preset, arguments), fit)
    else:
        result = simulator.simulate(simulator.load_simulation_config(preset, arguments))
        content = {"preset": preset, **result.summary()}
        _show(" ".join([preset, *arguments]), result, timeline)
    save_json(json_file, content)


def _list_presets() -> None:
    from paceline.sim import simulator

    rows = [{"preset": name, "about": simulator.load_simulation_config(name).about} for name in simulator.presets()]
    out.print(render(rows, {"preset": "preset", "about": "about"}))
    print_note("Or the folder of a recorded run: its lengths, step times and stages replace the specs.")


def _show(name: str, result: Result, timeline: bool) -> None:
    summary, ar = result.summary(), result.summary()["ar"]
    lag = result.config.pipeline.lag
    rows = [
        {"stage": stage, "ar": ar["stages"][stage], "spec": seconds}
        for stage, seconds in summary["stages"].items()
        if max(seconds, ar["stages"][stage]) >= MIN_SHARE * ar["step_s"]
    ]
    if lag:
        exposed = {"ar": round(ar["exposed_generation_s"], 6), "spec": round(summary["exposed_generation_s"], 6)}
        rows.append({"stage": "exposed generation", **exposed})
    rows.append({"stage": "step", "ar": ar["step_s"], "spec": summary["step_s"]})
    for row in rows:
        if row["stage"] in ("generation", "step"):
            row["speedup"] = row["ar"] / row["spec"]
    out.print(f"{name}: {result.title}", style="italic", soft_wrap=True)
    out.print(render(rows, STAGES))
    cost = (
        f"; {ar['gpu_hours_per_step']:.2g} → {summary['gpu_hours_per_step']:.2g} GPU hours per step"
        if result.config.run is None
        else ""
    )
    out.print(
        f"engine step {ar['engine_step_ms']:.2f} → {summary['engine_step_ms']:.2f} ms (x {summary['step_cost']:.2f}), "
        f"{summary['mean_acceptance_length']:.2f} tokens per row and step, {ar['mean_rows']:.1f} rows on average"
        + cost
        + (f", ${ar['usd_per_step']:.2g} → ${summary['usd_per_step']:.2g}" if ar["usd_per_step"] else ""),
        soft_wrap=True,
    )
    if result.config.run is None and result.config.about:
        print_note(f"Preset: {result.config.about}.")
    if result.config.run is not None and result.config.speculation.method == "free":
        print_note(
            "Every sequence drafts k tokens here. History often has fewer: `paceline advise` replays its real drafts."
        )
    if result.free_drafter is not None:
        print_note(f"The run has no draft times of {result.free_drafter}: assumed to be 0.")
    if timeline:
        spans = [span for span in result.run.step.timeline if 8 <= span.step < 11 and span.end_s > span.start_s]
        begin = min(span.start_s for span in spans)
        columns = {"devices": "devices", "step": "step", "stage": "stage", "start": "from, s", "end": "to, s"}
        shown = [
            {"devices": s.devices, "step": s.step, "stage": s.stage, "start": s.start_s - begin, "end": s.end_s - begin}
            for s in spans
        ]
        out.print(render(shown, columns))


# ---- sweeps ----


def _is_axis(argument: str) -> bool:
    value = argument.partition("=")[2]
    return ("," in value or ":" in value) and not value.lstrip().startswith(("[", "{"))  # a list or table is one value


def _values(axis: str) -> tuple[str, list[str]]:
    """Key and values of `k=1:7` (1 … 7), `k=1:7:2` (1, 3, 5, 7) or `batch=64,128`."""
    key, equals, text = axis.partition("=")
    if not equals or not key or not text:
        raise ValueError(f"--sweep {axis!r}: write KEY=FROM:TO, KEY=FROM:TO:STEP or KEY=A,B,C")
    if ":" not in text:
        return key, [value for value in text.split(",") if value]
    parts = text.split(":")
    if not (len(parts) in (2, 3) and all(part.isdecimal() for part in parts) and int(parts[-1]) > 0):
        raise ValueError(f"--sweep {axis!r}: a range is FROM:TO or FROM:TO:STEP, in whole numbers")
    numbers = range(int(parts[0]), int(parts[1]) + 1, int(parts[2]) if len(parts) == 3 else 1)
    if not 0 < len(numbers) <= MAX_CELLS:
        raise ValueError(f"--sweep {axis!r}: FROM must not be above TO, and a range has at most {MAX_CELLS} numbers")
    return key, [str(n) for n in numbers]


def _sweep(preset: str, arguments: list[str], axes: list[str], plot_file: Path | None) -> list[dict[str, Any]]:
    from paceline.sim import simulator

    keys = [simulator.full_key(argument.partition("=")[0].strip()) for argument in [*axes, *arguments]]
    if twice := [key for key in keys[: len(axes)] if keys.count(key) > 1]:
        raise ValueError(f"--sweep {' '.join([*axes, *arguments])}: {twice[0]} is given more than once; give it once")
    values = dict(_values(axis) for axis in axes)
    num_cells = math.prod(map(len, values.values()))
    if not 0 < num_cells <= MAX_CELLS:
        raise ValueError(f"--sweep {' '.join(axes)}: {num_cells} cells; from 1 to {MAX_CELLS}")
    rows = []
    for cell in itertools.product(*values.values()):
        settings = [f"{key}={value}" for key, value in zip(values, cell, strict=True)]
        summary = simulator.simulate(simulator.load_simulation_config(preset, [*arguments, *settings])).summary()
        rows.append(dict(zip(values, cell, strict=True)) | {key: summary[key] for key in SWEEP})
    out.print(render(rows, {key: key for key in values} | SWEEP, f"{preset} {' '.join(arguments)}".strip()))
    if plot_file is not None:
        from paceline.sim.plot import save_sweep

        save_sweep(rows, list(values), plot_file, preset)
    return rows


# ---- calibration ----


def _fit(chosen: Any, path: Path) -> dict[str, Any]:
    from dataclasses import asdict

    from paceline.sim.simulator import Simulator
    from paceline.sim.trace import calibrate, read_trace

    if chosen.run is not None:
        raise ValueError(f"--fit {path} with a run: its step times are fitted already; leave out --fit")
    simulator = Simulator(chosen)
    measured = read_trace(path)
    found = calibrate(measured, simulator.hardware, simulator.model, simulator.efficiency, chosen.engine)
    rows: list[dict[str, Any]] = []
    for which, steps, errors in (
        ("fitted", found.fitted_steps, [float(e) for e in found.fitted.errors]),
        ("held out", found.held_out, list(found.errors)),
    ):
        rows += [
            {"row": row.name, "which": which, "measured_ms": 1e3 * row.seconds, "error": f"{100 * error:+.1f}%"}
            for row, error in zip(steps, errors, strict=True)
        ]
    out.print(render(rows, {"row": "", "which": "", "measured_ms": "measured, ms", "error": "simulated"}))
    values = found.fitted.values
    out.print(render([{"name": k, "value": v} for k, v in values.items()], {"name": "", "value": "fitted"}))
    if found.fitted.at_bounds:
        warn(
            f"fitted values at their bounds: {', '.join(found.fitted.at_bounds)}; the steps do not determine them, or "
            "were measured with another model, hardware or precision"
        )
    style = "green" if found.max_error <= 0.1 else "yellow"
    err.print(f"largest error on held-out steps: {100 * found.max_error:.1f}%", style=style)
    return {
        "trace": str(path), "values": values, "worst_error": found.max_error, "rows": rows,
        "at_bounds": list(found.fitted.at_bounds),
        "efficiency": asdict(found.efficiency), "software": asdict(found.software),
    }  # fmt: skip
