"""A tokenizer with tools, and no network but the loopback interface."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

try:
    metadata.version("verifiers")
except metadata.PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]  # they can't be imported


@pytest.fixture(autouse=True)
def taskset_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "tasksets"))


@pytest.fixture(autouse=True)
def only_loopback(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Connections to other hosts fail, and are listed."""
    refused: list[str] = []
    connect, connect_ex, resolve = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def is_local(host: Any) -> bool:
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host in (None, "localhost")

    def check(address: Any) -> None:
        if isinstance(address, tuple) and not is_local(address[0]):
            refused.append(str(address[0]))
            raise OSError(f"no network in this test: {address}")

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: socket.socket, address: Any) -> Any:
            check(address)
            return function(self, address)

        return call

    def checked_resolve(host: Any, *args: Any, **options: Any) -> Any:
        check((host, 0))
        return resolve(host, *args, **options)

    monkeypatch.setattr(socket.socket, "connect", checked(connect))
    monkeypatch.setattr(socket.socket, "connect_ex", checked(connect_ex))
    monkeypatch.setattr(socket, "getaddrinfo", checked_resolve)
    return refused


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from conftest import write_tokenizer  # of tests/
    from transformers import AutoTokenizer
    from verifiers_support import TEMPLATE

    write_tokenizer(directory := tmp_path_factory.mktemp("tokenizer"))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    return tokenizer
