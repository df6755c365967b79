"""The single entry point for new jobs, so that watchers of the whole server learn of each."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator, Sequence

from omni_grpc.engine import Job, Submission
from omni_grpc.fleet import Fleet
from omni_grpc.gate.ask import Ask, Delivery
from omni_grpc.gate.audit import Audit, about_job
from omni_grpc.gate.changes import Changes
from omni_grpc.gate.media import Media, MediaReader
from omni_grpc.gate.options import Asked, OptionRules, check_delivery, read
from omni_grpc.gate.quotas import Quotas
from omni_grpc.gate.refusals import Refusals
from omni_grpc.gate.stored import Stored, available
from omni_grpc.store.artifacts import delete_blobs
from omni_grpc.store.jobs import same_request
from omni_grpc.store.journal import Taken
from omni_grpc.store.records import KeptInput
from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.errors import NotFound
from omni_grpc.types.request import Task
from omni_grpc.webhooks import Webhooks


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """A job, what its caller asked for, and whether an earlier call with the same request_id had made it."""

    job: Job
    asked: Asked
    deduplicated: bool


class Intake:
    """Hands requests to the fleet and notifies `changes` of every new job."""

    def __init__(
        self,
        fleet: Fleet,
        changes: Changes,
        stored: Stored,
        quotas: Quotas,
        audit: Audit,
        media: MediaReader,
        webhooks: Webhooks,
    ) -> None:
        self._fleet = fleet
        self._quotas = quotas
        self._audit = audit
        self._changes = changes
        self._media = media
        self._webhooks = webhooks
        self.rules = OptionRules(
            max_retention=fleet.config.keeping.max_retention,
            durable=fleet.storage.durable,
            signs=fleet.storage.blobs.signs or fleet.config.http.on,
            webhooks=webhooks,
            clock=fleet.storage.clock,
        )

    def check(self, caller: Caller, model: str, task: Task) -> None:
        """What is known without a look at the rest of a request, which a stack may ask before it translates a large
        one. Raises PermissionDenied, NotFound for a model that is not served (an empty name is that of the only one),
        FailedPrecondition for a task that it lacks, Unavailable before it is loaded.
        """
        with self._audit.refusals(caller, "CreateJob", model=model, task=task):
            self._check(caller, model, task)

    def _check(self, caller: Caller, model: str, task: Task) -> None:
        caller.require(Scope.GENERATE)
        self._fleet.model(model).running.check(model, task)

    def check_delivery(self, field: str, delivery: Delivery) -> None:
        """Raises InvalidArgument for a way of delivery that this server has not."""
        refusals = Refusals()
        check_delivery(refusals, field, delivery, self.rules)
        refusals.check()

    async def submit(self, caller: Caller, ask: Ask) -> Accepted:
        """Makes a job of a request. Raises every refusal. Those that need nothing of what is in the media come
        first: the caller's scope, the state of the server, the rules, the queue.
        """
        with self._audit.action(caller, "CreateJob", model=ask.draft.model, task=ask.draft.task) as line:
            accepted = await self._accept(caller, ask)
            line |= about_job(accepted.job) | {"deduplicated": accepted.deduplicated}
        return accepted

    async def _accept(self, caller: Caller, ask: Ask) -> Accepted:
        await self._quotas.refresh()
        self._check(caller, ask.draft.model, ask.draft.task)
        await self._webhooks.refresh()
        asked = read(ask, caller, self.rules)
        submission = asked.submission
        if (earlier := await self._earlier(submission)) is not None:
            return Accepted(earlier, asked, True)
        media = Media()
        if self._fleet.model(submission.draft.model).running.check_submission(submission) is None:
            self._quotas.check(submission)
            media = await self._media.read(caller, ask.media)
        job, deduplicated = await self._begin(submission, media)
        if not deduplicated and not ask.streaming and submission.cancel_on_disconnect:
            # nobody watches yet, so the disconnect grace runs from here on
            with self._fleet.watching(job):
                pass
        return Accepted(job, asked, deduplicated)

    async def _earlier(self, submission: Submission) -> Job | None:
        """The job that this request_id has made already, wherever it is."""
        with available():
            try:
                earlier = await self._fleet.jobs.find_earlier(
                    submission.request_id, submission.fingerprint, submission.tenant
                )
            except NotFound:
                # it has expired, and holds its request_id until it is swept
                await self._fleet.storage.retention.sweep()
                return None
        if earlier is not None and earlier.id in self._fleet.jobs:
            earlier, _ = await self._acknowledged(earlier, submission)
        return earlier

    async def _begin(self, submission: Submission, media: Media) -> tuple[Job, bool]:
        """Makes a job, and returns once it is committed with its inputs."""
        kept = await self._keep(media)
        draft = dataclasses.replace(submission.draft, inputs=media.inputs)
        submission = dataclasses.replace(
            submission, draft=draft, warnings=submission.warnings + media.notes, kept_inputs=kept
        )
        deduplicated = False
        try:
            job, deduplicated = self._submit(submission)
            # of two calls with one request_id at the same time, neither is told of a job before it is committed
            job, other = await self._acknowledged(job, submission)
            deduplicated = deduplicated or other
        except asyncio.CancelledError:
            # the job is there, unless it is another call's
            if deduplicated:
                await self._discard(media, kept)
            raise
        except BaseException:
            await self._discard(media, kept)
            raise
        if deduplicated:
            # another call with this request_id was first, perhaps while the media of this one were decoded
            await self._discard(media, kept)
        else:
            self._changes.notify()
        return job, deduplicated

    async def _acknowledged(self, job: Job, submission: Submission) -> tuple[Job, bool]:
        """The job once it is committed, or the one that another server has made of the same request."""
        try:
            with available():
                await self._fleet.storage.journal.acknowledged(job)
        except Taken as taken:
            with available():
                earlier = await self._fleet.jobs.find(taken.job_id, submission.tenant)
            return same_request(earlier, submission.fingerprint), True
        except asyncio.CancelledError:
            # the client has left: one that is tied to its watchers gets its disconnect grace
            with self._fleet.watching(job):
                pass
            raise
        return job, False

    async def _keep(self, media: Media) -> tuple[KeptInput, ...]:
        """The inputs as they were sent, for a server that has to start over."""
        if not self._fleet.storage.durable:
            return ()
        kept: list[KeptInput] = []
        try:
            with available():
                for file in media.files:
                    blob = f"input-{secrets.token_hex(16)}"
                    kept.append(
                        KeptInput(
                            blob=blob,
                            path=file.path,
                            name=file.name,
                            mime_type=file.mime_type,
                            as_uri=bool(file.uri),
                        )
                    )
                    await self._fleet.storage.blobs.put(blob, _whole(file.uri.encode() or file.data))
        except BaseException:
            await self._discard(media, kept)
            raise
        return tuple(kept)

    async def _discard(self, media: Media, kept: Sequence[KeptInput]) -> None:
        self._fleet.inputs.free(media.inputs)
        await delete_blobs(self._fleet.storage.blobs, [one.blob for one in kept])

    def _submit(self, submission: Submission) -> tuple[Job, bool]:
        """In one go, so that no other call comes between a check of the quotas and the job that is charged for."""
        tenant = submission.tenant
        job, deduplicated = self._fleet.model(submission.draft.model).running.submit(
            submission, approve=lambda request: self._quotas.check_work(tenant, request)
        )
        if not deduplicated:
            self._quotas.charge(tenant, job.request)
        return job, deduplicated


async def _whole(data: bytes) -> AsyncIterator[bytes]:
    yield data
