"""Packages import only packages of lower levels, no modules import each other in a circle, and light modules import no
heavy libraries. Also: the library installs no signal handlers."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "paceline"
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
# A package (or top-level module) may import packages of lower levels.
LEVELS: dict[str, int] = {
    "structured_outputs": -1, "__init__": 0, "types": 0, "console": 0, "files": 0, "other_names": 0,
    "config_io": 1, "native": 1, "outputs": 1, "config": 2,
    "chat": 3, "model": 3, "speculation": 3, "report": 3,
    "drafters": 4, "engine": 4, "tasks": 4,
    "replay": 5, "rl": 5, "serve": 5, "agents": 6, "draft": 6, "cluster": 6, "sim": 6,
    "build": 7, "bench": 8, "llm": 8, "async_llm": 9, "verify": 8, "doctor": 9, "cli": 10, "__main__": 11,
}  # fmt: skip
WITHOUT_TORCH = (
    "structured_outputs", "types", "chat", "config", "config_io", "other_names", "native", "speculation", "report",
    "replay", "sim",
)  # fmt: skip
ONLY_IN_CLUSTER = ("vllm", "ray")


def imports(path: Path, text: str | None = None) -> list[tuple[str, bool]]:
    """The modules that a file imports, also in functions, and whether only for type checkers."""
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
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(name if name in MODULES else node.module or "", id(node) in for_types) for name in names]
    return found


def package_of(module: str) -> str:
    name = (*module.split("."), "__init__")[1]
    return name if name in LEVELS else "__init__"


def errors(path: Path, text: str | None = None) -> list[str]:
    relative = path.relative_to(ROOT)
    package = relative.parts[0].removesuffix(".py")
    assert package in LEVELS, f"{package}: a new package; give it a level in {Path(__file__).name}"
    found = []
    for module, for_types in imports(path, text):
        top = module.split(".")[0]
        if top in ONLY_IN_CLUSTER and package != "cluster":
            found.append(f"{relative} imports {module}: only cluster/ may")
        if top == "torch" and package in WITHOUT_TORCH and not for_types:
            found.append(f"{relative} imports torch")
        if top != "paceline" or for_types:
            continue
        other = package_of(module)
        if other != package and LEVELS[other] >= LEVELS[package]:
            found.append(f"{relative} imports {module}: {package} may not import {other}")
    return found


def test_imports_are_of_lower_levels():
    assert [error for path in MODULES.values() for error in errors(path)] == []


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
        ("config.py", "from paceline.rl.check_settings import audit_problems"),
        ("rl/check_settings.py", "from paceline.build.config import load_config"),
        ("engine/engine.py", "from paceline import build"),
        ("bench/rollout.py", "import vllm"),
        ("build.py", "from ray import remote"),
    ],
)
def test_wrong_import_is_an_error(file, text):
    assert len(errors(ROOT / file, text)) == 1


def test_imports_for_types_are_allowed():
    text = "if TYPE_CHECKING:\n    import torch\n    from paceline.build import build_engine"
    assert errors(ROOT / "speculation/policy.py", text) == []


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other():
    """Imports in functions and for type checkers count too."""
    graph = {
        name: {module for module, _ in imports(path) if module in MODULES and module != name}
        for name, path in MODULES.items()
        if name != "paceline"  # its names are imported when they are used
    }
    assert sum(map(len, graph.values())) > len(graph), "imports were found"
    assert find_circle(graph) == []
    graph["paceline.types"].add("paceline.cli.app")
    assert "paceline.types" in find_circle(graph)


# These set how their own processes react to signals: workers, sandboxes, and the commands.
WITH_SIGNALS = ("cli", "cluster/vllm_extension.py", "replay/run.py", "tasks/pool.py", "tasks/supervisor.py")


def test_library_installs_no_signal_handlers():
    """An engine also runs in threads and in actors. Only the main thread may set a handler, and the program decides."""
    found = [
        path.relative_to(ROOT).as_posix()
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("signal.signal", "signal.sigaction")
    ]
    assert "cli/app.py" in found
    assert [path for path in found if not path.startswith(WITH_SIGNALS)] == []


LIGHT = [
    "types",
    "outputs",
    "config",
    "config_io",
    "native",
    "speculation.batch",
    "speculation.policy",
    "speculation.metrics",
]


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ([*LIGHT, "report.table", "report.plot"], ["torch", "transformers", "matplotlib"]),
        (["drafters"], ["torch", "numpy"]),
        (["build.config", "build.replay", "build.task", "cli"], ["torch", "transformers", "matplotlib", "vllm", "ray"]),
        (["build.cluster", "build.run"], ["vllm", "ray"]),
    ],
)
def test_light_modules_stay_light(modules, heavy):
    """In a new interpreter, to see indirect imports too."""
    program = f"import sys, {', '.join(f'paceline.{m}' for m in modules)}\nprint(sys.modules.keys() & {heavy!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
