"""What a store has acknowledged is there, whenever the server is killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.connection
import random
import time
from pathlib import Path

import pytest

from omni_grpc.store.records import JobState
from tests.store.killed import made, write_until_killed
from tests.store.samples import queued

KILLS = 10
LONGEST = 0.25
"""Seconds that a process writes before it is killed, at most."""


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_every_acknowledged_job_outlives_kill_9(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if kind == "sqlite":
        place = str(tmp_path / "jobs.db")
    else:
        place = await request.getfixturevalue("postgres").create()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.store.killed"])
    acknowledged: list[tuple[str, str]] = []
    chance = random.Random(7)
    for life in range(1, KILLS + 1):
        hearing, telling = context.Pipe(duplex=False)
        process = context.Process(target=write_until_killed, args=(place, life, telling), daemon=True)
        await asyncio.to_thread(process.start)
        telling.close()
        for _ in range(2):
            acknowledged += await asyncio.to_thread(hearing.recv)
        await asyncio.to_thread(time.sleep, chance.uniform(0.0, LONGEST))
        process.kill()
        await asyncio.to_thread(process.join)
        acknowledged += _rest(hearing)
    created, ended = ({job_id for said, job_id in acknowledged if said == what} for what in ("created", "ended"))
    store = made(place)
    await store.open()
    found = {one.record.id: one for one in await store.jobs.read(sorted(created))}
    assert found.keys() == created
    assert len(created) > 3 * KILLS
    assert ended <= created
    for job_id in ended:
        assert found[job_id].record.state is JobState.SUCCEEDED
    for one in found.values():
        # the log is what the record says, also of a write that was not acknowledged
        assert one.entries == ((queued(1), queued(2)) if one.record.state.terminal else (queued(1),))
    await store.close()


def _rest(hearing: multiprocessing.connection.Connection) -> list[tuple[str, str]]:
    """What was sent whole."""
    found: list[tuple[str, str]] = []
    while True:
        try:
            found += hearing.recv()
        except EOFError:
            return found
