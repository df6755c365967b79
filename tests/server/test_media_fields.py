"""No field of the requests with media is ignored: each is used, or refused by its name."""

import pytest
from google.protobuf.descriptor import FieldDescriptor

from omni_grpc.server.requests import read
from omni_grpc.server.served import EDIT_IMAGE, GENERATE_AUDIO, GENERATE_VIDEO
from omni_grpc.server.tasks import task_of
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.v1 import generation_pb2

from .test_request_fields import VALUES, paths, without_fingerprint

REQUESTS = {
    generation_pb2.EditImageRequest: EDIT_IMAGE,
    generation_pb2.GenerateVideoRequest: GENERATE_VIDEO,
    generation_pb2.GenerateAudioRequest: GENERATE_AUDIO,
}
MEDIA = ("images", "mask", "first_frame", "last_frame", "source_video", "reference_images", "control_video")
MEDIA += ("mask_video", "audio", "reference")
"""Read apart from the rest, by `MediaReader`."""
FIELDS = [
    (kind, path, field)
    for kind in REQUESTS
    for path, field in paths(kind.DESCRIPTOR)
    if path.split(".")[0] not in MEDIA
]
NAMES = [f"{kind.__name__}.{path}" for kind, path, _ in FIELDS]
COVERED = ("options.", "task")
"""Read like those of GenerateImage, or by `task_of`."""


def set_field(request, path, field):
    message = request
    for name in path.split(".")[:-1]:
        message = getattr(message, name)
    if field.message_type is not None and field.message_type.name == "Struct":
        getattr(message, field.name)["key"] = 1
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, field.name)["key"] = "value"
    elif field.is_repeated:
        target = getattr(message, field.name)
        target.add() if field.message_type is not None else target.append(VALUES[field.cpp_type])
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
        if field.message_type.name == "Duration":
            getattr(message, field.name).seconds = 1
    else:
        setattr(message, field.name, VALUES[field.cpp_type])
    return request


def is_served(kind, path):
    return any(path == name or path.startswith(name + ".") for name in REQUESTS[kind])


def test_the_tables_name_fields_that_exist():
    for kind, served in REQUESTS.items():
        known = {path for path, _ in paths(kind.DESCRIPTOR)} | set(MEDIA) & set(kind.DESCRIPTOR.fields_by_name)
        assert known >= served, kind


@pytest.mark.parametrize(("kind", "path", "field"), FIELDS, ids=NAMES)
def test_a_field_is_used_or_refused_by_its_name(kind, path, field):
    plain = kind(model="toy", prompt="a plain one")
    request = set_field(kind(model="toy", prompt="a plain one"), path, field)
    if not is_served(kind, path):
        with pytest.raises(InvalidArgument) as caught:
            read(request, task_of(request), streaming=True)
        assert caught.value.reason == "FIELD_NOT_SUPPORTED"
        assert path.startswith(caught.value.violations[0].field)
        return
    if path.startswith(COVERED) or field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return
    was = read(plain, task_of(plain), streaming=True)
    asked = read(request, task_of(request), streaming=True)
    assert without_fingerprint(asked) != without_fingerprint(was)
    assert asked.fingerprint != was.fingerprint
