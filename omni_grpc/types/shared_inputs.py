"""Decoded inputs with their bytes in shared memory: named in a request, copied by the worker, freed by the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from omni_grpc.types import shared_memory as shared
from omni_grpc.types.media import DecodedInput, Inputs
from omni_grpc.types.plan import SharedBytes


def media_of(inputs: Inputs) -> Iterator[DecodedInput]:
    """Every medium, in the order of the fields."""
    for name in inputs.given:
        value = getattr(inputs, name)
        yield from value if isinstance(value, tuple) else (value,)


def put_inputs(inputs: Inputs, blocks: Sequence[SharedBytes]) -> Inputs:
    """The inputs with the bytes of each medium moved to a new block of that name. Whoever gets them frees the blocks.

    Raises OSError where there is no room; then no block is left.
    """
    names = iter(blocks)

    def put(medium: Any) -> Any:
        name = next(names).name
        shared.store(medium.data, name)
        return dataclasses.replace(medium, data=b"", block=name)

    try:
        return _each(inputs, put)
    except OSError:
        free_blocks(block.name for block in blocks)
        raise


def link_inputs(inputs: Inputs, prefix: str) -> Inputs:
    """The inputs with another name, which begins with `prefix`, for the block of each medium: it stays when the first
    one is freed, and takes no memory beside it. Raises OSError where a block is gone; then no name is left.
    """
    made: list[str] = []

    def link(medium: Any) -> Any:
        if not medium.block:
            return medium
        made.append(f"{prefix}-{len(made)}")
        shared.link(medium.block, made[-1])
        return dataclasses.replace(medium, block=made[-1])

    try:
        return _each(inputs, link)
    except OSError:
        free_blocks(made)
        raise


def read_inputs(inputs: Inputs) -> Inputs:
    """The inputs with the bytes of each medium copied out of its block, which stays: a request whose worker dies is
    prepared again by the next one. Raises FileNotFoundError for a block that has been freed.
    """
    if not any(medium.block for medium in media_of(inputs)):
        return inputs

    def read(medium: Any) -> Any:
        return dataclasses.replace(medium, data=shared.read(medium.block), block="") if medium.block else medium

    return _each(inputs, read)


def free_blocks(names: Iterable[str]) -> None:
    """Unlinks blocks. Those that are gone, or that were never put, are passed over."""
    for name in names:
        shared.discard(name)


def _each(inputs: Inputs, change: Callable[[Any], Any]) -> Inputs:
    values: dict[str, Any] = {}
    for name in inputs.given:
        value = getattr(inputs, name)
        values[name] = tuple(map(change, value)) if isinstance(value, tuple) else change(value)
    return dataclasses.replace(inputs, **values)
