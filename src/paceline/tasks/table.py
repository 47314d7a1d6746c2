"""Problems from a table: a jsonl file (gzip too) or a Hugging Face dataset, one problem a row.

Every row is checked before any work starts. Columns other than the prompt go to the rewards as they are; `answer` is
the final answer, and where a row spells out the way to it (GSM8K's `#### 72`), `solution` is the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.config import TaskSection
from paceline.files import parse_json, read_lines
from paceline.tasks.prompt import NEEDED, dress, identity, is_prompt, is_unicode
from paceline.tasks.split import split
from paceline.tasks.task import Problem
from paceline.types import noise_key

Row = tuple[int, str, dict[str, Any]]  # its index, where it is in a user's words, its columns
RESERVED = ("prompts", "completions", "completion_ids")  # what every reward is given besides the columns
FINAL = "####"


class TableTask:
    def __init__(self, section: TaskSection) -> None:
        path = section.name.rstrip("/")
        self.name = Path(path).name.removesuffix(".gz").removesuffix(".jsonl")
        problems = list(_problems(section, self.name))

        def key(problem: Problem) -> str:
            return identity(problem.prompt)

        first = {key(problem): problem for problem in reversed(problems)}
        if not problems:
            raise ValueError(f'task.name = {section.name!r}: no rows in it; it needs some like {{"prompt": "…"}}')
        if section.held_out >= len(first):
            raise ValueError(
                f"task.held_out = {section.held_out}: {section.name} has only {len(first)} different prompts, and "
                f"training needs some; set it to at most {len(first) - 1}"
            )
        # Any row may be held out, by lot: tables are often sorted. The lot is the prompt's own, whatever its place.
        by_lot = sorted(first.values(), key=lambda problem: noise_key(section.seed, "held_out", key(problem)))
        self.train, self.held_out = split(problems, by_lot, section.size, section.held_out, key)
        if section.size and len(self.train) < section.size:
            raise ValueError(
                f"task.size = {section.size}: {section.name} has only {len(self.train)} rows left for training; lower "
                "it, or leave it out to take them all"
            )


def _problems(section: TaskSection, stem: str) -> Iterator[Problem]:
    unanswered: str | None = None  # the first row without an answer
    some_answered = False
    for index, where, row in _rows(section):
        prompt_column = section.prompt_column or ("prompt" if "prompt" in row else "question")
        prompt = row.get(prompt_column)
        if not is_prompt(prompt):
            names = f"`{section.prompt_column}`" if section.prompt_column else "`prompt` or `question`"
            raise ValueError(
                f"{where}: needs {names}, {NEEDED}; its columns are {_listed(row)}. Mend or remove it, or name the "
                "column by task.prompt_column"
            )
        if not is_unicode(prompt):
            raise ValueError(f"{where}: its prompt is not valid Unicode text; mend or remove it")
        if reserved := [column for column in RESERVED if column in row and column != prompt_column]:
            raise ValueError(f"{where}: a column is called `{reserved[0]}`, which rewards use themselves; rename it")
        columns = {column: value for column, value in row.items() if column != prompt_column}
        if row.get(section.answer_column) is None:
            unanswered = unanswered or f"{where}: no `{section.answer_column}`; its columns are {_listed(row)}"
        else:
            some_answered = True
            columns |= _answer(row[section.answer_column], columns, where)
        yield Problem(f"{stem}/{index}", dress(prompt, section), columns)
    # A table without any answers is fine: not every reward wants one. A run's config.toml names every setting, so that
    # the default must count as not given.
    if unanswered and (some_answered or section.answer_column != TaskSection().answer_column):
        raise ValueError(f"{unanswered}. Mend or remove it, or name the column by task.answer_column")


def _answer(answer: Any, columns: Mapping[str, Any], where: str) -> dict[str, Any]:
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or FINAL not in answer:
        return {"answer": answer}
    final = answer.rpartition(FINAL)[2].strip().replace(",", "")
    if not final:
        raise ValueError(f"{where}: its answer has nothing after {FINAL}, where the final answer goes; mend it")
    return {"answer": final, "solution": columns.get("solution", answer)}


def _rows(section: TaskSection) -> Iterator[Row]:
    if section.kind == "jsonl":
        if section.params:
            raise ValueError(f"task.params = {section.params!r}: a jsonl file has no parameters; leave it out")
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
                raise ValueError(f"{where}: {error}; mend or remove it") from None
            if not isinstance(row, dict):
                raise ValueError(f'{where}: must be an object like {{"prompt": "…"}}; mend or remove it')
            yield number - 1, where, row
    except OSError as error:
        raise ValueError(f"task.name = {str(path)!r}: can't be read: {error.strerror or error}") from None


def _dataset_rows(section: TaskSection) -> Iterator[Row]:
    try:
        from datasets import DatasetDict, load_dataset, load_from_disk
    except ImportError as error:
        raise ValueError(f'task.kind = "dataset" needs the datasets library ({error}); pip install datasets') from None
    name = section.name
    directory = Path(name)
    saved = any((directory / file).is_file() for file in ("state.json", "dataset_dict.json"))
    try:
        table = load_from_disk(name) if saved else load_dataset(name, split=section.split, **section.params)
    except Exception as error:
        raise ValueError(
            f"task.name = {name!r}, task.split = {section.split!r}, task.params = {section.params!r}: can't be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    if isinstance(table, DatasetDict):
        if section.split not in table:
            raise ValueError(f"task.split = {section.split!r}: {name} has {', '.join(table)}")
        table = table[section.split]
    for index, row in enumerate(table):
        yield index, f"{name} ({section.split}), row {index}", dict(row)


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(f"`{column}`" for column in row) or "none"
