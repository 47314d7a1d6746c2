"""Progress of a run on a terminal: a line per step, and below them a bar for the current stage."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.config import Config

COLOURS = {
    "data": "white",
    "sync": "magenta",
    "generation": "green",
    "draft": "cyan",
    "reward": "yellow",
    "logprob": "bright_blue",
    "training": "blue",
    "head_training": "bright_cyan",
    "exposed_generation": "green",
    "other": "bright_black",
}
BAR_WIDTH = 40


class TerminalProgress:
    """Without a terminal (a log file, CI) it prints only the lines. It refreshes twice a second only, to leave the CPU
    to the engine."""

    def __init__(self, console: Console, config: Config) -> None:
        self.console, self.config = console, config
        self._stage, self._done, self._total = "starting", 0, 1
        self._last: Mapping[str, Any] | None = None
        self._recent: deque[float] = deque(maxlen=10)  # seconds of the last steps, with evaluation
        self._step_started = time.perf_counter()
        self._live = Live(
            console=console, refresh_per_second=2, transient=True, get_renderable=self._render, redirect_stderr=False
        )

    def __enter__(self) -> TerminalProgress:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def progress(self, stage: str, done: int, total: int) -> None:
        self._stage, self._done, self._total = stage, done, total

    def note(self, text: str) -> None:
        self.console.print(Text(text, style="bold red" if text.startswith("ALARM") else "yellow"), soft_wrap=True)

    def step(self, metrics: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        self._recent.append(now - self._step_started)
        self._step_started = now
        self._last = metrics
        self.console.print(self._line(metrics), soft_wrap=True)

    def _line(self, m: Mapping[str, Any]) -> Text:
        text = Text()
        text.append(f"step {m['step'] + 1}/{self.config.train.num_steps}", "bold")
        text.append(f"  reward {m['reward_mean']:.3f}")
        text.append(f"  length {m['length_mean']:.0f}")
        text.append("  acceptance length " + (f"{m['mean_acceptance_length']:.2f}" if m["num_drafts"] else "–"))
        if (rate := m["generation_tokens_per_s"]) is not None:
            text.append(f"  {rate:.0f} tokens/s in generation, {m['tokens_per_s']:.0f} in the whole step")
        else:
            text.append(f"  {m['tokens_per_s']:.0f} tokens/s in the whole step")
        text.append(f"  {m['stages']['total']:.1f} s")
        if m["staleness_max"]:
            text.append(f"  staleness {m['staleness_max']}")
        if "eval_before" in m:
            text.append(f"  held out {format_reward(m['eval_before'])} before", "bold")
        if "eval" in m:
            text.append(f"  held out {format_reward(m['eval'])}", "bold green")
        if "audit" in m:
            text.append(f"  speed-up {m['audit']['speedup']:.2f}x", "bold cyan")
        if m["num_failures"]:
            text.append(f"  {m['num_failures']} not scored", "red")
        if m["num_zero_scored"]:
            text.append(f"  {m['num_zero_scored']} scored 0 because a reward failed", "yellow")
        return text

    def _render(self) -> Group:
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(1, self._total), completed=self._done, width=BAR_WIDTH, pulse=self._total <= 1)
        row.add_row(Text(f"{self._stage:>10}"), bar, Text(f"{self._done}/{self._total}" if self._total > 1 else ""))
        parts: list[Any] = [row]
        if self._last is not None:
            parts.append(self._stages(self._last["stages"]))
            left = (self.config.train.num_steps - self._last["step"] - 1) * sum(self._recent) / len(self._recent)
            parts.append(Text(f"{'':>10} about {format_duration(left)} left", "dim"))
        return Group(*parts)

    def _stages(self, stages: Mapping[str, float]) -> Text:
        """The stages of the last step, by time."""
        overlapped = self.config.train.max_staleness > 0
        names = (
            [n for n in COLOURS if n != "exposed_generation"]
            if not overlapped
            else ["exposed_generation", "logprob", "training", "head_training", "other"]
        )
        total = sum(stages[name] for name in names) or 1.0
        text = Text(f"{'time':>10} ")
        legend = Text()
        for name in names:
            width = round(BAR_WIDTH * stages[name] / total)
            if width:
                text.append("━" * width, COLOURS[name])
                legend.append(f" {name} {stages[name] / total:.0%}", COLOURS[name])
        return text + legend


def format_reward(evaluation: Mapping[str, Any]) -> str:
    return "–" if evaluation["reward"] is None else f"{evaluation['reward']:.3f}"


def format_duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
