"""Progress of `paceline verify`: the check that runs, the share that is done and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from paceline.cli.progress import format_duration

if TYPE_CHECKING:
    from paceline.verify.estimate import Estimate

LOG_SHARE = 0.05  # of all checks, between two lines of a log


class CheckProgress:
    """A `CheckObserver`. Without a terminal it prints a line per check, and whenever LOG_SHARE more is done."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._estimate: Estimate | None = None
        self._logged = "", 0.0  # check and total share of the last line
        self._started = time.perf_counter()
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=console,
            transient=True,
            refresh_per_second=2,
            disable=not console.is_terminal,
        )
        self._task = self._bars.add_task("preparing", total=1.0, left="")

    def __enter__(self) -> CheckProgress:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def begin(self, make_estimate: Callable[[], Estimate]) -> None:
        self._estimate = make_estimate()
        self.console.print(
            f"{len(self._estimate.names)} checks, about {format_minutes(self._estimate.total_s)}; Ctrl-C shows the "
            "results so far",
            soft_wrap=True,
        )
        self._started = time.perf_counter()

    def progress(self, check: str, detail: str, share: float) -> None:
        assert self._estimate is not None
        total = self._estimate.share(check, share)
        name = f"{check}: {detail}" if detail else check
        if not self.console.is_terminal:
            logged_check, logged_total = self._logged
            if check != logged_check or total >= logged_total + LOG_SHARE:
                self._logged = check, total
                self.console.print(f"check {name} ({total:.0%} of all)", soft_wrap=True)
            return
        left_s = self._estimate.left_s(total, time.perf_counter() - self._started)
        left = f"about {format_duration(left_s)} left"
        self._bars.update(self._task, description=f"{name}, {share:.0%}", completed=total, left=left)


def format_minutes(seconds: float) -> str:
    minutes = round(seconds / 60)
    return "a minute" if minutes <= 1 else f"{minutes} minutes"
