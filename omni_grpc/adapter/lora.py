"""LoRA adapters in the modules of a pipeline, and which of them a call runs with.

The layers are PEFT's, which diffusers loads adapters into as well. They stay in the modules, disabled, so that a call
that names no adapter runs the layers that were there before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.loaders.lora_base import LoraBaseMixin
from peft import inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import set_peft_model_state_dict
from torch import nn

from omni_grpc.adapter import lora_factors
from omni_grpc.adapter.lora_reading import Reading, read
from omni_grpc.loading.adapters import AdapterFile, read_adapter, refused
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.lora import Adapter, Lora
from omni_grpc.types.os_errors import plain

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Loaded:
    """`label`: what PEFT calls it, since its names may have no dots, nor be parts of each other."""

    label: str
    adapter: Adapter


class Adapters:
    """The adapters of one pipeline. Siblings of it share the modules, and so the adapters.

    Raises ConfigError for the setting `lora` for a pipeline that diffusers has no adapters for.
    """

    def __init__(self, pipeline: DiffusionPipeline) -> None:
        if not isinstance(pipeline, LoraBaseMixin):
            message = (
                f"--lora: diffusers loads no adapters into {type(pipeline).__name__}; merge the adapter into the "
                "checkpoint, or leave the setting out"
            )
            raise ConfigError(message, violations=(Violation("lora", message),))
        self._pipeline = pipeline
        found = {name: getattr(pipeline, name, None) for name in pipeline._lora_loadable_modules}
        self._parts: dict[str, nn.Module] = {name: one for name, one in found.items() if isinstance(one, nn.Module)}
        self._shapes = {name: lora_factors.shapes(part) for name, part in self._parts.items()}
        self._layers: dict[str, list[Any]] = {name: [] for name in self._parts}
        self._loaded: dict[str, _Loaded] = {}
        self._count = 0

    @property
    def found(self) -> tuple[Adapter, ...]:
        return tuple(loaded.adapter for loaded in self._loaded.values())

    def load(self, name: str, path: Path, dtype: torch.dtype) -> None:
        """Puts an adapter into the modules that it changes. `dtype` is that of quantized layers' computations.

        Raises ConfigError for the setting `lora` where it cannot be read, does not fit, or fits nothing.
        """
        file = read_adapter(name, path)
        reading = read(file, self._pipeline, self._parts, self._shapes)
        self._count += 1
        label = f"a{self._count}_"
        for component, changes in reading.changes.items():
            if changes:
                try:
                    made = lora_factors.factors(changes, self._shapes[component])
                except lora_factors.NotForPeft as error:
                    raise refused(name, str(error)) from error
                self._inject(name, label, component, made, dtype)
        self._loaded[name] = _Loaded(label, _adapter(file, reading))
        self._disable()
        counts = ", ".join(f"{len(keys)} keys fit {component}" for component, keys in reading.keys.items())
        logger.info("adapter %s: %s, %d fit nothing", name, counts, len(reading.skipped))

    @contextlib.contextmanager
    def applied(self, loras: Sequence[Lora]) -> Iterator[None]:
        """Runs what is in it with these adapters, and leaves the modules as if there were none, however it ends."""
        try:
            for component, layers in self._layers.items():
                _enable(layers, self._scales(component, loras))
            yield
        finally:
            self._disable()

    def _scales(self, component: str, loras: Sequence[Lora]) -> dict[str, float]:
        """By PEFT's name of each adapter that has an effect on a component."""
        scales: dict[str, float] = {}
        for lora in loras:
            loaded = self._loaded[lora.lora_id]
            if lora.target in ("", component) and component in loaded.adapter.targets:
                scales[loaded.label] = scales.get(loaded.label, 0.0) + lora.scale
        return {label: scale for label, scale in scales.items() if scale}

    def _disable(self) -> None:
        for layers in self._layers.values():
            _enable(layers, {})

    def _inject(
        self, name: str, label: str, component: str, made: Mapping[str, lora_factors.Factors], dtype: torch.dtype
    ) -> None:
        part = self._parts[component]
        state = lora_factors.tensors(made, part, dtype)
        try:
            inject_adapter_in_model(
                lora_factors.config(made), part, adapter_name=label, state_dict=state, low_cpu_mem_usage=True
            )
            result: Any = set_peft_model_state_dict(part, state, adapter_name=label, low_cpu_mem_usage=True)
        except (ValueError, TypeError, RuntimeError, NotImplementedError, ImportError) as error:
            # layers that PEFT has no counterpart of, such as those of some quantizations
            raise refused(name, f"PEFT cannot change {component}: {plain(error)}") from error
        if left := [*result.unexpected_keys, *(key for key in result.missing_keys if f".{label}." in key)]:
            raise refused(name, f"PEFT did not put {left[0]} into {component}")
        part._hf_peft_config_loaded = True  # type: ignore[assignment]
        self._layers[component] = [module for module in part.modules() if isinstance(module, BaseTunerLayer)]


def load(pipeline: DiffusionPipeline, asked: Mapping[str, str], dtype: torch.dtype) -> Adapters | None:
    """The adapters of the setting `lora`, in the pipeline; None for none. Raises ConfigError as `Adapters` does."""
    if not asked:
        return None
    adapters = Adapters(pipeline)
    for name, path in asked.items():
        adapters.load(name, Path(path), dtype)
    return adapters


def _enable(layers: Sequence[Any], scales: Mapping[str, float]) -> None:
    for layer in layers:
        own = {label: scale for label, scale in scales.items() if label in layer.scaling}
        if own:
            layer.enable_adapters(True)
            layer.set_adapter(list(own), inference_mode=True)
            for label, scale in own.items():
                layer.set_scale(label, scale)
        else:
            layer.enable_adapters(False)


def _adapter(file: AdapterFile, reading: Reading) -> Adapter:
    return Adapter(
        id=file.id,
        file=file.path.name,
        sha256=file.sha256,
        format=file.format,
        rank=file.rank,
        size_bytes=file.size_bytes,
        applied={component: len(keys) for component, keys in reading.keys.items()},
        skipped=reading.skipped,
    )
