"""Reward functions as users write them, working and broken ones. Some act on the text of a completion."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

NOT_A_FUNCTION = 1


def length(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def always_zero(completions: list[str], **columns: Any) -> list[float]:
    return [0.0 for _ in completions]


def relative(completions: list[str], **columns: Any) -> list[float]:
    """The share of completions in the batch that are shorter. Raises on "bad"."""
    if "bad" in completions:
        raise RuntimeError("bad\nin two lines")
    return [sum(len(other) < len(text) for other in completions) / len(completions) for text in completions]


def scripted(prompts: Any, completions: list[str], completion_ids: Any, **columns: Any) -> list[Any]:
    """Fails in the way that a completion of the batch names."""
    print("output of a reward function")
    sys.stdout.flush()
    if "hang" in completions:
        time.sleep(1000)
    if "raise" in completions:
        raise ValueError("on purpose")
    if "exit" in completions:
        os._exit(3)
    if "sys.exit" in completions:
        sys.exit(0)
    if "crash" in completions:
        os.kill(os.getpid(), 11)
    if "memory" in completions:
        raise MemoryError
    if "few" in completions:
        return []
    special = {"nan": float("nan"), "inf": float("inf"), "text": "1.0", "none": None}
    return [special.get(text, 1.0) for text in completions]


def scalar(completions: list[str], **columns: Any) -> Any:
    return 1.0


def by_index(completions: list[str], **columns: Any) -> dict[int, float]:
    return {i: 1.0 + i for i in range(len(completions))}


def all_different(completions: list[str], **columns: Any) -> set[float]:
    return {1.0 + i for i in range(len(completions))}


def one_for_all(completions: list[str], **columns: Any) -> list[float]:
    """Wrong on purpose: one value, for any number of completions."""
    if "raise" in completions:
        raise ValueError("on purpose")
    return [1.0]


def constant(completions: list[str], **columns: Any) -> list[float]:
    return [0.1] * len(completions)


async def asynchronous(completions: list[str], **columns: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(len(text)) for text in completions]


def check_arguments(
    prompts: Any, completions: Any, completion_ids: Any, answer: Any, extra: Any, **columns: Any
) -> list[float]:
    """1 for each sample with the arguments that TRL would pass."""
    rewards = []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if isinstance(prompt, str):
            right = completion == "yes" and answer[i] == "a" and extra[i] is None
        else:
            right = completion == [{"role": "assistant", "content": "yes"}] and answer[i] == "b" and extra[i] == [1]
        rewards.append(float(right and completion_ids[i] == [7, 8] and not columns))
    return rewards


def process(completions: Any, **columns: Any) -> list[float]:
    """The worker's process id, plus 0.5 if it has loaded torch."""
    return [float(os.getpid()) + 0.5 * ("torch" in sys.modules) for _ in completions]


def narrow(prompts: Any, completions: Any) -> list[float]:
    return [1.0 for _ in completions]


def many_a(prompts, completions, completion_ids, **columns):
    """The share of letters up to m: a random model emits some, and training can increase it."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(97 <= i <= 109 for i in map(ord, text)) / 12 for text in texts]


def sometimes_alike(prompts, completions, completion_ids, answer, **columns):
    """Problems with an odd answer give every sample the same reward."""
    return [len(set(text)) * (int(a) % 2 == 0) for text, a in zip(completions, answer, strict=True)]


def never(prompts, completions, completion_ids, **columns):
    """Hangs on real completions."""
    time.sleep(10_000 if completions else 0)
    return []


def _is_failing(completions):
    return [ord(text[0]) % 3 == 0 for text in completions]


def raises_on_some(completions, **columns):
    if any(_is_failing(completions)):
        raise ValueError("not this one")
    return [float(len(set(text))) for text in completions]


def nan_on_some(completions, **columns):
    return [
        float("nan") if failing else float(len(set(text)))
        for failing, text in zip(_is_failing(completions), completions, strict=True)
    ]


def dies_on_some(completions, **columns):
    if any(_is_failing(completions)):
        os.kill(os.getpid(), 9)
    return [float(len(set(text))) for text in completions]


def hangs_on_some(completions, **columns):
    if any(_is_failing(completions)):
        time.sleep(1000)
    return [float(len(set(text))) for text in completions]


def nan_on_held_out(prompts, completions, completion_ids, **columns):
    """NaN for held-out prompts. The first word of every prompt is the path of a file that lists them."""
    import json
    from pathlib import Path

    def reward(prompt):
        return float("nan") if prompt in json.loads(Path(prompt.split()[0]).read_text()) else float(len(prompt))

    return [reward(prompt) for prompt in prompts]


def dies_once(completions, marker, **columns):
    """The worker is killed in the first call, as by the system when memory runs out."""
    if not Path(marker[0]).exists():
        Path(marker[0]).touch()
        os.kill(os.getpid(), 9)
    return [1.0 for _ in completions]


def crashing_check(*limits):
    return lambda completion, columns: os._exit(3)


def finished_at(completions, **columns):
    """When the call ends, by a clock that all processes share. "slow" takes 3 s."""
    time.sleep(3.0 if "slow" in completions else 0.0)
    return [time.monotonic() for _ in completions]


def number_after_a_while(completions, **columns):
    """The number in the completion; larger numbers take less time."""
    time.sleep(0.05 * (8 - min(map(int, completions))))
    return [float(text) for text in completions]


def num_letters(completions, **columns):
    return [float(len(set(text))) for text in completions]


def sleeps_on_some(completions, **columns):
    if any(_is_failing(completions)):
        time.sleep(0.3)
    return num_letters(completions)


class WritesFile:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def hostile(completions: list[str], marker: list[str], **columns: Any) -> list[float]:
    """Sends invalid messages to the worker's parent. The completion names the kind of message."""
    connection = int(sys.argv[1])

    def send(data: bytes, end: bytes = b"\n") -> None:
        os.write(connection, data + end)

    for text in completions:
        if text == "pickle":
            send(pickle.dumps(("result", WritesFile(marker[0]))))
        elif text == "length":
            send(bytes(65 << 20), b"")
        elif text == "nested":
            send(b"[" * 1_000_000)
        elif text == "shape":
            send(b'{"result": 1}')
        elif text == "again":
            send(b'["loaded", null]')
        elif text == "twice":
            send(b'["result", [1.0]]')
        elif text == "object":
            send(b'["result", [{"reward": 1}]]')
        elif text == "huge":
            send(b'["result", [1' + b"0" * 400 + b"]]")
        elif text == "many":
            send(b'["result", [1, 2, 3]]')
    return [1.0 for _ in completions]


def raises(completions, **columns):
    return [column["missing"] for column in columns]
