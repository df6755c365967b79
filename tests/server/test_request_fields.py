"""No field of a request is ignored: each is used, or refused by its name."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from omni_grpc.gate import Ask
from omni_grpc.server.fields import members
from omni_grpc.server.requests import read
from omni_grpc.server.served import GENERATE_IMAGE
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.request import Task
from omni_grpc.types.request_options import OPTIONS
from omni_grpc.v1 import (
    artifact_pb2,
    event_pb2,
    generation_pb2,
    job_pb2,
    media_pb2,
    model_pb2,
    options_pb2,
    sampling_pb2,
)

from .service import image, refusal, starting

MINIMAL: Mapping[str, str] = {"model": "toy", "prompt": "a red circle"}
VALUES: Mapping[int, Any] = {
    FieldDescriptor.CPPTYPE_STRING: "x",
    FieldDescriptor.CPPTYPE_BOOL: True,
    FieldDescriptor.CPPTYPE_DOUBLE: 0.5,
    FieldDescriptor.CPPTYPE_UINT32: 1,
    FieldDescriptor.CPPTYPE_INT32: 1,
    FieldDescriptor.CPPTYPE_UINT64: 1,
    FieldDescriptor.CPPTYPE_ENUM: 1,
}
UNLIKE_THE_DEFAULT: Mapping[str, int] = {
    "options.delivery": options_pb2.ARTIFACT_DELIVERY_REFERENCE,
    "options.on_disconnect": options_pb2.DISCONNECT_POLICY_KEEP,
    "options.preview.method": options_pb2.PREVIEW_METHOD_LATENT_RGB,
    "options.preview.every_steps": 2,
}
NEEDS: Mapping[str, Mapping[str, Any]] = {
    f"options.preview.{name}": {"options": {"preview": {"method": options_pb2.PREVIEW_METHOD_LATENT_RGB}}}
    for name in ("every_steps", "max_edge_px", "format")
}
"""What a field means nothing without."""
TIMES: Mapping[str, int] = {"Duration": 1, "Timestamp": 4_000_000_000}


def paths(descriptor: Descriptor, prefix: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    """Every field that can be set by itself: repeated fields, maps and google's own types count as one."""
    for field in descriptor.fields:
        path = prefix + field.name
        inner = field.message_type
        if inner is None or field.is_repeated or not inner.fields or inner.file.package == "google.protobuf":
            yield path, field
        else:
            yield from paths(inner, path + ".")


FIELDS: Mapping[str, FieldDescriptor] = dict(paths(generation_pb2.GenerateImageRequest.DESCRIPTOR))


def without_field(path: str) -> generation_pb2.GenerateImageRequest:
    return generation_pb2.GenerateImageRequest(**MINIMAL, **NEEDS.get(path, {}))


def with_field(path: str) -> generation_pb2.GenerateImageRequest:
    """A request with one field set, to something that is not its default, and what the field needs."""
    request = without_field(path)
    message, field = request, FIELDS[path]
    for name in path.split(".")[:-1]:
        message = getattr(message, name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, field.name)["key"] = "value"
    elif field.is_repeated:
        target = getattr(message, field.name)
        target.add() if field.message_type is not None else target.append(VALUES[field.cpp_type])
    elif field.message_type is not None:
        value = getattr(message, field.name)
        value.SetInParent()
        if field.message_type.name in TIMES:
            value.seconds = TIMES[field.message_type.name]
        elif field.message_type.name == "Struct":
            value["key"] = 1
    else:
        setattr(message, field.name, UNLIKE_THE_DEFAULT.get(path, VALUES[field.cpp_type]))
    return request


def test_the_table_of_served_fields_names_fields_that_exist():
    assert FIELDS.keys() >= GENERATE_IMAGE


@pytest.mark.parametrize("path", sorted(FIELDS.keys() - GENERATE_IMAGE))
def test_a_field_that_is_not_served_is_refused_by_name(path):
    with pytest.raises(InvalidArgument) as caught:
        read(with_field(path), Task.TEXT_TO_IMAGE, streaming=True)
    assert caught.value.reason == "FIELD_NOT_SUPPORTED"
    (violation,) = caught.value.violations
    assert path == violation.field or path.startswith(violation.field + "."), violation
    assert "not yet served" in violation.description


@pytest.mark.parametrize("path", sorted(GENERATE_IMAGE))
def test_a_field_that_is_served_changes_what_is_asked(path):
    plain = read(without_field(path), Task.TEXT_TO_IMAGE, streaming=True)
    asked = read(with_field(path), Task.TEXT_TO_IMAGE, streaming=True)
    assert without_fingerprint(asked) != without_fingerprint(plain)
    assert asked.fingerprint != plain.fingerprint


def without_fingerprint(asked: Ask) -> Ask:
    return dataclasses.replace(asked, fingerprint=b"")


async def test_every_refused_field_is_named_at_once(service):
    request = image()
    request.sampling.guidance.image_scale = 0.0
    request.sampling.guidance.skip_layer.layers.append(1)
    error = await refusal(service.generation.GenerateImage(request))
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "FIELD_NOT_SUPPORTED")
    assert sorted(error.fields) == ["sampling.guidance.image_scale", "sampling.guidance.skip_layer"]
    assert "sampling.guidance.image_scale is not yet served" in error.message


async def test_fields_that_only_a_newer_client_knows_are_refused_by_number(service):
    request = image()
    request.MergeFromString(b"\xf8\x07\x01")  # field 127, varint
    request.sampling.guidance.MergeFromString(b"\xf8\x07\x01")
    error = await refusal(service.generation.GenerateImage(request))
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "FIELD_NOT_SUPPORTED")
    assert sorted(error.fields) == ["#127", "sampling.guidance.#127"]
    watch = job_pb2.WatchJobRequest(job_id="x")
    watch.MergeFromString(b"\xf8\x07\x01")
    assert (await refusal(service.jobs.WatchJob(watch))).fields == ["#127"]


def previewing(**preview: Any) -> dict[str, Any]:
    return {"options": {"preview": {"method": "PREVIEW_METHOD_LATENT_RGB"} | preview}}


BAD: Mapping[str, tuple[dict[str, Any], str]] = {
    "prompt": ({"prompt": "  "}, "is empty"),
    "width": ({"width": 33}, "nearest valid value: 32"),
    "height": ({"height": 0}, "nearest valid value: 16"),
    "output_format": (
        {"output_format": 99},
        "99 is not supported; use one of IMAGE_FORMAT_UNSPECIFIED, IMAGE_FORMAT_PNG",
    ),
    "sampling.steps": ({"sampling": {"steps": 0}}, "nearest valid value: 1"),
    "sampling.num_outputs": ({"sampling": {"num_outputs": 9}}, "nearest valid value: 8"),
    "sampling.seeds": ({"sampling": {"seed": 2**53}}, "nearest valid value: 9007199254740991"),
    "sampling.seed, sampling.seeds": ({"sampling": {"seeds": [1]}}, "are both set"),
    "sampling.guidance.true_cfg_scale": ({"sampling": {"guidance": {"true_cfg_scale": 101}}}, "nearest valid value"),
    "sampling.guidance.scale_low_noise": ({"sampling": {"guidance": {"scale_low_noise": -1}}}, "valid value: 0"),
    "sampling.guidance.boundary_ratio": ({"sampling": {"guidance": {"boundary_ratio": 2}}}, "2.0 is outside 0..1"),
    "sampling.guidance.scale": ({"sampling": {"guidance": {"scale": float("nan")}}}, "nan is outside"),
    "sampling.guidance.norm": ({"sampling": {"guidance": {"norm": 99}}}, "99 is not supported"),
    "options.delivery": (
        {"options": {"delivery": "ARTIFACT_DELIVERY_SIGNED_URL"}},
        "ARTIFACT_DELIVERY_SIGNED_URL needs --http-port, or a store that has addresses",
    ),
    "options.on_server_restart": ({"options": {"on_server_restart": 7}}, "7 is not supported"),
    "options.webhook": ({"options": {"webhook": {"url": "https://there.test/"}}}, "--webhook-hosts"),
    "options.on_disconnect": ({"options": {"on_disconnect": 7}}, "7 is not supported"),
    "options.disconnect_grace": ({"options": {"disconnect_grace": {"seconds": -1}}}, "-1 s is negative"),
    "options.min_progress_interval": ({"options": {"min_progress_interval": {"nanos": -1}}}, "is negative"),
    "options.request_id": ({"options": {"request_id": "r" * 129}}, "the maximum is 128"),
    "options.client_job_id": ({"options": {"client_job_id": "c" * 129}}, "the maximum is 128"),
    "options.labels": ({"options": {"labels": {"k": "v" * 129}}}, "the maximum is 128"),
    "options.priority": ({"options": {"priority": -101}}, "-101 is outside -100..100; nearest valid value: -100"),
    "options.queue_timeout": ({"options": {"queue_timeout": {"seconds": -1}}}, "-1 s is negative"),
    "options.run_timeout": ({"options": {"run_timeout": {"nanos": -1}}}, "is negative"),
    "options.deadline": ({"options": {"deadline": {"seconds": 1}}}, "1970-01-01T00:00:01Z is in the past"),
    "options.retention": ({"options": {"retention": {"seconds": 86401}}}, "nearest valid value: 86400 s"),
    "options.preview.method": (
        {"options": {"preview": {"method": "PREVIEW_METHOD_TINY_VAE"}}},
        "PREVIEW_METHOD_TINY_VAE is not supported; use one of PREVIEW_METHOD_UNSPECIFIED, PREVIEW_METHOD_NONE",
    ),
    "options.preview.format": (previewing(format="IMAGE_FORMAT_RAW_RGB8"), "IMAGE_FORMAT_RAW_RGB8 is not supported"),
    "options.preview.every_steps": (previewing(every_steps=0), "nearest valid value: 1"),
    "options.preview.max_edge_px": (previewing(max_edge_px=513), "nearest valid value: 512"),
}


@pytest.mark.parametrize("field", BAD)
async def test_a_bad_value_is_refused_by_field_before_any_work(service, field):
    changes, text = BAD[field]
    error = await refusal(service.generation.GenerateImage(image(**changes)))
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
    assert error.fields == [field]
    assert text in error.details["BadRequest"].field_violations[0].description
    assert service.executor.plans == []
    assert len(service.engine.jobs) == 0


async def test_all_bad_values_of_the_options_are_named_at_once(service):
    options = {"labels": {str(i): "" for i in range(65)}, "request_id": "r" * 129}
    error = await refusal(service.generation.GenerateImage(image(options=options)))
    assert error.fields == ["options.labels", "options.request_id"]


async def test_a_grace_without_its_policy_is_refused(service):
    options = {"disconnect_grace": {"seconds": 1}, "on_disconnect": "DISCONNECT_POLICY_KEEP"}
    error = await refusal(service.generation.GenerateImage(image(options=options)))
    assert error.fields == ["options.disconnect_grace"]


@pytest.mark.parametrize("method", [0, options_pb2.PREVIEW_METHOD_NONE], ids=["unset", "none"])
@pytest.mark.parametrize(
    "preview",
    [{"every_steps": 2}, {"max_edge_px": 64}, {"format": "IMAGE_FORMAT_PNG"}],
    ids=lambda fields: next(iter(fields)),
)
async def test_how_previews_are_made_is_refused_where_none_are(service, method, preview):
    options = {"preview": {"method": method} | preview}
    error = await refusal(service.generation.GenerateImage(image(options=options)))
    assert error.fields == ["options.preview.method"]
    assert "use PREVIEW_METHOD_LATENT_RGB" in error.message


def test_the_enums_have_no_value_that_the_tables_do_not_know():
    """A value that is added to the API must be served here or be refused on purpose."""
    from omni_grpc.server import requests

    for option in OPTIONS:
        if option.type.choices is not None:
            wire = getattr(sampling_pb2, option.type.choices.__name__, None) or getattr(
                media_pb2, option.type.choices.__name__, options_pb2.RestartPolicy
            )
            assert members(option.type.choices, wire).keys() == set(wire.values())
    assert requests.CANCELS.keys() == set(options_pb2.DisconnectPolicy.values())
    assert requests.DELIVERIES.keys() == set(options_pb2.ArtifactDelivery.values())
    assert requests.RESTARTS.keys() == set(options_pb2.RestartPolicy.values())
    unserved = {options_pb2.PREVIEW_METHOD_TINY_VAE, options_pb2.PREVIEW_METHOD_FULL_VAE}
    assert requests.PREVIEWS.keys() == set(options_pb2.PreviewMethod.values()) - unserved
    assert requests.PREVIEW_FORMATS.keys() == set(media_pb2.ImageFormat.values()) - {media_pb2.IMAGE_FORMAT_RAW_RGB8}
    assert requests.JOB_STATES.keys() == set(event_pb2.JobState.values()) - {event_pb2.JOB_STATE_UNSPECIFIED}


# --- what is no GenerateImage -----------------------------------------------------------------------------------------

PICTURE: Mapping[str, bytes] = {"data": b"x"}
OTHER_TASKS: Sequence[tuple[str, dict[str, Any], str]] = [
    ("EditImage", {"images": [PICTURE]}, "IMAGE_EDIT"),
    ("EditImage", {"images": [PICTURE], "strength": 0.0}, "IMAGE_TO_IMAGE"),
    ("EditImage", {"images": [PICTURE], "mask": PICTURE, "strength": 0.5}, "INPAINT"),
    ("EditImage", {"images": [PICTURE], "mask": PICTURE, "layers": 3}, "LAYERED"),
    ("EditImage", {"layers": 3, "task": "TASK_IMAGE_EDIT"}, "IMAGE_EDIT"),
    ("GenerateVideo", {}, "TEXT_TO_VIDEO"),
    ("GenerateVideo", {"with_audio": False}, "TEXT_TO_AUDIO_VIDEO"),
    ("GenerateVideo", {"last_frame": PICTURE, "with_audio": True}, "IMAGE_TO_VIDEO"),
    ("GenerateVideo", {"audio": PICTURE, "first_frame": PICTURE}, "AUDIO_TO_VIDEO"),
    ("GenerateVideo", {"source_video": PICTURE, "audio": PICTURE}, "VIDEO_TO_VIDEO"),
    ("GenerateVideo", {"source_video": PICTURE, "mask_video": PICTURE}, "VIDEO_EDIT"),
    ("GenerateAudio", {}, "TEXT_TO_AUDIO"),
]
ARMS: Mapping[str, str] = {
    "EditImage": "edit_image",
    "GenerateVideo": "generate_video",
    "GenerateAudio": "generate_audio",
}


@pytest.mark.parametrize(("rpc", "fields", "task"), OTHER_TASKS)
async def test_a_task_that_the_model_lacks_is_refused_with_the_tasks_it_has(service, rpc, fields, task):
    body = getattr(generation_pb2, f"{rpc}Request")(model="toy", prompt="a red circle", **fields)
    create = job_pb2.CreateJobRequest(**{ARMS[rpc]: body})
    for call in (getattr(service.generation, rpc)(body), service.jobs.CreateJob(create)):
        error = await refusal(call)
        assert (error.code, error.reason) == ("FAILED_PRECONDITION", "TASK_NOT_SUPPORTED")
        assert error.metadata == {"task": task, "tasks": "TEXT_TO_IMAGE"}
        assert error.details["PreconditionFailure"].violations[0].type == "TASK_NOT_SUPPORTED"


@pytest.mark.parametrize("rpc", ["GenerateImage", *ARMS])
async def test_an_unknown_model_is_refused_first(service, rpc):
    request = getattr(generation_pb2, f"{rpc}Request")(model="other", prompt="x")
    error = await refusal(getattr(service.generation, rpc)(request))
    assert (error.code, error.reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")
    assert "this server has toy" in error.message
    assert error.details["ResourceInfo"].resource_type == "model"


async def test_an_empty_name_is_that_of_the_only_model_and_told(service):
    for given, told in (({"model": ""}, "toy"), ({"model": "toy"}, None)):
        job = await service.finished(**given)
        assert job.model == "toy"
        completed = (await service.watch(job.job_id))[-1].completed
        assert completed.effective.defaults_used.get("model") == told
    assert (await service.models.GetModel(model_pb2.GetModelRequest())).model.name == "toy"
    assert (
        await refusal(service.models.GetModel(model_pb2.GetModelRequest(model="other")))
    ).reason == "MODEL_NOT_FOUND"
    assert len((await service.jobs.ListJobs(job_pb2.ListJobsRequest(model="toy"))).jobs) == 2


@pytest.mark.parametrize("name", [" ", "Toy", "toy "])
async def test_a_name_that_is_almost_it_is_refused_with_the_right_one(service, name):
    error = await refusal(service.generation.GenerateImage(generation_pb2.GenerateImageRequest(model=name, prompt="x")))
    assert error.message == f"model {name!r} is not served here; this server has toy"


async def test_an_empty_name_is_told_by_its_name_while_the_model_loads():
    async with starting() as (service, _):
        error = await refusal(service.generation.GenerateImage(generation_pb2.GenerateImageRequest(prompt="x")))
        assert error.reason == "MODEL_LOADING"
        assert "model 'toy' is not ready" in error.message
        service.executor.loading.open()


async def test_an_unknown_task_is_refused(service):
    error = await refusal(service.generation.EditImage(generation_pb2.EditImageRequest(model="toy", task=99)))
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", ["task"])


@pytest.mark.parametrize(
    ("service_name", "rpc", "request_type"),
    [
        ("jobs", "GetJob", job_pb2.GetJobRequest),
        ("jobs", "WatchJob", job_pb2.WatchJobRequest),
        ("jobs", "CancelJob", job_pb2.CancelJobRequest),
        ("jobs", "DeleteJob", job_pb2.DeleteJobRequest),
        ("artifacts", "DownloadArtifact", artifact_pb2.DownloadArtifactRequest),
        ("artifacts", "DeleteArtifact", artifact_pb2.DeleteArtifactRequest),
    ],
)
async def test_a_name_is_required_and_an_unknown_one_is_not_found(service, service_name, rpc, request_type):
    stub = getattr(getattr(service, service_name), rpc)
    field = request_type.DESCRIPTOR.fields[0].name
    missing = await refusal(stub(request_type()))
    assert (missing.code, missing.fields) == ("INVALID_ARGUMENT", [field])
    unknown = await refusal(stub(request_type(**{field: "nothing"})))
    assert unknown.code == "NOT_FOUND"
    assert unknown.reason == f"{field.removesuffix('_id').upper()}_NOT_FOUND"
    assert unknown.details["ResourceInfo"].resource_type == field.removesuffix("_id")
