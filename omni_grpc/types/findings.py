"""What a worker finds out about its model while loading it, and the part of it that every reply contains."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from omni_grpc.types.lora import Adapter
from omni_grpc.types.step_cache import FixedCache


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelExecution:
    """How a worker executes its model: the same for every request, and part of every reply.

    `attention_backend`: what attention runs on, as text. `quantized_layers`: number of layers by quantization scheme;
    `kept_layers`: layers of the blocks that stay in full precision beside them. `batch_invariant`: whether a request
    gives the same bits in any batch. `residency`: what of the weights leaves the device, in words; "" where all of them
    stay on it and no budget was given.
    """

    attention_backend: str = ""
    quantized_layers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    kept_layers: int = 0
    batch_invariant: bool = False
    residency: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFindings(ModelExecution):
    """`ModelExecution`, and what requests can choose from: the LoRA adapters that are loaded, oldest first, and the
    step cache that every request runs under, if there is one (`fixed_cache`).

    Adapters come and go while a worker lives: what it reports of them (plan.OfAdapter) changes these findings.
    `lora_merged_cache` is the room for weights with adapters merged into them, in bytes. `cached_blocks`: the blocks
    that step caches may skip, of the denoiser that has the fewest; 0 without such caches.
    """

    loras: tuple[Adapter, ...] = ()
    fixed_cache: FixedCache | None = None
    lora_merged_cache: int = 0
    cached_blocks: int = 0

    def with_adapter(self, adapter: Adapter) -> Self:
        """The findings with another adapter, or with the newer record of one."""
        others = self.without_adapter(adapter.key).loras
        return dataclasses.replace(self, loras=(*others, adapter))

    def without_adapter(self, key: str) -> Self:
        """The findings without the adapter of this key, if there was one."""
        return dataclasses.replace(self, loras=tuple(adapter for adapter in self.loras if adapter.key != key))

    def execution(self) -> dict[str, Any]:
        """The fields of `ModelExecution`, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(ModelExecution)}
