"""A Hugging Face hub on the loopback address, with one dataset: openai/gsm8k with made-up problems. Set HF_ENDPOINT to
`url` and HF_HOME to an empty folder in the environment of a new process."""

from __future__ import annotations

import hashlib
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DATASET = "datasets/openai/gsm8k"
COMMIT = "a" * 40
CARD = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n---\n"


def files(num_problems: int) -> dict[str, bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}
        for n in range(num_problems)
    ]
    table = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), table)
    return {"README.md": CARD.encode(), "main/train-00000-of-00001.parquet": table.getvalue()}


class Handler(BaseHTTPRequestHandler):
    files: dict[str, bytes]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path.startswith(f"{DATASET}/resolve/"):
            self._send_file(path.removeprefix(f"{DATASET}/resolve/").partition("/")[2])
        elif path.startswith(f"api/{DATASET}/tree/"):
            self._send_json(self._listing(path.removeprefix(f"api/{DATASET}/tree/").partition("/")[2]))
        elif path.startswith(f"api/{DATASET}"):
            siblings = [{"rfilename": name} for name in self.files]
            self._send_json({"id": "openai/gsm8k", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _listing(self, folder: str) -> list[dict[str, Any]]:
        prefix = f"{folder}/" if folder else ""
        inside = [name.removeprefix(prefix) for name in self.files if name.startswith(prefix)]
        folders = dict.fromkeys(name.partition("/")[0] for name in inside if "/" in name)
        found: list[dict[str, Any]] = [{"type": "directory", "path": prefix + f, "oid": "0" * 40} for f in folders]
        return found + [
            {"type": "file", "path": prefix + f, "size": len(self.files[prefix + f]), "oid": self._tag(prefix + f)}
            for f in inside
            if "/" not in f
        ]

    def _tag(self, name: str) -> str:
        return hashlib.sha1(self.files[name]).hexdigest()

    def _send_file(self, name: str) -> None:
        if name not in self.files:
            self.send_error(404)
            return
        self._send(self.files[name], {"ETag": f'"{self._tag(name)}"', "X-Repo-Commit": COMMIT})

    def _send_json(self, content: Any) -> None:
        self._send(json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def fake_hub(num_problems: int) -> Iterator[str]:
    """Yields its URL."""
    handler = type("HubHandler", (Handler,), {"files": files(num_problems)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
