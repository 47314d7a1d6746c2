"""torch's flag for deterministic algorithms: it is set only for the learner's backward pass, and nothing that the
engine runs at the same time is an error under it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_decoder
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.accept import RULES
from paceline.engine.engine import LocalEngine
from paceline.model import flash
from paceline.model.paged import PagedDecoder
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams

# What has no deterministic implementation on a GPU and runs without gradients; cumsum and bincount only of floats. See
# `torch.use_deterministic_algorithms`.
REFUSED = {"put_", "put", "histc", "median", "nanmedian", "kthvalue", "mode"}
REFUSED_FOR_FLOATS = {"cumsum", "cumsum_", "bincount", "scatter_reduce", "scatter_reduce_"}


class ListRefused(TorchDispatchMode):
    """Collects the operations that a GPU would refuse under the flag."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        has_floats = any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in args)
        if name in REFUSED or (name in REFUSED_FOR_FLOATS and has_floats):
            self.found.add(name)
        self.num_operations += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", RULES)
def test_generation_runs_beside_a_deterministic_backward_pass(rule: str) -> None:
    paged = PagedDecoder(tiny_decoder(torch.float32), 64)
    engine = LocalEngine(paged, drafter=SuffixDrafter(), policy=StaticPolicy(3), rule=rule)
    kinds = [{}, {"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.02, "top_p": 0.9}]
    requests = [
        Request(i, (1, 2, 3, 1, 2), SamplingParams(max_tokens=12, ignore_eos=True, **kind), i, "problem")
        for i, kind in enumerate(kinds)
    ]
    with ListRefused() as listed:
        engine.generate(requests)
    assert listed.num_operations > 100 and not listed.found


def test_refused_operations_are_listed() -> None:
    with ListRefused() as listed:
        torch.ones(3, dtype=torch.int64).cumsum(0)
        assert not listed.found
        torch.ones(3).cumsum(0)
        torch.tensor([1.0, 2.0]).median(0)
    assert listed.found == {"cumsum", "median"}


def flags() -> tuple[bool, bool, bool]:
    settings: Any = torch.utils.deterministic
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        settings.fill_uninitialized_memory,
    )


@pytest.mark.parametrize("before", [(False, False, True), (True, True, True), (True, False, False)], ids=str)
def test_flags_are_restored_after_an_error(before: tuple[bool, bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    enabled, warn_only, fill = before
    found = flags()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill)
    torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)
    try:
        with pytest.raises(RuntimeError, match="out of memory"), flash._deterministic():
            # Only then torch takes the deterministic kernel: with warn_only it would warn and take the other one.
            assert flags() == (True, False, False)
            raise RuntimeError("out of memory")
        assert flags() == before
    finally:
        torch._C._set_deterministic_algorithms(found[0], warn_only=found[1])


def test_a_backward_pass_sets_the_flags_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def backward(grad: torch.Tensor, *rest: Any, **options: Any) -> list[torch.Tensor]:
        seen.append(flags() == (True, False, False))
        return [grad, grad, grad]

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    x, at = torch.zeros(2, 1, 8), torch.tensor(np.array([0, 2], np.int32))
    for deterministic in (True, False):
        flash.flash_backward(x, x, x, x, x, x, flash.Segments(at, at, 2, 2, deterministic))
    assert seen == [True, False]
