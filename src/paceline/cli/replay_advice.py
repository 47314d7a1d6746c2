"""`paceline advise`: recommend speculation settings for recorded rollouts, without a model."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.app import (
    JsonFile,
    Overrides,
    comma_numbers,
    command,
    err,
    out,
    print_note,
    save_json,
    split_settings,
)
from paceline.cli.replay import (
    MAX_NUM_BATCHED_TOKENS,
    Budget,
    Cost,
    Hardware,
    MaxTokens,
    Rollouts,
    SkipBroken,
    Tokenizer,
    epoch_rows,
    open_reader,
    print_replay_notes,
    progress_bar,
)
from paceline.report.table import check_writable

if TYPE_CHECKING:
    from paceline.build.replay_costs import ReplayCosts
    from paceline.replay.rounds import Round
    from paceline.replay.run import Cell, Result
    from paceline.sim.recorded_run import RecordedRun

POLICY_GRID = ("static:1", "static:3", "static:5", "static:7", "auto:7")
BATCHES = (1, 8, 32, 128)
MAX_TOKENS_READ = 4_000_000  # tokens that are read without --all
MIN_PARALLEL_TOKENS = 20_000  # with fewer tokens, starting processes would not save time
MAX_PROCESSES = 16
CLEARLY_BETTER = 1.05  # how much faster another setting must be to replace a run's own
DEFAULT_SHARE = 0.65  # of generation in an RL step


@command()
def advise(
    rollouts: Rollouts,
    cost: Cost = None,
    hardware: Hardware = None,
    batch: Annotated[
        str | None, typer.Option(help="Batch sizes.", show_default="1,8,32,128, for a run up to its own")
    ] = None,
    generation_share: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Share of generation in an RL step's time.", show_default="from metrics.jsonl, or 0.65"
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Replay all problems, not a sample.")] = False,
    max_tokens: MaxTokens = None,
    max_num_batched_tokens: Budget = None,
    tokenizer: Tokenizer = None,
    skip_broken: SkipBroken = False,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """Recommend a drafter and a draft length for recorded rollouts, or no speculation. Replays a small grid.

    For a run of Paceline, the step times are those that the run measured, prompts included. Otherwise they are those
    of a shipped table. The first line says which.

    Examples:

    - `paceline advise runs/mine`
    - `paceline advise rollouts.jsonl --hardware vllm-h200-qwen3-8b --batch 16,64,256 --generation-share 0.7`
    """
    from paceline.bench.common import check_numbers
    from paceline.build.replay import MODEL_FREE, WITH_HEAD, build_replay, check_overrides
    from paceline.build.replay_costs import cell_of_run, choose_costs, recorded_run, shared_settings
    from paceline.replay import advice
    from paceline.replay.run import RoundSource

    check_writable(json_file)
    sizes = comma_numbers("--batch", batch) if batch is not None else BATCHES
    check_numbers(1, batch=sizes)
    rollouts, given = split_settings(rollouts, overrides)
    check_overrides(tuple(given))
    run = recorded_run(rollouts)
    with err.status("reading the run"):
        costs = choose_costs(cost, hardware, run)
    own = run if costs.run is not None else None  # its settings go with its step times
    run_cell = cell_of_run(own) if own is not None else None
    if own is not None and batch is None:
        sizes = (*(size for size in BATCHES if size < own.max_num_seqs), own.max_num_seqs)
    reader = open_reader(rollouts, tokenizer, skip_broken)
    with err.status("reading rollouts"):
        rounds, whole = advice.take_rounds(RoundSource(reader, max_tokens), None if everything else MAX_TOKENS_READ)
    out.print(costs.describe(), soft_wrap=True)
    notes = [] if whole else [f"Only the file's first {MAX_TOKENS_READ:,} tokens were read; --all reads all."]
    has_head_accepted = any(recorded.head_accepted is not None for recorded in rounds)
    drafters = (*MODEL_FREE, *(WITH_HEAD if has_head_accepted else ()))
    make = functools.partial(
        build_replay,
        costs=costs.table,
        overrides=(*(shared_settings(own) if own is not None else ()), *given),
        max_num_batched_tokens=max_num_batched_tokens
        or (own.config.engine.max_num_batched_tokens if own else MAX_NUM_BATCHED_TOKENS),
        prefill=costs.run is not None,
        order=own.config.engine.order if own is not None else "arrival",
    )
    results = _replay_grid(rounds, sizes, drafters, run_cell, make, everything, notes)
    untimed = advice.without_draft_times(drafters, costs.table.drafts) if costs.run is not None else []
    candidates = [result for result in results if result.cell.drafter not in untimed] or results
    share = generation_share if generation_share is not None else _recorded_share(rollouts)
    own_batch = own.max_num_seqs if own is not None and own.max_num_seqs in sizes else None
    advised = advice.advise(candidates, DEFAULT_SHARE if share is None else share, own_batch, untimed)
    if (
        own is not None
        and own.config.speculation.min_confidence
        and advised["settings"].get("speculation.policy") == "auto"
    ):
        advised["settings"]["speculation.min_confidence"] = 0.0
    if run_cell is not None and own_batch is not None:
        _keep_setting(advised, run_cell, candidates)
    if len(candidates) < len(results):
        advised["text"] += advice.untimed_text(results, untimed)
    measured = _measured(own, run_cell, results) if own is not None else None
    if measured is not None:
        out.print(measured["text"], soft_wrap=True)
    _show(advised, own_batch, advice.small_sample_warning(rounds))
    if share is None:
        notes.append(f"Generation is assumed to take {DEFAULT_SHARE:.0%} of a step; set --generation-share.")
    notes += _costs_notes(costs, sizes)
    for note in notes:
        print_note(note)
    print_replay_notes(reader, costs.table, results)
    grid = [row for result in results for row in epoch_rows(result, True)]
    save_json(
        json_file,
        {**advised, "cost": costs.table.name, "costs": costs.describe(), "measured": measured, "notes": notes,
         "rows": grid},
    )  # fmt: skip


def _keep_setting(advised: dict[str, Any], setting: Cell, results: Sequence[Result]) -> None:
    """Recommend the run's own setting if no other is clearly better: the costs are estimates."""
    speedups = {result.cell: result.speedup for result in results if result.cell.batch == setting.batch}
    own = speedups.get(setting, 0.0)
    if own < 1 or max(speedups.values()) > CLEARLY_BETTER * own:
        return
    kind, _, k = setting.policy.partition(":")
    advised["settings"] = {
        "speculation.method": setting.drafter,
        "speculation.policy": kind,
        "speculation.num_speculative_tokens": int(k),
    }
    advised["text"].append(
        f"The run's present setting gives {own:.2f}x; no other is more than {CLEARLY_BETTER - 1:.0%} faster."
    )


def _replay_grid(
    rounds: Sequence[Round],
    sizes: Sequence[int],
    drafters: Sequence[str],
    run_cell: Cell | None,
    make: Any,
    everything: bool,
    notes: list[str],
) -> list[Result]:
    """Replay every drafter and policy of the grid at every batch size, and the run's own setting at its batch size."""
    from paceline.replay import advice
    from paceline.replay.run import Cell, replay

    cells = {size: [Cell(drafter, policy, size) for drafter in drafters for policy in POLICY_GRID] for size in sizes}
    if run_cell is not None and run_cell.batch in cells:
        cells[run_cell.batch] = list(dict.fromkeys([*cells[run_cell.batch], run_cell]))
    parallel = sum(recorded.num_emitted for recorded in rounds) >= MIN_PARALLEL_TOKENS
    num_processes = min(os.cpu_count() or 1, MAX_PROCESSES) if parallel else 1
    results: list[Result] = []
    with progress_bar(sum(1 + len(each) for each in cells.values()), "replays") as step:
        for size, cells_of_size in cells.items():
            some = advice.sample(rounds, None if everything else advice.default_sample_tokens(size))
            if some.num_problems < some.num_problems_recorded:
                notes.append(
                    f"batch {size}: {some.num_problems} of {some.num_problems_recorded} problems were replayed, "
                    f"{some.num_tokens:,} of {some.num_tokens_recorded:,} tokens; --all replays all."
                )
            if (max_requests := max(map(len, some.rounds))) < size:
                notes.append(f"batch {size}: rounds have at most {max_requests} requests, so it was never full.")
            done: set[Cell] = set()

            def progress(cell: Cell, num_bytes: int, done: set[Cell] = done) -> None:
                if cell not in done:
                    done.add(cell)
                    step(f"{cell.drafter} {cell.policy}, batch {cell.batch}", 1)

            results += replay(some.rounds, False, cells_of_size, make, progress, num_processes)
    return results


def _measured(run: RecordedRun, setting: Cell | None, results: Sequence[Result]) -> dict[str, Any] | None:
    """What the run's audits measured, next to a replay of the same setting. None without audits."""
    from paceline.build.replay_costs import audited_s

    audits = audited_s(run)
    if not audits:
        return None
    measured = sum(plain_s for plain_s, _ in audits) / sum(speculative_s for _, speculative_s in audits)
    speculation = run.config.speculation
    text = (
        f"This run's audits measured {measured:.2f}x ({speculation.method}, policy "
        f'"{speculation.policy}", batch {run.max_num_seqs}; {len(audits)} '
        f"audit{'s' if len(audits) > 1 else ''})."
    )
    replayed = next((result.speedup for result in results if result.cell == setting), None)
    if replayed is not None:
        text += f" A replay of this setting gives {replayed:.2f}x."
    return {"speedup": measured, "num_audits": len(audits), "replayed": replayed, "text": text}


def _show(advised: dict[str, Any], own_batch: int | None, warning: str | None) -> None:
    if warning is not None:
        advised["text"].append(warning)
    for line in advised["text"]:
        out.print(f"• {line}", soft_wrap=True)
    out.print()
    which = f"for this run's batch size, {own_batch}" if own_batch is not None else "for all batch sizes"
    if advised["settings"] == {"speculation.method": "none"}:
        reason = f"batch {own_batch} does not become" if own_batch is not None else "no batch size becomes"
        out.print(f"Do not speculate: {reason} faster.", style="bold")
        return
    out.print(f"Best setting {which}:", style="bold", soft_wrap=True)
    for key, value in advised["settings"].items():
        out.print(f"  {key}={value}", style="bold", soft_wrap=True)


def _costs_notes(costs: ReplayCosts, sizes: Sequence[int]) -> list[str]:
    """How good the fit to the run's steps is, and for which batch sizes it extrapolates."""
    if costs.run is None:
        return []
    notes = [
        f"The costs are fitted to {costs.run.num_steps:,} engine steps; half of the steps differ from the fit by more "
        f"than {costs.run.median_error:.0%}."
    ]
    if larger := [str(size) for size in sizes if size > costs.run.max_rows]:
        notes.append(
            f"batch {', '.join(larger)}: the run's steps have at most {costs.run.max_rows} sequences, so these costs "
            "are extrapolated."
        )
    return notes


def _recorded_share(rollouts: Sequence[str]) -> float | None:
    from paceline.replay.advice import generation_share

    if len(rollouts) != 1 or rollouts[0] == "-":
        return None
    path = Path(rollouts[0])
    return generation_share((path if path.is_dir() else path.parent) / "metrics.jsonl")
