"""What is no request at all: bytes that are no message, messages over the limit, methods that do not exist."""

import re
from collections.abc import Iterator, Mapping

import pytest
from google.protobuf.message import Message

from omni_grpc.client import AsyncClient
from omni_grpc.config import EngineConfig, options
from omni_grpc.types.errors import ResourceExhausted
from omni_grpc.types.written import written
from omni_grpc.v1 import admin_pb2, artifact_pb2, model_pb2

from .service import image, refusal, serving

GARBAGE = {"wire": b"\xff\xff\xff\xff", "text": b"\x0a\x02\xff\xfe", "cut": b"\x0a\x7fabc"}
UNARY, STREAM, UPLOAD = "JobService/GetJob", "GenerationService/GenerateImage", "ArtifactService/UploadAsset"


async def answer(service, method: str, *messages: bytes):
    """The refusal of a call of bytes."""
    path = f"/omni_grpc.v1.{method}" if "." not in method else f"/{method}"
    if method == UPLOAD:
        return await refusal(service.channel.stream_unary(path)(iter(messages)))
    if method == STREAM:
        return await refusal(service.channel.unary_stream(path)(*messages))
    return await refusal(service.channel.unary_unary(path)(*messages))


@pytest.mark.parametrize("method", [UNARY, STREAM, UPLOAD])
@pytest.mark.parametrize("kind", GARBAGE)
async def test_bytes_that_are_no_message_are_refused_like_a_wrong_field(service, method, kind):
    error = await answer(service, method, GARBAGE[kind])
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")
    assert error.fields == ["request"]
    assert "are no omni_grpc.v1." in error.message


async def test_a_message_over_the_limit_names_sizes_and_flag():
    async with serving(max_message_bytes=1 << 20) as service:
        for call in (
            service.generation.GenerateImage(image(prompt="x" * (1 << 20))),
            service.artifacts.UploadAsset(iter([artifact_pb2.UploadAssetRequest(data=b"x" * (1 << 20))])),
        ):
            error = await refusal(call)
            assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "MESSAGE_TOO_LARGE")
            assert error.metadata["max_message_bytes"] == str(1 << 20)
            assert int(error.metadata["size_bytes"]) > 1 << 20
            assert "--max-message-bytes" in error.message
            assert "QuotaFailure" in error.details
        assert len((await refusal(service.generation.GenerateImage(image(prompt="x" * 1_000_000)))).fields) == 1


async def test_our_client_explains_a_message_that_gRPC_itself_refuses():
    async with serving(max_message_bytes=1 << 20) as service, AsyncClient(service.server.address) as client:
        with pytest.raises(ResourceExhausted) as caught:
            await client.generate_image("x" * (3 << 20), model="toy")
    assert caught.value.reason == "MESSAGE_TOO_LARGE"
    assert "--max-message-bytes" in str(caught.value)


@pytest.mark.parametrize(
    ("method", "hint"),
    [
        ("GenerationService/GenerateImages", "did you mean /omni_grpc.v1.GenerationService/GenerateImage?"),
        ("omni_grpc.v2.JobService/GetJob", "did you mean /omni_grpc.v1.JobService/GetJob?"),
        ("no.Such/Thing", "reflection lists what it has"),
    ],
)
async def test_a_method_that_does_not_exist_is_refused_with_the_nearest(service, method, hint):
    error = await answer(service, method, b"\xff")
    assert (error.code, error.reason) == ("UNIMPLEMENTED", "METHOD_UNKNOWN")
    assert error.metadata["method"].endswith(method)
    assert hint in error.message


VALUES = [True, False, 4, 4.0, 0.1, 1e-7, "a b", ("a", "b"), {"a": True, "b": [1, None]}]


async def test_settings_are_told_as_they_are_written():
    settings = {
        "batch_invariant": False,
        "max_step_ms": 250.0,
        "ignored_layers": ("a", "b"),
        "diffusion_pipeline_profiler_targets": ("vae.decode",),
        "enable_diffusion_pipeline_profiler": True,
    }
    async with serving(**settings) as service:
        info = await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
    assert info.features["batch_invariant"] == "false"
    assert info.features["enable_diffusion_pipeline_profiler"] == "true"
    assert info.features["max_step_ms"] == "250.0"
    assert info.features["ignored_layers"] == "a,b"
    assert "dtype" in info.features
    for name, value in info.features.items():
        assert value not in ("True", "False", "None"), name
        assert not value.startswith(("(", "[", "{'", "<", "PosixPath")), name


def test_what_is_written_is_read_back_as_the_setting():
    known = {option.name: option for option in options()}
    config = EngineConfig.from_settings(
        lora={"a": "b=c"}, ignored_layers=["x", "y"], retention=0.5, vae_use_tiling=True
    )
    for option in known.values():
        value = option.of(config)
        if value is not None:
            assert option.parse(written(value)) == value, option.name
    assert [written(value) for value in VALUES] == [
        "true", "false", "4", "4.0", "0.1", "1e-07", "a b", "a,b", '{"a": true, "b": [1, null]}'
    ]  # fmt: skip


PYTHON = re.compile(r"\b(True|False|None)\b|PosixPath|<\w|\(\)|\w\(\w+=|\{'|\['")
"""How Python shows values, and nobody writes them."""


def texts(message: Message) -> Iterator[str]:
    for field, value in message.ListFields():
        for one in value.values() if isinstance(value, Mapping) else value if field.is_repeated else (value,):
            if isinstance(one, Message):
                yield from texts(one)
            elif isinstance(one, str):
                yield one


async def test_no_reply_shows_a_value_as_python_does(service):
    job = await service.finished()
    replies = [
        job,
        *await service.watch(job.job_id),
        await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest()),
        await service.admin.GetServerStats(admin_pb2.GetServerStatsRequest()),
        await service.models.ListModels(model_pb2.ListModelsRequest()),
    ]
    found = [text for reply in replies for text in texts(reply)]
    assert len(found) > 50
    assert [text for text in found if PYTHON.search(text)] == []


async def test_refusals_show_no_value_as_python_does(service):
    wrong = image(
        sampling={
            "steps": 0,
            "scheduler": "none",
            "extra": {"a": None, "b": True},
            "cache": {"tea_cache": {"rel_l1_thresh": -1, "coefficients": [float("nan")]}},
        },
    )
    error = await refusal(service.generation.GenerateImage(wrong))
    assert len(error.fields) >= 3
    for violation in error.details["BadRequest"].field_violations:
        assert not PYTHON.search(violation.description), violation
