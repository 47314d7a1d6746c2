"""An environment with a tool: arithmetic problems, and a calculator to solve them with.

The policy writes `<calc>12*34</calc>` and receives the result in the next turn. `<answer>408</answer>` ends the episode
with reward 1 or 0. As a task: kind = "env", name = "paceline.tasks.calculator:Calculator".
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Iterator
from fractions import Fraction

from paceline.chat.messages import Message
from paceline.tasks.task import Turn

CALC = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
HELP = "Write <calc>…</calc> to calculate, or <answer>…</answer> with the final number."

OPERATIONS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
MAX_CHARS = 200
MAX_BITS = 1024  # of a number's numerator and denominator, intermediate results included


class Calculator:
    def __init__(self, expression: str, max_turns: int = 4) -> None:
        self.expression = expression
        self.num_turns_left = max_turns

    @staticmethod
    def problems(
        seed: int, min_digits: int = 2, max_digits: int = 4, operators: str = "+*", max_turns: int = 4
    ) -> Iterator[dict[str, object]]:
        if not 1 <= min_digits <= max_digits <= 20:
            raise ValueError(
                f"task.params.min_digits = {min_digits}, max_digits = {max_digits}: must be 1 <= min_digits <= "
                "max_digits <= 20"
            )
        if not operators or set(operators) - set("+-*"):
            raise ValueError(f"task.params.operators = {operators!r}: must be some of +, - and *")
        if max_turns < 1:
            raise ValueError(f"task.params.max_turns = {max_turns}: must be at least 1")
        rng = random.Random(seed)
        while True:
            a, b = (rng.randrange(10 ** (n - 1), 10**n) for n in (rng.randint(min_digits, max_digits) for _ in "ab"))
            yield {"expression": f"{a} {rng.choice(operators)} {b}", "max_turns": max_turns}

    def reset(self) -> str:
        return (
            f"What is {self.expression}?\nTo calculate, write for example <calc>12*34</calc> and wait for the result. "
            "When you know the answer, write it like this: <answer>408</answer>"
        )

    def step(self, message: Message) -> Turn:
        completion = message["content"]
        assert self.num_turns_left > 0, "this episode has ended; an environment is single-use"
        self.num_turns_left -= 1
        if answers := ANSWER.findall(completion):
            self.num_turns_left = 0
            answer = answers[-1].strip().replace(",", "").removeprefix("+")  # must be a number, not an expression
            return Turn(None, float(answer == calculate(self.expression)))
        if self.num_turns_left == 0:
            return Turn(None)
        results = [f"{expression.strip()} = {_result_or_error(expression)}" for expression in CALC.findall(completion)]
        return Turn([{"role": "user", "content": "\n".join(results) or HELP}])


def _result_or_error(expression: str) -> str:
    try:
        return calculate(expression)
    except ValueError as error:
        return f"error: {error}"


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, computed with fractions. Raises ValueError for an invalid expression.
    Always fast: sizes are limited before anything is computed."""
    text = expression.strip().replace(",", "").replace("×", "*")
    if len(text) > MAX_CHARS:
        raise ValueError(f"longer than {MAX_CHARS} characters")
    if not re.fullmatch(r"[0-9+\-*/%.() ]+", text):
        raise ValueError("only numbers, + - * / // % ** and parentheses")
    try:
        value = _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _evaluate(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp):
        return OPERATIONS[type(node.op)](_evaluate(node.operand))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.BinOp):
        return _bounded(OPERATIONS[type(node.op)](_evaluate(node.left), _evaluate(node.right)))
    raise ValueError("not an expression")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent must be a whole number")
    if abs(exponent) * _num_bits(base) > 2 * MAX_BITS:  # checked before computing: 9**9**9 would never finish
        raise ValueError("too large")
    return _bounded(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if _num_bits(value) > MAX_BITS:
        raise ValueError("too large")
    return value


def _num_bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
