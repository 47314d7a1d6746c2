"""`paceline report A B …`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fake_run import make_run

from paceline.report import compare
from paceline.report.run import read_run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [make_run(tmp_path / name, steps, seed=steps) for name, steps in (("a", 12), ("b", 8))]


def change(run: Path, old: str, new: str) -> None:
    path = run / "config.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_only_settings_that_differ_are_shown(runs: list[Path]) -> None:
    change(runs[1], 'method = "suffix"', 'method = "none"')
    change(runs[1], "num_speculative_tokens = 4", 'num_speculative_tokens = {"1" = 3, "4" = 1}')
    change(runs[0], "eval_every = 5", 'eval_every = 5\nparams = {"max_terms" = 2, tags = ["x", 1]}')
    assert compare.differing_settings([read_run(run) for run in runs]) == [
        ["speculation.method", "suffix", "none"],
        ["speculation.num_speculative_tokens", "4", "–"],
        ["train.num_steps", "12", "8"],
        ["train.params.max_terms", "2", "–"],
        ["train.params.tags", '["x", 1]', "–"],
        ["speculation.num_speculative_tokens.1", "–", "3"],
        ["speculation.num_speculative_tokens.4", "–", "1"],
    ]


def test_equal_settings(runs: list[Path]) -> None:
    (runs[1] / "config.toml").write_bytes((runs[0] / "config.toml").read_bytes())
    read = [read_run(run) for run in runs]
    assert compare.differing_settings(read) == []
    assert "All settings are the same." in compare.render_comparison(read)


def test_end_figures(runs: list[Path]) -> None:
    read = [read_run(run) for run in runs]
    rows = {name: cells for name, *cells in compare.end_figures(read)}
    assert rows["steps"] == ["12", "8"]
    assert rows["finished"] == ["yes", "yes"]
    for i, run in enumerate(read):
        last = run.steps[-1]
        assert rows["training reward, last step"][i] == f"{last['reward_mean']:.3f}"
        assert (
            rows["identical audits"][i] == f"{len(range(0, len(run.steps), 5))} of {len(range(0, len(run.steps), 5))}"
        )
        ratios = sorted(step["audit"]["speedup"] for step in run.steps if "audit" in step)
        assert rows["audited speed-up, median (range)"][i].endswith(f"({ratios[0]:.2f}× to {ratios[-1]:.2f}×)")
    (runs[1] / "summary.json").unlink()
    (runs[1] / "metrics.jsonl").write_text("")
    rows = {name: cells for name, *cells in compare.end_figures([read_run(run) for run in runs])}
    assert rows["steps"] == ["12", "0"] and rows["finished"] == ["yes", "no"]
    assert rows["acceptance length"][1] == rows["time"][1] == "–"


def test_curves_are_over_the_steps_of_all_runs(runs: list[Path]) -> None:
    page = compare.render_comparison([read_run(run) for run in runs])
    reward = page[page.index('aria-label="Reward, ') :]
    tips = re.findall(r'data-tip="([^"]*)"', reward[: reward.index("</figure>")])
    means = [[step["reward_mean"] for step in read_run(run).steps] for run in runs]
    assert tips[3] == f"step 3\na  {means[0][3]:.3f}\nb  {means[1][3]:.3f}"
    assert tips[10] == f"step 10\na  {means[0][10]:.3f}", "the other run has ended"
    held_out = page[page.index('aria-label="Held-out reward') :]
    assert "step 0\na  0.140\nb  0.140" in held_out, "with the evaluation before the first step"


def test_labels_are_unique(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("x/run", "y/run", "y/z/run", "other")]
    names = compare.labels(folders)
    assert names == ["x/run", "y/run", "z/run", "other"]
    assert compare.labels([tmp_path / "z/run", tmp_path / "y/z/run"]) == [f"{tmp_path.name}/z/run", "y/z/run"]


def test_a_comparison_needs_neither_rollouts_nor_traces(runs: list[Path], tmp_path: Path) -> None:
    """These files may be large."""
    for run in runs:
        (run / "rollouts.jsonl").write_text("not read")
        (run / "trace.jsonl").write_text("not read")
    page = compare.write_comparison(runs, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "left out" not in page and "http" not in page.replace("http-equiv", "")


def test_errors(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is given twice"):
        compare.read_runs([runs[0], runs[0] / ".." / "a"])
    with pytest.raises(ValueError, match="13 runs: a comparison shows at most 12"):
        compare.read_runs([runs[0]] * 13)
    with pytest.raises(ValueError, match="is a folder; give the name of a file"):
        compare.write_comparison(runs, tmp_path)


def test_a_run_with_invalid_values(runs: list[Path]) -> None:
    lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        for key in list(line)[i :: len(lines)]:
            line[key] = line[key] if key == "step" else [None, "x", {"reward": "x"}, 1e300][i % 4]
    (runs[0] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (runs[0] / "config.toml").write_text("a = 1979-05-27T07:32:00Z\nb = [{c = nan}]\n[d]\n")
    assert "1979-05-27" in compare.render_comparison([read_run(run) for run in runs])
