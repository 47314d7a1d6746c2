"""Compiles the C files of `csrc/` once per machine and loads them with ctypes.

Compiling on the user's machine allows `-march=native`, and one source for x86 and ARM. The libraries use torch's OpenMP
runtime: two runtimes would compete for the cores. Without a compiler `load` raises NativeUnavailable, and callers use
their reference implementation, which is slower; `paceline doctor` reports it. torch need not be installed.
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
# -ffp-contract=off: FMAs only where the source has them, so that all unrolled variants of a kernel round the same way.
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"  # on ARM -mcpu also tunes
FLAGS = ("-O3", _NATIVE, "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-Wall")


class NativeUnavailable(RuntimeError):
    """There is no C compiler, or it failed."""


def cache_dir() -> Path:
    """Folder for downloaded models, compiled kernels and measured cost tables."""
    return Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline")


def compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")


def _openmp_of_torch() -> Path | None:
    """The OpenMP runtime in torch's package, if any."""
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
    """Compile csrc/NAME.c, unless a library of the same source, compiler and CPU is cached. Returns its path."""
    source = SOURCES / f"{name}.c"
    cc = compiler()
    if cc is None:
        raise NativeUnavailable("no C compiler (cc, gcc or clang) on the PATH; install one for the fast CPU kernels")
    openmp = _openmp_of_torch()
    code = b"".join(p.read_bytes() for p in sorted(SOURCES.glob("*.h"))) + source.read_bytes()
    identity = "\n".join((cc, *FLAGS, platform.machine(), _cpu(), str(openmp)))
    digest = hashlib.sha256(code + identity.encode()).hexdigest()[:16]
    target = cache_dir() / "native" / f"{name}-{digest}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        out = Path(scratch) / "lib.so"
        if openmp is not None and sys.platform != "darwin":
            obj = Path(scratch) / "lib.o"
            _run([cc, *(f for f in FLAGS if f != "-shared"), "-fopenmp", "-c", str(source), "-o", str(obj)])
            # No -fopenmp for the linker: `load` loads torch's runtime globally, which has the symbols.
            _run([cc, "-shared", str(obj), "-o", str(out), "-lm"])
        else:
            macos = sys.platform == "darwin"
            flags = ["-Xpreprocessor", "-fopenmp", "-undefined", "dynamic_lookup"] if macos else ["-fopenmp"]
            _run([cc, *FLAGS, *flags, str(source), "-o", str(out), "-lm"])
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
    except OSError as error:  # clang needs its own OpenMP runtime, which torch does not include if built with gcc
        raise NativeUnavailable(f"{error}; set CC to a gcc") from error
