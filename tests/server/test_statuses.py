"""Failures as statuses: details by code, cut to what a client's trailers can take; and errors that nobody expected."""

import logging

import grpc
import pytest
from google.rpc import error_details_pb2

from omni_grpc.types.errors import Code, Failure, Violation
from omni_grpc.v1 import admin_pb2, job_pb2
from omni_grpc.wire.status import DETAILS_BYTES, clip, to_status

from .service import image, refusal, unpack


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_its_number_and_its_reason(code):
    answer = to_status(Failure(code=code, reason="SOME_REASON", message="why", metadata={"key": "value"}))
    assert (answer.code, grpc.StatusCode[code.name].name) == (grpc.StatusCode[code.name].value[0], code.value)
    info = error_details_pb2.ErrorInfo()
    assert answer.details[0].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == ("SOME_REASON", "omni_grpc", {"key": "value"})


def test_a_status_stays_within_what_trailers_can_carry():
    violations = tuple(Violation(f"field{i}" + "x" * 500, "y" * 5000) for i in range(500))
    failure = Failure(
        code=Code.RESOURCE_EXHAUSTED,
        reason="LONG",
        message="\u6f22" * 10_000,
        violations=violations,
        metadata={"key": "v" * 5000},
        retry_after=1,
    )
    answer = to_status(failure)
    assert answer.ByteSize() <= DETAILS_BYTES
    (request,) = (unpack(detail) for detail in answer.details if detail.type_url.endswith("BadRequest"))
    assert request.field_violations[0].field.startswith("field0")
    assert request.field_violations[-1].description.startswith(f"{500 - len(request.field_violations) + 1} more fields")


def test_clipping_keeps_whole_characters():
    assert clip("short", 10) == "short"
    assert clip("\u6f22" * 10, 10) == "\u6f22\u6f22..."


@pytest.mark.parametrize("text", ["\u6f22", "x", "\n", "%"])
async def test_a_client_can_read_a_refusal_that_quotes_it_at_length(service, text):
    error = await refusal(service.generation.GenerateImage(image(model=text * 100_000)))
    assert (error.code, error.reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")
    request = job_pb2.GetJobRequest(job_id=text * 100_000)
    assert (await refusal(service.jobs.GetJob(request))).reason == "JOB_NOT_FOUND"


async def test_an_unexpected_error_is_internal_and_can_be_found_in_the_log(service, monkeypatch, caplog):
    def boom(*arguments, **keywords):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(service.engine, "submit", boom)
    monkeypatch.setattr(service.engine.jobs, "find", boom)
    calls = (
        lambda: service.generation.GenerateImage(image()),
        lambda: service.jobs.GetJob(job_pb2.GetJobRequest(job_id="x")),
    )
    for call in calls:
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            error = await refusal(call())
        assert (error.code, error.reason) == ("INTERNAL", "INTERNAL")
        assert "secret detail" not in error.message
        (record,) = (record for record in caplog.records if record.exc_info)
        assert record.exc_info[0] is ZeroDivisionError
        assert error.message.rpartition(" ")[2] in record.getMessage()


async def test_what_is_not_there_names_the_process_that_was_asked(service):
    info = await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
    assert len(info.instance_id) == 16
    assert info.replica == ""
    error = await refusal(service.jobs.GetJob(job_pb2.GetJobRequest(job_id="job_x")))
    assert error.metadata == {"name": "job_x", "cause": "UNKNOWN", "instance_id": info.instance_id}
    job = await service.finished()
    await service.jobs.DeleteJob(job_pb2.DeleteJobRequest(job_id=job.job_id))
    error = await refusal(service.jobs.GetJob(job_pb2.GetJobRequest(job_id=job.job_id)))
    assert error.metadata == {"name": job.job_id, "cause": "DELETED", "instance_id": info.instance_id}
    assert error.details["ResourceInfo"].resource_name == job.job_id
