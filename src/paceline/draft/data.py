"""Examples from the lines of a jsonl file: text, chats, prompts with completions, or rollouts that were recorded.

What always holds: what was recorded as tokens is never tokenised again; no prompt that is held out is trained on; the
same file and settings give the same examples in the same order. A line that can't be used is an error that names it,
but for sequences too short to guess anything in, which are counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.draft.lesson import Example
from paceline.files import parse_json, read_lines
from paceline.tasks.prompt import NEEDED, continuation, encode, is_prompt, is_unicode
from paceline.tasks.task import Message

FORMS = "`text`; `prompt` and `completion`; `messages`; or `prompt_ids` and `token_ids`"
FIRST = 2  # the first token that a head can guess: it sees one token's feature and the token after it


@dataclass(slots=True)
class Examples:
    train: list[Example]
    held_out: list[Example]
    num_skipped: int = 0  # too short
    num_cut: int = 0  # longer than draft.max_length
    fingerprint: str = field(init=False)  # the same exactly where both lists are

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            digest.update(f"{len(part)} sequences".encode())
            for example in part:
                digest.update(f"{len(example.tokens)}".encode() + example.tokens.tobytes() + example.chosen.tobytes())
        self.fingerprint = digest.hexdigest()


@dataclass(slots=True)
class Reader:
    """From a line's record to an example."""

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
                    raise ValueError(f"{where}: {error}; write one object a line, with {FORMS}") from None
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
            raise ValueError(f"{where}: not valid Unicode text; remove what stands for half a character")
        forms = {"token_ids": self._recorded, "messages": self._chat, "prompt": self._prompted, "text": self._text}
        for key, form in forms.items():  # a recorded rollout has `prompt` too: tokens go first
            if key in record:
                try:
                    return form(record)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
        raise ValueError(f"{where}: has none of the keys that are known; give {FORMS}")

    def _text(self, record: dict[str, Any]) -> Example:
        return _joined([(self._ids(_words(record, "text")), True)])

    def _prompted(self, record: dict[str, Any]) -> Example:
        if not is_prompt(record["prompt"]):
            raise ValueError(f"`prompt`: give {NEEDED}")
        if "completion" not in record:
            raise ValueError(
                '`completion` is missing; give it, or let the model write it: task.kind = "jsonl", task.name = this '
                'file, draft.data = "rollouts"'
            )
        asked = encode(self.tokenizer, record["prompt"], self.chat)
        return _joined([(asked, False), (self._said(_words(record, "completion")), True)])

    def _chat(self, record: dict[str, Any]) -> Example:
        messages: list[Message] = record["messages"]
        if isinstance(messages, str) or not is_prompt(messages):
            raise ValueError("`messages`: give a list of messages with `role` and `content`, both strings")
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns or turns[0] == 0:
            raise ValueError("`messages`: give a turn of the user and, after it, one of the assistant")
        parts: list[tuple[Sequence[int], bool]] = [(encode(self.tokenizer, messages[: turns[0]], self.chat), False)]
        for turn, following in zip(turns, [*turns[1:], len(messages)], strict=True):
            said = self._said(messages[turn]["content"])
            parts.append((said, True))
            if following < len(messages):
                between = continuation(self.tokenizer, messages[turn + 1 : following], self.chat, said)
                parts.append((between, False))
        return _joined(parts)

    def _recorded(self, record: dict[str, Any]) -> Example:
        prompt, tokens = (self._known(record, key) for key in ("prompt_ids", "token_ids"))
        mask = record.get("mask", [1] * len(tokens))
        if not isinstance(mask, list) or len(mask) != len(tokens) or not all(value in (0, 1) for value in mask):
            raise ValueError("`mask`: give a list of 0 and 1, one for each of `token_ids`, or leave it out")
        whole = _joined([(prompt, False), (tokens, True)])
        return replace(whole, chosen=np.array([False] * len(prompt) + [bool(value) for value in mask], bool))

    def _known(self, record: dict[str, Any], key: str) -> list[int]:
        ids = record.get(key)
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise ValueError(f"`{key}`: give a list of token ids")
        if bad := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise ValueError(
                f"`{key}`: {bad[0]} is no token of this model, which has {self.vocab_size}; give the model that wrote "
                "this as model.name"
            )
        return ids

    def _said(self, text: str) -> list[int]:
        """A turn of the model's as it would have sampled it, its end included."""
        end = self.tokenizer.eos_token_id
        return [*self._ids(text, special=False), *([] if end is None else [end])]

    def _ids(self, text: str, special: bool = True) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=special))


def gather(found: Iterable[Example], max_length: int, limit: int | None = None) -> Examples:
    """All as training examples, or the first `limit` that are long enough: cut to max_length, short ones left out."""
    examples = Examples([], [])
    for example in found:
        if len(example.tokens) > max_length:
            examples.num_cut += 1
            example = Example(example.tokens[:max_length], example.chosen[:max_length])
        if not example.chosen[FIRST:].any():
            examples.num_skipped += 1
            continue
        examples.train.append(example)
        if len(examples.train) == limit:
            break
    return Examples(examples.train, [], examples.num_skipped, examples.num_cut)


def read_examples(path: Path, reader: Reader, num: int, held_out: int, max_length: int, seed: int) -> Examples:
    """Up to `num` training examples of a file, and `held_out` others whose prompts are not among theirs: by a seeded
    choice, as a file may be sorted."""
    found = gather(reader.read(path), max_length, num + held_out)
    groups: dict[bytes, list[int]] = {}
    for i, example in enumerate(found.train):
        groups.setdefault(_prompt(example), []).append(i)
    held: list[int] = []
    shuffled = list(groups.values())
    np.random.default_rng(seed).shuffle(shuffled)
    while shuffled and len(held) < held_out:
        held += shuffled.pop()
    kept = [i for group in shuffled for i in group]
    if len(held) < held_out or not kept:
        raise ValueError(
            f"draft.held_out = {held_out}: {path} has {len(found.train)} sequences of {len(groups)} prompts "
            f"({found.num_skipped} more are too short), which leaves none to train on; lower it, or give more"
        )
    train = [found.train[i] for i in sorted(kept)][:num]
    return Examples(train, [found.train[i] for i in held[:held_out]], found.num_skipped, found.num_cut)


def _prompt(example: Example) -> bytes:
    """What tells apart: all before the first chosen token, or the whole where nothing is."""
    first = int(example.chosen.argmax())
    return (example.tokens[:first] if first else example.tokens).tobytes()


def _joined(parts: Sequence[tuple[Sequence[int], bool]]) -> Example:
    tokens = np.concatenate([np.array(ids, np.int32) for ids, _ in parts])
    return Example(tokens, np.repeat(np.array([own for _, own in parts], bool), [len(ids) for ids, _ in parts]))


def _words(record: dict[str, Any], key: str) -> str:
    if not isinstance(record[key], str) or not record[key].strip():
        raise ValueError(f"`{key}`: give a string that is not empty")
    return record[key]
