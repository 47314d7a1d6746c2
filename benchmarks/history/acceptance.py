"""Acceptance of every drafter on the recorded RL runs, by epoch, with a fixed draft length.

    python benchmarks/history/acceptance.py [ROLLOUTS…] [--k 3,7] [--batch 64] [--json FILE] [--markdown FILE]

All drafters use the same replay engine (`paceline.replay`): it emits the recorded tokens, and requests arrive in the
recorded order. In epoch 0 (cold) each problem has no history yet. Three measures, each over all steps of an epoch:

- acceptance length: 1 + accepted / drafts, as in vLLM. Steps without a draft do not count, which favours drafters that
  draft only with high confidence.
- tokens per row and step: steps without a draft count as 1. The speed-up depends on this.
- drafted per row and step: how many draft tokens must be verified for it.

`arctic` is arctic-inference's suffix cache as vLLM uses it: one cache for all problems, vLLM's default settings, one
call per row. It needs its own environment, and is left out if it cannot be imported:

    python -m venv /tmp/arctic && /tmp/arctic/bin/pip install numpy rich pydantic arctic-inference==0.1.1
    PYTHONPATH=src /tmp/arctic/bin/python benchmarks/history/acceptance.py

`eagle3` replays the recorded accepted lengths of the shipped head; `hybrid` combines it with `history`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.build.replay import build_replay, frozen_costs
from paceline.replay.engine import Replay
from paceline.replay.reader import Reader
from paceline.replay.rounds import Round
from paceline.replay.run import Cell, RoundSource
from paceline.replay.stats import ACCEPTED, DRAFT_TOKENS, DRAFTS, ROW_STEPS, TOKENS, ReplayStats
from paceline.report.table import check_writable, render, write_bytes, write_json
from paceline.speculation.batch import Commits, Rows
from paceline.speculation.cost import CostTable
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.policy import StaticPolicy
from paceline.types import Receipt, Request

DATA = Path(__file__).parents[1] / "data"
RUNS = [DATA / "smollm2-gsm8k-t1.0.jsonl.xz", DATA / "smollm2-gsm8k-t0.6.jsonl.xz"]
METHODS = {"ngram": "ngram", "arctic": "", "history": "suffix", "eagle3": "eagle3", "hybrid": "hybrid"}
MEASURES = {
    "mean_acceptance_length": "acceptance length",
    "tokens_per_row_step": "tokens per row and step",
    "drafted_per_row_step": "drafted per row and step",
}


class ArcticDrafter:
    """arctic-inference's cache, used as in vLLM's proposer and with vLLM's default settings."""

    name = "arctic"
    version = 0
    aux_layers: tuple[int, ...] = ()
    reads_drafts = False
    num_bytes = 0  # not counted

    def __init__(
        self,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10_000,
        max_factor: float = 1.0,
        min_prob: float = 0.1,
    ) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(max_tree_depth, max_cached_requests)
        self.depth, self.max_factor, self.min_prob = max_tree_depth, max_factor, min_prob

    def begin(self, request: Request, version: int = 0) -> None:
        self.cache.start_request(request.request_id, np.array(request.prompt_ids, np.int32))

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        drafts = DraftBatch.empty(len(rows), int(caps.max(initial=0)))
        for i, (request_id, cap) in enumerate(zip(rows.request_ids.tolist(), caps.tolist(), strict=True)):
            if not cap:
                continue
            found = self.cache.speculate(
                request_id, rows.tokens[i][-self.depth :], cap, self.max_factor, min_token_prob=self.min_prob
            )
            drafts.num[i] = num = len(found.token_ids)
            drafts.tokens[i, :num], drafts.scores[i, :num] = found.token_ids, found.probs
        return drafts

    def observe(self, commits: Commits) -> None:
        for i, (request_id, num) in enumerate(zip(commits.request_ids.tolist(), commits.num.tolist(), strict=True)):
            self.cache.add_active_response(request_id, commits.tokens[i, :num])

    def end(self, request_id: int) -> None:
        self.cache.stop_request(request_id)

    def update(self, weights: Any, version: int) -> Receipt:
        raise ValueError("arctic's suffix cache has no weights to update")

    def state_dict(self) -> dict[str, np.ndarray]:
        raise ValueError("arctic's suffix cache cannot be saved")

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        raise ValueError("arctic's suffix cache cannot be restored")


def name_of(path: Path) -> str:
    return path.name.partition(".jsonl")[0]


def first_problems(path: Path, num_problems: int | None) -> list[Round]:
    """The recorded rounds of the first problems (None: of all)."""
    rounds = list(RoundSource(Reader([str(path)])))
    problems = list(dict.fromkeys(problem for recorded in rounds for problem in recorded.problems))[:num_problems]
    return [some for recorded in rounds if (some := recorded.select_problems(set(problems))) is not None]


def replay_rounds(rounds: Sequence[Round], drafter: str, k: int, batch: int, costs: CostTable) -> ReplayStats:
    """Replay the rounds. The costs affect only simulated times, and when `hybrid` uses its head."""
    if drafter == "arctic":
        engine = Replay(StaticPolicy(k), costs, ArcticDrafter(), max_num_seqs=batch)
    else:
        engine = build_replay(Cell(METHODS[drafter], f"static:{k}", batch), costs)
    for recorded in rounds:
        engine.run_round(recorded)
    return engine.stats


def figures(stats: ReplayStats, epochs: slice) -> dict[str, Any]:
    counts = stats.counts[:, epochs].sum(1).tolist()
    return {
        "tokens": counts[TOKENS],
        "mean_acceptance_length": 1 + counts[ACCEPTED] / max(1, counts[DRAFTS]),
        "tokens_per_row_step": counts[TOKENS] / counts[ROW_STEPS],
        "drafted_per_row_step": counts[DRAFT_TOKENS] / counts[ROW_STEPS],
        "acceptance_rate": counts[ACCEPTED] / max(1, counts[DRAFT_TOKENS]),
        "draft_share": counts[DRAFTS] / counts[ROW_STEPS],
    }


def result(run: str, drafter: str, k: int, batch: int, stats: ReplayStats) -> dict[str, Any]:
    return {
        "run": run,
        "k": k,
        "batch": batch,
        "drafter": drafter,
        "epochs": [figures(stats, slice(epoch, epoch + 1)) for epoch in range(stats.num_epochs)],
        "warm": figures(stats, slice(1, None)) if stats.num_epochs > 1 else None,
    }


def tables(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[dict[str, str]], dict[str, str]]]:
    """(title, rows, columns) of every run and draft length. Rows: the drafters under each measure."""
    found = []
    for run, k in dict.fromkeys((r["run"], r["k"]) for r in results):
        of_table = [r for r in results if (r["run"], r["k"]) == (run, k)]
        num_epochs = len(of_table[0]["epochs"])
        columns = {"measure": "", "drafter": "drafter", "0": "cold"}
        columns |= {str(epoch): str(epoch) for epoch in range(1, num_epochs)} | {"warm": "warm"}
        rows = []
        for measure, heading in MEASURES.items():
            for i, r in enumerate(of_table):
                row = {"measure": heading if i == 0 else "", "drafter": r["drafter"]}
                row |= {str(epoch): f"{of[measure]:.2f}" for epoch, of in enumerate(r["epochs"])}
                rows.append(row | {"warm": f"{r['warm'][measure]:.2f}" if r["warm"] else "–"})
        found.append((f"{run}, k = {k}, batch {of_table[0]['batch']}, by epoch", rows, columns))
    return found


def cold_and_warm(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tokens per row and step of all drafters: one line per run and draft length, for cold and for warm epochs."""
    lines = []
    for run, k in dict.fromkeys((r["run"], r["k"]) for r in results):
        of_table = [r for r in results if (r["run"], r["k"]) == (run, k)]
        for name in ("cold", "warm"):
            of_drafters = [(r["drafter"], r["epochs"][0] if name == "cold" else r["warm"]) for r in of_table]
            parts = [f"{drafter} {of['tokens_per_row_step']:.2f}" for drafter, of in of_drafters if of]
            lines.append(f"{run}, k = {k}, {name}, tokens per row and step: {', '.join(parts)}")
    return lines


def markdown(title: str, rows: Sequence[Mapping[str, str]], columns: Mapping[str, str]) -> str:
    lines = [list(columns.values()), ["---"] * len(columns), *([row[key] for key in columns] for row in rows)]
    return f"**{title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rollouts", nargs="*", type=Path, default=RUNS, help="default: both runs in benchmarks/data")
    parser.add_argument("--k", default="3,7", help="draft lengths (default: 3,7)")
    parser.add_argument("--batch", type=int, default=64, help="batch size (default: 64)")
    parser.add_argument("--drafters", default=",".join(METHODS), help=f"default: {','.join(METHODS)}")
    parser.add_argument("--problems", type=int, help="use only the first N problems")
    parser.add_argument("--hardware", help="cost table, for hybrid's choice (default: vllm-h200-qwen3-8b)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    drafters = args.drafters.split(",")
    if unknown := set(drafters) - set(METHODS):
        parser.error(f"--drafters: {', '.join(unknown)}: use {', '.join(METHODS)}")
    check_writable(args.json)
    check_writable(args.markdown)
    if "arctic" in drafters and find_spec("arctic_inference") is None:
        print("arctic: left out, arctic_inference is not installed")
        drafters.remove("arctic")
    costs = frozen_costs(None, args.hardware)
    lengths = [int(k) for k in args.k.split(",")]
    results = []
    with progress_bar() as progress:
        task = progress.add_task("", total=len(args.rollouts) * len(lengths) * len(drafters))
        for path in args.rollouts:
            rounds = first_problems(path, args.problems)
            for k in lengths:
                for drafter in drafters:
                    progress.update(task, description=f"{name_of(path)} k={k} {drafter}")
                    stats = replay_rounds(rounds, drafter, k, args.batch, costs)
                    results.append(result(name_of(path), drafter, k, args.batch, stats))
                    progress.advance(task)
                    if args.json:
                        write_json(args.json, results)
    console = Console()
    for title, rows, columns in tables(results):
        console.print(render(rows, columns, title))
    for line in cold_and_warm(results):
        console.print(line, soft_wrap=True, highlight=False)
    if args.markdown:
        parts = [markdown(*table) for table in tables(results)]
        write_bytes(args.markdown, "\n".join([*parts, *(f"- {line}" for line in cold_and_warm(results)), ""]).encode())


if __name__ == "__main__":
    main()
