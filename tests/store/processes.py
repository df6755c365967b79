"""Processes that put blobs, for every kind of place."""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from omni_grpc.store.seam import Blobs

CHILD = Path(__file__).with_name("child.py")
KILLS = 10


def killed_while_putting(place: str) -> None:
    """Ten processes put blobs at the same time; each is killed at a random moment."""
    command = [sys.executable, str(CHILD), "endless", place]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(KILLS)]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            time.sleep(random.Random().uniform(0, 0.15))
            child.send_signal(signal.SIGKILL)
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert {child.returncode for child in children} == {-signal.SIGKILL}


async def whole(blobs: Blobs) -> int:
    """How many blobs there are, each of which is whole."""
    count = 0
    async for name in blobs.names("", time.time() + 60):
        digest = hashlib.sha256()
        async for piece in blobs.read(name):
            digest.update(piece)
        assert digest.hexdigest() == name
        count += 1
    return count


def memory_of_a_large_one(place: str) -> int:
    """By how many MiB a process grows that puts and reads 200 MiB."""
    command = [sys.executable, str(CHILD), "large", place]
    grown, same = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert same == "True"
    return int(grown)
