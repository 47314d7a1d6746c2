"""Calls of Ray's actors, and what may become of them."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from paceline.cluster.ray_engine_actor import Stranger

LOST = (RayActorError, Stranger)  # the process that was called is gone, or is a new one that knows nothing


def answer(reference: ray.ObjectRef) -> Any:
    """What a call returned. What it raised is raised here as it was there; Ray's wrapping has its traceback."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise


def patient(method: Any) -> Any:
    """The same method of an actor that may just be starting, or starting again: Ray asks until it answers."""
    return method.options(max_task_retries=-1)


def answer_at_last(reference: ray.ObjectRef, who: str, max_restarts: int) -> Any:
    """What a patient call returned; ValueError when Ray has given its actor up."""
    try:
        return answer(reference)
    except ActorDiedError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{who} can't be started, or died more often than cluster.max_restarts = {max_restarts}; Ray's logs, in "
            f"/tmp/ray/session_latest/logs on its node, have its last words: {reason[:300]}"
        ) from None
