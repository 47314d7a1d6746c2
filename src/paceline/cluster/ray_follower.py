"""The further ranks of a learner that is divided, as Ray runs them: each follows the first, for as long as that lives.

They and the first are one thing: if any of them dies, all begin again from the last checkpoint.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import ray

Follow = Callable[[int, int, str], None]  # as which rank, of how many, and where they meet: HOST:PORT


class FollowerActor:
    def __init__(self, follow: Follow) -> None:
        self._follow = follow

    def follow(self, rank: int, size: int, address: str) -> None:
        self._follow(rank, size, address)


def call(followers: Sequence[Any]) -> str:
    """In the first rank's process: send the others to where it will be; returns the address."""
    host = ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.bind((host, 0))
        address = f"{host}:{free.getsockname()[1]}"
    for rank, follower in enumerate(followers, 1):
        follower.follow.remote(rank, 1 + len(followers), address)
    return address
