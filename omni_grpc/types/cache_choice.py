"""The step cache of a request as callers write it: "off", a quality, a method, or a method with some of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_grpc.types.cache_fields import ALIASES, FIELDS, from_peers, is_list
from omni_grpc.types.step_cache import METHODS, CacheDraft, CacheQuality

OFF = "off"
QUALITIES = tuple(quality.value.lower() for quality in CacheQuality)
EXPECTED = (
    f"{OFF}, a quality ({', '.join(QUALITIES)}), a method ({', '.join(METHODS)}), or a mapping of one method to a "
    "mapping of its fields"
)

Choice = str | dict[str, dict[str, Any]]


def cache_choice(value: Any) -> Choice:
    """The choice under our names. Raises TypeError or ValueError for what is none. What the values of fields may be is
    checked where the request is.
    """
    if isinstance(value, str):
        name = _name(value)
        if name not in (OFF, *QUALITIES, *METHODS):
            raise ValueError(value)
        return name
    if not isinstance(value, Mapping) or len(value) != 1:
        raise TypeError(value)
    ((name, fields),) = value.items()
    method = _name(name)
    if method not in METHODS or not isinstance(fields, Mapping):
        raise ValueError(value)
    given = from_peers(method, fields)
    if given.keys() - FIELDS[method].keys():
        raise ValueError(value)
    return {method: {field: list(one) if is_list(one) else one for field, one in given.items()}}


def _name(written: Any) -> str:
    """Our name for a method, in any case."""
    lower = str(written).lower()
    return ALIASES.get(lower, lower)


def cache_draft(choice: Choice) -> CacheDraft:
    """What a choice asks for."""
    if isinstance(choice, str):
        if choice in METHODS:
            return CacheDraft(method=choice)
        return CacheDraft(off=True) if choice == OFF else CacheDraft(quality=CacheQuality(choice.upper()))
    ((method, fields),) = choice.items()
    return CacheDraft(
        method=method, given={field: tuple(one) if is_list(one) else one for field, one in fields.items()}
    )


def chosen(draft: CacheDraft) -> Choice:
    """The choice that asks for this, which `cache_draft` makes it of."""
    if draft.quality is not None:
        return draft.quality.value.lower()
    if draft.off:
        return OFF
    given = {field: list(one) if is_list(one) else one for field, one in draft.given.items()}
    return {draft.method: given} if given else draft.method
