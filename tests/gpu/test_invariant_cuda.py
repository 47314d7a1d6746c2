"""Batch-invariant products and attention: rows have the same bits for any number of tokens, tile, split and chunk of
a prompt, and engines emit the same tokens and logprobs with speculation on and off, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support import tiny_config, tiny_decoder
from test_kernels_cuda import relative_error, requests, tokens
from tiny_run import lines, make, write_head, write_model, write_task

from paceline.drafters.device import DeviceHistoryDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.accept import RULES
from paceline.engine.engine import LocalEngine
from paceline.engine.runner import EagerRunner
from paceline.model.attention import PagedAttention
from paceline.model.config import ModelConfig
from paceline.model.kv import BLOCK, BatchPlan, BlockTable, PagedKV
from paceline.model.layer import Linear
from paceline.model.paged import PagedDecoder, Span
from paceline.model.rope import Rope
from paceline.model.shapes import SHAPES
from paceline.model.weights import checksum
from paceline.speculation.history_store import HistoryStore
from paceline.speculation.policy import StaticPolicy
from paceline.types import SamplingParams
from paceline.verify.drafters import AdversarialDrafter

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
# (inputs, outputs) of the products of a layer, and heads: query heads, key/value heads, size.
MODELS = {
    "smollm2-135m": ([(576, 960), (576, 576), (576, 3072), (1536, 576)], (9, 3, 64)),
    "qwen2.5-1.5b": ([(1536, 2048), (1536, 1536), (1536, 17920), (8960, 1536)], (12, 2, 128)),
    "qwen3-0.6b": ([(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)], (16, 8, 128)),
    "qwen3-1.7b": ([(2048, 4096), (2048, 2048), (2048, 12288), (6144, 2048)], (16, 8, 128)),
    "qwen3-8b": ([(4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096)], (32, 8, 128)),
}
PRODUCTS = [(1, True, None), (1, False, None), (1, False, torch.float32), (2, False, None)]  # parts, bias, dtype
NUMS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 48, 63, 64, 65, 96, 127, 128, 129, 200, 256, 257, 384, 511, 512, 768, 1024)


def random_linear(num_in: int, num_out: int, bias: bool = False) -> Linear:
    linear = Linear(num_in, num_out, bias=bias).to(CUDA, torch.bfloat16).requires_grad_(False)
    generator = torch.Generator(CUDA).manual_seed(num_in + num_out)
    assert linear.weight is not None
    linear.weight.copy_(torch.randn(num_out, num_in, generator=generator, device=CUDA) * num_in**-0.5)
    if linear.bias is not None:
        linear.bias.copy_(torch.randn(num_out, generator=generator, device=CUDA))
    return linear


def shapes() -> Iterator[tuple[int, int]]:
    for products, _ in MODELS.values():
        yield from products


@pytest.mark.parametrize(("num_in", "num_out"), sorted(set(shapes())))
@pytest.mark.parametrize(("parts", "bias", "dtype"), PRODUCTS)
def test_rows_of_a_product_have_the_same_bits_for_any_number_of_tokens(
    num_in: int, num_out: int, parts: int, bias: bool, dtype: torch.dtype | None
) -> None:
    """With both implementations, each for the numbers of tokens at which it is used."""
    from paceline.model.cuda.graphs import SIZES, round_up
    from paceline.model.cuda.invariant_product import Products, triton_product

    if num_in % (parts * 16):
        pytest.skip("parts must be multiples of 16")
    linear, products = random_linear(num_in, num_out, bias), Products()
    sizes = tuple(size for size in SIZES if size <= 1024)
    products.find_library_sizes(linear, parts, sizes, dtype)
    x = torch.randn(1024, num_in, generator=torch.Generator(CUDA).manual_seed(0), device=CUDA).bfloat16()
    wanted = triton_product(x[:16], linear, parts, dtype)
    exact = torch.nn.functional.linear(x[:16].double(), linear.weight.double())
    if linear.bias is not None:
        exact += linear.bias.double()
    assert relative_error(wanted.sum(0) if parts > 1 else wanted, exact) < (2e-5 if wanted.itemsize == 4 else 3e-3)
    all_rows = torch.cat([triton_product(part, linear, parts, dtype) for part in x.split(16)], -2)
    generator = torch.Generator().manual_seed(1)
    for num in NUMS:
        chosen = torch.randperm(1024, generator=generator)[:num].to(CUDA)
        padded = torch.zeros(round_up(num, SIZES), num_in, dtype=torch.bfloat16, device=CUDA)
        padded[:num] = x[chosen]
        assert torch.equal(products(padded, linear, parts, dtype)[..., :num, :], all_rows[..., chosen, :]), num
        assert torch.equal(triton_product(x[chosen], linear, parts, dtype), all_rows[..., chosen, :]), num


@pytest.mark.parametrize(("num_in", "num_out"), [(1024, 6144), (4096, 2048)])
def test_a_product_whose_parts_depend_on_the_number_of_tokens_is_caught(
    num_in: int, num_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that splits the input dimension at up to 16 tokens, one token included. Not with smaller layers, where
    torch's product is not compared for so few tokens."""
    from paceline.model.cuda import invariant_product
    from paceline.model.cuda.invariant_product import Products, is_small, triton_product

    def library(x: torch.Tensor, linear: Linear, parts: int = 1, dtype: torch.dtype | None = None) -> torch.Tensor:
        if len(x) > 16:
            return triton_product(x, linear, parts, dtype)
        return triton_product(x, linear, 4).sum(0).bfloat16()

    linear, products = random_linear(num_in, num_out), Products()
    assert not is_small(1, linear)
    x = torch.randn(16, num_in, generator=torch.Generator(CUDA).manual_seed(0), device=CUDA).bfloat16()
    assert relative_error(library(x, linear), triton_product(x, linear)) < 3e-3
    monkeypatch.setattr(invariant_product, "library_product", library)
    products.find_library_sizes(linear, 1, (1, 2, 8, 16, 32, 64))
    assert list(products.library_sizes.values()) == [frozenset({32, 64})]


def test_a_bias_that_is_added_after_rounding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.model.cuda import invariant_product
    from paceline.model.cuda.invariant_product import Products, triton_product

    def library(x: torch.Tensor, linear: Linear, parts: int = 1, dtype: torch.dtype | None = None) -> torch.Tensor:
        without_bias = Linear(linear.num_in, linear.num_out)
        without_bias.weight, bias = linear.weight, linear.bias
        assert bias is not None
        return triton_product(x, without_bias) + bias

    linear, products = random_linear(2048, 4096, bias=True), Products()
    monkeypatch.setattr(invariant_product, "library_product", library)
    products.find_library_sizes(linear, 1, (1, 16, 64))
    assert list(products.library_sizes.values()) == [frozenset()]


def test_fused_swiglu_has_the_bits_of_the_separate_kernels() -> None:
    from paceline.model.cuda.graphs import SIZES
    from paceline.model.cuda.invariant_product import Products, triton_product
    from paceline.model.cuda.ops import CudaOps
    from paceline.model.cuda.swiglu import swiglu

    linear, products = random_linear(4096, 24576), Products()
    products.find_fused_sizes(linear, tuple(size for size in SIZES if size <= 1024))
    (sizes,) = products.fused_sizes.values()
    if not sizes:
        pytest.skip("the fused kernel has other bits at every number of tokens, and is not used")
    assert linear.weight is not None
    for num in sizes:
        x = torch.randn(num, 4096, generator=torch.Generator(CUDA).manual_seed(num), device=CUDA).bfloat16()
        assert torch.equal(swiglu(x, linear.weight), CudaOps().silu_mul(triton_product(x, linear))), num


@pytest.mark.parametrize(("num_in", "num_out"), [(576, 3072), (1024, 6144), (32, 96)])
def test_swiglu_product_has_the_bits_of_the_separate_kernels(num_in: int, num_out: int) -> None:
    from paceline.model.cuda.invariant_product import swiglu_product, triton_product
    from paceline.model.cuda.ops import CudaOps

    linear = random_linear(num_in, num_out)
    x = 3 * torch.randn(16, num_in, generator=torch.Generator(CUDA).manual_seed(0), device=CUDA).bfloat16()
    wanted = CudaOps().silu_mul(triton_product(x, linear))
    assert wanted.abs().amax() > 1
    for num in (1, 2, 3, 5, 16):
        assert torch.equal(swiglu_product(x[:num], linear), wanted[:num]), num


class PagedSequences:
    """Random sequences in a KV cache, computed in steps. `outputs` has each token's attention."""

    def __init__(self, lengths: list[int], heads: tuple[int, int, int], seed: int = 0, qk_norm: bool = True) -> None:
        self.num_heads, self.num_kv, dim = heads
        self.config: ModelConfig = tiny_config(
            num_heads=self.num_heads, num_kv_heads=self.num_kv, head_dim=dim, num_layers=1, max_positions=65536
        )
        generator = torch.Generator(CUDA).manual_seed(seed)
        self.lengths, self.done = lengths, [0] * len(lengths)
        width = (self.num_heads + 2 * self.num_kv) * dim
        self.qkv = [torch.randn(n, width, generator=generator, device=CUDA).bfloat16() for n in lengths]
        self.outputs = [torch.zeros(n, self.num_heads * dim, dtype=torch.bfloat16, device=CUDA) for n in lengths]
        norms = [torch.rand(dim, generator=generator, device=CUDA).bfloat16() + 1 for _ in range(2)]
        self.norms: list[torch.Tensor | None] = [*norms] if qk_norm else [None, None]
        num_blocks = [-(-n // BLOCK) for n in lengths]
        order = np.random.default_rng(seed).permutation(sum(num_blocks)).astype(np.int32)
        ends = np.cumsum(num_blocks)
        self.tables = np.zeros((len(lengths), max(num_blocks)), np.int32)
        for row, (end, num) in enumerate(zip(ends, num_blocks, strict=True)):
            self.tables[row, :num] = order[end - num : end]
        self.kv = PagedKV(self.config, int(ends[-1]), torch.bfloat16, CUDA)
        self.kv.k.fill_(float("nan"))  # what was not written must not be read
        self.kv.v.fill_(float("nan"))
        self.dim = dim
        norm = torch.empty(1, device=CUDA, dtype=torch.bfloat16)
        self.cos, self.sin = Rope(self.config).tables(norm)

    def plan(self, rows: list[int], nums: list[int]) -> BatchPlan:
        starts = [self.done[row] for row in rows]
        positions = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, nums, strict=True)])
        return BatchPlan(
            np.zeros(len(positions), np.int64), positions, np.cumsum([0, *nums]).astype(np.int32),
            np.array([start + n for start, n in zip(starts, nums, strict=True)], np.int32), self.tables[rows],
            np.array([0]),
        )  # fmt: skip

    def step(self, rows: list[int], nums: list[int], num_padding: int = 0, splits: int | None = None) -> None:
        from paceline.model.cuda.attention import QKNormRope
        from paceline.model.cuda.invariant_attention import InvariantPagedAttention

        attention = InvariantPagedAttention.of_plan(self.kv, self.plan(rows, nums), num_padding)
        if splits is not None and attention.tiles is None:
            attention._set_tiles(len(rows), splits)
        parts = [self.qkv[row][self.done[row] : self.done[row] + n] for row, n in zip(rows, nums, strict=True)]
        x = torch.cat([*parts, self.qkv[0].new_ones(num_padding, self.qkv[0].shape[1])])
        q, k, v = x.unflatten(1, (-1, self.dim)).split([self.num_heads, self.num_kv, self.num_kv], 1)
        out = attention(0, q, k, v, QKNormRope(self.cos, self.sin, *self.norms, 1e-6))
        for row, n, part in zip(rows, nums, out[: sum(nums)].split(nums), strict=True):
            self.outputs[row][self.done[row] : self.done[row] + n] = part
            self.done[row] += n


def decoded(heads: tuple[int, int, int], lengths: list[int], seed: int, qk_norm: bool) -> PagedSequences:
    """Prompts in chunks of random sizes and in a random order, then up to 8 tokens at a time, in random batches."""
    rng, sequences = np.random.default_rng(seed), PagedSequences(lengths, heads, qk_norm=qk_norm)
    while any(done < n for done, n in zip(sequences.done, lengths, strict=True)):
        left = [row for row, n in enumerate(lengths) if sequences.done[row] < n]
        rows = rng.permutation(left)[: rng.integers(1, len(left) + 1)].tolist()
        longest = int(rng.choice([1, 2, 4, 8, 16, 300]))
        nums = [int(min(lengths[row] - sequences.done[row], rng.integers(1, longest + 1))) for row in rows]
        splits = int(rng.choice([1, 2, 8, 32]))
        sequences.step(rows, nums, int(rng.integers(0, 9)), splits)
    return sequences


@pytest.mark.parametrize("model", MODELS)
def test_attention_has_the_same_bits_however_a_sequence_is_computed(model: str) -> None:
    heads, lengths = MODELS[model][1], [1, 15, 64, 65, 255, 256, 257, 700, 1500]
    qk_norm = model.startswith("qwen3")
    whole = PagedSequences(lengths, heads, qk_norm=qk_norm)
    whole.step(list(range(len(lengths))), lengths)
    for seed in range(3):
        other = decoded(heads, lengths, seed, qk_norm)
        for row, (found, wanted) in enumerate(zip(other.outputs, whole.outputs, strict=True)):
            assert torch.equal(found, wanted), (seed, lengths[row], (found != wanted).any(1).nonzero()[0])
        for name in ("k", "v"):
            written = getattr(whole.kv, name).isfinite()
            assert torch.equal(getattr(whole.kv, name)[written], getattr(other.kv, name)[written])


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen2.5-1.5b", "smollm2-135m"])
def test_long_contexts_have_the_same_bits(model: str) -> None:
    """Sections of all sizes, the last queries alone and together."""
    heads, length = MODELS[model][1], 41_001
    whole = PagedSequences([length, 300], heads)
    whole.step([0, 1], [length, 300])
    for num, splits in ((1, 32), (5, 1), (16, 8)):
        other = PagedSequences([length, 300], heads)
        other.step([0, 1], [length - num, 300 - num])
        other.step([1, 0], [num, num], splits=splits)
        assert torch.equal(other.outputs[0], whole.outputs[0])
        assert torch.equal(other.outputs[1], whole.outputs[1])


def test_attention_equals_the_reference() -> None:
    from paceline.model.cuda.attention import QKNormRope
    from paceline.model.cuda.ops import _norm_rope

    sequences = PagedSequences([70, 700, 3000], (8, 2, 32))
    plan, slow = sequences.plan([0, 1, 2], [70, 700, 3000]), PagedKV(sequences.config, 300, torch.float32, CUDA)
    x = torch.cat(sequences.qkv)
    q, k, v = x.unflatten(1, (-1, 32)).split([8, 2, 2], 1)
    apply = QKNormRope(sequences.cos, sequences.sin, *sequences.norms, 1e-6)
    positions = torch.as_tensor(plan.positions, device=CUDA)
    rotated = [_norm_rope(each, positions, apply, norm) for each, norm in zip((q, k), sequences.norms, strict=True)]
    wanted = PagedAttention(slow, plan)(0, *(each.float() for each in (*rotated, v)))
    sequences.step([0, 1, 2], [70, 700, 3000])
    assert relative_error(torch.cat(sequences.outputs), wanted) < 4e-3  # weights and results are rounded
    written = sequences.kv.v.isfinite()
    assert torch.equal(sequences.kv.v[written].float(), slow.v[:, : sequences.kv.v.shape[1]][written])


def test_attention_with_splits_by_load_has_other_bits() -> None:
    """The kernel that is not invariant: what the comparisons above must be able to see."""
    from paceline.model.cuda.attention import CudaPagedAttention, QKNormRope
    from paceline.model.cuda.invariant_attention import InvariantPagedAttention

    outs = []
    for splits in (1, 4):
        sequences = PagedSequences([900], (8, 2, 64))
        sequences.step([0], [899])
        plan = sequences.plan([0], [1])
        rows = InvariantPagedAttention.of_plan(sequences.kv, plan).rows
        attention = CudaPagedAttention(sequences.kv, rows, 1)
        attention.splits, attention.num_done = splits, torch.zeros(2, dtype=torch.int32, device=CUDA)
        q, k, v = sequences.qkv[0][-1:].unflatten(1, (-1, 64)).split([8, 2, 2], 1)
        outs.append(attention(0, q, k, v, QKNormRope(sequences.cos, sequences.sin, *sequences.norms, 1e-6)))
    assert relative_error(outs[0], outs[1]) < 1e-2 and not torch.equal(*outs)


def engine(drafter: str, graphs: bool = True, num_blocks: int = 256, **options: int) -> LocalEngine:
    from paceline.engine.graph_runner import GraphRunner
    from paceline.model.cuda.invariant import InvariantOps
    from paceline.model.cuda.sampler import CudaSampler

    decoder = tiny_decoder(torch.bfloat16, num_heads=8, num_kv_heads=2, head_dim=32).to(CUDA)
    decoder.ops = InvariantOps(decoder)
    paged, sampler, max_num_seqs = PagedDecoder(decoder, num_blocks), CudaSampler(), options.pop("max_num_seqs", 8)
    eager = EagerRunner(paged, sampler, RULES["coupled"])
    drafters = {
        "none": None,
        "suffix": SuffixDrafter(),
        "random": AdversarialDrafter(61),
        "history": DeviceHistoryDrafter(HistoryStore()),
    }
    return LocalEngine(
        paged, sampler=sampler, runner=GraphRunner(paged, eager, max_num_seqs, enforce_eager=not graphs),
        drafter=drafters[drafter], policy=StaticPolicy(5), max_num_seqs=max_num_seqs, **options,
    )  # fmt: skip


@pytest.mark.parametrize("drafter", ["none", "suffix", "random", "history"])
def test_speculation_changes_no_bit_of_tokens_and_logprobs(drafter: str) -> None:
    wanted = engine("none", max_num_seqs=1).generate(requests())
    preempting = {"num_blocks": 16, "max_num_seqs": 6}
    settings: tuple[dict[str, int], ...] = (
        {}, {"graphs": False}, {"max_num_seqs": 3, "max_num_batched_tokens": 32}, {"prefix_sharing": False}, preempting,
    )  # fmt: skip
    for options in settings:
        running = engine(drafter, **options)
        found = running.generate(requests())
        assert tokens(found) == tokens(wanted), options
        for a, b in zip(found, wanted, strict=True):
            assert (a.logprobs == b.logprobs).all() and (a.raw_logprobs == b.raw_logprobs).all(), options
        assert (sum(c.num_draft_tokens for c in found) > 100) == (drafter != "none")
        assert drafter in ("none", "random") or sum(c.num_accepted_tokens for c in found) > 20
        assert (sum(c.num_preemptions for c in found) > 0) == (options is preempting)


@pytest.mark.parametrize("rank", [0, 16])
def test_logits_of_a_large_model_do_not_depend_on_how_its_tokens_are_computed(rank: int) -> None:
    """Two layers of Qwen3-8B: products in two parts, the fused SwiGLU kernel, torch's products, and LoRA adapters."""
    from paceline.bench.random_weights import add_random_adapters, random_decoder
    from paceline.model.cuda.invariant import InvariantOps

    config = replace(SHAPES["qwen3-8b"], num_layers=2, vocab_size=4096)
    decoder = random_decoder(config, torch.bfloat16, CUDA)
    if rank:
        add_random_adapters(decoder, rank)
    decoder.ops = InvariantOps(decoder)
    paged = PagedDecoder(decoder, 400)
    ids = np.random.default_rng(0).integers(0, 4096, 1400).astype(np.int32)

    def logits(chunks: list[int], num_others: int = 0) -> torch.Tensor:
        """Of all tokens, computed in these chunks beside other sequences of 5 tokens."""
        table, start, found = BlockTable(), 0, []
        others = [BlockTable() for _ in range(num_others)]
        for each in (table, *others):
            assert paged.pool.reserve(each, len(ids) if each is table else 5)
        for num in chunks:
            spans = [Span(ids[:5], 0, other, 1) for other in others]
            spans.append(Span(ids[start : start + num], start, table, num))
            found.append(paged.forward(spans)[num_others:])
            start += num
        for each in (table, *others):
            paged.pool.truncate(each, 0)
        assert start == len(ids)
        return torch.cat(found)

    wanted = logits([1400])
    for chunks, num_others in (
        ([1] * 20 + [1380], 0), ([1000, *[5] * 20, 300], 3), ([64] * 21 + [56], 0), ([128] * 10 + [120], 40),
        ([1, 1023, 1, 375], 0),
    ):  # fmt: skip
        assert torch.equal(logits(chunks, num_others), wanted), chunks
    layer = decoder.layers[0]  # more tokens than torch's products were compared for:
    for product, linear in ((decoder.ops.linear, layer.qkv), (decoder.ops.residual_linear, layer.down)):
        x = torch.randn(9300, linear.num_in, device=CUDA).bfloat16()
        padded = torch.cat([x, x.new_zeros(decoder.ops.padded(len(x)) - len(x), linear.num_in)])
        assert torch.equal(product(padded, linear)[..., :1024, :], product(x[:1024], linear))
        assert torch.equal(product(padded, linear)[..., 8500:9012, :], product(x[8500:9012], linear))


def test_norms_have_the_same_bits_for_all_numbers_of_tokens() -> None:
    """With 128 tokens the kernel has a variant that lets the next one begin."""
    from paceline.model.cuda.invariant import InvariantOps

    ops = InvariantOps.__new__(InvariantOps)
    generator = torch.Generator(CUDA).manual_seed(0)
    for num_parts in (1, 2):
        x = torch.randn(300, 4096, generator=generator, device=CUDA)
        y = torch.randn(num_parts, 300, 4096, generator=generator, device=CUDA)
        weight = torch.randn(4096, generator=generator, device=CUDA).bfloat16()
        parts = y[0].bfloat16() if num_parts == 1 else y
        total, wanted = ops.add_norm(x.clone(), parts.clone(), weight, 1e-6)
        for num in (1, 127, 128, 129):
            found = ops.add_norm(x[:num].clone(), parts[..., :num, :].clone(), weight, 1e-6)
            assert torch.equal(found[0], total[:num]) and torch.equal(found[1], wanted[:num]), num


@pytest.mark.parametrize("vocab_size", [49152, 151936])
def test_draws_have_the_same_bits_beside_truncated_rows(vocab_size: int) -> None:
    from paceline.model.cuda.sampler import CudaSampler
    from paceline.model.sampling_arrays import SamplingArrays

    logits = torch.randn(64, vocab_size, generator=torch.Generator(CUDA).manual_seed(0), device=CUDA) * 3
    plain = [SamplingParams(temperature=(1.0, 0.7)[i % 2]) for i in range(63)]
    drawn = []
    for last in (SamplingParams(), SamplingParams(top_p=0.5)):
        params = SamplingArrays.of([*plain, last], np.ones(64, np.int64))
        drawn.append(CudaSampler().draw(logits, np.arange(64, dtype=np.uint64), np.arange(64), params))
    for name in ("tokens", "logprobs", "raw_logprobs"):
        a, b = (getattr(draws, name)[:63] for draws in drawn)
        assert (a == b).all(), name
    assert drawn[0].logprobs[63] != drawn[1].logprobs[63]


@pytest.mark.parametrize("lora", [[], ["learner.lora_rank=4", "learner.learning_rate=0.02"]], ids=["all", "lora"])
def test_runs_with_and_without_drafts_are_identical(lora: list[str], tmp_path: Path) -> None:
    """Tokens, rewards, losses and weights of RL runs in bfloat16, with a loss that reads the engine's logprobs."""
    write_model(tmp_path / "model", head_dim=16)
    write_task(tmp_path / "task.jsonl")
    settings = [
        "model.device=cuda", "model.dtype=bfloat16", "sampling.max_tokens=32", "train.num_steps=6",
        "algorithm.correction=token_tis", "speculation.audit_every=2", *lora,
    ]  # fmt: skip
    suffix = ["speculation.method=suffix", "speculation.policy=static"]
    modes = {
        "plain": [], "suffix": suffix, "suffix, auto": [*suffix[:1], "speculation.policy=auto"],
        "eagle3": [*write_head(tmp_path), "speculation.policy=static"],
        "draft_model": [
            "speculation.method=draft_model", "speculation.draft_model=layers:1", "speculation.policy=static",
        ],
        "preempting": [*suffix, "engine.kv_tokens=160", "engine.max_num_batched_tokens=32"],
    }  # fmt: skip
    found = {}
    for mode, changes in modes.items():
        trainer = make(tmp_path, mode, *settings, *changes)
        assert trainer.engine.paged.decoder.ops.is_batch_invariant
        trainer.run()
        metrics = trainer.callback.metrics
        assert mode in ("plain", "suffix, auto") or sum(m["num_accepted_tokens"] for m in metrics) > 0
        assert [m["audit"]["identical"] for m in metrics if "audit" in m] == [True] * 3
        records = [
            [r[key] for key in ("step", "group", "sample", "token_ids", "logprobs", "reward")]
            for r in lines(tmp_path / mode, "rollouts")
        ]
        figures = [[m[key] for key in ("loss", "grad_norm", "mismatch_mean", "weights_checksum")] for m in metrics]
        found[mode] = records, figures, checksum(trainer.learner.state_dict().items())
        trainer.close()
    for mode, outcome in found.items():
        assert outcome == found["plain"], mode
    versions = [figure[-1] for figure in found["plain"][1]]
    assert len(set(versions)) == len(versions), "every step must change the weights"
