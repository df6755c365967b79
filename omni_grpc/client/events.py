"""What the wire says, in the vocabulary of `omni_grpc.types.request`: the same types as those of offline use."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from omni_grpc.client.failure import from_status
from omni_grpc.types.adapters_and_caches import AppliedLora, CacheCount, TeaCache
from omni_grpc.types.errors import Unimplemented
from omni_grpc.types.events import (
    ArtifactReady,
    Cancelled,
    Completed,
    DecodeProgress,
    EncodeDone,
    Event,
    Failed,
    Preempted,
    Queued,
    Resumed,
    Retrying,
    Started,
    StepProgress,
)
from omni_grpc.types.media import AudioFormat, ImageFormat, OutputFormat, VideoFormat
from omni_grpc.types.request import Guidance, GuidanceNorm
from omni_grpc.types.results import Artifact, Effective, RequestWarning, Stats
from omni_grpc.v1 import event_pb2, media_pb2, sampling_pb2
from omni_grpc.v1.event_pb2 import JobEvent

T = TypeVar("T", bound=enum.StrEnum)


def event(message: JobEvent) -> Event | None:
    """The event that a message carries; None for kinds that offline use does not have, as heartbeats and chunks are."""
    kind = message.WhichOneof("event")
    return _EVENTS[kind](getattr(message, kind)) if kind in _EVENTS else None


def artifact(message: media_pb2.Artifact) -> Artifact:
    return Artifact(
        id=message.artifact_id,
        job_id=message.job_id,
        index=message.index,
        mime_type=message.mime_type,
        size_bytes=message.size_bytes,
        sha256=message.sha256.hex(),
        width=message.width,
        height=message.height,
        seed=message.seed,
        num_frames=message.num_frames,
        fps=message.fps,
        sample_rate=message.sample_rate_hz,
        duration=seconds(message.duration),
        has_alpha=message.has_alpha,
        layer=message.layer if message.HasField("layer") else None,
    )


def warnings(messages: Iterable[Any]) -> tuple[RequestWarning, ...]:
    return tuple(
        RequestWarning(code=m.code, field=m.field, message=m.message, requested=m.requested, applied=m.applied)
        for m in messages
    )


def effective(message: event_pb2.EffectiveParams) -> Effective:
    return Effective(
        width=message.width,
        height=message.height,
        steps=message.steps,
        evals=message.evals,
        seeds=tuple(message.seeds),
        guidance=_guidance(message.guidance),
        scheduler=message.scheduler,
        output_format=_output_format(message),
        strength=message.strength if message.HasField("strength") else None,
        layers=message.layers,
        num_frames=message.num_frames,
        fps=message.fps,
        output_fps=message.output_fps,
        duration=seconds(message.duration),
        sample_rate=message.sample_rate_hz,
        attention_backend=message.attention_backend,
        cache=_cache(message.cache),
        loras=tuple(
            AppliedLora(
                id=lora.lora_id,
                scale=lora.scale,
                target=lora.target,
                keys_applied=lora.keys_applied,
                keys_skipped=lora.keys_skipped,
            )
            for lora in message.loras
        ),
        quantized_layers=dict(message.quantized_layers),
        kept_layers=message.kept_layers,
        batch_invariant=message.batch_invariant,
        defaults_used=dict(message.defaults_used),
        dropped_tokens=dict(message.dropped_tokens),
    )


def _cache(message: sampling_pb2.CacheOptions) -> TeaCache | None:
    if message.WhichOneof("kind") != "tea_cache":
        return None
    return TeaCache(threshold=message.tea_cache.rel_l1_thresh, coefficients=tuple(message.tea_cache.coefficients))


def stats(message: event_pb2.GenerationStats) -> Stats:
    return Stats(
        queue_wait=seconds(message.queue_wait),
        encode=seconds(message.encode),
        denoise=seconds(message.denoise),
        decode=seconds(message.decode),
        total=seconds(message.total),
        steps_run=message.steps_run,
        steps_cached=message.steps_cached,
        cache=tuple(
            CacheCount(component=count.component, hits=count.hits, misses=count.misses) for count in message.cache
        ),
        peak_memory_bytes=message.peak_memory_bytes,
        stage_durations={stage: seconds(spent) for stage, spent in message.stage_durations.items()},
    )


def seconds(message: Duration) -> float:
    return message.seconds + message.nanos / 1e9


_FORMATS: Mapping[str, tuple[type[ImageFormat] | type[VideoFormat] | type[AudioFormat], Any, str]] = {
    "image_format": (ImageFormat, media_pb2.ImageFormat, "IMAGE_FORMAT_"),
    "video_format": (VideoFormat, media_pb2.VideoFormat, "VIDEO_FORMAT_"),
    "audio_format": (AudioFormat, media_pb2.AudioFormat, "AUDIO_FORMAT_"),
}


def _output_format(message: event_pb2.EffectiveParams) -> OutputFormat:
    arm = message.WhichOneof("output_format") or "image_format"
    kind, wire, prefix = _FORMATS[arm]
    return member(kind, wire, getattr(message, arm), prefix)


def _guidance(message: sampling_pb2.Guidance) -> Guidance:
    norm = message.norm
    return Guidance(
        scale=message.scale if message.HasField("scale") else None,
        true_cfg_scale=message.true_cfg_scale if message.HasField("true_cfg_scale") else 1.0,
        # unspecified in a reply means that the model does not use it
        norm=member(GuidanceNorm, sampling_pb2.GuidanceNorm, norm, "GUIDANCE_NORM_") if norm else GuidanceNorm.NONE,
        rescale=message.rescale,
        interval_start=message.interval_start,
        interval_end=message.interval_end if message.HasField("interval_end") else 1.0,
        scale_low_noise=message.scale_low_noise if message.HasField("scale_low_noise") else None,
        boundary_ratio=message.boundary_ratio if message.HasField("boundary_ratio") else None,
    )


def member(kind: type[T], wire: Any, value: int, prefix: str) -> T:
    """The member of our enum that a number of the API's stands for. Raises Unimplemented for one that we lack."""
    try:
        return kind(wire.Name(value).removeprefix(prefix))
    except ValueError:
        message = f"the server's answer has a {kind.__name__} ({value}) that this client does not know; upgrade it"
        raise Unimplemented(message, reason="CLIENT_TOO_OLD") from None


def _queued(message: event_pb2.Queued) -> Queued:
    return Queued(position=message.position, depth=message.queue_depth)


def _started(message: event_pb2.Started) -> Started:
    return Started(
        model=message.model,
        seeds=tuple(message.seeds),
        width=message.width,
        height=message.height,
        steps=message.total_steps,
        queue_wait=seconds(message.queue_wait),
        warnings=warnings(message.warnings),
        attempt=message.attempt,
    )


def _retrying(message: event_pb2.Retrying) -> Retrying:
    return Retrying(
        failure=from_status(message.status),
        attempt=message.attempt,
        max_attempts=message.max_attempts,
        delay=seconds(message.delay),
    )


def _encoded(message: event_pb2.EncodeDone) -> EncodeDone:
    return EncodeDone(elapsed=seconds(message.elapsed), prompt_tokens=message.prompt_tokens)


def _step(message: event_pb2.StepProgress) -> StepProgress:
    return StepProgress(
        step=message.step,
        total=message.total_steps,
        sigma=message.sigma,
        timestep=message.timestep,
        step_time=seconds(message.step_time),
        elapsed=seconds(message.elapsed),
        eta=seconds(message.eta) if message.HasField("eta") else math.nan,
        rows=message.rows_total,
        rows_reused=message.rows_reused,
        evals=message.evals,
        segment=message.segment,
        segments=max(1, message.total_segments),
    )


def _preempted(message: event_pb2.Preempted) -> Preempted:
    return Preempted(completed_steps=message.completed_steps, reason=message.reason, position=message.position)


def _resumed(message: event_pb2.Resumed) -> Resumed:
    return Resumed(completed_steps=message.completed_steps, wait=seconds(message.wait))


def _decoding(message: event_pb2.DecodeProgress) -> DecodeProgress:
    return DecodeProgress(done_units=message.done_units, total_units=message.total_units)


def _ready(message: event_pb2.ArtifactReady) -> ArtifactReady:
    return ArtifactReady(artifact=artifact(message.artifact))


def _done(message: event_pb2.Completed) -> Completed:
    return Completed(
        artifacts=tuple(artifact(one) for one in message.artifacts),
        effective=effective(message.effective),
        warnings=warnings(message.warnings),
        stats=stats(message.stats),
    )


def _failed(message: event_pb2.Failed) -> Failed:
    return Failed(failure=from_status(message.status), stats=stats(message.stats))


def _cancelled(message: event_pb2.Cancelled) -> Cancelled:
    return Cancelled(reason=message.reason, completed_steps=message.completed_steps, stats=stats(message.stats))


_EVENTS: Mapping[str | None, Any] = {
    "queued": _queued,
    "started": _started,
    "retrying": _retrying,
    "encode_done": _encoded,
    "step_progress": _step,
    "preempted": _preempted,
    "resumed": _resumed,
    "decode_progress": _decoding,
    "artifact_ready": _ready,
    "completed": _done,
    "failed": _failed,
    "cancelled": _cancelled,
}
