"""Who holds how much."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping


class Tally:
    """Bytes by tenant. Those who hold nothing are not kept."""

    def __init__(self, held: Mapping[str, int] | None = None) -> None:
        self._bytes: collections.Counter[str] = collections.Counter(held or {})
        self.total = sum(self._bytes.values())

    def __getitem__(self, tenant: str) -> int:
        return self._bytes[tenant]

    def __iter__(self) -> Iterator[str]:
        return iter(self._bytes)

    def add(self, tenant: str, size: int) -> None:
        """`size` is negative for bytes that are given back."""
        self._bytes[tenant] += size
        self.total += size
        if not self._bytes[tenant]:
            del self._bytes[tenant]
