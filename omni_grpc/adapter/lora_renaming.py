"""The names that diffusers has for the layers of a file that our reader cannot name, and which of the file's keys they
came from.

diffusers turns files of many trainers into its own names, one function for each family of pipelines. Some of these
leave out keys, forget an alpha or mix up rows, with a line in the log at most. So each tensor is followed through the
conversion, and what comes out for a layer must be as large as what the file has for it.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from diffusers.models.normalization import AdaLayerNormContinuous
from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft
from torch import Tensor

from omni_grpc.loading.adapters.binding import FACTORED
from omni_grpc.loading.adapters.deltas import LowRank, Scaled, deltas
from omni_grpc.loading.adapters.files import AdapterFile, for_layer
from omni_grpc.loading.adapters.keys import Entry, sorted_entries
from omni_grpc.loading.adapters.names import plain
from omni_grpc.loading.adapters.parts import Malformed, NotServed
from omni_grpc.types.os_errors import plain as plain_text

CLOSE = 2e-2
"""How far the norms of a change may be from each other, for what conversions in half precision round."""


class NotRenamed(Exception):
    """A file that diffusers does not convert, or not to what it says; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Renamed:
    """A file with diffusers' names, and for each of its keys the keys that the tensor came from in the original."""

    file: AdapterFile
    sources: Mapping[str, frozenset[str]]


class _Followed(Tensor):
    """A tensor that passes the keys that it came from on to whatever is made of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _sources(args) | _sources((kwargs or {}).values())
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func is Tensor.__setitem__:
            args[0]._keys = found
        return _mark(result, found)


def _sources(values: Iterable[Any]) -> frozenset[str]:
    found: frozenset[str] = frozenset()
    for value in values:
        if isinstance(value, (list, tuple)):
            found |= _sources(value)
        else:
            found |= getattr(value, "_keys", frozenset())
    return found


def _mark(result: Any, keys: frozenset[str]) -> Any:
    if isinstance(result, Tensor):
        return follow(result, keys)
    if isinstance(result, (list, tuple)) and any(isinstance(one, Tensor) for one in result):
        return type(result)(_mark(one, keys) for one in result) if type(result) in (list, tuple) else result
    return result


def follow(tensor: Tensor, keys: frozenset[str]) -> Tensor:
    """The tensor, which from now on says that it came from these keys."""
    followed = tensor if isinstance(tensor, _Followed) else tensor.as_subclass(_Followed)
    followed._keys = keys  # type: ignore[attr-defined]
    return followed


def _bare(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def renamed(file: AdapterFile, pipeline: Any, components: Iterable[str]) -> Renamed:
    """The file as the pipeline's own conversion reads it; `components` are the denoisers. Raises NotRenamed."""
    try:
        converted = _convert(_given(file), pipeline, components)
    except NotRenamed:
        # some conversions have no use for alphas beside factors of some names, and need none: see below
        given = {key: tensor for key, tensor in _given(file).items() if not key.endswith(".alpha")}
        converted = _convert(given, pipeline, components)
    sources = {key: _sources((tensor,)) for key, tensor in converted.items() if isinstance(tensor, Tensor)}
    entries, others, _ = sorted_entries({key: _bare(converted[key]) for key, of in sources.items() if of})
    made = dataclasses.replace(file, entries=entries, others=tuple(others), config={})
    return Renamed(_with_halves(file, _scaled(file, made, sources), sources, pipeline), sources)


def _given(file: AdapterFile) -> dict[str, Tensor]:
    return {
        key: follow(entry.tensors[part], frozenset((key,)))
        for entry in file.entries.values()
        for part, key in entry.keys.items()
    }


def _convert(given: dict[str, Tensor], pipeline: Any, components: Iterable[str]) -> dict[str, Any]:
    convert = type(pipeline).lora_state_dict
    kwargs: dict[str, Any] = {}
    if "unet" in components:
        # by which the blocks of the original layout are told from each other
        kwargs["unet_config"] = pipeline.unet.config
    if "return_alphas" in inspect.signature(convert).parameters:
        kwargs["return_alphas"] = True
    try:
        result = convert(dict(given), **kwargs)
        state = dict(result[0] if isinstance(result, tuple) else result)
        return state if any("lora_A" in key for key in state) else dict(convert_unet_state_dict_to_peft(state))
    except Exception as error:  # a conversion raises anything over names that it does not know
        raise NotRenamed(f"diffusers does not know its names: {type(error).__name__}: {plain_text(error)}") from error


def _scaled(file: AdapterFile, made: AdapterFile, sources: Mapping[str, frozenset[str]]) -> AdapterFile:
    """`made` with the alphas of the original, where the conversion did not multiply the factors by them. Raises
    NotRenamed where a layer has come out larger or smaller than the file has it.
    """
    layer_of = {key: entry.layer for entry in file.entries.values() for key in entry.keys.values()}
    origins = {
        entry.layer: frozenset(layer_of[key] for own in entry.keys.values() for key in sources[own])
        for entry in made.entries.values()
    }
    groups: dict[frozenset[str], list[Entry]] = {}
    for entry in made.entries.values():
        groups.setdefault(origins[entry.layer], []).append(entry)
    entries = {}
    for layers, group in groups.items():
        originals = [_low(file, file.entries[layer]) for layer in layers]
        results = [_low(made, entry) for entry in group]
        if not all(one for one in originals) or not all(one for one in results):
            raise NotRenamed(f"{min(layers)} is no LoRA of two factors, and diffusers has another name for it")
        scales = {low.scale for low in originals if low}
        plainly, scaled = (math.sqrt(sum(_energy(low, by) for low in originals if low)) for by in (False, True))
        came = math.sqrt(sum(_energy(low, False) for low in results if low))
        if math.isclose(came, scaled, rel_tol=CLOSE):
            factor = 1.0
        elif math.isclose(came, plainly, rel_tol=CLOSE) and len(scales) == 1:
            factor = scales.pop()
        else:
            raise NotRenamed(
                f"diffusers would make a change of norm {came:.3g} of {min(layers)}, which is {scaled:.3g} in the file"
            )
        for entry in group:
            alpha = torch.tensor(factor * entry.rank)
            # no key of the file: it stands for what is the original's
            parts = {**entry.tensors, "alpha": alpha}
            entries[entry.layer] = dataclasses.replace(entry, tensors=parts, keys={**entry.keys})
    return dataclasses.replace(made, entries=entries)


def _with_halves(
    file: AdapterFile, made: AdapterFile, sources: Mapping[str, frozenset[str]], pipeline: Any
) -> AdapterFile:
    """`made` with scale before shift where a last norm has them so. Original models have them the other way round, and
    some conversions leave the rows as they were.
    """
    original = {key: entry for entry in file.entries.values() for key in entry.keys.values()}
    entries = dict(made.entries)
    for layer, entry in made.entries.items():
        component, _, path = layer.rpartition(".")[0].partition(".")
        try:
            owner = getattr(pipeline, component).get_submodule(path)
        except AttributeError:
            continue  # no layer of the model, which the reader tells
        up, source = entry.tensors["up"], min(sources[entry.keys["up"]])
        unmoved = "adaLN_modulation" in source and torch.equal(up, original[source].tensors["up"])
        if unmoved and isinstance(owner, AdaLayerNormContinuous):
            entries[layer] = dataclasses.replace(entry, tensors={**entry.tensors, "up": up.roll(len(up) // 2, 0)})
    return dataclasses.replace(made, entries=entries)


def _low(file: AdapterFile, entry: Entry) -> Scaled | None:
    """The two factors of a layer; None where it is anything else, or more."""
    if entry.kind not in FACTORED:
        return None
    try:
        found = list(deltas(entry, for_layer(file, plain(entry.layer)), (plain(entry.layer),)))
    except (NotServed, Malformed) as error:
        raise NotRenamed(str(error)) from error
    return found[0] if len(found) == 1 and isinstance(found[0].delta, LowRank) else None


def _energy(low: Scaled, scaled: bool) -> float:
    """The squared norm of a change, without making it: tr(up' up down down')."""
    assert isinstance(low.delta, LowRank)
    up, down = low.delta.up.double(), low.delta.down.double()
    energy = float(((up.T @ up) * (down @ down.T)).sum())
    return energy * (low.scale**2 if scaled else 1.0)
