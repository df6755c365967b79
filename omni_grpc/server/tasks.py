"""Which task a request asks for, found from the inputs it brings: the first row that fits. `task` overrules them."""

from __future__ import annotations

from collections.abc import Sequence

from omni_grpc.request import Task
from omni_grpc.server.requests import TASKS, Reader
from omni_grpc.v1 import generation_pb2, sampling_pb2

Rows = Sequence[tuple[Task, tuple[str, ...]]]

EDIT_ROWS: Rows = (
    (Task.LAYERED, ("layers",)),
    (Task.INPAINT, ("mask",)),
    (Task.IMAGE_TO_IMAGE, ("strength",)),
)
VIDEO_ROWS: Rows = (
    (Task.VIDEO_EDIT, ("mask_video", "control_video")),
    (Task.VIDEO_TO_VIDEO, ("source_video",)),
    (Task.AUDIO_TO_VIDEO, ("audio",)),
    (Task.IMAGE_TO_VIDEO, ("first_frame", "last_frame", "reference_images")),
    (Task.TEXT_TO_AUDIO_VIDEO, ("with_audio",)),
)


def edit_task(request: generation_pb2.EditImageRequest) -> Task:
    return _task(request, EDIT_ROWS, Task.IMAGE_EDIT)


def video_task(request: generation_pb2.GenerateVideoRequest) -> Task:
    return _task(request, VIDEO_ROWS, Task.TEXT_TO_VIDEO)


def _task(
    request: generation_pb2.EditImageRequest | generation_pb2.GenerateVideoRequest, rows: Rows, otherwise: Task
) -> Task:
    reader = Reader()
    asked = reader.choice("task", sampling_pb2.Task, request.task, TASKS)
    reader.check()
    if asked is not None:
        return asked
    given = {field.name for field, _ in request.ListFields()}
    return next((task for task, fields in rows if given.intersection(fields)), otherwise)
