"""Pauses of a drafter that takes time even if it drafts nothing: a head on the device reads every token.

It is paused if its drafts would not repay this even for a single row, the load at which drafts pay most. The first
pause takes FIRST_PAUSE steps, each further one twice as many. It ends when a new round of requests begins, because the
head has not read what ran meanwhile; if none begins, after PAUSE_FACTOR times as many steps. Before another pause the
head drafts again.
"""

from __future__ import annotations

from collections.abc import Callable

LEAST_GAIN = 1.05  # reading takes 4 to 6% of a step (1.5B model, H200)
MIN_AWAKE, CHECK_EVERY = 64, 16  # steps
FIRST_PAUSE, MAX_PAUSE, PAUSE_FACTOR = 256, 8192, 4


class Pauses:
    def __init__(self) -> None:
        self.is_paused = False
        self._num_steps = 0  # since the last change
        self._length = 0  # steps of the last pause
        self._num_in_a_row = 0  # pauses after which it still did not pay
        self._has_drafted = False  # since the last pause, and with the present weights

    def begin_round(self) -> None:
        if self.is_paused and self._num_steps >= self._length:
            self._change(False)

    def drafter_updated(self) -> None:
        """It must draft with its new weights before it is paused again."""
        self._length, self._num_in_a_row, self._has_drafted = 0, min(self._num_in_a_row, 1), False

    def step(self, has_drafted: bool, gain: Callable[[], float]) -> None:
        """After each step. `gain`: of drafting for a single row, by estimate."""
        self._num_steps += 1
        self._has_drafted |= has_drafted
        if self.is_paused:
            if self._num_steps >= PAUSE_FACTOR * self._length:
                self._change(False)
            return
        is_due = self._num_steps >= MIN_AWAKE and self._num_steps % CHECK_EVERY == 0
        if not is_due or (self._num_in_a_row and not self._has_drafted):
            return
        if gain() >= LEAST_GAIN:
            self._num_in_a_row = 0
        else:
            self._length = min(FIRST_PAUSE * 2**self._num_in_a_row, MAX_PAUSE)
            self._num_in_a_row += 1
            self._change(True)

    def _change(self, is_paused: bool) -> None:
        self.is_paused, self._num_steps, self._has_drafted = is_paused, 0, False
