"""LoRA adapters in the modules of a pipeline, and which of them a call runs with.

The layers are PEFT's, which diffusers loads adapters into as well. They stay in the modules, disabled, so that a call
that names no adapter runs the layers that were there before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.hooks.group_offloading import _maybe_remove_and_reapply_group_offloading
from diffusers.loaders.lora_base import LoraBaseMixin
from peft import inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import set_peft_model_state_dict
from torch import nn

from omni_grpc.adapter import lora_factors
from omni_grpc.adapter.lora_factors import Factors
from omni_grpc.adapter.lora_reading import Reading, read
from omni_grpc.loading.adapters import AdapterFile, read_adapter, refused
from omni_grpc.types.errors import ConfigError, FailedPrecondition, InvalidArgument, Violation
from omni_grpc.types.lora import Adapter, Lora
from omni_grpc.types.os_errors import plain
from omni_grpc.types.plan import LoadAdapter
from omni_grpc.types.request import Request
from omni_grpc.types.vitals import AdapterMemory

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Entry:
    """An adapter, and its factors by component and module until they are in the modules. `label`: what PEFT calls it,
    since its names may have no dots, nor be parts of each other. `users`: requests that have it; `leaving`: no other
    one gets it.
    """

    adapter: Adapter
    label: str
    waiting: Mapping[str, Mapping[str, Factors]]
    users: int = 0
    leaving: bool = False

    @property
    def key(self) -> str:
        return self.adapter.key


class Adapters:
    """The adapters of one pipeline, see features.Adapters. Siblings of it share the modules, and so the adapters.

    Modules change while no call runs alone: an adapter that is loaded by order is put into them at the beginning of the
    first call that names it. `dtype` is that of quantized layers' computations.
    """

    def __init__(self, pipeline: DiffusionPipeline, dtype: torch.dtype) -> None:
        self._pipeline, self._dtype = pipeline, dtype
        names = pipeline._lora_loadable_modules if isinstance(pipeline, LoraBaseMixin) else ()
        found = {name: getattr(pipeline, name, None) for name in names}
        self._parts: dict[str, nn.Module] = {name: one for name, one in found.items() if isinstance(one, nn.Module)}
        self._shapes = {name: lora_factors.shapes(part) for name, part in self._parts.items()}
        self._layers: dict[str, list[Any]] = {name: [] for name in self._parts}
        self._entries: dict[str, Entry] = {}
        self._leases: dict[str, list[Entry]] = {}
        self._count = 0
        self._lock = threading.Lock()
        # held by whoever runs or changes the modules
        self._modules = threading.Lock()

    # --- loading ------------------------------------------------------------------------------------------------------

    def add(self, name: str, path: Path) -> None:
        """Loads an adapter of the settings. Raises ConfigError for the setting `lora` where the pipeline takes none, or
        this one cannot be read, does not fit, or fits nothing.
        """
        entry = self._read(name, name, read_adapter(name, path))
        try:
            self._put(entry)
        except FailedPrecondition as error:
            raise refused(name, str(error)) from error
        self._entries[entry.key] = entry

    def load(self, order: LoadAdapter) -> Entry:
        """Raises InvalidArgument for what cannot be used."""
        if (known := self._entries.get(order.uid)) is not None:
            return known
        try:
            file = read_adapter(order.id, Path(order.path))
            if order.sha256 and file.sha256 != order.sha256:
                raise refused(order.id, f"{file.path} has the SHA-256 {file.sha256}, not {order.sha256}")
            if order.format and file.format != order.format:
                raise refused(order.id, f"{file.path} has the layout {file.format}, not {order.format}")
            entry = self._read(order.id, order.uid, file)
        except ConfigError as error:
            message = str(error).removeprefix("--lora ")
            raise InvalidArgument(message, reason="BAD_LORA", violations=(Violation("source", message),)) from error
        # all are: none leaves the device for another one
        entry.adapter = dataclasses.replace(entry.adapter, pinned=order.pinned)
        return entry

    def attach(self, entry: Entry) -> Adapter:
        with self._lock:
            self._entries[entry.key] = entry
        return entry.adapter

    def unload(self, key: str) -> Entry | None:
        with self._lock:
            entry = self._entries[key]
            entry.leaving = True
            return None if entry.users else entry

    def remove(self, entry: Entry) -> None:
        """Waits for the call that runs, if there is one."""
        with self._lock:
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
        with self._modules:
            entry.waiting = {}
            self._take_out(entry)

    @property
    def found(self) -> tuple[Adapter, ...]:
        with self._lock:
            return tuple(entry.adapter for entry in self._entries.values())

    @property
    def room(self) -> int:
        """None is kept free for them."""
        return 0

    @property
    def memory(self) -> tuple[AdapterMemory, ...]:
        """None is bounded for them."""
        return ()

    def wake(self) -> None:
        """Nothing to do: the adapters are in the modules, and sleep with them."""

    # --- requests -----------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """Raises FailedPrecondition for an adapter that is not loaded."""
        with self._lock:
            entries = [self._named(lora) for lora in {lora.key: lora for lora in request.loras}.values()]
            if entries:
                self._leases[request.id] = entries
            for entry in entries:
                entry.users += 1

    def release(self, request_id: str) -> list[Entry]:
        with self._lock:
            entries = self._leases.pop(request_id, [])
            for entry in entries:
                entry.users -= 1
            return [entry for entry in entries if entry.leaving and not entry.users]

    @contextlib.contextmanager
    def applied(self, loras: Sequence[Lora]) -> Iterator[None]:
        """Runs what is in it with these adapters, and leaves the modules as if there were none, however it ends. Raises
        FailedPrecondition for an adapter that is not loaded, or that PEFT has no layers for.
        """
        with self._lock:
            # one that is being unloaded serves those who had it before
            entries = {lora.key: self._entries.get(lora.key) or self._named(lora) for lora in loras}
        with self._modules:
            try:
                for entry in entries.values():
                    self._put(entry)
                for component, layers in self._layers.items():
                    _enable(layers, _scales(component, [(lora, entries[lora.key]) for lora in loras]))
                yield
            finally:
                self._disable()

    def _named(self, lora: Lora) -> Entry:
        entry = self._entries.get(lora.key)
        if entry is None or entry.leaving:
            why = "is not loaded" if entry is None else "is being unloaded"
            raise FailedPrecondition(f"the adapter {lora.lora_id!r} {why} in this worker", reason="LORA_NOT_LOADED")
        return entry

    # --- parts --------------------------------------------------------------------------------------------------------

    def _read(self, name: str, uid: str, file: AdapterFile) -> Entry:
        if not self._parts:
            kind = type(self._pipeline).__name__
            raise refused(name, f"diffusers loads no adapters into {kind}; merge the adapter into the checkpoint")
        if "@" in name:
            # a native model has a file for a component so
            raise refused(
                name,
                "a pipeline takes a file for all components; leave out what is behind the @, and let "
                "requests set target",
            )
        reading = read(file, self._pipeline, self._parts, self._shapes)
        try:
            made = {
                component: lora_factors.factors(changes, self._shapes[component])
                for component, changes in reading.changes.items()
                if changes
            }
        except lora_factors.NotForPeft as error:
            raise refused(name, str(error)) from error
        counts = ", ".join(f"{len(keys)} keys fit {component}" for component, keys in reading.keys.items())
        logger.info("adapter %s: %s, %d fit nothing", name, counts, len(reading.skipped))
        nbytes = sum(factors.nbytes for part in made.values() for factors in part.values())
        with self._lock:
            self._count += 1
            return Entry(_adapter(file, uid, reading, nbytes), f"a{self._count}_", made)

    def _put(self, entry: Entry) -> None:
        """Puts an adapter into the modules, disabled, unless it is there. Raises FailedPrecondition, and then nothing
        of it is.
        """
        for component, made in entry.waiting.items():
            part = self._parts[component]
            try:
                _inject(part, entry.label, made, self._dtype)
            except Exception as error:  # layers that PEFT has no counterpart of raise anything
                self._take_out(entry)
                why = f"PEFT cannot put {entry.adapter.id!r} into {component}: {type(error).__name__}: {plain(error)}"
                raise FailedPrecondition(
                    f"{why}; use a checkpoint whose layers are not quantized", reason="BAD_LORA"
                ) from error
            self._changed(component)
        entry.waiting = {}

    def _take_out(self, entry: Entry) -> None:
        for component, part in self._parts.items():
            if entry.label not in getattr(part, "peft_config", {}):
                continue
            for path, layer in list(part.named_modules()):
                if isinstance(layer, BaseTunerLayer) and entry.label in getattr(layer, "scaling", {}):
                    layer.delete_adapter(entry.label)
                    if not layer.scaling:
                        owner, _, name = path.rpartition(".")
                        setattr(part.get_submodule(owner), name, layer.base_layer)
            configs: Any = part.peft_config
            configs.pop(entry.label)
            if not configs:
                del part.peft_config
                part._hf_peft_config_loaded = False  # type: ignore[assignment]
            self._changed(component)

    def _changed(self, component: str) -> None:
        """The layers of a component are others than before."""
        part = self._parts[component]
        self._layers[component] = [module for module in part.modules() if isinstance(module, BaseTunerLayer)]
        _enable(self._layers[component], {})
        # of blocks that are offloaded, the parameters are in a list
        _maybe_remove_and_reapply_group_offloading(part)

    def _disable(self) -> None:
        for layers in self._layers.values():
            _enable(layers, {})


def load(pipeline: DiffusionPipeline, asked: Mapping[str, str], dtype: torch.dtype) -> Adapters:
    """The adapters of a pipeline, with those of the setting `lora` in it. Raises ConfigError as `Adapters.add` does."""
    adapters = Adapters(pipeline, dtype)
    for name, path in asked.items():
        adapters.add(name, Path(path))
    return adapters


def _inject(part: nn.Module, label: str, made: Mapping[str, Factors], dtype: torch.dtype) -> None:
    state = lora_factors.tensors(made, part, dtype)
    inject_adapter_in_model(
        lora_factors.config(made), part, adapter_name=label, state_dict=state, low_cpu_mem_usage=True
    )
    result: Any = set_peft_model_state_dict(part, state, adapter_name=label, low_cpu_mem_usage=True)
    if left := [*result.unexpected_keys, *(key for key in result.missing_keys if f".{label}." in key)]:
        raise ValueError(f"it has no place for {left[0]}")
    part._hf_peft_config_loaded = True  # type: ignore[assignment]


def _scales(component: str, loras: Sequence[tuple[Lora, Entry]]) -> dict[str, float]:
    """By PEFT's name of each adapter that has an effect on a component."""
    scales: dict[str, float] = {}
    for lora, entry in loras:
        if lora.target in ("", component) and component in entry.adapter.targets:
            scales[entry.label] = scales.get(entry.label, 0.0) + lora.scale
    return {label: scale for label, scale in scales.items() if scale}


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


def _adapter(file: AdapterFile, uid: str, reading: Reading, nbytes: int) -> Adapter:
    return Adapter(
        id=file.id,
        uid=uid,
        file=file.path.name,
        sha256=file.sha256,
        format=file.format,
        rank=file.rank,
        size_bytes=file.size_bytes,
        nbytes=nbytes,
        applied={component: len(keys) for component, keys in reading.keys.items()},
        skipped=reading.skipped,
    )
