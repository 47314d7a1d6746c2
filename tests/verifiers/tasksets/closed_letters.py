"""An environment whose resources can't be started."""

from __future__ import annotations

import verifiers.v1 as vf
from letters import ChatHarness, LetterTaskset


class ClosedEnv(vf.SingleAgentEnv):
    async def start(self) -> None:
        raise OSError("no port is free")


class Letters(LetterTaskset):
    """A module exports the taskset that it defines."""


__all__ = ["ChatHarness", "ClosedEnv", "Letters"]
