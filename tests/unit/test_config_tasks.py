"""`[[task]]`: several tasks in a config, in overrides, in errors and in `paceline config`."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.build.config import load_config, make_config, with_absolute_paths
from paceline.cli import app
from paceline.config import Config, MixedTaskSection, RewardSection
from paceline.config_io import ConfigError, dump_config

TWO = """
[sampling]
max_tokens = 100
[[task]]
label = "sums"
weight = 0.7
max_tokens = 24
params = { min_terms = 2 }
held_out = 5
[task.reward]
answer_pattern = "x"
[[task]]
label = "text"
kind = "jsonl"
name = "x.jsonl"
reward = { functions = ["math", "format"], weights = [1.0, 0.5] }
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "two.toml").write_text(TWO)
    return tmp_path / "two.toml"


def test_every_task_has_its_own_settings(path: Path) -> None:
    sums, text = load_config(path).tasks
    assert (sums.label, sums.weight, sums.max_tokens, sums.section.held_out) == ("sums", 0.7, 24, 5)
    assert (text.label, text.weight, text.max_tokens, text.section.held_out) == ("text", 1.0, 100, 64)
    assert (sums.reward.functions, sums.reward.answer_pattern) == (["gym"], "x")
    assert (text.reward.functions, text.reward.answer_pattern) == (["math", "format"], None)
    (only,) = load_config(None, ["task.name=lcm", "reward.workers=3", "sampling.max_tokens=7"]).tasks
    assert (only.label, only.section.name, only.reward.workers, only.max_tokens) == (None, "lcm", 3, 7)


def test_it_round_trips(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.toml") == config
    assert repr(load_config(tmp_path / "config.toml")) == repr(config)
    assert Config.model_validate_json(config.model_dump_json()) == config
    assert make_config(config.model_dump()) == config
    assert "\n[reward]\n" not in dump_config(config) and dump_config(config).count("[[task]]\nlabel = ") == 2


def test_paths_of_every_task_become_absolute(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").touch()
    (tmp_path / "judge").mkdir()
    found = with_absolute_paths(load_config(path, ["task.sums.reward.model=judge"])).tasks
    assert found[1].section.name == str(tmp_path / "x.jsonl")
    assert found[0].reward.model == str(tmp_path / "judge") and found[1].reward.model is None


def test_overrides_name_a_task_by_its_label(path: Path) -> None:
    given = ["task.text.weight=2", "task.sums.reward.workers=5", "task.sums.params.max_terms=3"]
    sums, text = load_config(path, given).tasks
    assert (sums.weight, text.weight) == (0.7, 2.0) and (sums.reward.workers, text.reward.workers) == (5, 2)
    assert sums.section.params == {"min_terms": 2, "max_terms": 3}


def test_one_of_the_tasks_can_be_chosen(path: Path) -> None:
    config = load_config(path, ["task=text"])
    assert [task.label for task in config.tasks] == ["text"] and config.only_task("x") == config.tasks[0]
    with pytest.raises(ValueError, match=r"eval uses one task, but the config has several: sums, text; .* task=sums"):
        load_config(path).only_task("eval")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.kind=env", "override 'task.kind=env': task is a list; write task.sums.kind or task.text.kind"),
        ("task.params.x=1", "override 'task.params.x=1': there is no 'params'; the labels are sums, text"),
        ("task=sum", "override 'task=sum': there is no 'sum'; the labels are sums, text"),
        (
            "task.sums.weight=0",
            "task.sums: weight = 0: must be a finite number above 0; a task that is not to be trained on must be "
            "removed from the config",
        ),
        (
            "task.sums.weight=nan",
            "task.sums: weight = nan: must be a finite number above 0; a task that is not to be trained on must be "
            "removed from the config",
        ),
        ("task.sums.weight=x", "task.sums.weight = 'x': expected a number"),
        ("task.sums.wieght=2", "unknown key task.sums.wieght: did you mean task.sums.weight?"),
        ("task.sums.lr=2", "unknown key task.sums.lr: Paceline's name is learner.learning_rate"),
        ("task.sums.reward.workers=x", "task.sums.reward.workers = 'x': expected an integer >= 1"),
        (
            "task.text.reward.functions=['math']",
            "task.text.reward: reward.weights has 2 entries, reward.functions 1; give one each",
        ),
        ("task.text.label=sums", 'task.label = "sums": 2 tasks have this label; give each its own'),
        ("task.text.label=a b", "task.2.label = 'a b': expected a string matching ^[A-Za-z0-9_-]+$"),
        (
            "task.text.label=kind",
            'task.kind: label = "kind": this is the name of a key of a task; choose another label',
        ),
        ("task=[{}]", "task.1.label is not set: expected a string matching ^[A-Za-z0-9_-]+$"),
        ("task=[]", "task = []: the list of tasks is empty; write at least one [[task]], or one [task]"),
        (
            "reward.workers=3",
            "reward: with [[task]] each task has its own; write [task.reward] below each [[task]], or set "
            "task.sums.reward.functions (the tasks are sums, text)",
        ),
        (
            "task.sums.max_tokens=101",
            "task.sums.max_tokens = 101: must be at most sampling.max_tokens = 100, which is the maximum of all tasks; "
            "raise that, or lower this",
        ),
        (
            "algorithm.overlong_buffer=5",
            "task.sums.max_tokens = 24: the penalty of algorithm.overlong_buffer = 5 is for lengths near "
            "sampling.max_tokens, which this task never reaches; remove one of the two",
        ),
    ],
)
def test_errors_name_the_task(path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(path, [override])
    assert str(error.value) == message


def test_a_list_entry_must_be_a_section(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^task\.1 = 3: expected a section with the keys kind, .*label"):
        load_config(path, ["task=[3]"])


def test_a_single_task_has_no_label_or_weight() -> None:
    for key in ("weight=2", "label=a", "sums.weight=2"):
        with pytest.raises(ConfigError, match=rf"^unknown key task\.{key.partition('=')[0].partition('.')[0]}: "):
            load_config(None, [f"task.{key}"])


def test_audits_need_single_turns_in_all_tasks(path: Path) -> None:
    with pytest.raises(ConfigError, match=r'speculation\.audit_every = 2: with task\.kind = "env"'):
        load_config(path, ["speculation.audit_every=2", "task.text.kind=env"])


# ---- paceline config ----


def config_command(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["config", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_prints_every_task(path: Path) -> None:
    assert make_config(tomllib.loads(config_command(path))) == load_config(path)
    assert config_command(path, "task.text.weight=2", "--changed").splitlines() == [
        "[sampling]",
        f"max_tokens = 100  # from {path}; default: 128",
        "",
        "[[task]]",
        f'label = "sums"  # from {path}; default: not set',
        f'params = {{"min_terms" = 2}}  # from {path}; default: {{}}',
        f"held_out = 5  # from {path}; default: 64",
        f"weight = 0.7  # from {path}; default: 1.0",
        f"max_tokens = 24  # from {path}; default: not set",
        "",
        "[task.reward]",
        f'answer_pattern = "x"  # from {path}; default: not set',
        "",
        "[[task]]",
        f'label = "text"  # from {path}; default: not set',
        f'kind = "jsonl"  # from {path}; default: "reasoning_gym"',
        f'name = "x.jsonl"  # from {path}; default: "chain_sum"',
        "weight = 2.0  # from the argument task.text.weight=2; default: 1.0",
        "",
        "[task.reward]",
        f'functions = ["math", "format"]  # from {path}; default: ["gym"]',
        f"weights = [1.0, 0.5]  # from {path}; default: not set",
    ]


def test_the_command_explains_the_keys_of_a_task(path: Path) -> None:
    assert config_command(path, "--explain", "task.sums.weight").splitlines() == [
        "task.sums.weight",
        "  Share of the groups, relative to the other tasks.",
        "  values   a number",
        "  default  1.0",
        f"  now      0.7, from {path}",
    ]
    assert "now      2, from the default" in config_command(path, "--explain", "task.text.reward.workers")
    num_keys = len(MixedTaskSection.model_fields) - 1 + len(RewardSection.model_fields)
    assert config_command(path, "--explain", "task.text").count("\n\n") == num_keys - 1
    for key in ("task.kind", "task.sums.wieght", "reward.functions"):
        several = f"unknown key {key}: the config has several tasks; give task.sums or task.text, or a key of it"
        assert several in config_command(path, "--explain", key, code=2)
