"""Read-only aliases for the old names of renamed fields."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def renamed(**new_names: str) -> Callable[[type[T]], type[T]]:
    """A decorator that adds read-only aliases, given as `old="new"`. The first use of each gives a DeprecationWarning
    that names the new field.

    Put it above `@dataclasses.dataclass`. The constructor takes the new names only.
    """

    def decorate(kind: type[T]) -> type[T]:
        for old, new in new_names.items():
            setattr(kind, old, _alias(kind.__name__, old, new))
        return kind

    return decorate


def _alias(kind: str, old: str, new: str) -> property:
    warned = False

    def read(self: Any) -> Any:
        nonlocal warned
        if not warned:
            warned = True
            warnings.warn(f"{kind}.{old} is now {kind}.{new}", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(read, doc=f"The old name of `{new}`.")
