"""The Triton kernels of `train_ops.py`, forward and backward. ACC is the dtype that a kernel computes in."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    x, y, weight, total, h, eps, D: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, HAS_Y: tl.constexpr
):  # fmt: skip
    """One row per program: total = x + y, h = norm(total) · weight."""
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, WIDTH)
    inside = at < D
    value = tl.load(x + row + at, mask=inside, other=0.0).to(ACC)
    if HAS_Y:
        value += tl.load(y + row + at, mask=inside, other=0.0).to(ACC)
        tl.store(total + row + at, value, mask=inside)
    factor = 1 / tl.sqrt(tl.sum(value * value) / D + eps)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(ACC)
    tl.store(h + row + at, (value * factor * scale).to(h.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_backward_kernel(
    x_grad, h_grad, x, weight, out, y_grad, partial, eps, num_rows,
    D: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, HAS_X_GRAD: tl.constexpr, HAS_Y: tl.constexpr,
    WANTS_WEIGHT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS rows per program. With n = x · factor and g = h_grad · weight:
    out = x_grad + factor · (g - n · mean(g n)). `partial` gets the sum over the rows of h_grad · n."""
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < D
    scale = tl.load(weight + at, mask=inside, other=0.0).to(ACC)
    total = tl.zeros([WIDTH], ACC)
    for i in range(TOKENS):
        row = program * TOKENS + i
        valid = inside & (row < num_rows)
        value = tl.load(x + row * D + at, mask=valid, other=0.0).to(ACC)
        grad = tl.load(h_grad + row * D + at, mask=valid, other=0.0).to(ACC)
        factor = 1 / tl.sqrt(tl.sum(value * value) / D + eps)
        normed = value * factor
        if WANTS_WEIGHT:
            total += grad * normed
        grad *= scale
        result = factor * (grad - normed * (tl.sum(grad * normed) / D))
        if HAS_X_GRAD:
            result += tl.load(x_grad + row * D + at, mask=valid, other=0.0).to(ACC)
        tl.store(out + row * D + at, result.to(out.dtype.element_ty), mask=valid)
        if HAS_Y:
            tl.store(y_grad + row * D + at, result.to(y_grad.dtype.element_ty), mask=valid)
    if WANTS_WEIGHT:
        tl.store(partial + program * D + at, total, mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, size, ACC: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(ACC)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0).to(ACC)
    tl.store(out + row * size + at, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_backward_kernel(gate_up, grad, gate_up_grad, out, size, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """With s = sigmoid(gate): d silu(gate) / d gate = s · (1 + gate · (1 - s))."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    start = row * 2 * size + at
    gate = tl.load(gate_up + start, mask=inside, other=0.0).to(ACC)
    up = tl.load(gate_up + start + size, mask=inside, other=0.0).to(ACC)
    out_grad = tl.load(grad + row * size + at, mask=inside, other=0.0).to(ACC)
    sigmoid = 1 / (1 + tl.exp(-gate))
    gate_grad = out_grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    silu = gate * sigmoid
    up_grad = out_grad * silu
    tl.store(out + row * size + at, (silu * up).to(out.dtype.element_ty), mask=inside)
    tl.store(gate_up_grad + start, gate_grad.to(gate_up_grad.dtype.element_ty), mask=inside)
    tl.store(gate_up_grad + start + size, up_grad.to(gate_up_grad.dtype.element_ty), mask=inside)


@triton.jit
def _load_factors(
    x, y, head, q_norm, k_norm, cos, sin, position, eps,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, HAS_NORM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """For the heads' halves x and y [HEADS, DIM / 2]: the norm's factor [HEADS, 1] and weights [HEADS, DIM / 2], cos
    and sin. Values have no norm and are not rotated: factor, weights and cos are 1, sin is 0."""
    e = tl.arange(0, DIM // 2)[None, :]
    is_q, is_v = (head < NUM_Q)[:, None], (head >= NUM_Q + NUM_KV)[:, None]
    c = tl.where(is_v, 1.0, tl.load(cos + position * (DIM // 2) + e).to(ACC))
    s = tl.where(is_v, 0.0, tl.load(sin + position * (DIM // 2) + e).to(ACC))
    if HAS_NORM:
        factor = 1 / tl.sqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM + eps)[:, None]
        factor = tl.where(is_v, 1.0, factor)
        q_x, k_x = tl.load(q_norm + e).to(ACC), tl.load(k_norm + e).to(ACC)
        q_y, k_y = tl.load(q_norm + DIM // 2 + e).to(ACC), tl.load(k_norm + DIM // 2 + e).to(ACC)
        scale_x = tl.where(is_v, 1.0, tl.where(is_q, q_x, k_x))
        scale_y = tl.where(is_v, 1.0, tl.where(is_q, q_y, k_y))
    else:
        factor = tl.full(is_v.shape, 1.0, ACC)
        scale_x = tl.full(x.shape, 1.0, ACC)
        scale_y = scale_x
    return factor, scale_x, scale_y, c, s


@triton.jit
def qkv_forward_kernel(
    heads, q, kv, q_norm, k_norm, cos, sin, positions, copies_start, copies, eps,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """One token per program. Its keys and values are written to all their copies."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    e = tl.arange(0, DIM // 2)[None, :]
    at = token * (NUM_Q + 2 * NUM_KV) * DIM + head[:, None] * DIM + e
    inside = (head < NUM_Q + 2 * NUM_KV)[:, None]
    x = tl.load(heads + at, mask=inside, other=0.0).to(ACC)
    y = tl.load(heads + at + DIM // 2, mask=inside, other=0.0).to(ACC)
    position = tl.load(positions + token)
    factor, scale_x, scale_y, c, s = _load_factors(
        x, y, head, q_norm, k_norm, cos, sin, position, eps, NUM_Q, NUM_KV, DIM, HAS_NORM, ACC
    )
    x, y = x * factor * scale_x, y * factor * scale_y
    dtype = q.dtype.element_ty
    x, y = (x * c - y * s).to(dtype), (y * c + x * s).to(dtype)
    to_q = q + (token * NUM_Q + head[:, None]) * DIM + e
    is_q = (head < NUM_Q)[:, None]
    tl.store(to_q, x, mask=is_q)
    tl.store(to_q + DIM // 2, y, mask=is_q)
    for i in range(tl.load(copies_start + token), tl.load(copies_start + token + 1)):
        row = tl.load(copies + i).to(tl.int64)
        to_kv = kv + (row * 2 * NUM_KV + head[:, None] - NUM_Q) * DIM + e
        tl.store(to_kv, x, mask=inside & (head >= NUM_Q)[:, None])
        tl.store(to_kv + DIM // 2, y, mask=inside & (head >= NUM_Q)[:, None])


@triton.jit
def qkv_backward_kernel(
    heads, q_grad, k_grad, v_grad, qkv_grad, norm_grads, q_norm, k_norm, cos, sin, positions, copies_start, copies,
    eps, num_tokens,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr,
    ACC: tl.constexpr, WANTS_NORMS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens per program. The gradients of a key's or value's copies are added in order."""
    program = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    e = tl.arange(0, DIM // 2)[None, :]
    is_q, is_v = (head < NUM_Q)[:, None], (head >= NUM_Q + NUM_KV)[:, None]
    inside = (head < NUM_Q + 2 * NUM_KV)[:, None]
    is_k = (head >= NUM_Q)[:, None] & (head < NUM_Q + NUM_KV)[:, None]
    total_x, total_y = tl.zeros([HEADS, DIM // 2], ACC), tl.zeros([HEADS, DIM // 2], ACC)
    for i in range(TOKENS):
        token = program * TOKENS + i
        if token < num_tokens:
            at = token * (NUM_Q + 2 * NUM_KV) * DIM + head[:, None] * DIM + e
            x = tl.load(heads + at, mask=inside, other=0.0).to(ACC)
            y = tl.load(heads + at + DIM // 2, mask=inside, other=0.0).to(ACC)
            position = tl.load(positions + token)
            factor, scale_x, scale_y, c, s = _load_factors(
                x, y, head, q_norm, k_norm, cos, sin, position, eps, NUM_Q, NUM_KV, DIM, HAS_NORM, ACC
            )
            from_q = q_grad + (token * NUM_Q + head[:, None]) * DIM + e
            x_grad = tl.load(from_q, mask=is_q, other=0.0).to(ACC)
            y_grad = tl.load(from_q + DIM // 2, mask=is_q, other=0.0).to(ACC)
            for j in range(tl.load(copies_start + token), tl.load(copies_start + token + 1)):
                row = tl.load(copies + j).to(tl.int64)
                from_k = k_grad + (row * NUM_KV + head[:, None] - NUM_Q) * DIM + e
                from_v = v_grad + (row * NUM_KV + head[:, None] - NUM_Q - NUM_KV) * DIM + e
                x_grad += tl.load(from_k, mask=is_k, other=0.0).to(ACC)
                y_grad += tl.load(from_k + DIM // 2, mask=is_k, other=0.0).to(ACC)
                x_grad += tl.load(from_v, mask=is_v & inside, other=0.0).to(ACC)
                y_grad += tl.load(from_v + DIM // 2, mask=is_v & inside, other=0.0).to(ACC)
            x_grad, y_grad = x_grad * c + y_grad * s, y_grad * c - x_grad * s  # the inverse rotation
            if HAS_NORM:
                x, y = x * factor, y * factor
                if WANTS_NORMS:
                    total_x += x_grad * x
                    total_y += y_grad * y
                x_grad, y_grad = x_grad * scale_x, y_grad * scale_y
                mean = ((tl.sum(x_grad * x, 1) + tl.sum(y_grad * y, 1)) / DIM)[:, None]
                mean = tl.where(is_v, 0.0, mean)
                x_grad, y_grad = factor * (x_grad - x * mean), factor * (y_grad - y * mean)
            tl.store(qkv_grad + at, x_grad.to(qkv_grad.dtype.element_ty), mask=inside)
            tl.store(qkv_grad + at + DIM // 2, y_grad.to(qkv_grad.dtype.element_ty), mask=inside)
    if WANTS_NORMS:
        to = norm_grads + program * 2 * DIM + tl.arange(0, DIM // 2)
        tl.store(to, tl.sum(tl.where(is_q, total_x, 0.0), 0))
        tl.store(to + DIM // 2, tl.sum(tl.where(is_q, total_y, 0.0), 0))
        tl.store(to + DIM, tl.sum(tl.where(is_k, total_x, 0.0), 0))
        tl.store(to + DIM + DIM // 2, tl.sum(tl.where(is_k, total_y, 0.0), 0))
