"""Values that a client can send and no type of ours expects: refused by field, never an unexpected error."""

from __future__ import annotations

import base64

import pytest

from omni_grpc.v1 import artifact_pb2, job_pb2
from tests.server.service import Service, image, refusal

TOKENS = {
    "nested too deep": b"[" * 100_000,
    "a number beyond any float": b"[1" + b"0" * 400 + b', "x", "y"]',
    "a number with too many digits": b"[1" + b"0" * 5000 + b', "x", "y"]',
    "no JSON": b"\xff\xfe",
    "too few": b'[1, "x"]',
    "no list": b"1",
}


@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
async def test_a_page_token_of_any_content_is_refused(service: Service, token: bytes) -> None:
    page_token = base64.urlsafe_b64encode(token).decode()
    for call in (
        service.jobs.ListJobs(job_pb2.ListJobsRequest(page_token=page_token)),
        service.artifacts.ListArtifacts(artifact_pb2.ListArtifactsRequest(page_token=page_token)),
    ):
        error = await refusal(call)
        assert (error.reason, error.fields) == ("BAD_PAGE_TOKEN", ["page_token"])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
async def test_an_extra_parameter_that_is_not_finite_is_refused_by_its_path(service: Service, number: float) -> None:
    request = image()
    request.sampling.extra.fields["a"].number_value = number
    request.sampling.extra.fields["b"].list_value.values.add().struct_value.fields["c"].number_value = number
    error = await refusal(service.generation.GenerateImage(request))
    assert {"sampling.extra.a", "sampling.extra.b[0].c"} <= set(error.fields)
