"""Host time of an engine step on a GPU: the engine's Python code with a device that computes nothing.

    python benchmarks/host.py --rows 1,32,128,512,1024
    python benchmarks/host.py --rows 1024 --length 600

Engine, scheduler, policy, the host side of EAGLE-3 and the graph runner are the real ones. The device returns at once
with random tokens; with three draft tokens the mean acceptance length is 3.32. Results are microseconds of CPU time per
step and per row: the best of several rounds, without the time of the simulated device. The phases and `else` (all other
code) add up to the step; those in parentheses are parts of other phases. Needs neither a GPU nor Triton.
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
from time import thread_time as clock_s  # CPU time: the machine may be busy
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

if find_spec("triton") is None:  # kernels are defined, but never run
    from unittest.mock import MagicMock

    for name in ("triton", "triton.language", "triton.language.extra", "triton.language.extra.cuda"):
        sys.modules[name] = MagicMock()

from paceline.drafters.device import DeviceEagle3Drafter
from paceline.engine.accept import RULES
from paceline.engine.engine import LocalEngine
from paceline.engine.graph_runner import NUM_BUFFERS, GraphRunner
from paceline.engine.runner import EagerRunner
from paceline.engine.scheduled_batch import ScheduledBatch
from paceline.model.config import ModelConfig
from paceline.model.cuda.attention import MAX_QUERIES
from paceline.model.cuda.device_state import MAX_DRAFT, ROW_WORDS
from paceline.model.cuda.graphs import GraphSize, OutputBuffers
from paceline.model.eagle3 import head_config, init_head
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder, Span
from paceline.model.sample import Sampler
from paceline.model.weights import init
from paceline.speculation.acceptance import NUM_SCORES
from paceline.speculation.auto import AutoPolicy
from paceline.speculation.cost import CostTable, Point
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams

K = 3
ACCEPTANCE = 0.8776  # probability p of each draft token: 1 + p + p² + p³ = 3.32
PROMPT, GROUP, EOS, NUM_DRAWS = 40, 16, 96, 16
CONFIG = ModelConfig(
    family="llama", vocab_size=97, hidden_size=8, intermediate_size=8, num_layers=3, num_heads=1, num_kv_heads=1,
    head_dim=8, norm_eps=1e-6, rope_theta=1e4, max_positions=8192, tie_embeddings=True, eos_token_ids=(EOS,),
)  # fmt: skip


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def time(self, phase: str, owner: Any, method: str) -> None:
        """Replace a method by one that adds its time to the phase."""
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = clock_s()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[phase] += clock_s() - started

        setattr(owner, method, timed)


class Event:
    def record(self, stream: None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class SimulatedHead:
    """In place of `GraphHead`."""

    may_draft_less = False

    def __init__(self) -> None:
        self.calibration = torch.ones(MAX_DRAFT, NUM_SCORES)

    def prefill(self, spans: list[Span], paged: PagedDecoder) -> None:
        pass


class SimulatedGraphs:
    """In place of `Graphs`. Its random outputs are drawn in advance."""

    stream = None

    def __init__(self, num_rows: int, rng: np.random.Generator) -> None:
        self.drafter: SimulatedHead | None = None
        most = GraphSize(num_rows, num_rows, 1).rounded_up().num_rows
        self.input_words = torch.empty(GraphSize(most, most, 1).num_words, dtype=torch.int32)
        self.outputs, self.seconds = OutputBuffers(most), dict[GraphSize, float]()
        self._num_runs = 0
        self._accepted = [rng.random((most, MAX_QUERIES)) < ACCEPTANCE for _ in range(NUM_DRAWS)]
        self.outputs.tokens[:] = torch.from_numpy(rng.integers(0, EOS, (most, 2 + MAX_QUERIES)))
        self.outputs.logprobs[:] = -1.0
        self.outputs.scores[:] = torch.from_numpy(rng.beta(4, 1, (most, MAX_DRAFT)))

    def fit(self, size: GraphSize, max_draft_length: int) -> GraphSize:
        return size

    def prepare(self, size: GraphSize) -> None:
        pass

    def run(self, size: GraphSize) -> None:
        rows = self.input_words[: size.num_row_words].numpy().reshape(-1, ROW_WORDS)
        verified = np.where(rows[:, 0] >= 0, rows[:, 1], 0)
        if size.selects_drafts:
            budget = int(self.input_words[size.num_words - 1])
            verified = np.minimum(verified, np.maximum(0, budget - (np.cumsum(verified) - verified)))
        num = len(rows)
        accepted = self._accepted[self._num_runs % NUM_DRAWS][:num] & (np.arange(MAX_QUERIES) < verified[:, None])
        tokens = self.outputs.tokens.numpy()
        tokens[:num, 0], tokens[:num, 1] = 1 + accepted.cumprod(1).sum(1), verified
        self._num_runs += 1


class HostBuffers:
    """In place of the graph runner's pinned memory."""

    def __init__(self, graphs: SimulatedGraphs) -> None:
        self.inputs = torch.empty_like(graphs.input_words)
        self.input_words = self.inputs.numpy()
        self.outputs = outputs = OutputBuffers(len(graphs.outputs.tokens))
        self.tokens, self.logprobs = outputs.tokens.numpy(), outputs.logprobs.numpy()
        self.scores, self.sources = outputs.scores.numpy(), outputs.sources.numpy()
        self.prefill_started, self.started, self.done, self.ended = (Event() for _ in range(4))


class SimulatedRunner(GraphRunner):
    def __init__(self, paged: PagedDecoder, num_rows: int, clock: Clock) -> None:
        super().__init__(paged, PromptRunner(paged, Sampler(), RULES["coupled"]), num_rows)
        self.simulated = SimulatedGraphs(num_rows, np.random.default_rng(0))
        clock.time("device", self.simulated, "run")
        self._buffers = [HostBuffers(self.simulated) for _ in range(NUM_BUFFERS)]  # type: ignore[misc]

    def _current_graphs(self) -> Any:
        return self.simulated


class PromptRunner(EagerRunner):
    """Computes nothing."""

    def prefill(self, batch: ScheduledBatch) -> None:
        pass


def engine_of(kind: str, num_rows: int, length: int, clock: Clock) -> LocalEngine:
    decoder = init(CONFIG, 0, torch.float32).requires_grad_(False)
    paged = PagedDecoder(decoder, num_rows * (8 + (PROMPT + length) // BLOCK))
    drafter = policy = None
    if kind != "plain":
        head = head_config(CONFIG, 97, (0, 1, 2))
        drafter = DeviceEagle3Drafter(init_head(head, torch.arange(97), seed=0, dtype=torch.float32, device="cpu"))
        policy = StaticPolicy(K) if kind == "static" else AutoPolicy(_costs(), K, "eagle3", "eagle3")
    runner = SimulatedRunner(paged, num_rows, clock)
    runner.simulated.drafter = None if drafter is None else SimulatedHead()
    engine = LocalEngine(
        paged, runner=runner, drafter=drafter, policy=policy, max_num_seqs=num_rows,
        max_num_batched_tokens=16384,
    )  # fmt: skip
    clock.time("schedule", engine.scheduler, "schedule")
    clock.time("reserve", engine.scheduler, "reserve")
    clock.time("propose", engine.drafting, "propose")
    clock.time("launch", engine.runner, "launch")
    clock.time("commit", engine, "_commit")
    clock.time("finish", engine, "_finish")
    clock.time("(plan)", engine.policy, "plan")
    clock.time("(observe)", engine.policy, "observe")
    return engine


def _requests(most: int, length: int | None) -> Iterator[Request]:
    """Groups of samples of one prompt."""
    rng, prompt = np.random.default_rng(1), tuple[int, ...]()
    for i in count():
        if i % GROUP == 0:
            prompt = tuple(rng.integers(0, EOS, PROMPT).tolist())
        num = most if length is None else int(rng.integers(length // 2, 3 * length // 2))
        yield Request(i, prompt, SamplingParams(max_tokens=num), i)


def _costs() -> CostTable:
    """Of a GPU on which verifying more tokens costs little."""
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
        whole_s = clock_s() - started - clock.seconds["device"]
        clock.seconds["launch"] -= clock.seconds.pop("device")
        phases = {name: 1e6 * seconds / num_steps for name, seconds in clock.seconds.items()}
        step_us = 1e6 * whole_s / num_steps
        if not best or step_us < best["step_us"]:
            other_us = step_us - sum(us for name, us in phases.items() if not name.startswith("("))
            best = {"step_us": step_us, **phases, "else": other_us}
    traces = engine.drain_trace()
    best["verified"] = sum(t.num_draft_tokens for t in traces) / len(traces) / num_rows
    best["emitted"] = sum(t.num_emitted for t in traces) / len(traces) / num_rows
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,32,128,512,1024")
    parser.add_argument("--kinds", default="plain,static,auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="steps per round")
    parser.add_argument(
        "--length", type=int, help="mean tokens of a completion; a new request replaces each finished one"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for kind in args.kinds.split(","):
        for num_rows in map(int, args.rows.split(",")):
            figures = measure(kind, num_rows, args.rounds, args.steps, args.length)
            found.append({"kind": kind, "rows": num_rows, "row_us": figures["step_us"] / num_rows, **figures})
    phases = [name for name in max(found, key=len) if name not in ("kind", "rows")]
    table = Table("kind", "rows", *(name.replace("_", " ") for name in phases))
    for row in found:
        table.add_row(row["kind"], str(row["rows"]), *(f"{row.get(name, 0.0):.1f}" for name in phases))
    Console(width=160).print(table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
