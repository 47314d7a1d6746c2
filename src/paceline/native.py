"""Compiles the C files of `csrc/` once per machine and loads them with ctypes.

The compiler runs on the user's own machine, so `-march=native` is right and there is one source for x86 and
ARM. The library shares torch's OpenMP runtime: two runtimes on two cores would spin against each other.
Without a compiler `load` raises NativeUnavailable and callers use their slow twin; `paceline doctor` says so.
Nothing here needs torch to be installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
# -ffp-contract=off: an FMA happens where the source says so and nowhere else, so that every unrolled variant
# of a kernel rounds alike.
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"  # on ARM it also tunes
FLAGS = ("-O3", _NATIVE, "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-Wall")


class NativeUnavailable(RuntimeError):
    """No C compiler, or it failed; the message says which."""


def cache_dir() -> Path:
    """Where Paceline keeps what it can make again: models pulled, kernels compiled."""
    return Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline")


def compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")


def _openmp_of_torch() -> Path | None:
    """The OpenMP runtime that torch brings along, if any."""
    import importlib.util

    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent
    for folder in (root / "lib", root.parent / "torch.libs"):
        for pattern in ("libgomp*.so*", "libomp*.dylib"):
            for found in sorted(folder.glob(pattern)):
                return found
    return None


@cache
def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return platform.processor()


def build(name: str) -> Path:
    """Compile csrc/NAME.c unless the same source was compiled on this CPU before; returns the library's path."""
    source = SOURCES / f"{name}.c"
    cc = compiler()
    if cc is None:
        raise NativeUnavailable("no C compiler (cc, gcc or clang) on the PATH; install one for the fast CPU kernels")
    openmp = _openmp_of_torch()
    texts = b"".join(p.read_bytes() for p in sorted(SOURCES.glob("*.h"))) + source.read_bytes()
    identity = "\n".join((cc, *FLAGS, platform.machine(), _cpu(), str(openmp)))
    digest = hashlib.sha256(texts + identity.encode()).hexdigest()[:16]
    target = cache_dir() / "native" / f"{name}-{digest}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        out = Path(scratch) / "lib.so"
        if sys.platform == "darwin":
            openmp_flags = ["-Xpreprocessor", "-fopenmp", "-undefined", "dynamic_lookup"]
        elif openmp is not None:
            obj = Path(scratch) / "lib.o"
            _run([cc, *(f for f in FLAGS if f != "-shared"), "-fopenmp", "-c", str(source), "-o", str(obj)])
            # No -fopenmp at link time: the symbols come from torch's runtime, loaded globally below.
            _run([cc, "-shared", str(obj), "-o", str(out), "-lm"])
            os.replace(out, target)
            return target
        else:
            openmp_flags = ["-fopenmp"]
        _run([cc, *FLAGS, *openmp_flags, str(source), "-o", str(out), "-lm"])
        os.replace(out, target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NativeUnavailable(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")


@cache
def load(name: str) -> ctypes.CDLL:
    """The compiled csrc/NAME.c."""
    path = build(name)
    openmp = _openmp_of_torch()
    if openmp is not None:
        ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # clang asks for its own OpenMP runtime, which a torch built with gcc does not bring
        raise NativeUnavailable(f"{error}; set CC to a gcc") from error
