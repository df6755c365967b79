"""What of a model stays in device memory under a budget: all of it, all but what runs between steps, or some blocks."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from omni_grpc.checkpoint.sizes import CODES, DENOISERS, Header
from omni_grpc.config import EngineConfig
from omni_grpc.feature_rules.base import is_native
from omni_grpc.feature_rules.gguf import gguf_files
from omni_grpc.feature_rules.lora import device_bytes
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.load_progress import size_text
from omni_grpc.types.memory_model import MARGIN
from omni_grpc.types.spec import Checkpoint

SETTING = "gpu_memory_budget"
GIB = 1 << 30
SLOTS = 2
"""Blocks of a stack that layerwise offload has on the device beside those that stay."""

GRAPHS = 2 << 30
"""Bytes that CUDA graphs and their pool may take, besides: they are captured while jobs run."""
STEP_FLOOR = 512 << 20
"""Bytes that steps work with, whatever their size: workspaces of libraries, tables, latents."""
PER_TOKEN = 64 << 10
"""Bytes that a step works with for each token: some twenty rows of a block's widest layer, in two bytes."""
PER_PIXEL = 1024
"""Bytes that a VAE works with for each pixel of the frames that it decodes at a time: four feature maps of 128 channels
in two bytes."""
FRAMES_AT_A_TIME = 8
TILED = 0.25
"""The share of that which a tiled decode works with."""

FEWEST_MATRICES = 3
"""Of a block of a stack. What is numbered and has fewer is a small network of layers in a row."""

_BLOCK = re.compile(r"(?:^|\.)([A-Za-z_]\w*)\.(\d+)\.")
_VECTORS_ONLY = re.compile(r"(^|[._])(mod|norm\w*|emb\w*|time\w*)([._]|$)")
"""Names of layers that read a few vectors, which quantization leaves in full precision."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenoiserSize:
    """Bytes of a denoiser: of each block that layerwise offload can move, stack by stack, and `fixed` of all else."""

    name: str
    fixed: int
    stacks: tuple[tuple[int, ...], ...] = ()

    @property
    def whole(self) -> int:
        return self.fixed + sum(map(sum, self.stacks))

    def with_resident(self, count: int) -> int:
        """Bytes on the device where `count` blocks of each stack stay there. They may be its largest."""
        return self.fixed + sum(_of_stack(blocks, count) for blocks in self.stacks)


def _of_stack(blocks: Sequence[int], count: int) -> int:
    largest = sorted(blocks, reverse=True)
    moving = max(0, len(largest) - count)
    slots = largest[0] * min(SLOTS, moving) if largest else 0
    return min(sum(largest), sum(largest[:count]) + slots) if moving else sum(largest)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartSize:
    """Bytes of a text encoder or a VAE, `work` of what it works with, and `block` of its largest block if its blocks
    can come one at a time; `in_blocks` of all of them.
    """

    name: str
    weights: int
    work: int = 0
    in_blocks: int = 0
    block: int = 0

    @property
    def by_block(self) -> int:
        """Bytes of weights on the device where blocks come one at a time."""
        return min(self.weights, self.weights - self.in_blocks + SLOTS * self.block)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Bytes of a model as it is loaded. `step`: what steps work with; `graphs`: what CUDA graphs take, where blocks do
    not move. `adapters`: what is kept for those that requests bring to the device. `margin`: the part of what the
    weights leave that no request may use.
    """

    denoisers: tuple[DenoiserSize, ...]
    parts: tuple[PartSize, ...]
    step: int
    graphs: int = 0
    adapters: int = 0
    margin: float = 0.0

    def peak(self, held: int, work: int, *, blocks_move: bool) -> int:
        """Bytes that a plan needs: what it holds, and what runs beside steps."""
        runs = math.ceil((self.step + work) / (1 - self.margin))
        return held + runs + self.adapters + (0 if blocks_move else self.graphs)

    def free(self, budget: int, held: int, *, blocks_move: bool) -> int:
        """Bytes that a budget leaves for what runs beside steps."""
        rest = budget - held - self.adapters - (0 if blocks_move else self.graphs)
        return int(rest * (1 - self.margin)) - self.step

    @property
    def weights(self) -> int:
        return sum(it.whole for it in self.denoisers) + sum(it.weights for it in self.parts)

    @property
    def most_blocks(self) -> int:
        return max((len(blocks) for it in self.denoisers for blocks in it.stacks), default=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyPlan:
    """What leaves the device. All in bytes but `resident_blocks`.

    between_phases: components that are there only while they run, by_block: those of them whose blocks come one at a
    time. room: what the former share. resident_blocks: of each stack, None where all stay. resident: weights on the
    device at rest. peak: with what runs. work: what the parts between phases work with, by name.
    """

    between_phases: tuple[str, ...] = ()
    by_block: tuple[str, ...] = ()
    room: int = 0
    resident_blocks: int | None = None
    resident: int
    peak: int
    work: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def describe(self, sizes: ModelSizes, budget: int) -> str:
        """In words, for logs and replies."""
        parts = []
        if self.between_phases:
            names = [f"{name} by block" if name in self.by_block else name for name in self.between_phases]
            parts.append(f"{', '.join(names)} between phases")
        if self.resident_blocks is not None:
            parts.append(f"{self.resident_blocks} of {sizes.most_blocks} blocks resident")
        said = "; ".join(parts) or "all resident"
        return f"{said}: {size_text(sizes.weights)} of weights, budget {size_text(budget)}"


def plan_residency(
    sizes: ModelSizes, budget: int, *, staged: bool = False, resident_blocks: int | None = None
) -> ResidencyPlan:
    """The plan that leaves most on the device within `budget` bytes. `staged`: text encoders and VAE leave it in any
    case; `resident_blocks`: so many blocks of each stack stay on it and no more, None: as many as fit.

    What leaves first costs least: components between phases, then their blocks, which costs prepare alone, then blocks
    of the denoiser, which costs each step. Raises ConfigError with the least budget where nothing fits.
    """
    least = None
    for plan in _plans(sizes, budget, staged=staged, resident_blocks=resident_blocks):
        if plan.peak <= budget:
            return plan
        least = plan if least is None or plan.peak < least.peak else least
    assert least is not None
    gib = math.ceil(least.peak / GIB * 100) / 100
    parts = ", ".join(part.name for part in sizes.parts) or "nothing else"
    why = (
        f"is {budget / GIB:g} GiB, and the model needs at least {gib:g}: two of its largest blocks, what is in no "
        f"block, the largest of {parts}, and what they work with"
    )
    if sizes.adapters:
        why += f", beside {sizes.adapters / GIB:.2f} for LoRA adapters (--lora-device-cache, --lora-merged-cache)"
    message = f"--gpu-memory-budget {why}; give it {gib:g} or more"
    raise ConfigError(message, reason="BUDGET_TOO_SMALL", violations=(Violation(SETTING, why),))


def _plans(sizes: ModelSizes, budget: int, *, staged: bool, resident_blocks: int | None) -> Iterator[ResidencyPlan]:
    """From the one that leaves most on the device to the one that leaves least."""
    whole = sum(it.whole for it in sizes.denoisers)
    if resident_blocks is None:
        if not staged:
            resident, work = sizes.weights, sum(part.work for part in sizes.parts)
            peak = sizes.peak(resident, work, blocks_move=False)
            yield ResidencyPlan(resident=resident, peak=peak)
        yield from _staged(sizes, budget, whole, None)
    asked = range(sizes.most_blocks - 1, -1, -1) if resident_blocks is None else (resident_blocks,)
    for count in asked:
        held = sum(it.with_resident(count) for it in sizes.denoisers)
        if resident_blocks is not None and not staged:
            resident = held + sum(part.weights for part in sizes.parts)
            peak = sizes.peak(resident, sum(part.work for part in sizes.parts), blocks_move=True)
            yield ResidencyPlan(resident_blocks=count, resident=resident, peak=peak)
        yield from _staged(sizes, budget, held, count)


def _staged(sizes: ModelSizes, budget: int, held: int, count: int | None) -> Iterator[ResidencyPlan]:
    """Parts between phases, with all of their blocks at once where that fits, else the blocks of those that are too
    large.
    """
    moves = count is not None
    if not sizes.parts:
        peak = sizes.peak(held, 0, blocks_move=moves)
        yield ResidencyPlan(resident_blocks=count, resident=held, peak=peak)
        return
    free = sizes.free(budget, held, blocks_move=moves)
    needs = {part.name: part.weights + part.work for part in sizes.parts}
    split = [part for part in sizes.parts if needs[part.name] > free and part.by_block < part.weights]
    for by_block in ((), tuple(split)) if split else ((),):
        some = {**needs, **{part.name: part.by_block + part.work for part in by_block}}
        largest = max(some.values())
        yield ResidencyPlan(
            between_phases=tuple(part.name for part in sizes.parts),
            by_block=tuple(part.name for part in by_block),
            room=max(largest, min(free, sum(some.values()))),
            resident_blocks=count,
            resident=held,
            peak=sizes.peak(held, largest, blocks_move=moves),
            work={part.name: part.work for part in sizes.parts if part.work},
        )


def sizes_of(
    config: EngineConfig, checkpoint: Checkpoint, headers: Mapping[str, Sequence[Header]], dtype: str
) -> ModelSizes:
    """The sizes of a checkpoint's components as this configuration loads them, from the headers of its files. `dtype`:
    "bfloat16" or "float32". Raises ConfigError for weights whose size cannot be told.
    """
    wide = {"float32": 4, "bfloat16": 2}[dtype]
    names = tuple(checkpoint.spec.weights) or DENOISERS
    denoisers, parts = [], []
    for name, files in headers.items():
        tensors = {key: value for header in files for key, value in header.items()}
        if name in names:
            denoisers.append(_denoiser(config, checkpoint, name, tensors, wide))
        else:
            parts.append(_part(config, checkpoint, name, tensors, wide))
    packed = gguf_files(config.quantization, checkpoint) if config.quantization is not None else {}
    denoisers = [it for it in denoisers if it.name not in packed]
    denoisers += [DenoiserSize(name=name, fixed=_file_bytes(file)) for name, file in packed.items()]
    return ModelSizes(
        denoisers=tuple(denoisers),
        parts=tuple(parts),
        step=_step_bytes(checkpoint),
        graphs=0 if config.worker.cuda_graph_tokens == 0 or not is_native(checkpoint) else GRAPHS,
        adapters=device_bytes(config) if is_native(checkpoint) else 0,
        margin=MARGIN,
    )


def _file_bytes(file: str) -> int:
    """Of a GGUF file: packed weights stay packed."""
    if not Path(file).is_file():
        why = f"cannot be planned for, as {file} is not on this machine: download it, and give its path"
        raise ConfigError(f"--gpu-memory-budget {why}", violations=(Violation(SETTING, why),))
    return Path(file).stat().st_size


def _denoiser(config: EngineConfig, checkpoint: Checkpoint, name: str, tensors: Header, wide: int) -> DenoiserSize:
    weights = checkpoint.spec.weights.get(name)
    quantized = config.quantization is not None and config.quantization.quantization in ("fp8", "int8")
    fixed, groups = 0, dict[tuple[str, str], dict[str, list[int]]]()
    for key, (stored, shape) in tensors.items():
        for pattern, replacement in weights.renames if weights else ():
            key = re.sub(pattern, replacement, key)
        width = 4 if weights and weights.in_float32(key) else wide
        block = _BLOCK.search(key)
        matrix = len(shape) == 2 and block is not None
        if stored in CODES or (quantized and matrix and not _VECTORS_ONLY.search(key)):
            width = 1
        size = math.prod(shape) * width
        if block is None or not matrix:
            fixed += size
            continue
        groups.setdefault((key[: block.start()], block[1]), {}).setdefault(block[2], []).append(size)
    stacks = dict[str, list[int]]()
    for (owner, _), blocks in groups.items():
        if all(len(matrices) >= FEWEST_MATRICES for matrices in blocks.values()):
            stacks.setdefault(owner, []).extend(map(sum, blocks.values()))
        else:
            fixed += sum(sum(matrices) for matrices in blocks.values())
    return DenoiserSize(name=name, fixed=fixed, stacks=tuple(map(tuple, stacks.values())))


def _part(config: EngineConfig, checkpoint: Checkpoint, name: str, tensors: Header, wide: int) -> PartSize:
    total, lists = 0, dict[str, dict[str, int]]()
    for key, (_, shape) in tensors.items():
        size = math.prod(shape) * wide
        total += size
        if block := _BLOCK.search(key):
            blocks = lists.setdefault(key[: block.end(1)], {})
            blocks[block[2]] = blocks.get(block[2], 0) + size
    # a VAE is a matter of megabytes, and is entered by its methods
    if "vae" in name or not lists:
        return PartSize(name=name, weights=total, work=_decode_bytes(config, checkpoint) if "vae" in name else 0)
    largest = max(lists.values(), key=lambda blocks: sum(blocks.values()))
    return PartSize(name=name, weights=total, in_blocks=sum(largest.values()), block=max(largest.values()))


def _step_bytes(checkpoint: Checkpoint) -> int:
    """Of a step of the default size, with a second prediction."""
    if not checkpoint.described:
        return STEP_FLOOR + 2 * PER_TOKEN * 4096
    usual, limits = checkpoint.defaults, checkpoint.limits
    edge = limits.size_multiple
    frames = math.ceil((usual.num_frames or 1) / max(limits.frame_multiple, 1))
    tokens = (usual.width // edge) * (usual.height // edge) * frames
    return STEP_FLOOR + 2 * PER_TOKEN * tokens


def _decode_bytes(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Of a decode of the default size. A diffusers pipeline states its size only when it is loaded: until then, a
    picture of 1024 x 1024.
    """
    pixels = 1024 * 1024
    if checkpoint.described:
        usual = checkpoint.defaults
        pixels = usual.width * usual.height * min(usual.num_frames or 1, FRAMES_AT_A_TIME)
    return int(PER_PIXEL * pixels * (TILED if config.adapter.vae_use_tiling else 1))


def plan_adapter(sizes: ModelSizes, budget: int) -> bool:
    """Whether a diffusers pipeline has to keep one component at a time on the device to fit the budget. Raises
    ConfigError where its largest does not fit.
    """
    work = math.ceil(max([sizes.step, *(part.work for part in sizes.parts)]) / (1 - sizes.margin))
    if sizes.weights + work <= budget:
        return False
    largest = max([it.whole for it in sizes.denoisers] + [it.weights for it in sizes.parts], default=0)
    if largest + work <= budget:
        return True
    gib = math.ceil((largest + work) / GIB * 100) / 100
    why = f"is {budget / GIB:g} GiB, and the largest component needs {gib:g}"
    message = f"--gpu-memory-budget {why}; give it {gib:g}, or add --enable-layerwise-offload"
    raise ConfigError(message, reason="BUDGET_TOO_SMALL", violations=(Violation(SETTING, why),))
