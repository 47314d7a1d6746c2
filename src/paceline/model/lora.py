"""Attach low-rank adapters (LoRA, arXiv 2106.09685) to a decoder. Only the adapters are trained.

Modules have the names of Hugging Face, and adapters those of PEFT. A starts random, as in PEFT, and B at zero, so
attaching adapters does not change the outputs. Learner and engine compute with adapters that are not merged into the
weights: merged weights are rounded, and in 16 bits an update is often smaller than half a unit of the last place.
`hf_state` of a decoder with adapters yields merged weights, for other engines and exports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.model.decoder import Decoder
from paceline.model.layer import Linear, Lora, LoraPart
from paceline.model.weights import ParameterView, assign, collect, decoder_views, fill_views, hf_state, read_views

PREFIX = "base_model.model."  # of PEFT's names


def attach(decoder: Decoder, rank: int, alpha: float, targets: Collection[str], seed: int = 0) -> None:
    """Add adapters to these modules of every layer ("q_proj", "down_proj", ...) and freeze everything else. The same
    seed gives the same A on every device."""
    decoder.requires_grad_(False)
    noise = torch.Generator().manual_seed(seed)
    modules = {name.rpartition(".")[2] for _, parts in _linears(decoder) for name, _ in parts}
    assert targets and modules.issuperset(targets), f"{sorted(targets)} are not all modules of the decoder"
    for linear, parts in list(_linears(decoder)):
        adapted = [part for name, part in parts if name.rpartition(".")[2] in targets]
        if not adapted:
            continue
        # To the right device and dtype before it is filled: of a decoder without memory (`meta`), only shapes matter.
        lora = Lora(linear.num_in, adapted, rank, alpha / rank).to(decoder.device, decoder.dtype)
        with torch.no_grad():
            bound = linear.num_in**-0.5  # PEFT: kaiming_uniform_(a=sqrt(5))
            lora.down.copy_((2 * torch.rand(lora.down.shape, generator=noise) - 1) * bound)
        linear.lora = lora


def adapters_of(decoder: nn.Module) -> list[Lora]:
    return [module for module in decoder.modules() if isinstance(module, Lora)]


def adapter_views(decoder: Decoder) -> Iterator[ParameterView]:
    """The adapters under PEFT's names: A and B of each module."""
    for linear, parts in _linears(decoder):
        lora = linear.lora
        if lora is not None:
            names = [PREFIX + name for name, part in parts if part in lora.parts]
            yield ParameterView(lora.down, tuple((f"{name}.lora_A.weight", lora.rank) for name in names))
            sizes = zip(names, lora.parts, strict=True)
            yield ParameterView(lora.up, tuple((f"{name}.lora_B.weight", part.size) for name, part in sizes))


def adapter_state(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every adapter tensor under its name in PEFT, as a view."""
    return read_views(adapter_views(decoder))


def assign_adapters(decoder: Decoder, pairs: Iterable[tuple[str, Tensor]]) -> None:
    """Overwrite all adapters in place from tensors of any dtype and device, under PEFT's names."""
    fill_views(adapter_views(decoder), *collect(pairs), "adapters")
    for lora in adapters_of(decoder):
        if lora.panels:
            from paceline.model import kernels

            kernels.pack_adapters(lora)


def policy_state(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """What weight updates have: the adapters, if there are any, else all weights."""
    return adapter_state(decoder) if adapters_of(decoder) else hf_state(decoder)


def assign_policy(decoder: Decoder, pairs: Iterable[tuple[str, Tensor]]) -> None:
    (assign_adapters if adapters_of(decoder) else assign)(decoder, pairs)


@contextmanager
def adapters_off(decoder: nn.Module) -> Iterator[None]:
    """Disable all adapters: the decoder computes with its base weights."""
    adapters = adapters_of(decoder)
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


def _linears(decoder: Decoder) -> Iterator[tuple[Linear, list[tuple[str, LoraPart]]]]:
    """Each linear map with the Hugging Face modules that are fused in it."""
    for view in decoder_views(decoder):
        if isinstance(view.parameter, Linear):
            parts, first = [], 0
            for name, size in view.parts:
                parts.append((name.removesuffix(".weight"), LoraPart(first, size)))
                first += size
            yield view.parameter, parts
