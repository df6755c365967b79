"""The settings of a server for several models, and which settings each model has for itself."""

from __future__ import annotations

import dataclasses

from omni_grpc.config.options import Option, setting

OF_MODEL = (
    "model",
    "adapter",
    "cache",
    "quantization",
    "loras",
    "offload",
    "recipes",
    "profiler",
    "scheduler",
    "worker",
    "parallel",
    "ranks",
)
"""Sections that each model of a server has for itself."""
LIMITS_OF_MODEL = ("max_pixels", "max_steps", "max_outputs", "max_prompt_chars")
"""Limits that each model has for itself. The others are about what comes in, whatever it is for."""
GIB = 1 << 30


def is_of_model(option: Option) -> bool:
    """Whether each model of a server has a setting for itself."""
    return option.section in OF_MODEL or option.name in LIMITS_OF_MODEL


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Several models in one server."""

    gpu_memory_budget: float | None = setting(
        None,
        "GiB of device memory, on each device, for all models together: of those that are awake, the weights fit, and "
        "what of one does not fit alone is offloaded, first text encoders and VAE between phases, then blocks "
        "(default: all that there is, and no offload); on a CPU, of the host's memory, and nothing is offloaded",
        minimum=0,
    )
    sleeping_weights: str = setting(
        "host",
        "where the weights of a model go that gives its device memory to others; host: to pinned host memory, dropped: "
        "nowhere, they are read again; on a CPU they are always dropped",
        choices=("host", "dropped"),
    )
    model_turn: float = setting(
        20.0,
        "seconds that a model with jobs may keep the memory that jobs of another model wait for",
        minimum=0,
    )
    model_roots: tuple[str, ...] = setting(
        (), "folders whose checkpoints LoadModel may load, by the names of their folders, separated by commas"
    )
    load_from_hub: bool = setting(False, "let LoadModel load any model of the Hugging Face hub (ORG/NAME)")

    lora_roots: tuple[str, ...] = setting(
        (), "folders whose files LoadLora may load as LoRA adapters, with all that is below, separated by commas"
    )
    lora_hub: bool = setting(False, "let LoadLora load LoRA adapters of the Hugging Face hub (ORG/NAME)")

    @property
    def budget_bytes(self) -> int | None:
        return None if self.gpu_memory_budget is None else int(self.gpu_memory_budget * GIB)
