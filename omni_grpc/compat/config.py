"""How a model is run, under vLLM-Omni's names and with its defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from omni_grpc.compat.fields import changed, check, only
from omni_grpc.compat.parallel import DiffusionParallelConfig
from omni_grpc.types.errors import ConfigError, Violation

NO_CACHE = "none"
STATIC_LORA = "lora_path"
DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp32": "float32", "float": "float32"}
FORMATS: Mapping[str, str] = {"default": "auto"}


@dataclasses.dataclass(kw_only=True)
class _ThresholdCaches:
    """TeaCache, SeaCache and MagCache."""

    rel_l1_thresh: float | None = None
    coefficients: list[float] | None = None
    sea_threshold: float = 0.25
    sea_residual_order: int = 1
    sea_max_consecutive_cached: int = 2
    sea_power_exp: float = 3.0
    mag_threshold: float = 0.24
    mag_max_skip_steps: int = 5
    mag_retention_ratio: float = 0.1
    mag_ratios: list[float] | None = None
    mag_calibrate: bool = False


@dataclasses.dataclass(kw_only=True)
class _CacheDit:
    """Cache-DiT: DBCache, TaylorSeer and step masks."""

    Fn_compute_blocks: int = 1
    Bn_compute_blocks: int = 0
    max_warmup_steps: int = 4
    max_cached_steps: int = -1
    residual_diff_threshold: float = 0.24
    max_continuous_cached_steps: int = 3
    enable_taylorseer: bool = False
    taylorseer_order: int = 1
    scm_steps_mask_policy: str | None = None
    scm_steps_policy: str = "dynamic"


@dataclasses.dataclass(kw_only=True)
class DiffusionCacheConfig(_ThresholdCaches, _CacheDit):
    """Arguments of a step cache. Those that are not at their defaults go to the cache, which refuses what it has not.

    A cache of the diffusers library takes that library's names: give those as a dict.
    """

    num_inference_steps: int | None = None
    force_refresh_step_hint: int | None = None
    force_refresh_step_policy: str = "once"


@dataclasses.dataclass(kw_only=True)
class _Execution:
    """How requests are run."""

    max_num_seqs: int = 1
    step_execution: bool = only(False, "is True or False", True)
    enforce_eager: bool = only(False, "is True or False", True)
    streaming_output: bool = only(False, "not yet; omni_grpc.Omni.stream yields every event as it happens")
    output_type: str = only("pil", "not yet: outputs are PIL images, or encoded video and audio files")
    engine_backend: str = only("default", "there is one engine")
    distributed_executor_backend: str | None = only(None, "not yet: a Ray cluster takes a server", "uni", "mp")
    num_gpus: int | None = None
    enable_sleep_mode: bool = only(False, "not yet")
    enable_prompt_embed_cache: bool = only(False, "not yet")
    enable_diffusion_pipeline_profiler: bool = only(
        False, "not yet as an option; each output has its stage_durations without it"
    )


@dataclasses.dataclass(kw_only=True)
class _Weights:
    """Which weights, from where, and in what precision."""

    revision: str | None = None
    dtype: Any = "auto"
    diffusion_load_format: str = "default"
    diffusers_load_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    diffusers_call_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    quantization: str | None = None
    quantization_config: str | None = None
    lora_path: str | None = None
    lora_scale: float = 1.0
    lora_backend: str = only("peft", "not yet")
    trust_remote_code: bool = only(False, "code from a checkpoint is never run")
    enable_multithread_weight_load: bool = True
    num_weight_load_threads: int = 4


@dataclasses.dataclass(kw_only=True)
class _Memory:
    """What lives where, and what is computed piece by piece."""

    enable_cpu_offload: bool = False
    enable_layerwise_offload: bool = False
    enable_distributed_layerwise_offload: bool = only(
        False, "not yet: use_hsdp has ranks keep parts of weights, enable_layerwise_offload has the host keep them"
    )
    vae_use_slicing: bool = False
    vae_use_tiling: bool = False
    diffusion_attention_backend: str | None = None
    diffusion_attention_config: dict[str, Any] | None = None
    diffusion_kv_cache_dtype: str | None = only(None, "not yet")


@dataclasses.dataclass(kw_only=True)
class OmniDiffusionConfig(_Execution, _Weights, _Memory):
    """How one model is run. Raises ConfigError for what cannot be done, by name.

    `dtype` "auto" is bfloat16 on CUDA, float32 on a CPU. `max_num_seqs` is what a call of `generate` takes that does
    not say it. Step execution is always on; nothing is compiled yet, so `enforce_eager` is how it is.
    """

    model: str | None = None
    model_class_name: str | None = only(None, "the checkpoint's model_index.json says which pipeline it is")
    boundary_ratio: float | None = None
    flow_shift: float | None = None
    cache_backend: str = NO_CACHE
    cache_config: DiffusionCacheConfig | dict[str, Any] = dataclasses.field(default_factory=dict)
    parallel_config: DiffusionParallelConfig = dataclasses.field(default_factory=DiffusionParallelConfig)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ConfigError for what cannot be done; again before use, since fields can be set."""
        check(self, ConfigError)
        self._check_processes()
        if self.quantization is not None and self.quantization_config is not None:
            rule = "quantization and quantization_config are both set; set only one of them"
            raise ConfigError(rule, violations=(Violation("quantization_config", rule),))
        if isinstance(self.max_num_seqs, bool) or not isinstance(self.max_num_seqs, int) or self.max_num_seqs < 1:
            rule = f"max_num_seqs is {self.max_num_seqs!r}, expected at least 1"
            raise ConfigError(rule, violations=(Violation("max_num_seqs", rule),))

    def _check_processes(self) -> None:
        """Raises ConfigError for ranks that do not add up, and for another place than the workers have then."""
        several = self.parallel_config.replicas(self.num_gpus) * self.parallel_config.ranks > 1
        rules = {
            "uni": "is 'uni', and several processes are asked for; leave it out" if several else "",
            "mp": "" if several else "is 'mp', and the model is in this process; leave it out, or ask for ranks",
        }
        if rule := rules.get(self.distributed_executor_backend or "", ""):
            name = "distributed_executor_backend"
            raise ConfigError(f"{name} {rule}", reason="NOT_SUPPORTED", violations=(Violation(name, rule),))

    def settings(self) -> dict[str, Any]:
        """The same as settings of `EngineConfig.from_settings`, without those that are left to it."""
        self.check()
        cache = self.cache_config
        dtype = str(self.dtype).removeprefix("torch.")
        as_they_are = {
            name: getattr(self, name)
            for name in (
                *("model", "revision", "boundary_ratio", "flow_shift", "diffusion_attention_backend"),
                *(
                    "num_weight_load_threads",
                    "enable_cpu_offload",
                    "enable_layerwise_offload",
                    "vae_use_slicing",
                    "vae_use_tiling",
                ),
            )
        }
        translated = {
            "disable_multithread_weight_load": not self.enable_multithread_weight_load,
            "dtype": DTYPES.get(dtype, dtype),
            "diffusion_load_format": FORMATS.get(self.diffusion_load_format, self.diffusion_load_format),
            "diffusion_attention_config": self.diffusion_attention_config or None,
            "diffusers_load_kwargs": self.diffusers_load_kwargs or None,
            "diffusers_call_kwargs": self.diffusers_call_kwargs or None,
            "cache_backend": None if self.cache_backend in (NO_CACHE, None) else self.cache_backend,
            "cache_config": (changed(cache) if isinstance(cache, DiffusionCacheConfig) else cache) or None,
            "quantization": self.quantization_config if self.quantization is None else self.quantization,
            "lora": None if self.lora_path is None else {STATIC_LORA: self.lora_path},
        }
        given = {name: value for name, value in (as_they_are | translated).items() if value is not None}
        return given | self.parallel_config.settings(self.num_gpus)
