"""Builds the local engine."""

from __future__ import annotations

import torch

from paceline.build.cost import measured_costs
from paceline.build.drafter import build_drafter, drafting_model, relative_draft_cost
from paceline.build.model import build_decoder, build_paged, build_sampler
from paceline.build.policy import build_policy
from paceline.config import Config
from paceline.engine.accept import RULES
from paceline.engine.engine import LocalEngine
from paceline.engine.runner import EagerRunner, Runner
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.model.store import load_tokenizer, resolve
from paceline.speculation.cost_files import cost_table_of


def build_engine(config: Config, with_adapters: bool = False) -> LocalEngine:
    """A local engine with its model, tokenizer, drafter and policy. `with_adapters`: it computes with the adapters of
    learner.lora_rank, and weight updates have only these; else updates have merged weights."""
    if config.engine.kind != "local":
        raise ValueError(f'engine.kind = "{config.engine.kind}": is for `paceline train`; here use "local"')
    if config.speculation.cost_table is not None:
        cost_table_of(config.speculation.cost_table)  # raises before a model is loaded
    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    directory = resolve(config.model.name)
    tokenizer = load_tokenizer(directory, config.model.chat_template)
    decoder = build_decoder(config, directory, with_adapters)
    sampler = build_sampler(decoder)
    paged = build_paged(config, decoder)
    drafter = build_drafter(config, decoder, tokenizer)
    paged.set_aux_layers(drafter.aux_layers if drafter is not None else ())  # before step times are measured
    runner = build_runner(config, paged, sampler)
    runner.set_drafter(drafter)
    draft_costs, method = dict[str, float](), config.speculation.method
    model = drafting_model(config, drafter)
    if (cost := relative_draft_cost(config, drafter, decoder.config)) or runner.drafts_on_device:
        draft_costs[model or method] = cost
    return LocalEngine(
        paged,
        sampler=sampler,
        runner=runner,
        drafter=drafter,
        policy=build_policy(config.speculation, lambda: measured_costs(paged, runner, config, draft_costs), model),
        rule=config.speculation.rule,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_num_prefill_tokens=config.engine.max_num_prefill_tokens,
        prefix_sharing=config.engine.prefix_sharing,
        order=config.engine.order,
        tokenizer=tokenizer,
        seed=config.sampling.seed,
    )


def build_runner(config: Config, paged: PagedDecoder, sampler: Sampler) -> Runner:
    rule = config.speculation.rule
    eager = EagerRunner(paged, sampler, RULES[rule])
    if not paged.decoder.ops.is_cuda or rule != "coupled":
        return eager
    from paceline.engine.graph_runner import GraphRunner

    return GraphRunner(paged, eager, config.engine.max_num_seqs, enforce_eager=not config.engine.graphs)
