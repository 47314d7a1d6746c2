"""`paceline config`: all settings as TOML, and explanations of keys."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.build.config import load_config, make_config
from paceline.cli import app
from paceline.config import Config
from paceline.config_io import all_keys

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command() -> Any:
    def call(*arguments: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["config", *map(str, arguments)])
        assert result.exit_code == code, result.output
        return result.output

    return call


def test_it_prints_every_key_and_the_same_settings(command: Any) -> None:
    path = ROOT / "configs/gsm8k.toml"
    given = ["model.device=cuda", "sampling.stop=['a # b']", "speculation.num_speculative_tokens=3"]
    text = command(path, *given)
    assert make_config(tomllib.loads(text)) == load_config(path, given)
    for key in all_keys(Config):
        name = key.partition(".")[2]
        assert f"\n{name} = " in text or f"\n# {name} is not set\n" in f"{text}\n", key


def test_values_that_are_not_defaults_are_marked_with_their_source(command: Any, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[model]\ndevice = "cuda"\n[train]\nnum_steps = 7\nseed = 0\n')
    text = command(path, "--changed", "engine.order=longest", "--set", "train.groups_per_step=2")
    assert text.splitlines() == [
        "[model]",
        'dtype = "bfloat16"  # from the default on a GPU; default: "float32"',
        f'device = "cuda"  # from {path}; default: "cpu"',
        "",
        "[engine]",
        "max_num_seqs = 256  # from the default on a GPU; default: 32",
        "max_num_batched_tokens = 16384  # from the default on a GPU; default: 512",
        'order = "longest"  # from the argument engine.order=longest; default: "arrival"',
        "",
        "[speculation]",
        "num_speculative_tokens = 7  # from the default on a GPU; default: 4",
        "",
        "[train]",
        f"num_steps = 7  # from {path}; default: 100",
        "groups_per_step = 2  # from the argument train.groups_per_step=2; default: 8",
    ]
    assert "seed" not in text, "a value equal to the default"


def test_explanation_of_a_key(command: Any, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[engine]\nmax_num_seqs = 64\n")
    assert command(path, "--explain", "engine.max_num_seqs").splitlines() == [
        "engine.max_num_seqs",
        "  Maximum sequences in a step; on a GPU 256 by default.",
        "  values   an integer >= 1",
        "  default  32; on a GPU 256",
        f"  now      64, from {path}",
    ]
    both = command(path, "engine.max_num_seqs=8", "--explain", "engine.max_num_seqs")
    assert "now      8, from the argument engine.max_num_seqs=8" in both
    assert "now      not set, from the default" in command("--explain", "model.yarn_factor")
    assert "values   a number > 0 and < 1" in command("--explain", "draft.online_drop")
    assert "Learning rate of AdamW" in command("--explain", "draft.learning_rate"), "an inherited comment"


def test_every_key_has_an_explanation(command: Any) -> None:
    for section in Config.model_fields:
        text = command("--explain", section)
        keys = [key for key in all_keys(Config) if key.startswith(f"{section}.")]
        assert [line for line in text.splitlines() if line[:1].strip()] == keys
        assert "\n  .\n" not in text, "a key without a comment"


def test_unknown_keys(command: Any) -> None:
    assert "did you mean train.num_steps?" in command("--explain", "train.num_step", code=2)
    assert "Paceline's name is learner.learning_rate" in command("--explain", "train.lr", code=2)
    assert "Paceline's name is algorithm.num_generations" in command("--explain", "group_size", code=2)
    assert command("--explain", "engine.vllm.max_model_len").startswith("engine.vllm\n")


def test_the_output_is_toml_whatever_the_arguments(tmp_path: Path) -> None:
    argument = 'task.system="""a\n[train]\nnum_steps = 1"""'
    result = CliRunner().invoke(app, ["config", argument])
    assert result.exit_code == 0, result.output
    written = tomllib.loads(result.stdout)
    assert written["task"]["system"] == "a\n[train]\nnum_steps = 1" and written["train"]["num_steps"] == 100
