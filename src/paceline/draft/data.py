"""Training examples from a jsonl file: text, chats, prompts with completions, or recorded rollouts.

Invariants: recorded token ids are never tokenized again; held-out prompts are not trained on; the same file and
settings give the same examples in the same order. An invalid line is an error that names the line. Sequences that are
too short to predict a token in are skipped and counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.chat.messages import Message, is_unicode
from paceline.chat.template import continuation, encode
from paceline.draft.head_batch import Example
from paceline.files import parse_json, read_lines
from paceline.tasks.prompt import PROMPT_FORMAT, is_prompt

FORMS = "`text`; `prompt` and `completion`; `messages`; or `prompt_ids` and `token_ids`"
FIRST = 2  # position of the first token that a head predicts: it needs the features of token 0, and token 1


@dataclass(slots=True)
class Examples:
    train: list[Example]
    held_out: list[Example]
    num_skipped: int = 0  # too short
    num_truncated: int = 0  # longer than draft.max_length
    fingerprint: str = field(init=False)  # hash of both lists

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            digest.update(f"{len(part)} sequences".encode())
            for example in part:
                digest.update(f"{len(example.tokens)}".encode())
                digest.update(example.tokens.tobytes() + example.loss_mask.tobytes())
        self.fingerprint = digest.hexdigest()


@dataclass(slots=True)
class Reader:
    """Makes examples from the lines of a file."""

    tokenizer: Any
    vocab_size: int
    chat: bool = True

    def read(self, path: Path) -> Iterator[Example]:
        try:
            for number, line in read_lines(path):
                where = f"{path}, line {number}"
                try:
                    record = parse_json(line)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}; write one object per line, with {FORMS}") from None
                yield self.example(record, where)
        except FileNotFoundError:
            raise ValueError(f'draft.data = "{path}": no such file; give a jsonl file, or "rollouts"') from None
        except OSError as error:
            raise ValueError(
                f'draft.data = "{path}": can\'t be read ({error}); give a jsonl file, plain or .gz'
            ) from None

    def example(self, record: Any, where: str) -> Example:
        if not isinstance(record, dict):
            raise ValueError(f"{where}: not a JSON object; give one with {FORMS}")
        if not is_unicode(record):
            raise ValueError(f"{where}: not valid Unicode text; remove unpaired surrogates")
        forms = {"token_ids": self._recorded, "messages": self._chat, "prompt": self._prompted, "text": self._text}
        for key, form in forms.items():  # a recorded rollout has `prompt` too, so `token_ids` is first
            if key in record:
                try:
                    return form(record)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
        raise ValueError(f"{where}: has none of the known keys; give {FORMS}")

    def _text(self, record: dict[str, Any]) -> Example:
        return _joined([(self._ids(_string(record, "text")), True)])

    def _prompted(self, record: dict[str, Any]) -> Example:
        if not is_prompt(record["prompt"]):
            raise ValueError(f"`prompt`: give {PROMPT_FORMAT}")
        if "completion" not in record:
            raise ValueError(
                '`completion` is missing; give it, or let the model generate it: task.kind = "jsonl", task.name = this '
                'file, draft.data = "rollouts"'
            )
        prompt = encode(self.tokenizer, record["prompt"], self.chat)
        return _joined([(prompt, False), (self._completion_ids(_string(record, "completion")), True)])

    def _chat(self, record: dict[str, Any]) -> Example:
        messages: list[Message] = record["messages"]
        if isinstance(messages, str) or not is_prompt(messages):
            raise ValueError("`messages`: give a list of messages with `role` and `content`, both strings")
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns or turns[0] == 0:
            raise ValueError("`messages`: give a user message and, after it, an assistant message")
        parts: list[tuple[Sequence[int], bool]] = [(encode(self.tokenizer, messages[: turns[0]], self.chat), False)]
        for turn, following in zip(turns, [*turns[1:], len(messages)], strict=True):
            reply = self._completion_ids(messages[turn]["content"])
            parts.append((reply, True))
            if following < len(messages):
                between = continuation(self.tokenizer, messages[turn + 1 : following], self.chat, reply)
                parts.append((between, False))
        return _joined(parts)

    def _recorded(self, record: dict[str, Any]) -> Example:
        prompt, tokens = (self._token_ids(record, key) for key in ("prompt_ids", "token_ids"))
        mask = record.get("mask", [1] * len(tokens))
        if not isinstance(mask, list) or len(mask) != len(tokens) or not all(value in (0, 1) for value in mask):
            raise ValueError("`mask`: give a list of 0 and 1, one for each of `token_ids`, or leave it out")
        example = _joined([(prompt, False), (tokens, True)])
        return replace(example, loss_mask=np.array([False] * len(prompt) + [bool(value) for value in mask], bool))

    def _token_ids(self, record: dict[str, Any], key: str) -> list[int]:
        ids = record.get(key)
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise ValueError(f"`{key}`: give a list of token ids")
        if bad := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise ValueError(
                f"`{key}`: {bad[0]} is not a token of this model, which has {self.vocab_size}; set model.name to the "
                "model that generated it"
            )
        return ids

    def _completion_ids(self, text: str) -> list[int]:
        """Tokens of a completion, with the end-of-sequence token."""
        eos = self.tokenizer.eos_token_id
        return [*self._ids(text, special=False), *([] if eos is None else [eos])]

    def _ids(self, text: str, special: bool = True) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=special))


def collect_examples(found: Iterable[Example], max_length: int, limit: int | None = None) -> Examples:
    """Collect all examples, or the first `limit`, as training examples. They are cut to max_length; those that are too
    short are skipped."""
    examples = Examples([], [])
    for example in found:
        if len(example.tokens) > max_length:
            examples.num_truncated += 1
            example = Example(example.tokens[:max_length], example.loss_mask[:max_length])
        if not example.loss_mask[FIRST:].any():
            examples.num_skipped += 1
            continue
        examples.train.append(example)
        if len(examples.train) == limit:
            break
    return Examples(examples.train, [], examples.num_skipped, examples.num_truncated)


def read_examples(path: Path, reader: Reader, num: int, held_out: int, max_length: int, seed: int) -> Examples:
    """Up to `num` training examples of a file, and `held_out` others with different prompts. The held-out prompts are a
    random choice, because a file may be sorted."""
    found = collect_examples(reader.read(path), max_length, num + held_out)
    groups: dict[bytes, list[int]] = {}
    for i, example in enumerate(found.train):
        groups.setdefault(_prompt(example), []).append(i)
    held_out_rows: list[int] = []
    shuffled = list(groups.values())
    np.random.default_rng(seed).shuffle(shuffled)
    while shuffled and len(held_out_rows) < held_out:
        held_out_rows += shuffled.pop()
    train_rows = [i for group in shuffled for i in group]
    if len(held_out_rows) < held_out or not train_rows:
        raise ValueError(
            f"draft.held_out = {held_out}: {path} has {len(found.train)} sequences of {len(groups)} prompts "
            f"({found.num_skipped} more are too short), which leaves none to train on; lower it, or give more data"
        )
    train = [found.train[i] for i in sorted(train_rows)][:num]
    return Examples(train, [found.train[i] for i in held_out_rows[:held_out]], found.num_skipped, found.num_truncated)


def _prompt(example: Example) -> bytes:
    """The tokens before the first one in the loss mask, or all tokens if there are none."""
    first = int(example.loss_mask.argmax())
    return (example.tokens[:first] if first else example.tokens).tobytes()


def _joined(parts: Sequence[tuple[Sequence[int], bool]]) -> Example:
    tokens = np.concatenate([np.array(ids, np.int32) for ids, _ in parts])
    return Example(tokens, np.repeat(np.array([in_loss for _, in_loss in parts], bool), [len(ids) for ids, _ in parts]))


def _string(record: dict[str, Any], key: str) -> str:
    if not isinstance(record[key], str) or not record[key].strip():
        raise ValueError(f"`{key}`: give a string that is not empty")
    return record[key]
