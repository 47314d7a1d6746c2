"""The result of a check, and the draft tokens of its runs. A run without accepted drafts would pass every comparison
without testing speculation, so that is a problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.types import Completion

Progress = Callable[[str, float], None]  # what is checked now, and the share of this check that is done
# Figures by name. `problems` is a list of sentences; the check passes if it is empty.
CheckResult = dict[str, Any]


def no_accepted_drafts(run: str, num_draft_tokens: int, num_accepted_tokens: int) -> list[str]:
    """The problem, if there is one."""
    if num_accepted_tokens > 0:
        return []
    what = f"none of {num_draft_tokens} draft tokens was accepted" if num_draft_tokens else "nothing was drafted"
    return [f"{run}: {what}, so this run does not test speculation"]


def num_drafted(completions: Sequence[Completion]) -> tuple[int, int]:
    """Draft tokens, and how many of them were accepted."""
    return sum(c.num_draft_tokens for c in completions), sum(c.num_accepted_tokens for c in completions)


def needs_drafts(run: str, completions: Sequence[Completion]) -> list[str]:
    remedy = "give prompts that repeat themselves with --prompts, or leave this drafter out of --drafters"
    return [f"{problem}; {remedy}" for problem in no_accepted_drafts(run, *num_drafted(completions))]


def acceptance(completions: Sequence[Completion]) -> dict[str, float]:
    num_drafts = sum(c.num_drafts for c in completions)
    drafted, accepted = num_drafted(completions)
    return {
        "mean_acceptance_length": 1 + accepted / max(1, num_drafts),
        "draft_acceptance_rate": accepted / max(1, drafted),
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
    }
