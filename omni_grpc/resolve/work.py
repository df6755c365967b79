"""How much a request asks for, in a unit that is the same for every model: what rate limits are counted in."""

from __future__ import annotations

from omni_grpc.types.media import Modality
from omni_grpc.types.request import Request, has_negative

SAMPLE_RATE = 44_100
"""Samples a second of a sound whose rate is left to the model."""
SECONDS = 10.0
"""Of a sound whose length is left to the model."""


def pixel_steps(request: Request) -> float:
    """Pixels that are denoised, counted once for each prediction of the model.

    width x height x frames x outputs, times the steps, where a step within the guidance interval counts twice if
    classifier-free guidance is on. 1024 x 1024 with 50 guided steps are 105 million; a layer counts as an output, and a
    sample of a sound as a pixel. What comes before and after the steps is not in it, nor are input pictures; nor is
    what a cache or a `strength` below 1 saves, which is known only as it runs.
    """
    return pixels(request) * predictions(request)


def pixels(request: Request) -> float:
    """Of all outputs of a request, in all frames; the samples of a sound."""
    if request.task.modality is Modality.AUDIO:
        seconds = SECONDS if request.duration is None else request.duration
        return max(1.0, seconds * (request.sample_rate_hz or SAMPLE_RATE)) * request.num_outputs
    return float(
        request.width * request.height * (request.num_frames or 1) * request.num_outputs * (request.layers or 1)
    )


def predictions(request: Request) -> int:
    """Of one output, over all steps: with something to guide away from, two for each step in the interval, else one."""
    if not has_negative(request):
        return request.steps
    return sum(1 + request.guidance.covers(index, request.steps) for index in range(request.steps))
