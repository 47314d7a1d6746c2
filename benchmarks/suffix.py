"""What the history drafter costs as its history grows, beside arctic-inference's SuffixDecodingCache.

Both are told the same rollouts and then draft for the same held-out ones of the same problems, in turn: a row
proposes up to k tokens, keeps those that the rollout really says and one more, and tells its drafter. Two kinds of
history, each in one policy version and in four: `one` problem with all the tokens, and `many` problems of 16 rollouts
per version. The held-out ones are of the newest version, the 16 samples of a problem side by side; in `scattered`, as
many problems, every row is another problem's. At the end the oldest version is forgotten.

    python benchmarks/suffix.py --json suffix.json

The peer takes part where `arctic_inference` can be imported, up to --peer-tokens (it is told some 20k tokens a second).
It knows no versions. It wants an environment of its own:

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
from time import thread_time as clock  # CPU time: neither drafter waits or has threads, but the machine may be busy
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.drafters.suffix import SuffixDrafter
from paceline.speculation.batch import Commits, DraftBatch, Rows
from paceline.types import Request, SamplingParams

try:
    from arctic_inference.suffix_decoding import SuffixDecodingCache
except ImportError:
    SuffixDecodingCache = None

GROUP = 16  # rollouts per problem
PROMPT, LENGTH = 64, 500  # tokens of a synthetic prompt and rollout
STRAYS = 0.15  # how often a synthetic rollout leaves its plan
DRIFT = 0.2  # how many of a plan's passages the next policy says otherwise


@dataclass
class Problem:
    name: str
    prompt: np.ndarray
    history: list[list[np.ndarray]]  # of each version
    held_out: list[np.ndarray]  # of the last version


class Source:
    """Rollouts as a policy at temperature 1 gives them: phrases from a common book make up a few plans per problem;
    a rollout follows one, strays into other words now and then, and comes back to it or to another."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.phrases = [self._words(1 + self.rng.geometric(0.4)) for _ in range(20_000)]

    def _words(self, num: int) -> np.ndarray:
        """Cubed, so that a few of the 49152 words are everywhere and most are rare."""
        return (49152 * self.rng.random(num) ** 3).astype(np.int32)

    def _text(self, length: int) -> np.ndarray:
        chosen = (len(self.phrases) * self.rng.random(length) ** 2).astype(int)
        return np.concatenate([self.phrases[i] for i in chosen])[:length]

    def problem(self, name: str, num_history: int, num_versions: int, num_held_out: int, length: int) -> Problem:
        plans = [self._text(length) for _ in range(-(-num_history // num_versions // 4))]
        history = []
        for version in range(num_versions):
            if version:
                for plan in plans:
                    self._drift(plan)
            num = (version + 1) * num_history // num_versions - version * num_history // num_versions
            history.append([self._rollout(plans, length) for _ in range(num)])
        held_out = [self._rollout(plans, length) for _ in range(num_held_out)]
        return Problem(name, self._text(PROMPT), history, held_out)

    def _drift(self, plan: np.ndarray) -> None:
        for at in range(0, len(plan), 32):
            if self.rng.random() < DRIFT:
                passage = plan[at : at + self.rng.integers(2, 12)]
                passage[:] = self._words(len(passage))

    def _rollout(self, plans: list[np.ndarray], length: int) -> np.ndarray:
        rng, pieces, num = self.rng, [], 0
        plan = plans[rng.integers(len(plans))]
        while num < length:
            if rng.random() < 0.25:
                plan = plans[rng.integers(len(plans))]
            pieces += [plan[num : num + rng.geometric(STRAYS)], self._words(rng.geometric(0.5))]
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
    """What a drafter did and how long it took. `tokens_per_step` counts every row of every step, drafted or not."""

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


class Contender(Protocol):
    """`propose` and `observe` are timed; `tokens_of` reads what propose returned and is not."""

    name: str

    def begin(self, request_id: int, problem: Problem, version: int) -> None: ...
    def propose(self, rows: Rows, caps: np.ndarray) -> Any: ...
    def tokens_of(self, drafts: Any) -> list[list[int]]: ...
    def observe(self, commits: Commits, said: list[np.ndarray]) -> None: ...
    def end(self, request_id: int) -> None: ...
    def num_bytes(self) -> int: ...
    def forget(self, ids: list[int]) -> int: ...  # what these requests, all of version 0, said; in how many parts


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
        """What a policy leaves of them that cuts a draft at its first doubtful token."""
        sure = np.minimum.accumulate(drafts.confidence >= self.min_confidence, axis=1).sum(axis=1)
        return [row[:n].tolist() for row, n in zip(drafts.tokens, np.minimum(drafts.num, sure), strict=True)]

    def observe(self, commits: Commits, said: list[np.ndarray]) -> None:
        self.drafter.observe(commits)

    def num_bytes(self) -> int:
        return self.drafter.num_bytes

    def forget(self, ids: list[int]) -> int:
        return self.drafter.remove(0)


class Arctic:
    """As vLLM calls it: one cache for all problems, one call per row. It keeps prompts of live requests only."""

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

    def observe(self, commits: Commits, said: list[np.ndarray]) -> None:
        for i, tokens in zip(commits.request_ids.tolist(), said, strict=True):
            self.cache.add_active_response(i, tokens)

    def end(self, request_id: int) -> None:
        self.cache.stop_request(request_id)

    def num_bytes(self) -> int:
        return self.cache._global_tree.estimate_memory()

    def forget(self, ids: list[int]) -> int:
        for i in ids:
            self.cache.evict_cached_response(i)
        return len(ids)


def remember(contender: Contender, problems: list[Problem]) -> list[list[int]]:
    """Tell it every rollout of the history, version by version, the samples of a problem side by side, 8 tokens a step.
    Returns the requests of each version."""
    num_told = 0
    told: list[list[int]] = []
    for version in range(len(problems[0].history)):
        told.append([])
        for problem in problems:
            rollouts = problem.history[version]
            for start in range(0, len(rollouts), GROUP):
                group = rollouts[start : start + GROUP]
                ids = np.arange(num_told, num_told + len(group), dtype=np.int64)
                num_told += len(group)
                for i in ids.tolist():
                    contender.begin(i, problem, version)
                for at in range(0, max(map(len, group)), 8):
                    tell(contender, ids, [rollout[at : at + 8] for rollout in group])
                for i in ids.tolist():
                    contender.end(i)
                told[-1] += ids.tolist()
    return told


def tell(contender: Contender, ids: np.ndarray, said: list[np.ndarray]) -> float:
    num = np.array([len(tokens) for tokens in said], np.int32)
    tokens = np.zeros((len(said), num.max()), np.int32)
    for row, new in zip(tokens, said, strict=True):
        row[: len(new)] = new
    none = np.zeros(len(said), np.int32)
    commits = Commits(ids, tokens, num, none, none)
    start = clock()
    contender.observe(commits, said)
    return clock() - start


def draft(contender: Contender, batch: list[tuple[Problem, np.ndarray]], first_id: int, cost: Cost) -> None:
    """Decode the held-out rollouts of a batch side by side, as far as drafts and truth go together plus one."""
    texts = [np.concatenate([problem.prompt, rollout]) for problem, rollout in batch]
    at = [len(problem.prompt) for problem, _ in batch]
    for i, (problem, _) in enumerate(batch):
        contender.begin(first_id + i, problem, len(problem.history) - 1)
    emitted, propose_s, observe_s = 0, 0.0, 0.0
    live = list(range(len(batch)))
    while live:
        ids = np.array([first_id + i for i in live], np.int64)
        tokens = [texts[i][: at[i]] for i in live]
        rows = Rows(ids, tokens, ids.astype(np.uint64), [SamplingParams()] * len(live))
        caps = np.full(len(live), cost.k, np.int32)
        start = clock()
        drafts = contender.propose(rows, caps)
        propose_s += clock() - start
        said = []
        for i, guess in zip(live, contender.tokens_of(drafts), strict=True):
            truth = texts[i][at[i] : at[i] + len(guess) + 1]
            right = 0
            while right < min(len(guess), len(truth)) and guess[right] == truth[right]:
                right += 1
            said.append(truth[: right + 1])
            cost.num_steps += 1
            cost.num_drafts += bool(guess)
            cost.num_draft_tokens += len(guess)
            cost.num_accepted_tokens += right
        observe_s += tell(contender, ids, said)
        for i, new in zip(live, said, strict=True):
            at[i] += len(new)
            emitted += len(new)
        live = [i for i in live if at[i] < len(texts[i])]
    for i in range(len(batch)):
        contender.end(first_id + i)
    cost.propose_s += propose_s
    cost.observe_s += observe_s
    cost.num_emitted += emitted
    cost.samples_us.append(1e6 * (propose_s + observe_s) / emitted)


def measure(
    history: str,
    problems: list[Problem],
    make: list[Callable[[], Contender]],
    batches: list[int],
    k: int,
    num_rows: int,
) -> list[dict]:
    num_versions = len(problems[0].history)
    num_tokens = sum(len(rollout) for problem in problems for rollouts in problem.history for rollout in rollouts)
    contenders, facts = [], {}
    for one in make:
        contender = one()
        start = clock()
        told = remember(contender, problems)
        facts[contender.name] = {
            "bytes_per_token": contender.num_bytes() / num_tokens,
            "remember_us": 1e6 * (clock() - start) / num_tokens,
        }
        contenders.append(contender)
    next_id = told[-1][-1] + 1
    # Every batch size decodes rollouts that no drafter has seen yet.
    rows_of = [[(problem, rollout) for rollout in problem.held_out] for problem in problems]
    held_out = chain(*(zip_longest(*rows_of) if history == "scattered" else rows_of))
    held_out = (row for row in held_out if row is not None)
    costs, num_more = [], 0
    for batch in batches:
        of_batch = {contender.name: Cost(contender.name, history, batch, k) for contender in contenders}
        for turn in range(max(1, num_rows // batch)):
            rows = [row for _, row in zip(range(batch), held_out, strict=False)]
            if len(rows) < batch:
                break
            if num_more >= num_tokens:  # small histories start again before the held-out rollouts outgrow them
                contenders, num_more = [one() for one in make], 0
                for contender in contenders:
                    remember(contender, problems)
            num_more += sum(len(rollout) for _, rollout in rows)
            for contender in contenders if turn % 2 == 0 else contenders[::-1]:
                draft(contender, rows, next_id, of_batch[contender.name])
            next_id += batch
        costs += of_batch.values()
    for contender in contenders:
        start = clock()
        num_parts = contender.forget(told[0])
        facts[contender.name] |= {"forget_ms": 1e3 * (clock() - start), "num_forgotten": num_parts}
    name = {"history": history, "num_history_tokens": num_tokens, "num_versions": num_versions, "k": k}
    return [
        name | {"drafter": cost.drafter, "batch": cost.batch} | cost.figures() | facts[cost.drafter]
        for cost in costs
        if cost.num_emitted
    ]


def show(results: list[dict]) -> None:
    table = Table(title="CPU microseconds per emitted token, and what they buy")
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
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [10_000, 100_000, 1_000_000, 10_000_000]
    parser.add_argument("--num-tokens", type=numbers, default=sizes, help="tokens in the history (10k to 10M)")
    parser.add_argument("--versions", type=numbers, default=[1, 4], help="policy versions of it (default: 1,4)")
    parser.add_argument("--histories", default="one,many", help="of one, many, scattered (default: one,many)")
    parser.add_argument("--batch", type=numbers, default=[1, 16, 64], help="rows per step (default: 1,16,64)")
    parser.add_argument("--k", type=int, default=4, help="draft tokens per row (default: 4)")
    parser.add_argument("--num-rows", type=int, default=192, help="held-out rollouts per batch size (default: 192)")
    parser.add_argument("--min-confidence", type=float, default=0, help="cut Paceline's drafts below this (default: 0)")
    parser.add_argument("--peer-tokens", type=int, default=1_000_000, help="no peer beyond this (default: 1000000)")
    parser.add_argument("--rollouts", type=Path, help="jsonl of real rollouts instead of the synthetic source")
    parser.add_argument("--json", type=Path, help="write the table here too")
    arguments = parser.parse_args()
    if SuffixDecodingCache is None:
        print("arctic_inference is not installed here: no peer in this run")
    results = []
    for history, problems in histories(arguments):
        num_versions = len(problems[0].history)
        make: list[Callable[[], Contender]] = [partial(Paceline, num_versions, arguments.min_confidence)]
        num_tokens = sum(len(r) for problem in problems for rollouts in problem.history for r in rollouts)
        if SuffixDecodingCache is not None and num_tokens <= arguments.peer_tokens:
            make.append(Arctic)
        results += measure(history, problems, make, arguments.batch, arguments.k, arguments.num_rows)
        if arguments.json:
            machine = {"machine": platform.machine(), "python": platform.python_version()}
            arguments.json.write_text(json.dumps({**machine, "rows": results}, indent=1) + "\n")
    show(results)


def histories(arguments: argparse.Namespace) -> Iterator[tuple[str, list[Problem]]]:
    if arguments.rollouts:
        yield "file", read_rollouts(arguments.rollouts)
        return
    num_held_out = sum(max(batch, arguments.num_rows) for batch in arguments.batch)
    for num_tokens in arguments.num_tokens:
        for num_versions in arguments.versions:
            source, num_rollouts = Source(0), max(num_versions, num_tokens // LENGTH)
            for kind in arguments.histories.split(","):
                num_problems = 1 if kind == "one" else max(1, num_rollouts // (GROUP * num_versions))
                num_each = max(GROUP if kind == "many" else 1, -(-num_held_out // num_problems))
                problems = []
                for i in range(num_problems):
                    num = min(num_each, max(0, num_held_out - i * num_each))
                    name, num_told = f"{kind}-{i}", num_rollouts // num_problems
                    problems.append(source.problem(name, num_told, num_versions, num, LENGTH))
                yield kind, problems


if __name__ == "__main__":
    main()
