"""A real server and a real collector: the spans of calls, jobs and webhooks, and which trace they belong to."""

from __future__ import annotations

import logging
import socket
import time

import httpx2
import pytest
from grpc import aio
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import ConfigError, InternalError
from omni_grpc.v1 import artifact_pb2, job_pb2
from tests.outbound.web import answer, web
from tests.server.service import Service, image, read_refusal, serving, until
from tests.telemetry.collector import GRPC, HTTP, Collector, attributes, collecting

TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"  # pragma: allowlist secret
PARENT = f"00-{TRACE}-{ABOVE}-01"
UNSAMPLED = f"00-{TRACE}-{ABOVE}-00"
CALL, JOB = "omni_grpc.v1.GenerationService/GenerateImage", "generate_content toy"
PHASES = ["queue", "encode", "denoise", "decode", "store"]


@pytest.fixture(params=[GRPC, HTTP])
def collector(request, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with collecting(request.param) as found:
        yield found


@pytest.fixture
def grpc_collector(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with collecting(GRPC) as found:
        yield found


def metadata(parent: str = PARENT, **more: str):
    return tuple({"traceparent": parent, **more}.items())


async def generated(service: Service, parent: str = PARENT, **changes) -> tuple[str, dict[str, str]]:
    """The id of a job that was made on a stream and has ended, and the initial metadata of the call."""
    call = service.generation.GenerateImage(image(**changes), metadata=metadata(parent) if parent else ())
    events = [message.event async for message in call]
    return events[0].job_id, dict(await call.initial_metadata())


def seconds(span) -> tuple[float, float]:
    return span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9


async def test_a_job_over_grpc_is_a_tree_of_spans(collector: Collector) -> None:
    before = time.time()
    async with serving(**collector.settings) as service:
        job_id, told = await generated(service, sampling={"steps": 3, "seed": 5})
        record = await service.get(job_id)
    after = time.time()
    assert collector.tree() == {"": [CALL, "omni_grpc.v1.JobService/GetJob"], CALL: [JOB], JOB: PHASES}
    ours = [span for span in collector.spans if not span.name.endswith("GetJob")]
    assert {span.trace_id.hex() for span in ours} == {TRACE}
    call, job = collector.named(CALL), collector.named(JOB)
    assert call.parent_span_id.hex() == ABOVE
    assert told["traceparent"] == f"00-{TRACE}-{call.span_id.hex()}-01"
    assert record.trace_id == TRACE
    # times: all within the test, each phase after the one before, all within the job
    times = [seconds(collector.named(name)) for name in PHASES]
    flat = [moment for pair in times for moment in pair]
    assert flat == sorted(flat)
    start, end = seconds(job)
    assert before < start <= flat[0] <= flat[-1] <= end + 0.001 < after
    assert start == pytest.approx(record.create_time.ToNanoseconds() / 1e9, abs=1e-3)
    assert times[0][1] == pytest.approx(record.start_time.ToNanoseconds() / 1e9, abs=1e-3)
    steps = collector.named("denoise").events
    assert [attributes(step)["omni_grpc.step"] for step in steps] == [1, 2, 3]
    assert all(times[2][0] <= step.time_unix_nano / 1e9 <= times[2][1] for step in steps)
    said = attributes(job)
    assert said["omni_grpc.job.id"] == said["gen_ai.response.id"] == job_id
    assert (said["gen_ai.request.model"], said["gen_ai.output.type"], said["gen_ai.request.seed"]) == (
        "toy",
        "image",
        5,
    )
    assert (said["omni_grpc.steps"], said["omni_grpc.job.state"]) == (3, "SUCCEEDED")
    said = attributes(call)
    assert (said["rpc.system.name"], said["rpc.method"], said["rpc.response.status_code"]) == ("grpc", CALL, "OK")
    assert (collector.resource["service.name"], collector.resource["telemetry.sdk.language"]) == ("omni_grpc", "python")
    assert image().prompt not in str(collector.requests)


async def test_a_job_over_http_is_the_same_tree(collector: Collector) -> None:
    async with serving(http_port=0, **collector.settings) as service, httpx2.AsyncClient(trust_env=False) as http:
        body = {"model": "toy", "prompt": "a red circle", "size": "64x32"}
        headers = {"traceparent": PARENT, "tracestate": "vendor=1, other=2"}
        made = await http.post(f"{service.http}/v1/images/generations", json=body, headers=headers)
        assert made.status_code == 200
        unary = f"{service.http}/omni_grpc.v1.JobService/ListJobs"
        listed = await http.post(unary, json={}, headers={"traceparent": PARENT})
        (job,) = listed.json()["jobs"]
        upload = {"traceparent": PARENT, "content-type": "image/png"}
        stored = await http.post(f"{service.http}/files/assets", content=b"1", headers=upload)
    openai = "POST /v1/images/generations"
    rpc, file = "omni_grpc.v1.JobService/ListJobs", "POST /files/assets"
    assert collector.tree() == {"": [openai, rpc, file], openai: [JOB], JOB: PHASES}
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE} == {job["traceId"]}
    assert collector.named(JOB).trace_state == "vendor=1,other=2"
    for reply, name in ((made, openai), (listed, rpc), (stored, file)):
        assert reply.headers["traceparent"] == f"00-{TRACE}-{collector.named(name).span_id.hex()}-01"
    assert attributes(collector.named(rpc))["rpc.system.name"] == "connectrpc"
    said = attributes(collector.named(openai))
    assert (said["http.route"], said["http.response.status_code"]) == ("/v1/images/generations", 200)


async def test_where_none_comes_a_trace_begins(grpc_collector: Collector) -> None:
    async with serving(**grpc_collector.settings) as service:
        job_id, told = await generated(service, parent="")
        trace_id = (await service.get(job_id)).trace_id
    assert grpc_collector.named(CALL).parent_span_id == b""
    assert grpc_collector.named(JOB).trace_id.hex() == trace_id == told["traceparent"].split("-")[1]


@pytest.mark.parametrize("parent", ["00-0-0-01", f"00-{'0' * 32}-{ABOVE}-01", PARENT.upper(), f"ff{PARENT[2:]}"])
async def test_a_traceparent_that_is_none_begins_a_trace(grpc_collector: Collector, parent: str) -> None:
    async with serving(**grpc_collector.settings) as service:
        _, told = await generated(service, parent)
    assert TRACE not in told["traceparent"]
    assert grpc_collector.named(CALL).parent_span_id == b""


async def test_who_calls_says_what_is_sampled(grpc_collector: Collector) -> None:
    async with serving(**grpc_collector.settings, trace_sample_ratio=0) as service:
        await generated(service, parent="")
        job_id, told = await generated(service, UNSAMPLED)
        assert (await service.get(job_id)).trace_id == TRACE
        assert told["traceparent"].endswith("-00")
        await generated(service, PARENT)
    assert [span.name for span in grpc_collector.spans if span.name == CALL] == [CALL]
    assert {span.trace_id.hex() for span in grpc_collector.spans} == {TRACE}


async def test_an_error_is_in_the_span_and_names_its_trace(grpc_collector: Collector, monkeypatch) -> None:
    async with serving(**grpc_collector.settings) as service:
        call = service.generation.GenerateImage(image(width=63), metadata=metadata())
        # asked for after the end, gRPC may say that there was none
        headers = dict(await call.initial_metadata())
        with pytest.raises(aio.AioRpcError) as refused:
            await call.read()
        assert read_refusal(refused.value).metadata["trace_id"] == TRACE
        assert headers["traceparent"].startswith(f"00-{TRACE}-")

        async def broken(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(service.server._gate.jobs, "get", broken)
        with pytest.raises(aio.AioRpcError) as failed:
            await service.jobs.GetJob(job_pb2.GetJobRequest(job_id="x"), metadata=metadata())
        assert read_refusal(failed.value).metadata["trace_id"] == TRACE
    span = grpc_collector.named(CALL)
    # a refusal is no fault of the server
    assert (attributes(span)["rpc.response.status_code"], span.status.code) == (
        "INVALID_ARGUMENT",
        Status.STATUS_CODE_UNSET,
    )
    span = grpc_collector.named("omni_grpc.v1.JobService/GetJob")
    assert (attributes(span)["error.type"], span.status.code) == ("INTERNAL", Status.STATUS_CODE_ERROR)


async def test_a_job_that_fails_says_in_which_phase(grpc_collector: Collector) -> None:
    async with serving(**grpc_collector.settings) as service:
        service.executor.failures[Lane.STEP] = InternalError("no such kernel", reason="WORKER_ERROR").failure
        job_id = (await service.create(options={})).job_id
        await service.watch(job_id)
    job, denoise = grpc_collector.named(JOB), grpc_collector.named("denoise")
    assert (job.status.code, job.status.message) == (Status.STATUS_CODE_ERROR, "INTERNAL WORKER_ERROR")
    assert (denoise.status.code, denoise.status.message) == (Status.STATUS_CODE_ERROR, "WORKER_ERROR")
    assert grpc_collector.tree()[JOB] == ["queue", "encode", "denoise"]


async def test_a_cancelled_job_is_no_error(grpc_collector: Collector) -> None:
    async with serving(**grpc_collector.settings) as service:
        service.executor.gates[Lane.STEP].close()
        job = await service.create()
        await until(lambda: any(plan.step for plan in service.executor.plans))
        await service.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=job.job_id))
    span = grpc_collector.named(JOB)
    assert (span.status.code, attributes(span)["omni_grpc.job.state"]) == (Status.STATUS_CODE_UNSET, "CANCELLED")


async def test_many_steps_are_a_bounded_number_of_events(grpc_collector: Collector) -> None:
    async with serving(**grpc_collector.settings) as service:
        await generated(service, sampling={"steps": 150})
    denoise = grpc_collector.named("denoise")
    assert len(denoise.events) == 128
    assert attributes(denoise)["omni_grpc.events_left_out"] == 22
    assert attributes(denoise.events[-1])["omni_grpc.step"] == 150


async def test_each_attempt_to_tell_a_receiver_is_a_span(grpc_collector: Collector, tmp_path) -> None:
    async with web(tmp_path) as site:
        site.paths["/hook"] = answer(b"", status="500 Internal Server Error")
        hosts = ",".join(site.hooks("127.0.0.1:{}", "127.0.0.0/8").webhook_hosts)
        settings = {**grpc_collector.settings, "webhook_hosts": hosts, "outbound_ca": str(site.ca)}
        async with serving(**settings) as service:
            await generated(service, options={"webhook": {"url": site.url("/hook", host="127.0.0.1")}})
            await until(lambda: len(site.asked) == 1)
    span = grpc_collector.named("webhook")
    assert f"traceparent: 00-{TRACE}-{span.span_id.hex()}-01" in site.asked[0].lower()
    assert grpc_collector.tree()[JOB] == [*PHASES, "webhook"]
    said = attributes(span)
    assert (said["http.response.status_code"], said["server.address"]) == (500, "127.0.0.1")
    assert span.status.code == Status.STATUS_CODE_ERROR


async def test_an_upload_is_in_its_trace(grpc_collector: Collector) -> None:
    async with serving(**grpc_collector.settings) as service:
        header = artifact_pb2.UploadAssetRequest(header={"mime_type": "image/png", "size_bytes": 1})
        parts = iter([header, artifact_pb2.UploadAssetRequest(data=b"1")])
        await service.artifacts.UploadAsset(parts, metadata=metadata())
    assert grpc_collector.named("omni_grpc.v1.ArtifactService/UploadAsset").trace_id.hex() == TRACE


async def test_without_a_collector_the_trace_is_passed_on_as_it_came(tmp_path) -> None:
    async with web(tmp_path) as site:
        site.paths["/hook"] = answer(b"")
        hosts = ",".join(site.hooks("127.0.0.1:{}", "127.0.0.0/8").webhook_hosts)
        async with serving(webhook_hosts=hosts, outbound_ca=str(site.ca)) as service:
            options = {"webhook": {"url": site.url("/hook", host="127.0.0.1")}}
            job_id, told = await generated(service, options=options)
            assert told["traceparent"] == PARENT
            assert (await service.get(job_id)).trace_id == TRACE
            await until(lambda: site.asked)
            assert f"traceparent: {PARENT}" in site.asked[0].lower()
            job_id, told = await generated(service, parent="")
            assert "traceparent" not in told
            assert (await service.get(job_id)).trace_id == ""


async def test_headers_come_from_a_file_or_from_the_standard_variable(
    collector: Collector, tmp_path, monkeypatch
) -> None:
    file = tmp_path / "headers"
    file.write_text("# of the collector\nAuthorization: Bearer abc\n\nX-Scope: a=b\n")
    async with serving(**collector.settings, otlp_headers_file=str(file)) as service:
        await generated(service)
    assert (collector.headers[0]["authorization"], collector.headers[0]["x-scope"]) == ("Bearer abc", "a=b")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20def")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "studio")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", collector.protocol)
    collector.requests.clear()
    async with serving() as service:
        await generated(service)
    assert collector.headers[-1]["authorization"] == "Bearer def"
    assert collector.resource["service.name"] == "studio"


async def test_a_collector_that_is_not_there_costs_nothing_and_is_told_once(monkeypatch, caplog) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    # so long the exporter tries: more than a busy machine takes for a job that does not wait for it
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    caplog.set_level(logging.INFO)
    async with serving(otlp_endpoint=f"http://127.0.0.1:{port}") as service:
        for _ in range(2):
            began = time.monotonic()
            await generated(service)
            assert time.monotonic() - began < 4.0
            await until(lambda: service.server._tracing.dropped)
        began = time.monotonic()
    assert time.monotonic() - began < 10.0
    told = [record for record in caplog.records if "spans" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING", "WARNING"]
    assert "do not reach" in told[0].getMessage()
    assert "closed with" in told[1].getMessage()
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_a_collector_that_comes_back_is_told_with_what_was_dropped(collector: Collector, caplog) -> None:
    caplog.set_level(logging.INFO)
    collector.refuse = True
    async with serving(**collector.settings) as service:
        await generated(service)
        await until(lambda: service.server._tracing.dropped)
        collector.refuse = False
        await generated(service)
        await until(lambda: service.server._tracing.sent)
    texts = [record.getMessage() for record in caplog.records if "spans" in record.getMessage()]
    assert "do not reach" in texts[0]
    assert "reach http" in texts[1]
    assert "again" in texts[1]
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("text", "rule"),
    [("authorization", "line 1: write NAME: VALUE"), (None, "cannot be read: .*there is no such file")],
)
def test_a_file_of_headers_that_cannot_be_used_is_refused(tmp_path, text, rule) -> None:
    from omni_grpc.config import TracesConfig
    from omni_grpc.telemetry.tracing import Tracing

    file = tmp_path / "headers"
    if text is not None:
        file.write_text(text)
    config = TracesConfig(otlp_endpoint="http://127.0.0.1:1", otlp_headers_file=str(file))
    with pytest.raises(ConfigError, match=rule) as caught:
        Tracing.of(config, {}, instance="one")
    assert [one.field for one in caught.value.violations] == ["otlp_headers_file"]


def test_without_the_packages_it_is_refused_with_what_installs_them(monkeypatch, caplog) -> None:
    import sys

    from omni_grpc.config import TracesConfig
    from omni_grpc.telemetry.tracing import Tracing

    monkeypatch.delitem(sys.modules, "omni_grpc.telemetry.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"pip install 'omni-grpc\[traces\]'") as caught:
        Tracing.of(TracesConfig(otlp_endpoint="http://127.0.0.1:1"), {}, instance="one")
    assert caught.value.reason == "PACKAGE_MISSING"
    # a variable for all programs is no order to this one
    assert not Tracing.of(TracesConfig(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, instance="one").on
    assert "pip install" in caplog.text


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4317", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_standard_variables_name_a_collector(environ, on) -> None:
    from omni_grpc.config import TracesConfig

    assert (TracesConfig().collector(environ) is not None) == on
