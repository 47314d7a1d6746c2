"""The report: reading a run, charts and page. tests/e2e/test_report_browser.py tests it in a browser."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import browser
import pytest
from fake_run import make_run, write_lines
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.console import escape_controls
from paceline.files import number
from paceline.report import chart, figures, key_figures, rollouts, series
from paceline.report.elements import seconds
from paceline.report.html import render_page, write_report
from paceline.report.run import OUTCOMES, read_run
from paceline.report.sections import acceptance_by_depth
from paceline.report.series import Series
from paceline.report.table import finite

HOSTILE = "</script><script>alert(1)</script><!-- \u2028 \x1b[31m \u202e ' \" <img src=x onerror=alert(1)> &lt;"
INVALID = (None, "x", [], {}, math.nan, math.inf, -1e300, True, [None, "x"], {"reward": "x", "1": None})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", 6)


class Page(HTMLParser):
    """The elements and attributes of a page, and its text outside of style and script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.data = ""
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_endtag(self, tag):
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data):
        if self._inside and self._inside[-1] == "script":
            self.data = self.data or data  # the first script is the data
        elif not self._inside or self._inside[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


# Reading a run


def test_a_finished_run_is_read_completely(folder):
    run = read_run(folder)
    assert run.notes == []
    assert run.numbers == list(range(6))
    assert run.rollouts.num_total == len(run.rollouts.records) == 6 * 2 * 4
    assert sum(totals["num_steps"] for totals in run.engine.values()) == 200
    assert run.setting("speculation", "rule") == "coupled"


def test_outcomes_of_drafting_are_shown_if_tokens_were_proposed(folder):
    run = read_run(folder)
    outcomes = {name: sum(totals[name] for totals in run.engine.values()) for name in OUTCOMES}
    assert outcomes == {"verified": 120, "probe": 20, "not selected": 20, "nothing proposed": 20, "not planned": 20}
    text = Page(write_report(folder).read_text(encoding="utf-8")).text
    assert "Drafting: number of steps by outcome" in text and "not selected" in text
    traces = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    plain = {"num_planned": 0, "num_proposed": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0, "reason": ""}
    write_lines(folder / "trace.jsonl", [trace | plain for trace in traces])
    text = Page(write_report(folder).read_text(encoding="utf-8")).text
    assert "By number of rows" in text and "Drafting: number of steps" not in text


def test_acceptance_by_depth_is_shown_if_completions_are_long(folder):
    found = acceptance_by_depth(read_run(folder))
    assert list(found) == ["from 0", "from 64"] and found["from 64"] == 1.5
    title = "Acceptance length by depth"
    assert title in Page(write_report(folder).read_text(encoding="utf-8")).text
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    write_lines(folder / "metrics.jsonl", [r | {"acceptance_length_per_depth": {"0": 2.0}} for r in records])
    assert title not in Page(write_report(folder).read_text(encoding="utf-8")).text


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_text("")])
def test_a_folder_without_a_run_is_an_error(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        write_report(tmp_path / "x")
    assert not (tmp_path / "x" / "report.html").exists()


FILES = ("config.toml", "run.json", "metrics.jsonl", "rollouts.jsonl", "trace.jsonl", "summary.json")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_a_note(folder, name):
    (folder / name).unlink()
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert name in page.text
    assert [note for note in read_run(folder).notes if name in note]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", [0, 1, 37])
def test_a_truncated_file_is_read_as_far_as_possible(folder, name, cut):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-cut] if cut > 1 else path.read_bytes()[:cut])
    run = read_run(folder)
    render_page(run)
    if cut == 37 and name.endswith("jsonl"):
        assert [note for note in run.notes if name in note and "cut off" in note]
    if cut == 37 and name == "metrics.jsonl":
        assert run.numbers == list(range(5))


def test_if_a_step_was_written_twice_the_later_line_counts(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward_mean": 77.0}\n')
    run = read_run(folder)
    assert run.numbers == list(range(6))
    assert run.series("reward_mean")[3] == 77.0


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl", "trace.jsonl", "summary.json", "run.json"])
def test_invalid_values_do_not_break_the_page(tmp_path, name):
    """Each key in turn has an invalid value."""
    folder = make_run(tmp_path / "run", 1, groups=1, samples=1)
    path = folder / name
    first, *others = path.read_text(encoding="utf-8").splitlines()
    record = json.loads(first)
    keys = [(key,) for key in record if key != "format"]
    keys += [(key, inner) for key, value in record.items() if isinstance(value, dict) for inner in value]
    for i, key in enumerate(keys):
        for invalid in INVALID[i % 5 :: 5]:
            changed = json.loads(first)
            parent = changed
            for part in key[:-1]:
                parent = parent[part]
            parent[key[-1]] = invalid
            path.write_text("\n".join([json.dumps(changed), *others]) + "\n", encoding="utf-8")
            assert "</html>" in render_page(read_run(folder)), (key, invalid)


def test_values_that_number_reads_as_none():
    record = {"a": {"b": 2, "nan": math.nan, "yes": True}, "huge": 1e300}
    assert number(record, "a", "b") == 2.0
    assert [number(record, *path) for path in (("a", "nan"), ("a", "yes"), ("a",), ("c", "d"), ("huge",))] == [None] * 5


# Figures


def test_a_run_that_was_not_evaluated_at_its_end_has_no_reward_after(folder):
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"reward_after": None}))
    assert figures.reward_after(read_run(folder)) is None


def test_figures_of_an_unfinished_run_come_from_its_steps(folder):
    finished = read_run(folder)
    (folder / "summary.json").unlink()
    running = read_run(folder)
    assert figures.reward_before(running) == figures.reward_before(finished) == 0.14
    assert figures.reward_after(running) == figures.reward_after(finished)
    assert figures.speedup(running) == pytest.approx(figures.speedup(finished))
    assert figures.tail_speedup(running) == pytest.approx(figures.tail_speedup(finished))
    drafts = sum(record["num_drafts"] for record in running.steps)
    accepted = sum(record["num_accepted_tokens"] for record in running.steps)
    assert figures.acceptance_length(running) == 1 + accepted / drafts


def test_held_out_rewards_begin_before_the_first_step(folder):
    run = read_run(folder)
    run.steps = [{"step": 0, "eval_before": {"reward": 0.25}}, {"step": 1}, {"step": 2, "eval": {"reward": 0.5}}]
    assert figures.held_out_rewards(run) == [0.25, None, 0.5]
    run.steps[0]["eval"] = {"reward": 0.75}
    assert figures.held_out_rewards(run) == [0.75, None, 0.5]
    run.steps = []
    assert figures.held_out_rewards(run) == []


def test_zero_in_the_summary_is_a_value(folder):
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"reward_before": 0.0}))
    assert figures.reward_before(read_run(folder)) == 0.0


@pytest.mark.parametrize("staleness", [0, 2])
def test_stages_add_up_to_the_step(tmp_path, staleness):
    run = read_run(make_run(tmp_path, 4, max_staleness=staleness))
    stages = figures.stage_seconds(
        run, ("data", "sync", "generation", "reward", "logprob", "training", "draft", "other")
    )
    assert sum(value or 0 for values in stages.values() for value in values) == pytest.approx(
        sum(record["stages"]["total"] for record in run.steps)
    )
    page = render_page(run)
    assert ("exposed generation" in page) == ("The engine had nothing to generate for" in page) == (staleness > 0)


def test_engine_idle_time_and_trainer_wait(tmp_path):
    run = read_run(make_run(tmp_path, 4, max_staleness=2))
    waited, rewards, whole = (run.total("stages", name) for name in ("exposed_generation", "reward", "total"))
    page = render_page(run)
    assert f"Training waited for rollouts for {seconds(waited)}, {waited / whole:.0%} of the time" in page
    assert f"nothing to generate for {seconds(5 + rewards)}, {(5 + rewards) / whole:.0%} of the time" in page
    assert f"it waited {seconds(5.0)} for newer weights, and {seconds(rewards)} for rewards" in page


def test_warnings(folder):
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert figures.warnings(read_run(folder)) == []
    records[2]["mismatch_alarm"] = True
    records[3]["num_failures"] = 2
    records[0]["audit"]["identical"] = False
    records[4]["staleness_max"] = 1
    records[5]["zero_advantages_alarm"] = True
    records[1]["num_skipped_optimizer_steps"] = 2
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    alarm, advantages, failures, skipped, audit, lag = figures.warnings(read_run(folder))
    assert "step 2" in alarm
    assert advantages == "All advantages were zero, so rewards did not change the policy, at step 5."
    assert "2 samples" in failures
    assert "step 3" in failures
    assert skipped == "2 optimizer steps were skipped, because the loss or the gradient was not finite, at step 1."
    assert "step 0" in audit
    assert "step 4" in lag


# Rollouts


def test_chosen_rollouts_are_spread_over_the_steps(tmp_path):
    folder = make_run(tmp_path, 40)
    path = folder / "rollouts.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    offsets, offset = [], 0
    for record, line in zip(lines, path.read_bytes().splitlines(keepends=True), strict=True):
        offsets.append(((record["step"], record["group"], record["sample"], 0), offset))
        offset += len(line)
    few = rollouts.choose(path, offsets, max_samples=36)
    assert few.num_total == 320
    steps = sorted({record["s"] for record in few.records})
    assert len(few.records) == 36
    assert len(steps) == 9, "expected nine groups of nine different steps"
    assert (steps[0], steps[-1]) == (0, 39)
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 6
    groups = {(record["s"], record["g"]) for record in few.records}
    assert all(sum((r["s"], r["g"]) == group for r in few.records) == 4 for group in groups), "whole groups only"
    small = rollouts.choose(path, offsets, max_bytes=60_000)
    assert 0 < len(rollouts.encode(small.records)) <= 60_000 * 1.05
    assert len({record["s"] for record in small.records}) > 5
    assert rollouts.choose(path, offsets, max_bytes=10).records == []


def test_the_page_shows_how_many_samples_it_contains(folder):
    assert "All 48 samples are in this page." in Page(render_page(read_run(folder))).text
    run = read_run(folder)
    run.rollouts.records = run.rollouts.records[:8]
    assert "This page contains 8 of 48 samples" in Page(render_page(run)).text


@given(st.integers(0, 200))
def test_spread_is_a_permutation(num):
    assert sorted(rollouts.spread(range(num))) == list(range(num))


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.text() | st.floats() | st.integers(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
        max_leaves=10,
    )
)
@example({HOSTILE: [HOSTILE, math.nan]})
def test_encoded_data_has_no_markup_and_can_be_parsed(content):
    text = rollouts.encode(content)
    assert text.isascii()
    assert not set(text) & set("<>&")
    assert json.loads(text) == finite(content)


def test_prompts_are_stored_once(folder):
    run = read_run(folder)
    assert len(run.rollouts.prompts) == 12
    assert all("(problem" in run.rollouts.prompts[record["p"]] for record in run.rollouts.records)


def test_per_token_fields_of_the_wrong_length_are_left_out(folder):
    path = folder / "rollouts.jsonl"
    record = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    record["logprobs"].pop()
    record["pieces"].append("too many")
    path.write_text(json.dumps(record) + "\n")
    (kept,) = read_run(folder).rollouts.records
    assert "logprobs" not in kept
    assert "pieces" not in kept
    assert kept["text"] == record["completion"]
    assert len(kept["provenance"]) == len(kept["sources"]) == len(kept["ids"])


# Charts


def coordinates(svg: str) -> list[tuple[float, float]]:
    """Every point of a line, polygon, circle or bar."""
    points = [
        tuple(map(float, pair.split(","))) for group in re.findall(r'points="([^"]*)"', svg) for pair in group.split()
    ]
    points += [(float(x), float(y)) for x, y in re.findall(r'cx="([^"]*)" cy="([^"]*)"', svg)]
    for x, y, width, height in re.findall(r'<rect[^>]* x="([^"]*)" y="([^"]*)" width="([^"]*)" height="([^"]*)"', svg):
        points += [(float(x), float(y)), (float(x) + float(width), float(y) + float(height))]
    return points  # type: ignore[return-value]


numbers = st.none() | st.floats(-1e90, 1e90, allow_subnormal=False) | st.sampled_from([0.0, 1.0, 1e-12, 0.5])


@settings(max_examples=60)
@given(st.lists(numbers, min_size=1, max_size=8), st.booleans(), st.booleans())
def test_lines_stay_inside_their_frame(values, from_zero, small):
    svg = chart.lines("t", "u", range(len(values)), [Series("s", values)], from_zero=from_zero, small=small)
    if all(value is None for value in values):
        assert svg == ""
        return
    if series.constant(values) is not None:
        assert "<svg" not in svg and svg.startswith('<p class="constant">')
        return
    width, height = map(int, re.findall(r'viewBox="0 0 (320|460) (\d+)"', svg)[0])
    assert "nan" not in svg
    assert "inf" not in svg
    assert all(chart.LEFT - 0.1 <= x <= width and 0 <= y <= height - chart.BOTTOM + 0.1 for x, y in coordinates(svg))


def test_lines_have_gaps_at_missing_values():
    svg = chart.lines("t", "u", range(5), [Series("s", [1.0, 2.0, None, 3.0, 4.0])])
    assert svg.count("<polyline") == 2
    joined = chart.lines("t", "u", range(5), [Series("s", [1.0, 2.0, None, 3.0, 4.0], style="points")])
    assert joined.count("<polyline") == 1


def test_a_band_is_centred_on_its_line():
    svg = chart.lines("t", "u", range(3), [Series("s", [1.0, 2.0, 3.0], band=[0.5, 0.25, 0.5])])
    (edge,) = re.findall(r'<polygon[^>]*points="([^"]*)"', svg)
    (line,) = re.findall(r'<polyline[^>]*points="([^"]*)"', svg)
    ys = [float(pair.split(",")[1]) for pair in edge.split()]
    middle = [float(pair.split(",")[1]) for pair in line.split()]
    upper, lower = ys[:3], ys[:2:-1]
    assert [(a + b) / 2 for a, b in zip(upper, lower, strict=True)] == pytest.approx(middle, abs=0.11)
    assert lower[0] - upper[0] == pytest.approx(2 * (lower[1] - upper[1]), abs=0.3)
    assert upper[0] < middle[0] < lower[0]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"a": [0.0, 0.0, 0.0]}, "a 0 at every step"),
        ({"a": [2.8e-17, -1e-17, 3e-17]}, "a 0 at every step"),  # rounding errors
        ({"a": [6.0, 6.0], "b": [0.5, 0.5]}, "a 6, b 0.500 at every step"),
        ({"a": [None, 1.0, 1.0]}, "a 1 at every step with a value"),
        ({"a": [None, 1.5]}, "a 1.50 at the only step with a value"),
        ({"Title": [3.0, 3.0]}, ": 3 at every step"),  # not named twice
    ],
)
def test_a_constant_is_a_line_of_text(given, shown):
    steps = range(len(next(iter(given.values()))))
    text = chart.lines("title", "u", steps, [Series(name, values) for name, values in given.items()])
    assert "<svg" not in text and Page(text).text.endswith(shown)


def test_what_changes_is_a_chart():
    assert "<svg" in chart.lines("t", "u", range(2), [Series("a", [1.0, 1.0]), Series("b", [1.0, 1.00001])])
    assert "<svg" in chart.lines("t", "u", range(2), [Series("a", [1.0, 1.0], band=[0.1, 0.2])])


def test_the_page_draws_no_constants(tmp_path):
    page = render_page(read_run(make_run(tmp_path, 12)))
    assert "Staleness versions behind the learner : mean 0, largest 0 at every step" in Page(page).text
    assert 'aria-label="Staleness' not in page and 'aria-label="Groups' in page


def test_running_mean():
    assert series.running_mean([1.0, 2.0, 6.0, None, 4.0], 3) == [1.5, 3.0, 4.0, None, 4.0]
    noise = [float(i % 2) for i in range(40)]
    assert series.smoothing_window(noise) == 5
    assert series.smoothing_window(noise * 10) == 27
    assert series.smoothing_window(noise[:9]) == 0, "too few values"
    assert series.smoothing_window([float(min(i, 10)) - i / 10 for i in range(40)]) == 0, "a learning rate is not noisy"


def test_a_noisy_curve_has_its_running_mean():
    svg = chart.lines("t", "u", range(40), [Series("s", [float(i % 2) for i in range(40)], style="dashed")])
    assert [f'<polyline class="line dashed c0 {role}"' in svg for role in ("raw", "mean")] == [True, True]
    assert "thick: mean of 5 steps" in svg
    (mean,) = re.findall(r'c0 mean" points="([^"]*)"', svg)
    assert len({float(pair.split(",")[1]) for pair in mean.split()[3:-3]}) == 2, "2/5 and 3/5 alternate"
    marks = chart.lines("t", "u", range(40), [Series("s", [float(i % 2) for i in range(40)], style="points")])
    assert "mean" not in marks


def test_colors_and_styles_of_many_series_differ():
    assert len({series.color_and_style(i) for i in range(18)}) == 18


def test_reward_functions_have_curves(tmp_path):
    folder = make_run(tmp_path, 12)
    assert {"gym", "format"} <= set(re.findall(r"<span>(\w+)</span>", render_page(read_run(folder))))
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    write_lines(folder / "metrics.jsonl", [step | {"rewards": {"gym": step["reward_mean"]}} for step in steps])
    assert "Reward by function" not in render_page(read_run(folder)), "it would repeat the reward"
    write_lines(folder / "metrics.jsonl", [step | {"rewards": {"gym": step["reward_mean"] / 2}} for step in steps])
    assert "Reward by function" in render_page(read_run(folder))


def test_key_figures_show_ranges(tmp_path):
    folder = make_run(tmp_path, 16)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ratios = iter((0.49, 1.68, 1.2, 0.9))
    for step in steps:
        if "audit" in step:
            step["audit"] |= {"speedup": (ratio := next(ratios)), "tail_speedup": {"1": ratio + 1}}
    write_lines(folder / "metrics.jsonl", steps)
    summary = json.loads((folder / "summary.json").read_text()) | {
        "generation_speedup": 1.06,
        "tail_speedup": {"1": 2.1},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    text = Page(key_figures.key_figures(read_run(folder))).text
    assert (
        "audited speed-up 1.05× plain ÷ speculative time: median of 4 audits, 0.49× to 1.68×. All together 1.06×"
        in text
    )
    assert "2.05× with 1 running sequence: median of 4 audits, 1.49× to 2.68×. All together 2.10×" in text
    lengths = [step["mean_acceptance_length"] for step in steps]
    assert f"{min(lengths):.2f} to {max(lengths):.2f} by step" in text
    write_lines(folder / "metrics.jsonl", steps[:1])
    assert "speculative time, one audited step" in Page(key_figures.key_figures(read_run(folder))).text


def test_a_missing_browser_fails_only_in_ci(monkeypatch):
    monkeypatch.setattr(browser, "find_browser", lambda: None)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="make setup-browser"):
        browser.require_browser()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="make setup-browser"):
        browser.require_browser()


def test_many_steps_are_averaged():
    svg = chart.lines("t", "u", range(1000), [Series("s", [float(i % 2) for i in range(1000)])])
    strips = re.findall(r'data-tip="([^"]*)"', svg)
    assert len(strips) <= chart.MAX_POINTS
    assert strips[0].startswith("steps 0–6, mean\n")


def test_heights_of_stacked_bars():
    svg = chart.stacked("t", "s", [0], {"a": (0, [3.0]), "b": (1, [7.0])})
    heights = [float(h) for h in re.findall(r'class="bar[^>]*width="42.0" height="([^"]*)"', svg)]
    assert len(heights) == 2
    assert heights[1] / heights[0] == pytest.approx(7 / 3, rel=0.02)
    assert "total  10 s" in svg


@given(st.floats(-1e6, 1e6), st.floats(1e-9, 1e6))
def test_ticks_cover_the_range(low, span):
    high = low + max(span, abs(low) * 1e-6)
    marks = chart.ticks(low, high)
    step = marks[1] - marks[0]
    assert marks[0] <= low + 1e-6 * step
    assert marks[-1] >= high - 1e-6 * step
    assert 2 <= len(marks) <= 8


@pytest.mark.parametrize(
    ("marks", "labels"),
    [
        ([0, 0.5, 1.0], ["0.0", "0.5", "1.0"]),
        ([0, 0.25, 0.5], ["0.00", "0.25", "0.50"]),
        ([0, 20000, 40000], ["0", "20k", "40k"]),
        ([0, 500, 1000], ["0", "500", "1000"]),
        ([0, 5e-6, 1e-5], ["0", "0.5e-5", "1.0e-5"]),
        ([0, 2.5e6, 5e6], ["0", "2.5M", "5.0M"]),
        ([0, 1e30], ["0", "1e30"]),
    ],
)
def test_tick_labels(marks, labels):
    assert chart.tick_labels(marks) == labels


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.1234, "0.123"),
        (2.0, "2"),
        (1.9, "1.90"),
        (123.4, "123"),
        (12.345, "12.3"),
        (12345.6, "12,346"),
        (2.5e-6, "2.5e-6"),
    ],
)
def test_show(value, text):
    assert chart.show(value) == text


# The page


def test_a_report_does_not_import_torch():
    program = "import sys, paceline.report.html\nprint(sys.modules.keys() & {'torch', 'transformers', 'matplotlib'})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_page_has_every_section(folder):
    page = Page(render_page(read_run(folder)))
    sections = {attrs["id"] for tag, attrs in page.tags if tag == "section"}
    assert sections == {
        "reward", "time", "speculation", "exactness", "staleness", "learning", "rollouts", "engine", "steps", "config"
    }  # fmt: skip
    links = {attrs["href"] for tag, attrs in page.tags if tag == "a"}
    assert links == {f"#{section}" for section in sections}
    assert "the same tokens by the same kernels" in page.text
    assert "0.140 → 0.6" in page.text
    assert 'rule = "coupled"' in page.text
    assert len(json.loads(page.data)["rollouts"]) == 48


def test_the_page_has_no_external_references(folder):
    page = Page(render_page(read_run(folder)))
    assert not {tag for tag, _ in page.tags} & {
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "audio",
        "video",
    }
    for tag, attrs in page.tags:
        assert "src" not in attrs, tag
        assert "style" not in attrs, f"{tag}: the Content-Security-Policy forbids it"
        assert not [name for name in attrs if name.startswith("on")], tag
        assert (attrs.get("href") or "#").startswith("#")
    (policy,) = [attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_hostile_text_adds_no_elements(tmp_path):
    harmless = Page(render_page(read_run(make_run(tmp_path / "harmless", 8, hostile="text"))))
    hostile = Page(render_page(read_run(make_run(tmp_path / "hostile", 8, hostile=HOSTILE))))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in harmless.tags]
    assert escape_controls(HOSTILE) in hostile.texts
    assert not set("\x1b\u202e") & set(hostile.text)
    assert json.loads(hostile.data)["prompts"] == [HOSTILE]


def test_the_page_is_written_atomically(folder, monkeypatch):
    first = write_report(folder)
    assert first == folder / "report.html"
    before = first.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_report(folder)
    assert first.read_bytes() == before
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_write_to_another_path(folder, tmp_path):
    assert write_report(folder, tmp_path / "x.html") == tmp_path / "x.html"
    assert not (folder / "report.html").exists()
    with pytest.raises(ValueError, match="is a folder"):
        write_report(folder, tmp_path)
