"""`paceline bench learner`: FLOPs, the baseline against our learner, and runs of a tiny shape on a CPU."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_config, tiny_decoder
from typer.testing import CliRunner

from paceline.bench import hf_learner, learner, learner_settings, learner_worker, memory
from paceline.bench.hf_learner import HFLearner
from paceline.bench.learner import FIGURES, measure
from paceline.bench.learner_settings import Settings
from paceline.bench.learner_worker import PacelineLearner, grpo_batch, random_groups
from paceline.bench.process import WorkerError
from paceline.bench.update_flops import Rollouts, update_flops
from paceline.cli import app
from paceline.config import LearnerSection
from paceline.model import weights
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.layer import Layer
from paceline.model.shapes import SHAPES
from paceline.report.table import render
from paceline.rl.packing import pack

DATA = Rollouts(num_sequences=6, per_prompt=3, prompt_tokens=5, completion_tokens=7)
SECTION = LearnerSection(tokens_per_microbatch=30, learning_rate=1e-2)
SIZE = DATA.sequences_per_microbatch(SECTION.tokens_per_microbatch)  # 2: three microbatches
QWENS = {"qwen2": {"family": "qwen2", "qkv_bias": True}, "qwen3": {"family": "qwen3", "qk_norm": True}}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {**QWENS["qwen2"], "rope_theta": 1e6},
    "qwen3": {**QWENS["qwen3"], "rope_theta": 1e6, "tie_embeddings": False},
}
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "learner.py"
ON_CPU = ("--device", "cpu", "--dtype", "float32")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    config = tiny_config()
    monkeypatch.setitem(SHAPES, "tiny", config)
    return config


class WorkerHere:
    """A worker in this process, where it has the weights of `tiny` too. Its messages are JSON."""

    def __init__(self, path: Path) -> None:
        assert path == learner.WORKER
        self.worker = learner_worker.Worker()

    def call(self, cmd: str, **params: Any) -> dict[str, Any]:
        try:
            return json.loads(json.dumps(getattr(self.worker, cmd)(**json.loads(json.dumps(params)))))
        except torch.OutOfMemoryError as error:
            raise WorkerError(f"OutOfMemoryError: {error}") from None

    def close(self) -> None:
        del self.worker


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "WorkerProcess", WorkerHere)


def on_cpu(**changes: object) -> Settings:
    given: dict = {"sequences": 6, "per_prompt": 3, "prompt_tokens": 5, "completion_tokens": 7, "updates": 2}
    given |= {"variants": ("paceline", "hf-eager"), "learner": SECTION, "device": "cpu", "dtype": "float32"}
    return Settings("tiny", **(given | changes))


# ---- FLOPs ----


@pytest.mark.parametrize("lora", [False, True])
def test_flops_are_those_of_a_count_by_hand(lora: bool) -> None:
    """Every token and every pair of tokens, counted one by one on the sequences that the learner packs."""
    config = tiny_config(tie_embeddings=False)
    packed = pack([rollout for group in random_groups(61, DATA) for rollout in group.rollouts])
    assert len(packed) == DATA.num_packed_tokens == 2 * 5 + 6 * 6
    with torch.device("meta"):
        in_layer = sum(p.numel() for p in Layer(config).parameters() if p.ndim == 2)
    pairs = 0
    for length, prefix in zip(packed.lengths, packed.prefixes, strict=True):
        before = 0 if prefix is None else packed.lengths[prefix]
        pairs += sum(key <= before + query for query, key in product(range(length), range(before + length)))
    per_pair = config.num_layers * config.num_heads * 2 * 2 * config.head_dim  # q·k and the sum over v
    per_parameter = 2 * (2 if lora else 3)
    expected = per_parameter * (config.num_layers * in_layer * len(packed) + 32 * 61 * len(packed.row_P))
    assert update_flops(config, DATA, lora) == expected + 3 * per_pair * pairs


def test_flops_of_a_known_model() -> None:
    """About 6 FLOPs per token and parameter in matrices: 1.41e9 in the layers of Qwen3-1.7B, 0.31e9 in its LM head."""
    rollouts = Rollouts(256, 8, 96, 512)
    matrices = 6 * (1.41e9 * (32 * 96 + 256 * 511) + 0.311e9 * 256 * 512)
    attention = update_flops(SHAPES["qwen3-1.7b"], rollouts, False) - matrices
    assert 0.01 < attention / matrices < 0.03


@pytest.mark.parametrize(("name", "num"), [("qwen3-1.7b", 1.72e9), ("qwen2.5-1.5b", 1.54e9), ("qwen3-8b", 8.19e9)])
def test_shapes_have_the_published_number_of_parameters(name: str, num: float) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in Decoder(SHAPES[name]).parameters()) == pytest.approx(num, rel=3e-3)


# ---- the baseline ----


def learners(decoder: Decoder, masters: str = "float32", compiled: bool = False) -> tuple[PacelineLearner, HFLearner]:
    """Our learner and the baseline, with the same weights."""
    groups = random_groups(decoder.config.vocab_size, DATA)
    theirs = HFLearner(decoder, SECTION, *grpo_batch(groups), SIZE, masters, compiled)  # copies the weights
    return PacelineLearner(decoder, SECTION, groups), theirs


def differences(ours: PacelineLearner, theirs: HFLearner) -> tuple[float, float, float]:
    """After one update: the largest of the logprobs before it, the relative one of gradient norms, and the largest of
    the weights."""
    (our_logprobs, our_norm), (their_logprobs, their_norm) = ours.update(), theirs.update()
    state = theirs.model.state_dict()
    changed = [float((w - state[name]).abs().max()) for name, w in ours.learner.weights()]
    return float((our_logprobs - their_logprobs).abs().max()), abs(their_norm / our_norm - 1), max(changed)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_the_baseline_makes_the_same_update(model: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without code generation, which takes a minute: the rest of torch.compile is the same.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(hf_learner, "CHUNK", 5)  # several chunks, the last one shorter
    before = tiny_decoder(torch.float32, **MODELS[model])
    start = {name: w.clone() for name, w in weights.hf_state(before)}
    ours, theirs = learners(before, compiled=compiled)
    logprobs, norm, changed = differences(ours, theirs)
    assert logprobs < 1e-4 and norm < 1e-4 and changed < 1e-3
    moved = max(float((w - start[name]).abs().max()) for name, w in ours.learner.weights())
    assert moved > 0.9e-2, "the update is ten times larger than the difference"


def test_a_different_update_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_scale(hidden: Any, weight: Any, target: Any, coefficient: Any) -> Any:  # broken: all advantages are 1
        return chunk_loss(hidden, weight, target, coefficient.abs())

    chunk_loss = hf_learner.chunk_loss
    monkeypatch.setattr(hf_learner, "chunk_loss", no_scale)
    logprobs, norm, changed = differences(*learners(tiny_decoder(torch.float32)))
    assert logprobs < 1e-4 and norm > 1e-2 and changed > 1e-3
    decoder = tiny_decoder(torch.float32)
    ours, theirs = learners(decoder)
    theirs.tokens_SL = theirs.tokens_SL.roll(1, 0)  # broken: other sequences
    assert differences(ours, theirs)[0] > 1e-2


@pytest.mark.parametrize("compiled", [False, True])
def test_attention_has_no_mask(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask, sdpa can't use flash attention, and the baseline would be slower than it has to be."""
    real, seen = torch.nn.functional.scaled_dot_product_attention, []

    def attention(*args: Any, attn_mask: Any = None, is_causal: bool = False, **rest: Any) -> Any:
        seen.append((attn_mask is None, is_causal))
        return real(*args, attn_mask=attn_mask, is_causal=is_causal, **rest)

    def backend(graph: Any, inputs: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if node.target is real]
        seen.extend((node.kwargs["attn_mask"] is None, node.kwargs["is_causal"]) for node in nodes)
        return graph

    if compiled:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    else:
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    learners(tiny_decoder(torch.float32), compiled=compiled)[1].update()
    assert len(seen) >= 3 and set(seen) == {(True, True)}


@pytest.mark.parametrize("masters", ["float32", "none"])
def test_masters_of_16_bit_weights(masters: str) -> None:
    """With masters, gradients and moments are float32, and steps below the precision of bfloat16 add up."""
    groups = random_groups(61, DATA)
    section = SECTION.model_copy(update={"learning_rate": 1e-6})
    decoder = tiny_decoder(torch.bfloat16)
    baseline = HFLearner(decoder, section, *grpo_batch(groups), SIZE, masters, False)
    before = [p.detach().clone() for p in baseline.parameters]
    leaves = [leaf.detach().clone() for leaf in baseline.leaves]
    baseline.update()
    dtype = torch.float32 if masters == "float32" else torch.bfloat16
    moments = [baseline.optimizer.state[leaf]["exp_avg"] for leaf in baseline.leaves]
    assert {each.dtype for each in (*baseline.leaves, *moments)} == {dtype}
    assert {p.dtype for p in baseline.parameters} == {torch.bfloat16}
    large = [p.abs() > 0.1 for p in before]
    moved = [bool((a != b)[at].any()) for a, b, at in zip(leaves, baseline.leaves, large, strict=True)]
    assert any(moved) == (masters == "float32")
    assert all(p.grad is None for p in (*baseline.parameters, *baseline.leaves))


def test_masters_accumulate_all_microbatches_and_are_rounded_to_the_weights() -> None:
    ours, theirs = learners(tiny_decoder(torch.bfloat16))
    before = [p.detach().clone() for p in theirs.parameters]
    assert differences(ours, theirs)[1] < 0.02
    for parameter, leaf, old in zip(theirs.parameters, theirs.leaves, before, strict=True):
        assert torch.equal(parameter, leaf.bfloat16()) and not torch.equal(parameter, old)


def test_activation_checkpointing_recomputes_layers() -> None:
    groups, norms, calls = random_groups(61, DATA), [], []
    for checkpointing in (False, True):
        section = SECTION.model_copy(update={"activation_checkpointing": checkpointing})
        baseline = HFLearner(tiny_decoder(torch.float32), section, *grpo_batch(groups), SIZE, "float32", False)
        counted: list[int] = []
        baseline.model.base_model.layers[1].mlp.register_forward_pre_hook(lambda *_, counted=counted: counted.append(1))
        norms.append(baseline.update()[1])
        calls.append(len(counted))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and calls == [3, 6]


def test_rollouts_are_random_and_share_prompts() -> None:
    groups = random_groups(61, DATA)
    assert [len(group.rollouts) for group in groups] == [3, 3]
    assert len({group.rollouts[0].prompt_ids for group in groups}) == 2
    for group in groups:
        assert {rollout.prompt_ids for rollout in group.rollouts} == {group.rollouts[0].prompt_ids}
        assert [rollout.reward for rollout in group.rollouts] == [1, -1, 1]
        assert len({tuple(rollout.token_ids) for rollout in group.rollouts}) == 3
    batch = grpo_batch(groups)[1]
    assert batch.advantages_T is not None and set(batch.advantages_T.tolist()) == {-1.0, 1.0}
    assert batch.weights_T is not None and float(batch.weights_T.sum()) == pytest.approx(1)
    again = random_groups(61, DATA)
    assert np.array_equal(again[1].rollouts[2].token_ids, groups[1].rollouts[2].token_ids)


# ---- measured updates ----


def test_variants_agree(tiny: ModelConfig, in_process: None) -> None:
    seen: list[str] = []
    rows = list(measure(on_cpu(profile=True), seen.append))
    assert [row["variant"] for row in rows] == ["paceline", "hf-eager"]
    assert "hf-eager: update 2 of 2" in seen and "paceline: profile" in seen
    flops = update_flops(tiny, DATA, False)
    for row in rows:
        assert row.keys() == {"model", "variant", "note", *FIGURES}
        assert row["note"] is None and len(row["updates_s"]) == 2
        assert row["memory_gib"] is None and row["allocated_gib"] is None, "only on a GPU"
        assert row["mean_logprob"] == pytest.approx(rows[0]["mean_logprob"], abs=1e-4)
        assert row["logprob_difference"] < 1e-4
        assert row["grad_norm"] == pytest.approx(rows[0]["grad_norm"], rel=1e-4)
        assert row["update_s"] == pytest.approx(sum(row["updates_s"]) / 2)
        assert row["tokens_per_s"] == pytest.approx(42 / row["update_s"])
        assert row["tflops"] == pytest.approx(flops / row["update_s"] / 1e12)
        assert row["matmul_share"] == pytest.approx(row["tflops"] / row["matmul_tflops"])
        assert row["time_ratio"] == pytest.approx(row["update_s"] / rows[0]["update_s"])
    profile = rows[0]["profile"]
    assert rows[1]["profile"] is None and len(profile["kernels"]) == learner_worker.NUM_KERNELS
    shares = [kernel["share"] for kernel in profile["kernels"]]
    assert shares == sorted(shares, reverse=True) and 0.5 < sum(shares) <= 1 and profile["host_s"] > 0


def test_both_peaks_of_memory_are_shown(tiny: ModelConfig, in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch reserved decides whether an update fits; what tensors took is what a memory plan computes."""
    peaks = {"max_memory_reserved": 53.25, "max_memory_allocated": 49.5}
    for name, gib in peaks.items():
        monkeypatch.setattr(torch.cuda, name, lambda gib=gib: gib * 2**30)
    for name, figure in (("memory_gib", 53.25), ("allocated_gib", 49.5)):
        assert getattr(memory, f"peak_{name}")(torch.device("cuda")) == figure
        monkeypatch.setattr(learner_worker, f"peak_{name}", lambda device, figure=figure: figure)
    settings = on_cpu(variants=("paceline",))
    (row,) = measure(settings)
    table = render([row], learner_settings.COLUMNS)
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert [str(cell) for cell in (*cells["GiB"], *cells["used"])] == ["53.2", "49.5"]
    assert any("used: most that tensors took" in note for note in learner_settings.notes(settings))


def test_the_script_of_presets_passes_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("learner_presets", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    outputs: list[str] = []

    def run(command: list[str], check: bool) -> None:
        assert command[:3] == [sys.executable, "-m", "paceline"] and check
        outputs.append(CliRunner().invoke(app, command[3:]).output)

    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["learner.py", str(tmp_path / "out"), "--updates", "0"])
    script.main()
    assert len(outputs) == len(script.PRESETS) == 3
    assert all("--updates 0: must be at least 1" in output for output in outputs)


def test_a_variant_that_fails_has_a_note(tiny: ModelConfig, in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: PacelineLearner) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(PacelineLearner, "update", fail)
    ours, theirs = measure(on_cpu())
    assert ours["note"] == "OutOfMemoryError: no more" and ours["update_s"] is None
    assert theirs["note"] is None and theirs["time_ratio"] == 1, "the next variant is measured"


def test_variants_that_can_not_make_the_update_are_skipped(tiny: ModelConfig, in_process: None) -> None:
    lora = SECTION.model_copy(update={"lora_rank": 2})
    ours, theirs = measure(on_cpu(learner=lora, updates=1))
    assert ours["update_s"] and ours["note"] is None
    assert theirs["update_s"] is None and "learner.lora_rank = 2: transformers has no LoRA" in theirs["note"]
    muon = replace(on_cpu(), learner=SECTION.model_copy(update={"optimizer": "muon"}))
    assert learner_settings.skip_reason(muon, "paceline") is None
    assert 'learner.optimizer = "muon"' in (learner_settings.skip_reason(muon, "hf-eager") or "")
    assert learner_settings.skip_reason(on_cpu(), "hf-compiled") is None


# ---- the command ----


def test_the_command_with_a_directory(tmp_path: Path) -> None:
    out, model = tmp_path / "out.json", tmp_path / "small"
    weights.save(tiny_decoder(torch.float32), model)
    arguments = ["bench", "learner", "--model", str(model), "--sequences", "4", "--per-prompt", "2", "--updates", "1"]
    arguments += ["--prompt-tokens", "5", "--completion-tokens", "7", "--tokens-per-microbatch", "20", *ON_CPU]
    result = CliRunner().invoke(app, [*arguments, "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "small: update" in result.output and "20 tokens per microbatch" in result.output
    content = json.loads(out.read_text())
    assert content.keys() == {"interrupted", "settings", "rows"} and not content["interrupted"]
    assert [row["variant"] for row in content["rows"]] == ["paceline", "hf-eager"]
    assert content["rows"][1]["logprob_difference"] < 1e-4
    # The weights are those of the directory: they give other logprobs than random weights, about -log(61).
    assert abs(content["rows"][0]["mean_logprob"] + np.log(61)) > 0.1
    settings = content["settings"]
    assert settings["learner"]["tokens_per_microbatch"] == 20 and settings["masters"] == "float32"
    assert {"model", "variants", "sequences", "per_prompt", "device", "dtype", "machine", "version"} <= settings.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt-9"], "--model 'gpt-9': neither a directory nor one of qwen3-8b, qwen3-1.7b,"),
        (["--variants", "trl"], "--variants 'trl': not one of paceline, hf-compiled, hf-eager"),
        (["--variants", "hf-eager", "--profile"], "--profile: shows an update of paceline"),
        (["--masters", "bfloat16"], "--masters 'bfloat16': not one of float32, none"),
        (["--sequences", "12"], "--sequences 12: must be a multiple of --per-prompt 8"),
        (["--updates", "0"], "--updates 0: must be at least 1"),
        (["--device", "cpu"], "--dtype bfloat16: on a CPU use float32"),
        (["--device", "tpu"], "--device 'tpu': not one of cuda, cpu"),
        (["--dtype", "float16"], "--dtype 'float16': not one of bfloat16, float32, float64"),
        ([*ON_CPU, "--completion-tokens", "40900"], "together 40996, but the context of qwen3-1.7b is 40960"),
        (["--set", "learner.num_iterations=2"], "learner.num_iterations = 2: the bench measures one optimizer step"),
        (["--set", "learner.model=transformers"], 'learner.model = "transformers": remove it'),
        (["--lora-rank", "-1"], "learner.lora_rank"),
        ([], "this machine has no CUDA device; .* --device cpu --dtype float32"),
    ],
)
def test_errors(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "learner", *arguments])
    assert result.exit_code == 2
    assert re.search(message, " ".join(result.output.split())), result.output
