"""DSpark heads in the layouts of `speculators` and DeepSpec: save, load, errors.

A reference in plain torch computes a block from a directory's tensors and config alone, as these two libraries do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import head_checksum, tiny_config
from torch import Tensor
from torch.nn import functional as F

from paceline.model import kernels
from paceline.model.dspark import DSparkConfig, DSparkHead, dspark_config, init_dspark
from paceline.model.eagle3 import Eagle3Head, head_config
from paceline.model.head_files import assign_head, head_state, load_head, read_head_config, save_head
from paceline.model.layer import Linear
from paceline.model.provenance import Provenance, read_provenance
from paceline.model.weights import ModelError
from paceline.native import NativeUnavailable

TARGET = tiny_config(family="qwen3", qk_norm=True, num_layers=8)
IDS = torch.tensor([0, 3, 4, 9, 20, 33, 34, 60])
CONFIG = dspark_config(TARGET, len(IDS), (2, 4, 5), block_size=4, markov_rank=6)
FULL = replace(CONFIG, draft_vocab_size=61, own_embedding=True, mask_token_id=57)  # as DeepSpec has it
PROVENANCE = Provenance("tiny", "0f" * 32, "words", 7, 100, 5000, {"greedy": {"k": 3, "length": 2.5}})


def head(
    seed: int = 0, config: DSparkConfig = CONFIG, ids: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> DSparkHead:
    """Large weights, so that every part matters, and norms that differ from each other."""
    ids = torch.arange(61) if config.draft_vocab_size == 61 else IDS if ids is None else ids
    made, noise = init_dspark(config, ids), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            random = torch.randn(parameter.shape, generator=noise)
            parameter.copy_(1 + 0.3 * random if "norm" in name else 0.2 * random)
    return made.to(dtype)


def state(of: DSparkHead) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in head_state(of)}


def same(a: object, b: DSparkHead) -> bool:
    assert isinstance(a, DSparkHead)
    return a.config == b.config and head_checksum(a) == head_checksum(b) and torch.equal(a.draft_ids, b.draft_ids)


# ---- memory ----

LAYER = {
    "input_layernorm": (32,),
    "post_attention_layernorm": (32,),
    "self_attn.q_norm": (8,),
    "self_attn.k_norm": (8,),
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}
SHAPES = {
    **{f"layers.{i}.{name}.weight": shape for i in (0, 1) for name, shape in LAYER.items()},
    "fc.weight": (32, 96),
    "hidden_norm.weight": (32,),
    "norm.weight": (32,),
    "lm_head.weight": (8, 32),
    "markov_head.markov_w1.weight": (61, 6),
    "markov_head.markov_w2.weight": (8, 6),
    "confidence_head.proj.weight": (1, 38),
    "confidence_head.proj.bias": (1,),
    "d2t": (8,),
    "t2d": (61,),
}


def test_names_and_shapes_are_those_of_speculators() -> None:
    """As in the files of its DSparkDraftModel 0.9."""
    found = state(head())
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == SHAPES
    assert found["d2t"].tolist() == [0, 2, 2, 6, 16, 28, 28, 53] and found["d2t"].dtype == torch.int64
    assert found["t2d"].nonzero().flatten().tolist() == IDS.tolist() and found["t2d"].dtype == torch.bool


def test_names_and_shapes_are_those_of_deepspec() -> None:
    """As in the files of its Qwen3DSparkModel."""
    full = {name: shape for name, shape in SHAPES.items() if name not in ("d2t", "t2d")}
    full |= {"lm_head.weight": (61, 32), "markov_head.markov_w2.weight": (61, 6), "embed_tokens.weight": (61, 32)}
    assert {name: tuple(tensor.shape) for name, tensor in state(head(config=FULL)).items()} == full
    without = {name: shape for name, shape in full.items() if not name.startswith("confidence_head")}
    assert state(head(config=replace(FULL, has_confidence=False))).keys() == without.keys()


def test_assign_is_in_place_and_sorts_draft_ids() -> None:
    """A file's draft ids may have any order. Ours are sorted, and the rows of the LM head and the Markov term with
    them."""
    given, order = state(head(1, dtype=torch.float64)), torch.tensor([3, 1, 0, 2, 7, 5, 6, 4])
    given["d2t"] = IDS[order] - torch.arange(8)
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        given[name] = given[name][order]
    old = head(0)
    places = [parameter.data_ptr() for parameter in (*old.parameters(), old.draft_ids)]
    assign_head(old, iter(given.items()))
    assert same(old, head(1)) and places == [parameter.data_ptr() for parameter in (*old.parameters(), old.draft_ids)]


def test_panels_give_the_same_state() -> None:
    plain, packed, new = head(0, FULL), head(0, FULL), head(1, FULL, dtype=torch.float64)
    try:
        kernels.pack_for_inference(packed)
    except NativeUnavailable as error:
        pytest.skip(str(error))
    assert all(module.weight is None for module in packed.modules() if isinstance(module, Linear))
    for seed in (0, 1):
        assert head_checksum(packed) == head_checksum(plain) == head_checksum(head(seed, FULL))
        for one in (plain, packed):
            assign_head(one, head_state(new))


# ---- directories ----


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize("changes", [{}, {"own_embedding": True, "has_confidence": False}])
def test_save_and_load(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    target = replace(TARGET, family=family, qk_norm=family == "qwen3", qkv_bias=family == "qwen2")
    config = dspark_config(target, len(IDS), (1, 8), num_layers=3, block_size=5, markov_rank=3)
    written = head(3, replace(config, mask_token_id=0, **changes))
    save_head(written, tmp_path, PROVENANCE, dtype=None)
    assert same(load_head(tmp_path, target), written)
    assert read_head_config(tmp_path, target) == written.config
    assert read_provenance(tmp_path) == PROVENANCE


def test_it_is_saved_in_bfloat16_and_loaded_in_any_dtype(tmp_path: Path) -> None:
    save_head(head(dtype=torch.float64), tmp_path, PROVENANCE)
    assert same(load_head(tmp_path, TARGET, dtype=torch.bfloat16), head().to(torch.bfloat16))
    assert load_head(tmp_path, TARGET, dtype=torch.float64).dtype == torch.float64


def test_the_config_has_the_keys_of_vllm_and_speculators(tmp_path: Path) -> None:
    save_head(head(), tmp_path, PROVENANCE, target_name="org/tiny")
    config = json.loads((tmp_path / "config.json").read_text())
    layer = config.pop("transformer_layer_config")
    assert (layer["model_type"], layer["num_hidden_layers"], layer["vocab_size"]) == ("qwen3", 2, 61)
    assert config == {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_config": {
            "algorithm": "dspark",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],  # the block size
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "org/tiny", "architectures": []},
        },
        "draft_vocab_size": 8,
        "target_hidden_size": 32,
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "block_size": 4,
        "mask_token_id": 60,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    save_head(head(), tmp_path, PROVENANCE, num_speculative_tokens=2)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 2


def deepspec(directory: Path, of: DSparkHead, **changes: Any) -> Path:
    """As saved by its Qwen3DSparkModel: the target's config with own keys, layers counted from 0."""
    directory.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in head_state(of)}, directory / "model.safetensors")
    config = {
        **of.config.layer.to_hf(),
        "architectures": ["Qwen3DSparkModel"],
        "block_size": of.config.block_size,
        "confidence_head_with_markov": True,
        "enable_confidence_head": of.config.has_confidence,
        "layer_types": ["full_attention"] * of.config.layer.num_layers,
        "markov_head_type": "vanilla",
        "markov_rank": of.config.markov_rank,
        "mask_token_id": of.config.mask_token_id,
        "max_window_layers": 28,
        "num_anchors": 512,
        "num_target_layers": 8,
        "sliding_window": None,
        "target_layer_ids": [i - 1 for i in of.config.layer_ids],
        "use_sliding_window": False,
        **changes,
    }
    config = {key: value for key, value in config.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("has_confidence", [True, False])
def test_deepspec_counts_layers_from_zero(tmp_path: Path, has_confidence: bool) -> None:
    written = head(5, replace(FULL, has_confidence=has_confidence, layer_ids=(1, 4, 8)))
    with_markov = True if has_confidence else ...  # absent without a confidence head
    path = deepspec(tmp_path, written, confidence_head_with_markov=with_markov)
    assert json.loads((path / "config.json").read_text())["target_layer_ids"] == [0, 3, 7]
    assert same(load_head(path, TARGET), written)
    assert read_head_config(path, TARGET).aux_layers == (0, 3, 7)


def test_layers_of_speculators_may_be_named_llama(tmp_path: Path) -> None:
    """It builds layers of the Qwen3 family from any config (draft_arch = "llama")."""
    save_head(head(), tmp_path, PROVENANCE, dtype=None)
    edit(tmp_path / "config.json", {"model_type": "llama"}, "transformer_layer_config")
    assert same(load_head(tmp_path, TARGET), head())


def test_the_class_depends_on_the_config(tmp_path: Path) -> None:
    save_head(head(), tmp_path / "dspark", PROVENANCE)
    eagle3 = Eagle3Head(head_config(TARGET, 61))
    with torch.no_grad():
        for parameter in eagle3.parameters():
            parameter.fill_(1)
    save_head(eagle3, tmp_path / "eagle3", PROVENANCE)
    assert isinstance(load_head(tmp_path / "dspark", TARGET), DSparkHead)
    assert isinstance(load_head(tmp_path / "eagle3", TARGET), Eagle3Head)


# ---- the meaning of tensors and config ----


def reference(directory: Path, states: Sequence[Tensor], embed: Tensor, tokens: Tensor, at: int) -> tuple[Tensor, ...]:
    """The logits and acceptance logits of the block whose first token is at `at`. `states` are the target's hidden
    states: of the embedding, and after each layer."""
    config, w = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    w = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in w.items()}
    c, size = config.get("transformer_layer_config", config), config["block_size"]
    if "speculators_config" in config:
        used = [states[i] for i in config["aux_hidden_state_layer_ids"]]
    else:
        used = [states[i + 1] for i in config["target_layer_ids"]]
    context = norm(torch.cat(used, -1)[:at] @ w["fc.weight"].T, w["hidden_norm.weight"], c)
    inputs = torch.tensor([int(tokens[at])] + [config["mask_token_id"]] * (size - 1))
    x, positions = w.get("embed_tokens.weight", embed)[inputs], torch.arange(at + size)
    for i in range(c["num_hidden_layers"]):
        p = {name.removeprefix(f"layers.{i}."): t for name, t in w.items() if name.startswith(f"layers.{i}.")}
        h = norm(x, p["input_layernorm.weight"], c)
        both = torch.cat([context, h])
        q = heads(h, "q", p, c, positions[at:])
        k, v = heads(both, "k", p, c, positions), heads(both, "v", p, c, None)
        groups = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhe,khe->hqk", q, k.repeat_interleave(groups, 1)) / math.sqrt(c["head_dim"])
        out = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v.repeat_interleave(groups, 1)).flatten(1)
        x = x + out @ p["self_attn.o_proj.weight"].T
        h = norm(x, p["post_attention_layernorm.weight"], c)
        x = (
            x
            + (F.silu(h @ p["mlp.gate_proj.weight"].T) * (h @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
        )
    h = norm(x, w["norm.weight"], c)
    previous = w["markov_head.markov_w1.weight"][tokens[at : at + size]]
    logits = h @ w["lm_head.weight"].T + previous @ w["markov_head.markov_w2.weight"].T
    features = torch.cat([h, previous], -1)
    return logits, (features @ w["confidence_head.proj.weight"].T + w["confidence_head.proj.bias"]).squeeze(-1)


def norm(x: Tensor, weight: Tensor, c: dict[str, Any]) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt() * weight


def heads(x: Tensor, which: str, p: dict[str, Tensor], c: dict[str, Any], positions: Tensor | None) -> Tensor:
    rows = (x @ p[f"self_attn.{which}_proj.weight"].T).unflatten(-1, (-1, c["head_dim"]))
    if positions is None:
        return rows
    rows, half = norm(rows, p[f"self_attn.{which}_norm.weight"], c), c["head_dim"] // 2
    angles = positions.double()[:, None] / c["rope_parameters"]["rope_theta"] ** (torch.arange(half).double() / half)
    a, b, cos, sin = *rows.chunk(2, -1), angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class BlockAttention:
    """Each of a block's positions attends to the context and to all positions of the block."""

    def __init__(self, context: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.context = context

    def __call__(self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        k, v = (torch.cat(pair).transpose(0, 1) for pair in zip(self.context[layer], (k_TGE, v_TGE), strict=True))
        out = F.scaled_dot_product_attention(q_THE.transpose(0, 1), k, v, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)


def largest_difference(path: Path, *, shift: int = 0, swap: bool = False) -> float:
    """Between the reference and the loaded head, over the blocks of a sequence. The options break it."""
    loaded = load_head(path, TARGET, dtype=torch.float64)
    assert isinstance(loaded, DSparkHead)
    noise = torch.Generator().manual_seed(0)
    states = torch.randn(9, 12, 32, generator=noise, dtype=torch.float64)
    embed, tokens = Linear(32, 61).double(), torch.randint(0, 61, (12,), generator=noise)
    assert embed.weight is not None
    size, ids = loaded.config.block_size, loaded.config.layer_ids
    used = torch.cat([states[i + shift] for i in (ids[::-1] if swap else ids)], -1)
    worst = 0.0
    with torch.no_grad():
        embed.weight.copy_(torch.randn(embed.weight.shape, generator=noise))
        for at in range(1, 12 - size):
            context = list(loaded.context(loaded.fuse(used[:at]), torch.arange(at)))
            inputs, positions = loaded.block_tokens(tokens[at : at + 1], size)[0], torch.arange(at, at + size)
            h = loaded(inputs, positions, BlockAttention(context), embed)
            features = torch.cat([h, loaded.previous(tokens[at : at + size])], -1)
            found = features @ loaded.output_weight().T, loaded.acceptance_logits(features)
            for ours, theirs in zip(found, reference(path, list(states), embed.weight, tokens, at), strict=True):
                assert ours is not None
                worst = max(worst, float((ours - theirs).abs().max()))
    return worst


@pytest.mark.parametrize("layout", ["speculators", "deepspec"])
def test_a_block_equals_the_reference(tmp_path: Path, layout: str) -> None:
    if layout == "deepspec":
        deepspec(tmp_path, head(7, FULL))
    else:
        save_head(head(7), tmp_path, PROVENANCE, dtype=None)
    assert largest_difference(tmp_path) < 1e-6  # RoPE's tables are float32
    assert largest_difference(tmp_path, shift=1) > 0.1 and largest_difference(tmp_path, swap=True) > 0.1


# ---- errors ----


def edit(path: Path, changes: dict[str, Any], inside: str | None = None) -> None:
    content = json.loads(path.read_text())
    at = content if inside is None else content[inside]
    for key, value in changes.items():
        at[key] = value
        if value is ...:
            del at[key]
    path.write_text(json.dumps(content))


def raises(directory: Path, message: str, target: Any = TARGET) -> None:
    for load in (load_head, read_head_config):
        with pytest.raises(ModelError, match=message) as caught:
            load(directory, target)
        assert str(directory) in str(caught.value)


KEY = "aux_hidden_state_layer_ids"
BOTH: list[tuple[dict[str, Any], str]] = [  # of both layouts
    ({"block_size": ...}, "block_size is missing"),
    ({"block_size": 0}, "block_size = 0: must be a positive integer"),
    ({"block_size": 10**12}, "block_size = 1000000000000: must be at most 1000"),
    ({"mask_token_id": ...}, "mask_token_id = None: must be the token .*, from 0 to 60"),
    ({"mask_token_id": 61}, "mask_token_id = 61: must be the token .*, from 0 to 60"),
    ({"mask_token_id": -1}, "mask_token_id = -1: must be the token"),
    ({"mask_token_id": True}, "mask_token_id = True: must be the token"),
    ({"markov_rank": 0}, r"markov_rank = 0: a head without a Markov term \(DFlash\) is not supported; use one with"),
    ({"markov_rank": ...}, "markov_rank is missing"),
    ({"markov_rank": 10**15}, "markov_rank = 1000000000000000: must be at most 100000"),
    ({"markov_head_type": "gated"}, "markov_head_type = 'gated' is not supported; use a head with 'vanilla'"),
    ({"markov_head_type": "rnn"}, "markov_head_type = 'rnn' is not supported; use a head with 'vanilla'"),
    ({"markov_head_type": ...}, "markov_head_type = None is not supported; use a head with 'vanilla'"),
    ({"enable_confidence_head": ...}, "enable_confidence_head is missing"),
    ({"enable_confidence_head": "yes"}, "enable_confidence_head = 'yes': must be true or false"),
    ({"confidence_head_with_markov": False}, "confidence_head_with_markov = false is not supported: use a head"),
    ({"confidence_head_with_markov": ...}, "confidence_head_with_markov is missing"),
    ({"sample_from_anchor": False}, "sample_from_anchor = false: .* use one that was trained with true"),
    ({"sample_from_anchor": 1}, "sample_from_anchor = 1: must be true or false"),
    ({"target_hidden_size": 64}, "target_hidden_size = 64, but the target's hidden_size is 32"),
]


@pytest.mark.parametrize(
    "changes, message",
    [
        *BOTH,
        ({"sample_from_anchor": ...}, "sample_from_anchor is missing, and its default differs.*true or false"),
        ({"sample_from_anchor": None}, "sample_from_anchor = false: "),
        ({KEY: [0, 4, 5]}, rf"{KEY} \[0, 4, 5\], counted from 1, must be different numbers from 1 to the target's 8"),
        ({KEY: [2, 4, 9]}, rf"{KEY} \[2, 4, 9\].* the target's 8 layers"),
        ({KEY: [2, 4]}, rf"fc.weight has 96 inputs, but {KEY} \[2, 4\] are 2 layers of size 32"),
        ({KEY: ...}, f"{KEY} = None: must be a list of target layers"),
        ({KEY: [2, 4, True]}, f"{KEY} = .*True.*: must be a list of target layers"),
        ({"draft_vocab_size": ...}, "draft_vocab_size is missing"),
        ({"draft_vocab_size": 9}, "draft_vocab_size = 9, but lm_head.weight has 8 rows"),
        ({"draft_vocab_size": 99}, "draft_vocab_size = 99 exceeds the target's vocabulary of 61"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type = 'dflash' is not supported; supported are"),
        ({"speculators_model_type": ["dspark"]}, r"speculators_model_type = \['dspark'\] is not supported"),
        ({"speculators_model_type": ...}, r"architectures = \['DSparkDraftModel'\] is no supported head"),
        ({"transformer_layer_config": ...}, "transformer_layer_config = None: must be the configuration"),
    ],
    ids=str,
)
def test_a_wrong_config_raises(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_head(head(), tmp_path, PROVENANCE)
    edit(tmp_path / "config.json", changes)
    raises(tmp_path, message)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gemma4_text"}, "model_type = 'gemma4_text' is not supported; .* 'qwen3'"),
        ({"model_type": "qwen2"}, "model_type = 'qwen2' is not supported; .* 'qwen3'"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}, r"sliding_window = 9\) is not"),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, r"sliding_window = 9\) is not"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000: must be at most 1000"),
        ({"hidden_size": 64}, "target_hidden_size = 32|the head can't use the target's embedding"),
        ({"vocab_size": 62}, "vocab_size = 62, but the target's is 61: it was trained for another target"),
        ({"max_position_embeddings": 128}, "max_position_embeddings = 128, but the target's is 256"),
    ],
    ids=str,
)
def test_a_wrong_layer_raises(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_head(head(), tmp_path, PROVENANCE)
    edit(tmp_path / "config.json", changes, "transformer_layer_config")
    raises(tmp_path, message)


@pytest.mark.parametrize(
    "changes, message",
    [
        *BOTH,
        ({"architectures": ["Gemma4DSparkModel"]}, r"architectures = \['Gemma4DSparkModel'\] is no supported head"),
        ({"architectures": 3}, "architectures = 3 is no supported head"),
        ({"target_layer_ids": [-1, 3, 4]}, r"target_layer_ids = \[-1, 3, 4\]: -1, the embedding's output, is not"),
        (
            {"target_layer_ids": [1, 3, 8]},
            r"target_layer_ids \[2, 4, 9\], counted from 1, must be .* target's 8 layers",
        ),
        ({"target_layer_ids": [1, 3, 3]}, "must be different numbers"),
        ({"target_layer_ids": ...}, "target_layer_ids = None: must be a list of target layers"),
        ({"num_target_layers": 36}, "num_target_layers = 36, but the target has 8 layers: it was trained for another"),
        ({"model_type": "gemma4_text"}, "model_type = 'gemma4_text' is not supported"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding window attention .* is not supported"),
        ({"quantization_config": {}}, "quantization_config: quantised weights are not supported"),
        ({"draft_vocab_size": 8}, "draft_vocab_size = 8, but lm_head.weight has 61 rows"),
    ],
    ids=str,
)
def test_a_wrong_deepspec_config_raises(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    raises(deepspec(tmp_path, head(config=FULL), **changes), message)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"markov_rank": 7}, r"markov_head.markov_w1.weight is \[61, 6\], the config requires \[61, 7\]"),
        ({"enable_confidence_head": False}, "unexpected tensors.*: confidence_head.proj.bias"),
    ],
)
def test_a_config_of_other_weights_raises(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_head(head(), tmp_path, PROVENANCE)
    edit(tmp_path / "config.json", changes)
    with pytest.raises(ModelError, match=message):
        load_head(tmp_path, TARGET)


def test_too_many_layers_raise(tmp_path: Path) -> None:
    save_head(head(), tmp_path, PROVENANCE)
    edit(tmp_path / "config.json", {"num_hidden_layers": 3}, "transformer_layer_config")
    with pytest.raises(ModelError, match=r"missing tensors that the config requires: layers.2.input_layernorm.weight"):
        load_head(tmp_path, TARGET)


def _rewrite(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return damage


def _pickle(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


@pytest.mark.parametrize(
    "damage, message",
    [
        (_rewrite(lambda w: w.pop("lm_head.weight")), "lm_head.weight is missing: the head uses the LM head of the"),
        (_rewrite(lambda w: w.pop("markov_head.markov_w2.weight")), "missing tensors.*: markov_head.markov_w2.weight"),
        (_rewrite(lambda w: w.pop("confidence_head.proj.bias")), "missing tensors.*: confidence_head.proj.bias"),
        (_rewrite(lambda w: w.pop("d2t")), "d2t is missing.* 8 draft tokens to the target's 61 tokens"),
        (_rewrite(lambda w: w.update(d2t=IDS)), "d2t maps to token 67, outside the target's vocabulary of 61"),
        (_rewrite(lambda w: w.update(gate=IDS)), "unexpected tensors.*: gate"),
        (_rewrite(lambda w: w["markov_head.markov_w1.weight"].fill_(torch.nan)), "markov_in.weight holds values that"),
        (_pickle, "only pytorch_model.bin, a pickle.* weights_only=True"),
    ],
)
def test_damaged_directories_raise(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    save_head(head(), tmp_path, PROVENANCE)
    damage(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        load_head(tmp_path, TARGET)
    assert str(tmp_path) in str(caught.value)
