"""Which task a request asks for: the one that it names, else the one that its inputs imply."""

from __future__ import annotations

from omni_grpc.resolve import tasks
from omni_grpc.server.fields import Reader
from omni_grpc.server.requests import TASKS, GenerationRequest
from omni_grpc.types.request import Task
from omni_grpc.v1 import generation_pb2, sampling_pb2


def task_of(request: GenerationRequest) -> Task:
    """The task of any request. Raises InvalidArgument for a `task` that the API does not define."""
    given = {field.name for field, _ in request.ListFields()}
    match request:
        case generation_pb2.EditImageRequest():
            return _named(request.task) or tasks.edit_task(given)
        case generation_pb2.GenerateVideoRequest():
            return _named(request.task) or tasks.video_task(given)
        case generation_pb2.GenerateAudioRequest():
            return Task.TEXT_TO_AUDIO
    return Task.TEXT_TO_IMAGE


def _named(value: int) -> Task | None:
    reader = Reader()
    asked = reader.choice("task", sampling_pb2.Task, value, TASKS)
    reader.check()
    return asked
