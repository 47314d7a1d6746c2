"""Generation and training overlap on one GPU: weights are updated while requests run with CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from overlap import Overlap, assert_overlapped
from tiny_run import assert_each_once, lines, make, write_head, write_model, write_task

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("inflight", ["keep", "recompute"])
@pytest.mark.parametrize("method", ["suffix", "eagle3"])
def test_an_overlapped_run(tmp_path: Path, method: str, inflight: str) -> None:
    write_model(tmp_path / "model", head_dim=16)
    write_task(tmp_path / "task.jsonl")
    drafter = ["speculation.method=suffix"] if method == "suffix" else write_head(tmp_path)
    settings = f"train.inflight={inflight}", "train.max_staleness=1", "train.num_steps=6", "speculation.policy=static"
    trainer = make(
        tmp_path, "run", "model.device=cuda", "model.dtype=float32", "sampling.max_tokens=32", *settings, *drafter
    )
    overlap = Overlap(trainer)
    trainer.run()
    assert trainer.engine.runner.num_captured > 0, "no graphs were used"
    trainer.close()
    assert_overlapped(tmp_path / "run", overlap, inflight, 6)
    assert_each_once(tmp_path / "run", 6)
    metrics = lines(tmp_path / "run", "metrics")
    assert sum(t["num_draft_tokens"] for t in lines(tmp_path / "run", "trace")) > 100
    if inflight == "recompute":  # with `keep` the engine's KV is from older weights
        assert max(m["mismatch_mean"] for m in metrics[:1]) < 1e-3
    torch.cuda.empty_cache()
