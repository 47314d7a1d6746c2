"""Runs one engine's worker: `python serve.py WORKER.py`, JSON lines in on stdin, JSON lines out on stdout.

WORKER.py defines a class Worker with `load(**settings) -> dict` and `run(**round) -> dict`. Standard library only, and
run by path: vLLM's interpreter need not know paceline. An idle worker blocks on a read and costs nothing; when the
parent goes away, the read ends and so does the worker.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback


def main() -> None:
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this folder; its module names are nobody else's business
    # Libraries print; what they print goes to the log with stderr, and the replies have stdout for themselves.
    with os.fdopen(os.dup(1), "w", buffering=1) as replies:
        os.dup2(2, 1)
        worker = runpy.run_path(sys.argv[1], run_name="worker")["Worker"]()
        for line in sys.stdin:
            message = json.loads(line)
            command = message.pop("cmd")
            try:
                reply = getattr(worker, command)(**message)
            except Exception as error:
                traceback.print_exc()
                kind = (
                    "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                )  # ValueErrors speak to users
                reply = {"error": f"{kind}{error}"}
            replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
