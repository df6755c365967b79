"""Features beside ranks: how each is turned on, what it is asked, and how close ranks come to one process with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.config.roles import Roles, Window
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.lora import Lora
from omni_grpc.types.ranks import ParallelSizes
from tests.features.suite import FIRST, SECOND, Suite
from tests.gguf_files import convert
from tests.parallel.alone import CACHE, Alone, Joins
from tests.parallel.model_jobs import Features, Made

EXACT = "bit for bit"
FLOAT = "2e-5"
SAME = 0.9999
"""Least cosine of latents in 8 bits on ranks and in one process, for tiny models with random weights: a sum over ranks
rounds otherwise, so a value between two codes may take the other one.
"""
CODES = f"cosine {SAME}"
ROUGH = 0.999
"""The same for attention in fp8, which has one scale for what it is given of a row and head."""

PACKED = ("Q8_0", "Q4_0", "Q5_0", "Q4_1")
ARCHITECTURES = {
    "QwenImagePipeline": "qwen_image",
    "FluxPipeline": "flux",
    "WanPipeline": "wan",
    "ZImagePipeline": "lumina2",
}


class Adapted(Alone):
    """With adapters and GGUF files of the model, and what one process makes with each feature, made once."""

    def __init__(self, suite: Suite, folder: Path) -> None:
        super().__init__(suite.load())
        self.lora: Features = suite.lora
        self._suite, self._folder = suite, folder
        self._made: dict[str, tuple[Joins, Made]] = {}
        self._packed: Features = {}

    @property
    def packed(self) -> Features:
        """The settings for GGUF files of its denoisers."""
        if not self._packed:
            files = {name: self._folder / f"{name}.gguf" for name in self._suite.components}
            architecture = ARCHITECTURES[self.checkpoint.spec.name]
            for component, file in files.items():
                convert(self._suite.folder, file, architecture, component=component, among=PACKED)
            named = tuple(f"{name}={file}" for name, file in files.items())
            self._packed = {"quantization": "gguf", "gguf_model": named}
        return self._packed

    def expected(self, name: str) -> tuple[Joins, Made]:
        """What is asked with a feature, and what one process makes of it."""
        if name not in self._made:
            beside = BESIDE[name]
            joins = beside.joins(self)
            self._made[name] = joins, self.run(beside.settings(self), joins)
        return self._made[name]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """settings: of the server. joins: what is asked. close: how close ranks come to one process, by their sizes.
    changes: whether latents differ from those without the feature.
    """

    settings: Callable[[Adapted], Features]
    joins: Callable[[Adapted], Joins] = lambda alone: alone.joins
    close: Callable[[ParallelSizes], str] = lambda sizes: FLOAT
    changes: bool = True


def _adapted(alone: Adapted) -> Joins:
    return alone.changed(loras=(Lora(lora_id=FIRST), Lora(lora_id=SECOND, scale=-0.5)))[:2] + alone.joins[2:]


def _whole_sums(sizes: ParallelSizes) -> bool:
    """Whether each rank sums as one process does, and in the same batches."""
    return sizes.tensor_parallel_size == sizes.ring_degree == sizes.cfg_parallel_size == 1


def _in_8_bits(sizes: ParallelSizes) -> str:
    tokens_alone = _whole_sums(sizes) and sizes.pipeline_parallel_size == 1
    return EXACT if tokens_alone else CODES


IN_DOUBLE = Roles(schedule=(Window(precision="float64", steps=(0.5, 1.0)),))
"""In the second half of the steps, so that requests that join late differ from the others."""


def _attention(precision: str) -> Features:
    return {"diffusion_attention_config": {"default": {"precision": precision}}}


BESIDE: Mapping[str, Beside] = {
    "no feature": Beside(settings=lambda alone: {}, changes=False),
    "step cache": Beside(settings=lambda alone: CACHE, joins=lambda alone: alone.half_cached()),
    "int8": Beside(settings=lambda alone: {"quantization": "int8"}, close=_in_8_bits),
    "fp8": Beside(settings=lambda alone: {"quantization": "fp8"}, close=_in_8_bits),
    "GGUF": Beside(settings=lambda alone: alone.packed),
    "LoRA": Beside(settings=lambda alone: alone.lora, joins=_adapted),
    "batch invariance": Beside(settings=lambda alone: {"batch_invariant": True}, changes=False),
    "layerwise offload": Beside(settings=lambda alone: {"enable_layerwise_offload": True}, changes=False),
    "attention by step": Beside(settings=lambda alone: {"roles": IN_DOUBLE}, changes=False),
    "attention in int8": Beside(settings=lambda alone: _attention("int8"), close=lambda sizes: CODES),
    "attention in fp8": Beside(settings=lambda alone: _attention("fp8"), close=lambda sizes: f"cosine {ROUGH}"),
    "CUDA graphs": Beside(settings=lambda alone: {"cuda_graph_tokens": 64}),
}


def refused(alone: Adapted, sizes: ParallelSizes, features: Features) -> dict[str, str]:
    """What is refused before any rank is started, as `serve` does it: setting -> what is wrong with it."""
    given = {name: value for name, value in features.items() if name != "roles"}
    asked = {name: value for name, value in dataclasses.asdict(sizes).items() if value is not None}
    folder = alone.checkpoint.path
    config = EngineConfig.from_settings(model=str(folder), device="cpu", **asked, **given)
    try:
        apply_settings(config, open_checkpoint(folder))
    except ConfigError as error:
        return {violation.field: violation.description for violation in error.violations}
    return {}


def refusals(name: str, sizes: ParallelSizes) -> dict[str, str]:
    """What has to be refused of a feature beside ranks, whatever the model: setting -> a part of what is said."""
    if name == "layerwise offload" and sizes.use_hsdp:
        return {"use_hsdp": "must be off beside --enable-layerwise-offload"}
    if name == "GGUF" and sizes.tensor_parallel_size > 1:
        return {"tensor_parallel_size": "must be 1 beside --quantization gguf"}
    if name.startswith("attention in ") and sizes.ring_degree > 1:
        return {"ring_degree": "must be 1 beside attention in "}
    if name == "CUDA graphs" and sizes.world > sizes.cfg_parallel_size:
        return {"cuda_graph_tokens": "does not work with ranks that share the work of the blocks"}
    return {}


def too_few_heads(alone: Adapted, sizes: ParallelSizes) -> bool:
    """Of these tiny models some have heads that two features cannot both share."""
    config = alone.checkpoint.configs["transformer"]
    heads = next(config[name] for name in ("num_attention_heads", "n_heads") if name in config)
    return bool(heads % (sizes.tensor_parallel_size * sizes.ulysses_degree))


def same(mine: Made, theirs: Made, close: str) -> None:
    """`close`: "bit for bit", a cosine, or the largest difference."""
    for name, expected in theirs.latents.items():
        made = mine.latents[name]
        kind, _, least = close.partition(" ")
        if close == EXACT:
            assert torch.equal(made, expected), (made - expected).abs().max()
        elif kind == "cosine":
            found = torch.nn.functional.cosine_similarity(made.flatten(), expected.flatten(), dim=0)
            assert found > float(least), found
        else:
            torch.testing.assert_close(made, expected, rtol=0, atol=float(close))
