"""What servers tell each other over PostgreSQL's LISTEN and NOTIFY."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import asyncpg
import sqlalchemy as sa

from omni_grpc.store.seam import Notice
from omni_grpc.store.sql import codec
from omni_grpc.store.sql.database import Database
from omni_grpc.store.sql.faults import ERRORS, fault

LIMIT = 8000
"""PostgreSQL takes payloads of fewer bytes."""
PAUSES = (0.1, 0.5, 2.0, 5.0)
"""Seconds between attempts to listen again; the last one is repeated."""
CHECK = 15.0
"""Seconds between looks whether the connection is still there: nobody sends anything over one that was cut."""

logger = logging.getLogger(__name__)


class Channel:
    """One connection that listens for as long as the store is open, and connects again where it is lost. What is told
    meanwhile is not heard.
    """

    def __init__(self, connect: Callable[[], Awaitable[Any]], timeout: float) -> None:
        self._connect = connect
        self._timeout = timeout
        self._sender = secrets.token_hex(8)
        self._name = ""
        self._hearers: list[Callable[[Notice], None]] = []
        self._task: asyncio.Task[None] | None = None

    def open(self, schema: str) -> None:
        """`schema`: servers hear those alone that have their tables in the same one."""
        self._name = f"omni_grpc {schema}"
        self._start()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def listen(self, hear: Callable[[Notice], None]) -> None:
        self._hearers.append(hear)
        self._start()

    async def tell(self, database: Database, notices: Sequence[Notice]) -> None:
        """Raises StoreError."""
        payloads = [{"payload": codec.encode_notice(notice, self._sender, LIMIT)} for notice in notices]

        def work(connection: sa.Connection) -> None:
            # nothing is written that has to outlive a crash: no wait for the disk
            connection.execute(sa.text("SET LOCAL synchronous_commit = off"))
            notify = sa.select(sa.func.pg_notify(self._name, sa.bindparam("payload", type_=sa.Text)))
            for payload in payloads:
                connection.execute(notify, payload)

        await database.write(work)

    def _start(self) -> None:
        """Once the store is open and somebody listens."""
        if self._name and self._hearers and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        failures = 0
        while True:
            try:
                connection = await self._connect()
                try:
                    await connection.add_listener(self._name, self._heard)
                    failures = 0
                    await self._until_lost(connection)
                finally:
                    connection.terminate()
            except ERRORS as error:
                logger.warning("notices of other servers are not heard: %s", fault(error))
            await asyncio.sleep(PAUSES[min(failures, len(PAUSES) - 1)])
            failures += 1

    async def _until_lost(self, connection: Any) -> None:
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        while not lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK):
                    await lost.wait()
            if not lost.is_set():
                await connection.execute("SELECT 1", timeout=self._timeout)
        raise asyncpg.InterfaceError("the connection is lost")

    def _heard(self, connection: Any, process: int, channel: str, payload: object) -> None:
        try:
            sender, notice = codec.decode_notice(str(payload))
        except codec.Unreadable as error:
            logger.warning("%s", error)
            return
        if sender != self._sender:
            for hear in self._hearers:
                hear(notice)
