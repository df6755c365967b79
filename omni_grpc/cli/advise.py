"""`doctor --advise`: whether a model fits a machine, and the command line for it, lossless settings first.

Nothing is measured: a model's memory is the bytes of its weights, plus an estimate of what it works with.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omni_grpc.checkpoint.sizes import ComponentSize
from omni_grpc.config import EngineConfig
from omni_grpc.resolve.memory_hints import PHASES, Switch, changed, switches
from omni_grpc.resolve.residency import FRAMES_AT_A_TIME, PER_PIXEL, TILED
from omni_grpc.resolve.settings import Machine, Placement, check_settings, place
from omni_grpc.types.diffusers_spec import OPAQUE_FAMILY
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.load_progress import size_text
from omni_grpc.types.spec import Checkpoint

RESERVE = 2 << 30
"""Bytes on the device besides weights and pixels: its runtime, and what the denoiser works with."""
USABLE = 0.95
"""The share of memory that a plan may use."""
LARGE = 1_000_000_000
"""Parameters from which a model is slow without a GPU."""
FEW_STEPS = 8
"""With so few steps, each differs too much from the one before."""
BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One device: its name and its memory in bytes."""

    name: str
    memory: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine: its devices, the memory of the host in bytes, and the cores that a process may use."""

    gpus: tuple[Gpu, ...]
    memory: int
    cores: int


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """Bytes on the device and on the host. On a machine without a GPU, all of them are on the host."""

    device: int
    host: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A flag, and why it is there."""

    flag: str
    why: str
    lossless: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The result. `commands`: one for each server that should run on the machine, empty if the model does not fit; then
    `lacking` says what is missing. `also`: flags that may be added, at the price that each names.
    """

    model: str
    pipeline: str
    native: bool
    parts: tuple[ComponentSize, ...]
    dtype: str
    host: Host
    need: Need
    fits: bool
    lacking: str
    commands: tuple[str, ...]
    flags: tuple[Reason, ...]
    also: tuple[Reason, ...]
    notes: tuple[str, ...]


def advise(checkpoint: Checkpoint, parts: Sequence[ComponentSize], host: Host, config: EngineConfig) -> Advice:
    """The best way to run the model that fits: with the fewest settings that change outputs, then the fewest settings.
    What `config` has on stays on.
    """
    case = Case(checkpoint, tuple(parts), host)
    best, chosen = min(case.ways(config), key=lambda way: case.rank(*way))
    need = case.need(best)
    lacking = case.lacking(need)
    servers = 0 if lacking else case.servers(need)
    flags = tuple(Reason(flag=it.flag, why=it.remedy.saves, lossless=it.remedy.lossless) for it in chosen)
    return Advice(
        model=config.model.model,
        pipeline=checkpoint.spec.name,
        native=checkpoint.spec.family != OPAQUE_FAMILY,
        parts=case.parts,
        dtype=case.placement(best).dtype,
        host=host,
        need=need,
        fits=not lacking,
        lacking=lacking,
        commands=tuple(_commands(config, flags, servers)),
        flags=() if lacking else flags,
        also=() if lacking else tuple(_also(best, case)),
        notes=tuple(_notes(case, servers, chosen, case.need(config))),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A model and a machine, for which configurations are compared."""

    checkpoint: Checkpoint
    parts: tuple[ComponentSize, ...]
    host: Host

    def placement(self, config: EngineConfig) -> Placement:
        return place(
            config.model,
            Machine(cuda=bool(self.host.gpus), cores=self.host.cores),
            replicas=config.processes,
        )

    def need(self, config: EngineConfig) -> Need:
        """The memory that a server with this configuration needs: weights as loaded, and an estimate of the rest."""
        placement = self.placement(config)
        wide = BYTES[placement.dtype]
        whole = {part.name: part.parameters * wide - _quantised(config, part) * (wide - 1) for part in self.parts}
        work = RESERVE + int(PER_PIXEL * _pixels(self.checkpoint) * (TILED if config.adapter.vae_use_tiling else 1))
        if placement.device == "cpu":
            return Need(0, sum(whole.values()) + work)
        by_component = config.adapter.enable_cpu_offload
        if by_component and self.checkpoint.spec.family == OPAQUE_FAMILY:
            return Need(max(whole.values(), default=0) + work, sum(whole.values()))
        away = sum(self._offloaded(config, part, whole[part.name]) for part in self.parts)
        if by_component:
            # of a native model the denoiser stays, and of the others one at a time is there
            others = [whole[part.name] for part in self.parts if not part.denoiser]
            away += sum(others) - max(others, default=0)
        return Need(sum(whole.values()) - away + work, away)

    def _offloaded(self, config: EngineConfig, part: ComponentSize, whole: int) -> int:
        """Bytes of a component that stay on the host: its blocks but two, and but those that stay on the device.
        diffusers does that to all components.
        """
        native, offload = self.checkpoint.spec.family != OPAQUE_FAMILY, config.offload
        if offload is None or not offload.enable_layerwise_offload or not part.parameters:
            return 0
        if native and not part.denoiser:
            return 0
        here = (2 + offload.layerwise_resident_blocks) * part.largest_block
        return whole * max(0, part.in_blocks - here) // part.parameters

    def ways(self, config: EngineConfig, chosen: Sequence[Switch] = ()) -> Iterator[tuple[EngineConfig, list[Switch]]]:
        """The configuration as it is, and with every combination of settings in which each saves memory."""
        yield config, list(chosen)
        now, placement = self.need(config), self.placement(config)
        found = [switch for phase in PHASES for switch in switches(config, self.checkpoint, placement, phase)]
        for switch in {switch.flag: switch for switch in found}.values():
            more = changed(config, **{switch.remedy.setting: switch.value})
            then = self.need(more)
            if then.device < now.device or then.host < now.host:
                yield from self.ways(more, [*chosen, switch])

    def rank(self, config: EngineConfig, chosen: Sequence[Switch]) -> tuple[Any, ...]:
        """A sort key: the smaller the better."""
        need = self.need(config)
        if self.lacking(need):
            return (True, need.device + need.host)
        return (False, sum(not switch.remedy.lossless for switch in chosen), len(chosen), need.device)

    def lacking(self, need: Need) -> str:
        """What the machine has too little of; empty if it has enough."""
        largest, found = max((gpu.memory for gpu in self.host.gpus), default=0), []
        if need.device > largest * USABLE:
            found.append(f"it needs {size_text(need.device)} on the device, which has {size_text(largest)}")
        if need.host > self.host.memory * USABLE:
            found.append(f"it needs {size_text(need.host)} on the host, which has {size_text(self.host.memory)}")
        return "; ".join(found)

    def servers(self, need: Need) -> int:
        """The number of servers: one for each device that the model fits on, as far as the host's memory suffices."""
        cards = sum(need.device <= gpu.memory * USABLE for gpu in self.host.gpus)
        return max(1, min(cards, int(self.host.memory * USABLE // need.host) if need.host else cards))


def render(it: Advice) -> str:
    """The advice as text."""
    runs = "native" if it.native else "through diffusers"
    wide = BYTES[it.dtype]
    weights = ", ".join(f"{part.name} {size_text(part.parameters * wide)}" for part in it.parts)
    total = size_text(sum(part.parameters for part in it.parts) * wide)
    lines = [
        f"model    {it.pipeline}, {runs}",
        f"weights  {weights}: {total} in {it.dtype}",
        f"machine  {_machine(it.host)}",
        f"needs    {_needs(it.need)} (weights, and an estimate of the activations)",
        "",
    ]
    if not it.fits:
        lines.append(f"It does not fit: {it.lacking}.")
    else:
        lines += ["It fits, with:", "", *(f"  {command}" for command in it.commands), ""]
        lines += _table(it.flags) or ["  No setting is needed."]
        if it.also:
            lines += ["", "If that is not fast or small enough, at a cost in quality:", "", *_table(it.also)]
    return "\n".join([*lines, *(f"\nnote: {note}" for note in it.notes)])


def _table(reasons: Sequence[Reason]) -> list[str]:
    wide = max((len(reason.flag) for reason in reasons), default=0)
    return [f"  {r.flag:{wide}}  {'lossless' if r.lossless else 'lossy'}: {r.why}" for r in reasons]


def _machine(host: Host) -> str:
    names = [f"{gpu.name} ({size_text(gpu.memory)})" for gpu in host.gpus]
    cards = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)] or ["no CUDA device"]
    return f"{', '.join(cards)}, {size_text(host.memory)} of memory, {host.cores} cores"


def _needs(need: Need) -> str:
    device = [f"{size_text(need.device)} on the device"] if need.device else []
    return " and ".join([*device, *([f"{size_text(need.host)} on the host"] if need.host else [])])


def _quantised(config: EngineConfig, part: ComponentSize) -> int:
    """Parameters in one byte: those of the blocks of a denoiser, or as many of them as are stored so."""
    if not part.denoiser:
        return 0
    return part.coded or (part.in_blocks if config.quantization is not None else 0)


def _pixels(checkpoint: Checkpoint) -> int:
    """Pixels that are decoded at a time by default. A diffusers pipeline states its size only when it is loaded: until
    then, a picture of 1024 x 1024.
    """
    if not checkpoint.described:
        return 1024 * 1024
    defaults = checkpoint.defaults
    return defaults.width * defaults.height * min(defaults.num_frames or 1, FRAMES_AT_A_TIME)


def _commands(config: EngineConfig, flags: Sequence[Reason], servers: int) -> Iterator[str]:
    command = ["python", "-m", "omni_grpc.serve", "--model", config.model.model]
    if config.model.revision is not None:
        command += ["--revision", config.model.revision]
    if config.model.diffusion_load_format != "auto":
        command += ["--diffusion-load-format", config.model.diffusion_load_format]
    line = " ".join([shlex.join(command), *(reason.flag for reason in flags)])
    if servers == 1:
        yield line
        return
    for number in range(servers):
        yield f"CUDA_VISIBLE_DEVICES={number} {line} --port {config.server.port + number}"


def _also(config: EngineConfig, case: Case) -> Iterator[Reason]:
    checkpoint = case.checkpoint
    spec = checkpoint.spec
    known = "tea_cache" in spec.step_cache
    unsure = "" if known else "; this model has no published coefficients, so compare the outputs"
    if (
        checkpoint.described
        and checkpoint.defaults.steps > FEW_STEPS
        and _taken(config, checkpoint, cache_backend="tea_cache")
    ):
        why = f"a step whose input has hardly changed reuses the previous result{unsure}"
        yield Reason(flag="--cache-backend tea_cache", why=why, lossless=False)
    coded = any(part.coded for part in case.parts if part.denoiser)
    if config.quantization is None and not coded and _taken(config, checkpoint, quantization="int8"):
        why = "the linear layers of the denoiser take half the memory; not necessarily faster"
        yield Reason(flag="--quantization int8", why=why, lossless=False)


def _taken(config: EngineConfig, checkpoint: Checkpoint, **settings: Any) -> bool:
    try:
        check_settings(changed(config, **settings), checkpoint)
    except ConfigError:
        return False
    return True


def _notes(case: Case, servers: int, chosen: Sequence[Switch], plain: Need) -> Iterator[str]:
    host = case.host
    if servers > 1:
        yield f"a server uses one device, so {servers} servers share the work of {len(host.gpus)} devices"
    if servers and servers < len(host.gpus):
        yield f"a server uses one device; {len(host.gpus) - servers} of {len(host.gpus)} devices stay idle"
    if chosen:
        yield f"without these settings it would need {_needs(plain)}"
    if not host.gpus and sum(part.parameters for part in case.parts) > LARGE:
        yield "without a CUDA device, a large model takes minutes to hours per image"
