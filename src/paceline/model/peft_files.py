"""Adapters in the format of PEFT: a directory with adapter_config.json and adapter_model.safetensors.

Only LoRA that Paceline computes exactly is read: every setting that changes the outputs is supported or refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from paceline.model.lora import PREFIX
from paceline.model.tensor_file import TensorFile, TensorSpec, write_file
from paceline.model.weights import ModelError, read_json

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NAME = re.compile(re.escape(PREFIX) + r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight")
# Settings that do not change the outputs of given tensors. There is no dropout: the engine has none.
HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
    "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
# Initialisations after which the base weights are still those of the model.
INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class Adapter:
    """`tensors`: under PEFT's names. An adapter's scale is alpha / rank."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    tensors: Mapping[str, Tensor]


def read_adapter(directory: Path) -> Adapter:
    """Raises ModelError for what is missing or not supported. The model's shapes are checked when the tensors are
    assigned."""
    rank, alpha = _read_config(directory)
    path = directory / TENSORS
    if not path.exists():
        pickled = " (adapter_model.bin is a pickle, which can run code)" * (directory / "adapter_model.bin").exists()
        raise ModelError(f"{path}: missing{pickled}; save the adapter again with `save_pretrained` of PEFT")
    try:
        with TensorFile(path) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path}: truncated or corrupt ({error}); save the adapter again") from None
    found: set[str] = set()
    for name, tensor in tensors.items():
        match = NAME.fullmatch(name)
        if match is None or match[2] not in TARGETS:
            raise ModelError(f"{path}: {name}: only adapters of {', '.join(TARGETS)} in every layer are supported")
        if not tensor.is_floating_point() or tensor.ndim != 2 or tensor.shape[0 if match[3] == "A" else 1] != rank:
            raise ModelError(f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, but r = {rank} in {CONFIG}")
        found.add(match[2])
    if not found:
        raise ModelError(f"{path}: no adapters; save the adapter again")
    return Adapter(rank, alpha, tuple(name for name in TARGETS if name in found), tensors)


def _read_config(directory: Path) -> tuple[int, float]:
    """Rank and alpha."""
    path = directory / CONFIG
    if not path.exists():
        raise ModelError(f"{path}: missing; expected a directory that `save_pretrained` of PEFT has written")
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type = {config.get('peft_type')!r}: only LORA is supported")
    rank, alpha, init = config.get("r"), config.get("lora_alpha"), config.get("init_lora_weights")
    if type(rank) is not int or rank < 1:
        raise ModelError(f"{path}: r = {rank!r}: must be a positive integer")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ModelError(f"{path}: lora_alpha = {alpha!r}: must be a positive number")
    if init not in INITS:
        raise ModelError(f"{path}: init_lora_weights = {init!r}: changes the base weights; merge the adapter instead")
    for key, value in config.items():
        if key not in HARMLESS and value not in (None, False, "none", [], {}, ""):
            raise ModelError(f"{path}: {key} = {value!r}: not supported; merge the adapter into the model with PEFT")
    return rank, alpha * math.sqrt(rank) if config.get("use_rslora") else alpha


def write_adapter(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    specs: Mapping[str, TensorSpec],
    rank: int,
    alpha: float,
    targets: Sequence[str],
    base_model: str,
) -> None:
    """Write both files to an existing directory. The config is written last: a directory without it is incomplete."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": [name for name in TARGETS if name in targets],
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    write_file(directory / TENSORS, specs, tensors)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
