"""The parts of the vLLM engine that do not import vLLM."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.cluster import vllm_shared
from paceline.cluster.vllm_provenance import provenance
from paceline.cluster.vllm_shared import read_bucket, with_tied_head, write_buckets
from paceline.types import Provenance

S, A, C, B = Provenance.SAMPLED, Provenance.ACCEPTED, Provenance.CORRECTED, Provenance.BONUS


@pytest.mark.parametrize(
    ("tokens_per_step", "accepted", "drafted", "expected"),
    [
        ([1, 1, 1], [], [], [S, S, S]),
        ([1, 3, 1], [2, 0], [2, 3], [S, A, A, B, C]),
        ([1, 2, 1, 3], [1, 0, 2], [3, 3, 3], [S, A, C, C, A, A, C]),
        ([1, 1, 1, 3], [0, 2], [3, 2], [S, S, S, A, A, B]),  # it is unknown which of the two steps had a draft
        ([1, 2], [3], [3], [S, A, A]),  # truncated by a stop
        ([1, 1], [3], [3], [S, A]),
        ([1, 3, 1], [], [], [S, A, A, S, S]),  # the engine aborted it, so vLLM reported no drafts
        ([], [], [], []),
    ],
)
def test_provenance(tokens_per_step, accepted, drafted, expected) -> None:
    found = provenance(tokens_per_step, accepted, drafted)
    assert found.tolist() == expected and found.dtype == np.uint8


def weights() -> list[tuple[str, torch.Tensor]]:
    return [
        ("a", torch.randn(3, 5)),
        ("b", torch.randn(7, dtype=torch.bfloat16)),
        ("c", torch.tensor([True, False, True])),
        ("d", torch.arange(4)),
        ("e", torch.randn(5, 4).t()),  # not contiguous
    ]


@pytest.mark.parametrize("max_bytes", [math.inf, 64, 1])
def test_buckets_arrive_as_they_were_sent(max_bytes: float, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(vllm_shared, "FOLDERS", (str(tmp_path / "missing"), str(tmp_path)))
    sent, received, paths = weights(), [], set()
    for bucket in write_buckets(sent, max_bytes):
        received += read_bucket(bucket["path"], bucket["size"], bucket["tensors"], torch.device("cpu"))
        paths.add(bucket["path"])
        assert Path(bucket["path"]).stat().st_mode & 0o077 == 0
    assert [name for name, _ in received] == list("abcde")
    assert all(a.dtype == b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(sent, received, strict=True))
    assert list(tmp_path.iterdir()) == [] and paths


def test_unread_buckets_are_removed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(vllm_shared, "FOLDERS", (str(tmp_path),))
    buckets = write_buckets(weights(), 1)
    next(buckets)
    assert len(list(tmp_path.iterdir())) == 1
    buckets.close()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(vllm_shared, "FOLDERS", (str(tmp_path / "missing"),))
    with pytest.raises(ValueError, match="not enough space for"):
        list(write_buckets(weights()))


def test_tied_head_is_sent_explicitly() -> None:
    class Config:
        tie_word_embeddings = True

    sent = [("model.embed_tokens.weight", torch.ones(2)), ("model.norm.weight", torch.ones(1))]
    names = [name for name, _ in with_tied_head(iter(sent), Config)]
    assert names == ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    assert [name for name, _ in with_tied_head(iter(sent), object())] == [name for name, _ in sent]
