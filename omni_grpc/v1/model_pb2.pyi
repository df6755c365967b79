import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from omni_grpc.v1 import media_pb2 as _media_pb2
from omni_grpc.v1 import options_pb2 as _options_pb2
from omni_grpc.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_STATE_UNSPECIFIED: _ClassVar[ModelState]
    MODEL_STATE_AVAILABLE: _ClassVar[ModelState]
    MODEL_STATE_LOADING: _ClassVar[ModelState]
    MODEL_STATE_READY: _ClassVar[ModelState]
    MODEL_STATE_FAILED: _ClassVar[ModelState]
    MODEL_STATE_SLEEPING: _ClassVar[ModelState]

class GuidanceKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GUIDANCE_KIND_UNSPECIFIED: _ClassVar[GuidanceKind]
    GUIDANCE_KIND_EMBEDDED: _ClassVar[GuidanceKind]
    GUIDANCE_KIND_TRUE_CFG: _ClassVar[GuidanceKind]

class LoraState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LORA_STATE_UNSPECIFIED: _ClassVar[LoraState]
    LORA_STATE_LOADED: _ClassVar[LoraState]
    LORA_STATE_PENDING: _ClassVar[LoraState]
    LORA_STATE_LOADING: _ClassVar[LoraState]
    LORA_STATE_UNLOADING: _ClassVar[LoraState]
    LORA_STATE_FAILED: _ClassVar[LoraState]
MODEL_STATE_UNSPECIFIED: ModelState
MODEL_STATE_AVAILABLE: ModelState
MODEL_STATE_LOADING: ModelState
MODEL_STATE_READY: ModelState
MODEL_STATE_FAILED: ModelState
MODEL_STATE_SLEEPING: ModelState
GUIDANCE_KIND_UNSPECIFIED: GuidanceKind
GUIDANCE_KIND_EMBEDDED: GuidanceKind
GUIDANCE_KIND_TRUE_CFG: GuidanceKind
LORA_STATE_UNSPECIFIED: LoraState
LORA_STATE_LOADED: LoraState
LORA_STATE_PENDING: LoraState
LORA_STATE_LOADING: LoraState
LORA_STATE_UNLOADING: LoraState
LORA_STATE_FAILED: LoraState

class Model(_message.Message):
    __slots__ = ("name", "revision", "state", "tasks", "defaults", "schedulers", "cache_methods", "attention_backends", "quantizations", "parallelism", "components", "guidance_kinds", "loras", "refusals", "preview_methods", "limits", "extra_params_schema", "dtype", "license", "family", "pipeline", "image_formats", "video_formats", "audio_formats", "error", "weight_bytes", "quantized_layers", "kept_layers", "residency")
    class QuantizedLayersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULERS_FIELD_NUMBER: _ClassVar[int]
    CACHE_METHODS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKENDS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATIONS_FIELD_NUMBER: _ClassVar[int]
    PARALLELISM_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_KINDS_FIELD_NUMBER: _ClassVar[int]
    LORAS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_METHODS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_PARAMS_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LICENSE_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FORMATS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FORMATS_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FORMATS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUANTIZED_LAYERS_FIELD_NUMBER: _ClassVar[int]
    KEPT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    state: ModelState
    tasks: _containers.RepeatedScalarFieldContainer[_sampling_pb2.Task]
    defaults: _sampling_pb2.SamplingParams
    schedulers: _containers.RepeatedScalarFieldContainer[str]
    cache_methods: _containers.RepeatedScalarFieldContainer[str]
    attention_backends: _containers.RepeatedScalarFieldContainer[str]
    quantizations: _containers.RepeatedScalarFieldContainer[str]
    parallelism: _containers.RepeatedScalarFieldContainer[str]
    components: _containers.RepeatedCompositeFieldContainer[Component]
    guidance_kinds: _containers.RepeatedScalarFieldContainer[GuidanceKind]
    loras: _containers.RepeatedScalarFieldContainer[str]
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    preview_methods: _containers.RepeatedScalarFieldContainer[_options_pb2.PreviewMethod]
    limits: ModelLimits
    extra_params_schema: _struct_pb2.Struct
    dtype: str
    license: str
    family: str
    pipeline: str
    image_formats: _containers.RepeatedScalarFieldContainer[_media_pb2.ImageFormat]
    video_formats: _containers.RepeatedScalarFieldContainer[_media_pb2.VideoFormat]
    audio_formats: _containers.RepeatedScalarFieldContainer[_media_pb2.AudioFormat]
    error: _status_pb2.Status
    weight_bytes: int
    quantized_layers: _containers.ScalarMap[str, int]
    kept_layers: int
    residency: str
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., tasks: _Optional[_Iterable[_Union[_sampling_pb2.Task, str]]] = ..., defaults: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., schedulers: _Optional[_Iterable[str]] = ..., cache_methods: _Optional[_Iterable[str]] = ..., attention_backends: _Optional[_Iterable[str]] = ..., quantizations: _Optional[_Iterable[str]] = ..., parallelism: _Optional[_Iterable[str]] = ..., components: _Optional[_Iterable[_Union[Component, _Mapping]]] = ..., guidance_kinds: _Optional[_Iterable[_Union[GuidanceKind, str]]] = ..., loras: _Optional[_Iterable[str]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., preview_methods: _Optional[_Iterable[_Union[_options_pb2.PreviewMethod, str]]] = ..., limits: _Optional[_Union[ModelLimits, _Mapping]] = ..., extra_params_schema: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., dtype: _Optional[str] = ..., license: _Optional[str] = ..., family: _Optional[str] = ..., pipeline: _Optional[str] = ..., image_formats: _Optional[_Iterable[_Union[_media_pb2.ImageFormat, str]]] = ..., video_formats: _Optional[_Iterable[_Union[_media_pb2.VideoFormat, str]]] = ..., audio_formats: _Optional[_Iterable[_Union[_media_pb2.AudioFormat, str]]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., weight_bytes: _Optional[int] = ..., quantized_layers: _Optional[_Mapping[str, int]] = ..., kept_layers: _Optional[int] = ..., residency: _Optional[str] = ...) -> None: ...

class Component(_message.Message):
    __slots__ = ("name", "class_name", "dtype", "quantization", "parameters", "size_bytes", "device")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    name: str
    class_name: str
    dtype: str
    quantization: str
    parameters: int
    size_bytes: int
    device: str
    def __init__(self, name: _Optional[str] = ..., class_name: _Optional[str] = ..., dtype: _Optional[str] = ..., quantization: _Optional[str] = ..., parameters: _Optional[int] = ..., size_bytes: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("feature", "reason")
    FEATURE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    feature: str
    reason: str
    def __init__(self, feature: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DoubleRange(_message.Message):
    __slots__ = ("min", "max")
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    min: float
    max: float
    def __init__(self, min: _Optional[float] = ..., max: _Optional[float] = ...) -> None: ...

class ModelLimits(_message.Message):
    __slots__ = ("min_width", "min_height", "max_width", "max_height", "max_pixels", "size_multiple", "default_width", "default_height", "max_steps", "max_outputs", "max_prompt_chars", "max_prompt_tokens", "max_input_images", "max_loras", "min_frames", "max_frames", "frame_multiple", "frame_offset", "default_frames", "default_fps", "fps", "max_audio", "strength", "lora_scale", "guidance_scale", "true_cfg_scale")
    MIN_WIDTH_FIELD_NUMBER: _ClassVar[int]
    MIN_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_WIDTH_FIELD_NUMBER: _ClassVar[int]
    MAX_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    SIZE_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_WIDTH_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_CHARS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUT_IMAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    MIN_FRAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAMES_FIELD_NUMBER: _ClassVar[int]
    FRAME_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    FRAME_OFFSET_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_FRAMES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_FPS_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    MAX_AUDIO_FIELD_NUMBER: _ClassVar[int]
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    LORA_SCALE_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_SCALE_FIELD_NUMBER: _ClassVar[int]
    TRUE_CFG_SCALE_FIELD_NUMBER: _ClassVar[int]
    min_width: int
    min_height: int
    max_width: int
    max_height: int
    max_pixels: int
    size_multiple: int
    default_width: int
    default_height: int
    max_steps: int
    max_outputs: int
    max_prompt_chars: int
    max_prompt_tokens: int
    max_input_images: int
    max_loras: int
    min_frames: int
    max_frames: int
    frame_multiple: int
    frame_offset: int
    default_frames: int
    default_fps: float
    fps: DoubleRange
    max_audio: _duration_pb2.Duration
    strength: DoubleRange
    lora_scale: DoubleRange
    guidance_scale: DoubleRange
    true_cfg_scale: DoubleRange
    def __init__(self, min_width: _Optional[int] = ..., min_height: _Optional[int] = ..., max_width: _Optional[int] = ..., max_height: _Optional[int] = ..., max_pixels: _Optional[int] = ..., size_multiple: _Optional[int] = ..., default_width: _Optional[int] = ..., default_height: _Optional[int] = ..., max_steps: _Optional[int] = ..., max_outputs: _Optional[int] = ..., max_prompt_chars: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., max_input_images: _Optional[int] = ..., max_loras: _Optional[int] = ..., min_frames: _Optional[int] = ..., max_frames: _Optional[int] = ..., frame_multiple: _Optional[int] = ..., frame_offset: _Optional[int] = ..., default_frames: _Optional[int] = ..., default_fps: _Optional[float] = ..., fps: _Optional[_Union[DoubleRange, _Mapping]] = ..., max_audio: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., strength: _Optional[_Union[DoubleRange, _Mapping]] = ..., lora_scale: _Optional[_Union[DoubleRange, _Mapping]] = ..., guidance_scale: _Optional[_Union[DoubleRange, _Mapping]] = ..., true_cfg_scale: _Optional[_Union[DoubleRange, _Mapping]] = ...) -> None: ...

class Lora(_message.Message):
    __slots__ = ("lora_id", "model", "source", "rank", "size_bytes", "pinned", "load_time", "targets", "format", "keys_applied", "keys_skipped", "in_use", "sha256", "uid", "state", "error", "cache_bytes", "warnings")
    LORA_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    LOAD_TIME_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    KEYS_APPLIED_FIELD_NUMBER: _ClassVar[int]
    KEYS_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    lora_id: str
    model: str
    source: str
    rank: int
    size_bytes: int
    pinned: bool
    load_time: _timestamp_pb2.Timestamp
    targets: _containers.RepeatedScalarFieldContainer[str]
    format: str
    keys_applied: int
    keys_skipped: _containers.RepeatedScalarFieldContainer[str]
    in_use: int
    sha256: bytes
    uid: str
    state: LoraState
    error: _status_pb2.Status
    cache_bytes: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lora_id: _Optional[str] = ..., model: _Optional[str] = ..., source: _Optional[str] = ..., rank: _Optional[int] = ..., size_bytes: _Optional[int] = ..., pinned: bool = ..., load_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., targets: _Optional[_Iterable[str]] = ..., format: _Optional[str] = ..., keys_applied: _Optional[int] = ..., keys_skipped: _Optional[_Iterable[str]] = ..., in_use: _Optional[int] = ..., sha256: _Optional[bytes] = ..., uid: _Optional[str] = ..., state: _Optional[_Union[LoraState, str]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., cache_bytes: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ("tasks",)
    TASKS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedScalarFieldContainer[_sampling_pb2.Task]
    def __init__(self, tasks: _Optional[_Iterable[_Union[_sampling_pb2.Task, str]]] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class ListLorasRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListLorasResponse(_message.Message):
    __slots__ = ("loras",)
    LORAS_FIELD_NUMBER: _ClassVar[int]
    loras: _containers.RepeatedCompositeFieldContainer[Lora]
    def __init__(self, loras: _Optional[_Iterable[_Union[Lora, _Mapping]]] = ...) -> None: ...
