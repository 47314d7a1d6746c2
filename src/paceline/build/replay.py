"""Builds replays: drafters and policies by name, without a model. Imports torch only to load a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.build import model_free
from paceline.build.config import load_config
from paceline.build.policy import build_policy
from paceline.config import Config
from paceline.config_io import ConfigError, read_settings
from paceline.drafters.hybrid import HybridDrafter
from paceline.replay.engine import Replay
from paceline.replay.recorded_head import RecordedHead
from paceline.replay.round_state import RoundState
from paceline.replay.run import Cell
from paceline.speculation.batch import Drafter, Load
from paceline.speculation.cost import CostTable
from paceline.speculation.cost_files import cost_table_of, shipped_tables

MODEL_FREE = ("suffix", "ngram")
WITH_HEAD = ("eagle3", "hybrid")  # drafters with recorded acceptance of an EAGLE-3 head
DEFAULT_HARDWARE = "vllm-h200-qwen3-8b"
MAX_DRAFT_LENGTH = 7  # of das and auto, unless the policy's name gives one
SUPPORTED_SETTINGS = (
    "engine.prefix_sharing", "speculation.hybrid_choice", "speculation.min_confidence", "speculation.prompt_lookup_max",
    "speculation.prompt_lookup_min", "speculation.suffix_max_bytes", "speculation.suffix_max_versions",
    "speculation.suffix_min_match", "speculation.suffix_recency",
)  # fmt: skip


def check_names(drafters: tuple[str, ...], policies: tuple[str, ...]) -> None:
    for drafter in drafters:
        if drafter not in (*MODEL_FREE, *WITH_HEAD):
            raise ValueError(
                f"--drafter {drafter!r}: replay has no model; use one of {', '.join((*MODEL_FREE, *WITH_HEAD))}"
            )
    for policy in policies:
        kind, colon, k = policy.partition(":")
        if kind not in ("static", "das", "auto") or ((colon or kind == "static") and not k.isdecimal()):
            raise ValueError(
                f"--policy {policy!r}: use static:K, das, auto, or das:K and auto:K for drafts of at most K"
            )


def check_overrides(overrides: tuple[str, ...]) -> None:
    """Raise ValueError for a setting that a replay would ignore."""
    load_config(None, overrides)  # raises for an unknown key
    given = read_settings(None, overrides)
    for key in sorted(f"{section}.{key}" for section, values in given.items() for key in values):
        if key not in SUPPORTED_SETTINGS:
            raise ValueError(
                f"--set {key}: not a setting of a replay, which has {', '.join(SUPPORTED_SETTINGS)}; drafters, "
                "policies, batch sizes, costs and limits are options of the command (--help)"
            )


def replay_config(cell: Cell, overrides: tuple[str, ...] = ()) -> Config:
    """The settings of a live run with this cell's drafter and policy."""
    kind, _, k = cell.policy.partition(":")
    try:
        return load_config(
            None,
            [
                *overrides,
                f'speculation.method="{cell.drafter}"',
                f'speculation.policy="{kind}"',
                f"speculation.num_speculative_tokens={k or MAX_DRAFT_LENGTH}",
                f"engine.max_num_seqs={cell.batch}",
            ],
        )
    except ConfigError as error:
        raise ValueError(f"{cell.drafter}, {cell.policy}, batch {cell.batch}: {error}") from None


def build_replay(cell: Cell, costs: CostTable, overrides: tuple[str, ...] = (), **options: Any) -> Replay:
    """A replay with an empty history. `options`: arguments of Replay."""
    assert costs.frozen  # a policy must not update the table that gives the replay its step times
    config = replay_config(cell, overrides)
    round_state = RoundState()
    return Replay(
        build_policy(config.speculation, lambda: costs, "eagle3" if config.speculation.method in WITH_HEAD else None),
        costs,
        _drafter(config, round_state, costs),
        round_state=round_state,
        max_num_seqs=cell.batch,
        prefix_sharing=config.engine.prefix_sharing,
        **options,
    )


def _drafter(config: Config, round_state: RoundState, costs: CostTable) -> Drafter | None:
    speculation = config.speculation
    if speculation.method in model_free.MODEL_FREE:
        return model_free.build_model_free(config)
    head = RecordedHead(round_state)
    if speculation.method == "eagle3":
        return head
    assert speculation.method == "hybrid"
    head_cost = costs.draft_s("eagle3", 1, 1) / costs.step_s(Load(1, 1, 1))
    return HybridDrafter(model_free.build_history(config), head, head_cost, speculation.hybrid_choice)


def frozen_costs(cost: str | None, hardware: str | None) -> CostTable:
    """The cost table of --cost or --hardware, by default that of DEFAULT_HARDWARE. Policies do not update it."""
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
    """The tokenizer of a known model, a directory or a hub id. Downloads no weights and runs no remote code."""
    from transformers import AutoTokenizer

    from paceline.model.store import KNOWN, cached, resolve

    source = resolve(name) if name in KNOWN or cached(name) is not None else name
    try:
        return AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many types
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"--tokenizer {name!r}: can't be loaded ({reason}); give a directory, a known name ({', '.join(KNOWN)}) "
            "or, online, a hub id"
        ) from None
