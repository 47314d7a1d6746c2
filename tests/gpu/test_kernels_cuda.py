"""Triton kernels against their torch reference implementations, and engines with CUDA graphs against those without."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_config, tiny_decoder, tiny_dspark, tiny_head

from paceline.drafters.device import DeviceHistoryDrafter
from paceline.drafters.dspark import DSparkDrafter
from paceline.drafters.eagle3 import Eagle3Drafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.accept import RULES
from paceline.engine.engine import LocalEngine
from paceline.engine.runner import EagerRunner
from paceline.model.attention import GatheredAttention, PagedAttention, has_varlen
from paceline.model.kv import BLOCK, BatchPlan, PagedKV
from paceline.model.layer import Linear
from paceline.model.ops import TorchOps
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler, Stream, philox_words
from paceline.model.sampling_arrays import SamplingArrays
from paceline.model.weights import hf_state
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.history_store import HistoryStore
from paceline.speculation.policy import StaticPolicy
from paceline.types import Completion, Request, SamplingParams
from paceline.verify.drafters import AdversarialDrafter

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16]
SHAPE = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 32}
QWEN3_8B = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape and torch.isfinite(found).all()
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fused_operations_equal_torch_ops(dtype: torch.dtype, family: str) -> None:
    """In bfloat16 bit for bit: both round at the same places."""
    from paceline.model.cuda.ops import CudaOps

    decoder = tiny_decoder(dtype, family=family, qk_norm=family == "qwen3", **SHAPE).to(CUDA)
    config, layer, rng = decoder.config, decoder.layers[0], torch.Generator(CUDA).manual_seed(1)
    for norm in (layer.input_norm, layer.q_norm, layer.k_norm):
        if norm is not None:
            norm.copy_(1 + 0.2 * torch.randn(norm.shape, generator=rng, device=CUDA))
    slow, fast = TorchOps(), CudaOps()
    tolerance = 0.0 if dtype == torch.bfloat16 else 1e-6

    def noise(*size: int) -> torch.Tensor:
        return 3 * torch.randn(size, generator=rng, device=CUDA).to(dtype)

    for num in (5, 7):  # fewer tokens use small_batch
        x, y, gate_up = noise(num, config.hidden_size), noise(num, config.hidden_size), noise(num, 2 * 1030)
        at = torch.randint(0, config.max_positions, (num,), generator=rng, device=CUDA)
        assert relative_error(fast.norm(x, layer.input_norm, 1e-6), slow.norm(x, layer.input_norm, 1e-6)) <= tolerance
        assert relative_error(fast.silu_mul(gate_up), slow.silu_mul(gate_up)) <= tolerance
        rope = decoder.rope.tables(decoder.norm)
        for ours, reference in zip(fast.qkv(x, layer, at, rope), slow.qkv(x, layer, at, rope), strict=True):
            assert relative_error(ours, reference) <= tolerance
        both = x, layer.input_norm, y, layer.post_norm, 1e-6
        assert relative_error(fast.norm_concat(*both), slow.norm_concat(*both)) <= tolerance
        for residual in (x, x.float() + 1e-4):  # of a head, and of a decoder
            given = y, layer.input_norm, 1e-6
            wanted = slow.add_norm(residual, *given)
            assert [part.dtype for part in wanted] == [residual.dtype, dtype]
            assert relative_error(fast.rounded_sum(residual, y, dtype), slow.rounded_sum(residual, y, dtype)) == 0
            for ours, reference in zip(fast.add_norm(residual.clone(), y.clone(), *given[1:]), wanted, strict=True):
                assert ours.dtype == reference.dtype and relative_error(ours, reference) <= tolerance


@pytest.mark.parametrize(("num", "tile", "share", "too_few"), [
    (512, 128, 1 / 2, 300), (470, 128, 1 / 2, 300), (128, 96, 1, 127)
])  # fmt: skip
def test_fused_swiglu_equals_linear_and_silu_mul(num: int, tile: int, share: float, too_few: int) -> None:
    """And `should_use` refuses float32 and too few tokens. A tile of tokens uses `share` of the multiprocessors."""
    from paceline.model.cuda.ops import CudaOps
    from paceline.model.cuda.swiglu import num_sms, should_use

    if num_sms(CUDA) >= 1 << 30:
        pytest.skip("the SwiGLU kernel is for Hopper")
    gate_up = Linear(320, 2 * tile * int(share * num_sms(CUDA)))
    rng = torch.Generator(CUDA).manual_seed(3)
    gate_up.weight = torch.nn.Parameter(0.1 * torch.randn(gate_up.weight.shape, generator=rng, device=CUDA).bfloat16())
    h = torch.randn(num, 320, generator=rng, device=CUDA).bfloat16()
    assert should_use(h, gate_up.weight) and not should_use(h.float(), gate_up.weight.float())
    assert not should_use(h[:too_few], gate_up.weight)
    with torch.no_grad():
        found, wanted = CudaOps().gated(h, gate_up), TorchOps().gated(h, gate_up)
    # Float32 sums in another order, rounded to bfloat16: a few values differ in the last bit.
    assert relative_error(found, wanted) <= 1e-3 and (found == wanted).float().mean() > 0.98


@pytest.mark.parametrize(("num", "size"), [((1, 576), 960), ((3, 576), 3072), ((4, 1536), 576), ((2, 48), 20)])
def test_small_batch_linear_equals_torch_ops(num: tuple[int, int], size: int) -> None:
    """With and without the norm before and the SwiGLU after."""
    from paceline.model.cuda import small_batch

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device=CUDA)

    rng, slow, linear = torch.Generator(CUDA).manual_seed(4), TorchOps(), Linear(num[1], size)
    linear.weight = torch.nn.Parameter((0.1 * noise(size, num[1])).bfloat16(), requires_grad=False)
    x, addend, weight = 3 * noise(*num), noise(*num).bfloat16(), (1 + 0.2 * noise(num[1])).bfloat16()
    narrow = x.bfloat16()
    assert small_batch.should_use(narrow, linear) and not small_batch.should_use(narrow.repeat(8, 1), linear)
    x_sum, h = slow.add_norm(x, addend, weight, 1e-5)
    norm, add_norm = (small_batch.InputNorm(weight, 1e-5, y) for y in (None, addend))
    for (got_x, got), want_x, want in (
        (small_batch.fused_linear(narrow, linear), narrow, slow.linear(narrow, linear)),
        (small_batch.fused_linear(narrow, linear, swiglu=True), narrow, slow.gated(narrow, linear)),
        (small_batch.fused_linear(x, linear, norm), x, slow.linear(slow.norm(x, weight, 1e-5), linear)),
        (small_batch.fused_linear(x, linear, add_norm), x_sum, slow.linear(h, linear)),
        (small_batch.fused_linear(x, linear, add_norm, swiglu=True), x_sum, slow.gated(h, linear)),
    ):
        # Float32 sums in another order, rounded to bfloat16: a few values differ in the last bit.
        assert torch.equal(got_x, want_x) and relative_error(got, want) <= 2e-3 and (got == want).float().mean() > 0.97


@pytest.mark.parametrize("num", [1, 37, 128])
def test_split_k_parts_are_summed_by_the_kernel_that_adds_them(num: int) -> None:
    """Each part is correct, and kernels that read the parts equal kernels that read their rounded sum, bit for bit."""
    from paceline.model.cuda.ops import CudaOps
    from paceline.model.cuda.split_k import should_use, split_k_linear

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=rng, device=CUDA)

    rng, fast, slow, linear = torch.Generator(CUDA).manual_seed(5), CudaOps(), TorchOps(), Linear(4096, 2048)
    linear.weight = torch.nn.Parameter((0.1 * noise(2048, 4096)).bfloat16(), requires_grad=False)
    x, residual, weight = noise(num, 4096).bfloat16(), 3 * noise(num, 2048), (1 + 0.2 * noise(2048)).bfloat16()
    assert should_use(x, linear) and not any(should_use(x.new_zeros(many, 4096), linear) for many in (64, 2000))
    found = fast.residual_linear(x, linear)
    assert torch.equal(found, split_k_linear(x, linear)) and found.dtype == torch.float32
    for part, features in zip(found, (slice(2048), slice(2048, 4096)), strict=True):
        # Tensor cores sum with a few bits less than float32: 2e-6 on an H200.
        assert relative_error(part, x[:, features].double() @ linear.weight[:, features].double().T) <= 1e-5
    y = found.sum(0).bfloat16()
    assert torch.equal(fast.rounded_sum(residual, found, torch.bfloat16), slow.rounded_sum(residual, y, torch.bfloat16))
    wanted = slow.add_norm(residual, y, weight, 1e-5)
    for ours, reference in zip(fast.add_norm(residual.clone(), found, weight, 1e-5), wanted, strict=True):
        assert ours.dtype == reference.dtype and torch.equal(ours, reference)
    linear.bias = torch.nn.Parameter(noise(2048).bfloat16())
    assert not should_use(x, linear) and fast.residual_linear(x, linear).shape == (num, 2048)


def test_float8_head_computes_with_rounded_weights_and_activations() -> None:
    from paceline.model.cuda.float8 import apply_head_dtype
    from paceline.model.head_files import assign_head, head_state
    from paceline.model.layer import FLOAT8

    decoder = tiny_decoder(torch.bfloat16, vocab_size=64, **SHAPE)
    head, other = (tiny_head(decoder, 64, seed).to(CUDA) for seed in (3, 4))
    apply_head_dtype(head, "auto")
    assert head.lm_head.float8 is None  # the head is too small for "auto"
    apply_head_dtype(head, "float8")
    for updated in (False, True):
        if updated:
            assign_head(head, head_state(other))
        rng = torch.Generator(CUDA).manual_seed(5)
        x, y = (torch.randn(7, 32, generator=rng, device=CUDA).bfloat16() for _ in range(2))
        for linear in (head.layer.gate_up, head.lm_head):
            _, h = head.ops.add_norm(x.clone(), y, head.norm, 1e-6)
            _, wanted = TorchOps().add_norm(x + y, torch.zeros_like(y).float(), head.norm.float(), 1e-6)
            # Sums in another order: a few values differ in the last bit.
            assert h.dtype == FLOAT8 and (h.float() == wanted.to(FLOAT8).float()).float().mean() > 0.99
            large_norm = 1000 * head.norm  # not by the kernel just before: norms load weights while that one may run
            _, clipped = head.ops.add_norm(x.clone(), y, large_norm, 1e-6)
            assert clipped.float().abs().max() == 448
            assert relative_error(clipped.float(), (1000 * wanted).clamp(-448, 448)) < 0.05
            scale = linear.weight.float().abs().max() / 448
            weight = (linear.weight.float() / scale).to(FLOAT8).float() * scale
            # The device accumulates float8 products with 14 bits, and rounds to bfloat16.
            assert relative_error(head.ops.linear(h, linear), h.float() @ weight.T) < 1e-2
            assert relative_error(head.ops.linear(h, linear), wanted @ linear.weight.float().T) < 0.1
        x = torch.randn(7, head.layer.o.num_in, generator=rng, device=CUDA).bfloat16()
        x[0, 0] = 1000
        narrow = x.clamp(-448, 448).to(FLOAT8)  # as decode attention writes it; prefill attention writes bfloat16
        assert torch.equal(head.ops.linear(x, head.layer.o), head.ops.linear(narrow, head.layer.o))


def paged_rows(
    num_query: list[int], dtype: torch.dtype, shape: dict[str, int] = SHAPE, longest: int = 500
) -> tuple[BatchPlan, Any, list[PagedKV]]:
    """Rows over a KV cache of noise: as a plan for PagedAttention, as rows for the kernel, and three copies of it."""
    from paceline.model.cuda.attention import AttentionRows

    config, rng = tiny_config(**shape), np.random.default_rng(len(num_query))
    num_rows = len(num_query)
    context = np.maximum(rng.integers(1, longest, num_rows), num_query).astype(np.int32)
    context[0] = num_query[0]  # nothing cached
    sizes = -(-context // BLOCK)
    tables = np.zeros((num_rows, sizes.max()), np.int32)
    blocks = iter(rng.permutation(sizes.sum() + 3))
    for row, size in enumerate(sizes):
        tables[row, :size] = [next(blocks) for _ in range(size)]
    start = np.concatenate([[0], np.cumsum(num_query)]).astype(np.int32)
    total = int(start[-1])
    positions = np.arange(total) + np.repeat(context - np.array(num_query) - start[:-1], num_query)
    plan = BatchPlan(np.zeros(total, np.int64), positions, start, context, tables, np.arange(total))
    kvs = [PagedKV(config, int(sizes.sum()) + 3, dtype, CUDA) for _ in range(3)]
    for name in ("k", "v"):
        noise = torch.randn(kvs[0].k.shape, generator=torch.Generator(CUDA).manual_seed(0), device=CUDA)
        for kv in kvs:
            getattr(kv, name).copy_(noise)
    arrays = (start, context, np.arange(num_rows, dtype=np.int32), tables)
    return plan, AttentionRows(*(torch.as_tensor(x, device=CUDA) for x in arrays)), kvs


# The last three: so many programs that several share a multiprocessor, with few and with many queries.
QUERIES = [
    [1] * 5, [1, 3, 4, 2, 1], [1, 5, 8, 3, 6], [4, 16, 1, 9, 8], [2] * 70,
    [1] * 300, [1, 2, 6, 4, 8] * 52, [1, 2, 16, 4, 9] * 52,
]  # fmt: skip


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_layer_of_few_tokens_equals_torch_ops(qkv_bias: bool) -> None:
    """With a bias, torch's linear layer is used."""
    from paceline.model.cuda import small_batch
    from paceline.model.cuda.attention import CudaPagedAttention
    from paceline.model.cuda.ops import CudaOps

    decoder, rng = (
        tiny_decoder(torch.bfloat16, qkv_bias=qkv_bias, **SHAPE).to(CUDA),
        torch.Generator(CUDA).manual_seed(6),
    )
    layer, rope = decoder.layers[0], decoder.rope.tables(decoder.norm)
    if layer.qkv.bias is not None:
        layer.qkv.bias.data.normal_(generator=rng)
    plan, rows, kvs = paged_rows([1, 2, 1], torch.bfloat16)
    x, y = torch.randn(2, 4, 32, generator=rng, device=CUDA)
    at = torch.as_tensor(plan.positions, device=CUDA)
    assert small_batch.should_use(x, layer.gate_up) and small_batch.should_use(x, layer.qkv) != qkv_bias
    with torch.no_grad():
        found, wanted = (
            ops.layer(layer, x.clone(), y.bfloat16(), at, rope, attention, 0)
            for ops, attention in (
                (CudaOps(), CudaPagedAttention(kvs[0], rows, 2)), (TorchOps(), PagedAttention(kvs[1], plan))
            )
        )  # fmt: skip
    # Sums in another order differ in the last bit of bfloat16, through four products.
    assert relative_error(found[0], wanted[0]) < 1e-2 and relative_error(found[1], wanted[1]) < 2e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_query", "longest"),
    [*((n, 500) for n in QUERIES), *((n, 9000) for n in QUERIES[:4])],  # the last: the maximum number of splits
)
def test_paged_attention_equals_sdpa(dtype: torch.dtype, num_query: list[int], longest: int) -> None:
    from paceline.model.cuda.attention import CudaPagedAttention

    plan, rows, (slow, fast, gathered) = paged_rows(num_query, dtype, longest=longest)
    noise = torch.Generator(CUDA).manual_seed(2)
    heads = torch.randn(sum(num_query), 12, 32, generator=noise, device=CUDA).to(dtype)
    q, k, v = heads.split([8, 2, 2], 1)
    wanted = PagedAttention(slow, plan)(1, q, k, v)
    found = CudaPagedAttention(fast, rows, max(num_query))(1, q, k, v)
    # In bfloat16 attention weights are rounded once, as in SDPA.
    assert relative_error(found, wanted) < (1e-6 if dtype == torch.float32 else 2e-3)
    assert torch.equal(slow.k, fast.k) and torch.equal(slow.v, fast.v)
    if has_varlen(CUDA, dtype, 32):  # used for prefill
        assert relative_error(GatheredAttention(gathered, plan)(1, q, k, v), wanted) < 4e-3  # rounds at other places
        assert torch.equal(slow.k, gathered.k) and torch.equal(slow.v, gathered.v)


@pytest.mark.parametrize("num_query", QUERIES)
def test_rows_with_a_context_of_0_are_skipped(num_query: list[int]) -> None:
    from paceline.model.cuda.attention import CudaPagedAttention

    _, rows, (full_kv, kv, initial_kv) = paged_rows(num_query, torch.bfloat16)
    noise = torch.Generator(CUDA).manual_seed(2)
    q, k, v = torch.randn(sum(num_query), 12, 32, generator=noise, device=CUDA).bfloat16().split([8, 2, 2], 1)
    wanted = CudaPagedAttention(full_kv, rows, max(num_query))(1, q, k, v)
    active = torch.arange(rows.num_rows, device=CUDA) % 3 != 1
    rows.context = torch.where(active, rows.context, 0)
    found = CudaPagedAttention(kv, rows, max(num_query))(1, q, k, v)
    active_tokens = active.repeat_interleave(torch.tensor(num_query, device=CUDA))
    assert torch.equal(found[active_tokens], wanted[active_tokens])
    assert not found[~active_tokens].any() and wanted[~active_tokens].any()
    blocks = rows.block_tables[~active].unique().long()
    # Table entries past a row's last block are 0.
    blocks = blocks[~torch.isin(blocks, rows.block_tables[active].unique())]
    for name in ("k", "v"):
        after, initial, full = (getattr(cache, name) for cache in (kv, initial_kv, full_kv))
        assert torch.equal(after[:, blocks], initial[:, blocks]) and not torch.equal(after, full)
    narrow = CudaPagedAttention(kv, rows, max(num_query))(1, q, k, 1000 * v, dtype=torch.float8_e4m3fn)
    wide = CudaPagedAttention(kv, rows, max(num_query))(1, q, k, 1000 * v)
    assert torch.equal(narrow.float() == 0, wide.float().abs() < 2**-10) and not narrow[~active_tokens].float().any()
    assert relative_error(narrow.float(), wide.float().clamp(-448, 448)) < 0.05 and narrow.float().abs().max() == 448


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("num_query", "shape"),
    [
        *((n, SHAPE) for n in QUERIES[1:5]),
        *((n, SMOLLM2) for n in QUERIES[1:3]),
        ([1, 5, 8, 3, 6] * 5, QWEN3_8B),
        *((n * 14, QWEN3_8B) for n in ([1, 2, 4, 3, 4], [1, 2, 6, 4, 8], [1, 2, 16, 4, 9])),
    ],
)
def test_norm_and_rope_inside_the_attention_kernel(
    dtype: torch.dtype, family: str, num_query: list[int], shape: dict[str, int]
) -> None:
    """Norm and RoPE in the kernel or before it: the same keys in the cache, and the same output."""
    from paceline.model.cuda.attention import CudaPagedAttention
    from paceline.model.cuda.ops import CudaOps

    plan, rows, (slow, fast, _) = paged_rows(num_query, dtype, shape)
    decoder = tiny_decoder(dtype, family=family, qk_norm=family == "qwen3", max_positions=512, **shape).to(CUDA)
    config, layer, rng = decoder.config, decoder.layers[0], torch.Generator(CUDA).manual_seed(1)
    for norm in (layer.q_norm, layer.k_norm):
        if norm is not None:
            norm.copy_(1 + 0.2 * torch.randn(norm.shape, generator=rng, device=CUDA))
    h = 3 * torch.randn(sum(num_query), config.hidden_size, generator=rng, device=CUDA).to(dtype)
    at = torch.as_tensor(plan.positions, device=CUDA)
    given = (h, layer, at, decoder.rope.tables(decoder.norm))
    wanted = TorchOps().attend(*given, PagedAttention(slow, plan), 1)
    found = CudaOps().attend(*given, CudaPagedAttention(fast, rows, max(num_query)), 1)
    # In bfloat16 also queries are rounded.
    assert relative_error(found, wanted) < (1e-6 if dtype == torch.float32 else 3e-3)
    assert relative_error(fast.k, slow.k) < (1e-7 if dtype == torch.float32 else 1e-5) and torch.equal(slow.v, fast.v)


def test_noise_equals_the_cpus_and_exponentials_are_within_two_ulp() -> None:
    import triton
    import triton.language as tl

    from paceline.model.cuda.sample import exponential

    @triton.jit
    def apply(words, out, SIZE: tl.constexpr):
        at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        tl.store(out + at, exponential(tl.load(words + at).to(tl.uint32)))

    keys, at = np.array([2**63 + 11, 5], np.uint64), np.array([7 + (3 << 32), 1])
    words = philox_words(keys, at, Stream.RESIDUAL, 1 << 20, torch.device("cpu")).flatten()
    words[:6] = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
    out = torch.empty(len(words), device=CUDA)
    apply[(len(words) // 1024,)](words.to(CUDA), out, SIZE=1024)
    wanted = -torch.log1p(-(words.double() + 0.5) / 2**32)
    ulp = torch.from_numpy(np.spacing(wanted.float().numpy())).double()
    assert float(((out.cpu().double() - wanted) / ulp).abs().max()) <= 2


@pytest.mark.parametrize("vocab", [61, 4096, 49152, 151936])
@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_equal_the_cpu_samplers(vocab: int, dtype: torch.dtype) -> None:
    from paceline.model.cuda.sample import draw

    rng = np.random.default_rng(vocab)
    num = 64
    keys, at = rng.integers(0, 2**64, num, np.uint64), rng.integers(0, 2**40, num)
    temperature = rng.choice([0.0, 0.6, 1.0, 2.0], num)
    logits = (3 * torch.randn(num, vocab, generator=torch.Generator(CUDA).manual_seed(0), device=CUDA)).to(dtype)
    logits[:, ::7] = -torch.inf  # like a head with a reduced vocabulary
    given = logits, *(torch.as_tensor(x, device=CUDA) for x in (keys.view(np.int64), at, temperature)), 0
    found, with_margins = draw(*given), draw(*given, margins=True)
    none = np.zeros(num)
    arrays = SamplingArrays(temperature, none.astype(np.int32), none + 1, none)
    wanted = Sampler().draw(logits, keys, at, arrays, 0, margins=True)
    assert (found.tokens.cpu().numpy() == wanted.tokens).all()
    assert abs(found.logprobs.cpu().numpy() - wanted.logprobs).max() < 1e-5  # z in float32
    assert abs(found.raw_logprobs.cpu().numpy() - wanted.raw_logprobs).max() < 1e-6
    assert torch.equal(with_margins.tokens, found.tokens) and torch.equal(with_margins.logprobs, found.logprobs)
    assert are_margins(with_margins.margins, wanted.margins)


def are_margins(
    found: torch.Tensor | None, wanted: np.ndarray | None, low_temperature: np.ndarray | bool = False
) -> bool:
    """A margin is a little too small if the second arrival was not known exactly, which must be rare. At low
    temperatures only logits are compared."""
    assert found is not None and wanted is not None and (wanted >= 0).all()
    shortfall = wanted - found.cpu().numpy()
    close = np.where(low_temperature, abs(shortfall) < 0.5, (shortfall > -1e-5) & (shortfall < 1))
    return bool(close.all() and (shortfall[~np.broadcast_to(low_temperature, shortfall.shape)] > 1e-5).mean() < 0.1)


@pytest.mark.parametrize("vocab", [61, 9000])
def test_draws_and_margins_of_a_reduced_vocabulary_equal_the_cpu_samplers(vocab: int) -> None:
    """At high and low temperatures; and inactive positions do not change active ones."""
    from paceline.model.cuda.sample import draw

    rng, num = np.random.default_rng(vocab), 64
    keys, at = rng.integers(0, 2**64, num, np.uint64), rng.integers(0, 2**40, num)
    temperature = rng.choice([0.0, 1e-5, 0.01, 0.3, 1.0, 2.0], num)
    ids = np.sort(rng.permutation(4 * vocab)[:vocab])
    logits = 3 * torch.randn(num, vocab, generator=torch.Generator(CUDA).manual_seed(0), device=CUDA)
    given = [torch.as_tensor(x, device=CUDA) for x in (keys.view(np.int64), at, temperature)]
    found = draw(logits, *given, 0, torch.as_tensor(ids, device=CUDA), margins=True)
    active = torch.as_tensor(rng.integers(0, 3, num, np.int32), device=CUDA)
    some = draw(logits, *given, 0, torch.as_tensor(ids, device=CUDA), margins=True, active_P=active)
    assert torch.equal(some.tokens, found.tokens * (active > 0))
    for name in ("margins", "logprobs", "raw_logprobs"):
        assert torch.equal(getattr(some, name)[active > 0], getattr(found, name)[active > 0])
    spread = torch.full((num, 4 * vocab), -torch.inf, device=CUDA)
    spread[:, torch.as_tensor(ids, device=CUDA)] = logits
    none = np.zeros(num)
    arrays = SamplingArrays(temperature, none.astype(np.int32), none + 1, none)
    wanted = Sampler().draw(spread, keys, at, arrays, 0, margins=True)
    assert (found.tokens.cpu().numpy() == wanted.tokens).all()
    assert are_margins(found.margins, wanted.margins, (temperature > 0) & (temperature < 0.05))


@pytest.mark.parametrize("vocab", [61, 9000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ties", [False, True])
def test_truncation_equals_the_cpu_samplers(vocab: int, dtype: torch.dtype, ties: bool) -> None:
    """Which tokens are kept, and what is sampled from them, also with many equal logits."""
    from paceline.model.cuda.device_state import DeviceState
    from paceline.model.cuda.sample import draw
    from paceline.model.cuda.truncate import truncate

    rng = np.random.default_rng(vocab)
    kinds = [
        (1.0, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.3, 0, 1.0, 0.05), (0.6, 20, 0.8, 0.02),
        (0.0, 3, 0.5, 0.1), (1.0, 1, 1.0, 0.0), (2.0, vocab, 0.999, 0.0), (1.0, 0, 1e-6, 0.0), (1.0, 7, 0.4, 0.0),
    ]  # fmt: skip
    num = len(kinds)
    params = SamplingArrays.of([SamplingParams(*kind) for kind in kinds])
    logits = 2 * torch.randn(num, vocab, generator=torch.Generator(CUDA).manual_seed(0), device=CUDA)
    if ties:
        logits = logits.round()
    logits[:, ::9] = -torch.inf
    logits = logits.to(dtype)
    state = DeviceState(num, 1, CUDA)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        getattr(state, name).copy_(torch.as_tensor(getattr(params, name)))
    found = truncate(logits, torch.arange(num, dtype=torch.int32, device=CUDA), state)
    limit, at = found.logit[:, None], torch.arange(vocab, device=CUDA)
    wide = logits.float()
    kept = ((wide > limit) | ((wide == limit) & (at <= found.index[:, None]))) & (wide > -torch.inf)
    expected = Sampler().distribution(logits, params) > 0
    greedy = torch.as_tensor(params.temperature == 0, device=CUDA)
    assert torch.equal(kept[~greedy], expected[~greedy])
    keys, positions = rng.integers(0, 2**64, num, np.uint64), rng.integers(0, 2**40, num)
    arrays = (torch.as_tensor(x, device=CUDA) for x in (keys.view(np.int64), positions, params.temperature))
    ours = draw(logits, *arrays, 0, truncation=found, margins=True)
    reference = Sampler().draw(logits, keys, positions, params, 0, margins=True)
    assert (ours.tokens.cpu().numpy() == reference.tokens).all()
    assert abs(ours.logprobs.cpu().numpy() - reference.logprobs).max() < 1e-5  # z in float32
    assert abs(ours.raw_logprobs.cpu().numpy() - reference.raw_logprobs).max() < 1e-6
    assert are_margins(ours.margins, reference.margins)


def engine(kind: str, dtype: torch.dtype, drafter: str = "none", num_blocks: int = 256, **options: int) -> LocalEngine:
    from paceline.engine.graph_runner import GraphRunner
    from paceline.model.cuda.ops import CudaOps

    decoder = tiny_decoder(dtype, **SHAPE).to(CUDA)
    paged, sampler, max_num_seqs = PagedDecoder(decoder, num_blocks), Sampler(), options.pop("max_num_seqs", 8)
    runner = EagerRunner(paged, sampler, RULES["coupled"])
    if kind != "plain":
        decoder.ops = CudaOps()
        runner = GraphRunner(paged, runner, max_num_seqs, enforce_eager=kind == "eager")
    drafters = {
        "none": None,
        "suffix": SuffixDrafter(),
        "random": AdversarialDrafter(61),
        "history": DeviceHistoryDrafter(HistoryStore()),
    }
    return LocalEngine(
        paged, sampler=sampler, runner=runner, drafter=drafters[drafter], policy=StaticPolicy(5),
        max_num_seqs=max_num_seqs, **options,
    )  # fmt: skip


def requests() -> list[Request]:
    rng = np.random.default_rng(1)
    kinds = [{}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_p": 0.7}, {"stop_token_ids": (3, 4)}]
    return [
        Request(
            i, tuple(rng.integers(0, 60, rng.integers(1, 40)).tolist()),
            SamplingParams(max_tokens=int(rng.integers(1, 70)), **kinds[i % 5]), 17 * i, str(i % 3),
        )
        for i in range(30)
    ]  # fmt: skip


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [c.token_ids.tolist() for c in completions]


@pytest.mark.parametrize("drafter", ["none", "suffix", "random", "history"])
def test_graphs_emit_the_plain_engines_tokens(drafter: str) -> None:
    """In float32, where rounding does not change which token a tiny model samples."""
    wanted = engine("plain", torch.float32).generate(requests())
    for kind in ("eager", "graph"):
        running = engine(kind, torch.float32, drafter)
        found = running.generate(requests())
        assert tokens(found) == tokens(wanted)
        for own, expected in zip(found, wanted, strict=True):
            assert abs(own.logprobs - expected.logprobs).max() < 1e-4
            assert (own.finish_reason, own.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert not running.has_work and running.paged.pool.num_free == 256
        assert (sum(c.num_draft_tokens for c in found) > 100) == (drafter != "none")
        assert drafter in ("none", "random") or sum(c.num_accepted_tokens for c in found) > 20


@pytest.mark.parametrize("drafter", ["none", "suffix", "history"])
def test_graphs_equal_eager_bit_for_bit(drafter: str) -> None:
    eager, graph = (engine(kind, torch.bfloat16, drafter).generate(requests()) for kind in ("eager", "graph"))
    assert tokens(eager) == tokens(graph)
    assert all((a.logprobs == b.logprobs).all() for a, b in zip(eager, graph, strict=True))
    assert drafter == "none" or sum(c.num_accepted_tokens for c in graph) > 20


def test_preemption_and_sleep_change_no_token() -> None:
    """With few KV blocks, so that sequences are preempted, and sleep between two batches."""
    wanted = requests()
    plain, graph = (engine(kind, torch.float32, num_blocks=16, max_num_seqs=6) for kind in ("plain", "graph"))
    found = []
    for running in (plain, graph):
        first = tokens(running.generate(wanted))
        running.sleep()
        running.wake()
        found.append(first + tokens(running.generate(wanted)))
        assert sum(t.num_preempted for t in running.drain_trace()) > 0
    assert found[0] == found[1]


def test_an_abort_with_steps_in_flight_leaves_nothing_behind() -> None:
    running = engine("graph", torch.float32)
    handles = [running.submit(request) for request in requests()]
    for _ in range(6):
        running.step()
    live = [h for h in handles if not h.done]
    running.abort(live[0].request.request_id)
    while running.has_work:
        running.step()
    assert all(h.done for h in handles) and running.paged.pool.num_free == 256
    whole = engine("plain", torch.float32).generate(requests())
    aborted = live[0].request.request_id
    for handle, want in zip(handles, whole, strict=True):
        own, expected = handle.completion.token_ids.tolist(), want.token_ids.tolist()
        assert own == (expected[: len(own)] if handle.request.request_id == aborted else expected)


HEADS = {"eagle3": (tiny_head, Eagle3Drafter), "dspark": (tiny_dspark, DSparkDrafter)}


def head_engine(
    head_kind: str, kind: str, dtype: torch.dtype, k: int, num_blocks: int = 256, vocab: tuple[int, int] = (61, 41)
) -> LocalEngine:
    from paceline.drafters.device import device_head_drafter
    from paceline.engine.graph_runner import GraphRunner
    from paceline.model.cuda.ops import CudaOps

    decoder = tiny_decoder(dtype, vocab_size=vocab[0], **SHAPE)
    make, host_drafter = HEADS[head_kind]
    head = make(decoder, vocab[1]).to(CUDA)
    decoder = decoder.to(CUDA)
    paged, sampler = PagedDecoder(decoder, num_blocks), Sampler()
    runner = EagerRunner(paged, sampler, RULES["coupled"])
    if kind == "plain":
        drafter = host_drafter(head, decoder.embed, sampler, num_blocks)
    else:
        decoder.ops, drafter = CudaOps(), device_head_drafter(head)
        runner = GraphRunner(paged, runner, 8, enforce_eager=kind == "eager")
    return LocalEngine(
        paged, sampler=sampler, runner=runner, drafter=drafter, policy=StaticPolicy(k), max_num_seqs=8
    )  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("k", [1, 3, 7, 15])
def test_a_head_on_the_device_drafts_what_one_on_the_host_drafts(k: int, head: str) -> None:
    """And changes no token. It has no draft for the first token after a prompt, so it drafts a little less."""
    wanted = engine("plain", torch.float32).generate(requests())
    on_host = head_engine(head, "plain", torch.float32, k)
    host = on_host.generate(requests())
    assert tokens(host) == tokens(wanted)
    for kind in ("eager", "graph"):
        running = head_engine(head, kind, torch.float32, k)
        found = running.generate(requests())
        assert tokens(found) == tokens(wanted)
        lengths = [
            1 + sum(c.num_accepted_tokens for c in each) / sum(c.num_drafts for c in each) for each in (found, host)
        ]
        assert sum(c.num_drafts for c in found) > 100 and abs(lengths[0] - lengths[1]) < 0.05, lengths
        assert not running.has_work and running.paged.pool.num_free == 256


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_float8_head_changes_no_token_and_few_drafts(dtype: torch.dtype, head: str) -> None:
    from paceline.model.cuda.float8 import apply_head_dtype

    found = []
    for is_float8 in (False, True):
        running = head_engine(head, "graph", dtype, 3, vocab=(64, 64))
        if is_float8:
            apply_head_dtype(running.drafter.head, "float8")
        found.append(running.generate(requests()))
    assert tokens(found[0]) == tokens(found[1])
    accepted = [sum(c.num_accepted_tokens for c in each) for each in found]
    assert accepted[1] > 0.8 * accepted[0] > 40, accepted


@pytest.mark.parametrize("head", HEADS)
def test_history_and_a_head_draft_together_on_the_device(head: str) -> None:
    from paceline.drafters.device import DeviceHybridDrafter

    wanted = engine("plain", torch.float32).generate(requests())
    running = head_engine(head, "graph", torch.float32, 3)
    running.set_drafter(DeviceHybridDrafter(HistoryStore(), running.drafter), StaticPolicy(3))
    for _ in range(2):  # the second time, the history has the same tokens
        assert tokens(running.generate(requests())) == tokens(wanted)
    assert running.runner.drafts_on_device and running.drafting.overlaps and running.runner.num_captured > 0
    assert {name for trace in running.drain_trace() for name, _, num_accepted in trace.per_drafter if num_accepted} == {
        "suffix", head
    }  # fmt: skip


@pytest.mark.parametrize("num_queries", [1, 4, 16])
@pytest.mark.parametrize("num_rows", [1, 5, 24])
def test_the_most_probable_drafts_are_selected(num_rows: int, num_queries: int) -> None:
    from paceline.model.cuda.device_state import MAX_DRAFT, ROW_WORDS, DeviceState

    rng = np.random.default_rng(num_rows)
    state = DeviceState(32, 1, CUDA)
    survival = np.cumprod(rng.choice([0.9, 0.5, 1.0, 1e-20, 0], (32, MAX_DRAFT)), 1).astype(np.float32)  # many equal
    state.survival.copy_(torch.from_numpy(survival))
    for budget in (0, 1, num_rows, 3 * num_rows, 10**4):
        row_inputs = np.full((num_rows + 2, ROW_WORDS), -1, np.int32)  # two rows of padding
        row_inputs[:num_rows, 0] = rng.permutation(32)[:num_rows]
        row_inputs[:num_rows, 1] = num = rng.integers(0, num_queries, num_rows)
        on_device = torch.from_numpy(row_inputs).to(CUDA)
        state.select_drafts(on_device, torch.tensor([budget], dtype=torch.int32, device=CUDA), num_queries)
        tokens = [(-float(survival[row_inputs[r, 0], j]), r, j) for r in range(num_rows) for j in range(num[r])]
        candidates = sorted(token for token in tokens if token[0] < 0)
        selected = candidates[:budget]
        assert on_device[:num_rows, 1].tolist() == np.bincount([r for _, r, _ in selected], minlength=num_rows).tolist()
        assert state.threshold.item() == (-selected[-1][0] if 0 < budget < len(candidates) else 0)
        assert (on_device.cpu().numpy()[:, 2:] == row_inputs[:, 2:]).all()


def test_drafting_stops_early_for_rows_below_the_threshold() -> None:
    """Rows 0 and 2 have probable draft tokens, row 1 has an improbable second one, and row 3 is padding."""
    from paceline.model.cuda.attention import AttentionRows
    from paceline.model.cuda.device_state import MAX_DRAFT, DeviceState
    from paceline.model.cuda.graph_eagle3 import GraphEagle3
    from paceline.model.cuda.sample import Draws
    from paceline.speculation.acceptance import SCORE_EDGES

    decoder = tiny_decoder(torch.float32, **SHAPE)
    state, kv = DeviceState(8, 1, CUDA), PagedKV(decoder.config, 1, torch.float32, CUDA)
    device_head = GraphEagle3(tiny_head(decoder).to(CUDA), decoder.embed, kv, state, SCORE_EDGES.tolist())
    slots = torch.tensor([5, 1, 3, -1], dtype=torch.int32, device=CUDA)
    state.length.fill_(9)
    state.limit.fill_(99)
    rows = AttentionRows(torch.arange(5, dtype=torch.int32, device=CUDA), slots, slots, state.block_tables)
    for stops_early in (True, False):
        inputs, found = device_head._inputs(rows, 3), torch.zeros(4, MAX_DRAFT, dtype=torch.float64, device=CUDA)
        step: Any = SimpleNamespace(
            inputs=SimpleNamespace(rows=rows), stops_early=stops_early, scores_out=found, imposed=None
        )
        state.threshold.fill_(0.5)
        for i, margins in enumerate(([9.0, 9, 9, 9], [9.0, -9, 9, 9], [9.0, 9, 9, 9])):
            zeros = torch.zeros(4, dtype=torch.float64, device=CUDA)
            draws = Draws(torch.full_like(slots, i), zeros, zeros, torch.tensor(margins, device=CUDA))
            device_head._store_draft(draws, step, inputs, i)
        assert inputs.context.tolist()[:2] == [[8, 8, 8, 1], [9, 9, 9, 2]]
        assert inputs.context[2].tolist()[:3] == [10, 0 if stops_early else 10, 10]
        survival = state.survival[slots[:3].long()].cpu()
        assert (survival[[0, 2], 2] > 0.9).all() and survival[1, 0] > 0.9 and 0 < survival[1, 1] < 0.1
        assert (survival[1, 2] == 0) == stops_early
        assert (found[1, 2] == found[1, 1]) == stops_early and found[1, 1] < 0.1 < 0.9 < found[1, 0]


def test_survival_is_calibrated() -> None:
    """By position and by the head's probability; the reported scores are not calibrated."""
    from paceline.model.confidence import BY_LOGPROB, BY_MARGIN, START
    from paceline.model.cuda.attention import AttentionRows
    from paceline.model.cuda.device_state import MAX_DRAFT, DeviceState
    from paceline.model.cuda.graph_eagle3 import GraphEagle3
    from paceline.model.cuda.sample import Draws
    from paceline.speculation.acceptance import SCORE_EDGES

    rng, num, k = np.random.default_rng(0), 40, 6
    decoder = tiny_decoder(torch.float32, **SHAPE)
    state, kv = DeviceState(num, 1, CUDA), PagedKV(decoder.config, 1, torch.float32, CUDA)
    head = GraphEagle3(tiny_head(decoder).to(CUDA), decoder.embed, kv, state, SCORE_EDGES.tolist())
    factors = rng.uniform(0.3, 1.3, head.calibration.shape).astype(np.float32)
    head.calibration.copy_(torch.from_numpy(factors))
    state.length.fill_(9)
    state.limit.fill_(99)
    slots = torch.arange(num, dtype=torch.int32, device=CUDA)
    starts = torch.arange(num + 1, dtype=torch.int32, device=CUDA)
    rows = AttentionRows(starts, slots, slots, state.block_tables)
    inputs, found = head._inputs(rows, k), torch.zeros(num, MAX_DRAFT, dtype=torch.float64, device=CUDA)
    step: Any = SimpleNamespace(
        inputs=SimpleNamespace(rows=rows), stops_early=False, scores_out=found, imposed=None
    )  # fmt: skip
    joint = np.ones(num)
    for i in range(k):
        margins, logprobs = rng.normal(1, 2, num), -rng.exponential(1, num)
        zeros = torch.zeros(num, dtype=torch.float64, device=CUDA)
        draws = Draws(slots, zeros, *(torch.tensor(each, device=CUDA) for each in (logprobs, margins)))
        head._store_draft(draws, step, inputs, i)
        scores = 1 / (1 + np.exp(-(START + BY_MARGIN * margins + BY_LOGPROB * logprobs)))
        away = (np.abs(scores[:, None] - SCORE_EDGES) > 1e-5).all(1)  # not at the edge of a bucket
        bucket = SCORE_EDGES.searchsorted(scores, "right")
        joint *= np.minimum(1, scores * factors[i, bucket])
        joint[~away] = np.nan
        ok = ~np.isnan(joint)
        assert state.survival[:, i].cpu().numpy()[ok] == pytest.approx(joint[ok], rel=1e-4)
        assert found[:, i].cpu().numpy() == pytest.approx(scores, rel=1e-4)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", ["eager", "graph"])
def test_selecting_drafts_on_the_device_changes_no_token(kind: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the draft tokens, and as many more as a larger graph can verify. The head stops early."""
    monkeypatch.setattr("paceline.model.cuda.graphs.MIN_STOP_ROWS", 2)

    class Quarter(StaticPolicy):
        takes_best = True

        def __init__(self) -> None:
            super().__init__(4)
            self.reads_drafts = True

        def select(self, drafts: DraftBatch) -> np.ndarray:
            assert len(drafts.num) < 2 or drafts.scores.shape[1] == drafts.num.max()
            return drafts.num // 4

    some = requests()[:6]
    wanted = engine("plain", torch.float32).generate(some)
    running = head_engine(head, kind, torch.float32, 4)
    running.set_drafter(running.drafter, Quarter())
    found = running.generate(some)
    assert tokens(found) == tokens(wanted)
    traces = running.drain_trace()
    assert not running._in_flight and running.paged.pool.num_free == 256
    chosen = [t for t in traces if t.num_drafts and 0 < t.num_draft_tokens < t.num_proposed]
    assert len(chosen) > 10 and any(len(set(t.drafted_per_position)) > 1 for t in chosen)  # ragged
    assert sum(t.num_accepted_tokens for t in traces) > 0
    survival = running.runner.state.survival[:, :4]
    assert (survival[survival[:, 0] > 0, 1:] == 0).any()


@pytest.mark.parametrize("head", HEADS)
def test_a_head_on_the_device_with_few_blocks(head: str) -> None:
    wanted = engine("plain", torch.float32).generate(requests())
    running = head_engine(head, "graph", torch.float32, 3, num_blocks=16)
    assert tokens(running.generate(requests())) == tokens(wanted)
    assert sum(t.num_preempted for t in running.drain_trace()) > 0


DRAFTERS = ["none", "suffix", "history", "eagle3", "dspark", "hybrid"]


def drafting_engine(drafter: str) -> LocalEngine:
    from paceline.drafters.device import DeviceHybridDrafter

    if drafter not in (*HEADS, "hybrid"):
        return engine("graph", torch.float32, drafter)
    running = head_engine("dspark" if drafter == "dspark" else "eagle3", "graph", torch.float32, 3)
    if drafter == "hybrid":
        # History finds next to nothing, so that the head's drafts are those of a head alone.
        running.set_drafter(DeviceHybridDrafter(HistoryStore(), running.drafter, min_match=8), StaticPolicy(3))
    return running


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_weights_that_change_while_requests_run(drafter: str) -> None:
    """With steps in flight. Before the change, the old weights' tokens; after it, those that the new weights emit after
    the same prefix. Drafts are accepted as often as in an engine that never had other weights."""
    new = list(hf_state(tiny_decoder(torch.float32, seed=9, **SHAPE)))
    wanted = [replace(r, sampling=SamplingParams(max_tokens=64, ignore_eos=True)) for r in requests()[:6]]
    old = tokens(engine("plain", torch.float32).generate(wanted))
    running = drafting_engine(drafter)
    handles = [running.submit(request) for request in wanted]
    for _ in range(8):
        running.step()
    assert running._in_flight or not running.drafting.overlaps, "or nothing was in flight"
    running.update_weights(new, 1, "recompute")
    running.drain_trace()
    while running.has_work:
        running.step()
    after = running.drain_trace()
    fresh = engine("plain", torch.float32)
    fresh.update_weights(new, 1)
    continued = []
    for handle, before in zip(handles, old, strict=True):
        completion = handle.completion
        num = int((completion.versions == 0).sum())
        assert 0 < num < 64 and (completion.versions[num:] == 1).all()
        assert completion.token_ids[:num].tolist() == before[:num]
        request = handle.request
        prompt = (*request.prompt_ids, *before[:num])
        sampling = SamplingParams(max_tokens=64 - num, ignore_eos=True)
        continued.append(replace(request, prompt_ids=prompt, sampling=sampling))
        assert completion.token_ids[num:].tolist() == tokens(fresh.generate([continued[-1]]))[0]
    if drafter in (*HEADS, "hybrid"):
        head = "dspark" if drafter == "dspark" else "eagle3"
        other = head_engine(head, "graph", torch.float32, 3)
        other.update_weights(new, 1)
        other.generate(continued)
        rates = []
        for traces in (after, other.drain_trace()):
            of_head = [(num, accepted) for t in traces for name, num, accepted in t.per_drafter if name == head]
            rates.append(sum(accepted for _, accepted in of_head) / sum(num for num, _ in of_head))
        assert abs(rates[0] - rates[1]) < 0.05, rates
    elif drafter != "none":
        assert sum(t.num_accepted_tokens for t in after) > 0


@pytest.mark.parametrize("head", HEADS)
def test_a_head_goes_on_after_a_prefill(head: str) -> None:
    """Its KV of a prompt is as if the tokens had been emitted: the same drafts are verified, and as many accepted."""
    # Two engines, since the second run would find the first one's KV in the prefix cache.
    decoding, prefilling = (head_engine(head, "graph", torch.float32, 3) for _ in range(2))
    num_accepted = 0

    def steps(running: LocalEngine, request: Request) -> tuple[list[int], list[tuple[int, int, int]]]:
        completion = running.generate([request])[0]
        traces = [t for t in running.drain_trace() if t.num_emitted]
        numbers = [(t.num_emitted, t.num_draft_tokens, t.num_accepted_tokens) for t in traces]
        return completion.token_ids.tolist(), numbers

    for request in requests()[:6]:
        request = replace(request, sampling=SamplingParams(max_tokens=64, ignore_eos=True))
        emitted, whole = steps(decoding, request)
        ends = np.cumsum([num for num, _, _ in whole])
        boundary = int(np.flatnonzero(ends >= 12)[0])
        # The prefill emits a token, and so does the next step, for which nothing is drafted yet.
        num = int(ends[boundary]) - 2
        prompt, sampling = (*request.prompt_ids, *emitted[:num]), SamplingParams(max_tokens=64 - num, ignore_eos=True)
        found, continued = steps(prefilling, replace(request, prompt_ids=prompt, sampling=sampling))
        assert found == emitted[num:] and [n for n, _, _ in continued[:2]] == [1, 1]
        assert continued[2:] == whole[boundary + 1 :]
        num_accepted += sum(accepted for _, _, accepted in continued)
    assert num_accepted > 20


def test_a_hybrid_takes_the_draft_with_more_expected_tokens() -> None:
    """Row by row; a row of padding, and one for which history finds nothing, stay as they are."""
    from paceline.model.cuda.device_state import MAX_DRAFT, DeviceState
    from paceline.model.cuda.graph_drafter import DraftStep
    from paceline.model.cuda.graph_hybrid import HEAD, HISTORY, GraphHybrid

    rng, k, num_slots = np.random.default_rng(0), 5, 32
    state = DeviceState(num_slots, 1, CUDA)
    rows = [*rng.permutation(num_slots)[:23].tolist(), -1]
    slots = torch.tensor(rows, dtype=torch.int32, device=CUDA)
    probabilities = rng.uniform(0.01, 1, (2, len(rows), MAX_DRAFT))
    probabilities[HISTORY] *= np.arange(MAX_DRAFT) < rng.integers(0, k + 1, (len(rows), 1))
    tokens = rng.integers(0, 1000, (2, len(rows), MAX_DRAFT))

    class Fake:
        aux_layers = ()
        drafts, survival = state.drafts, state.survival

        def __init__(self, source: int) -> None:
            self.source = source

        def draft(self, step: DraftStep) -> None:
            at = slots[:-1].long()
            survival = probabilities[self.source].cumprod(1)
            self.drafts[at, :k] = torch.as_tensor(tokens[self.source, :-1, :k], dtype=torch.int32, device=CUDA)
            self.survival[at, :k] = torch.as_tensor(survival[:-1, :k], dtype=torch.float32, device=CUDA)
            step.scores_out[: len(rows), :k] = torch.as_tensor(probabilities[self.source, :, :k], device=CUDA)

    history, head = (Fake(source) for source in (HISTORY, HEAD))
    hybrid = GraphHybrid(history, head, state)  # type: ignore[arg-type]
    inputs: Any = SimpleNamespace(rows=SimpleNamespace(slots=slots))
    found = torch.zeros(len(rows), MAX_DRAFT, dtype=torch.float64, device=CUDA)
    sources = torch.full((len(rows),), 9, dtype=torch.int32, device=CUDA)
    none = torch.zeros(0, device=CUDA)
    hybrid.draft(DraftStep(inputs, 1, None, none, none, none, k, False, False, found, sources, None))
    expected = probabilities[:, :, :k].astype(np.float32).cumprod(2).sum(2)
    better = np.where(expected[HISTORY] >= expected[HEAD], HISTORY, HEAD)[:-1]
    assert {HISTORY, HEAD} == set(better.tolist()) and sources.tolist() == [*better.tolist(), 9]
    for row, source in enumerate(better.tolist()):
        assert state.drafts[rows[row], :k].tolist() == tokens[source, row, :k].tolist()
        survival = probabilities[source, row, :k].cumprod()
        assert state.survival[rows[row], :k].tolist() == pytest.approx(survival.tolist(), abs=1e-6)
        assert found[row, :k].tolist() == probabilities[source, row, :k].tolist()


def test_graphs_are_captured_while_another_thread_allocates() -> None:
    """Like a learner that trains while the next batch is generated (max_staleness > 0, one GPU)."""
    wanted = engine("plain", torch.float32).generate(requests())
    stop, failures, num_allocated = threading.Event(), list[BaseException](), 0

    def allocate() -> None:
        nonlocal num_allocated
        try:
            while not stop.is_set():
                some = [torch.empty(1 << 26, dtype=torch.uint8, device=CUDA) for _ in range(2)]
                some[0].fill_(1)
                del some
                torch.cuda.empty_cache()
                num_allocated += 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        is_enough = False
        while not is_enough:  # allocating is slow while other processes use the GPU
            running = engine("graph", torch.float32)
            assert tokens(running.generate(requests())) == tokens(wanted)
            assert running.runner.num_captured > 3
            is_enough = num_allocated > 10 or bool(failures)
    finally:
        stop.set()
        thread.join()
    assert not failures
