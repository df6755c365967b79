"""What is refused because it is predicted not to fit in the device's memory, and the nearest that would."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from omni_grpc.resolve.frames import nearest_frames
from omni_grpc.types.errors import Code, Failure, ResourceExhausted, Violation
from omni_grpc.types.memory_model import MemoryModel, Need
from omni_grpc.types.request import Request
from omni_grpc.types.spec import Limits

REASON = "MEMORY_PREDICTED"
GIB = 2**30


def check_memory(request: Request, memory: MemoryModel, limits: Limits) -> None:
    """Raises ResourceExhausted (MEMORY_PREDICTED) for a request that would not fit with nothing beside it. The
    violations are on the fields that would have to be less, each with the most that fits if the others stay.
    """
    need = memory.need(request)
    if need.alone <= memory.capacity:
        return
    fits = tuple(_fits(request, memory, limits))
    ways = "; ".join(dict.fromkeys(one.description for one in fits))
    instead = ways or "not even the smallest size would: the server needs a device with more memory, or smaller weights"
    raise ResourceExhausted(f"{_why(need, memory)}; {instead}", reason=REASON, violations=fits)


def too_large(need: Need, memory: MemoryModel) -> Failure | None:
    """The failure of a job whose rows turn out to be too long, when it is prepared; None for one that fits."""
    if need.alone <= memory.capacity:
        return None
    message = f"{_why(need, memory)}; ask for a smaller size, fewer frames or outputs, or fewer or smaller inputs"
    return Failure(code=Code.RESOURCE_EXHAUSTED, reason=REASON, message=message)


def _why(need: Need, memory: MemoryModel) -> str:
    asked, there = need.alone / GIB, memory.capacity / GIB
    return f"the request is predicted to need {asked:.2f} GiB beside the weights, and there are {there:.2f} GiB"


def _fits(request: Request, memory: MemoryModel, limits: Limits) -> Iterator[Violation]:
    def fit(**changes: object) -> bool:
        return memory.fits(dataclasses.replace(request, **changes))  # type: ignore[arg-type]

    outputs = range(request.num_outputs - 1, 0, -1)
    if count := next((n for n in outputs if fit(num_outputs=n, seeds=request.seeds[:n])), 0):
        yield Violation("sampling.num_outputs", f"{count} of the {request.num_outputs} outputs fit")
    if request.num_frames:
        fewer = _frames(request.num_frames, limits)
        if frames := next((n for n in fewer if fit(num_frames=n)), 0):
            yield Violation("num_frames", f"{frames} of the {request.num_frames} frames fit")
    for width, height in _sizes(request, limits):
        if fit(width=width, height=height):
            what = f"the same shape fits as {width} x {height}"
            yield Violation("width", what)
            yield Violation("height", what)
            return


def _frames(most: int, limits: Limits) -> Iterator[int]:
    """The legal numbers of frames below `most`, the largest first."""
    count = most
    while (fewer := nearest_frames(count - limits.frame_multiple, limits)) < count:
        yield fewer
        count = fewer


def _sizes(request: Request, limits: Limits) -> Iterator[tuple[int, int]]:
    """Smaller sizes of the same shape, as nearly as the model's multiples allow; the largest first."""
    multiple = limits.size_multiple
    least = -(-limits.min_size // multiple) * multiple
    short, long = sorted((request.width, request.height))
    for side in range((short - 1) // multiple * multiple, least - 1, -multiple):
        other = max(least, round(side * long / short / multiple) * multiple)
        yield (side, other) if request.width == short else (other, side)
