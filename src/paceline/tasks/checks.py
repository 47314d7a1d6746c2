"""What runs in the workers: each function here loads what it needs and returns the check of one completion.

A check is `check(completion, columns) -> float`; a user's function sees whole batches. Imported by workers, so nothing
heavy at the top. Whatever a check raises, and however it dies, costs the one sample it was about.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import logging
import math
import re
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.tasks import remote
from paceline.tasks.sandbox import Kind, Limits, Program, forbid_inspection, run_program

Check = Callable[[str, dict[str, Any]], float]
MEMORY_BYTES = 8 << 30  # address space of a worker while a symbolic check runs: 9**9**9**9 must not take the machine
FENCED = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def extract(completion: str, pattern: str | None) -> str | None:
    """The answer in a completion: the pattern's last match, group 1 if it has one; None: no match."""
    if pattern is None:
        return completion.strip()
    matches = list(re.finditer(pattern, completion))
    if not matches:
        return None
    last = matches[-1]
    return (last.group(1 if last.re.groups else 0) or "").strip()


def column(columns: dict[str, Any], name: str) -> Any:
    if columns.get(name) is None:
        raise ValueError(f"the problem has no column {name!r}")
    return columns[name]


def exact(pattern: str | None) -> Check:
    """1 if the answer reads the same, but for case, white space and commas between thousands."""

    def check(completion: str, columns: dict[str, Any]) -> float:
        wanted = column(columns, "answer")
        answer = extract(completion, pattern)
        return float(answer is not None and _plain(answer) == _plain(str(wanted)))

    return check


def _plain(text: str) -> str:
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return " ".join(text.casefold().split())


def shape(pattern: str) -> Check:
    """1 if the whole completion matches."""
    return lambda completion, columns: float(re.fullmatch(pattern, completion) is not None)


def symbolic(pattern: str | None) -> Check:
    """1 if math-verify finds the answer equal. Its own timeouts work by signals; here the pool's apply instead."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that it has no timeout
    verify(parse("$1$", parsing_timeout=None), parse("1", parsing_timeout=None), timeout_seconds=None)  # loads the rest

    def check(completion: str, columns: dict[str, Any]) -> float:
        wanted = str(column(columns, "answer"))
        answer = extract(completion, pattern)
        if answer is None:
            return 0.0
        with memory_limit():
            gold = parse(wanted, parsing_timeout=None) or parse(f"${wanted}$", parsing_timeout=None)
            if not gold:
                raise ValueError(f"the answer {wanted[:80]!r} is no mathematical expression")
            return float(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))

    return check


def gym(dataset: str, params: dict[str, Any], pattern: str | None) -> Check:
    """reasoning-gym's own scorer."""
    import reasoning_gym  # noqa: F401  loaded here, where patience is longer

    from paceline.tasks.gym import score

    def check(completion: str, columns: dict[str, Any]) -> float:
        answer = extract(completion, pattern)
        if answer is None:
            return 0.0
        with memory_limit():
            return float(score(dataset, params, answer, column(columns, "entry")))

    return check


@contextlib.contextmanager
def memory_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def program(cpu_s: int, memory_mb: int, timeout_s: float, kind: Kind) -> Check:
    """1 if the completion's program passes all of the column `tests`, else 0: all or nothing, as a program that is
    right on most inputs is wrong. `tests` is a list of asserts, one text of test code, or a list of
    {"input": …, "output": …}, compared line by line but for white space at the ends. All tests share `timeout_s`.

    Test code runs in another process than the program (`remote`), and outputs are compared here: what would be right is
    never in the program's reach."""
    if kind == "process":
        forbid_inspection()  # programs run as the same user, and this process learns how they ended

    def check(completion: str, columns: dict[str, Any]) -> float:
        tests = column(columns, "tests")
        tests = [tests] if isinstance(tests, str) else list(tests)
        blocks = FENCED.findall(completion)
        source = blocks[-1] if blocks else completion
        end_s = time.monotonic() + timeout_s

        def limits() -> Limits:
            return Limits(cpu_s=cpu_s, memory_mb=memory_mb, wall_s=max(0.0, end_s - time.monotonic()))

        def printed(stdin: str) -> str | None:
            """What the program printed, or None if it failed."""
            outcome = run_program(source, stdin, limits(), kind)
            return outcome.stdout if outcome.ok else None

        if tests and all(isinstance(test, str) for test in tests):
            return float(_passes(source, tests, limits(), kind))
        if tests and all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests):
            return float(all(_same(printed(str(test["input"])), str(test["output"])) for test in tests))
        raise ValueError('column \'tests\' must hold asserts, test code, or {"input", "output"} pairs')

    return check


def _passes(solution: str, tests: list[str], limits: Limits, kind: Kind) -> bool:
    """Whether test code passes, as the process says in which it runs; the solution runs in another one."""
    for test in tests:
        try:
            ast.parse(test)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"column 'tests': not Python: {error}") from None
    code = Path(remote.__file__).read_text(encoding="utf-8")
    ends = socket.socketpair()
    with ends[0], ends[1]:
        server = Program(f"{code}\n\nserve_solution({solution!r})\n", ends[0], limits, kind)
        try:
            judge = Program(f"{code}\n\nrun_tests({tests!r})\n", ends[1], limits, kind)
            for end in ends:
                end.close()  # so that each of the two notices when the other is gone
            outcome = judge.wait()
        finally:
            server.stop()
    if outcome.returncode == remote.UNSUPPORTED:
        raise ValueError(f"column 'tests': {outcome.stderr.splitlines()[-1]}")
    return outcome.ok


def _same(printed: str | None, wanted: str) -> bool:
    return printed is not None and _lines(printed) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def find(path: str) -> Callable[..., Any]:
    """The user's `module:function`, checked as far as can be without calling it."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    module, _, name = path.partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{path} is not a function")
    with contextlib.suppress(ValueError):  # builtins have no signature
        parameters = inspect.signature(function).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            raise TypeError(f"{path} must take f(prompts, completions, completion_ids, **columns)")
    return function


def ping(path: str) -> Callable[[], None]:
    """Loading is the point."""
    find(path)
    return lambda: None


def batch(path: str) -> Callable[[dict[str, list[Any]]], list[float | str | None] | str]:
    """The user's function on a batch: a number, None or a complaint for each sample, or one complaint about all."""
    function = find(path)

    def check(arguments: dict[str, list[Any]]) -> list[float | str | None] | str:
        num_samples = len(arguments["completions"])
        values = function(**arguments)
        if inspect.isawaitable(values):
            values = asyncio.run(_wait_for(values))
        try:
            values = list(values)
        except TypeError:
            return f"returned {_short(values)}, not a list"
        if len(values) != num_samples:
            return f"returned {len(values)} values for {num_samples} completions"
        return [_number(value) for value in values]

    return check


async def _wait_for(values: Any) -> Any:
    return await values


def _number(value: Any) -> float | str | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)  # numpy's and torch's numbers too
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    return number if math.isfinite(number) else f"returned {_short(value)}"


def _short(value: Any) -> str:
    return " ".join(repr(value).split())[:80]
