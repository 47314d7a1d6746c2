"""What the host knows of drafts on the device: which requests have any, and, once they are verified, their scores."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.drafters.device import DeviceDSparkDrafter, DeviceEagle3Drafter, DeviceHeadDrafter, DeviceHybridDrafter
from paceline.speculation.acceptance import AcceptanceModel
from paceline.speculation.batch import Rows
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.history_store import HistoryStore
from paceline.types import SamplingParams

K = 3


def eagle3() -> DeviceEagle3Drafter:
    head: Any = SimpleNamespace(config=SimpleNamespace(aux_layers=(0,)))
    return DeviceEagle3Drafter(head)


def ids(*request_ids: int) -> np.ndarray:
    return np.array(request_ids, np.int64)


def rows_of(request_ids: np.ndarray) -> Rows:
    num = len(request_ids)
    return Rows(request_ids, [np.zeros(4, np.int32)] * num, np.zeros(num, np.uint64), [SamplingParams()] * num)


def dspark() -> DeviceDSparkDrafter:
    head: Any = SimpleNamespace(config=SimpleNamespace(aux_layers=(0,), block_size=K))
    return DeviceDSparkDrafter(head)


def propose(drafter: DeviceHeadDrafter, request_ids: np.ndarray) -> DraftBatch:
    return drafter.propose(rows_of(request_ids), np.full(len(request_ids), K, np.int32))


@pytest.mark.parametrize("make", [eagle3, dspark])
def test_positions_are_reserved_for_the_longest_drafts_so_far(make: Callable[[], DeviceHeadDrafter]) -> None:
    """A graph that drafts three tokens may also run a step that wants one. No drafts have a graph of their own."""
    drafter, rows = make(), rows_of(ids(1, 2))
    for caps, num_positions in (([1, 0], 1), ([1, 3], 3), ([0, 2], 3), ([0, 0], 0), ([1, 1], 3)):
        drafter.set_draft_length(rows, np.array(caps, np.int32))
        assert drafter.kv_lookahead == num_positions
        assert drafter.draft_length == max(caps)


def test_a_dspark_draft_is_at_most_as_long_as_trained_blocks() -> None:
    drafter = dspark()
    drafter.set_draft_length(rows_of(ids(1, 2)), np.array([K + 4, 1], np.int32))
    assert drafter.draft_length == K


def test_a_request_that_left_has_no_drafts_until_there_are_new_ones() -> None:
    drafter, wanted = eagle3(), ids(4, 7, 9)
    for _ in range(2):
        drafter.launched(wanted, K)
        assert propose(drafter, wanted).num.tolist() == [K, K, K]
        drafter.forget(7)
        assert propose(drafter, wanted).num.tolist() == [K, 0, K]
    drafter.launched(wanted.copy(), K)
    drafter.launched(wanted, K - 1)
    assert propose(drafter, ids(9, 5, 4)).num.tolist() == [K - 1, 0, K - 1]


@pytest.mark.parametrize("wanted", [ids(4, 7, 9), ids(9, 4), ids(5, 9, 4, 8), ids(1)])
@pytest.mark.parametrize("width", [1, K])
def test_scores_are_those_of_each_requests_draft(wanted: np.ndarray, width: int) -> None:
    """Whichever requests have come or left; and those of a verified step after the next one has finished."""
    rng, drafter = np.random.default_rng(0), eagle3()
    for _ in range(3):
        scores = rng.uniform(0.01, 1, (3, width)).astype(np.float32)
        by_request = dict(zip((4, 7, 9), scores, strict=True))
        drafter.launched(ids(4, 7, 9), width)
        drafter.drafted(ids(4, 7, 9), scores, np.zeros(3))
        expected = np.array([by_request.get(i, np.zeros(width)) for i in wanted.tolist()])
        proposed = propose(drafter, wanted)
        assert proposed.num.tolist() == [width if i in by_request else 0 for i in wanted.tolist()]
        assert proposed.scores.tolist() == expected[:, : proposed.scores.shape[1]].tolist()
        assert (proposed.tokens == -1).all()  # the host does not know them
        drafter.drafted(ids(2), np.ones((1, 2)), np.zeros(1))  # the next step, which has verified them
        verified = drafter.verified(wanted)
        assert verified.num.tolist() == proposed.num.tolist()
        assert verified.scores.tolist() == expected.tolist()
        assert verified.caps is not None and verified.caps.tolist() == proposed.num.tolist()


def test_a_request_without_a_draft_in_a_step_that_drafted_counts_as_not_drafted() -> None:
    """History may find nothing (score 0). A request that was not in the step counts neither way."""
    drafter, acceptance = eagle3(), AcceptanceModel()
    drafter.drafted(ids(4, 7), np.array([[0.9, 0.8], [0.0, 0.0]]), np.zeros(2))
    drafter.drafted(ids(4, 7, 8), np.ones((3, 2)), np.zeros(3))
    verified = drafter.verified(ids(4, 7, 8))
    assert verified.num.tolist() == [2, 0, 0]
    assert verified.caps is not None and verified.caps.tolist() == [2, 2, 0]
    acceptance.rate(verified, "eagle3")
    acceptance.observe(verified, "eagle3", None, np.array([1, 0, 0]), np.array([2, 0, 0]))
    assert acceptance.num_drafts("eagle3") == 2 and acceptance.num_outcomes("eagle3") == 2


@pytest.mark.parametrize("make", [eagle3, dspark])
def test_a_hybrid_has_the_drafter_of_each_draft(make: Callable[[], DeviceHeadDrafter]) -> None:
    head = make()
    drafter = DeviceHybridDrafter(HistoryStore(), head)
    drafter.drafted(ids(4, 7), np.full((2, K), 0.5), np.array([1, 0]))
    drafter.drafted(ids(4, 7), np.full((2, K), 0.5), np.array([0, 1]))
    for verified, expected in ((drafter.verified(ids(7, 4)), [0, 1]), (propose(drafter, ids(7, 4)), [1, 0])):
        assert verified.names == ("suffix", head.name) and head.name == make.__name__
        assert verified.sources is not None and verified.sources.tolist() == expected
