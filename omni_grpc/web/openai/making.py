"""From a request to the end of its job, for as long as the client waits."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.message import Message
from starlette.requests import Request
from starlette.types import Receive

from omni_grpc.gate import Accepted, Gate, Job, JobState, ModelView, Update
from omni_grpc.gate.jobs import raise_outcome
from omni_grpc.server.calls import Gone
from omni_grpc.server.intake import aside, asked
from omni_grpc.server.server import Backend
from omni_grpc.server.tasks import task_of
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import DeadlineExceeded, OmniError
from omni_grpc.types.log_lines import more
from omni_grpc.types.media import TRANSPARENT_MASK
from omni_grpc.types.results import Artifact, RequestWarning
from omni_grpc.types.spec import GuidanceKind
from omni_grpc.v1 import options_pb2
from omni_grpc.web.openai.attempts import Attempt, Attempts
from omni_grpc.web.openai.body import Body
from omni_grpc.web.openai.reading import Fields, Reading

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_SECONDS = 590.0
"""How long a call that is answered at its end may take: the official clients give it up after 600 seconds."""
RETRY_COUNT = "x-stainless-retry-count"
KEY = "Idempotency-Key"


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A job of a request, and what there is to say of how it came to be."""

    job: Job
    reading: Reading
    streaming: bool

    @property
    def warnings(self) -> list[dict[str, str]]:
        return self.reading.told(self.job.warnings)


class Maker:
    """Makes jobs of bodies and waits for them."""

    def __init__(self, backend: Backend, attempts: Attempts, *, answer_seconds: float = ANSWER_SECONDS) -> None:
        self.gate: Gate = backend.gate
        self.most = backend.config.server.max_message_bytes
        self._identity = backend.config.identity.on
        self._attempts = attempts
        self._answer_seconds = answer_seconds

    # --- from a body to a message -------------------------------------------------------------------------------------

    async def read(self, caller: Caller, body: Body, kind: str, message: Any, fields: Fields) -> Reading:
        """The body as a request message. Raises InvalidArgument, and NotFound for a model that is not served."""
        view = self.model(caller, body)
        reading = Reading(kind, message, fields, _guided(view))
        if body.large:
            await asyncio.to_thread(reading.read, body.values)
        else:
            reading.read(body.values)
        return reading

    def model(self, caller: Caller, body: Body) -> ModelView:
        """The model that a body names, the only one where it names none."""
        name = body.values.get("model")
        return self.gate.models.get(caller, str(name) if isinstance(name, str) else "")

    def usual_steps(self, caller: Caller, body: Body, message: Any) -> int:
        """The steps of a request that names none. Raises what keeps the model from taking it: before it is loaded
        they may be unknown.
        """
        task = task_of(message)
        self.gate.intake.check(caller, message.model, task)
        return self.model(caller, body).checkpoint.of(task).defaults.steps

    # --- from a message to a job --------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def job(self, request: Request, caller: Caller, reading: Reading, *, waits: bool) -> AsyncGenerator[Made]:
        """The job of a request while its call is open. `waits`: the call goes on to the job's end, and the job ends
        with the call. Raises every refusal, under the caller's names of fields.
        """
        options = reading.message.options
        attempts: contextlib.AbstractContextManager[Attempt | None] = contextlib.nullcontext()
        if key := request.headers.get(KEY.lower()):
            # whoever sends a key may come back with it: the job has its usual time
            options.request_id = key
            reading.note("options.request_id", KEY)
        elif waits:
            options.disconnect_grace.SetInParent()
        if waits:
            options.on_disconnect = options_pb2.DISCONNECT_POLICY_CANCEL
        if not key:
            attempts = await self._attempt(request, caller, reading)
        with _renaming(reading), attempts as attempt:
            accepted = await self._submit(caller, reading, waits, attempt)
            job = accepted.job
            logger.info(
                "%s is %s%s",
                request.state.request_id,
                job.id,
                " again" if accepted.deduplicated else "",
                extra=more(always=True),
            )
            yield Made(job, reading, waits)

    async def _attempt(
        self, request: Request, caller: Caller, reading: Reading
    ) -> contextlib.AbstractContextManager[Attempt]:
        """The attempt of a call without a key: its request_id is that of the attempt that it repeats."""
        # where nobody says who they are, a call is told from others' by its address
        who = "" if self._identity else caller.peer.rpartition(":")[0]
        given = repr((request.url.path, caller.tenant, caller.subject, who, sorted(reading.reply.items())))
        call = await aside(reading.message, lambda: _digest(given, reading.message))
        number = request.headers.get(RETRY_COUNT, "0")
        count = int(number) if number.isdecimal() and len(number) < 5 else 0
        return self._attempts.attempt(call, count, request.state.request_id)

    async def _submit(self, caller: Caller, reading: Reading, waits: bool, attempt: Attempt | None) -> Accepted:
        if attempt is None:
            return await self._send(caller, reading, waits)
        reading.message.options.request_id = attempt.request_id
        accepted = await self._send(caller, reading, waits)
        if accepted.deduplicated and accepted.job.state in (JobState.FAILED, JobState.CANCELLED):
            # the attempt before took it along
            attempt.request_id += "+"
            reading.message.options.request_id = attempt.request_id
            accepted = await self._send(caller, reading, waits)
        if accepted.deduplicated:
            reading.warnings.append(
                RequestWarning(
                    code="REPEATED_CALL",
                    field="",
                    message="this call was taken for a repetition, and has the job of the call before; "
                    f"with {KEY} that is never guessed",
                    applied=accepted.job.id,
                )
            )
        return accepted

    async def _send(self, caller: Caller, reading: Reading, waits: bool) -> Accepted:
        ask = await asked(self.gate, caller, reading.message, streaming=waits)
        if reading.transparent:
            media = tuple(
                dataclasses.replace(one, name=TRANSPARENT_MASK) if one.path in reading.transparent else one
                for one in ask.media
            )
            ask = dataclasses.replace(ask, media=media, fingerprint=ask.fingerprint + TRANSPARENT_MASK.encode())
        return await self.gate.intake.submit(caller, ask)

    # --- to the end of a job ------------------------------------------------------------------------------------------

    def updates(self, caller: Caller, made: Made) -> AsyncGenerator[Update | None]:
        return self.gate.jobs.watch(caller, made.job.id)

    async def finished(self, caller: Caller, made: Made) -> tuple[Artifact, ...]:
        """What the job has made, once it has ended. Raises its failure, and DeadlineExceeded (ANSWER_TIMEOUT)."""
        try:
            async with asyncio.timeout(self._answer_seconds), aclosing(self.updates(caller, made)) as updates:
                async for _ in updates:
                    pass
        except TimeoutError:
            raise DeadlineExceeded(
                f"job {made.job.id} was not done after {self._answer_seconds:g} s, and is cancelled, since the "
                "official clients wait no longer than 600 s; ask for less, or use stream, /v1/videos or CreateJob",
                reason="ANSWER_TIMEOUT",
                metadata={"job_id": made.job.id},
            ) from None
        self.outcome(made.job)
        return made.job.artifacts

    def outcome(self, job: Job) -> None:
        """Raises the failure that a job ended with, which names it."""
        try:
            raise_outcome(job)
        except OmniError as error:
            failure = error.failure
            named = dataclasses.replace(failure, metadata={**failure.metadata, "job_id": job.id})
            raise named.error() from error

    async def bytes(self, caller: Caller, artifact: Artifact) -> bytes:
        async with aclosing(self.gate.files.chunks(caller, artifact.artifact_id)) as chunks:
            return b"".join([chunk.data async for chunk in chunks])

    async def base64(self, caller: Caller, artifact: Artifact) -> str:
        data = await self.bytes(caller, artifact)
        return (await asyncio.to_thread(base64.b64encode, data)).decode()


async def attended(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves: Gone is raised then. The request's body has been
    read.
    """
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Gone
    finally:
        for one in (task, leaving):
            one.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _digest(given: str, message: Message) -> bytes:
    return hashlib.sha256(given.encode() + message.SerializeToString(deterministic=True)).digest()


@contextlib.contextmanager
def _renaming(reading: Reading) -> Iterator[None]:
    try:
        yield
    except OmniError as error:
        raise reading.renamed(error) from error


def _guided(view: ModelView) -> frozenset[GuidanceKind]:
    return frozenset(kind for part in view.checkpoint.parts for kind in part.guidance)
