from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_TEXT_TO_IMAGE: _ClassVar[Task]
    TASK_IMAGE_TO_IMAGE: _ClassVar[Task]
    TASK_IMAGE_EDIT: _ClassVar[Task]
    TASK_INPAINT: _ClassVar[Task]
    TASK_LAYERED: _ClassVar[Task]
    TASK_TEXT_TO_VIDEO: _ClassVar[Task]
    TASK_IMAGE_TO_VIDEO: _ClassVar[Task]
    TASK_VIDEO_TO_VIDEO: _ClassVar[Task]
    TASK_VIDEO_EDIT: _ClassVar[Task]
    TASK_AUDIO_TO_VIDEO: _ClassVar[Task]
    TASK_TEXT_TO_AUDIO: _ClassVar[Task]
    TASK_TEXT_TO_AUDIO_VIDEO: _ClassVar[Task]

class GuidanceNorm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GUIDANCE_NORM_UNSPECIFIED: _ClassVar[GuidanceNorm]
    GUIDANCE_NORM_NONE: _ClassVar[GuidanceNorm]
    GUIDANCE_NORM_RENORM: _ClassVar[GuidanceNorm]
    GUIDANCE_NORM_RENORM_CLIPPED: _ClassVar[GuidanceNorm]

class CacheQuality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_QUALITY_UNSPECIFIED: _ClassVar[CacheQuality]
    CACHE_QUALITY_NEAR_LOSSLESS: _ClassVar[CacheQuality]
    CACHE_QUALITY_BALANCED: _ClassVar[CacheQuality]
    CACHE_QUALITY_FAST: _ClassVar[CacheQuality]
TASK_UNSPECIFIED: Task
TASK_TEXT_TO_IMAGE: Task
TASK_IMAGE_TO_IMAGE: Task
TASK_IMAGE_EDIT: Task
TASK_INPAINT: Task
TASK_LAYERED: Task
TASK_TEXT_TO_VIDEO: Task
TASK_IMAGE_TO_VIDEO: Task
TASK_VIDEO_TO_VIDEO: Task
TASK_VIDEO_EDIT: Task
TASK_AUDIO_TO_VIDEO: Task
TASK_TEXT_TO_AUDIO: Task
TASK_TEXT_TO_AUDIO_VIDEO: Task
GUIDANCE_NORM_UNSPECIFIED: GuidanceNorm
GUIDANCE_NORM_NONE: GuidanceNorm
GUIDANCE_NORM_RENORM: GuidanceNorm
GUIDANCE_NORM_RENORM_CLIPPED: GuidanceNorm
CACHE_QUALITY_UNSPECIFIED: CacheQuality
CACHE_QUALITY_NEAR_LOSSLESS: CacheQuality
CACHE_QUALITY_BALANCED: CacheQuality
CACHE_QUALITY_FAST: CacheQuality

class SamplingParams(_message.Message):
    __slots__ = ("steps", "guidance", "seed", "seeds", "num_outputs", "scheduler", "shift", "sigmas", "loras", "cache", "preset", "extra")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    SHIFT_FIELD_NUMBER: _ClassVar[int]
    SIGMAS_FIELD_NUMBER: _ClassVar[int]
    LORAS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PRESET_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    steps: int
    guidance: Guidance
    seed: int
    seeds: _containers.RepeatedScalarFieldContainer[int]
    num_outputs: int
    scheduler: str
    shift: float
    sigmas: _containers.RepeatedScalarFieldContainer[float]
    loras: _containers.RepeatedCompositeFieldContainer[LoraRef]
    cache: CacheOptions
    preset: str
    extra: _struct_pb2.Struct
    def __init__(self, steps: _Optional[int] = ..., guidance: _Optional[_Union[Guidance, _Mapping]] = ..., seed: _Optional[int] = ..., seeds: _Optional[_Iterable[int]] = ..., num_outputs: _Optional[int] = ..., scheduler: _Optional[str] = ..., shift: _Optional[float] = ..., sigmas: _Optional[_Iterable[float]] = ..., loras: _Optional[_Iterable[_Union[LoraRef, _Mapping]]] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ..., preset: _Optional[str] = ..., extra: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class Guidance(_message.Message):
    __slots__ = ("scale", "true_cfg_scale", "scale_low_noise", "image_scale", "rescale", "norm", "interval_start", "interval_end", "skip_layer", "boundary_ratio")
    SCALE_FIELD_NUMBER: _ClassVar[int]
    TRUE_CFG_SCALE_FIELD_NUMBER: _ClassVar[int]
    SCALE_LOW_NOISE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_SCALE_FIELD_NUMBER: _ClassVar[int]
    RESCALE_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_START_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_END_FIELD_NUMBER: _ClassVar[int]
    SKIP_LAYER_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_RATIO_FIELD_NUMBER: _ClassVar[int]
    scale: float
    true_cfg_scale: float
    scale_low_noise: float
    image_scale: float
    rescale: float
    norm: GuidanceNorm
    interval_start: float
    interval_end: float
    skip_layer: SkipLayerGuidance
    boundary_ratio: float
    def __init__(self, scale: _Optional[float] = ..., true_cfg_scale: _Optional[float] = ..., scale_low_noise: _Optional[float] = ..., image_scale: _Optional[float] = ..., rescale: _Optional[float] = ..., norm: _Optional[_Union[GuidanceNorm, str]] = ..., interval_start: _Optional[float] = ..., interval_end: _Optional[float] = ..., skip_layer: _Optional[_Union[SkipLayerGuidance, _Mapping]] = ..., boundary_ratio: _Optional[float] = ...) -> None: ...

class SkipLayerGuidance(_message.Message):
    __slots__ = ("scale", "layers", "start", "stop")
    SCALE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    scale: float
    layers: _containers.RepeatedScalarFieldContainer[int]
    start: float
    stop: float
    def __init__(self, scale: _Optional[float] = ..., layers: _Optional[_Iterable[int]] = ..., start: _Optional[float] = ..., stop: _Optional[float] = ...) -> None: ...

class LoraRef(_message.Message):
    __slots__ = ("lora_id", "scale", "target")
    LORA_ID_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    lora_id: str
    scale: float
    target: str
    def __init__(self, lora_id: _Optional[str] = ..., scale: _Optional[float] = ..., target: _Optional[str] = ...) -> None: ...

class CacheOptions(_message.Message):
    __slots__ = ("off", "tea_cache", "cache_dit", "mag_cache", "sea_cache", "first_block", "quality")
    OFF_FIELD_NUMBER: _ClassVar[int]
    TEA_CACHE_FIELD_NUMBER: _ClassVar[int]
    CACHE_DIT_FIELD_NUMBER: _ClassVar[int]
    MAG_CACHE_FIELD_NUMBER: _ClassVar[int]
    SEA_CACHE_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    off: CacheOff
    tea_cache: TeaCacheOptions
    cache_dit: DbCacheOptions
    mag_cache: MagCacheOptions
    sea_cache: SeaCacheOptions
    first_block: FirstBlockCacheOptions
    quality: CacheQuality
    def __init__(self, off: _Optional[_Union[CacheOff, _Mapping]] = ..., tea_cache: _Optional[_Union[TeaCacheOptions, _Mapping]] = ..., cache_dit: _Optional[_Union[DbCacheOptions, _Mapping]] = ..., mag_cache: _Optional[_Union[MagCacheOptions, _Mapping]] = ..., sea_cache: _Optional[_Union[SeaCacheOptions, _Mapping]] = ..., first_block: _Optional[_Union[FirstBlockCacheOptions, _Mapping]] = ..., quality: _Optional[_Union[CacheQuality, str]] = ...) -> None: ...

class CacheOff(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TeaCacheOptions(_message.Message):
    __slots__ = ("rel_l1_thresh", "coefficients", "max_continuous_cached_steps", "signal")
    REL_L1_THRESH_FIELD_NUMBER: _ClassVar[int]
    COEFFICIENTS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTINUOUS_CACHED_STEPS_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    rel_l1_thresh: float
    coefficients: _containers.RepeatedScalarFieldContainer[float]
    max_continuous_cached_steps: int
    signal: str
    def __init__(self, rel_l1_thresh: _Optional[float] = ..., coefficients: _Optional[_Iterable[float]] = ..., max_continuous_cached_steps: _Optional[int] = ..., signal: _Optional[str] = ...) -> None: ...

class FirstBlockCacheOptions(_message.Message):
    __slots__ = ("threshold", "max_continuous_cached_steps")
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTINUOUS_CACHED_STEPS_FIELD_NUMBER: _ClassVar[int]
    threshold: float
    max_continuous_cached_steps: int
    def __init__(self, threshold: _Optional[float] = ..., max_continuous_cached_steps: _Optional[int] = ...) -> None: ...

class DbCacheOptions(_message.Message):
    __slots__ = ("fn_compute_blocks", "bn_compute_blocks", "max_warmup_steps", "residual_diff_threshold", "max_continuous_cached_steps", "max_cached_steps", "taylorseer_order", "scm_steps_mask_policy", "scm_steps_policy", "scm_steps_mask", "cfg_diff_compute_separate")
    FN_COMPUTE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BN_COMPUTE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_DIFF_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTINUOUS_CACHED_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_CACHED_STEPS_FIELD_NUMBER: _ClassVar[int]
    TAYLORSEER_ORDER_FIELD_NUMBER: _ClassVar[int]
    SCM_STEPS_MASK_POLICY_FIELD_NUMBER: _ClassVar[int]
    SCM_STEPS_POLICY_FIELD_NUMBER: _ClassVar[int]
    SCM_STEPS_MASK_FIELD_NUMBER: _ClassVar[int]
    CFG_DIFF_COMPUTE_SEPARATE_FIELD_NUMBER: _ClassVar[int]
    fn_compute_blocks: int
    bn_compute_blocks: int
    max_warmup_steps: int
    residual_diff_threshold: float
    max_continuous_cached_steps: int
    max_cached_steps: int
    taylorseer_order: int
    scm_steps_mask_policy: str
    scm_steps_policy: str
    scm_steps_mask: _containers.RepeatedScalarFieldContainer[bool]
    cfg_diff_compute_separate: bool
    def __init__(self, fn_compute_blocks: _Optional[int] = ..., bn_compute_blocks: _Optional[int] = ..., max_warmup_steps: _Optional[int] = ..., residual_diff_threshold: _Optional[float] = ..., max_continuous_cached_steps: _Optional[int] = ..., max_cached_steps: _Optional[int] = ..., taylorseer_order: _Optional[int] = ..., scm_steps_mask_policy: _Optional[str] = ..., scm_steps_policy: _Optional[str] = ..., scm_steps_mask: _Optional[_Iterable[bool]] = ..., cfg_diff_compute_separate: bool = ...) -> None: ...

class MagCacheOptions(_message.Message):
    __slots__ = ("threshold", "max_skip_steps", "retention_ratio", "ratios")
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    MAX_SKIP_STEPS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_RATIO_FIELD_NUMBER: _ClassVar[int]
    RATIOS_FIELD_NUMBER: _ClassVar[int]
    threshold: float
    max_skip_steps: int
    retention_ratio: float
    ratios: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, threshold: _Optional[float] = ..., max_skip_steps: _Optional[int] = ..., retention_ratio: _Optional[float] = ..., ratios: _Optional[_Iterable[float]] = ...) -> None: ...

class SeaCacheOptions(_message.Message):
    __slots__ = ("threshold", "residual_order", "max_consecutive_cached", "power_exp")
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_ORDER_FIELD_NUMBER: _ClassVar[int]
    MAX_CONSECUTIVE_CACHED_FIELD_NUMBER: _ClassVar[int]
    POWER_EXP_FIELD_NUMBER: _ClassVar[int]
    threshold: float
    residual_order: int
    max_consecutive_cached: int
    power_exp: float
    def __init__(self, threshold: _Optional[float] = ..., residual_order: _Optional[int] = ..., max_consecutive_cached: _Optional[int] = ..., power_exp: _Optional[float] = ...) -> None: ...
