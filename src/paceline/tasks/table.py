"""Problems from a table: a jsonl file (also gzipped) or a Hugging Face dataset, one problem per row.

Every row is checked before any work starts. Rewards get all columns except the prompt. `answer` is the final answer. If
a row's answer contains the reasoning too (GSM8K's `#### 72`), `solution` is the complete text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.chat.messages import is_unicode
from paceline.config import TaskSection
from paceline.files import parse_json, read_lines
from paceline.tasks.prompt import PROMPT_FORMAT, apply_template, is_prompt, prompt_identity
from paceline.tasks.split import split
from paceline.tasks.task import Problem
from paceline.types import noise_key

Row = tuple[int, str, dict[str, Any]]  # index, location for error messages, columns
RESERVED = ("prompts", "completions", "completion_ids")  # arguments of every reward function besides the columns
NOT_AN_ARRAY = 'must be an object like {"prompt": "…"}; write one object per line, not an array'
FINAL_ANSWER_MARK = "####"


class TableTask:
    def __init__(self, section: TaskSection) -> None:
        path = section.name.rstrip("/")
        self.name = Path(path).name.removesuffix(".gz").removesuffix(".jsonl")
        problems = list(_problems(section, self.name))
        first = {prompt_identity(problem.prompt): problem for problem in reversed(problems)}
        if not problems:
            raise ValueError(f'task.name = {section.name!r}: no rows in it; add rows like {{"prompt": "…"}}')
        if section.held_out >= len(first):
            raise ValueError(
                f"task.held_out = {section.held_out}: {section.name} has only {len(first)} different prompts, and "
                f"training needs some; set it to at most {len(first) - 1}"
            )
        # Held-out rows are random, as tables are often sorted. The order depends on seed and prompts, not on positions.
        shuffled = [first[key] for key in sorted(first, key=lambda key: noise_key(section.seed, "held_out", key))]
        self.train, self.held_out = split(problems, shuffled, section.size, section.held_out)
        if section.size and len(self.train) < section.size:
            raise ValueError(
                f"task.size = {section.size}: {section.name} has only {len(self.train)} rows left for training; lower "
                "it, or leave it out to use all"
            )

    def close(self) -> None:
        pass


def _problems(section: TaskSection, stem: str) -> Iterator[Problem]:
    unanswered: str | None = None  # the first row without an answer
    some_answered = False
    for index, where, row in _rows(section):
        prompt_column = section.prompt_column or ("prompt" if "prompt" in row else "question")
        prompt = row.get(prompt_column)
        if not is_prompt(prompt):
            names = f"`{section.prompt_column}`" if section.prompt_column else "`prompt` or `question`"
            raise ValueError(
                f"{where}: needs {names}, {PROMPT_FORMAT}; its columns are {_listed(row)}. Fix or remove the row, or "
                "set task.prompt_column"
            )
        if not is_unicode(prompt):
            raise ValueError(f"{where}: the prompt is not valid Unicode text; fix or remove the row")
        if reserved := [column for column in RESERVED if column in row and column != prompt_column]:
            raise ValueError(
                f"{where}: the column name `{reserved[0]}` is reserved for an argument of reward functions; rename it"
            )
        columns = {column: value for column, value in row.items() if column != prompt_column}
        if row.get(section.answer_column) is None:
            unanswered = unanswered or f"{where}: no `{section.answer_column}`; its columns are {_listed(row)}"
        else:
            some_answered = True
            columns |= _answer(row[section.answer_column], columns, where)
        yield Problem(
            f"{stem}/{index}",
            apply_template(prompt, section),
            columns,
            None,
            section.chat,
            section.chat_template_kwargs,
        )
    # A table without any answers is fine: not every reward needs one. A run's config.toml contains every setting, so
    # the default value counts as not given.
    if unanswered and (some_answered or section.answer_column != TaskSection().answer_column):
        raise ValueError(f"{unanswered}. Fix or remove the row, or set task.answer_column")


def _answer(answer: Any, columns: Mapping[str, Any], where: str) -> dict[str, Any]:
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or FINAL_ANSWER_MARK not in answer:
        return {"answer": answer}
    final = answer.rpartition(FINAL_ANSWER_MARK)[2].strip().replace(",", "")
    if not final:
        raise ValueError(f"{where}: the answer has nothing after {FINAL_ANSWER_MARK}; put the final answer there")
    return {"answer": final, "solution": columns.get("solution", answer)}


def _rows(section: TaskSection) -> Iterator[Row]:
    if section.kind in ("jsonl", "agent"):
        if section.params:
            raise ValueError(f"task.params = {section.params!r}: a jsonl file has no parameters; remove the setting")
        return _jsonl_rows(Path(section.name))
    assert section.kind == "dataset"
    return _dataset_rows(section)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    try:
        for number, line in read_lines(path):
            where = f"{path}, line {number}"
            try:
                row = parse_json(line)
            except ValueError as error:
                if line.lstrip().startswith(b"["):  # the first line of a JSON array
                    raise ValueError(f"{where}: {NOT_AN_ARRAY}") from None
                raise ValueError(f"{where}: {error}; fix or remove the line") from None
            if isinstance(row, list):
                raise ValueError(f"{where}: {NOT_AN_ARRAY}")
            if not isinstance(row, dict):
                raise ValueError(f'{where}: must be an object like {{"prompt": "…"}}; fix or remove the line')
            yield number - 1, where, row
    except OSError as error:
        raise ValueError(
            f"task.name = {str(path)!r}: {path.absolute()} can't be read: {error.strerror or error}"
        ) from None


def _dataset_rows(section: TaskSection) -> Iterator[Row]:
    try:
        from datasets import DatasetDict, load_dataset, load_from_disk
    except ImportError as error:
        raise ValueError(f'task.kind = "dataset" needs the datasets library ({error}); pip install datasets') from None
    name = section.name
    is_saved = any(Path(name, file).is_file() for file in ("state.json", "dataset_dict.json"))
    try:
        table = load_from_disk(name) if is_saved else load_dataset(name, split=section.split, **section.params)
    except Exception as error:
        raise ValueError(
            f"task.name = {name!r}, task.split = {section.split!r}, task.params = {section.params!r}: can't be loaded: "
            f"{type(error).__name__}: {error}. Without access to the hub, use a file of the same rows: "
            "task.kind=jsonl task.name=FILE.jsonl task.params={}"
        ) from error
    if isinstance(table, DatasetDict):
        if section.split not in table:
            raise ValueError(f"task.split = {section.split!r}: {name} has the splits {', '.join(table)}")
        table = table[section.split]
    for index, row in enumerate(table):
        yield index, f"{name} ({section.split}), row {index}", dict(row)


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(f"`{column}`" for column in row) or "none"
