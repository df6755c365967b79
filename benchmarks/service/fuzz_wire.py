"""Sends the cases of `fuzz_messages` to a running server, and counts what it answers."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import io
import time
from collections.abc import AsyncIterator
from typing import Any, TypedDict

import grpc
import PIL.Image
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from omni_grpc.client import AsyncClient
from omni_grpc.client.channel import options_for
from omni_grpc.client.result import MediaResult
from omni_grpc.v1 import event_pb2, job_pb2, job_pb2_grpc, sampling_pb2

from . import fuzz_messages
from .fuzz_messages import Case, Known
from .server import PATIENCE, Resources, Server, resources

PROMPT = "a red circle"
AT_ONCE = 12
ROUND = 500
"""Calls between two looks at the server; jobs and ids are made anew for each round."""
WATCHED = 0.5
"""Seconds that a stream without an end is read for."""
ENDLESS = ("WatchJob", "WatchJobs", "WatchServerStats")
LIMIT = "limit"
"""What a call counts as that this side ended, since it had no end of its own."""
BY_GRPC = ("Received message larger than max", "received metadata size exceeds", "Received RST_STREAM")
"""Refusals of gRPC itself, before any code of ours: they cannot have details."""


class UsualOptions(TypedDict):
    """Those that every task takes."""

    width: int
    height: int
    steps: int
    seed: int
    timeout: float


@dataclasses.dataclass
class Tally:
    """What was answered: (rpc, code and reason) -> calls; what should not have been, with the case that it was."""

    answers: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Answer:
    """How a call ended. `reason` is that of its ErrorInfo, "" without one."""

    code: str
    reason: str = ""
    message: str = ""

    @property
    def fault(self) -> str:
        """What is wrong with it, or ""."""
        if self.code in ("INTERNAL", "UNKNOWN", "DATA_LOSS"):
            return f"{self.code} {self.reason}: {self.message[:300]}"
        if self.code in ("OK", LIMIT) or self.reason:
            return ""
        return (
            ""
            if any(text in self.message for text in BY_GRPC)
            else f"{self.code} without ErrorInfo: {self.message[:300]}"
        )


async def fuzz(server: Server, count: int, seed: int, tally: Tally, *, first: int = 0) -> None:
    """Sends cases `first` to `first + count`."""
    before = await settled(server)
    _, bits = await usual(server)
    for begin in range(first, first + count, ROUND):
        known, _ = await usual(server, asset=True)
        cases = iter(range(begin, min(begin + ROUND, first + count)))
        async with channels_to(server, 4) as channels:
            senders = [_sender(server, channels[n % 4], cases, seed, known, tally) for n in range(AT_ONCE)]
            await asyncio.gather(*senders)
        await _check_jobs(server, tally)
    after = await settled(server)
    tally.problems += [f"resources: {problem}" for problem in after.grown_since(before)]
    if server.worker() != before.worker:
        tally.problems.append("the worker died")
    if (await usual(server))[1] != bits:
        tally.problems.append("a generation afterwards has other bits than the same one before")


@contextlib.asynccontextmanager
async def channels_to(server: Server, count: int) -> AsyncIterator[list[Any]]:
    """Channels to a server, each with a connection of its own."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [aio.insecure_channel(server.address, options=options) for _ in range(count)]
    try:
        yield channels
    finally:
        for channel in channels:
            await channel.close()


async def _sender(server: Server, channel: Any, cases: Any, seed: int, known: Known, tally: Tally) -> None:
    for index in cases:
        case = fuzz_messages.case(seed, index, known)
        answer = await answered(server, channel, case)
        tally.answers[case.method.name, f"{answer.code} {answer.reason}".strip()] += 1
        tally.kinds[case.how] += 1
        if answer.fault:
            tally.problems.append(f"case {seed}:{index} ({case.how}) {case.method.name}: {answer.fault}")


async def answered(server: Server, channel: Any, case: Case) -> Answer:
    """Makes the call to its end."""
    began, endless = time.monotonic(), case.method.name in ENDLESS
    limit = WATCHED if endless else PATIENCE
    try:
        if case.method.client_streaming:
            await asyncio.to_thread(_upload, server, case)
        else:
            call = channel.unary_stream(case.path)(case.payloads[0], metadata=case.metadata, timeout=limit)
            async for _ in call:
                pass
    except grpc.RpcError as error:
        answer = _of(error)
        if answer.code == "DEADLINE_EXCEEDED" and not answer.reason and time.monotonic() - began >= 0.9 * limit:
            return Answer(LIMIT) if endless else Answer("UNKNOWN", "HANG", f"no end within {limit:g} s")
        return answer
    return Answer("OK")


def _upload(server: Server, case: Case) -> None:
    """By the other client of gRPC: that of asyncio tells INTERNAL of its own where an answer comes before all parts of
    an upload are sent.
    """
    with grpc.insecure_channel(server.address, options=options_for(server.address)) as channel:
        channel.stream_unary(case.path)(iter(case.payloads), metadata=case.metadata, timeout=PATIENCE)


def _of(error: Any) -> Answer:
    reason = ""
    for name, value in error.trailing_metadata() or ():
        if name == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    reason = info.reason
    return Answer(error.code().name, reason, error.details() or "")


async def settled(server: Server) -> Resources:
    """What the server holds once its jobs are deleted and its memory has come to rest."""
    async with channels_to(server, 1) as (channel,):
        jobs = job_pb2_grpc.JobServiceStub(channel)
        while listed := (await jobs.ListJobs(job_pb2.ListJobsRequest(page_size=500))).jobs:
            for job in listed:
                try:
                    await jobs.CancelJob(job_pb2.CancelJobRequest(job_id=job.job_id))
                    await jobs.DeleteJob(job_pb2.DeleteJobRequest(job_id=job.job_id))
                except aio.AioRpcError as error:
                    if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
                        raise
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    return resources(server)


async def usual(server: Server, asset: bool = False) -> tuple[Known, str]:
    """Makes what the model makes, and returns what the server has then and the SHA-256 of the output. Raises OmniError
    where that fails.
    """
    picture, options = _png(), UsualOptions(width=32, height=32, steps=1, seed=7, timeout=PATIENCE)
    async with AsyncClient(server.address) as client:
        model = (await client.list_models())[0]
        made: MediaResult
        if sampling_pb2.TASK_TEXT_TO_VIDEO in model.tasks:
            made = await client.generate_video(PROMPT, num_frames=5, **options)
        elif sampling_pb2.TASK_TEXT_TO_IMAGE in model.tasks:
            made = await client.generate_image(PROMPT, **options)
        else:
            made = await client.edit_image(PROMPT, images=[picture], **options)
        known = Known(
            model=model.name,
            job_id=made.job_id,
            artifact_id=made.artifacts[0].artifact_id,
            asset_id=(await client.upload(picture)).asset_id if asset else "",
            picture=picture,
        )
        return known, made.artifacts[0].sha256


def _png() -> bytes:
    buffer = io.BytesIO()
    PIL.Image.radial_gradient("L").resize((32, 32)).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


async def _check_jobs(server: Server, tally: Tally) -> None:
    """A job that failed for no reason that its request gave is a fault too."""
    async with channels_to(server, 1) as (channel,):
        jobs, token = job_pb2_grpc.JobServiceStub(channel), ""
        while True:
            asked = job_pb2.ListJobsRequest(states=[event_pb2.JOB_STATE_FAILED], page_size=500, page_token=token)
            page = await jobs.ListJobs(asked)
            for job in page.jobs:
                if job.error.code in (grpc.StatusCode.INTERNAL.value[0], grpc.StatusCode.UNKNOWN.value[0]):
                    tally.problems.append(f"job {job.job_id} failed: {job.error.message[:300]}")
                tally.answers["(jobs that failed)", _name(job.error.code)] += 1
                await jobs.DeleteJob(job_pb2.DeleteJobRequest(job_id=job.job_id))
            token = page.next_page_token
            if not token:
                return


def _name(number: int) -> str:
    return next(code.name for code in grpc.StatusCode if code.value[0] == number)
