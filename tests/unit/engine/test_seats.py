"""Sequences side by side end up as each would alone, step by step (`Sequence.take` and `book`)."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from support import LetterTokenizer, tiny_decoder

from paceline.engine import seats as room
from paceline.engine.accept import Verdict
from paceline.engine.engine import LocalEngine
from paceline.engine.seats import Seats
from paceline.engine.sequence import Record, Sequence
from paceline.model.paged import PagedDecoder
from paceline.types import Completion, Request, SamplingParams

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


def said(completion: Completion) -> list[object]:
    return [part.tolist() if isinstance(part, np.ndarray) else part for part in astuple(completion)[1:]]


def side_by_side_and_alone(seed: int, num: int = 12) -> tuple[list[list[object]], list[list[object]]]:
    dice = np.random.default_rng(seed)
    many, alone = (sequences(num, np.random.default_rng(seed)) for _ in range(2))
    with pytest.MonkeyPatch.context() as small:
        small.setattr(room, "STRIDE", 4)
        seats = Seats(2)  # too few, and too short
    waiting, seated = list(range(num)), list[int]()
    drafted_by = [seats.number_of(name) for name in NAMES]
    for step in range(200):
        while waiting and dice.random() < 0.7:
            seated.append(waiting.pop())
            seats.sit(many[seated[-1]])
        if not seated:
            continue
        at = np.array([many[i].seat for i in seated])
        num_drafted = dice.integers(0, 4, len(at))
        num_accepted = np.minimum(num_drafted, dice.integers(0, 4, len(at)))
        verdict = Verdict(
            dice.integers(0, 6, (len(at), 4)).astype(np.int32), num_accepted, -dice.random((len(at), 4)),
            -dice.random((len(at), 4)),
        )  # fmt: skip
        who = dice.integers(0, 2, len(at))
        counts, over = seats.take(at, verdict, num_drafted, np.array(drafted_by, np.uint8)[who], step, decode)
        for row, i in enumerate(seated):
            twin = alone[i]
            start = twin.num_tokens
            emitted = verdict.tokens[row, : num_accepted[row] + 1].tolist()
            count = twin.take(emitted, decode)
            twin.book(
                start, count, verdict.logprobs[row], verdict.raw_logprobs[row], int(num_accepted[row]),
                int(num_drafted[row]), step, NAMES[who[row]],
            )  # fmt: skip
            assert counts[row] == count and over[row] == (twin.finish_reason is not None)
            assert (many[i].tokens == twin.tokens).all()
        leaving = [i for i, done in zip(seated, over.tolist(), strict=True) if done or dice.random() < 0.1]
        for i in leaving:  # done, or sent back to wait
            seats.rise(many[i])
            seated.remove(i)
            if many[i].finish_reason is None:
                waiting.append(i)
    return [said(s.completion()) for s in many], [said(s.completion()) for s in alone]


@pytest.mark.parametrize("seed", range(20))
def test_side_by_side_as_alone(seed: int) -> None:
    many, alone = side_by_side_and_alone(seed)
    assert many == alone
    assert all(completion[7] in ("stop", "length") for completion in many), many[0]


def test_a_wrong_account_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a bonus token is taken for a corrected one."""
    monkeypatch.setattr(room, "BONUS", room.CORRECTED)
    many, alone = side_by_side_and_alone(0)
    assert many != alone


def test_seats_are_taken_again_before_there_are_more() -> None:
    dice, seats = np.random.default_rng(0), Seats(4)
    some = sequences(9, dice)
    for sequence in some[:4]:
        seats.sit(sequence)
    seats.rise(some[1])
    seats.rise(some[3])
    seats.sit(some[4])
    seats.sit(some[5])
    assert sorted(s.seat for s in (some[0], some[2], some[4], some[5])) == [0, 1, 2, 3]
    for sequence in some[6:]:
        seats.sit(sequence)
    assert len({s.seat for s in some if s.seat >= 0}) == 7
    for sequence in some:
        assert sequence.tokens.tolist() == list(sequence.request.prompt_ids)
        assert sequence.seat < 0 or seats.arrival[sequence.seat] == sequence.arrival


@pytest.mark.parametrize("where", ["sits", "moves", "makes room", "rises", "begins"])
@pytest.mark.parametrize("when", [1, 3])
def test_an_interrupt_leaves_every_seat_free(where: str, when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While somebody sits down, moves, or rises: `generate` takes all its requests out, and the next ones run well."""
    wanted = [Request(i, (1 + i % 5, 2, 3), SamplingParams(max_tokens=4 + 3 * i, ignore_eos=True), i) for i in range(7)]

    def engine() -> LocalEngine:
        return LocalEngine(PagedDecoder(tiny_decoder(), 32), max_num_seqs=4)

    said = [c.token_ids.tolist() for c in engine().generate(wanted)]
    target, name = {
        "sits": (Seats, "note"),
        "moves": (Record, "take_over"),
        "makes room": (Seats, "_lengthen"),
        "rises": (Record, "copy"),
        "begins": (room.Seats, "_place"),
    }[where]
    running, original, num = engine(), getattr(target, name), 0

    def interrupted(*given: object) -> object:
        nonlocal num
        num += 1
        found = original(*given)
        if num == when:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patched:
        patched.setattr(target, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            running.generate(wanted)
    assert not running.has_work and not any(running.paged.pool.references)
    assert all(sequence is None for sequence in running.scheduler.seats.sequences)
    assert [c.token_ids.tolist() for c in running.generate(wanted)] == said
