"""Whether a model can be spread over ranks as its configuration asks, on the devices that there are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from omni_grpc.config import EngineConfig
from omni_grpc.config.backends import AUTO, BACKENDS, EIGHT_BIT, candidates
from omni_grpc.config.sections import RAY
from omni_grpc.feature_rules.base import Faults
from omni_grpc.feature_rules.gguf import SCHEME as GGUF
from omni_grpc.feature_rules.ranks import check_sizes
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.launch import Launch
from omni_grpc.types.ranks import RENDEZVOUS
from omni_grpc.types.spec import Checkpoint

GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder of the driver that has one folder for each GPU."""

MOST_INVARIANT = 2
"""Ranks that can share weights where a sum may not depend on the batch: a sum of two has one order."""


def check_ranks(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raises ConfigError for sizes that the model or the machine cannot have, by setting, before any process starts."""
    sizes, replicas = config.parallel.sizes, config.worker.data_parallel_size
    devices = device_count(config, os.environ)
    there = sizes.world if devices is None else devices // replicas
    wrong = {**check_sizes(checkpoint, sizes, there), **_beside(config)}
    if wrong:
        violations = tuple(Violation(field, why) for field, why in wrong.items())
        message = "; ".join(f"--{field.replace('_', '-')} {why}" for field, why in wrong.items())
        raise ConfigError(message, reason="RANKS_DO_NOT_FIT", violations=violations)


def device_count(config: EngineConfig, environ: Mapping[str, str]) -> int | None:
    """The GPUs that workers can have; None where ranks share a CPU, where only a worker or a cluster can tell, and in a
    rank, which sees no other GPU than its own, or those of one host.
    """
    elsewhere = config.worker.distributed_executor_backend == RAY
    if config.model.device == "cpu" or elsewhere or RENDEZVOUS in environ or Launch.of(environ) is not None:
        return None
    listed = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if listed:
        return len(listed)
    try:
        return len(list(GPUS.iterdir())) or None
    except OSError:
        return None


def _beside(config: EngineConfig) -> Faults:
    """What does not go together with ranks."""
    sizes = config.parallel.sizes
    wrong: dict[str, str] = {}
    if sizes.world == 1:
        return wrong
    if config.worker.cuda_graph_tokens and sizes.world > sizes.cfg_parallel_size:
        wrong["cuda_graph_tokens"] = "does not work with ranks that share the work of the blocks; leave it out"
    if sizes.vae_patch_parallel_size > 1 and config.adapter.vae_use_tiling:
        wrong["vae_patch_parallel_size"] = (
            "must be 1 beside --vae-use-tiling, which decodes tile by tile; leave one out"
        )
    if sizes.use_hsdp and config.offload is not None and config.offload.enable_layerwise_offload:
        wrong["use_hsdp"] = "must be off beside --enable-layerwise-offload, which moves the same weights; leave one out"
    if config.model.batch_invariant and sizes.tensor_parallel_size > MOST_INVARIANT:
        wrong["tensor_parallel_size"] = (
            f"must be {MOST_INVARIANT} at most beside --batch-invariant: a sum over more ranks is in an order that "
            "depends on where in the batch a token is; share tokens instead, with --ulysses-degree or "
            "--sequence-parallel-size"
        )
    return {**wrong, **_packed(config), **_in_a_ring(config)}


def _packed(config: EngineConfig) -> Faults:
    """A GGUF file packs each row of a weight in blocks, and a rank's layers are others where experts are shared."""
    if config.quantization is None or config.quantization.quantization != GGUF:
        return {}
    sizes = config.parallel.sizes
    instead = "share tokens instead, with --ulysses-degree or --sequence-parallel-size, or use --quantization int8"
    if sizes.tensor_parallel_size > 1:
        return {
            "tensor_parallel_size": f"must be 1 beside --quantization gguf, whose blocks parts of rows cut; {instead}"
        }
    if sizes.enable_expert_parallel:
        return {
            "enable_expert_parallel": "must be off beside --quantization gguf, whose layers stay whole; leave one out"
        }
    return {}


def _in_a_ring(config: EngineConfig) -> Faults:
    """A ring merges what it attends to part by part, and not every backend gives what that takes."""
    roles = config.model.attention
    if roles is None or config.parallel.ring_degree == 1:
        return {}
    choices = {"default": roles.default, **{f"per_role.{role}": choice for role, choice in roles.per_role.items()}}
    asked = {name: _backend(choice.backend, choice.precision) for name, choice in choices.items()}
    for number, window in enumerate(roles.schedule):
        asked[f"schedule[{number}]"] = _backend(AUTO, window.precision)
    for name, backend in asked.items():
        if backend != AUTO and not any(BACKENDS[each].parts for each in candidates(backend, "")):
            able = ", ".join(each for each, backend in BACKENDS.items() if backend.parts)
            why = (
                f"must be 1 beside attention in {backend} ({name}), which gives no log-sum-exp to merge parts by; use "
                f"{able} or {AUTO} in 16 or 32 bits, or --sequence-parallel-size in place of a ring"
            )
            return {"ring_degree": why}
    return {}


def _backend(name: str, precision: str) -> str:
    """The backend of a choice: in 8 bits another one than otherwise."""
    return EIGHT_BIT[precision].get(name, name) if precision in EIGHT_BIT else name
