"""Rollouts to train a head on: the engine generates completions of the task's prompts, and each is written to
rollouts.jsonl as soon as it is complete.

Invariants: the noise key of a sequence is (seed, split, problem, sample), so its tokens do not depend on scheduling or
interruptions; no training sequence is a completion of a held-out problem.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.config import DraftSection
from paceline.draft.data import Examples, Reader, collect_examples
from paceline.engine.engine import LocalEngine
from paceline.rl.folder import RunFolder
from paceline.rl.order import Shares
from paceline.tasks.task import Problem, Task
from paceline.types import Request, SamplingParams, noise_key

Record = dict[str, Any]


def rollout_requests(
    task: Task, task_weights: Mapping[str, float], section: DraftSection, tokenizer: Any, sampling: SamplingParams
) -> dict[str, list[Request]]:
    """Requests by split. Request ids are unique over both splits. Samples of one problem are consecutive, so that the
    engine computes its prompt once. `task_weights`: by label, if there are several tasks."""
    if not task.held_out:
        raise ValueError("task.held_out = 0: acceptance is measured on held-out problems; raise it")
    if any(problem.make_agent is not None for problem in task.train):
        raise ValueError(
            'draft.data = "rollouts": not available with environments and agents, which have several turns; train a '
            "run and set draft.data to its rollouts.jsonl"
        )
    found: dict[str, list[Request]] = {}
    num_requests = 0
    for split, problems, num in (
        ("train", task.train, section.num_sequences),
        ("held_out", task.held_out, section.held_out),
    ):
        found[split] = []
        shares = _problems_by_task(problems, num, task_weights)
        samples = [each for of_task, share in shares for each in _samples_per_problem(of_task, share)]
        for i, (problem, num_samples) in enumerate(samples):
            ids = problem.encode(tokenizer)
            params = replace(sampling, max_tokens=problem.max_tokens or sampling.max_tokens)
            for sample in range(num_samples):
                key = noise_key(section.seed, "draft", split, i, sample)
                found[split].append(Request(num_requests, ids, params, key, problem.name))
                num_requests += 1
    return found


def _problems_by_task(
    problems: Sequence[Problem], num: int, weights: Mapping[str, float]
) -> list[tuple[Sequence[Problem], int]]:
    """The problems of each task with some, and its share of `num` samples."""
    if not weights:
        return [(problems, num)]
    by_task = {label: [problem for problem in problems if problem.task == label] for label in weights}
    present = [label for label in weights if by_task[label]]
    counts = Shares([weights[label] for label in present]).counts(num)
    return [(by_task[label], count) for label, count in zip(present, counts, strict=True)]


def _samples_per_problem(problems: Sequence[Problem], num: int) -> Iterator[tuple[Problem, int]]:
    """Distribute `num` samples evenly over the problems; the first ones may have one more."""
    each, more = divmod(num, len(problems))
    for i, problem in enumerate(problems[:num]):
        yield problem, each + (i < more)


def generate(
    make_engine: Callable[[], LocalEngine],
    requests: Mapping[str, Sequence[Request]],
    folder: RunFolder,
    between: Callable[[int, int], None] = lambda done, total: None,
) -> list[Record]:
    """The records of all requests. Those that are missing in the folder's rollouts are generated and appended there.
    `between(num_done, num_total)` is called between steps and may raise to stop. Requests that the engine refuses,
    because the prompt is too long, get an empty record."""
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


def num_complete_bytes(folder: RunFolder) -> int:
    """Size of rollouts.jsonl without an incomplete last line, which an interrupted process may leave."""
    path = folder.path / "rollouts.jsonl"
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


def rollout_examples(records: Sequence[Mapping[str, Any]], reader: Reader, max_length: int) -> Examples:
    """Examples in the order of their request ids."""
    ordered = sorted(records, key=lambda record: record["id"])
    train, held_out = (
        collect_examples((reader.example(r, f"rollout {r['id']}") for r in ordered if r["split"] == split), max_length)
        for split in ("train", "held_out")
    )
    for found, key in ((train, "num_sequences"), (held_out, "held_out")):
        if not found.train:
            raise ValueError(
                f"draft.{key}: all generated sequences are too short ({found.num_skipped}); raise draft.{key}, "
                "draft.max_length or sampling.max_tokens"
            )
    return Examples(
        train.train,
        held_out.train,
        train.num_skipped + held_out.num_skipped,
        train.num_truncated + held_out.num_truncated,
    )
