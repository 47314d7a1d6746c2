"""The C kernels against their reference implementations, and their batch invariance: a row's result is bit-identical in
every batch."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_config, tiny_decoder
from torch import Tensor
from torch.nn import functional as F

from paceline import native
from paceline.model import kernels
from paceline.model.attention import PagedAttention
from paceline.model.decoder import Decoder
from paceline.model.kv import BatchPlan, PagedKV
from paceline.model.layer import Linear, Lora, LoraPart
from paceline.model.lora import adapters_of, attach
from paceline.model.ops import TorchOps
from paceline.model.sample import PhiloxNoise, Sampler, philox_words
from paceline.model.sampling_arrays import SamplingArrays

try:
    native.load("decoder"), native.load("sample"), native.load("weights")
except native.NativeUnavailable as error:
    pytest.skip(f"no kernels here: {error}", allow_module_level=True)

SHAPES = {
    "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "qwen3": {"qk_norm": True, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "tie_embeddings": False},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "num_heads": 6, "num_kv_heads": 1, "head_dim": 24},
    "odd": {"hidden_size": 37, "intermediate_size": 51, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6},
}
SHAPES |= {"adapters": SHAPES["smollm2"], "few adapters": SHAPES["odd"]}
ADAPTERS = {
    "adapters": (16, 16.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    "few adapters": (3, 6.0, ("q_proj", "v_proj", "up_proj")),
}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    threads = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def gen() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def packed(weight: Tensor, bias: Tensor | None = None) -> Linear:
    linear = Linear(weight.shape[1], weight.shape[0], bias is not None)
    linear.weight, linear.panels = None, kernels.pack(weight)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias)
    return linear


# ---- batch invariance ----


def first_difference(function: Callable[[Tensor], Tensor], x_TD: Tensor, num_threads: tuple[int, ...] = (1, 2)) -> str:
    """Compares the rows computed alone with batches of up to 64 rows. Returns the first that differs ("" for none)."""
    alone = torch.cat([function(row.unsqueeze(0).clone()) for row in x_TD])
    for threads in num_threads:
        torch.set_num_threads(threads)
        for size in [*range(1, 18), 31, 33, 64]:
            for start in range(0, len(x_TD) - size + 1, max(1, len(x_TD) // 3)):
                together = function(x_TD[start : start + size].clone())
                if not torch.equal(together, alone[start : start + size]):
                    return f"{size} rows from {start}, {threads} threads"
    return ""


@pytest.mark.parametrize("num_in, num_out", [(576, 960), (1536, 576), (37, 50), (3, 5), (64, 16)])
def test_linear_is_batch_invariant(num_in: int, num_out: int, gen: torch.Generator) -> None:
    weight, bias = torch.randn(num_out, num_in, generator=gen), torch.randn(num_out, generator=gen)
    x = torch.randn(64, num_in, generator=gen)
    for linear in (packed(weight), packed(weight, bias)):
        assert first_difference(lambda x, linear=linear: kernels.NativeOps().linear(x, linear), x) == ""


@pytest.mark.parametrize("sizes, rank", [((576, 192, 192), 16), ((50,), 3), ((5, 40), 17)])
def test_adapters_are_batch_invariant(sizes: tuple[int, ...], rank: int, gen: torch.Generator) -> None:
    """Those of all parts, and of all but the first."""
    linear = packed(torch.randn(sum(sizes), 70, generator=gen))
    assert linear.panels is not None
    weight, x, ops = kernels.unpack(linear.panels, sum(sizes)), torch.randn(64, 70, generator=gen), kernels.NativeOps()
    parts = [LoraPart(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
    for adapted in (parts, parts[1:] or parts):
        linear.lora = lora = Lora(70, adapted, rank, 0.7)
        lora.down.normal_(generator=gen), lora.up.normal_(generator=gen)
        kernels.pack_adapters(lora)
        torch.testing.assert_close(ops.linear(x, linear), lora(x, F.linear(x, weight)), rtol=1e-4, atol=1e-4)
        assert first_difference(lambda x: ops.linear(x, linear), x) == ""


def test_another_order_of_summation_is_detected(gen: torch.Generator) -> None:
    """Broken implementations: torch's matmul, and a kernel that splits k in two if there are many rows."""
    weight, x = torch.randn(960, 576, generator=gen), torch.randn(64, 576, generator=gen)
    halves = packed(weight[:, :288].contiguous()), packed(weight[:, 288:].contiguous())
    whole, ops = packed(weight), kernels.NativeOps()

    def split(x: Tensor) -> Tensor:
        if len(x) < 8:
            return ops.linear(x, whole)
        return ops.linear(x[:, :288].contiguous(), halves[0]) + ops.linear(x[:, 288:].contiguous(), halves[1])

    assert first_difference(split, x) != ""
    assert first_difference(lambda x: F.linear(x, weight), x) != ""


def test_elementwise_operations_are_batch_invariant(gen: torch.Generator) -> None:
    x, weight, ops = torch.randn(64, 1152, generator=gen), torch.rand(1152, generator=gen), kernels.NativeOps()
    assert first_difference(lambda x: ops.norm(x, weight, 1e-5), x) == ""
    assert first_difference(lambda x: torch.cat(ops.add_norm(x, x * 0.7, weight, 1e-5), -1), x) == ""
    assert first_difference(ops.silu_mul, x) == ""


# ---- equality with the reference implementations ----


def slow_pack(weight_NK: Tensor) -> Tensor:
    padded = F.pad(weight_NK, (0, 0, 0, -len(weight_NK) % 16))
    return padded.view(-1, 16, weight_NK.shape[1]).transpose(1, 2).contiguous()


@pytest.mark.parametrize("sizes", [(1,), (16,), (9, 3, 3), (20, 5, 40), (16, 48), (7, 9, 1), (30, 0, 2)], ids=str)
def test_parts_are_packed_one_by_one(sizes: tuple[int, ...], gen: torch.Generator) -> None:
    """Also if parts share a panel; a transposed source and the old contents of panels make no difference."""
    weight = torch.randn(11, sum(sizes), generator=gen).T
    panels = slow_pack(torch.ones(weight.shape))
    first = 0
    for part in weight.split(sizes):
        kernels.pack_rows(part, panels, first)
        first += len(part)
    assert torch.equal(panels, slow_pack(weight))
    for num in (0, 1, len(weight) - 1, len(weight)):
        assert torch.equal(kernels.unpack(panels, num), weight[:num])


@pytest.mark.parametrize("num_out", [1, 16, 50, 64])
def test_pack_and_unpack(num_out: int, gen: torch.Generator) -> None:
    weight = torch.randn(num_out, 7, generator=gen)
    panels = kernels.pack(weight)
    assert torch.equal(panels, slow_pack(weight))
    assert torch.equal(kernels.unpack(panels, num_out), weight)
    tokens = torch.arange(num_out).flip(0)
    assert torch.equal(kernels.NativeOps().embed(tokens, packed(weight)), weight[tokens])


@pytest.mark.parametrize("num_rows", [1, 3, 5, 7, 40])
def test_ops_equal_torch(num_rows: int, gen: torch.Generator) -> None:
    ops, reference = kernels.NativeOps(), TorchOps()
    x = torch.randn(num_rows, 102, generator=gen)
    y, weight, bias = torch.randn_like(x), torch.randn(70, 102, generator=gen), torch.randn(70, generator=gen)
    scale = torch.rand(102, generator=gen)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(ops.linear(x, packed(weight, bias)), F.linear(x, weight, bias), **close)
    torch.testing.assert_close(ops.norm(x, scale, 1e-5), reference.norm(x, scale, 1e-5), **close)
    want = reference.add_norm(x, y, scale, 1e-5)
    torch.testing.assert_close(ops.add_norm(x.clone(), y.clone(), scale, 1e-5), want, **close)
    large = x * 60  # far into both tails of the sigmoid
    torch.testing.assert_close(ops.silu_mul(large), reference.silu_mul(large), **close)


def both(name: str) -> tuple[Decoder, Decoder]:
    decoder = tiny_decoder(torch.float32, **SHAPES[name])
    if name in ADAPTERS:
        attach(decoder, *ADAPTERS[name])
        for lora in adapters_of(decoder):
            lora.up.data.copy_(torch.randn(lora.up.shape, generator=torch.Generator().manual_seed(1)) / 16)
    fast = copy.deepcopy(decoder)
    kernels.pack_for_inference(fast)
    return decoder, fast


NUM_SEQUENCES, LENGTH = 4, 70
TABLES = np.random.default_rng(7).permutation(NUM_SEQUENCES * 5).reshape(NUM_SEQUENCES, 5).astype(np.int32)


def fill_with_nan(kv: PagedKV) -> PagedKV:
    """So that reading memory that was not written gives NaN."""
    kv.k.fill_(torch.nan), kv.v.fill_(torch.nan)
    return kv


def plan_of(rows: list[tuple[int, int, int]], tokens: np.ndarray) -> BatchPlan:
    """Rows of (sequence, start, num_query)."""
    return BatchPlan(
        tokens=np.concatenate([tokens[s, start : start + num] for s, start, num in rows]),
        positions=np.concatenate([np.arange(start, start + num) for _, start, num in rows]),
        query_start=np.cumsum([0, *(num for _, _, num in rows)]).astype(np.int32),
        context=np.array([start + num for _, start, num in rows], np.int32),
        block_tables=TABLES[[s for s, _, _ in rows]],
        logits_at=np.arange(sum(num for _, _, num in rows)),
    )


def logits_of(decoder: Decoder, kv: PagedKV, rows: list[tuple[int, int, int]], tokens: np.ndarray) -> Tensor:
    plan = plan_of(rows, tokens)
    kind = PagedAttention if decoder.embed.panels is None else kernels.NativePagedAttention
    out = decoder(torch.as_tensor(plan.tokens), torch.as_tensor(plan.positions), kind(kv, plan))
    return decoder.logits(out.hidden)


@pytest.mark.parametrize("name", SHAPES)
def test_decoder_equals_torch(name: str) -> None:
    """Up to rounding: the error of the compiled kernels is about that of torch in float32. How large that is depends on
    the model: with SmolLM2's shape and random weights, logits have a standard deviation of 6 and errors of 4e-4."""
    slow, fast = both(name)
    tokens = np.random.default_rng(0).integers(0, slow.config.vocab_size, (NUM_SEQUENCES, LENGTH))
    rows = [(s, 0, LENGTH - s) for s in range(NUM_SEQUENCES)]

    def logprobs(decoder: Decoder) -> Tensor:
        memory = PagedKV(slow.config, NUM_SEQUENCES * 5, decoder.dtype, "cpu", transposed=True)
        return logits_of(decoder, fill_with_nan(memory), rows, tokens).double().log_softmax(-1)

    exact = logprobs(copy.deepcopy(slow).double())
    error, error_of_torch = ((logprobs(decoder) - exact).abs().max() for decoder in (fast, slow))
    assert error <= 4 * error_of_torch < 4e-3


def run_in_pieces(decoder: Decoder, tokens: np.ndarray, sizes: Iterator[int], together: Iterator[bool]) -> Tensor:
    """All logits, with each sequence split into queries of the given sizes, in batches given by `together`."""
    kv = fill_with_nan(PagedKV(decoder.config, NUM_SEQUENCES * 5, torch.float32, "cpu", transposed=True))
    out = torch.full((NUM_SEQUENCES, LENGTH, decoder.config.vocab_size), torch.nan)
    done, step = [0] * NUM_SEQUENCES, 0
    while min(done) < LENGTH:
        running = [s for s in range(NUM_SEQUENCES) if done[s] < LENGTH]
        chosen = [s for s in running if next(together)] or running[:1]
        rows = [(s, done[s], min(next(sizes), LENGTH - done[s])) for s in chosen]
        torch.set_num_threads(1 + step % 2)
        logits = logits_of(decoder, kv, rows, tokens).split([num for _, _, num in rows])
        for (s, start, num), piece in zip(rows, logits, strict=True):
            out[s, start : start + num] = piece
            done[s] += num
        step += 1
    return out


def forever(values: list) -> Iterator:
    while True:
        yield from values


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=6, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 1, 1, 2, 4, 5, 6, 8, 9, 33, 70]), min_size=3, max_size=9),
    together=st.lists(st.booleans(), min_size=3, max_size=9),
)
def test_batches_and_chunks_do_not_change_bits(name: str, sizes: list[int], together: list[bool]) -> None:
    fast = packed_decoder(name)
    tokens = np.random.default_rng(1).integers(0, fast.config.vocab_size, (NUM_SEQUENCES, LENGTH))
    with torch.inference_mode():
        whole = run_in_pieces(fast, tokens, forever([LENGTH]), forever([True]))
        pieces = run_in_pieces(fast, tokens, forever(sizes), forever([*together, True]))
    assert torch.equal(pieces, whole)  # NaN is never equal, so no unwritten memory was read


_PACKED: dict[str, Decoder] = {}


def packed_decoder(name: str) -> Decoder:
    if name not in _PACKED:
        _PACKED[name] = both(name)[1]
    return _PACKED[name]


def test_torch_is_not_batch_invariant() -> None:
    slow, _ = both("smollm2")
    tokens = np.random.default_rng(1).integers(0, slow.config.vocab_size, (NUM_SEQUENCES, LENGTH))
    kv = PagedKV(slow.config, NUM_SEQUENCES * 5, torch.float32, "cpu", transposed=True)
    whole = logits_of(slow, kv, [(0, 0, 40)], tokens)
    pieces = torch.cat([logits_of(slow, kv, [(0, i, 1)], tokens) for i in range(40)])
    assert not torch.equal(whole, pieces)


def test_attention_is_causal(gen: torch.Generator) -> None:
    """Also if later values are infinite, where a weight of zero would not be enough."""
    config = tiny_config(num_layers=1, num_heads=6, num_kv_heads=2)
    q, k, v = (torch.randn(20, heads, config.head_dim, generator=gen) for heads in (6, 2, 2))

    def attend(v: Tensor) -> Tensor:
        kv = fill_with_nan(PagedKV(config, 20, torch.float32, "cpu", transposed=True))
        plan = plan_of([(0, 0, 20)], np.zeros((1, 20), np.int64))
        return kernels.NativePagedAttention(kv, plan)(0, q, k, v)

    infinite = v.clone()
    infinite[12:] = torch.inf
    assert torch.equal(attend(infinite)[:12], attend(v)[:12])
    assert not torch.equal(attend(infinite)[12:], attend(v)[12:])


def test_attention_takes_separate_tensors_and_many_tiles(gen: torch.Generator) -> None:
    """Long and short rows with many heads; q, k and v are contiguous tensors."""
    config = tiny_config(num_layers=2, num_heads=8, num_kv_heads=1, head_dim=20)
    plan = plan_of([(2, 0, 66), (0, 0, 1), (1, 0, 17)], np.zeros((NUM_SEQUENCES, LENGTH), np.int64))
    q, k, v = (torch.randn(84, heads, 20, generator=gen) for heads in (8, 1, 1))
    slow, fast = (PagedKV(config, NUM_SEQUENCES * 5, torch.float32, "cpu", transposed=True) for _ in range(2))
    want, got = PagedAttention(slow, plan)(1, q, k, v), kernels.NativePagedAttention(fast, plan)(1, q, k, v)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(slow.k, fast.k) and torch.equal(slow.v, fast.v)


# ---- noise and sampling ----


def philox_numpy(counter: list[int], key: list[int]) -> list[int]:
    """Salmon et al. 2011, straight from the paper: Philox4x32-10."""
    c, k = [int(x) for x in counter], [int(x) for x in key]
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(second >> 32) ^ c[1] ^ k[0], second & 0xFFFFFFFF, (first >> 32) ^ c[3] ^ k[1], first & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_philox_known_answers() -> None:
    """The published vectors, and the words of our (key, position, stream)."""
    ones = 0xFFFFFFFF
    assert philox_numpy([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox_numpy([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    keys = np.array([0, 2**64 - 1, 0x0123456789ABCDEF], np.uint64)
    positions = np.array([0, -1, (3 << 32) + 5], np.int64)
    for stream in (0, 3, ones):
        words = [
            philox_numpy([0, int(p) & ones, stream, (int(p) >> 32) & ones], [int(k) & ones, int(k) >> 32])[0]
            for k, p in zip(keys, positions, strict=True)
        ]
        assert kernels.uniform(keys, positions, stream).tolist() == [(word + 0.5) / 2**32 for word in words]


def arrays(num: int, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingArrays:
    values = zip((temperature, top_k, top_p, min_p), (np.float64, np.int32, np.float64, np.float64), strict=True)
    return SamplingArrays(*(np.full(num, value, dtype) for value, dtype in values))


def native_draw(logits: Tensor, keys: np.ndarray, positions: np.ndarray, p: SamplingArrays, stream: int = 0):
    return kernels.draw(logits, keys, positions, p, stream, margins=True)


@pytest.mark.parametrize("vocab", [3, 64, 1000, 1025])
def test_race_is_the_full_race(vocab: int, gen: torch.Generator) -> None:
    """Peaked, flat and sparse weights; the lazy race must not lose a single winner."""
    rng = np.random.default_rng(0)
    weights = (torch.randn(300, vocab, generator=gen) * torch.rand(300, 1, generator=gen) * 8).exp()
    weights[torch.rand(300, vocab, generator=gen) < 0.3] = 0
    weights[:, -1] += 1e-6
    keys, positions = rng.integers(0, 2**64, 300, np.uint64), rng.integers(0, 2**40, 300)
    assert np.array_equal(kernels.race(weights, keys, positions, 2), PhiloxNoise().race(weights, keys, positions, 2))


def test_ties_go_to_the_lower_token() -> None:
    logits = torch.zeros(1, 200)
    logits[0, [70, 7, 130]] = 3.0
    keys, positions = np.array([5], np.uint64), np.array([9])
    assert native_draw(logits, keys, positions, arrays(1, 0.0))[0] == 7
    # Of three equal tokens a nucleus of a half holds the first two.
    drawn = {
        int(native_draw(logits, np.array([key], np.uint64), positions, arrays(1, 0.01, top_p=0.5))[0][0])
        for key in range(40)
    }
    assert drawn == {7, 70}


PARAMETERS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.0, "top_k": 5000},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 1.3, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 12.0])
def test_draw_equals_torch(parameters: dict, spread: float, gen: torch.Generator) -> None:
    rng = np.random.default_rng(1)
    logits = torch.randn(48, 1001, generator=gen) * spread
    logits[:, 17] = -torch.inf
    keys, positions = rng.integers(0, 2**64, 48, np.uint64), rng.integers(0, 10_000, 48)
    p = arrays(48, **parameters)
    want = Sampler().draw(logits.double(), keys, positions, p, margins=True)
    tokens, logprobs, raw, margins = native_draw(logits, keys, positions, p)
    # The last bit of a float32 may decide a truncation or a race, but in none of these 48 rows.
    assert np.array_equal(tokens, want.tokens)
    np.testing.assert_allclose(logprobs, want.logprobs, atol=3e-5)
    np.testing.assert_allclose(raw, want.raw_logprobs, atol=3e-5)
    np.testing.assert_allclose(margins, want.margins, atol=3e-5)
    without = kernels.draw(logits, keys, positions, p, 0, margins=False)
    assert all(np.array_equal(a, b) for a, b in zip(without, (tokens, logprobs, raw), strict=True))


def test_draw_is_batch_invariant(gen: torch.Generator) -> None:
    rng = np.random.default_rng(2)
    logits = torch.randn(40, 3000, generator=gen) * 4
    keys, positions = rng.integers(0, 2**64, 40, np.uint64), rng.integers(0, 10_000, 40)
    mixed = SamplingArrays(
        rng.choice([0, 0.7, 1], 40),
        rng.choice([0, 10], 40).astype(np.int32),
        rng.choice([1, 0.9], 40),
        rng.choice([0, 0.1], 40),
    )
    together = native_draw(logits, keys, positions, mixed)
    for i in range(40):
        one = SamplingArrays(*(getattr(mixed, name)[i : i + 1] for name in ("temperature", "top_k", "top_p", "min_p")))
        alone = native_draw(logits[i : i + 1], keys[i : i + 1], positions[i : i + 1], one)
        assert [a[0] for a in alone] == [t[i] for t in together]


def test_noise_words_reach_every_token() -> None:
    """With two tokens of equal weight, the one with the smaller word of philox_words is drawn."""
    vocab, keys, positions = 150, np.array([77], np.uint64), np.array([(2 << 32) + 11])
    words = philox_words(keys, positions, 1, vocab, torch.device("cpu"))[0]
    for a in range(0, vocab, 7):
        b = (a + 64) % vocab
        weights = torch.zeros(1, vocab)
        weights[0, [a, b]] = 1.0
        assert kernels.race(weights, keys, positions, 1)[0] == (a if words[a] < words[b] else b)


def test_openmp_is_shared_with_torch() -> None:
    """One OpenMP runtime in the process: with two, two thread pools would spin against each other."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc here")
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if re.search("lib(g|i)?omp", line)}
    assert len(runtimes) <= 1, runtimes
