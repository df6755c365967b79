import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ImageFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IMAGE_FORMAT_UNSPECIFIED: _ClassVar[ImageFormat]
    IMAGE_FORMAT_PNG: _ClassVar[ImageFormat]
    IMAGE_FORMAT_JPEG: _ClassVar[ImageFormat]
    IMAGE_FORMAT_WEBP: _ClassVar[ImageFormat]
    IMAGE_FORMAT_RAW_RGB8: _ClassVar[ImageFormat]

class VideoFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VIDEO_FORMAT_UNSPECIFIED: _ClassVar[VideoFormat]
    VIDEO_FORMAT_MP4: _ClassVar[VideoFormat]
    VIDEO_FORMAT_WEBM: _ClassVar[VideoFormat]
    VIDEO_FORMAT_FMP4: _ClassVar[VideoFormat]

class AudioFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AUDIO_FORMAT_UNSPECIFIED: _ClassVar[AudioFormat]
    AUDIO_FORMAT_WAV: _ClassVar[AudioFormat]
    AUDIO_FORMAT_FLAC: _ClassVar[AudioFormat]
    AUDIO_FORMAT_MP3: _ClassVar[AudioFormat]
    AUDIO_FORMAT_OPUS: _ClassVar[AudioFormat]
IMAGE_FORMAT_UNSPECIFIED: ImageFormat
IMAGE_FORMAT_PNG: ImageFormat
IMAGE_FORMAT_JPEG: ImageFormat
IMAGE_FORMAT_WEBP: ImageFormat
IMAGE_FORMAT_RAW_RGB8: ImageFormat
VIDEO_FORMAT_UNSPECIFIED: VideoFormat
VIDEO_FORMAT_MP4: VideoFormat
VIDEO_FORMAT_WEBM: VideoFormat
VIDEO_FORMAT_FMP4: VideoFormat
AUDIO_FORMAT_UNSPECIFIED: AudioFormat
AUDIO_FORMAT_WAV: AudioFormat
AUDIO_FORMAT_FLAC: AudioFormat
AUDIO_FORMAT_MP3: AudioFormat
AUDIO_FORMAT_OPUS: AudioFormat

class MediaInput(_message.Message):
    __slots__ = ("data", "asset_id", "uri", "mime_type", "sha256")
    DATA_FIELD_NUMBER: _ClassVar[int]
    ASSET_ID_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    asset_id: str
    uri: str
    mime_type: str
    sha256: bytes
    def __init__(self, data: _Optional[bytes] = ..., asset_id: _Optional[str] = ..., uri: _Optional[str] = ..., mime_type: _Optional[str] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class Artifact(_message.Message):
    __slots__ = ("artifact_id", "job_id", "index", "mime_type", "size_bytes", "sha256", "width", "height", "num_frames", "fps", "sample_rate_hz", "seed", "download_uri", "layer", "has_alpha", "duration", "create_time", "expire_time")
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_HZ_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_URI_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    HAS_ALPHA_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    artifact_id: str
    job_id: str
    index: int
    mime_type: str
    size_bytes: int
    sha256: bytes
    width: int
    height: int
    num_frames: int
    fps: float
    sample_rate_hz: int
    seed: int
    download_uri: str
    layer: int
    has_alpha: bool
    duration: _duration_pb2.Duration
    create_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    def __init__(self, artifact_id: _Optional[str] = ..., job_id: _Optional[str] = ..., index: _Optional[int] = ..., mime_type: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., num_frames: _Optional[int] = ..., fps: _Optional[float] = ..., sample_rate_hz: _Optional[int] = ..., seed: _Optional[int] = ..., download_uri: _Optional[str] = ..., layer: _Optional[int] = ..., has_alpha: bool = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ArtifactChunk(_message.Message):
    __slots__ = ("artifact_id", "offset", "data", "last")
    ARTIFACT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    artifact_id: str
    offset: int
    data: bytes
    last: bool
    def __init__(self, artifact_id: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., last: bool = ...) -> None: ...
