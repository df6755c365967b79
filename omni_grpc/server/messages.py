"""Jobs, events and artifacts as the API shows them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf import json_format

from omni_grpc import wire
from omni_grpc.gate import Asset, Chunk, Found, Gate, Job, Update
from omni_grpc.types.events import EncodeDone, Failed, Preempted, Retrying, Started, StepProgress
from omni_grpc.types.results import Artifact, Effective, Stats
from omni_grpc.types.step_cache import CacheCount
from omni_grpc.v1 import artifact_pb2, event_pb2, job_pb2, media_pb2


class Messages:
    """Makes messages of what the gate hands out."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._extra_fields: Mapping[type, Callable[[Job, Any, float], Mapping[str, Any]]] = {
            Started: lambda job, event, at: {"num_frames": job.request.num_frames},
            EncodeDone: _since_start,
            StepProgress: _since_start,
            Failed: lambda job, event, at: {"retryable": event.failure.retryable},
            Stats: self._of_stats,
            CacheCount: _of_cache,
            Effective: lambda job, effective, at: {"task": job.request.task},
            Artifact: _of_artifact,
        }
        """Type of a record -> the fields of its message that the server computes. Types without any are left out."""

    # --- events ---------------------------------------------------------------------------------------------------

    def event(self, job: Job, update: Update, *, previews: bool = True) -> event_pb2.JobEvent:
        """One entry of a job's log. A step comes with the newest previews of the job, where they are its own or those
        of a step that this follower was not sent.
        """
        entry = update.entry
        result = wire.build(
            event_pb2.JobEvent,
            self._extra(job, entry.time),
            job_id=job.id,
            seq=entry.seq,
            time=entry.time,
            coalesced=update.coalesced,
            client_job_id=job.record.client_job_id,
            event=entry.event,
        )
        if previews and isinstance(entry.event, StepProgress) and update.after < job.preview_seq <= entry.seq:
            result.step_progress.previews.extend(wire.to_message(one, event_pb2.Preview) for one in job.previews)
        return result

    def heartbeat(self, job: Job | None = None) -> event_pb2.JobEvent:
        """A sign of life of a stream about one job, or about many (None)."""
        return wire.build(
            event_pb2.JobEvent,
            job_id=job.id if job else "",
            client_job_id=job.record.client_job_id if job else "",
            time=job.clock() if job else time.time(),
            heartbeat=event_pb2.Heartbeat(),
        )

    def chunk_event(self, job: Job, update: Update, chunk: Chunk) -> event_pb2.JobEvent:
        """Bytes of an output that `update` announces."""
        return wire.build(
            event_pb2.JobEvent,
            job_id=job.id,
            client_job_id=job.record.client_job_id,
            time=update.entry.time,
            artifact_chunk=chunk_message(chunk),
        )

    # --- records --------------------------------------------------------------------------------------------------

    def artifact(self, job: Job, artifact: Artifact) -> media_pb2.Artifact:
        return wire.to_message(artifact, media_pb2.Artifact, self._extra(job))

    async def whole_job(self, job: Job) -> job_pb2.Job:
        """The job's current record, with its place in the queue of all servers."""
        message = self.job(job)
        message.queue_position = await self._gate.jobs.queue_position(job)
        return message

    def as_json(self, job: Job) -> bytes:
        """The job's current record as JSON, as protobuf writes it."""
        return json_format.MessageToJson(self.job(job), indent=None).encode()

    def job(self, job: Job) -> job_pb2.Job:
        """The job's current record."""
        return wire.build(
            job_pb2.Job,
            self._extra(job),
            job_id=job.id,
            state=job.state,
            model=job.request.model,
            task=job.request.task,
            create_time=job.record.create_time,
            start_time=job.record.start_time,
            end_time=job.record.end_time,
            expire_time=job.record.expire_time,
            step=job.step,
            total_steps=job.total_steps,
            eta=job.eta,
            queue_position=self._gate.jobs.queue_position_here(job),
            last_seq=job.last_seq,
            artifacts=job.outputs,
            error=job.failure,
            stats=job.stats,
            labels=job.record.labels,
            cancel_requested=job.cancel_requested,
            effective=job.effective,
            warnings=job.warnings,
            client_job_id=job.record.client_job_id,
            tenant=job.tenant,
            request_id=job.record.request_id,
            replica=self._gate.jobs.replica(job),
            priority=job.record.priority,
            retryable=job.failure is not None and job.failure.retryable,
            trace_id="" if job.record.spec.trace is None else job.record.spec.trace.trace_id,
            width=job.request.width,
            height=job.request.height,
            num_frames=job.request.num_frames,
        )

    # --- fields that the server computes --------------------------------------------------------------------------

    def _extra(self, job: Job, at: float = 0.0) -> wire.ExtraFields:
        """The computed fields for the records of a job; `at` is the time of the event that contains them."""

        def extra(record: Any) -> Mapping[str, Any]:
            known = self._extra_fields.get(type(record))
            return {} if known is None else known(job, record, at)

        return extra

    def _of_stats(self, job: Job, stats: Stats, at: float) -> Mapping[str, Any]:
        kinds = Counter(type(entry.event) for entry in job.entries)
        return {
            "steps_per_second": stats.steps_run / stats.denoise if stats.denoise else 0.0,
            "num_gpus": 0 if self._gate.operation.device is None else 1,
            "preemptions": kinds[Preempted],
            "attempts": 1 + kinds[Retrying],
        }


def asset_message(asset: Asset) -> artifact_pb2.UploadAssetResponse:
    """An upload, as its caller is told of it."""
    return wire.build(
        artifact_pb2.UploadAssetResponse,
        asset_id=asset.id,
        expire_time=asset.expire_time,
        size_bytes=asset.size_bytes,
        sha256=asset.sha256,
    )


def found_message(found: Found) -> media_pb2.Artifact:
    """A file that is about to be downloaded."""
    times = {"create_time": found.create_time, "expire_time": found.expire_time}
    return wire.to_message(found.artifact, media_pb2.Artifact, lambda _: times)


def chunk_message(chunk: Chunk) -> media_pb2.ArtifactChunk:
    return media_pb2.ArtifactChunk(artifact_id=chunk.artifact_id, offset=chunk.offset, data=chunk.data, last=chunk.last)


def _of_artifact(job: Job, artifact: Artifact, at: float) -> Mapping[str, Any]:
    return {"create_time": job.outputs[artifact], "expire_time": job.record.expire_time}


def _of_cache(job: Job, count: CacheCount, at: float) -> Mapping[str, Any]:
    return {
        "mean_residual_diff": count.change / count.measured if count.measured else 0.0,
        # as if nothing but blocks took time
        "est_speedup": count.blocks / count.blocks_run if count.blocks_run else 0.0,
    }


def _since_start(job: Job, event: EncodeDone | StepProgress, at: float) -> Mapping[str, Any]:
    # since the start that it belongs to: a job may have been started again since then. Clocks may be set back
    began = [start for start in job.starts if start <= at] or job.starts[:1]
    return {"elapsed": max(0.0, at - began[-1]) if began else 0.0}
