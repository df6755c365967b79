"""The length of a video in frames: which counts a model can make, and the one nearest to a duration."""

from __future__ import annotations

import dataclasses

from omni_grpc.types.media import Modality
from omni_grpc.types.request import Draft
from omni_grpc.types.results import RequestWarning
from omni_grpc.types.spec import Checkpoint, Limits

TOLERANCE = 1e-6
"""Frames by which a duration may be off before the caller is warned."""


def nearest_frames(count: float, limits: Limits) -> int:
    """The legal number of frames nearest to `count`: k x frame_multiple + frame_offset, at most max_frames."""
    multiples = round((count - limits.frame_offset) / limits.frame_multiple)
    if limits.max_frames:
        multiples = min(multiples, (limits.max_frames - limits.frame_offset) // limits.frame_multiple)
    return max(multiples, 0 if limits.frame_offset else 1) * limits.frame_multiple + limits.frame_offset


def frames_within(count: int, limits: Limits) -> int:
    """The largest legal number of frames up to `count`, or else the smallest legal number."""
    nearest = nearest_frames(count, limits)
    return nearest if nearest <= count else nearest_frames(nearest - limits.frame_multiple, limits)


def segments(num_frames: int | None, limits: Limits) -> int:
    """The number of segments that a video is made in, one after the other. Each takes all the steps of its request."""
    if not limits.segment_frames or num_frames is None:
        return 1
    return -(-num_frames // limits.segment_frames)


def counts_frames(draft: Draft, checkpoint: Checkpoint) -> bool:
    """Whether this is a video whose length is given as a duration, for a model that takes a number of frames."""
    is_video = draft.task.modality is Modality.VIDEO
    return is_video and draft.duration is not None and "num_frames" in checkpoint.spec.takes


def rate(draft: Draft, checkpoint: Checkpoint) -> float | None:
    """Frames per second that a duration is converted with: the draft's, else the source video's, else the model's
    default.
    """
    source = draft.inputs.source_video
    usual = checkpoint.defaults.fps if source is None else source.fps
    return usual if draft.fps is None else draft.fps


def duration_fault(draft: Draft, checkpoint: Checkpoint) -> str:
    """What is wrong with the duration of a video, or ""."""
    if draft.duration is None or not counts_frames(draft, checkpoint):
        return ""
    fps, most = rate(draft, checkpoint), checkpoint.limits.max_frames
    if fps is None:
        return f"needs fps, because {checkpoint.spec.name} has no default; set fps, or num_frames"
    if most and draft.duration * fps > most:
        longest = nearest_frames(most, checkpoint.limits) / fps
        return f"{draft.duration:g} s at {fps:g} fps is more than {most} frames; nearest valid value: {longest:g}"
    return ""


def count_frames(draft: Draft, checkpoint: Checkpoint) -> tuple[Draft, tuple[RequestWarning, ...]]:
    """The draft with a number of frames in place of its duration, and a warning if that is not exact."""
    fps = rate(draft, checkpoint)
    if draft.duration is None or fps is None or not counts_frames(draft, checkpoint):
        return draft, ()
    frames = nearest_frames(draft.duration * fps, checkpoint.limits)
    counted = dataclasses.replace(draft, num_frames=frames, duration=None)
    if abs(frames - draft.duration * fps) <= TOLERANCE:
        return counted, ()
    warning = RequestWarning(
        code="DURATION_ROUNDED",
        field="duration",
        message=f"the nearest number of frames that {checkpoint.spec.name} supports is {frames}, at {fps:g} fps",
        requested=f"{draft.duration:g} s",
        applied=f"{frames / fps:g} s",
    )
    return counted, (warning,)
