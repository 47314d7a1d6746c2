"""Rewards: values are right, and a function that fails costs only the sample that caused it."""

from __future__ import annotations

import inspect
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reward_functions  # workers find it through the parent's sys.path

from paceline.config import RewardSection, TaskSection
from paceline.tasks import checks, pool
from paceline.tasks.pool import Failed, Pool
from paceline.tasks.rewards import LocalRewarder, Sample, Score


def sample(
    completion: str, name: str = "s", prompt: Any = "?", ids: tuple[int, ...] = (1, 2), **columns: Any
) -> Sample:
    return Sample(name, prompt, completion, ids, columns)


def score(functions: list[str], samples: list[Sample], task: TaskSection | None = None, **settings: Any) -> list[Score]:
    rewarder = LocalRewarder(RewardSection(functions=functions, **{"timeout_s": 20.0, **settings}), task)
    try:
        return rewarder.score(samples)
    finally:
        rewarder.close()


def rewards(*args: Any, **settings: Any) -> list[float]:
    scores = score(*args, **settings)
    assert [s.failure for s in scores] == [None] * len(scores)
    return [s.reward for s in scores]


# --- the built-in functions


@pytest.mark.parametrize(
    ("completion", "answer", "pattern", "reward"),
    [
        ("  Forty  Two\n", "forty two", None, 1),
        ("1,234,567", 1234567, None, 1),
        ("1,23", "123", None, 0),
        ("42", "43", None, 0),
        ("<answer>1</answer> no: <answer> 42 </answer>", "42", r"<answer>(.*?)</answer>", 1),
        ("<answer>42</answer> no: <answer>1</answer>", "42", r"<answer>(.*?)</answer>", 0),
        ("it is 41, 42", "42", r"\d+", 1),
        ("nothing here", "42", r"\d+", 0),
    ],
)
def test_extract_and_compare(completion: str, answer: Any, pattern: str | None, reward: float) -> None:
    assert checks.exact_check(pattern)(completion, {"answer": answer}) == reward


def test_exact_and_format_with_weights() -> None:
    samples = [
        sample("<think>x</think> <answer>4</answer>", answer="4"),
        sample("<answer>4</answer>", answer="4"),
        sample("<think>x</think><answer>5</answer> and more", answer="4"),
    ]
    scores = score(["exact", "format"], samples, weights=[1.0, 0.25], answer_pattern="<answer>(.*?)</answer>")
    assert [s.reward for s in scores] == [1.25, 1.0, 0.0]
    assert scores[0].parts == {"exact": 1.0, "format": 1.0}


def test_math_and_a_missing_answer() -> None:
    pairs = [
        (r"so it is $\boxed{\frac{1}{2}}$", "0.5", 1), (r"$\boxed{\frac{1}{3}}$", "0.5", 0), ("72", "72", 1),
        (r"$x^2+2x+1$", "$(x+1)^2$", 1), (r"\boxed{12}", r"\frac{24}{2}", 1), ("I don't know", "7", 0),
    ]  # fmt: skip
    samples = [sample(text, answer=answer) for text, answer, _ in pairs]
    scores = score(["math"], [*samples, sample("1", name="step 1, p/3, sample 0")])
    assert [s.reward for s in scores[:-1]] == [reward for *_, reward in pairs]
    assert scores[-1].failure == (
        "step 1, p/3, sample 0: reward math raised ValueError: the problem has no column 'answer'"
    )


def test_a_math_check_that_never_returns_costs_one_sample() -> None:
    samples = [sample("$7$", answer="7"), sample("$(10^{10})!$", name="slow", answer="7"), sample("$8$", answer="8")]
    scores = score(["math"], samples, timeout_s=3.0)
    assert [s.reward for s in scores[::2]] == [1.0, 1.0]
    assert scores[1] == Score(0.0, {"math": 0.0}, "slow: reward math did not return within 3 s: scored 0")


def test_a_regular_expression_that_never_returns_costs_one_sample() -> None:
    samples = [sample("aaaa!"), sample("a" * 64 + "?", name="slow"), sample("a!")]
    scores = score(["format"], samples, format_pattern="(a+)+!", timeout_s=1.0)
    assert [s.reward for s in scores[::2]] == [1.0, 1.0]
    assert scores[1] == Score(0.0, {"format": 0.0}, "slow: reward format did not return within 1 s: scored 0")


def test_gym() -> None:
    task = TaskSection(kind="reasoning_gym", name="chain_sum", params={"min_terms": 2, "max_terms": 2})
    entry = {"question": "2 + 2 =", "answer": "4", "metadata": {"source_dataset": "chain_sum"}}
    samples = [sample(text, entry=entry) for text in ("2 + 2. Answer: 4", "Answer: 1000000", "4")]
    values = rewards(["gym"], samples, task, answer_pattern=r"Answer: (.*)")
    assert values[0] == 1.0 and values[1] < 0.5 and values[2] == 0.0


PAIRS = [{"input": "2\n", "output": "4"}, {"input": "3", "output": " 6 "}]
CODE = "Here:\n```python\nold = 1\n```\nbetter:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."


@pytest.mark.parametrize(
    ("completion", "tests", "reward"),
    [
        (CODE, ["assert double(2) == 4", "assert double('a') == 'aa'"], 1),
        (CODE, ["assert double(2) == 4", "assert double(2) == 5"], 0),
        (CODE, "for i in range(9):\n    assert double(i) == i + i", 1),
        ("def double(x): return 2 * x", ["assert double(2) == 4"], 1),
        ("import os\nos._exit(0)", ["assert False"], 0),
        ("def double(x): raise SystemExit(0)", ["assert double(2) == 4"], 0),
        ("def double(x): return 2 * x\nraise SystemExit", ["assert double(2) == 4"], 1),
        (
            "```python\nprint(2 * int(input()))\n```",
            [{"input": "2\n", "output": "4"}, {"input": "3", "output": " 6 "}],
            1,
        ),
        ("```python\nprint(4)\n```", PAIRS, 0),
        ("while True: pass", ["assert True"], 0),
        (CODE, ["x = [1]\ny = double(x)\nassert y == [1, 1], 'twice'\ny.clear()", "assert not y", "assert y == []"], 1),
        (CODE, ["assert double(2) == 4 == 4", "assert -4 == -double(2)", "assert double(2) != 5"], 1),
        (CODE, ["assert not double(2)"], 0),
        ("def f(): return True", ["assert f() is True", "assert f() == 1"], 1),
        ("def f(): return 1", ["assert f() is True"], 0),
        ("def f(): return None", ["assert f() is None"], 1),
        (
            "import collections as c, enum\nclass E(enum.IntEnum):\n    A = 1\nP = c.namedtuple('P', 'x y')\n"
            "def f(): return [c.Counter('aab'), P(E.A, 2.5), {1: 2}.keys(), frozenset(), 'é\\n', b'x', -1 + 2j, None]",
            ["assert f() == [{'a': 2, 'b': 1}, (1, 2.5), {1}, set(), 'é\\n', b'x', -1 + 2j, None]"],
            1,
        ),
        ("def f(): return (1,)", ["assert f() == [1]"], 0),
        ("def f():\n    x = []\n    x.append(x)\n    return x", ["assert f() == []"], 0),
        ("def f(): return 'x' * 10**7", ["assert f() == 'x'"], 0),
        # All test code runs in another process than the program.
        (CODE, ["def check(f):\n    assert f(2) == 4\n    assert f(3) == 7", "check(double)"], 0),
        ("def double(x): x += x", ["x = [[1], {2: 3}]\ndouble(x)\nassert x == [[1], {2: 3}, [1], {2: 3}]"], 1),
        ("def apply(f, x): return f(f(x))", ["assert apply(lambda x: x + 1, 3) == 5", "assert apply(len, []) == 1"], 0),
        ("def apply(f, x): return f(f(x))", ["def inc(x): return apply(abs, x) + 1", "assert apply(inc, -3) == 5"], 1),
        (
            "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
            "    def __len__(self): return len(self.items)\n    def __iter__(self): return iter(self.items)\n"
            "    def __getitem__(self, i): return self.items[i]",
            ["s = Stack()\nassert not s\ns.push(1)\ns.push('a')\nassert len(s) == 2 and s[1] == 'a' and 1 in s",
             "assert [x for x in s] == [1, 'a'] and s.items == [1, 'a'] and next(iter(s)) == 1"],
            1,
        ),
        (
            "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)",
            ["assert (V(1) + V(2)).x == 3"],
            1,
        ),
        (
            "class Odd(ValueError): pass\ndef f(x):\n    if x % 2: raise Odd('odd')\n    if x > 9: raise KeyError(x)",
            ["for x, kind in ((1, Odd), (3, ValueError), (10, KeyError)):\n    try: f(x)\n    except kind: pass\n"
             "    else: raise AssertionError"],
            1,
        ),
        ("def f(n):\n    for i in range(n): yield i", ["assert list(f(3)) == [0, 1, 2]", "assert next(f(1)) == 0"], 1),
        ("def sum(a, b): return a * b", ["assert sum(10, 15) == 150"], 1),  # the name of a built-in function
        (
            "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
            "def f(): return P.__annotations__['x'] is int and P.__module__ == 'solution' and P(1).x",
            ["assert f() == 1 and P(2).x == 2"],
            1,
        ),
        (
            "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
            "@dataclass\nclass P:\n    n: ClassVar[int] = 3\n    x: int = 0",
            ["assert P(2).x == 2 and P.n == 3"],
            1,
        ),
        # Values of names that tests do not use are not sent.
        ("big = list(range(4 * 10**6))\ndef f(): return len(big)", ["assert f() == 4 * 10**6"], 1),
        ("table = {1: 2}\nsame = []\nsame.append(same)", ["assert table == {1: 2} and len(same) == 1"], 1),
        ("import math\ndef f(n): return math.factorial(n)", ["assert f(2000) == math.factorial(2000)"], 1),
        (
            "from fractions import *\nfrom decimal import *\nfrom collections import deque\n"
            "def f(): return [Fraction(1, 3), Decimal('0.1'), deque([1]), range(3), float('inf')]",
            ["from fractions import *\nfrom decimal import *\nfrom collections import deque",
             "assert f() == [Fraction(1, 3), Decimal('0.1'), deque([1]), range(3), float('inf')]"],
            1,
        ),
    ],
)  # fmt: skip
def test_code(completion: str, tests: Any, reward: float) -> None:
    assert checks.code_check(1, 256, 20.0, "namespaces")(completion, {"tests": tests}) == reward


# A program that finds its end of the connection and sends an answer in place of its functions. It can read the request,
# which is not secret, and no expected value.
FORGED_ANSWER = """
import json, os, sys
connection = sys._getframe(1).f_locals["self"]._connection
connection.send(["names", ["double"]])
assert connection.receive() == ["do", "global", ["double"], {{}}]
connection.send(["value", {{"object": 0}}, {{}}])
request = connection.receive()
{send}
os._exit(0)
"""


@pytest.mark.parametrize(
    "completion",
    [
        "class Yes:\n    def __eq__(self, other): return True\ndef double(x): return Yes()",
        "class Yes(int):\n    def __eq__(self, other): return True\ndef double(x): return Yes(7)",
        FORGED_ANSWER.format(send=""),
        FORGED_ANSWER.format(send='connection.send(["value", True, {}])'),
        FORGED_ANSWER.format(send='connection.send(["value", {"object": 0}, {}])'),
        FORGED_ANSWER.format(send='connection.send(["value", {"list": {"object": 0}}, {}])'),
        FORGED_ANSWER.format(send='connection.send(["value", {"dict": [[{"list": []}, 1]]}, {}])'),
        FORGED_ANSWER.format(send='connection.send(["value", 7, {"9": 1}])'),
        FORGED_ANSWER.format(send='connection.send(["callback", 0, [], {}])'),
        FORGED_ANSWER.format(send='connection.send(["raise", ["SystemExit"], {"dict": [["text", "0"]]}])'),
        FORGED_ANSWER.format(send='connection.send(["raise", ["KeyError"], "0"])'),
        FORGED_ANSWER.format(send='connection.send(["value", {"namedtuple": ["P", ["__eq__"], [{"object": 0}]]}, {}])'),
        FORGED_ANSWER.format(send='connection.send({"value": 4})'),
        FORGED_ANSWER.format(send='connection._file.write(b"[" * 10**6 + b"\\n"); connection._file.flush()'),
    ],
)
def test_a_forged_answer_does_not_pass(completion: str) -> None:
    tests = ["assert double(2) == 4", "assert double(3) == 6"]
    assert checks.code_check(1, 256, 20.0, "namespaces")(completion, {"tests": tests}) == 0


def test_a_forged_answer_with_the_right_value_passes() -> None:
    """Shows that the programs of the test above reach the tests: only the value is wrong there."""
    right = FORGED_ANSWER.format(send='connection.send(["value", 4, {}])')
    assert checks.code_check(1, 256, 20.0, "namespaces")(right, {"tests": ["assert double(2) == 4"]}) == 1


def test_tests_that_pass_other_than_plain_data_are_reported() -> None:
    tests = ["class Node: pass", "assert double(Node()) is None"]
    scores = score(["code"], [sample(CODE, name="odd", tests=tests)])
    assert "column 'tests': tests pass a Node to the solution, which takes plain data only" in (scores[0].failure or "")


UNITTEST = """
import unittest
class TestDouble(unittest.TestCase):
    def test_two(self): self.assertEqual(double(2), 4)
    def test_text(self): self.assertEqual(double("a"), "aa")
if __name__ == "__main__":
    unittest.main()
"""
WRONG = "def double(x): return 4"


@pytest.mark.parametrize(
    ("completion", "tests", "reward"),
    [
        # Changes in place.
        ("def f(x, y=None): y.append(x)", ["y = [[2]]\nf(1, y=y)\nassert y == [[2], 1]"], 1),
        ("def f(x): x.append(2)\ndef g(x): x.appendleft([0])", [
            "from collections import deque", "d = deque([1])\nf(d)\ng(d)\nassert d == deque([[0], 1, 2])",
            "b = bytearray(b'a')\nf(b)\nassert b == b'a\\x02' and type(b) is bytearray",
        ], 1),
        ("def f(x): x[0].append(x[1])\n", ["a = [1]\nt = (a, 1000)\nf(t)\nassert a == [1, 1000] and t[0] is a"], 1),
        ("def f(x): x[0][0].append(1)\n", ["a = []\nx = [(a, 'k')]\nf(x)\nassert a == [1] and x[0][0] is a"], 1),
        ("def f(x): x['b'] = 2", ["import collections as c\nd = c.OrderedDict()\nf(d)\nassert d == {'b': 2}"], 1),
        ("def f(x): x.append(x[0](1))", ["fs = [lambda x: x + 1]\nf(fs)\nassert fs[0](5) == 6 and fs[1] == 2"], 1),
        # Named arguments with the names of our own parameters.
        ("def f(function, operation, self): return function(operation) + self", [
            "assert f(function=abs, operation=-2, self=1) == 3",
        ], 1),
        # Named tuples, classes, identity.
        ("import collections\nP = collections.namedtuple('P', 'x y')\ndef f(p): return P(p.y, [p.x])", [
            "import collections\nQ = collections.namedtuple('Q', 'x y')\np = f(Q(1, 2))",
            "assert p.x == 2 and p.y == [1] and p == (2, [1]) and repr(p) == 'P(x=2, y=[1])'",
        ], 1),
        ("class A: pass\nclass B(A): pass\ndef f(): return B()", [
            "assert isinstance(f(), A) and isinstance(f(), (int, B)) and not isinstance(3, A) and issubclass(B, A)",
        ], 1),
        ("class A: pass\ndef f(): return 3", ["assert isinstance(f(), A)"], 0),
        ("class A:\n    one = None\n    def __new__(cls):\n        cls.one = cls.one or object.__new__(cls)\n"
         "        return cls.one", ["assert A() is A()"], 1),
        ("class A: pass", ["assert A() is A()"], 0),
        # Exceptions.
        ("class Odd(Exception):\n    def __init__(self, n): super().__init__(f'odd: {n}'); self.n = n\n"
         "def f(x):\n    if x: raise Odd(x)\n    raise KeyError('k')", [
            "try: f(0)\nexcept KeyError as e: assert str(e) == \"'k'\" and e.args == ('k',)\nelse: assert 0",
            "try: f(3)\nexcept Odd as e: assert str(e) == 'odd: 3' and e.n == 3\nelse: assert 0",
        ], 1),
        ("def f(): open('/none')", ["try: f()\nexcept FileNotFoundError as e: assert e.errno == 2\nelse: assert 0"], 1),
        # Test code that exits.
        (CODE, UNITTEST, 1),
        (WRONG, UNITTEST, 0),
        ("", UNITTEST, 0),
        (CODE, ["import sys\nassert double(2) == 4\nsys.exit()", "assert double(3) == 6"], 1),
        (CODE, ["import sys\nsys.exit()", "assert double(3) == 7"], 0),
        (CODE, ["import sys\nsys.exit(double(1))"], 0),
        ("def double(x): raise SystemExit(0)", ["double(1)", "assert False"], 0),
        # Tests that pass without a call of the solution.
        ("", "def test_double(): assert double(2) == 4", 0),
        ("other = 1", "try: double(2)\nexcept NameError: pass", 0),
        ("answer = 42", "assert answer == 42", 1),
        # Test code that catches every exception does not catch a refused comparison.
        ("class Yes: pass\ndef f(): return Yes()", ["try: assert f() > 3\nexcept: pass"], 0),
    ],
)  # fmt: skip
def test_code_behaves_as_in_one_process(completion: str, tests: Any, reward: float) -> None:
    assert checks.code_check(2, 256, 20.0, "namespaces")(completion, {"tests": tests}) == reward


@pytest.mark.parametrize(
    ("completion", "tests", "message"),
    [
        ("class A(int): pass\ndef f(): return A()", "assert isinstance(f(), A)", r"isinstance\(\) with a class"),
        ("class A: pass", "assert not issubclass(int, A)", r"issubclass\(\) with a class"),
        (CODE, "class Node: pass\ntry: double(Node())\nexcept: pass", "pass a Node to the solution"),
        (CODE, UNITTEST.replace('"a"', "object()"), "pass a object to the solution"),
        (CODE, "def test_double(): assert double(2) == 4", "never call the solution"),
        (WRONG, "def test_double(): assert double(2) == 4", "never call the solution"),
        (CODE, "", "never call the solution"),
    ],
)
def test_tests_that_can_not_run_in_another_process_are_reported(completion: str, tests: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"column 'tests': tests .*{message}"):
        checks.code_check(2, 256, 20.0, "namespaces")(completion, {"tests": tests})


def test_tests_that_are_not_python_are_reported() -> None:
    scores = score(["code"], [sample(CODE, name="odd", tests=["assert double(2) = 4"])])
    assert (scores[0].failure or "").startswith("odd: reward code raised ValueError: column 'tests': not Python")


def test_code_through_the_rewarder() -> None:
    forever = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    samples = [
        sample(CODE, tests=["assert double(2) == 4"]), sample(forever, tests=["assert True"]),
        sample(CODE, name="odd", tests=[]),
    ]  # fmt: skip
    scores = score(["code"], samples, timeout_s=1.5)
    assert [s.reward for s in scores[:2]] == [1.0, 0.0]
    assert scores[2].failure is not None and scores[2].failure.startswith("odd: reward code raised ValueError: column")


def test_model(tmp_path: Path, tiny_classifier: Any) -> None:
    """Rewards in a padded batch equal those one by one, and two labels give the difference of the logits."""
    import torch

    for num_labels in (1, 2):
        path, tokenizer, model = tiny_classifier(tmp_path / str(num_labels), num_labels)
        samples = [sample("no"), sample("yes, a longer one"), sample("!", prompt=[{"role": "user", "content": "hm"}])]
        texts = ["?no", "?yes, a longer one", "hm\n!"]
        with torch.inference_mode():
            logits = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts]
        expected = [float(row[0] if num_labels == 1 else row[1] - row[0]) for row in logits]
        assert rewards(["model"], samples, model=str(path)) == pytest.approx(expected, abs=1e-5)
        assert len({round(value, 4) for value in expected}) == 3


@pytest.fixture
def tiny_classifier() -> Any:
    def make(path: Path, num_labels: int) -> Any:
        import torch
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        raw = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "<end>"])}, []))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(alphabet) + 1, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_labels=num_labels, initializer_range=0.5, pad_token_id=None,
        )  # fmt: skip
        model = LlamaForSequenceClassification(config).eval()
        tokenizer.save_pretrained(path)
        model.save_pretrained(path)
        return path, tokenizer, model

    return make


def test_env_reward_and_functions_that_do_not_apply() -> None:
    samples = [Sample("a", "?", "x", (1,), {}, env_reward=0.5), Sample("b", "?", "none", (1,), {})]
    scores = score(["env", "reward_functions:scripted"], samples)
    assert scores[0] == Score(1.5, {"env": 0.5, "reward_functions:scripted": 1.0})
    assert math.isnan(scores[1].reward) and scores[1].failure == "b: no reward function applies to it"
    broken = score(["env"], [Sample("c", "?", "x", (1,), {}, env_reward=math.nan)])
    assert broken[0].failure == "c: reward env returned nan"


def test_a_sum_that_is_not_finite_costs_its_sample() -> None:
    samples = [Sample(name, "?", "x", (1, 2), {}, env_reward=value) for name, value in (("a", 1e308), ("b", 1.0))]
    weighted = score(["env", "reward_functions:length"], samples, weights=[1.0, 1e308])
    assert weighted[0].failure == "a: the weighted sum of its rewards is not finite" and math.isnan(weighted[0].reward)
    assert weighted[0].parts == {"env": 1e308, "reward_functions:length": 2.0}
    scores = score(["env", "reward_functions:length"], samples, weights=[1.5, -0.5])
    assert [s.failure for s in scores] == [None, None] and scores[1].reward == 0.5
    opposed = score(["env", "reward_functions:length"], samples, weights=[1e308, -1e308])
    assert opposed[0].failure is not None


# --- the user's functions


def test_user_functions_get_the_arguments_of_trl() -> None:
    chat = [{"role": "user", "content": "?"}]
    samples = [
        sample("yes", ids=(7, 8), answer="a"),
        sample("yes", prompt=chat, ids=(7, 8), answer="b", extra=[1]),
        sample("yes", prompt=chat, ids=(7, 8), answer="a", extra=[1]),  # wrong on purpose
    ]
    assert rewards(["reward_functions:check_arguments"], samples) == [1.0, 1.0, 0.0]


def test_sync_and_async_with_weights() -> None:
    names = ["reward_functions:length", "reward_functions:asynchronous"]
    assert rewards(names, [sample("abc"), sample("", ids=(1,))], weights=[10.0, 1.0]) == [23.0, 10.0]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("hang", "did not return within 1 s"),
        ("raise", "raised ValueError: on purpose (LINE)"),
        ("exit", "ended its process (exit code 3)"),
        ("sys.exit", "raised SystemExit: 0 (LINE)"),
        ("crash", "killed its process (signal 11)"),
        ("nan", "returned nan, not a finite number or None"),
        ("inf", "returned inf, not a finite number or None"),
        ("text", "returned '1.0', not a finite number or None"),
    ],
)
def test_a_failed_call_costs_one_sample(bad: str, reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    samples = [sample("good"), sample(bad, name="step 3, p/17, sample 2"), sample("none"), sample("good")]
    scores = score(["reward_functions:scripted"], samples, timeout_s=1.0, on_failure="exclude")
    assert [s.failure and re.sub(r"[^( ]*reward_functions\.py, line \d+", "LINE", s.failure) for s in scores] == [
        None, f"step 3, p/17, sample 2: reward reward_functions:scripted {reason}",
        "s: no reward function applies to it", None,
    ]  # fmt: skip
    assert math.isnan(scores[1].reward) and [scores[i].reward for i in (0, 3)] == [1.0, 1.0]
    assert capfd.readouterr().out == ""  # the function's prints do not reach standard output


def test_samples_that_do_not_fail_are_scored_in_one_batch() -> None:
    scores = score(["reward_functions:relative"], [sample("a"), sample("bad", name="x"), sample("aa"), sample("aaaa")])
    assert [s.reward for s in (scores[0], *scores[2:])] == pytest.approx([0, 1 / 3, 2 / 3])
    failure = "x: reward reward_functions:relative raised RuntimeError: bad in two lines"
    line = (
        inspect.getsource(reward_functions).splitlines().index('        raise RuntimeError("bad\\nin two lines")') + 1
    )
    assert scores[1].failure == f"{failure} ({Path(reward_functions.__file__)}, line {line})" or (
        scores[1].failure == f"{failure} ({os.path.relpath(reward_functions.__file__)}, line {line})"
    )


def test_the_pool_gives_up_if_every_call_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_LOST_CALLS", 2)
    scores = score(["reward_functions:scripted"], [sample("hang") for _ in range(40)], timeout_s=0.1)
    assert all(s.reward == 0 for s in scores), "those that were not called, too"
    assert sum("was not called" in (s.failure or "") for s in scores) >= 36


@pytest.mark.parametrize(
    ("function", "completions", "message"),
    [
        ("scripted", ["good", "few", "good"], "returned 0 values for 3 completions"),
        ("scripted", ["few"], "returned 0 values for 1 completion;"),
        ("one_for_all", ["a", "b", "c", "d"], "returned 1 value for 4 completions"),
        ("one_for_all", ["raise", "b", "c"], None),  # fails as a batch; a sample alone has the right number of values
        ("scalar", ["a", "b"], "returned 1.0 for 2 completions, not a list"),
        ("by_index", ["a", "b"], "returned {0: 1.0, 1: 2.0} for 2 completions, not a list"),
        ("all_different", ["a"], "returned {1.0} for 1 completion, not a list"),
    ],
)
def test_a_wrong_number_of_values_is_an_error(function: str, completions: list[str], message: str | None) -> None:
    """Values can't be assigned to samples, also where a call per sample would return one value."""
    with pytest.raises(ValueError, match=f"reward.functions: reward_functions:{function} returned") as error:
        score([f"reward_functions:{function}"], [sample(text) for text in completions])
    assert message is None or message in str(error.value)
    assert f"def {function}(prompts, completions, **columns) -> list[float | None]" in str(error.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exakt", "exact, format, math"),
        ("no_such_module:f", "No module named .*; modules are looked for in the current folder, /"),
        ("my_reward.py:larger", r"'my_reward.py:larger': a file, not a module; write my_reward:larger, without .py$"),
        ("./rewards/sums.py:f", "write rewards.sums:f, without .py$"),
        ("/home/me/sums.py:f", "write sums:f, without .py, and change to the file's folder$"),
        ("reward_functions:nothing", "nothing"),
        ("reward_functions:NOT_A_FUNCTION", "is not a function"),
        ("reward_functions:narrow", r"\*\*columns"),
        ("gym", "task.kind"),
    ],
)
def test_wrong_settings_are_reported_at_construction(function: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)reward\.functions.*{message}"):
        LocalRewarder(RewardSection(functions=[function]))


def test_functions_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def f(completions, **columns):\n    return [2.0 for _ in completions]\n")
    monkeypatch.chdir(tmp_path)
    assert rewards(["my_rewards:f"], [sample("x")]) == [2.0]


# --- the pool


@pytest.fixture
def workers() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


def test_results_of_large_calls_come_in_order(workers: Pool) -> None:
    calls = [({"completions": ["x" * (i * 50_000)], "prompts": [0], "completion_ids": [[1] * i]},) for i in range(12)]
    replies = workers.map(checks.user_check, ("reward_functions:length",), calls, 20.0)
    assert replies == [[float(i)] for i in range(12)]


def test_a_call_that_can_not_be_pickled_fails_alone(workers: Pool) -> None:
    replies = workers.map(checks.exact_check, (None,), [("1", {"answer": "1"}), ("1", {"answer": lambda: 1})], 20.0)
    assert replies[0] == 1.0
    assert isinstance(replies[1], Failed) and "can't be sent" in replies[1].reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pickle", "sent an invalid message"),
        ("length", "sent an invalid message"),
        ("nested", "sent an invalid message"),
        ("shape", "sent an invalid message"),
        ("again", "sent 'loaded' unexpectedly"),
        ("object", ""),
        ("huge", ""),
        ("many", ""),
    ],
)
def test_a_hostile_worker_costs_its_sample(text: str, reason: str, tmp_path: Path) -> None:
    """It may send anything to the trainer's process; nothing of that is executed there, and scoring continues."""
    marker = tmp_path / "executed"
    bad, good = sample(text, name="bad", marker=str(marker)), sample("good", marker=str(marker))
    rewarder = LocalRewarder(RewardSection(functions=["reward_functions:hostile"], workers=1, timeout_s=20.0))
    try:
        assert f"bad: reward reward_functions:hostile {reason}" in (rewarder.score([bad])[0].failure or "")
        assert rewarder.score([good]) == [Score(1.0, {"reward_functions:hostile": 1.0})]
    finally:
        rewarder.close()
    assert not marker.exists()


def test_a_second_answer_does_not_count_for_another_call() -> None:
    """At worst the worker's own next call gets a wrong value, which it could send anyway. Other calls are right."""
    rewarder = LocalRewarder(RewardSection(functions=["reward_functions:hostile"], workers=1, timeout_s=20.0))
    try:
        scores = [rewarder.score([sample(text, marker="")])[0] for text in ("good", "twice", "good", "good")]
    finally:
        rewarder.close()
    assert all(s.reward == 1.0 or s.failure is not None for s in scores) and scores[-1].reward == 1.0


def test_workers_start_on_demand_are_reused_and_end_with_close() -> None:
    rewarder = LocalRewarder(RewardSection(functions=["exact"], workers=2))
    assert rewarder._pool._workers == []
    rewarder.close()
    rewarder = LocalRewarder(RewardSection(functions=["reward_functions:process"], workers=2))
    first, second = (rewarder.score([sample("x")])[0].reward for _ in range(2))
    assert first == second == int(first) != os.getpid()  # no fraction: torch is not loaded
    assert os.getsid(int(first)) == int(first)  # Ctrl-C in the terminal does not reach it
    os.kill(int(first), signal.SIGKILL)
    wait_for_end(int(first), reap=rewarder._pool._workers[0].process)
    third = rewarder.score([sample("x")])[0].reward
    assert third not in (first, math.nan)
    rewarder.close()
    rewarder.close()
    assert not Path(f"/proc/{int(third)}").exists()


def wait_for_end(pid: int, reap: subprocess.Popen[bytes] | None = None) -> None:
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        if reap is not None:
            reap.poll()
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} is still alive")


def test_workers_end_with_a_parent_that_is_killed() -> None:
    program = (
        "import sys, threading, time\n"
        "from paceline.config import RewardSection\n"
        "from paceline.tasks.rewards import LocalRewarder, Sample\n"
        "r = LocalRewarder(RewardSection(functions=['reward_functions:scripted'], workers=1, timeout_s=100.0))\n"
        "threading.Thread(target=r.score, args=([Sample('s', '?', 'hang', (1,), {})],), daemon=True).start()\n"
        "while [w.state for w in r._pool._workers] != ['calling']: time.sleep(0.05)\n"
        "time.sleep(0.3)\n"
        "print(r._pool._workers[0].process.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        os.kill(worker, 0)
        parent.kill()
    wait_for_end(worker)


def test_an_interrupted_batch_leaves_no_stale_answers(workers: Pool) -> None:
    def interrupt() -> None:
        time.sleep(1.0)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    call = {"prompts": [0], "completions": ["hang"], "completion_ids": [[]]}
    with pytest.raises(KeyboardInterrupt):
        workers.map(checks.user_check, ("reward_functions:scripted",), [(call,)], 60.0)
    assert workers.map(checks.exact_check, (None,), [("2", {"answer": "2"})], 20.0) == [1.0]
