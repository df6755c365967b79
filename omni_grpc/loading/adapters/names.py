"""Which layer of a model a file means. Names with underscores in place of dots cannot be taken apart by rules, so a
table is built from the layers that the model has: their names in the checkpoint, and those that the layouts of the
model's spec have for them.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterator, Sequence

from omni_grpc.types.spec import FileLayout, RowSlice

_PREFIXES = (
    *("base_model.model.", "model.diffusion_model.", "diffusion_model.", "unet."),
    *("lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_"),
)
"""What files put before names; it says nothing of the layer."""

_NOISE = ("high_noise.", "low_noise.")
"""Prefixes of the first and the second of two experts."""

_COMPONENT = re.compile(r"(transformer(?:_\d+)?)\.")
_ENCODER = re.compile(
    r"(?:lora_te\d?|te\d?|text_encoders?(?:_\d+)?|text_model|clip_[lg]|t5xxl|text_embedding_projection)[._]"
)
"""Names of layers of text encoders, of all tools."""

TEXT_ENCODER = "text encoder"
"""Stands for the component of layers of any text encoder, and for those that no text encoder of the model has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """A layer as a file means it: the component, "" where it names none; and the modules of the checkpoint that its
    rows belong to, one after the other, None where the model has no such layer.
    """

    component: str
    modules: tuple[RowSlice, ...] | None


class Names:
    """The names of the layers of one denoiser. `modules`: the checkpoint's; `layouts`: other ways of naming them;
    `components`: the denoisers of the model, in order.
    """

    def __init__(self, modules: Collection[str], layouts: Sequence[FileLayout], components: Sequence[str]) -> None:
        self._components = tuple(components)
        self._table: dict[str, tuple[RowSlice, ...] | None] = {}
        for layout in layouts:
            for name, parts in _other_names(modules, layout):
                known = self._table.setdefault(_flat(name), parts)
                if known != parts:
                    # two layers could be meant
                    self._table[_flat(name)] = None
        self._table |= {_flat(module): (RowSlice(module),) for module in modules}

    def find(self, layer: str) -> Named:
        """What `layer`, a name in a file, means."""
        component = ""
        while True:
            if is_of_an_encoder(layer):
                return Named(TEXT_ENCODER, None)
            if (found := self._table.get(_flat(layer))) is not None:
                return Named(component, found)
            if match := _COMPONENT.match(layer):
                component, layer = match[1], layer[match.end() :]
            elif prefix := next((prefix for prefix in _PREFIXES if layer.startswith(prefix)), ""):
                layer = layer.removeprefix(prefix)
            elif len(self._components) == 2 and layer.startswith(_NOISE):
                component = self._components[not layer.startswith(_NOISE[0])]
                layer = layer.partition(".")[2]
            else:
                return Named(component, None)


def plain(layer: str) -> str:
    """A layer's name in a file without what says nothing of it; what names a component stays."""
    while prefix := next((prefix for prefix in _PREFIXES if layer.startswith(prefix)), ""):
        layer = layer.removeprefix(prefix)
    return layer


def named_component(layer: str) -> str:
    """The denoiser that a layer's name in a file begins with, as it calls it: also "high_noise"; "" where it says
    none.
    """
    layer = plain(layer)
    if prefix := next((prefix for prefix in _NOISE if layer.startswith(prefix)), ""):
        return prefix.removesuffix(".")
    match = _COMPONENT.match(layer)
    return match[1] if match else ""


def without_component(layer: str) -> str:
    """A layer's name in a file without the denoiser that it begins with."""
    layer = plain(layer)
    while match := _COMPONENT.match(layer):
        layer = plain(layer[match.end() :])
    return layer


def is_of_an_encoder(layer: str) -> bool:
    """Whether a layer's name in a file, without what `plain` takes away, is that of a text encoder's."""
    return _ENCODER.match(layer) is not None


def _flat(name: str) -> str:
    """Some files have underscores for all dots, and some for a few of them."""
    return name.replace(".", "_")


def _other_names(modules: Collection[str], layout: FileLayout) -> Iterator[tuple[str, tuple[RowSlice, ...]]]:
    """The names that a layout has for modules of the checkpoint, each with the modules that its rows belong to."""
    backwards = [back for pattern, new in reversed(layout.renames) if (back := _backwards(pattern, new))]
    for module in modules:
        fused = [
            module.removesuffix(part.module) + name
            for name, parts in layout.cuts.items()
            for part in parts
            if module == part.module or module.endswith("." + part.module)
        ]
        for name in dict.fromkeys((module, *fused)):
            key = f"{name}.weight"
            for pattern, new in backwards:
                key = re.sub(pattern, new, key)
            other = key.removesuffix(".weight")
            parts = _of_the_checkpoint(other, layout)
            # what the layout does not read back as that module was no name of it
            if other != module and module in {part.module for part in parts} <= set(modules):
                yield other, parts


def _of_the_checkpoint(other: str, layout: FileLayout) -> tuple[RowSlice, ...]:
    """The modules that the rows of a layout's tensor belong to, as its renames and cuts say."""
    key = f"{other}.weight"
    for pattern, new in layout.renames:
        key = re.sub(pattern, new, key)
    module = key.removesuffix(".weight")
    for name, parts in layout.cuts.items():
        if module == name or module.endswith("." + name):
            return tuple(dataclasses.replace(part, module=module.removesuffix(name) + part.module) for part in parts)
    return (RowSlice(module),)


def _backwards(pattern: str, new: str) -> tuple[str, str] | None:
    """A rename the other way round; None for one whose pattern is more than text and groups of alternatives."""
    body = pattern.removeprefix("^").removesuffix("$")
    groups = re.findall(r"\(([^()]*)\)", body)
    numbers = itertools.count(1)
    text = re.sub(r"\([^()]*\)", lambda found: f"\\{next(numbers)}", body).replace("\\.", ".")
    if re.search(r"[?*+\[\](){}|^$]", text):
        return None
    back = re.escape(new)
    for number, group in enumerate(groups, 1):
        if back.count(f"\\\\{number}") != 1:
            return None
        back = back.replace(f"\\\\{number}", f"({group})")
    if re.findall(r"\\\\(\d)", re.escape(new)) != [str(number) for number in range(1, len(groups) + 1)]:
        # the groups of the new pattern would be in another order
        return None
    return ("^" if pattern.startswith("^") else "") + back + ("$" if pattern.endswith("$") else ""), text
