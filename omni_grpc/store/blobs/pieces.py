"""The pieces in which bytes come, made fit to be written."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable

from omni_grpc.store.memory import PIECE_BYTES

SMALL_BYTES = 1 << 14
"""Pieces of fewer bytes than that are put together. Larger ones are not copied."""


async def regrouped(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The same bytes in pieces of at most a MiB, none of them empty, small ones put together."""
    small = bytearray()
    async for piece in pieces:
        if len(piece) < SMALL_BYTES:
            small += piece
        if small and (len(small) >= SMALL_BYTES or len(piece) >= SMALL_BYTES):
            yield bytes(small)
            small.clear()
        if len(piece) >= SMALL_BYTES:
            for at in range(0, len(piece), PIECE_BYTES):
                yield piece[at : at + PIECE_BYTES]
    if small:
        yield bytes(small)
