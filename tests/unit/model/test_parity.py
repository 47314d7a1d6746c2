"""The decoder equals transformers: single, packed and paged sequences, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.model import weights
from paceline.model.attention import PackedAttention, PagedAttention
from paceline.model.decoder import Decoder
from paceline.model.hf_directory import MAX_SHARD_BYTES
from paceline.model.kv import BLOCK, BatchPlan, PagedKV

Checkpoint = Callable[..., Path]
F32 = {"rtol": 1e-5, "atol": 2e-5}
F64 = {"rtol": 0, "atol": 1e-10}
families = pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])


def reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):  # those of transformers always compute in float32
                eps = module.variance_epsilon
                module.forward = lambda x, m=module, eps=eps: m.weight * x * (x.square().mean(-1, True) + eps).rsqrt()
    return model


def tokens(num: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (num,), generator=torch.Generator().manual_seed(seed))


def packed(decoder: Decoder, *sequences: Tensor) -> Tensor:
    lengths = [len(s) for s in sequences]
    positions = torch.cat([torch.arange(n) for n in lengths])
    return decoder.logits(decoder(torch.cat(sequences), positions, PackedAttention(lengths)).hidden)


@families
@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_logits(checkpoint: Checkpoint, family: str, rope: str, tie: bool) -> None:
    path, ids = checkpoint(family, rope, tie), tokens(100)
    for dtype, tolerance in ((torch.float32, F32), (torch.float64, F64)):
        with torch.no_grad():
            theirs = reference(path, dtype)(ids[None]).logits[0]
            ours = packed(weights.load(path, dtype), ids)
        assert theirs.std() > 0.3  # the logits are not all equal
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("family, biases", [("llama", {"attention_bias", "mlp_bias"}), ("qwen3", {"attention_bias"})])
def test_logits_with_optional_biases(checkpoint: Checkpoint, family: str, biases: set[str]) -> None:
    path, ids = checkpoint(family, **dict.fromkeys(sorted(biases), True)), tokens(40)
    with torch.no_grad():
        torch.testing.assert_close(
            packed(weights.load(path, torch.float64), ids), reference(path, torch.float64)(ids[None]).logits[0], **F64
        )


@pytest.mark.parametrize(
    "broken",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {"rope_theta": 10_100.0},
        {"norm_eps": 1e-3},
    ],
    ids=str,
)
def test_a_wrong_config_is_detected(checkpoint: Checkpoint, broken: dict[str, Any]) -> None:
    path, ids = checkpoint("llama", "yarn"), tokens(100)
    right = weights.load(path)
    wrong = Decoder(replace(right.config, **broken))
    weights.assign(wrong, weights.hf_state(right))
    with torch.no_grad(), pytest.raises(AssertionError):
        torch.testing.assert_close(packed(wrong, ids), reference(path)(ids[None]).logits[0], **F32)


@families
def test_gradients(checkpoint: Checkpoint, family: str) -> None:
    path, ids = checkpoint(family, "yarn", False), tokens(60)
    model, decoder = reference(path, torch.float64), weights.load(path, torch.float64)
    torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:]).backward()
    torch.nn.functional.cross_entropy(packed(decoder, ids)[:-1], ids[1:]).backward()
    ours = copy.deepcopy(decoder)
    for theirs, mine in zip(ours.parameters(), decoder.parameters(), strict=True):
        assert mine.grad is not None and mine.grad.abs().max() > 0
        theirs.data = mine.grad
    for name, gradient in weights.hf_state(ours):
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, **F64)


@families
def test_packed_sequences_do_not_attend_to_each_other(checkpoint: Checkpoint, family: str) -> None:
    decoder = weights.load(checkpoint(family), torch.float64)
    sequences = [tokens(n, seed=n) for n in (1, 17, 40, 5)]
    with torch.no_grad():
        together, alone = packed(decoder, *sequences), torch.cat([packed(decoder, s) for s in sequences])
    torch.testing.assert_close(together, alone, **F64)


@families
def test_aux_hidden_states(checkpoint: Checkpoint, family: str) -> None:
    path, ids = checkpoint(family), tokens(30)
    with torch.no_grad():
        theirs = reference(path, torch.float64)(ids[None], output_hidden_states=True).hidden_states
        ours = weights.load(path, torch.float64)(ids, torch.arange(30), PackedAttention([30]), aux_layers=(0, 1, 2))
    assert sorted(ours.aux_hidden_states) == [0, 1, 2]
    for layer in (0, 1):  # transformers returns the last layer's only after the final norm
        torch.testing.assert_close(ours.aux_hidden_states[layer], theirs[layer + 1][0], **F64)
    torch.testing.assert_close(ours.hidden, theirs[-1][0], **F64)
    assert not torch.equal(ours.aux_hidden_states[2], ours.hidden)


def paged(decoder: Decoder, sequences: list[Tensor], seed: int) -> list[Tensor]:
    """All sequences' logits, computed in chunks of random sizes, rows and blocks in random order."""
    rng = np.random.default_rng(seed)
    num_blocks = [-(-len(s) // BLOCK) for s in sequences]
    free = rng.permutation(sum(num_blocks) + 3)
    tables = np.split(free, np.cumsum(num_blocks))[:-1]
    kv = PagedKV(decoder.config, len(free), decoder.dtype, decoder.device)
    kv.k.fill_(torch.nan), kv.v.fill_(torch.nan)  # unwritten memory must not be read
    done = [0] * len(sequences)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    while rows := [i for i in rng.permutation(len(sequences)) if done[i] < len(sequences[i])]:
        rows = rows[: rng.integers(1, len(rows) + 1)]
        sizes = [int(min(rng.integers(1, 9), len(sequences[i]) - done[i])) for i in rows]
        width = max(len(tables[i]) for i in rows)
        plan = BatchPlan(
            tokens=np.concatenate([sequences[i][done[i] : done[i] + n] for i, n in zip(rows, sizes, strict=True)]),
            positions=np.concatenate([np.arange(done[i], done[i] + n) for i, n in zip(rows, sizes, strict=True)]),
            query_start=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
            context=np.array([done[i] + n for i, n in zip(rows, sizes, strict=True)], np.int32),
            block_tables=np.stack([np.pad(tables[i], (0, width - len(tables[i]))) for i in rows]).astype(np.int32),
            logits_at=np.arange(sum(sizes)),
        )
        hidden = decoder(torch.as_tensor(plan.tokens), torch.as_tensor(plan.positions), PagedAttention(kv, plan)).hidden
        for i, n, part in zip(rows, sizes, decoder.logits(hidden).split(sizes), strict=True):
            logits[i].append(part)
            done[i] += n
    return [torch.cat(parts) for parts in logits]


@families
@pytest.mark.parametrize("seed", range(3))
def test_paged_equals_packed(checkpoint: Checkpoint, family: str, seed: int) -> None:
    decoder = weights.load(checkpoint(family, "llama3"), torch.float64)
    sequences = [tokens(n, seed=n) for n in (1, 16, 17, 50, 33)]
    with torch.no_grad():
        for ours, sequence in zip(paged(decoder, sequences, seed), sequences, strict=True):
            torch.testing.assert_close(ours, packed(decoder, sequence), **F64)


@families
@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_transformers_loads_what_we_save(
    checkpoint: Checkpoint, tmp_path: Path, family: str, rope: str, sharded: bool
) -> None:
    path, ids = checkpoint(family, rope, tie=not sharded), tokens(50)
    decoder = weights.load(path)
    weights.save(decoder, tmp_path, 20_000 if sharded else MAX_SHARD_BYTES)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == sharded
    theirs, saved = reference(path), reference(tmp_path)
    assert saved.config.eos_token_id == list(decoder.config.eos_token_ids)
    with torch.no_grad():
        assert torch.equal(saved(ids[None]).logits, theirs(ids[None]).logits)
    again = weights.load(tmp_path)
    assert again.config == decoder.config
    assert weights.checksum(weights.hf_state(again)) == weights.checksum(weights.hf_state(decoder))
