"""Calls to Ray actors and their failures."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from paceline.cluster.ray_engine_actor import UnknownSession

ACTOR_LOST = (RayActorError, UnknownSession)  # the called process died, or was restarted and has lost its state


def get_result(reference: ray.ObjectRef) -> Any:
    """The result of a call. Exceptions are raised with their original type; their cause has the remote traceback."""
    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise


def with_retries(method: Any) -> Any:
    """The same actor method; Ray repeats the call while the actor starts or restarts."""
    return method.options(max_task_retries=-1)


def get_when_started(reference: ray.ObjectRef, name: str, max_restarts: int) -> Any:
    """The result of a call made `with_retries`. Raise ValueError if Ray gives up restarting the actor."""
    try:
        return get_result(reference)
    except ActorDiedError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{name} can't be started, or died more often than cluster.max_restarts = {max_restarts}; see Ray's logs "
            f"in /tmp/ray/session_latest/logs on its node: {reason[:300]}"
        ) from None
