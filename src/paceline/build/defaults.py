"""Defaults that depend on other settings: those of a GPU on model.device, those of speculation on engine, acceptance
rule and draft length (docs/how-to/speculation.md has the table), that of the correction on staleness."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config import GPU_DEFAULTS, Config, SpeculationSection
from paceline.config_io import ConfigError

Settings = Mapping[str, Any]  # by section and key; values are not validated
DRAFTERS = {
    "ngram": "drafts from the sequence itself",
    "suffix": "drafts from earlier completions of the problem",
    "draft_model": "drafts with a smaller model",
    "eagle3": "drafts with an EAGLE-3 head",
    "dspark": "drafts with a DSpark head",
    "hybrid": "drafts from earlier completions and with a head",
}
POLICIES = {
    "auto": "only if that should save time",
    "das": "more for sequences that are expected to be long",
    "static": "in every step",
}


def with_defaults(settings: Settings) -> Settings:
    """The settings, with each default that differs from the one in `config`."""
    check_method(settings)
    return _with_speculation_defaults(_with_device_defaults(_with_correction_default(settings)))


def check_method(settings: Settings) -> None:
    """Raise ConfigError for a drafter that would be ignored, as speculation.method is not set."""
    given = _section(settings, "speculation")
    drafters = [name for name in ("head", "draft_model") if given.get(name) is not None]
    if drafters and "method" not in given and _section(settings, "engine").get("kind") == "vllm":
        raise ConfigError(
            f'speculation.{drafters[0]} = {given[drafters[0]]!r}: with engine.kind = "vllm" nothing is drafted by '
            "default; set speculation.method"
        )


def describe_speculation(config: Config) -> str:
    """One line about how a run drafts, and why if that is not what it does by default."""
    s = config.speculation
    if s.method == "none" and config.engine.kind == "vllm":
        return 'no speculation: with engine.kind = "vllm", set speculation.method'
    if s.method == "none":
        return 'no speculation: speculation.method = "none"'
    if s.num_speculative_tokens == 0:
        return "no speculation: speculation.num_speculative_tokens = 0"
    return f"speculation: {s.method} {DRAFTERS[s.method]}; policy {describe_policy(config)}"


def describe_policy(config: Config) -> str:
    """The policy of a run that drafts, what it does, and why it is not `auto` where that can't be used."""
    s = config.speculation
    length = s.num_speculative_tokens
    if isinstance(length, int):
        amount = f"{'up to ' if s.policy != 'static' else ''}{length} tokens, {POLICIES[s.policy]}"
    else:
        table = ", ".join(f"{k} up to {rows}" for rows, k in sorted(length.items()))
        amount = f"tokens by number of running sequences: {table}, else none"
    text = f"{s.policy}: {amount}"
    reason = _no_auto(s.model_dump(), config.engine.kind)
    return text if s.policy == "auto" or reason is None else f"{text} (auto is not possible with {reason})"


def _with_device_defaults(settings: Settings) -> Settings:
    device = _section(settings, "model").get("device")
    if not isinstance(device, str) or not device.startswith("cuda"):
        return settings
    for section, defaults in GPU_DEFAULTS.items():
        settings = fill(settings, section, defaults)
    return settings


def _with_correction_default(settings: Settings) -> Settings:
    """Stale rollouts are not from the policy that is trained."""
    max_staleness = _section(settings, "train").get("max_staleness", 0)
    is_stale = isinstance(max_staleness, int) and max_staleness > 0
    return fill(settings, "algorithm", {"correction": "token_tis"}) if is_stale else settings


def _with_speculation_defaults(settings: Settings) -> Settings:
    engine = _section(settings, "engine").get("kind", "local")
    given = _section(settings, "speculation")
    defaults = SpeculationSection().model_dump(include={"method", "rule", "num_speculative_tokens", "min_confidence"})
    if engine == "vllm":
        defaults |= {"method": "none", "rule": "rejection"}
    elif given.get("num_speculative_tokens") == 0:
        defaults["method"] = "none"
    elif given.get("head") is not None:
        defaults["method"] = "hybrid"
    elif given.get("draft_model") is not None:
        defaults["method"] = "draft_model"
    if _no_auto(defaults | dict(given), engine) is not None:
        defaults["policy"] = "static"
    return fill(settings, "speculation", defaults)


def _no_auto(speculation: Settings, engine: str) -> str | None:
    """The setting with which policy "auto" can't be used, if there is one."""
    if engine == "vllm":
        return 'engine.kind = "vllm"'
    if speculation["method"] == "none":
        return 'method = "none"'
    if speculation["rule"] != "coupled":
        return f'rule = "{speculation["rule"]}"'
    if not isinstance(speculation["num_speculative_tokens"], int):
        return "a table of draft lengths"
    if not speculation["num_speculative_tokens"]:
        return "num_speculative_tokens = 0"
    return "min_confidence" if speculation["min_confidence"] else None


def _section(settings: Settings, name: str) -> Settings:
    """What is given for a section; empty if it is not a table, which validation reports."""
    section = settings.get(name, {})
    return section if isinstance(section, Mapping) else {}


def fill(settings: Settings, section: str, defaults: Settings) -> Settings:
    """The settings, with these values for the keys of a section that are not set."""
    if not isinstance(settings.get(section, {}), Mapping):
        return settings
    return {**settings, section: {**defaults, **_section(settings, section)}}
