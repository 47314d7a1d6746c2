"""The nouns that every room speaks. No torch here.

A Request goes in, a Completion comes out, and every engine step leaves one StepTrace. Everything a
request needs to be reproduced (its prompt, its sampling parameters, its noise key) is on the request.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np


def noise_key(*parts: object) -> int:
    """A 64-bit key for a request's noise from what identifies it: (run seed, step, group, sample, turn)."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are drawn and when it ends. The processing order is Hugging Face's:
    temperature, then top-k, then top-p, then min-p. Temperature 0 is greedy."""

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

        temperate = finite(self.temperature) and (self.temperature == 0 or self.temperature >= 1e-5)
        need(temperate, "temperature", "0 (greedy) or a finite number >= 1e-5")
        whole = isinstance(self.top_k, int) and 0 <= self.top_k < 2**31
        need(whole, "top_k", "an integer from 0 (which turns it off) to 2**31 - 1")
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
        """Whether some tokens may get probability zero."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to generate. `noise_key` alone decides its randomness, never its place in a batch. Where none is
    given the engine derives one from its seed and the order of submission (`with_noise_key`), so that two requests for
    one prompt are two samples. `problem` names what it is a sample of: siblings and earlier rollouts with the same
    problem feed the history drafter."""

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
                f"{name}: noise_key = {self.noise_key!r}: must be an integer from 0 to 2**64 - 1, as "
                "paceline.types.noise_key(seed, ...) makes them; leave it out to have the engine derive one"
            )


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def with_noise_key(request: Request, seed: int, num_submitted: int) -> Request:
    """The request with a noise key: its own, or one from an engine's seed and the number of requests that were
    submitted to it before."""
    if request.noise_key is not None:
        return request
    return replace(request, noise_key=noise_key(seed, "submitted", num_submitted))


class Provenance(IntEnum):
    """Where an emitted token came from. The target chose every one of them; this says what it checked."""

    SAMPLED = 0  # no draft at this position
    ACCEPTED = 1  # a drafted token, confirmed
    CORRECTED = 2  # the drafted token here was wrong; this is the target's own
    BONUS = 3  # after a draft that was accepted whole


@dataclass(slots=True)
class Completion:
    """What a request became. All arrays have one entry per emitted token."""

    request: Request
    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float64, target's, under the processed distribution
    raw_logprobs: np.ndarray  # float64, target's, before temperature and truncation
    versions: np.ndarray  # int32, the policy version that emitted the token
    provenance: np.ndarray  # uint8, Provenance
    sources: np.ndarray  # uint8, index into `drafters` of who drafted at this position (255: nobody)
    drafters: tuple[str, ...]
    finish_reason: str  # "stop" | "length" | "abort"
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts, as vLLM counts it; 1 where nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


@dataclass(slots=True)
class Rollout:
    """One scored sample. `token_ids` is all that follows the prompt: what the policy wrote (mask true) and, between
    the turns of an environment, what the environment answered (mask false). Arrays have one entry per such token."""

    sample: int  # its number within the group
    prompt_ids: tuple[int, ...]
    token_ids: np.ndarray  # int32
    mask: np.ndarray  # bool, True where the policy chose the token
    logprobs: np.ndarray  # float64, the engine's, under the processed distribution; 0 where mask is false
    versions: np.ndarray  # int32, the policy version that emitted the token; that of the turn before where masked
    provenance: np.ndarray  # uint8, Provenance
    sources: np.ndarray  # uint8, index into `drafters` (255: nobody)
    drafters: tuple[str, ...]
    finish_reason: str  # of its last turn: "stop" | "length" | "abort"
    num_turns: int = 1
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    text: str = ""  # the policy's last turn, or the only one, without special tokens
    reward: float = math.nan  # the weighted sum of `rewards`; NaN: could not be scored, see `failure`
    rewards: dict[str, float] = field(default_factory=dict)  # by reward function
    advantage: float = 0.0  # mean over its tokens, for the records
    failure: str | None = None  # why it has no reward; such a sample trains nothing

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(slots=True)
class Group:
    """The samples of one problem that are judged against each other."""

    index: int  # its place in the order of the data: order, selection and batching go by it
    problem: str  # the problem's name
    prompt: str  # as text, for the records
    rollouts: list[Rollout]

    @property
    def scored(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.failure is None]

    @property
    def oldest_version(self) -> int:
        return min(int(r.versions[r.mask].min()) for r in self.rollouts if r.mask.any())


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One engine step: what ran, what speculation did, where the time went."""

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
    draft_s: float  # all that speculation takes outside the forward: plan, propose, select, observe
    forward_s: float
    sample_s: float
    total_s: float
    version: int
    drafter_version: int
    drafter: str
    policy: str = "static"
    reason: str = ""  # why so many tokens were verified, in the policy's words
    num_planned: int = 0  # tokens that the drafter might have offered at most: the sum of the caps
    num_proposed: int = 0  # and those it did offer, of which num_draft_tokens were verified
    expected_accepted: float = 0.0  # by the policy's estimate
    expected_s: float = 0.0  # what it took the step's time for; 0: it does not estimate
    sources: tuple[tuple[str, int, int], ...] = ()  # (drafter, tokens verified, tokens accepted)
    num_history_bytes: int = 0  # what the drafter remembers takes
    num_captured: int = 0  # sizes of steps that were made ready meanwhile, for the first time: its time says little
    num_guessed: int = 0  # tokens that a head on the device drafted for each row, for the next step
    engine: int = 0  # its number, where several generate


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof of a weight transfer: what the receiver now holds, hashed on the receiver's side."""

    version: int
    checksum: str
    num_tensors: int
    num_bytes: int
    seconds: float
