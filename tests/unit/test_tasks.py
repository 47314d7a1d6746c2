"""Tasks: the same settings give the same problems, no held-out problem is trained on, no token is tokenized again."""

from __future__ import annotations

import builtins
import gzip
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import write_tokenizer

from paceline.build.config import load_config
from paceline.chat.template import continuation, encode
from paceline.config import Config, TaskSection
from paceline.config_io import dump_config
from paceline.model.store import load_tokenizer
from paceline.tasks.calculator import Calculator, calculate
from paceline.tasks.episodes import EnvTask
from paceline.tasks.gym import GymTask, make_dataset
from paceline.tasks.prompt import apply_template, prompt_identity
from paceline.tasks.table import TableTask
from paceline.tasks.task import Problem, Task, Turn

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 200 different questions


def leaks(task: Task) -> set[str]:
    """Prompts that are both trained on and held out."""
    return {prompt_identity(p.prompt) for p in task.train} & {prompt_identity(p.prompt) for p in task.held_out}


def check_names(task: Task) -> None:
    """One name for every prompt, one prompt for every name."""
    pairs = {(p.name, prompt_identity(p.prompt)) for p in [*task.train, *task.held_out]}
    assert len(pairs) == len({name for name, _ in pairs}) == len({prompt for _, prompt in pairs})


def gym(**settings: Any) -> GymTask:
    return GymTask(TaskSection(**{"name": "chain_sum", "size": 200, "held_out": 20, **settings}))


# reasoning-gym


def test_gym_problems_are_the_datasets_own():
    import reasoning_gym

    task = gym(name="gcd", seed=3)
    dataset = reasoning_gym.create_dataset("gcd", seed=3, size=200)
    kept = {p.name: p for p in task.train}
    assert len(task.train) == 200 and len(task.held_out) == 20
    for index, entry in enumerate(dataset):
        if (problem := kept.get(f"gcd/{index}")) is not None:
            assert problem.prompt == entry["question"]
            assert problem.columns["answer"] == entry["answer"]
            assert problem.columns["entry"] == entry
    assert "gcd/0" in kept and len(kept) > 150


def test_gym_is_deterministic_and_a_larger_size_keeps_the_first_problems():
    small, again, large = gym(), gym(), gym(size=300)
    assert (small.train, small.held_out) == (again.train, again.held_out)
    assert large.train[:200] == small.train and large.held_out == small.held_out
    assert gym(seed=1).train != small.train
    many = gym(
        params={"min_terms": 5, "min_digits": 4}, seed=7
    )  # with many different questions the held-out ones are not among the training ones
    assert [p.name for p in many.train] == [f"chain_sum/{i}" for i in range(200)]


@pytest.mark.parametrize(("size", "held_out"), [(1024, 64), (1024, 150), (50, 64), (300, 0)])
def test_no_question_leaks_if_there_are_few(size, held_out):
    task = gym(params=ONE_DIGIT, size=size, held_out=held_out)
    assert len(task.train) == size and len(task.held_out) == held_out
    assert leaks(task) == set()
    assert len({prompt_identity(p.prompt) for p in task.held_out}) == held_out
    check_names(task)


def test_leaks_are_detected():
    """Another seed alone does not prevent leaks."""
    first, second = gym(params=ONE_DIGIT, held_out=0), gym(params=ONE_DIGIT, held_out=0, seed=1)
    first.held_out = second.train
    assert leaks(first)
    with pytest.raises(AssertionError):
        check_names(first)


def test_gym_errors_name_the_key():
    with pytest.raises(ValueError, match=r"task\.held_out = 201.*too few different questions"):
        gym(params=ONE_DIGIT, held_out=201)
    with pytest.raises(ValueError, match=r"task\.held_out = 200"):  # nothing would be left to train on
        gym(params=ONE_DIGIT, held_out=200)
    with pytest.raises(ValueError, match=r"task\.name = 'chain_sun'.*chain_sum"):
        gym(name="chain_sun")
    with pytest.raises(ValueError, match=r"similar names are [a-z_0-9]+, [a-z_0-9]+, [a-z_0-9]+$"):
        gym(name="./nothing/like/it.json")
    with pytest.raises(ValueError, match=r"task\.params\.min_term.*min_terms.*allow_negation"):
        gym(params={"min_term": 2})
    with pytest.raises(ValueError, match=r"task\.params.*max_terms must be >= min_terms"):
        gym(params={"min_terms": 5, "max_terms": 2})
    with pytest.raises(ValueError, match=r"task\.params.*min_digits"):
        gym(params={"min_digits": "one"})
    with pytest.raises(ValueError, match=r"task\.params\.seed.*task\.seed"):
        gym(params={"seed": 2})


def test_gym_scores_with_the_datasets_own_scorer():
    for name, params in (("chain_sum", ONE_DIGIT), ("countdown", {}), ("arc_agi", {})):
        problem = gym(name=name, params=params, size=2, held_out=1).train[0]
        entry = problem.columns["entry"]
        json.dumps(entry)
        assert make_dataset(name, params).score_answer(problem.columns["answer"], entry) == 1.0, name
        assert make_dataset(name, params).score_answer("no idea", entry) < 0.1, name
        assert make_dataset(name, params).score_answer(None, entry) < 0.1, name
    countdown = {"question": "", "answer": "", "metadata": {"numbers": [2, 3, 4], "target": 14, "expression": ""}}
    assert make_dataset("countdown", {}).score_answer("2 + 3*4", countdown) == 1.0  # any correct expression
    assert make_dataset("countdown", {}).score_answer("2 + 3 + 4", countdown) < 1.0


def test_gym_composite_takes_tables():
    params = {"datasets": [{"name": "gcd", "weight": 1, "config": {}}, {"name": "lcm", "weight": 1, "config": {}}]}
    task = gym(name="composite", params=params, size=20, held_out=2)
    assert {p.columns["entry"]["metadata"]["source_dataset"] for p in task.train} == {"gcd", "lcm"}
    assert (
        make_dataset("composite", params).score_answer(task.train[0].columns["answer"], task.train[0].columns["entry"])
        == 1.0
    )


# tables


def table(path: Path, rows: list[Any], **settings: Any) -> TableTask:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return TableTask(TaskSection(**{"kind": "jsonl", "name": str(path), "held_out": 1, **settings}))


def all_of(task: Task) -> dict[str, Problem]:
    return {p.name: p for p in [*task.train, *task.held_out]}


def test_gsm8k_rows_work_as_they_are(tmp_path):
    rows = [
        {"question": f"Ann has {i} apples.", "answer": f"She had <<{i}>>.\n#### 1,{i:03d} ", "id": i} for i in range(4)
    ]
    for file in ("gsm.jsonl", "gsm.jsonl.gz"):
        found = all_of(table(tmp_path / file, rows))
        assert sorted(found) == [f"gsm/{i}" for i in range(4)]
        assert found["gsm/2"].prompt == "Ann has 2 apples."
        assert found["gsm/2"].columns == {"answer": "1002", "solution": rows[2]["answer"], "id": 2}


def test_columns_by_name_messages_and_numbers(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    rows = [{"q": chat, "a": 4, "tests": ["x"]}, {"q": "3+3?", "a": "6"}]
    found = all_of(table(tmp_path / "t.jsonl", rows, prompt_column="q", answer_column="a"))
    assert found["t/0"].prompt == chat
    assert found["t/0"].columns == {"answer": "4", "a": 4, "tests": ["x"]}
    templated = all_of(
        table(tmp_path / "t.jsonl", rows, prompt_column="q", answer_column="a", template="Q: {prompt} {A}", system="S")
    )
    assert templated["t/0"].prompt == chat  # messages with their own system message are not changed
    assert templated["t/1"].prompt == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q: 3+3? {A}"},
    ]


def test_duplicates_share_a_name_and_never_leak(tmp_path):
    # Every prompt three times, once as a message.
    rows = [{"prompt": f"p{i % 20}", "answer": str(i)} for i in range(40)]
    rows += [{"prompt": [{"role": "user", "content": f"p{i}"}], "answer": "0"} for i in range(20)]
    for seed in range(5):
        task = table(tmp_path / "t.jsonl", rows, held_out=7, seed=seed)
        check_names(task)
        assert leaks(task) == set()
        assert len(task.held_out) == 7 and len(task.train) == 39
        assert all(int(name.split("/")[1]) < 20 for name in all_of(task))
        again = table(tmp_path / "t.jsonl", rows, held_out=7, seed=seed)
        assert (again.train, again.held_out) == (task.train, task.held_out)
    other = table(tmp_path / "t.jsonl", rows, held_out=7, seed=5)
    assert {p.name for p in other.held_out} != {p.name for p in task.held_out}
    small = table(tmp_path / "t.jsonl", rows, held_out=7, seed=4, size=5)
    assert small.train == task.train[:5] and small.held_out == task.held_out


GOOD = {"prompt": "1+1?", "answer": "2"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "x"', "not valid JSON"),
        ("1", r"must be an object like .*; fix or remove the line$"),
        ('[{"prompt": "x"}]', r"must be an object like .*; write one object per line, not an array$"),
        ("[", "write one object per line, not an array$"),
        ({"text": "x", "answer": "1"}, "needs `prompt` or `question`.*`text`.*task.prompt_column"),
        ({"prompt": " ", "answer": "1"}, "non-empty string"),
        ({"prompt": 3, "answer": "1"}, "non-empty string"),
        ({"prompt": [], "answer": "1"}, "list of messages"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "list of messages"),
        ('{"prompt": "\\ud800", "answer": "1"}', "not valid Unicode"),
        ({"prompt": "x"}, "no `answer`.*task.answer_column"),
        ({"prompt": "x", "answer": None}, "no `answer`"),
        ({"prompt": "x", "answer": "so ####"}, "nothing after ####"),
        ({"prompt": "x", "answer": "1", "completions": 1}, "`completions`.*rename"),
    ],
)
def test_an_invalid_line_is_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=rf"(?s)t\.jsonl, line 3: .*{message}"):
        table(tmp_path / "t.jsonl", [GOOD, "", row, {"prompt": "y", "answer": "1"}])


def test_a_table_without_answers_can_be_resumed(tmp_path):
    """A run's config.toml contains every setting, `answer_column` too."""
    (tmp_path / "t.jsonl").write_text('{"prompt": "x", "tests": []}\n')
    config = Config(task=TaskSection(kind="jsonl", name=str(tmp_path / "t.jsonl"), held_out=0))
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert len(TableTask(load_config(tmp_path / "config.toml").task).train) == 1


def test_invalid_files_and_settings(tmp_path, monkeypatch):
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2: not UTF-8"):
        TableTask(TaskSection(kind="jsonl", name=str(tmp_path / "b.jsonl")))
    whole = gzip.compress(json.dumps(GOOD).encode() * 1000)
    (tmp_path / "half.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"half\.jsonl\.gz: the archive is damaged or cut off"):
        TableTask(TaskSection(kind="jsonl", name=str(tmp_path / "half.jsonl.gz")))
    for name in ("absent.jsonl", "."):
        with pytest.raises(ValueError, match=r"task\.name = "):
            TableTask(TaskSection(kind="jsonl", name=str(tmp_path / name)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=re.escape(f"'absent.jsonl': {tmp_path / 'absent.jsonl'} can't be read: No such")
    ):
        TableTask(TaskSection(kind="jsonl", name="absent.jsonl"))
    rows = [GOOD, {"prompt": "x", "answer": "1"}]
    for settings, message in (
        ({"held_out": 2}, r"task\.held_out = 2.*only 2 different.*at most 1"),
        ({"size": 2}, r"task\.size = 2.*only 1"),
        ({"template": "no place"}, r"task\.template = 'no place'.*\{prompt\}"),
        ({"system": "S", "chat": False}, r"task\.system = 'S'.*task\.template"),
        ({"answer_column": "gold"}, r"line 1: no `gold`.*task\.answer_column"),
        ({"params": {"a": 1}}, r"task\.params"),
    ):
        with pytest.raises(ValueError, match=message):
            table(tmp_path / "t.jsonl", rows, **settings)
    with pytest.raises(ValueError, match="no rows"):
        table(tmp_path / "t.jsonl", [])


def test_a_table_without_answers(tmp_path):
    task = table(tmp_path / "t.jsonl", [{"prompt": "a"}, {"prompt": "b", "lang": "en"}])
    assert all("answer" not in p.columns for p in all_of(task).values())


def test_hugging_face_datasets_from_directories(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(5)]
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": made, "test": made.select([0, 1])}).save_to_disk(tmp_path / "dict")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for folder in ("plain", "dict", "files"):
        section = TaskSection(kind="dataset", name=str(tmp_path / folder), held_out=2)
        found = all_of(TableTask(section))
        assert {name: (p.prompt, p.columns["answer"]) for name, p in found.items()} == {
            f"{folder}/{i}": (f"q{i}", str(i)) for i in range(5)
        }
    assert (
        len(all_of(TableTask(TaskSection(kind="dataset", name=str(tmp_path / "dict"), split="test", held_out=1)))) == 2
    )
    with pytest.raises(ValueError, match=r"task\.split = 'dev'.*train, test"):
        TableTask(TaskSection(kind="dataset", name=str(tmp_path / "dict"), split="dev"))
    with pytest.raises(ValueError, match=r"files \(train\), row 0: needs `text`"):
        TableTask(TaskSection(kind="dataset", name=str(tmp_path / "files"), prompt_column="text"))


def test_without_datasets_the_error_names_the_package(monkeypatch):
    original = builtins.__import__

    def without_datasets(name: str, *args: Any) -> Any:
        if name == "datasets":
            raise ImportError("No module named 'datasets'")
        return original(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(ValueError, match=r"pip install datasets$"):
        TableTask(TaskSection(kind="dataset", name="openai/gsm8k"))


# environments


CALCULATOR = "paceline.tasks.calculator:Calculator"


def env(**settings: Any) -> EnvTask:
    return EnvTask(TaskSection(**{"kind": "env", "name": CALCULATOR, "size": 30, "held_out": 5, **settings}))


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_env_task_makes_fresh_episodes():
    task = env(system="S", params={"operators": "*", "max_turns": 2})
    assert len(task.train) == 30 and len(task.held_out) == 5 and leaks(task) == set()
    check_names(task)
    problem = task.train[0]
    assert problem.make_agent is not None and problem.name == "Calculator/0"
    agents = problem.make_agent(), pickle.loads(pickle.dumps(problem.make_agent))()
    first, second = (agent.make_env() for agent in agents)
    assert all(agent.template(e.reset()) == problem.prompt for agent, e in zip(agents, (first, second), strict=True))
    assert problem.prompt[0] == {"role": "system", "content": "S"}
    first.step(says("<answer>1</answer>"))
    assert second.step(says("hm")).observation is not None  # episodes are independent
    assert [p.columns for p in env().train] == [p.columns for p in env().train]
    assert [p.columns for p in env(seed=1).train] != [p.columns for p in env().train]


def test_few_or_finitely_many_env_problems():
    few = {"min_digits": 1, "max_digits": 1, "operators": "+"}  # 81 problems
    task = env(params=few, size=200, held_out=40)
    assert len(task.train) == 200 and len(task.held_out) == 40 and leaks(task) == set()
    check_names(task)
    with pytest.raises(ValueError, match=r"task\.held_out = 82"):
        env(params=few, held_out=82)
    guess = EnvTask(TaskSection(kind="env", name=f"{__name__}:Guess", held_out=0))
    assert [p.columns["secret"] for p in guess.train] == list(range(10))  # equal prompts, different episodes
    with pytest.raises(ValueError, match=r"task\.size = 11"):
        EnvTask(TaskSection(kind="env", name=f"{__name__}:Guess", held_out=0, size=11))
    with pytest.raises(ValueError, match=r"task\.held_out = 1.*too few different prompts.*\(1 "):
        EnvTask(TaskSection(kind="env", name=f"{__name__}:Guess", held_out=1))


def test_no_prompt_leaks_if_other_arguments_differ():
    task = EnvTask(TaskSection(kind="env", name=f"{__name__}:Numbered", size=100, held_out=10))
    assert len(task.train) == 100 and len(task.held_out) == 10
    assert leaks(task) == set()
    check_names(task)


class Guess:
    def __init__(self, secret: int) -> None:
        self.secret = secret

    @staticmethod
    def problems(seed: int) -> list[dict[str, Any]]:
        return [{"secret": secret} for secret in range(10)]

    def reset(self) -> str:
        return "Guess my number."

    def step(self, message: dict[str, Any]) -> Turn:
        return Turn(None, float(message["content"] == str(self.secret)))


class Numbered(Guess):
    """Every problem has its own `uid`, but there are only 20 prompts."""

    def __init__(self, secret: int, uid: str) -> None:
        super().__init__(secret)

    @staticmethod
    def problems(seed: int) -> Any:
        return ({"secret": i % 20, "uid": f"{seed}-{i}"} for i in range(1000))

    async def reset(self) -> str:
        return f"Say {self.secret}."


class Broken(Guess):
    """Raises where `how` names it."""

    def __init__(self, secret: Any) -> None:
        super().__init__(secret)
        if secret == "init":
            raise KeyError("no such episode")

    @staticmethod
    def problems(seed: int, how: str) -> Any:
        if how == "no list":
            return None
        if how == "no arguments":
            return [5]
        return Broken._problems(how)

    @staticmethod
    def _problems(how: str) -> Any:
        yield {"secret": 1}
        if how == "problems":
            raise ValueError("no more problems")
        yield {"secret": how}

    def reset(self) -> Any:
        if self.secret == "reset":
            raise RuntimeError("no prompt")
        return None if self.secret == "none" else f"Say {self.secret}."


@pytest.mark.parametrize("system", ["", "S"])
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("problems", r"Broken\.problems\(\) raised ValueError: no more problems"),
        ("no list", r"Broken\.problems\(\) raised TypeError: 'NoneType' object is not iterable"),
        ("no arguments", r"5 raised TypeError"),
        ("init", r"\{'secret': 'init'\} raised KeyError: 'no such episode'"),
        ("reset", r"\{'secret': 'reset'\} raised RuntimeError: no prompt"),
        ("none", r"the prompt of \{'secret': 'none'\} must be a non-empty string"),
    ],
)
def test_a_broken_environment_is_named(how, reason, system):
    with pytest.raises(ValueError, match=rf"task\.name = '{__name__}:Broken': .*{reason}"):
        env(name=f"{__name__}:Broken", params={"how": how}, system=system)


@pytest.mark.parametrize(
    ("source", "reason"),
    [("def", "SyntaxError"), ("1 / 0", "ZeroDivisionError"), ("import sys; sys.exit(3)", "SystemExit: 3")],
)
def test_a_module_that_can_not_be_imported_is_named(tmp_path, monkeypatch, source, reason):
    (tmp_path / "my_broken_env.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=rf"task\.name = 'my_broken_env:Env': my_broken_env can't be imported.*{reason}"
    ):
        env(name="my_broken_env:Env")


def test_env_errors_name_the_key():
    for settings, message in (
        ({"name": "Calculator"}, r"task\.name = 'Calculator'.*module:EnvClass"),
        ({"name": "absent_module:Env"}, r"task\.name.*can't be imported"),
        ({"name": "paceline.tasks.calculator:Absent"}, r"task\.name.*no class Absent"),
        ({"name": "paceline.tasks.task:Problem"}, r"task\.name.*no problems\(\)"),
        ({"params": {"digits": 2}}, r"task\.params = .*digits.*min_digits"),
        ({"params": {"min_digits": 5, "max_digits": 2}}, r"task\.params\.min_digits"),
        ({"params": {"operators": "/"}}, r"task\.params\.operators"),
    ):
        with pytest.raises(ValueError, match=message):
            env(**settings)


def test_the_calculator_calculates_and_scores():
    episode = Calculator("12 * 34", max_turns=3)
    assert "12 * 34" in episode.reset()
    turn = episode.step(says("Let me see: <calc>12*34</calc> and <calc>1/0</calc>"))
    assert turn.observation == [{"role": "user", "content": "12*34 = 408\n1/0 = error: division by zero"}]
    assert episode.step(says("hm")).observation is not None
    assert episode.step(says("so <answer>+408</answer>")) == Turn(None, 1.0)
    with pytest.raises(AssertionError, match="single-use"):
        episode.step(says("again"))
    assert Calculator("12 * 34").step(says("<answer>409</answer>")) == Turn(None, 0.0)
    assert Calculator("12 * 34").step(says("<answer>12 * 34</answer>")) == Turn(None, 0.0)  # not a number
    assert Calculator("12 * 34").step(says("<answer>408</answer> no, <answer>9</answer>")) == Turn(None, 0.0)
    assert Calculator("1200 * 3").step(says("<answer> 3,600 </answer>")) == Turn(None, 1.0)
    assert Calculator("12 * 34", max_turns=1).step(says("<calc>12*34</calc>")) == Turn(None, 0.0)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2+3*4", "14"), ("(2+3)*4", "20"), ("-7//2", "-4"), ("7 % 3", "1"), ("1/8", "0.125"), ("0.1+0.2", "0.3"),
        ("2**10", "1024"), ("2**-1", "0.5"), ("1,234 × 2", "2468"), ("9999999999*9999999999", "99999999980000000001"),
    ],
)  # fmt: skip
def test_calculate(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "", "2+", "1.2.3", "()", "(1)(2)", "007", "1/0", "0**-1", "2**0.5", "9**9**9", "9**9**9**9", "2**-(9**99)",
        "99**99**9*0", "(" * 150 + "1", "1" + "*9" * 500, "1e9", "__import__('os')", "a", "[1]*9", "1 if 1 else 2",
        "1\n2", "x:=1", "9" * 199 + "**9", "(9**99)**99",
    ],
)  # fmt: skip
def test_calculate_refuses(expression):
    with pytest.raises(ValueError):  # computing some of these would never finish
        calculate(expression)


# prompts


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return load_tokenizer(directory)


@pytest.fixture(scope="module", params=["bytes", "smollm2", "inst"])
def tokenizer(request: pytest.FixtureRequest, byte_tokenizer: Any) -> Any:
    if request.param == "smollm2":
        return load_tokenizer(request.getfixturevalue("smollm2"))
    if request.param == "bytes":
        return byte_tokenizer
    made = load_tokenizer(byte_tokenizer.name_or_path)
    made.chat_template = (  # another format: turns without headers, a closing token without a newline
        "{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}<|im_end|>"
        "{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
        "{% if add_generation_prompt %} {% endif %}"
    )
    return made


def test_encode_uses_the_chat_template(tokenizer):
    messages = [{"role": "user", "content": "Why is 1 < 2? 你好\n"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert encode(tokenizer, messages) == encode(tokenizer, messages[0]["content"]) == tuple(expected)
    assert encode(tokenizer, "Why?", chat=False) == tuple(tokenizer.encode("Why?"))
    with pytest.raises(ValueError, match="turned off"):
        encode(tokenizer, messages, chat=False)
    with pytest.raises(ValueError, match="not valid Unicode"):
        encode(tokenizer, "\ud800")


OBSERVATIONS = [
    [{"role": "user", "content": "12*34 = 408"}],
    [{"role": "user", "content": "\n\n 你好 <|im_end|> x"}, {"role": "user", "content": "go on"}],
]


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("num_closed", [0, 1, 2])
def test_continuation_gives_the_ids_of_the_whole_conversation(tokenizer, observation, num_closed):
    """Three turns. The policy emits none, one or two of the closing tokens itself."""
    conversation: list[dict[str, Any]] = [{"role": "user", "content": "What is 12*34?"}]
    ids = encode(tokenizer, conversation)
    closing = tokenizer.encode("<|im_end|>\n" if "im_start" in tokenizer.chat_template else "<|im_end|>")[:num_closed]
    for text in ("Let me see:\n<calc>12*34</calc>", "So 408", "Yes."):
        completion = [*tokenizer.encode(text, add_special_tokens=False), *closing]
        between = continuation(tokenizer, observation, True, completion)
        ids += (*completion, *between)
        conversation += [{"role": "assistant", "content": text}, *observation]
        assert ids == encode(tokenizer, conversation)


def test_continuation_does_not_repeat_the_end_token(smollm2):
    """Also for ids that differ from the tokenization of their text."""
    tokenizer = load_tokenizer(smollm2)
    letters = [tokenizer.encode(letter)[0] for letter in "hello"]
    assert tokenizer.encode("hello") != letters
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    open_turn = continuation(tokenizer, OBSERVATIONS[0], True, letters)
    closed_turn = continuation(tokenizer, OBSERVATIONS[0], True, [*letters, end])
    assert open_turn == (end, *closed_turn)
    assert closed_turn[0] != end


def test_without_a_template_the_continuation_is_the_observations_text(byte_tokenizer):
    assert continuation(byte_tokenizer, OBSERVATIONS[0], False, []) == tuple(byte_tokenizer.encode("12*34 = 408"))


def test_apply_template():
    assert apply_template("2+2", TaskSection(template="{prompt} = ?")) == "2+2 = ?"
    messages = [{"role": "user", "content": "x"}]
    assert apply_template(messages, TaskSection(template="{prompt}!")) == messages
    assert apply_template(messages, TaskSection(system="S"))[0] == {"role": "system", "content": "S"}
