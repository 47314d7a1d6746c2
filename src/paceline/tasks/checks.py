"""Checks that run in the reward workers.

Each factory here loads what it needs and returns the check of one completion: `check(completion, columns) -> float`.
A user's function gets batches instead. Workers import this module, so heavy imports are inside the factories. An
exception or a crash costs only the sample that caused it.
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
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from paceline.tasks import remote
from paceline.tasks.pool import BadArguments
from paceline.tasks.sandbox import Kind, Limits, Program, forbid_inspection, run_program

Check = Callable[[str, dict[str, Any]], float]
MEMORY_BYTES = 8 << 30  # address space of a worker while it checks one answer: 9**9**9**9 must not fill the machine
CODE_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def extract_answer(completion: str, pattern: str | None) -> str | None:
    """The answer in a completion: the last match of `pattern`, or its group 1 if it has groups. None: no match."""
    if pattern is None:
        return completion.strip()
    matches = list(re.finditer(pattern, completion))
    if not matches:
        return None
    last = matches[-1]
    return (last.group(1 if last.re.groups else 0) or "").strip()


def required_column(columns: dict[str, Any], name: str) -> Any:
    if columns.get(name) is None:
        raise ValueError(f"the problem has no column {name!r}")
    return columns[name]


def exact_check(pattern: str | None) -> Check:
    """1 if the answer equals the column `answer`, ignoring case, white space and commas between thousands."""

    def check(completion: str, columns: dict[str, Any]) -> float:
        expected = required_column(columns, "answer")
        answer = extract_answer(completion, pattern)
        return float(answer is not None and _normalize(answer) == _normalize(str(expected)))

    return check


def _normalize(text: str) -> str:
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return " ".join(text.casefold().split())


def format_check(pattern: str) -> Check:
    """1 if the whole completion matches."""
    return lambda completion, columns: float(re.fullmatch(pattern, completion) is not None)


def math_check(pattern: str | None) -> Check:
    """1 if math-verify finds the answer equal. Its own timeouts use signals; the pool's timeout applies instead."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that it has no timeout
    # The first call loads the rest of the library.
    verify(parse("$1$", parsing_timeout=None), parse("1", parsing_timeout=None), timeout_seconds=None)

    def check(completion: str, columns: dict[str, Any]) -> float:
        expected = str(required_column(columns, "answer"))
        answer = extract_answer(completion, pattern)
        if answer is None:
            return 0.0
        with memory_limit():
            gold = parse(expected, parsing_timeout=None) or parse(f"${expected}$", parsing_timeout=None)
            if not gold:
                raise ValueError(f"the answer {expected[:80]!r} is not a mathematical expression")
            with blaming_answer():
                return float(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))

    return check


def gym_check(dataset: str, params: dict[str, Any], pattern: str | None) -> Check:
    """The score of reasoning-gym's own scorer."""
    from paceline.tasks.gym import make_dataset

    scorer = make_dataset(dataset, params)

    def check(completion: str, columns: dict[str, Any]) -> float:
        answer = extract_answer(completion, pattern)
        if answer is None:
            return 0.0
        entry = required_column(columns, "entry")
        with memory_limit(), blaming_answer():
            return float(scorer.score_answer(answer, entry))

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


@contextlib.contextmanager
def blaming_answer() -> Iterator[None]:
    """For a library that reads an answer. An exception is then the answer's failure, like a crash."""
    try:
        yield
    except Exception as error:
        raise BadArguments from error


def code_check(cpu_s: int, memory_mb: int, timeout_s: float, kind: Kind) -> Check:
    """1 if the completion's program passes all of the column `tests`, else 0.

    `tests` is a list of asserts, one string of test code, or a list of {"input": …, "output": …}. Outputs are compared
    line by line, ignoring white space at the ends. All tests together may take `timeout_s`.

    Test code runs in another process than the program (`remote`), and outputs are compared in this process: the program
    has no access to the expected values."""
    if kind == "process":
        forbid_inspection()  # programs run as the same user, and this process receives their exit status

    def check(completion: str, columns: dict[str, Any]) -> float:
        tests = required_column(columns, "tests")
        tests = [tests] if isinstance(tests, str) else list(tests)
        blocks = CODE_BLOCK.findall(completion)
        source = blocks[-1] if blocks else completion
        deadline_s = time.monotonic() + timeout_s

        def limits() -> Limits:
            return Limits(cpu_s=cpu_s, memory_mb=memory_mb, wall_s=max(0.0, deadline_s - time.monotonic()))

        def has_output(test: dict[str, Any]) -> bool:
            outcome = run_program(source, str(test["input"]), limits(), kind)
            return outcome.ok and _lines(outcome.stdout) == _lines(str(test["output"]))

        if tests and all(isinstance(test, str) for test in tests):
            return float(_passes(source, tests, limits(), kind))
        if tests and all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests):
            return float(all(map(has_output, tests)))
        raise ValueError('column \'tests\' must hold asserts, test code, or {"input", "output"} pairs')

    return check


def _passes(solution: str, tests: list[str], limits: Limits, kind: Kind) -> bool:
    """Whether the test code passes. Tests and solution run in two sandboxes; the exit code of the tests decides."""
    for test in tests:
        try:
            ast.parse(test)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"column 'tests': not Python: {error}") from None
    code = Path(remote.__file__).read_text(encoding="utf-8")
    ends = socket.socketpair()
    with ends[0], ends[1]:
        solution_program = Program(f"{code}\n\nserve_solution({solution!r})\n", ends[0], limits, kind)
        try:
            test_program = Program(f"{code}\n\nrun_tests({tests!r})\n", ends[1], limits, kind)
            for end in ends:
                end.close()  # so that each of the two notices when the other ends
            outcome = test_program.wait()
        finally:
            solution_program.stop()
    if outcome.returncode == remote.UNSUPPORTED:
        raise ValueError(f"column 'tests': {outcome.stderr.splitlines()[-1]}")
    return outcome.ok


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def import_function(path: str) -> Callable[..., Any]:
    """The user's `module:function`. Its signature is checked; it is not called."""
    function = import_path(path)
    if not callable(function):
        raise TypeError(f"{path} is not a function")
    with contextlib.suppress(ValueError):  # builtins have no signature
        parameters = inspect.signature(function).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            raise TypeError(f"{path} must take f(prompts, completions, completion_ids, **columns)")
    return function


def import_path(path: str) -> Any:
    """The user's `module:name`."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def import_only(path: str) -> Callable[[], None]:
    """Checks that the user's function can be imported in a worker; the returned check does nothing."""
    import_function(path)
    return lambda: None


def user_check(path: str) -> Callable[[dict[str, list[Any]]], list[float | str | None] | str]:
    """The user's function on a batch. Returns a number, None or an error message for each sample, or one error message
    for the whole batch."""
    function = import_function(path)

    def check(arguments: dict[str, list[Any]]) -> list[float | str | None] | str:
        num_samples = len(arguments["completions"])
        values = function(**arguments)
        if inspect.isawaitable(values):
            values = asyncio.run(_wait_for(values))
        try:
            iterator = iter(values)
        except TypeError:
            iterator = None
        if iterator is None or isinstance(values, Mapping | Set | str | bytes):  # these have no order of samples
            return f"returned {_short(values)} for {_plural(num_samples, 'completion')}, not a list"
        values = list(iterator)  # errors of a generator are those of the function
        if len(values) != num_samples:
            return f"returned {_plural(len(values), 'value')} for {_plural(num_samples, 'completion')}"
        return [_number_or_error(value) for value in values]

    return check


async def _wait_for(values: Any) -> Any:
    return await values


def _number_or_error(value: Any) -> float | str | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)  # also numpy and torch numbers
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    return number if math.isfinite(number) else f"returned {_short(value)}, not a finite number or None"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _short(value: Any) -> str:
    return " ".join(repr(value).split())[:80]
