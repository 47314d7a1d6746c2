"""Check that two processes on this machine can send weights to each other over gloo."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from dataclasses import asdict

import torch

from paceline.cluster.channel import Channel, ChannelError, Rendezvous, open_rendezvous, pack
from paceline.model.weights import checksum

TIMEOUT_S = 60.0  # mostly for the other process to import torch


def measure_transfer(host: str) -> tuple[int, float]:
    """Send sample weights through this address of this machine; return bytes and seconds. Raise ValueError with the
    reason if it fails."""
    weights = [(f"weight.{i}", torch.randn(128, 200)) for i in range(3)]  # about 300 kB, in several buckets
    try:
        rendezvous, store = open_rendezvous(host, 2, "gloo", TIMEOUT_S)
    except OSError as error:
        raise ValueError(f"{host}: {error}") from None
    command = [sys.executable, "-m", __name__, json.dumps(asdict(rendezvous))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as receiver:
        try:
            channel = Channel(rendezvous, 0, host, store)
            started = time.perf_counter()
            channel.send(pack(weights, 1 << 17), lambda: None)
            seconds = time.perf_counter() - started
            received_checksum, _ = receiver.communicate(timeout=TIMEOUT_S)
        except (ChannelError, subprocess.TimeoutExpired) as error:
            raise ValueError(str(error)) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                receiver.kill()
    if received_checksum.strip() != checksum(weights):
        raise ValueError("what was received is not what was sent")
    return sum(tensor.nbytes for _, tensor in weights), seconds


if __name__ == "__main__":
    rendezvous = Rendezvous(**json.loads(sys.argv[1]))
    print(checksum(Channel(rendezvous, 1, rendezvous.host).receive()))
