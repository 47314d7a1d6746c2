"""Models of a given shape with random weights, created on the device: for timing without a checkpoint."""

from __future__ import annotations

from typing import TypeVar, get_args

import torch

from paceline.config import LoraTarget
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.draft_head import DraftHead
from paceline.model.dspark import DSparkHead, dspark_config
from paceline.model.eagle3 import Eagle3Head, default_layer_ids, head_config
from paceline.model.layer import init_random
from paceline.model.lora import adapters_of, attach

HeadType = TypeVar("HeadType", bound=DraftHead)


def random_decoder(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder = decoder.to(dtype).to_empty(device=device).requires_grad_(False)
    init_random(decoder.named_parameters(), 0, device)
    return decoder


def add_random_adapters(decoder: Decoder, rank: int) -> None:
    """LoRA adapters of all modules, none of which is zero."""
    attach(decoder, rank, rank, get_args(LoraTarget))
    noise = torch.Generator(decoder.device).manual_seed(2)
    for lora in adapters_of(decoder):
        lora.requires_grad_(False).up.normal_(0, 0.02, generator=noise)


def random_head(target: ModelConfig, draft_vocab_size: int, dtype: torch.dtype, device: torch.device) -> Eagle3Head:
    with torch.device("meta"):
        head = Eagle3Head(head_config(target, draft_vocab_size))
    return _with_random_weights(head, dtype, device)


def random_dspark(
    target: ModelConfig, draft_vocab_size: int, num_layers: int, rank: int, dtype: torch.dtype, device: torch.device
) -> DSparkHead:
    ids = default_layer_ids(target.num_layers)
    with torch.device("meta"):
        head = DSparkHead(dspark_config(target, draft_vocab_size, ids, num_layers=num_layers, markov_rank=rank))
    return _with_random_weights(head, dtype, device)


def _with_random_weights(head: HeadType, dtype: torch.dtype, device: torch.device) -> HeadType:
    """Its vocabulary is every n-th token of the target's."""
    num, num_target = head.config.draft_vocab_size, head.config.layer.vocab_size
    head = head.to(dtype).to_empty(device=device).requires_grad_(False)
    init_random(head.named_parameters(), 1, device)
    head.draft_ids.copy_(torch.arange(num, device=device) * num_target // num)
    return head
