import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from omni_grpc.v1 import event_pb2 as _event_pb2
from omni_grpc.v1 import media_pb2 as _media_pb2
from omni_grpc.v1 import options_pb2 as _options_pb2
from omni_grpc.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateImageRequest(_message.Message):
    __slots__ = ("model", "prompt", "negative_prompt", "sampling", "output_format", "options", "width", "height")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NEGATIVE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    negative_prompt: str
    sampling: _sampling_pb2.SamplingParams
    output_format: _media_pb2.ImageFormat
    options: _options_pb2.JobOptions
    width: int
    height: int
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., negative_prompt: _Optional[str] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., output_format: _Optional[_Union[_media_pb2.ImageFormat, str]] = ..., options: _Optional[_Union[_options_pb2.JobOptions, _Mapping]] = ..., width: _Optional[int] = ..., height: _Optional[int] = ...) -> None: ...

class GenerateImageResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _event_pb2.JobEvent
    def __init__(self, event: _Optional[_Union[_event_pb2.JobEvent, _Mapping]] = ...) -> None: ...

class EditImageRequest(_message.Message):
    __slots__ = ("model", "prompt", "negative_prompt", "sampling", "output_format", "options", "task", "width", "height", "images", "mask", "strength", "layers")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NEGATIVE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    negative_prompt: str
    sampling: _sampling_pb2.SamplingParams
    output_format: _media_pb2.ImageFormat
    options: _options_pb2.JobOptions
    task: _sampling_pb2.Task
    width: int
    height: int
    images: _containers.RepeatedCompositeFieldContainer[_media_pb2.MediaInput]
    mask: _media_pb2.MediaInput
    strength: float
    layers: int
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., negative_prompt: _Optional[str] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., output_format: _Optional[_Union[_media_pb2.ImageFormat, str]] = ..., options: _Optional[_Union[_options_pb2.JobOptions, _Mapping]] = ..., task: _Optional[_Union[_sampling_pb2.Task, str]] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., images: _Optional[_Iterable[_Union[_media_pb2.MediaInput, _Mapping]]] = ..., mask: _Optional[_Union[_media_pb2.MediaInput, _Mapping]] = ..., strength: _Optional[float] = ..., layers: _Optional[int] = ...) -> None: ...

class EditImageResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _event_pb2.JobEvent
    def __init__(self, event: _Optional[_Union[_event_pb2.JobEvent, _Mapping]] = ...) -> None: ...

class GenerateVideoRequest(_message.Message):
    __slots__ = ("model", "prompt", "negative_prompt", "sampling", "output_format", "options", "task", "width", "height", "first_frame", "last_frame", "source_video", "reference_images", "control_video", "mask_video", "audio", "strength", "num_frames", "duration", "fps", "output_fps", "with_audio", "interpolation")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NEGATIVE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    FIRST_FRAME_FIELD_NUMBER: _ClassVar[int]
    LAST_FRAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_VIDEO_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_IMAGES_FIELD_NUMBER: _ClassVar[int]
    CONTROL_VIDEO_FIELD_NUMBER: _ClassVar[int]
    MASK_VIDEO_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FPS_FIELD_NUMBER: _ClassVar[int]
    WITH_AUDIO_FIELD_NUMBER: _ClassVar[int]
    INTERPOLATION_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    negative_prompt: str
    sampling: _sampling_pb2.SamplingParams
    output_format: _media_pb2.VideoFormat
    options: _options_pb2.JobOptions
    task: _sampling_pb2.Task
    width: int
    height: int
    first_frame: _media_pb2.MediaInput
    last_frame: _media_pb2.MediaInput
    source_video: _media_pb2.MediaInput
    reference_images: _containers.RepeatedCompositeFieldContainer[_media_pb2.MediaInput]
    control_video: _media_pb2.MediaInput
    mask_video: _media_pb2.MediaInput
    audio: _media_pb2.MediaInput
    strength: float
    num_frames: int
    duration: _duration_pb2.Duration
    fps: float
    output_fps: float
    with_audio: bool
    interpolation: Interpolation
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., negative_prompt: _Optional[str] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., output_format: _Optional[_Union[_media_pb2.VideoFormat, str]] = ..., options: _Optional[_Union[_options_pb2.JobOptions, _Mapping]] = ..., task: _Optional[_Union[_sampling_pb2.Task, str]] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., first_frame: _Optional[_Union[_media_pb2.MediaInput, _Mapping]] = ..., last_frame: _Optional[_Union[_media_pb2.MediaInput, _Mapping]] = ..., source_video: _Optional[_Union[_media_pb2.MediaInput, _Mapping]] = ..., reference_images: _Optional[_Iterable[_Union[_media_pb2.MediaInput, _Mapping]]] = ..., control_video: _Optional[_Union[_media_pb2.MediaInput, _Mapping]] = ..., mask_video: _Optional[_Union[_media_pb2.MediaInput, _Mapping]] = ..., audio: _Optional[_Union[_media_pb2.MediaInput, _Mapping]] = ..., strength: _Optional[float] = ..., num_frames: _Optional[int] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., fps: _Optional[float] = ..., output_fps: _Optional[float] = ..., with_audio: bool = ..., interpolation: _Optional[_Union[Interpolation, _Mapping]] = ...) -> None: ...

class Interpolation(_message.Message):
    __slots__ = ("exp", "scale", "model")
    EXP_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    exp: int
    scale: float
    model: str
    def __init__(self, exp: _Optional[int] = ..., scale: _Optional[float] = ..., model: _Optional[str] = ...) -> None: ...

class GenerateVideoResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _event_pb2.JobEvent
    def __init__(self, event: _Optional[_Union[_event_pb2.JobEvent, _Mapping]] = ...) -> None: ...

class GenerateAudioRequest(_message.Message):
    __slots__ = ("model", "prompt", "negative_prompt", "sampling", "output_format", "options", "text", "reference", "strength", "start", "end", "duration", "sample_rate_hz")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NEGATIVE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_HZ_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    negative_prompt: str
    sampling: _sampling_pb2.SamplingParams
    output_format: _media_pb2.AudioFormat
    options: _options_pb2.JobOptions
    text: str
    reference: _media_pb2.MediaInput
    strength: float
    start: _duration_pb2.Duration
    end: _duration_pb2.Duration
    duration: _duration_pb2.Duration
    sample_rate_hz: int
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., negative_prompt: _Optional[str] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., output_format: _Optional[_Union[_media_pb2.AudioFormat, str]] = ..., options: _Optional[_Union[_options_pb2.JobOptions, _Mapping]] = ..., text: _Optional[str] = ..., reference: _Optional[_Union[_media_pb2.MediaInput, _Mapping]] = ..., strength: _Optional[float] = ..., start: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., end: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., sample_rate_hz: _Optional[int] = ...) -> None: ...

class GenerateAudioResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _event_pb2.JobEvent
    def __init__(self, event: _Optional[_Union[_event_pb2.JobEvent, _Mapping]] = ...) -> None: ...
