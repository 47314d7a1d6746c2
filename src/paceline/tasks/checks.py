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
import json
import logging
import math
import re
import resource
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.tasks.sandbox import run_program

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


# Runs in the sandbox. It says what the steps of the tests gave, each as a Python literal; whether that is right is
# decided outside, and what would be right is not known in here. The token comes by standard input and goes out before
# the values, to tell them from what the solution printed. Functions are tested, so `if __name__ == "__main__"` of the
# solution does not run.
_DRIVER = """
import collections.abc, json, os, sys
job = json.load(sys.stdin)

def literal(value):
    for kind in (bool, int, float, complex, str, bytes, type(None)):
        if isinstance(value, kind):
            return kind.__repr__(value)  # an IntEnum is an int
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(literal(item) + ", " for item in value) + ")"
    if isinstance(value, collections.abc.Set):
        return "{" + ", ".join(map(literal, value)) + "}" if value else "set()"
    raise TypeError(f"{type(value).__name__} is not plain data")

names = {"__name__": "solution"}
try:
    exec(compile(job.pop("solution"), "solution.py", "exec"), names)
except SystemExit:
    pass
names["__name__"] = "__main__"
values = [literal(eval(compile(source, "test.py", mode), names)) for mode, source in job["steps"]]
sys.stdout.flush()
os.write(1, (job["token"] + json.dumps(values)).encode())
os._exit(0)
"""

Step = tuple[str, str, Callable[[Any], bool]]  # compile's mode, source, whether the value it gives is right


def program(cpu_s: int, memory_mb: int, timeout_s: float) -> Check:
    """1 if the completion's program passes all of the column `tests`, else 0: all or nothing, as a program that is
    right on most inputs is wrong. `tests` is a list of asserts, one text of test code, or a list of
    {"input": …, "output": …}, compared line by line but for white space at the ends. All tests share `timeout_s`.

    The right side of `assert f(2) == 4` stays out of the sandbox, as outputs do: there a program must find the value,
    which must be plain data. What can't be helped: a program that reads its interpreter's frames can answer in its
    place, so it may pass tests of other forms, whose right answer is plain (that something is true, that test code
    raises nothing)."""

    def check(completion: str, columns: dict[str, Any]) -> float:
        tests = column(columns, "tests")
        tests = [tests] if isinstance(tests, str) else list(tests)
        blocks = FENCED.findall(completion)
        source = blocks[-1] if blocks else completion
        end_s = time.monotonic() + timeout_s

        def run(program: str, stdin: str) -> str | None:
            """What it printed, or None if it failed."""
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return None
            outcome = run_program(program, stdin, cpu_s=cpu_s, memory_mb=memory_mb, wall_s=left_s)
            return outcome.stdout if outcome.ok else None

        if tests and all(isinstance(test, str) for test in tests):
            token = secrets.token_hex(16)
            steps = [step for test in tests for step in _steps(test)]
            job = {"solution": source, "steps": [(mode, text) for mode, text, _ in steps], "token": token}
            printed = run(_DRIVER, json.dumps(job))
            return float(printed is not None and _holds(steps, printed.rpartition(token)))
        if tests and all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests):
            return float(all(_same(run(source, str(test["input"])), str(test["output"])) for test in tests))
        raise ValueError('column \'tests\' must hold asserts, test code, or {"input", "output"} pairs')

    return check


def _steps(test: str) -> Iterator[Step]:
    """Test code taken apart: a top-level assert asks for a value, anything else is run as it is."""
    try:
        body = ast.parse(test).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"column 'tests': not Python: {error}") from None
    for node in body:
        if isinstance(node, ast.Assert):
            yield _asked(node.test)
        else:
            yield "exec", ast.unparse(node), lambda value: value is None


def _asked(asserted: ast.expr) -> Step:
    """What to evaluate in the sandbox, and what the assertion then says of it. `x` and `not x` look alike in there."""
    match asserted:
        case ast.Compare(left, [ast.Eq()], [right]):
            with contextlib.suppress(ValueError, TypeError):  # not a literal
                wanted = ast.literal_eval(right)
                return "eval", ast.unparse(left), lambda value: bool(value == wanted)
        case ast.Compare(left, [ast.Is()], [ast.Constant(None | True | False as single)]):
            return "eval", ast.unparse(left), lambda value: value is single
        case ast.UnaryOp(ast.Not(), operand):
            return "eval", f"not ({ast.unparse(operand)})", lambda value: value is True
    return "eval", f"not ({ast.unparse(asserted)})", lambda value: value is False


def _holds(steps: list[Step], printed: tuple[str, str, str]) -> bool:
    """Whether the values after the token are there and right. Anything may stand there."""
    _, token, said = printed
    try:
        values = [ast.literal_eval(text) for text in json.loads(said)]
        return bool(token) and all([is_right(v) for (_, _, is_right), v in zip(steps, values, strict=True)])
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False


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
