"""`paceline watch` without a browser: who may read the page, and that it follows the run."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_run import make_run
from typer.testing import CliRunner

from paceline.cli import app
from paceline.report import watch
from paceline.report.watch import LivePage, WatchServer

Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("watch") / "run", 3)


def serve(folder: Path) -> Iterator[WatchServer]:
    with WatchServer(LivePage(folder)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[WatchServer]:
    yield from serve(folder)


def raw(server: WatchServer, request: bytes) -> Answer:
    """The answer to these bytes. No client library: they would clean up the path."""
    with socket.create_connection(server.server_address, timeout=10) as connection:  # type: ignore[arg-type]
        connection.sendall(request)
        answer = http.client.HTTPResponse(connection, method=request.split(b" ")[0].decode())
        answer.begin()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def ask(
    server: WatchServer, path: str | None = None, method: str = "GET", host: str | None = None, more: str = ""
) -> Answer:
    path = f"/{server.token}/" if path is None else path
    host = f"127.0.0.1:{server.server_port}" if host is None else host
    return raw(server, f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode())


def test_the_page_with_its_headers(server: WatchServer) -> None:
    status, headers, content = ask(server)
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert len(content) == int(headers["content-length"]) and b"chain_sum-grpo" in content
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy and "connect-src 'self'" in policy
    assert (headers["cache-control"], headers["referrer-policy"]) == ("no-store", "no-referrer")
    assert headers["x-content-type-options"] == "nosniff"
    assert "python" not in headers["server"].lower()
    assert ask(server, host=f"localhost:{server.server_port}")[0] == 200
    assert server.server_address[0] == "127.0.0.1"


def test_the_token_is_new_at_every_start(server: WatchServer, folder: Path) -> None:
    with WatchServer(LivePage(folder)) as other:
        assert other.token != server.token and len(other.token) >= 32
        assert ask(server, f"/{other.token}/")[0] == 403


@pytest.mark.parametrize(
    "path",
    ["/", "//", "/x", "/x/", "*", "/favicon.ico", "/run.json", "/?{token}", "/x/{token}/", "/{token}x/",
     "/{short}/", "/{TOKEN}/", "/../{token}/", "http://evil.example/", "/%00/", "/é/", "http://[/", "/{token}%2f.."],
)  # fmt: skip
def test_without_the_token_nothing_is_shown(server: WatchServer, path: str) -> None:
    token = server.token
    status, _, content = ask(server, path.format(token=token, short=token[:-1], TOKEN=token.swapcase()))
    assert status in (400, 403) and b"chain_sum" not in content and token.encode() not in content


@pytest.mark.parametrize(
    "rest",
    ["run.json", "../run.json", "..%2frun.json", "%2e%2e/", "//etc/passwd", "/", "metrics.jsonl", ".", "..", "x/",
     "....//run.json", "\\..\\run.json"],
)  # fmt: skip
def test_there_is_no_other_path(server: WatchServer, rest: str) -> None:
    status, _, content = ask(server, f"/{server.token}/{rest}")
    assert (status, content) == (404, b"404 Not Found\n")


@pytest.mark.parametrize("host", ["", "evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "[::1]:{port}",
                                  "localhost:{port}.evil.example", "0.0.0.0:{port}"])  # fmt: skip
def test_another_host_is_refused(server: WatchServer, host: str) -> None:
    status, _, content = ask(server, host=host.format(port=server.server_port))
    assert status == 403
    assert content == (
        b"Refused (403). Open the address that `paceline watch` printed; if you forward the port, use the same number "
        b"on both sides\n"
    )


def test_no_host_or_two_are_refused(server: WatchServer) -> None:
    line = f"GET /{server.token}/ HTTP/1.1\r\n".encode()
    host = f"Host: 127.0.0.1:{server.server_port}\r\n".encode()
    assert raw(server, line + b"\r\n")[0] == 403
    assert raw(server, line + host + b"Host: evil.example\r\n\r\n")[0] == 403
    assert raw(server, line + host + b"\r\n")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_other_methods_are_refused(server: WatchServer, method: str) -> None:
    status, headers, content = ask(server, method=method)
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert b"chain_sum" not in content


def test_head_has_no_content(server: WatchServer) -> None:
    status, headers, content = ask(server, method="HEAD")
    assert (status, content) == (200, b"")
    assert int(headers["content-length"]) > 1000
    assert ask(server, "/", method="HEAD")[0] == 403
    request = f"HEAD /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n"
    with socket.create_connection(server.server_address, timeout=10) as connection:  # type: ignore[arg-type]
        connection.sendall(request.encode())
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert received.startswith(b"HTTP/1.0 200") and received.endswith(b"\r\n\r\n") and len(received) < 2000


@pytest.mark.parametrize("request_line", ["\r\n\r\n", "GET\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", f"GET /{'x' * 70_000}"])
def test_malformed_requests_do_not_stop_it(server: WatchServer, request_line: str) -> None:
    with socket.create_connection(server.server_address, timeout=10) as connection:  # type: ignore[arg-type]
        connection.sendall(request_line.encode())
        connection.shutdown(socket.SHUT_WR)
        assert b"chain_sum" not in connection.recv(1 << 16)
    assert ask(server)[0] == 200


# ---- a run that changes ----


@pytest.fixture
def changing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, WatchServer]]:
    monkeypatch.setattr(watch, "MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(watch, "MAX_SHARE", 1e9)
    folder = make_run(tmp_path / "run", 3)
    (folder / "summary.json").unlink()
    for server in serve(folder):
        yield folder, server


def test_an_unchanged_page_is_not_sent_again(changing: tuple[Path, WatchServer]) -> None:
    folder, server = changing
    tag = ask(server)[1]["etag"]
    assert ask(server, more=f"If-None-Match: {tag}\r\n")[::2] == (304, b"")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 77, "reward_mean": 0.25}\n')
    status, headers, content = ask(server, more=f"If-None-Match: {tag}\r\n")
    assert status == 200 and headers["etag"] != tag and b'<td class="text">77</td>' in content


def test_a_line_that_is_being_written_is_no_damage(changing: tuple[Path, WatchServer]) -> None:
    folder, server = changing
    for name in ("metrics.jsonl", "rollouts.jsonl", "trace.jsonl"):
        path = folder / name
        path.write_bytes(path.read_bytes() + b'{"step": 77, "reward_mean": 0.')
    content = ask(server)[2]
    assert b"cut off or damaged" not in content and b">77<" not in content
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("5}\n")
    assert b">77<" in ask(server)[2]
    (folder / "metrics.jsonl").write_bytes(b'{"step"\n' + (folder / "metrics.jsonl").read_bytes())
    assert b"cut off or damaged" in ask(server)[2], "a damaged line in the middle is still reported"


def test_a_file_that_is_still_to_be_written_is_not_missing(changing: tuple[Path, WatchServer]) -> None:
    folder, server = changing
    for name in ("metrics.jsonl", "rollouts.jsonl", "trace.jsonl"):
        (folder / name).unlink()
    content = ask(server)[2]
    assert b"The run has not finished." in content and b"is missing" not in content
    (folder / "run.json").unlink()
    (folder / "metrics.jsonl").touch()
    assert b"run.json is missing" in ask(server)[2]


def test_the_last_page_stays_if_the_run_is_removed(changing: tuple[Path, WatchServer]) -> None:
    folder, server = changing
    before = ask(server)[2]
    folder.rename(folder.with_name("gone"))
    assert ask(server)[2] == before


def test_a_run_is_read_at_most_for_a_share_of_the_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    num_renders = 0

    def render(*_: object, **__: object) -> str:
        nonlocal num_renders
        num_renders += 1
        now[0] += 3.0  # the run is large
        return f"page {num_renders}"

    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch, "render_page", render)
    page = LivePage(folder)
    for _ in range(70):
        os.utime(folder / "metrics.jsonl")
        page.current()
        now[0] += 1.0
    assert num_renders == 1 + 2, "3 s of reading, then 30 s without"


def test_a_failed_reading_is_repeated_after_the_interval(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, error = [100.0], [False]
    num_renders = 0

    def render(*_: object, **__: object) -> str:
        nonlocal num_renders
        num_renders += 1
        if error[0]:
            raise OSError("too many open files")
        return f"page {num_renders}"

    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch, "render_page", render)
    page = LivePage(folder)
    os.utime(folder / "metrics.jsonl", ns=(1, 1))
    now[0], error[0] = 110.0, True
    for _ in range(5):
        assert page.current()[1] == b"page 1"
    assert num_renders == 2, "not again within the interval"
    now[0], error[0] = 120.0, False
    assert page.current()[1] == b"page 3", "although no file has changed since the failed reading"


def test_watching_writes_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 2)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    for server in serve(folder):
        assert ask(server)[0] == 200
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


# ---- the command ----


def test_errors_of_the_command(folder: Path, tmp_path: Path) -> None:
    def error(*arguments: object) -> str:
        result = CliRunner().invoke(app, ["watch", *map(str, arguments)])
        assert result.exit_code == 2
        return " ".join(result.stderr.split())

    assert "is not the folder of a run" in error(tmp_path)
    assert "is not a folder" in error(tmp_path / "nowhere")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port} is in use: give another port" in error(folder, "--port", port)
    assert "65535" in error(folder, "--port", 70000)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_ends_it_cleanly(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "watch", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    port, token = int(url.split(":")[2].split("/")[0]), url.split("/")[3]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", f"/{token}/")
    assert connection.getresponse().status == 200
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "")
    assert err.splitlines()[-1] == "stopped" and "Traceback" not in err
