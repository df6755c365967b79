"""What a caller writes becomes one request, or an error that names the field."""

import uuid

import pytest
from google.protobuf.duration_pb2 import Duration

from omni_grpc.client import messages
from omni_grpc.types.errors import FailedPrecondition, InvalidArgument
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import GuidanceNorm
from omni_grpc.v1.job_pb2 import ListJobsRequest
from omni_grpc.v1.media_pb2 import IMAGE_FORMAT_WEBP
from omni_grpc.v1.model_pb2 import Model
from omni_grpc.v1.options_pb2 import PREVIEW_METHOD_LATENT_RGB, PreviewOptions
from omni_grpc.v1.sampling_pb2 import GUIDANCE_NORM_RENORM


def test_every_option_has_its_field():
    request = messages.image_request(
        "toy",
        "a red circle",
        {
            "negative_prompt": "",
            "width": 64,
            "height": 32,
            "steps": 3,
            "guidance_scale": 0.0,
            "true_cfg_scale": 2.5,
            "guidance_norm": "renorm",
            "seeds": [5, 9],
            "num_outputs": 2,
            "scheduler": "Heun",
            "output_format": "webp",
            "request_id": "mine",
            "labels": {"team": "red"},
            "guidance_rescale": 0.5,
            "guidance_interval_start": 0.0,
            "guidance_interval_end": 0.75,
            "guidance_scale_low_noise": 0.0,
            "boundary_ratio": 0.9,
            "priority": -2,
            "queue_timeout": 1.5,
            "run_timeout": 60,
            "retention": 0,
            "preview_every_steps": 5,
            "preview_max_edge_px": 128,
            "loras": {"style": 0.5, "sketch@transformer_2": 1},
        },
    )
    assert (request.model, request.prompt) == ("toy", "a red circle")
    assert request.HasField("negative_prompt")
    assert (request.width, request.height, request.sampling.steps, request.sampling.num_outputs) == (64, 32, 3, 2)
    assert request.sampling.guidance.HasField("scale")
    assert request.sampling.guidance.true_cfg_scale == 2.5
    assert request.sampling.guidance.norm == GUIDANCE_NORM_RENORM
    assert request.sampling.guidance.rescale == 0.5
    assert request.sampling.guidance.HasField("interval_start")
    assert request.sampling.guidance.interval_end == 0.75
    assert request.sampling.guidance.HasField("scale_low_noise")
    assert request.sampling.guidance.boundary_ratio == 0.9
    assert list(request.sampling.seeds) == [5, 9]
    assert request.sampling.scheduler == "Heun"
    asked = [(lora.lora_id, lora.target, lora.scale) for lora in request.sampling.loras]
    assert asked == [("style", "", 0.5), ("sketch", "transformer_2", 1.0)]
    assert request.output_format == IMAGE_FORMAT_WEBP
    assert (request.options.request_id, dict(request.options.labels)) == ("mine", {"team": "red"})
    assert request.options.priority == -2
    assert request.options.queue_timeout == Duration(seconds=1, nanos=500_000_000)
    assert request.options.run_timeout == Duration(seconds=60)
    assert request.options.HasField("retention")
    assert request.options.preview == PreviewOptions(method=PREVIEW_METHOD_LATENT_RGB, every_steps=5, max_edge_px=128)


def test_what_is_not_given_is_not_sent():
    request = messages.image_request("toy", "x", {"width": None, "negative_prompt": None, "seed": 0})
    assert not request.HasField("width")
    assert not request.HasField("negative_prompt")
    assert request.sampling.HasField("seed")
    assert {field.name for field, _ in request.sampling.ListFields()} == {"seed"}


def test_every_request_gets_an_idempotency_key_of_its_own():
    first, second = (messages.image_request("toy", "x", {}).options.request_id for _ in range(2))
    assert uuid.UUID(first).version == 4
    assert first != second


def test_enum_members_are_as_good_as_their_names():
    options = {"output_format": ImageFormat.JPEG, "guidance_norm": GuidanceNorm.RENORM_CLIPPED}
    request = messages.image_request("toy", "x", options)
    assert request.output_format == 2
    assert request.sampling.guidance.norm == 3


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("width", -1, "width"),
        ("height", 64.5, "height"),
        ("steps", "ten", "sampling.steps"),
        ("seed", -7, "sampling.seed"),
        ("seed", 2**64, "sampling.seed"),
        ("seeds", [1, -2], "sampling.seeds"),
        ("seeds", 3, "sampling.seeds"),
        ("num_outputs", 2**32, "sampling.num_outputs"),
        ("true_cfg_scale", "high", "sampling.guidance.true_cfg_scale"),
        ("output_format", "gif", "output_format"),
        ("guidance_norm", "UNSPECIFIED", "sampling.guidance.norm"),
        ("labels", {"team": 1}, "options.labels"),
        ("run_timeout", "long", "options.run_timeout"),
        ("run_timeout", 1e30, "options.run_timeout"),
        ("retention", float("nan"), "options.retention"),
        ("priority", 2**40, "options.priority"),
        ("negative_prompt", "\ud800", "negative_prompt"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_field(option, value, field):
    with pytest.raises(InvalidArgument) as caught:
        messages.image_request("toy", "x", {option: value})
    assert [violation.field for violation in caught.value.violations] == [field]
    assert repr(value) in str(caught.value)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(InvalidArgument) as caught:
        messages.image_request("toy", "x", {"width": -1, "seed": -1, "output_format": "gif"})
    assert {v.field for v in caught.value.violations} == {"width", "sampling.seed", "output_format"}
    assert "PNG, JPEG, WEBP, RAW_RGB8" in str(caught.value)


def test_an_unknown_option_is_a_type_error_with_the_nearest_name():
    with pytest.raises(TypeError, match="unknown option 'widht'; did you mean 'width'"):
        messages.image_request("toy", "x", {"widht": 64})


def test_the_only_model_is_taken_and_a_choice_is_not_made():
    assert messages.only_model([Model(name="toy")]) == "toy"
    with pytest.raises(InvalidArgument, match="choose one of a, b") as caught:
        messages.only_model([Model(name="a"), Model(name="b")])
    assert caught.value.violations[0].field == "model"
    with pytest.raises(FailedPrecondition):
        messages.only_model([])


def test_states_are_names_in_any_case():
    request = messages.list_jobs_request({"states": ["running", "FAILED"], "labels": {"a": "b"}}, 7)
    assert request == ListJobsRequest(page_size=7, states=[2, 5], label_selector={"a": "b"})
    with pytest.raises(InvalidArgument, match="expected some of QUEUED, RUNNING"):
        messages.list_jobs_request({"states": ["UNSPECIFIED"]}, 7)
    with pytest.raises(InvalidArgument, match="limit is 0"):
        messages.list_jobs_request({}, 0)


def test_a_state_of_a_newer_server_has_a_name_too():
    assert messages.state_name(4) == "SUCCEEDED"
    assert messages.state_name(99) == "99"
