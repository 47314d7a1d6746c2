"""The Triton kernels against their slow twins, and whole engines on graphs against engines without."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_config, tiny_decoder, tiny_head

from paceline.drafters.ahead import HistoryAhead
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.accept import RULES
from paceline.engine.engine import LocalEngine
from paceline.engine.runner import EagerRunner
from paceline.model.attention import GatheredAttention, PagedAttention, has_varlen
from paceline.model.kv import BLOCK, BatchPlan, PagedKV
from paceline.model.layer import Linear
from paceline.model.ops import TorchOps
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler, SamplingArrays, Stream, philox_words
from paceline.model.weights import hf_state
from paceline.speculation.batch import DraftBatch
from paceline.speculation.library import Library
from paceline.speculation.policy import StaticPolicy
from paceline.types import Completion, Provenance, Request, SamplingParams
from paceline.verify.drafters import AdversarialDrafter

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16]
SHAPE = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 32}
QWEN3_8B = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape and torch.isfinite(found).all()
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fused_operations_equal_the_plain_ones(dtype: torch.dtype, family: str) -> None:
    """In bfloat16 bit for bit: they round at the same places."""
    from paceline.model.cuda.ops import CudaOps

    decoder = tiny_decoder(dtype, family=family, qk_norm=family == "qwen3", **SHAPE).to(CUDA)
    config, layer, dice = decoder.config, decoder.layers[0], torch.Generator(CUDA).manual_seed(1)
    for norm in (layer.input_norm, layer.q_norm, layer.k_norm):
        if norm is not None:
            norm.copy_(1 + 0.2 * torch.randn(norm.shape, generator=dice, device=CUDA))
    slow, fast = TorchOps(), CudaOps()
    most = 0.0 if dtype == torch.bfloat16 else 1e-6

    def noise(*size: int) -> torch.Tensor:
        return 3 * torch.randn(size, generator=dice, device=CUDA).to(dtype)

    for num in (5, 7):  # fewer have products of their own
        x, y, gate_up = noise(num, config.hidden_size), noise(num, config.hidden_size), noise(num, 2 * 1030)
        at = torch.randint(0, config.max_positions, (num,), generator=dice, device=CUDA)
        assert off(fast.norm(x, layer.input_norm, 1e-6), slow.norm(x, layer.input_norm, 1e-6)) <= most
        assert off(fast.silu_mul(gate_up), slow.silu_mul(gate_up)) <= most
        rope = decoder.rope.tables(decoder.norm)
        for mine, theirs in zip(
            fast.qkv(x, layer, config, at, rope), slow.qkv(x, layer, config, at, rope), strict=True
        ):
            assert off(mine, theirs) <= most
        both = x, layer.input_norm, y, layer.post_norm, 1e-6
        assert off(fast.beside(*both), slow.beside(*both)) <= most
        for residual in (x, x.float() + 1e-4):  # a head's, and a decoder's
            given = y, layer.input_norm, 1e-6
            wanted = slow.add_norm(residual, *given)
            assert [part.dtype for part in wanted] == [residual.dtype, dtype]
            assert off(fast.rounded_sum(residual, y, dtype), slow.rounded_sum(residual, y, dtype)) == 0
            for mine, theirs in zip(fast.add_norm(residual.clone(), y.clone(), *given[1:]), wanted, strict=True):
                assert mine.dtype == theirs.dtype and off(mine, theirs) <= most


@pytest.mark.parametrize(("num", "tile", "share", "too_few"), [
    (512, 128, 1 / 2, 300), (470, 128, 1 / 2, 300), (128, 96, 1, 127)
])  # fmt: skip
def test_gates_of_one_product_equal_those_of_two_steps(num: int, tile: int, share: float, too_few: int) -> None:
    """Of the projection and what is made of it; and few tokens, or what fills no device, go by the two. A tile of
    tokens takes a share of the multiprocessors: four of half of them twice what runs at once."""
    from paceline.model.cuda.gated import num_processors, pays
    from paceline.model.cuda.ops import CudaOps

    if num_processors(CUDA) >= 1 << 30:
        pytest.skip("no such product on this device")
    gate_up = Linear(320, 2 * tile * int(share * num_processors(CUDA)))
    dice = torch.Generator(CUDA).manual_seed(3)
    gate_up.weight = torch.nn.Parameter(0.1 * torch.randn(gate_up.weight.shape, generator=dice, device=CUDA).bfloat16())
    h = torch.randn(num, 320, generator=dice, device=CUDA).bfloat16()
    assert pays(h, gate_up.weight) and not pays(h.float(), gate_up.weight.float())
    assert not pays(h[:too_few], gate_up.weight)
    with torch.no_grad():
        found, wanted = CudaOps().gated(h, gate_up), TorchOps().gated(h, gate_up)
    # Sums of float32 in another order, rounded to 8 bits: now and then the neighbour.
    assert off(found, wanted) <= 1e-3 and (found == wanted).float().mean() > 0.98


@pytest.mark.parametrize(("num", "size"), [((1, 576), 960), ((3, 576), 3072), ((4, 1536), 576), ((2, 48), 20)])
def test_few_tokens_products_equal_the_plain_ones(num: tuple[int, int], size: int) -> None:
    """With the norm before them, and the gate behind them, or without."""
    from paceline.model.cuda import few

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice, device=CUDA)

    dice, slow, linear = torch.Generator(CUDA).manual_seed(4), TorchOps(), Linear(num[1], size)
    linear.weight = torch.nn.Parameter((0.1 * noise(size, num[1])).bfloat16(), requires_grad=False)
    x, more, weight = 3 * noise(*num), noise(*num).bfloat16(), (1 + 0.2 * noise(num[1])).bfloat16()
    narrow = x.bfloat16()
    assert few.pays(narrow, linear) and not few.pays(narrow.repeat(8, 1), linear)
    grown, h = slow.add_norm(x, more, weight, 1e-5)
    added = few.Norm(weight, 1e-5, more)
    for (got_x, got), want_x, want in (
        (few.product(narrow, linear), narrow, slow.linear(narrow, linear)),
        (few.product(narrow, linear, gated=True), narrow, slow.gated(narrow, linear)),
        (few.product(x, linear, few.Norm(weight, 1e-5, None)), x, slow.linear(slow.norm(x, weight, 1e-5), linear)),
        (few.product(x, linear, added), grown, slow.linear(h, linear)),
        (few.product(x, linear, added, gated=True), grown, slow.gated(h, linear)),
    ):
        # Sums of float32 in another order, rounded to 8 bits: now and then the neighbour.
        assert torch.equal(got_x, want_x) and off(got, want) <= 2e-3 and (got == want).float().mean() > 0.97


@pytest.mark.parametrize("num", [1, 37, 128])
def test_halves_of_a_product_are_summed_where_they_are_added(num: int) -> None:
    """Each half is a product of its own; what is made of both is what their rounded sum makes, bit for bit."""
    from paceline.model.cuda.halves import halves, pays
    from paceline.model.cuda.ops import CudaOps

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=dice, device=CUDA)

    dice, fast, slow, linear = torch.Generator(CUDA).manual_seed(5), CudaOps(), TorchOps(), Linear(4096, 2048)
    linear.weight = torch.nn.Parameter((0.1 * noise(2048, 4096)).bfloat16(), requires_grad=False)
    x, residual, weight = noise(num, 4096).bfloat16(), 3 * noise(num, 2048), (1 + 0.2 * noise(2048)).bfloat16()
    assert pays(x, linear) and not any(pays(x.new_zeros(many, 4096), linear) for many in (64, 2000))
    found = fast.summand(x, linear)
    assert torch.equal(found, halves(x, linear)) and found.dtype == torch.float32
    for half, mine in zip(found, (slice(2048), slice(2048, 4096)), strict=True):
        # A tensor core sums in a few bits less than float32 has: 2e-6 on an H200.
        assert off(half, x[:, mine].double() @ linear.weight[:, mine].double().T) <= 1e-5
    y = found.sum(0).bfloat16()
    assert torch.equal(fast.rounded_sum(residual, found, torch.bfloat16), slow.rounded_sum(residual, y, torch.bfloat16))
    wanted = slow.add_norm(residual, y, weight, 1e-5)
    for mine, theirs in zip(fast.add_norm(residual.clone(), found, weight, 1e-5), wanted, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    linear.bias = torch.nn.Parameter(noise(2048).bfloat16())
    assert not pays(x, linear) and fast.summand(x, linear).shape == (num, 2048)


def test_a_head_in_eight_bits_computes_what_rounding_makes_of_it() -> None:
    from paceline.model.cuda.float8 import settle_dtype
    from paceline.model.head_files import assign_head, head_state
    from paceline.model.layer import FLOAT8

    decoder = tiny_decoder(torch.bfloat16, vocab_size=64, **SHAPE)
    head, other = (tiny_head(decoder, 64, seed).to(CUDA) for seed in (3, 4))
    settle_dtype(head, "auto")
    assert head.lm_head.rounded is None  # small as it is
    settle_dtype(head, "float8")
    for updated in (False, True):
        if updated:
            assign_head(head, head_state(other))
        dice = torch.Generator(CUDA).manual_seed(5)
        x, y = (torch.randn(7, 32, generator=dice, device=CUDA).bfloat16() for _ in range(2))
        for linear in (head.layer.gate_up, head.lm_head):
            _, h = head.ops.add_norm(x.clone(), y, head.norm, 1e-6)
            _, wanted = TorchOps().add_norm(x + y, torch.zeros_like(y).float(), head.norm.float(), 1e-6)
            # Sums in another order: now and then the neighbour.
            assert h.dtype == FLOAT8 and (h.float() == wanted.to(FLOAT8).float()).float().mean() > 0.99
            _, cut = head.ops.add_norm(x.clone(), y, 1000 * head.norm, 1e-6)
            assert cut.float().abs().max() == 448 and off(cut.float(), (1000 * wanted).clamp(-448, 448)) < 0.05
            scale = linear.weight.float().abs().max() / 448
            weight = (linear.weight.float() / scale).to(FLOAT8).float() * scale
            # The device sums 8 bits' products to 14 bits, and rounds to 8.
            assert off(head.ops.linear(h, linear), h.float() @ weight.T) < 1e-2
            assert off(head.ops.linear(h, linear), wanted @ linear.weight.float().T) < 0.1
        x = torch.randn(7, head.layer.o.num_in, generator=dice, device=CUDA).bfloat16()
        x[0, 0] = 1000
        narrow = x.clamp(-448, 448).to(FLOAT8)  # as the attention of a decoded token leaves it; a prompt's does not
        assert torch.equal(head.ops.linear(x, head.layer.o), head.ops.linear(narrow, head.layer.o))


def paged_rows(
    num_query: list[int], dtype: torch.dtype, shape: dict[str, int] = SHAPE, longest: int = 500
) -> tuple[BatchPlan, Any, list[PagedKV]]:
    """Rows over pages of noise: as PagedAttention's plan and as the kernel's Rows, and three times the same pages."""
    from paceline.model.cuda.attention import Rows

    config, dice = tiny_config(**shape), np.random.default_rng(len(num_query))
    num_rows = len(num_query)
    context = np.maximum(dice.integers(1, longest, num_rows), num_query).astype(np.int32)
    context[0] = num_query[0]  # nothing before them
    sizes = -(-context // BLOCK)
    tables = np.zeros((num_rows, sizes.max()), np.int32)
    pages = iter(dice.permutation(sizes.sum() + 3))
    for row, size in enumerate(sizes):
        tables[row, :size] = [next(pages) for _ in range(size)]
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
    return plan, Rows(*(torch.as_tensor(x, device=CUDA) for x in arrays)), kvs


# The last three: so many programs that several share a multiprocessor; rows of few queries beside rows of many.
QUERIES = [
    [1] * 5, [1, 3, 4, 2, 1], [1, 5, 8, 3, 6], [4, 16, 1, 9, 8], [2] * 70,
    [1] * 300, [1, 2, 6, 4, 8] * 52, [1, 2, 16, 4, 9] * 52,
]  # fmt: skip


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_a_layer_of_few_tokens_equals_the_plain_one(qkv_bias: bool) -> None:
    """A bias goes by the framework's product."""
    from paceline.model.cuda import few
    from paceline.model.cuda.attention import CudaPagedAttention
    from paceline.model.cuda.ops import CudaOps

    decoder, dice = (
        tiny_decoder(torch.bfloat16, qkv_bias=qkv_bias, **SHAPE).to(CUDA),
        torch.Generator(CUDA).manual_seed(6),
    )
    layer, config, rope = decoder.layers[0], decoder.config, decoder.rope.tables(decoder.norm)
    if layer.qkv.bias is not None:
        layer.qkv.bias.data.normal_(generator=dice)
    plan, rows, kvs = paged_rows([1, 2, 1], torch.bfloat16)
    x, y = torch.randn(2, 4, 32, generator=dice, device=CUDA)
    at = torch.as_tensor(plan.positions, device=CUDA)
    assert few.pays(x, layer.gate_up) and few.pays(x, layer.qkv) != qkv_bias
    with torch.no_grad():
        found, wanted = (
            ops.layer(layer, config, x.clone(), y.bfloat16(), at, rope, attention, 0)
            for ops, attention in (
                (CudaOps(), CudaPagedAttention(kvs[0], rows, 2)), (TorchOps(), PagedAttention(kvs[1], plan))
            )
        )  # fmt: skip
    # In 16 bits sums of another order round to the neighbour now and then, four products deep.
    assert off(found[0], wanted[0]) < 1e-2 and off(found[1], wanted[1]) < 2e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_query", "longest"),
    [*((n, 500) for n in QUERIES), *((n, 9000) for n in QUERIES[:4])],  # the last: in as many parts as there may be
)
def test_paged_attention_equals_sdpa(dtype: torch.dtype, num_query: list[int], longest: int) -> None:
    from paceline.model.cuda.attention import CudaPagedAttention

    plan, rows, (slow, fast, gathered) = paged_rows(num_query, dtype, longest=longest)
    noise = torch.Generator(CUDA).manual_seed(2)
    heads = torch.randn(sum(num_query), 12, 32, generator=noise, device=CUDA).to(dtype)
    q, k, v = heads.split([8, 2, 2], 1)
    wanted = PagedAttention(slow, plan)(1, q, k, v)
    found = CudaPagedAttention(fast, rows, max(num_query))(1, q, k, v)
    assert off(found, wanted) < (1e-6 if dtype == torch.float32 else 2e-3)  # bf16: weights are rounded once, as in SDPA
    assert torch.equal(slow.k, fast.k) and torch.equal(slow.v, fast.v)
    if has_varlen(CUDA, dtype, 32):  # as prompts are computed
        assert off(GatheredAttention(gathered, plan)(1, q, k, v), wanted) < 4e-3  # it rounds at other places
        assert torch.equal(slow.k, gathered.k) and torch.equal(slow.v, gathered.v)


@pytest.mark.parametrize("num_query", QUERIES)
def test_rows_without_a_context_find_nothing_and_leave_nothing(num_query: list[int]) -> None:
    from paceline.model.cuda.attention import CudaPagedAttention

    _, rows, (seen, some, before) = paged_rows(num_query, torch.bfloat16)
    noise = torch.Generator(CUDA).manual_seed(2)
    q, k, v = torch.randn(sum(num_query), 12, 32, generator=noise, device=CUDA).bfloat16().split([8, 2, 2], 1)
    wanted = CudaPagedAttention(seen, rows, max(num_query))(1, q, k, v)
    looks = torch.arange(rows.num, device=CUDA) % 3 != 1
    rows.context = torch.where(looks, rows.context, 0)
    found = CudaPagedAttention(some, rows, max(num_query))(1, q, k, v)
    of_token = looks.repeat_interleave(torch.tensor(num_query, device=CUDA))
    assert torch.equal(found[of_token], wanted[of_token]) and not found[~of_token].any() and wanted[~of_token].any()
    pages = rows.tables[~looks].unique().long()
    pages = pages[~torch.isin(pages, rows.tables[looks].unique())]  # those behind a row's last are 0
    for name in ("k", "v"):
        left, was, is_seen = (getattr(kv, name) for kv in (some, before, seen))
        assert torch.equal(left[:, pages], was[:, pages]) and not torch.equal(left, is_seen)
    narrow = CudaPagedAttention(some, rows, max(num_query))(1, q, k, 1000 * v, dtype=torch.float8_e4m3fn)
    wide = CudaPagedAttention(some, rows, max(num_query))(1, q, k, 1000 * v)
    assert torch.equal(narrow.float() == 0, wide.float().abs() < 2**-10) and not narrow[~of_token].float().any()
    assert off(narrow.float(), wide.float().clamp(-448, 448)) < 0.05 and narrow.float().abs().max() == 448


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
def test_queries_turned_inside_the_attention(
    dtype: torch.dtype, family: str, num_query: list[int], shape: dict[str, int]
) -> None:
    """Normed and rotated in its kernel, or before it: the same keys in the pages, and the same found."""
    from paceline.model.cuda.attention import CudaPagedAttention
    from paceline.model.cuda.ops import CudaOps

    plan, rows, (slow, fast, _) = paged_rows(num_query, dtype, shape)
    decoder = tiny_decoder(dtype, family=family, qk_norm=family == "qwen3", max_positions=512, **shape).to(CUDA)
    config, layer, dice = decoder.config, decoder.layers[0], torch.Generator(CUDA).manual_seed(1)
    for norm in (layer.q_norm, layer.k_norm):
        if norm is not None:
            norm.copy_(1 + 0.2 * torch.randn(norm.shape, generator=dice, device=CUDA))
    h = 3 * torch.randn(sum(num_query), config.hidden_size, generator=dice, device=CUDA).to(dtype)
    at = torch.as_tensor(plan.positions, device=CUDA)
    given = (h, layer, config, at, decoder.rope.tables(decoder.norm))
    wanted = TorchOps().attend(*given, PagedAttention(slow, plan), 1)
    found = CudaOps().attend(*given, CudaPagedAttention(fast, rows, max(num_query)), 1)
    assert off(found, wanted) < (1e-6 if dtype == torch.float32 else 3e-3)  # bf16: as above, on rounded queries
    assert off(fast.k, slow.k) < (1e-7 if dtype == torch.float32 else 1e-5) and torch.equal(slow.v, fast.v)


def test_noise_is_the_cpus_to_the_bit_and_its_exponentials_to_two_ulp() -> None:
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
def test_draws_are_the_plain_samplers(vocab: int, dtype: torch.dtype) -> None:
    from paceline.model.cuda.sample import draw

    dice = np.random.default_rng(vocab)
    num = 64
    keys, at = dice.integers(0, 2**64, num, np.uint64), dice.integers(0, 2**40, num)
    temperature = dice.choice([0.0, 0.6, 1.0, 2.0], num)
    logits = (3 * torch.randn(num, vocab, generator=torch.Generator(CUDA).manual_seed(0), device=CUDA)).to(dtype)
    logits[:, ::7] = -torch.inf  # as a head's, that knows part of the vocabulary
    given = logits, *(torch.as_tensor(x, device=CUDA) for x in (keys.view(np.int64), at, temperature)), 0
    found, led = draw(*given), draw(*given, leads=True)
    none = np.zeros(num)
    arrays = SamplingArrays(temperature, none.astype(np.int32), none + 1, none)
    wanted = Sampler().draw(logits, keys, at, arrays, 0, leads=True)
    assert (found.tokens.cpu().numpy() == wanted.tokens).all()
    assert abs(found.logprobs.cpu().numpy() - wanted.logprobs).max() < 1e-5  # z in float32
    assert abs(found.raw_logprobs.cpu().numpy() - wanted.raw_logprobs).max() < 1e-6
    assert torch.equal(led.tokens, found.tokens) and torch.equal(led.logprobs, found.logprobs)
    assert are_leads(led.leads, wanted.leads)


def are_leads(found: torch.Tensor | None, wanted: np.ndarray | None, cold: np.ndarray | bool = False) -> bool:
    """Where a part of the vocabulary forgot its second, a little less is said; seldom, or it would be of no use. In the
    cold logits alone are compared."""
    assert found is not None and wanted is not None and (wanted >= 0).all()
    less = wanted - found.cpu().numpy()
    close = np.where(cold, abs(less) < 0.5, (less > -1e-5) & (less < 1))
    return bool(close.all() and (less[~np.broadcast_to(cold, less.shape)] > 1e-5).mean() < 0.1)


@pytest.mark.parametrize("vocab", [61, 9000])
def test_a_heads_draws_and_leads_are_the_plain_samplers(vocab: int) -> None:
    """Of some ids, warm and cold; and where not all count, of those that do."""
    from paceline.model.cuda.sample import draw

    dice, num = np.random.default_rng(vocab), 64
    keys, at = dice.integers(0, 2**64, num, np.uint64), dice.integers(0, 2**40, num)
    temperature = dice.choice([0.0, 1e-5, 0.01, 0.3, 1.0, 2.0], num)
    ids = np.sort(dice.permutation(4 * vocab)[:vocab])
    logits = 3 * torch.randn(num, vocab, generator=torch.Generator(CUDA).manual_seed(0), device=CUDA)
    given = [torch.as_tensor(x, device=CUDA) for x in (keys.view(np.int64), at, temperature)]
    found = draw(logits, *given, 0, torch.as_tensor(ids, device=CUDA), leads=True)
    counts = torch.as_tensor(dice.integers(0, 3, num, np.int32), device=CUDA)
    some = draw(logits, *given, 0, torch.as_tensor(ids, device=CUDA), leads=True, counts_P=counts)
    assert torch.equal(some.tokens, found.tokens * (counts > 0))
    for name in ("leads", "logprobs", "raw_logprobs"):
        assert torch.equal(getattr(some, name)[counts > 0], getattr(found, name)[counts > 0])
    spread = torch.full((num, 4 * vocab), -torch.inf, device=CUDA)
    spread[:, torch.as_tensor(ids, device=CUDA)] = logits
    none = np.zeros(num)
    arrays = SamplingArrays(temperature, none.astype(np.int32), none + 1, none)
    wanted = Sampler().draw(spread, keys, at, arrays, 0, leads=True)
    assert (found.tokens.cpu().numpy() == wanted.tokens).all()
    assert are_leads(found.leads, wanted.leads, (temperature > 0) & (temperature < 0.05))


@pytest.mark.parametrize("vocab", [61, 9000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ties", [False, True])
def test_cuts_are_the_plain_samplers(vocab: int, dtype: torch.dtype, ties: bool) -> None:
    """What stays, and what is drawn of it, where many logits are alike too."""
    from paceline.model.cuda.cut import cut
    from paceline.model.cuda.sample import draw
    from paceline.model.cuda.slots import Slots

    dice = np.random.default_rng(vocab)
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
    slots = Slots(num, 1, CUDA)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        getattr(slots, name).copy_(torch.as_tensor(getattr(params, name)))
    found = cut(logits, torch.arange(num, dtype=torch.int32, device=CUDA), slots)
    limit, at = found.logit[:, None], torch.arange(vocab, device=CUDA)
    wide = logits.float()
    stays = ((wide > limit) | ((wide == limit) & (at <= found.place[:, None]))) & (wide > -torch.inf)
    drawn_from = Sampler().distribution(logits, params) > 0
    greedy = torch.as_tensor(params.temperature == 0, device=CUDA)
    assert torch.equal(stays[~greedy], drawn_from[~greedy])
    keys, places = dice.integers(0, 2**64, num, np.uint64), dice.integers(0, 2**40, num)
    arrays = (torch.as_tensor(x, device=CUDA) for x in (keys.view(np.int64), places, params.temperature))
    mine = draw(logits, *arrays, 0, cut=found, leads=True)
    theirs = Sampler().draw(logits, keys, places, params, 0, leads=True)
    assert (mine.tokens.cpu().numpy() == theirs.tokens).all()
    assert abs(mine.logprobs.cpu().numpy() - theirs.logprobs).max() < 1e-5  # z in float32
    assert abs(mine.raw_logprobs.cpu().numpy() - theirs.raw_logprobs).max() < 1e-6
    assert are_leads(mine.leads, theirs.leads)


def engine(kind: str, dtype: torch.dtype, drafter: str = "none", num_blocks: int = 256, **options: int) -> LocalEngine:
    from paceline.engine.graph_runner import GraphRunner
    from paceline.model.cuda.ops import CudaOps

    decoder = tiny_decoder(dtype, **SHAPE).to(CUDA)
    paged, sampler, max_num_seqs = PagedDecoder(decoder, num_blocks), Sampler(), options.pop("max_num_seqs", 8)
    runner = EagerRunner(paged, sampler, RULES["coupled"])
    if kind != "plain":
        decoder.ops = CudaOps()
        runner = GraphRunner(paged, runner, max_num_seqs, eager=kind == "eager")
    drafters = {
        "none": None, "suffix": SuffixDrafter(), "random": AdversarialDrafter(61), "history": HistoryAhead(Library()),
    }  # fmt: skip
    return LocalEngine(
        paged, sampler=sampler, runner=runner, drafter=drafters[drafter], policy=StaticPolicy(5),
        max_num_seqs=max_num_seqs, **options,
    )  # fmt: skip


def requests() -> list[Request]:
    dice = np.random.default_rng(1)
    kinds = [{}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_p": 0.7}, {"stop_token_ids": (3, 4)}]
    return [
        Request(
            i, tuple(dice.integers(0, 60, dice.integers(1, 40)).tolist()),
            SamplingParams(max_tokens=int(dice.integers(1, 70)), **kinds[i % 5]), 17 * i, str(i % 3),
        )
        for i in range(30)
    ]  # fmt: skip


def said(completions: list[Completion]) -> list[list[int]]:
    return [c.token_ids.tolist() for c in completions]


@pytest.mark.parametrize("drafter", ["none", "suffix", "random", "history"])
def test_graphs_emit_the_plain_engines_tokens(drafter: str) -> None:
    """float32, where two tokens of a tiny model do not come close enough to change places."""
    wanted = engine("plain", torch.float32).generate(requests())
    for kind in ("eager", "graph"):
        running = engine(kind, torch.float32, drafter)
        found = running.generate(requests())
        assert said(found) == said(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            assert abs(mine.logprobs - theirs.logprobs).max() < 1e-4
            assert (mine.finish_reason, mine.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
        assert not running.has_work and running.paged.pool.num_free == 256
        assert (sum(c.num_draft_tokens for c in found) > 100) == (drafter != "none")
        assert drafter in ("none", "random") or sum(c.num_accepted_tokens for c in found) > 20


@pytest.mark.parametrize("drafter", ["none", "suffix", "history"])
def test_graphs_equal_eager_bit_for_bit(drafter: str) -> None:
    eager, graph = (engine(kind, torch.bfloat16, drafter).generate(requests()) for kind in ("eager", "graph"))
    assert said(eager) == said(graph)
    assert all((a.logprobs == b.logprobs).all() for a, b in zip(eager, graph, strict=True))
    assert drafter == "none" or sum(c.num_accepted_tokens for c in graph) > 20


def test_preempted_and_slept_in_between() -> None:
    """Little memory, so that sequences are preempted; sleep between."""
    wanted = requests()
    plain, graph = (engine(kind, torch.float32, num_blocks=16, max_num_seqs=6) for kind in ("plain", "graph"))
    found = []
    for running in (plain, graph):
        said_so_far = said(running.generate(wanted))
        running.sleep()
        running.wake()
        said_so_far += said(running.generate(wanted))
        found.append(said_so_far)
        assert sum(t.num_preempted for t in running.drain_trace()) > 0
    assert found[0] == found[1]


def test_an_abort_in_mid_flight_leaves_nothing_behind() -> None:
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
        mine = handle.completion.token_ids.tolist()
        want_ids = want.token_ids.tolist()
        assert mine == (want_ids[: len(mine)] if handle.request.request_id == aborted else want_ids)


def eagle3_engine(
    kind: str, dtype: torch.dtype, k: int, num_blocks: int = 256, vocab: tuple[int, int] = (61, 41)
) -> LocalEngine:
    from paceline.drafters.ahead import Eagle3Ahead
    from paceline.drafters.eagle3 import Eagle3Drafter
    from paceline.engine.graph_runner import GraphRunner
    from paceline.model.cuda.ops import CudaOps

    decoder = tiny_decoder(dtype, vocab_size=vocab[0], **SHAPE)
    head = tiny_head(decoder, vocab[1]).to(CUDA)
    decoder = decoder.to(CUDA)
    paged, sampler = PagedDecoder(decoder, num_blocks), Sampler()
    runner = EagerRunner(paged, sampler, RULES["coupled"])
    if kind == "plain":
        drafter = Eagle3Drafter(head, decoder.embed, sampler, num_blocks)
    else:
        decoder.ops, drafter = CudaOps(), Eagle3Ahead(head)
        runner = GraphRunner(paged, runner, 8, eager=kind == "eager")
    return LocalEngine(
        paged, sampler=sampler, runner=runner, drafter=drafter, policy=StaticPolicy(k), max_num_seqs=8
    )  # fmt: skip


@pytest.mark.parametrize("k", [1, 3, 7])
def test_a_head_on_the_device_drafts_what_one_on_the_host_drafts(k: int) -> None:
    """And changes no token. It has no draft for the first token after a prompt, so it drafts a little less."""
    wanted = engine("plain", torch.float32).generate(requests())
    on_host = eagle3_engine("plain", torch.float32, k)
    host = on_host.generate(requests())
    assert said(host) == said(wanted)
    for kind in ("eager", "graph"):
        running = eagle3_engine(kind, torch.float32, k)
        found = running.generate(requests())
        assert said(found) == said(wanted)
        lengths = [
            1 + sum(c.num_accepted_tokens for c in each) / sum(c.num_drafts for c in each) for each in (found, host)
        ]
        assert sum(c.num_drafts for c in found) > 100 and abs(lengths[0] - lengths[1]) < 0.05, lengths
        assert not running.has_work and running.paged.pool.num_free == 256
        # They say the same of them: as many are so sure.
        seen = [e.drafter.calibration.counts[1] - e.drafter.calibration.start[1] for e in (running, on_host)]
        assert abs(seen[0] / seen[0].sum() - seen[1] / seen[1].sum()).sum() < 0.15, seen


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_in_eight_bits_changes_no_token_and_few_guesses(dtype: torch.dtype) -> None:
    from paceline.model.cuda.float8 import settle_dtype

    found = []
    for rounds in (False, True):
        running = eagle3_engine("graph", dtype, 3, vocab=(64, 64))
        if rounds:
            settle_dtype(running.drafter.head, "float8")
        found.append(running.generate(requests()))
    assert said(found[0]) == said(found[1])
    stood = [sum(c.num_accepted_tokens for c in each) for each in found]
    assert stood[1] > 0.8 * stood[0] > 40, stood


def test_history_speaks_beside_a_head_on_the_device() -> None:
    """In the same graphs: a step is not computed another way because someone on the host drafts too."""
    from paceline.drafters.hybrid import HybridAhead

    wanted = engine("plain", torch.float32).generate(requests())
    running = eagle3_engine("graph", torch.float32, 3)
    running.set_drafter(HybridAhead(SuffixDrafter(), running.drafter, 0.05), StaticPolicy(3))
    for _ in range(2):  # what was said once history knows
        assert said(running.generate(requests())) == said(wanted)
    assert running.runner.has_head and running.runner.num_captured > 0
    assert {who for trace in running.drain_trace() for who, _, num_stood in trace.sources if num_stood} == {
        "suffix", "eagle3"
    }  # fmt: skip


@pytest.mark.parametrize("num_queries", [1, 4, 16])
@pytest.mark.parametrize("num_rows", [1, 5, 24])
def test_an_auction_keeps_what_is_worth_most(num_rows: int, num_queries: int) -> None:
    from paceline.model.cuda.slots import MAX_DRAFT, ORDER, Slots

    dice = np.random.default_rng(num_rows)
    slots = Slots(32, 1, CUDA)
    worth = np.cumprod(dice.choice([0.9, 0.5, 1.0, 1e-20, 0], (32, MAX_DRAFT)), 1).astype(np.float32)  # many equals
    slots.worth.copy_(torch.from_numpy(worth))
    for wanted in (0, 1, num_rows, 3 * num_rows, 10**4):
        orders = np.full((num_rows + 2, ORDER), -1, np.int32)  # two rows of padding
        orders[:num_rows, 0] = dice.permutation(32)[:num_rows]
        orders[:num_rows, 1] = num = dice.integers(0, num_queries, num_rows)
        on_device = torch.from_numpy(orders).to(CUDA)
        slots.auction(on_device, torch.tensor([wanted], dtype=torch.int32, device=CUDA), num_queries)
        bids = [(-float(worth[orders[r, 0], j]), r, j) for r in range(num_rows) for j in range(num[r])]
        kept = sorted(bid for bid in bids if bid[0] < 0)[:wanted]
        assert on_device[:num_rows, 1].tolist() == np.bincount([r for _, r, _ in kept], minlength=num_rows).tolist()
        loses = 0 < wanted < sum(bid[0] < 0 for bid in bids)
        assert slots.least.item() == (-kept[-1][0] if loses else 0)
        assert (on_device.cpu().numpy()[:, 2:] == orders[:, 2:]).all()


def test_who_cannot_win_an_auction_does_not_look_at_its_context() -> None:
    """Rows 0 and 2 are sure of their first guesses, row 1 is not of its second, and row 3 is nobody's."""
    from paceline.model.cuda.attention import Rows
    from paceline.model.cuda.head import DeviceHead
    from paceline.model.cuda.sample import Draws
    from paceline.model.cuda.slots import MAX_DRAFT, Slots

    decoder = tiny_decoder(torch.float32, **SHAPE)
    slots, kv = Slots(8, 1, CUDA), PagedKV(decoder.config, 1, torch.float32, CUDA)
    device_head = DeviceHead(tiny_head(decoder).to(CUDA), decoder.embed, kv, slots)
    places = torch.tensor([5, 1, 3, -1], dtype=torch.int32, device=CUDA)
    slots.length.fill_(9)
    slots.limit.fill_(99)
    rows = Rows(torch.arange(5, dtype=torch.int32, device=CUDA), places, places, slots.tables)
    for auctions in (True, False):
        course, told = device_head._course(rows, 3), torch.zeros(4, MAX_DRAFT, dtype=torch.float64, device=CUDA)
        slots.least.fill_(0.5)
        for i, leads in enumerate(([9.0, 9, 9, 9], [9.0, -9, 9, 9], [9.0, 9, 9, 9])):
            leads = torch.tensor(leads, device=CUDA)
            zeros = torch.zeros(4, dtype=torch.float64, device=CUDA)
            draws = Draws(torch.full_like(places, i), zeros, zeros, leads)
            device_head._keep(draws, places, course, i, auctions, told, None)
        assert course.context.tolist()[:2] == [[8, 8, 8, 1], [9, 9, 9, 2]]
        assert course.context[2].tolist()[:3] == [10, 0 if auctions else 10, 10]
        worth = slots.worth[places[:3].long()].cpu()
        assert (worth[[0, 2], 2] > 0.9).all() and (worth[1, :2] > torch.tensor([0.9, 0])).all() and worth[1, 1] < 0.1
        assert (worth[1, 2] == 0) == auctions
        assert (told[1, 2] == told[1, 1]) == auctions and told[1, 1] < 0.1 < 0.9 < told[1, 0]


@pytest.mark.parametrize("kind", ["eager", "graph"])
def test_a_device_that_chooses_what_it_verifies_changes_no_token(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of what is drafted, and as much more as a graph that was captured wider has places for, while the host
    does not wait; and the head looks away from who cannot win."""
    monkeypatch.setattr("paceline.model.cuda.graphs.CROWD", 2)

    class Quarter(StaticPolicy):
        reads_drafts = takes_best = True

        def select(self, drafts: DraftBatch) -> np.ndarray:
            assert len(drafts.num) < 2 or drafts.confidence.shape[1] == drafts.num.max()
            return drafts.num // 4

    some = requests()[:6]
    wanted = engine("plain", torch.float32).generate(some)
    running = eagle3_engine(kind, torch.float32, 4)
    running.set_drafter(running.drafter, policy := Quarter(4))
    policy.reads_drafts = True
    found = running.generate(some)
    assert said(found) == said(wanted)
    traces = running.drain_trace()
    assert not running._flying and running.paged.pool.num_free == 256
    chosen = [t for t in traces if t.num_drafts and 0 < t.num_draft_tokens < t.num_proposed]
    assert len(chosen) > 10 and any(len(set(t.drafted_per_position)) > 1 for t in chosen)  # ragged
    assert sum(t.num_accepted_tokens for t in traces) > 0
    worth = running.runner.slots.worth[:, :4]
    assert (worth[worth[:, 0] > 0, 1:] == 0).any()
    drafter = running.drafter
    assert drafter.calibration.counts[1].sum() > drafter.calibration.start[1].sum() + 10  # it learned what stood


def test_a_head_on_the_device_in_little_memory() -> None:
    wanted = engine("plain", torch.float32).generate(requests())
    running = eagle3_engine("graph", torch.float32, 3, num_blocks=16)
    assert said(running.generate(requests())) == said(wanted)
    assert sum(t.num_preempted for t in running.drain_trace()) > 0


DRAFTERS = ["none", "suffix", "history", "eagle3", "hybrid"]


def drafting_engine(drafter: str) -> LocalEngine:
    from paceline.drafters.hybrid import HybridAhead

    if drafter not in ("eagle3", "hybrid"):
        return engine("graph", torch.float32, drafter)
    running = eagle3_engine("graph", torch.float32, 3)
    if drafter == "hybrid":
        running.set_drafter(HybridAhead(SuffixDrafter(), running.drafter, 0.05), StaticPolicy(3))
    return running


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_weights_that_change_while_requests_run(drafter: str) -> None:
    """Before the change the old weights' tokens, after it those that the new weights emit after the same prefix, with
    steps in flight; and drafts are accepted as often as by an engine that never had other weights."""
    new = list(hf_state(tiny_decoder(torch.float32, seed=9, **SHAPE)))
    wanted = [replace(r, sampling=SamplingParams(max_tokens=64, ignore_eos=True)) for r in requests()[:6]]
    old = said(engine("plain", torch.float32).generate(wanted))
    running = drafting_engine(drafter)
    handles = [running.submit(request) for request in wanted]
    for _ in range(8):
        running.step()
    assert running._flying or not running.drafting.overlaps, "or nothing was in flight"
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
        assert completion.token_ids[num:].tolist() == said(fresh.generate([continued[-1]]))[0]
    if drafter in ("eagle3", "hybrid"):
        other = eagle3_engine("graph", torch.float32, 3)
        other.update_weights(new, 1)
        other.generate(continued)
        rates = []
        for traces in (after, other.drain_trace()):
            heads = [(num, stood) for t in traces for who, num, stood in t.sources if who == "eagle3"]
            rates.append(sum(stood for _, stood in heads) / sum(num for num, _ in heads))
        assert abs(rates[0] - rates[1]) < 0.05, rates
    elif drafter != "none":
        assert sum(t.num_accepted_tokens for t in after) > 0


class Once(SuffixDrafter):
    """Drafts what it was told for the first step of a request, and nothing later."""

    def __init__(self, drafts: dict[int, list[int]]) -> None:
        super().__init__()
        self.drafts, self.lengths = drafts, dict[int, int]()

    def propose(self, rows: Any, caps: np.ndarray) -> DraftBatch:
        drafts = DraftBatch.empty(len(rows), int(caps.max(initial=0)))
        drafts.confidence[:] = 0.99
        drafts.match = np.zeros(len(rows), np.int32)
        for i, (request_id, tokens) in enumerate(zip(rows.request_ids.tolist(), rows.tokens, strict=True)):
            if self.lengths.setdefault(request_id, len(tokens)) == len(tokens):
                told = self.drafts[request_id][: caps[i]]
                drafts.tokens[i, : len(told)], drafts.num[i] = told, len(told)
        return drafts


def test_a_head_goes_on_after_a_prefill_that_verified_a_draft() -> None:
    """As if what was accepted there had been part of the prompt: the same drafts, and as many accepted."""
    from paceline.drafters.hybrid import HybridAhead

    some = [replace(r, sampling=SamplingParams(max_tokens=64, ignore_eos=True)) for r in requests()[:6]]
    plain = said(engine("plain", torch.float32).generate(some))
    hybrid = eagle3_engine("graph", torch.float32, 3)
    history = Once({r.request_id: text[:3] for r, text in zip(some, plain, strict=True)})
    hybrid.set_drafter(HybridAhead(history, hybrid.drafter, 0.05), StaticPolicy(3))
    found = []
    for request, text in zip(some, plain, strict=True):
        completion = hybrid.generate([request])[0]
        assert completion.token_ids.tolist() == text
        assert completion.provenance[:3].tolist() == [Provenance.ACCEPTED] * 3 and completion.sources[0] == 0
        found.append([(t.num_draft_tokens, t.num_accepted_tokens) for t in hybrid.drain_trace()][1:])
    alone = eagle3_engine("graph", torch.float32, 3)
    for request, text, steps in zip(some, plain, found, strict=True):
        # A draft of three that is accepted whole emits four tokens.
        sampling = SamplingParams(max_tokens=61, ignore_eos=True)
        alone.generate([replace(request, prompt_ids=(*request.prompt_ids, *text[:3]), sampling=sampling)])
        assert [(t.num_draft_tokens, t.num_accepted_tokens) for t in alone.drain_trace()][1:] == steps
    assert sum(num for steps in found for _, num in steps) > 20


def test_graphs_are_captured_while_another_thread_allocates() -> None:
    """As a learner does beside a rollout of the next batch (max_staleness > 0, one GPU)."""
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
        running = engine("graph", torch.float32)
        found = running.generate(requests())
    finally:
        stop.set()
        thread.join()
    assert not failures and num_allocated > 10 and running.runner.num_captured > 3
    assert said(found) == said(wanted)
