"""What a step takes on the host, where a GPU computes it: the engine's own Python, over a device that does nothing.

    python benchmarks/host.py --rows 1,32,128,512,1024
    python benchmarks/host.py --rows 1024 --length 600

Everything is the real thing (engine, scheduler, policy, EAGLE-3 on the device, graph runner) but for the device: it
answers at once, with tokens by lot, of which a draft of three brings 3.32 in the mean. Figures are microseconds of a
step, and of a row of it: the best round of several, without the lottery. What a phase has is part of the whole; what is
not in any is `else`. No GPU is needed, nor Triton.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from time import thread_time as clock_s  # CPU time: nobody waits here, but the machine may be busy
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

if find_spec("triton") is None:  # kernels are defined, and never run
    from unittest.mock import MagicMock

    for name in ("triton", "triton.language", "triton.language.extra", "triton.language.extra.cuda"):
        sys.modules[name] = MagicMock()

from paceline.drafters.ahead import Eagle3Ahead
from paceline.engine.accept import RULES, Verdict
from paceline.engine.engine import LocalEngine
from paceline.engine.graph_runner import FLYING, GraphRunner
from paceline.engine.runner import EagerRunner, Landed, Over
from paceline.model.config import ModelConfig
from paceline.model.cuda.attention import MAX_QUERIES
from paceline.model.cuda.graphs import Letter, Size
from paceline.model.cuda.slots import MAX_DRAFT, ORDER
from paceline.model.eagle3 import head_config, init_head
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.model.weights import init
from paceline.speculation.auto import AutoPolicy
from paceline.speculation.cost import CostTable, Point
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams

K = 3
CHANCE = 0.8776  # that a drafted token stands: 1 + p + p² + p³ = 3.32
PROMPT, GROUP, EOS, NUM_LOTS = 40, 16, 96, 16
CONFIG = ModelConfig(
    family="llama", vocab_size=97, hidden_size=8, intermediate_size=8, num_layers=3, num_heads=1, num_kv_heads=1,
    head_dim=8, norm_eps=1e-6, rope_theta=1e4, max_positions=8192, tie_embeddings=True, eos_token_ids=(EOS,),
)  # fmt: skip


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def times(self, name: str, owner: Any, *methods: str) -> None:
        for method in methods:
            setattr(owner, method, self._timed(name, getattr(owner, method)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            started = clock_s()
            try:
                return call(*given, **named)
            finally:
                self.seconds[name] += clock_s() - started

        return timed


class Event:
    def record(self, stream: None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Mail:
    def __init__(self, words: torch.Tensor, num_rows: int) -> None:
        self.words = torch.empty_like(words)
        self.array, self.letter = self.words.numpy(), Letter(num_rows)
        self.tokens, self.logprobs = self.letter.tokens.numpy(), self.letter.logprobs.numpy()
        self.chances = self.letter.chances.numpy()
        self.started, self.done = Event(), Event()


class Device:
    """In the place of `Graphs`. It draws lots beforehand: what it says to a step is one of a few."""

    head = stream = None

    def __init__(self, num_rows: int, dice: np.random.Generator) -> None:
        most = Size(num_rows, num_rows, 1).rounded_up().num_rows
        self.words = torch.empty(Size(most, most, 1).num_words, dtype=torch.int32)
        self.letter, self._turn, self.seconds = Letter(most), 0, dict[Size, float]()
        self._right = [dice.random((most, MAX_QUERIES)) < CHANCE for _ in range(NUM_LOTS)]
        self.letter.tokens[:] = torch.from_numpy(dice.integers(0, EOS, (most, 2 + MAX_QUERIES)))
        self.letter.logprobs[:] = -1.0
        self.letter.chances[:] = torch.from_numpy(dice.beta(4, 1, (most, MAX_DRAFT)))

    def fit(self, size: Size, most_guesses: int) -> Size:
        return size

    def prepare(self, size: Size) -> None:
        pass

    def run(self, size: Size) -> None:
        orders = self.words[: size.num_order_words].numpy().reshape(-1, ORDER)
        verified = np.where(orders[:, 0] >= 0, orders[:, 1], 0)
        if size.auctions:
            num_slots = int(self.words[size.num_words - 1])
            verified = np.minimum(verified, np.maximum(0, num_slots - (np.cumsum(verified) - verified)))
        num = len(orders)
        right = self._right[self._turn % NUM_LOTS][:num] & (np.arange(MAX_QUERIES) < verified[:, None])
        told = self.letter.tokens.numpy()
        told[:num, 0], told[:num, 1] = 1 + right.cumprod(1).sum(1), verified
        self._turn += 1


class Lottery(GraphRunner):
    def __init__(self, paged: PagedDecoder, num_rows: int, clock: Clock) -> None:
        super().__init__(paged, Prompts(paged, Sampler(), RULES["coupled"]), num_rows)
        self._device_of_lots = Device(num_rows, np.random.default_rng(0))
        clock.times("lottery", self._device_of_lots, "run")
        num = len(self._device_of_lots.letter.tokens)
        self._mail = [Mail(self._device_of_lots.words, num) for _ in range(FLYING)]  # type: ignore[misc]

    def _ready(self) -> Any:
        return self._device_of_lots


class Prompts(EagerRunner):
    def launch(self, rows: Any, q: Any, num_slots: int | None = None) -> Over:
        num = sum(row.decides for row in rows)
        return Over(Landed(Verdict.empty(num, 1)), 0.0, 0.0)


def engine_of(kind: str, num_rows: int, length: int, clock: Clock) -> LocalEngine:
    decoder = init(CONFIG, 0, torch.float32).requires_grad_(False)
    paged = PagedDecoder(decoder, num_rows * (8 + (PROMPT + length) // BLOCK))
    drafter = policy = None
    if kind != "plain":
        head = head_config(CONFIG, 97, (0, 1, 2))
        drafter = Eagle3Ahead(init_head(head, torch.arange(97), seed=0, dtype=torch.float32, device="cpu"))
        policy = StaticPolicy(K) if kind == "static" else AutoPolicy(_costs(), K, "eagle3")
    engine = LocalEngine(
        paged, runner=Lottery(paged, num_rows, clock), drafter=drafter, policy=policy, max_num_seqs=num_rows,
        max_num_batched_tokens=16384,
    )  # fmt: skip
    clock.times("schedule", engine.scheduler, "schedule")
    clock.times("reserve", engine.scheduler, "reserve")
    clock.times("plan", engine.drafting, "plan")
    clock.times("propose", engine.drafting, "propose")
    clock.times("launch", engine.runner, "launch")
    clock.times("learn", engine, "_learn")
    clock.times("book", engine, "_account", "_close")
    clock.times("(observe)", engine.policy, "observe")
    return engine


def _requests(most: int, length: int | None) -> Iterator[Request]:
    """Groups of samples of one prompt."""
    dice, prompt = np.random.default_rng(1), tuple[int, ...]()
    for i in count():
        if i % GROUP == 0:
            prompt = tuple(dice.integers(0, EOS, PROMPT).tolist())
        num = most if length is None else int(dice.integers(length // 2, 3 * length // 2))
        yield Request(i, prompt, SamplingParams(max_tokens=num), i)


def _costs() -> CostTable:
    """A GPU's, which goes on to verify at little cost."""
    points = [
        Point(rows, rows * (1 + k), rows * (1 + k), 2e-3 + 2e-7 * rows * (1 + k))
        for rows in (1, 32, 128, 512, 1024)
        for k in (0, 1, 3, 7)
    ]
    drafts = [(rows, k, 2e-5 * k) for rows in (1, 1024) for k in (1, 7)]
    return CostTable("host", points, {"eagle3": drafts}, frozen=True)


def measure(kind: str, num_rows: int, num_rounds: int, num_steps: int, length: int | None) -> dict[str, float]:
    clock = Clock()
    most = 8 * (num_rounds * num_steps + 20) if length is None else 2 * length
    engine = engine_of(kind, num_rows, most, clock)
    requests = _requests(most, length)
    for _ in range(num_rows):
        engine.submit(next(requests))
    for _ in range(20):
        for _ in engine.step():
            engine.submit(next(requests))
    assert len(engine.scheduler.running) == num_rows
    best: dict[str, float] = {}
    for _ in range(num_rounds):
        engine.drain_trace()
        clock.seconds.clear()
        started = clock_s()
        for _ in range(num_steps):
            for _ in engine.step():
                engine.submit(next(requests))
        whole_s = clock_s() - started - clock.seconds["lottery"]
        clock.seconds["launch"] -= clock.seconds.pop("lottery")
        phases = {name: 1e6 * seconds / num_steps for name, seconds in clock.seconds.items()}
        step_us = 1e6 * whole_s / num_steps
        if not best or step_us < best["step_us"]:
            rest = step_us - sum(us for name, us in phases.items() if not name.startswith("("))
            best = {"step_us": step_us, **phases, "else": rest}
    traces = engine.drain_trace()
    best["verified"] = sum(t.num_draft_tokens for t in traces) / len(traces) / num_rows
    best["emitted"] = sum(t.num_emitted for t in traces) / len(traces) / num_rows
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,32,128,512,1024")
    parser.add_argument("--kinds", default="plain,static,auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--length", type=int, help="of a completion in the mean: who is done, another follows")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    for kind in given.kinds.split(","):
        for num_rows in map(int, given.rows.split(",")):
            figures = measure(kind, num_rows, given.rounds, given.steps, given.length)
            found.append({"kind": kind, "rows": num_rows, "row_us": figures["step_us"] / num_rows, **figures})
    phases = [name for name in max(found, key=len) if name not in ("kind", "rows")]
    table = Table("kind", "rows", *(name.replace("_", " ") for name in phases))
    for row in found:
        table.add_row(row["kind"], str(row["rows"]), *(f"{row.get(name, 0.0):.1f}" for name in phases))
    Console(width=160).print(table)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
