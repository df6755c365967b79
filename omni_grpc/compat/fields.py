"""Fields that are taken at some values alone, and how the others are refused."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from omni_grpc.types.errors import OmniError, Violation

PLAIN = (bool, int, float, str, dict, list, tuple)
"""What is compared by value; anything else, arrays for example, is none of the values that a field takes."""


def only(default: Any, why: str, *also: Any) -> Any:
    """A dataclass field that takes its default and what is in `also`. Other values are refused, because `why`."""
    metadata = {"why": why, "taken": (default, *also)}
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check(given: Any, error: type[OmniError]) -> None:
    """Raises `error` (reason NOT_SUPPORTED) that names every field of a dataclass with a value it does not take."""
    violations = tuple(
        Violation(field.name, f"is {repr(getattr(given, field.name))[:60]}: {field.metadata['why']}")
        for field in dataclasses.fields(given)
        if "why" in field.metadata and not _taken(getattr(given, field.name), field.metadata["taken"])
    )
    if violations:
        message = "; ".join(f"{violation.field} {violation.description}" for violation in violations)
        raise error(f"{type(given).__name__}: {message}", reason="NOT_SUPPORTED", violations=violations)


def changed(given: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults."""
    usual = type(given)()
    return {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(given)
        if getattr(given, field.name) != getattr(usual, field.name)
    }


def _taken(value: Any, taken: tuple[Any, ...]) -> bool:
    return any(value is one or (isinstance(value, PLAIN) and value == one) for one in taken)
