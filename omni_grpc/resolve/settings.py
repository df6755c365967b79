"""Every decision made for a server: which settings its model takes, and where it runs. For requests see `resolve`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from omni_grpc.config import (
    DIFFUSERS_CACHES,
    NATIVE_CACHES,
    AdapterConfig,
    EngineConfig,
    ModelConfig,
    QuantizationConfig,
)
from omni_grpc.config.backends import AUTO
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types.adapters_and_caches import TeaCache, coefficients_fault, threshold_fault
from omni_grpc.types.diffusers_spec import OPAQUE_FAMILY
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.plan import Ready
from omni_grpc.types.spec import Checkpoint, ModelSpec

DIFFUSERS_ONLY = ("diffusers_load_kwargs", "diffusers_call_kwargs")
"""Settings that are refused as long as diffusers is not asked for by name, also where `auto` would choose it."""

OF_ANY_VAE = ("vae_use_slicing", "vae_use_tiling")
"""Settings of the autoencoder, which native models take from diffusers."""

DEFAULT_THRESHOLD = 0.2
"""Of TeaCache, where neither the request nor --cache-config has one."""

HUB_FILE = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*):(.+)", re.ASCII)
"""A file of a repository on the hub."""

Faults = dict[str, str]
"""Setting -> what is wrong with it."""


def facts_of(config: EngineConfig, checkpoint: Checkpoint, ready: Ready | None) -> ServingFacts:
    """What the rules look at, for a server with this configuration whose worker has said this of itself."""
    return ServingFacts(
        checkpoint,
        config.limits,
        cache=step_cache(config, checkpoint.spec),
        fixed_cache=ready.fixed_cache if ready else None,
        loras=ready.loras if ready else (),
    )


def step_cache(config: EngineConfig, spec: ModelSpec) -> TeaCache | None:
    """The step cache of a request that says nothing, for a native model."""
    if config.cache is None or config.cache.cache_backend not in NATIVE_CACHES or spec.family == OPAQUE_FAMILY:
        return None
    given = config.cache.cache_config or {}
    return TeaCache(
        threshold=given.get("rel_l1_thresh", DEFAULT_THRESHOLD),
        coefficients=tuple(given.get("coefficients") or spec.cache_coefficients),
    )


def apply_settings(config: EngineConfig, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as the settings change it: those that stand in for an entry of its configs are put there, so that
    defaults and the model itself find them. Raises ConfigError, see check_settings.
    """
    check_settings(config, checkpoint)
    if checkpoint.spec.family == OPAQUE_FAMILY:
        return checkpoint
    configs = dict(checkpoint.configs)
    for name, (component, key) in checkpoint.spec.settings.items():
        if (value := getattr(config.adapter, name)) is not None:
            configs[component] = {**configs[component], key: value}
    replaced = frozenset(gguf_files(config.quantization, checkpoint)) if config.quantization else frozenset()
    return dataclasses.replace(checkpoint, configs=configs, replaced=replaced)


def _stands_in(name: str, checkpoint: Checkpoint) -> bool:
    """Whether a setting stands in for something that the checkpoint has."""
    component, key = checkpoint.spec.settings.get(name, ("", ""))
    return checkpoint.configs.get(component, {}).get(key) is not None


def check_settings(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raises ConfigError for settings that the model would not look at: those of the diffusers adapter for a native
    model, those of native features for a diffusers pipeline, and those that mean nothing without another.
    """
    native = checkpoint.spec.family != OPAQUE_FAMILY
    name = checkpoint.spec.name
    wrong = _adapter_faults(config, checkpoint, native) | _cache_faults(config, name, native)
    wrong |= _gguf_faults(config.quantization or QuantizationConfig(), checkpoint, native)
    if config.profiler is not None and not config.profiler.enable_diffusion_pipeline_profiler:
        wrong["diffusion_pipeline_profiler_targets"] = "needs --enable-diffusion-pipeline-profiler"
    if not native:
        for field in ("num_weight_load_threads", "disable_multithread_weight_load"):
            if getattr(config.model, field) != ModelConfig.__dataclass_fields__[field].default:
                wrong[field] = f"has no effect on {name}, whose weights diffusers reads"
        if config.model.batch_invariant:
            wrong["batch_invariant"] = f"has no effect on {name}, which runs through diffusers"
        if config.worker.cuda_graph_tokens is not None:
            wrong["cuda_graph_tokens"] = f"has no effect on {name}, which runs through diffusers"
        if config.quantization is not None:
            own = "--diffusers-load-kwargs has a quantization_config"
            wrong["quantization"] = f"has no effect on {name}, which runs through diffusers; {own}"
        if config.loras is not None:
            wrong["lora"] = f"has no effect on {name}, which runs through diffusers; adapters are for native models"
        if config.offload is not None and config.offload.layerwise_resident_blocks:
            wrong["layerwise_resident_blocks"] = f"has no effect on {name}, which runs through diffusers"
    elif (chosen := config.quantization) is not None and chosen.quantization is None and chosen.ignored_layers:
        wrong["ignored_layers"] = "needs --quantization"
    if not native and (why := _attention_fault(config)):
        wrong["diffusion_attention_config"] = f"has {why}, which has no effect on {name}: it runs through diffusers"
    if config.offload is not None and config.offload.enable_layerwise_offload and config.worker.cuda_graph_tokens:
        wrong["cuda_graph_tokens"] = "needs weights that stay where they are: leave out --enable-layerwise-offload"
    if config.offload is not None and not config.offload.enable_layerwise_offload:
        wrong["layerwise_resident_blocks"] = "needs --enable-layerwise-offload"
    if wrong:
        violations = tuple(Violation(field, why) for field, why in wrong.items())
        message = "; ".join(f"--{field.replace('_', '-')} {why}" for field, why in wrong.items())
        raise ConfigError(message, reason="SETTING_WITHOUT_EFFECT", violations=violations)


def gguf_files(config: QuantizationConfig, checkpoint: Checkpoint) -> Mapping[str, str]:
    """The GGUF file of each component, as it was named: a path or a file on the hub. One that stands alone is that of
    the only denoiser; where there are two it has no component ("").
    """
    denoisers = _denoisers(checkpoint)
    found = {}
    for text in config.gguf_model:
        component, equals, file = text.partition("=")
        named = bool(equals) and component in checkpoint.spec.weights
        found[component if named else denoisers[0] if len(denoisers) == 1 else ""] = file if named else text
    return found


def _denoisers(checkpoint: Checkpoint) -> list[str]:
    return [component for component in checkpoint.spec.weights if component in checkpoint.configs]


def _gguf_faults(config: QuantizationConfig, checkpoint: Checkpoint, native: bool) -> Faults:
    name = checkpoint.spec.name
    if config.quantization != "gguf":
        return {"gguf_model": "needs --quantization gguf"} if config.gguf_model else {}
    if not native:
        return {"gguf_model": f"has no effect on {name}, which runs through diffusers"} if config.gguf_model else {}
    wrong = {}
    if config.ignored_layers:
        wrong["ignored_layers"] = "has no effect with --quantization gguf: the file says how each layer is packed"
    files, denoisers = gguf_files(config, checkpoint), _denoisers(checkpoint)
    if checkpoint.spec.single_file is None:
        wrong["quantization"] = f"gguf is not served yet for {name}, of whose GGUF files nothing is known"
    elif not files:
        wrong["gguf_model"] = "is required by --quantization gguf: a path, or ORG/NAME:FILE on the hub"
    elif files.keys() != set(denoisers):
        example = ",".join(f"{component}=FILE" for component in denoisers)
        wrong["gguf_model"] = f"must name a file for each of {', '.join(denoisers)} of {name}: --gguf-model {example}"
    elif absent := [file for file in files.values() if not (Path(file).is_file() or HUB_FILE.fullmatch(file))]:
        wrong["gguf_model"] = f"{absent[0]} is neither a file here nor one on the hub (ORG/NAME:FILE)"
    return wrong


def _adapter_faults(config: EngineConfig, checkpoint: Checkpoint, native: bool) -> Faults:
    wrong, default = {}, AdapterConfig()
    for field in [field.name for field in dataclasses.fields(AdapterConfig)]:
        if getattr(config.adapter, field) == getattr(default, field):
            continue
        if field in DIFFUSERS_ONLY and config.model.diffusion_load_format != "diffusers":
            wrong[field] = "is for diffusers pipelines; add --diffusion-load-format diffusers"
        elif native and field not in OF_ANY_VAE and not _stands_in(field, checkpoint):
            wrong[field] = (
                f"has no effect on {checkpoint.spec.name}, which is native; leave it out, or add "
                "--diffusion-load-format diffusers"
            )
    return wrong


def _attention_fault(config: EngineConfig) -> str:
    """What is asked of attention beyond one backend for all of it."""
    roles = config.model.attention
    if roles is None:
        return ""
    asked = {"per_role": roles.per_role, "schedule": roles.schedule, "precision": roles.default.precision != AUTO}
    return ", ".join(key for key, value in asked.items() if value)


def _cache_faults(config: EngineConfig, name: str, native: bool) -> Faults:
    if config.cache is None:
        return {}
    backend, given = config.cache.cache_backend, config.cache.cache_config or {}
    has = NATIVE_CACHES if native else DIFFUSERS_CACHES
    if backend is None:
        return {"cache_config": "needs --cache-backend"}
    if backend not in has:
        runs = "is native" if native else "runs through diffusers"
        return {"cache_backend": f"{backend!r} is no step cache of {name}, which {runs}; it has {', '.join(has)}"}
    if not native:
        return {}
    if unknown := sorted(given.keys() - {"rel_l1_thresh", "coefficients"}):
        return {"cache_config": f"has {', '.join(unknown)}; {backend} takes rel_l1_thresh and coefficients"}
    faults = {
        "rel_l1_thresh": threshold_fault(given.get("rel_l1_thresh", DEFAULT_THRESHOLD)),
        "coefficients": coefficients_fault(given.get("coefficients") or ()),
    }
    found = "; ".join(f"{key} {fault}" for key, fault in faults.items() if fault)
    return {"cache_config": found} if found else {}


# --- the machine ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What a worker found: whether torch sees a CUDA device, and how many CPU cores the process may use."""

    cuda: bool
    cores: int


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a worker runs. `cpu_threads` is None where torch's own choice stands."""

    device: str
    dtype: str
    cpu_threads: int | None


def place(config: ModelConfig, machine: Machine) -> Placement:
    """Decides every "auto" of a worker. Raises ConfigError for a device that is not there."""
    if config.device == "cuda" and not machine.cuda:
        raise ConfigError("--device is 'cuda', but torch sees no CUDA device; use --device cpu", reason="NO_DEVICE")
    device = config.device if config.device != "auto" else ("cuda" if machine.cuda else "cpu")
    dtype = config.dtype if config.dtype != "auto" else {"cuda": "bfloat16", "cpu": "float32"}[device]
    threads = config.cpu_threads
    if device == "cpu" and threads is None:
        # one core stays with the server, so that events stay smooth while a step runs
        threads = max(1, machine.cores - 1)
    return Placement(device="cuda:0" if device == "cuda" else device, dtype=dtype, cpu_threads=threads)
