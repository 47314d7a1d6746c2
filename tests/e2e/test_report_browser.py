"""The report in a real browser: it opens without errors, makes no requests, fits every screen, and its rollout browser
works. Set PACELINE_SCREENSHOTS to a folder to keep screenshots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from fake_run import make_run

from paceline.console import escape_controls
from paceline.report.html import render_page, write_report
from paceline.report.run import read_run

HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2><!--<script>\u2028\x1b[31m\u202e"
    "\"'><svg onload=window.hacked=3> javascript:alert(1) </pre></option></style><style>*{display:none}</style>"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_run(tmp_path_factory.mktemp("run"), 12, max_staleness=1))


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_run(tmp_path_factory.mktemp("hostile"), 8, hostile=HOSTILE))


def select(browser: Browser, name: str, value: object) -> None:
    element = f"document.getElementById('{name}')"
    browser.run(f"{element}.value = '{value}'; {element}.dispatchEvent(new Event('change'))")


def search(browser: Browser, text: str) -> None:
    browser.run(f"search.value = {json.dumps(text)}; search.dispatchEvent(new Event('input'))")


def open_first(browser: Browser, page: Path) -> list[dict[str, Any]]:
    """Opens the page at the last step's first sample. Returns the page's records."""
    browser.open(page)
    records = read_run(page.parent).rollouts.records
    select(browser, "step", records[-1]["s"])
    return records


@pytest.mark.parametrize(
    ("width", "scheme"),
    [(320, "dark"), (400, "light"), (400, "dark"), (768, "dark"), (1400, "light"), (1400, "dark"), (1920, "light")],
)
def test_it_opens_and_fits(browser, page, width, scheme):
    browser.open(page, width, scheme=scheme)
    browser.keep(f"{scheme}-{width}")
    assert browser.complaints == []
    assert browser.requests == [page.resolve().as_uri()], "the page made a request"
    assert browser.overflow == 0
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
    records = open_first(browser, page)
    shown = browser.run(
        """[...tokens.querySelectorAll(".t")].map((t) => {
          const style = getComputedStyle(t);
          return [t.className, style.backgroundColor, style.textDecorationLine + style.textDecorationStyle];
        })"""
    )
    first = next(r for r in records if r["s"] == records[-1]["s"])
    assert len(shown) == len(first["ids"])
    kinds = {"0": "sampled", "1": "drafted", "2": "corrected", "3": "bonus"}
    assert [row[0].split()[1] for row in shown] == [kinds[p] for p in first["provenance"]]
    looks = {row[0].replace(" newline", ""): tuple(row[1:]) for row in shown}
    assert {"t drafted d0", "t drafted d1", "t corrected", "t bonus", "t sampled"} <= looks.keys()
    assert len(set(looks.values())) == len(looks), "two kinds look alike"
    assert len({line for _, line in looks.values()}) == len(looks), "two kinds differ by colour alone"


def test_environment_tokens_are_grey(browser, page):
    open_first(browser, page)
    browser.run("next.click()")  # sample 1 has an environment's turn
    assert browser.run('tokens.querySelectorAll(".environment").length') == 4
    assert browser.run('getComputedStyle(tokens.querySelector(".environment")).fontStyle') == "italic"


def test_hovering_a_token_shows_its_figures(browser, page):
    records = open_first(browser, page)
    browser.scroll_to("tokens")
    x, y = browser.run("(() => { const b = tokens.children[3].getBoundingClientRect(); return [b.x + 4, b.y + 8] })()")
    browser.move_to(x, y)
    first = next(r for r in records if r["s"] == records[-1]["s"])
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
    open_first(browser, page)
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


def drafted_share(record: dict[str, Any]) -> float:
    mask = record.get("mask", "1" * len(record["ids"]))
    generated = [p for p, chosen in zip(record["provenance"], mask, strict=True) if chosen == "1"]
    return generated.count("1") / len(generated)


def test_it_opens_on_drafted_tokens_of_a_group_with_mixed_rewards(browser, page, tmp_path):
    browser.open(page)
    records = read_run(page.parent).rollouts.records
    groups = [[r for r in records if r["g"] == g] for g in range(24)]
    mixed = [group for group in groups if len({r["reward"] for r in group}) > 1]
    last = [r for group in mixed for r in group if group[0]["s"] == mixed[-1][0]["s"]]
    best = max(last, key=drafted_share)
    assert position(browser) == [str(best["s"]), str(best["g"]), f"#{best['i']}"]
    assert browser.run("tokens.querySelectorAll('.drafted').length") > 3
    path = make_run(tmp_path / "run", 3) / "rollouts.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:  # one group has drafts, another one mixed rewards
        line["provenance"] = [int(line["group"] == 2)] * len(line["provenance"])
        line["reward"] = float(line["group"] == 1 and line["sample"] == 1)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    browser.open(write_report(path.parent))
    assert position(browser)[:2] == ["1", "2"], "drafted tokens are shown before none"


def shown_order(browser: Browser, expression: str) -> list[Any]:
    """The expression's value for each of the first samples, in the order shown."""
    step = f"(() => {{ const value = {expression}; next.click(); return value; }})()"
    return [browser.run(step) for _ in range(12)]


@pytest.mark.parametrize("direction", ["down", "up"])
@pytest.mark.parametrize(
    ("order", "expression"),
    [
        ("reward", "Number(document.querySelector('#sample-facts dd').textContent)"),
        ("length", "tokens.children.length"),
        ("drafted", "Number(/\\((\\d+)%\\)/.exec(document.getElementById('sample-facts').textContent)[1])"),
    ],
)
def test_orders(browser, page, order, direction, expression):
    browser.open(page)
    select(browser, "order", f"{order}-{direction}")
    found = shown_order(browser, expression)
    records = read_run(page.parent).rollouts.records
    figures = {"reward": lambda r: r["reward"], "length": lambda r: len(r["ids"]), "drafted": drafted_share}
    values = sorted(figures[order](r) for r in records if r["reward"] is not None or order != "reward")
    expected = (values[::-1] if direction == "down" else values)[:12]
    assert found == ([int(100 * value + 0.5) for value in expected] if order == "drafted" else expected)
    assert browser.complaints == []


def test_filters(browser, page):
    browser.open(page)
    select(browser, "filter", "failed")
    assert browser.run("place.textContent") == "1 of 2"
    assert "reward.timeout_s" in browser.run("document.querySelector('.failure dd').textContent")
    assert browser.run("document.querySelector('#sample-facts dd').textContent") == "–"
    select(browser, "filter", "truncated")
    assert browser.run("place.textContent") == "1 of 24"
    select(browser, "filter", "mixed")
    browser.run("samples.children[0].click()")
    assert browser.run("new Set([...samples.children].map((b) => b.lastChild.textContent)).size") > 1
    select(browser, "filter", "all")
    select(browser, "order", "reward-up")
    browser.run("previous.click(); for (let i = 0; i < 100; i++) next.click()")
    assert browser.run("document.querySelector('#sample-facts dd').textContent") == "–", "without a reward: last"


def test_search_finds_a_rollout(browser, tmp_path):
    path = make_run(tmp_path / "run", 6) / "rollouts.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines[13]["pieces"][3:5] = [" Xylo", "phone <b>"]  # the text spans two tokens
    lines[13]["prompt"] = "Where is the Zebra?"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    browser.open(write_report(path.parent))
    search(browser, "xylophone <B>")
    assert browser.run("place.textContent") == "1 of 1"
    assert position(browser) == ["1", str(lines[13]["group"]), f"#{lines[13]['sample']}"]
    assert browser.run("[...tokens.querySelectorAll('.hit')].map((t) => t.textContent)") == [" Xylo", "phone <b>"]
    browser.keep("search")
    search(browser, "zebra")
    assert (
        browser.run("prompt.querySelector?.('mark').textContent ?? document.querySelector('mark').textContent")
        == "Zebra"
    )
    search(browser, "no such text")
    assert browser.run("place.textContent") == "no such sample"
    assert browser.run("tokens.textContent") == ""
    browser.press("ArrowRight")
    search(browser, "")
    assert browser.run("place.textContent").endswith("of 48")
    search(browser, "zebra")
    browser.run("samples.children[0].click()")  # a sample that the search does not find
    assert browser.run("search.value") == "" and browser.run("place.textContent").endswith("of 48")
    assert browser.complaints == []


def test_running_means_can_be_turned_off(browser, page):
    browser.open(page)
    visible = """[...document.querySelectorAll(".mean, .mean-note")].filter((e) => e.getClientRects().length).length"""
    opacity = "Number(getComputedStyle(document.querySelector('.line.raw')).strokeOpacity)"
    assert browser.run(visible) > 4 and browser.run(opacity) < 0.5
    browser.run("smooth.click()")
    assert browser.run(visible) == 0 and browser.run(opacity) == 1
    assert browser.run("document.querySelectorAll('.line.raw').length") > 4


def test_every_line_is_named(browser, page):
    browser.open(page)
    unnamed = browser.run(
        """[...document.querySelectorAll(".chart")].filter((chart) => {
          const kinds = new Set([...chart.querySelectorAll("svg:not(.key) .line:not(.mean)")].map(
            (line) => [...line.classList].filter((name) => name !== "raw").join(" ")));
          const keys = new Set([...chart.querySelectorAll(".key .line")].map((line) => line.classList.value));
          return [...kinds].some((kind) => !keys.has(kind));
        }).map((chart) => chart.textContent)"""
    )
    assert unnamed == []


def test_an_order_without_samples(browser, tmp_path):
    browser.open(write_report(make_run(tmp_path, 3)))
    select(browser, "filter", "failed")
    assert browser.run("place.textContent") == "no such sample"
    assert browser.run("tokens.textContent") == ""
    browser.press("ArrowRight")
    select(browser, "filter", "all")
    assert browser.run("place.textContent") == "1 of 24"
    assert browser.complaints == []


@pytest.mark.parametrize("width", [400, 1400])
def test_hostile_texts_are_inert(browser, hostile_page, width):
    browser.open(hostile_page, width)
    browser.keep(f"hostile-{width}")
    select(browser, "filter", "failed")  # a hostile failure message
    assert browser.complaints == []
    assert browser.requests == [hostile_page.resolve().as_uri()]
    assert browser.run("window.hacked === undefined")
    assert browser.run("document.querySelectorAll('img, iframe, svg[onload]').length") == 0
    assert browser.run("document.scripts.length") == 2
    assert browser.overflow == 0
    text = json.dumps(escape_controls(HOSTILE))  # control characters are shown as \\x1b and \\u202e
    assert browser.run(f"document.querySelector('h1').textContent === {text}")
    assert browser.run(f"document.getElementById('prompt').textContent === {text}")
    assert browser.run(f"[...tokens.children].some((t) => t.textContent === {text})")
    assert browser.run("!/[\\x1b\\u202e]/.test(document.body.innerText)")
    search(browser, HOSTILE)
    assert browser.run("place.textContent") == "1 of 2"
    assert browser.run(f"document.querySelector('#prompt mark').textContent === {text}")
    assert browser.complaints == [] and browser.run("window.hacked === undefined")


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
    browser.run("while (!previous.disabled) previous.click()")
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
    select(browser, "step", 1)
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
