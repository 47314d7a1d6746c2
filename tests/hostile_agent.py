"""An agent that does what the column `behaviour` of its problem says. Standard library only: it starts fast."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import string
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]


def request(path: str, body: Any = None, url: str = URL, key: str = KEY) -> tuple[int, Any]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", parts.path + path, None if body is None else content, headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text else None


def chat(messages: list[dict[str, Any]], url: str = URL, key: str = KEY) -> tuple[int, Any]:
    return request("/chat/completions", {"model": "any", "messages": messages, "max_tokens": 4}, url, key)


def good(problem: dict[str, Any]) -> float:
    """Two turns. The reward is the share of the letter a."""
    messages = [{"role": "user", "content": problem["prompt"]}]
    text = ""
    for _ in range(2):
        status, answer = chat(messages)
        assert status == 200, answer
        message = answer["choices"][0]["message"]
        text += message["content"]
        messages += [message, {"role": "user", "content": "more"}]
    return text.count("a") / max(1, len(text))


def hang(problem: dict[str, Any]) -> None:
    chat([{"role": "user", "content": "hang"}])
    time.sleep(600)


def crash(problem: dict[str, Any]) -> None:
    chat([{"role": "user", "content": "crash"}])
    os.abort()


def flood(problem: dict[str, Any]) -> None:
    def send() -> None:
        while True:
            request("/models")

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()


def late(problem: dict[str, Any]) -> float:
    """A child in another session calls again after the sample's end, if it lives."""
    program = f"import time; time.sleep(2); open({problem['mark']!r}, 'w').write('alive')"
    subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    return good(problem)


def forge(problem: dict[str, Any]) -> float:
    """Tries to reach other samples. The reward is 1 if that works once."""
    root = URL.removesuffix(f"/{KEY}/v1")
    letters = string.ascii_letters + string.digits + "_-"
    keys = ["", "sk-", KEY[:-1], KEY.swapcase(), *("sk-" + "".join(random.choices(letters, k=32)) for _ in range(20))]
    for key in keys:
        for url, bearer in ((f"{root}/v1", key), (f"{root}/{key}/v1", KEY if key else "none")):
            status, _ = chat([{"role": "user", "content": "forged"}], url, bearer)
            if status == 200:
                return 1.0
    return good(problem) and 0.0


def garbage(problem: dict[str, Any]) -> float:
    parts = urlsplit(URL)
    for content in (b"", b"\x00" * 100, b"POST " * 100_000, b"GET / HTTP/9.9\r\n\r\n", os.urandom(1000)):
        with socket.create_connection((parts.hostname, parts.port), timeout=10) as raw:
            raw.sendall(content)
            raw.settimeout(0.05)
            with suppress(OSError):
                raw.recv(100)
    no_model = json.dumps({"messages": [{}]}).encode()
    for body in (b"", b"\xff", b"[" * 10_000, b'{"model": 1}', no_model, b"x" * (5 << 20)):
        with suppress(OSError, http.client.HTTPException):  # the connection was closed
            assert request("/chat/completions", body)[0] >= 400
    print("\x00\ud7ff not JSON")
    sys.stdout.buffer.write(os.urandom(1000))
    print()
    return good(problem)


def nonsense(problem: dict[str, Any]) -> str:
    good(problem)
    return json.dumps({"reward": "everything"})


def fork_bomb(problem: dict[str, Any]) -> None:
    """A bounded one: every child starts more."""
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
    time.sleep(600)


def main() -> None:
    problem = json.load(sys.stdin)
    result = globals()[problem["behaviour"]](problem)
    if result is not None:
        print(result)


if __name__ == "__main__":
    main()
