"""Checks what this machine can run. Everything that is reported as ok was tried."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable

from paceline import native
from paceline.bench.process import available_memory
from paceline.doctor.finding import DEGRADED, MISSING, OK, Finding, Progress, no_progress

LIBRARIES = (
    "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf", "pydantic", "typer", "rich"
)  # fmt: skip
EXTRAS = {  # library: purpose
    "reasoning_gym": 'task.kind = "reasoning_gym"',
    "datasets": 'task.kind = "dataset"',
    "verifiers": 'task.kind = "verifiers"',
    "math_verify": "the reward `math`",
    "tensorboard": "train.tensorboard",
    "wandb": "train.wandb",
    "matplotlib": "plots",
    "ray": "clusters",
    "scipy": "tests",
    "hypothesis": "tests",
}


def check_machine(progress: Progress = no_progress) -> list[Finding]:
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "Python": _python, "libraries": _libraries, "torch": _torch, "kernels (compiles them at first)": _native,
        "CPU and memory": _machine, "cache and models": _cache, "GPU": _cuda, "vLLM": _vllm, "code sandbox": _sandbox,
        "optional libraries": _extras,
    }  # fmt: skip
    findings: list[Finding] = []
    for what, check in checks.items():
        progress(what)
        findings += check()
    return findings


def _python() -> Iterable[Finding]:
    yield Finding("Python", OK, f"{platform.python_version()} ({sys.executable})", required=True)


def _libraries() -> Iterable[Finding]:
    absent = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    versions = ", ".join(f"{name} {_version(name)}" for name in ("numpy", "transformers", "safetensors"))
    if absent:
        remedy = 'run in the repository: pip install -e ".[train]"'
        yield Finding("libraries", MISSING, f"not installed: {', '.join(absent)}", remedy, required=True)
    else:
        yield Finding("libraries", OK, versions, required=True)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _torch() -> Iterable[Finding]:
    try:
        import torch
    except Exception as error:  # a broken installation may raise any type
        yield Finding("torch", MISSING, f"import failed: {error}", "pip install torch", required=True)
        return
    yield Finding("torch", OK, f"{torch.__version__}, {torch.get_num_threads()} threads", required=True)


def _native() -> Iterable[Finding]:
    """Compile and load the kernels, and compare them with plain torch on a tiny model."""
    compiler = native.compiler()
    remedy = "install a C compiler (gcc or clang); without one Paceline uses plain torch, several times slower"
    if compiler is None:
        yield Finding("C compiler", DEGRADED, "none on the PATH", remedy)
        return
    yield Finding("C compiler", OK, compiler)
    for name in sorted(path.stem for path in native.SOURCES.glob("*.c")):
        try:
            native.load(name)
        except (native.NativeUnavailable, OSError) as error:
            yield Finding(f"kernels: {name}", DEGRADED, str(error).strip().splitlines()[0], remedy)
        else:
            yield Finding(f"kernels: {name}", OK, "compiled and loaded")
    yield _check_kernels()


def _check_kernels() -> Finding:
    try:
        difference = native_difference()
    except Exception as error:  # every error is a finding
        return Finding("kernels: self-check", DEGRADED, f"{type(error).__name__}: {error}", "set engine.native = false")
    if difference > 1e-4:
        remedy = "set engine.native = false, and report this machine's CPU and compiler"
        return Finding("kernels: self-check", DEGRADED, f"logits differ from plain torch by {difference:.1e}", remedy)
    return Finding("kernels: self-check", OK, f"largest difference to plain torch's logits: {difference:.0e}")


def native_difference() -> float:
    """The largest difference between the logits of compiled kernels and of plain torch, for a tiny random model."""
    import torch

    from paceline.model.config import ModelConfig
    from paceline.model.kernels import pack_for_inference
    from paceline.model.kv import BlockTable
    from paceline.model.paged import PagedDecoder, Span
    from paceline.model.weights import init

    config = ModelConfig(
        family="llama", vocab_size=96, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=16, norm_eps=1e-6, rope_theta=1e4, max_positions=64, tie_embeddings=True,
    )  # fmt: skip
    decoder = init(config).requires_grad_(False)  # plain torch first: packing can't be undone
    tokens = torch.arange(20).numpy()

    def logits() -> torch.Tensor:
        paged, table = PagedDecoder(decoder, 4), BlockTable()
        paged.pool.reserve(table, len(tokens))
        return paged.forward([Span(tokens, 0, table, 4)])

    plain = logits()
    pack_for_inference(decoder)
    return float((logits() - plain).abs().max())


def _machine() -> Iterable[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("CPU", OK, f"{platform.machine()}, {cores} cores")
    free = available_memory()
    if free is None:
        yield Finding("memory", OK, "free memory is unknown on this system")
    elif free < 2 << 30:
        yield Finding(
            "memory", DEGRADED, f"{free / 1e9:.1f} GB free", "end other programs; smollm2-135m needs about 2 GB"
        )
    else:
        yield Finding("memory", OK, f"{free / 1e9:.1f} GB free")


def _cache() -> Iterable[Finding]:
    from paceline.model.store import KNOWN

    cache = native.cache_dir()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK)
    elsewhere = "set PACELINE_CACHE to a writable folder with enough space"
    if not writable:
        yield Finding("cache", MISSING, f"{cache} is not writable", elsewhere, required=True)
    elif free < 2 << 30:
        yield Finding("cache", DEGRADED, f"{cache}, {free / 1e9:.1f} GB free", f"pulling needs 1.1 GB; {elsewhere}")
    else:
        yield Finding("cache", OK, f"{cache}, {free / 1e9:.1f} GB free")
    for name in KNOWN:
        if (cache / "models" / name).is_dir():
            yield Finding(f"model: {name}", OK, "pulled")
        else:
            yield Finding(f"model: {name}", MISSING, "not pulled yet", f"paceline pull {name}")


def _cuda() -> Iterable[Finding]:
    try:
        import torch

        if torch.cuda.is_available():
            yield Finding("CUDA", OK, f"{torch.cuda.get_device_name()}, {torch.cuda.device_count()} device(s)")
            yield _batch_invariance()
        else:
            yield Finding("CUDA", MISSING, "no device, or torch was built without CUDA", "not needed on a CPU")
    except Exception as error:
        yield Finding("CUDA", MISSING, str(error).splitlines()[0], "not needed on a CPU")


def _batch_invariance() -> Finding:
    """Compares products of this GPU's library with those of our kernels."""
    from paceline.build.config import load_config
    from paceline.build.model import invariant_obstacle

    name = "batch-invariant kernels"
    obstacle = invariant_obstacle(load_config(None, ["model.device=cuda", "model.dtype=bfloat16"]))
    if obstacle is not None:
        return Finding(name, DEGRADED, obstacle, "none needed: speculation changes tokens at near-ties only")
    try:
        from paceline.model.cuda.invariant_product import library_shares

        shares = " and ".join(f"{share:.0%}" for share in library_shares())
    except Exception as error:
        detail = (str(error) or repr(error)).splitlines()[0]
        return Finding(name, MISSING, detail, "free the GPU's memory, or install Triton")
    detail = f"torch's matrix products have the fixed order at {shares} of the step sizes, in one part and in two"
    return Finding(name, OK, detail)


def _vllm() -> Iterable[Finding]:
    from paceline.cluster import vllm_python

    try:
        python = vllm_python.find_python()
        yield Finding("vLLM", OK, f"{vllm_python.version(python)} ({python})")
    except ValueError as error:
        detail, _, remedy = str(error).partition("; ")
        yield Finding("vLLM", MISSING, detail, f'only for engine.kind = "vllm" and comparisons: {remedy}')


def _sandbox() -> Iterable[Finding]:
    from paceline.tasks.sandbox import SandboxUnavailable, isolation

    try:
        yield Finding("code sandbox", OK, f"{isolation('namespaces')}: programs have no network, files or processes")
    except SandboxUnavailable as no_namespaces:
        try:
            detail = f"no namespaces; {isolation('process')} is possible"
            yield Finding("code sandbox", DEGRADED, detail, str(no_namespaces).partition("; ")[2])
        except SandboxUnavailable as error:
            yield Finding("code sandbox", MISSING, str(error).splitlines()[0], "the reward `code` can't be used here")


def _extras() -> Iterable[Finding]:
    for name, purpose in EXTRAS.items():
        if importlib.util.find_spec(name) is not None:
            yield Finding(f"extra: {name}", OK, _version(name))
        else:
            yield Finding(
                f"extra: {name}", MISSING, "not installed", f"only for {purpose}: pip install {name.replace('_', '-')}"
            )
