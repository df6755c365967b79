"""The step cache of a request as callers write it, to and from its message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_grpc.types.cache_choice import OFF, Choice, cache_draft, chosen
from omni_grpc.types.step_cache import CacheDraft, CacheQuality
from omni_grpc.v1 import sampling_pb2
from omni_grpc.wire.known import plain

_QUALITIES: Mapping[CacheQuality, Any] = {
    quality: getattr(sampling_pb2, f"CACHE_QUALITY_{quality.value}") for quality in CacheQuality
}


def write_cache(message: sampling_pb2.CacheOptions, choice: Choice) -> None:
    """Raises TypeError or ValueError for values that their fields cannot hold."""
    draft = cache_draft(choice)
    if draft.quality is not None:
        message.quality = _QUALITIES[draft.quality]
        return
    kind = OFF if draft.off else draft.method
    getattr(message, kind).SetInParent()
    options = getattr(message, kind)
    for name, value in draft.given.items():
        if isinstance(value, tuple):
            getattr(options, name).extend(value)
        else:
            setattr(options, name, value)


def read_cache(message: sampling_pb2.CacheOptions) -> CacheDraft | None:
    """None where nothing is chosen. Of a message with a quality that this version does not know: as if it had none."""
    kind = message.WhichOneof("kind")
    if kind is None:
        quality = next((quality for quality, number in _QUALITIES.items() if number == message.quality), None)
        return None if quality is None else CacheDraft(quality=quality)
    if kind == OFF:
        return CacheDraft(off=True)
    given = {field.name: plain(value) for field, value in getattr(message, kind).ListFields()}
    return CacheDraft(method=kind, given=given)


def read_choice(message: sampling_pb2.CacheOptions) -> Choice | None:
    """What is chosen, as callers write it."""
    draft = read_cache(message)
    return None if draft is None else chosen(draft)
