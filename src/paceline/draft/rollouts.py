"""Rollouts to learn from: the engine answers the task's prompts, and each answer is kept as a line as soon as it is
whole.

What always holds: a sequence's noise is keyed by (seed, split, problem, sample), so what is generated does not depend
on when, after how many interruptions or beside what else; no training sequence answers a held-out problem.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.config import DraftSection
from paceline.draft.data import Examples, Reader, gather
from paceline.engine.engine import LocalEngine
from paceline.tasks.prompt import encode
from paceline.tasks.task import Problem, Task
from paceline.types import Request, SamplingParams, noise_key

if TYPE_CHECKING:
    from paceline.rl.folder import RunFolder

Record = dict[str, Any]


def rollout_requests(
    task: Task, section: DraftSection, tokenizer: Any, sampling: SamplingParams, chat: bool
) -> dict[str, list[Request]]:
    """By split. Ids count through both; samples of one problem stand together, so that the engine computes its prompt
    once."""
    if not task.held_out:
        raise ValueError("task.held_out = 0: acceptance is measured on held-out problems; raise it")
    if any(problem.make_env is not None for problem in task.train[:1]):
        raise ValueError(
            'draft.data = "rollouts": task.kind = "env" answers the model between its turns; train once and give '
            "that run's rollouts.jsonl as draft.data"
        )
    found: dict[str, list[Request]] = {}
    num_requests = 0
    for split, problems, num in (
        ("train", task.train, section.num_sequences),
        ("held_out", task.held_out, section.held_out),
    ):
        found[split] = []
        for i, (problem, num_samples) in enumerate(_shares(problems, num)):
            ids = encode(tokenizer, problem.prompt, chat)
            for sample in range(num_samples):
                key = noise_key(section.seed, "draft", split, i, sample)
                found[split].append(Request(num_requests, ids, sampling, key, problem.name))
                num_requests += 1
    return found


def _shares(problems: Sequence[Problem], num: int) -> Iterator[tuple[Problem, int]]:
    """How many of `num` samples each problem has: as equal as can be, more for the first ones."""
    each, more = divmod(num, len(problems))
    for i, problem in enumerate(problems[:num]):
        yield problem, each + (i < more)


def generate(
    make_engine: Callable[[], LocalEngine],
    requests: Mapping[str, Sequence[Request]],
    folder: RunFolder,
    between: Callable[[int, int], None] = lambda done, total: None,
) -> list[Record]:
    """The records of all requests; those that the folder's rollouts do not hold yet are generated and added there.
    `between(done, in all)` may raise to stop. A prompt that the engine refuses, being too long, costs its own
    sequences and no others: their records are empty."""
    records = list(folder.read("rollouts"))
    done = {record["id"] for record in records}
    missing = {r.request_id: (r, split) for split, part in requests.items() for r in part if r.request_id not in done}
    if not missing:
        return records
    total = len(done) + len(missing)
    between(len(done), total)
    with contextlib.closing(make_engine()) as engine:

        def keep(request: Request, token_ids: list[int], finish_reason: str) -> None:
            _, split = missing.pop(request.request_id)
            record = {
                "id": request.request_id,
                "split": split,
                "problem": request.problem,
                "prompt_ids": list(request.prompt_ids),
                "completion": engine.tokenizer.decode(token_ids, skip_special_tokens=True),
                "token_ids": token_ids,
                "finish_reason": finish_reason,
            }
            folder.append("rollouts", [record])
            records.append(record)

        for request, _ in list(missing.values()):
            try:
                engine.submit(request)
            except ValueError as error:
                keep(request, [], f"refused: {error}")
        while missing:
            between(total - len(missing), total)
            for completion in engine.step():
                keep(completion.request, completion.token_ids.tolist(), completion.finish_reason)
    return records


def whole_lines(folder: RunFolder) -> int:
    """How many bytes of the rollouts that a dead process left are whole lines."""
    path = folder.path / "rollouts.jsonl"
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


def rollout_examples(records: Sequence[Mapping[str, Any]], reader: Reader, max_length: int) -> Examples:
    """In the order of their ids, whoever finished first."""
    ordered = sorted(records, key=lambda record: record["id"])
    train, held_out = (
        gather((reader.example(r, f"rollout {r['id']}") for r in ordered if r["split"] == split), max_length)
        for split in ("train", "held_out")
    )
    for found, key in ((train, "num_sequences"), (held_out, "held_out")):
        if not found.train:
            raise ValueError(
                f"draft.{key}: none of the sequences that were generated is of use ({found.num_skipped} have too few "
                "tokens); raise it, draft.max_length or sampling.max_tokens"
            )
    return Examples(
        train.train, held_out.train, train.num_skipped + held_out.num_skipped, train.num_cut + held_out.num_cut
    )
