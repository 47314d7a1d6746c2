"""Structured outputs: which tokens a grammar allows after given tokens, by the package llguidance.

Invariant: as long as no limit is exceeded, what `GrammarMatcher.allowed` returns depends only on the tokens that it is
given, not on earlier calls. So rejected drafts, preemption and recovery need no special care: a matcher rolls back to
what its tokens and the new ones have in common. Grammars that can't roll back are refused. V vocabulary.
"""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from paceline.structured_outputs import StructuredOutputsParams

MAX_CACHED = 128  # compiled grammars
# A mask takes a millisecond. These and MaskTime keep hostile grammars from taking more than seconds and some MB.
LIMITS: dict[str, Any] = {
    "max_lexer_states": 100_000,
    "max_grammar_size": 100_000,
    "step_max_items": 50_000,
    "verbose_errors": False,
}


class GrammarError(ValueError):
    """A structured output that can't be compiled, or that no text satisfies."""


class _LimitExceeded(Exception):
    """One of LIMITS, or of llguidance's own."""


class MaskTime:
    """CPU time for the masks of one grammar, on the engine's thread, where they delay all requests. Sequences that use
    the grammar at the same time share it."""

    MAX_S = 2.0
    PER_MASK_S = 0.005  # a grammar with faster masks has no limit

    def __init__(self) -> None:
        self.left_s = self.MAX_S

    def spend(self, seconds: float) -> None:
        self.left_s = min(self.left_s + self.PER_MASK_S - seconds, self.MAX_S)


class GrammarMatcher:
    """Of one sequence."""

    def __init__(
        self,
        compiled: Any,
        renew: Callable[[Any], Any],
        mask_time: MaskTime,
        eos_token_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        self._compiled, self._renew, self._mask_time = compiled, renew, mask_time
        self._eos_token_ids, self._vocab_size = eos_token_ids, vocab_size
        self.error = ""  # why it can't go on: it exceeds a limit
        self._start()

    def _start(self) -> None:
        self._matcher = self._compiled.deep_copy()
        self._tokens = np.zeros(0, np.int32)  # that the matcher has consumed

    def allowed(self, token_ids: np.ndarray) -> np.ndarray | None:
        """The tokens that may come after these: bool [V]. All are False if a limit is exceeded. None: the grammar does
        not allow `token_ids` themselves, or they have ended it."""
        if self._mask_time.left_s < 0:
            self.error = "structured_outputs: its masks take too long"
            return np.zeros(self._vocab_size, bool)
        started = time.thread_time()  # a loaded machine ends no request
        try:
            return self._allowed(token_ids)
        except KeyboardInterrupt:  # perhaps between a rollback and the tokens after it
            self._start()
            raise
        finally:
            self._mask_time.spend(time.thread_time() - started)

    def _allowed(self, token_ids: np.ndarray) -> np.ndarray | None:
        try:
            return self._after(token_ids)
        except _LimitExceeded:
            pass
        # Every mask adds states to the lexer, which copies share. Whether these tokens exceed a limit must depend
        # neither on other sequences nor on earlier masks: a matcher of its own decides.
        self._compiled = self._renew(self._compiled)
        self._start()
        try:
            return self._after(token_ids)
        except _LimitExceeded as error:
            self.error = f"structured_outputs: {error}"
            return np.zeros(self._vocab_size, bool)

    def _after(self, token_ids: np.ndarray) -> np.ndarray | None:
        if self._move_to(token_ids):
            return self._mask()
        num = len(self._tokens)
        if not self._eos_token_ids.isdisjoint(token_ids[num:].tolist()) or not self._mask()[token_ids[num]]:
            return None
        raise _LimitExceeded("its limits are exceeded")  # an allowed token could not be consumed

    def _move_to(self, token_ids: np.ndarray) -> bool:
        """Whether the matcher has consumed exactly these."""
        num = min(len(self._tokens), len(token_ids))
        different = np.flatnonzero(self._tokens[:num] != token_ids[:num])
        num_common = int(different[0]) if len(different) else num
        if num_common < len(self._tokens):
            self._matcher.rollback(len(self._tokens) - num_common)
        new = token_ids[num_common:].tolist()
        is_ended = not self._eos_token_ids.isdisjoint(new)  # nothing comes after it: it is not consumed
        num_consumed = 0 if is_ended else self._matcher.try_consume_tokens(new)
        self._tokens = token_ids[: num_common + num_consumed].copy()
        return len(self._tokens) == len(token_ids)

    def _mask(self) -> np.ndarray:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise _LimitExceeded(_reason(self._matcher))
        return np.unpackbits(mask, count=self._vocab_size, bitorder="little").view(bool)


class GrammarCompiler:
    """Of one tokenizer. May be called from several threads."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._vocabulary: Any = None  # the tokenizer, for llguidance
        self._compiled: OrderedDict[StructuredOutputsParams, Any] = OrderedDict()
        # As long as a sequence uses the grammar.
        self._mask_times: WeakValueDictionary[StructuredOutputsParams, MaskTime] = WeakValueDictionary()
        self._lock = threading.Lock()  # of both

    def matcher(self, params: StructuredOutputsParams | None) -> GrammarMatcher | None:
        """Raises GrammarError."""
        if params is None:
            return None
        compiled, mask_time = self.compile(params), self._mask_times.setdefault(params, MaskTime())
        eos_token_ids = frozenset(self._eos_token_ids)
        return GrammarMatcher(compiled, partial(self._renew, params), mask_time, eos_token_ids, self._vocab_size)

    def is_compiled(self, params: StructuredOutputsParams) -> bool:
        with self._lock:
            return params in self._compiled

    def compile(self, params: StructuredOutputsParams) -> Any:
        """A matcher to copy. It takes milliseconds for most grammars, and seconds for hostile ones and for the
        tokenizer's first. Raises GrammarError."""
        with self._lock:
            if params in self._compiled:
                self._compiled.move_to_end(params)
                return self._compiled[params]
            vocabulary = self._vocabulary = self._vocabulary or self._build_vocabulary()
        compiled = _compile(params, vocabulary)
        with self._lock:
            self._compiled[params] = compiled
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return compiled

    def _renew(self, params: StructuredOutputsParams, used_up: Any) -> Any:
        """For one sequence only."""
        with self._lock:
            if self._compiled.get(params) is used_up:
                del self._compiled[params]
        return _compile(params, self._vocabulary)

    def _build_vocabulary(self) -> Any:
        if importlib.util.find_spec("llguidance") is None:
            raise GrammarError("structured_outputs needs llguidance; run: pip install 'paceline[structured]'")
        if self._tokenizer is None:
            raise GrammarError("structured_outputs needs a tokenizer, and this engine has none")
        if not self._eos_token_ids:
            raise GrammarError("structured_outputs needs an end-of-sequence token, and this model has none")
        from llguidance.hf import from_tokenizer

        num = max(self._vocab_size, len(self._tokenizer))  # embeddings may be padded
        try:
            return from_tokenizer(self._tokenizer, n_vocab=num, eos_token=list(self._eos_token_ids))
        except ValueError as error:
            raise GrammarError(f"structured_outputs can't use this model's tokenizer: {error}") from None


def _compile(params: StructuredOutputsParams, vocabulary: Any) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    try:
        compiled = LLMatcher(vocabulary, _grammar(params), log_level=0, limits=LLParserLimits(**LIMITS))
    except ValueError as error:
        raise GrammarError(f"structured_outputs.{params.kind}: {error}") from None
    if not compiled.is_error():
        compiled.compute_bitmask()  # finds grammars without any text; and the first mask takes longest
    if compiled.is_error():
        raise GrammarError(f"structured_outputs.{params.kind}: {_reason(compiled)}")
    if params.grammar is not None and not _can_roll_back(compiled):
        raise GrammarError("structured_outputs.grammar: max_tokens=… and stop=… are not supported; use suffix=…")
    return compiled


def _can_roll_back(compiled: Any) -> bool:
    """After a rejected draft. llguidance does not say so before."""
    matcher = compiled.deep_copy()
    allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    matcher.try_consume_tokens([int(allowed.argmax())])
    return bool(matcher.rollback(1))


def _reason(matcher: Any) -> str:
    """Why a matcher has an error, in one line."""
    reason = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:300]
    reason = reason.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Use anyOf")
    return {"NoExtensionBias": "no text satisfies it"}.get(reason, reason)


def _grammar(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    if '"x-guidance"' in (params.json or params.grammar or ""):
        raise ValueError('"x-guidance", with which llguidance ignores parts of a schema, is not supported')
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        # One terminal: a rule could not have thousands of alternatives.
        texts = " | ".join(json.dumps(each, ensure_ascii=False) for each in params.choice)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    if params.grammar is not None:
        return LLMatcher.grammar_from_lark(params.grammar)
    options: Any = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    schema = '{"type": "object"}' if params.json is None else str(params.json)
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)
