"""One request on its way: tokens so far, what is known of each, how much of its KV is computed, when it ends."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from paceline.model.kv import BlockTable
from paceline.types import Completion, Provenance, Request

NOBODY = 255  # in `sources`: no drafter guessed at this position
Detokenize = Callable[[Seq[int]], str]


class Sequence:
    """Always: 0 <= num_computed < num_tokens while it runs; the last token's KV is not computed yet."""

    def __init__(self, request: Request, arrival: int, max_length: int, eos_token_ids: tuple[int, ...]) -> None:
        sampling = request.sampling
        self.request = request
        self.arrival = arrival
        self.num_prompt = len(request.prompt_ids)
        self.limit = min(self.num_prompt + sampling.max_tokens, max_length)  # tokens in all, at most
        self.table = BlockTable()
        self.num_tokens = self.num_prompt
        self.num_computed = 0
        self.num_flying = 0  # tokens that steps on their way may emit at most
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.drafters: list[str] = []  # who drafted for it, in order of appearance
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = self.num_preemptions = 0
        self.truncates = sampling.truncates
        self.stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        )
        room = self.limit - self.num_prompt
        self._tokens = np.empty(self.limit, np.int32)
        self._tokens[: self.num_prompt] = request.prompt_ids
        self._logprobs = np.empty(room)
        self._raw_logprobs = np.empty(room)
        self._versions = np.empty(room, np.int32)
        self._provenance = np.empty(room, np.uint8)
        self._sources = np.empty(room, np.uint8)

    @property
    def tokens(self) -> np.ndarray:
        return self._tokens[: self.num_tokens]

    @property
    def last_token(self) -> int:
        return int(self._tokens[self.num_tokens - 1])

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is not computed: 1 when decoding, more while prefilling."""
        return self.num_tokens - self.num_computed

    @property
    def num_left(self) -> int:
        """Tokens it may still emit."""
        return self.limit - self.num_tokens

    def take(self, tokens: list[int], detokenize: Detokenize | None) -> int:
        """Append what a verification emitted, up to and including the first stop; returns how many were taken. What
        else is to be known of them is told to `book`, which can wait."""
        count = self._up_to_stop(tokens[: self.limit - self.num_tokens], detokenize)
        self._tokens[self.num_tokens : self.num_tokens + count] = tokens[:count]
        self.num_tokens += count
        if self.finish_reason is None and self.num_tokens == self.limit:
            self.finish_reason = "length"
        return count

    def book(
        self,
        start: int,
        count: int,
        logprobs: np.ndarray,
        raw_logprobs: np.ndarray,
        num_accepted: int,
        num_drafted: int,
        version: int,
        drafter: str | None,
    ) -> None:
        """Of the `count` tokens from position `start` on: the first num_accepted had been drafted, out of num_drafted;
        the one after them is the target's own."""
        at = start - self.num_prompt
        new = slice(at, at + count)
        self._logprobs[new], self._raw_logprobs[new] = logprobs[:count], raw_logprobs[:count]
        self._versions[new] = version
        self._provenance[new] = Provenance.ACCEPTED
        self._sources[new] = self._index_of(drafter) if num_drafted and drafter else NOBODY
        if count > num_accepted:
            own = at + num_accepted
            if num_drafted == 0:
                self._provenance[own] = Provenance.SAMPLED
            elif num_accepted < num_drafted:
                self._provenance[own] = Provenance.CORRECTED
            else:
                self._provenance[own], self._sources[own] = Provenance.BONUS, NOBODY
        if num_drafted:
            self.num_drafts += 1
            self.num_draft_tokens += num_drafted
            self.num_accepted_tokens += min(count, num_accepted)

    def _up_to_stop(self, tokens: list[int], detokenize: Detokenize | None) -> int:
        """How many of these tokens come up to the first stop, which is noted; all of them if there is none."""
        stops = self.request.sampling.stop
        if not stops and self.stop_ids.isdisjoint(tokens):
            return len(tokens)
        emitted = self._tokens[self.num_prompt : self.num_tokens].tolist() if stops else []
        # Every token is checked as it comes, so a new match must end in the newest token: a tail that holds the
        # longest stop is enough, and a token is at least one byte.
        window = max((len(stop.encode()) for stop in stops), default=0) + 16
        for i, token in enumerate(tokens):
            if token in self.stop_ids:
                self.finish_reason, self.stop_reason = "stop", token
                return i + 1
            if stops:
                assert detokenize is not None
                emitted.append(token)
                text = detokenize(emitted[-window:])
                for stop in stops:
                    if stop in text:
                        self.finish_reason, self.stop_reason = "stop", stop
                        return i + 1
        return len(tokens)

    def _index_of(self, drafter: str) -> int:
        if drafter not in self.drafters:
            self.drafters.append(drafter)
        return self.drafters.index(drafter)

    def completion(self) -> Completion:
        count = self.num_tokens - self.num_prompt
        return Completion(
            request=self.request,
            token_ids=self._tokens[self.num_prompt : self.num_tokens].copy(),
            logprobs=self._logprobs[:count].copy(),
            raw_logprobs=self._raw_logprobs[:count].copy(),
            versions=self._versions[:count].copy(),
            provenance=self._provenance[:count].copy(),
            sources=self._sources[:count].copy(),
            drafters=tuple(self.drafters),
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_preemptions=self.num_preemptions,
        )
