"""How often processes were restarted: for the metrics of every step."""

from __future__ import annotations

from paceline.cluster.ray_engine import RayEngine
from paceline.cluster.ray_rewarder import RayRewarder


class Restarts:
    """Since it was last asked. A learner that was itself restarted begins with that."""

    def __init__(self, engine: RayEngine, rewarder: RayRewarder, learner_restarted: bool) -> None:
        self._engine, self._rewarder, self._learner = engine, rewarder, int(learner_restarted)
        self._told = dict.fromkeys(self._counts(), 0)

    def __call__(self) -> dict[str, int]:
        before, self._told = self._told, self._counts()
        return {name: count - before[name] for name, count in self._told.items()}

    def _counts(self) -> dict[str, int]:
        return {
            "engine_restarts": self._engine.num_restarts,
            "reward_restarts": self._rewarder.num_restarts,
            "learner_restarts": self._learner,
        }
