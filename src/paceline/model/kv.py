"""The paged KV cache: the layout of one step (BatchPlan), the tensors (PagedKV), the allocation of blocks (BlockPool)
and one sequence's blocks (BlockTable).

The policy and the draft model, if there is one, each have their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from paceline.model.config import ModelConfig

BLOCK = 16  # tokens per block; the CPU kernel computes a block's scores as one vector
COPY_CHUNK = 64  # blocks that are copied at once; each needs a temporary copy


@dataclass(slots=True)
class BatchPlan:
    """One forward pass: B rows, concatenated to T tokens. The queries of row i are
    tokens[query_start[i]:query_start[i+1]]. They are the last of its context[i] tokens, and block_tables[i] has the KV
    blocks of these."""

    tokens: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    query_start: np.ndarray  # int32 [B + 1]
    context: np.ndarray  # int32 [B]
    block_tables: np.ndarray  # int32 [B, max blocks of a row]
    logits_at: np.ndarray  # int64 [P], which of the T tokens need logits

    @property
    def num_rows(self) -> int:
        return len(self.context)

    def slot_mapping(self) -> np.ndarray:
        """Where each token's KV is written: block * BLOCK + offset, int64 [T]."""
        rows = np.repeat(np.arange(self.num_rows), np.diff(self.query_start))
        return self.block_tables[rows, self.positions // BLOCK].astype(np.int64) * BLOCK + self.positions % BLOCK


class PagedKV:
    """Keys and values by block. For the CPU kernels, keys are `transposed` within a block, so that one vector holds one
    dimension of 16 positions. Optionally also each token's auxiliary hidden states."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str,
        transposed: bool = False,
    ) -> None:
        shape = config.num_layers, num_blocks, config.num_kv_heads, BLOCK, config.head_dim
        self.config, self.transposed = config, transposed
        self.k = torch.zeros((*shape[:3], *shape[:2:-1]) if transposed else shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.aux_hidden_states: Tensor | None = None  # [slots, F]
        self.draft_kv: PagedKV | None = None  # a draft head's KV in the same blocks

    @property
    def num_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def allocate_aux_hidden_states(self, size: int) -> None:
        if self.aux_hidden_states is None or self.aux_hidden_states.shape[1] != size:
            self.aux_hidden_states = self.k.new_empty(self.k.shape[1] * BLOCK, size)

    def write(self, layer: int, slots_T: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> None:
        block, offset = slots_T // BLOCK, slots_T % BLOCK
        self._keys(layer)[block, :, offset] = k_TGE
        self.v[layer][block, :, offset] = v_TGE

    def read(self, layer: int, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """The first `context` keys and values [context, G, E] of the row with this block table."""
        blocks = table[: -(-context // BLOCK)]
        k, v = (x[blocks].transpose(1, 2).flatten(0, 1) for x in (self._keys(layer), self.v[layer]))
        return k[:context], v[:context]

    def _keys(self, layer: int) -> Tensor:
        """A view [blocks, G, BLOCK, E], transposed or not."""
        return self.k[layer].transpose(2, 3) if self.transposed else self.k[layer]

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """No block may be both source and target."""
        pairs = torch.as_tensor([sources, targets]).to(self.k.device, non_blocking=True)
        for chunk in pairs.split(COPY_CHUNK, 1):
            self._copy(*chunk)

    def _copy(self, sources: Tensor, targets: Tensor) -> None:
        for blocks in (self.k, self.v):
            blocks.index_copy_(1, targets, blocks.index_select(1, sources))
        if self.aux_hidden_states is not None:
            blocks = self.aux_hidden_states.unflatten(0, (-1, BLOCK))
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))
        if self.draft_kv is not None:
            self.draft_kv._copy(sources, targets)


@dataclass(slots=True)
class BlockTable:
    """One sequence's blocks. The first `num_cached` full blocks are in the prefix cache, the last of them as `node`."""

    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    node: int = 0
    epoch: int = 0

    def slot_mapping(self, start: int, end: int) -> np.ndarray:
        """Where the tokens start … end-1 are stored: block * BLOCK + offset, int64."""
        positions = np.arange(start, end)
        return np.array(self.blocks, np.int64)[positions // BLOCK] * BLOCK + positions % BLOCK


class BlockPool:
    """Reference-counted blocks with a prefix cache.

    The cache is a trie with one edge per block of tokens: a prompt that was computed once is shared by the other
    samples of its group, and by a later turn that starts with it. A cached block without references keeps its content
    until its memory is needed; the oldest is evicted first. Invariant: each block is in exactly one of three states:
    held (reference count > 0), idle (cached, without references), or free.
    """

    ROOT = 0

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.epoch = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._next_node = 1
        self._full: dict[tuple[int, bytes], int] = {}  # (parent node, 16 tokens) -> block
        self._node: dict[int, int] = {}  # block -> its node, for full cached blocks
        # (parent node, first token) -> block -> its tokens so far (1 to 16). The first token is part of the key because
        # the root has a child for every prompt.
        self._children: dict[tuple[int, bytes], dict[int, bytes]] = {}
        self._child_key: dict[int, tuple[int, bytes]] = {}  # cached block -> its key in _children

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: free and idle ones."""
        return len(self._free) + len(self._idle)

    def reserve(self, table: BlockTable, num_tokens: int) -> bool:
        """Extend the table to num_tokens. Returns False, and changes nothing, if there are not enough blocks."""
        need = -(-num_tokens // BLOCK) - len(table.blocks)
        if need > self.num_free:
            return False
        if need > 0:
            table.blocks += self._allocate(need)
        return True

    def extend(self, tables: Sequence[BlockTable], nums: Sequence[int]) -> None:
        """Extend each table to this number of blocks. The caller has checked that there are enough. Safe to call again
        after an interrupt."""
        wanted = [max(0, num - len(table.blocks)) for table, num in zip(tables, nums, strict=True)]
        taken = iter(self._allocate(sum(wanted)))
        try:
            for table, num in zip(tables, wanted, strict=True):
                table.blocks += islice(taken, num)
        except BaseException:
            for block in taken:
                self.release(block)
            raise

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        """Release the blocks past num_tokens (0: all of them)."""
        keep = -(-num_tokens // BLOCK)
        while len(table.blocks) > keep:  # last first, so that leaves are evicted before their parents
            self.release(table.blocks.pop())
        if table.num_cached > keep:
            assert keep == 0, "cached blocks hold committed tokens: they are released only with the whole sequence"
            table.num_cached, table.node = 0, self.ROOT

    def match_prefix(self, table: BlockTable, tokens: np.ndarray) -> tuple[int, tuple[int, int] | None]:
        """Fill an empty table with the cached blocks of a prefix of `tokens`. Returns the number of tokens that they
        cover and, if a cached block has the beginning of the next block, (this block, number of its tokens that match):
        the caller holds and copies it."""
        assert not table.blocks
        node, content, size = self.ROOT, tokens.tobytes(), tokens.itemsize
        start, width = 0, BLOCK * size
        while (block := self._full.get((node, content[start : start + width]))) is not None:
            self.hold(block)
            table.blocks.append(block)
            node = self._node[block]
            start += width
        table.num_cached, table.node, table.epoch = len(table.blocks), node, self.epoch
        remaining, best = content[start : start + width], None
        for block, held in self._children.get((node, remaining[:size]), {}).items():
            common = _num_common(held, remaining) // size
            if best is None or common > best[1]:
                best = block, common
            if common * size == len(remaining):
                break
        return len(table.blocks) * BLOCK, best

    def share_prefix(self, table: BlockTable, tokens: np.ndarray) -> tuple[int, int | None]:
        """`match_prefix`, and allocate a block for a partial match if there is one free. Returns the number of tokens
        that the table covers, and the block that the last one must be copied from, if any. The caller releases that
        block after the copy."""
        covered, partial = self.match_prefix(table, tokens)
        if partial is None:
            return covered, None
        source, num_more = partial
        self.hold(source)  # so that `reserve` does not evict it
        if self.reserve(table, covered + num_more):
            return covered + num_more, source
        self.release(source)
        return covered, None

    def cache_blocks(self, table: BlockTable, tokens: np.ndarray) -> None:
        """Add the table's blocks to the prefix cache. `tokens` are those with computed and final KV."""
        if table.epoch != self.epoch:
            return  # at least partly computed with older weights
        content, size = tokens.tobytes(), tokens.itemsize
        width = BLOCK * size
        for start in range(table.num_cached * width, len(content), width):
            block, key = table.blocks[table.num_cached], (table.node, content[start : start + width])
            if start + width > len(content):
                self._insert(block, key, size)
                return
            if key in self._full:  # another sequence cached the same tokens: use its node, do not cache this block
                self._evict(block)
                table.node = self._node[self._full[key]]
            else:
                self._insert(block, key, size)
                self._full[key] = block
                self._node[block] = table.node = self._next_node
                self._next_node += 1
            table.num_cached += 1

    def reset_prefix_cache(self) -> None:
        """Stop sharing all blocks that are computed so far: the weights have changed."""
        self._full.clear()
        self._node.clear()
        self._children.clear()
        self._child_key.clear()
        self._free.extend(self._idle)
        self._idle.clear()
        self.epoch += 1

    def reset(self) -> None:
        """Free all blocks. Tables that hold some must be thrown away."""
        self.reset_prefix_cache()
        self.ref_counts = [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, -1, -1))

    def _allocate(self, num: int) -> list[int]:
        """Free blocks first, then idle ones, the oldest first."""
        taken = self._free[: -num - 1 : -1]
        del self._free[len(self._free) - len(taken) :]
        while len(taken) < num:
            block, _ = self._idle.popitem(last=False)
            self._evict(block)
            taken.append(block)
        for block in taken:
            self.ref_counts[block] = 1
        return taken

    def hold(self, block: int) -> None:
        if self.ref_counts[block] == 0:
            del self._idle[block]
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        self.ref_counts[block] -= 1
        assert self.ref_counts[block] >= 0
        if self.ref_counts[block] == 0:
            if block in self._child_key:
                self._idle[block] = None
            else:
                self._free.append(block)

    def _insert(self, block: int, key: tuple[int, bytes], size: int) -> None:
        parent, tokens = key
        child_key = self._child_key[block] = parent, tokens[:size]
        self._children.setdefault(child_key, {})[block] = tokens

    def _evict(self, block: int) -> None:
        """Remove a block from the cache, if it is there."""
        child_key = self._child_key.pop(block, None)
        if child_key is None:
            return
        children = self._children[child_key]
        tokens = children.pop(block)
        if not children:
            del self._children[child_key]
        if self._node.pop(block, None) is not None:
            del self._full[child_key[0], tokens]


def _num_common(a: bytes, b: bytes) -> int:
    """Length of the common prefix, in bytes."""
    num = min(len(a), len(b))
    differs = int.from_bytes(a[:num], "little") ^ int.from_bytes(b[:num], "little")
    return ((differs & -differs).bit_length() - 1) // 8 if differs else num
