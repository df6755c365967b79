"""From the engine's plain data to messages, piece by piece: no job, no engine, no state. Enums go by their names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from omni_grpc.config import NATIVE_CACHES
from omni_grpc.engine import JobState
from omni_grpc.types.adapters_and_caches import Adapter, CacheCount, FixedCache, TeaCache
from omni_grpc.types.media import ImageFormat, OutputFormat
from omni_grpc.types.request import Guidance, Task
from omni_grpc.types.results import Effective, RequestWarning, Stats
from omni_grpc.v1 import event_pb2, model_pb2, sampling_pb2


def timestamp(seconds: float) -> Timestamp:
    """Unix seconds as a Timestamp."""
    result = Timestamp()
    result.FromNanoseconds(round(seconds * 1e9))
    return result


def duration(seconds: float) -> Duration:
    result = Duration()
    result.FromNanoseconds(round(seconds * 1e9))
    return result


def task(value: Task) -> str:
    return f"TASK_{value.value}"


def image_format(value: ImageFormat) -> str:
    return f"IMAGE_FORMAT_{value.value}"


def output_format(value: OutputFormat) -> dict[str, Any]:
    """The arm of EffectiveParams.output_format."""
    kind = type(value).__name__.removesuffix("Format").lower()
    return {f"{kind}_format": f"{kind.upper()}_FORMAT_{value.value}"}


def job_state(value: JobState) -> str:
    return f"JOB_STATE_{value.value}"


def guidance(value: Guidance) -> sampling_pb2.Guidance:
    """`scale` is unset where the model has no embedded guidance, the last two where it has no two experts."""
    return sampling_pb2.Guidance(
        scale=value.scale,
        true_cfg_scale=value.true_cfg_scale,
        norm=f"GUIDANCE_NORM_{value.norm.value}",
        rescale=value.rescale,
        interval_start=value.interval_start,
        interval_end=value.interval_end,
        scale_low_noise=value.scale_low_noise,
        boundary_ratio=value.boundary_ratio,
    )


def cache(value: TeaCache | FixedCache | None) -> sampling_pb2.CacheOptions | None:
    """Unset for a cache that the API has no options for."""
    match value:
        case None:
            return sampling_pb2.CacheOptions(off=sampling_pb2.CacheOff())
        case TeaCache(threshold=threshold, coefficients=coefficients):
            options = sampling_pb2.TeaCacheOptions(rel_l1_thresh=threshold, coefficients=coefficients)
            return sampling_pb2.CacheOptions(tea_cache=options)
    return None


def _cache_stats(count: CacheCount) -> event_pb2.CacheStats:
    rows = count.hits + count.misses
    return event_pb2.CacheStats(
        component=count.component,
        method=NATIVE_CACHES[0],
        hits=count.hits,
        misses=count.misses,
        mean_residual_diff=count.change / count.measured if count.measured else 0.0,
        # as if a row that is answered took no time
        est_speedup=rows / count.misses if count.misses else 0.0,
    )


def lora(value: Adapter, model: str, *, in_use: int) -> model_pb2.Lora:
    """Adapters are loaded when the worker starts, and stay."""
    return model_pb2.Lora(
        lora_id=value.id,
        model=model,
        source=value.file,
        rank=value.rank,
        size_bytes=value.size_bytes,
        pinned=True,
        targets=value.targets,
        format=value.format,
        keys_applied=value.keys_applied,
        keys_skipped=value.skipped,
        in_use=in_use,
        sha256=bytes.fromhex(value.sha256),
    )


def warnings(values: Iterable[RequestWarning]) -> list[event_pb2.Warning]:
    return [
        event_pb2.Warning(
            code=value.code,
            field=value.field,
            message=value.message,
            requested=value.requested,
            applied=value.applied,
        )
        for value in values
    ]


def stats(value: Stats, *, gpus: int, preemptions: int, attempts: int) -> event_pb2.GenerationStats:
    return event_pb2.GenerationStats(
        queue_wait=duration(value.queue_wait),
        encode=duration(value.encode),
        denoise=duration(value.denoise),
        decode=duration(value.decode),
        total=duration(value.total),
        steps_run=value.steps_run,
        steps_cached=value.steps_cached,
        cache=[_cache_stats(count) for count in value.cache],
        steps_per_second=value.steps_run / value.denoise if value.denoise else 0.0,
        peak_memory_bytes=value.peak_memory_bytes,
        num_gpus=gpus,
        stage_durations={stage: duration(seconds) for stage, seconds in value.stage_durations.items()},
        preemptions=preemptions,
        attempts=attempts,
    )


def effective(value: Effective, of: Task) -> event_pb2.EffectiveParams:
    return event_pb2.EffectiveParams(
        width=value.width,
        height=value.height,
        steps=value.steps,
        evals=value.evals,
        seeds=value.seeds,
        guidance=guidance(value.guidance),
        scheduler=value.scheduler,
        cache=cache(value.cache),
        loras=[
            event_pb2.AppliedLora(
                lora_id=lora.id,
                scale=lora.scale,
                target=lora.target,
                keys_applied=lora.keys_applied,
                keys_skipped=lora.keys_skipped,
            )
            for lora in value.loras
        ],
        quantized_layers=value.quantized_layers,
        kept_layers=value.kept_layers,
        batch_invariant=value.batch_invariant,
        dropped_tokens=value.dropped_tokens,
        defaults_used=value.defaults_used,
        strength=value.strength,
        layers=value.layers,
        num_frames=value.num_frames,
        fps=value.fps,
        output_fps=value.output_fps,
        duration=duration(value.duration) if value.duration else None,
        sample_rate_hz=value.sample_rate,
        attention_backend=value.attention_backend,
        **output_format(value.output_format),
        task=task(of),
    )
