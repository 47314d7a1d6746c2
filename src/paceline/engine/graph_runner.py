"""Steps on a CUDA device as graphs, one after another without waiting for the host.

Rows that decode (their last token, and perhaps a draft) go into a graph; what they emitted is copied to the host by the
way, and looked at when the step lands. All others (prompts, truncated sampling) go to the eager runner behind it.

Always: the device's slot of a sequence is right at every launch. Where the host knows a sequence's tokens it tells them
anew; where a step is still flying, the device knows better.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.engine.accept import Verdict
from paceline.engine.runner import EagerRunner, Landed
from paceline.engine.scheduler import Row
from paceline.engine.sequence import Sequence
from paceline.model.cuda.attention import MAX_QUERIES
from paceline.model.cuda.graphs import Graphs
from paceline.model.cuda.slots import HEADER, ORDER, Slots
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder

FLYING = 3  # steps whose words may be on their way between host and device


class _Mail:
    """Page-locked memory for one step: its orders, and what comes back."""

    def __init__(self, graphs: Graphs) -> None:
        def pinned(like: Tensor) -> Tensor:
            return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

        self.words, self.tokens, self.logprobs = (
            pinned(x) for x in (graphs.words, graphs.tokens_out, graphs.logprobs_out)
        )
        self.started, self.done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


@dataclass(slots=True)
class _Flight:
    """`places`: of the graph's rows and of the others, where they are among the deciding ones."""

    mail: _Mail | None
    rest: Landed | None
    places: tuple[list[int], list[int]]

    @property
    def may_wait(self) -> bool:
        return self.rest is None

    def land(self) -> Landed:
        if self.mail is None:
            assert self.rest is not None
            return self.rest
        mail, (mine, others) = self.mail, self.places
        mail.done.synchronize()
        device_s = mail.started.elapsed_time(mail.done) / 1e3
        num, width = len(mine), int(mail.tokens[: len(mine), 0].max())
        tokens, logprobs = mail.tokens.numpy()[:num].copy(), mail.logprobs.numpy()[:num, :, :width].copy()
        found = Verdict(tokens[:, 1 : 1 + width], tokens[:, 0] - 1, logprobs[:, 0], logprobs[:, 1])
        if self.rest is None:
            return Landed(found, device_s, 0.0)
        both = Verdict.empty(num + len(others), max(width, self.rest.verdict.tokens.shape[1]))
        for place, part in ((mine, found), (others, self.rest.verdict)):
            both.num_accepted[place] = part.num_accepted
            for name in ("tokens", "logprobs", "raw_logprobs"):
                getattr(both, name)[place, : part.tokens.shape[1]] = getattr(part, name)
        return Landed(both, device_s + self.rest.forward_s, self.rest.sample_s)


class GraphRunner:
    """For the rule `coupled`. `eager`: the same kernels without graphs."""

    def __init__(self, paged: PagedDecoder, others: EagerRunner, max_num_seqs: int, eager: bool = False) -> None:
        self.paged, self.others, self.max_num_seqs, self.eager = paged, others, max_num_seqs, eager
        self._device = paged.decoder.device
        num_pages = -(-paged.decoder.config.max_positions // BLOCK)
        self.slots = Slots(max_num_seqs, num_pages, self._device)
        self._graphs: Graphs | None = None
        self._mail: list[_Mail] = []
        self._free = list(range(max_num_seqs))
        self._slot_of: dict[int, int] = {}  # by arrival
        self._sent: list[list[int]] = [[] for _ in range(max_num_seqs)]  # the pages that each slot knows

    def launch(self, rows: list[Row], q: dict[int, Tensor]) -> _Flight:
        mine, rest = rows, list[Row]()
        places: tuple[list[int], list[int]] = [*range(len(rows))], []
        if self.paged.taps or not all(map(_fits, rows)):
            mine = [row for row in rows if _fits(row) and not self.paged.taps]
            chosen = {id(row) for row in mine}
            rest = [row for row in rows if id(row) not in chosen]
            deciding = [id(row) in chosen for row in rows if row.decides]
            places = np.flatnonzero(deciding).tolist(), np.flatnonzero(~np.array(deciding, bool)).tolist()
        mail = self._run(mine) if mine else None
        return _Flight(mail, self.others.launch(rest, q).land() if rest else None, places)

    def leave(self, sequence: Sequence) -> None:
        slot = self._slot_of.pop(sequence.arrival, None)
        if slot is not None:
            self._sent[slot] = []
            self._free.append(slot)

    def forget(self) -> None:
        self._graphs = None

    def _run(self, rows: list[Row]) -> _Mail:
        if self._graphs is None:
            assert self.paged.kv is not None, "asleep"
            self._graphs = Graphs(self.paged.decoder, self.paged.kv, self.slots, self.max_num_seqs, self.eager)
            self._mail = [_Mail(self._graphs) for _ in range(FLYING)]
        graphs = self._graphs
        mail = self._mail.pop(0)
        self._mail.append(mail)
        sizes = [1 + len(row.draft) for row in rows]
        bucket = graphs.bucket(len(rows), sum(sizes), max(sizes))
        num_words = self._write(rows, mail.words.numpy(), bucket[0])
        graphs.words[:num_words].copy_(mail.words[:num_words], non_blocking=True)
        graphs.prepare(bucket)
        mail.started.record()
        graphs.run(bucket)
        mail.tokens[: len(rows)].copy_(graphs.tokens_out[: len(rows)], non_blocking=True)
        mail.logprobs[: len(rows)].copy_(graphs.logprobs_out[: len(rows)], non_blocking=True)
        mail.done.record()
        return mail

    def _write(self, rows: list[Row], words: np.ndarray, num_rows: int) -> int:
        """The orders of a step; how many words they are."""
        orders = words[: num_rows * ORDER].reshape(num_rows, ORDER)
        pages = words[num_rows * ORDER : num_rows * (ORDER + 6)].reshape(-1, 3)
        header, new = [], []
        for i, row in enumerate(rows):
            sequence = row.sequence
            slot = self._slot_of.get(sequence.arrival)
            if slot is None:
                slot = self._enter(sequence)
            last, length = (-1, 0) if sequence.num_flying else (sequence.last_token, sequence.num_tokens)
            header.append((slot, len(row.draft), last, length))
            if len(row.draft):
                orders[i, HEADER : HEADER + len(row.draft)] = row.draft
            sent, blocks = self._sent[slot], sequence.table.blocks
            for index in range(sequence.num_computed // BLOCK, len(blocks)):
                if index >= len(sent) or sent[index] != blocks[index]:
                    new.append((slot, index, blocks[index]))
                    sent[index:] = [blocks[index]]
        orders[: len(rows), :HEADER] = header
        orders[len(rows) :, 0] = -1
        assert len(new) <= len(pages)
        pages[: len(new)] = np.array(new, np.int32).reshape(-1, 3)
        pages[len(new) :, 0] = -1
        return num_rows * (ORDER + 6)

    def _enter(self, sequence: Sequence) -> int:
        slot = self._slot_of[sequence.arrival] = self._free.pop()
        request, blocks = sequence.request, sequence.table.blocks
        self.slots.key[slot] = int(np.uint64(request.noise_key).view(np.int64))
        self.slots.temperature[slot] = request.sampling.temperature
        self.slots.tables[slot, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32, device=self._device)
        self._sent[slot] = list(blocks)
        return slot


def _fits(row: Row) -> bool:
    """Whether it decodes, as the graphs do it."""
    return row.num_query == 1 and row.decides and len(row.draft) < MAX_QUERIES and not row.sequence.truncates
