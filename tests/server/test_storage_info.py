"""What a server says of where it keeps jobs, before anything is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_grpc.types.storage_info import StorageInfo, time_text
from omni_grpc.v1 import admin_pb2
from omni_grpc.wire import from_message
from tests.store.postgres import postgres as postgres

from .service import serving

DAY, GIB = 86400.0, 1 << 30
MEMORY = StorageInfo(
    durable=False,
    shared=False,
    rows="memory",
    files="memory",
    retention=600.0,
    max_retention=DAY,
    artifact_budget_bytes=GIB,
    asset_budget_bytes=GIB,
)
FOLDER = StorageInfo(
    durable=True,
    shared=False,
    rows="sqlite",
    files="folder",
    retention=7 * DAY,
    max_retention=30 * DAY,
    artifact_budget_bytes=100 * GIB,
    asset_budget_bytes=10 * GIB,
)


@pytest.mark.parametrize(("kept", "expected"), [(False, MEMORY), (True, FOLDER)])
async def test_a_server_says_where_it_keeps_jobs(kept: bool, expected: StorageInfo, tmp_path: Path) -> None:
    place = str(tmp_path / "a-secret-place")
    async with serving(**({"state_dir": place} if kept else {})) as service:
        reply = await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
        job = await service.finished()
        assert job.replica == reply.replica == "", "nobody shares it"
    assert from_message(StorageInfo, reply.storage) == expected
    assert "a-secret-place" not in str(reply)


async def test_servers_of_one_database_are_told_apart(postgres, tmp_path: Path) -> None:
    url = await postgres.create()
    async with serving(state_url=url, artifact_url=str(tmp_path), retention=90, artifact_budget=GIB // 2) as service:
        info = await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
        job = await service.finished()
    assert job.replica == info.replica == info.instance_id != ""
    assert (info.storage.rows, info.storage.files) == ("postgresql", "folder")
    assert (info.storage.durable, info.storage.shared) == (True, True)
    assert (info.storage.retention.seconds, info.storage.artifact_budget_bytes) == (90, GIB // 2)
    for hidden in (url, str(tmp_path)):
        assert hidden not in str(info)


def test_the_line_says_what_a_restart_leaves() -> None:
    assert str(MEMORY) == (
        "jobs are kept in memory: a restart loses them (--state-dir keeps them); for 10 minutes after their end, with "
        "outputs of at most 1 GiB"
    )
    assert str(FOLDER) == (
        "jobs are kept in SQLite and outputs in a folder: a restart goes on with them; for 7 days after their end, "
        "with outputs of at most 100 GiB"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (90, "90 s"), (60, "1 minute"), (3600, "1 hour"), (5400, "90 minutes"), (172800, "2 days")],
)
def test_times_are_in_the_largest_unit_that_fits(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
