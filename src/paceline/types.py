"""Types that all packages use. No torch here.

An engine takes Requests and returns Completions, and records one StepTrace per step. A Request holds everything that
determines its tokens: prompt, sampling parameters and noise key.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np


def noise_key(*parts: object) -> int:
    """A 64-bit noise key: a hash of what identifies a request, for example (run seed, step, group, sample, turn)."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are sampled and when it ends. Logits are processed in Hugging Face's order: temperature,
    top-k, top-p, min-p. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ValueError(f"sampling.{name} = {getattr(self, name)!r}: must be {rule}")

        def finite(value: object) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

        valid_temperature = finite(self.temperature) and (self.temperature == 0 or self.temperature >= 1e-5)
        need(valid_temperature, "temperature", "0 (greedy) or a finite number >= 1e-5")
        valid_top_k = isinstance(self.top_k, int) and 0 <= self.top_k < 2**31
        need(valid_top_k, "top_k", "an integer from 0 (which turns it off) to 2**31 - 1")
        need(finite(self.top_p) and 0 < self.top_p <= 1, "top_p", "in (0, 1] (1 turns it off)")
        need(finite(self.min_p) and 0 <= self.min_p < 1, "min_p", "in [0, 1) (0 turns it off)")
        need(isinstance(self.max_tokens, int) and self.max_tokens >= 1, "max_tokens", "an integer >= 1")
        strings = not isinstance(self.stop, str) and all(isinstance(s, str) and s for s in self.stop)
        need(strings, "stop", "a sequence of non-empty strings")
        need(all(map(_is_integer, self.stop_token_ids)), "stop_token_ids", "a sequence of token ids")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether sampling may set the probability of some tokens to zero."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to generate. Its random numbers depend on `noise_key` alone, not on the batch. Without a noise key
    the engine derives one from its seed and the order of submission (`with_noise_key`), so two requests with the same
    prompt give two samples. The history drafter drafts from completions with the same `problem`."""

    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    noise_key: int | None = None  # 64 bits
    problem: str | None = None

    def __post_init__(self) -> None:
        name = f"request {self.request_id}"
        if not (_is_integer(self.request_id) and -(2**63) <= self.request_id < 2**63):
            raise ValueError(f"{name}: request_id must be an integer of 64 bits")
        if not len(self.prompt_ids):
            raise ValueError(f"{name}: prompt_ids is empty; a prompt needs at least one token")
        if not (set(map(type, self.prompt_ids)) <= {int} or all(map(_is_integer, self.prompt_ids))):
            wrong = next(token for token in self.prompt_ids if not _is_integer(token))
            raise ValueError(f"{name}: prompt_ids holds {wrong!r}; token ids are integers")
        if not isinstance(self.prompt_ids, tuple):  # a list or an array: requests are compared by their prompts
            object.__setattr__(self, "prompt_ids", tuple(map(int, self.prompt_ids)))
        if self.noise_key is not None and not (_is_integer(self.noise_key) and 0 <= self.noise_key < 2**64):
            raise ValueError(
                f"{name}: noise_key = {self.noise_key!r}: must be an integer from 0 to 2**64 - 1; make one "
                "with paceline.types.noise_key(seed, ...), or leave it out and the engine derives one"
            )


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def with_noise_key(request: Request, seed: int, num_submitted: int) -> Request:
    """The request with its own noise key, or with one from an engine's seed and the number of requests that were
    submitted to the engine before."""
    if request.noise_key is not None:
        return request
    return replace(request, noise_key=noise_key(seed, "submitted", num_submitted))


def acceptance_probability(length: float, k: int) -> float:
    """The p with 1 + p + … + p^k = length: the probability that each of k draft tokens is accepted, given that those
    before it are, if it is the same for all."""
    low, high = 0.0, 1.0
    for _ in range(60):  # halvings: the precision of float64
        middle = (low + high) / 2
        low, high = (middle, high) if 1 + sum(middle**i for i in range(1, k + 1)) < length else (low, middle)
    return high


class Provenance(IntEnum):
    """Origin of an emitted token. All of them follow the target's distribution."""

    SAMPLED = 0  # no draft token at this position
    ACCEPTED = 1  # an accepted draft token
    CORRECTED = 2  # the target's own token in place of a rejected draft token
    BONUS = 3  # the target's own token after a draft that was accepted as a whole


@dataclass(slots=True)
class Completion:
    """The result of a request. All arrays have one entry per emitted token."""

    request: Request
    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float64, of the target, after temperature and truncation
    raw_logprobs: np.ndarray  # float64, of the target, before temperature and truncation
    versions: np.ndarray  # int32, the policy version that emitted the token
    provenance: np.ndarray  # uint8, Provenance
    sources: np.ndarray  # uint8, index into `drafters` of the drafter at this position (255: none)
    drafters: tuple[str, ...]
    finish_reason: str  # "stop" | "length" | "abort"
    stop_reason: int | str | None = None  # the stop token or stop string
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts, as in vLLM; 1 without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


@dataclass(slots=True)
class Rollout:
    """A completion with its reward. `token_ids` are all tokens after the prompt: the policy's (mask True) and, between
    the turns of an environment, the environment's (mask False). Arrays have one entry per token."""

    sample: int  # index in the group
    prompt_ids: tuple[int, ...]
    token_ids: np.ndarray  # int32
    mask: np.ndarray  # bool, True for tokens of the policy
    logprobs: np.ndarray  # float64, of the engine, after temperature and truncation; 0 if mask is False
    versions: np.ndarray  # int32, the policy version that emitted the token; if mask is False, that of the turn before
    provenance: np.ndarray  # uint8, Provenance
    sources: np.ndarray  # uint8, index into `drafters` (255: none)
    drafters: tuple[str, ...]
    finish_reason: str  # of the last turn: "stop" | "length" | "abort"
    num_turns: int = 1
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    text: str = ""  # the policy's last turn, without special tokens
    reward: float = math.nan  # the weighted sum of `rewards`; NaN: not scored, see `failure`
    rewards: dict[str, float] = field(default_factory=dict)  # by reward function
    advantage: float = 0.0  # mean over tokens, for the records
    failure: str | None = None  # why there is no reward; such a rollout is not trained on

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(slots=True)
class Group:
    """All rollouts of one problem in one step. Advantages compare their rewards."""

    index: int  # position in the data; determines order, selection and batching
    problem: str  # name of the problem
    prompt: str  # text, for the records
    rollouts: list[Rollout]

    @property
    def scored(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.failure is None]

    @property
    def oldest_version(self) -> int:
        return min(int(r.versions[r.mask].min()) for r in self.rollouts if r.mask.any())


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One engine step: its load, its speculation, its times."""

    step: int
    start_s: float
    num_rows: int
    num_query_tokens: int
    num_context_tokens: int
    num_emitted: int
    num_drafts: int  # rows that verified a draft
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    drafted_per_position: tuple[int, ...]
    num_preempted: int
    num_free_blocks: int
    draft_s: float  # time of speculation outside the forward pass: plan, propose, select, observe
    forward_s: float  # with CUDA graphs it includes sampling, verification and drafting
    sample_s: float  # with CUDA graphs only of rows outside of the graph
    total_s: float
    version: int
    drafter_version: int
    drafter: str
    policy: str = "static"
    reason: str = ""  # why the policy selected so many draft tokens
    is_probe: bool = False  # draft tokens were verified only to measure how the drafter does
    num_planned: int = 0  # most draft tokens that the policy allowed the drafter: the sum of the rows' limits
    num_proposed: int = 0  # draft tokens that the drafter proposed; num_draft_tokens of them were verified
    expected_accepted: float = 0.0  # accepted draft tokens, as estimated by the policy
    expected_s: float = 0.0  # time of the step, as estimated by the policy; 0: no estimate
    plain_s: float = 0.0  # time of the step if it had no drafts, as estimated by the policy; 0: no estimate
    per_drafter: tuple[tuple[str, int, int], ...] = ()  # (drafter, tokens verified, tokens accepted)
    num_history_bytes: int = 0  # size of the drafter's history
    num_captured: int = 0  # CUDA graphs captured during the step; if any, the step's times are not representative
    num_drafted_on_device: int = 0  # draft tokens per row that the device proposed for the next step
    engine: int = 0  # index of the engine, if there are several


@dataclass(frozen=True, slots=True)
class Receipt:
    """Result of a weight transfer. The receiver computes the checksum of the weights that it now has."""

    version: int
    checksum: str
    num_tensors: int
    num_bytes: int
    seconds: float
