"""LoRA adapters: what a request asks for, what a worker has loaded, and what became of both. Plain frozen data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

MAX_LORAS = 8
"""The most adapters of one request."""


LORA_FORMATS = ("peft", "diffusers", "kohya", "musubi", "onetrainer", "lycoris", "comfyui", "lightx2v", "xlabs")
"""Names of layouts of files, see docs/lora.md."""

MAX_LORA_SCALE = 100.0
"""The largest factor of an adapter; its negative is the smallest."""


def split(name: str) -> tuple[str, str]:
    """An adapter and the component that NAME@COMPONENT means of it, which is "" for NAME alone: all of them."""
    lora_id, _, component = name.partition("@")
    return lora_id, component


def joined(lora_id: str, component: str) -> str:
    """What `split` takes apart."""
    return f"{lora_id}@{component}" if component else lora_id


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """One adapter of a request: its change of the weights times `scale`, in one component or ("") all that it fits.

    `uid` is that of the load which a request was resolved to. A draft has none yet.
    """

    lora_id: str
    scale: float = 1.0
    target: str = ""
    uid: str = ""

    @property
    def key(self) -> str:
        """What workers know the adapter by. Adapters that are loaded at start have their id as uid."""
        return self.uid or self.lora_id


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter that a worker has loaded. `uid` is unique among all loads of a model, whatever their id: what is
    loaded under the id of another one shares nothing with it. `nbytes` is what it takes of the caches of adapters,
    `size_bytes` is that of its file. One that is `pinned` is never dropped from them.

    `copied` and `rescaled` are the layers of which it makes new weights, as component.path, with the bytes of a copy:
    it needs one of the first, and of the others only beside another adapter that makes new weights of them.

    `applied` counts its keys that found a layer, by component; `skipped` names those that found none in any, each with
    the reason. `warnings`: what the operator should know of how it is used.
    """

    id: str
    file: str
    sha256: str
    format: str
    rank: int
    size_bytes: int
    applied: Mapping[str, int]
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    uid: str = ""
    nbytes: int = 0
    pinned: bool = False
    copied: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rescaled: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        """What requests and workers know this load by."""
        return self.uid or self.id

    @property
    def keys_applied(self) -> int:
        return sum(self.applied.values())

    @property
    def targets(self) -> tuple[str, ...]:
        """The components that it changes."""
        return tuple(component for component, keys in self.applied.items() if keys)


def newest(adapters: Sequence[Adapter], lora_id: str) -> Adapter | None:
    """The adapter that a new request means by an id: of several loads, the last one. None: there is none."""
    return next((adapter for adapter in reversed(adapters) if adapter.id == lora_id), None)


def copies(loras: Sequence[Lora], adapters: Sequence[Adapter]) -> dict[str, int]:
    """The layers of which a request with these adapters needs a copy of the weight, and the bytes of each."""
    needed: dict[str, int] = {}
    seen: set[str] = set()
    for lora in loras:
        adapter = newest(adapters, lora.lora_id)
        if adapter is None or not lora.scale:
            continue
        for mine, needs_one in ((adapter.copied, True), (adapter.rescaled, False)):
            for layer, size in mine.items():
                if lora.target in ("", layer.partition(".")[0]):
                    if needs_one or layer in seen:
                        needed[layer] = size
                    seen.add(layer)
    return needed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AppliedLora:
    """An adapter as it was applied to one component of one request."""

    lora_id: str
    scale: float
    target: str
    keys_applied: int
    keys_skipped: int
