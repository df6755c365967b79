"""The configuration tree: small frozen sections, filled alike by flags, YAML, environment variables and Python.

Every setting has one flat name, unique over the tree (`max_queue`), which is its flag (`--max-queue`), its
environment variable (`OMNI_GRPC_MAX_QUEUE`), its keyword in `Omni(model, max_queue=...)` and its key in a YAML file,
alone or under its section. An unknown name is an error with a suggestion.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omni_grpc.config import backends, exposure, roles
from omni_grpc.config.fleet import FleetConfig
from omni_grpc.config.http import HttpConfig
from omni_grpc.config.keeping import JobsConfig, KeepingLimits, StoreConfig
from omni_grpc.config.logs import LogConfig
from omni_grpc.config.metrics import MetricsConfig
from omni_grpc.config.options import Option, options_of, sections_of, setting, unknown_settings
from omni_grpc.config.parallel import ParallelConfig, RanksConfig
from omni_grpc.config.service_sections import (
    AuditConfig,
    IdentityConfig,
    OutboundConfig,
    ServerConfig,
    TenantsConfig,
    TlsConfig,
    WebhooksConfig,
)
from omni_grpc.config.traces import TracesConfig
from omni_grpc.types.cache_choice import QUALITIES
from omni_grpc.types.cache_fields import ALIASES
from omni_grpc.types.errors import ConfigError, Violation

BUNDLED = Path(__file__).resolve().parents[1] / "demo"
"""The checkpoint that comes with the package: the default model."""

NATIVE_CACHES = ("tea_cache", "first_block", "cache_dit", "mag_cache", "sea_cache")
DIFFUSERS_CACHES = ("first_block", "mag_cache", "sea_cache", "taylorseer", "faster", "pab", "text_kv")
"""Values of --cache-backend, by what runs the model."""
QUANTIZATIONS = ("fp8", "int8", "gguf")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which checkpoint, where it runs, in which precision and with which attention."""

    model: str = setting(
        dataclasses.MISSING,
        "checkpoint folder in the diffusers layout, or ORG/NAME on the Hugging Face hub (default: demo, the bundled "
        "model); as NAME=FOLDER with its name in requests, for a server several times",
        repeats=True,
        empty="give a checkpoint folder or ORG/NAME of the hub, or leave it out for the bundled model",
    )
    served_model_name: str | None = setting(
        None, "name of the model in requests (default: the folder's name, or the hub name)"
    )
    device: str = setting(
        "auto", "device of the worker; auto: cuda if available, otherwise cpu", choices=("auto", "cpu", "cuda")
    )
    dtype: str = setting(
        "auto",
        "precision of the weights; auto: bfloat16 on cuda, float32 on cpu",
        choices=("auto", "float32", "bfloat16"),
    )
    revision: str | None = setting(None, "branch, tag or commit of a checkpoint from the hub (default: main)")
    diffusion_load_format: str = setting(
        "auto",
        "native: our own implementation; diffusers: any diffusers pipeline through the adapter; auto: native if "
        "available, otherwise diffusers",
        choices=("auto", "native", "diffusers"),
    )
    num_weight_load_threads: int = setting(
        4, "threads that load the weights of a native denoiser; 1: one tensor after the other", minimum=1
    )
    disable_multithread_weight_load: bool = setting(False, "load weights one tensor after the other, in one thread")
    cpu_threads: int | None = setting(
        None, "torch threads of a CPU worker (default: cores - 1, so that progress events are not delayed)", minimum=1
    )
    batch_invariant: bool = setting(
        False,
        "batch invariance: give a request the same bits whatever else is in the batch; native models only",
    )
    diffusion_attention_backend: str | None = setting(
        None, f"attention backend of the denoiser: {', '.join(backends.names())} (default: auto)"
    )
    diffusion_attention_config: dict[str, Any] | None = setting(
        None,
        "attention backend and precision as a JSON object with default, per_role and schedule; also written as "
        "--diffusion-attention-config.per_role.self.backend NAME",
    )

    def __post_init__(self) -> None:
        _ = self.attention  # a name that nothing has is an error at once

    @property
    def attention(self) -> roles.Roles | None:
        """The backends and precisions of attention, None if no setting names any. Raises ConfigError, see `roles`."""
        if self.diffusion_attention_backend is None and self.diffusion_attention_config is None:
            return None
        return roles.parse(self.diffusion_attention_backend, self.diffusion_attention_config)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """How a diffusers pipeline is loaded and called. A native model takes what its spec's `settings` name, and refuses
    the rest.
    """

    diffusers_load_kwargs: dict[str, Any] | None = setting(
        None, "JSON object of arguments for from_pretrained; they override other settings"
    )
    diffusers_call_kwargs: dict[str, Any] | None = setting(
        None, "JSON object of arguments for every call of the pipeline; a request overrides them"
    )
    allow_attention_fallback: bool = setting(
        False,
        "use the default attention backend if the requested one is unavailable, with a warning in every reply",
    )
    boundary_ratio: float | None = setting(
        None,
        "for models with two experts: fraction of the timesteps at which the low-noise expert takes over",
        minimum=0,
    )
    flow_shift: float | None = setting(
        None, "shift of the noise schedule, for models whose scheduler has one", minimum=0
    )
    vae_use_slicing: bool = setting(False, "VAE slicing: decode one output after the other, as native models always do")
    vae_use_tiling: bool = setting(
        False, "VAE tiling: decode in tiles to save memory, as native models do where an output would not fit"
    )
    enable_cpu_offload: bool = setting(
        False,
        "CPU offload: keep one component at a time on the device; of native models, text encoders and VAE are there "
        "only while they run, and the denoiser stays",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The step cache: skips computation that changes little from one step to the next."""

    cache_backend: str | None = setting(
        None,
        f"step cache; native models: auto, {', '.join(NATIVE_CACHES)}; diffusers pipelines: "
        f"{', '.join(DIFFUSERS_CACHES)} (default: none)",
    )
    cache_config: dict[str, Any] | None = setting(
        None, "JSON object of arguments for the step cache, for example '{\"rel_l1_thresh\": 0.3}' for tea_cache"
    )
    cache_quality: str | None = setting(
        None,
        "with --cache-backend auto, how much the step cache may change results (default: near_lossless)",
        choices=QUALITIES,
    )

    def __post_init__(self) -> None:
        if self.cache_backend is not None:
            object.__setattr__(self, "cache_backend", ALIASES.get(self.cache_backend, self.cache_backend))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """Quantized weights, for native models."""

    quantization: str | None = setting(
        None,
        "quantization of the denoiser's blocks (default: that of the checkpoint)",
        choices=QUANTIZATIONS,
    )
    ignored_layers: tuple[str, ...] = setting(
        (), "layers to exclude from quantization, separated by commas: parts of names, paths with *, or re:EXPRESSION"
    )
    gguf_model: tuple[str, ...] = setting(
        (),
        "with --quantization gguf, the GGUF file of the denoiser: a path, or ORG/NAME:FILE on the hub; for a model "
        "with two denoisers, COMPONENT=FILE for each, separated by a comma",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Adapters that requests can name, of native models."""

    lora: dict[str, str] | None = setting(
        None,
        "LoRA adapter that requests can name: a safetensors file, or a folder with one; NAME@COMPONENT=VALUE gives the "
        "file for one component (transformer_2, text_encoder); repeatable, or one JSON object",
        pairs=True,
    )
    lora_device_cache: int | None = setting(
        None,
        "bytes of device memory for adapters; those used longest ago make room for others, except those of running "
        "requests and pinned ones (default: 2 GiB, or what those of --lora take)",
        minimum=0,
    )
    lora_host_cache: int | None = setting(
        None,
        "bytes of host memory for adapters; those used longest ago make room, and are read from their files again for "
        "the next request (default: 8 GiB, or what those of --lora take)",
        minimum=0,
    )
    lora_merged_cache: int | None = setting(
        None,
        "bytes of device memory for weights with adapters merged into them, of kinds that cannot be added row by row "
        "(OFT, GLoRA, some DoRA and LoHa); a request that needs more is refused (default: 1 GiB)",
        minimum=0,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Weights that stay in host memory."""

    enable_layerwise_offload: bool = setting(
        False, "layerwise offload: keep the blocks in host memory, and only the running ones on the device"
    )
    layerwise_resident_blocks: int = setting(
        0, "with --enable-layerwise-offload, number of blocks per stack that stay on the device", minimum=0
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecipeConfig:
    """Presets: settings of requests that belong together, and the one that is the default."""

    presets: tuple[str, ...] = setting(
        (), "YAML files with presets for requests, beside those that come with the models, separated by commas"
    )
    recipe: str | None = setting(
        None,
        "preset that requests get unless they name another; its adapters are loaded from the hub, or from files in the "
        "order of the preset: NAME=FILE,FILE",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig:
    """Time per request, component by component."""

    enable_diffusion_pipeline_profiler: bool = setting(
        False,
        "profiler: log the time of each target and report it in replies; on cuda it synchronizes around each call",
    )
    diffusion_pipeline_profiler_targets: tuple[str, ...] = setting(
        (),
        "what the profiler measures: COMPONENT.METHOD, or diffuse for the denoising steps, separated by commas "
        "(default: vae.encode, vae.decode, diffuse, text_encoder.forward and tokenizer.forward, if the model has them)",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The queue, and how much it holds."""

    max_queue: int = setting(256, "most jobs in the queue; further jobs are refused with RESOURCE_EXHAUSTED", minimum=1)
    max_num_seqs: int = setting(8, "most requests that share a denoising step (continuous batching)", minimum=1)
    max_step_ms: float | None = setting(
        None,
        "longest shared step in milliseconds, as predicted by the cost model; a request whose steps alone take longer "
        "runs them alone (default: a request joins a step unless it is much larger than the one whose turn it is)",
        minimum=0,
    )
    policy: str = setting("fcfs", "scheduling policy: which job runs first", choices=("fcfs", "priority", "deadline"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """What one request may ask for, below what the checkpoint allows."""

    max_pixels: int | None = setting(
        None, "largest width x height of an output (default: the limit of the checkpoint)", minimum=1
    )
    max_steps: int = setting(200, "most denoising steps per request", minimum=1)
    max_outputs: int = setting(8, "most outputs per request", minimum=1)
    max_prompt_chars: int = setting(100_000, "longest prompt, in characters", minimum=1)
    max_input_bytes: int = setting(128 << 20, "largest input file, in bytes", minimum=1)
    max_input_pixels: int = setting(1 << 26, "largest width x height of an input image or frame", minimum=1)
    max_input_frames: int = setting(1024, "most frames of an input video", minimum=1)
    max_input_video_pixels: int = setting(1 << 29, "largest frames x width x height of an input video", minimum=1)
    max_input_seconds: float = setting(600.0, "longest input video or audio, in seconds", minimum=0)
    input_budget: int = setting(
        4 << 30,
        "bytes of decoded inputs held for jobs that wait; what does not fit is refused with RESOURCE_EXHAUSTED",
        minimum=1,
    )
    input_timeout: float = setting(120.0, "seconds that decoding the inputs of one request may take", minimum=1)


RAY = "ray"
EXECUTORS = ("process", RAY)
"""Values of --distributed-executor-backend."""


def _ray_address(value: str) -> str:
    """Raises ValueError for the address of a Ray client: what it does passes through a proxy at the head."""
    if value != "auto" and not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s/:\[\]]+):\d{1,5}", value):
        raise ValueError("must be HOST:PORT of the head of the cluster, as in ray start --address, or auto")
    return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How many workers, when one counts as dead, how it is restarted, and what it prepares."""

    data_parallel_size: int = setting(
        1, "replicas of the model, each in a worker of its own, on a GPU of its own where there are GPUs", minimum=1
    )
    devices: tuple[str, ...] = setting(
        (),
        "GPUs of the replicas, and of each one's ranks, by number, separated by commas (default: the first ones; with "
        "one process, all)",
    )
    load_later: bool = setting(
        False, "know the model, and load it only when AdminService.LoadModel asks for it (among several models)"
    )
    distributed_executor_backend: str = setting(
        "process",
        "where workers run; process: each in a process on this machine; ray: each in an actor of a Ray cluster, on a "
        "node that has room for it (needs the extra omni-grpc[ray])",
        choices=EXECUTORS,
    )
    ray_address: str | None = setting(
        None,
        "with --distributed-executor-backend ray, the cluster: HOST:PORT of its head, or auto for that of the Ray node "
        "on this machine (default: a Ray of this machine alone, started and ended with the server)",
        read=_ray_address,
    )
    ray_placement_timeout: float = setting(
        60.0,
        "with --distributed-executor-backend ray, seconds that the cluster gets to find a place for a replica",
        minimum=1,
    )
    worker_timeout: float = setting(30.0, "seconds without a heartbeat after which a worker is killed", minimum=1)
    phase_timeout: float = setting(
        1800.0, "seconds that one prepare, step or decode may take before the worker is killed as hung", minimum=1
    )
    restart_backoff: float = setting(
        1.0, "seconds before a dead worker is restarted; doubles with each failure, up to 60", minimum=0
    )
    warm_up_seconds: float = setting(
        10.0, "seconds that the warm-up may take to fit the cost model; 0: nothing is measured", minimum=0
    )
    cuda_graph_tokens: int | None = setting(
        None,
        "use CUDA graphs for recurring batch shapes of up to this many tokens; 0: no CUDA graphs (default: 8192 on "
        "cuda, none with --enable-layerwise-offload); native models only",
        minimum=0,
    )

    def __post_init__(self) -> None:
        """Raises ConfigError for settings of Ray where workers are processes of this machine."""
        if self.distributed_executor_backend == RAY:
            return
        fields = [field for field in dataclasses.fields(self) if field.name.startswith("ray_")]
        idle = [field.name for field in fields if getattr(self, field.name) != field.default]
        if idle:
            why = "has no effect without --distributed-executor-backend ray; add it, or leave this out"
            message = "; ".join(f"--{name.replace('_', '-')} {why}" for name in idle)
            violations = tuple(Violation(name, why) for name in idle)
            raise ConfigError(message, reason="SETTING_WITHOUT_EFFECT", violations=violations)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The whole tree. Build it with `EngineConfig.from_settings(model=..., max_queue=...)`.

    A section that may be None is a feature, and is None where all of its settings are their defaults: then it is off.
    """

    model: ModelConfig
    adapter: AdapterConfig = AdapterConfig()
    cache: CacheConfig | None = None
    quantization: QuantizationConfig | None = None
    loras: LoraConfig | None = None
    offload: OffloadConfig | None = None
    recipes: RecipeConfig | None = None
    profiler: ProfilerConfig | None = None
    scheduler: SchedulerConfig = SchedulerConfig()
    limits: LimitsConfig = LimitsConfig()
    fleet: FleetConfig = dataclasses.field(default_factory=FleetConfig)
    jobs: JobsConfig = dataclasses.field(default_factory=JobsConfig)
    store: StoreConfig = dataclasses.field(default_factory=StoreConfig)
    worker: WorkerConfig = WorkerConfig()
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    ranks: RanksConfig = dataclasses.field(default_factory=RanksConfig)
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    http: HttpConfig = dataclasses.field(default_factory=HttpConfig)
    outbound: OutboundConfig = dataclasses.field(default_factory=OutboundConfig)
    webhooks: WebhooksConfig = dataclasses.field(default_factory=WebhooksConfig)
    tenants: TenantsConfig = dataclasses.field(default_factory=TenantsConfig)
    tls: TlsConfig = dataclasses.field(default_factory=TlsConfig)
    identity: IdentityConfig = dataclasses.field(default_factory=IdentityConfig)
    audit: AuditConfig = dataclasses.field(default_factory=AuditConfig)
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
    traces: TracesConfig = dataclasses.field(default_factory=TracesConfig)
    logs: LogConfig = dataclasses.field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if not (self.tls.on or self.tls.insecure):
            addresses = (*self.server.addresses, *self.http.addresses(self.server.host))
            exposure.check_plaintext(addresses, identified=self.identity.on)
            exposure.check_plaintext(self.metrics.addresses, identified=False, what="the names of tenants and models")
        KeepingLimits.of(self.jobs, self.store)

    @property
    def keeping(self) -> KeepingLimits:
        """For how long finished jobs are kept, and how much of them."""
        return KeepingLimits.of(self.jobs, self.store)

    @property
    def processes(self) -> int:
        """Workers of the model: each rank of each replica."""
        return self.worker.data_parallel_size * self.parallel.sizes.world

    @classmethod
    def from_settings(cls, **flat: Any) -> EngineConfig:
        """Builds the tree from flat names; without a model, for the one that comes with the package.

        Raises ConfigError for an unknown name, a wrong type or a value out of range.
        """
        known = {option.name: option for option in options()}
        unknown = [name for name in flat if name not in known]
        if unknown:
            raise unknown_settings(unknown, known)
        if flat.get("model") is None:
            if not BUNDLED.is_dir():
                raise ConfigError(
                    "no model: pass a checkpoint folder or a hub model (--model DIR or --model ORG/NAME); the "
                    f"bundled model was not found in {BUNDLED}",
                    violations=(Violation("model", "is required"),),
                )
            flat["model"] = str(BUNDLED)
        flat["model"] = model_of(known["model"].parse(flat["model"]))
        sections: dict[str, dict[str, Any]] = {}
        for name, value in flat.items():
            option, parsed = known[name], known[name].parse(value)
            if not (option.feature and parsed == option.default):
                sections.setdefault(option.section, {})[name] = parsed
        kinds = {section: kind for section, kind, _ in sections_of(cls)}
        return cls(**{section: kinds[section](**values) for section, values in sections.items()})


def model_of(name: str) -> str:
    """The folder or hub name that a name means: the bundled model has a name too, unless a folder here is called so."""
    return str(BUNDLED) if name == BUNDLED.name and BUNDLED.is_dir() and not Path(name).exists() else name


def options() -> Iterator[Option]:
    """Every setting of the tree, in the order in which it is declared."""
    return options_of(EngineConfig)
