"""What the history drafter costs at a history of a million tokens, beside arctic-inference's SuffixDecodingCache.

Both are told the same rollouts and then draft for the same held-out ones of the same problems, in turn: a row
proposes up to k tokens, keeps those that the rollout really says and one more, and tells its drafter. Two
histories: `one` problem with all the tokens, and `many` problems of 16 rollouts each.

    python benchmarks/suffix.py --json suffix.json

The peer takes part where `arctic_inference` can be imported. It wants an environment of its own:

    python -m venv /tmp/arctic && /tmp/arctic/bin/pip install numpy rich arctic-inference==0.1.1
    PYTHONPATH=src /tmp/arctic/bin/python benchmarks/suffix.py --json suffix.json

The rollouts come from a synthetic source (`Source`), or from `--rollouts FILE`: jsonl with
{"prompt": [ids], "rollouts": [[ids], ...]} per problem; the last quarter of each problem's rollouts is then held out.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
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
PROMPT = 64  # tokens of a synthetic prompt
STRAYS = 0.15  # how often a synthetic rollout leaves its plan


@dataclass
class Problem:
    name: str
    prompt: np.ndarray
    history: list[np.ndarray]
    held_out: list[np.ndarray]


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

    def problem(self, name: str, num_history: int, num_held_out: int, length: int) -> Problem:
        plans = [self._text(length) for _ in range(-(-num_history // 4))]
        rollouts = [self._rollout(plans, length) for _ in range(num_history + num_held_out)]
        return Problem(name, self._text(PROMPT), rollouts[:num_history], rollouts[num_history:])

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
        problems.append(Problem(f"problem-{i}", np.array(record["prompt"], np.int32), rollouts[:cut], rollouts[cut:]))
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
            "best_total_us": min(self.samples_us),
            "tokens_per_step": self.num_emitted / self.num_steps,
            "drafted_per_step": self.num_draft_tokens / self.num_steps,
            "mean_acceptance_length": 1 + self.num_accepted_tokens / max(1, self.num_drafts),
            "acceptance_rate": self.num_accepted_tokens / max(1, self.num_draft_tokens),
        }


class Contender(Protocol):
    """`propose` and `observe` are timed; `tokens_of` reads what propose returned and is not."""

    name: str

    def begin(self, request_id: int, problem: Problem) -> None: ...
    def propose(self, rows: Rows, caps: np.ndarray) -> Any: ...
    def tokens_of(self, drafts: Any) -> list[list[int]]: ...
    def observe(self, commits: Commits, said: list[np.ndarray]) -> None: ...
    def end(self, request_id: int) -> None: ...
    def num_bytes(self) -> int: ...


class Paceline:
    name = "paceline"

    def __init__(self, min_confidence: float = 0) -> None:
        self.drafter = SuffixDrafter(max_bytes=1 << 40)
        self.min_confidence = min_confidence
        self.propose = self.drafter.propose
        self.end = self.drafter.end

    def begin(self, request_id: int, problem: Problem) -> None:
        self.drafter.begin(Request(request_id, tuple(problem.prompt.tolist()), problem=problem.name))

    def tokens_of(self, drafts: DraftBatch) -> list[list[int]]:
        """What a policy leaves of them that cuts a draft at its first doubtful token."""
        sure = np.minimum.accumulate(drafts.confidence >= self.min_confidence, axis=1).sum(axis=1)
        return [row[:n].tolist() for row, n in zip(drafts.tokens, np.minimum(drafts.num, sure), strict=True)]

    def observe(self, commits: Commits, said: list[np.ndarray]) -> None:
        self.drafter.observe(commits)

    def num_bytes(self) -> int:
        return self.drafter.num_bytes


class Arctic:
    """As vLLM calls it: one cache for all problems, one call per row. It keeps prompts of live requests only."""

    name = "arctic"
    depth = 64  # its default

    def __init__(self) -> None:
        self.cache = SuffixDecodingCache(self.depth)

    def begin(self, request_id: int, problem: Problem) -> None:
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


def remember(contender: Contender, problems: list[Problem], first_id: int) -> int:
    """Tell it every rollout of the history, the samples of a problem side by side, 8 tokens a step."""
    request_id = first_id
    for problem in problems:
        for start in range(0, len(problem.history), GROUP):
            group = problem.history[start : start + GROUP]
            ids = np.arange(request_id, request_id + len(group), dtype=np.int64)
            request_id += len(group)
            for i in ids.tolist():
                contender.begin(i, problem)
            for at in range(0, max(map(len, group)), 8):
                tell(contender, ids, [rollout[at : at + 8] for rollout in group])
            for i in ids.tolist():
                contender.end(i)
    return request_id


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
        contender.begin(first_id + i, problem)
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
    history: str, problems: list[Problem], contenders: list[Contender], batches: list[int], k: int, num_rows: int
) -> list[dict]:
    num_tokens = sum(len(rollout) for problem in problems for rollout in problem.history)
    results, next_id = [], 0
    memory = {}
    for contender in contenders:
        start = clock()
        next_id = max(next_id, remember(contender, problems, 0))
        memory[contender.name] = {
            "num_history_tokens": num_tokens,
            "bytes_per_token": contender.num_bytes() / num_tokens,
            "remember_us": 1e6 * (clock() - start) / num_tokens,
        }
    # Every batch size decodes rollouts that no drafter has seen yet.
    held_out = iter([(problem, problem.held_out[j]) for j in range(len(problems[0].held_out)) for problem in problems])
    for batch in batches:
        costs = {contender.name: Cost(contender.name, history, batch, k) for contender in contenders}
        for turn in range(max(1, num_rows // batch)):
            rows = [row for _, row in zip(range(batch), held_out, strict=False)]
            if len(rows) < batch:
                break
            for contender in contenders if turn % 2 == 0 else contenders[::-1]:
                draft(contender, rows, next_id, costs[contender.name])
            next_id += batch
        for cost in costs.values():
            if cost.num_emitted:
                row = {"drafter": cost.drafter, "history": history, "batch": batch, "k": k}
                results.append(row | cost.figures() | memory[cost.drafter])
    return results


def show(results: list[dict]) -> None:
    table = Table(title="CPU microseconds per emitted token, and what they buy")
    for name in ("history", "batch", "drafter"):
        table.add_column(name)
    for name in ("observe", "propose", "total", "best total", "tokens/step", "drafted/step", "accepted", "bytes/token"):
        table.add_column(name, justify="right")
    for row in results:
        table.add_row(
            row["history"], str(row["batch"]), row["drafter"],
            *(f"{row[key + '_us']:.2f}" for key in ("observe", "propose", "total", "best_total")),
            f"{row['tokens_per_step']:.2f}", f"{row['drafted_per_step']:.2f}",
            f"{row['acceptance_rate']:.0%}", f"{row['bytes_per_token']:.1f}",
        )  # fmt: skip
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tokens", type=int, default=1_000_000, help="tokens in the history (default: 1000000)")
    parser.add_argument("--batch", default="1,16,64", help="rows per step (default: 1,16,64)")
    parser.add_argument("--k", type=int, default=4, help="draft tokens per row (default: 4)")
    parser.add_argument("--num-rows", type=int, default=256, help="held-out rollouts per batch size (default: 256)")
    parser.add_argument("--min-confidence", type=float, default=0, help="cut Paceline's drafts below this (default: 0)")
    parser.add_argument("--rollouts", type=Path, help="jsonl of real rollouts instead of the synthetic source")
    parser.add_argument("--json", type=Path, help="write the table here too")
    arguments = parser.parse_args()
    batches = [int(size) for size in arguments.batch.split(",")]
    num_held_out = len(batches) * arguments.num_rows
    if arguments.rollouts:
        histories = {"file": read_rollouts(arguments.rollouts)}
    else:
        num_rollouts, length = max(1, arguments.num_tokens // 500), 500
        num_problems = max(1, num_rollouts // GROUP)
        source = Source(0)
        num_each = -(-num_held_out // num_problems)
        histories = {
            "one": [source.problem("one", num_rollouts, num_held_out, length)],
            "many": [source.problem(f"many-{i}", GROUP, num_each, length) for i in range(num_problems)],
        }
    if SuffixDecodingCache is None:
        print("arctic_inference is not installed here: no peer in this run")
    results = []
    for history, problems in histories.items():
        contenders: list[Contender] = [Paceline(arguments.min_confidence)]
        if SuffixDecodingCache is not None:
            contenders.append(Arctic())
        results += measure(history, problems, contenders, batches, arguments.k, arguments.num_rows)
    show(results)
    if arguments.json:
        machine = {"machine": platform.machine(), "python": platform.python_version()}
        arguments.json.write_text(json.dumps({**machine, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
