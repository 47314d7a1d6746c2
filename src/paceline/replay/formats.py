"""Parse one line of a rollouts file into a Record. The format is recognized by the keys:

    prompt_ids, token_ids             our own rollouts.jsonl; `mask` is false for tokens of an environment;
                                      `head_accepted` has a digit per token: accepted length of a head's draft that
                                      starts with it
    prompt_ids, completion_ids        TRL, with token ids
    prompt_token_ids, token_ids       vLLM
    token_ids, token_loss_mask        NeMo RL (train_data_step*.jsonl, every value in a list of one)
    message_log                       NeMo RL: messages with `role` and `token_ids`, or `content`
    prompt, completion                TRL (log_completions), text or messages
    input, output                     verl (trainer.rollout_data_dir), text
    prompt, response                  text

Token ids take precedence over text. Text needs a tokenizer, and does not have everything: special tokens may be
missing, and the policy's own tokenization is lost.

A problem is identified by `problem`, else by its prompt. (`uid` and `group` identify a group within one step, not a
problem across steps.) The step is `step`, `global_step` or `training_step`; else a number at the end of the file's
name. The policy version is `versions` (ours), `version`, or the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.chat.template import render_chat
from paceline.replay.rounds import Record
from paceline.types import TRUNCATED

Json = Mapping[str, Any]
IDS = (("prompt_ids", "token_ids"), ("prompt_ids", "completion_ids"), ("prompt_token_ids", "token_ids"))
TEXTS = (("prompt", "completion"), ("input", "output"), ("prompt", "response"))
STEPS = ("step", "global_step", "training_step")
MAX_ID = MAX_LENGTH = 2**31 - 1  # int32
KNOWN = "; ".join(f"`{a}` and `{b}`" for a, b in (*IDS, ("token_ids", "token_loss_mask"), *TEXTS)) + "; `message_log`"


class Formats:
    """`tokenizer`: for lines with text; None if the user gave none."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer

    def record(self, line: Json, step: int | None = None) -> Record:
        """`step`: from the file's name. A ValueError does not name the line; the caller adds it."""
        prompt_ids, token_ids, mask = self._tokens(line)
        if not len(prompt_ids):
            raise ValueError("the prompt is empty; it needs at least one token")
        if mask is not None and mask.all():
            mask = None
        step = next((_integer(line, key) for key in STEPS if line.get(key) is not None), step)
        version = _version(line)
        max_tokens = line.get("max_tokens")
        return Record(
            problem=str(line["problem"]) if line.get("problem") is not None else _digest(prompt_ids),
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            mask=mask,
            head_accepted=_head_accepted(line, len(token_ids)),
            is_cut=line.get("finish_reason") in TRUNCATED,
            max_tokens=_integer(line, "max_tokens", MAX_LENGTH) if max_tokens is not None else None,
            step=step,
            version=version if version is not None else step,
        )

    def _tokens(self, line: Json) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Prompt tokens, the tokens after the prompt, and the mask of those that the policy sampled."""
        for prompt, completion in IDS:
            if line.get(prompt) is not None and line.get(completion) is not None:
                token_ids = _ids(line, completion)
                mask = _mask(line, "mask", len(token_ids)) if line.get("mask") is not None else None
                return _ids(line, prompt), token_ids, mask
        if line.get("token_ids") is not None and line.get("token_loss_mask") is not None:
            return _nemo({key: _only(line.get(key)) for key in ("token_ids", "token_loss_mask", "input_lengths")})
        if line.get("message_log") is not None:
            return self._messages(_only(line["message_log"]))
        for prompt, completion in TEXTS:
            if line.get(prompt) is not None and line.get(completion) is not None:
                return self._text(line[prompt], prompt), *self._completion(line[completion], completion)
        raise ValueError(f"not a known format: its keys are {', '.join(line) or '(none)'}. Known are {KNOWN}")

    # -- text -------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise ValueError("has text but no token ids; give the policy's tokenizer: --tokenizer NAME or directory")
        return self._tokenizer

    def _encode(self, text: Any, key: str) -> np.ndarray:
        if not isinstance(text, str):
            raise ValueError(f"`{key}` is {_kind(text)}; expected text, or a list of messages")
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def _text(self, prompt: Any, key: str) -> np.ndarray:
        if not isinstance(prompt, list):
            return self._encode(prompt, key)
        messages = [{"role": role, "content": content} for role, content, _ in map(_message, prompt)]
        return self._encode(render_chat(self.tokenizer, messages, add_generation_prompt=True), key)

    def _completion(self, completion: Any, key: str) -> tuple[np.ndarray, np.ndarray | None]:
        if not isinstance(completion, list):
            return self._encode(completion, key), None
        return _joined([(role == "assistant", self._encode(content, key)) for role, content, _ in
                        map(_message, completion)])  # fmt: skip

    def _messages(self, messages: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        if not isinstance(messages, list):
            raise ValueError(f"`message_log` is {_kind(messages)}; expected a list of messages")
        parts = [
            (
                role == "assistant",
                _ids({"token_ids": ids}, "token_ids") if ids is not None else self._encode(text, role),
            )
            for role, text, ids in map(_message, messages)
        ]
        first = next((i for i, (sampled, _) in enumerate(parts) if sampled), len(parts))
        prompt, _ = _joined(parts[:first])
        return prompt, *_joined(parts[first:])


def _joined(parts: list[tuple[bool, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The concatenated tokens, and the mask of those that the policy sampled."""
    tokens = np.concatenate([np.zeros(0, np.int32), *(ids for _, ids in parts)])
    return tokens, np.repeat(np.array([sampled for sampled, _ in parts], bool), [len(ids) for _, ids in parts])


def _message(message: Any) -> tuple[str, Any, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message is {_kind(message)} without a role; expected objects with `role` and `content`")
    return message["role"], message.get("content"), message.get("token_ids")


def _nemo(line: Json) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    token_ids = _ids(line, "token_ids")
    mask = _mask(line, "token_loss_mask", len(token_ids))
    if line["input_lengths"] is not None:  # the rest is padding
        length = _integer(line, "input_lengths")
        token_ids, mask = token_ids[:length], mask[:length]
    first = int(mask.argmax()) if mask.any() else len(mask)
    return token_ids[:first], token_ids[first:], mask[first:]


def _only(value: Any) -> Any:
    """The item of a list with one list or string in it, or the value itself."""
    return value[0] if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], Mapping) else value


def _ids(line: Json, key: str) -> np.ndarray:
    values = line[key]
    if not isinstance(values, list):
        raise ValueError(f"`{key}` is {_kind(values)}; expected a list of token ids")
    if not values:
        return np.zeros(0, np.int32)
    try:
        ids = np.array(values)
    except (ValueError, OverflowError):  # nested lists of different lengths, or a huge integer
        ids = np.array([None])
    if ids.ndim != 1 or ids.dtype.kind != "i":
        wrong = next((v for v in values if not isinstance(v, int) or isinstance(v, bool)), values[0])
        raise ValueError(f"`{key}` contains {str(wrong)[:40]!r}; token ids are integers from 0 to {MAX_ID}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > MAX_ID:
        raise ValueError(f"`{key}` contains {low if low < 0 else high}; token ids are integers from 0 to {MAX_ID}")
    return ids.astype(np.int32)


def _mask(line: Json, key: str, num_tokens: int) -> np.ndarray:
    values = line[key]
    try:
        mask = np.array(values)
    except ValueError:
        mask = np.array([None])
    if mask.shape != (num_tokens,) or mask.dtype.kind not in "bif":
        if not num_tokens and values == []:
            return np.zeros(0, bool)
        raise ValueError(f"`{key}` is not a list of {num_tokens} values 0 or 1, one per token")
    return mask != 0


def _head_accepted(line: Json, num_tokens: int) -> np.ndarray | None:
    digits = line.get("head_accepted")
    if digits is None:
        return None
    if (
        not isinstance(digits, str)
        or len(digits) != num_tokens
        or (digits and not (digits.isascii() and digits.isdecimal()))
    ):
        raise ValueError(f"`head_accepted` is not a string of {num_tokens} digits, one per token")
    return np.frombuffer(digits.encode(), np.uint8) - ord("0")


def _integer(line: Json, key: str, most: int = 2**53 - 1) -> int:
    value = line[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or not 0 <= value <= most:
        raise ValueError(f"`{key}` is {str(value)[:40]!r}; expected an integer from 0 to {most}")
    return int(value)


def _version(line: Json) -> int | None:
    runs = line.get("versions")
    if isinstance(runs, list) and runs and isinstance(runs[0], list) and runs[0]:
        return _integer({"versions": runs[0][0]}, "versions")
    return _integer(line, "version") if line.get("version") is not None else None


def _digest(prompt_ids: np.ndarray) -> str:
    return hashlib.blake2b(prompt_ids.tobytes(), digest_size=8).hexdigest()


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
