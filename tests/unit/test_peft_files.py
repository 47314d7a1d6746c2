"""Adapters in PEFT's format, with the real `peft`: its adapters load, train and export, and load in it again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import make, settings, write_model, write_task
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from paceline.build.adapter import with_adapter_settings
from paceline.build.learner import build_learner
from paceline.cli import app
from paceline.engine.engine import LocalEngine
from paceline.model.attention import PackedAttention
from paceline.model.lora import adapter_state
from paceline.model.peft_files import CONFIG, TARGETS, TENSORS, read_adapter
from paceline.model.weights import ModelError
from paceline.rl.learner import Learner

if "CI" in os.environ:
    import peft
else:
    peft = pytest.importorskip("peft", reason="needs peft")
TOKENS = torch.arange(40) * 7 % 250
ROUNDING = 1e-9
MODULES = [["q_proj", "v_proj"], list(TARGETS), ["up_proj", "o_proj", "k_proj"]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    write_task(tmp_path / "task.jsonl")
    return tmp_path


def load_base(folder: Path) -> Any:
    """In float64, norms too, which transformers computes in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            eps = module.variance_epsilon
            module.forward = lambda x, m=module, eps=eps: m.weight * x * (x.square().mean(-1, True) + eps).rsqrt()
    return model


def save_adapter(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """An adapter of peft with random A and B."""
    base = load_base(folder)
    given = {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | changes
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, peft.LoraConfig(**given))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.3)
    model.save_pretrained(folder / "adapter")
    return folder / "adapter"


def peft_logits(folder: Path, adapter: Path) -> Tensor:
    base = load_base(folder)
    model = peft.PeftModel.from_pretrained(base, adapter).double()
    with torch.no_grad():
        return model(TOKENS[None]).logits[0]


def logits(learner: Learner) -> Tensor:
    with torch.no_grad():
        out = learner.decoder(TOKENS, torch.arange(40), PackedAttention([40]))
        return learner.decoder.logits(out.hidden)


def given_adapter(folder: Path, adapter: Path, *overrides: str) -> Learner:
    config = with_adapter_settings(settings(folder, f"learner.lora_init={str(adapter)!r}", *overrides))
    return build_learner(config, folder / "model")


@pytest.mark.parametrize("modules", MODULES, ids="-".join)
@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_of_peft_gives_its_logits(modules: list[str], use_rslora: bool, folder: Path) -> None:
    adapter = save_adapter(folder, target_modules=modules, use_rslora=use_rslora, lora_dropout=0.1)
    learner = given_adapter(folder, adapter)
    expected = peft_logits(folder, adapter)
    torch.testing.assert_close(logits(learner), expected, rtol=0, atol=ROUNDING)
    base = load_base(folder)
    with torch.no_grad():
        assert (base(TOKENS[None]).logits[0] - expected).abs().max() > 0.1, "the adapter changes the logits"


def test_it_trains_and_loads_in_peft_again(folder: Path) -> None:
    adapter = save_adapter(folder, target_modules=MODULES[2])
    trainer = make(folder, "run", f"learner.lora_init={str(adapter)!r}", "train.num_steps=2")
    assert isinstance(trainer.engine, LocalEngine) and trainer.config.learner.lora_rank == 4
    before = logits(trainer.learner)
    trainer.run()
    after = logits(trainer.learner)
    assert (after - before).abs().max() > 1e-3
    found = dict(adapter_state(trainer.learner.decoder))
    trainer.close()
    result = CliRunner().invoke(app, ["export", str(folder / "run"), str(folder / "out"), "--adapter"])
    assert result.exit_code == 0, result.output
    assert {path.name for path in (folder / "out").iterdir()} == {CONFIG, TENSORS}
    written = load_file(folder / "out" / TENSORS)
    assert written.keys() == found.keys() == load_file(adapter / TENSORS).keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in found.items())
    torch.testing.assert_close(peft_logits(folder, folder / "out"), after, rtol=0, atol=ROUNDING)
    torch.testing.assert_close(logits(given_adapter(folder, folder / "out")), after, rtol=0, atol=0)
    resumed = make(folder, "run", resume=True, config=trainer.config.changed(train={"num_steps": 3}))
    assert torch.equal(logits(resumed.learner), after)
    resumed.close()


def test_settings_are_those_of_the_adapter(folder: Path) -> None:
    adapter = save_adapter(folder)
    config = with_adapter_settings(settings(folder, f"learner.lora_init={str(adapter)!r}", "learner.lora_rank=4"))
    learner = config.learner
    assert (learner.lora_rank, learner.lora_alpha, learner.lora_targets) == (4, 10, ["q_proj", "v_proj"])
    assert with_adapter_settings(config) == config
    for wrong in ("learner.lora_rank=8", "learner.lora_alpha=1", 'learner.lora_targets=["q_proj"]'):
        with pytest.raises(ValueError, match=r"the adapter learner.lora_init = .*; remove learner.lora_"):
            given_adapter(folder, adapter, wrong)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora = True: not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head']: not supported"),
    ({"bias": "lora_only"}, "bias = 'lora_only': not supported"),
    ({"lora_bias": True}, "lora_bias = True: not supported"),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern = {'q_proj': 2}: not supported"),
    ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern = {'q_proj': 2}: not supported"),
    ({"layers_to_transform": [1]}, "missing tensors that the config requires: base_model"),
    ({"target_modules": ["q_proj", "embed_tokens"]}, "only adapters of q_proj, k_proj"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: next(iter(value), "") if value else "")
def test_what_is_not_supported_is_refused(changes: dict[str, Any], message: str, folder: Path) -> None:
    adapter = save_adapter(folder, **changes)
    with pytest.raises(ModelError) as refused:
        given_adapter(folder, adapter)
    assert message in str(refused.value)


def change(adapter: Path, **values: Any) -> None:
    config = json.loads((adapter / CONFIG).read_text()) | values
    (adapter / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA': only LORA"),
        ({"r": 0}, "r = 0: must be a positive integer"),
        ({"lora_alpha": None}, "lora_alpha = None: must be a positive number"),
        ({"use_something_new": True}, "use_something_new = True: not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa': changes the base weights"),
        ({"r": 5}, "but r = 5"),
    ],
)
def test_damaged_configs(values: dict[str, Any], message: str, folder: Path) -> None:
    adapter = save_adapter(folder)
    change(adapter, **values)
    with pytest.raises(ModelError) as refused:
        read_adapter(adapter)
    assert message in str(refused.value)


def test_damaged_tensors(folder: Path) -> None:
    adapter = save_adapter(folder)
    tensors = load_file(adapter / TENSORS)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, adapter / TENSORS)
    with pytest.raises(ModelError, match="adapters: wrong shapes"):
        given_adapter(folder, adapter)
    (adapter / TENSORS).write_bytes(b"not a file of tensors")
    with pytest.raises(ModelError, match="truncated or corrupt"):
        read_adapter(adapter)
    (adapter / TENSORS).rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"missing \(adapter_model.bin is a pickle"):
        read_adapter(adapter)
    with pytest.raises(ModelError, match=r"adapter_config.json: missing"):
        read_adapter(folder / "model")


def test_an_adapter_is_not_exported_from_a_run_without(folder: Path) -> None:
    trainer = make(folder, "run", "train.num_steps=1")
    trainer.run()
    trainer.close()
    for options, message in ((["--adapter"], "it trained all weights"), (["--adapter", "--head", "x"], "--head")):
        result = CliRunner().invoke(app, ["export", str(folder / "run"), str(folder / "out"), *options])
        assert result.exit_code and message in str(result.output) + str(result.exception)
    assert not (folder / "out").exists()
