"""Regression test of the shipped head's acceptance on recorded rollouts. Damaged heads are caught.

The rollouts are SmolLM2-135M-Instruct's on prompts that the head was not trained on: ten of GSM8K and ten of
reasoning-gym, at temperatures 1 and 0.6, of up to 64 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.draft.acceptance import Acceptance, measure
from paceline.draft.head_batch import Example, HeadBatch, make_head_batch
from paceline.model.decoder import Decoder
from paceline.model.eagle3 import Eagle3Head
from paceline.model.head_files import load_head, resolve_head
from paceline.model.weights import checkpoint_checksum, load

pytestmark = pytest.mark.slow
DATA = Path(__file__).parents[1] / "data" / "shipped_head.npz"
# Mean acceptance length at k = 3, measured when the head was added. The noise has a fixed seed; platforms differ by
# rounding only.
EXPECTED = {
    (1.0, "coupled"): 2.295,
    (1.0, "greedy"): 1.718,
    (0.6, "coupled"): 2.702,
    (0.6, "greedy"): 2.446,
}
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def decoder(smollm2: Path) -> Decoder:
    return load(smollm2).requires_grad_(False)


@pytest.fixture(scope="module")
def head(smollm2: Path, decoder: Decoder) -> Eagle3Head:
    directory = resolve_head(None, "smollm2-135m")
    return load_head(directory, decoder.config, target_checksum=checkpoint_checksum(smollm2)).requires_grad_(False)


@pytest.fixture(scope="module")
def head_batches(decoder: Decoder, head: Eagle3Head) -> dict[float, list[HeadBatch]]:
    with np.load(DATA) as data:
        sequences = np.split(data["tokens"], np.cumsum(data["length"].astype(np.int64))[:-1])
        rows = list(zip(sequences, data["num_prompt"].tolist(), data["temperature"].round(3).tolist(), strict=True))
    found: dict[float, list[HeadBatch]] = {}
    for temperature in (1.0, 0.6):
        examples = [
            Example(tokens.astype(np.int32), np.arange(len(tokens)) >= num_prompt)
            for tokens, num_prompt, t in rows
            if abs(t - temperature) < 1e-3
        ]
        parts = [examples[i::4] for i in range(4)]
        found[temperature] = [make_head_batch(decoder, part, head.config.aux_layers) for part in parts]
    return found


def lengths(
    head: Eagle3Head,
    decoder: Decoder,
    head_batches: dict[float, list[HeadBatch]],
    temperatures: tuple[float, ...] = (1.0, 0.6),
) -> dict[tuple[float, str], float]:
    found = {}
    for temperature in temperatures:
        total = {kind: Acceptance.zeros(3) for kind in ("coupled", "greedy")}
        for seed, head_batch in enumerate(head_batches[temperature]):
            measured = measure(head, decoder.embed, head_batch, 3, temperature, seed)
            for kind, part in total.items():
                part.add(measured[kind])
        found |= {(temperature, kind): part.mean_length for kind, part in total.items()}
    return found


def test_acceptance(head: Eagle3Head, decoder: Decoder, head_batches: dict[float, list[HeadBatch]]) -> None:
    found = lengths(head, decoder, head_batches)
    for key, expected in EXPECTED.items():
        assert found[key] > (1 - TOLERANCE) * expected, (key, found)
        assert found[key] < (1 + TOLERANCE) * expected, "better: update EXPECTED"


def swapped_keys_and_values(head: Eagle3Head) -> None:
    c = head.config.layer
    assert head.layer.qkv.weight is not None
    q, k, v = head.layer.qkv.weight.data.split([c.num_heads * c.head_dim, *[c.num_kv_heads * c.head_dim] * 2])
    head.layer.qkv.weight.data = torch.cat([q, v, k])


def other_layers(head_batch: HeadBatch) -> HeadBatch:
    low, middle, high = head_batch.aux_hidden_SLF.chunk(3, -1)
    return replace(head_batch, aux_hidden_SLF=torch.cat([middle, low, high], -1))


def no_shift(head_batch: HeadBatch) -> HeadBatch:
    """Hidden state i comes with token i instead of token i + 1."""
    return replace(head_batch, aux_hidden_SLF=head_batch.aux_hidden_SLF.roll(-1, 1))


@pytest.mark.parametrize("damage", [swapped_keys_and_values, other_layers, no_shift])
def test_damage_is_caught(
    head: Eagle3Head, decoder: Decoder, head_batches: dict[float, list[HeadBatch]], damage: Callable
) -> None:
    damaged, given = head, head_batches[1.0]
    if damage is swapped_keys_and_values:
        damaged = Eagle3Head(head.config)
        damaged.load_state_dict(head.state_dict())
        damage(damaged.requires_grad_(False))
    else:
        given = [damage(head_batch) for head_batch in given]
    found = lengths(damaged, decoder, {1.0: given}, (1.0,))
    assert found[1.0, "coupled"] < (1 - TOLERANCE) * EXPECTED[1.0, "coupled"], found
