"""Paged key/value memory: one step's plan (BatchPlan), the tensors (PagedKV), who owns which block (BlockPool), and
one sequence's share of it (BlockTable).

Two models decode here (the policy and, where there is one, the draft model); each has its own of everything.
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
COPIED = 64  # blocks at once: they lie in memory twice for it


@dataclass(slots=True)
class BatchPlan:
    """One forward: B rows laid end to end, T tokens. Row i's queries are tokens[query_start[i]:query_start[i+1]];
    they are the last of its context[i] tokens, whose KV lives in the blocks of block_tables[i]."""

    tokens: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    query_start: np.ndarray  # int32 [B + 1]
    context: np.ndarray  # int32 [B]
    block_tables: np.ndarray  # int32 [B, max blocks of a row]
    logits_at: np.ndarray  # int64 [P], which of the T tokens need logits

    @property
    def num_rows(self) -> int:
        return len(self.context)

    def slots(self) -> np.ndarray:
        """Where each token's KV goes: block * BLOCK + offset, int64 [T]."""
        rows = np.repeat(np.arange(self.num_rows), np.diff(self.query_start))
        return self.block_tables[rows, self.positions // BLOCK].astype(np.int64) * BLOCK + self.positions % BLOCK


class PagedKV:
    """For the CPU kernels keys lie `transposed` within a block, so that one vector holds one feature of 16 positions.
    Beside keys and values there may be room for each token's hidden states, which a drafter reads."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str,
        transposed: bool = False,
    ) -> None:
        shape = config.num_layers, num_blocks, config.num_kv_heads, BLOCK, config.head_dim
        self.transposed = transposed
        self.k = torch.zeros((*shape[:3], *shape[:2:-1]) if transposed else shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.features: Tensor | None = None  # [slots, F]
        self.beside: PagedKV | None = None  # a head's, that lies in the same blocks

    @property
    def num_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def make_features(self, num_features: int) -> None:
        if self.features is None or self.features.shape[1] != num_features:
            self.features = self.k.new_empty(self.k.shape[1] * BLOCK, num_features)

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
        """[blocks, G, BLOCK, E], however they lie."""
        return self.k[layer].transpose(2, 3) if self.transposed else self.k[layer]

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """All at once: none of them is both source and target."""
        places = torch.as_tensor([sources, targets]).to(self.k.device, non_blocking=True)
        for some in places.split(COPIED, 1):
            self._copy(*some)

    def _copy(self, sources: Tensor, targets: Tensor) -> None:
        for blocks in (self.k, self.v):
            blocks.index_copy_(1, targets, blocks.index_select(1, sources))
        if self.features is not None:
            lines = self.features.unflatten(0, (-1, BLOCK))
            lines.index_copy_(0, targets, lines.index_select(0, sources))
        if self.beside is not None:
            self.beside._copy(sources, targets)


@dataclass(slots=True)
class BlockTable:
    """One sequence's blocks. The first `num_indexed` of them are findable by content, the last of those as `node`."""

    blocks: list[int] = field(default_factory=list)
    num_indexed: int = 0
    node: int = 0
    epoch: int = 0

    def slots(self, start: int, end: int) -> np.ndarray:
        """Where the tokens start … end-1 lie: block * BLOCK + offset, int64."""
        positions = np.arange(start, end)
        return np.array(self.blocks, np.int64)[positions // BLOCK] * BLOCK + positions % BLOCK


class BlockPool:
    """Reference-counted blocks, and an index of what is in them.

    The index is a trie whose edges are whole blocks of tokens, so that a prompt computed once is found by its
    siblings (and by a later turn that starts with it). Blocks nobody holds keep their content until the memory is
    needed, oldest first. Always: every block is held (references > 0), idle and indexed, or free; never two of these.
    """

    ROOT = 0

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.epoch = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._next_node = 1
        self._full: dict[tuple[int, bytes], int] = {}  # (parent node, 16 tokens) -> block
        self._node: dict[int, int] = {}  # block -> its node, for full indexed blocks
        # (node, first token) -> block -> its tokens so far (1 to 16): at some node there is a block for every prompt
        self._children: dict[tuple[int, bytes], dict[int, bytes]] = {}
        self._place: dict[int, tuple[int, bytes]] = {}  # indexed block -> where it is among the children

    @property
    def num_free(self) -> int:
        """Blocks that an allocation could take now."""
        return len(self._free) + len(self._idle)

    def reserve(self, table: BlockTable, num_tokens: int) -> bool:
        """Make the table long enough for num_tokens; False, and nothing changed, if there is no room."""
        need = -(-num_tokens // BLOCK) - len(table.blocks)
        if need > self.num_free:
            return False
        if need > 0:
            table.blocks += self._take(need)
        return True

    def extend(self, tables: Sequence[BlockTable], nums: Sequence[int]) -> None:
        """Make each table so many blocks long, if it is not; there is room. Interrupted, it can be done again."""
        wanted = [max(0, num - len(table.blocks)) for table, num in zip(tables, nums, strict=True)]
        taken = iter(self._take(sum(wanted)))
        try:
            for table, num in zip(tables, wanted, strict=True):
                table.blocks += islice(taken, num)
        except BaseException:
            for block in taken:
                self.release(block)
            raise

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        """Give back the blocks past num_tokens (0 gives back all of them)."""
        keep = -(-num_tokens // BLOCK)
        while len(table.blocks) > keep:  # last first: of an idle chain the leaves are forgotten before the root
            self.release(table.blocks.pop())
        if table.num_indexed > keep:
            assert keep == 0, "indexed blocks hold committed tokens; only a whole sequence gives them back"
            table.num_indexed, table.node = 0, self.ROOT

    def match(self, table: BlockTable, tokens: np.ndarray) -> tuple[int, tuple[int, int] | None]:
        """Fill an empty table with blocks that already hold a prefix of `tokens`. Returns how many tokens they cover
        and, where a block holds part of the next one, (that block, how many further tokens): hold and copy it."""
        assert not table.blocks
        node, content, size = self.ROOT, tokens.tobytes(), tokens.itemsize
        start, width = 0, BLOCK * size
        while (block := self._full.get((node, content[start : start + width]))) is not None:
            self.hold(block)
            table.blocks.append(block)
            node = self._node[block]
            start += width
        table.num_indexed, table.node, table.epoch = len(table.blocks), node, self.epoch
        rest, best = content[start : start + width], None
        for block, held in self._children.get((node, rest[:size]), {}).items():
            common = _num_common(held, rest) // size
            if best is None or common > best[1]:
                best = block, common
            if common * size == len(rest):
                break
        return len(table.blocks) * BLOCK, best

    def share(self, table: BlockTable, tokens: np.ndarray) -> tuple[int, int | None]:
        """As `match`, with a block for the part of the next one, if there is room. Returns how many tokens the table
        then covers, and the block that its last one is to be copied from, which is held until it is."""
        covered, partial = self.match(table, tokens)
        if partial is None:
            return covered, None
        source, num_more = partial
        self.hold(source)  # or the reservation might take it
        if self.reserve(table, covered + num_more):
            return covered + num_more, source
        self.release(source)
        return covered, None

    def index(self, table: BlockTable, tokens: np.ndarray) -> None:
        """Make the table's blocks findable; `tokens` are those whose KV is computed and final."""
        if table.epoch != self.epoch:
            return  # computed, at least in part, under older weights
        content, size = tokens.tobytes(), tokens.itemsize
        width = BLOCK * size
        for start in range(table.num_indexed * width, len(content), width):
            block, key = table.blocks[table.num_indexed], (table.node, content[start : start + width])
            if start + width > len(content):
                self._enter(block, key, size)
                return
            if key in self._full:  # a sibling wrote the same: follow its node, leave this block unindexed
                self._forget(block)
                table.node = self._node[self._full[key]]
            else:
                self._enter(block, key, size)
                self._full[key] = block
                self._node[block] = table.node = self._next_node
                self._next_node += 1
            table.num_indexed += 1

    def forget_all(self) -> None:
        """New weights: nothing computed so far may be shared from now on."""
        self._full.clear()
        self._node.clear()
        self._children.clear()
        self._place.clear()
        self._free.extend(self._idle)
        self._idle.clear()
        self.epoch += 1

    def _take(self, num: int) -> list[int]:
        """What is free first, then what is idle, the oldest of it."""
        taken = self._free[: -num - 1 : -1]
        del self._free[len(self._free) - len(taken) :]
        while len(taken) < num:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            taken.append(block)
        for block in taken:
            self.references[block] = 1
        return taken

    def hold(self, block: int) -> None:
        if self.references[block] == 0:
            del self._idle[block]
        self.references[block] += 1

    def release(self, block: int) -> None:
        self.references[block] -= 1
        assert self.references[block] >= 0
        if self.references[block] == 0:
            if block in self._place:
                self._idle[block] = None
            else:
                self._free.append(block)

    def _enter(self, block: int, key: tuple[int, bytes], size: int) -> None:
        parent, tokens = key
        place = self._place[block] = parent, tokens[:size]
        self._children.setdefault(place, {})[block] = tokens

    def _forget(self, block: int) -> None:
        place = self._place.pop(block, None)
        if place is None:
            return
        siblings = self._children[place]
        tokens = siblings.pop(block)
        if not siblings:
            del self._children[place]
        if self._node.pop(block, None) is not None:
            del self._full[place[0], tokens]


def _num_common(a: bytes, b: bytes) -> int:
    """Bytes that both begin with."""
    num = min(len(a), len(b))
    differs = int.from_bytes(a[:num], "little") ^ int.from_bytes(b[:num], "little")
    return ((differs & -differs).bit_length() - 1) // 8 if differs else num
