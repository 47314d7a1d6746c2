"""Replay equals the live engine without its model: the same drafts and acceptance in every step."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from support import tiny_decoder

from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.kernels import pack_for_inference
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder
from paceline.model.weights import hf_state
from paceline.replay import prefixes
from paceline.replay.engine import Replay, _Step
from paceline.replay.rounds import Record, Round, RoundSplitter
from paceline.speculation.batch import Commits, Load
from paceline.speculation.policy import Decision, StaticPolicy
from paceline.types import Completion, Request, SamplingParams, StepTrace
from paceline.verify.cases import make_policy

MAX_TOKENS = 32
NUM_SAMPLES = 3
LIMITS = {"max_num_seqs": 6, "max_num_batched_tokens": 40}  # fewer slots than requests, prompts in several chunks
DRAFTERS = {"ngram": lambda: NgramDrafter(1, 3), "suffix": lambda: SuffixDrafter()}
POLICIES = {"k=4": (4,), "by batch": ({1: 7, 3: 5, 6: 2},), "confident": (6, 0.3)}
COST_BASED = ("das", "auto")  # with a frozen cost table, because measured step times differ
STEP = ("step", "num_rows", "num_query_tokens", "num_context_tokens", "num_emitted", "num_drafts", "num_draft_tokens",
        "num_accepted_tokens", "accepted_per_position", "drafted_per_position", "version", "drafter", "policy",
        "reason", "is_probe", "num_planned", "num_proposed", "per_drafter")  # fmt: skip


class ZeroCosts:
    """Steps take no time."""

    def steps_s(self, load: Load, num_extra: int) -> np.ndarray:
        return np.zeros(num_extra + 1)

    def draft_s(self, drafter: str, num_rows: int, k: int) -> float:
        return 0.0


def prompts() -> list[tuple[int, ...]]:
    """With shared and own parts, from shorter than a block to longer than max_num_batched_tokens."""
    rng = np.random.default_rng(5)
    head = rng.integers(0, 50, 20).tolist()
    return [(*head[:common], *rng.integers(0, 50, own).tolist()) for common, own in
            ((0, 3), (20, 1), (20, 30), (0, 70), (9, 6), (20, 12), (0, 1))]  # fmt: skip


@functools.cache
def live(
    drafter: str, policy: str, sharing: bool = True, order: str = "arrival"
) -> tuple[list[StepTrace], list[list[Completion]]]:
    """Three epochs, each with new weights. The model is peaked, so that some drafts are accepted."""
    decoder = tiny_decoder(torch.float32)
    pack_for_inference(decoder)
    engine = LocalEngine(
        PagedDecoder(decoder, num_blocks=400),
        drafter=DRAFTERS[drafter](),
        policy=make_policy(policy, 6, drafter) if policy in COST_BASED else StaticPolicy(*POLICIES[policy]),
        prefix_sharing=sharing,
        order=order,
        **LIMITS,
    )
    rounds = []
    for epoch in range(3):
        if epoch:
            torch.manual_seed(epoch)
            changed = [(name, w + 0.01 * torch.randn_like(w)) for name, w in hf_state(decoder)]
            engine.update_weights(changed, epoch)
        sampling = SamplingParams(temperature=0.6, max_tokens=MAX_TOKENS)
        wanted = [
            Request(1000 * epoch + 10 * p + s, prompt, sampling, 7 * p + s, f"p{p}")
            for p, prompt in enumerate(prompts())
            for s in range(NUM_SAMPLES)
        ]
        rounds.append(engine.generate(wanted))
    return engine.drain_trace(), rounds


def record(epoch: int, completion: Completion) -> Record:
    return Record(
        problem=str(completion.request.problem),
        prompt_ids=np.array(completion.request.prompt_ids, np.int32),
        token_ids=completion.token_ids,
        is_cut=completion.finish_reason == "length",
        step=epoch,
        version=int(completion.versions[0]),
    )


class CountingPolicy(StaticPolicy):
    """Counts each request's drafts, drafted and accepted tokens."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.counts: dict[int, np.ndarray] = {}

    def observe(self, commits: Commits, trace: StepTrace, decision: Decision) -> None:
        columns = np.stack([commits.num_drafted > 0, commits.num_drafted, commits.num_accepted], 1)
        for request_id, counted in zip(commits.request_ids.tolist(), columns, strict=True):
            self.counts[request_id] = self.counts.get(request_id, 0) + counted


def replay(
    rounds: list[list[Completion]], drafter: str, policy: str, kind: type[Replay] = Replay, **options: object
) -> tuple[list[StepTrace], list[list[int]]]:
    traces: list[StepTrace] = []
    made = make_policy(policy, 6, drafter) if policy in COST_BASED else CountingPolicy(*POLICIES[policy])
    engine = kind(made, ZeroCosts(), DRAFTERS[drafter](), prefill=True, on_step=traces.append, **LIMITS, **options)
    records = [record(epoch, completion) for epoch, done in enumerate(rounds) for completion in done]
    for recorded in RoundSplitter(MAX_TOKENS).split(records):
        engine.run_round(recorded)
    counts = made.counts if isinstance(made, CountingPolicy) else {}
    return traces, [counts[i].tolist() for i in sorted(counts)]


def seen(traces: list[StepTrace]) -> list[dict[str, object]]:
    return [{name: getattr(trace, name) for name in STEP} for trace in traces]


@pytest.mark.parametrize(
    ("drafter", "policy", "sharing", "order"),
    [
        *(("suffix", policy, True, "arrival") for policy in POLICIES),
        ("suffix", "k=4", False, "arrival"),
        ("suffix", "k=4", True, "longest"),
        ("ngram", "k=4", True, "arrival"),
    ],
)
def test_replay_agrees_with_the_live_engine(drafter: str, policy: str, sharing: bool, order: str) -> None:
    wanted, rounds = live(drafter, policy, sharing, order)
    found, counts = replay(rounds, drafter, policy, prefix_sharing=sharing, order=order)
    assert seen(found) == seen(wanted)
    done = [completion for completions in rounds for completion in completions]
    assert counts == [[c.num_drafts, c.num_draft_tokens, c.num_accepted_tokens] for c in done]
    # The test needs accepted drafts, and completions of both kinds.
    assert sum(c.num_accepted_tokens for c in done) > 50
    assert {c.finish_reason for c in done} == {"stop", "length"}
    assert max(map(len, prompts())) > LIMITS["max_num_batched_tokens"]


class DraftsTooLong(Replay):
    """Deliberately broken: drafts one token more than can be emitted."""

    def run_round(self, recorded: Round) -> None:
        recorded.limit = recorded.limit + 1
        super().run_round(recorded)


class NoPromptSharing(Replay):
    """Deliberately broken: samples do not wait for their shared prompt."""

    def _admit(self, budget: int) -> list[tuple[int, int, int]]:
        keys = self._keys
        self._keys = [str(i).encode() for i in range(len(keys))]
        new = super()._admit(budget)
        self._keys = keys
        return new


class IgnoresVersions(Replay):
    """Deliberately broken: the policy version never changes."""

    def run_round(self, recorded: Round) -> None:
        recorded.version = 0
        super().run_round(recorded)


class NoCommits(Replay):
    """Deliberately broken: the drafter does not get the emitted tokens."""

    def _commit(self, step: _Step, num_accepted: np.ndarray) -> Commits:
        return dataclasses.replace(super()._commit(step, num_accepted), num=step.emitting.zeros)


@pytest.mark.parametrize("broken", [DraftsTooLong, NoPromptSharing, IgnoresVersions, NoCommits])
def test_a_broken_replay_is_caught(broken: type[Replay]) -> None:
    wanted, rounds = live("suffix", "k=4")
    found, _ = replay(rounds, "suffix", "k=4", broken)
    assert seen(found) != seen(wanted)


def test_block_sizes_are_equal() -> None:
    assert prefixes.BLOCK == BLOCK


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", COST_BASED)
def test_policies_decide_in_a_replay_as_in_the_engine(drafter: str, policy: str) -> None:
    wanted, rounds = live(drafter, policy)
    found, _ = replay(rounds, drafter, policy)
    assert sum(trace.num_draft_tokens for trace in wanted) > 0
    assert seen(found) == seen(wanted)
