"""Processes that put blobs, for every kind of place."""

from __future__ import annotations

import contextlib
import hashlib
import os
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
    command = [sys.executable, str(CHILD), "endless", place, str(KILLS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            for child in [int(process.stdout.readline()) for _ in range(KILLS)]:
                time.sleep(random.Random().uniform(0, 0.15))
                os.kill(child, signal.SIGKILL)
            assert process.stdout.read().split() == [str(signal.SIGKILL.value)] * KILLS
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


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
