"""Settings that save memory, in one table: for a worker that ran out of it, and for `doctor --advise`.

To suggest another setting, add a row.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from omni_grpc.config import EngineConfig, options
from omni_grpc.resolve.settings import Placement, check_settings
from omni_grpc.types.diffusers_spec import OPAQUE_FAMILY
from omni_grpc.types.errors import ConfigError, Failure
from omni_grpc.types.media import Modality
from omni_grpc.types.spec import Checkpoint
from omni_grpc.types.written import written

PHASES = ("load", "prepare", "step", "decode")


def _anywhere(placement: Placement, checkpoint: Checkpoint) -> bool:
    return True


def _beside_the_host(placement: Placement, checkpoint: Checkpoint) -> bool:
    return placement.device != "cpu"


def _in_full_precision(placement: Placement, checkpoint: Checkpoint) -> bool:
    return placement.dtype == "float32"


def _all_at_once(placement: Placement, checkpoint: Checkpoint) -> bool:
    """Native models decode outputs one by one anyway."""
    return checkpoint.spec.family == OPAQUE_FAMILY


def _shared(placement: Placement, checkpoint: Checkpoint) -> bool:
    return not checkpoint.spec.exclusive


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A setting, and a function from its current value to a better one, or to the same where there is none.

    `phases` are those whose memory it saves; `where` says on which machine and for which model it helps. `lossless`:
    outputs stay the same. `excludes` names a setting that cannot be combined with it.
    """

    setting: str
    better: Callable[[Any], Any]
    saves: str
    lossless: bool
    phases: tuple[str, ...] = PHASES
    where: Callable[[Placement, Checkpoint], bool] = _anywhere
    excludes: str = ""


REMEDIES = (
    Remedy(
        setting="layerwise_resident_blocks",
        better=lambda now: 0,
        saves="at most two blocks of each stack are on the device",
        lossless=True,
        where=_beside_the_host,
    ),
    Remedy(
        setting="enable_layerwise_offload",
        better=lambda now: True,
        saves="two blocks of the denoiser are on the device at a time, the others in host memory",
        lossless=True,
        where=_beside_the_host,
    ),
    Remedy(
        setting="enable_cpu_offload",
        better=lambda now: True,
        saves="text encoders and VAE are on the device only while they run, and through diffusers the denoiser too",
        lossless=True,
        where=_beside_the_host,
    ),
    Remedy(
        setting="gpu_memory_budget",
        better=lambda now: None if now is None else float(f"{1.25 * now:.3g}"),
        saves="the worker may use more of the device",
        lossless=True,
        where=_beside_the_host,
    ),
    Remedy(
        setting="vae_use_slicing",
        better=lambda now: True,
        saves="outputs are decoded one after the other",
        lossless=True,
        phases=("decode",),
        where=_all_at_once,
    ),
    Remedy(
        setting="max_num_seqs",
        better=lambda now: max(1, now // 2),
        saves="fewer requests share a denoising step",
        lossless=True,
        phases=("prepare", "step", "decode"),
        where=_shared,
    ),
    Remedy(
        setting="cuda_graph_tokens",
        better=lambda now: 0,
        saves="no CUDA graphs, whose tensors take up to 2 GiB",
        lossless=True,
        phases=("prepare", "step", "decode"),
        where=_beside_the_host,
        excludes="enable_layerwise_offload",
    ),
    Remedy(
        setting="vae_use_tiling",
        better=lambda now: True,
        saves="images are decoded tile by tile, with blended seams",
        lossless=False,
        phases=("decode",),
    ),
    Remedy(
        setting="quantization",
        better=lambda now: now or "int8",
        saves="the linear layers of the denoiser take half of their bfloat16 memory",
        lossless=False,
    ),
    Remedy(
        setting="dtype",
        better=lambda now: "bfloat16",
        saves="weights and activations take half of their float32 memory",
        lossless=False,
        where=_in_full_precision,
    ),
)
SMALLER: Mapping[Modality, str] = {
    Modality.IMAGE: "fewer outputs or a smaller size",
    Modality.VIDEO: "fewer outputs or a smaller size, or fewer frames",
    Modality.AUDIO: "fewer outputs or a shorter duration",
}
"""What a request can reduce, by what the model makes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Switch:
    """A remedy that this server can apply, with its value and the flag that sets it."""

    remedy: Remedy
    value: Any
    flag: str


def changed(config: EngineConfig, **settings: Any) -> EngineConfig:
    """The configuration with other values of these settings."""
    return EngineConfig.from_settings(**{option.name: option.of(config) for option in options()} | settings)


def switches(config: EngineConfig, checkpoint: Checkpoint, placement: Placement, phase: str) -> list[Switch]:
    """Remedies that save memory in a phase, are not applied yet, and work with this model and configuration."""
    known, found = {option.name: option for option in options()}, []
    for remedy in REMEDIES:
        option = known[remedy.setting]
        now = option.of(config)
        value = remedy.better(now)
        excluded = remedy.excludes and known[remedy.excludes].of(config)
        if value == now or excluded or phase not in remedy.phases or not remedy.where(placement, checkpoint):
            continue
        try:
            check_settings(changed(config, **{remedy.setting: value}), checkpoint)
        except ConfigError:
            continue
        found.append(
            Switch(remedy, value, option.flag if value is True else f"{option.flag} {shlex.quote(written(value))}")
        )
    return found


def out_of_memory(
    failure: Failure, phase: str, config: EngineConfig, checkpoint: Checkpoint, placement: Placement
) -> Failure:
    """The failure, with a message that also says what would save memory in this phase. "switches" of its metadata are
    the flags alone.
    """
    found = switches(config, checkpoint, placement, phase)
    ways = [f"start the server with {', '.join(switch.flag for switch in found)} (any of them)"] if found else []
    if phase != "load":
        modalities = dict.fromkeys(task.modality for task in checkpoint.tasks)
        ways += [f"ask for {SMALLER[modality]}" for modality in modalities or (Modality.IMAGE,)]
    elif not found:
        ways = ["use a device with more memory"]
    metadata = {"switches": ", ".join(switch.flag for switch in found)} if found else {}
    return dataclasses.replace(
        failure, message=f"{failure.message}; {'; or '.join(ways)}", metadata={**failure.metadata, **metadata}
    )
