"""The learner on a CUDA device: the CPU's results in float64; reproducible bfloat16 training with float32 master
weights; varlen attention; logprobs without all logits in memory; weight updates on the device; sleep mode."""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_decoder
from torch import Tensor, distributed

from paceline.build.config import load_config
from paceline.build.learner import load_policy, use_train_kernels
from paceline.config import LearnerSection
from paceline.engine.engine import LocalEngine
from paceline.model.attention import Attention, PackedAttention, VarlenAttention, has_varlen
from paceline.model.layer import Lora
from paceline.model.paged import PagedDecoder
from paceline.model.sharding import shard
from paceline.model.weights import assign, checksum, save
from paceline.rl import logprobs as logprobs_module
from paceline.rl.batch import TokenBatch, scored
from paceline.rl.learner import Learner
from paceline.rl.trainer import sleep_mode
from paceline.rl.worker_group import WorkerGroup
from paceline.types import Group, Request, Rollout, SamplingParams

pytestmark = pytest.mark.gpu


@dataclass(slots=True)
class Loss:
    loss: Tensor
    stats: dict[str, float]


def loss(batch: TokenBatch, logprobs_T: Tensor) -> Loss:
    token_T = batch.reward_S[batch.sequence_T] * logprobs_T * batch.mask_T
    return Loss(-token_T.mean(), {"num_tokens": float(batch.mask_T.sum())})


def groups(seed: int = 0) -> list[Group]:
    rng = np.random.default_rng(seed)

    def rollout(prompt: tuple[int, ...], num: int) -> Rollout:
        return Rollout(
            sample=0,
            prompt_ids=prompt,
            token_ids=rng.integers(0, 60, num).astype(np.int32),
            mask=np.ones(num, bool),
            logprobs=np.zeros(num),
            versions=np.zeros(num, np.int32),
            provenance=np.zeros(num, np.uint8),
            sources=np.full(num, 255, np.uint8),
            drafters=(),
            finish_reason="stop",
            reward=float(rng.normal()),
        )

    made = []
    for index in range(3):
        prompt = tuple(rng.integers(0, 60, rng.integers(1, 30)).tolist())
        made.append(Group(index, str(index), "", [rollout(prompt, int(n)) for n in rng.integers(1, 40, 5)]))
    return made


def learner(device: str, dtype: torch.dtype, **settings: Any) -> Learner:
    settings = {"learning_rate": 1e-2, "tokens_per_microbatch": 150, **settings}
    return Learner(tiny_decoder(dtype).to(device), LearnerSection(**settings), num_steps=5, keep_reference=True)


def train(trained: Learner, num_updates: int = 3) -> list[float]:
    return [trained.update(scored(g), TokenBatch.of(g), loss).loss for g in map(groups, range(num_updates))]


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 3}, {"activation_checkpointing": True}], ids=str)
def test_float64_results_equal_the_cpus(settings: dict[str, Any]) -> None:
    cpu, cuda = (learner(device, torch.float64, **settings) for device in ("cpu", "cuda"))
    rollouts = scored(groups())
    torch.testing.assert_close(cuda.logprobs(rollouts), cpu.logprobs(rollouts), rtol=0, atol=1e-10)
    assert train(cuda) == pytest.approx(train(cpu), abs=1e-8)
    for (name, found), (_, expected) in zip(cuda.weights(), cpu.weights(), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-5, msg=name)
    torch.testing.assert_close(cuda.reference_logprobs(rollouts), cpu.reference_logprobs(rollouts), rtol=0, atol=1e-10)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bfloat16_with_master_weights_is_reproducible_and_resumes(optimizer: str) -> None:
    first, second, saved_half = (learner("cuda", torch.bfloat16, optimizer=optimizer) for _ in range(3))
    assert train(first, 4) == train(second, 4)
    train(saved_half, 2)
    saved = {name: tensor.cpu().clone() for name, tensor in saved_half.state_dict().items()}
    resumed = learner("cuda", torch.bfloat16, optimizer=optimizer)
    resumed.load_state_dict(saved)
    for g in (groups(2), groups(3)):
        resumed.update(scored(g), TokenBatch.of(g), loss)
    for other in (second, resumed):
        state = other.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in first.state_dict().items())
    for name, master in first.optimizer.masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), first.optimizer.parameters[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_an_optimizer_step_that_is_not_finite_is_skipped(bad: str, dtype: torch.dtype) -> None:
    it = learner("cuda", dtype)
    train(it, 1)
    before = {name: tensor.clone() for name, tensor in it.optimizer.state_dict().items()}

    def not_finite(part: TokenBatch, logprobs_T: Tensor) -> Loss:
        wrong = (logprobs_T * torch.nan).sum() if bad == "loss" else (logprobs_T - logprobs_T.detach()).sqrt().sum()
        return Loss(wrong, {"num_tokens": float(part.mask_T.sum())})

    report = it.update(scored(groups()), TokenBatch.of(groups()), not_finite)
    assert report.num_optimizer_steps == 0 and len(report.skipped) == it.num_skipped_in_a_row == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in it.optimizer.state_dict().items())
    assert it.update(scored(groups()), TokenBatch.of(groups()), loss).num_optimizer_steps == 1


def test_a_bfloat16_shard_is_float32_and_computes_as_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 with NCCL, over one rank: it casts, gathers and reduces as with several."""
    used = []

    class Recorded(VarlenAttention):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            used.append(args)

    def trained(worker_group: WorkerGroup) -> Learner:
        decoder = tiny_decoder(torch.bfloat16, head_dim=16).to("cuda")
        use_train_kernels(decoder)
        section = LearnerSection(learning_rate=1e-2, tokens_per_microbatch=150, max_grad_norm=1e9)
        it = Learner(decoder, section, num_steps=5, worker_group=worker_group)
        train(it, 2)
        return it

    class OneRank(WorkerGroup):
        def shard(self, model: Any, blocks: Any) -> None:
            shard(model, blocks, self.device)

    monkeypatch.setattr("paceline.model.decoder.VarlenAttention", Recorded)
    plain = trained(WorkerGroup())
    num_used = len(used)
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        sharded = trained(OneRank(device="cuda"))
        assert len(used) == 2 * num_used > 0
        assert {p.dtype for p in sharded.decoder.parameters()} == {torch.float32}
        found = dict(sharded.weights())
    finally:
        distributed.destroy_process_group()
    for name, tensor in plain.weights():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], tensor), name


def test_bfloat16_logprobs_are_close_to_float64() -> None:
    rollouts = scored(groups())
    exact = learner("cpu", torch.float64).logprobs(rollouts)
    rounded = learner("cuda", torch.bfloat16).logprobs(rollouts)
    assert rounded.dtype == torch.float64 and rounded.device.type == "cpu"
    assert (rounded - exact).abs().median() < 0.15 < exact.std()


# ---- varlen attention ----

SHARED = [37, 200, 1, 90, 130, 129, 64, 255], [None, 0, 0, 0, None, 4, 4, 4]
NOT_SHARED = [300, 1, 127, 128, 17], None


def attend(attention: Attention, fused: Tensor, heads: list[int], weight: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v, which are views of one tensor, as v is in a decoder."""
    qkv = fused.clone().requires_grad_(True).split(heads, 1)
    out = attention(0, *qkv)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), qkv)]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 128), (4, 4, 8)], ids=str)
@pytest.mark.parametrize("lengths, prefixes", [SHARED, NOT_SHARED], ids=["shared", "not shared"])
def test_varlen_equals_packed(
    lengths: list[int], prefixes: list[int | None] | None, heads: tuple[int, int, int]
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    assert has_varlen(torch.device("cuda"), torch.bfloat16, head_dim)
    noise = torch.Generator("cuda").manual_seed(0)
    make = partial(torch.randn, device="cuda", generator=noise)
    total = sum(lengths)
    split = [num_heads, num_kv_heads, num_kv_heads]
    fused, weight = make(total, sum(split), head_dim).bfloat16(), make(total, num_heads * head_dim).bfloat16()
    varlen = attend(VarlenAttention(lengths, prefixes, "cuda"), fused, split, weight)
    packed = attend(PackedAttention(lengths, prefixes), fused, split, weight)
    exact = attend(PackedAttention(lengths, prefixes), fused.double(), split, weight.double())
    for name, a, b, c in zip(("out", "q", "k", "v"), varlen, packed, exact, strict=True):
        assert relative_error(a, b) < 2e-2, (name, relative_error(a, b))
        assert relative_error(a, c) < 2e-2, (name, relative_error(a, c), relative_error(b, c))
    if prefixes is not None:  # broken: sequences that do not attend to their prefix
        broken = attend(VarlenAttention(lengths, None, "cuda"), fused, split, weight)
        assert all(relative_error(a, c) > 0.1 for a, c in zip(broken, exact, strict=True))


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"family": "qwen2", "qkv_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": True, "tie_embeddings": False},
}


@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}, {"lora_rank": 3}], ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["torch", "fused kernels"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_in_bfloat16_are_as_exact_as_plain_torchs(
    model: str, fused: bool, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a whole learner: with varlen attention and TorchOps or TrainOps, against PackedAttention and TorchOps."""
    used: list[torch.dtype] = []
    made = groups()
    section = LearnerSection(tokens_per_microbatch=150, **settings)

    class Recorded(VarlenAttention):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            used.append(torch.bfloat16)

    def gradient(dtype: torch.dtype, fused: bool) -> Tensor:
        decoder = tiny_decoder(torch.bfloat16, head_dim=16, **MODELS[model]).to("cuda", dtype)
        if fused:
            use_train_kernels(decoder)
        assert decoder.ops.is_cuda == fused
        trained = Learner(decoder, section, num_steps=5)
        noise = torch.Generator().manual_seed(1)
        for lora in (module for module in decoder.modules() if isinstance(module, Lora)):  # the same in every dtype
            lora.down.data.copy_(lora.down.data.bfloat16())
            lora.up.data.copy_(torch.randn(lora.up.shape, generator=noise).bfloat16() / 8)
        trained._backward(scored(made), TokenBatch.of(made), loss, None)
        gradients = [master.grad for master in trained.optimizer.masters.values()]
        return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])

    monkeypatch.setattr("paceline.model.decoder.VarlenAttention", Recorded)
    exact = gradient(torch.float64, False)
    assert not used
    found = gradient(torch.bfloat16, fused)
    assert len(used) >= 2, "several microbatches"
    monkeypatch.setattr("paceline.model.decoder.has_varlen", lambda *_: False)
    packed = gradient(torch.bfloat16, False)
    assert found.dtype == packed.dtype == torch.float32 and found.shape == exact.shape
    errors = relative_error(found, exact), relative_error(packed, exact)
    assert errors[0] < 1.5 * errors[1] + 0.02, errors


# ---- logprobs ----


# With 15,000 rows, an index into all probabilities needs more than 31 bits.
@pytest.mark.parametrize(("num", "fused"), [(8192, False), (8192, True), (15_000, True)])
def test_logprobs_do_not_store_all_logits(num: int, fused: bool) -> None:
    vocab_size = 151_936
    decoder = tiny_decoder(torch.bfloat16, vocab_size=vocab_size, head_dim=16).to("cuda").requires_grad_(True)
    if fused:
        use_train_kernels(decoder)
    noise = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(num, 32, device="cuda", generator=noise).bfloat16().requires_grad_(True)
    target = torch.randint(0, vocab_size, (num,), device="cuda", generator=noise)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, _ = logprobs_module.token_logprobs(decoder, hidden, target)
    logprobs.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    # The logits of a chunk, and half a GB of probabilities; the fused kernels keep all of them, in 16 bits.
    limit = logprobs_module.CUDA_CHUNK_BYTES + num * vocab_size * 2 + 300e6 if fused else 2e9
    assert peak < limit < num * vocab_size * 4, peak
    assert hidden.grad is not None and hidden.grad.isfinite().all()
    weight = decoder.embed.weight
    assert weight is not None
    with torch.no_grad():
        for rows in (slice(0, 256), slice(num - 256, num)):
            exact = (hidden[rows].double() @ weight.double().T).log_softmax(-1)
            found = logprobs[rows] - exact.gather(1, target[rows, None]).squeeze(1)
            assert found.abs().max() < 1e-4  # float32 sums of 151,936 weights
            exact_grad = weight[target[rows]].double() - exact.exp() @ weight.double()
            assert relative_error(hidden.grad[rows], exact_grad) < 1e-2


# ---- weights and memory ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("size", [0, 1, (1 << 16) - 1, 5 * (1 << 16) + 13, 130 * (1 << 16) + 1])
def test_checksum_equals_the_cpus(dtype: torch.dtype, size: int) -> None:
    noise = torch.Generator().manual_seed(size)
    tensor = torch.randint(-128, 128, (size,), generator=noise).to(dtype)
    assert checksum([("a", tensor.cuda())]) == checksum([("a", tensor)])


def test_checksum_of_many_tensors_synchronizes_once() -> None:
    matrix = torch.randn(300, 700).bfloat16()
    pairs = [(str(i), matrix[i:].T) for i in range(50)]  # not contiguous
    on_device = [(name, tensor.cuda().T.contiguous().T) for name, tensor in pairs]
    assert checksum(on_device) == checksum(pairs)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as syncs:
            warnings.simplefilter("always")
            checksum(on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(syncs) <= 1, [str(w.message) for w in syncs]


def test_weight_updates_stay_on_the_device() -> None:
    trained = learner("cuda", torch.bfloat16)
    engine = LocalEngine(PagedDecoder(tiny_decoder(torch.bfloat16).to("cuda"), 64))
    pointers = [parameter.data_ptr() for parameter in engine.paged.decoder.parameters()]
    train(trained, 1)
    receipt = engine.update_weights(trained.weights(), 1)
    assert receipt.checksum == checksum(trained.weights()) == checksum((n, t.cpu()) for n, t in trained.weights())
    assert pointers == [parameter.data_ptr() for parameter in engine.paged.decoder.parameters()]
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as syncs:
            warnings.simplefilter("always")
            assign(engine.paged.decoder, trained.weights())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not syncs, [str(w.message) for w in syncs]


def test_sleep_mode_frees_the_kv_memory() -> None:
    engine = LocalEngine(PagedDecoder(tiny_decoder(torch.float32).to("cuda"), 1 << 14))
    requests = [Request(i, (1, 2, 3 + i), SamplingParams(max_tokens=20), 7 * i, str(i)) for i in range(4)]
    first = [c.token_ids.tolist() for c in engine.generate(requests)]
    assert engine.paged.kv is not None
    num_bytes = engine.paged.kv.k.nbytes + engine.paged.kv.v.nbytes
    assert num_bytes > 1 << 26
    gc.collect()  # what earlier tests left must not be freed in between
    before = torch.cuda.memory_allocated()
    reserved = torch.cuda.memory_reserved()
    with sleep_mode(engine):
        assert before - torch.cuda.memory_allocated() >= num_bytes
        assert reserved - torch.cuda.memory_reserved() >= num_bytes // 2  # what is left shares segments with others
    assert abs(torch.cuda.memory_allocated() - before) < num_bytes // 8
    assert [c.token_ids.tolist() for c in engine.generate(requests)] == first


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_on_a_second_gpu(tmp_path: Path) -> None:
    """Triton launches kernels on the current device."""
    save(tiny_decoder(torch.float32, head_dim=16), tmp_path)
    try:
        config = load_config(None, ["model.device=cuda:1", "model.dtype=bfloat16"])
        decoder = load_policy(config, tmp_path, "cuda:1")
        assert torch.cuda.current_device() == 1
        section = LearnerSection(tokens_per_microbatch=150)
        trained = Learner(decoder, section, num_steps=5)
        assert train(trained, 2) == train(Learner(load_policy(config, tmp_path, "cuda:0"), section, num_steps=5), 2)
    finally:
        torch.cuda.set_device(0)
