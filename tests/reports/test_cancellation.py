"""Who leaves or cancels stops the work for it, and nothing else; and what progress tells is true."""

import asyncio
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omni_grpc.engine import JobState
from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.events import StepProgress
from omni_grpc.types.request import Draft
from omni_grpc.v1 import job_pb2
from tests.server.service import Service, image, kinds, serving, to_error, until

ENDS = {"completed", "failed", "cancelled"}
AT_ONCE = {"disconnect_grace": {}}
"""A client that leaves is not waited for."""


async def leave_at(service: Service, kind: str, **changes):
    """Starts a generation, reads up to an event of this kind, and drops the call. Returns its job."""
    call = service.generation.GenerateImage(image(options=AT_ONCE, **changes))
    async for message in call:
        if message.event.WhichOneof("event") == kind:
            break
    call.cancel()
    return service.engine.jobs.get(message.event.job_id)


async def complete(service: Service) -> None:
    """A request that is served as if nothing had been."""
    assert kinds([message.event async for message in service.generation.GenerateImage(image())])[-1] == "completed"


async def events_of(call):
    return [message.event async for message in call]


# --- cancellation -----------------------------------------------------------------------------------------------------


# report B099
@pytest.mark.parametrize(
    ("lane", "kind", "steps"),
    [(Lane.PREPARE, "started", 0), (Lane.STEP, "step_progress", 1), (Lane.DECODE, "decode_progress", 5)],
    ids=["encode", "step", "decode"],
)
async def test_the_work_for_a_client_that_left_stops(service, lane, kind, steps):
    gate = service.executor.gates[lane]
    gate.close()
    gate.let(steps if lane is Lane.STEP else 0)
    job = await leave_at(service, kind, sampling={"steps": 5})
    await until(lambda: job.state is JobState.CANCELLED)
    assert job.step == steps
    assert service.executor.plans[-1].drop == (job.id,), "the worker forgets it"
    gate.open()
    await complete(service)


# report B099
async def test_a_job_in_the_queue_whose_client_left_never_starts():
    async with serving(max_num_seqs=1) as service:
        service.executor.gates[Lane.STEP].close()
        await service.create()
        job = await leave_at(service, "queued")
        await until(lambda: job.state is JobState.CANCELLED)
        service.executor.gates[Lane.STEP].open()
        await complete(service)
        assert job.id not in {request.id for plan in service.executor.plans for request in plan.admit}


# report B101
async def test_fifty_clients_that_leave_anywhere_harm_nobody(service):
    places = [
        "queued",
        "started",
        "encode_done",
        "step_progress",
        "decode_progress",
        "artifact_ready",
        "artifact_chunk",
    ]
    for i in range(50):
        await leave_at(service, places[i % len(places)])
    await complete(service)
    await until(lambda: service.engine.stats().running == 0)


# report B102
async def test_what_a_cancelled_job_still_does_in_the_worker_is_waited_for(service):
    gate = service.executor.gates[Lane.DECODE]
    gate.close()
    first, second = [await service.create() for _ in range(2)]
    await until(lambda: service.engine.jobs.get(second.job_id).step == 3)
    await service.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=first.job_id))
    decoded = [job_id for plan in service.executor.plans for job_id in plan.decode]
    assert decoded == [first.job_id], "the cancel is told, and the phase is taken until the worker has reported"
    gate.let(1)
    await until(lambda: service.executor.plans[-1].decode == (second.job_id,))
    gate.open()
    assert kinds(await service.watch(second.job_id))[-1] == "completed"


# report B103
async def test_a_job_that_is_out_of_time_stops(service):
    gate = service.executor.gates[Lane.STEP]
    gate.close()
    gate.let(2)
    request = image(sampling={"steps": 30}, options={"run_timeout": {"nanos": 50_000_000}})
    messages, error = await to_error(service.generation.GenerateImage(request))
    assert (error.code, error.reason) == ("DEADLINE_EXCEEDED", "RUN_TIMEOUT")
    gate.open()
    await complete(service)
    job = service.engine.jobs.get(messages[0].event.job_id)
    assert (job.step, job.id in service.executor.plans[-1].step) == (2, False)


# report B104
async def test_clients_that_leave_free_what_they_held(service):
    service.executor.gates[Lane.STEP].close()
    service.executor.gates[Lane.STEP].let(1)
    threads = threading.active_count()
    await asyncio.gather(*(leave_at(service, "encode_done") for _ in range(10)))
    await until(lambda: service.server._calls.open_streams == 0)
    stub = health_pb2_grpc.HealthStub(service.channel)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    assert threading.active_count() <= threads


# report B105
async def test_a_cancelled_task_inside_of_a_call_does_not_leave_its_client_waiting(service, monkeypatch):
    def cancelled(*arguments):
        raise asyncio.CancelledError

    monkeypatch.setattr(service.engine, "submit", cancelled)
    monkeypatch.setattr(service.engine.jobs, "find", cancelled)
    for call in (service.generation.GenerateImage(image()).read(), service.get("x")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call, 10)
        assert caught.value.code() is grpc.StatusCode.INTERNAL


# report B106
async def test_a_call_that_was_cancelled_leaves_nothing_behind(service):
    service.executor.gates[Lane.STEP].close()
    job = await leave_at(service, "encode_done")
    await until(lambda: job.state is JobState.CANCELLED)
    assert job.watchers == 0
    assert (service.server._calls.open_streams, service.server._calls._open) == (0, 0)
    assert service.engine._runs == {}
    assert job._waiters == set()


# report B107
def test_a_cancelled_run_frees_its_memory(omni):
    stream = omni.stream(Draft(model="tiny", prompt="x", width=64, height=64, steps=200))
    for event in stream:
        if isinstance(event, StepProgress) and event.step == 3:
            break
    stream.close()
    # the lanes work in order: once this one is through, what was dropped before is gone
    omni.generate("next", width=32, height=32, steps=1)
    runner = omni._engine.replicas[0].executor._worker._runner
    assert (runner._held, runner._rows) == ({}, None)


# --- progress ---------------------------------------------------------------------------------------------------------


# report B108
async def test_every_step_is_told_once_and_in_order(service):
    gate = service.executor.gates[Lane.STEP]
    gate.close()
    seen, polled = [], []
    async for message in service.generation.GenerateImage(image(sampling={"steps": 30})):
        kind = message.event.WhichOneof("event")
        if kind == "step_progress":
            seen.append((message.event.step_progress.step, message.event.step_progress.total_steps))
            polled.append((await service.get(message.event.job_id)).step)
        if kind in ("encode_done", "step_progress"):
            gate.let(1)
    assert seen == [(number, 30) for number in range(1, 31)]
    assert polled == list(range(1, 31)), "the record says the same"


# report B110
async def test_two_jobs_do_not_see_each_others_progress(service):
    calls = [service.generation.GenerateImage(image(sampling={"steps": steps})) for steps in (10, 40)]
    short, long = await asyncio.gather(*map(events_of, calls))
    for events, total in ((short, 10), (long, 40)):
        assert len({event.job_id for event in events}) == 1
        steps = [event.step_progress for event in events if event.HasField("step_progress")]
        assert {step.total_steps for step in steps} == {total}
        assert [step.step for step in steps] == sorted({step.step for step in steps})
    assert short[0].job_id != long[0].job_id


# report B111
@pytest.mark.parametrize("changes", [{}, {"negative_prompt": ""}, {"sampling": {"num_outputs": 3, "steps": 7}}])
async def test_the_total_is_the_number_of_step_events(service, changes):
    events = await events_of(service.generation.GenerateImage(image(**changes)))
    steps = [event.step_progress for event in events if event.HasField("step_progress")]
    (started,) = (event.started for event in events if event.HasField("started"))
    assert {step.total_steps for step in steps} == {len(steps)} == {started.total_steps}


# report B112
@pytest.mark.parametrize("lane", [None, *Lane], ids=["none", *Lane])
async def test_every_job_has_exactly_one_end_and_it_comes_last(service, lane):
    if lane is not None:
        service.executor.failures[lane] = Failure(code=Code.INTERNAL, reason="WORKER_ERROR", message="broke")
    events = await service.watch((await service.create()).job_id)
    ends = [kind for kind in kinds(events) if kind in ENDS]
    assert ends == [kinds(events)[-1]] == ["completed" if lane is None else "failed"]


# report B113
async def test_after_many_jobs_events_still_flow_and_a_late_watcher_is_in_the_picture():
    async with serving(retention=0.05) as service:
        for _ in range(200):
            await complete(service)
        gate = service.executor.gates[Lane.STEP]
        gate.close()
        gate.let(4)
        job = await service.create(sampling={"steps": 8})
        await until(lambda: service.engine.jobs.get(job.job_id).step == 4)
        state = await service.get(job.job_id)
        assert (state.step, state.last_seq) == (4, 7)
        watching = asyncio.create_task(service.watch(job.job_id, after_seq=2))
        await until(lambda: service.engine.jobs.get(job.job_id).watchers == 1)
        gate.open()
        assert [event.seq for event in await watching] == list(range(3, 15))
        await until(lambda: len(service.engine.jobs) == 0)
        assert service.engine.artifacts.size_bytes == 0
