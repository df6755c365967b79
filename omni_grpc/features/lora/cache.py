"""Which adapters are in a memory that is bounded by bytes."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable


class ByteCache:
    """Keys with their bytes, of which at most `limit` are used, in the order of their use: longest ago first. It keeps
    the books alone: whoever has the memory frees and fills it. `used`: the bytes of all keys; `evictions`: how many had
    to go for others.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.used = self.evictions = 0
        self._held: collections.OrderedDict[str, int] = collections.OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._held

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._held)

    def touch(self, key: str) -> None:
        """Makes a key the one that was used last."""
        self._held.move_to_end(key)

    def add(self, key: str, nbytes: int) -> None:
        """Counts a key, which is the one that was used last now. Bytes of one that is there are added to."""
        self._held[key] = self._held.get(key, 0) + nbytes
        self.used += nbytes
        self.touch(key)

    def remove(self, key: str) -> None:
        self.used -= self._held.pop(key, 0)

    def in_the_way(self, nbytes: int, may_go: Callable[[str], bool]) -> list[str] | None:
        """The keys that have to go so that `nbytes` more fit, longest unused first; None where they do not fit even
        then.
        """
        surplus = self.used + nbytes - self.limit
        if surplus <= 0:
            return []
        going = [key for key in self._held if may_go(key)]
        freed = list(itertools.accumulate(self._held[key] for key in going))
        return next((going[: count + 1] for count, size in enumerate(freed) if size >= surplus), None)
