"""`paceline report A B` in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browser import Browser
from fake_run import make_run

from paceline.console import escape_controls
from paceline.report.compare import write_comparison

HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2>\u2028\x1b[31m\u202e"
    "</td></table><svg onload=window.hacked=3></style>"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    runs = [make_run(folder / name, steps, seed=seed) for seed, (name, steps) in enumerate((("a", 14), ("b", 11)))]
    path = runs[1] / "config.toml"
    path.write_text(path.read_text().replace('"suffix"', '"none"'))
    return write_comparison(runs, folder / "page.html")


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (1400, "dark"), (400, "light"), (400, "dark")])
def test_it_opens_and_fits(browser: Browser, page: Path, width: int, scheme: str) -> None:
    browser.open(page, width, scheme=scheme)
    browser.keep(f"compare-{scheme}-{width}")
    assert browser.complaints == []
    assert browser.requests == [page.resolve().as_uri()]
    assert browser.overflow == 0


def test_curves_settings_and_figures_of_both_runs(browser: Browser, page: Path) -> None:
    browser.open(page)
    keys = "[...document.querySelector('#reward .chart').querySelectorAll('.legend li')].map((li) => li.textContent)"
    assert browser.run(keys)[:2] == ["a", "b"]
    ends = browser.run(
        """[...document.querySelectorAll("#reward .chart:first-child .line.raw")].map(
          (line) => Math.max(...[...line.points].map((p) => p.x)))"""
    )
    assert len(ends) == 2 and ends[1] < ends[0], "the shorter run ends earlier"
    cells = "[...document.querySelectorAll('#settings td')].map((td) => td.textContent)"
    assert browser.run(cells) == ["speculation.method", "suffix", "none", "train.num_steps", "14", "11"]
    steps = "[...document.querySelector('#figures tbody tr').cells].map((td) => td.textContent)"
    assert browser.run(steps) == ["steps", "14", "11"]
    browser.scroll_to("document.querySelector('.chart')")
    x, y = browser.run(
        "(() => { const b = document.querySelectorAll('.chart .strip')[3].getBoundingClientRect();"
        " return [b.x + b.width / 2, b.y + 20] })()"
    )
    browser.move_to(x, y)
    assert [line.split("  ")[0] for line in browser.run("tip.textContent").split("\n")] == ["step 3", "a", "b"]


@pytest.mark.parametrize("width", [400, 1400])
def test_hostile_texts_are_inert(browser: Browser, tmp_path: Path, width: int) -> None:
    text = HOSTILE.replace("/", "")  # a folder's name has none
    runs = [make_run(tmp_path / name, 8, hostile=HOSTILE) for name in (text, "b")]
    (runs[0] / "config.toml").write_text(f"[task]\nname = {json.dumps(HOSTILE)}\n{json.dumps(HOSTILE)} = 1\n")
    page = write_comparison(runs, tmp_path / "page.html")
    browser.open(page, width)
    browser.keep(f"compare-hostile-{width}")
    assert browser.complaints == []
    assert browser.requests == [page.resolve().as_uri()]
    assert browser.run("window.hacked === undefined && document.scripts.length === 1")
    assert browser.run("document.querySelectorAll('img, svg[onload]').length") == 0
    assert browser.overflow == 0
    shown = "(text) => [...document.querySelectorAll('td, .legend span')].some((e) => e.textContent === text)"
    for expected in (HOSTILE, text, f"task.{HOSTILE}"):
        assert browser.run(f"({shown})({json.dumps(escape_controls(expected))})"), expected
