"""Goes on with jobs of a server that is gone: this one before its restart, or another one of the same store."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence

from omni_grpc.engine import Job, JobState
from omni_grpc.fleet import Fleet
from omni_grpc.gate.media import MediaReader
from omni_grpc.media_in.inputs import InputFile
from omni_grpc.store.records import KeptInput, StoredJob
from omni_grpc.store.seam import Blobs, MissingBlob, StoreError
from omni_grpc.types.errors import Code, Failure, OmniError
from omni_grpc.types.events import Cancelled, Failed, Retrying
from omni_grpc.types.media import Inputs
from omni_grpc.types.os_errors import plain
from omni_grpc.types.results import Stats

logger = logging.getLogger(__name__)

RESTARTED = "SERVER_RESTARTED"
RETRY_SECONDS = 1.0
"""Between two tries to find room for the inputs of a job, or to reach the store."""


class Recovery:
    """Takes jobs that are in the store, in their order. Those that waited go on waiting; those that had started start
    over, once, if their request says so, and fail as retryable if not.
    """

    def __init__(self, fleet: Fleet, media: MediaReader) -> None:
        self._fleet = fleet
        self._media = media
        self._jobs: asyncio.Queue[str] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._held_up = asyncio.Event()

    def take(self, job_ids: Sequence[str]) -> None:
        """Jobs that are this server's from now on."""
        if not job_ids:
            return
        logger.info("%d jobs of a server that is gone: going on with them", len(job_ids))
        for job_id in job_ids:
            self._jobs.put_nowait(job_id)
        if self._task is None or self._task.done():
            self._held_up.clear()
            self._task = asyncio.create_task(self._run(), name="omni_grpc-recovery")

    async def caught_up(self) -> None:
        """Returns once all have been taken that need not wait for others to give room."""
        if self._task is not None:
            held_up = asyncio.ensure_future(self._held_up.wait())
            await asyncio.wait({self._task, held_up}, return_when=asyncio.FIRST_COMPLETED)
            held_up.cancel()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while not self._jobs.empty():
            job_id = self._jobs.get_nowait()
            while self._fleet.takes_over:
                try:
                    for stored in await self._fleet.storage.store.jobs.read([job_id]):
                        with self._blamed(stored):
                            await self._take(stored)
                    break
                except StoreError as error:
                    logger.warning("job %s is not taken yet: %s", job_id, error)
                self._held_up.set()
                await asyncio.sleep(RETRY_SECONDS)

    @contextlib.contextmanager
    def _blamed(self, stored: StoredJob) -> Iterator[None]:
        """Whatever goes wrong inside with one job is its failure: those behind it are taken all the same."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            job = self._fleet.jobs.restore(stored)
            logger.exception("unexpected error while going on with job %s", job.id)
            message = f"{type(error).__name__} while going on with it: {plain(error)}"
            failure = Failure(code=Code.INTERNAL, reason="ENGINE_ERROR", message=message)
            if not job.ended:
                self._fleet.settle(job, Failed(failure=failure, stats=Stats()))

    async def _take(self, stored: StoredJob) -> None:
        job = self._fleet.jobs.restore(stored)
        if job.state.terminal or job.id in self._fleet.jobs:
            return
        if job.record.cancel_reason is not None:
            event = Cancelled(reason=job.record.cancel_reason, completed_steps=job.step, stats=Stats())
            self._fleet.settle(job, event)
            return
        lost = None if job.state is JobState.QUEUED else _lost()
        failure = self._hopeless(job, lost)
        if failure is None:
            try:
                inputs = await self._inputs(job)
            except OmniError as error:
                failure = error.failure
            else:
                job.request = dataclasses.replace(job.request, inputs=inputs)
                engine = self._fleet.engine_of(job)
                assert engine is not None, "what has no engine is hopeless"
                engine.resume(job, lost=lost)
                if job.id not in self._fleet.jobs:
                    self._fleet.inputs.free(inputs)
                elif job.record.spec.inputs:
                    await self._look_again(job)
                return
        self._fleet.settle(job, Failed(failure=failure, stats=Stats()))

    async def _look_again(self, job: Job) -> None:
        """Stops a job whose end was asked for while its inputs were read."""
        for stored in await self._fleet.storage.store.jobs.read([job.id]):
            if (reason := stored.record.cancel_reason) is not None and job.id in self._fleet.jobs:
                self._fleet.cancel(job.id, reason)

    def _hopeless(self, job: Job, lost: Failure | None) -> Failure | None:
        """Why a job is not started again."""
        spec = job.record.spec
        again = any(isinstance(one.event, Retrying) and one.event.failure.reason == RESTARTED for one in job.entries)
        if lost is not None and (again or not spec.requeue):
            return lost
        if self._fleet.engine_of(job) is None:
            names = [repr(model.name) for model in self._fleet.models if model.engine is not None]
            loaded = ", ".join(names) or "no model"
            message = f"the server was started again with {loaded}, and not {job.record.model!r}: send it elsewhere"
            return Failure(code=Code.FAILED_PRECONDITION, reason="MODEL_NOT_SERVED", message=message)
        return None

    async def _inputs(self, job: Job) -> Inputs:
        """The decoded inputs of a job. Raises what they are refused for."""
        spec = job.record.spec
        if not spec.inputs:
            return Inputs()
        files = [await _file(self._fleet.storage.blobs, kept) for kept in spec.inputs]
        while True:
            try:
                return (await self._media.decode(files, job.tenant)).inputs
            except OmniError as error:
                if error.failure.reason != "INPUTS_FULL":
                    raise
            # those that start give theirs back
            self._held_up.set()
            await asyncio.sleep(RETRY_SECONDS)


def _lost() -> Failure:
    message = "the server was lost while this job ran; send the request again"
    return Failure(code=Code.UNAVAILABLE, reason=RESTARTED, message=message)


def _input_lost(code: Code, what: str) -> OmniError:
    return Failure(code=code, reason="INPUT_LOST", message=f"{what}; send the request again").error()


async def _file(blobs: Blobs, kept: KeptInput) -> InputFile:
    try:
        data = b"".join([piece async for piece in blobs.read(kept.blob)])
    except MissingBlob:
        raise _input_lost(Code.NOT_FOUND, f"{kept.path}: is not where inputs are kept any more") from None
    except StoreError as error:
        if error.retryable:
            raise
        raise _input_lost(Code.UNAVAILABLE, f"{kept.path}: {error}") from error
    content = {"uri": data.decode()} if kept.as_uri else {"data": data}
    return InputFile(path=kept.path, name=kept.name, mime_type=kept.mime_type, **content)
