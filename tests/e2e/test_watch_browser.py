"""`paceline watch` in a real browser: the page follows a run that is being written, and keeps what the reader chose."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser
from fake_run import make_run

from paceline.report import watch
from paceline.report.watch import REFUSED, LivePage, WatchServer

STATUS = "document.getElementById('live').textContent"
FILES = ("metrics.jsonl", "rollouts.jsonl", "trace.jsonl")
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2>\u2028\x1b[31m\u202e<!--"


class GrowingRun:
    """A run that is written step by step, and the server that watches it."""

    def __init__(self, folder: Path, num_steps: int = 14, hostile: str | None = None) -> None:
        self.folder = make_run(folder, num_steps, hostile=hostile)
        (folder / "summary.json").unlink()
        self._lines = {name: (folder / name).open(encoding="utf-8", newline="\n").readlines() for name in FILES}
        self.write(0)

    def write(self, num_steps: int, cut: int = 0) -> None:
        """The first steps; of the next one, `cut` characters of its line in each file."""
        for name, lines in self._lines.items():
            step = "rl_step" if name == "trace.jsonl" else "step"
            done = [line for line in lines if json.loads(line)[step] < num_steps]
            rest = "".join(lines[len(done) :])[:cut]
            (self.folder / name).write_text("".join(done) + rest, encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path) -> GrowingRun:
    return GrowingRun(tmp_path / "run")


@pytest.fixture
def server(run: GrowingRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchServer]:
    monkeypatch.setattr(watch, "MIN_INTERVAL_S", 0.0)
    yield from serve(run)


def serve(run: GrowingRun) -> Iterator[WatchServer]:
    with WatchServer(LivePage(run.folder)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def open_page(browser: Browser, server: WatchServer, width: int = 1400, scheme: str = "light") -> None:
    browser.open("about:blank")  # ends the polling of another test's page, whose server is gone
    browser.open(server.url, width, scheme=scheme)
    browser.wait_for("document.getElementById('live').textContent.startsWith('live')")


def steps_shown(browser: Browser) -> int:
    return browser.run("document.querySelectorAll('#steps tbody tr').length")


def follow(browser: Browser, num_steps: int) -> None:
    browser.wait_for(f"document.querySelectorAll('#steps tbody tr').length === {num_steps}")


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (1400, "dark"), (400, "light"), (400, "dark")])
def test_it_opens_fits_and_follows_the_run(
    browser: Browser, run: GrowingRun, server: WatchServer, width: int, scheme: str
) -> None:
    run.write(4)
    open_page(browser, server, width, scheme)
    assert steps_shown(browser) == 4
    run.write(12, cut=40)
    follow(browser, 12)
    browser.keep(f"watch-{scheme}-{width}")
    assert browser.run("document.querySelectorAll('.chart').length") > 8
    assert "cut off" not in browser.run("document.body.textContent")
    assert browser.overflow == 0
    assert browser.complaints == []
    assert all(request.startswith(server.url) for request in browser.requests)


def test_the_first_step_appears(browser: Browser, run: GrowingRun, server: WatchServer) -> None:
    """The page is opened before there is a step or a rollout."""
    open_page(browser, server)
    assert browser.run("document.querySelector('#empty').textContent") == "No step has finished yet."
    run.write(1)
    follow(browser, 1)
    assert browser.run("document.querySelector('#empty')") is None
    browser.wait_for("document.querySelectorAll('#tokens .t').length > 5")
    assert browser.run("place.textContent").endswith("of 8")
    run.write(11)
    follow(browser, 11)
    names = browser.run("[...document.querySelectorAll('main > section')].map((s) => s.id)")
    links = browser.run("[...document.querySelectorAll('nav a')].map((a) => a.hash.slice(1))")
    assert names == links, "sections are in order"
    assert browser.run("Boolean(document.getElementById('smooth'))")
    assert browser.complaints == []


@pytest.mark.parametrize("anchoring", ["auto", "none"])  # Chromium keeps the position too, Safari does not
def test_the_reader_loses_nothing_by_an_update(
    browser: Browser, run: GrowingRun, server: WatchServer, anchoring: str
) -> None:
    run.write(5)
    open_page(browser, server)
    browser.run(f"document.documentElement.style.overflowAnchor = '{anchoring}'")
    browser.run("""
      document.querySelector('#steps details').open = true;
      step.value = '2'; step.dispatchEvent(new Event('change'));
      next.click();
      search.value = 'the'; search.dispatchEvent(new Event('input'));
      filter.focus();
    """)
    chosen = (
        "[step.value, group.value, samples.querySelector('[aria-pressed=true] small').textContent, tokens.textContent]"
    )
    before = browser.run(chosen)
    assert before[0] == "2"
    browser.scroll_to("document.getElementById('tokens')")
    top = "document.getElementById('tokens').getBoundingClientRect().top"
    y = browser.run(top)
    height = browser.run("document.documentElement.scrollHeight")
    run.write(13)
    follow(browser, 13)
    assert browser.run("document.documentElement.scrollHeight") != height, "nothing above or below has changed"
    assert abs(browser.run(top) - y) <= 1
    assert browser.run(chosen) == before
    assert browser.run("search.value") == "the"
    assert browser.run("document.activeElement.id") == "filter"
    assert browser.run("document.querySelector('#steps details').open")
    assert browser.run("place.textContent").endswith("of 104"), "the new rollouts can be reached"
    assert browser.complaints == []


def test_the_smoothing_switch_stays(browser: Browser, run: GrowingRun, server: WatchServer) -> None:
    run.write(12)
    open_page(browser, server)
    browser.run("smooth.click()")
    run.write(13)
    follow(browser, 13)
    assert browser.run("smooth.checked") is False
    assert browser.run("[...document.querySelectorAll('.mean')].every((line) => !line.getClientRects().length)")


def test_it_says_when_the_server_stops(browser: Browser, run: GrowingRun) -> None:
    run.write(2)
    for server in serve(run):
        open_page(browser, server)
    browser.wait_for(f"{STATUS}.startsWith('paceline watch does not answer since ')")
    assert steps_shown(browser) == 2, "the page stays"


def test_it_says_why_the_server_refuses(browser: Browser, run: GrowingRun, server: WatchServer) -> None:
    run.write(2)
    open_page(browser, server)
    server.hosts = {"localhost:1"}  # as if the port was forwarded to another number
    browser.wait_for(f"{STATUS} === {json.dumps(REFUSED)}")


def test_an_error_in_an_update_is_no_stopped_server(browser: Browser, run: GrowingRun, server: WatchServer) -> None:
    run.write(2)
    open_page(browser, server)
    browser.run("DOMParser.prototype.parseFromString = () => { window.calls = (window.calls ?? 0) + 1; throw 'x'; }")
    run.write(3)
    browser.wait_for("window.calls > 1")
    assert browser.run("document.getElementById('live').className") == "live", browser.run(STATUS)


def test_hostile_texts_of_an_update_are_inert(browser: Browser, tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "run", 10, hostile=HOSTILE)
    run.write(2)
    for server in serve(run):
        open_page(browser, server, 400)
        run.write(9)
        follow(browser, 9)
        assert browser.complaints == []
        assert browser.run("window.hacked === undefined")
        assert browser.run("document.querySelectorAll('img').length") == 0
        assert browser.overflow == 0
        assert all(request.startswith(server.url) for request in browser.requests)
