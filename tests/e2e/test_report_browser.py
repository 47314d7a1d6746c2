"""The report in a real browser: it opens without errors, makes no requests, fits every screen, and its rollout browser
works. Set PACELINE_SCREENSHOTS to a folder to keep screenshots."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, find_browser
from fake_run import make_run

from paceline.report.html import render_page, write_report
from paceline.report.run import read_run

HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2><!--<script>\u2028"
    "\"'><svg onload=window.hacked=3> javascript:alert(1) </pre></option></style><style>*{display:none}</style>"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_browser()
    if executable is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH")
    running = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_run(tmp_path_factory.mktemp("run"), 12, max_staleness=1))


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_run(tmp_path_factory.mktemp("hostile"), 8, hostile=HOSTILE))


def keep(browser: Browser, name: str) -> None:
    if folder := os.environ.get("PACELINE_SCREENSHOTS"):
        browser.screenshot(Path(folder) / f"{name}.png")


def overflow(browser: Browser) -> int:
    return browser.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def select(browser: Browser, name: str, index: int) -> None:
    browser.run(f"{name}.selectedIndex = {index}; {name}.dispatchEvent(new Event('change'))")


@pytest.mark.parametrize(
    ("width", "scheme"),
    [(320, "dark"), (390, "light"), (768, "dark"), (1280, "light"), (1280, "dark"), (1920, "light")],
)
def test_it_opens_and_fits(browser, page, width, scheme):
    browser.open(page, width, scheme=scheme)
    keep(browser, f"{scheme}-{width}")
    assert browser.complaints == []
    assert browser.requests == [page.resolve().as_uri()], "the page made a request"
    assert overflow(browser) == 0
    dark = browser.run("getComputedStyle(document.body).backgroundColor").removeprefix("rgb(").split(",")[0]
    assert (int(dark) < 60) == (scheme == "dark")


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_texts_in_a_chart_do_not_overlap_or_overflow(browser, page, width):
    browser.open(page, width)
    wrong = browser.run(
        """[...document.querySelectorAll(".chart > svg")].flatMap((svg) => {
          const frame = svg.getBoundingClientRect();
          const texts = [...svg.querySelectorAll("text")].filter((t) => t.getClientRects().length);
          const boxes = texts.map((t) => [t.textContent, t.getBoundingClientRect()]);
          const name = svg.getAttribute("aria-label");
          const out = boxes.filter(([, b]) => b.left < frame.left - 1 || b.right > frame.right + 1
            || b.top < frame.top - 6 || b.bottom > frame.bottom + 3).map(([t]) => `${name}: ${t} leaves`);
          boxes.forEach(([t, a], i) => boxes.slice(i + 1).forEach(([u, b]) => {
            const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            if (wide > 1 && high > 4) out.push(`${name}: ${t} over ${u}`);
          }));
          return out;
        })"""
    )
    assert wrong == []


def test_tokens_are_coloured_by_provenance(browser, page):
    browser.open(page)
    shown = browser.run(
        """[...tokens.querySelectorAll(".t")].map((t) => {
          const style = getComputedStyle(t);
          return [t.className, style.backgroundColor, style.textDecorationLine + style.textDecorationStyle];
        })"""
    )
    record = read_run(page.parent).rollouts.records
    first = next(r for r in record if r["s"] == record[-1]["s"])
    assert len(shown) == len(first["ids"])
    kinds = {"0": "sampled", "1": "drafted", "2": "corrected", "3": "bonus"}
    assert [row[0].split()[1] for row in shown] == [kinds[p] for p in first["provenance"]]
    looks = {row[0].replace(" newline", ""): tuple(row[1:]) for row in shown}
    assert {"t drafted d0", "t drafted d1", "t corrected", "t bonus", "t sampled"} <= looks.keys()
    assert len(set(looks.values())) == len(looks), "two kinds look alike"
    assert len({line for _, line in looks.values()}) == len(looks), "two kinds differ by colour alone"


def test_environment_tokens_are_grey(browser, page):
    browser.open(page)
    browser.run("next.click()")  # sample 1 has an environment's turn
    assert browser.run('tokens.querySelectorAll(".environment").length') == 4
    assert browser.run('getComputedStyle(tokens.querySelector(".environment")).fontStyle') == "italic"


def test_hovering_a_token_shows_its_figures(browser, page):
    browser.open(page)
    browser.scroll_to("tokens")
    x, y = browser.run("(() => { const b = tokens.children[3].getBoundingClientRect(); return [b.x + 4, b.y + 8] })()")
    browser.move_to(x, y)
    record = read_run(page.parent).rollouts.records
    first = next(r for r in record if r["s"] == record[-1]["s"])
    facts = browser.run("document.getElementById('token-facts').textContent")
    assert f"id {first['ids'][3]} " in facts
    assert f"logprob {first['logprobs'][3]:.4f}" in facts
    assert f"version {first['versions'][0][0]}" in facts
    assert browser.run("!tip.hidden && tip.textContent.includes('logprob')")


def test_hovering_a_chart_shows_the_step(browser, page):
    browser.open(page)
    browser.scroll_to("document.querySelector('.chart')")
    x, y = browser.run(
        """(() => { const b = document.querySelectorAll(".chart .strip")[5].getBoundingClientRect();
        return [b.x + b.width / 2, b.y + 20] })()"""
    )
    browser.move_to(x, y)
    tip = browser.run("tip.textContent")
    assert tip.startswith("step 5\n")
    mean = read_run(page.parent).steps[5]["reward_mean"]
    assert f"training, mean  {mean:.3f}" in tip
    assert browser.run("document.querySelectorAll('.guide.on').length") == 1


def position(browser: Browser) -> list[str]:
    return browser.run("[step.value, group.value, samples.querySelector('[aria-pressed=true] small').textContent]")


def test_keys_and_controls_of_the_rollout_browser(browser, page):
    browser.open(page)
    browser.scroll_to("document.getElementById('browser')")
    assert position(browser) == ["11", "22", "#0"]
    browser.press("ArrowRight")
    assert position(browser) == ["11", "22", "#1"]
    browser.press("]")
    assert position(browser) == ["11", "23", "#0"]
    browser.press("[")
    assert position(browser) == ["11", "22", "#0"]
    browser.press("ArrowLeft", shift=True)
    assert position(browser) == ["10", "20", "#0"]
    browser.press("ArrowLeft")
    assert position(browser) == ["9", "19", "#3"]
    select(browser, "step", 0)
    assert position(browser) == ["0", "0", "#0"]
    assert browser.run("previous.disabled && !next.disabled")
    select(browser, "group", 1)
    assert position(browser) == ["0", "1", "#0"]
    browser.run("samples.children[2].click()")
    assert position(browser) == ["0", "1", "#2"]
    browser.run("order.focus()")
    browser.press("ArrowLeft")  # goes to the list that has the focus
    assert position(browser) == ["0", "1", "#2"]
    assert browser.complaints == []


def test_orders(browser, page):
    browser.open(page)
    reward = "document.querySelector('#sample-facts dd').textContent"
    select(browser, "order", 1)
    assert browser.run(reward) == "1"
    select(browser, "order", 2)
    assert browser.run(reward) == "0"
    select(browser, "order", 3)
    assert browser.run("place.textContent") == "1 of 2"
    assert "reward.timeout_s" in browser.run("document.querySelector('.failure dd').textContent")
    assert browser.run(reward) == "–"
    select(browser, "order", 4)
    assert browser.run("place.textContent") == "1 of 24"


def test_an_order_without_samples(browser, tmp_path):
    browser.open(write_report(make_run(tmp_path, 3)))
    select(browser, "order", 3)
    assert browser.run("place.textContent") == "no such sample"
    assert browser.run("tokens.textContent") == ""
    browser.press("ArrowRight")
    select(browser, "order", 0)
    assert browser.run("place.textContent") == "1 of 24"
    assert browser.complaints == []


@pytest.mark.parametrize("width", [390, 1280])
def test_hostile_texts_are_inert(browser, hostile_page, width):
    browser.open(hostile_page, width)
    keep(browser, f"hostile-{width}")
    select(browser, "order", 3)  # a hostile failure message
    assert browser.complaints == []
    assert browser.requests == [hostile_page.resolve().as_uri()]
    assert browser.run("window.hacked === undefined")
    assert browser.run("document.querySelectorAll('img, iframe, svg[onload]').length") == 0
    assert browser.run("document.scripts.length") == 2
    assert overflow(browser) == 0
    text = HOSTILE.replace("\u2028", "\\u2028").replace('"', '\\"')
    assert browser.run(f'document.querySelector("h1").textContent === "{text}"')
    assert browser.run(f'document.getElementById("prompt").textContent === "{text}"')
    assert browser.run(f'[...tokens.children].some((t) => t.textContent === "{text}")')


def test_a_page_without_escaping_is_detected(browser, hostile_page, tmp_path):
    """Without escaping the policy blocks the strings of the test above, and without the policy they run."""
    unescaped = tmp_path / "unescaped.html"
    text = render_page(read_run(hostile_page.parent))
    unescaped.write_text(text.replace("\\u003c", "<").replace("\\u003e", ">"), encoding="utf-8")
    browser.open(unescaped)
    assert browser.complaints != []  # the policy reports a violation; nothing ran
    assert browser.run("window.hacked === undefined")
    unescaped.write_text(
        text.replace("\\u003c", "<").replace("\\u003e", ">").replace("Content-Security-Policy", "nothing"),
        encoding="utf-8",
    )
    browser.open(unescaped)
    assert browser.run("window.hacked !== undefined")


def test_records_with_invalid_values_can_be_shown(browser, tmp_path):
    """One sample for each key, with an invalid value."""
    folder = make_run(tmp_path, 1, groups=1, samples=1)
    path = folder / "rollouts.jsonl"
    record = json.loads(path.read_text(encoding="utf-8"))
    broken = [
        record | {key: junk, "step": 0, "group": i, "sample": 0}
        for i, key in enumerate(record)
        for junk in ([None, "x", {"a": None}, [None, [None]], -1.5][i % 5],)
        if key not in ("step", "group", "sample")
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in broken), encoding="utf-8")
    browser.open(write_report(folder))
    for i in range(len(broken)):
        assert browser.run("place.textContent") == f"{i + 1} of {len(broken)}"
        browser.run("tokens.firstElementChild?.click(); next.click()")
    assert browser.complaints == []


def test_records_without_pieces_show_their_text(browser, tmp_path):
    folder = make_run(tmp_path, 2)
    path = folder / "rollouts.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: v for k, v in r.items() if k != "pieces"}) + "\n" for r in records))
    browser.open(write_report(folder))
    assert browser.run("tokens.textContent") == records[8]["completion"]
    assert browser.run("tokens.children.length") == 0
    assert "no text per token" in browser.run("legend.textContent")
    assert browser.complaints == []


@pytest.mark.parametrize("missing", ["config.toml", "run.json", "metrics.jsonl", "rollouts.jsonl", "trace.jsonl"])
def test_unfinished_runs_open_too(browser, tmp_path, missing):
    folder = make_run(tmp_path, 2)
    (folder / "summary.json").unlink()
    (folder / missing).unlink()
    browser.open(write_report(folder))
    assert browser.complaints == []
    assert missing in browser.run("document.querySelector('.note').textContent")
