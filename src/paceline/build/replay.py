"""Drafters and policies for a replay, by name: no model, and no torch unless a tokenizer is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.config import Config, ConfigError, load_config

if TYPE_CHECKING:
    from paceline.replay.engine import Replay
    from paceline.replay.run import Cell
    from paceline.replay.tape import Tape
    from paceline.speculation.batch import Drafter
    from paceline.speculation.cost import CostTable

MODEL_FREE = ("suffix", "ngram")
RECORDED = ("eagle3", "hybrid")  # where match lengths are stored
DEFAULT_HARDWARE = "vllm-h200-qwen3-8b"
LONGEST = 7  # draft of das and auto, unless said
TAKEN = (
    "engine.prefix_sharing", "speculation.hybrid_choice", "speculation.min_confidence", "speculation.prompt_lookup_max",
    "speculation.prompt_lookup_min", "speculation.suffix_max_bytes", "speculation.suffix_max_versions",
    "speculation.suffix_min_match", "speculation.suffix_recency",
)  # fmt: skip


def check_names(drafters: tuple[str, ...], policies: tuple[str, ...]) -> None:
    for drafter in drafters:
        if drafter not in (*MODEL_FREE, *RECORDED):
            raise ValueError(
                f"--drafter {drafter!r}: replay has no model; use one of {', '.join((*MODEL_FREE, *RECORDED))}"
            )
    for policy in policies:
        kind, colon, k = policy.partition(":")
        if kind not in ("static", "das", "auto") or ((colon or kind == "static") and not k.isdecimal()):
            raise ValueError(
                f"--policy {policy!r}: use static:K, das, auto, or das:K and auto:K for drafts of at most K"
            )


def check_overrides(overrides: tuple[str, ...]) -> None:
    """Nothing that is set goes unheard."""
    given = load_config(None, overrides)
    keys = [
        f"{section}.{key}" for section in given.model_fields_set for key in getattr(given, section).model_fields_set
    ]
    for key in sorted(keys):
        if key not in TAKEN:
            raise ValueError(
                f"--set {key}: a replay does not take it, but {', '.join(TAKEN)}; drafters, policies, batches, costs "
                "and limits are options of the command's own (--help)"
            )


def replay_config(cell: Cell, overrides: tuple[str, ...] = ()) -> Config:
    """The settings that a live run with this cell's drafter and policy would have."""
    kind, _, k = cell.policy.partition(":")
    try:
        return load_config(
            None,
            [
                *overrides,
                f'speculation.method="{cell.drafter}"',
                f'speculation.policy="{kind}"',
                f"speculation.num_speculative_tokens={k or LONGEST}",
                f"engine.max_num_seqs={cell.batch}",
            ],
        )
    except ConfigError as error:
        raise ValueError(f"{cell.drafter}, {cell.policy}, batch {cell.batch}: {error}") from None


def build_replay(cell: Cell, costs: CostTable, overrides: tuple[str, ...] = (), **options: Any) -> Replay:
    """A replay that begins with an empty history. `options`: of Replay."""
    from paceline.build.policy import build_policy
    from paceline.replay.engine import Replay
    from paceline.replay.tape import Tape

    assert costs.frozen  # or a policy's learning would change the clock
    config = replay_config(cell, overrides)
    tape = Tape()
    return Replay(
        build_policy(config.speculation, lambda: costs),
        costs,
        _drafter(config, tape, costs),
        tape=tape,
        max_num_seqs=cell.batch,
        prefix_sharing=config.engine.prefix_sharing,
        **options,
    )


def _drafter(config: Config, tape: Tape, costs: CostTable) -> Drafter | None:
    from paceline.build import drafter

    speculation = config.speculation
    if speculation.method in drafter.MODEL_FREE:
        return drafter.build_model_free(config)
    from paceline.replay.recorded_head import RecordedHead

    head = RecordedHead(tape)
    if speculation.method == "eagle3":
        return head
    from paceline.drafters.hybrid import HybridDrafter
    from paceline.speculation.batch import Load

    assert speculation.method == "hybrid"
    head_cost = costs.draft_s("eagle3", 1, 1) / costs.step_s(Load(1, 1, 1))
    return HybridDrafter(drafter.build_history(config), head, head_cost, speculation.hybrid_choice)


def frozen_costs(cost: str | None, hardware: str | None) -> CostTable:
    """The table of --cost or --hardware; DEFAULT_HARDWARE's where neither is given."""
    from pathlib import Path

    from paceline.speculation.cost import CostTable
    from paceline.speculation.cost_files import cost_table_of, shipped_tables

    if cost is not None and hardware is not None:
        raise ValueError(f"--cost {cost} and --hardware {hardware}: give one of the two")
    if hardware is not None and hardware not in shipped_tables():
        raise ValueError(
            f"--hardware {hardware!r}: the shipped tables are {', '.join(shipped_tables())}; or give --cost FILE"
        )
    if cost is not None and not Path(cost).is_file():
        raise ValueError(
            f"--cost {cost}: no such file; or name a shipped table: --hardware {'|'.join(shipped_tables())}"
        )
    table = cost_table_of(cost or hardware or DEFAULT_HARDWARE)
    return CostTable(table.name, table.points, table.drafts, table.per_context_token_s, table.source, frozen=True)


def load_any_tokenizer(name: str) -> Any:
    """Of a known model, a directory or a hub id: of that the tokenizer alone, and no code."""
    from transformers import AutoTokenizer

    from paceline.model.store import KNOWN, resolve

    place = resolve(name) if name in KNOWN else name
    try:
        return AutoTokenizer.from_pretrained(str(place), trust_remote_code=False)
    except Exception as error:  # transformers, tokenizers and their validators raise all sorts
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"--tokenizer {name!r}: can't be loaded ({reason}); give a directory, a known name ({', '.join(KNOWN)}) "
            "or, online, a hub id"
        ) from None
