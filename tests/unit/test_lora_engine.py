"""An engine with adapters beside shared base weights: what it gets, and how close it is to the learner."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import torch
from tiny_run import lines, make, outcome, write_model, write_task

from paceline.build import run as build_run
from paceline.engine.engine import LocalEngine
from paceline.model.lora import adapter_state, adapters_of
from paceline.model.weights import checksum, hf_state
from paceline.native import NativeUnavailable, load
from paceline.rl.stage_timer import StageTimer
from paceline.rl.trainer import Trainer

LORA = ("learner.lora_rank=4", "learner.lora_alpha=16")


@pytest.fixture
def merged_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of before: weight updates have merged weights."""
    build = build_run.build_engine
    monkeypatch.setattr(build_run, "build_engine", lambda config, with_adapters: build(config))


def local(trainer: Trainer) -> LocalEngine:
    assert isinstance(trainer.engine, LocalEngine)
    return trainer.engine


def addresses(trainer: Trainer, adapters: bool) -> list[list[int]]:
    """Of the parameters of learner and engine."""
    return [
        sorted(p.data_ptr() for name, p in decoder.named_parameters() if (".lora." in name) == adapters)
        for decoder in (trainer.learner.decoder, local(trainer).paged.decoder)
    ]


def test_base_weights_are_shared_and_adapters_are_not(tmp_path: Path) -> None:
    trainer = make(tmp_path, "run", *LORA, "train.num_steps=2", "learner.learning_rate=0.05")
    base, own = addresses(trainer, False), addresses(trainer, True)
    assert base[0] == base[1] and not set(own[0]) & set(own[1]) and len(own[0]) == len(own[1]) == 2 * 4 * 2
    before = {name: tensor.clone() for name, tensor in trainer.learner.weights()}
    trainer.run()
    found, sent = (dict(adapter_state(d)) for d in (local(trainer).paged.decoder, trainer.learner.decoder))
    assert found.keys() == sent.keys() and not all(torch.equal(found[name], sent[name]) for name in sent)
    trainer.producer._update_engine(2, StageTimer(), "recompute")
    assert all(torch.equal(found[name], sent[name]) for name in sent)
    after = dict(trainer.learner.weights())
    assert not all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert [m["weights_checksum"] for m in lines(tmp_path / "run", "metrics")][-1] == checksum(sent.items())
    assert checksum(hf_state(local(trainer).paged.decoder)) == checksum(after.items())
    trainer.close()


def test_updates_have_only_adapters(tmp_path: Path) -> None:
    trainer = make(tmp_path, "run", *LORA)
    engine = local(trainer)
    sent = list(trainer.learner.weights(adapters=True))
    assert sent[0][0] == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" and len(sent) == 2 * 7 * 2
    receipt = engine.update_weights(sent, 3)
    assert (receipt.num_tensors, receipt.num_bytes) == (len(sent), sum(tensor.nbytes for _, tensor in sent))
    assert receipt.checksum == checksum(sent)
    with pytest.raises(ValueError, match=r"adapters: missing tensors .*q_proj.lora_A"):
        engine.update_weights(trainer.learner.weights(), 4)
    trainer.close()


def test_packed_weights_are_not_shared(tmp_path: Path) -> None:
    try:
        load("decoder")
    except NativeUnavailable as error:
        pytest.skip(f"no kernels here: {error}")
    trainer = make(tmp_path, "run", *LORA, "model.dtype=float32", "train.num_steps=2", "learner.learning_rate=0.05")
    engine = local(trainer)
    assert engine.paged.decoder.embed.panels is not None
    trainer.run()
    engine.update_weights(trainer.learner.weights(adapters=True), 2)
    for lora in adapters_of(engine.paged.decoder):
        assert lora.panels and lora.up.any()
    merged, theirs = dict(hf_state(engine.paged.decoder)), dict(trainer.learner.weights())
    assert all(torch.equal(merged[name], tensor) for name, tensor in theirs.items())
    assert max(m["mismatch_mean"] for m in lines(tmp_path / "run", "metrics")) < 1e-5
    trainer.close()


@pytest.mark.parametrize("staleness", [0, 1])
def test_sharing_changes_no_bit(staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of older versions too: the learner trains while the engine generates with those before."""
    given = *LORA, f"train.max_staleness={staleness}", "learner.learning_rate=0.05"
    for name in ("shared", "apart"):
        if name == "apart":
            monkeypatch.setattr(build_run, "shared_base", lambda *_: None)
        trainer = make(tmp_path, name, *given)
        base = addresses(trainer, False)
        assert (base[0] == base[1]) == (name == "shared")
        trainer.run()
        trainer.close()
    shared, apart = outcome(tmp_path / "shared"), outcome(tmp_path / "apart")
    assert shared == apart
    spans = [span for record in shared["rollouts"] for span in record["versions"]]
    assert max(span[0] for span in spans) == 3 - staleness, "versions of the tokens"


def mismatches(folder: Path, name: str) -> list[float]:
    """Mean |Δ logprob| of engine and learner, at each step."""
    trainer = make(
        folder, name, *LORA, "model.dtype=bfloat16", "train.num_steps=12", "learner.learning_rate=3e-4",
        "train.groups_per_step=8", "algorithm.num_generations=8",
    )  # fmt: skip
    trainer.run()
    trainer.close()
    return [m["mismatch_mean"] for m in lines(folder / name, "metrics")]


@pytest.fixture
def bfloat16_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.build.model.check_device", lambda config: None)


def test_mismatch_does_not_grow(tmp_path: Path, bfloat16_on_cpu: None, request: pytest.FixtureRequest) -> None:
    """In bfloat16, engine and learner are as close after ten updates as before the first. With merged weights they are
    not: these are rounded once more."""
    write_model(tmp_path / "model", hidden_size=64, intermediate_size=128, num_layers=4)
    write_task(tmp_path / "task.jsonl", 16)
    found = mismatches(tmp_path, "own")
    request.getfixturevalue("merged_engine")
    merged = mismatches(tmp_path, "merged")
    assert 0 < mean(found[9:12]) < 1.2 * mean(found[:2])
    assert merged[0] == found[0] and mean(merged[9:12]) > 4 * merged[0]
