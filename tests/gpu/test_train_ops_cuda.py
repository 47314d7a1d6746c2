"""TrainOps, the fused kernels of the learner: outputs and gradients equal those of TorchOps. In float64 up to rounding;
in bfloat16 their error against float64 is at most 1.5 times that of TorchOps. They also run in Triton's interpreter,
without a GPU: TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support import tiny_config
from torch import Tensor
from torch.nn import functional as F

from paceline.model.attention import PackedAttention, VarlenAttention
from paceline.model.decoder import Decoder
from paceline.model.flash import Segments
from paceline.model.layer import Lora, LoraPart, init_random
from paceline.model.ops import Ops, TorchOps
from paceline.rl import logprobs
from paceline.rl.logprobs import token_logprobs

train_ops = pytest.importorskip("paceline.model.cuda.train_ops", reason="needs triton")
softmax = pytest.importorskip("paceline.model.cuda.softmax", reason="needs triton")

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FACTOR = 1.5 if DEVICE == "cuda" else 4  # the interpreter truncates instead of rounding
SHARED = [5, 3, 1, 4, 2, 2, 6], [None, 0, 0, None, 3, 3, 3]
NOT_SHARED = [5, 1, 7], None
Function = Callable[..., Sequence[Tensor]]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(
        DEVICE, dtype
    )


def results(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of all inputs for a random linear function of the outputs."""
    leaves = [x.clone().requires_grad_(True) for x in inputs]
    outs = function(*leaves)
    total = sum((out.double() * noise(*out.shape, seed=i)).sum() for i, out in enumerate(outs))
    assert isinstance(total, Tensor)
    return [*(out.detach() for out in outs), *torch.autograd.grad(total, leaves)]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def check(fused: Function, plain: Function, inputs: Sequence[Tensor], wide: Sequence[int] = ()) -> None:
    """`wide`: the inputs that are never rounded to 16 bits, as the residual stream."""
    inputs = [x.double() for x in inputs]
    exact = results(plain, inputs)
    for found, expected in zip(results(fused, inputs), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    rounded = [x.float() if i in wide else x.bfloat16() for i, x in enumerate(inputs)]
    exact = results(plain, [x.double() for x in rounded])
    for found, other, expected in zip(results(fused, rounded), results(plain, rounded), exact, strict=True):
        assert found.dtype == other.dtype and found.shape == other.shape
        assert relative_error(found, expected) <= FACTOR * relative_error(other, expected) + 1e-7


def broken(fused: Function, plain: Function, inputs: Sequence[Tensor]) -> bool:
    try:
        check(fused, plain, inputs)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("shape", [(1, 8), (19, 48), (300, 128)], ids=str)
def test_norms(shape: tuple[int, int]) -> None:
    x, y, weight = noise(*shape), noise(*shape, seed=1), noise(shape[1], seed=2)
    fused, plain = train_ops.TrainOps(), TorchOps()
    check(lambda *t: [fused.norm(*t, 1e-5)], lambda *t: [plain.norm(*t, 1e-5)], [x, weight], wide=[0])
    add_norm: dict[Any, Function] = {ops: (lambda *t, ops=ops: ops.add_norm(*t, 1e-5)) for ops in (fused, plain)}
    check(add_norm[fused], add_norm[plain], [x, y, weight], wide=[0])
    check(lambda *t: add_norm[fused](*t)[1:], lambda *t: add_norm[plain](*t)[1:], [x, y, weight], wide=[0])
    not_contiguous = {ops: (lambda x, weight, ops=ops: [ops.norm(x.T, weight, 1e-5)]) for ops in (fused, plain)}
    check(not_contiguous[fused], not_contiguous[plain], [x.T, weight], wide=[0])
    assert broken(lambda *t: fused.add_norm(*t, 1e-4), add_norm[plain], [x, y, weight])


@pytest.mark.parametrize("rank, only_up", [(0, False), (4, False), (4, True)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens, size", [(1, 8), (19, 24), (3, 1250)])
def test_mlp(num_tokens: int, size: int, bias: bool, rank: int, only_up: bool) -> None:
    """gate_up and down, both with bias and adapters if there are any. `only_up`: gate has none."""
    layer = Decoder(tiny_config(intermediate_size=size, mlp_bias=bias)).layers[0].to(DEVICE)
    linears = layer.gate_up, layer.down
    for linear in linears if rank else ():
        whole = [LoraPart(0, linear.num_out)]
        parts = whole if linear is layer.down else [LoraPart(0, size), LoraPart(size, size)][only_up:]
        linear.lora = Lora(linear.num_in, parts, rank, 0.7).to(DEVICE)
    parameters = [(module, name) for linear in linears for module in linear.modules() for name in module._parameters]
    parameters = [(module, name) for module, name in parameters if getattr(module, name) is not None]
    trained = [pair for pair in parameters if not rank or isinstance(pair[0], Lora)]
    shapes = {pair: getattr(*pair).shape for pair in parameters}
    frozen = {pair: noise(*shapes[pair], seed=3) / 3 for pair in parameters if pair not in trained}
    for module, name in parameters:  # plain attributes, so that they can be tensors with a history
        del module._parameters[name]

    def apply(ops: Ops) -> Function:
        def function(h: Tensor, *values: Tensor) -> list[Tensor]:
            for (module, name), value in zip(trained, values, strict=True):
                module.__dict__[name] = value
            for (module, name), value in frozen.items():
                module.__dict__[name] = value.bfloat16().to(h.dtype)
            return [ops.mlp(h, layer)]

        return function

    inputs = [noise(num_tokens, 32), *(noise(*shapes[pair], seed=i) / 3 for i, pair in enumerate(trained))]
    fused, plain = train_ops.TrainOps(), TorchOps()
    check(apply(fused), apply(plain), inputs)
    if num_tokens > 1:
        assert broken(lambda h, *values: apply(fused)(h.flip(0), *values), apply(plain), inputs)


def slow_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """flash_forward in plain torch, for float64 and for devices without flash attention."""
    outs = []
    cu_seqlens_q, cu_seqlens_k = segments.cu_seqlens_q.tolist(), segments.cu_seqlens_k.tolist()
    for i in range(len(cu_seqlens_q) - 1):
        qi = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]].transpose(0, 1)
        ki, vi = (x[cu_seqlens_k[i] : cu_seqlens_k[i + 1]].transpose(0, 1) for x in (k, v))
        mask = torch.ones(qi.shape[1], ki.shape[1], dtype=torch.bool, device=q.device).tril(ki.shape[1] - qi.shape[1])
        outs.append(F.scaled_dot_product_attention(qi, ki, vi, mask, enable_gqa=True).transpose(0, 1))
    return torch.cat(outs), q.new_empty(0)


def slow_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, segments: Segments
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_(True) for x in (q, k, v)]
    with torch.enable_grad():
        return torch.autograd.grad(slow_forward(*leaves, segments)[0], leaves, grad)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("lengths, prefixes", [SHARED, NOT_SHARED], ids=["shared", "not shared"])
def test_attention(
    lengths: list[int], prefixes: list[int | None] | None, qk_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_ops, "flash_forward", slow_forward)
    monkeypatch.setattr(train_ops, "flash_backward", slow_backward)
    config = tiny_config(num_heads=6, num_kv_heads=2, head_dim=16, qk_norm=qk_norm)
    decoder = Decoder(config).to(DEVICE)
    layer, num = decoder.layers[0], sum(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(DEVICE)

    def apply(ops: Ops, attention: Any) -> Function:
        def function(heads: Tensor, *norms: Tensor) -> list[Tensor]:
            q_norm, k_norm = norms or (None, None)
            layer.__dict__.update(q_norm=q_norm, k_norm=k_norm)
            monkeypatch.setattr(ops, "linear", lambda x, linear: x, raising=False)
            rope = decoder.rope.tables(heads)
            return [ops.attend(heads, layer, positions, rope, attention, 0)]

        return function

    for name in ("q_norm", "k_norm"):
        layer._parameters.pop(name, None)
    inputs = [noise(num, 10 * 16), *([noise(16, seed=1), noise(16, seed=2)] if qk_norm else [])]
    plain = apply(TorchOps(), PackedAttention(lengths, prefixes))
    check(apply(train_ops.TrainOps(), VarlenAttention(lengths, prefixes, DEVICE)), plain, inputs)
    if prefixes is not None:
        assert broken(apply(train_ops.TrainOps(), VarlenAttention(lengths, None, DEVICE)), plain, inputs)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("keep_bytes", [1 << 30, 0], ids=["kept", "recomputed"])
@pytest.mark.parametrize("vocab_size", [300, 20_000])
def test_logprobs(vocab_size: int, keep_bytes: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CUDA_CHUNK_BYTES", 128 * 4 * vocab_size)  # several chunks
    decoder = Decoder(tiny_config(vocab_size=vocab_size)).to(DEVICE, torch.bfloat16).requires_grad_(True)
    init_random(decoder.named_parameters(), 0)
    num, size = 300, decoder.config.hidden_size
    hidden = noise(num, size, dtype=torch.bfloat16) * 8
    target = decoder.logits(hidden).argmax(1).where(torch.arange(num, device=DEVICE) % 3 > 0, 7)  # p from 1e-9 to 1

    def run(ops: Ops, dtype: torch.dtype) -> list[Tensor]:
        decoder.ops = ops
        wide = decoder.to(dtype)
        leaf = hidden.to(dtype).requires_grad_(True)
        logprob, entropy = token_logprobs(wide, leaf, target, temperature, keep_bytes)
        weight = (wide.lm_head or wide.embed).weight
        assert weight is not None
        return [logprob.detach(), entropy, *torch.autograd.grad((logprob * noise(num)).sum(), [leaf, weight])]

    exact = run(TorchOps(), torch.float64)
    fused, plain = run(train_ops.TrainOps(), torch.bfloat16), run(TorchOps(), torch.bfloat16)
    assert (fused[0] - exact[0]).abs().max() < 1e-4 and (fused[1] - exact[1]).abs().max() < 1e-4
    for found, other, expected in zip(fused[2:], plain[2:], exact[2:], strict=True):
        assert found.dtype == other.dtype == torch.bfloat16
        assert relative_error(found, expected) <= FACTOR * relative_error(other, expected)
