import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from omni_grpc.v1 import event_pb2 as _event_pb2
from omni_grpc.v1 import generation_pb2 as _generation_pb2
from omni_grpc.v1 import media_pb2 as _media_pb2
from omni_grpc.v1 import options_pb2 as _options_pb2
from omni_grpc.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Job(_message.Message):
    __slots__ = ("job_id", "state", "model", "task", "create_time", "start_time", "end_time", "expire_time", "step", "total_steps", "eta", "queue_position", "last_seq", "artifacts", "error", "stats", "labels", "cancel_requested", "effective", "warnings", "client_job_id", "tenant", "request_id", "priority", "replica", "retryable", "trace_id", "width", "height", "num_frames")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    ETA_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    state: _event_pb2.JobState
    model: str
    task: _sampling_pb2.Task
    create_time: _timestamp_pb2.Timestamp
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    step: int
    total_steps: int
    eta: _duration_pb2.Duration
    queue_position: int
    last_seq: int
    artifacts: _containers.RepeatedCompositeFieldContainer[_media_pb2.Artifact]
    error: _status_pb2.Status
    stats: _event_pb2.GenerationStats
    labels: _containers.ScalarMap[str, str]
    cancel_requested: bool
    effective: _event_pb2.EffectiveParams
    warnings: _containers.RepeatedCompositeFieldContainer[_event_pb2.Warning]
    client_job_id: str
    tenant: str
    request_id: str
    priority: int
    replica: str
    retryable: bool
    trace_id: str
    width: int
    height: int
    num_frames: int
    def __init__(self, job_id: _Optional[str] = ..., state: _Optional[_Union[_event_pb2.JobState, str]] = ..., model: _Optional[str] = ..., task: _Optional[_Union[_sampling_pb2.Task, str]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., step: _Optional[int] = ..., total_steps: _Optional[int] = ..., eta: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., queue_position: _Optional[int] = ..., last_seq: _Optional[int] = ..., artifacts: _Optional[_Iterable[_Union[_media_pb2.Artifact, _Mapping]]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., stats: _Optional[_Union[_event_pb2.GenerationStats, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., cancel_requested: bool = ..., effective: _Optional[_Union[_event_pb2.EffectiveParams, _Mapping]] = ..., warnings: _Optional[_Iterable[_Union[_event_pb2.Warning, _Mapping]]] = ..., client_job_id: _Optional[str] = ..., tenant: _Optional[str] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ..., replica: _Optional[str] = ..., retryable: bool = ..., trace_id: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., num_frames: _Optional[int] = ...) -> None: ...

class CreateJobRequest(_message.Message):
    __slots__ = ("generate_image", "edit_image", "generate_video", "generate_audio")
    GENERATE_IMAGE_FIELD_NUMBER: _ClassVar[int]
    EDIT_IMAGE_FIELD_NUMBER: _ClassVar[int]
    GENERATE_VIDEO_FIELD_NUMBER: _ClassVar[int]
    GENERATE_AUDIO_FIELD_NUMBER: _ClassVar[int]
    generate_image: _generation_pb2.GenerateImageRequest
    edit_image: _generation_pb2.EditImageRequest
    generate_video: _generation_pb2.GenerateVideoRequest
    generate_audio: _generation_pb2.GenerateAudioRequest
    def __init__(self, generate_image: _Optional[_Union[_generation_pb2.GenerateImageRequest, _Mapping]] = ..., edit_image: _Optional[_Union[_generation_pb2.EditImageRequest, _Mapping]] = ..., generate_video: _Optional[_Union[_generation_pb2.GenerateVideoRequest, _Mapping]] = ..., generate_audio: _Optional[_Union[_generation_pb2.GenerateAudioRequest, _Mapping]] = ...) -> None: ...

class CreateJobResponse(_message.Message):
    __slots__ = ("job", "deduplicated", "warnings")
    JOB_FIELD_NUMBER: _ClassVar[int]
    DEDUPLICATED_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    job: Job
    deduplicated: bool
    warnings: _containers.RepeatedCompositeFieldContainer[_event_pb2.Warning]
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., deduplicated: bool = ..., warnings: _Optional[_Iterable[_Union[_event_pb2.Warning, _Mapping]]] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class GetJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "states", "label_selector", "model", "created_from", "created_before", "tenant")
    class LabelSelectorEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    LABEL_SELECTOR_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CREATED_FROM_FIELD_NUMBER: _ClassVar[int]
    CREATED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    states: _containers.RepeatedScalarFieldContainer[_event_pb2.JobState]
    label_selector: _containers.ScalarMap[str, str]
    model: str
    created_from: _timestamp_pb2.Timestamp
    created_before: _timestamp_pb2.Timestamp
    tenant: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., states: _Optional[_Iterable[_Union[_event_pb2.JobState, str]]] = ..., label_selector: _Optional[_Mapping[str, str]] = ..., model: _Optional[str] = ..., created_from: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., created_before: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., tenant: _Optional[str] = ...) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs", "next_page_token")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    next_page_token: str
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class WatchJobRequest(_message.Message):
    __slots__ = ("job_id", "after_seq", "omit_previews", "delivery", "min_progress_interval")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    OMIT_PREVIEWS_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    MIN_PROGRESS_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    after_seq: int
    omit_previews: bool
    delivery: _options_pb2.ArtifactDelivery
    min_progress_interval: _duration_pb2.Duration
    def __init__(self, job_id: _Optional[str] = ..., after_seq: _Optional[int] = ..., omit_previews: bool = ..., delivery: _Optional[_Union[_options_pb2.ArtifactDelivery, str]] = ..., min_progress_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchJobResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _event_pb2.JobEvent
    def __init__(self, event: _Optional[_Union[_event_pb2.JobEvent, _Mapping]] = ...) -> None: ...

class WatchJobsRequest(_message.Message):
    __slots__ = ("job_ids", "label_selector", "after_seq", "omit_previews", "min_progress_interval")
    class LabelSelectorEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class AfterSeqEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    LABEL_SELECTOR_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    OMIT_PREVIEWS_FIELD_NUMBER: _ClassVar[int]
    MIN_PROGRESS_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    job_ids: _containers.RepeatedScalarFieldContainer[str]
    label_selector: _containers.ScalarMap[str, str]
    after_seq: _containers.ScalarMap[str, int]
    omit_previews: bool
    min_progress_interval: _duration_pb2.Duration
    def __init__(self, job_ids: _Optional[_Iterable[str]] = ..., label_selector: _Optional[_Mapping[str, str]] = ..., after_seq: _Optional[_Mapping[str, int]] = ..., omit_previews: bool = ..., min_progress_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchJobsResponse(_message.Message):
    __slots__ = ("event", "snapshot")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    event: _event_pb2.JobEvent
    snapshot: Job
    def __init__(self, event: _Optional[_Union[_event_pb2.JobEvent, _Mapping]] = ..., snapshot: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("job_id", "reason")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    reason: str
    def __init__(self, job_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CancelJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class DeleteJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class DeleteJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
