"""Expiry, leases and deadlines go on evenly where the clock of the machine is set."""

import time
from pathlib import Path

import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.store.clock import Clock
from omni_grpc.store.sql import SqlStore
from omni_grpc.store.storage import Storage
from omni_grpc.types.events import Cancelled
from omni_grpc.types.results import Stats
from tests.store.postgres import Postgres
from tests.store.postgres import postgres as postgres
from tests.store.test_jobs import job

HOUR = 3600.0
ROOT = Path(__file__).resolve().parents[2]


BY_THE_MACHINE = {
    "store/clock.py": "where the clock begins",
    "store/job.py": "an id, and a time that the journal replaces",
    "store/memory.py": "of a store that one process has: how long names are remembered, and ages of bytes",
    "store/sql/jobs.py": "how long names are remembered: a week",
    "store/sql/servers.py": "of a file that one process has",
    "store/blobs/folder.py": "ages of files, which the machine dates",
    "gate/addresses.py": "signed addresses end by the clock of whoever is asked",
    "gate/audit_file.py": "lines of a log",
    "gate/operation.py": "when the server was started",
    "webhooks/sender.py": "receivers compare it with the clock of their machine",
}
"""What goes by the clock of the machine, which may be set at any time, and why."""


@pytest.mark.parametrize("room", ["store", "gate", "engine", "fleet", "webhooks"])
def test_what_lasts_does_not_go_by_the_clock_of_the_machine(room):
    found = {path for path in (ROOT / "omni_grpc" / room).rglob("*.py") if "time.time()" in path.read_text("utf-8")}
    assert {path.relative_to(ROOT / "omni_grpc").as_posix() for path in found} <= set(BY_THE_MACHINE)


@pytest.fixture
def jump(monkeypatch):
    """Sets the clock of the machine ahead by so many seconds."""
    right = time.time

    def jump(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: right() + seconds)

    return jump


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
def test_it_goes_on_as_it_did_when_the_machines_clock_is_set(jump, seconds):
    passed = [0.0]
    clock = Clock(lambda: passed[0])
    began = clock()
    assert began == pytest.approx(time.time(), abs=1)
    jump(seconds)
    passed[0] = 5.0
    assert clock() == began + 5
    assert clock.earliest() == pytest.approx(began + min(5.0, seconds), abs=6)
    clock.set(1000.0)
    passed[0] = 7.0
    assert clock() == 1002.0


async def test_a_job_neither_expires_early_nor_late(jump):
    storage = Storage(EngineConfig.from_settings(model="toy"))
    ended = job()
    storage.jobs.add(ended)
    jump(HOUR)
    ended.append(Cancelled(reason="", completed_steps=0, stats=Stats()))
    left = ended.record.expire_time - storage.clock()
    assert left == pytest.approx(ended.record.spec.retention, abs=1)
    assert await storage.jobs.find(ended.id) is ended
    assert ended.record.end_time - ended.record.create_time < 1
    jump(-HOUR)
    assert ended.record.expire_time - storage.clock() == pytest.approx(left, abs=1)


@pytest.mark.service
async def test_servers_on_a_database_have_its_time_whatever_their_own_clocks_say(postgres: Postgres, jump):
    right = time.time()
    jump(-HOUR)
    store = SqlStore.postgresql(await postgres.create())
    await store.open()
    try:
        assert await store.servers.now() == pytest.approx(right, abs=30)
    finally:
        await store.close()
