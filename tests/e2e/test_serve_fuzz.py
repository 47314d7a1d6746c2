"""Malformed bodies, headers and paths: an error for the client, never status 500, a crash or a hang."""

from __future__ import annotations

import json
import random
import re
import socket
import string
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Served, serving
from tiny_run import write_model

ROUTES = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
VALID: dict[str, dict[str, Any]] = {
    ROUTES[0]: {"model": "tiny", "prompt": "abc", "max_tokens": 2, "n": 1, "stop": ["x"], "logit_bias": {"5": 1.0}},
    ROUTES[1]: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": True},
    ROUTES[2]: {"model": "tiny", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2, "seed": 4}},
}
STRUCTURED: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "a|b"}}, {"structured_outputs": {"json": {"type": "object"}}},
    {"structured_outputs": {"grammar": "start: /a*/"}}, {"structured_outputs": {"choice": ["a", "b"]}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1, "x"]}}}},
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e308, "", "x", "\x00", "\ud800", "日本😀",
    "{{7*7}}", "{% for x in range(10**9) %}x{% endfor %}", "../../etc/passwd", "x" * 5000, [], {}, [[]], [None],
    [[1, "a"]], {"a": {"b": []}}, [1] * 300, ["x"] * 200, {"role": "user"}, {"type": "text"}, "258", [258],
    [10**9], [-5],
]  # fmt: skip
KEYS = [
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "logprobs", "top_logprobs", "stream", "stream_options", "logit_bias", "bad_words",
    "allowed_token_ids", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos",
    "token_ids", "sampling_params", "echo", "tools", "user", "nonsense", "__class__", "return_token_ids", "request_id",
    "response_format", "structured_outputs", "tool_choice", "json", "regex", "choice", "grammar", "json_object",
]  # fmt: skip


def mutate(value: Any, dice: random.Random) -> Any:
    """Replace, add or remove something somewhere."""
    if isinstance(value, dict) and value and dice.random() < 0.6:
        changed = dict(value)
        key = dice.choice(list(changed))
        changed[key] = mutate(changed[key], dice)
        return changed
    if isinstance(value, list) and value and dice.random() < 0.5:
        changed_list = list(value)
        changed_list[dice.randrange(len(value))] = mutate(dice.choice(value), dice)
        return changed_list
    if isinstance(value, dict) and dice.random() < 0.7:
        changed = dict(value)
        changed[dice.choice(KEYS)] = dice.choice(VALUES)
        if changed and dice.random() < 0.3:
            changed.pop(dice.choice(list(changed)))
        return changed
    return dice.choice(VALUES)


def body(route: str, dice: random.Random) -> bytes:
    value: Any = VALID[route]
    if dice.random() < 0.2:
        value = {**value, **dice.choice(STRUCTURED)}
    for _ in range(dice.randrange(4)):
        value = mutate(value, dice)
    content = json.dumps(value).encode()
    kind = dice.randrange(12)
    if kind == 0:
        content = content[: dice.randrange(len(content) + 1)]
    elif kind == 1:
        at = dice.randrange(len(content) + 1)
        content = content[:at] + dice.randbytes(dice.randrange(1, 9)) + content[at:]
    elif kind == 2:
        content = dice.choice([b"[", b'{"a":', b"\xff\xfe", b"NaN", b"1e999", b"\x00"]) * dice.choice([1, 10, 5000])
    elif kind == 3:
        content = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
    return content


def message(dice: random.Random) -> tuple[bytes, bool]:
    """A request, and whether the server may wait for more of it."""
    route = dice.choice(ROUTES)
    content = body(route, dice)
    path, method, version = route, "POST", "HTTP/1.1"
    headers = [("Host", "127.0.0.1"), ("Content-Type", "application/json"), ("Content-Length", str(len(content)))]
    kind = dice.randrange(16)
    printable = string.printable
    if kind == 0:
        path = dice.choice(
            ["/", "//", "/v1/../v1/models", "/%00", "/v1/models?" + "a" * 9000, "*", "\x7f", "/metrics%0a"]
        )
    elif kind == 1:
        method = dice.choice(["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "X" * 300, "", "TRACE", "CONNECT"])
    elif kind == 2:
        headers[dice.randrange(3)] = ("".join(dice.choices(printable, k=6)), "".join(dice.choices(printable, k=12)))
    elif kind == 3:
        headers[2] = ("Content-Length", dice.choice(["-1", "x", "99999999999999999999", "0", "5", "1e3", "٣"]))
    elif kind == 4:
        headers[0] = ("Host", dice.choice(["", "evil.com", "127.0.0.1:x", "[::1", "a" * 5000, "127.0.0.1,evil.com"]))
    elif kind == 5:
        headers += [("X-Long", "y" * dice.choice([100, 70_000]))] * dice.randrange(1, 4)
    elif kind == 6:
        headers[2] = ("Transfer-Encoding", dice.choice(["chunked", "gzip", "chunked, chunked", "identity"]))
    elif kind == 7:
        headers[1] = ("Content-Type", dice.choice(["", "text/plain", "application/json; charset=utf-16", "*/*"]))
    elif kind == 8:
        version = dice.choice(["HTTP/1.0", "HTTP/2", "HTTP/9.9", "", "FTP/1"])
    elif kind == 9:
        headers += [("Host", "127.0.0.1"), ("Content-Length", "3"), ("Expect", "100-continue")]
    lines = [f"{method} {path} {version}", *(f"{name}: {value}" for name, value in headers), "Connection: close"]
    return "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n" + content, kind in (2, 3, 6)


def status_of(served: Served, content: bytes, is_open: bool) -> int | None:
    """The status of the response; None if the server closed the connection without one. TimeoutError: it hangs."""
    host, port = served.root.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        try:
            connection.sendall(content)
            if is_open:
                connection.settimeout(0.3)
                with suppress(TimeoutError):
                    while part := connection.recv(65536):
                        received += part
                    return last_status(received)
                connection.settimeout(60)
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                received += part
        except (ConnectionError, BrokenPipeError):
            pass
    return last_status(received)


def last_status(received: bytes) -> int | None:
    """After `100 Continue` there is a second status line."""
    found = re.findall(rb"^HTTP/1\.1 (\d{3})", received, re.MULTILINE)
    return int(found[-1]) if found else None


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("fuzz") / "model"
    write_model(folder)
    with serving(folder, "--served-model-name", "tiny", "--max-body-mb", "1", "--max-tokens", "20") as served:
        yield served


@pytest.mark.parametrize("num", [1000, pytest.param(20_000, marks=pytest.mark.soak)])
def test_no_malformed_request_is_a_server_error(served: Served, num: int) -> None:
    question = {"model": "tiny", "prompt": "abc", "seed": 1, "max_tokens": 16}
    before = httpx.post(f"{served.url}/completions", json=question, timeout=60).json()["choices"]
    statuses = Counter[int | None]()
    dice = random.Random(num)
    for _ in range(num):
        content, is_open = message(dice)
        status = status_of(served, content, is_open)
        statuses[status] += 1
        assert status is None or status < 500, content[:2000]
    assert served.process.poll() is None
    assert statuses[200] > num / 20 and statuses[400] > num / 3, statuses
    assert {403, 404, 405, 415} <= statuses.keys(), statuses
    assert httpx.post(f"{served.url}/completions", json=question, timeout=60).json()["choices"] == before
    figures = httpx.get(f"{served.root}/metrics").text.splitlines()
    for name in ("requests_in_progress", "num_requests_running", "num_requests_waiting"):
        assert f"paceline_{name} 0.0" in figures
