"""A tool server of `verifiers`: it runs in a process of its own, and all rollouts share it."""

from __future__ import annotations

import verifiers.v1 as vf


class CountingTools(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    async def count(self, text: str) -> str:
        """How many letters a text has."""
        return str(len(text))


if __name__ == "__main__":
    CountingTools.run()
