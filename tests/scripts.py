"""A script of benchmarks/ as a module, for tests of what it is made of."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def load_script(name: str) -> ModuleType:
    """`name`: its path under benchmarks/."""
    path = Path(__file__).parents[1] / "benchmarks" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
