"""Checks what the settings of a run require: model and head, vLLM, Ray and its nodes, weight transfer.

Nothing is downloaded, and no run is started. Only what the settings need is checked, and all of it is required.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import Config, TaskSettings
from paceline.doctor.finding import DEGRADED, MISSING, OK, Finding, Progress, no_progress

if TYPE_CHECKING:
    from paceline.cluster.ray_cluster import Plan
    from paceline.model.hf_shape import Shape

LOOPBACK = "127.0.0.1"


# The oldest versions that work, as in pyproject.toml.
MIN_VLLM, MIN_RAY = "0.11", "2.52"


def check_run(config: Config, progress: Progress = no_progress, only_required: bool = False) -> list[Finding]:
    """`only_required`: leave out what only other settings need."""
    progress("device and model")
    findings = [*_device(config), *_model(config)]
    if by_sandbox := {task.reward.sandbox: task for task in config.tasks if "code" in task.reward.functions}:
        progress("code sandbox")
        findings += [_sandbox(task) for task in by_sandbox.values()]
    if config.engine.kind == "vllm":
        progress("vLLM (imports it)")
        findings += [*_vllm(config), *_shared_memory(config)]
    host, on_ray = LOOPBACK, config.cluster.kind == "ray"
    if on_ray:
        progress("Ray")
        rows, host = _ray(config)
        findings += rows
    if on_ray or not only_required:
        progress("weight transfer between processes")
        findings.append(_weight_transfer(host, required=on_ray))
    return findings


def problem(name: str, detail: object, remedy: str = "") -> Finding:
    """A missing requirement. Without `remedy`, the text after the semicolon of our error messages is the remedy. Some
    messages have none: there, the cause says what to do."""
    text, _, rest = str(detail).partition("; ")
    return Finding(f"run: {name}", MISSING, text, remedy or rest, required=True)


def ok(name: str, detail: str) -> Finding:
    return Finding(f"run: {name}", OK, detail, required=True)


def _device(config: Config) -> Iterable[Finding]:
    """Checks the device, unless the run is on another Ray cluster."""
    import torch

    from paceline.build.model import check_device, check_training_dtype

    if config.cluster.kind == "ray" and config.cluster.address is not None:
        return
    try:
        check_device(config)
        check_training_dtype(config)
    except ValueError as error:
        yield problem("device", error)
        return
    if config.model.device == "cpu":
        yield ok("device", "cpu")
        return
    required = config.engine.tensor_parallel_size if config.cluster.kind == "none" else 1
    here = torch.cuda.device_count()
    if here < required:
        yield problem("device", f"engine.tensor_parallel_size = {required}, but there are {here} GPUs", "lower it")
    else:
        yield ok("device", f"{config.model.device}, {here} GPU(s), {torch.cuda.get_device_name()}")


def _model(config: Config) -> Iterable[Finding]:
    from paceline.model.hf_shape import read_shape
    from paceline.model.store import load_tokenizer
    from paceline.model.weights import read_config

    try:
        directory = local_directory(config.model.name)
        model = read_shape(directory)
        if config.engine.kind == "local":
            read_config(directory)  # raises for models that the local engine does not support
        num_bytes = sum(_tensor_sizes(config, directory))
        load_tokenizer(directory)
    except (ValueError, OSError) as error:
        yield problem("model", error)
        return
    yield ok("model", f"{directory}, {num_bytes / 1e9:.2f} GB as {config.model.dtype}")
    yield from _drafter(config, directory, model)


def _drafter(config: Config, directory: Path, model: Shape) -> Iterable[Finding]:
    from paceline.build.drafter import build_head
    from paceline.build.vllm import vllm_options
    from paceline.model.weights import read_config

    speculation = config.speculation
    name = "head" if speculation.uses_head else "drafter"
    on_cpu = config.changed(model={"device": "cpu"})
    try:
        if speculation.uses_head:
            head = build_head(on_cpu, read_config(directory)).config
            yield ok(name, f"reads layers {list(head.layer_ids)} of {directory.name}")
        elif speculation.method == "draft_model" and not str(speculation.draft_model).startswith("layers:"):
            draft_directory = local_directory(str(speculation.draft_model))
            read_config(draft_directory)
            yield ok(name, str(draft_directory))
        if config.engine.kind == "vllm":
            vllm_options(on_cpu, directory, model)
    except (ValueError, OSError) as error:
        yield problem(name, error)


def local_directory(name: str) -> Path:
    """The directory of a model, without downloading it."""
    from huggingface_hub import snapshot_download

    from paceline.model.store import HUB_FILES, KNOWN, cached, resolve

    absent = ValueError(f"{name} is not on this machine; paceline pull {name}")
    if Path(name).expanduser().is_dir() or cached(name) is not None:
        return resolve(name)
    if name in KNOWN:
        raise absent
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True))
    except Exception:  # huggingface_hub raises many types
        raise absent from None


def _tensor_sizes(config: Config, directory: Path) -> list[int]:
    """Bytes of each tensor in model.dtype, as it is transferred."""
    import torch

    from paceline.model.weights import tensors_in

    itemsize = getattr(torch, config.model.dtype).itemsize
    with tensors_in(directory) as (shapes, _):
        return [math.prod(shape) * itemsize for shape in shapes.values()]


def _sandbox(task: TaskSettings) -> Finding:
    """Checks this machine only. Reward workers on other machines check theirs when the run starts."""
    from paceline.tasks.sandbox import SandboxUnavailable, isolation

    try:
        found = isolation(task.reward.sandbox)
    except SandboxUnavailable as error:
        return problem("code sandbox", error)
    if found.not_isolated:
        remedy = f'{task.reward_key}.sandbox = "namespaces" isolates more, if the machine allows it'
        return Finding("run: code sandbox", DEGRADED, str(found), remedy)
    return ok("code sandbox", str(found))


def _vllm(config: Config) -> Iterable[Finding]:
    from paceline.cluster.vllm_probe import vllm_facts

    remedy = "run paceline in an environment that has vLLM (`make setup-vllm` makes .venv-vllm)"
    try:
        facts = vllm_facts()
    except ValueError as error:
        yield problem("vLLM", f'engine.kind = "vllm": {error}', remedy)
        return
    version = facts["version"]
    if is_older(version, MIN_VLLM):
        yield problem("vLLM", f'engine.kind = "vllm": vLLM {version} is older than {MIN_VLLM}', "install a newer vLLM")
    elif facts["weight_transfer"]:
        yield ok("vLLM", f"{version}, with the weight transfer API")
    elif config.draft.online != "off":
        detail = f"{version}, without the weight transfer API, which updates of a head need"
        yield problem("vLLM", detail, "install a newer vLLM")
    else:
        remedy = "none needed: the policy is updated by reload_weights; draft.online needs a newer vLLM"
        yield Finding("run: vLLM", DEGRADED, f"{version}, without the weight transfer API", remedy)


def _shared_memory(config: Config) -> Iterable[Finding]:
    """Writes a bucket as large as the run's largest one, and reads it back."""
    import torch

    from paceline.cluster.vllm_shared import FOLDERS, MAX_BYTES, read_bucket, write_buckets

    with contextlib.suppress(ValueError, OSError):  # `_model` reports a model that can't be read
        sizes = _tensor_sizes(config, local_directory(config.model.name))
        num_bytes = max(min(sum(sizes), MAX_BYTES), *sizes)
        content = torch.zeros(num_bytes, dtype=torch.uint8)
        content[:: 1 << 12] = 7  # a mark on every page
        try:
            for bucket in write_buckets([("content", content)]):
                folder = Path(bucket["path"]).parent
                ((_, received),) = read_bucket(**bucket, device=torch.device("cpu"))
        except ValueError as error:
            yield problem("shared memory", error)
            return
        size = f"{num_bytes / 1e6:.0f} MB"
        if not received.equal(content):
            yield problem("shared memory", f"{folder}: {size} were not read back as written", "set another TMPDIR")
        elif str(folder) == FOLDERS[0]:
            yield ok("shared memory", f"{folder} has space for a bucket of {size}")
        else:
            remedy = (
                f"make {FOLDERS[0]} larger (docker run --shm-size, a Memory emptyDir); until then weights go by disk"
            )
            yield Finding("run: shared memory", DEGRADED, f"{FOLDERS[0]} has not enough space for {size}", remedy)


def is_older(version: str, minimum: str) -> bool:
    one, other = ([int(part) for part in re.findall(r"\d+", text)[:2]] for text in (version, minimum))
    return one < other


def _ray(config: Config) -> tuple[list[Finding], str]:
    """The findings, and this machine's address in the cluster."""
    from paceline.build.cluster import build_plan
    from paceline.cluster.ray_probe import cluster_facts, ray_version

    try:
        installed = ray_version()
    except ValueError as error:
        return [problem("Ray", f'cluster.kind = "ray": {error}', 'pip install -e ".[ray]"')], LOOPBACK
    if is_older(installed, MIN_RAY):
        detail = f'cluster.kind = "ray": Ray {installed} is older than {MIN_RAY}'
        return [problem("Ray", detail, f"pip install 'ray>={MIN_RAY}'")], LOOPBACK
    address = config.cluster.address
    if address is None:
        return [
            ok("Ray", f"{installed}; the run starts it on this machine"),
            _local_resources(build_plan(config)),
        ], LOOPBACK
    try:
        facts = cluster_facts(address, [*_local_files(config), str(Path.cwd())])
    except ValueError as error:
        remedy = "start Ray (`ray start --head`, docs/how-to/ray.md), run this on a Ray node, or unset cluster.address"
        return [problem("Ray", f"cluster.address = {address!r}: {error}", remedy)], LOOPBACK
    found = ok("Ray", f"{installed}; {len(facts['nodes'])} node(s) at {address}")
    return [found, _cluster_resources(build_plan(config), facts), _nodes(config, facts["nodes"])], str(facts["host"])


def _local_files(config: Config) -> list[str]:
    """Files and directories in the settings that exist on this machine."""
    from paceline.build.config import with_absolute_paths

    config = with_absolute_paths(config)
    speculation = config.speculation
    of_tasks = [name for task in config.tasks for name in (task.section.name, task.reward.model)]
    named = (config.model.name, *of_tasks, speculation.head, speculation.cost_table)
    return [name for name in named if name is not None and Path(name).is_absolute()]


def _required_resources(plan: Plan) -> dict[str, float]:
    return {name: sum(bundle.get(name, 0) for bundle in plan.bundles) for name in ("CPU", "GPU")}


def _format_resources(resources: dict[str, float]) -> str:
    return f"{resources['CPU']:g} CPUs and {resources['GPU']:g} GPUs"


RESOURCES_REMEDY = (
    "lower cluster.num_engines, num_learners, num_reward_workers, cpus_per_… or gpus_per_…, or start Ray with more"
)


def _local_resources(plan: Plan) -> Finding:
    """Too many CPUs only make the run slower: the number that Ray is started with need not be the real one."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    required, here = _required_resources(plan), {"CPU": float(cores), "GPU": float(torch.cuda.device_count())}
    detail = f"{_format_resources(required)} required, {_format_resources(here)} available"
    if required["GPU"] > here["GPU"]:
        return problem("resources", detail, RESOURCES_REMEDY)
    if required["CPU"] > here["CPU"]:
        return Finding("run: resources", DEGRADED, detail, RESOURCES_REMEDY)
    return ok("resources", detail)


def _cluster_resources(plan: Plan, facts: dict[str, Any]) -> Finding:
    required, free = _required_resources(plan), facts["free"]
    nodes = [node["resources"] for node in facts["nodes"]]
    total = {name: sum(node[name] for node in nodes) for name in required}
    detail = f"{_format_resources(required)} required, {_format_resources(total)} available"
    if any(required[name] > total[name] for name in required):
        return problem("resources", detail, RESOURCES_REMEDY)
    for bundle in plan.bundles:
        if not any(all(node[name] >= number for name, number in bundle.items()) for node in nodes):
            detail += f", but no node has {_format_resources({'GPU': 0, **bundle})} for one process"
            return problem("resources", detail, RESOURCES_REMEDY)
    if any(required[name] > free[name] for name in required):
        detail += f", {_format_resources(free)} free"
        return Finding("run: resources", DEGRADED, detail, "wait until other runs on the cluster end")
    return ok("resources", detail)


def _nodes(config: Config, nodes: list[dict[str, Any]]) -> Finding:
    """Checks that all nodes have the same packages and files."""
    needed = {"paceline", "torch"} | ({"vllm"} if config.engine.kind == "vllm" else set())
    for node in nodes:
        host, versions, absent = node["host"], node["versions"], node["absent"]
        if lacking := sorted(name for name in needed if versions[name] is None):
            return problem("nodes", f"{host} has no {', '.join(lacking)}", "install the same environment on all nodes")
        detail, shared = f"{host} does not have {', '.join(absent)}", "a file system that all nodes share"
        if absent and absent != [str(Path.cwd())]:
            return problem("nodes", detail, f"put model, data and runs into {shared}")
        if absent:
            return Finding("run: nodes", DEGRADED, detail, f"start from {shared}, or give --run a folder in one")
    for one, other in itertools.pairwise(nodes):
        if differing := [name for name in one["versions"] if other["versions"][name] != one["versions"][name]]:
            listed = ", ".join(f"{name} {one['versions'][name]} and {other['versions'][name]}" for name in differing)
            detail = f"{one['host']} and {other['host']} differ: {listed}"
            return Finding("run: nodes", DEGRADED, detail, "install the same environment on all nodes")
    versions = ", ".join(f"{name} {version}" for name, version in nodes[0]["versions"].items() if version is not None)
    return ok("nodes", f"all have {versions}, and the files in the settings")


def _weight_transfer(host: str, required: bool) -> Finding:
    """Checks that two processes can exchange weights. Ray and torchrun's ranks need it."""
    from paceline.cluster.channel_probe import measure_transfer

    try:
        num_bytes, seconds = measure_transfer(host)
    except ValueError as error:
        detail = f"two processes at {host} did not exchange weights: {error}"
        remedy = "check the firewall; runs with several ranks and with Ray need this"
        return Finding("run: gloo", MISSING, detail, remedy, required)
    return ok("gloo", f"two processes exchanged {num_bytes / 1e3:.0f} kB at {host} in {1e3 * seconds:.0f} ms")
