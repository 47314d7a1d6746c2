"""The memory plan: sizes against real learners, engines and heads, the choice of KV cache and microbatch, and how a run
uses and records it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_config
from tiny_run import SETTINGS, make, settings
from typer.testing import CliRunner

from paceline.build import memory
from paceline.build.config import load_config
from paceline.build.memory import other_memory_note, resolve_memory
from paceline.build.memory_plan import (
    GIB,
    HEAD_VOCABULARY,
    MemoryPlan,
    activation_bytes,
    head_training_bytes,
    least_kv_tokens,
    needed_kv_tokens,
    num_head_weights,
    part_sizes,
    plan_memory,
    usable_bytes,
)
from paceline.cli import app
from paceline.config import Config
from paceline.config_io import ConfigError, dump_config
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.eagle3 import Eagle3Head, head_config
from paceline.model.weights import init
from paceline.rl.learner import Learner

GPUS = (24e9, 80e9, 141e9)
QWEN3: dict[str, Any] = {
    "family": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_kv_heads": 8,
    "norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_positions": 40960,
    "qk_norm": True,
}
SMALL = ModelConfig(
    hidden_size=2048, intermediate_size=6144, num_layers=28, num_heads=16, tie_embeddings=True, **QWEN3
)  # Qwen3-1.7B
LARGE = ModelConfig(hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, **QWEN3)  # Qwen3-8B


def on_gpu(*overrides: str) -> Config:
    """256 sequences of 480 tokens, and 128 for each one's share of the prompt."""
    base = ["model.device=cuda", "model.dtype=bfloat16", "engine.max_num_seqs=256", "sampling.max_tokens=480"]
    return load_config(None, [*base, *overrides])


def plan(model: ModelConfig, total: float, *overrides: str, **rest: Any) -> MemoryPlan:
    return plan_memory(on_gpu(*overrides), model, int(total), **rest)


# ---- sizes ----


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_and_optimizer_equal_those_of_a_learner(family: str, optimizer: str, rank: int, dtype: str) -> None:
    biases = {"qkv_bias": family != "qwen3", "o_bias": family == "llama", "mlp_bias": family == "llama"}
    model = tiny_config(family=family, qk_norm=family == "qwen3", tie_embeddings=family == "llama", **biases)
    targets = 'learner.lora_targets=["qkv", "down"]'
    config = on_gpu(f"learner.optimizer={optimizer}", f"learner.lora_rank={rank}", f"model.dtype={dtype}", targets)
    learner = Learner(init(model, 0, getattr(torch, dtype)), config.learner, num_steps=1)
    sizes = part_sizes(config, model, 1024, 2048, 80 * GIB)
    assert sizes.learner_weights == sum(p.nbytes for p in learner.decoder.parameters())
    assert sizes.engine_weights == sum(p.nbytes for p in Decoder(model).to(getattr(torch, dtype)).parameters())
    optim = learner.optimizer
    copies = [m for name, m in optim.masters.items() if m is not optim.parameters[name]]
    assert sizes.masters == sum(m.nbytes for m in copies)
    assert sizes.gradients == sum(m.nbytes for m in optim.masters.values())
    moments = [t for each, _ in optim.optimizers for state in each.state.values() for t in state.values() if t.ndim]
    assert sizes.moments == sum(moment.nbytes for moment in moments) > 0


def test_head_weights_equal_those_of_a_head() -> None:
    for model in (tiny_config(vocab_size=40_000), tiny_config(family="qwen2", qkv_bias=True)):
        with torch.device("meta"):
            head = Eagle3Head(head_config(model, min(model.vocab_size, HEAD_VOCABULARY)))
        assert num_head_weights(model) == sum(p.numel() for p in head.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("shares_prompt", [False, True])
def test_activations_in_plain_torch_are_near_those_that_autograd_keeps(
    family: str, rank: int, shares_prompt: bool
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_layers": 8, "num_heads": 8, "head_dim": 16}
    model = tiny_config(family=family, qk_norm=family == "qwen3", num_kv_heads=4, **shape)
    config = load_config(None, ["model.dtype=float32", f"learner.lora_rank={rank}"])
    decoder = init(model, 0, torch.float32)
    Learner(decoder, config.learner, num_steps=1)
    parameters = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept: dict[int, torch.Tensor] = {}  # by address; the tensors stay alive, so that no address is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (at := tensor.untyped_storage().data_ptr()) not in parameters:
            kept[at] = tensor
        return tensor

    lengths, prefixes = ([32, 64, 64, 64], [None, 0, 0, 0]) if shares_prompt else ([64] * 4, [None] * 4)
    num = sum(lengths)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder(torch.zeros(num, dtype=torch.int64), torch.arange(num), decoder.attention(lengths, prefixes))
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert 0.9 * measured < activation_bytes(config, model, num) < 1.35 * measured


def test_targets() -> None:
    """Sizes of whole runs, calculated by hand from the shapes: 608 tokens for each of 256 sequences."""
    small = plan(SMALL, 141e9)
    assert small.kv_tokens == 608 * 256 and small.tokens_per_microbatch == 8192
    assert small.sum_bytes <= 65 * GIB
    num = 1_720_574_976  # parameters of Qwen3-1.7B
    assert (small.learner_weights, small.masters, small.moments) == (2 * num, 4 * num, 8 * num)
    # 61,504 bytes per token and layer: residuals, norms, qkv, attention, gate_up.
    assert small.activations == 8192 * 28 * (16384 + 8192 + 8192 + 4096 + 64 + 24576)
    large = plan(LARGE, 141e9, "learner.lora_rank=16")
    assert large.tokens_per_microbatch == 8192 and large.sum_bytes <= 85 * GIB


def test_reference_published_weights_checkpointing_and_ranks() -> None:
    plain = plan(SMALL, 141e9)
    assert plain.reference == plain.published_weights == 0
    with_reference = plan(SMALL, 141e9, "algorithm.beta=0.1")
    assert with_reference.reference == plain.engine_weights
    assert plan(SMALL, 141e9, "algorithm.beta=0.1", "learner.lora_rank=8").reference == 0
    assert plan(SMALL, 141e9, "train.max_staleness=2").published_weights == 3 * plain.engine_weights
    few = plan(SMALL, 141e9, "learner.activation_checkpointing=true")
    assert few.activations < plain.activations / 4
    assert few.activations + few.logits >= head_training_bytes(on_gpu(), SMALL)
    ranks = plan(SMALL, 141e9, num_ranks=4)
    assert ranks.moments == plain.moments // 4 and ranks.engine_weights == plain.engine_weights
    assert plain.learner_weights / 4 < ranks.learner_weights < plain.learner_weights


def test_draft_model_is_counted() -> None:
    plain = plan(SMALL, 141e9)
    for name, num_weights in (("x", 1_720_574_976), ("layers:28", 0)):  # layers of the target share its weights
        with_draft = plan(
            SMALL, 141e9, "speculation.method=draft_model", f"speculation.draft_model={name}", draft=SMALL
        )
        assert with_draft.drafter == 2 * num_weights + plain.kv_tokens * 2 * 2 * 28 * 8 * 128


def test_shape_of_the_draft_model(tmp_path: Path) -> None:
    given = ["speculation.method=draft_model", "speculation.draft_model=layers:2"]
    draft = memory.read_draft_model(load_config(None, given), SMALL)
    assert draft == replace(SMALL, num_layers=2)
    assert memory.read_draft_model(load_config(None, given[1:]), SMALL) is None, "it is not used"
    settings(tmp_path)
    named = memory.read_draft_model(
        load_config(None, [given[0], f"speculation.draft_model={tmp_path / 'model'}"]), SMALL
    )
    assert named is not None and named.num_layers == 2 and named.hidden_size == 32


# ---- the choice ----


@pytest.mark.parametrize("total", GPUS)
@pytest.mark.parametrize(
    "switched",
    [
        ["speculation.method=hybrid", "speculation.policy=auto", "draft.online=every"],
        ["speculation.method=suffix", "speculation.num_speculative_tokens=7"],
    ],
)
def test_speculation_does_not_change_the_plan(total: float, switched: list[str]) -> None:
    given = ["learner.lora_rank=16", "engine.max_num_seqs=128"]
    assert plan(SMALL, total, *given) == plan(SMALL, total, *given, *switched)


def test_plan_does_not_ask_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> Any:
        raise AssertionError("a plan is a pure function")

    first = plan(SMALL, 80e9)
    for name in ("mem_get_info", "get_device_properties", "memory_reserved", "is_available"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    assert plan(SMALL, 80e9) == first
    assert plan(SMALL, 80e9 // GIB * GIB) == first == plan(SMALL, 80e9 // GIB * GIB + GIB - 1), "totals are rounded"


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["engine.sleep=false"],
        ["engine.sleep=true"],
        ["train.max_staleness=1"],
        ["learner.lora_rank=16"],
        ["learner.lora_rank=16", "engine.max_num_seqs=64", "sampling.max_tokens=8192"],
        ["learner.activation_checkpointing=true", "algorithm.beta=0.1"],
        ["speculation.method=hybrid", "learner.lora_rank=16"],
    ],
)
def test_more_memory_never_gives_less(given: list[str]) -> None:
    before, num_plans, choices = (0, 0), 0, set()
    for total in range(8 * GIB, 200 * GIB, GIB):
        try:
            found = plan(SMALL, total, *given)
        except ValueError:
            assert not num_plans, f"{total / GIB} GiB are refused, but less memory was enough"
            continue
        num_plans += 1
        assert found.sum_bytes <= usable_bytes(total)
        choice = found.tokens_per_microbatch, found.kv_tokens
        assert choice[0] >= before[0] and choice[1] >= before[1], f"{total / GIB} GiB: {choice} after {before}"
        before = choice
        choices.add(choice)
    assert before == (8192, needed_kv_tokens(on_gpu(*given), SMALL))
    assert len(choices) > 3, "the KV cache shrinks, then the microbatch grows"


def test_order_of_the_choice() -> None:
    """The microbatch shrinks first, then the KV cache, down to one sequence."""
    full = needed_kv_tokens(on_gpu(), SMALL)
    found = [plan(SMALL, total * GIB, "engine.sleep=false", "learner.lora_rank=16") for total in range(28, 60)]
    assert {p.kv_tokens for p in found if p.tokens_per_microbatch > 2048} == {full}
    assert {p.tokens_per_microbatch for p in found if p.kv_tokens < full} == {2048}
    assert {p.tokens_per_microbatch for p in found} == {2048, 4096, 8192}
    assert min(p.kv_tokens for p in found) >= least_kv_tokens(on_gpu(), SMALL)


def test_kv_cache_of_the_settings() -> None:
    kv = {"tokens": needed_kv_tokens(on_gpu(), SMALL)}
    assert kv["tokens"] == 256 * 480 + 32 * 1024
    assert needed_kv_tokens(on_gpu("engine.prefix_sharing=false"), SMALL) == 256 * (480 + 1024)
    assert needed_kv_tokens(on_gpu("sampling.max_tokens=100_000"), SMALL) == 256 * 40960
    assert needed_kv_tokens(on_gpu("engine.max_num_seqs=1"), SMALL) == 4096 + 480
    assert needed_kv_tokens(on_gpu("task.kind=env", "task.name=x:y"), SMALL) == 256 * 4096


def test_sleep_is_by_the_share_of_the_kv_cache() -> None:
    total = 141e9
    assert plan(SMALL, total).sleeps and not plan(SMALL, total, "engine.max_num_seqs=64").sleeps
    assert not plan(SMALL, total, "engine.sleep=false").sleeps
    assert not plan(SMALL, total, "train.max_staleness=1").sleeps, "the engine generates meanwhile"
    asleep, awake = plan(SMALL, total, "engine.sleep=true"), plan(SMALL, total, "engine.sleep=false")
    assert awake.sum_bytes - asleep.sum_bytes == min(asleep.kv, asleep.microbatch_bytes)
    tight = plan(SMALL, 49 * GIB, "engine.max_num_seqs=64")
    assert 8 * tight.kv < 49 * GIB and tight.sleeps, "else it would not fit"


def test_a_small_batch_gets_a_small_microbatch() -> None:
    assert plan(SMALL, 141e9, "train.groups_per_step=1", "algorithm.num_generations=2").tokens_per_microbatch == 2048


def test_a_long_sequence_counts_as_a_microbatch() -> None:
    long = plan(
        SMALL, 141e9, "sampling.max_tokens=15360", "engine.max_num_seqs=8", "learner.tokens_per_microbatch=2048"
    )
    assert long.activations == 2 * plan(SMALL, 141e9).activations


def test_given_numbers_are_kept() -> None:
    found = plan(SMALL, 141e9, "engine.kv_tokens=5000", "learner.tokens_per_microbatch=32768")
    assert (found.kv_tokens, found.tokens_per_microbatch) == (5000, 32768)
    for given, remedy in (
        ("engine.kv_tokens=800000", "lower engine.kv_tokens"),
        ("learner.tokens_per_microbatch=60000", "lower learner.tokens_per_microbatch"),
    ):
        with pytest.raises(ValueError, match=remedy):
            plan(SMALL, 80e9, given)


def test_what_cannot_fit_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError) as refused:
        plan(LARGE, 80e9, "algorithm.beta=0.1")
    message = str(refused.value)
    assert re.search(r"needs \d+\.\d GiB, but of the GPU's 74\.0 GiB a run may use 69\.4 GiB", message)
    for text in ("for moments", "lora_rank", "algorithm.beta", "smaller model"):
        assert text in message
    assert "kv_tokens" not in message, "it was not set, and is as small as possible"
    with pytest.raises(ValueError, match=r"activation_checkpointing = true"):
        plan(LARGE, 48e9, "learner.lora_rank=16")


def test_a_head_that_is_not_used_takes_no_memory_that_the_run_needs() -> None:
    given = ["learner.lora_rank=16", "learner.activation_checkpointing=true"]
    full = needed_kv_tokens(on_gpu(), LARGE)
    found = plan(LARGE, 46 * GIB, *given)
    assert found.drafter == 0 and found.tokens_per_microbatch == 2048 and full / 16 <= found.kv_tokens <= full / 2
    with pytest.raises(ValueError, match="GiB for drafter"):
        plan(LARGE, 46 * GIB, *given, "speculation.method=eagle3")
    for total in range(46, 90):
        plain = plan(LARGE, total * GIB, *given)
        assert plain.drafter or plain.kv_tokens <= full / 2
        try:
            drafts = plan(LARGE, total * GIB, *given, "speculation.method=eagle3")
        except ValueError:
            assert not plain.drafter
            continue
        assert drafts == plain or (not plain.drafter and drafts.tokens_per_microbatch == plain.tokens_per_microbatch)


# ---- runs ----


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """gpu(total): from now on, runs on this machine's CPU are planned like those on a GPU with this memory."""

    def simulate(total: int) -> None:
        monkeypatch.setattr(memory, "is_planned", lambda config: True)
        monkeypatch.setattr(memory, "check_device", lambda config: None)
        monkeypatch.setattr(memory, "device_bytes", lambda config, group: total)

    return simulate


def test_auto_is_2048_without_a_plan(tmp_path: Path) -> None:
    assert Config().learner.tokens_per_microbatch == "auto"
    for given in ([], ["model.device=cuda", "cluster.kind=ray"], ["model.device=cuda", "learner.model=transformers"]):
        config, found = resolve_memory(load_config(None, given))
        assert found is None and config.learner.tokens_per_microbatch == 2048
        assert config.engine.kv_tokens is None and config.engine.sleep is None
    assert resolve_memory(load_config(None, ["learner.tokens_per_microbatch=7"]))[0].learner.tokens_per_microbatch == 7
    with pytest.raises(ConfigError, match=r"learner.tokens_per_microbatch = 'most': expected .*auto"):
        load_config(None, ["learner.tokens_per_microbatch=most"])


def test_auto_on_a_cpu_trains_like_2048(tmp_path: Path) -> None:
    spans, weights = [], []
    for name, given in (("auto", []), ("given", ["learner.tokens_per_microbatch=2048"])):
        trainer = make(tmp_path, name, "train.num_steps=1", *given)
        assert trainer.learner.section.tokens_per_microbatch == 2048
        cut = trainer.learner._microbatches
        trainer.learner._microbatches = lambda rollouts, cut=cut: spans.append(cut(rollouts)) or spans[-1]  # type: ignore
        trainer.run()
        weights.append({name: tensor.clone() for name, tensor in trainer.learner.weights()})
        trainer.close()
    assert spans and spans[: len(spans) // 2] == spans[len(spans) // 2 :]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_a_run_records_its_plan_and_keeps_it_on_resume(tmp_path: Path, gpu: Any) -> None:
    gpu(80 * GIB)
    trainer = make(tmp_path, "run", "train.num_steps=1", "algorithm.num_generations=400", "engine.max_num_seqs=1000")
    trainer.run()
    chosen = trainer.config.learner.tokens_per_microbatch, trainer.config.engine.kv_tokens
    assert chosen == (8192, 1000 * 12 + 3 * 1024) and trainer.learner.section.tokens_per_microbatch == 8192
    assert trainer.engine.paged.pool.num_blocks * 16 == chosen[1]
    trainer.close()
    run = tmp_path / "run"
    recorded = json.loads((run / "run.json").read_text())["memory_plan"]
    assert recorded["total_bytes"] == 80 * GIB and recorded["tokens_per_microbatch"] == 8192
    config = load_config(run / "config.toml", ["train.num_steps=2"])
    assert (config.learner.tokens_per_microbatch, config.engine.kv_tokens) == chosen
    for total, is_other in ((80 * GIB, False), (40 * GIB, True)):
        gpu(total)
        trainer = make(tmp_path, "run", resume=True, config=config)
        assert (trainer.config.learner.tokens_per_microbatch, trainer.config.engine.kv_tokens) == chosen
        assert trainer.learner.section.tokens_per_microbatch == 8192
        notes = [note for note in trainer.callback.notes if "the run started on one with 80 GiB" in note]
        assert len(notes) == is_other, trainer.callback.notes
        assert not any("changed on resume: learner" in note for note in trainer.callback.notes)
        trainer.close()
    gpu(1 * GIB)
    with pytest.raises(ValueError, match="this run needs"):
        make(tmp_path, "run", resume=True, config=config)


def test_resolved_numbers_survive_the_config_file(tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "read_model", lambda config: SMALL)
    gpu(140 * GIB)
    config, first = resolve_memory(on_gpu())
    assert first is not None and first.tokens_per_microbatch == 8192 and config.engine.sleep is True
    (tmp_path / "config.toml").write_text(dump_config(config))
    (tmp_path / "run.json").write_text(json.dumps({"memory_plan": {"total_bytes": 140 * GIB}}))
    again = load_config(tmp_path / "config.toml")
    for total in (70, 140, 200):
        gpu(total * GIB)
        resumed, found = resolve_memory(again)
        assert resumed == config, "the same on every GPU"
        assert (other_memory_note(tmp_path, found) is None) == (total == 140)


def test_a_run_that_cannot_fit_ends_before_anything_is_loaded(
    tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(tmp_path)  # writes the model
    gpu(1 * GIB)
    monkeypatch.setattr("paceline.build.run.build_rollout_engine", lambda config: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=r"this run needs .* GiB, but of the GPU's 1\.0 GiB"):
        make(tmp_path, "run")
    assert not (tmp_path / "run").exists()


def test_ranks_plan_with_the_smallest_gpu(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.rl.worker_group import WorkerGroup

    monkeypatch.setattr(memory, "read_model", lambda config: SMALL)
    gpu(140 * GIB)
    group = WorkerGroup(0, 2)
    monkeypatch.setattr(WorkerGroup, "all_gather_object", lambda self, own: [own, {"total_bytes": 60 * GIB}])
    _, found = resolve_memory(on_gpu(), group)
    assert found == plan(SMALL, 60 * GIB, num_ranks=2)


def dry_run(folder: Path, *overrides: str, code: int = 0) -> str:
    given = [f"model.name={str(folder / 'model')!r}", f"task.name={str(folder / 'task.jsonl')!r}"]
    result = CliRunner().invoke(app, ["train", *given, *SETTINGS, *overrides, "--dry-run"], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def test_dry_run_prints_the_plan(tmp_path: Path, gpu: Any) -> None:
    settings(tmp_path)
    parts = ("weights of the learner", "weights of the engine", "moments", "gradients", "KV cache", "activations",
             "logits", "drafter", "reserve", "sum")  # fmt: skip
    on_cpu = dry_run(tmp_path)
    assert all(part in on_cpu for part in parts) and "activations, 2048 tokens" in on_cpu
    assert not re.search(r"^\s*GPU\b", on_cpu, re.MULTILINE)
    gpu(80 * GIB)
    planned = dry_run(tmp_path)
    assert re.search(r"^\s*GPU +80\.0\s*$", planned, re.MULTILINE), planned
    gpu(1 * GIB)
    assert "this run needs" in dry_run(tmp_path, code=2)
