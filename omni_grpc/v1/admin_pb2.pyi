import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from omni_grpc.v1 import model_pb2 as _model_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOAD_PHASE_UNSPECIFIED: _ClassVar[LoadPhase]
    LOAD_PHASE_DOWNLOADING: _ClassVar[LoadPhase]
    LOAD_PHASE_LOADING: _ClassVar[LoadPhase]
    LOAD_PHASE_WARMING_UP: _ClassVar[LoadPhase]
    LOAD_PHASE_READY: _ClassVar[LoadPhase]

class SleepLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLEEP_LEVEL_UNSPECIFIED: _ClassVar[SleepLevel]
    SLEEP_LEVEL_KEEP_WEIGHTS: _ClassVar[SleepLevel]
    SLEEP_LEVEL_DROP_WEIGHTS: _ClassVar[SleepLevel]

class ProfileFileKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROFILE_FILE_KIND_UNSPECIFIED: _ClassVar[ProfileFileKind]
    PROFILE_FILE_KIND_TRACE: _ClassVar[ProfileFileKind]
    PROFILE_FILE_KIND_OPS: _ClassVar[ProfileFileKind]
    PROFILE_FILE_KIND_MEMORY: _ClassVar[ProfileFileKind]

class ProfileEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROFILE_END_UNSPECIFIED: _ClassVar[ProfileEnd]
    PROFILE_END_STEPS: _ClassVar[ProfileEnd]
    PROFILE_END_STOPPED: _ClassVar[ProfileEnd]
    PROFILE_END_TIME_LIMIT: _ClassVar[ProfileEnd]
    PROFILE_END_JOB_ENDED: _ClassVar[ProfileEnd]
    PROFILE_END_ASLEEP: _ClassVar[ProfileEnd]
LOAD_PHASE_UNSPECIFIED: LoadPhase
LOAD_PHASE_DOWNLOADING: LoadPhase
LOAD_PHASE_LOADING: LoadPhase
LOAD_PHASE_WARMING_UP: LoadPhase
LOAD_PHASE_READY: LoadPhase
SLEEP_LEVEL_UNSPECIFIED: SleepLevel
SLEEP_LEVEL_KEEP_WEIGHTS: SleepLevel
SLEEP_LEVEL_DROP_WEIGHTS: SleepLevel
PROFILE_FILE_KIND_UNSPECIFIED: ProfileFileKind
PROFILE_FILE_KIND_TRACE: ProfileFileKind
PROFILE_FILE_KIND_OPS: ProfileFileKind
PROFILE_FILE_KIND_MEMORY: ProfileFileKind
PROFILE_END_UNSPECIFIED: ProfileEnd
PROFILE_END_STEPS: ProfileEnd
PROFILE_END_STOPPED: ProfileEnd
PROFILE_END_TIME_LIMIT: ProfileEnd
PROFILE_END_JOB_ENDED: ProfileEnd
PROFILE_END_ASLEEP: ProfileEnd

class LoadModelRequest(_message.Message):
    __slots__ = ("model", "engine_options")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    engine_options: _struct_pb2.Struct
    def __init__(self, model: _Optional[str] = ..., engine_options: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("component", "done_bytes", "total_bytes", "model", "phase", "file")
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    component: str
    done_bytes: int
    total_bytes: int
    model: _model_pb2.Model
    phase: LoadPhase
    file: str
    def __init__(self, component: _Optional[str] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., model: _Optional[_Union[_model_pb2.Model, _Mapping]] = ..., phase: _Optional[_Union[LoadPhase, str]] = ..., file: _Optional[str] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("model", "force")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    model: str
    force: bool
    def __init__(self, model: _Optional[str] = ..., force: bool = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ("freed_bytes",)
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...

class LoadLoraRequest(_message.Message):
    __slots__ = ("lora_id", "model", "path", "hub_id", "asset_id", "pinned", "filename", "sha256", "format")
    LORA_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    HUB_ID_FIELD_NUMBER: _ClassVar[int]
    ASSET_ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    FILENAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    lora_id: str
    model: str
    path: str
    hub_id: str
    asset_id: str
    pinned: bool
    filename: str
    sha256: bytes
    format: str
    def __init__(self, lora_id: _Optional[str] = ..., model: _Optional[str] = ..., path: _Optional[str] = ..., hub_id: _Optional[str] = ..., asset_id: _Optional[str] = ..., pinned: bool = ..., filename: _Optional[str] = ..., sha256: _Optional[bytes] = ..., format: _Optional[str] = ...) -> None: ...

class LoadLoraResponse(_message.Message):
    __slots__ = ("lora",)
    LORA_FIELD_NUMBER: _ClassVar[int]
    lora: _model_pb2.Lora
    def __init__(self, lora: _Optional[_Union[_model_pb2.Lora, _Mapping]] = ...) -> None: ...

class UnloadLoraRequest(_message.Message):
    __slots__ = ("lora_id", "model", "wait", "force")
    LORA_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    lora_id: str
    model: str
    wait: _duration_pb2.Duration
    force: bool
    def __init__(self, lora_id: _Optional[str] = ..., model: _Optional[str] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., force: bool = ...) -> None: ...

class UnloadLoraResponse(_message.Message):
    __slots__ = ("failed_jobs",)
    FAILED_JOBS_FIELD_NUMBER: _ClassVar[int]
    failed_jobs: int
    def __init__(self, failed_jobs: _Optional[int] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("model", "level")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    level: SleepLevel
    def __init__(self, model: _Optional[str] = ..., level: _Optional[_Union[SleepLevel, str]] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("freed_bytes",)
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ("elapsed",)
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    elapsed: _duration_pb2.Duration
    def __init__(self, elapsed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GpuInfo(_message.Message):
    __slots__ = ("name", "index", "memory_total_bytes", "memory_used_bytes", "utilization")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    index: int
    memory_total_bytes: int
    memory_used_bytes: int
    utilization: float
    def __init__(self, name: _Optional[str] = ..., index: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., memory_used_bytes: _Optional[int] = ..., utilization: _Optional[float] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "git_sha", "gpus", "max_queue", "max_message_bytes", "features", "start_time", "replica", "unserved_rpcs", "instance_id", "storage", "loading")
    class FeaturesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GIT_SHA_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    UNSERVED_RPCS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    version: str
    git_sha: str
    gpus: _containers.RepeatedCompositeFieldContainer[GpuInfo]
    max_queue: int
    max_message_bytes: int
    features: _containers.ScalarMap[str, str]
    start_time: _timestamp_pb2.Timestamp
    replica: str
    unserved_rpcs: _containers.RepeatedScalarFieldContainer[str]
    instance_id: str
    storage: StorageInfo
    loading: _containers.RepeatedCompositeFieldContainer[ModelLoading]
    def __init__(self, version: _Optional[str] = ..., git_sha: _Optional[str] = ..., gpus: _Optional[_Iterable[_Union[GpuInfo, _Mapping]]] = ..., max_queue: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., features: _Optional[_Mapping[str, str]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., replica: _Optional[str] = ..., unserved_rpcs: _Optional[_Iterable[str]] = ..., instance_id: _Optional[str] = ..., storage: _Optional[_Union[StorageInfo, _Mapping]] = ..., loading: _Optional[_Iterable[_Union[ModelLoading, _Mapping]]] = ...) -> None: ...

class ModelLoading(_message.Message):
    __slots__ = ("model", "phase", "component", "done_bytes", "total_bytes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    model: str
    phase: LoadPhase
    component: str
    done_bytes: int
    total_bytes: int
    def __init__(self, model: _Optional[str] = ..., phase: _Optional[_Union[LoadPhase, str]] = ..., component: _Optional[str] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class StorageInfo(_message.Message):
    __slots__ = ("durable", "shared", "rows", "files", "retention", "max_retention", "artifact_budget_bytes", "asset_budget_bytes")
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    MAX_RETENTION_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    ASSET_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    durable: bool
    shared: bool
    rows: str
    files: str
    retention: _duration_pb2.Duration
    max_retention: _duration_pb2.Duration
    artifact_budget_bytes: int
    asset_budget_bytes: int
    def __init__(self, durable: bool = ..., shared: bool = ..., rows: _Optional[str] = ..., files: _Optional[str] = ..., retention: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_retention: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., artifact_budget_bytes: _Optional[int] = ..., asset_budget_bytes: _Optional[int] = ...) -> None: ...

class ServerStats(_message.Message):
    __slots__ = ("queued", "running", "max_queue", "est_queue_delay", "steps_per_second", "open_streams", "draining", "gpus", "queued_by_model", "artifact_bytes", "time", "worker_restarts", "step_cost", "models")
    class QueuedByModelEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_FIELD_NUMBER: _ClassVar[int]
    EST_QUEUE_DELAY_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    OPEN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BY_MODEL_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    WORKER_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    queued: int
    running: int
    max_queue: int
    est_queue_delay: _duration_pb2.Duration
    steps_per_second: float
    open_streams: int
    draining: bool
    gpus: _containers.RepeatedCompositeFieldContainer[GpuInfo]
    queued_by_model: _containers.ScalarMap[str, int]
    artifact_bytes: int
    time: _timestamp_pb2.Timestamp
    worker_restarts: int
    step_cost: StepCost
    models: _containers.RepeatedCompositeFieldContainer[ModelStats]
    def __init__(self, queued: _Optional[int] = ..., running: _Optional[int] = ..., max_queue: _Optional[int] = ..., est_queue_delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., steps_per_second: _Optional[float] = ..., open_streams: _Optional[int] = ..., draining: bool = ..., gpus: _Optional[_Iterable[_Union[GpuInfo, _Mapping]]] = ..., queued_by_model: _Optional[_Mapping[str, int]] = ..., artifact_bytes: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., worker_restarts: _Optional[int] = ..., step_cost: _Optional[_Union[StepCost, _Mapping]] = ..., models: _Optional[_Iterable[_Union[ModelStats, _Mapping]]] = ...) -> None: ...

class ModelStats(_message.Message):
    __slots__ = ("model", "state", "queued", "running", "est_queue_delay", "predicted_work", "replicas", "step_cost", "loading")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    EST_QUEUE_DELAY_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_WORK_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    model: str
    state: _model_pb2.ModelState
    queued: int
    running: int
    est_queue_delay: _duration_pb2.Duration
    predicted_work: _duration_pb2.Duration
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStats]
    step_cost: StepCost
    loading: ModelLoading
    def __init__(self, model: _Optional[str] = ..., state: _Optional[_Union[_model_pb2.ModelState, str]] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., est_queue_delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., predicted_work: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStats, _Mapping]]] = ..., step_cost: _Optional[_Union[StepCost, _Mapping]] = ..., loading: _Optional[_Union[ModelLoading, _Mapping]] = ...) -> None: ...

class ReplicaStats(_message.Message):
    __slots__ = ("replica", "state", "running", "predicted_work", "restarts", "device", "step_time", "step_jobs", "step_rows", "weight_bytes", "host_memory_bytes", "device_used_bytes", "device_total_bytes")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_WORK_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    STEP_JOBS_FIELD_NUMBER: _ClassVar[int]
    STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    replica: int
    state: str
    running: int
    predicted_work: _duration_pb2.Duration
    restarts: int
    device: str
    step_time: _duration_pb2.Duration
    step_jobs: float
    step_rows: float
    weight_bytes: int
    host_memory_bytes: int
    device_used_bytes: int
    device_total_bytes: int
    def __init__(self, replica: _Optional[int] = ..., state: _Optional[str] = ..., running: _Optional[int] = ..., predicted_work: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., restarts: _Optional[int] = ..., device: _Optional[str] = ..., step_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., step_jobs: _Optional[float] = ..., step_rows: _Optional[float] = ..., weight_bytes: _Optional[int] = ..., host_memory_bytes: _Optional[int] = ..., device_used_bytes: _Optional[int] = ..., device_total_bytes: _Optional[int] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("fixed_ms", "token_ms", "pair_ms", "error")
    FIXED_MS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    PAIR_MS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    fixed_ms: float
    token_ms: float
    pair_ms: float
    error: float
    def __init__(self, fixed_ms: _Optional[float] = ..., token_ms: _Optional[float] = ..., pair_ms: _Optional[float] = ..., error: _Optional[float] = ...) -> None: ...

class GetServerStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerStatsResponse(_message.Message):
    __slots__ = ("stats",)
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: ServerStats
    def __init__(self, stats: _Optional[_Union[ServerStats, _Mapping]] = ...) -> None: ...

class WatchServerStatsRequest(_message.Message):
    __slots__ = ("interval",)
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchServerStatsResponse(_message.Message):
    __slots__ = ("stats",)
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: ServerStats
    def __init__(self, stats: _Optional[_Union[ServerStats, _Mapping]] = ...) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ("job_id", "start_step", "num_steps", "activities", "with_stack", "record_shapes", "memory", "model", "replica", "all_ranks", "time_limit")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    START_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    ACTIVITIES_FIELD_NUMBER: _ClassVar[int]
    WITH_STACK_FIELD_NUMBER: _ClassVar[int]
    RECORD_SHAPES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ALL_RANKS_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    start_step: int
    num_steps: int
    activities: _containers.RepeatedScalarFieldContainer[str]
    with_stack: bool
    record_shapes: bool
    memory: bool
    model: str
    replica: int
    all_ranks: bool
    time_limit: _duration_pb2.Duration
    def __init__(self, job_id: _Optional[str] = ..., start_step: _Optional[int] = ..., num_steps: _Optional[int] = ..., activities: _Optional[_Iterable[str]] = ..., with_stack: bool = ..., record_shapes: bool = ..., memory: bool = ..., model: _Optional[str] = ..., replica: _Optional[int] = ..., all_ranks: bool = ..., time_limit: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ("profile_id", "model", "activities", "time_limit")
    PROFILE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ACTIVITIES_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_FIELD_NUMBER: _ClassVar[int]
    profile_id: str
    model: str
    activities: _containers.RepeatedScalarFieldContainer[str]
    time_limit: _duration_pb2.Duration
    def __init__(self, profile_id: _Optional[str] = ..., model: _Optional[str] = ..., activities: _Optional[_Iterable[str]] = ..., time_limit: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ("profile_id", "wait")
    PROFILE_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    profile_id: str
    wait: bool
    def __init__(self, profile_id: _Optional[str] = ..., wait: bool = ...) -> None: ...

class ProfileFile(_message.Message):
    __slots__ = ("artifact_id", "kind", "replica", "rank", "size_bytes")
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    artifact_id: str
    kind: ProfileFileKind
    replica: int
    rank: int
    size_bytes: int
    def __init__(self, artifact_id: _Optional[str] = ..., kind: _Optional[_Union[ProfileFileKind, str]] = ..., replica: _Optional[int] = ..., rank: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("artifact_ids", "files", "steps", "end")
    ARTIFACT_IDS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    artifact_ids: _containers.RepeatedScalarFieldContainer[str]
    files: _containers.RepeatedCompositeFieldContainer[ProfileFile]
    steps: int
    end: ProfileEnd
    def __init__(self, artifact_ids: _Optional[_Iterable[str]] = ..., files: _Optional[_Iterable[_Union[ProfileFile, _Mapping]]] = ..., steps: _Optional[int] = ..., end: _Optional[_Union[ProfileEnd, str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout", "model", "replica")
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    model: str
    replica: int
    def __init__(self, timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., model: _Optional[str] = ..., replica: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running", "queued")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    running: int
    queued: int
    def __init__(self, running: _Optional[int] = ..., queued: _Optional[int] = ...) -> None: ...
