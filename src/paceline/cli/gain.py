"""Says in words what speculation brought in a run, for the end of `paceline train`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config import Config

EXAMPLE_SPEEDUP = 1.5  # of generation, for the example of a head
MEASURABLE = 0.005  # of a step's time; smaller differences are noise


def describe_gain(config: Config, summary: Mapping[str, Any], has_shipped_head: bool) -> list[str]:
    """Sentences about a run's summary; none if no step was trained."""
    if not summary["num_steps"]:
        return []
    method = config.speculation.method
    share = _generation_share(summary["stages"])
    is_measured = summary["generation_speedup"] is not None or summary["estimated_speedup"] is not None
    if method == "none" and not is_measured:  # a run that was resumed without drafts has measurements
        return [f"Nothing was drafted. Generation took {share:.0%} of the time."]
    lines = [_gain(summary, share)]
    if method in ("suffix", "ngram") and config.engine.kind == "local":
        lines.append(_head(share, has_shipped_head))
    return lines


def _gain(summary: Mapping[str, Any], share: float) -> str:
    ratio, estimate = summary["generation_speedup"], summary["estimated_speedup"]
    if ratio is None and estimate is None:
        return f"The gain of speculation was not measured. Generation took {share:.0%} of the time."
    if ratio is None:
        return (
            f"By estimate, speculation made generation {estimate:.2f}x as fast as without drafts. "
            f"{_steps(estimate, share)} No audit ran, and one may differ from the estimate by 10%: "
            "speculation.audit_every=5 measures the gain in every fifth step."
        )
    text = f"Speculation made generation {ratio:.2f}x as fast as without drafts, measured on the same tokens"
    if tail := summary["tail_speedup"]:
        rows = min(tail, key=int)
        text += f", and {tail[rows]:.2f}x with {rows} {'sequence' if rows == '1' else 'sequences'} at a time"
    return f"{text}. {_steps(ratio, share)}"


def _steps(ratio: float, share: float) -> str:
    """How much shorter steps were, if generation takes this share of them now."""
    saved = share * (ratio - 1) / (1 + share * (ratio - 1))
    if abs(saved) < MEASURABLE:
        return f"Generation took {share:.0%} of the time. The length of the steps shows no measurable difference."
    verb = "shorter" if saved >= 0 else "longer"
    return f"Generation took {share:.0%} of the time, so the steps were {abs(saved):.1%} {verb}."


def _head(share: float, has_shipped_head: bool) -> str:
    saved = share * (1 - 1 / EXAMPLE_SPEEDUP)
    if has_shipped_head:
        how = "To try the one that is shipped for this model, set speculation.method=hybrid."
    else:
        how = "`paceline train-draft` with this config trains one; then set speculation.head=DIR."
    return (
        f"An EAGLE-3 head may draft more tokens. If it made generation {EXAMPLE_SPEEDUP:g}x as fast (not measured "
        f"here), a step would be {saved:.0%} shorter. {how}"
    )


def _generation_share(stages: Mapping[str, Mapping[str, float]]) -> float:
    """Generation with drafting, as a share of the step time; with overlap only what training waited for."""
    exposed = stages.get("exposed_generation")
    return exposed["share"] if exposed else 0.0
