"""The learner on a CUDA device: the CPU's numbers in float64, bfloat16 with float32 masters, the same bits again;
attention in one kernel, a head without all logits, weights that stay on the device, memory that changes hands."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_decoder
from torch import Tensor

from paceline.config import LearnerSection
from paceline.engine.engine import LocalEngine
from paceline.model.attention import Attention, PackedAttention, VarlenAttention, has_varlen
from paceline.model.paged import PagedDecoder
from paceline.model.weights import assign, checksum
from paceline.rl import head
from paceline.rl.batch import TokenBatch, scored
from paceline.rl.learner import Learner
from paceline.rl.loop import asleep
from paceline.types import Group, Request, Rollout, SamplingParams

pytestmark = pytest.mark.gpu


@dataclass(slots=True)
class Loss:
    loss: Tensor
    stats: dict[str, float]


def loss(batch: TokenBatch, logprobs_T: Tensor) -> Loss:
    token_T = batch.reward_S[batch.sequence_T] * logprobs_T * batch.mask_T
    return Loss(-token_T.mean(), {"tokens": float(batch.mask_T.sum())})


def groups(seed: int = 0) -> list[Group]:
    dice = np.random.default_rng(seed)

    def rollout(prompt: tuple[int, ...], num: int) -> Rollout:
        return Rollout(
            sample=0,
            prompt_ids=prompt,
            token_ids=dice.integers(0, 60, num).astype(np.int32),
            mask=np.ones(num, bool),
            logprobs=np.zeros(num),
            versions=np.zeros(num, np.int32),
            provenance=np.zeros(num, np.uint8),
            sources=np.full(num, 255, np.uint8),
            drafters=(),
            finish_reason="stop",
            reward=float(dice.normal()),
        )

    made = []
    for index in range(3):
        prompt = tuple(dice.integers(0, 60, dice.integers(1, 30)).tolist())
        made.append(Group(index, str(index), "", [rollout(prompt, int(n)) for n in dice.integers(1, 40, 5)]))
    return made


def learner(device: str, dtype: torch.dtype, **settings: Any) -> Learner:
    settings = {"learning_rate": 1e-2, "tokens_per_microbatch": 150, **settings}
    return Learner(tiny_decoder(dtype).to(device), LearnerSection(**settings), num_steps=5, keep_reference=True)


def train(it: Learner, num_updates: int = 3) -> list[float]:
    return [it.update(scored(g), TokenBatch.of(g), loss).loss for g in map(groups, range(num_updates))]


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 3}, {"activation_checkpointing": True}], ids=str)
def test_float64_is_the_cpus(settings: dict[str, Any]) -> None:
    cpu, cuda = (learner(device, torch.float64, **settings) for device in ("cpu", "cuda"))
    rollouts = scored(groups())
    torch.testing.assert_close(cuda.logprobs(rollouts), cpu.logprobs(rollouts), rtol=0, atol=1e-10)
    assert train(cuda) == pytest.approx(train(cpu), abs=1e-8)
    for (name, mine), (_, theirs) in zip(cuda.weights(), cpu.weights(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=0, atol=1e-5, msg=name)
    torch.testing.assert_close(cuda.reference_logprobs(rollouts), cpu.reference_logprobs(rollouts), rtol=0, atol=1e-10)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bfloat16_with_masters_repeats_and_restores(optimizer: str) -> None:
    straight, again, half = (learner("cuda", torch.bfloat16, optimizer=optimizer) for _ in range(3))
    assert train(straight, 4) == train(again, 4)
    train(half, 2)
    saved = {name: tensor.cpu().clone() for name, tensor in half.state().items()}
    resumed = learner("cuda", torch.bfloat16, optimizer=optimizer)
    resumed.restore(saved)
    for g in (groups(2), groups(3)):
        resumed.update(scored(g), TokenBatch.of(g), loss)
    for one in (again, resumed):
        state = one.state()
        assert all(torch.equal(tensor, state[name]) for name, tensor in straight.state().items())
    for name, master in straight.optimizer.masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), straight.optimizer.parameters[name])


def test_bfloat16_logprobs_are_near_float64s() -> None:
    rollouts = scored(groups())
    exact = learner("cpu", torch.float64).logprobs(rollouts)
    near = learner("cuda", torch.bfloat16).logprobs(rollouts)
    assert near.dtype == torch.float64 and near.device.type == "cpu"
    assert (near - exact).abs().median() < 0.15 < exact.std()


# ---- attention in one kernel ----

SHARED = [37, 200, 1, 90, 130, 129, 64, 255], [None, 0, 0, 0, None, 4, 4, 4]
ALONE = [300, 1, 127, 128, 17], None


def attend(attention: Attention, fused: Tensor, heads: list[int], weight: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v, which are views of one tensor, as a decoder's v is."""
    qkv = fused.clone().requires_grad_(True).split(heads, 1)
    out = attention(0, *qkv)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), qkv)]


def relative(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 128), (4, 4, 8)], ids=str)
@pytest.mark.parametrize("lengths, prefixes", [SHARED, ALONE], ids=["shared", "alone"])
def test_varlen_is_packed(lengths: list[int], prefixes: list[int | None] | None, heads: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, head_dim = heads
    assert has_varlen(torch.device("cuda"), torch.bfloat16, head_dim)
    noise = torch.Generator("cuda").manual_seed(0)
    make = partial(torch.randn, device="cuda", generator=noise)
    total = sum(lengths)
    split = [num_heads, num_kv_heads, num_kv_heads]
    fused, weight = make(total, sum(split), head_dim).bfloat16(), make(total, num_heads * head_dim).bfloat16()
    mine = attend(VarlenAttention(lengths, prefixes, "cuda"), fused, split, weight)
    theirs = attend(PackedAttention(lengths, prefixes), fused, split, weight)
    exact = attend(PackedAttention(lengths, prefixes), fused.double(), split, weight.double())
    for name, a, b, c in zip(("out", "q", "k", "v"), mine, theirs, exact, strict=True):
        assert relative(a, b) < 2e-2, (name, relative(a, b))
        assert relative(a, c) < 2e-2, (name, relative(a, c), relative(b, c))
    if prefixes is not None:  # and who does not see its prompt is caught
        blind = attend(VarlenAttention(lengths, None, "cuda"), fused, split, weight)
        assert all(relative(a, c) > 0.1 for a, c in zip(blind, exact, strict=True))


@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}], ids=str)
def test_varlen_gradients_are_as_near_as_packed_ones(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    made = groups()
    section = LearnerSection(tokens_per_microbatch=10_000, **settings)

    class Seen(VarlenAttention):
        def __call__(self, layer: int, *qkv: Tensor) -> Tensor:
            used.append(layer)
            return super().__call__(layer, *qkv)

    def gradient(dtype: torch.dtype) -> Tensor:
        it = Learner(tiny_decoder(torch.bfloat16).to("cuda", dtype), section, num_steps=5)
        it._backward(scored(made), TokenBatch.of(made), loss, None)
        return torch.cat([master.grad.flatten() for master in it.optimizer.masters.values()])

    monkeypatch.setattr("paceline.model.decoder.VarlenAttention", Seen)
    exact = gradient(torch.float64)
    assert not used
    mine = gradient(torch.bfloat16)
    assert set(used) == {0, 1, 2}
    monkeypatch.setattr("paceline.model.decoder.has_varlen", lambda *_: False)
    theirs = gradient(torch.bfloat16)
    assert mine.dtype == theirs.dtype == torch.float32
    assert relative(mine, exact) < 1.5 * relative(theirs, exact) + 0.02, (
        relative(mine, exact),
        relative(theirs, exact),
    )


# ---- the head ----


def test_head_never_holds_all_logits() -> None:
    vocab_size, num = 151_936, 8192
    decoder = tiny_decoder(torch.bfloat16, vocab_size=vocab_size).to("cuda").requires_grad_(True)
    noise = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(num, 32, device="cuda", generator=noise).bfloat16().requires_grad_(True)
    target = torch.randint(0, vocab_size, (num,), device="cuda", generator=noise)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, _ = head.logprobs(decoder, hidden, target)
    logprobs.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2e9 < num * vocab_size * 4, peak  # a chunk's few, and the half GB that is kept
    assert hidden.grad is not None and hidden.grad.isfinite().all()
    first = slice(0, head.CHUNK)
    exact = decoder.logits(hidden[first]).double().log_softmax(-1).gather(1, target[first, None]).squeeze(1)
    assert (logprobs[first] - exact).abs().max() < 1e-5  # float32 sums of 151,936 weights


# ---- weights and memory ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("size", [0, 1, (1 << 16) - 1, 5 * (1 << 16) + 13, 130 * (1 << 16) + 1])
def test_checksum_is_the_cpus(dtype: torch.dtype, size: int) -> None:
    noise = torch.Generator().manual_seed(size)
    tensor = torch.randint(-128, 128, (size,), generator=noise).to(dtype)
    assert checksum([("a", tensor.cuda())]) == checksum([("a", tensor)])


def test_checksum_of_many_waits_once() -> None:
    matrix = torch.randn(300, 700).bfloat16()
    pairs = [(str(i), matrix[i:].T) for i in range(50)]  # of any layout
    on_device = [(name, tensor.cuda().T.contiguous().T) for name, tensor in pairs]
    assert checksum(on_device) == checksum(pairs)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            checksum(on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) <= 1, [str(w.message) for w in waits]


def test_new_weights_stay_on_the_device() -> None:
    it = learner("cuda", torch.bfloat16)
    engine = LocalEngine(PagedDecoder(tiny_decoder(torch.bfloat16).to("cuda"), 64))
    places = [parameter.data_ptr() for parameter in engine.paged.decoder.parameters()]
    train(it, 1)
    receipt = engine.update_weights(it.weights(), 1)
    assert receipt.checksum == checksum(it.weights()) == checksum((n, t.cpu()) for n, t in it.weights())
    assert places == [parameter.data_ptr() for parameter in engine.paged.decoder.parameters()]
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            assign(engine.paged.decoder, it.weights())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not waits, [str(w.message) for w in waits]


def test_the_kvs_memory_is_the_learners_while_it_trains() -> None:
    engine = LocalEngine(PagedDecoder(tiny_decoder(torch.float32).to("cuda"), 1 << 14))
    requests = [Request(i, (1, 2, 3 + i), SamplingParams(max_tokens=20), 7 * i, str(i)) for i in range(4)]
    first = [c.token_ids.tolist() for c in engine.generate(requests)]
    assert engine.paged.kv is not None
    num_bytes = engine.paged.kv.k.nbytes + engine.paged.kv.v.nbytes
    assert num_bytes > 1 << 26
    awake = torch.cuda.memory_allocated()
    with asleep(engine):
        assert awake - torch.cuda.memory_allocated() >= num_bytes
    assert abs(torch.cuda.memory_allocated() - awake) < num_bytes // 8
    assert [c.token_ids.tolist() for c in engine.generate(requests)] == first
