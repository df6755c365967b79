"""Who goes first, and who is set aside for them."""

import time

import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.v1 import event_pb2, job_pb2

from .service import Service, kinds, serving, until


async def preempted(service: Service, **options) -> tuple[job_pb2.Job, job_pb2.Job]:
    """A long job that was set aside after three steps, for a short one with these options that has a step in hand."""
    gate = service.executor.gates[Lane.STEP]
    gate.close()
    gate.let(2)
    low = await service.create(sampling={"steps": 10})
    await until(lambda: service.engine.jobs.get(low.job_id).step == 2)
    high = await service.create(sampling={"steps": 2}, options=options)
    await until(lambda: service.engine.jobs.get(high.job_id).last_seq == 3)
    gate.let(1)
    await until(lambda: service.engine.jobs.get(low.job_id).step == 3)
    return await service.get(low.job_id), await service.get(high.job_id)


def soon() -> dict[str, int]:
    return {"seconds": int(time.time()) + 3600}


@pytest.mark.parametrize(
    ("policy", "options"),
    [("priority", lambda: {"priority": 1}), ("deadline", lambda: {"deadline": soon()})],
    ids=["priority", "deadline"],
)
async def test_a_job_of_a_higher_rank_takes_its_steps_first_and_the_other_goes_on_where_it_stopped(policy, options):
    async with serving(policy=policy, max_num_seqs=1) as service:
        low, high = await preempted(service, **options())
        assert (low.state, low.step, low.HasField("eta")) == (event_pb2.JOB_STATE_PREEMPTED, 3, False)
        assert high.state == event_pb2.JOB_STATE_RUNNING
        listed = await service.jobs.ListJobs(job_pb2.ListJobsRequest(states=["JOB_STATE_PREEMPTED"]))
        assert [job.job_id for job in listed.jobs] == [low.job_id]
        service.executor.gates[Lane.STEP].open()
        events = await service.watch(low.job_id)
        short = await service.watch(high.job_id)
    assert kinds(events)[3:9] == ["step_progress"] * 3 + ["preempted", "resumed", "step_progress"]
    aside = events[6].preempted
    assert (aside.completed_steps, aside.reason, aside.position) == (3, policy, 1)
    assert (events[7].resumed.completed_steps, events[7].resumed.wait.ToNanoseconds() > 0) == (3, True)
    steps = [event.step_progress.step for event in events if event.HasField("step_progress")]
    assert steps == list(range(1, 11)), "no step is taken twice"
    assert events[-1].completed.stats.preemptions == 1
    assert short[-1].completed.stats.preemptions == 0
    between = (events[6].time.ToNanoseconds(), events[7].time.ToNanoseconds())
    taken = [event.time.ToNanoseconds() for event in short if event.HasField("step_progress")]
    assert between[0] <= taken[0] <= taken[1] <= between[1]


async def test_a_job_that_was_set_aside_can_be_cancelled():
    async with serving(policy="priority", max_num_seqs=1) as service:
        low, high = await preempted(service, priority=1)
        job = (await service.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=low.job_id))).job
        assert job.state == event_pb2.JOB_STATE_CANCELLED
        events = await service.watch(low.job_id)
        assert kinds(events)[-2:] == ["preempted", "cancelled"]
        assert events[-1].cancelled.completed_steps == 3
        service.executor.gates[Lane.STEP].open()
        assert kinds(await service.watch(high.job_id))[-1] == "completed"


async def test_the_queue_is_in_the_order_of_priority():
    async with serving(policy="priority", max_num_seqs=1) as service:
        # two jobs of the highest priority keep everybody else in the queue
        service.executor.gates[Lane.STEP].close()
        await service.create(options={"priority": 100})
        jobs = [await service.create(options={"priority": priority}) for priority in (0, 5, -5, 5)]
        assert [job.priority for job in jobs] == [0, 5, -5, 5]
        assert [(await service.get(job.job_id)).queue_position for job in jobs] == [2, 0, 3, 1]


async def test_a_priority_that_the_policy_does_not_look_at_is_a_warning(service):
    response = await service.jobs.CreateJob(
        job_pb2.CreateJobRequest(generate_image={"model": "toy", "prompt": "x", "options": {"priority": 7}})
    )
    (warning,) = response.warnings
    assert (warning.code, warning.field, warning.requested, warning.applied) == (
        "PRIORITY_WITHOUT_EFFECT", "options.priority", "7", "0",
    )  # fmt: skip
