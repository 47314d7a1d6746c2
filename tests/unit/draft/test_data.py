"""Examples from lines of a file, error messages, the split, and the order of batches."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import VOCAB_SIZE, write_tokenizer

from paceline.chat.template import encode
from paceline.draft.batches import BUCKET, batches, plan
from paceline.draft.data import Examples, Reader, collect_examples, read_examples
from paceline.draft.head_batch import Example
from paceline.model.store import load_tokenizer

END = VOCAB_SIZE - 1  # <|im_end|>


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """With one token per byte, and a chat template."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return Reader(load_tokenizer(directory), VOCAB_SIZE)


def shown(reader: Reader, example: Example) -> list[tuple[str, bool]]:
    """Runs of tokens as text, and whether they are in the loss mask."""
    runs: list[tuple[list[int], bool]] = []
    for token, in_loss in zip(example.tokens.tolist(), example.loss_mask.tolist(), strict=True):
        if not runs or runs[-1][1] != in_loss:
            runs.append(([], in_loss))
        runs[-1][0].append(token)
    return [(reader.tokenizer.decode(ids), in_loss) for ids, in_loss in runs]


# ---- formats ----


def test_text(reader: Reader) -> None:
    assert shown(reader, reader.example({"text": "abc def"}, "")) == [("abc def", True)]


def test_prompt_and_completion(reader: Reader) -> None:
    record = {"prompt": "1+1?", "completion": "2", "other": [1]}
    prompt = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert shown(reader, reader.example(record, "")) == [(prompt, False), ("2<|im_end|>", True)]
    without_chat = Reader(reader.tokenizer, VOCAB_SIZE, chat=False)
    assert shown(reader, without_chat.example(record, "")) == [("1+1?", False), ("2<|im_end|>", True)]


def test_messages(reader: Reader) -> None:
    """The loss mask has every assistant message with its end token, and nothing of the template around it."""
    contents = [("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D")]
    messages = [{"role": role, "content": content} for role, content in contents]
    example = reader.example({"messages": messages}, "")
    prompt = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n"
    between = "\n<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n"
    assert shown(reader, example) == [
        (prompt, False), ("B<|im_end|>", True), (between, False), ("D<|im_end|>", True),
    ]  # fmt: skip
    # The model's prompt for its last turn is a prefix of the example.
    last_prompt = encode(reader.tokenizer, messages[:-1])
    assert tuple(example.tokens[: len(last_prompt)].tolist()) == last_prompt
    longer = reader.example({"messages": [*messages, messages[1]]}, "")
    assert longer.tokens.tolist() == example.tokens.tolist(), "messages after the last assistant message are dropped"


def test_recorded_rollouts_are_not_tokenized_again(reader: Reader) -> None:
    record = {"prompt": "not read", "completion": "nor this", "prompt_ids": [1, 2], "token_ids": [3, 4, 5, END]}
    example = reader.example(record, "")
    assert example.tokens.tolist() == [1, 2, 3, 4, 5, END]
    assert example.loss_mask.tolist() == [False, False, True, True, True, True]
    masked = reader.example(record | {"mask": [1, 0, 0, 1]}, "")
    assert masked.loss_mask.tolist() == [False, False, True, False, False, True]


USER = [{"role": "user", "content": "A"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"line 2: not valid JSON \("),
        ("[1]", "line 2: not a JSON object; give one with `text`"),
        ('{"txt": "a"}', "line 2: has none of the known keys; give `text`; `prompt` and `completion`"),
        ('{"text": 3}', "line 2: `text`: give a string that is not empty"),
        ('{"text": " "}', "line 2: `text`: give a string"),
        ('{"text": "\\ud800"}', "line 2: not valid Unicode"),
        ('{"prompt": "a"}', 'line 2: `completion` is missing; give it, or .* draft.data = "rollouts"'),
        ('{"prompt": 1, "completion": "b"}', "line 2: `prompt`: give a non-empty string or a list of messages"),
        ('{"prompt": "a", "completion": null}', "line 2: `completion`: give a string"),
        ('{"messages": "hello"}', "line 2: `messages`: give a list of messages"),
        ('{"messages": [{"role": "user"}]}', "line 2: `messages`: give a list of messages"),
        (json.dumps({"messages": USER}), "line 2: `messages`: give a user message and, after it, an"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 2: `messages`: give a user message"),
        ('{"token_ids": [1, 2]}', "line 2: `prompt_ids`: give a list of token ids"),
        ('{"prompt_ids": [1], "token_ids": [1.5]}', "line 2: `token_ids`: give a list of token ids"),
        ('{"prompt_ids": [1], "token_ids": [259]}', "line 2: `token_ids`: 259 is not a token of this .* model.name"),
        ('{"prompt_ids": [-1], "token_ids": [2]}', "line 2: `prompt_ids`: -1 is not a token of this model"),
        ('{"prompt_ids": [1], "token_ids": [2], "mask": [1, 1]}', "line 2: `mask`: give a list of 0 and 1"),
    ],
)
def test_invalid_lines(reader: Reader, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"text": "fine, this one"}}\n{line}\n')
    with pytest.raises(ValueError, match=f"bad.jsonl, {message}"):
        list(reader.read(path))


def test_invalid_files(reader: Reader, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"draft.data = .*no such file; give a jsonl file, or"):
        list(reader.read(tmp_path / "nowhere.jsonl"))
    (tmp_path / "latin").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"latin, line 1: not UTF-8"):
        list(reader.read(tmp_path / "latin"))
    with pytest.raises(ValueError, match=r"draft.held_out = 1: .* has 0 sequences"):
        (tmp_path / "empty").write_text("\n\n")
        read_examples(tmp_path / "empty", reader, 10, 1, 64, 0)


def test_compressed_files_and_blank_lines(reader: Reader, tmp_path: Path) -> None:
    text = '{"text": "abc"}\n\n{"text": "def"}\n'
    (tmp_path / "a.jsonl").write_text("\ufeff" + text)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(text)
    plain, compressed = (list(reader.read(tmp_path / name)) for name in ("a.jsonl", "a.jsonl.gz"))
    assert [shown(reader, x) for x in plain] == [[("abc", True)], [("def", True)]]
    assert [shown(reader, x) for x in compressed] == [shown(reader, x) for x in plain]


# ---- selection ----


def example(num_prompt: int, num_completion: int, first: int = 0) -> Example:
    tokens = np.arange(first, first + num_prompt + num_completion, dtype=np.int32)
    return Example(tokens, np.arange(num_prompt + num_completion) >= num_prompt)


def test_long_examples_are_cut_and_short_ones_skipped() -> None:
    """The first token that a head predicts is the third one."""
    sizes = [(1, 9), (1, 1), (1, 2), (0, 2), (9, 3), (2, 1)]
    found = collect_examples([example(*size) for size in sizes], 8)
    assert [len(x.tokens) for x in found.train] == [8, 3, 3]
    assert found.num_truncated == 2  # one of them has no token left in the loss mask
    assert found.num_skipped == 3
    assert len(collect_examples([example(1, 5)] * 9, 8, limit=4).train) == 4


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_no_held_out_prompt_is_trained_on(reader: Reader, tmp_path: Path) -> None:
    """Neither with another completion, nor in another order of the file."""
    records = [{"prompt": f"p{i // 4}", "completion": f"answer {i}"} for i in range(40)]
    path = write(tmp_path / "a.jsonl", records)
    found = read_examples(path, reader, 100, 6, 512, seed=0)

    def prompts(examples: list[Example]) -> set[str]:
        return {shown(reader, x)[0][0] for x in examples}

    assert len(found.held_out) == 6 and len(found.train) == 32
    assert not prompts(found.train) & prompts(found.held_out)
    again, other = (read_examples(path, reader, 100, 6, 512, seed=seed) for seed in (0, 1))
    assert again.fingerprint == found.fingerprint != other.fingerprint
    assert prompts(other.held_out) != prompts(found.held_out)
    order = [shown(reader, x)[1][0] for x in found.train]
    assert order == sorted(order, key=lambda text: int(text.split()[1].removesuffix("<|im_end|>")))


def test_only_as_many_lines_are_read_as_needed(reader: Reader, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(20)])
    path.write_text(path.read_text() + "not JSON\n")
    found = read_examples(path, reader, 10, 4, 512, 0)
    assert (len(found.train), len(found.held_out)) == (10, 4)
    with pytest.raises(ValueError, match="line 21: not valid JSON"):
        read_examples(path, reader, 100, 4, 512, 0)


@pytest.mark.parametrize("held_out", [4, 5])
def test_no_examples_left_to_train_on(reader: Reader, tmp_path: Path, held_out: int) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": f"p{i}", "completion": "yes"} for i in range(4)])
    with pytest.raises(ValueError, match=rf"draft.held_out = {held_out}: .* has 4 sequences of 4 prompts"):
        read_examples(path, reader, 10, held_out, 512, 0)


def test_fingerprints_of_different_examples_differ() -> None:
    one = example(2, 3)
    other = Example(one.tokens, ~one.loss_mask)
    fingerprints = {
        Examples(*pair).fingerprint
        for pair in (([one], [other]), ([other], [one]), ([one, other], []), ([one], [one]), ([example(2, 4)], [other]))
    }
    assert len(fingerprints) == 5
    assert Examples([one], [other]).fingerprint == Examples([example(2, 3)], [other]).fingerprint


# ---- batches ----


def test_batches_stay_within_tokens_per_batch() -> None:
    lengths = [5, 5, 5, 9, 2, 30, 1]
    found = [batch.tolist() for batch in batches(lengths, 20)]
    assert found == [[0, 1, 2], [3, 4], [5], [6]]  # 3 x 5, 2 x 9, a single sequence that is too long, 1
    assert batches([], 20) == []


def test_every_epoch_has_every_sequence_once_in_a_new_order() -> None:
    lengths = np.random.default_rng(0).integers(5, 200, 500)
    steps = plan(lengths.tolist(), 1000, 3, seed=7)
    flat = np.concatenate(steps)
    epochs = flat.reshape(3, 500)
    assert all(sorted(epoch.tolist()) == list(range(500)) for epoch in epochs)
    assert not (epochs[0] == epochs[1]).all()
    assert all(lengths[step].max() * len(step) <= 1000 for step in steps)
    again, other = plan(lengths.tolist(), 1000, 3, seed=7), plan(lengths.tolist(), 1000, 3, seed=8)
    assert all((a == b).all() for a, b in zip(steps, again, strict=True))
    assert np.concatenate(other).tolist() != flat.tolist()


def test_batches_have_similar_lengths_in_random_order() -> None:
    """Little padding within a batch, and no correlation of lengths between consecutive batches."""
    lengths = np.random.default_rng(0).integers(5, 200, 3000)
    steps = plan(lengths.tolist(), 1000, 1, seed=0)
    padded = sum(int(lengths[step].max()) * len(step) for step in steps)
    assert lengths.sum() / padded > 0.8
    means = np.array([lengths[step].mean() for step in steps])
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.2
    assert len(steps) > 4 * BUCKET, "the test needs several buckets"
