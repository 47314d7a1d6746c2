"""What speculation did, with vLLM's names. Token-weighted figures count every draft alike, request-weighted ones every
request: a long completion then counts no more than a short one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.types import Completion, StepTrace


def summarise(completions: Sequence[Completion], traces: Sequence[StepTrace]) -> dict[str, Any]:
    num_drafts = sum(t.num_drafts for t in traces)
    num_draft_tokens = sum(t.num_draft_tokens for t in traces)
    num_accepted_tokens = sum(t.num_accepted_tokens for t in traces)
    positions = max((len(t.drafted_per_position) for t in traces), default=0)
    accepted, drafted = [0] * positions, [0] * positions
    for trace in traces:
        for j, count in enumerate(trace.accepted_per_position):
            accepted[j] += count
        for j, count in enumerate(trace.drafted_per_position):
            drafted[j] += count
    per_request = [c.mean_acceptance_length for c in completions if c.num_drafts]
    return {
        "num_drafts": num_drafts,
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": num_accepted_tokens,
        "mean_acceptance_length": 1 + num_accepted_tokens / num_drafts if num_drafts else 1.0,
        "mean_acceptance_length_per_request": sum(per_request) / len(per_request) if per_request else 1.0,
        "draft_acceptance_rate": num_accepted_tokens / num_draft_tokens if num_draft_tokens else 0.0,
        # As in vLLM: of all drafts, how many were accepted up to this position.
        "acceptance_rate_per_position": [a / num_drafts for a in accepted] if num_drafts else [],
        "drafted_per_position": drafted,
        "num_steps": len(traces),
        "num_emitted": sum(t.num_emitted for t in traces),
        "draft_s": sum(t.draft_s for t in traces),
        "forward_s": sum(t.forward_s for t in traces),
        "sample_s": sum(t.sample_s for t in traces),
        "total_s": sum(t.total_s for t in traces),
    }
