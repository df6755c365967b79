"""Jobs, events and artifacts as the API shows them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from omni_grpc.engine import Engine, Job, JobState
from omni_grpc.server import convert
from omni_grpc.server.failures import status
from omni_grpc.server.follow import Update
from omni_grpc.types.events import (
    ArtifactReady,
    Cancelled,
    Completed,
    DecodeProgress,
    EncodeDone,
    Failed,
    Preempted,
    Queued,
    Resumed,
    Retrying,
    Started,
    StepProgress,
)
from omni_grpc.types.media import PreviewImage
from omni_grpc.types.results import Artifact, Stats
from omni_grpc.v1 import event_pb2, job_pb2, media_pb2

CHUNK_BYTES = 512 * 1024
"""Bytes of an artifact in one message: half of what the API promises at most, where loopback throughput is flat."""


class Messages:
    """Makes messages of what the engine knows."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._arms: Mapping[type, tuple[str, Callable[[Job, Any, float], Message]]] = {
            Queued: ("queued", _queued),
            Started: ("started", _started),
            Retrying: ("retrying", _retrying),
            EncodeDone: ("encode_done", _encoded),
            StepProgress: ("step_progress", _step),
            Preempted: ("preempted", _preempted),
            Resumed: ("resumed", _resumed),
            DecodeProgress: ("decode_progress", _decoding),
            ArtifactReady: ("artifact_ready", self._artifact_ready),
            Completed: ("completed", self._completed),
            Failed: ("failed", self._failed),
            Cancelled: ("cancelled", self._cancelled),
        }

    # --- events ---------------------------------------------------------------------------------------------------

    def event(self, job: Job, update: Update, *, previews: bool = True) -> event_pb2.JobEvent:
        """One entry of a job's log. A step comes with the newest previews of the job, where they are its own or those
        of a step that this follower was not sent.
        """
        entry = update.entry
        arm, convert_event = self._arms[type(entry.event)]
        result = event_pb2.JobEvent(
            job_id=job.id,
            seq=entry.seq,
            time=convert.timestamp(entry.time),
            coalesced=update.coalesced,
            client_job_id=job.client_job_id,
        )
        getattr(result, arm).CopyFrom(convert_event(job, entry.event, entry.time))
        if previews and arm == "step_progress" and update.after < job.preview_seq <= entry.seq:
            result.step_progress.previews.extend(map(_preview, job.previews))
        return result

    def heartbeat(self, job: Job | None = None) -> event_pb2.JobEvent:
        """A sign of life of a stream about one job, or about many (None)."""
        return event_pb2.JobEvent(
            job_id=job.id if job else "",
            client_job_id=job.client_job_id if job else "",
            time=convert.timestamp(time.time()),
            heartbeat=event_pb2.Heartbeat(),
        )

    def chunk_events(self, job: Job, update: Update, artifact: Artifact) -> Iterator[event_pb2.JobEvent]:
        """The bytes of an artifact that `update` announces. Raises NotFound if they are gone."""
        for chunk in self.chunks(artifact.id):
            yield event_pb2.JobEvent(
                job_id=job.id,
                client_job_id=job.client_job_id,
                time=convert.timestamp(update.entry.time),
                artifact_chunk=chunk,
            )

    def chunks(self, artifact_id: str, start: int = 0, end: int | None = None) -> Iterator[media_pb2.ArtifactChunk]:
        """Bytes `start` to `end` of an artifact, in messages of CHUNK_BYTES. Raises NotFound once they are gone."""
        _, data = self._engine.artifacts.get(artifact_id)
        end = len(data) if end is None else min(end, len(data))
        for offset in range(start, end, CHUNK_BYTES):
            piece = data[offset : min(offset + CHUNK_BYTES, end)]
            yield media_pb2.ArtifactChunk(
                artifact_id=artifact_id, offset=offset, data=piece, last=offset + len(piece) == len(data)
            )

    def _artifact_ready(self, job: Job, event: ArtifactReady, at: float) -> event_pb2.ArtifactReady:
        return event_pb2.ArtifactReady(artifact=self.artifact(job, event.artifact))

    def _completed(self, job: Job, event: Completed, at: float) -> event_pb2.Completed:
        return event_pb2.Completed(
            artifacts=[self.artifact(job, artifact) for artifact in event.artifacts],
            stats=self._stats(job, event.stats),
            effective=convert.effective(event.effective, job.request.task),
            warnings=convert.warnings(event.warnings),
        )

    def _failed(self, job: Job, event: Failed, at: float) -> event_pb2.Failed:
        return event_pb2.Failed(
            status=status(event.failure),
            stats=self._stats(job, event.stats),
            retryable=event.failure.retryable,
        )

    def _cancelled(self, job: Job, event: Cancelled, at: float) -> event_pb2.Cancelled:
        return event_pb2.Cancelled(
            reason=event.reason,
            completed_steps=event.completed_steps,
            stats=self._stats(job, event.stats),
        )

    # --- records --------------------------------------------------------------------------------------------------

    @property
    def gpus(self) -> int:
        """Devices that work on a job."""
        ready = self._engine.ready
        return 0 if ready is None or ready.device == "cpu" else 1

    def _stats(self, job: Job, stats: Stats) -> event_pb2.GenerationStats:
        kinds = Counter(type(entry.event) for entry in job.entries)
        return convert.stats(stats, gpus=self.gpus, preemptions=kinds[Preempted], attempts=1 + kinds[Retrying])

    def artifact(self, job: Job, artifact: Artifact) -> media_pb2.Artifact:
        return media_pb2.Artifact(
            artifact_id=artifact.id,
            job_id=artifact.job_id,
            index=artifact.index,
            mime_type=artifact.mime_type,
            size_bytes=artifact.size_bytes,
            sha256=bytes.fromhex(artifact.sha256),
            width=artifact.width,
            height=artifact.height,
            num_frames=artifact.num_frames,
            fps=artifact.fps,
            sample_rate_hz=artifact.sample_rate,
            duration=convert.duration(artifact.duration) if artifact.duration else None,
            has_alpha=artifact.has_alpha,
            layer=artifact.layer,
            seed=artifact.seed,
            create_time=convert.timestamp(stored_artifacts(job)[artifact]),
            expire_time=None if job.expire_time is None else convert.timestamp(job.expire_time),
        )

    def job(self, job: Job) -> job_pb2.Job:
        """The job as it stands."""
        return job_pb2.Job(
            job_id=job.id,
            state=convert.job_state(job.state),
            model=job.request.model,
            task=convert.task(job.request.task),
            create_time=convert.timestamp(job.create_time),
            start_time=None if job.start_time is None else convert.timestamp(job.start_time),
            end_time=None if job.end_time is None else convert.timestamp(job.end_time),
            expire_time=None if job.expire_time is None else convert.timestamp(job.expire_time),
            step=job.step,
            total_steps=job.total_steps,
            eta=None if job.eta is None else convert.duration(job.eta),
            queue_position=self._engine.queue_position(job) if job.state is JobState.QUEUED else 0,
            last_seq=job.last_seq,
            artifacts=[self.artifact(job, artifact) for artifact in stored_artifacts(job)],
            error=None if job.failure is None else status(job.failure),
            stats=None if job.stats is None else self._stats(job, job.stats),
            labels=job.labels,
            cancel_requested=job.cancel_requested,
            effective=None if job.effective is None else convert.effective(job.effective, job.request.task),
            warnings=convert.warnings(job.warnings),
            client_job_id=job.client_job_id,
            request_id=job.request_id,
            priority=job.priority,
            retryable=job.failure is not None and job.failure.retryable,
        )


def stored_artifacts(job: Job) -> dict[Artifact, float]:
    """The outputs that a job has stored so far, by index, with the time of each."""
    return {entry.event.artifact: entry.time for entry in job.entries if isinstance(entry.event, ArtifactReady)}


def _queued(job: Job, event: Queued, at: float) -> event_pb2.Queued:
    return event_pb2.Queued(position=event.position, queue_depth=event.depth)


def _started(job: Job, event: Started, at: float) -> event_pb2.Started:
    return event_pb2.Started(
        model=event.model,
        seeds=event.seeds,
        total_steps=event.steps,
        width=event.width,
        height=event.height,
        num_frames=job.request.num_frames or 0,
        queue_wait=convert.duration(event.queue_wait),
        warnings=convert.warnings(event.warnings),
        attempt=event.attempt,
    )


def _retrying(job: Job, event: Retrying, at: float) -> event_pb2.Retrying:
    return event_pb2.Retrying(
        status=status(event.failure),
        attempt=event.attempt,
        max_attempts=event.max_attempts,
        delay=convert.duration(event.delay),
    )


def _encoded(job: Job, event: EncodeDone, at: float) -> event_pb2.EncodeDone:
    return event_pb2.EncodeDone(elapsed=_since_start(job, at), prompt_tokens=event.prompt_tokens)


def _step(job: Job, event: StepProgress, at: float) -> event_pb2.StepProgress:
    return event_pb2.StepProgress(
        step=event.step,
        total_steps=event.total,
        step_time=convert.duration(event.step_time),
        elapsed=_since_start(job, at),
        eta=convert.duration(event.eta),
        sigma=event.sigma,
        timestep=event.timestep,
        rows_total=event.rows,
        rows_reused=event.rows_reused,
        evals=event.evals,
        segment=event.segment,
        total_segments=event.segments if event.segments > 1 else 0,
    )


def _preview(value: PreviewImage) -> event_pb2.Preview:
    return event_pb2.Preview(
        index=value.index, mime_type=value.mime_type, data=value.data, width=value.width, height=value.height
    )


def _preempted(job: Job, event: Preempted, at: float) -> event_pb2.Preempted:
    return event_pb2.Preempted(completed_steps=event.completed_steps, reason=event.reason, position=event.position)


def _resumed(job: Job, event: Resumed, at: float) -> event_pb2.Resumed:
    return event_pb2.Resumed(completed_steps=event.completed_steps, wait=convert.duration(event.wait))


def _decoding(job: Job, event: DecodeProgress, at: float) -> event_pb2.DecodeProgress:
    return event_pb2.DecodeProgress(done_units=event.done_units, total_units=event.total_units)


def _since_start(job: Job, at: float) -> Duration:
    assert job.start_time is not None
    # the clock may have been set back meanwhile
    return convert.duration(max(0.0, at - job.start_time))
