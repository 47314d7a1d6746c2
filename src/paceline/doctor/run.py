"""Whether a run's settings will find what they ask for: model and head, vLLM, Ray and its nodes, a way for weights.

Nothing is downloaded, and no run is begun. What the settings do not ask for is not looked at, and what they do ask for
is required.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import native
from paceline.config import ADAPTABLE, Config
from paceline.doctor.finding import DEGRADED, MISSING, OK, Finding

if TYPE_CHECKING:
    from paceline.cluster.ray_cluster import Plan
    from paceline.model.hf_shape import Shape

LOOPBACK = "127.0.0.1"


def examine_run(config: Config) -> list[Finding]:
    findings = [*_device(config), *_model(config)]
    if "code" in config.reward.functions:
        findings.append(_sandbox(config))
    if config.engine.kind == "vllm":
        findings += [*_vllm(config), *_shared_memory(config)]
    host = LOOPBACK
    if config.cluster.kind == "ray":
        rows, host = _ray(config)
        findings += rows
    return [*findings, _channel(host, required=config.cluster.kind == "ray")]


def _problem(name: str, detail: object, remedy: str = "") -> Finding:
    """Errors of ours have their remedy behind the semicolon."""
    text, _, rest = str(detail).partition("; ")
    return Finding(f"run: {name}", MISSING, text, remedy or rest or "correct the setting", required=True)


def _good(name: str, detail: str) -> Finding:
    return Finding(f"run: {name}", OK, detail, required=True)


def _device(config: Config) -> Iterable[Finding]:
    """Where the run is on this machine, that is."""
    import torch

    from paceline.build import check_device

    if config.cluster.kind == "ray" and config.cluster.address is not None:
        return
    try:
        check_device(config)
    except ValueError as error:
        yield _problem("device", error)
        return
    if config.model.device == "cpu":
        yield _good("device", "cpu")
        return
    wanted = config.engine.tensor_parallel_size if config.cluster.kind == "none" else 1
    here = torch.cuda.device_count()
    if here < wanted:
        yield _problem("device", f"engine.tensor_parallel_size = {wanted}, but there are {here} GPUs", "lower it")
    else:
        yield _good("device", f"{config.model.device}, {here} GPU(s), {torch.cuda.get_device_name()}")


def _model(config: Config) -> Iterable[Finding]:
    from paceline.model.hf_shape import read_shape
    from paceline.model.store import load_tokenizer
    from paceline.model.weights import read_config

    try:
        directory = _directory(config.model.name)
        model = read_shape(directory)
        if config.engine.kind == "local":
            read_config(directory)  # of the families that our own engine computes
        num_bytes = sum(_sizes(config, directory))
        load_tokenizer(directory)
    except (ValueError, OSError) as error:
        yield _problem("model", error)
        return
    yield _good("model", f"{directory}, {num_bytes / 1e9:.2f} GB as {config.model.dtype}")
    yield from _drafter(config, directory, model)


def _drafter(config: Config, directory: Path, model: Shape) -> Iterable[Finding]:
    from paceline.build import build_head
    from paceline.build.vllm import vllm_options
    from paceline.model.weights import read_config

    speculation = config.speculation
    name = "head" if speculation.method in ADAPTABLE else "drafter"
    here = config.model_copy(update={"model": config.model.model_copy(update={"device": "cpu"})})
    try:
        if speculation.method in ADAPTABLE:
            head = build_head(here, read_config(directory)).config
            yield _good(name, f"reads layers {list(head.layer_ids)} of {directory.name}")
        elif speculation.method == "draft_model" and not str(speculation.draft_model).startswith("layers:"):
            drafts = _directory(str(speculation.draft_model))
            read_config(drafts)
            yield _good(name, str(drafts))
        if config.engine.kind == "vllm":
            vllm_options(here, directory, model)
    except (ValueError, OSError) as error:
        yield _problem(name, error)


def _directory(name: str) -> Path:
    """Of a model that is on this machine."""
    from huggingface_hub import snapshot_download

    from paceline.model.store import HUB_FILES, KNOWN, resolve

    absent = ValueError(f"{name} is not on this machine; paceline pull {name}")
    if Path(name).expanduser().is_dir() or (name in KNOWN and (native.cache_dir() / "models" / name).is_dir()):
        return resolve(name)
    if name in KNOWN:
        raise absent
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True))
    except Exception:  # the hub's library has one for each kind of absence
        raise absent from None


def _sizes(config: Config, directory: Path) -> list[int]:
    """Bytes of each tensor, as they travel."""
    import torch

    from paceline.model.weights import tensors_in

    itemsize = getattr(torch, config.model.dtype).itemsize
    with tensors_in(directory) as (shapes, _):
        return [math.prod(shape) * itemsize for shape in shapes.values()]


def _sandbox(config: Config) -> Finding:
    """On this machine; reward workers on another one look for themselves when the run begins."""
    from paceline.tasks.sandbox import Refused, isolation

    try:
        found = isolation(config.reward.sandbox)
    except Refused as error:
        return _problem("code sandbox", error)
    if found.gaps:
        remedy = 'reward.sandbox = "namespaces" isolates more, where a machine allows it'
        return Finding("run: code sandbox", DEGRADED, str(found), remedy)
    return _good("code sandbox", str(found))


def _vllm(config: Config) -> Iterable[Finding]:
    from paceline.cluster.vllm_probe import vllm_facts

    elsewhere = "run paceline in an environment that has it (`make setup-vllm` makes .venv-vllm)"
    try:
        facts = vllm_facts()
    except ValueError as error:
        yield _problem("vLLM", error, elsewhere)
        return
    said = f"{facts['version']}, imported here with all that our engine needs"
    if facts["seam"]:
        yield _good("vLLM", f"{said}; has the weight-transfer seam")
    elif config.draft.online != "off":
        yield _problem("vLLM", f"{said}; without the weight-transfer seam a head can't be updated", "a newer vLLM")
    else:
        remedy = "fine for the policy, which goes through reload_weights; a newer vLLM for draft.online"
        yield Finding("run: vLLM", DEGRADED, f"{said}; no weight-transfer seam", remedy)


def _shared_memory(config: Config) -> Iterable[Finding]:
    """A parcel as large as the run's largest one, filled and read back."""
    import torch

    from paceline.cluster.vllm_shared import FOLDERS, MAX_BYTES, parcels, unpack

    with contextlib.suppress(ValueError, OSError):  # a model that can't be read has its own row
        sizes = _sizes(config, _directory(config.model.name))
        num_bytes = max(min(sum(sizes), MAX_BYTES), *sizes)
        content = torch.zeros(num_bytes, dtype=torch.uint8)
        content[:: 1 << 12] = 7  # a mark on every page
        try:
            for parcel in parcels([("content", content)]):
                folder = Path(parcel["path"]).parent
                ((_, received),) = unpack(**parcel, device=torch.device("cpu"))
        except ValueError as error:
            yield _problem("shared memory", error)
            return
        size = f"{num_bytes / 1e6:.0f} MB"
        if not received.equal(content):
            yield _problem("shared memory", f"{folder}: {size} did not come back as they went in", "another TMPDIR")
        elif str(folder) == FOLDERS[0]:
            yield _good("shared memory", f"{folder} takes a parcel of {size}")
        else:
            remedy = f"make {FOLDERS[0]} larger (docker run --shm-size, a Memory emptyDir); else weights go by disk"
            yield Finding("run: shared memory", DEGRADED, f"{FOLDERS[0]} has no {size}; {folder} has", remedy)


def _ray(config: Config) -> tuple[list[Finding], str]:
    """And the address by which other nodes reach this one."""
    from paceline.build.cluster import build_plan
    from paceline.cluster.ray_probe import cluster_facts, ray_version

    try:
        installed = ray_version()
    except ValueError as error:
        return [_problem("Ray", error, 'pip install -e ".[ray]"')], LOOPBACK
    address = config.cluster.address
    if address is None:
        return [_good("Ray", f"{installed}; it is started here for the run"), _room_here(build_plan(config))], LOOPBACK
    try:
        facts = cluster_facts(address, [*_files(config), str(Path.cwd())])
    except ValueError as error:
        remedy = "start it (`ray start --head`, docs/slurm.md), run this on one of its nodes, or leave cluster.address"
        return [_problem("Ray", f"cluster.address = {address!r}: {error}", remedy)], LOOPBACK
    found = _good("Ray", f"{installed}; {len(facts['nodes'])} node(s) at {address}")
    return [found, _room(build_plan(config), facts), _nodes(config, facts["nodes"])], str(facts["host"])


def _files(config: Config) -> list[str]:
    """Of those that the settings name, the ones on this machine."""
    from paceline.build import with_absolute_paths

    config = with_absolute_paths(config)
    speculation = config.speculation
    named = (config.model.name, config.task.name, config.reward.model, speculation.head, speculation.cost_table)
    return [name for name in named if name is not None and Path(name).is_absolute()]


def _wanted(plan: Plan) -> dict[str, float]:
    return {name: sum(bundle.get(name, 0) for bundle in plan.bundles) for name in ("CPU", "GPU")}


def _words(resources: dict[str, float]) -> str:
    return f"{resources['CPU']:g} CPUs and {resources['GPU']:g} GPUs"


LESS = "lower cluster.num_engines, num_learners, num_reward_workers, cpus_per_… or gpus_per_…, or start Ray with more"


def _room_here(plan: Plan) -> Finding:
    """Ray believes whatever it is told of CPUs, so too many are slow and no more."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted, here = _wanted(plan), {"CPU": float(cores), "GPU": float(torch.cuda.device_count())}
    if wanted["GPU"] > here["GPU"]:
        return _problem("room", f"{_words(wanted)} wanted, {_words(here)} here", LESS)
    if wanted["CPU"] > here["CPU"]:
        return Finding("run: room", DEGRADED, f"{_words(wanted)} wanted, {_words(here)} here", LESS)
    return _good("room", f"{_words(wanted)} wanted, {_words(here)} here")


def _room(plan: Plan, facts: dict[str, Any]) -> Finding:
    wanted, free = _wanted(plan), facts["free"]
    nodes = [node["resources"] for node in facts["nodes"]]
    total = {name: sum(node[name] for node in nodes) for name in wanted}
    said = f"{_words(wanted)} wanted, {_words(total)} there"
    if any(wanted[name] > total[name] for name in wanted):
        return _problem("room", said, LESS)
    for bundle in plan.bundles:
        if not any(all(node[name] >= number for name, number in bundle.items()) for node in nodes):
            return _problem("room", f"{said}, but no node has {_words({'GPU': 0, **bundle})} for one process", LESS)
    if any(wanted[name] > free[name] for name in wanted):
        return Finding("run: room", DEGRADED, f"{said}, {_words(free)} free", "wait for whoever has the rest")
    return _good("room", said)


def _nodes(config: Config, nodes: list[dict[str, Any]]) -> Finding:
    """Whether all nodes have the same libraries, and see the same files."""
    needed = {"paceline", "torch"} | ({"vllm"} if config.engine.kind == "vllm" else set())
    for node in nodes:
        host, versions, absent = node["host"], node["versions"], node["absent"]
        if lacking := sorted(name for name in needed if versions[name] is None):
            return _problem("nodes", f"{host} has no {', '.join(lacking)}", "install the same environment on all nodes")
        said, shared = f"{host} does not see {', '.join(absent)}", "a file system that all nodes see"
        if absent and absent != [str(Path.cwd())]:
            return _problem("nodes", said, f"put model, data and runs into {shared}")
        if absent:
            return Finding("run: nodes", DEGRADED, said, f"start from {shared}, or give --run a folder in one")
    for one, other in itertools.pairwise(nodes):
        if differing := [name for name, has in one["versions"].items() if other["versions"][name] != has]:
            listed = ", ".join(f"{name} {one['versions'][name]} and {other['versions'][name]}" for name in differing)
            said = f"{one['host']} and {other['host']} differ: {listed}"
            return Finding("run: nodes", DEGRADED, said, "install the same environment on all nodes")
    versions = ", ".join(f"{name} {has}" for name, has in nodes[0]["versions"].items() if has is not None)
    return _good("nodes", f"all have {versions}, and see the files that the settings name")


def _channel(host: str, required: bool) -> Finding:
    """In one process nobody needs it, but torchrun's ranks do."""
    from paceline.cluster.channel_probe import transfer

    try:
        num_bytes, seconds = transfer(host)
    except ValueError as error:
        detail = f"two processes at {host} did not exchange weights: {error}"
        remedy = "look for a firewall; several ranks and Ray need it"
        return Finding("run: gloo", MISSING, detail, remedy, required)
    return _good("gloo", f"two processes met at {host}; {num_bytes / 1e3:.0f} kB in {1e3 * seconds:.0f} ms, same bytes")
