"""A job that another server takes over stays in its trace, and that server sends its spans."""

import pytest

from omni_grpc.v1 import job_pb2
from tests.lasting.lives import stepping
from tests.lasting.test_two_servers import held
from tests.server.service import image, until
from tests.telemetry.collector import GRPC, attributes, collecting
from tests.telemetry.test_traces import JOB, PARENT, TRACE

pytestmark = pytest.mark.service


async def test_a_job_that_is_taken_over_goes_on_in_its_trace(shared):
    with collecting(GRPC) as collector:
        first = await shared.start(**collector.settings)
        second = await shared.start(**collector.settings)
        await until(lambda: first.gate._sharing._others and second.gate._sharing._others)
        held(first)
        options = {"on_server_restart": "RESTART_POLICY_REQUEUE"}
        asked = job_pb2.CreateJobRequest(generate_image=image(options=options))
        made = await first.jobs.CreateJob(asked, metadata=(("traceparent", PARENT),))
        await stepping(first, made.job.job_id)
        await first.abandon()
        await second.watch(made.job.job_id)
        await second.stop()
        first.server._tracing.close()
    job, call = collector.named(JOB), collector.named("omni_grpc.v1.JobService/CreateJob")
    assert (job.trace_id.hex(), job.parent_span_id) == (TRACE, call.span_id)
    assert attributes(job)["omni_grpc.server"] == second.gate.instance_id != first.gate.instance_id
    attempts = [attributes(span)["omni_grpc.attempt"] for span in collector.spans if span.name == "denoise"]
    assert attempts == [1, 2]
