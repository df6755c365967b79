"""A job that outlives its server stays in its trace."""

from __future__ import annotations

from omni_grpc.engine.scheduler import Lane
from omni_grpc.v1 import job_pb2
from tests.lasting.lives import place, restarted, stepping
from tests.server.service import image
from tests.telemetry.collector import GRPC, attributes, collecting
from tests.telemetry.test_traces import JOB, PARENT, PHASES, TRACE

REQUEUE = {"on_server_restart": "RESTART_POLICY_REQUEUE"}


async def test_a_job_that_starts_over_on_the_next_server_stays_one_span(tmp_path) -> None:
    with collecting(GRPC) as collector:
        async with place("sqlite", tmp_path, **collector.settings) as found:
            first = await found.start()
            first.executor.gates[Lane.STEP].close()
            asked = job_pb2.CreateJobRequest(generate_image=image(options=REQUEUE))
            made = await first.jobs.CreateJob(asked, metadata=(("traceparent", PARENT),))
            await stepping(first, made.job.job_id)
            second = await restarted(found, first)
            await second.watch(made.job.job_id)
            assert (await second.get(made.job.job_id)).trace_id == TRACE
            await second.stop()
            first.server._tracing.close()
    job, call = collector.named(JOB), collector.named("omni_grpc.v1.JobService/CreateJob")
    assert (job.trace_id.hex(), job.parent_span_id) == (TRACE, call.span_id)
    assert collector.tree()[JOB] == ["queue", "encode", "denoise", *PHASES]
    lost, again = (span for span in collector.spans if span.name == "denoise")
    assert (attributes(lost)["omni_grpc.attempt"], lost.status.message) == (1, "SERVER_RESTARTED")
    assert (attributes(again)["omni_grpc.attempt"], again.status.message) == (2, "")
    assert [event.name for event in job.events] == ["retrying"]


async def test_a_webhook_that_is_owed_stays_in_its_trace_over_a_restart(tmp_path) -> None:
    """Its span is that of the job, which the next server knows from the store."""
    hosts = {"webhook_hosts": "127.0.0.1:9,127.0.0.0/8"}
    with collecting(GRPC) as collector:
        async with place("sqlite", tmp_path, **collector.settings, **hosts) as found:
            first = await found.start(webhook_timeout=0.2)
            options = {"webhook": {"url": "https://127.0.0.1:9/hook"}}
            asked = job_pb2.CreateJobRequest(generate_image=image(options=options))
            made = await first.jobs.CreateJob(asked, metadata=(("traceparent", PARENT),))
            await first.watch(made.job.job_id)
            await first.stop()
            second = await found.start(webhook_timeout=0.2)
            (owed,) = await second.engine.storage.store.deliveries.of(made.job.job_id)
            await second.stop()
    assert owed.trace is not None
    assert (owed.trace.trace_id, owed.trace.span_id) == (TRACE, collector.named(JOB).span_id.hex())
