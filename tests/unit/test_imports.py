"""Imports point down only, and what promises to be light is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "paceline"
# A room may import rooms of lower floors, and those of its own floor that are named after it.
FLOORS: dict[str, int] = {
    "__init__": 0, "types": 0, "config": 0, "native": 0, "console": 0, "files": 0,
    "model": 1, "speculation": 1, "report": 1,
    "drafters": 2, "engine": 2, "tasks": 2,
    "draft": 3, "replay": 3, "rl": 4, "cluster": 4, "sim": 4,
    "build": 5, "bench": 6, "verify": 6, "doctor": 7, "cli": 8, "__main__": 9,
}  # fmt: skip
ALLOWED_BESIDE = {
    ("config", "types"),
    ("config", "files"),
    ("native", "types"),
    ("native", "__init__"),
    ("config", "__init__"),
}
WITHOUT_TORCH = ("types", "config", "native", "speculation", "report", "replay", "sim")
OUTSIDERS = ("vllm", "ray")


def imports(path: Path, text: str | None = None) -> list[tuple[str, bool]]:
    """The modules that a file imports, and whether only for type checkers. Imports inside functions count."""
    tree = ast.parse(text if text is not None else path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in for_types) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write paceline.…"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "paceline" else [module]
            found += [(name, id(node) in for_types) for name in names]
    return found


def room_of(module: str) -> str:
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "__init__"
    return name if name in FLOORS else "__init__"


def mistakes(path: Path, text: str | None = None) -> list[str]:
    relative = path.relative_to(ROOT)
    room = relative.parts[0].removesuffix(".py")
    assert room in FLOORS, f"{room}: a new room; give it a floor in {Path(__file__).name}"
    wrong = []
    for module, for_types in imports(path, text):
        top = module.split(".")[0]
        if top in OUTSIDERS and room != "cluster":
            wrong.append(f"{relative} imports {module}: only cluster/ may")
        if top == "torch" and room in WITHOUT_TORCH and not for_types:
            wrong.append(f"{relative} imports torch")
        if top != "paceline" or for_types:
            continue
        other = room_of(module)
        if other != room and FLOORS[other] >= FLOORS[room] and (room, other) not in ALLOWED_BESIDE:
            wrong.append(f"{relative} imports {module}: {room} may not know {other}")
    return wrong


def test_imports_point_down():
    assert [wrong for path in sorted(ROOT.rglob("*.py")) for wrong in mistakes(path)] == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("engine/engine.py", "from paceline.drafters.suffix import SuffixDrafter"),
        ("engine/engine.py", "def f():\n    import paceline.drafters.suffix"),
        ("drafters/suffix.py", "from paceline.engine import accept"),
        ("model/decoder.py", "from paceline.engine.sequence import Sequence"),
        ("speculation/policy.py", "import torch"),
        ("report/plot.py", "from torch import Tensor"),
        ("types.py", "from paceline import config"),
        ("engine/engine.py", "from paceline import build"),
        ("bench/rollout.py", "import vllm"),
        ("build.py", "from ray import remote"),
    ],
)
def test_a_wrong_import_is_caught(file, text):
    assert len(mistakes(ROOT / file, text)) == 1


def test_types_only_imports_are_free():
    text = "if TYPE_CHECKING:\n    import torch\n    from paceline.build import build_engine"
    assert mistakes(ROOT / "speculation/policy.py", text) == []


LIGHT = ["types", "config", "native", "speculation.batch", "speculation.policy", "speculation.metrics"]


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ([*LIGHT, "report.table", "report.plot"], ["torch", "transformers", "matplotlib"]),
        (["drafters"], ["torch", "numpy"]),
        (["cli"], ["torch", "transformers", "matplotlib"]),
    ],
)
def test_light_modules_stay_light(modules, heavy):
    """In a fresh interpreter, so that what they import in turn counts too."""
    program = f"import sys, {', '.join(f'paceline.{m}' for m in modules)}\nprint(sys.modules.keys() & {heavy!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
