"""DSpark heads in CUDA graphs: the drafts are those of the plain implementation, and change no token. The tests without
an engine also run in Triton's interpreter, without a GPU: TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_config, tiny_decoder, tiny_dspark
from torch import Tensor

pytest.importorskip("triton")
from paceline.model.attention import PagedAttention
from paceline.model.cuda import graph_head
from paceline.model.cuda.attention import AttentionRows, CudaPagedAttention, QKNormRope
from paceline.model.cuda.device_state import MAX_DRAFT, DeviceState, Inputs
from paceline.model.cuda.float8 import apply_head_dtype
from paceline.model.cuda.graph_drafter import DraftStep
from paceline.model.cuda.graph_dspark import GraphDSpark
from paceline.model.cuda.rotate_and_store import rotate_and_store
from paceline.model.cuda.sample import Draws
from paceline.model.decoder import Decoder
from paceline.model.dspark import DSparkHead
from paceline.model.head_files import assign_head, head_state
from paceline.model.kv import BLOCK, BatchPlan, PagedKV
from paceline.model.layer import FLOAT8
from paceline.model.ops import TorchOps
from paceline.model.rope import rope_tables
from paceline.model.sample import Sampler
from paceline.model.sampling_arrays import SamplingArrays
from paceline.speculation.acceptance import SCORE_EDGES
from paceline.types import SamplingParams

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
SHAPE = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 32}


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.inference_mode():
        yield


def noise(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape and torch.isfinite(found).all()
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


# ---- kernels ----


def tables_of(sizes: list[int]) -> np.ndarray:
    """Block tables of rows with so many positions. No row has block 0, which the entries past a row's end name."""
    num = [-(-size // BLOCK) for size in sizes]
    blocks = iter(1 + np.random.default_rng(0).permutation(sum(num)))
    tables = np.zeros((len(sizes), max(num) + 2), np.int32)
    for row, each in enumerate(num):
        tables[row, :each] = [next(blocks) for _ in range(each)]
    return tables


def as_single_rows(tables: np.ndarray, starts: list[int], ends: list[int]) -> BatchPlan:
    """Blocks from `starts` to `ends`: each position is a row of its own, whose context is the whole block."""
    row = np.repeat(np.arange(len(starts)), np.array(ends) - starts)
    positions = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
    num = len(row)
    context = np.array(ends, np.int32)[row]
    return BatchPlan(np.zeros(num, np.int64), positions, np.arange(num + 1, dtype=np.int32), context, tables[row],
                     np.arange(num))  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "num_rows", "longest"),
    [
        (torch.float32, 5, 40), (torch.float32, 5, 700),  # 700: several programs share a row
        *(pytest.param(dtype, num, 200, marks=needs_gpu) for dtype in (torch.float32, torch.bfloat16)
          for num in (5, 70, 300)),  # 300: so many programs that several share a multiprocessor
    ],
)  # fmt: skip
@pytest.mark.parametrize("k", [1, 3, 7, 15])
def test_attention_of_blocks_equals_that_of_single_rows(
    k: int, dtype: torch.dtype, num_rows: int, longest: int
) -> None:
    """With norm and RoPE in the kernel. The last row's block ends early, at its limit."""
    config, rng = tiny_config(**SHAPE, max_positions=1024), np.random.default_rng(k)
    starts = [0, *rng.integers(1, longest, num_rows - 2).tolist(), longest]
    limits = [start + k + 5 for start in starts[:-1]] + [starts[-1] + (k + 1) // 2]
    ends = [min(start + k, limit) for start, limit in zip(starts, limits, strict=True)]
    tables = tables_of(ends)
    slots = rng.permutation(num_rows)
    by_slot = np.zeros_like(tables)
    by_slot[slots] = tables
    kvs = [PagedKV(config, int(tables.max()) + 1, dtype, DEVICE) for _ in range(2)]
    for kv in kvs:
        kv.k.copy_(noise(*kv.k.shape, seed=1))
        kv.v.copy_(noise(*kv.v.shape, seed=2))
    before = kvs[1].k.clone()
    q, key, v = noise(num_rows * k, 12, 32, seed=3).to(dtype).split([8, 2, 2], 1)
    cos, sin = (table.to(DEVICE) for table in rope_tables(config))
    norms = [(1 + 0.2 * noise(32, seed=i)).to(dtype) for i in (4, 5)]
    norm_rope = QKNormRope(cos, sin, norms[0], norms[1], 1e-6)

    def sent(values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)

    rows = AttentionRows(sent(np.arange(num_rows + 1) * k), sent(np.add(starts, k)), sent(slots), sent(by_slot))
    of_slot = np.zeros(num_rows, np.int32)
    of_slot[slots] = limits
    found = CudaPagedAttention(kvs[0], rows, k, sent(of_slot))(1, q, key, v, norm_rope)
    valid = torch.tensor([i * k + j for i in range(num_rows) for j in range(ends[i] - starts[i])], device=DEVICE)
    plan = as_single_rows(tables, starts, ends)
    at = torch.as_tensor(plan.positions, device=DEVICE)
    rotated = [rotate(x[valid], norm, norm_rope, at) for x, norm in ((q, norms[0]), (key, norms[1]))]
    wanted = PagedAttention(kvs[1], plan)(1, *rotated, v[valid])
    # In bfloat16 queries and attention weights are rounded.
    assert relative_error(found[valid], wanted) < (1e-5 if dtype == torch.float32 else 4e-3)
    assert torch.isfinite(found).all()
    assert relative_error(kvs[0].k, kvs[1].k) < (1e-6 if dtype == torch.float32 else 1e-3) and torch.equal(
        kvs[0].v, kvs[1].v
    )
    assert torch.equal(kvs[0].k[:, 0], before[:, 0]) and not torch.equal(kvs[0].k, before)
    if k > 1:  # a causal block is something else
        causal = CudaPagedAttention(kvs[0], rows, k)(1, q, key, v, norm_rope)
        assert relative_error(causal[: k - 1], found[: k - 1]) > 0.1


def rotate(x_THE: Tensor, norm: Tensor | None, norm_rope: QKNormRope, at: Tensor) -> Tensor:
    x = x_THE.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_rope.eps) * norm
    cos, sin = norm_rope.cos[at].double().unsqueeze(1), norm_rope.sin[at].double().unsqueeze(1)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_THE.dtype)


@pytest.mark.parametrize("has_norm", [False, True])
def test_keys_and_values_without_queries(has_norm: bool) -> None:
    """Of tokens in any order; padding is not stored."""
    config, rng = tiny_config(**SHAPE), np.random.default_rng(0)
    tables = tables_of([40, 20, 33])
    row = np.array([0, 2, 2, 1, 0, 0, 1])
    positions = np.array([39, 0, 17, 19, 5, 15, 16])
    slots = np.concatenate([row, [-1, -1]])
    at = torch.as_tensor(np.concatenate([positions, [0, 0]]).astype(np.int32), device=DEVICE)
    kv, plain = (PagedKV(config, int(tables.max()) + 1, torch.float32, DEVICE) for _ in range(2))
    both = noise(len(slots), 4 * 32, seed=int(rng.integers(9)))
    cos, sin = (table.to(DEVICE) for table in rope_tables(config))
    norms = [1 + 0.2 * noise(32, seed=i) if has_norm else None for i in (1, 2)]
    norm_rope = QKNormRope(cos, sin, norms[0], norms[1], 1e-6)
    slots_T, tables_T = (torch.as_tensor(x.astype(np.int32), device=DEVICE) for x in (slots, tables))
    rotate_and_store(both, None, kv, 2, norm_rope, at, slots_T, tables_T)
    k, v = both[: len(row)].view(-1, 4, 32).split(2, 1)
    if has_norm:
        k = rotate(k, norms[1], norm_rope, at[: len(row)].long())
    else:
        k = rotate(k, torch.ones(32, device=DEVICE), replace(norm_rope, eps=0.0), at[: len(row)].long()) * k.square(
        ).mean(-1, keepdim=True).sqrt()  # fmt: skip
    place = tables[row, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    plain.write(2, torch.as_tensor(place, device=DEVICE), k, v)
    assert torch.equal(kv.v, plain.v) and relative_error(kv.k, plain.k) < 1e-6
    assert not kv.k[:2].any() and (kv.k[2].abs().sum((1, 3)) > 0).sum() == len(row)


@needs_gpu
def test_a_float8_head_computes_its_context_in_float8() -> None:
    """Also with new weights: the part of the projection that computes keys and values changes with the whole."""
    decoder = tiny_decoder(torch.bfloat16, vocab_size=64, **SHAPE).to(DEVICE)
    head, other = (tiny_dspark(decoder, 64, seed).to(DEVICE) for seed in (3, 4))
    apply_head_dtype(head, "float8")
    part, aux = head.layers[1].qkv.outputs_from(8 * 32), noise(20, head.config.aux_hidden_size).bfloat16()
    found = []
    for updated in (False, True):
        if updated:
            assign_head(head, head_state(other))
        fused, plain = head.fuse(aux), TorchOps().norm(TorchOps().linear(aux, head.fc), head.hidden_norm, 1e-6)
        assert fused.dtype == FLOAT8 and relative_error(fused.float(), plain) < 0.05
        found.append(head.ops.linear(fused, part))
        whole = head.ops.linear(fused, head.layers[1].qkv)
        assert found[-1].shape == (20, 2 * 2 * 32) and relative_error(found[-1], whole[:, 8 * 32 :]) < 1e-2
    assert relative_error(found[0], found[1]) > 0.5


# ---- the head's part of a step ----

K = 5
LENGTHS, LIMITS = [19, 40, 2, 34], [60, 90, 80, 36]  # after the step; the last row's block reaches its limit
NUM_COMPUTED = [16, 39, 0, 31]  # positions that were computed before the step
NUM_REJECTED = [2, 0, 1, 0]  # tokens that the step computed after those


class Sequences:
    """What a plain implementation knows: all hidden states of each sequence, and its last token."""

    def __init__(self, decoder: Decoder, head: DSparkHead) -> None:
        self.decoder, self.head, rng = decoder, head, np.random.default_rng(1)
        size = head.config.aux_hidden_size
        self.hidden = [noise(n + r, size, seed=n) for n, r in zip(LENGTHS, NUM_REJECTED, strict=True)]
        self.last = rng.integers(0, 61, len(LENGTHS)).tolist()
        self.keys = rng.integers(0, 2**63, len(LENGTHS), np.int64)
        self.temperature = [1.0, 0.7, 0.0, 1.0]
        self.tables = tables_of(LIMITS)

    def drafts(self) -> tuple[list[list[int]], list[Tensor]]:
        """With the plain head, one row and one position at a time: the tokens, and their logits."""
        head = deepcopy(self.head)
        head.ops = TorchOps()
        kv = PagedKV(head.config.layer, int(self.tables.max()) + 1, head.dtype, DEVICE)
        drafts, found = [], []
        for row, (length, limit) in enumerate(zip(LENGTHS, LIMITS, strict=True)):
            context = torch.arange(length - 1, device=DEVICE)
            table = torch.as_tensor(self.tables[row].astype(np.int64), device=DEVICE)
            for layer, (k, v) in enumerate(head.context(head.fuse(self.hidden[row][: length - 1]), context)):
                kv.write(layer, table[context // BLOCK] * BLOCK + context % BLOCK, k, v)
            end = min(length - 1 + K, limit)
            plan = as_single_rows(self.tables[row : row + 1], [length - 1], [end])
            tokens = head.block_tokens(torch.tensor([self.last[row]], device=DEVICE), end - length + 1)[0]
            h = head(
                tokens, torch.as_tensor(plan.positions, device=DEVICE), PagedAttention(kv, plan), self.decoder.embed
            )
            drafts.append([])
            previous = self.last[row]
            for i, base in enumerate(head.base_logits(h)):
                logits = base + head.markov_logits(head.previous(torch.tensor([previous], device=DEVICE)))
                params = SamplingArrays.of([SamplingParams(temperature=self.temperature[row])])
                emitted_at, key = np.array([length + i]), self.keys[row : row + 1].view(np.uint64)
                previous = int(Sampler().draw(head.to_target_vocab(logits), key, emitted_at, params).tokens[0])
                drafts[-1].append(previous)
                found.append(logits[0])
        return drafts, found


def draw_on_cpu(
    logits: Tensor, keys: Tensor, at: Tensor, temperature: Tensor, stream: int, ids: Tensor | None, limits: None,
    margins: bool, active_P: Tensor | None,
) -> Draws:  # fmt: skip
    """In place of `draw`: the interpreter does not know its functions."""
    wide = logits if ids is None else logits.new_full((len(logits), 61), -torch.inf).index_copy_(1, ids, logits)
    none = np.zeros(len(logits))
    params = SamplingArrays(temperature.numpy(), none.astype(np.int32), none + 1, none)
    draws = Sampler().draw(wide.nan_to_num(), keys.numpy().view(np.uint64), at.numpy(), params, stream, margins=True)
    found = [torch.from_numpy(x) for x in (draws.tokens, draws.logprobs, draws.raw_logprobs, draws.margins)]
    if active_P is not None:
        found[0] *= active_P > 0
    return Draws(found[0].int(), found[1], found[2], found[3].float())


@pytest.mark.parametrize("stops_early", [False, True])
@pytest.mark.parametrize(("vocab", "family"), [(41, "llama"), (61, "qwen3")])
def test_a_step_drafts_what_the_plain_head_drafts(
    vocab: int, family: str, stops_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a prefill and a step with accepted and rejected tokens and padding. Nothing is written to blocks of no
    sequence."""
    if INTERPRETED:
        monkeypatch.setattr(graph_head, "draw", draw_on_cpu)
    decoder = tiny_decoder(torch.float32, family=family, qk_norm=family == "qwen3", **SHAPE).to(DEVICE)
    head = tiny_dspark(decoder, vocab).to(DEVICE)
    sequences = Sequences(decoder, head)
    expected, expected_logits = sequences.drafts()
    state, slots = DeviceState(8, sequences.tables.shape[1], DEVICE), [5, 1, 3, 6]
    for row, slot in enumerate(slots):
        state.last[slot], state.length[slot], state.limit[slot] = sequences.last[row], LENGTHS[row], LIMITS[row]
        state.key[slot], state.temperature[slot] = int(sequences.keys[row]), sequences.temperature[row]
        state.block_tables[slot] = torch.as_tensor(sequences.tables[row])
    kv = PagedKV(head.config.layer, int(sequences.tables.max()) + 1, head.dtype, DEVICE)
    device_head = GraphDSpark(head, decoder.embed, kv, state, SCORE_EDGES.tolist())
    device_head.compute(*prefill_of(sequences, head))
    recorded, real = [], device_head._draw

    def record(logits: Tensor, *rest: Any) -> Tensor:
        recorded.append(logits.clone())
        return real(logits, *rest)

    device_head._draw = record  # type: ignore[method-assign]
    scores = torch.zeros(5, MAX_DRAFT, dtype=torch.float64, device=DEVICE)
    if stops_early:
        state.threshold.fill_(0.05)
    device_head.draft(step_of(sequences, state, [*slots, -1], scores, stops_early))
    num = [len(draft) for draft in expected]
    assert num == [K, K, K, 3]
    logits = torch.stack(recorded, 1)
    found = state.drafts[torch.tensor(slots, device=DEVICE), :K].tolist()
    survival = state.survival[torch.tensor(slots, device=DEVICE), :K].tolist()
    skipped = [next((j for j in range(n) if survival[row][j] == 0), n) for row, n in enumerate(num)]
    assert (sum(skipped) < sum(num)) == stops_early and min(skipped) >= 1
    offset = np.cumsum([0, *num])
    for row, n in enumerate(skipped):
        assert found[row][:n] == expected[row][:n]
        wanted = torch.stack(expected_logits[offset[row] : offset[row] + n])
        assert relative_error(logits[row, :n], wanted) < 1e-4
        assert all(a >= b for a, b in zip(survival[row], survival[row][1:], strict=False)) and 0 < survival[row][0] <= 1
        assert (scores[row, :K] > 0).all() and (scores[row, :K] <= 1).all()
    assert not kv.k[:, 0].any() and not kv.v[:, 0].any()


def prefill_of(sequences: Sequences, head: DSparkHead) -> tuple[BatchPlan, Tensor]:
    """The positions before the step, in two of the rows' blocks at a time."""
    sizes = np.array(NUM_COMPUTED)
    rows = np.flatnonzero(sizes)
    start = np.concatenate([[0], np.cumsum(sizes[rows])]).astype(np.int32)
    positions = np.concatenate([np.arange(sizes[row]) for row in rows])
    plan = BatchPlan(
        np.zeros(len(positions), np.int64), positions, start, sizes[rows].astype(np.int32), sequences.tables[rows],
        np.zeros(0, np.int64),
    )  # fmt: skip
    return plan, head.fuse(torch.cat([sequences.hidden[row][: sizes[row]] for row in rows]))


def step_of(sequences: Sequences, state: DeviceState, slots: list[int], scores: Tensor, stops_early: bool) -> DraftStep:
    """All positions that were not computed before, and two tokens of padding. The last row is padding."""

    def sent(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype, device=DEVICE)

    ends = [n - 1 + r for n, r in zip(LENGTHS, NUM_REJECTED, strict=True)]
    sizes = [end - start for start, end in zip(NUM_COMPUTED, ends, strict=True)]
    hidden = [sequences.hidden[row][start : ends[row]] for row, start in enumerate(NUM_COMPUTED)]
    positions = np.concatenate([*(np.arange(a, b) for a, b in zip(NUM_COMPUTED, ends, strict=True)), [0, 0]])
    of = np.concatenate([np.repeat(slots[:-1], sizes), [-1, -1]])
    rows = AttentionRows(
        sent(np.cumsum([0, *sizes, 0])), sent([*ends, 0]), sent(slots), state.block_tables
    )  # fmt: skip
    none = torch.zeros(0, device=DEVICE)
    inputs = Inputs(none, sent(positions), none, none, none, sent(of), rows)
    aux = torch.cat([*hidden, noise(2, sequences.head.config.aux_hidden_size)])
    return DraftStep(inputs, max(sizes), aux, none, none, none, K, False, stops_early, scores, none, None)
