"""Whether two processes of this machine can meet over gloo and weights go from one to the other."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from dataclasses import asdict

import torch
from torch import Tensor

from paceline.cluster.channel import Broken, Channel, Place, open_place, pack
from paceline.model.weights import checksum

TIMEOUT_S = 60.0  # most of it is for the other process to import torch


def sample() -> list[tuple[str, Tensor]]:
    """Some 300 kB, in several buckets."""
    generator = torch.Generator().manual_seed(0)
    return [(f"weight.{i}", torch.randn(128, 200, generator=generator)) for i in range(3)]


def transfer(host: str) -> tuple[int, float]:
    """Bytes and seconds, through this address of ours; ValueError with the reason where it fails."""
    weights = sample()
    try:
        place, store = open_place(host, 2, "gloo", TIMEOUT_S)
    except OSError as error:
        raise ValueError(f"{host}: {error}") from None
    command = [sys.executable, "-m", __name__, json.dumps(asdict(place))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as other:
        try:
            channel = Channel(place, 0, host, store)
            started = time.perf_counter()
            channel.send(pack(weights, 1 << 17), lambda: None)
            seconds = time.perf_counter() - started
            held, _ = other.communicate(timeout=TIMEOUT_S)
        except (Broken, subprocess.TimeoutExpired) as error:
            raise ValueError(str(error)) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                other.kill()
    if held.strip() != checksum(weights):
        raise ValueError("what arrived is not what was sent")
    return sum(tensor.nbytes for _, tensor in weights), seconds


if __name__ == "__main__":
    place = Place(**json.loads(sys.argv[1]))
    print(checksum(Channel(place, 1, place.host).receive()))
