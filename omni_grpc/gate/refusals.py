"""Collects what is wrong with the fields of a call, so that its caller learns of everything at once."""

from __future__ import annotations

from collections.abc import Iterable

from omni_grpc.types.errors import InvalidArgument, Violation


def refused(field: str, description: str) -> InvalidArgument:
    """The error for one field."""
    return InvalidArgument(f"{field}: {description}", violations=(Violation(field, description),))


class Refusals:
    """Violations by field; `check` raises them all at once."""

    def __init__(self, found: Iterable[Violation] = ()) -> None:
        self._violations = list(found)

    @property
    def found(self) -> tuple[Violation, ...]:
        return tuple(self._violations)

    def refuse(self, field: str, description: str) -> None:
        self._violations.append(Violation(field, description))

    def check(self) -> None:
        """Raises InvalidArgument with every violation found so far."""
        if self._violations:
            message = "; ".join(f"{v.field}: {v.description}" for v in self._violations)
            raise InvalidArgument(message, violations=tuple(self._violations))

    def required(self, field: str, value: str) -> str:
        if not value:
            self.refuse(field, "is required")
        return value

    def text(self, field: str, value: str, most: int) -> str:
        if len(value) > most:
            self.refuse(field, f"has {len(value)} characters; the maximum is {most}")
        return value

    def number(self, field: str, value: int, low: int, high: int) -> int:
        if not low <= value <= high:
            nearest = min(max(value, low), high)
            self.refuse(field, f"{value} is outside {low}..{high}; nearest valid value: {nearest}")
        return value
