"""The client is in the trace of the program that uses it, where that has a span."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from omni_grpc.cli.main import main
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.v1 import job_pb2
from tests.server.service import serving
from tests.telemetry.collector import GRPC, collecting

TRACER = TracerProvider(shutdown_on_exit=False).get_tracer("tests")


@pytest.mark.parametrize("token", [None, "omni_not_asked_for"])
async def test_the_span_of_a_program_is_above_its_calls(kind, token) -> None:
    with collecting(GRPC) as collector:
        async with (
            serving(**collector.settings) as service,
            kind(f"127.0.0.1:{service.server.port}", token=token) as client,
        ):
            with TRACER.start_as_current_span("mine") as mine:
                made = await client.generate_image("a red circle", model="toy")
                above = mine.get_span_context()
            await client.generate_image("a red circle", model="toy")
    first, second = (span for span in collector.spans if span.name.endswith("GenerateImage"))
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (f"{above.trace_id:032x}", f"{above.span_id:016x}")
    assert made.trace_id == first.trace_id.hex()
    assert second.parent_span_id == b""


async def test_an_error_has_the_trace_in_its_metadata(kind, service) -> None:
    async with kind(f"127.0.0.1:{service.server.port}") as client:
        with TRACER.start_as_current_span("mine") as mine, pytest.raises(InvalidArgument) as caught:
            await client.generate_image("a red circle", model="toy", width=63)
        assert caught.value.failure.metadata["trace_id"] == f"{mine.get_span_context().trace_id:032x}"
        with pytest.raises(InvalidArgument) as caught:
            await client.generate_image("a red circle", model="toy", width=63)
        assert "trace_id" not in caught.value.failure.metadata


async def test_a_span_that_is_none_is_not_told_of(kind, service) -> None:
    async with kind(f"127.0.0.1:{service.server.port}") as client:
        with trace.use_span(trace.INVALID_SPAN):
            made = await client.generate_image("a red circle", model="toy")
    assert made.trace_id == ""
    assert (await service.jobs.GetJob(job_pb2.GetJobRequest(job_id=made.job_id))).job.trace_id == ""


async def test_the_command_line_says_the_trace(tmp_path, capsys) -> None:
    with collecting(GRPC) as collector:
        async with serving(**collector.settings) as service:
            server = ("--server", f"127.0.0.1:{service.server.port}", "--quiet")
            asked = ("generate", "x", "--out", str(tmp_path / "o.png"), *server, "--verbose")
            assert await asyncio.to_thread(main, asked) == 0
            told = capsys.readouterr().err
            job = (await service.jobs.ListJobs(job_pb2.ListJobsRequest())).jobs[0]
            assert await asyncio.to_thread(main, (*asked, "--width", "63")) == 1
            refused = capsys.readouterr().err
    assert told == f"job {job.job_id}, trace {job.trace_id}\n"
    assert "  trace " in refused
