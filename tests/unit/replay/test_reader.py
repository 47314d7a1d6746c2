"""Rollout files in all formats, and errors for invalid ones."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.replay import reader as reader_module
from paceline.replay.formats import Formats
from paceline.replay.reader import Reader
from paceline.replay.rounds import Record

OURS = {"step": 3, "group": 9, "problem": "p1", "sample": 0, "prompt_ids": [5, 6], "token_ids": [1, 2, 3],
        "versions": [[2, 1], [3, 2]], "reward": 1.0, "finish_reason": "length", "head_accepted": "092"}  # fmt: skip


class CharTokenizer:
    """One token per character; the chat template puts each message in brackets."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"[{m['content']}]" for m in messages) + ">"


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def read(*paths: str, skip_broken: bool = False) -> list[Record]:
    return list(Reader(paths, Formats(CharTokenizer()), skip_broken))


def text(ids: np.ndarray) -> str:
    return "".join(map(chr, ids.tolist()))


def test_our_own_format(tmp_path: Path) -> None:
    (record,) = read(write(tmp_path / "rollouts.jsonl", OURS))
    assert (record.problem, record.step, record.version, record.is_cut) == ("p1", 3, 2, True)
    assert (record.prompt_ids.tolist(), record.token_ids.tolist()) == ([5, 6], [1, 2, 3])
    assert record.head_accepted is not None and record.head_accepted.tolist() == [0, 9, 2]
    assert record.mask is None


def test_tokens_of_an_environment_are_masked(tmp_path: Path) -> None:
    (record,) = read(write(tmp_path / "r.jsonl", OURS | {"mask": [1, 0, 1]}))
    assert record.mask is not None and record.mask.tolist() == [True, False, True]


def test_trl_with_text_with_messages_and_with_ids(tmp_path: Path) -> None:
    plain, chat, ids = read(
        write(
            tmp_path / "completions.jsonl",
            {"step": 1, "prompt": "ab", "completion": "cd", "advantage": 0.5},
            {"step": 1, "prompt": [{"role": "user", "content": "ab"}],
             "completion": [{"role": "assistant", "content": "c"}, {"role": "tool", "content": "xy"},
                            {"role": "assistant", "content": "d"}]},
            {"step": 2, "prompt": "ab", "completion": "cd", "prompt_ids": [1], "completion_ids": [2, 3]},
        )
    )  # fmt: skip
    assert (text(plain.prompt_ids), text(plain.token_ids)) == ("ab", "cd")
    assert (text(chat.prompt_ids), text(chat.token_ids)) == ("[ab]>", "cxyd")
    assert chat.mask is not None and chat.mask.tolist() == [True, False, False, True]
    assert (ids.prompt_ids.tolist(), ids.token_ids.tolist()) == ([1], [2, 3])
    assert plain.problem != chat.problem  # their prompts differ


def test_a_problem_without_a_name_is_identified_by_its_prompt(tmp_path: Path) -> None:
    line = {"prompt_ids": [1, 2], "completion_ids": [3]}
    a, b, c = read(write(tmp_path / "r.jsonl", line | {"uid": "x"}, line | {"uid": "y"}, line | {"prompt_ids": [2]}))
    assert a.problem == b.problem != c.problem


def test_files_of_verl_are_read_in_numeric_order(tmp_path: Path) -> None:
    for step in (10, 9, 1):
        write(tmp_path / f"{step}.jsonl", {"input": "q", "output": "a" * step, "gts": "x", "score": 0, "step": step})
    assert [len(record.token_ids) for record in read(str(tmp_path))] == [1, 9, 10]


def test_nemo_rl(tmp_path: Path) -> None:
    """Every value is in a list of one; the step is in the file's name."""
    flat = {"content": ["…"], "rewards": [1.0], "input_lengths": [5], "token_ids": [[1, 2, 3, 4, 5, 0, 0]],
            "token_loss_mask": [[0, 0, 1, 1, 1, 0, 0]], "idx": 0}  # fmt: skip
    log = {"message_log": [{"role": "user", "token_ids": [1, 2]}, {"role": "assistant", "token_ids": [3, 4]},
                           {"role": "tool", "content": "ok"}, {"role": "assistant", "token_ids": [5]}]}  # fmt: skip
    a, b = read(write(tmp_path / "train_data_step12.jsonl", flat, log))
    assert (a.step, a.version) == (12, 12)
    assert (a.prompt_ids.tolist(), a.token_ids.tolist(), a.mask) == ([1, 2], [3, 4, 5], None)
    assert b.prompt_ids.tolist() == [1, 2] and b.token_ids.tolist() == [3, 4, ord("o"), ord("k"), 5]
    assert b.mask is not None and b.mask.tolist() == [True, True, False, False, True]


def test_archives_folders_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = (json.dumps(OURS) + "\n\n").encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line * 3))
    (tmp_path / "b.jsonl.xz").write_bytes(lzma.compress(line * 2))
    assert len(read(str(tmp_path / "a.jsonl.gz"), str(tmp_path / "b.jsonl.xz"))) == len(read(str(tmp_path))) == 5
    write(tmp_path / "rollouts.jsonl", OURS)  # a run's folder has other jsonl files too
    write(tmp_path / "metrics.jsonl", {"step": 1})
    assert len(read(str(tmp_path))) == 1
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line)))
    assert len(read("-")) == 1


def test_record_bytes_add_up_to_the_file_size(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", *[OURS] * 50)
    assert sum(record.num_bytes for record in read(path)) == Path(path).stat().st_size == Reader([path]).num_bytes


BROKEN = {
    '{"step": 1, "prompt_ids": [1': "not valid JSON",
    "[1, 2]": "not a JSON object",
    '{"step": 1}': "not a known format: its keys are step. Known are `prompt_ids` and `token_ids`",
    '{"prompt_ids": [1], "token_ids": [1, -2]}': "`token_ids` contains -2",
    '{"prompt_ids": [1], "token_ids": [1, 2.5]}': "`token_ids` contains '2.5'",
    '{"prompt_ids": [1], "token_ids": ["a"]}': "`token_ids` contains 'a'",
    '{"prompt_ids": [1], "token_ids": [[1], [2, 3]]}': "`token_ids` contains",
    '{"prompt_ids": [1], "token_ids": [null, 3]}': "`token_ids` contains 'None'",
    '{"prompt_ids": [1], "token_ids": [true]}': "`token_ids` contains 'True'",
    '{"prompt_ids": [1], "token_ids": [3000000000]}': "`token_ids` contains 3000000000",
    '{"prompt_ids": [1], "token_ids": [99999999999999999999999]}': "`token_ids` contains",
    '{"prompt_ids": [1], "token_ids": "abc"}': "`token_ids` is text",
    '{"prompt_ids": [], "token_ids": [1]}': "the prompt is empty",
    '{"prompt_ids": [1], "token_ids": [1], "mask": [1, 0]}': "`mask` is not a list of 1 values 0 or 1",
    '{"prompt_ids": [1], "token_ids": [1], "head_accepted": "12"}': "`head_accepted` is not a string of 1 digits",
    '{"prompt_ids": [1], "token_ids": [1], "step": -1}': "`step` is '-1'",
    '{"prompt_ids": [1], "token_ids": [1], "step": NaN}': "`step` is 'nan'",
    '{"prompt_ids": [1], "token_ids": [1], "max_tokens": 2147483648}': "`max_tokens` is '2147483648'; expected an",
    '{"message_log": [1, 2]}': "a message is a number without a role",
    '{"prompt": 3, "completion": "a"}': "`prompt` is a number",
    "[" * 100_000: "nested too deep",
}


@pytest.mark.parametrize("line", BROKEN, ids=lambda line: line[:40])
def test_the_error_names_the_broken_line(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "r.jsonl", OURS, "", line, OURS)
    with pytest.raises(ValueError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}, line 3: ") and BROKEN[line] in str(error.value)
    assert "--skip-broken" in str(error.value)
    reader = Reader([path], Formats(CharTokenizer()), skip_broken=True)
    assert len(list(reader)) == 2 and reader.num_broken == 1 and "line 3" in reader.first_broken


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(b'{"a": "\xff\xfe"}\n')
    with pytest.raises(ValueError, match="line 1: not UTF-8 text"):
        read(str(tmp_path / "r.jsonl"))


def test_a_file_that_ends_within_a_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(OURS) + "\n" + json.dumps(OURS)[:50])
    with pytest.raises(ValueError, match=r"line 2: .*the file ends within this line: was it cut off"):
        read(str(path))


def test_truncated_archives(tmp_path: Path) -> None:
    noise = [OURS | {"token_ids": row} for row in np.random.default_rng(0).integers(0, 9999, (200, 3)).tolist()]
    whole = "".join(json.dumps(line) + "\n" for line in noise).encode()
    for ending, pack in ((".gz", gzip.compress), (".xz", lzma.compress)):
        path = tmp_path / f"r.jsonl{ending}"
        path.write_bytes(pack(whole)[:-300])
        with pytest.raises(ValueError, match=r"line \d+: the archive is damaged or cut off"):
            read(str(path))
        path.write_bytes(b"no archive")
        with pytest.raises(ValueError, match="line 1: the archive is damaged"):
            read(str(path))


def test_empty_archives(tmp_path: Path) -> None:
    for ending, pack in ((".gz", gzip.compress), (".xz", lzma.compress)):
        path = tmp_path / f"r.jsonl{ending}"
        path.write_bytes(b"")
        with pytest.raises(ValueError, match=rf"r.jsonl{ending} is empty and not a valid archive"):
            read(str(path))
        path.write_bytes(pack(b""))
        with pytest.raises(ValueError, match="contains no rollouts"):
            read(str(path))


def test_lines_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MAX_LINE", 1000)
    path = write(tmp_path / "r.jsonl", OURS, OURS | {"text": "x" * 5000}, OURS)
    with pytest.raises(ValueError, match=r"line 2: longer than .* MB; is it jsonl, with one rollout per line"):
        read(path)
    assert len(read(path, skip_broken=True)) == 2


def test_missing_and_empty_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="contains no rollouts"):
        read(write(tmp_path / "r.jsonl", ""))
    with pytest.raises(ValueError, match="1 broken lines were skipped"):
        read(write(tmp_path / "r.jsonl", "{"), skip_broken=True)
    with pytest.raises(ValueError, match="no such file"):
        read(str(tmp_path / "missing.jsonl"))
    with pytest.raises(ValueError, match="no rollouts in this folder"):
        (tmp_path / "empty").mkdir()
        read(str(tmp_path / "empty"))


def test_the_error_for_parquet_says_how_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "c.parquet").write_bytes(b"PAR1\x15\x00\x15")
    with pytest.raises(ValueError, match=r"parquet file, as TRL writes them; convert it to jsonl: pandas.read_parquet"):
        read(str(tmp_path / "c.parquet"))


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", {"input": "q", "output": "a"})
    with pytest.raises(ValueError, match=r"line 1: has text but no token ids; .*--tokenizer"):
        list(Reader([path]))
