"""Block allocation and the prefix cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.model.kv import BLOCK, BlockPool, BlockTable

TOKENS = np.arange(100, dtype=np.int32)


def filled(pool: BlockPool, tokens: np.ndarray) -> BlockTable:
    table = BlockTable()
    assert pool.reserve(table, len(tokens))
    pool.cache_blocks(table, tokens)
    return table


def test_reserve_takes_all_or_nothing() -> None:
    pool = BlockPool(3)
    table = BlockTable()
    assert not pool.reserve(table, 3 * BLOCK + 1)
    assert table.blocks == []
    assert pool.num_free == 3
    assert pool.reserve(table, 2 * BLOCK + 1)
    assert len(set(table.blocks)) == 3
    pool.truncate(table, BLOCK)
    assert len(table.blocks) == 1
    assert pool.num_free == 2


def test_extend_equals_reserving_one_after_another() -> None:
    """Also if there are not enough free blocks, so that cached ones are evicted."""
    found = []
    for at_once in (True, False):
        pool = BlockPool(8)
        pool.truncate(filled(pool, TOKENS[:48]), 0)
        tables = [filled(pool, TOKENS[50:60]), BlockTable(), BlockTable()]
        nums = [2, 2, 3]
        if at_once:
            pool.extend(tables, nums)
        else:
            assert all(pool.reserve(table, num * BLOCK) for table, num in zip(tables, nums, strict=True))
        found.append(([t.blocks for t in tables], pool.ref_counts, pool.num_free))
    assert found[0] == found[1]
    assert [len(blocks) for blocks in found[0][0]] == [2, 2, 3] and found[0][2] == 1


def test_extend_can_be_repeated_after_an_interrupt() -> None:
    class Interrupted(list[int]):
        def __iadd__(self, more: object) -> Any:
            raise KeyboardInterrupt

    pool = BlockPool(8)
    tables = [BlockTable(), BlockTable(Interrupted()), BlockTable()]
    with pytest.raises(KeyboardInterrupt):
        pool.extend(tables, [1, 2, 3])
    assert [len(table.blocks) for table in tables] == [1, 0, 0] and pool.num_free == 7
    tables[1].blocks = []
    pool.extend(tables, [1, 2, 3])
    assert [len(table.blocks) for table in tables] == [1, 2, 3] and pool.num_free == 2


def test_full_blocks_are_shared_and_partial_matches_returned() -> None:
    pool = BlockPool(8)
    first = filled(pool, TOKENS[:40])
    second = BlockTable()
    wanted = np.concatenate([TOKENS[:37], [99, 98]]).astype(np.int32)
    covered, partial = pool.match_prefix(second, wanted)
    assert covered == 32
    assert second.blocks == first.blocks[:2]
    assert partial == (first.blocks[2], 5)
    assert pool.ref_counts[first.blocks[0]] == 2
    pool.truncate(first, 0)
    assert pool.ref_counts[second.blocks[0]] == 1


def test_idle_blocks_stay_cached_until_their_memory_is_needed() -> None:
    pool = BlockPool(4)
    pool.truncate(filled(pool, TOKENS[:48]), 0)
    assert pool.num_free == 4
    again = BlockTable()
    assert pool.match_prefix(again, TOKENS[:48])[0] == 48
    pool.truncate(again, 0)
    other = BlockTable()
    assert pool.reserve(other, 4 * BLOCK)  # also takes the idle ones, leaves first
    assert pool.match_prefix(BlockTable(), TOKENS[:48]) == (0, None)
    assert pool.num_free == 0


def test_leaves_are_evicted_before_their_parents() -> None:
    pool = BlockPool(4)
    pool.truncate(filled(pool, TOKENS[:64]), 0)
    taken = BlockTable()
    pool.reserve(taken, 2 * BLOCK)
    found = BlockTable()
    assert pool.match_prefix(found, TOKENS[:64])[0] == 32


def test_equal_content_is_cached_once() -> None:
    pool = BlockPool(8)
    first, second = filled(pool, TOKENS[:32]), BlockTable()
    pool.reserve(second, 48)
    pool.cache_blocks(second, TOKENS[:48])  # the same tokens, computed at the same time
    third = BlockTable()
    assert pool.match_prefix(third, TOKENS[:48])[0] == 48
    assert third.blocks == [*first.blocks, second.blocks[2]]
    for table in (first, second, third):
        pool.truncate(table, 0)
    assert pool.num_free == 8
    assert pool.ref_counts == [0] * 8


def test_reset_prefix_cache() -> None:
    pool = BlockPool(8)
    held = filled(pool, TOKENS[:32])
    pool.truncate(filled(pool, TOKENS[50:82]), 0)
    pool.reset_prefix_cache()
    assert pool.match_prefix(BlockTable(), TOKENS[:32]) == (0, None)
    assert pool.match_prefix(BlockTable(), TOKENS[50:82]) == (0, None)
    pool.reserve(held, 48)
    pool.cache_blocks(held, TOKENS[:48])  # partly computed with the old weights: must not be found
    assert pool.match_prefix(BlockTable(), TOKENS[:48]) == (0, None)
    pool.truncate(held, 0)
    assert pool.num_free == 8


def test_releasing_cached_blocks_of_a_running_sequence_is_a_bug() -> None:
    pool = BlockPool(8)
    with pytest.raises(AssertionError):
        pool.truncate(filled(pool, TOKENS[:48]), 16)
