"""An environment in a process of its own (`task.isolation = "process"`). The process is killed if it hangs, and at the
end of its sample. Messages and turns are sent as in `pool`: nothing that the process sends is executed here.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.chat.messages import Message, Prompt, Tool
from paceline.tasks.agent import AgentFailed
from paceline.tasks.checks import import_path
from paceline.tasks.pool import Failed, Worker, WorkerLost
from paceline.tasks.task import Turn

GRACE_S = 5.0  # the agent's own time limit comes first


class IsolatedEnv:
    """An `Env`, for `EnvAgent`, which calls `close` also if a method hangs."""

    def __init__(self, path: str, arguments: Mapping[str, Any], step_timeout_s: float) -> None:
        """`path`: module:EnvClass, with these arguments."""
        self._job = pickle.dumps((serve_env, (path, dict(arguments))))
        self._timeout_s = step_timeout_s + GRACE_S
        self._worker: Worker | None = None
        self._is_closed = False
        self.tools: Sequence[Tool] = ()
        self.chat_template_kwargs: Mapping[str, Any] = {}

    def reset(self) -> Prompt:
        self._worker = Worker()
        if self._is_closed:  # while the process was started, in another thread
            self._worker.kill()
        opened = self._call("reset")
        self.tools, self.chat_template_kwargs = opened["tools"], opened["chat_template_kwargs"]
        prompt: Prompt = opened["prompt"]
        return prompt

    def step(self, message: Message) -> Turn:
        turn = self._call("step", message)
        return Turn(turn["observation"], turn["reward"])

    def close(self) -> None:
        self._is_closed = True
        if self._worker is not None:
            self._worker.kill()

    def _call(self, method: str, *args: Any) -> Any:
        assert self._worker is not None
        try:
            reply = self._worker.call(self._job, pickle.dumps((self._job, (method, *args))), self._timeout_s)
        except WorkerLost as error:
            raise AgentFailed(f"its environment {error}") from None
        if isinstance(reply, Failed):
            raise AgentFailed(f"its environment {reply.reason}")
        return reply


def serve_env(path: str, arguments: Mapping[str, Any]) -> Callable[..., dict[str, Any]]:
    """In the process: calls the environment's methods, and returns what they do as JSON."""
    env_class, loop = import_path(path), asyncio.new_event_loop()
    made: list[Any] = []

    def result_of(value: Any) -> Any:
        return loop.run_until_complete(value) if inspect.isawaitable(value) else value

    def call(method: str, *args: Any) -> dict[str, Any]:
        if method == "reset":
            env = env_class(**arguments)
            made.append(env)
            prompt = result_of(env.reset())
            kwargs = dict(getattr(env, "chat_template_kwargs", {}))
            return {"prompt": prompt, "tools": list(getattr(env, "tools", ())), "chat_template_kwargs": kwargs}
        turn = result_of(made[0].step(*args))
        return {"observation": turn.observation, "reward": float(turn.reward)}

    return call
