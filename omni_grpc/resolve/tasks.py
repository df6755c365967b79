"""Which task a request asks for, found from the inputs it brings: the first row that fits."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from omni_grpc.types.request import Task

TaskRules = Sequence[tuple[Task, tuple[str, ...]]]

EDIT_ROWS: TaskRules = (
    (Task.LAYERED, ("layers",)),
    (Task.INPAINT, ("mask",)),
    (Task.IMAGE_TO_IMAGE, ("strength",)),
)
VIDEO_ROWS: TaskRules = (
    (Task.VIDEO_EDIT, ("mask_video", "control_video")),
    (Task.VIDEO_TO_VIDEO, ("source_video",)),
    (Task.AUDIO_TO_VIDEO, ("audio",)),
    (Task.IMAGE_TO_VIDEO, ("first_frame", "last_frame", "reference_images")),
    (Task.TEXT_TO_AUDIO_VIDEO, ("with_audio",)),
)


def edit_task(given: Collection[str]) -> Task:
    """The task of an edit with these fields."""
    return _first(given, EDIT_ROWS, Task.IMAGE_EDIT)


def video_task(given: Collection[str]) -> Task:
    """The task of a video with these fields."""
    return _first(given, VIDEO_ROWS, Task.TEXT_TO_VIDEO)


def _first(given: Collection[str], rows: TaskRules, otherwise: Task) -> Task:
    return next((task for task, fields in rows if any(field in given for field in fields)), otherwise)
