"""Every rpc over Connect and gRPC-Web: the same answers, refusals and cancels as over gRPC."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import struct

import httpx2
import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.server.server import served_methods, unserved_methods
from omni_grpc.store.job import JobState
from omni_grpc.v1 import admin_pb2, artifact_pb2, generation_pb2, job_pb2, model_pb2
from tests.server.service import image, kinds, serving, until

from .calling import FORMATS, Refused, refused, stream, unary

pytestmark = pytest.mark.service


def generate(http, request, form, **headers):
    return stream(
        http, "GenerationService/GenerateImage", request, generation_pb2.GenerateImageResponse, form, **headers
    )


async def refusal(call):
    with pytest.raises(Refused) as caught:
        await call
    return caught.value


@pytest.mark.parametrize("form", FORMATS)
async def test_a_generation_streams_what_grpc_streams(service, http, form):
    events = [message.event async for message in generate(http, image(), form)]
    over_grpc = [message.event async for message in service.generation.GenerateImage(image())]
    assert kinds(events) == kinds(over_grpc)
    assert events[-1].completed.artifacts[0].sha256 == over_grpc[-1].completed.artifacts[0].sha256
    chunks = [event.artifact_chunk.data for event in events if event.WhichOneof("event") == "artifact_chunk"]
    assert len(b"".join(chunks)) == events[-1].completed.artifacts[0].size_bytes


@pytest.mark.parametrize("kind", ["proto", "json"])
async def test_a_call_with_one_answer(service, http, kind):
    found = await unary(
        http, "ModelService/ListModels", model_pb2.ListModelsRequest(), model_pb2.ListModelsResponse, kind
    )
    assert [model.name for model in found.models] == ["toy"]
    assert found == await service.models.ListModels(model_pb2.ListModelsRequest())


async def test_a_job_is_one_over_both_stacks(service, http):
    service.executor.gates[Lane.STEP].close()
    created = await unary(
        http, "JobService/CreateJob", job_pb2.CreateJobRequest(generate_image=image()), job_pb2.CreateJobResponse
    )
    job_id = created.job.job_id
    assert (await service.get(job_id)).job_id == job_id
    cancel = job_pb2.CancelJobRequest(job_id=job_id)
    await unary(http, "JobService/CancelJob", cancel, job_pb2.CancelJobResponse, "json")
    assert kinds(await service.watch(job_id))[-1] == "cancelled"


async def test_many_jobs_over_one_stream(service, http):
    jobs = [(await service.create()).job_id for _ in range(8)]
    seen = set()
    asked = job_pb2.WatchJobsRequest(job_ids=jobs, after_seq=dict.fromkeys(jobs, 0))
    watched = stream(http, "JobService/WatchJobs", asked, job_pb2.WatchJobsResponse, "connect+proto")
    async for message in watched:
        if message.event.WhichOneof("event") == "completed":
            seen.add(message.event.job_id)
    assert seen == set(jobs)


@pytest.mark.parametrize("form", FORMATS)
async def test_an_error_has_the_details_of_grpc(http, form):
    with pytest.raises(Refused) as caught:
        async for _ in generate(http, image(width=17), form):
            pass
    if form.startswith("connect"):
        assert (caught.value.code, caught.value.reason) == ("invalid_argument", "INVALID_ARGUMENT")
        assert caught.value.fields == ["width"]
    assert "width" in caught.value.message


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"job_Id": "x"}', 'no field named "job_Id"'),
        (b"{", "Failed to load JSON"),
        (b"[" * 100_000, "GetJobRequest"),
        (b'{"jobId": 3}', "jobId"),
        (b"\xff", "codec can't decode"),
    ],
)
async def test_json_that_is_no_message_is_refused(http, content, text):
    answer = await http.post(
        "/omni_grpc.v1.JobService/GetJob", content=content, headers={"content-type": "application/json"}
    )
    error = refused(answer.json())
    assert (answer.status_code, error.code, error.reason) == (400, "invalid_argument", "MALFORMED_MESSAGE")
    assert text in error.message


async def test_bytes_that_are_no_message_are_refused(http):
    answer = await http.post(
        "/omni_grpc.v1.JobService/GetJob", content=b"\xff" * 31, headers={"content-type": "application/proto"}
    )
    assert refused(answer.json()).reason == "MALFORMED_MESSAGE"


async def test_a_message_above_the_limit_is_refused():
    async with serving(http_port=0, max_message_bytes=1 << 20) as service, _client(service) as http:
        asked = job_pb2.GetJobRequest(job_id="x" * (3 << 19))
        error = await refusal(unary(http, "JobService/GetJob", asked, job_pb2.GetJobResponse))
        assert (error.code, error.reason) == ("resource_exhausted", "MESSAGE_TOO_LARGE")


async def test_a_request_may_be_compressed(http):
    data = gzip.compress(json.dumps({"pageSize": 3}).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip", "accept-encoding": "gzip"}
    answer = await http.post("/omni_grpc.v1.JobService/ListJobs", content=data, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.json() == {}


async def test_a_deadline_ends_a_call(service, http):
    service.executor.gates[Lane.STEP].close()
    with pytest.raises(Refused) as caught:
        async for _ in generate(http, image(), "connect+proto", connect_timeout_ms="300"):
            pass
    assert caught.value.code == "deadline_exceeded"


@pytest.mark.parametrize("form", FORMATS)
async def test_a_client_that_leaves_cancels_its_job(form):
    async with serving(http_port=0, disconnect_grace=0) as service, _client(service) as http:
        gate = service.executor.gates[Lane.STEP]
        gate.close()
        events = generate(http, image(sampling={"steps": 30}), form)
        job = service.engine.jobs.get((await anext(events)).event.job_id)
        await events.aclose()
        await http.aclose()
        await until(lambda: job.state is JobState.CANCELLED)
        await until(lambda: service.server._calls._open == 0)
        assert service.server._calls.open_streams == 0


async def test_an_unexpected_error_tells_an_incident_and_no_more(service, http, monkeypatch, caplog):
    def broken(*arguments):
        raise RuntimeError("a secret of the inside")

    monkeypatch.setattr(service.engine.jobs, "find", broken)
    caplog.set_level(logging.INFO, logger="omni_grpc.server.calls")
    error = await refusal(unary(http, "JobService/GetJob", job_pb2.GetJobRequest(job_id="x"), job_pb2.GetJobResponse))
    assert (error.code, error.reason) == ("internal", "INTERNAL")
    assert "secret" not in error.message
    incident = error.message.rpartition(" ")[2]
    assert f"incident {incident}" in caplog.text
    assert "a secret of the inside" in caplog.text


async def test_every_rpc_is_there_and_those_not_served_say_so(http):
    for method in sorted(served_methods() | unserved_methods()):
        answer = await http.post(method, content=b"{}", headers={"content-type": "application/json"})
        # a stream wants an envelope; everything else is answered
        assert answer.status_code != 404, method
        if method in unserved_methods():
            assert refused(answer.json()).code == "unimplemented"
    gone = await http.post("/omni_grpc.v1.JobService/Nothing", content=b"{}")
    assert gone.status_code == 404


async def test_the_admin_service_is_at_its_own_address_alone(tmp_path):
    async with serving(http_port=0, admin_address=f"unix:{tmp_path}/admin.sock") as service, _client(service) as http:
        asked = admin_pb2.GetServerInfoRequest()
        error = await refusal(unary(http, "AdminService/GetServerInfo", asked, admin_pb2.GetServerInfoResponse))
        assert (error.code, error.reason) == ("unimplemented", "METHOD_ELSEWHERE")


async def test_an_upload_streams_too(service, http):
    data = bytes(range(256)) * 8
    parts = [
        artifact_pb2.UploadAssetRequest(header={"mime_type": "image/png", "size_bytes": len(data)}),
        artifact_pb2.UploadAssetRequest(data=data),
    ]
    framed = b"".join(struct.pack(">BI", 0, part.ByteSize()) + part.SerializeToString() for part in parts)
    headers = {"content-type": "application/connect+proto"}
    answer = await http.post("/omni_grpc.v1.ArtifactService/UploadAsset", content=framed, headers=headers)
    size = int.from_bytes(answer.content[1:5], "big")
    made = artifact_pb2.UploadAssetResponse.FromString(answer.content[5 : 5 + size])
    assert made.size_bytes == len(data)


async def test_a_stop_ends_streams_with_their_last_events():
    async with serving(http_port=0) as service, _client(service) as http:
        service.executor.gates[Lane.STEP].close()
        events = generate(http, image(sampling={"steps": 30}), "connect+proto")
        await anext(events)
        stopping = asyncio.create_task(service.server.stop())
        with pytest.raises(Refused) as caught:
            async for _ in events:
                pass
        assert caught.value.code == "unavailable"
        await asyncio.wait_for(stopping, 10)


def _client(service):
    return httpx2.AsyncClient(base_url=service.http, timeout=30, trust_env=False)
