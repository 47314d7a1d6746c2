"""EAGLE-3 heads in the layouts of `speculators` and SpecForge: save, load, errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import head_checksum, tiny_config
from torch import Tensor

import paceline
from paceline.model import head_files, kernels, layer
from paceline.model.eagle3 import Eagle3Config, Eagle3Head, head_config, init_head
from paceline.model.head_files import assign_head, head_state, load_head, resolve_head, save_head
from paceline.model.layer import FLOAT8, Float8Weight, Linear
from paceline.model.provenance import Provenance, read_provenance
from paceline.model.weights import ModelError, checkpoint_checksum, init, save
from paceline.native import NativeUnavailable

TARGET = tiny_config(num_layers=8)
IDS = torch.tensor([0, 3, 4, 9, 20, 33, 34, 60])
CONFIG = head_config(TARGET, len(IDS))  # reads layers 2, 4, 5
PROVENANCE = Provenance("tiny", "0f" * 32, "words", 7, 100, 5000, {"greedy": {"k": 3, "length": 2.5}})


def head(
    seed: int = 0, config: Eagle3Config = CONFIG, ids: Tensor = IDS, dtype: torch.dtype = torch.float32
) -> Eagle3Head:
    made = init_head(config, ids, seed=seed)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # norms that differ from each other, so that a swap is detected
        for parameter in made.parameters():
            if parameter.ndim == 1 or parameter is made.fc_norm:
                parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return made.to(dtype)


def state(of: Eagle3Head) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in head_state(of)}


def same(a: Eagle3Head, b: Eagle3Head) -> bool:
    return a.config == b.config and head_checksum(a) == head_checksum(b) and torch.equal(a.draft_ids, b.draft_ids)


# ---- memory ----

LAYER = [
    *("hidden_norm", "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    *("self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
]
NAMES = {"fc.weight", "norm.weight", "lm_head.weight", *(f"layers.0.{name}.weight" for name in LAYER)}


def test_names_and_shapes_are_those_of_speculators() -> None:
    """As in the state_dict of its Eagle3DraftModel 0.9, without the target's tensors."""
    found = state(head())
    assert found.keys() == NAMES | {"d2t", "t2d"}
    assert found["layers.0.self_attn.k_proj.weight"].shape == (16, 64)  # its input is the embedding and the state
    assert found["fc.weight"].shape == (32, 3 * 32) and found["lm_head.weight"].shape == (8, 32)
    assert found["d2t"].tolist() == [0, 2, 2, 6, 16, 28, 28, 53] and found["d2t"].dtype == torch.int64
    assert found["t2d"].nonzero().flatten().tolist() == IDS.tolist() and found["t2d"].dtype == torch.bool


def test_names_of_optional_tensors() -> None:
    full = replace(CONFIG, draft_vocab_size=61, own_embedding=True, fc_norm=True)
    found = state(head(config=full, ids=torch.arange(61)))
    assert found.keys() == NAMES | {"embed_tokens.weight", *(f"fc_norm.{i}.weight" for i in range(3))}
    assert found["embed_tokens.weight"].shape == (61, 32) and found["fc_norm.2.weight"].shape == (32,)


def test_names_are_of_the_right_rows() -> None:
    one = head(config=replace(CONFIG, fc_norm=True))
    found, qkv, gate_up = state(one), one.layer.qkv.weight, one.layer.gate_up.weight
    for which, rows in zip("qkv", (slice(0, 32), slice(32, 48), slice(48, 64)), strict=True):
        assert torch.equal(found[f"layers.0.self_attn.{which}_proj.weight"], qkv[rows])
    assert torch.equal(found["layers.0.mlp.gate_proj.weight"], gate_up[:48])
    assert torch.equal(found["layers.0.hidden_norm.weight"], one.hidden_norm)
    assert torch.equal(found["layers.0.input_layernorm.weight"], one.layer.input_norm)
    assert torch.equal(torch.stack([found[f"fc_norm.{i}.weight"] for i in range(3)]), one.fc_norm)


def test_assign_is_in_place_and_takes_streams() -> None:
    old, new = head(0), head(1, dtype=torch.float64, ids=IDS.flip(0).sort().values - IDS.eq(60).long())
    places = [parameter.data_ptr() for parameter in (*old.parameters(), old.draft_ids)]
    assign_head(old, head_state(new))
    assert places == [parameter.data_ptr() for parameter in (*old.parameters(), old.draft_ids)]
    assert all(torch.equal(tensor, state(new)[name].to(tensor.dtype)) for name, tensor in head_state(old))
    assert torch.equal(old.draft_ids, new.draft_ids) and old.draft_ids[-1] == 59


def test_float8_weights_are_updated_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "ROWS", 7)
    one, other = (head(seed, dtype=torch.bfloat16) for seed in (0, 1))
    float8 = one.lm_head.float8 = Float8Weight(one.lm_head.weight)
    place = float8.weight.data_ptr(), float8.scale.data_ptr()
    for source in (one, other):
        if source is other:
            assign_head(one, head_state(other))
        given = source.lm_head.weight.float()
        assert float8.weight.float().abs().max() == 448  # the full range is used, and nothing is clipped
        # Rounded once: rounding to bfloat16 first would change every fortieth value.
        assert torch.equal(float8.weight.float(), (given / (given.abs().max() / 448)).to(FLOAT8).float())
    assert place == (float8.weight.data_ptr(), float8.scale.data_ptr())


def test_panels_give_the_same_state() -> None:
    config = replace(CONFIG, fc_norm=True, own_embedding=True)
    plain, packed, new = head(0, config), head(0, config), head(1, config, dtype=torch.float64)
    try:
        kernels.pack_for_inference(packed)
    except NativeUnavailable as error:
        pytest.skip(str(error))
    assert all(module.weight is None for module in packed.modules() if isinstance(module, Linear))
    assert head_checksum(packed) == head_checksum(plain)
    for one in (plain, packed):
        assign_head(one, head_state(new))
    assert head_checksum(packed) == head_checksum(plain) != head_checksum(head(0, config))


def test_draft_ids_are_sorted() -> None:
    """A file's draft ids may have any order. Ours are sorted, and the LM head's rows with them."""
    given, order = state(head(1)), torch.tensor([3, 1, 0, 2, 7, 5, 6, 4])
    given["d2t"] = IDS[order] - torch.arange(8)
    given["lm_head.weight"] = given["lm_head.weight"][order]
    old = head(0)
    assign_head(old, given.items())
    assert same(old, head(1))


def _broken(good: dict[str, Tensor], how: str) -> Iterator[tuple[str, Tensor]]:
    changed = dict(good)
    offsets = good["d2t"]
    if how == "missing":
        del changed["layers.0.hidden_norm.weight"]
    elif how == "unexpected":
        changed["layers.1.hidden_norm.weight"] = good["norm.weight"]
    elif how == "shape":
        changed["fc.weight"] = good["fc.weight"][:, :64]
    elif how == "no d2t":
        del changed["d2t"]
    elif how == "absolute":  # ids where offsets belong
        changed["d2t"] = IDS
    elif how == "twice":
        changed["d2t"] = offsets.clone().index_fill_(0, torch.tensor(1), -1)
    elif how == "short d2t":
        changed["d2t"] = offsets[:-1]
    elif how == "t2d":
        changed["t2d"] = good["t2d"].roll(1)
    elif how == "long t2d":
        changed["t2d"] = torch.cat([good["t2d"], torch.zeros(1, dtype=torch.bool)])
    return iter(changed.items())


@pytest.mark.parametrize(
    "how, message",
    [
        ("missing", "missing tensors .*: layers.0.hidden_norm.weight"),
        ("unexpected", "unexpected tensors.*: layers.1.hidden_norm.weight"),
        ("shape", r"fc.weight is \[32, 64\], the config requires \[32, 96\]"),
        ("no d2t", "d2t is missing.* 8 draft tokens to the target's 61 tokens"),
        ("absolute", "d2t maps to token 67, outside the target's vocabulary of 61; it must hold offsets"),
        ("twice", "d2t maps two draft tokens to one target token"),
        ("short d2t", r"d2t has shape \[7\], but draft_vocab_size = 8"),
        ("t2d", "t2d must be true for the tokens that d2t maps to"),
        ("long t2d", "t2d must be true for the tokens that d2t maps to"),
    ],
)
def test_a_failed_assign_changes_nothing(how: str, message: str) -> None:
    old = head(0)
    before = head_checksum(old)
    with pytest.raises(ModelError, match=message):
        assign_head(old, _broken(state(head(1)), how))
    assert head_checksum(old) == before


# ---- directories ----


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize("changes", [{}, {"fc_norm": True, "own_embedding": True, "norm_before_residual": True}])
def test_save_and_load(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    target = replace(TARGET, family=family, qk_norm=family == "qwen3", qkv_bias=family == "qwen2")
    written = head(3, replace(head_config(target, len(IDS), (1, 8)), **changes))
    save_head(written, tmp_path, PROVENANCE, dtype=None)
    assert same(load_head(tmp_path, target), written)
    assert read_provenance(tmp_path) == PROVENANCE


def test_it_is_saved_in_bfloat16_and_loaded_in_any_dtype(tmp_path: Path) -> None:
    save_head(head(dtype=torch.float64), tmp_path, PROVENANCE)
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for name, tensor in stored.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert same(load_head(tmp_path, TARGET, dtype=torch.bfloat16), head().to(torch.bfloat16))
    assert load_head(tmp_path, TARGET, dtype=torch.float64).dtype == torch.float64


def test_the_config_has_the_keys_of_vllm_and_speculators(tmp_path: Path) -> None:
    save_head(head(), tmp_path, PROVENANCE, target_name="org/tiny", num_speculative_tokens=5)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 5}]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert (config["draft_vocab_size"], config["target_hidden_size"]) == (8, 32)
    assert config["norm_before_residual"] is False
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"], layer["vocab_size"]) == ("llama", 1, 61)
    assert layer["rope_parameters"]["rope_theta"] == TARGET.rope_theta


def test_shards(tmp_path: Path) -> None:
    for max_bytes in (10_000, 5_000):  # the second time with smaller shards, into the same directory
        save_head(head(), tmp_path, PROVENANCE, max_shard_bytes=max_bytes)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 4 and f"-of-{len(files):05d}" in files[0].name
    assert all(sum(tensor.nbytes for tensor in load_file(file).values()) <= 6_144 for file in files)  # fc is 6144
    assert same(load_head(tmp_path, TARGET, dtype=torch.bfloat16), head().to(torch.bfloat16))


def test_an_interrupted_save_can_not_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_head(head(), tmp_path, PROVENANCE)
    monkeypatch.setattr("paceline.model.hf_directory.write_file", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_head(head(1), tmp_path, PROVENANCE)
    with pytest.raises(ModelError, match=r"config.json is missing"):
        load_head(tmp_path, TARGET)


# ---- SpecForge's layout ----


def specforge(directory: Path, of: Eagle3Head, **changes: Any) -> Path:
    """As saved by its LlamaForCausalLMEagle3: flat, `midlayer`, layers counted from 0."""
    directory.mkdir(exist_ok=True)
    tensors = {name.replace("layers.0.", "midlayer."): tensor.contiguous() for name, tensor in head_state(of)}
    save_file(tensors, directory / "model.safetensors")
    layer = of.config.layer.to_hf()
    config = {
        **{key: layer[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")},
        **{key: layer[key] for key in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "head_dim")},
        **{key: layer[key] for key in ("rope_parameters", "num_hidden_layers", "attention_bias", "hidden_act")},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": of.config.draft_vocab_size,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_specforge_counts_layers_from_zero(tmp_path: Path) -> None:
    default = load_head(specforge(tmp_path / "a", head(5)), TARGET)
    assert default.config.layer_ids == (2, 4, 5)  # in SpecForge (1, n/2 - 1, n - 4)
    assert head_checksum(default) == head_checksum(head(5)) and not default.config.norm_before_residual
    own = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 7], "use_aux_hidden_state": True}}
    assert load_head(specforge(tmp_path / "b", head(5), **own), TARGET).config.layer_ids == (1, 4, 8)


def test_specforge_with_embedding_norms_and_full_vocabulary(tmp_path: Path) -> None:
    config = replace(CONFIG, own_embedding=True, fc_norm=True, draft_vocab_size=61)
    written = head(5, config, ids=torch.arange(61))
    path = specforge(tmp_path, written, fc_norm=True, draft_vocab_size=None)
    assert head_checksum(load_head(path, TARGET)) == head_checksum(written)
    stored = load_file(path / "model.safetensors")  # with an explicit identity mapping, as its buffers are initialised
    stored |= {"d2t": torch.zeros(61, dtype=torch.int64), "t2d": torch.ones(61, dtype=torch.bool)}
    save_file(stored, path / "model.safetensors")
    assert load_head(path, TARGET).config == replace(config, layer=load_head(path, TARGET).config.layer)


def test_a_head_of_a_smaller_model_with_its_own_embedding(tmp_path: Path) -> None:
    narrow = replace(CONFIG, layer=replace(CONFIG.layer, hidden_size=24), own_embedding=True)
    save_head(head(1, narrow), tmp_path, PROVENANCE, dtype=None)
    assert same(load_head(tmp_path, TARGET), head(1, narrow))


# ---- errors ----


def raises(directory: Path, message: str, target: Any = TARGET, **options: Any) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_head(directory, target, **options)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize(
    "target, message",
    [
        ({"vocab_size": 64}, "vocab_size = 61, but the target's is 64: it was trained for another target"),
        ({"hidden_size": 64}, "target_hidden_size = 32, but the target's hidden_size is 64"),
        ({"num_layers": 4}, r"eagle_aux_hidden_state_layer_ids \[2, 4, 5\].* the target's 4 layers"),
        ({"max_positions": 512}, "max_position_embeddings = 256, but the target's is 512"),
    ],
)
def test_another_target_raises(tmp_path: Path, target: dict[str, Any], message: str) -> None:
    save_head(head(), tmp_path, PROVENANCE)
    load_head(tmp_path, replace(TARGET, max_positions=200))
    raises(tmp_path, message, replace(TARGET, **target))


def test_another_checkpoint_of_the_same_shape_raises(tmp_path: Path) -> None:
    for seed in (0, 1):
        save(init(TARGET, seed), tmp_path / f"target-{seed}", max_shard_bytes=10_000)
    mine, other = (checkpoint_checksum(tmp_path / f"target-{seed}") for seed in (0, 1))
    path = tmp_path / "head"
    save_head(head(), path, replace(PROVENANCE, target_checksum=mine))
    load_head(path, TARGET, target_checksum=mine)
    load_head(path, TARGET)
    raises(path, "target_checksum = .*of tiny.*speculation.any_target = true", target_checksum=other)
    load_head(path, TARGET, target_checksum=other, any_target=True)
    save_head(head(), path, replace(PROVENANCE, target_checksum=None))
    load_head(path, TARGET, target_checksum=other)


def edit(path: Path, changes: dict[str, Any], inside: str | None = None) -> None:
    content = json.loads(path.read_text())
    at = content if inside is None else content[inside]
    for key, value in changes.items():
        at.pop(key)
        if value is not ...:
            at[key] = value
    path.write_text(json.dumps(content))


KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({KEY: [0, 4, 5]}, "different numbers from 1 to the target's 8"),
        ({KEY: [2, 4, 9]}, "different numbers from 1 to the target's 8"),
        ({KEY: [2, 4, 4]}, "different numbers from 1 to the target's 8"),
        ({KEY: [2, 4]}, r"fc.weight has 96 inputs, but .*\[2, 4\] are 2 layers of size 32"),
        ({KEY: "2, 4"}, "must be a list of target layers"),
        ({"draft_vocab_size": 9}, "draft_vocab_size = 9, but lm_head.weight has 8 rows"),
        ({"draft_vocab_size": 99}, "draft_vocab_size = 99 exceeds the target's vocabulary of 61"),
        ({"draft_vocab_size": ...}, "draft_vocab_size is missing"),
        ({"norm_before_residual": ...}, "norm_before_residual is missing.*true or false"),
        ({"norm_before_fc": True}, "norm_before_fc = True: this variant"),
        ({"norm_output": True}, "norm_output = True: this variant"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type = 'peagle' is not supported"),
        ({"speculators_model_type": ...}, "is no supported head"),
        ({"transformer_layer_config": ...}, "transformer_layer_config = None"),
        ({"fc_norm": True}, "missing tensors that the config requires: fc_norm.0.weight"),
    ],
)
def test_a_wrong_config_raises(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_head(head(), tmp_path, PROVENANCE)
    edit(tmp_path / "config.json", changes)
    raises(tmp_path, message)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_hidden_layers": 2}, "a head with several layers is not supported"),
        ({"model_type": "deepseek_v3"}, "model_type = 'deepseek_v3' is not supported"),
        ({"hidden_size": 64, "head_dim": 16}, "the head can't use the target's embedding and has none of its own"),
        ({"num_key_value_heads": 4}, "wrong shapes: layers.0.self_attn.k_proj.weight"),
        ({"hidden_size": ...}, "hidden_size is missing"),
    ],
)
def test_a_wrong_layer_raises(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_head(head(), tmp_path, PROVENANCE)
    edit(tmp_path / "config.json", changes, "transformer_layer_config")
    raises(tmp_path, message)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"norm_output": False}, "norm_output = False: its meaning differs"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc = true"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = false"),
        ({"eagle_config": {KEY: [-1, 3, 4]}}, "different numbers from 1 to the target's 8"),
        ({KEY: [2, 4, 5]}, "belongs into eagle_config, where layers are counted from 0"),
        ({"max_position_embeddings": 128}, "max_position_embeddings = 128, but the target's is 256"),
        ({"draft_vocab_size": None}, "draft_vocab_size = 61, but lm_head.weight has 8 rows"),
        ({"architectures": ["LlamaForCausalLM"]}, "is no supported head"),
    ],
)
def test_a_wrong_specforge_config_raises(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    raises(specforge(tmp_path, head(), **changes), message)


def _truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _pickle(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


@pytest.mark.parametrize(
    "damage, message",
    [
        (_truncate, "model.safetensors: truncated or corrupt"),
        (_pickle, "only pytorch_model.bin, a pickle.* weights_only=True"),
        (lambda path: (path / "model.safetensors").unlink(), "no weights"),
        (lambda path: (path / "config.json").write_text("{"), "config.json: not valid JSON"),
        (lambda path: (path / "config.json").unlink(), "config.json is missing"),
        (lambda path: (path / "provenance.json").write_text("[]"), "provenance.json: expected a JSON object"),
    ],
)
def test_damaged_directories_raise(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    save_head(head(), tmp_path, PROVENANCE)
    damage(tmp_path)
    raises(tmp_path, message)


def test_no_such_directory(tmp_path: Path) -> None:
    raises(tmp_path / "nowhere", "no such directory")


# ---- provenance ----


def test_provenance_has_date_and_versions() -> None:
    made = Provenance("tiny", None, "words", 0, 1, 2)
    assert made.versions == {"paceline": paceline.__version__, "torch": torch.__version__}
    assert len(made.created) == len("2026-01-31")


def test_heads_of_other_tools_have_no_provenance(tmp_path: Path) -> None:
    assert read_provenance(specforge(tmp_path, head())) is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seed": ...}, "seed is missing; restore the file"),
        ({"num_steps": "100"}, "num_steps = '100': must be int"),
        ({"num_tokens": True}, "num_tokens = True: must be int"),
        ({"target_checksum": 3}, "target_checksum = 3: must be str or null"),
        ({"acceptance": 2.5}, "acceptance = 2.5: must be dict"),
    ],
)
def test_damaged_provenance_raises(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_head(head(), tmp_path, PROVENANCE)
    edit(tmp_path / "provenance.json", changes)
    with pytest.raises(ModelError, match=f"provenance.json: {message}"):
        read_provenance(tmp_path)


# ---- names ----


def test_a_head_by_path(tmp_path: Path) -> None:
    assert resolve_head(str(tmp_path), "anything") == tmp_path
    for name in ("", str(tmp_path / "nowhere")):
        with pytest.raises(ModelError, match=r"speculation.head = .*no such directory"):
            resolve_head(name, "anything")


def test_the_head_that_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_files.resources, "files", lambda _: tmp_path)
    with pytest.raises(ModelError, match=r"'some-model' \(for: none\); train one with `paceline train-draft`"):
        resolve_head(None, "some-model")
    save_head(head(), tmp_path / "heads" / "some-model", PROVENANCE)
    (tmp_path / "heads" / "unfinished").mkdir()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    for name in ("some-model", str(tmp_path / "cache" / "models" / "some-model")):
        assert resolve_head(None, name) == tmp_path / "heads" / "some-model"
    for name in ("other", "unfinished", "../some-model", str(tmp_path / "heads" / "some-model")):
        with pytest.raises(ModelError, match=r"\(for: some-model\).* set speculation.head"):
            resolve_head(None, name)


def test_shipped_heads_are_complete_and_small() -> None:
    """Small enough for the repository, and with provenance."""
    for config in (Path(paceline.__file__).parent / "heads").glob("*/config.json"):
        files = list(config.parent.iterdir())
        assert max(file.stat().st_size for file in files) < 20e6
        assert sum(file.stat().st_size for file in files) <= 48e6
        assert read_provenance(config.parent) is not None
