"""An agent that is a process: any program in any language with an OpenAI client.

It gets the problem as JSON on standard input, and OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in a small
environment without the trainer's secrets. The last line of its standard output may be the reward. Invariant: when `run`
ends, however it ends, the process and everything that it started are killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.agents.endpoint import Client, Endpoint
from paceline.agents.result import last_line, outcome_of
from paceline.agents.supervisor import NOT_STARTED, SPEC
from paceline.tasks.agent import AgentFailed, Outcome, Policy

SUPERVISOR = Path(__file__).with_name("supervisor.py")
KEPT_BYTES = 64 << 10  # the end of what an agent writes
MAX_BYTES = 64 << 20  # an agent that writes more is ended
CHECK_S = 1.0  # how often an agent that writes nothing is checked
KILL_S = 5.0  # for the supervisor to end everything
# What a program needs to find itself, its libraries and its user; no tokens, keys or passwords.
PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ",
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "NODE_PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip


class ProcessAgent:
    """`problem`: the columns of its row, and the prompt. `env`: more variables, from the settings."""

    def __init__(
        self,
        endpoint: Endpoint,
        command: Sequence[str],
        env: Mapping[str, str],
        problem: Mapping[str, Any],
        *,
        template_kwargs: Mapping[str, Any] = {},
    ) -> None:
        self._endpoint, self._command, self._env, self._problem = endpoint, command, env, problem
        self._template_kwargs = template_kwargs

    async def run(self, policy: Policy) -> Outcome:
        with self._endpoint.session(policy, self._template_kwargs) as session:
            process = await self._start(session.client)
            talking = asyncio.ensure_future(self._talk(process))
            try:
                await asyncio.wait((talking, session.failed), return_when=asyncio.FIRST_COMPLETED)
                if session.failed.done():
                    session.failed.result()
                output, errors = talking.result()
            finally:
                talking.cancel()
                await _end(process)
            if process.returncode and session.backend.was_refused:
                return outcome_of(None, session)
            if process.returncode:
                last_words = session.client.hidden(_last_words(errors))
                raise AgentFailed(f"its agent {_exit_of(process.returncode)}{last_words}")
            return outcome_of(last_line(output), session)

    async def _start(self, client: Client) -> asyncio.subprocess.Process:
        spec = {"command": list(self._command), "env": self._environment(client), "parent": os.getpid()}
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(SUPERVISOR)),
            # Not in its arguments, which every user of the machine can read: the spec has keys.
            env={SPEC: json.dumps(spec)}, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True,
        )  # fmt: skip

    def _environment(self, client: Client) -> dict[str, str]:
        kept = {name: os.environ[name] for name in PASSED if name in os.environ} | {"PATH": search_path()}
        own = {"OPENAI_BASE_URL": client.base_url, "OPENAI_API_KEY": client.api_key, "OPENAI_MODEL": client.model}
        return {**kept, "NO_PROXY": "127.0.0.1,localhost", **self._env, **own}

    async def _talk(self, process: asyncio.subprocess.Process) -> tuple[str, str]:
        """Send the problem and read everything until the end; the ends of its output and its errors."""
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        writing: asyncio.Task[Any] = asyncio.create_task(
            _write(process.stdin, json.dumps(self._problem, default=str).encode())
        )
        reading: list[asyncio.Task[str]] = [
            asyncio.create_task(_read_end(stream)) for stream in (process.stdout, process.stderr)
        ]
        try:
            while left := [task for task in reading if not task.done()]:
                has_ended = process.returncode is not None
                await asyncio.wait(left, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in reading:
                    if task.done():
                        task.result()
                if has_ended and not all(task.done() for task in reading):  # the supervisor was killed
                    break
            await process.wait()
            output, errors = (task.result() if task.done() else "" for task in reading)
            return output, errors
        finally:
            for task in (writing, *reading):
                task.cancel()


async def _write(stream: asyncio.StreamWriter, content: bytes) -> None:
    with suppress(OSError):  # it does not read
        stream.write(content + b"\n")
        await stream.drain()
        stream.close()


async def _read_end(stream: asyncio.StreamReader) -> str:
    kept, total = bytearray(), 0
    while part := await stream.read(1 << 16):
        total += len(part)
        if total > MAX_BYTES:
            raise AgentFailed(f"its agent wrote more than {MAX_BYTES >> 20} MB")
        kept += part
        del kept[:-KEPT_BYTES]
    return kept.decode("utf-8", errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """End what is left, also if this task is cancelled once more."""
    try:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()  # the supervisor kills everything
            with suppress(TimeoutError):
                async with asyncio.timeout(KILL_S):
                    await process.wait()
    finally:
        if process.returncode is None or process.returncode < 0:  # it hangs, or was killed
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def _exit_of(code: int) -> str:
    if code == NOT_STARTED:
        return "could not be started"
    if code < 0:
        return f"was ended with its supervisor by signal {-code}"
    is_signal = 128 < code < 128 + signal.NSIG
    return f"was ended by signal {code - 128}" if is_signal else f"ended with exit code {code}"


def _last_words(errors: str) -> str:
    line = next((each.strip() for each in reversed(errors.splitlines()) if each.strip()), "")
    return f": {line[-300:]}" if line else ""


def search_path() -> str:
    """Where programs are looked for: `python` is the trainer's, also if its environment is not activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def check_command(command: Sequence[str]) -> None:
    """Raise ValueError if the program, or a script that an interpreter gets, does not exist."""
    if not command or not command[0]:
        raise ValueError('task.command = []: write the program and its arguments, such as ["python", "agent.py"]')
    if shutil.which(command[0], path=search_path()) is None:
        raise ValueError(f"task.command = {list(command)!r}: there is no program {command[0]!r}; install it")
    script = next((each for each in command[1:] if not each.startswith("-")), None)
    is_script = script is not None and script.endswith((".py", ".js", ".mjs", ".ts", ".sh", ".rb"))
    if script is not None and is_script and not Path(script).is_file():
        raise ValueError(f"task.command = {list(command)!r}: {Path(script).absolute()} does not exist")
