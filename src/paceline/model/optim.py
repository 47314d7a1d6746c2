"""The optimiser: AdamW, or Muon for the layers' matrices and AdamW for all other parameters.

Invariants: the learning rate depends only on the step number; a step is applied to all parameters or to none, and to
none if the gradient is not finite; the state dict has only tensors. Parameters of less than 32 bits have a float32
master copy. It accumulates the gradients and is updated; then it is rounded to the parameter. If parameters are sharded
(`sharding.py`), so are gradients and moments: every rank updates its rows, and the gradient norm is that of all ranks.
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
from paceline.model.layer import Linear, Lora
from paceline.model.sharding import first_row, full_tensor, is_sharded, local_tensor

MATRIX = re.compile(r"(?:layers\.\d+|layer)\.\w+\.")  # layers.3.qkv.weight, layers.3.qkv.lora.up, layer.o.weight


def schedule(step: int, section: OptimizerSection, num_steps: int) -> float:
    """The factor on the learning rate at step 0 … num_steps-1: a linear warm-up, then constant or decaying. The decay
    reaches zero at step num_steps."""
    warmup = section.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if section.schedule == "constant":
        return 1.0
    left = max(0.0, (num_steps - step) / max(1, num_steps - warmup))
    return left if section.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


class Muon(torch.optim.Muon):
    """torch's Muon, except on a CPU. torch orthogonalises in bfloat16, which a CPU emulates in minutes. Here a CPU
    computes in the precision of the parameters."""

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
    """About U V^T of the matrix U S V^T, by Newton-Schulz: X <- a X + (b X X^T + c (X X^T)^2) X."""
    a, b, c = coefficients
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix  # so that X X^T is the smaller product
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Optimizer:
    """Updates the parameters of `module` that require gradients. `module` is a decoder or a head with layers of shape
    `config`. A step uses the gradients that are accumulated since the last step."""

    def __init__(self, module: nn.Module, config: ModelConfig, section: OptimizerSection, num_steps: int) -> None:
        self.section, self.num_steps = section, num_steps
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if section.optimizer == "muon" and any(map(is_sharded, self.parameters.values())):
            raise ValueError(
                'learner.optimizer = "muon": it orthogonalises full matrices, but they are sharded over ranks; use '
                '"adamw", or train in one process'
            )
        self.masters = {name: _master(p) for name, p in self.parameters.items()}
        sizes = _fused_rows(module, config)
        self.parts = {part.name: part for name in self.masters for part in self._parts(name, sizes)}
        matrices = [part.leaf for part in self.parts.values() if part.is_matrix]
        others = [part.leaf for part in self.parts.values() if not part.is_matrix]
        decay = section.weight_decay
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = []  # with their learning rates
        if matrices:
            muon = Muon(matrices, weight_decay=decay)
            self.optimizers.append((muon, section.muon_learning_rate))
            for leaf in matrices:
                muon.state[leaf] = {"momentum_buffer": torch.zeros_like(leaf)}
        if others:
            groups = [  # no weight decay for norms and biases
                {"params": [leaf for leaf in others if leaf.ndim == 2], "weight_decay": decay},
                {"params": [leaf for leaf in others if leaf.ndim != 2], "weight_decay": 0.0},
            ]
            beta1, beta2 = section.betas
            adamw = torch.optim.AdamW(groups, betas=(beta1, beta2), eps=section.eps, fused=True)  # fused: twice as fast
            self.optimizers.append((adamw, section.learning_rate))
            for leaf in others:
                zeros = {key: torch.zeros_like(leaf.detach()) for key in ("exp_avg", "exp_avg_sq")}
                adamw.state[leaf] = {"step": torch.zeros((), device=leaf.device), **zeros}

    def learning_rate(self, step: int) -> float:
        return self.section.learning_rate * schedule(step, self.section, self.num_steps)

    def step(self, step: int) -> float:
        """Make step number `step` with the accumulated gradients. Returns their norm before clipping. If it is not
        finite, the gradients are discarded and nothing else changes."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        norm = full_tensor(get_total_norm([master.grad for master in self.masters.values() if master.grad is not None]))
        if not norm.isfinite():
            self.clear()
            return float(norm)
        if norm > self.section.max_grad_norm:
            clip_grads_with_norm_(self.masters.values(), self.section.max_grad_norm, norm)
        for part in self.parts.values():
            grad = self.masters[part.of].grad
            assert grad is not None
            part.leaf.grad = grad if part.rows is None else grad[part.rows]
        factor = schedule(step, self.section, self.num_steps)
        for optimizer, learning_rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * factor
            optimizer.step()
        self.clear()
        self._round()
        return float(norm)

    def clear(self) -> None:
        """Discard all gradients."""
        for leaf in (*self.parameters.values(), *self.masters.values(), *(part.leaf for part in self.parts.values())):
            leaf.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and moments. These are the live tensors: write or copy them before the next step."""
        parameters = {f"parameter.{name}": master.detach() for name, master in self.masters.items()}
        moments = {
            f"{key}.{part.name}": tensor
            for part in self.parts.values()
            for optimizer, _ in self.optimizers
            for key, tensor in optimizer.state.get(part.leaf, {}).items()
        }
        return parameters | moments

    def load_state_dict(self, state: Mapping[str, Tensor], others: Sequence[str] = ()) -> None:
        """Load the `state_dict` of an optimiser with the same parameters and of the same kind, sharded or not. Tensors
        in `state` are full and are read one by one. `others` are names in `state` that are not the optimiser's."""
        current = self.state_dict()
        if different := sorted(current.keys() ^ (state.keys() - {*others})):
            raise ValueError(
                f"learner state: {different[0]} and {len(different) - 1} more tensors are only in the saved state or "
                "only in this learner; resume with the model, learner.optimizer and learner.lora_* that the state was "
                "saved with"
            )
        for name, tensor in current.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"learner state: {name} is {list(state[name].shape)}, but this learner has {list(tensor.shape)}; "
                    "resume with the model and learner.lora_* that the state was saved with"
                )
        with torch.no_grad():
            for name, tensor in current.items():
                saved = state[name]
                if is_sharded(tensor):
                    start = first_row(tensor)
                    saved = saved[start : start + len(local_tensor(tensor))]
                local_tensor(tensor).copy_(saved)
        self._round()

    def _parts(self, name: str, sizes: Mapping[str, Sequence[int]]) -> Iterator[_Part]:
        """A parameter or, for Muon, the matrices that are fused in it, with these `sizes`: each is orthogonalised
        separately, as in a model that does not fuse them."""
        master = self.masters[name]
        if self.section.optimizer == "adamw" or MATRIX.match(name) is None or master.ndim != 2:
            yield _Part(name, name, master)
            return
        start = 0
        for i, size in enumerate(sizes.get(name, [len(master)])):
            rows = slice(start, start + size)
            yield _Part(f"{name}.{i}", name, nn.Parameter(master.detach()[rows]), rows, is_matrix=True)  # same memory
            start += size

    @torch.no_grad()
    def _round(self) -> None:
        names = [name for name, master in self.masters.items() if master is not self.parameters[name]]
        parameters, masters = (
            [local_tensor(tensors[name]) for name in names] for tensors in (self.parameters, self.masters)
        )
        if names:
            torch._foreach_copy_(parameters, masters)  # one kernel for many tensors


def _fused_rows(module: nn.Module, config: ModelConfig) -> dict[str, Sequence[int]]:
    """The rows of each matrix that is fused in a parameter, by name of the parameter. Transformers' models have none,
    and a config of their own."""
    rows: dict[str, Sequence[int]] = {}
    for name, each in module.named_modules():
        kind = name.rpartition(".")[2]
        if isinstance(each, Linear) and kind == "qkv":
            q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            rows[f"{name}.weight"] = [q, kv, kv]
        if isinstance(each, Linear) and kind == "gate_up":
            rows[f"{name}.weight"] = [config.intermediate_size] * 2
        if isinstance(each, Lora):
            rows[f"{name}.down"] = [each.rank] * len(each.parts)
            rows[f"{name}.up"] = [part.size for part in each.parts]
    return rows


@dataclass(slots=True)
class _Part:
    """What torch's optimisers see as one parameter."""

    name: str
    of: str  # the parameter that it is, or is a slice of
    leaf: nn.Parameter
    rows: slice | None = None
    is_matrix: bool = False  # updated by Muon


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or a float32 copy with a hook that adds each backward pass's gradients to the copy."""
    if parameter.dtype.itemsize >= 4:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def accumulate(half: Tensor) -> None:
        assert half.grad is not None
        master.grad = half.grad.float() if master.grad is None else master.grad.add_(half.grad)
        half.grad = None

    parameter.register_post_accumulate_grad_hook(accumulate)
    return master
