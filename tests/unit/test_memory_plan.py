"""The choice of KV cache and microbatch by a memory plan, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from planned import LARGE, SMALL, on_gpu, plan

from paceline.build.memory_plan import (
    GIB,
    least_kv_tokens,
    needed_kv_tokens,
    usable_bytes,
)
from paceline.model.config import ModelConfig


@pytest.mark.parametrize(
    "switched",
    [
        ["speculation.method=hybrid", "speculation.policy=auto", "draft.online=every"],
        ["speculation.method=hybrid", "draft.online=every", "draft.tokens_per_batch=512", "draft.online_tokens=512"],
        ["speculation.method=suffix", "speculation.num_speculative_tokens=7"],
    ],
)
@pytest.mark.parametrize("given", [[], ["learner.activation_checkpointing=true"]])
def test_speculation_does_not_change_the_plan(given: list[str], switched: list[str]) -> None:
    given, num_plans = ["learner.lora_rank=16", "engine.max_num_seqs=128", *given], 0
    for total in range(16, 140):
        try:
            plain, drafts = plan(SMALL, total * GIB, *given), plan(SMALL, total * GIB, *given, *switched)
        except ValueError:
            assert not num_plans
            continue
        num_plans += 1
        assert drafts.tokens_per_microbatch == plain.tokens_per_microbatch
        assert drafts == plain or total < 28, "the plan differs only where memory is short"
    assert num_plans > 100


def test_settings_of_a_head_that_is_not_trained_do_not_change_the_plan() -> None:
    given, sizes = "learner.activation_checkpointing=true", ["draft.tokens_per_batch=16384", "draft.unroll=8"]
    assert plan(SMALL, 141e9, given) == plan(SMALL, 141e9, given, *sizes)
    online = ["speculation.method=eagle3", "draft.online=every"]
    assert plan(SMALL, 141e9, given, *online) == plan(SMALL, 141e9, given)
    assert plan(SMALL, 141e9, given, *online, *sizes).activations > 3 * plan(SMALL, 141e9, given).activations


def test_plan_does_not_ask_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> Any:
        raise AssertionError("a plan is a pure function")

    first = plan(SMALL, 80e9)
    for name in ("mem_get_info", "get_device_properties", "memory_reserved", "is_available"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    assert plan(SMALL, 80e9) == first
    assert plan(SMALL, 80e9 // GIB * GIB) == first == plan(SMALL, 80e9 // GIB * GIB + GIB - 1), "totals are rounded"


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["engine.sleep=false"],
        ["engine.sleep=true"],
        ["train.max_staleness=1"],
        ["learner.lora_rank=16"],
        ["learner.lora_rank=16", "engine.max_num_seqs=64", "sampling.max_tokens=8192"],
        ["learner.activation_checkpointing=true", "algorithm.beta=0.1"],
        ["speculation.method=hybrid", "learner.lora_rank=16"],
    ],
)
def test_more_memory_never_gives_less(given: list[str]) -> None:
    before, num_plans, choices, needed = (0, 0), 0, set(), needed_kv_tokens(on_gpu(*given), SMALL)
    for total in range(8 * GIB, 200 * GIB, GIB):
        try:
            found = plan(SMALL, total, *given)
        except ValueError:
            assert not num_plans, f"{total / GIB} GiB are refused, but less memory was enough"
            continue
        num_plans += 1
        assert found.sum_bytes <= usable_bytes(total)
        choice = found.tokens_per_microbatch, found.kv_tokens or 0
        assert choice[0] >= before[0] and choice[1] >= before[1], f"{total / GIB} GiB: {choice} after {before}"
        before = choice
        choices.add(choice)
    assert before[0] == 8192 and before[1] >= needed
    assert len(choices) > 3, "the KV cache grows, then the microbatch, then the KV cache"


def test_order_of_the_choice() -> None:
    """The KV cache shrinks to what is needed, then the microbatch, then the KV cache, down to one sequence."""
    needed, given = needed_kv_tokens(on_gpu(), SMALL), ["engine.sleep=false", "learner.lora_rank=16"]
    found = [plan(SMALL, total * GIB, *given) for total in range(30, 200)]
    sizes = [p.kv_tokens or 0 for p in found]
    assert {p.tokens_per_microbatch for p in found} == {4096, 8192}, "a sequence may have more than 4096 tokens"
    assert {p.tokens_per_microbatch for p in found if (p.kv_tokens or 0) > needed} == {8192}
    assert {p.tokens_per_microbatch for p in found if (p.kv_tokens or 0) < needed} == {4096}
    assert needed in sizes and max(sizes) > needed > min(sizes) >= least_kv_tokens(on_gpu(), SMALL)
    short = replace(SMALL, max_positions=1024)
    choices = {plan(short, total * GIB, *given).tokens_per_microbatch for total in range(30, 60)}
    assert choices == {2048, 4096, 8192}


def test_kv_cache_is_ample_where_memory_is() -> None:
    """Evaluations have more prompts, and prompts may be longer, than training needs on average."""
    default = ["engine.max_num_seqs=32", "sampling.max_tokens=128"]
    ample = plan(SMALL, 141e9, *default)
    assert ample.kv_tokens == 32 * 4096 and not ample.sleeps and ample.tokens_per_microbatch == 8192
    assert plan(SMALL, 141e9, *default, "engine.max_num_seqs=4").kv_tokens == SMALL.max_positions, "a whole context"
    less = plan(SMALL, 80e9, *default)
    assert less.kv_tokens is not None and SMALL.max_positions < less.kv_tokens < 32 * 4096
    assert less.kv <= 74 * GIB / 8 and not less.sleeps and less.tokens_per_microbatch == 8192
    assert plan(SMALL, 58 * GIB, *default).kv_tokens == needed_kv_tokens(on_gpu(*default), SMALL), "memory is short"


def test_kv_cache_of_the_settings() -> None:
    kv = {"tokens": needed_kv_tokens(on_gpu(), SMALL)}
    assert kv["tokens"] == 256 * 480 + 32 * 1024
    assert needed_kv_tokens(on_gpu("engine.prefix_sharing=false"), SMALL) == 256 * (480 + 1024)
    assert needed_kv_tokens(on_gpu("sampling.max_tokens=100_000"), SMALL) == 256 * 40960
    assert needed_kv_tokens(on_gpu("engine.max_num_seqs=1"), SMALL) == 4096 + 480
    assert needed_kv_tokens(on_gpu("task.kind=env", "task.name=x:y"), SMALL) == 256 * 4096


def test_sleep_is_by_the_share_of_the_kv_cache() -> None:
    total = 141e9
    assert plan(SMALL, total).sleeps and not plan(SMALL, total, "engine.max_num_seqs=64").sleeps
    assert not plan(SMALL, total, "engine.sleep=false").sleeps
    assert not plan(SMALL, total, "train.max_staleness=1").sleeps, "the engine generates meanwhile"
    given = "engine.kv_tokens=155648"
    asleep, awake = (plan(SMALL, total, f"engine.sleep={sleep}", given) for sleep in ("true", "false"))
    assert awake.sum_bytes - asleep.sum_bytes == min(asleep.kv, asleep.microbatch_bytes)
    found = [plan(SMALL, total * GIB, "engine.max_num_seqs=64") for total in range(50, 70)]
    assert any(8 * each.kv < 50 * GIB and each.sleeps for each in found), "else it would not fit"


def test_a_small_batch_gets_a_small_microbatch() -> None:
    assert plan(SMALL, 141e9, "train.groups_per_step=1", "algorithm.num_generations=2").tokens_per_microbatch == 2048


def test_a_long_sequence_counts_as_a_microbatch() -> None:
    given = ["engine.max_num_seqs=8", "learner.tokens_per_microbatch=2048"]
    long = plan(SMALL, 141e9, "sampling.max_tokens=12288", *given)
    assert long.packed_tokens == 4096 + 12288 and long.activations == 2 * plan(SMALL, 141e9).activations
    assert plan(replace(SMALL, max_positions=2048), 141e9, *given).packed_tokens == 2048
    with pytest.raises(ValueError, match=r"for activations, 4576 tokens.*makes it fit: .*activation_checkpointing"):
        plan(LARGE, 33 * GIB, "learner.lora_rank=16")  # a prompt of 4096 tokens would not fit


def test_given_numbers_are_kept() -> None:
    found = plan(SMALL, 141e9, "engine.kv_tokens=5000", "learner.tokens_per_microbatch=32768")
    assert (found.kv_tokens, found.tokens_per_microbatch) == (5000, 32768)


REFUSED: list[tuple[ModelConfig, int, list[str], list[str]]] = [
    (SMALL, 74, ["engine.kv_tokens=800000"], ["lower engine.kv_tokens to 155648"]),
    (
        SMALL,
        74,
        ["learner.tokens_per_microbatch=60000"],
        ["lower learner.tokens_per_microbatch to 8192", "set learner.activation_checkpointing = true"],
    ),
    (LARGE, 74, ["algorithm.beta=0.1"], ["set learner.lora_rank = 16"]),
    (
        SMALL,
        19,
        ["learner.lora_rank=16", "sampling.max_tokens=16384", "engine.max_num_seqs=1"],
        ["lower sampling.max_tokens to 2048"],
    ),
    (
        SMALL,
        50,
        ["engine.sleep=false", "engine.max_num_seqs=64", "engine.kv_tokens=65536"],
        [
            "lower engine.kv_tokens to 17024",
            "set engine.sleep = true",
            "set learner.activation_checkpointing = true",
            "set learner.lora_rank = 16",
        ],
    ),
    (
        SMALL,
        74,
        ["engine.kind=vllm", "speculation.rule=rejection"],
        ["lower engine.vllm.gpu_memory_utilization to 0.5"],
    ),
]


@pytest.mark.parametrize(("model", "total", "given", "expected"), REFUSED)
def test_refusals_list_what_makes_the_run_fit(
    model: ModelConfig, total: int, given: list[str], expected: list[str]
) -> None:
    with pytest.raises(ValueError) as refused:
        plan(model, total * GIB, *given)
    assert str(refused.value).split("What makes it fit: ")[1].split(", or ") == expected
    numbers = [each.partition(" to ") for each in expected if " to " in each]
    for key, _, value in numbers:  # as the message says
        plan(model, total * GIB, *given, f"{key.removeprefix('lower ')}={value}")


def test_refusals_list_only_what_helps() -> None:
    with pytest.raises(ValueError) as refused:
        plan(LARGE, 24 * GIB, "learner.lora_rank=16", "learner.activation_checkpointing=true", "algorithm.beta=0.1")
    message = str(refused.value)
    assert re.search(r"needs \d+\.\d GiB, but of the GPU's 24\.0 GiB a run may use 22\.5 GiB", message)
    assert "GiB for weights of the learner" in message and "use a smaller model; one of these is not enough" in message
    for other in ("engine.kv_tokens", "tokens_per_microbatch", "sleep", "lora_rank", "beta", "staleness", "draft"):
        assert other not in message, "it is set so, or changes nothing"


def test_a_head_that_is_not_used_takes_no_memory_that_the_run_needs() -> None:
    given = ["learner.lora_rank=16", "learner.activation_checkpointing=true"]
    full, num_refused = needed_kv_tokens(on_gpu(), LARGE), 0
    found = plan(LARGE, 30 * GIB, *given)
    assert found.drafter == 0 and found.tokens_per_microbatch == 4096
    assert full / 16 <= (found.kv_tokens or 0) <= full / 2
    with pytest.raises(ValueError, match="GiB for drafter"):
        plan(LARGE, 30 * GIB, *given, "speculation.method=eagle3")
    for total in range(30, 74):
        plain = plan(LARGE, total * GIB, *given)
        assert plain.drafter or (plain.kv_tokens or 0) <= full / 2
        try:
            drafts = plan(LARGE, total * GIB, *given, "speculation.method=eagle3")
        except ValueError:
            assert not plain.drafter
            num_refused += 1
            continue
        assert drafts == plain or (not plain.drafter and drafts.tokens_per_microbatch == plain.tokens_per_microbatch)
    assert 0 < num_refused < 10
    asleep = [plan(SMALL, total * GIB, "engine.max_num_seqs=64") for total in (48, 51)]
    assert not asleep[0].drafter and asleep[0].kv_tokens == asleep[1].kv_tokens, "a smaller KV cache would not help"
