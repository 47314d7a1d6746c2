"""A headless browser, controlled through its debugging pipe (DevTools protocol) without a driver or a library."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def require_browser() -> str:
    """The browser's path. Without one, skips the test, or fails it if CI is set: there nothing may be left out."""
    if (path := find_browser()) is not None:
        return path
    message = f"no {', '.join(NAMES)} on PATH; `make setup-browser` installs one"
    if os.environ.get("CI", "") not in ("", "0", "false"):
        pytest.fail(message)
    pytest.skip(message)


class Browser:
    """One page. `complaints` has its console messages, errors and policy violations; `requests` the URLs it loads."""

    def __init__(self, executable: str, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The protocol uses file descriptors 3 and 4; a shell redirects to these numbers.
        shell = f'exec "$@" 3</dev/fd/{to_browser} 4>/dev/fd/{from_browser}'
        self._process = subprocess.Popen(
            ["sh", "-c", shell, "sh", executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._ids = itertools.count(1)
        self._session: str | None = None
        self._loaded = False
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self, timeout_s: float = 60.0) -> dict[str, Any]:
        end = time.monotonic() + timeout_s
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(self._read, 1 << 20) if ready else b""
            if not chunk:
                raise RuntimeError(f"no message from the browser within {timeout_s} s, or it has exited")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded":
                self.complaints.append(json.dumps(params)[:600])
            case "Page.javascriptDialogOpening":
                self.complaints.append(f"dialog: {params['message']}")
        return message

    def open(self, page: Path | str, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        self.complaints.clear()
        self.requests.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._loaded = False
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not self._loaded:
            self._next()

    def wait_for(self, expression: str, timeout_s: float = 20.0) -> None:
        """Waits until a JavaScript expression is true."""
        end = time.monotonic() + timeout_s
        while not self.run(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, if JSON can represent it."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, shift: bool = False) -> None:
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 if shift else 0, **text)

    def scroll_to(self, element: str) -> None:
        """Scrolls the element (an expression) to the middle and waits until it is there."""
        two_frames = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        self.run(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        self.call("Runtime.evaluate", expression=two_frames, awaitPromise=True)

    def move_to(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    @property
    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return self.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def keep(self, name: str) -> None:
        """Writes a screenshot if PACELINE_SCREENSHOTS names a folder."""
        if folder := os.environ.get("PACELINE_SCREENSHOTS"):
            self.screenshot(Path(folder) / f"{name}.png")

    def screenshot(self, path: Path) -> None:
        """The whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(picture))

    def close(self) -> None:
        try:
            self._session = None
            self.call("Browser.close")
            self._process.wait(timeout=10)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            os.close(self._read)
            os.close(self._write)
