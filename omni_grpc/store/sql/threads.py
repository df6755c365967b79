"""Transactions of SQLite in threads.

Its calls are short and block, so each transaction is run by one thread from begin to commit: one switch there and one
back, where an asynchronous driver has two for each statement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import sqlalchemy as sa

T = TypeVar("T")


class Threads:
    """An engine with as many threads as connections."""

    def __init__(self, engine: sa.Engine, count: int) -> None:
        self.sync_engine = engine
        self._count = count
        self._threads = self._pool()

    def _pool(self) -> ThreadPoolExecutor:
        # its threads start with the first transactions
        return ThreadPoolExecutor(self._count, thread_name_prefix="omni_grpc-sqlite")

    async def run(self, work: Callable[[sa.Connection], T]) -> T:
        """What `work` returns, once it is committed."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._whole, work)

    def _whole(self, work: Callable[[sa.Connection], T]) -> T:
        with self.sync_engine.begin() as connection:
            return work(connection)

    async def dispose(self) -> None:
        """Closes the connections; it can be used again. What hangs in a system call is left alone."""
        threads, self._threads = self._threads, self._pool()
        threads.shutdown(wait=False)
        await asyncio.to_thread(self.sync_engine.dispose)
