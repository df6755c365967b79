import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from omni_grpc.v1 import media_pb2 as _media_pb2
from omni_grpc.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_QUEUED: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_PREEMPTED: _ClassVar[JobState]
    JOB_STATE_SUCCEEDED: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_CANCELLED: _ClassVar[JobState]
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_QUEUED: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_PREEMPTED: JobState
JOB_STATE_SUCCEEDED: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_CANCELLED: JobState

class JobEvent(_message.Message):
    __slots__ = ("job_id", "seq", "time", "coalesced", "client_job_id", "queued", "started", "encode_done", "step_progress", "decode_progress", "artifact_chunk", "artifact_ready", "warning", "completed", "failed", "cancelled", "preempted", "resumed", "retrying", "heartbeat")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    COALESCED_FIELD_NUMBER: _ClassVar[int]
    CLIENT_JOB_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENCODE_DONE_FIELD_NUMBER: _ClassVar[int]
    STEP_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_CHUNK_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_READY_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    RETRYING_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    seq: int
    time: _timestamp_pb2.Timestamp
    coalesced: int
    client_job_id: str
    queued: Queued
    started: Started
    encode_done: EncodeDone
    step_progress: StepProgress
    decode_progress: DecodeProgress
    artifact_chunk: _media_pb2.ArtifactChunk
    artifact_ready: ArtifactReady
    warning: Warning
    completed: Completed
    failed: Failed
    cancelled: Cancelled
    preempted: Preempted
    resumed: Resumed
    retrying: Retrying
    heartbeat: Heartbeat
    def __init__(self, job_id: _Optional[str] = ..., seq: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., coalesced: _Optional[int] = ..., client_job_id: _Optional[str] = ..., queued: _Optional[_Union[Queued, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., encode_done: _Optional[_Union[EncodeDone, _Mapping]] = ..., step_progress: _Optional[_Union[StepProgress, _Mapping]] = ..., decode_progress: _Optional[_Union[DecodeProgress, _Mapping]] = ..., artifact_chunk: _Optional[_Union[_media_pb2.ArtifactChunk, _Mapping]] = ..., artifact_ready: _Optional[_Union[ArtifactReady, _Mapping]] = ..., warning: _Optional[_Union[Warning, _Mapping]] = ..., completed: _Optional[_Union[Completed, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., cancelled: _Optional[_Union[Cancelled, _Mapping]] = ..., preempted: _Optional[_Union[Preempted, _Mapping]] = ..., resumed: _Optional[_Union[Resumed, _Mapping]] = ..., retrying: _Optional[_Union[Retrying, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Queued(_message.Message):
    __slots__ = ("position", "queue_depth", "eta")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    ETA_FIELD_NUMBER: _ClassVar[int]
    position: int
    queue_depth: int
    eta: _duration_pb2.Duration
    def __init__(self, position: _Optional[int] = ..., queue_depth: _Optional[int] = ..., eta: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("replica", "model", "seeds", "total_steps", "width", "height", "num_frames", "queue_wait", "eta", "batch_size", "warnings", "attempt")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_FIELD_NUMBER: _ClassVar[int]
    ETA_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    replica: str
    model: str
    seeds: _containers.RepeatedScalarFieldContainer[int]
    total_steps: int
    width: int
    height: int
    num_frames: int
    queue_wait: _duration_pb2.Duration
    eta: _duration_pb2.Duration
    batch_size: int
    warnings: _containers.RepeatedCompositeFieldContainer[Warning]
    attempt: int
    def __init__(self, replica: _Optional[str] = ..., model: _Optional[str] = ..., seeds: _Optional[_Iterable[int]] = ..., total_steps: _Optional[int] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., num_frames: _Optional[int] = ..., queue_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., eta: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., batch_size: _Optional[int] = ..., warnings: _Optional[_Iterable[_Union[Warning, _Mapping]]] = ..., attempt: _Optional[int] = ...) -> None: ...

class EncodeDone(_message.Message):
    __slots__ = ("elapsed", "prompt_tokens", "prompt_cache_hit")
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CACHE_HIT_FIELD_NUMBER: _ClassVar[int]
    elapsed: _duration_pb2.Duration
    prompt_tokens: int
    prompt_cache_hit: bool
    def __init__(self, elapsed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., prompt_cache_hit: bool = ...) -> None: ...

class StepProgress(_message.Message):
    __slots__ = ("step", "total_steps", "step_time", "elapsed", "eta", "sigma", "timestep", "rows_total", "rows_reused", "evals", "segment", "total_segments", "stage", "previews")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    ETA_FIELD_NUMBER: _ClassVar[int]
    SIGMA_FIELD_NUMBER: _ClassVar[int]
    TIMESTEP_FIELD_NUMBER: _ClassVar[int]
    ROWS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ROWS_REUSED_FIELD_NUMBER: _ClassVar[int]
    EVALS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PREVIEWS_FIELD_NUMBER: _ClassVar[int]
    step: int
    total_steps: int
    step_time: _duration_pb2.Duration
    elapsed: _duration_pb2.Duration
    eta: _duration_pb2.Duration
    sigma: float
    timestep: float
    rows_total: int
    rows_reused: int
    evals: int
    segment: int
    total_segments: int
    stage: str
    previews: _containers.RepeatedCompositeFieldContainer[Preview]
    def __init__(self, step: _Optional[int] = ..., total_steps: _Optional[int] = ..., step_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., elapsed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., eta: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., sigma: _Optional[float] = ..., timestep: _Optional[float] = ..., rows_total: _Optional[int] = ..., rows_reused: _Optional[int] = ..., evals: _Optional[int] = ..., segment: _Optional[int] = ..., total_segments: _Optional[int] = ..., stage: _Optional[str] = ..., previews: _Optional[_Iterable[_Union[Preview, _Mapping]]] = ...) -> None: ...

class Preview(_message.Message):
    __slots__ = ("index", "mime_type", "data", "width", "height")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    index: int
    mime_type: str
    data: bytes
    width: int
    height: int
    def __init__(self, index: _Optional[int] = ..., mime_type: _Optional[str] = ..., data: _Optional[bytes] = ..., width: _Optional[int] = ..., height: _Optional[int] = ...) -> None: ...

class DecodeProgress(_message.Message):
    __slots__ = ("done_units", "total_units", "elapsed")
    DONE_UNITS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_UNITS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    done_units: int
    total_units: int
    elapsed: _duration_pb2.Duration
    def __init__(self, done_units: _Optional[int] = ..., total_units: _Optional[int] = ..., elapsed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ArtifactReady(_message.Message):
    __slots__ = ("artifact",)
    ARTIFACT_FIELD_NUMBER: _ClassVar[int]
    artifact: _media_pb2.Artifact
    def __init__(self, artifact: _Optional[_Union[_media_pb2.Artifact, _Mapping]] = ...) -> None: ...

class Warning(_message.Message):
    __slots__ = ("code", "field", "message", "requested", "applied")
    CODE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    code: str
    field: str
    message: str
    requested: str
    applied: str
    def __init__(self, code: _Optional[str] = ..., field: _Optional[str] = ..., message: _Optional[str] = ..., requested: _Optional[str] = ..., applied: _Optional[str] = ...) -> None: ...

class Completed(_message.Message):
    __slots__ = ("artifacts", "stats", "effective", "warnings")
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    artifacts: _containers.RepeatedCompositeFieldContainer[_media_pb2.Artifact]
    stats: GenerationStats
    effective: EffectiveParams
    warnings: _containers.RepeatedCompositeFieldContainer[Warning]
    def __init__(self, artifacts: _Optional[_Iterable[_Union[_media_pb2.Artifact, _Mapping]]] = ..., stats: _Optional[_Union[GenerationStats, _Mapping]] = ..., effective: _Optional[_Union[EffectiveParams, _Mapping]] = ..., warnings: _Optional[_Iterable[_Union[Warning, _Mapping]]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("status", "stats", "retryable")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    status: _status_pb2.Status
    stats: GenerationStats
    retryable: bool
    def __init__(self, status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., stats: _Optional[_Union[GenerationStats, _Mapping]] = ..., retryable: bool = ...) -> None: ...

class Cancelled(_message.Message):
    __slots__ = ("reason", "completed_steps", "stats")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_STEPS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    completed_steps: int
    stats: GenerationStats
    def __init__(self, reason: _Optional[str] = ..., completed_steps: _Optional[int] = ..., stats: _Optional[_Union[GenerationStats, _Mapping]] = ...) -> None: ...

class Preempted(_message.Message):
    __slots__ = ("completed_steps", "reason", "position")
    COMPLETED_STEPS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    completed_steps: int
    reason: str
    position: int
    def __init__(self, completed_steps: _Optional[int] = ..., reason: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ("completed_steps", "wait")
    COMPLETED_STEPS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    completed_steps: int
    wait: _duration_pb2.Duration
    def __init__(self, completed_steps: _Optional[int] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Retrying(_message.Message):
    __slots__ = ("status", "attempt", "max_attempts", "delay")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    status: _status_pb2.Status
    attempt: int
    max_attempts: int
    delay: _duration_pb2.Duration
    def __init__(self, status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., attempt: _Optional[int] = ..., max_attempts: _Optional[int] = ..., delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EffectiveParams(_message.Message):
    __slots__ = ("width", "height", "num_frames", "fps", "steps", "evals", "seeds", "guidance", "scheduler", "shift", "cache", "loras", "attention_backend", "quantized_layers", "dropped_tokens", "duration", "sample_rate_hz", "defaults_used", "image_format", "video_format", "audio_format", "task", "strength", "output_fps", "layers", "kept_layers", "batch_invariant", "residency", "sigmas", "preset")
    class QuantizedLayersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DroppedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DefaultsUsedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    EVALS_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    SHIFT_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    LORAS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    QUANTIZED_LAYERS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_HZ_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_USED_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FORMAT_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FORMAT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FPS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KEPT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    SIGMAS_FIELD_NUMBER: _ClassVar[int]
    PRESET_FIELD_NUMBER: _ClassVar[int]
    width: int
    height: int
    num_frames: int
    fps: float
    steps: int
    evals: int
    seeds: _containers.RepeatedScalarFieldContainer[int]
    guidance: _sampling_pb2.Guidance
    scheduler: str
    shift: float
    cache: _sampling_pb2.CacheOptions
    loras: _containers.RepeatedCompositeFieldContainer[AppliedLora]
    attention_backend: str
    quantized_layers: _containers.ScalarMap[str, int]
    dropped_tokens: _containers.ScalarMap[str, int]
    duration: _duration_pb2.Duration
    sample_rate_hz: int
    defaults_used: _containers.ScalarMap[str, str]
    image_format: _media_pb2.ImageFormat
    video_format: _media_pb2.VideoFormat
    audio_format: _media_pb2.AudioFormat
    task: _sampling_pb2.Task
    strength: float
    output_fps: float
    layers: int
    kept_layers: int
    batch_invariant: bool
    residency: str
    sigmas: _containers.RepeatedScalarFieldContainer[float]
    preset: str
    def __init__(self, width: _Optional[int] = ..., height: _Optional[int] = ..., num_frames: _Optional[int] = ..., fps: _Optional[float] = ..., steps: _Optional[int] = ..., evals: _Optional[int] = ..., seeds: _Optional[_Iterable[int]] = ..., guidance: _Optional[_Union[_sampling_pb2.Guidance, _Mapping]] = ..., scheduler: _Optional[str] = ..., shift: _Optional[float] = ..., cache: _Optional[_Union[_sampling_pb2.CacheOptions, _Mapping]] = ..., loras: _Optional[_Iterable[_Union[AppliedLora, _Mapping]]] = ..., attention_backend: _Optional[str] = ..., quantized_layers: _Optional[_Mapping[str, int]] = ..., dropped_tokens: _Optional[_Mapping[str, int]] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., sample_rate_hz: _Optional[int] = ..., defaults_used: _Optional[_Mapping[str, str]] = ..., image_format: _Optional[_Union[_media_pb2.ImageFormat, str]] = ..., video_format: _Optional[_Union[_media_pb2.VideoFormat, str]] = ..., audio_format: _Optional[_Union[_media_pb2.AudioFormat, str]] = ..., task: _Optional[_Union[_sampling_pb2.Task, str]] = ..., strength: _Optional[float] = ..., output_fps: _Optional[float] = ..., layers: _Optional[int] = ..., kept_layers: _Optional[int] = ..., batch_invariant: bool = ..., residency: _Optional[str] = ..., sigmas: _Optional[_Iterable[float]] = ..., preset: _Optional[str] = ...) -> None: ...

class AppliedLora(_message.Message):
    __slots__ = ("lora_id", "scale", "target", "keys_applied", "keys_skipped")
    LORA_ID_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    KEYS_APPLIED_FIELD_NUMBER: _ClassVar[int]
    KEYS_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    lora_id: str
    scale: float
    target: str
    keys_applied: int
    keys_skipped: int
    def __init__(self, lora_id: _Optional[str] = ..., scale: _Optional[float] = ..., target: _Optional[str] = ..., keys_applied: _Optional[int] = ..., keys_skipped: _Optional[int] = ...) -> None: ...

class GenerationStats(_message.Message):
    __slots__ = ("queue_wait", "encode", "denoise", "decode", "postprocess", "total", "steps_run", "steps_cached", "steps_per_second", "peak_memory_bytes", "reserved_memory_bytes", "cache", "num_gpus", "stage_durations", "phase_peak_memory_bytes", "bytes_moved_by_offload", "preemptions", "attempts")
    class StageDurationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _duration_pb2.Duration
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
    class PhasePeakMemoryBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    QUEUE_WAIT_FIELD_NUMBER: _ClassVar[int]
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    DENOISE_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    POSTPROCESS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEPS_RUN_FIELD_NUMBER: _ClassVar[int]
    STEPS_CACHED_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    NUM_GPUS_FIELD_NUMBER: _ClassVar[int]
    STAGE_DURATIONS_FIELD_NUMBER: _ClassVar[int]
    PHASE_PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_BY_OFFLOAD_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    queue_wait: _duration_pb2.Duration
    encode: _duration_pb2.Duration
    denoise: _duration_pb2.Duration
    decode: _duration_pb2.Duration
    postprocess: _duration_pb2.Duration
    total: _duration_pb2.Duration
    steps_run: int
    steps_cached: int
    steps_per_second: float
    peak_memory_bytes: int
    reserved_memory_bytes: int
    cache: _containers.RepeatedCompositeFieldContainer[CacheStats]
    num_gpus: int
    stage_durations: _containers.MessageMap[str, _duration_pb2.Duration]
    phase_peak_memory_bytes: _containers.ScalarMap[str, int]
    bytes_moved_by_offload: int
    preemptions: int
    attempts: int
    def __init__(self, queue_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., encode: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., denoise: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., postprocess: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., steps_run: _Optional[int] = ..., steps_cached: _Optional[int] = ..., steps_per_second: _Optional[float] = ..., peak_memory_bytes: _Optional[int] = ..., reserved_memory_bytes: _Optional[int] = ..., cache: _Optional[_Iterable[_Union[CacheStats, _Mapping]]] = ..., num_gpus: _Optional[int] = ..., stage_durations: _Optional[_Mapping[str, _duration_pb2.Duration]] = ..., phase_peak_memory_bytes: _Optional[_Mapping[str, int]] = ..., bytes_moved_by_offload: _Optional[int] = ..., preemptions: _Optional[int] = ..., attempts: _Optional[int] = ...) -> None: ...

class CacheStats(_message.Message):
    __slots__ = ("component", "method", "hits", "misses", "mean_residual_diff", "est_speedup", "blocks", "blocks_run")
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    MEAN_RESIDUAL_DIFF_FIELD_NUMBER: _ClassVar[int]
    EST_SPEEDUP_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_RUN_FIELD_NUMBER: _ClassVar[int]
    component: str
    method: str
    hits: int
    misses: int
    mean_residual_diff: float
    est_speedup: float
    blocks: int
    blocks_run: int
    def __init__(self, component: _Optional[str] = ..., method: _Optional[str] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., mean_residual_diff: _Optional[float] = ..., est_speedup: _Optional[float] = ..., blocks: _Optional[int] = ..., blocks_run: _Optional[int] = ...) -> None: ...
