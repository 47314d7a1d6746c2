"""Samples of vLLM with drafts against samples without, beside a null of the same size: a model of four tokens, whole
sequences as bins. As `verify/chance.py` does it for our own engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import write_head, write_model

from paceline.build.run import build_rollout_engine
from paceline.cluster import vllm_sampler
from paceline.config import load_config
from paceline.types import Request, SamplingParams, noise_key
from paceline.verify.chance import SIGNIFICANCE, Test, against_sample, holm

pytestmark = pytest.mark.vllm
VOCAB, LENGTH, SAMPLES, TEMPERATURE = 4, 4, 5000, 0.8
PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)
DRAFT = ["speculation.num_speculative_tokens=3", "speculation.rule=rejection"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm-chance")
    write_model(folder / "model", vocab_size=VOCAB, head_dim=32, num_layers=3, eos_token_ids=())
    return folder


def draw(folder: Path, name: str, *overrides: str) -> tuple[np.ndarray, float]:
    """Sequences as bin numbers, and how much of a draft stood on average."""
    given = [f"model.name={str(folder / 'model')!r}", "engine.kind=vllm", "engine.graphs=false"]
    engine = build_rollout_engine(load_config(None, [*given, "engine.max_num_seqs=128", *overrides]))
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=LENGTH, ignore_eos=True)
    try:
        handles = [engine.submit(Request(i, PROMPT, sampling, noise_key(name, i), "one")) for i in range(SAMPLES)]
        while not all(handle.done for handle in handles):
            engine.step()
        traces = engine.drain_trace()
    finally:
        engine.close()
    tokens = np.array([handle.completion.token_ids for handle in handles])
    drafts = sum(trace.num_drafts for trace in traces)
    accepted = sum(trace.num_accepted_tokens for trace in traces)
    return tokens @ VOCAB ** np.arange(LENGTH), accepted / max(1, drafts)


def compare(a: np.ndarray, b: np.ndarray) -> Test:
    return against_sample(a, b, VOCAB**LENGTH)


@contextmanager
def too_sharp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The broken twin: drafted positions at another temperature than the others."""
    from vllm.v1.sample import rejection_sampler

    def wrong(*given: Any, **more: Any) -> Any:
        return vllm_sampler.expand(*given, **more) * 0.7

    with monkeypatch.context() as patch:
        patch.setattr(vllm_sampler, "check_sampler", lambda device: None)
        patch.setattr(rejection_sampler, "expand_batch_to_tokens", wrong)
        yield


def test_drafts_do_not_change_the_distribution(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    methods = {
        "suffix": ["speculation.method=suffix"],
        "eagle3": write_head(folder, model=folder / "model", layers=(1, 2, 3), num_tokens=VOCAB - 1),
    }
    plain, _ = draw(folder, "plain")
    tests = {"plain": compare(plain, draw(folder, "null")[0])}
    for method, settings in methods.items():
        found, accepted = draw(folder, method, *settings, *DRAFT)
        tests[method] = compare(plain, found)
        assert accepted > 0.1  # else nothing was tried
    with too_sharp(monkeypatch):
        twin = compare(plain, draw(folder, "twin", *methods["suffix"], *DRAFT)[0])
    with capsys.disabled():
        for name, test in {**tests, "twin": twin}.items():
            print(
                f"\n  {name:6} against plain: chi-square {test.statistic:.0f} in {test.num_bins} bins, "
                f"p = {test.p_value:.2g}, total variation {test.total_variation:.3f}"
            )
    assert min(holm([test.p_value for test in tests.values()])) > SIGNIFICANCE > twin.p_value
