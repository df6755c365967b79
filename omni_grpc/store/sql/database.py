"""Transactions on a database that may hang, be full, or go away: bounded in time, with errors in words.

Work is a plain function of a connection, which runs as a whole (`AsyncConnection.run_sync`, or in a thread): it is
fewer switches than one for each statement.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from omni_grpc.store.seam import StoreError
from omni_grpc.store.sql.faults import ERRORS, RETRIED, fault, sqlstate
from omni_grpc.store.sql.threads import Threads

T = TypeVar("T")

Connections = AsyncEngine | Threads

TRIES = 3
"""How often a transaction is run that another one got in the way of."""

logger = logging.getLogger(__name__)


class Database:
    """Reading and writing transactions. `timeout`: seconds that a caller waits for one at most.

    A transaction is a task of its own: a caller who is cancelled, or has waited long enough, leaves it alone. It may
    still be committed then, so what is written again must do no harm.
    """

    def __init__(self, readers: Connections, writers: Connections, *, timeout: float, abandons: bool) -> None:
        """`abandons`: a transaction that has taken too long is cancelled, which closes its connection. One of SQLite
        is in a system call, so its connection could not be closed either.
        """
        self._readers = readers
        self._writers = writers
        self._timeout = timeout
        self._abandons = abandons
        self._running: set[asyncio.Task[Any]] = set()

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        """What `work` returns, of one state of the database. Raises StoreError."""
        return await self._bounded(self._transaction(self._readers, work))

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        """The same, committed: when it returns, it is on the disk. Raises StoreError."""
        return await self._bounded(self._transaction(self._writers, work))

    async def close(self) -> None:
        """Waits for what is running, and closes all connections; not longer than `timeout` each."""
        if self._running:
            await asyncio.wait(self._running, timeout=self._timeout)
        try:
            await self._bounded(self._dispose())
        except StoreError as error:
            logger.warning("the job store was not closed cleanly: %s", error)

    async def _dispose(self) -> None:
        for engine in {self._readers, self._writers}:
            await engine.dispose()

    async def _transaction(self, engine: Connections, work: Callable[[sa.Connection], T]) -> T:
        for left in reversed(range(TRIES)):
            try:
                if isinstance(engine, Threads):
                    return await engine.run(work)
                async with engine.begin() as connection:
                    return await connection.run_sync(work)
            except ERRORS as error:
                if not left or sqlstate(error) not in RETRIED:
                    raise fault(error) from error
        raise AssertionError("unreachable")

    async def _bounded(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        await asyncio.wait({task}, timeout=self._timeout)
        if task.done():
            return task.result()
        if self._abandons:
            task.cancel()
        raise StoreError(f"the job store has not answered for {self._timeout:g} s: look at its disk or its server")

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """The error of one whose caller has gone is nobody's; reading it says that it was seen."""
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("a transaction failed: %s", error)
