"""Webhooks that are owed, in this process. It implements `omni_grpc.store.seam.Deliveries`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from omni_grpc.store.records import Delivery, Outcome


class MemoryDeliveries:
    """Deliveries by id, those that ended apart from those that a server looks through every second."""

    def __init__(self) -> None:
        self._pending: dict[str, Delivery] = {}
        self._ended: dict[str, Delivery] = {}
        self._claims: dict[str, tuple[str, float]] = {}

    @property
    def owed(self) -> int:
        """Those that have not ended."""
        return len(self._pending)

    def add(self, deliveries: Iterable[Delivery]) -> None:
        for one in deliveries:
            if one.id not in self._pending and one.id not in self._ended:
                self._pending[one.id] = one

    async def hosts(self, now: float) -> list[str]:
        due = sorted(self._free(now), key=lambda one: one.due)
        return list(dict.fromkeys(one.host for one in due))

    async def claim(self, host: str, now: float, *, owner: str, until: float, limit: int) -> list[Delivery]:
        due = sorted((one for one in self._free(now) if one.host == host), key=lambda one: one.due)[:limit]
        self._claims |= {one.id: (owner, until) for one in due}
        return due

    async def release(self, owner: str = "") -> None:
        self._claims = {name: claim for name, claim in self._claims.items() if owner not in ("", claim[0])}

    async def done(self, delivery_id: str, now: float, attempts: int) -> None:
        self._end(delivery_id, now, Outcome.DELIVERED, attempts, "")

    async def retry(self, delivery_id: str, due: float, attempts: int, error: str, *, owner: str) -> None:
        if self._owned(delivery_id, owner):
            del self._claims[delivery_id]
            self._pending[delivery_id] = dataclasses.replace(
                self._pending[delivery_id], due=due, attempts=attempts, last_error=error
            )

    async def give_up(self, delivery_id: str, now: float, attempts: int, error: str, *, owner: str) -> None:
        if self._owned(delivery_id, owner):
            self._end(delivery_id, now, Outcome.GIVEN_UP, attempts, error)

    async def of(self, job_id: str) -> list[Delivery]:
        found = [one for one in (*self._pending.values(), *self._ended.values()) if one.job_id == job_id]
        return sorted(found, key=lambda one: (one.create_time, one.id))

    async def forget(self, before: float) -> None:
        self._ended = {name: one for name, one in self._ended.items() if (one.end_time or 0.0) >= before}

    def _free(self, now: float) -> Iterator[Delivery]:
        for one in self._pending.values():
            _, until = self._claims.get(one.id, ("", now))
            if one.due <= now and until <= now:
                yield one

    def _owned(self, delivery_id: str, owner: str) -> bool:
        return delivery_id in self._pending and self._claims.get(delivery_id, ("", 0.0))[0] == owner

    def _end(self, delivery_id: str, now: float, outcome: Outcome, attempts: int, error: str) -> None:
        if (one := self._pending.pop(delivery_id, None)) is not None:
            self._claims.pop(delivery_id, None)
            self._ended[delivery_id] = dataclasses.replace(
                one, outcome=outcome, end_time=now, attempts=attempts, last_error=error, body=b""
            )
