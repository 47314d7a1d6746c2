from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import typer
from gguf_files import TOKENS, write_gguf
from typer.testing import CliRunner

from paceline import __version__
from paceline.bench.drafts import compare_drafts
from paceline.build.config import load_config
from paceline.build.drafter import build_drafter
from paceline.build.engine import build_engine
from paceline.cli import app, generate
from paceline.cli.app import comma_numbers, exit_if, results_so_far, stop_on_signal
from paceline.cli.completions import CompletionPrinter
from paceline.console import SafeConsole, escape_controls
from paceline.engine.engine import LocalEngine
from paceline.engine.runner import Runner
from paceline.model.text import Pieces
from paceline.types import Request, SamplingParams


@pytest.fixture
def run():
    """run("generate", …) -> result, with separate stdout and stderr. Uncaught exceptions are raised."""

    def call(*arguments, code=0, text=None):
        result = CliRunner().invoke(app, list(map(str, arguments)), input=text, env={"COLUMNS": "200"})
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
    ("arguments", "message"),
    [
        (["generate"], "no prompt"),
        (["generate", ""], "a prompt is empty"),
        (["generate", "x", "--set", "sampling.temprature=1"], "did you mean sampling.temperature?"),
        (["generate", "x", "--temperature", "nan"], "sampling.temperature"),
        (["generate", "x", "--temperature", "-1"], "sampling.temperature = -1.0"),
        (["generate", "x", "--max-tokens", "0"], "sampling.max_tokens = 0"),
        (["generate", "x", "--method", "unknown"], "speculation.method = 'unknown'"),
        (["generate", "x", "--config", "nowhere.toml"], "nowhere.toml does not exist"),
        (["generate", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["generate", "x", "--json", "/no/such/folder/out.json"], "/no/such/folder"),
        (["generate", "x", "--model", "no-such-model"], "no-such-model"),
        (["pull", "no-such-model"], "no-such-model"),
        (["pull", "nowhere.gguf"], "nowhere.gguf: no such file"),
        (["pull", "x.gguf", "--dtype", "int8"], "--dtype 'int8': not one of float32, bfloat16"),
        (["pull", "smollm2-135m", "--dtype", "bfloat16"], "--dtype bfloat16 is only for GGUF files"),
        (["generate", "x", "--model", "x.gguf"], "a GGUF file must be imported first; run: paceline pull x.gguf"),
        (["bench", "rollout", "--engines", "tgi"], "--engines 'tgi': not one of paceline, hf, vllm"),
        (["bench", "rollout", "--modes", "unknown"], "--modes 'unknown'"),
        (["bench", "rollout", "--batch", "1,many"], "--batch '1,many'"),
        (["bench", "rollout", "--batch", "0"], "must be at least 1"),
        (["bench", "rollout", "--plot", "out.pdf"], "write a .png or a .html file"),
        (["verify", "--model", "no-such-model"], "no-such-model"),
    ],
)
def test_errors_are_one_message(run, arguments, message):
    result = run(*arguments, code=2)
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_debug_shows_the_traceback(run, monkeypatch):
    monkeypatch.setenv("PACELINE_DEBUG", "1")
    with pytest.raises(ValueError, match="no prompt"):
        run("generate")


def test_generate(run, tiny, tmp_path):
    path = tmp_path / "out.json"
    sampling = ["-n", 2, "--max-tokens", 12, "--seed", 3]
    arguments = ["generate", "abcabcabc", "xyz", "--model", tiny, *sampling, "--json", path]
    result = run(*arguments, "--method", "suffix", "--k", 3)
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
    assert "accepted draft" not in result.stdout and "\x1b" not in result.stdout  # no colours, so nothing to explain
    assert "mean_acceptance_length" in result.stdout
    run(*arguments)  # without speculation: the same tokens
    plain = json.loads(path.read_text())
    assert plain["metrics"]["num_drafts"] == 0
    assert [c["token_ids"] for c in plain["completions"]] == [c["token_ids"] for c in found["completions"]]


@pytest.mark.parametrize("no_color", [False, True])
def test_a_single_completion_is_streamed_on_a_terminal(run, tiny, tmp_path, monkeypatch, no_color):
    """Text is printed while it is generated, and the whole text is that of the completion."""
    screen = io.StringIO()
    monkeypatch.setattr(generate, "out", SafeConsole(file=screen, force_terminal=True, no_color=no_color, width=200))
    written = []  # before each engine step
    step = LocalEngine.step
    monkeypatch.setattr(LocalEngine, "step", lambda engine: (written.append(len(screen.getvalue())), step(engine))[1])
    path = tmp_path / "out.json"
    arguments = ["generate", "abcabcabc", "--model", tiny, "--max-tokens", 12, "--seed", 3, "--method", "suffix"]
    run(*arguments, "--set", "sampling.ignore_eos=true", "--json", path)
    assert len(set(written)) > 3
    shown = screen.getvalue()
    plain = re.sub("\x1b\\[[0-9;]*m", "", shown)
    text = json.loads(path.read_text())["completions"][0]["text"]
    assert f"{escape_controls(text)}  [length, 12 tokens]" in plain
    assert ("accepted draft" in shown) == ("\x1b[36m" in shown) == (not no_color)


def test_a_character_is_printed_when_all_its_tokens_are_known():
    screen = io.StringIO()
    printer = CompletionPrinter(SafeConsole(file=screen, width=200), Bytes())
    ids = list("a€b".encode())
    stream = printer.stream()
    for end in range(1, len(ids) + 1):
        stream.update(ids[:end], [0] * end)
        assert "\ufffd" not in screen.getvalue()
    assert screen.getvalue() == "a€b"


def test_compare(run, tiny, tmp_path):
    path = tmp_path / "out.json"
    arguments = ["generate", "abcabcabc", "--model", tiny, "--max-tokens", 12, "--method", "ngram", "--compare"]
    result = run(*arguments, "-n", 2, "--set", "sampling.ignore_eos=true", "--json", path)
    found = json.loads(path.read_text())["comparison"]
    assert found["identical"] and found["must_be_identical"] and found["num_tokens"] == 24 and found["num_rounds"] == 3
    assert found["speedup"] == pytest.approx(found["plain_s"] / found["speculative_s"])
    assert f"{found['speedup']:.2f}x with drafts, measured on 24 tokens: median of 3 rounds" in result.stdout
    assert "The tokens are identical" in result.stdout and "Less than 500 tokens" in result.stdout
    assert found["num_captured"] == 0 and "CUDA graphs" not in result.stdout


def test_compare_says_if_graphs_were_captured_in_every_try(run, tiny, monkeypatch):
    """A runner that captures a graph in every generation with drafts."""
    original, runners = LocalEngine.generate, []

    def generate_and_capture(engine, requests, progress=None):
        runners.extend([engine.runner] if engine.drafter is not None else [])
        return original(engine, requests, progress)

    monkeypatch.setattr(LocalEngine, "generate", generate_and_capture)
    monkeypatch.setattr(Runner, "num_captured", property(runners.count))
    result = run("generate", "abc", "--model", tiny, "--max-tokens", 4, "--method", "ngram", "--compare")
    assert "3 CUDA graphs were captured in the measured rounds" in result.stdout


def test_compare_fails_if_drafts_change_tokens(run, tiny, monkeypatch):
    """A broken engine that emits another token whenever it drafts."""
    original = LocalEngine.generate

    def broken(engine, requests, progress=None):
        completions = original(engine, requests, progress)
        for completion in completions if engine.drafter is not None else ():
            completion.token_ids[-1] += 1
        return completions

    monkeypatch.setattr(LocalEngine, "generate", broken)
    result = run("generate", "abc", "--model", tiny, "--max-tokens", 4, "--method", "ngram", "--compare", code=1)
    assert "The tokens DIFFER with drafts" in result.stderr and "identical" not in result.stdout


def test_compared_rounds_start_without_the_history_of_the_others(tiny):
    """Otherwise the history would already have the completions, and later rounds would draft all of them."""
    config = load_config(None, [f"model.name={str(tiny)!r}", "speculation.method=suffix", "speculation.policy=static",
                                "sampling.ignore_eos=true"])  # fmt: skip
    engine = build_engine(config)
    num_accepted = []  # by the run with drafts before

    def make_drafter():
        num_accepted.append(sum(trace.num_accepted_tokens for trace in engine.drain_trace()))
        return build_drafter(config, engine.paged.decoder, engine.tokenizer)

    requests = [Request(0, tuple(range(5)), SamplingParams(max_tokens=24, ignore_eos=True), 1, "p")]
    compare_drafts(engine, requests, make_drafter, engine.state_dict())
    _, warm_up, first, second = num_accepted
    assert warm_up == first == second < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], '--compare: speculation.method = "none" drafts nothing'),
        (["--method", "draft_model", "--set", "speculation.draft_model=layers:1", "--set", "speculation.rule=block"],
         'speculation.rule = "block" samples other tokens'),
    ],
)  # fmt: skip
def test_what_can_not_be_compared(run, tiny, arguments, message):
    assert message in run("generate", "x", "--model", tiny, "--compare", *arguments, code=2).stderr


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
    assert len(only["prompt_ids"]) == 5  # one token per byte, no chat template
    path.write_text('{"prompt": "fine"}\n{"promt": "typo"}\n')
    assert "line 2: needs `prompt` or `question`" in run("generate", "--prompts", path, *common, code=2).stderr
    path.write_text("{\n")
    assert "line 1: not valid JSON" in run("generate", "--prompts", path, *common, code=2).stderr


def test_prompt_longer_than_the_context(run, tiny):
    result = run("generate", "x" * 500, "--model", tiny, code=2)
    assert "context is 128" in result.stderr


class Bytes:
    """A tokenizer with one token per byte."""

    def decode(self, ids, skip_special_tokens):
        return bytes(ids).decode(errors="replace")


def test_pieces_do_not_split_a_character():
    ids = list("aé€b".encode())
    assert Pieces(Bytes())(ids) == ["a", "", "é", "", "", "€", "b"]
    assert "".join(Pieces(Bytes())(ids[:2])) == "a\ufffd"


def test_comma_numbers():
    assert comma_numbers("--batch", "1, 4,16,4") == (1, 4, 16)
    with pytest.raises(ValueError, match="--batch"):
        comma_numbers("--batch", "-1")


def test_pull_imports_a_gguf_file_and_prints_its_directory(run, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    model = checkpoint("qwen3", hidden_size=64, intermediate_size=96, vocab_size=len(TOKENS))
    file = write_gguf(tmp_path / "tiny-q4.gguf", model)
    directory = tmp_path / "cache" / "models" / "tiny-q4"
    assert run("pull", file, "--dtype", "bfloat16").stdout.strip() == str(directory)
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"
    run("generate", "hen", "--model", "tiny-q4", "--max-tokens", "2")
    assert "exists already" in run("pull", file, code=2).stderr


def test_closed_pipe_is_not_an_error(tiny):
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
def test_invalid_prompts_are_errors(run, tiny, tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    assert message in run("generate", "--prompts", path, "--model", tiny, code=2).stderr


def test_byte_order_mark_is_allowed_and_utf16_is_not(run, tiny, tmp_path):
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
def test_invalid_model_config_error_names_the_key(run, tiny, tmp_path, change, message):
    for file in tiny.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tiny / "config.json").read_text()) | change
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert message in run("generate", "hi", "--model", tmp_path, code=2).stderr.replace("\n", " ")


def test_too_much_kv_memory_is_an_error(run, tiny):
    arguments = ["generate", "hi", "--model", tiny, "--set", "engine.kv_tokens=1000000000000"]
    assert "engine.kv_tokens = 1000000000000" in run(*arguments, code=2).stderr


def test_json_output_to_links_and_pipes(run, tiny, tmp_path):
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


def test_verify_and_bench_reject_a_short_context(run, tiny, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 100}) + "\n")
    assert "context of 128" in run("verify", "--quick", "--model", tiny, "--prompts", path, code=2).stderr
    arguments = ["bench", "rollout", "--model", tiny, "--engines", "paceline", "--max-tokens", 500, "--batch", 1]
    assert "the context of" in run(*arguments, code=2).stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_first_signal_stops_and_a_second_ctrl_c_ends_at_once(number):
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    stops = []
    with pytest.raises(KeyboardInterrupt), stop_on_signal(lambda: stops.append(number)):
        signal.raise_signal(number)
        assert stops == [number], "the block goes on, to the end of its step"
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second Ctrl-C was ignored")
    assert stops == [number]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_command_reports_its_results(number):
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with results_so_far("interrupted; results so far:") as interrupted:
        signal.raise_signal(number)
        pytest.fail("the block goes on")
    signal.raise_signal(signal.SIGINT)  # must not prevent the report
    assert interrupted.is_set()
    with pytest.raises(typer.Exit) as ended:
        exit_if(interrupted)
    assert ended.value.exit_code == 130
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_an_uninterrupted_command_does_not_exit():
    with results_so_far("interrupted") as interrupted:
        pass
    exit_if(interrupted)
