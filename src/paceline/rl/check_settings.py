"""Finds settings that an audit or the learner can't follow."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config import Config


def audit_problems(config: Config) -> Iterator[str]:
    """Audits that are asked for and not possible."""
    if config.speculation.audit_every:
        for obstacle in audit_obstacles(config):
            yield f"speculation.audit_every = {config.speculation.audit_every}: {obstacle}"


def audit_obstacles(config: Config) -> Iterator[str]:
    """Settings with which an audit could not compare tokens and times."""
    if config.speculation.rule != "coupled":
        yield (
            "an audit generates the same tokens twice, which speculation.rule = "
            f'"{config.speculation.rule}" does not; use rule = "coupled" or audit_every = 0'
        )
    if config.train.max_staleness:
        yield (
            "training would run at the same time as the audit and distort its times; set train.max_staleness = 0 or "
            "audit_every = 0"
        )
    if kinds := sorted({task.section.kind for task in config.tasks if task.section.has_agents}):
        yield (
            f'with task.kind = "{kinds[0]}" the prompt of a later turn contains the completion of the turn before, '
            "which the audit would generate again; set audit_every = 0"
        )


def may_audit(config: Config) -> bool:
    """Whether a run has audits if it is long enough. They need an engine in the learner's process. Without drafts there
    are none unless they are asked for."""
    every, drafts = config.speculation.audit_every, config.speculation.method != "none"
    return every != 0 and (drafts or every is not None) and audits_are_possible(config)


def audits_are_possible(config: Config) -> bool:
    is_in_process = config.engine.kind == "local" and config.cluster.kind == "none"
    return is_in_process and not any(audit_obstacles(config))


def training_problems(config: Config) -> Iterator[str]:
    """Settings of model, sampling and algorithm that the learner can't follow."""
    if config.learner.model == "transformers" and config.model.yarn_factor is not None:
        yield (
            f'model.yarn_factor = {config.model.yarn_factor}: with learner.model = "transformers" the context length '
            "comes from the model's config.json; set rope_parameters there"
        )
    if config.train.oversample > 1 and (config.train.max_staleness or not config.algorithm.samples_dynamically):
        yield (
            f"train.oversample = {config.train.oversample:g}: is for algorithm.dynamic_sampling with "
            "train.max_staleness = 0; otherwise no group would be used that is started in addition"
        )
    if config.algorithm.correction != "none" and config.sampling.params().truncates:
        yield (
            f'algorithm.correction = "{config.algorithm.correction}" (the default with train.max_staleness > 0 is '
            "\"token_tis\"): compares the engine's logprobs with the learner's, which ignore sampling.top_k, top_p and "
            'min_p; turn these off, or set algorithm.correction = "none"'
        )
