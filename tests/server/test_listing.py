"""ListJobs at size: filters by time and tenant, pages that stay as they are, replies that a client can take."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from google.protobuf.timestamp_pb2 import Timestamp

from omni_grpc.gate.pages import MAX_SIZE
from omni_grpc.server.jobs import MAX_PAGE_BYTES
from omni_grpc.store.records import JobRecord, JobState
from omni_grpc.v1 import event_pb2, job_pb2
from tests.store.samples import new, record

from .service import Service, image, refusal, serving

SECONDS = 1_790_000_000
"""A time at which nobody has made jobs here."""
TENANTS = {"studio": ["generate", "read"], "other": ["read"], "house": ["admin"]}


def token(tenant: str) -> str:
    return "omni_" + hashlib.sha256(tenant.encode()).hexdigest()[:43]


@pytest_asyncio.fixture
async def known(tmp_path: Path) -> AsyncIterator[Service]:
    """A server that knows its callers and keeps jobs in a file."""
    records = [
        {"name": name, "tenant": name, "scopes": scopes, "sha256": hashlib.sha256(token(name).encode()).hexdigest()}
        for name, scopes in TENANTS.items()
    ]
    file = tmp_path / "callers.yaml"
    file.write_text(yaml.safe_dump(records))
    file.chmod(0o600)
    async with serving(token_file=str(file), state_dir=str(tmp_path / "state")) as running:
        yield running


def jobs_of(tenant: str, count: int, **changes: Any) -> list[JobRecord]:
    """Ended jobs, one a second; those of two tenants take turns."""
    ended = {"state": JobState.SUCCEEDED, "end_time": SECONDS + 1e6, "expire_time": SECONDS + 1e8}
    start = SECONDS + (0.5 if tenant == "other" else 0.0)
    return [
        record(number, id=f"job_{tenant}_{number:05}", tenant=tenant, create_time=start + number, **(ended | changes))
        for number in range(count)
    ]


async def keep(service: Service, *records: JobRecord) -> None:
    await service.engine.storage.store.jobs.write(new(*records))


async def listed(service: Service, caller: str | None = None, **query: Any) -> tuple[list[str], str]:
    metadata = () if caller is None else (("authorization", f"Bearer {token(caller)}"),)
    reply = await service.jobs.ListJobs(job_pb2.ListJobsRequest(**query), metadata=metadata)
    return [job.job_id for job in reply.jobs], reply.next_page_token


def at(seconds: float) -> Timestamp:
    return Timestamp(seconds=int(SECONDS + seconds), nanos=int(seconds % 1 * 1e9))


async def test_jobs_are_listed_from_a_time_on_and_before_another(service: Service) -> None:
    made = [(await service.create()) for _ in range(4)]
    first, second, third, fourth = ids = [job.job_id for job in made]
    times = [job.create_time for job in made]
    assert (await listed(service, created_from=times[1]))[0] == [fourth, third, second], "the time itself is included"
    assert (await listed(service, created_before=times[1]))[0] == [first], "the time itself is not included"
    assert (await listed(service, created_from=times[1], created_before=times[3]))[0] == [third, second]
    assert (await listed(service, created_from=Timestamp()))[0] == ids[::-1]
    assert (await listed(service, created_before=Timestamp()))[0] == []


async def test_filters_are_combined(known: Service) -> None:
    studio = jobs_of("studio", 6)
    studio[1] = dataclasses.replace(studio[1], state=JobState.FAILED)
    studio[2] = dataclasses.replace(studio[2], labels={"app": "web", "user": "ada"})
    studio[3] = dataclasses.replace(studio[3], labels={"app": "web"}, state=JobState.FAILED)
    studio[4] = dataclasses.replace(studio[4], model="other", labels={"app": "web"})
    await keep(known, *studio, *jobs_of("other", 6, labels={"app": "web"}))

    async def numbers(**query: Any) -> list[int]:
        return [int(job_id[-5:]) for job_id in (await listed(known, "house", tenant="studio", **query))[0]]

    web = {"app": "web"}
    assert await numbers(label_selector=web) == [4, 3, 2]
    assert await numbers(label_selector=web, model="tiny") == [3, 2]
    assert await numbers(label_selector=web, created_from=at(3)) == [4, 3]
    assert await numbers(label_selector=web, created_before=at(4)) == [3, 2]
    assert await numbers(states=[event_pb2.JOB_STATE_FAILED], created_before=at(3)) == [1]
    failed_or_queued = [event_pb2.JOB_STATE_FAILED, event_pb2.JOB_STATE_QUEUED]
    assert await numbers(states=failed_or_queued, created_from=at(0.5)) == [3, 1]
    assert await numbers(states=failed_or_queued, created_from=at(1), created_before=at(3), model="tiny") == [1]
    assert await numbers(label_selector={**web, "user": "ada"}, created_from=at(2), created_before=at(2.5)) == [2]


async def test_a_tenant_lists_its_own_jobs_and_an_admin_those_of_any(known: Service) -> None:
    await keep(known, *jobs_of("studio", 2), *jobs_of("other", 1))
    studio, other = ["job_studio_00001", "job_studio_00000"], ["job_other_00000"]
    assert (await listed(known, "studio"))[0] == studio
    assert (await listed(known, "studio", tenant="studio"))[0] == studio
    assert (await listed(known, "other"))[0] == other
    assert (await listed(known, "house"))[0] == ["job_studio_00001", *other, "job_studio_00000"]
    assert (await listed(known, "house", tenant="studio"))[0] == studio
    assert (await listed(known, "house", tenant="nobody"))[0] == []
    metadata = (("authorization", f"Bearer {token('house')}"),)
    reply = await known.jobs.ListJobs(job_pb2.ListJobsRequest(), metadata=metadata)
    assert [job.tenant for job in reply.jobs] == ["studio", "other", "studio"]
    for tenant in ("other", "nobody"):
        request = job_pb2.ListJobsRequest(tenant=tenant)
        error = await refusal(known.jobs.ListJobs(request, metadata=(("authorization", f"Bearer {token('studio')}"),)))
        assert (error.code, error.fields) == ("INVALID_ARGUMENT", ["tenant"]), "nothing tells whether there is one"


@pytest.mark.parametrize(
    ("query", "field", "why"),
    [
        ({"created_from": {"nanos": -1}}, "created_from", "no time"),
        ({"created_from": {"nanos": 1_000_000_000}}, "created_from", "no time"),
        ({"created_from": {"seconds": 253_402_300_800}}, "created_from", "no time"),
        ({"created_before": {"seconds": -62_135_596_801}}, "created_before", "no time"),
        ({"created_from": {"seconds": 5}, "created_before": {"seconds": 5}}, "created_before", "not later"),
        ({"created_from": {"seconds": 6}, "created_before": {"seconds": 5}}, "created_before", "not later"),
        ({"tenant": "a\0b"}, "tenant", "no name"),
        ({"tenant": "a" * 257}, "tenant", "no name"),
    ],
)
async def test_a_filter_that_makes_no_sense_is_refused_by_name(
    service: Service, query: dict[str, Any], field: str, why: str
) -> None:
    error = await refusal(service.jobs.ListJobs(job_pb2.ListJobsRequest(**query)))
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", [field])
    assert why in error.message


async def test_pages_stay_as_they_are_while_jobs_come(known: Service) -> None:
    await keep(known, *jobs_of("studio", 1200), *jobs_of("other", 1200))
    query: dict[str, Any] = {"tenant": "studio", "created_from": at(100), "created_before": at(2000)}
    pages, sizes = [], []
    mine, theirs = (("authorization", f"Bearer {token('studio')}"),), jobs_of("studio", 1)[0]
    for number in range(20):
        page, following = await listed(known, "house", page_size=100, **query)
        pages += page
        sizes.append(len(page))
        if not following:
            break
        query["page_token"] = following
        # newer ones, in the store and here
        await keep(known, dataclasses.replace(theirs, id=f"job_new_{number}", create_time=SECONDS + 1500.0 + number))
        await known.jobs.CreateJob(job_pb2.CreateJobRequest(generate_image=image()), metadata=mine)
    assert pages == [f"job_studio_{number:05}" for number in range(1199, 99, -1)]
    assert sizes == [100] * 11
    (most, following) = await listed(known, "house", page_size=100_000)
    assert len(most) == MAX_SIZE
    assert following


async def test_a_page_of_large_jobs_is_one_that_a_client_can_take(known: Service) -> None:
    """4 MiB, of which a job with many labels takes a hundredth."""
    labels = {f"{number:02}{'k' * 126}": "v" * 4 * 128 for number in range(64)}
    await keep(known, *jobs_of("studio", 200, labels=labels))
    found: list[str] = []
    following = ""
    for _ in range(10):
        request = job_pb2.ListJobsRequest(page_size=150, page_token=following)
        reply = await known.jobs.ListJobs(request, metadata=(("authorization", f"Bearer {token('studio')}"),))
        assert reply.ByteSize() <= MAX_PAGE_BYTES + 1000
        found += [job.job_id for job in reply.jobs]
        if not (following := reply.next_page_token):
            break
    assert found == [f"job_studio_{number:05}" for number in range(199, -1, -1)]
