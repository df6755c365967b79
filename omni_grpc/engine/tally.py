"""Who holds how much."""

from __future__ import annotations

import collections


class Tally:
    """Bytes by tenant. Those who hold nothing are not kept."""

    def __init__(self) -> None:
        self._bytes: collections.Counter[str] = collections.Counter()

    def __getitem__(self, tenant: str) -> int:
        return self._bytes[tenant]

    def add(self, tenant: str, size: int) -> None:
        """`size` is negative for bytes that are given back."""
        self._bytes[tenant] += size
        if not self._bytes[tenant]:
            del self._bytes[tenant]
