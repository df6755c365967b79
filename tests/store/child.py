"""Runs in a process of its own: puts blobs until it is killed, or tells how much memory a large one takes.

python tests/store/child.py endless|large PLACE [PROCESSES]
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import sys
import zlib
from collections.abc import AsyncIterator

from omni_grpc.store.blobs.open import artifacts_at
from omni_grpc.store.seam import Blobs

MIB = 1 << 20
LARGE = 200


async def endless(blobs: Blobs) -> None:
    """Each blob has the SHA-256 of its bytes as its name."""
    os.write(1, f"{os.getpid()}\n".encode())
    while True:
        data = os.urandom(MIB) * 9 + os.urandom(17)

        async def pieces(data: bytes = data) -> AsyncIterator[bytes]:
            for at in range(0, len(data), MIB):
                yield data[at : at + MIB]

        await blobs.put(hashlib.sha256(data).hexdigest(), pieces())


async def large(blobs: Blobs) -> None:
    """Writes by how many MiB the process has grown, and whether what was read is what was put."""

    async def pieces(count: int) -> AsyncIterator[bytes]:
        for number in range(count):
            yield number.to_bytes(2, "little") * (MIB // 2)

    await blobs.put("small", pieces(2))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    written = found = 0
    async for piece in pieces(LARGE):
        written = zlib.crc32(piece, written)
    await blobs.put("large", pieces(LARGE))
    async for piece in blobs.read("large"):
        found = zlib.crc32(piece, found)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    sys.stdout.write(f"{grown >> 10} {written == found}\n")


def forked(count: int) -> None:
    """Goes on in so many processes; this one waits for their ends and writes the signals of them."""
    children = []
    for _ in range(count):
        if (child := os.fork()) == 0:
            return
        children.append(child)
    sys.stdout.write("".join(f"{os.WTERMSIG(os.waitpid(child, 0)[1])}\n" for child in children))
    sys.exit()


async def main() -> None:
    blobs = artifacts_at(sys.argv[2])
    await blobs.open()
    await {"endless": endless, "large": large}[sys.argv[1]](blobs)
    await blobs.close()


if len(sys.argv) > 3:
    forked(int(sys.argv[3]))
asyncio.run(main())
