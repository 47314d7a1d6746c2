"""The vLLM engine: requests, completions, weight updates and drafters, compared with the learner's model.

vLLM runs in this process, as in `paceline train`. The models are tiny: the tests compare numbers, not speed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_vllm import SHAPE
from tiny_run import write_head

pytest.importorskip("vllm.v1", reason="needs vLLM", exc_type=ImportError)

from paceline.build.config import load_config
from paceline.build.drafter import build_head
from paceline.build.run import build_rollout_engine
from paceline.cluster import vllm_engine, vllm_sampler, vllm_shared, vllm_transfer
from paceline.cluster.vllm_engine import VllmEngine
from paceline.config import Config
from paceline.model import weights
from paceline.model.attention import PackedAttention
from paceline.model.decoder import Decoder
from paceline.model.head_files import head_state
from paceline.model.sample import process
from paceline.model.sampling_arrays import SamplingArrays
from paceline.model.weights import checksum, hf_state
from paceline.types import Completion, Provenance, Request, SamplingParams

pytestmark = pytest.mark.vllm
PROMPTS = [tuple((7 * i + j * j) % 200 for j in range(5 + 3 * i)) for i in range(6)]
REJECTION = "speculation.rule=rejection"


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", **SHAPE)


def settings(model: Path, *overrides: str) -> Config:
    given = [f"model.name={str(model)!r}", "engine.kind=vllm", "engine.graphs=false", "engine.max_num_seqs=8"]
    return load_config(None, [*given, *overrides])


@contextmanager
def running(config: Config) -> Iterator[VllmEngine]:
    engine = build_rollout_engine(config)
    assert isinstance(engine, VllmEngine)
    try:
        yield engine
    finally:
        engine.close()


def requests(first: int = 0, **sampling: Any) -> list[Request]:
    params = SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **sampling})
    return [Request(first + i, prompt, params, noise_key=i, problem=str(i)) for i, prompt in enumerate(PROMPTS)]


def generate(engine: VllmEngine, wanted: Sequence[Request]) -> list[Completion]:
    handles = [engine.submit(request) for request in wanted]
    while engine.has_work:
        engine.step()
    return [handle.completion for handle in handles]


@torch.no_grad()
def logprobs_of(decoder: Decoder, completion: Completion) -> tuple[np.ndarray, np.ndarray]:
    """The learner's logprobs, processed and raw."""
    request = completion.request
    tokens = torch.tensor([*request.prompt_ids, *completion.token_ids.tolist()])
    hidden = decoder(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)])).hidden
    logits = decoder.logits(hidden[len(request.prompt_ids) - 1 : -1])
    targets = tokens[len(request.prompt_ids) :, None]
    params = SamplingArrays.of([request.sampling], np.array([len(targets)]))
    raw = logits.double().log_softmax(-1)
    return process(logits, params).gather(1, targets)[:, 0].numpy(), raw.gather(1, targets)[:, 0].numpy()


def max_logprob_error(decoder: Decoder, completions: Sequence[Completion]) -> float:
    return max(float(np.abs(c.logprobs - logprobs_of(decoder, c)[0]).max()) for c in completions)


def perturbed(model: Path, seed: int = 1) -> Decoder:
    """The model with a change of every weight."""
    decoder = weights.load(model).requires_grad_(False)
    noise = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=noise))
        parameter.view(-1)[5] = -0.0  # reading by multiplication loses the sign
    return decoder


# ---- requests ----


def test_completions_and_traces(model: Path) -> None:
    decoder = weights.load(model)
    with running(settings(model)) as engine:
        assert engine.dtype == torch.float32 and not engine.wants_sleep
        kinds: list[dict[str, Any]] = [
            {},
            {"temperature": 0.7},
            {"temperature": 0.0},
            {"top_k": 5, "top_p": 0.9},
            {"min_p": 0.05},
        ]
        found = {}
        for i, kind in enumerate(kinds):
            found[i] = generate(engine, requests(10 * i, **kind))
            assert [len(c.token_ids) for c in found[i]] == [16] * 6
            assert max_logprob_error(decoder, found[i]) < 1e-3
        for completion in (*found[0], *found[2]):
            assert np.abs(completion.raw_logprobs - logprobs_of(decoder, completion)[1]).max() < 1e-3
        assert all(np.isnan(c.raw_logprobs).all() for i in (1, 3, 4) for c in found[i])  # vLLM reports one of the two
        traces = engine.drain_trace()
        assert sum(trace.num_emitted for trace in traces) == 5 * 6 * 16
        assert traces[0].num_query_tokens == sum(map(len, PROMPTS)) and traces[1].num_query_tokens == 6
        assert [trace.step for trace in traces] == list(range(len(traces)))
        assert engine.drain_trace() == []
        again = generate(engine, requests(60))
        assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in found[0]]  # same seeds
        check_stops_and_aborts(engine, found[0][3])


def check_stops_and_aborts(engine: VllmEngine, known: Completion) -> None:
    """`known` is the completion of request 3 without a stop."""
    emitted, prompt = known.token_ids.tolist(), PROMPTS[3]
    position = emitted.index(emitted[9])
    stop = SamplingParams(max_tokens=16, stop_token_ids=(emitted[9],), ignore_eos=True)
    text = engine.tokenizer.decode(emitted[:10])[-2:]
    num_emitted = next(i for i in range(1, 17) if text in engine.tokenizer.decode(emitted[:i]))
    stop_string = SamplingParams(max_tokens=16, stop=(text,), ignore_eos=True)
    endless = SamplingParams(max_tokens=100, ignore_eos=True)
    by_id, by_text, aborted = (
        engine.submit(Request(90 + i, prompt, params, noise_key=3))
        for i, params in enumerate((stop, stop_string, endless))
    )
    for _ in range(3):
        engine.step()
    engine.abort(92)
    assert aborted.completion.finish_reason == "abort" and aborted.completion.token_ids.tolist() == emitted[:3]
    while engine.has_work:
        engine.step()
    assert by_id.completion.token_ids.tolist() == emitted[: position + 1]
    assert by_id.completion.stop_reason == emitted[9]
    assert by_text.completion.token_ids.tolist() == emitted[:num_emitted] and by_text.completion.stop_reason == text
    for bad, message in (((1,) * 128, "its prompt has 128 tokens"), ((1, 259), "token id 259 is not in the vocab")):
        with pytest.raises(ValueError, match=message):
            engine.submit(Request(99, bad))
    with pytest.raises(ValueError, match="request 99 is not running"):
        engine.abort(99)
    assert not engine.has_work


# ---- weights ----


@pytest.mark.parametrize("weight_transfer", [True, False], ids=["transfer", "reload"])
@pytest.mark.parametrize(("family", "tie"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_all_weights_arrive(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str, tie: bool, weight_transfer: bool
) -> None:
    if not weight_transfer and family != "llama":
        pytest.skip("the fallback does not depend on the family")
    model = checkpoint(family, tie=tie, **SHAPE)
    monkeypatch.setattr(vllm_shared, "MAX_BYTES", 1 << 18)
    monkeypatch.setattr(vllm_engine, "MAX_BYTES", 1 << 18)  # several buckets, with a layer's parts in two of them
    monkeypatch.setattr(vllm_engine, "HAS_WEIGHT_TRANSFER", weight_transfer)
    with running(settings(model)) as engine:
        before = generate(engine, requests())
        for version in (1, 2):
            decoder = perturbed(model, version)
            receipt = engine.update_weights(hf_state(decoder), version)
            assert receipt.checksum == checksum(hf_state(decoder)) and receipt.version == engine.version == version
            assert receipt.num_bytes == sum(tensor.nbytes for _, tensor in hf_state(decoder))
            after = generate(engine, requests(10 * version))
            assert max_logprob_error(decoder, after) < 1e-3 and all((c.versions == version).all() for c in after)
            assert [c.token_ids.tolist() for c in after] != [c.token_ids.tolist() for c in before]
        with pytest.raises(ValueError, match="no weights"):
            engine.update_drafter([], 1)


def test_incomplete_transfer_is_detected(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = perturbed(model)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    with running(settings(model, "engine.kv_tokens=64")) as engine:
        # The environment variable is ignored. vLLM reserves one of the blocks.
        assert engine._config.cache_config.num_gpu_blocks == 2
        with pytest.raises(ValueError, match=r"may reach 68 tokens, but engine.kv_tokens = 64; raise it or lower"):
            engine.submit(Request(99, (1,) * 52, SamplingParams(max_tokens=16)))
        incomplete = [(name, tensor) for name, tensor in hf_state(decoder) if "layers.1.mlp.up_proj" not in name]
        assert engine.update_weights(incomplete, 1).checksum != checksum(hf_state(decoder))
        # Without an explicit tied LM head vLLM keeps using the old one.
        decoder = perturbed(model, 2)
        monkeypatch.setattr(vllm_transfer, "with_tied_head", lambda weights, config: weights)
        receipt = engine.update_weights(hf_state(decoder), 2)
        assert receipt.checksum != checksum(hf_state(decoder))
        assert max_logprob_error(decoder, generate(engine, requests())) > 1e-2
        monkeypatch.undo()
        assert engine.update_weights(hf_state(decoder), 3).checksum == checksum(hf_state(decoder))
        assert max_logprob_error(decoder, generate(engine, requests(10))) < 1e-3


def test_running_requests_continue_with_new_weights(model: Path) -> None:
    decoder, old = perturbed(model), weights.load(model)
    with running(settings(model)) as engine:
        handles = [engine.submit(request) for request in requests()]
        for _ in range(6):
            engine.step()
        with pytest.raises(ValueError, match="inflight = 'keep'"):
            engine.update_weights(hf_state(decoder), 1, "keep")
        engine.update_weights(hf_state(decoder), 1, "recompute")
        while engine.has_work:
            engine.step()
        for completion in (handle.completion for handle in handles):
            assert completion.versions.tolist() == [0] * 6 + [1] * 10
            assert np.abs(completion.logprobs - logprobs_of(old, completion)[0])[:6].max() < 1e-3
            assert np.abs(completion.logprobs - logprobs_of(decoder, completion)[0])[6:].max() < 1e-3


# ---- drafters ----


def test_head_and_its_weight_updates(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(model, *write_head(tmp_path, model=model, layers=(1, 2, 3)), REJECTION)
    decoder = weights.load(model)
    head = build_head(config, decoder.config).requires_grad_(False)
    with running(config) as engine:
        found = generate(engine, requests())
        assert max_logprob_error(decoder, found) < 1e-3
        assert all(
            c.provenance[0] == Provenance.SAMPLED and (c.provenance[1:] != Provenance.SAMPLED).all() for c in found
        )
        traces = engine.drain_trace()
        assert sum(c.num_drafts for c in found) == sum(t.num_drafts for t in traces) > 0
        assert sum(c.num_draft_tokens for c in found) == sum(t.num_draft_tokens for t in traces)
        for parameter in head.parameters():
            parameter.mul_(1.5)
        policy = engine.update_weights(hf_state(decoder), 1).checksum
        receipt = engine.update_drafter(head_state(head), 1)
        assert receipt.checksum == checksum(head_state(head))
        assert engine._call_workers("paceline_receipt", 0, False).checksum == policy == checksum(hf_state(decoder))
        generate(engine, requests(10))
        assert engine.drain_trace()[-1].drafter_version == 1
        # A common bug: the drafter's transfer does nothing and reports no error.
        for parameter in head.parameters():
            parameter.mul_(1.5)
        monkeypatch.setattr(vllm_transfer.SharedMemoryTransfer, "receive_weights", lambda self, info: None)
        assert engine.update_drafter(head_state(head), 2).checksum != checksum(head_state(head))


def test_history_drafter(model: Path) -> None:
    """It drafts from completions of the same problem, and its state can be saved and loaded."""
    config = settings(model, "speculation.method=suffix", REJECTION)
    with running(config) as engine:
        first = generate(engine, requests(temperature=0.0))
        engine.drain_trace()
        again = generate(engine, requests(10, temperature=0.0))
        assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in first]
        state_dict = engine.state_dict()
        assert all(c.mean_acceptance_length > 3 for c in again)
        engine.load_state_dict({"drafter": {name: array[:0] for name, array in state_dict["drafter"].items()}})
        without_history = generate(engine, requests(20, temperature=0.0))
        assert sum(c.num_accepted_tokens for c in without_history) < sum(c.num_accepted_tokens for c in again)
        engine.load_state_dict(state_dict)
        assert all(c.mean_acceptance_length > 3 for c in generate(engine, requests(30, temperature=0.0)))
        # Another problem with the same prompt does not share the history.
        check_drafts_of_stopped_requests(engine, again[3])
        others = [Request(40 + r.request_id, r.prompt_ids, r.sampling, 0, "another") for r in requests(temperature=0.0)]
        assert sum(c.num_accepted_tokens for c in generate(engine, others[:1])) < again[0].num_accepted_tokens


def check_drafts_of_stopped_requests(engine: VllmEngine, known: Completion) -> None:
    """vLLM itself reports no drafts for requests that end with a stop string or an abort."""
    sampling = known.request.sampling
    text = engine.tokenizer.decode(known.token_ids.tolist()[:12])[-2:]
    engine.drain_trace()
    stopped, aborted = (
        engine.submit(replace(known.request, request_id=60 + i, sampling=replace(sampling, stop=stop)))
        for i, stop in enumerate(((text,), ()))
    )
    engine.step()
    engine.step()
    if not aborted.done:
        engine.abort(61)
    while engine.has_work:
        engine.step()
    found, traces = [stopped.completion, aborted.completion], engine.drain_trace()
    assert [c.finish_reason for c in found] == ["stop", "abort"]
    assert sum(c.num_drafts for c in found) == sum(t.num_drafts for t in traces) > 1
    assert sum(c.num_draft_tokens for c in found) == sum(t.num_draft_tokens for t in traces)
    for completion in found:
        assert completion.num_accepted_tokens == (completion.provenance == Provenance.ACCEPTED).sum() > 1


def test_broken_sampler_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample import rejection_sampler

    x, cu_num_tokens = torch.tensor([0.5, 0.0, 0.7]), torch.tensor([1, 3, 3], dtype=torch.int32)
    assert vllm_sampler.expand_batch_to_tokens(x, cu_num_tokens, 3, 0, 1).tolist() == [0.5, 1.0, 1.0]
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", lambda x, *_: x)
    vllm_sampler.check_sampler(torch.device("cpu"))
    assert rejection_sampler.expand_batch_to_tokens is vllm_sampler.expand_batch_to_tokens


def test_tensor_parallel_workers(checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: Any) -> None:
    """Two tensor-parallel workers together hold the sent weights. They ignore SIGINT: the engine decides when to
    stop."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    model = checkpoint("qwen2", tie=False, **SHAPE)  # its qkv has biases
    head = write_head(tmp_path, model=model, layers=(1, 2, 3))
    config = settings(model, *head, REJECTION, "engine.tensor_parallel_size=2")
    decoder = perturbed(model)
    drafter = build_head(config, decoder.config).requires_grad_(False)
    for parameter in drafter.parameters():
        parameter.mul_(1.5)
    with running(config) as engine:
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGINT)
        assert engine.update_weights(hf_state(decoder), 1).checksum == checksum(hf_state(decoder))
        assert engine.update_drafter(head_state(drafter), 1).checksum == checksum(head_state(drafter))
        assert max_logprob_error(decoder, generate(engine, requests())) < 1e-3
        worker = multiprocessing.active_children()[0]
        worker.kill()
        worker.join()
        with pytest.raises(ValueError, match="one of vLLM's worker processes has died"):
            generate(engine, requests(10))
