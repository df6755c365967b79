"""Every decision made for a server: which settings its model accepts, and where it runs. For requests see
`resolve.request`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from omni_grpc.config import AdapterConfig, EngineConfig, ModelConfig
from omni_grpc.feature_rules.base import Faults, is_native
from omni_grpc.feature_rules.step_cache import offer
from omni_grpc.feature_rules.table import FEATURES, feature_faults
from omni_grpc.resolve.ranks import check_ranks
from omni_grpc.resolve.recipes import with_presets
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.plan import Ready
from omni_grpc.types.spec import Checkpoint

DIFFUSERS_ONLY = ("diffusers_load_kwargs", "diffusers_call_kwargs")
"""Settings that are refused as long as diffusers is not asked for by name, also where `auto` would choose it."""

SHARED = ("vae_use_slicing", "vae_use_tiling", "enable_cpu_offload")
"""Settings that native models take too: of the autoencoder, and offload by component."""


def facts_of(
    config: EngineConfig,
    checkpoint: Checkpoint,
    ready: Ready | None,
    *,
    found: WorkerFindings | None = None,
    faults: Mapping[str, str] | None = None,
) -> ServingFacts:
    """The facts for the rules of requests, from a server's configuration and what its worker found out. `found`: the
    same with the adapters as they are now; `faults`: those that cannot be named, each with the reason.
    """
    if found is None:
        found = WorkerFindings() if ready is None else ready.found
    return ServingFacts(
        checkpoint,
        config.limits,
        cache=offer(config, checkpoint),
        found=found,
        lora_faults={} if faults is None else faults,
    )


def apply_settings(config: EngineConfig, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the settings that replace an entry of its configs put there, so that defaults and the model
    itself see them, and with its presets. Raises ConfigError, see check_settings and with_presets.
    """
    check_settings(config, checkpoint)
    checkpoint = with_presets(config, checkpoint)
    if not is_native(checkpoint):
        return checkpoint
    configs = dict(checkpoint.configs)
    for name, (component, key) in checkpoint.spec.settings.items():
        if (value := getattr(config.adapter, name)) is not None:
            configs[component] = {**configs[component], key: value}
    replaced = frozenset().union(*(feature.replaces(config, checkpoint) for feature in FEATURES))
    return dataclasses.replace(checkpoint, configs=configs, replaced=replaced)


def _stands_in(name: str, checkpoint: Checkpoint) -> bool:
    """Whether a setting replaces an entry of the checkpoint's configs."""
    component, key = checkpoint.spec.settings.get(name, ("", ""))
    return checkpoint.configs.get(component, {}).get(key) is not None


def check_settings(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raises ConfigError for settings that the model would ignore: those of the diffusers adapter for a native model,
    those of native models for a diffusers pipeline, those that a feature refuses (`feature_rules`), and for ranks that
    the model or the machine cannot have.
    """
    check_ranks(config, checkpoint)
    wrong = {
        **_adapter_faults(config, checkpoint),
        **_loading_faults(config, checkpoint),
        **feature_faults(config, checkpoint),
    }
    if wrong:
        violations = tuple(Violation(field, why) for field, why in wrong.items())
        message = "; ".join(f"--{field.replace('_', '-')} {why}" for field, why in wrong.items())
        raise ConfigError(message, reason="SETTING_WITHOUT_EFFECT", violations=violations)


def _adapter_faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    wrong, default = {}, AdapterConfig()
    for field in [field.name for field in dataclasses.fields(AdapterConfig)]:
        if getattr(config.adapter, field) == getattr(default, field):
            continue
        if field in DIFFUSERS_ONLY and config.model.diffusion_load_format != "diffusers":
            wrong[field] = "is for diffusers pipelines; add --diffusion-load-format diffusers"
        elif is_native(checkpoint) and field not in SHARED and not _stands_in(field, checkpoint):
            wrong[field] = (
                f"has no effect on {checkpoint.spec.name}, which is native; leave it out, or add "
                "--diffusion-load-format diffusers"
            )
    return wrong


def _loading_faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    """Threads that read weights are those of native models."""
    if is_native(checkpoint):
        return {}
    return {
        field: f"has no effect on {checkpoint.spec.name}, whose weights are loaded by diffusers"
        for field in ("num_weight_load_threads", "disable_multithread_weight_load")
        if getattr(config.model, field) != ModelConfig.__dataclass_fields__[field].default
    }


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


def place(config: ModelConfig, machine: Machine, *, replicas: int = 1) -> Placement:
    """Decides every "auto" of a worker, one of `replicas` on this machine. Raises ConfigError for a device that is not
    there.
    """
    if config.device == "cuda" and not machine.cuda:
        rule = "is 'cuda', but torch sees no CUDA device; use --device cpu"
        raise ConfigError(f"--device {rule}", reason="NO_DEVICE", violations=(Violation("device", rule),))
    device = config.device if config.device != "auto" else ("cuda" if machine.cuda else "cpu")
    dtype = config.dtype if config.dtype != "auto" else {"cuda": "bfloat16", "cpu": "float32"}[device]
    threads = config.cpu_threads
    if device == "cpu" and threads is None:
        # one core stays with the server, so that events stay smooth while a step runs
        threads = max(1, (machine.cores - 1) // replicas)
    return Placement(device="cuda:0" if device == "cuda" else device, dtype=dtype, cpu_threads=threads)
