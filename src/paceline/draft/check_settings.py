"""Finds settings with which a head can't be trained online."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config import Config


def online_problems(config: Config) -> Iterator[str]:
    online = config.draft.online
    if online == "off":
        return
    if not config.speculation.uses_head:
        yield (
            f'draft.online = "{online}": only a head can be trained, but speculation.method = '
            f'"{config.speculation.method}"; use "eagle3", "dspark" or "hybrid", or draft.online = "off"'
        )
    if config.learner.model == "transformers":
        yield (
            f'draft.online = "{online}": a head is trained on the hidden states of Paceline\'s own decoder; with '
            'learner.model = "transformers" set draft.online = "off"'
        )
