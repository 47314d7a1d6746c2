"""The optimiser: AdamW, or Muon for the layers' matrices and AdamW for the rest, behind one step.

What always holds: the learning rate is a function of the step's number alone; a step is made whole or not at all; the
state is plain tensors. Parameters of less than 32 bits have a float32 master, which gathers the gradients, is
stepped, and is then rounded into the parameter. Where parameters are divided among ranks (`sharding.py`) so are
masters, gradients and moments; every rank makes the same step with its rows, and the norm is that of all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from paceline.config import OptimizerSection
from paceline.model.config import ModelConfig
from paceline.model.sharding import first_row, is_divided, local, whole

MATRIX = re.compile(r"(?:layers\.\d+|layer)\.(\w+)\.(.+)")  # layers.3.qkv.weight, layers.3.qkv.lora.up, layer.o.weight


def schedule(step: int, section: OptimizerSection, num_steps: int) -> float:
    """The share of the learning rate that step 0 … num_steps-1 has: a linear warm-up, then constant, or down towards
    zero, which the step after the last would have."""
    warmup = section.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if section.schedule == "constant":
        return 1.0
    left = max(0.0, (num_steps - step) / max(1, num_steps - warmup))
    return left if section.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


class Muon(torch.optim.Muon):
    """torch's, which orthogonalises in bfloat16: on a CPU, where that is emulated and takes minutes, in float32 (or
    the parameters' own precision) instead."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        leaves = [(group, leaf) for group in self.param_groups for leaf in group["params"]]
        if any(leaf.device.type != "cpu" for _, leaf in leaves):
            return super().step()
        for group, leaf in leaves:
            momentum, learning_rate = group["momentum"], group["lr"]
            average = self.state[leaf]["momentum_buffer"].lerp_(leaf.grad, 1 - momentum)
            direction = orthogonal(leaf.grad.lerp(average, momentum), group["ns_coefficients"], group["ns_steps"])
            leaf.mul_(1 - learning_rate * group["weight_decay"])
            num_out, num_in = leaf.shape
            leaf.sub_(direction, alpha=learning_rate * math.sqrt(max(1, num_out / num_in)))
        return None


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int) -> Tensor:
    """U V^T, about, of the matrix U S V^T, by Newton-Schulz: X <- a X + (b X X^T + c (X X^T)^2) X."""
    a, b, c = coefficients
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix  # the smaller of the two products X X^T, X^T X
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Optimizer:
    """Over the parameters of `module`, a decoder or a head with layers of shape `config`, that are trained. Gradients
    are whatever backward passes have left since the last step."""

    def __init__(self, module: nn.Module, config: ModelConfig, section: OptimizerSection, num_steps: int) -> None:
        self.section, self.num_steps = section, num_steps
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if section.optimizer == "muon" and any(map(is_divided, self.parameters.values())):
            raise ValueError(
                'learner.optimizer = "muon": it orthogonalises whole matrices, but here each rank holds some rows of '
                'them; use "adamw", or train in one process'
            )
        self.masters = {name: _master(p) for name, p in self.parameters.items()}
        self.parts = {part.name: part for name in self.masters for part in self._parts(name, config)}
        matrices = [part.leaf for part in self.parts.values() if part.is_matrix]
        rest = [part.leaf for part in self.parts.values() if not part.is_matrix]
        decay = section.weight_decay
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = []  # with their learning rates
        if matrices:
            muon = Muon(matrices, weight_decay=decay)
            self.optimizers.append((muon, section.muon_learning_rate))
            for leaf in matrices:
                muon.state[leaf] = {"momentum_buffer": torch.zeros_like(leaf)}
        if rest:
            groups = [  # norms and biases do not decay
                {"params": [leaf for leaf in rest if leaf.ndim == 2], "weight_decay": decay},
                {"params": [leaf for leaf in rest if leaf.ndim != 2], "weight_decay": 0.0},
            ]
            beta1, beta2 = section.betas
            adamw = torch.optim.AdamW(groups, betas=(beta1, beta2), eps=section.eps, fused=True)  # twice as fast
            self.optimizers.append((adamw, section.learning_rate))
            for leaf in rest:
                zeros = {key: torch.zeros_like(leaf.detach()) for key in ("exp_avg", "exp_avg_sq")}
                adamw.state[leaf] = {"step": torch.zeros((), device=leaf.device), **zeros}

    def learning_rate(self, step: int) -> float:
        return self.section.learning_rate * schedule(step, self.section, self.num_steps)

    def step(self, step: int) -> float:
        """Step number `step` with the gradients there are. Returns their norm, before clipping to max_grad_norm."""
        for master in self.masters.values():
            if master.grad is None:  # nothing was trained
                master.grad = torch.zeros_like(master)
        norm = whole(get_total_norm([master.grad for master in self.masters.values() if master.grad is not None]))
        if not norm.isfinite():
            self.clear()
            raise ValueError(
                f"step {step}: the gradient's norm is {norm.item()}; this update was not made, the weights are as they "
                "were. Lower the learning rate, or look for rewards or logprobs out of range"
            )
        if norm > self.section.max_grad_norm:
            clip_grads_with_norm_(self.masters.values(), self.section.max_grad_norm, norm)
        for part in self.parts.values():
            grad = self.masters[part.of].grad
            assert grad is not None
            part.leaf.grad = grad if part.rows is None else grad[part.rows]
        share = schedule(step, self.section, self.num_steps)
        for optimizer, learning_rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * share
            optimizer.step()
        self.clear()
        self._round()
        return float(norm)

    def clear(self) -> None:
        """Forget all gradients."""
        for leaf in (*self.parameters.values(), *self.masters.values(), *(part.leaf for part in self.parts.values())):
            leaf.grad = None

    def state(self) -> dict[str, Tensor]:
        """Parameters and moments, the live tensors: write or copy them before the next step."""
        parameters = {f"parameter.{name}": master.detach() for name, master in self.masters.items()}
        moments = {
            f"{key}.{part.name}": tensor
            for part in self.parts.values()
            for optimizer, _ in self.optimizers
            for key, tensor in optimizer.state.get(part.leaf, {}).items()
        }
        return parameters | moments

    def restore(self, state: Mapping[str, Tensor], others: Sequence[str] = ()) -> None:
        """Take over what `state` gave, of an optimiser of the same parameters and kind, divided or not: here tensors
        are whole, and read one by one. `others` are in the state but not the optimiser's."""
        mine = self.state()
        if different := sorted(mine.keys() ^ (state.keys() - {*others})):
            raise ValueError(
                f"learner state: {different[0]} and {len(different) - 1} more tensors are on one side only; resume "
                "with the model, learner.optimizer and learner.lora_* that the state was saved with"
            )
        for name, tensor in mine.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"learner state: {name} is {list(state[name].shape)}, here {list(tensor.shape)}; resume with the "
                    "model and learner.lora_* that the state was saved with"
                )
        with torch.no_grad():
            for name, tensor in mine.items():
                given = state[name]
                if is_divided(tensor):
                    start = first_row(tensor)
                    given = given[start : start + len(local(tensor))]
                local(tensor).copy_(given)
        self._round()

    def _parts(self, name: str, config: ModelConfig) -> Iterator[_Part]:
        """A parameter, or for Muon the matrices that are fused in it: each is orthogonalised by itself, as in a model
        that does not fuse them."""
        master = self.masters[name]
        within = MATRIX.fullmatch(name)
        if self.section.optimizer == "adamw" or within is None or master.ndim != 2:
            yield _Part(name, name, master)
            return
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        fused = {"qkv": [q, kv, kv], "gate_up": [config.intermediate_size] * 2}
        linear, kind = within.groups()
        sizes = fused.get(linear, [len(master)]) if kind != "lora.down" else [len(master)]
        start = 0
        for i, size in enumerate(sizes):
            rows = slice(start, start + size)
            yield _Part(f"{name}.{i}", name, nn.Parameter(master.detach()[rows]), rows, is_matrix=True)  # same memory
            start += size

    @torch.no_grad()
    def _round(self) -> None:
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)


@dataclass(slots=True)
class _Part:
    """What is stepped as one."""

    name: str
    of: str  # the parameter it is, or is rows of
    leaf: nn.Parameter
    rows: slice | None = None
    is_matrix: bool = False  # Muon's


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """Itself, or a float32 copy into which its gradients are gathered as each backward pass leaves them."""
    if parameter.dtype.itemsize >= 4:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def gather(half: Tensor) -> None:
        assert half.grad is not None
        master.grad = half.grad.float() if master.grad is None else master.grad.add_(half.grad)
        half.grad = None

    parameter.register_post_accumulate_grad_hook(gather)
    return master
