"""A headless browser for the tests of the report's pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser, require_browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    running = Browser(require_browser(), tmp_path_factory.mktemp("profile"))
    yield running
    running.close()
