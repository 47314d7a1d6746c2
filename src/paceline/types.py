"""Types that all packages use. No torch here.

An engine takes Requests and returns Completions, and records one StepTrace per step. A Request holds everything that
determines its tokens: prompt, sampling parameters and noise key.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from paceline.structured_outputs import StructuredOutputsParams


def noise_key(*parts: object) -> int:
    """A 64-bit noise key: a hash of what identifies a request, for example (run seed, step, group, sample, turn)."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are sampled and when it ends. Names and meanings are vLLM's.

    Logits are changed in this order: structured_outputs, allowed_token_ids, bad_words, min_tokens, logit_bias and
    penalties (`engine.logits_processor`), then temperature, top-k, top-p, min-p (`model.sample`).
    Temperature 0 is greedy.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1  # samples per prompt; for `LLM`, because an engine's request is one sample
    seed: int | None = None  # for a request without a noise key
    logprobs: int = 0  # also report so many most probable tokens at each position
    min_tokens: int = 0  # no stop token or stop string before so many tokens
    repetition_penalty: float = 1.0  # divides logits of tokens in prompt or output if positive, else multiplies them
    frequency_penalty: float = 0.0  # subtracted from a token's logit for each occurrence in the output
    presence_penalty: float = 0.0  # subtracted once from the logits of tokens in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), or a dict
    allowed_token_ids: tuple[int, ...] | None = None  # sample only these; None: all
    bad_words: tuple[str | tuple[int, ...], ...] = ()  # strings, or sequences of token ids, that are never completed
    structured_outputs: StructuredOutputsParams | None = None  # what the text must be

    def __post_init__(self) -> None:
        self._normalise()

        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ValueError(f"sampling.{name} = {getattr(self, name)!r}: must be {rule}")

        valid_temperature = _is_finite(self.temperature) and (self.temperature == 0 or self.temperature >= 1e-5)
        need(valid_temperature, "temperature", "0 (greedy) or a finite number >= 1e-5")
        valid_top_k = _is_integer(self.top_k) and 0 <= self.top_k < 2**31
        need(valid_top_k, "top_k", "an integer from 0 (which turns it off) to 2**31 - 1")
        need(_is_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", "in (0, 1] (1 turns it off)")
        need(_is_finite(self.min_p) and 0 <= self.min_p < 1, "min_p", "in [0, 1) (0 turns it off)")
        need(_is_integer(self.max_tokens) and self.max_tokens >= 1, "max_tokens", "an integer >= 1")
        need(all(map(_is_text, self.stop)), "stop", "a sequence of non-empty Unicode strings")
        need(_are_ids(self.stop_token_ids), "stop_token_ids", "a sequence of token ids")
        need(_is_integer(self.n) and self.n >= 1, "n", "an integer >= 1")
        need(self.seed is None or _is_integer(self.seed), "seed", "an integer or None")
        need(_is_integer(self.logprobs) and self.logprobs >= 0, "logprobs", "an integer >= 0")
        valid_min_tokens = _is_integer(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens
        need(valid_min_tokens, "min_tokens", f"an integer from 0 to max_tokens, which is {self.max_tokens}")
        valid_repetition = _is_finite(self.repetition_penalty) and 0.01 <= self.repetition_penalty <= 100
        need(valid_repetition, "repetition_penalty", "from 0.01 to 100 (1 turns it off)")
        for name in ("frequency_penalty", "presence_penalty"):
            need(
                _is_finite(getattr(self, name)) and -2 <= getattr(self, name) <= 2, name, "in [-2, 2] (0 turns it off)"
            )
        valid_bias = all(
            _is_integer(token) and _is_finite(bias) and -100 <= bias <= 100 for token, bias in self.logit_bias
        )
        need(valid_bias, "logit_bias", "a dict of token ids and numbers from -100 to 100")
        allowed = self.allowed_token_ids
        need(allowed is None or (len(allowed) > 0 and _are_ids(allowed)), "allowed_token_ids", "token ids, or None")
        valid_words = all(
            _is_text(word) or (isinstance(word, tuple) and word and _are_ids(word)) for word in self.bad_words
        )
        need(valid_words, "bad_words", "a sequence of non-empty Unicode strings or sequences of token ids")
        valid_structure = self.structured_outputs is None or isinstance(
            self.structured_outputs, StructuredOutputsParams
        )
        need(valid_structure, "structured_outputs", "a StructuredOutputsParams, or None")
        ends = self.structured_outputs is None or not self.ignore_eos
        need(ends, "ignore_eos", "False with structured_outputs, which an end-of-sequence token ends")

    def _normalise(self) -> None:
        """Sequences become tuples, and a dict sorted pairs, so that params can be compared and hashed."""
        values: dict[str, object] = {}
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logit_bias"):
            value = getattr(self, name)
            try:
                if name == "logit_bias" and value:
                    pairs = value.items() if isinstance(value, Mapping) else value  # the keys of JSON are strings
                    bias = [(int(token) if isinstance(token, str) else token, bias) for token, bias in pairs]
                    values[name] = tuple(sorted(bias))
                elif isinstance(value, str):
                    values[name] = (value,)
                elif value is None and name != "allowed_token_ids":
                    values[name] = ()
                elif value is not None and not isinstance(value, tuple):
                    values[name] = tuple(value)
            except (TypeError, ValueError):
                raise ValueError(f"sampling.{name} = {value!r}: has the wrong type") from None
        words = values.get("bad_words", self.bad_words)
        if isinstance(words, tuple):
            values["bad_words"] = tuple(tuple(word) if isinstance(word, list) else word for word in words)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether sampling may set the probability of some tokens to zero, by top-k, top-p or min-p."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def logits_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that are set and change logits before the temperature does."""
        defaults: dict[str, object] = {
            "structured_outputs": None, "allowed_token_ids": None, "bad_words": (), "min_tokens": 0, "logit_bias": (),
            "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        }  # fmt: skip
        return tuple(name for name, default in defaults.items() if getattr(self, name) != default)


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


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: object) -> bool:
    """Not empty, and without lone surrogates, which tokenizers reject."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def _are_ids(values: Iterable[object]) -> bool:
    return all(map(_is_integer, values))


def with_noise_key(request: Request, seed: int, num_submitted: int) -> Request:
    """The request with its own noise key, or with one from an engine's seed and the number of requests that were
    submitted to the engine before. A request with a seed has the same noise key in every engine."""
    if request.noise_key is not None:
        return request
    if request.sampling.seed is not None:
        return replace(request, noise_key=seeded_noise_key(request.sampling.seed, 0))
    return replace(request, noise_key=noise_key(seed, "submitted", num_submitted))


def seeded_noise_key(seed: int, sample: int) -> int:
    """The noise key of one sample of a request with a seed. It does not depend on the prompt: as in vLLM, equal
    requests with equal seeds have equal tokens."""
    return noise_key("seed", seed, sample)


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
class TopLogprobs:
    """The most probable tokens at each of N positions, best first, before any sampling parameter is applied."""

    token_ids: np.ndarray  # int32 [N, sampling.logprobs]
    logprobs: np.ndarray  # float64 [N, sampling.logprobs]


@dataclass(slots=True)
class Completion:
    """The result of a request. All arrays have one entry per emitted token."""

    request: Request
    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float64, of the target, after all sampling parameters: of what was sampled from
    raw_logprobs: np.ndarray  # float64, of the target, before any sampling parameter
    versions: np.ndarray  # int32, the policy version that emitted the token
    provenance: np.ndarray  # uint8, Provenance
    sources: np.ndarray  # uint8, index into `drafters` of the drafter at this position (255: none)
    drafters: tuple[str, ...]
    finish_reason: str  # "stop" | "length" | "abort" | "error": the sampling parameters left no token to sample
    stop_reason: int | str | None = None  # the stop token or stop string; why there was an error
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    top_logprobs: TopLogprobs | None = None  # if sampling.logprobs > 0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts, as in vLLM; 1 without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens that a step emitted for a request, as in `Completion`. `completion`: all of it, if it has finished."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray
    versions: np.ndarray
    provenance: np.ndarray
    top_logprobs: TopLogprobs | None
    completion: Completion | None


@dataclass(slots=True)
class Rollout:
    """A training sequence with the reward of its sample. `token_ids` are all tokens after the prompt: the policy's
    (mask True) and, between its turns, others (mask False), such as an environment's. Arrays have one entry per token.
    A sample of an agent may have several rollouts, its branches. They have the sample's reward, failure and finish
    reason."""

    sample: int  # index in the group
    prompt_ids: tuple[int, ...]
    token_ids: np.ndarray  # int32
    mask: np.ndarray  # bool, True for tokens of the policy
    logprobs: np.ndarray  # float64, of the engine, after temperature and truncation; 0 if mask is False
    versions: np.ndarray  # int32, the policy version that emitted the token; if mask is False, that of the turn before
    provenance: np.ndarray  # uint8, Provenance
    sources: np.ndarray  # uint8, index into `drafters` (255: none)
    drafters: tuple[str, ...]
    finish_reason: str  # of the sample: that of its last call, or one of `TRUNCATED` or `FAILED`
    branch: int = 0  # index in the sample
    num_turns: int = 1
    turn_lengths: tuple[int, ...] = ()  # by turn: how many tokens the policy sampled
    turn_rewards: tuple[float, ...] = ()  # by turn: its part of the reward; empty if no turn has one
    metrics: dict[str, float] = field(default_factory=dict)  # of the sample, from its agent; for the records
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    text: str = ""  # the last turn, without special tokens
    reward: float = math.nan  # the weighted sum of `rewards`; NaN: not scored, see `failure`
    rewards: dict[str, float] = field(default_factory=dict)  # by reward function
    advantage: float = 0.0  # mean over tokens, for the records
    failure: str | None = None  # why there is no reward, or why a reward function's value is 0

    @property
    def is_scored(self) -> bool:
        """Whether it has a reward. Other rollouts are not trained on."""
        return not math.isnan(self.reward)

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason in TRUNCATED


TRUNCATED = ("length", "context", "budget")  # context: no room in the model's context; budget: no tokens or calls left
FAILED = ("timeout", "crash")  # of the sample's agent


@dataclass(slots=True)
class Group:
    """All rollouts of one problem in one step, by sample and branch. Advantages compare the rewards of samples."""

    index: int  # position in the data; determines order, selection and batching
    problem: str  # name of the problem
    prompt: str  # text, for the records
    rollouts: list[Rollout]
    task: str | None = None  # label of the task, if there are several

    @property
    def scored(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.is_scored]

    @property
    def rewards(self) -> list[float]:
        """Of the samples that have one."""
        return [rollout.reward for rollout in first_branches(self.scored)]

    @property
    def has_tokens(self) -> bool:  # of the policy: false if every sample failed before its first call
        return any(rollout.mask.any() for rollout in self.rollouts)

    @property
    def oldest_version(self) -> int:
        return min(int(r.versions[r.mask].min()) for r in self.rollouts if r.mask.any())


def first_branches(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """One rollout per sample, which has the fields of the sample: reward, failure and finish reason."""
    return [rollout for rollout in rollouts if not rollout.branch]


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
    num_outside_graph: int = 0  # rows that could not run in the step's CUDA graph; the host waits for them
    engine: int = 0  # index of the engine, if there are several


@dataclass(frozen=True, slots=True)
class Receipt:
    """Result of a weight transfer. The receiver computes the checksum of the weights that it now has."""

    version: int
    checksum: str
    num_tensors: int
    num_bytes: int
    seconds: float
