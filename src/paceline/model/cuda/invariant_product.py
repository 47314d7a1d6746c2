"""Matrix products with batch-invariant results: the bits of a token's output do not depend on the number of tokens.

The bits of a product in 16 bits depend on the order of its sums alone. Each matrix has a fixed order: its input
dimension is cut into a number of parts; in each part, tensor core instructions add products in the order of the input
dimension to a float32 accumulator; the parts are added in order. The reference is `triton_product`: one program
computes a tile of outputs of one part from beginning to end, so its tile sizes do not change results.

torch's library has kernels that are faster, and sums in the same order unless it splits the input dimension by itself.
Whether it does depends on the number of tokens. `Products` compares both at each number of tokens that steps are padded
to, and uses torch's product where all bits are equal. Times play no part in the choice: on a device of the same kind,
with the same library versions, it has the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from paceline.model.cuda import small_batch, swiglu
from paceline.model.cuda.pdl import pdl_options
from paceline.model.cuda.product_kernel import product_kernel
from paceline.model.layer import Linear

MIN_SPLIT_NUM_IN = 4096  # from here on, a product that is added to the residual stream has two parts
SEEDS = range(2)  # of the inputs that cancel
TILE_TOKENS = 128  # of many tokens
SMALL_TOKENS = 16  # in a small layer: one tile of tokens


@dataclass(frozen=True, slots=True)
class Order:
    """What determines a product's bits, apart from its inputs."""

    num_out: int
    num_in: int
    parts: int
    has_bias: bool
    dtype: torch.dtype  # of the output


def residual_parts(linear: Linear) -> int:
    """Parts of a product that is added to the residual stream. Its weight has few rows, so a product with few tokens
    would otherwise leave multiprocessors idle."""
    return 2 if linear.num_in >= MIN_SPLIT_NUM_IN and linear.num_in % 128 == 0 and linear.bias is None else 1


@dataclass(slots=True)
class Products:
    """`library_sizes`: for each order, the numbers of tokens at which torch's product has the order's bits.
    `fused_sizes`: the same for the fused SwiGLU kernel."""

    library_sizes: dict[Order, frozenset[int]] = field(default_factory=dict)
    fused_sizes: dict[Order, frozenset[int]] = field(default_factory=dict)

    def __call__(self, x_TK: Tensor, linear: Linear, parts: int = 1, dtype: torch.dtype | None = None) -> Tensor:
        """[T, N], or float32 [P, T, N] with several parts."""
        order = order_of(linear, parts, dtype)
        product = library_product if len(x_TK) in self.library_sizes.get(order, ()) else triton_product
        return product(x_TK, linear, parts, dtype)

    def find_library_sizes(
        self, linear: Linear, parts: int, sizes: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> None:
        """Find the numbers of tokens at which torch's product has the bits of `triton_product`, and may be faster."""
        order = order_of(linear, parts, dtype)
        if order not in self.library_sizes:
            examples = make_examples(linear)
            larger = (size for size in sizes if not is_small(size, linear))
            self.library_sizes[order] = frozenset(size for size in larger if is_equal(examples, size, parts, dtype))

    def find_fused_sizes(self, gate_up: Linear, sizes: tuple[int, ...]) -> None:
        """The same for the fused SwiGLU kernel."""
        order = order_of(gate_up, 1, None)
        if order not in self.fused_sizes:
            examples = make_examples(gate_up)
            self.fused_sizes[order] = frozenset(size for size in sizes if is_equal_fused(examples, size))


def is_small(num_tokens: int, linear: Linear) -> bool:
    """Whether starting a kernel takes longer than reading the weights. Ours start while the previous one still runs."""
    weight = linear.weight
    assert weight is not None
    return num_tokens <= SMALL_TOKENS and weight.numel() <= small_batch.MAX_WEIGHTS


def library_shares(num_in: int = 4096, num_out: int = 4096) -> tuple[float, float]:
    """At how many of the sizes of a step torch's product of a random matrix has the order of ours, in 1 and in 2
    parts."""
    from paceline.model.cuda.graphs import SIZES

    linear = Linear(num_in, num_out).to("cuda", torch.bfloat16).requires_grad_(False)
    examples = make_examples(linear)
    one, two = (sum(is_equal(examples, size, parts, None) for size in SIZES) / len(SIZES) for parts in (1, 2))
    return one, two


def order_of(linear: Linear, parts: int, dtype: torch.dtype | None) -> Order:
    weight = linear.weight
    assert weight is not None
    dtype = torch.float32 if parts > 1 else dtype or weight.dtype
    num_out, num_in = weight.shape
    return Order(num_out, num_in, parts, linear.bias is not None, dtype)


def make_examples(linear: Linear) -> list[Example]:
    """Layers of this shape with inputs. The first ones cancel: the second half of a weight's columns repeats the first
    half, shuffled, and of the inputs it is the negative. The exact outputs are 0, so what is left is rounding, and
    another order of summation shows in nearly every output. With random inputs it would show in few outputs that are
    rounded to 16 bits. The last one has random inputs and a random bias."""
    cancelling, other = _random_copy(linear, 0), _random_copy(linear, 1)
    assert cancelling.weight is not None
    half, device = linear.num_in // 2, cancelling.weight.device
    shuffled = torch.randperm(linear.num_in, generator=torch.Generator().manual_seed(0)).to(device)
    first, second = shuffled[:half], shuffled[half : 2 * half]
    cancelling.weight[:, second] = cancelling.weight[:, first]
    if other.bias is not None:
        other.bias.normal_(generator=torch.Generator(device).manual_seed(2))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # kernels may read weights before the previous kernel has finished
    return [*(Example(cancelling, seed, (first, second)) for seed in SEEDS), Example(other, len(SEEDS))]


def _random_copy(linear: Linear, seed: int) -> Linear:
    """Without a bias, or with one of 0."""
    weight = linear.weight
    assert weight is not None
    with weight.device:
        copy = Linear(linear.num_in, linear.num_out, bias=linear.bias is not None).to(weight.dtype)
    copy.requires_grad_(False)
    assert copy.weight is not None
    copy.weight.normal_(0, linear.num_in**-0.5, generator=torch.Generator(weight.device).manual_seed(seed))
    return copy


@dataclass(frozen=True, slots=True)
class Example:
    """A layer and random inputs, for a comparison. `halves`: inputs of the second are the negatives of the first."""

    linear: Linear
    seed: int
    halves: tuple[Tensor, Tensor] | None = None

    def inputs(self, num_tokens: int) -> Tensor:
        """[T, K]"""
        weight = self.linear.weight
        assert weight is not None
        generator = torch.Generator(weight.device).manual_seed(self.seed)
        x = torch.randn(num_tokens, self.linear.num_in, generator=generator, device=weight.device).to(weight.dtype)
        if self.halves is not None:
            first, second = self.halves
            x[:, second] = -x[:, first]
        return x


def is_equal(examples: Sequence[Example], num_tokens: int, parts: int, dtype: torch.dtype | None) -> bool:
    for example in examples:
        x, linear = example.inputs(num_tokens), example.linear
        if not torch.equal(library_product(x, linear, parts, dtype), triton_product(x, linear, parts, dtype)):
            return False
    return True


def is_equal_fused(examples: Sequence[Example], num_tokens: int) -> bool:
    """Whether there is a fused kernel for so many tokens with the bits of the separate ones."""
    from paceline.model.cuda.ops import CudaOps

    for example in examples:
        x, gate_up = example.inputs(num_tokens), example.linear
        weight = gate_up.weight
        assert weight is not None
        if gate_up.bias is not None or not (is_small(num_tokens, gate_up) or swiglu.should_use(x, weight)):
            return False
        if not torch.equal(fused_swiglu(x, gate_up), CudaOps().silu_mul(triton_product(x, gate_up))):
            return False
    return True


def fused_swiglu(x_TK: Tensor, gate_up: Linear) -> Tensor:
    weight = gate_up.weight
    assert weight is not None
    return swiglu_product(x_TK, gate_up) if is_small(len(x_TK), gate_up) else swiglu.swiglu(x_TK, weight)


def library_product(x_TK: Tensor, linear: Linear, parts: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    weight = linear.weight
    assert weight is not None
    if parts > 1:
        size = weight.shape[1] // parts
        x, w = x_TK.view(-1, parts, size).transpose(0, 1), weight.view(-1, parts, size).permute(1, 2, 0)
        return torch.bmm(x, w, out_dtype=torch.float32)
    if dtype == torch.float32:
        return torch.mm(x_TK, weight.T, out_dtype=torch.float32)
    return torch.nn.functional.linear(x_TK, weight, linear.bias)


def triton_product(x_TK: Tensor, linear: Linear, parts: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    weight = linear.weight
    assert weight is not None and (linear.bias is None or parts == 1)
    num_tokens, (num_out, num_in) = len(x_TK), weight.shape
    order = order_of(linear, parts, dtype)
    out = torch.empty(parts, num_tokens, num_out, dtype=order.dtype, device=x_TK.device)
    options = tuning(num_tokens)
    grid = triton.cdiv(num_out, options["BLOCK_N"]), triton.cdiv(num_tokens, options["BLOCK_T"]), parts
    product_kernel[grid](
        x_TK, weight, out if linear.bias is None else linear.bias, out, num_tokens, num_out, num_tokens * num_out,
        x_TK.stride(0), num_in, num_in // parts, HAS_BIAS=linear.bias is not None, SWIGLU=False,
        **options, **pdl_options(x_TK.device),
    )  # fmt: skip
    return out if parts > 1 else out[0]


def swiglu_product(x_TK: Tensor, gate_up: Linear) -> Tensor:
    """silu(gate) · up, with the bits of `triton_product` and `CudaOps.silu_mul`: [T, N / 2]."""
    weight = gate_up.weight
    assert weight is not None and gate_up.bias is None
    num_tokens, num_out, num_in = len(x_TK), len(weight) // 2, weight.shape[1]
    out = torch.empty(num_tokens, num_out, dtype=weight.dtype, device=x_TK.device)
    options = tuning(num_tokens) | {"num_stages": 4}  # of three tiles, which must fit shared memory
    product_kernel[triton.cdiv(num_out, options["BLOCK_N"]), triton.cdiv(num_tokens, options["BLOCK_T"]), 1](
        x_TK, weight, out, out, num_tokens, num_out, 0, x_TK.stride(0), num_in, num_in, HAS_BIAS=False, SWIGLU=True,
        **options, **pdl_options(x_TK.device),
    )  # fmt: skip
    return out


def tuning(num_tokens: int) -> dict[str, int]:
    """Launch parameters, which do not change results."""
    if num_tokens <= 64:
        block = max(16, triton.next_power_of_2(num_tokens))
        return {"BLOCK_N": 64, "BLOCK_T": block, "BLOCK_K": 128, "num_warps": 4, "num_stages": 6 if block < 64 else 5}
    return {"BLOCK_N": 128, "BLOCK_T": TILE_TOKENS, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}
