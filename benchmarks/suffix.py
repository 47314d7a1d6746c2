"""CPU time and memory of the history drafter as its history grows, next to arctic-inference's SuffixDecodingCache.

    python benchmarks/suffix.py --json suffix.json

Both observe the same rollouts and then draft for the same held-out rollouts of the same problems, in turn: a step
proposes up to k tokens per row, accepts those that the rollout has and emits one more. There are two kinds of history,
each with one policy version and with four: `one` problem with all the tokens, and `many` problems with 16 rollouts per
version. Held-out rollouts are of the newest version, with the 16 samples of a problem in one batch; in `scattered`,
which has as many problems, each row of a batch is of another problem. At the end the oldest version is removed.

arctic-inference (the "peer") takes part if `arctic_inference` can be imported, up to --peer-tokens: it observes some
20k tokens per second. It has no versions. It needs its own environment:

    python -m venv /tmp/arctic && /tmp/arctic/bin/pip install numpy rich arctic-inference==0.1.1
    PYTHONPATH=src /tmp/arctic/bin/python benchmarks/suffix.py --json suffix.json

The rollouts come from a synthetic source (`Source`), or from `--rollouts FILE`: jsonl with
{"prompt": [ids], "rollouts": [[ids], ...]} per problem and, if not all of one version, "versions": [one per rollout];
the last quarter of each problem's rollouts is then held out.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from statistics import median
from time import thread_time as clock  # CPU time: the drafters have no threads, and the machine may be busy
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.drafters.suffix import SuffixDrafter
from paceline.speculation.batch import Commits, Rows
from paceline.speculation.draft_batch import DraftBatch
from paceline.types import Request, SamplingParams

try:
    from arctic_inference.suffix_decoding import SuffixDecodingCache
except ImportError:
    SuffixDecodingCache = None

GROUP = 16  # rollouts per problem
PROMPT, LENGTH = 64, 500  # tokens of a synthetic prompt and rollout
DEVIATIONS = 0.15  # how often a synthetic rollout leaves its plan, per token
DRIFT = 0.2  # share of a plan's passages that change with the next policy version


@dataclass
class Problem:
    name: str
    prompt: np.ndarray
    history: list[list[np.ndarray]]  # of each version
    held_out: list[np.ndarray]  # of the last version


class Source:
    """Synthetic rollouts that resemble those of a policy at temperature 1. Each problem has a few plans, made of common
    phrases. A rollout follows one of them, sometimes deviates to random tokens, and returns to it or to another."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.phrases = [self._tokens(1 + self.rng.geometric(0.4)) for _ in range(20_000)]

    def _tokens(self, num: int) -> np.ndarray:
        """Cubed, so that a few of the 49152 tokens are frequent and most are rare."""
        return (49152 * self.rng.random(num) ** 3).astype(np.int32)

    def _phrases(self, length: int) -> np.ndarray:
        chosen = (len(self.phrases) * self.rng.random(length) ** 2).astype(int)
        return np.concatenate([self.phrases[i] for i in chosen])[:length]

    def problem(self, name: str, num_history: int, num_versions: int, num_held_out: int, length: int) -> Problem:
        plans = [self._phrases(length) for _ in range(-(-num_history // num_versions // 4))]
        history = []
        for version in range(num_versions):
            if version:
                for plan in plans:
                    self._drift(plan)
            num = (version + 1) * num_history // num_versions - version * num_history // num_versions
            history.append([self._rollout(plans, length) for _ in range(num)])
        held_out = [self._rollout(plans, length) for _ in range(num_held_out)]
        return Problem(name, self._phrases(PROMPT), history, held_out)

    def _drift(self, plan: np.ndarray) -> None:
        for at in range(0, len(plan), 32):
            if self.rng.random() < DRIFT:
                passage = plan[at : at + self.rng.integers(2, 12)]
                passage[:] = self._tokens(len(passage))

    def _rollout(self, plans: list[np.ndarray], length: int) -> np.ndarray:
        rng, pieces, num = self.rng, [], 0
        plan = plans[rng.integers(len(plans))]
        while num < length:
            if rng.random() < 0.25:
                plan = plans[rng.integers(len(plans))]
            pieces += [plan[num : num + rng.geometric(DEVIATIONS)], self._tokens(rng.geometric(0.5))]
            num = sum(map(len, pieces[-2:])) + num
        return np.concatenate(pieces)[:length]


def read_rollouts(path: Path) -> list[Problem]:
    problems = []
    for i, line in enumerate(path.read_text().splitlines()):
        record = json.loads(line)
        rollouts = [np.array(ids, np.int32) for ids in record["rollouts"]]
        cut = len(rollouts) * 3 // 4
        versions: dict[int, list[np.ndarray]] = {}
        for rollout, version in zip(rollouts[:cut], record.get("versions", [0] * len(rollouts)), strict=False):
            versions.setdefault(version, []).append(rollout)
        history = [versions[version] for version in sorted(versions)]
        problems.append(Problem(f"problem-{i}", np.array(record["prompt"], np.int32), history, rollouts[cut:]))
    return problems


@dataclass
class Cost:
    """Times and counts of a drafter. `tokens_per_step` counts every row of every step, with or without a draft."""

    drafter: str
    history: str
    batch: int
    k: int
    propose_s: float = 0
    observe_s: float = 0
    num_emitted: int = 0
    num_steps: int = 0  # rows x steps
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    samples_us: list[float] = field(default_factory=list)  # per emitted token, one per turn

    def figures(self) -> dict:
        us = 1e6 / self.num_emitted
        return {
            "propose_us": self.propose_s * us,
            "observe_us": self.observe_s * us,
            "total_us": (self.propose_s + self.observe_s) * us,
            "median_total_us": median(self.samples_us),
            "best_total_us": min(self.samples_us),
            "tokens_per_step": self.num_emitted / self.num_steps,
            "drafted_per_step": self.num_draft_tokens / self.num_steps,
            "mean_acceptance_length": 1 + self.num_accepted_tokens / max(1, self.num_drafts),
            "acceptance_rate": self.num_accepted_tokens / max(1, self.num_draft_tokens),
        }


class TimedDrafter(Protocol):
    """`propose` and `observe` are timed; `tokens_of`, which reads the result of `propose`, is not."""

    name: str

    def begin(self, request_id: int, problem: Problem, version: int) -> None: ...
    def propose(self, rows: Rows, caps: np.ndarray) -> Any: ...
    def tokens_of(self, drafts: Any) -> list[list[int]]: ...
    def observe(self, commits: Commits, emitted: list[np.ndarray]) -> None: ...
    def end(self, request_id: int) -> None: ...
    def num_bytes(self) -> int: ...
    def forget(self, ids: list[int]) -> int: ...  # remove these requests, all of version 0; returns the number of parts


class Paceline:
    name = "paceline"

    def __init__(self, max_versions: int, min_confidence: float = 0) -> None:
        self.drafter = SuffixDrafter(max_bytes=1 << 40, max_versions=max_versions)
        self.min_confidence = min_confidence
        self.propose = self.drafter.propose
        self.end = self.drafter.end

    def begin(self, request_id: int, problem: Problem, version: int) -> None:
        self.drafter.begin(Request(request_id, tuple(problem.prompt.tolist()), problem=problem.name), version)

    def tokens_of(self, drafts: DraftBatch) -> list[list[int]]:
        """The drafts, each cut before its first token below the minimum confidence."""
        confident = np.minimum.accumulate(drafts.scores >= self.min_confidence, axis=1).sum(axis=1)
        return [row[:n].tolist() for row, n in zip(drafts.tokens, np.minimum(drafts.num, confident), strict=True)]

    def observe(self, commits: Commits, emitted: list[np.ndarray]) -> None:
        self.drafter.observe(commits)

    def num_bytes(self) -> int:
        return self.drafter.num_bytes

    def forget(self, ids: list[int]) -> int:
        return self.drafter.remove(0)


class Arctic:
    """As vLLM uses it: one cache for all problems, one call per row. It keeps prompts only of running requests."""

    name = "arctic"
    depth = 64  # its default

    def __init__(self) -> None:
        self.cache = SuffixDecodingCache(self.depth)

    def begin(self, request_id: int, problem: Problem, version: int) -> None:
        self.cache.start_request(request_id, problem.prompt)

    def propose(self, rows: Rows, caps: np.ndarray) -> list[Any]:
        speculate, depth = self.cache.speculate, self.depth
        return [
            speculate(i, tokens[-depth:], max_spec_tokens=cap)
            for i, tokens, cap in zip(rows.request_ids.tolist(), rows.tokens, caps.tolist(), strict=True)
        ]

    def tokens_of(self, drafts: list[Any]) -> list[list[int]]:
        return [draft.token_ids for draft in drafts]

    def observe(self, commits: Commits, emitted: list[np.ndarray]) -> None:
        for i, tokens in zip(commits.request_ids.tolist(), emitted, strict=True):
            self.cache.add_active_response(i, tokens)

    def end(self, request_id: int) -> None:
        self.cache.stop_request(request_id)

    def num_bytes(self) -> int:
        return self.cache._global_tree.estimate_memory()

    def forget(self, ids: list[int]) -> int:
        for i in ids:
            self.cache.evict_cached_response(i)
        return len(ids)


def fill_history(drafter: TimedDrafter, problems: list[Problem]) -> list[list[int]]:
    """The drafter observes all rollouts of the history: version by version, the samples of a problem in one batch, 8
    tokens per step. Returns the request ids of each version."""
    num_requests = 0
    request_ids: list[list[int]] = []
    for version in range(len(problems[0].history)):
        request_ids.append([])
        for problem in problems:
            rollouts = problem.history[version]
            for start in range(0, len(rollouts), GROUP):
                group = rollouts[start : start + GROUP]
                ids = np.arange(num_requests, num_requests + len(group), dtype=np.int64)
                num_requests += len(group)
                for i in ids.tolist():
                    drafter.begin(i, problem, version)
                for at in range(0, max(map(len, group)), 8):
                    commit_tokens(drafter, ids, [rollout[at : at + 8] for rollout in group])
                for i in ids.tolist():
                    drafter.end(i)
                request_ids[-1] += ids.tolist()
    return request_ids


def commit_tokens(drafter: TimedDrafter, ids: np.ndarray, emitted: list[np.ndarray]) -> float:
    """Returns the seconds of `observe`."""
    num = np.array([len(tokens) for tokens in emitted], np.int32)
    tokens = np.zeros((len(emitted), num.max()), np.int32)
    for row, new in zip(tokens, emitted, strict=True):
        row[: len(new)] = new
    none = np.zeros(len(emitted), np.int32)
    commits = Commits(ids, tokens, num, none, none)
    start = clock()
    drafter.observe(commits, emitted)
    return clock() - start


def draft(drafter: TimedDrafter, batch: list[tuple[Problem, np.ndarray]], first_id: int, cost: Cost) -> None:
    """Decode a batch of held-out rollouts. A step emits the accepted draft tokens and one more."""
    sequences = [np.concatenate([problem.prompt, rollout]) for problem, rollout in batch]
    at = [len(problem.prompt) for problem, _ in batch]
    for i, (problem, _) in enumerate(batch):
        drafter.begin(first_id + i, problem, len(problem.history) - 1)
    num_emitted, propose_s, observe_s = 0, 0.0, 0.0
    live = list(range(len(batch)))
    while live:
        ids = np.array([first_id + i for i in live], np.int64)
        tokens = [sequences[i][: at[i]] for i in live]
        rows = Rows(ids, tokens, ids.astype(np.uint64), [SamplingParams()] * len(live))
        caps = np.full(len(live), cost.k, np.int32)
        start = clock()
        drafts = drafter.propose(rows, caps)
        propose_s += clock() - start
        emitted = []
        for i, drafted in zip(live, drafter.tokens_of(drafts), strict=True):
            target = sequences[i][at[i] : at[i] + len(drafted) + 1]
            accepted = 0
            while accepted < min(len(drafted), len(target)) and drafted[accepted] == target[accepted]:
                accepted += 1
            emitted.append(target[: accepted + 1])
            cost.num_steps += 1
            cost.num_drafts += bool(drafted)
            cost.num_draft_tokens += len(drafted)
            cost.num_accepted_tokens += accepted
        observe_s += commit_tokens(drafter, ids, emitted)
        for i, new in zip(live, emitted, strict=True):
            at[i] += len(new)
            num_emitted += len(new)
        live = [i for i in live if at[i] < len(sequences[i])]
    for i in range(len(batch)):
        drafter.end(first_id + i)
    cost.propose_s += propose_s
    cost.observe_s += observe_s
    cost.num_emitted += num_emitted
    cost.samples_us.append(1e6 * (propose_s + observe_s) / num_emitted)


def measure(
    history: str,
    problems: list[Problem],
    make: list[Callable[[], TimedDrafter]],
    batches: list[int],
    k: int,
    num_rows: int,
) -> list[dict]:
    num_versions = len(problems[0].history)
    num_tokens = sum(len(rollout) for problem in problems for rollouts in problem.history for rollout in rollouts)
    drafters, facts = [], {}
    for one in make:
        drafter = one()
        start = clock()
        request_ids = fill_history(drafter, problems)
        facts[drafter.name] = {
            "bytes_per_token": drafter.num_bytes() / num_tokens,
            "remember_us": 1e6 * (clock() - start) / num_tokens,
        }
        drafters.append(drafter)
    next_id = request_ids[-1][-1] + 1
    # Every batch size decodes rollouts that no drafter has observed yet.
    rows_of = [[(problem, rollout) for rollout in problem.held_out] for problem in problems]
    held_out = chain(*(zip_longest(*rows_of) if history == "scattered" else rows_of))
    held_out = (row for row in held_out if row is not None)
    costs, num_more = [], 0
    for batch in batches:
        of_batch = {drafter.name: Cost(drafter.name, history, batch, k) for drafter in drafters}
        for turn in range(max(1, num_rows // batch)):
            rows = [row for _, row in zip(range(batch), held_out, strict=False)]
            if len(rows) < batch:
                break
            if num_more >= num_tokens:  # refill small histories before they consist mainly of held-out rollouts
                drafters, num_more = [one() for one in make], 0
                for drafter in drafters:
                    fill_history(drafter, problems)
            num_more += sum(len(rollout) for _, rollout in rows)
            for drafter in drafters if turn % 2 == 0 else drafters[::-1]:
                draft(drafter, rows, next_id, of_batch[drafter.name])
            next_id += batch
        costs += of_batch.values()
    for drafter in drafters:
        start = clock()
        num_parts = drafter.forget(request_ids[0])
        facts[drafter.name] |= {"forget_ms": 1e3 * (clock() - start), "num_forgotten": num_parts}
    name = {"history": history, "num_history_tokens": num_tokens, "num_versions": num_versions, "k": k}
    return [
        name | {"drafter": cost.drafter, "batch": cost.batch} | cost.figures() | facts[cost.drafter]
        for cost in costs
        if cost.num_emitted
    ]


def show(results: list[dict]) -> None:
    table = Table(title="CPU microseconds per emitted token, and acceptance")
    for name in ("history", "tokens", "versions", "batch", "drafter", "observe", "propose", "total", "median", "best",
                 "tokens/step", "drafted/step", "accepted", "bytes/token", "forget us/part"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("history", "drafter") else "right")
    for row in results:
        table.add_row(
            row["history"], f"{row['num_history_tokens']:,}", str(row["num_versions"]), str(row["batch"]),
            row["drafter"],
            *(f"{row[key + '_us']:.2f}" for key in ("observe", "propose", "total", "median_total", "best_total")),
            f"{row['tokens_per_step']:.2f}", f"{row['drafted_per_step']:.2f}",
            f"{row['acceptance_rate']:.0%}", f"{row['bytes_per_token']:.1f}",
            f"{1e3 * row['forget_ms'] / row['num_forgotten']:.1f}",
        )  # fmt: skip
    Console(width=160).print(table)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [10_000, 100_000, 1_000_000, 10_000_000]
    parser.add_argument("--num-tokens", type=numbers, default=sizes, help="tokens in the history (10k to 10M)")
    parser.add_argument("--versions", type=numbers, default=[1, 4], help="policy versions of it (default: 1,4)")
    parser.add_argument("--histories", default="one,many", help="one, many or scattered (default: one,many)")
    parser.add_argument("--batch", type=numbers, default=[1, 16, 64], help="rows per step (default: 1,16,64)")
    parser.add_argument("--k", type=int, default=4, help="draft tokens per row (default: 4)")
    parser.add_argument("--num-rows", type=int, default=192, help="held-out rollouts per batch size (default: 192)")
    parser.add_argument("--min-confidence", type=float, default=0, help="cut Paceline's drafts below this (default: 0)")
    parser.add_argument("--peer-tokens", type=int, default=1_000_000, help="largest history of the peer")
    parser.add_argument("--rollouts", type=Path, help="jsonl of real rollouts instead of the synthetic source")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    if SuffixDecodingCache is None:
        print("arctic_inference is not installed: it is left out")
    results = []
    for history, problems in histories(args):
        num_versions = len(problems[0].history)
        make: list[Callable[[], TimedDrafter]] = [partial(Paceline, num_versions, args.min_confidence)]
        num_tokens = sum(len(r) for problem in problems for rollouts in problem.history for r in rollouts)
        if SuffixDecodingCache is not None and num_tokens <= args.peer_tokens:
            make.append(Arctic)
        results += measure(history, problems, make, args.batch, args.k, args.num_rows)
        if args.json:
            machine = {"machine": platform.machine(), "python": platform.python_version()}
            args.json.write_text(json.dumps({**machine, "rows": results}, indent=1) + "\n")
    show(results)


def histories(args: argparse.Namespace) -> Iterator[tuple[str, list[Problem]]]:
    if args.rollouts:
        yield "file", read_rollouts(args.rollouts)
        return
    num_held_out = sum(max(batch, args.num_rows) for batch in args.batch)
    for num_tokens in args.num_tokens:
        for num_versions in args.versions:
            source, num_rollouts = Source(0), max(num_versions, num_tokens // LENGTH)
            for kind in args.histories.split(","):
                num_problems = 1 if kind == "one" else max(1, num_rollouts // (GROUP * num_versions))
                num_each = max(GROUP if kind == "many" else 1, -(-num_held_out // num_problems))
                problems = []
                for i in range(num_problems):
                    num = min(num_each, max(0, num_held_out - i * num_each))
                    name, num_history = f"{kind}-{i}", num_rollouts // num_problems
                    problems.append(source.problem(name, num_history, num_versions, num, LENGTH))
                yield kind, problems


if __name__ == "__main__":
    main()
