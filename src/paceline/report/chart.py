"""Charts as inline SVG: lines over the steps, stacked bars, single bars, one bar of shares.

No script draws a chart, so it works without JavaScript. Colours are CSS classes (c0 … c8) that follow the page's theme.
Line styles and markers differ too, so that no meaning depends on colour alone. Each position on the x axis has an
invisible strip; its `data-tip` is the tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.report.markup import escape
from paceline.report.series import Series, Values, buckets, constant, means, running_mean, smoothing_window

MAX_POINTS = 160  # with more steps than this, adjacent steps are averaged
MAX_BARS = 56
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 12, 38


@dataclass(frozen=True, slots=True)
class Frame:
    """The plot's inner rectangle and its scales."""

    width: int
    height: int
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        part = (value - self.y_low) / (self.y_high - self.y_low)
        return self.height - BOTTOM - part * (self.height - TOP - BOTTOM)


# Numbers


def show(value: float | None) -> str:
    """A number for display: three significant digits, commas between thousands, 1e-5 instead of 1e-05."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if size >= 1e12:
        return f"{value:.1e}".replace("e+", "e")
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    decimals = 3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0
    return f"{value:.{decimals}f}"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover low … high: the first is <= low, the last is >= high."""
    step = _round_up((high - low) / about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _round_up(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))


def tick_labels(marks: Sequence[float]) -> list[str]:
    """All labels have the same number of decimals and fit into the margin."""
    largest = max(map(abs, marks))
    step = marks[1] - marks[0] if len(marks) > 1 else largest or 1
    units = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
    unit, suffix = next(((unit, suffix) for least, unit, suffix in units if largest >= least), (1.0, ""))
    if largest < 1e-3 or largest >= 1e12:
        power = math.floor(math.log10(largest))
        unit, suffix = 10.0**power, f"e{power}"
    decimals = _decimals(step / unit)
    return [f"{mark / unit:.{decimals}f}{suffix}" if mark or not suffix else "0" for mark in marks]


def _decimals(step: float) -> int:
    return next(
        digits for digits in range(8) if digits == 7 or abs(step * 10**digits - round(step * 10**digits)) < 1e-6
    )


# Charts


def lines(
    title: str,
    unit: str,
    steps: Sequence[int],
    series: Sequence[Series],
    *,
    from_zero: bool = False,
    limits: tuple[float, float] | None = None,
    reference: tuple[float, str] | None = None,
    small: bool = False,
) -> str:
    """A line chart over the steps, noisy series with their running mean. If no series changes over the run, a line of
    text; "" if no series has a value."""
    series = [s for s in series if any(value is not None for value in s.values)]
    if not series:
        return ""
    if all(_is_constant(s) for s in series):
        return _constants(title, unit, series)
    parts = buckets(len(steps), MAX_POINTS)
    centres = [(steps[part[0]] + steps[part[-1]]) / 2 for part in parts]
    averaged = [
        replace(s, values=means(s.values, parts), band=means(s.band, parts) if s.band else None) for s in series
    ]
    spans = [span for s in averaged for span in _spans(s)]
    if reference:
        spans.append((reference[0], reference[0]))
    frame, marks = _frame(spans, centres[0], centres[-1], small, from_zero, limits)
    body = [_grid(frame, marks), _step_axis(frame, steps)]
    if reference:
        body.append(_reference(frame, *reference))
    body += [_band(frame, centres, s) for s in averaged if s.band]
    windows = [0 if s.has_marks else smoothing_window(s.values) for s in series]
    for s, drawn, window in zip(series, averaged, windows, strict=True):
        body.append(_line(frame, centres, drawn, "raw" if window else ""))
        if window:
            smooth = replace(drawn, values=means(running_mean(s.values, window), parts), band=None)
            body.append(_line(frame, centres, smooth, "mean", has_circles=False))

    def tip(i: int) -> str:
        rows = [_name_steps(steps, parts[i])]
        for s in averaged:
            if (value := s.values[i]) is not None:
                spread = f" ± {show(s.band[i])}" if s.band and s.band[i] is not None else ""
                rows.append(f"{s.name}  {show(value)}{spread}")
        return "\n".join(rows)

    body.append(_strips(frame, [frame.x(centre) for centre in centres], tip))
    legend = [(f"{s.style} c{s.colour}", s.name) for s in averaged]
    if averaged[0].band:
        legend.insert(1, (f"band c{averaged[0].colour}", "± one standard deviation"))
    note = f"thick: mean of {max(windows)} steps" if any(windows) else ""
    return _figure(title, unit, legend, frame, body, note)


def stacked(title: str, unit: str, steps: Sequence[int], layers: Mapping[str, tuple[int, Values]]) -> str:
    """Stacked bars over the steps. Layers are name -> (colour, values), from bottom to top."""
    layers = {name: layer for name, layer in layers.items() if any(layer[1])}
    if not layers:
        return ""
    parts = buckets(len(steps), MAX_BARS)
    averaged = {
        name: (colour, [value or 0.0 for value in means(values, parts)]) for name, (colour, values) in layers.items()
    }
    totals = [sum(values[i] for _, values in averaged.values()) for i in range(len(parts))]
    frame, marks = _frame([(0, max(totals))], -0.5, len(parts) - 0.5, False, True, None)
    width = min((frame.x(1) - frame.x(0)) * 0.82, 42)
    body = [_grid(frame, marks)]
    for i in range(len(parts)):
        base = 0.0
        for colour, values in averaged.values():
            top, bottom = frame.y(base + values[i]), frame.y(base)
            base += values[i]
            if bottom - top > 0.05:
                body.append(_bar(frame.x(i) - width / 2, top, width, bottom - top, colour))
    every = max(1, math.ceil(len(parts) / 8))
    for i in range(0, len(parts), every):
        body.append(_text(frame.x(i), frame.height - BOTTOM + 16, str(steps[parts[i][0]]), "middle"))
    body.append(_axis_name(frame))

    def tip(i: int) -> str:
        rows = [f"{name}  {show(values[i])} s" for name, (_, values) in reversed(averaged.items()) if values[i]]
        return "\n".join([_name_steps(steps, parts[i]), *rows, f"total  {show(totals[i])} s"])

    body.append(_strips(frame, [frame.x(i) for i in range(len(parts))], tip))
    legend = [(f"block c{colour}", name) for name, (colour, _) in averaged.items()]
    return _figure(title, unit, legend, frame, body)


def bars(
    title: str,
    unit: str,
    axis: str,
    values: Mapping[str, float | None],
    *,
    colour: int = 0,
    limits: tuple[float, float] | None = None,
    reference: tuple[float, str] | None = None,
    suffix: str = "",
) -> str:
    """One bar per name, with its value above it."""
    present = {name: value for name, value in values.items() if value is not None}
    if not present:
        return ""
    # 8% of space for the values above the bars.
    spans = [(0.0, value * 1.08) for value in present.values()] + ([(reference[0], reference[0])] if reference else [])
    margin = 0.5 if reference else 0.0  # right of the last bar, for the reference's name
    frame, marks = _frame(spans, -0.5, len(present) - 0.5 + margin, False, True, limits)
    width = min((frame.x(1) - frame.x(0)) * 0.7, 56)
    body = [_grid(frame, marks)]
    every = max(1, math.ceil(len(present) / 12))
    for i, (name, value) in enumerate(present.items()):
        x, y = frame.x(i), frame.y(value)
        body.append(_bar(x - width / 2, y, width, max(frame.y(0) - y, 0.5), colour))
        if i % every == 0:
            body.append(_text(x, y - 5, f"{value:.2f}{suffix}", "middle", "value"))
            body.append(_text(x, frame.height - BOTTOM + 16, name, "middle"))
    if reference:
        body.append(_reference(frame, *reference))
    body.append(_axis_name(frame, axis))
    return _figure(title, unit, [], frame, body)


def shares(title: str, unit: str, parts: Mapping[str, tuple[int, float]]) -> str:
    """One bar divided into shares: name -> (colour, share of 1)."""
    width, height, x = 940, 46, 0.0
    body = []
    for name, (colour, share) in parts.items():
        length = share * width
        body.append(f'<g class="share" data-tip="{escape(name)}  {share:.1%}">')
        body.append(_bar(x, 0, length, height, colour))
        name_fits = length > 14 + 9 * len(name)
        if name_fits:
            body.append(_text(x + length / 2, 20, name, "middle", "on-bar"))
        if name_fits or length > 44:
            body.append(_text(x + length / 2, 38 if name_fits else 29, f"{share:.0%}", "middle", "on-bar"))
        body.append("</g>")
        x += length
    label = f"{title}: " + ", ".join(f"{name} {share:.0%}" for name, (_, share) in parts.items())
    svg = (
        f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{''.join(body)}</svg>"
    )
    return f'<figure class="chart wide"><figcaption>{_caption(title, unit)}</figcaption>{svg}</figure>'


# Parts of a chart


def _is_constant(series: Series) -> bool:
    return constant(series.values) is not None and (series.band is None or constant(series.band) is not None)


def _constants(title: str, unit: str, series: Sequence[Series]) -> str:
    """Instead of a chart of horizontal lines. The page's grid puts it below the charts."""

    def named(s: Series) -> str:
        spread = f" ± {show(constant(s.band))}" if s.band else ""
        name = "" if s.name.lower() == title.lower() else f"{s.name} "
        return f"{name}{show(constant(s.values))}{spread}"

    num_values = min(sum(value is not None for value in s.values) for s in series)
    when = "at every step" if num_values == len(series[0].values) else "at every step with a value"
    if num_values == 1:
        when = "at the only step with a value"
    text = f"{', '.join(map(named, series))} {when}"
    return f'<p class="constant">{_caption(title, unit)}: {escape(text)}</p>'


def _spans(series: Series) -> list[tuple[float, float]]:
    """The range of y values of each point, with its band."""
    band = series.band or [None] * len(series.values)
    return [
        (value - (half or 0.0), value + (half or 0.0))
        for value, half in zip(series.values, band, strict=True)
        if value is not None
    ]


def _frame(
    spans: Sequence[tuple[float, float]],
    x_low: float,
    x_high: float,
    small: bool,
    from_zero: bool,
    limits: tuple[float, float] | None,
) -> tuple[Frame, list[float]]:
    low, high = min(span[0] for span in spans), max(span[1] for span in spans)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if limits:
        low, high = max(low, limits[0]), min(high, limits[1])
        low, high = (limits[0], high) if low - limits[0] < 0.5 * (high - low) else (low, high)
    if high - low < 1e-9 * max(abs(low), abs(high)) or high == low:
        margin = abs(high) * 0.5 or 1.0
        low, high = (0.0, margin) if from_zero and high == 0 else (low - margin, high + margin)
    width, height = (320, 168) if small else (460, 240)
    marks = ticks(low, high, 3 if small else 5)
    if x_high <= x_low:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    return Frame(width, height, x_low, x_high, marks[0], marks[-1]), marks


def _grid(frame: Frame, marks: Sequence[float]) -> str:
    out = []
    for mark, label in zip(marks, tick_labels(marks), strict=True):
        y = frame.y(mark)
        kind = "zero" if mark == 0 else "grid"
        out.append(f'<line class="{kind}" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(_text(LEFT - 7, y + 4, label, "end"))
    return "".join(out)


def _step_axis(frame: Frame, steps: Sequence[int]) -> str:
    """Labels only at whole steps within the range."""
    low, high = steps[0], steps[-1]
    every = max(1, math.ceil(_round_up(max((high - low) / (5 if frame.width < 400 else 7), 1))))
    marks = [mark for mark in range(math.ceil(low / every) * every, high + 1, every)] or [low]
    out = [_text(frame.x(mark), frame.height - BOTTOM + 16, str(mark), "middle") for mark in marks]
    return "".join(out) + _axis_name(frame)


def _axis_name(frame: Frame, name: str = "step") -> str:
    return _text((LEFT + frame.width - RIGHT) / 2, frame.height - 5, name, "middle", "axis")


def _reference(frame: Frame, value: float, label: str) -> str:
    y = frame.y(value)
    line = f'<line class="reference" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    above = y - 5 if y - 5 > TOP + 6 else y + 13
    return line + _text(frame.width - RIGHT - 2, above, label, "end", "reference-name")


def _bar(x: float, y: float, width: float, height: float, colour: int) -> str:
    position = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="bar c{colour}" {position}/>'


def _band(frame: Frame, centres: Sequence[float], series: Series) -> str:
    assert series.band is not None
    out = []
    for run in _runs(series.values):
        edges = []
        for sign, order in ((1, run), (-1, run[::-1])):
            for i in order:
                value = (series.values[i] or 0.0) + sign * (series.band[i] or 0.0)
                y = frame.y(min(max(value, frame.y_low), frame.y_high))
                edges.append(f"{frame.x(centres[i]):.1f},{y:.1f}")
        out.append(f'<polygon class="band c{series.colour}" points="{" ".join(edges)}"/>')
    return "".join(out)


def _line(frame: Frame, centres: Sequence[float], series: Series, role: str = "", has_circles: bool = True) -> str:
    """`role`: "raw" below a running mean, "mean" for the running mean itself."""
    points = [(frame.x(x), frame.y(v)) if v is not None else None for x, v in zip(centres, series.values, strict=True)]
    kind = f"{series.style} c{series.colour}" + (f" {role}" if role else "")
    present = [i for i, point in enumerate(points) if point]
    runs = [present] if series.has_marks else _runs(series.values)
    size = 5.0 if len(present) <= 40 else 2.2
    out = []
    for run in runs:
        path = " ".join(f"{point[0]:.1f},{point[1]:.1f}" for i in run if (point := points[i]))
        out.append(f'<polyline class="line {kind}" points="{path}"/>')
    for i in present:
        x, y = points[i] or (0.0, 0.0)
        if series.has_marks:
            out.append(
                f'<path class="mark {kind}" d="M{x:.1f} {y - size:.1f}l{size} {size}l-{size} {size}l-{size}-{size}z"/>'
            )
        elif has_circles and len(present) <= 30:
            radius = 4 if len(present) <= 3 else 2.2
            out.append(f'<circle class="mark {kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>')
    return "".join(out)


def _runs(values: Values) -> list[list[int]]:
    """Runs of consecutive indices with a value."""
    runs: list[list[int]] = []
    for i, value in enumerate(values):
        if value is None:
            continue
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _strips(frame: Frame, xs: Sequence[float], tip: Callable[[int], str]) -> str:
    """Invisible strips with tooltips. Each ends halfway to its neighbours."""
    out = []
    for i, x in enumerate(xs):
        start = (xs[i - 1] + x) / 2 if i else LEFT
        end = (x + xs[i + 1]) / 2 if i + 1 < len(xs) else frame.width - RIGHT
        width, height = max(end - start, 0.5), frame.height - TOP - BOTTOM
        position = f'x="{start:.1f}" y="{TOP}" width="{width:.1f}" height="{height}"'
        out.append(f'<rect class="strip" {position} data-x="{x:.1f}" data-tip="{escape(tip(i))}"/>')
    guide = f'<line class="guide" y1="{TOP}" y2="{frame.height - BOTTOM}" x1="0" x2="0"/>'
    return guide + "".join(out)


def _name_steps(steps: Sequence[int], part: range) -> str:
    first, last = steps[part[0]], steps[part[-1]]
    return f"step {first}" if first == last else f"steps {first}–{last}, mean"


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _caption(title: str, unit: str) -> str:
    return f"<b>{escape(title)}</b>" + (f' <span class="unit">{escape(unit)}</span>' if unit else "")


def _figure(
    title: str, unit: str, legend: Sequence[tuple[str, str]], frame: Frame, body: Sequence[str], note: str = ""
) -> str:
    """`note`: of the legend, about running means."""
    keys = "".join(f"<li>{key(kind)}<span>{escape(name)}</span></li>" for kind, name in legend)
    keys += f'<li class="mean-note">{escape(note)}</li>' if note else ""
    keys = f'<ul class="legend">{keys}</ul>' if keys else ""
    size = "small" if frame.width < 400 else "large"
    return (
        f'<figure class="chart {size}"><figcaption>{_caption(title, unit)}{keys}</figcaption>'
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" aria-label="{escape(f"{title}, {unit}")}">'
        f"{''.join(body)}</svg></figure>"
    )


def key(kind: str) -> str:
    """The icon of a line style or a block in a legend."""
    style = kind.split()[0]
    if style in ("block", "band"):
        shape = f'<rect class="{"bar" if style == "block" else ""} {kind}" x="2" y="1" width="18" height="10"/>'
    else:
        shape = f'<line class="line {kind}" x1="1" x2="21" y1="6" y2="6"/>'
        if style == "points":
            shape += f'<path class="mark {kind}" d="M11 1l5 5l-5 5l-5-5z"/>'
    return f'<svg class="key" viewBox="0 0 22 12" aria-hidden="true">{shape}</svg>'
