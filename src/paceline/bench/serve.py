"""Runs the worker of one engine: `python serve.py WORKER.py`. Requests and replies are JSON lines on stdin and stdout.

WORKER.py defines a class Worker with `load(**settings) -> dict` and `run(**round) -> dict`. This file uses the standard
library only and is run by its path, because vLLM's interpreter may not have paceline. An idle worker blocks on a read;
when the parent exits, the read ends and the worker exits too.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback


def main() -> None:
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this folder, so that its modules do not shadow others
    # Replies use a copy of stdout. Whatever libraries print to stdout goes to stderr, which is the log.
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
                # The message of a ValueError is written for users; others need their type.
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                reply = {"error": f"{kind}{error}"}
            replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
