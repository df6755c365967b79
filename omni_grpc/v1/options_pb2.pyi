import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from omni_grpc.v1 import event_pb2 as _event_pb2
from omni_grpc.v1 import media_pb2 as _media_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DisconnectPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DISCONNECT_POLICY_UNSPECIFIED: _ClassVar[DisconnectPolicy]
    DISCONNECT_POLICY_CANCEL: _ClassVar[DisconnectPolicy]
    DISCONNECT_POLICY_KEEP: _ClassVar[DisconnectPolicy]

class RestartPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESTART_POLICY_UNSPECIFIED: _ClassVar[RestartPolicy]
    RESTART_POLICY_FAIL: _ClassVar[RestartPolicy]
    RESTART_POLICY_REQUEUE: _ClassVar[RestartPolicy]

class ArtifactDelivery(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ARTIFACT_DELIVERY_UNSPECIFIED: _ClassVar[ArtifactDelivery]
    ARTIFACT_DELIVERY_INLINE_CHUNKS: _ClassVar[ArtifactDelivery]
    ARTIFACT_DELIVERY_REFERENCE: _ClassVar[ArtifactDelivery]
    ARTIFACT_DELIVERY_SIGNED_URL: _ClassVar[ArtifactDelivery]

class PreviewMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREVIEW_METHOD_UNSPECIFIED: _ClassVar[PreviewMethod]
    PREVIEW_METHOD_NONE: _ClassVar[PreviewMethod]
    PREVIEW_METHOD_LATENT_RGB: _ClassVar[PreviewMethod]
    PREVIEW_METHOD_TINY_VAE: _ClassVar[PreviewMethod]
    PREVIEW_METHOD_FULL_VAE: _ClassVar[PreviewMethod]
DISCONNECT_POLICY_UNSPECIFIED: DisconnectPolicy
DISCONNECT_POLICY_CANCEL: DisconnectPolicy
DISCONNECT_POLICY_KEEP: DisconnectPolicy
RESTART_POLICY_UNSPECIFIED: RestartPolicy
RESTART_POLICY_FAIL: RestartPolicy
RESTART_POLICY_REQUEUE: RestartPolicy
ARTIFACT_DELIVERY_UNSPECIFIED: ArtifactDelivery
ARTIFACT_DELIVERY_INLINE_CHUNKS: ArtifactDelivery
ARTIFACT_DELIVERY_REFERENCE: ArtifactDelivery
ARTIFACT_DELIVERY_SIGNED_URL: ArtifactDelivery
PREVIEW_METHOD_UNSPECIFIED: PreviewMethod
PREVIEW_METHOD_NONE: PreviewMethod
PREVIEW_METHOD_LATENT_RGB: PreviewMethod
PREVIEW_METHOD_TINY_VAE: PreviewMethod
PREVIEW_METHOD_FULL_VAE: PreviewMethod

class JobOptions(_message.Message):
    __slots__ = ("request_id", "priority", "queue_timeout", "run_timeout", "on_disconnect", "preview", "delivery", "min_progress_interval", "labels", "disconnect_grace", "deadline", "webhook", "on_server_restart", "retention", "client_job_id", "embed_parameters")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    RUN_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    ON_DISCONNECT_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    MIN_PROGRESS_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    DISCONNECT_GRACE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    WEBHOOK_FIELD_NUMBER: _ClassVar[int]
    ON_SERVER_RESTART_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_JOB_ID_FIELD_NUMBER: _ClassVar[int]
    EMBED_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    priority: int
    queue_timeout: _duration_pb2.Duration
    run_timeout: _duration_pb2.Duration
    on_disconnect: DisconnectPolicy
    preview: PreviewOptions
    delivery: ArtifactDelivery
    min_progress_interval: _duration_pb2.Duration
    labels: _containers.ScalarMap[str, str]
    disconnect_grace: _duration_pb2.Duration
    deadline: _timestamp_pb2.Timestamp
    webhook: Webhook
    on_server_restart: RestartPolicy
    retention: _duration_pb2.Duration
    client_job_id: str
    embed_parameters: bool
    def __init__(self, request_id: _Optional[str] = ..., priority: _Optional[int] = ..., queue_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., run_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., on_disconnect: _Optional[_Union[DisconnectPolicy, str]] = ..., preview: _Optional[_Union[PreviewOptions, _Mapping]] = ..., delivery: _Optional[_Union[ArtifactDelivery, str]] = ..., min_progress_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., disconnect_grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., webhook: _Optional[_Union[Webhook, _Mapping]] = ..., on_server_restart: _Optional[_Union[RestartPolicy, str]] = ..., retention: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., client_job_id: _Optional[str] = ..., embed_parameters: bool = ...) -> None: ...

class PreviewOptions(_message.Message):
    __slots__ = ("method", "every_steps", "max_edge_px", "format")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    EVERY_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_EDGE_PX_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    method: PreviewMethod
    every_steps: int
    max_edge_px: int
    format: _media_pb2.ImageFormat
    def __init__(self, method: _Optional[_Union[PreviewMethod, str]] = ..., every_steps: _Optional[int] = ..., max_edge_px: _Optional[int] = ..., format: _Optional[_Union[_media_pb2.ImageFormat, str]] = ...) -> None: ...

class Webhook(_message.Message):
    __slots__ = ("url", "secret_name", "states")
    URL_FIELD_NUMBER: _ClassVar[int]
    SECRET_NAME_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    url: str
    secret_name: str
    states: _containers.RepeatedScalarFieldContainer[_event_pb2.JobState]
    def __init__(self, url: _Optional[str] = ..., secret_name: _Optional[str] = ..., states: _Optional[_Iterable[_Union[_event_pb2.JobState, str]]] = ...) -> None: ...
