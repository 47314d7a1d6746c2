"""The plain torch path on a CUDA device: it decodes, speculates, trains, and draws the same noise as a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_decoder
from tiny_run import write_model

from paceline.build.config import load_config
from paceline.build.model import HOPPER
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.attention import PackedAttention
from paceline.model.decoder import first_layers
from paceline.model.paged import PagedDecoder
from paceline.model.sample import PhiloxNoise, Sampler, Stream, philox_words
from paceline.model.weights import checksum, hf_state
from paceline.speculation.policy import StaticPolicy
from paceline.types import Completion, Request, SamplingParams
from paceline.verify.checks import run_checks

pytestmark = pytest.mark.gpu


def requests() -> list[Request]:
    rng = np.random.default_rng(1)
    kinds = [{}, {"temperature": 0.0}, {"temperature": 0.8, "top_k": 7}, {"top_p": 0.7, "min_p": 0.02}]
    return [
        Request(
            i,
            tuple(rng.integers(0, 60, rng.integers(1, 30)).tolist()),
            SamplingParams(max_tokens=24, **kinds[i % 4]),
            17 * i,
            str(i % 3),
        )
        for i in range(12)
    ]


def generate(device: str, dtype: torch.dtype, drafter: str | None = None, rule: str = "coupled") -> list[Completion]:
    decoder = tiny_decoder(dtype).to(device)
    sampler = Sampler()
    drafters = {
        None: lambda: None,
        "suffix": SuffixDrafter,
        "draft_model": lambda: DraftModelDrafter(
            PagedDecoder(first_layers(decoder, 2), 64), sampler, coupled=rule == "coupled"
        ),
    }
    engine = LocalEngine(
        PagedDecoder(decoder, 64), sampler=sampler, drafter=drafters[drafter](), policy=StaticPolicy(3), rule=rule
    )
    return engine.generate(requests())


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [c.token_ids.tolist() for c in completions]


def num_accepted(completions: list[Completion]) -> int:
    return sum(c.num_accepted_tokens for c in completions)


def test_noise_words_are_the_same_on_both_devices() -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, 8, np.uint64)
    at = np.arange(8) << 20
    cpu, cuda = (philox_words(keys, at, Stream.DRAFT, 50_000, torch.device(d)).cpu() for d in ("cpu", "cuda"))
    assert torch.equal(cpu, cuda)
    weights = torch.rand(8, 50_000, dtype=torch.float64)
    assert (PhiloxNoise().race(weights, keys, at, 0) == PhiloxNoise().race(weights.cuda(), keys, at, 0)).all()


@pytest.mark.parametrize("drafter", [None, "suffix", "draft_model"])
def test_float64_tokens_equal_the_cpus(drafter: str | None) -> None:
    found = generate("cuda", torch.float64, drafter)
    assert tokens(found) == tokens(generate("cpu", torch.float64))
    assert (num_accepted(found) > 10) == (drafter is not None)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rejection_rules_emit_the_cpus_tokens(rule: str) -> None:
    cuda, cpu = (generate(device, torch.float64, "draft_model", rule) for device in ("cuda", "cpu"))
    assert tokens(cuda) == tokens(cpu) and num_accepted(cuda) == num_accepted(cpu) > 10
    for a, b in zip(cuda, cpu, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-9)


@pytest.mark.parametrize("drafter", [None, "suffix"])
def test_bfloat16_logprobs_are_those_of_the_tokens_emitted(drafter: str | None) -> None:
    """They are close to the float64 logprobs of the same tokens. Those of other tokens would differ by several nats."""
    found, decoder, gaps = generate("cuda", torch.bfloat16, drafter), tiny_decoder(torch.bfloat16).double(), []
    for c in found:
        ids = torch.tensor([*c.request.prompt_ids, *c.token_ids.tolist()])
        logits = decoder.logits(decoder(ids, torch.arange(len(ids)), PackedAttention([len(ids)])).hidden)
        logprobs = logits.log_softmax(-1)[len(c.request.prompt_ids) - 1 : -1].gather(1, ids[-len(c.token_ids) :, None])
        gaps.append(np.abs(logprobs[:, 0].numpy() - c.raw_logprobs))
    assert np.concatenate(gaps).mean() < 0.1 and (num_accepted(found) > 10) == (drafter is not None)


def verify(folder: Path, *settings: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Levels 3 to 5 on a model that the CUDA kernels support; returns those of the seeded and of the greedy tokens."""
    write_model(folder, num_layers=1, head_dim=16)
    config = load_config(None, [f"model.name={str(folder)!r}", "model.device=cuda", *settings])
    prompts = [list(text.encode()) for text in ("say a", "abcabcab", "1 2 3 4 5", "def f(x):")]
    report = run_checks(config, prompts, ("suffix",), quick=True, levels="345")
    assert report["passed"], report
    seeded, _, greedy, _ = report["checks"]
    return seeded, greedy


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_verify_passes_up_to_near_ties(tmp_path: Path, dtype: str) -> None:
    """With kernels that are not batch-invariant."""
    seeded, greedy = verify(tmp_path, f"model.dtype={dtype}", "engine.invariant=false")
    assert seeded["not_near_ties"] == greedy["not_near_ties"] == 0
    assert len(seeded["near_ties"]) == sum(seeded["differences"].values())
    assert (seeded["rounding"] < 1e-3) == (dtype == "float32")


def test_verify_allows_no_near_ties_with_batch_invariant_kernels(tmp_path: Path) -> None:
    """The default. Only transformers' tokens, which are computed in float32, may differ."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("batch-invariant kernels are for Hopper")
    seeded, greedy = verify(tmp_path)
    assert seeded["differences"].keys() > {"alone", "suffix, preempted", "none, 512 sequences", "suffix, 512 sequences"}
    assert not any(seeded["differences"].values()) and not any(greedy["differences_with_drafts"].values())
    assert "near_ties" not in seeded
    assert greedy["not_near_ties"] == 0 and len(greedy["near_ties"]) == greedy["differences"]


def test_training_gradients_equal_the_cpus() -> None:
    tokens = torch.arange(20) % 60
    grads = []
    for device in ("cpu", "cuda"):
        decoder = tiny_decoder().to(device).requires_grad_(True)
        positions = torch.cat([torch.arange(8), torch.arange(12)]).to(device)
        hidden = decoder(tokens.to(device), positions, PackedAttention([8, 12])).hidden
        decoder.logits(hidden).log_softmax(-1)[:, 3].sum().backward()
        grads.append([p.grad.cpu() for p in decoder.parameters()])
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(*grads, strict=True))


def test_checksums_agree_across_devices() -> None:
    assert checksum(hf_state(tiny_decoder())) == checksum(hf_state(tiny_decoder().cuda()))
