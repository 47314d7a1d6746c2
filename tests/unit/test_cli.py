from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from paceline import __version__
from paceline.cli import app
from paceline.cli.app import comma_numbers
from paceline.model.text import Pieces


@pytest.fixture
def run():
    """run("generate", …) -> result, with stdout and stderr apart. A traceback is never an answer."""

    def call(*words, code=0, text=None):
        result = CliRunner().invoke(app, [str(word) for word in words], input=text, env={"COLUMNS": "200"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return call


@pytest.fixture(scope="module")
def tiny(checkpoint):
    return checkpoint("llama")


def test_help_and_version(run):
    assert __version__ in run("--version").stdout
    for command in (["generate"], ["bench", "rollout"], ["verify"], ["doctor"], ["pull"]):
        text = run(*command, "--help").stdout
        assert "Usage" in text
        if command not in (["doctor"], ["pull"]):
            assert "Examples" in text
            assert "--json" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate"], "no prompt"),
        (["generate", ""], "a prompt is empty"),
        (["generate", "x", "--set", "sampling.temprature=1"], "did you mean sampling.temperature?"),
        (["generate", "x", "--temperature", "nan"], "sampling.temperature"),
        (["generate", "x", "--temperature", "-1"], "sampling.temperature = -1.0"),
        (["generate", "x", "--max-tokens", "0"], "sampling.max_tokens = 0"),
        (["generate", "x", "--method", "telepathy"], "speculation.method = 'telepathy'"),
        (["generate", "x", "--config", "nowhere.toml"], "nowhere.toml does not exist"),
        (["generate", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["generate", "x", "--json", "/no/such/folder/out.json"], "/no/such/folder"),
        (["generate", "x", "--model", "no-such-model"], "no-such-model"),
        (["pull", "no-such-model"], "no-such-model"),
        (["bench", "rollout", "--engines", "tgi"], "--engines 'tgi': not one of paceline, hf, vllm"),
        (["bench", "rollout", "--modes", "magic"], "--modes 'magic'"),
        (["bench", "rollout", "--batch", "1,many"], "--batch '1,many'"),
        (["bench", "rollout", "--batch", "0"], "must be at least 1"),
        (["bench", "rollout", "--plot", "out.pdf"], "write a .png or a .html file"),
        (["verify", "--model", "no-such-model"], "no-such-model"),
    ],
)
def test_mistakes_are_one_clear_message(run, words, message):
    result = run(*words, code=2)
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_debug_shows_the_traceback(run, monkeypatch):
    monkeypatch.setenv("PACELINE_DEBUG", "1")
    with pytest.raises(ValueError, match="no prompt"):
        run("generate")


def test_generate_writes_what_it_shows(run, tiny, tmp_path):
    path = tmp_path / "out.json"
    words = ["generate", "abcabcabc", "xyz", "--model", tiny, "-n", 2, "--max-tokens", 12, "--seed", 3, "--json", path]
    result = run(*words, "--method", "suffix", "--k", 3)
    found = json.loads(path.read_text())
    assert [(c["prompt_index"], c["prompt"]) for c in found["completions"]] == [
        (0, "abcabcabc"), (0, "abcabcabc"), (1, "xyz"), (1, "xyz"),
    ]  # fmt: skip
    for c in found["completions"]:
        num = len(c["token_ids"])
        assert 0 < num <= 12
        assert len(c["logprobs"]) == len(c["raw_logprobs"]) == len(c["provenance"]) == num
        assert set(c["provenance"]) <= {"sampled", "accepted", "corrected", "bonus"}
    assert found["metrics"]["num_drafts"] > 0
    assert "drafted and accepted" in result.stdout
    assert "mean_acceptance_length" in result.stdout
    run(*words)  # the default: no speculation, and by the first promise the same tokens
    plain = json.loads(path.read_text())
    assert plain["metrics"]["num_drafts"] == 0
    assert [c["token_ids"] for c in plain["completions"]] == [c["token_ids"] for c in found["completions"]]


def test_prompts_from_stdin_and_files(run, tiny, tmp_path):
    path, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path.write_text("\n".join(map(json.dumps, [{"prompt": "one"}, {"question": "two"}, {"prompt": messages}])) + "\n\n")
    common = ["--model", tiny, "--max-tokens", 2, "--json", out]
    run("generate", "--prompts", path, *common)
    assert [c["prompt"] for c in json.loads(out.read_text())["completions"]] == ["one", "two", messages]
    run("generate", "--prompts", "-", *common, text=path.read_text())
    assert len(json.loads(out.read_text())["completions"]) == 3
    run("generate", "-", "--raw", *common, text="ab\ncd")
    (only,) = json.loads(out.read_text())["completions"]
    assert only["prompt"] == "ab\ncd"
    assert len(only["prompt_ids"]) == 5  # a byte tokenizer and no template
    path.write_text('{"prompt": "fine"}\n{"promt": "typo"}\n')
    assert "line 2: needs `prompt` or `question`" in run("generate", "--prompts", path, *common, code=2).stderr
    path.write_text("{\n")
    assert "line 1: not valid JSON" in run("generate", "--prompts", path, *common, code=2).stderr


def test_a_prompt_longer_than_the_context(run, tiny):
    result = run("generate", "x" * 500, "--model", tiny, code=2)
    assert "context is 128" in result.stderr


def test_pieces_never_split_a_character():
    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode(errors="replace")

    ids = list("aé€b".encode())
    assert Pieces(Bytes())(ids) == ["a", "", "é", "", "", "€", "b"]
    assert "".join(Pieces(Bytes())(ids[:2])) == "a\ufffd"


def test_comma_numbers():
    assert comma_numbers("--batch", "1, 4,16,4") == (1, 4, 16)
    with pytest.raises(ValueError, match="--batch"):
        comma_numbers("--batch", "-1")


def test_a_closed_pipe_is_no_error(tiny):
    command = [sys.executable, "-m", "paceline.cli", "pull", str(tiny)]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": [{"role": "user", "content": 3}]}', "both strings"),
        ('{"prompt": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}', "both strings"),
        ('{"prompt": [{"role": 1, "content": "x"}]}', "both strings"),
        ('{"prompt": "\\ud800"}', "not valid Unicode"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_odd_prompts_are_mistakes_not_tracebacks(run, tiny, tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    assert message in run("generate", "--prompts", path, "--model", tiny, code=2).stderr


def test_a_byte_order_mark_is_no_mistake_and_utf16_is(run, tiny, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hi"}\n', encoding="utf-8-sig")
    run("generate", "--prompts", path, "--model", tiny, "--max-tokens", 2)
    path.write_text('{"prompt": "hi"}\n', encoding="utf-16")
    assert f"{path}, line 1: not UTF-8" in run("generate", "--prompts", path, "--model", tiny, code=2).stderr.replace(
        "\n", ""
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": "3"}, "num_hidden_layers = '3'"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"rms_norm_eps": "a"}, "rms_norm_eps = 'a'"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM"),
    ],
)
def test_a_broken_config_names_its_key(run, tiny, tmp_path, change, message):
    for file in tiny.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tiny / "config.json").read_text()) | change
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert message in run("generate", "hi", "--model", tmp_path, code=2).stderr.replace("\n", " ")


def test_too_much_kv_memory_is_a_mistake(run, tiny):
    words = ["generate", "hi", "--model", tiny, "--set", "engine.kv_tokens=1000000000000"]
    assert "engine.kv_tokens = 1000000000000" in run(*words, code=2).stderr


def test_json_goes_through_links_and_into_pipes(run, tiny, tmp_path):
    target, link, pipe = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    common = ["generate", "hi", "--model", tiny, "--max-tokens", 2, "--json"]
    run(*common, link)
    assert link.is_symlink()
    assert len(json.loads(target.read_text())["completions"]) == 1
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        run(*common, pipe)
        assert len(json.loads(reader.communicate(timeout=30)[0])["completions"]) == 1
    assert pipe.is_fifo()


def test_verify_and_bench_say_when_the_context_is_too_short(run, tiny, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 100}) + "\n")
    assert "context of 128" in run("verify", "--quick", "--model", tiny, "--prompts", path, code=2).stderr
    words = ["bench", "rollout", "--model", tiny, "--engines", "paceline", "--max-tokens", 500, "--batch", 1]
    assert "the context of" in run(*words, code=2).stderr
