"""The spans of a job, made of its log at its end: while it runs, tracing costs it nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from omni_grpc.engine import Job
from omni_grpc.store.records import Entry
from omni_grpc.telemetry.span import Attributes, Moment, Span, Value
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
from omni_grpc.types.media import AudioFormat, ImageFormat
from omni_grpc.types.trace import TraceContext

QUEUE, ENCODE, DENOISE, PREEMPTED = "queue", "encode", "denoise", "preempted"
DECODE, ENCODE_MEDIA, STORE = "decode", "encode_media", "store"
"""Names of the spans below a job."""
MAX_STEPS = 128
"""Most events of steps in one span, which is what OpenTelemetry keeps of a span's events."""


def job_spans(job: Job) -> Sequence[Span]:
    """The span of a job that has ended, and below it one for each phase of each attempt. Empty where nobody wants any:
    its trace is not sampled, or there is none.
    """
    trace = job.record.trace
    if trace is None or not trace.ours or not trace.sampled:
        return ()
    return _Story(job, trace).told()


@dataclasses.dataclass(slots=True)
class _Open:
    """A phase that has begun."""

    start: float
    attributes: dict[str, Value]
    moments: list[Moment] = dataclasses.field(default_factory=list)
    above: str | None = None


class _Story:
    """Goes through the log of a job, and opens and closes its phases."""

    def __init__(self, job: Job, trace: TraceContext) -> None:
        self._job = job
        self._trace = trace
        self._open: dict[str, _Open] = {}
        self._ids: dict[str, TraceContext] = {}
        self._spans: list[Span] = []
        self._moments: list[Moment] = []
        self._attributes: dict[str, Value] = dict(_about(job))
        self._attempt = 1
        self._steps: StepProgress | None = None
        self._stored: float | None = None

    def told(self) -> Sequence[Span]:
        job, record = self._job, self._job.record
        for entry in job.entries:
            self._take(entry)
        end = record.end_time if record.end_time is not None else job.entries[-1].time
        failed = job.failure
        whole = Span(
            name=f"generate_content {record.model}",
            context=self._trace,
            parent=record.spec.trace,
            start=record.create_time,
            end=max(end, record.create_time),
            attributes=self._attributes,
            moments=tuple(self._moments),
            error=None if failed is None else f"{failed.code} {failed.reason}",
        )
        return (whole, *self._spans)

    def _take(self, entry: Entry) -> None:
        now = entry.time
        match entry.event:
            case Queued() as event:
                if QUEUE not in self._open:
                    self._begin(QUEUE, now, {"omni_grpc.queue.position": event.position})
            case Started(attempt=attempt):
                self._attempt = attempt
                self._end(QUEUE, now)
                self._begin(ENCODE, now)
            case EncodeDone() as event:
                self._attributes["gen_ai.usage.input_tokens"] = event.prompt_tokens
                self._since(ENCODE, now - event.elapsed)
                self._end(ENCODE, now)
                self._begin(DENOISE, now, {"omni_grpc.steps": self._job.total_steps})
            case StepProgress() as event:
                self._steps = event
                if (phase := self._open.get(DENOISE)) is not None:
                    phase.moments.append(Moment(name="step", time=now, attributes=_of_step(event)))
            case DecodeProgress() as event:
                self._decoding(event, now)
            case Preempted() as event:
                self._begin(PREEMPTED, now, {"omni_grpc.reason": event.reason}, above=DENOISE)
            case Resumed():
                self._end(PREEMPTED, now)
            case Retrying(failure=failure):
                self._end_all(now, failure.reason)
                self._steps = None
                self._moments.append(Moment(name="retrying", time=now, attributes={"error.type": failure.reason}))
            case ArtifactReady():
                self._stored = now
            case Completed() as event:
                self._completed(event, now)
            case Failed(failure=failure):
                self._attributes["error.type"] = failure.reason
                self._end_all(now, failure.reason)
            case Cancelled(completed_steps=steps):
                self._attributes["omni_grpc.completed_steps"] = steps
                self._end_all(now)

    def _decoding(self, event: DecodeProgress, now: float) -> None:
        """All steps are done; or a part of the output is decoded, which may be while the others take their steps."""
        last = self._steps
        if DENOISE in self._open and (last is None or last.step >= last.total_steps):
            self._end(DENOISE, now)
            self._begin(DECODE, now)
            return
        parts = {"omni_grpc.done": event.done_units, "omni_grpc.total": event.total_units}
        moments = self._open[DECODE].moments if DECODE in self._open else self._moments
        moments.append(Moment(name="part_decoded", time=now, attributes=parts))

    def _completed(self, event: Completed, now: float) -> None:
        stored = now if self._stored is None else self._stored
        handed = stored if self._job.handed is None else min(self._job.handed, stored)
        decoded = handed - event.stats.postprocess
        began = decoded - event.stats.decode
        if DENOISE in self._open:
            self._end(DENOISE, began)
            self._begin(DECODE, began)
        if self._job.segments == 1:
            # it may have waited for its turn
            self._since(DECODE, began)
        self._end(DECODE, decoded)
        if event.stats.postprocess:
            self._begin(ENCODE_MEDIA, decoded)
            self._end(ENCODE_MEDIA, handed)
        if self._job.handed is not None:
            size = sum(artifact.size_bytes for artifact in event.artifacts)
            self._begin(STORE, handed, {"omni_grpc.size_bytes": size})
            self._end(STORE, stored)
        self._end_all(now)

    # --- phases -----------------------------------------------------------------------------------------------------

    def _begin(
        self, name: str, start: float, attributes: Attributes | None = None, *, above: str | None = None
    ) -> None:
        numbered = {"omni_grpc.attempt": self._attempt} if name != QUEUE else {}
        self._open[name] = _Open(start, {**numbered, **(attributes or {})}, above=above)
        self._ids[name] = self._trace.child(f"{name}/{len(self._spans)}/{len(self._open)}")

    def _since(self, name: str, start: float) -> None:
        """It began no earlier than this."""
        if (phase := self._open.get(name)) is not None:
            phase.start = max(phase.start, start)

    def _end(self, name: str, end: float, error: str | None = None) -> None:
        if (phase := self._open.pop(name, None)) is None:
            return
        above = self._trace if phase.above is None else self._ids.get(phase.above, self._trace)
        moments = _some(phase.moments)
        if len(moments) < len(phase.moments):
            phase.attributes["omni_grpc.events_left_out"] = len(phase.moments) - len(moments)
        self._spans.append(
            Span(
                name=name,
                context=self._ids[name],
                parent=above,
                # clocks may be set back
                start=phase.start,
                end=max(end, phase.start),
                attributes=phase.attributes,
                moments=moments,
                error=error,
            )
        )

    def _end_all(self, end: float, error: str | None = None) -> None:
        for name in reversed(tuple(self._open)):
            self._end(name, end, error)


def _some(moments: Sequence[Moment]) -> Sequence[Moment]:
    """At most MAX_STEPS of them, at even distances, the last one included."""
    count = len(moments)
    if count <= MAX_STEPS:
        return tuple(moments)
    return tuple(moments[(index + 1) * count // MAX_STEPS - 1] for index in range(MAX_STEPS))


def _of_step(event: StepProgress) -> Attributes:
    found: dict[str, Value] = {
        "omni_grpc.step": event.step,
        "omni_grpc.seconds": event.step_time,
        "omni_grpc.sigma": event.sigma,
        "omni_grpc.rows": event.rows_total,
    }
    if event.rows_reused:
        found["omni_grpc.rows_reused"] = event.rows_reused
    if event.total_segments > 1:
        found["omni_grpc.segment"] = event.segment
    return found


def _about(job: Job) -> Mapping[str, Value]:
    """What a job is, without a word of what its caller wrote."""
    record, request = job.record, job.request
    found: dict[str, Value] = {
        "gen_ai.operation.name": "generate_content",
        "gen_ai.provider.name": "omni_grpc",
        "gen_ai.request.model": record.model,
        "gen_ai.request.choice.count": request.num_outputs,
        "gen_ai.output.type": _kind(request.output_format),
        "gen_ai.response.id": record.id,
        "omni_grpc.job.id": record.id,
        "omni_grpc.job.state": record.state.value,
        "omni_grpc.task": record.task,
        "omni_grpc.priority": record.priority,
        "omni_grpc.steps": job.total_steps,
    }
    if request.seeds:
        found["gen_ai.request.seed"] = request.seeds[0]
    if record.tenant:
        found["omni_grpc.tenant"] = record.tenant
    if request.width:
        found |= {"omni_grpc.width": request.width, "omni_grpc.height": request.height}
    if request.num_frames:
        found["omni_grpc.frames"] = request.num_frames
    if record.server:
        found["omni_grpc.server"] = record.server
    return found


def _kind(output_format: object) -> str:
    if isinstance(output_format, ImageFormat):
        return "image"
    return "audio" if isinstance(output_format, AudioFormat) else "video"
