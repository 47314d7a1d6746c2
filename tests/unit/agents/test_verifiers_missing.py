"""Without `verifiers`, or with another version of it, task.kind = "verifiers" says what to install."""

from __future__ import annotations

from importlib import metadata

import pytest

from paceline.build.task import build_task
from paceline.config import Config, TaskSection

CONFIG = Config(task=TaskSection(kind="verifiers", name="letters"))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, r'task.kind = "verifiers" needs the verifiers library; pip install "verifiers~=0.4.0"'),
        ("0.3.1", r'needs verifiers 0.4, but 0.3.1 is installed; pip install "verifiers~=0.4.0"'),
        ("0.40.0", r"needs verifiers 0.4, but 0.40.0 is installed"),
    ],
)
def test_the_version_is_checked_first(found, message, monkeypatch):
    def version(name: str) -> str:
        assert name == "verifiers"
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ValueError, match=message):
        build_task(CONFIG)
