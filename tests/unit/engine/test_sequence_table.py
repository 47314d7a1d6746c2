"""The table of running sequences commits a batch as a plain reference implementation commits one sequence."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field

import numpy as np
import pytest
from support import LetterTokenizer, tiny_decoder

from paceline.engine import sequence_table
from paceline.engine.accept import VerificationResult
from paceline.engine.engine import LocalEngine
from paceline.engine.sequence import NO_SOURCE, Record, Sequence
from paceline.engine.sequence_table import SequenceTable
from paceline.model.paged import PagedDecoder
from paceline.types import Completion, Provenance, Request, SamplingParams

NAMES = ("suffix", "eagle3")
decode = LetterTokenizer().decode


def sequences(num: int, dice: np.random.Generator) -> list[Sequence]:
    kinds: list[dict[str, object]] = [{}, {"stop": ("ab", "ccc")}, {"stop_token_ids": (2, 3)}, {"ignore_eos": True}]
    return [
        Sequence(
            Request(
                i, tuple(dice.integers(0, 6, dice.integers(1, 9)).tolist()),
                SamplingParams(max_tokens=int(dice.integers(1, 30)), **kinds[i % 4]), i,  # type: ignore[arg-type]
            ),
            i, 200, (5,),
        )
        for i in range(num)
    ]  # fmt: skip


def summary(completion: Completion) -> list[object]:
    return [part.tolist() if isinstance(part, np.ndarray) else part for part in astuple(completion)[1:]]


@dataclass
class Reference:
    """One sequence, token by token."""

    sequence: Sequence
    rows: list[tuple[int, float, float, int, int, str | None]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def commit(self, result: VerificationResult, row: int, num_drafted: int, version: int, name: str) -> int:
        num_accepted, sampling, start = int(result.num_accepted[row]), self.sequence.request.sampling, len(self.rows)
        for j in range(num_accepted + 1):
            token = int(result.tokens[row, j])
            if j < num_accepted:
                provenance, source = Provenance.ACCEPTED, name
            elif not num_drafted:
                provenance, source = Provenance.SAMPLED, None
            else:
                whole = num_accepted == num_drafted
                provenance, source = (Provenance.BONUS, None) if whole else (Provenance.CORRECTED, name)
            logprobs = float(result.logprobs[row, j]), float(result.raw_logprobs[row, j])
            self.rows.append((token, *logprobs, version, int(provenance), source))
            text = decode([each[0] for each in self.rows])
            stops = [stop for stop in sampling.stop if stop in text]
            if token in self.sequence.stop_ids or stops:
                self.finish_reason = "stop"
                self.stop_reason = token if token in self.sequence.stop_ids else stops[0]
            elif self.sequence.num_prompt + len(self.rows) == self.sequence.limit:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        num = len(self.rows) - start
        self.num_drafts += num_drafted > 0
        self.num_drafted += num_drafted
        self.num_accepted += min(num, num_accepted) if num_drafted else 0
        return num

    def summary(self) -> list[object]:
        names = list(dict.fromkeys(row[5] for row in self.rows if row[5] is not None))
        columns = [list(column) for column in zip(*self.rows, strict=True)] or [[] for _ in range(6)]
        sources = [NO_SOURCE if name is None else names.index(name) for name in columns[5]]
        counts = self.num_drafts, self.num_drafted, self.num_accepted
        ended = self.finish_reason, self.stop_reason
        return [*columns[:5], sources, tuple(names), *ended, *counts, 0, None]  # no preemptions, no top logprobs


def table_and_reference(seed: int, num: int = 12) -> tuple[list[list[object]], list[list[object]]]:
    dice = np.random.default_rng(seed)
    many = sequences(num, np.random.default_rng(seed))
    references = [Reference(sequence) for sequence in many]
    with pytest.MonkeyPatch.context() as small:
        small.setattr(sequence_table, "STRIDE", 4)
        table = SequenceTable(2)  # too few slots, and too short
    waiting, running = list(range(num)), list[int]()
    drafted_by = [table.drafter_index(name) for name in NAMES]
    for step in range(200):
        while waiting and dice.random() < 0.7:
            running.append(waiting.pop())
            table.add(many[running[-1]])
        if not running:
            continue
        slots = np.array([many[i].slot for i in running])
        num_drafted = dice.integers(0, 4, len(slots))
        num_accepted = np.minimum(num_drafted, dice.integers(0, 4, len(slots)))
        result = VerificationResult(
            dice.integers(0, 6, (len(slots), 4)).astype(np.int32), num_accepted, -dice.random((len(slots), 4)),
            -dice.random((len(slots), 4)),
        )  # fmt: skip
        drafter = dice.integers(0, 2, len(slots))
        numbers = np.array(drafted_by, np.uint8)[drafter]
        counts, finished = table.commit(slots, result, num_drafted, numbers, step, decode)
        for row, i in enumerate(running):
            expected = references[i].commit(result, row, int(num_drafted[row]), step, NAMES[drafter[row]])
            assert counts[row] == expected and finished[row] == (references[i].finish_reason is not None)
        leaving = [i for i, done in zip(running, finished.tolist(), strict=True) if done or dice.random() < 0.1]
        for i in leaving:  # finished, or preempted
            table.remove(many[i])
            running.remove(i)
            if many[i].finish_reason is None:
                waiting.append(i)
    return [summary(s.completion()) for s in many], [reference.summary() for reference in references]


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_is_committed_like_single_sequences(seed: int) -> None:
    many, expected = table_and_reference(seed)
    assert many == expected
    assert all(completion[7] in ("stop", "length") for completion in many), many[0]


def test_a_wrong_provenance_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a bonus token counts as a corrected one."""
    monkeypatch.setattr(sequence_table, "BONUS", sequence_table.CORRECTED)
    many, expected = table_and_reference(0)
    assert many != expected


def test_free_slots_are_reused_before_the_table_grows() -> None:
    dice, seq_table = np.random.default_rng(0), SequenceTable(4)
    some = sequences(9, dice)
    for sequence in some[:4]:
        seq_table.add(sequence)
    seq_table.remove(some[1])
    seq_table.remove(some[3])
    seq_table.add(some[4])
    seq_table.add(some[5])
    assert sorted(s.slot for s in (some[0], some[2], some[4], some[5])) == [0, 1, 2, 3]
    for sequence in some[6:]:
        seq_table.add(sequence)
    assert len({s.slot for s in some if s.slot >= 0}) == 7
    for sequence in some:
        assert sequence.tokens.tolist() == list(sequence.request.prompt_ids)
        assert sequence.slot < 0 or seq_table.arrival[sequence.slot] == sequence.arrival


@pytest.mark.parametrize("where", ["set_num_blocks", "assign", "_lengthen", "copy", "_place", "commit"])
@pytest.mark.parametrize("when", [1, 3])
def test_an_interrupt_leaves_every_slot_free(where: str, when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` aborts all its requests, and the next ones run well."""
    wanted = [Request(i, (1 + i % 5, 2, 3), SamplingParams(max_tokens=4 + 3 * i, ignore_eos=True), i) for i in range(7)]

    def engine() -> LocalEngine:
        return LocalEngine(PagedDecoder(tiny_decoder(), 32), max_num_seqs=4)

    expected = [c.token_ids.tolist() for c in engine().generate(wanted)]
    target = Record if where in ("assign", "copy") else SequenceTable
    running, original, num = engine(), getattr(target, where), 0

    def interrupted(*given: object) -> object:
        nonlocal num
        num += 1
        found = original(*given)
        if num == when:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patched:
        patched.setattr(target, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            running.generate(wanted)
    assert not running.has_work and not any(running.paged.pool.ref_counts)
    assert all(sequence is None for sequence in running.scheduler.seq_table.sequences)
    assert [c.token_ids.tolist() for c in running.generate(wanted)] == expected
