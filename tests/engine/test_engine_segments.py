"""Outputs that are made part by part: each part is decoded while the next one takes its steps."""

import asyncio

import pytest

from omni_grpc.engine import JobState, Submission
from omni_grpc.types.errors import Code
from omni_grpc.types.events import Completed, DecodeProgress, Started, StepProgress
from omni_grpc.types.media import VideoFormat
from omni_grpc.types.plan import DecodedPart, Plan, RequestStep, Stepped
from omni_grpc.types.request import Draft, Guidance, Task
from omni_grpc.types.spec import Defaults, Limits
from tests.engine.manual import READY, started_engine
from tests.toy import toy_checkpoint

STEPS, SEGMENTS, FRAMES = 2, 3, 5
LIMITS = Limits(
    size_multiple=16,
    min_size=16,
    max_size=64,
    max_pixels=64 * 64,
    max_prompt_tokens=8,
    max_frames=50,
    frame_multiple=FRAMES,
    segment_frames=FRAMES,
)
DEFAULTS = Defaults(width=16, height=16, steps=STEPS, guidance=Guidance(), num_frames=FRAMES, fps=8.0)


async def engine_for_videos(**settings):
    engine, worker = await started_engine(**settings)
    engine.checkpoint = toy_checkpoint(
        tasks=(Task.TEXT_TO_VIDEO,),
        limits=lambda configs: LIMITS,
        defaults=lambda configs: DEFAULTS,
        takes=frozenset({"num_frames", "fps"}),
    )
    return engine, worker


def ask(engine, segments=SEGMENTS):
    draft = Draft(
        model="toy",
        prompt="a star",
        task=Task.TEXT_TO_VIDEO,
        num_frames=segments * FRAMES,
        output_format=VideoFormat.MP4,
    )
    return engine.submit(Submission(draft=draft))[0]


def stepped(worker, *jobs):
    """The worker has taken the next step of each of these jobs."""
    progress = []
    for job in jobs:
        step = job.step + 1
        ends = step % STEPS == 0
        progress.append(
            RequestStep(
                id=job.id,
                step=step,
                total=job.total_steps,
                sigma=1.0,
                timestep=1000.0,
                rows=1,
                segment=(step - 1) // STEPS,
                segments=job.segments,
                part_ready=ends and step < job.total_steps,
                finished=step == job.total_steps,
            )
        )
    worker.deliver(Stepped(elapsed=0.5, progress=tuple(progress)))


def decoded_part(worker, job, done):
    worker.deliver(DecodedPart(id=job.id, elapsed=0.25, done=done, total=job.segments))


async def running(engine, worker, *segments):
    """Jobs of so many segments each that share their steps."""
    jobs = []
    for count in segments:
        job = ask(engine, count)
        jobs.append(job)
        worker.prepared(job.id)
    return jobs


def story(job):
    """Steps as (segment, step), decodes as (done, total)."""
    return [
        (event.segment, event.step) if isinstance(event, StepProgress) else (event.done_units, event.total_units)
        for event in (entry.event for entry in job.entries)
        if isinstance(event, StepProgress | DecodeProgress)
    ]


async def test_a_part_is_decoded_while_the_steps_of_the_next_one_go_on():
    engine, worker = await engine_for_videos()
    (job,) = await running(engine, worker, SEGMENTS)
    (started,) = (entry.event for entry in job.entries if isinstance(entry.event, Started))
    assert started.total_steps == job.total_steps == STEPS * SEGMENTS, "of all segments, from the start"
    stepped(worker, job)
    assert worker.last == Plan(step=(job.id,))
    stepped(worker, job)
    assert worker.last == Plan(step=(job.id,), decode_parts=(job.id,)), "both lanes at once"
    stepped(worker, job)
    assert worker.last == Plan(step=(job.id,)), "the part is still in the decode lane"
    decoded_part(worker, job, done=1)
    stepped(worker, job)
    assert worker.last == Plan(step=(job.id,), decode_parts=(job.id,))
    decoded_part(worker, job, done=2)
    stepped(worker, job)
    stepped(worker, job)
    assert worker.last == Plan(decode=(job.id,))
    worker.decoded(job.id)
    assert job.state is JobState.SUCCEEDED
    assert story(job) == [
        (0, 1), (0, 2), (1, 3), (1, SEGMENTS), (1, 4), (2, SEGMENTS), (2, 5), (2, 6), (2, SEGMENTS),
    ]  # fmt: skip
    done = job.entries[-1].event
    assert isinstance(done, Completed)
    assert (done.effective.steps, done.stats.steps_run) == (STEPS, STEPS * SEGMENTS)
    assert done.stats.decode == pytest.approx(2 * 0.25 + 0.2), "parts and the rest"


async def test_a_decoder_that_is_slower_than_the_steps_holds_up_none_of_them():
    engine, worker = await engine_for_videos()
    (job,) = await running(engine, worker, SEGMENTS)
    for _ in range(STEPS * SEGMENTS - 1):
        stepped(worker, job)
        assert worker.last.step == (job.id,)
    stepped(worker, job)
    assert sum(bool(plan.decode_parts) for plan in worker.plans) == 1, "the first part is still in the lane"
    assert worker.last.decode == ()
    decoded_part(worker, job, done=1)
    assert worker.last == Plan(decode=(job.id,)), "what is left of it is decoded at the end, in one go"
    worker.decoded(job.id)
    assert job.state is JobState.SUCCEEDED
    assert story(job)[-2:] == [(0, SEGMENTS), (1, SEGMENTS)]


async def test_the_decode_lane_takes_parts_and_whole_outputs_in_turn():
    engine, worker = await engine_for_videos()
    long, short = await running(engine, worker, 2, 1)
    stepped(worker, long)
    stepped(worker, long, short)
    assert worker.last.decode_parts == (long.id,)
    stepped(worker, long, short)
    assert worker.last.decode == (), "one at a time"
    decoded_part(worker, long, done=1)
    assert worker.last == Plan(decode=(short.id,))
    worker.decoded(short.id)
    assert (short.state, long.state) == (JobState.SUCCEEDED, JobState.RUNNING)


async def test_a_job_that_is_cancelled_while_a_part_is_decoded_ends_at_once_and_its_neighbour_goes_on():
    engine, worker = await engine_for_videos()
    job, neighbour = await running(engine, worker, SEGMENTS, SEGMENTS)
    stepped(worker, job)
    stepped(worker, job, neighbour)
    assert worker.last.decode_parts == (job.id,)
    engine.cancel(job.id, "enough")
    assert worker.last == Plan(drop=(job.id,))
    assert job.entries[-1].event.completed_steps == STEPS
    stepped(worker, neighbour)
    assert worker.last == Plan(step=(neighbour.id,)), "the lane is busy until the worker reports, whoever is gone"
    events = job.last_seq
    decoded_part(worker, job, done=1)
    assert worker.last == Plan(decode_parts=(neighbour.id,))
    assert job.last_seq == events
    assert engine.stats().running == 1


async def test_a_part_that_waits_for_its_decode_goes_with_its_job():
    engine, worker = await engine_for_videos()
    first, second = await running(engine, worker, SEGMENTS, SEGMENTS)
    stepped(worker, first)
    stepped(worker, first, second)
    stepped(worker, first, second)
    engine.cancel(second.id, "enough")
    decoded_part(worker, first, done=1)
    assert all(second.id not in plan.decode_parts for plan in worker.plans)
    stepped(worker, first)
    assert worker.last.decode_parts == (first.id,)


async def test_a_part_whose_decode_fails_fails_its_job_alone():
    engine, worker = await engine_for_videos()
    bad, good = await running(engine, worker, SEGMENTS, 2)
    stepped(worker, bad)
    stepped(worker, bad, good)
    assert worker.last == Plan(step=(bad.id, good.id), decode_parts=(bad.id,))
    worker.broken(bad.id, "decode")
    assert (bad.state, bad.failure.reason) == (JobState.FAILED, "X")
    assert bad.entries[-1].event.stats.steps_run == STEPS
    stepped(worker, good)
    assert worker.last == Plan(step=(good.id,), decode_parts=(good.id,)), "the step in flight was not the last of both"
    decoded_part(worker, good, done=1)
    stepped(worker, good)
    stepped(worker, good)
    worker.decoded(good.id)
    assert good.state is JobState.SUCCEEDED
    assert engine.stats().running == 0


async def test_a_worker_that_dies_with_a_part_in_hand_fails_its_job_and_the_next_one_starts_clean():
    engine, worker = await engine_for_videos(max_num_seqs=1, restart_backoff=0)
    (job,) = await running(engine, worker, SEGMENTS)
    waiting = ask(engine)
    stepped(worker, job)
    stepped(worker, job)
    assert worker.last.decode_parts == (job.id,)
    worker.died()
    assert (job.failure.code, job.failure.reason) == (Code.UNAVAILABLE, "WORKER_DIED")
    assert waiting.state is JobState.QUEUED
    await asyncio.sleep(0.01)
    worker.deliver(READY)
    assert worker.last == Plan(admit=(waiting.request,))
    worker.prepared(waiting.id)
    for _ in range(STEPS):
        stepped(worker, waiting)
    assert worker.last.decode_parts == (waiting.id,), "no lane is taken by what died"
    decoded_part(worker, waiting, done=1)
    for _ in range(STEPS * (SEGMENTS - 1)):
        stepped(worker, waiting)
    decoded_part(worker, waiting, done=2)
    worker.decoded(waiting.id)
    assert waiting.state is JobState.SUCCEEDED


async def test_a_part_in_a_plan_that_does_not_reach_the_worker_is_lost_with_its_job():
    """The worker died a moment ago, and the news of it is still to come."""
    engine, worker = await engine_for_videos(restart_backoff=0)
    (job,) = await running(engine, worker, SEGMENTS)
    stepped(worker, job)
    worker.gone = True
    stepped(worker, job)
    assert worker.last.decode_parts == ()
    assert job.state is JobState.RUNNING
    worker.died()
    assert job.state is JobState.FAILED
    assert engine.stats().running == 0


async def test_a_preempted_job_has_its_finished_part_decoded_meanwhile():
    engine, worker = await engine_for_videos(policy="priority", max_num_seqs=1)
    (low,) = await running(engine, worker, SEGMENTS)
    stepped(worker, low)
    draft = Draft(model="toy", prompt="x", task=Task.TEXT_TO_VIDEO, output_format=VideoFormat.MP4)
    high = engine.submit(Submission(draft=draft, priority=1))[0]
    worker.prepared(high.id)
    stepped(worker, low)
    assert worker.last == Plan(step=(high.id,), decode_parts=(low.id,))
    assert low.state is JobState.PREEMPTED
    decoded_part(worker, low, done=1)
    assert story(low)[-1] == (1, SEGMENTS)
    for _ in range(STEPS):
        stepped(worker, high)
    assert low.state is JobState.RUNNING
    assert worker.last.step == (low.id,)
