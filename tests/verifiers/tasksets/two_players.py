"""An environment in which the policy would play two agents."""

from __future__ import annotations

import verifiers.v1 as vf
from letters import ChatHarness, LetterTaskset


class TwoPlayersConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class TwoPlayersEnv(vf.Env[TwoPlayersConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.first.run(task)
        await agents.second.run(task)


class Letters(LetterTaskset):
    """A module exports the taskset that it defines."""


__all__ = ["ChatHarness", "Letters", "TwoPlayersEnv"]
