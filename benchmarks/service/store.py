"""What it costs to keep jobs: pages of a long list, opening, bytes on the disk, and commits.

Each database gets `jobs` jobs that have ended, with the logs that are kept of them, from several tenants, with labels.
A page has 50 jobs with their logs, from a random place of the list. A new job is one record and one event; the loop is
watched while groups of them are written.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sqlalchemy as sa

from omni_grpc.cli.bench.figures import quantile
from omni_grpc.store.records import ArtifactRow, Entry, JobQuery, JobRecord, JobSpec, JobState, JobWrite
from omni_grpc.store.sql import SqlStore
from omni_grpc.types import events
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Guidance, Request, Task
from omni_grpc.types.results import Artifact, Effective, Stats

from .report import Result

PROMPT = "a red circle left of a blue square on a wooden table, studio light, 50 mm, shallow depth of field"
STATES = (*[JobState.SUCCEEDED] * 46, *[JobState.FAILED] * 3, JobState.CANCELLED)
"""How jobs end, of fifty."""
TENANTS = ("studio", "games", "press", "lab")
PROJECTS = 20
PAGE = 50
GROUPS = (1, 16, 64)
FILTERS: Mapping[str, Mapping[str, Any]] = {
    "no filter": {},
    "a state (6 %)": {"states": (JobState.FAILED,)},
    "two states (8 %)": {"states": (JobState.FAILED, JobState.CANCELLED)},
    "a label (5 %)": {"labels": {"project": "p7"}},
    "a label and a state (0.3 %)": {"labels": {"project": "p7"}, "states": (JobState.FAILED,)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """`pages` of each kind; `seconds` of writing at each size of group. `state_url`: an empty database of PostgreSQL,
    which is measured beside a file of SQLite and left full.
    """

    jobs: int = 100_000
    pages: int = 300
    opens: int = 5
    seconds: float = 3.0
    state_url: str = ""


def run(checkpoint: Path) -> Result:
    return measure(Numbers())


def measure(numbers: Numbers) -> Result:
    # a full collection looks at all that is loaded here, torch too: 60 to 180 ms, which are not the store's
    gc.collect()
    gc.freeze()
    with TemporaryDirectory() as folder:
        places = {"SQLite": str(Path(folder) / "jobs.db")}
        if numbers.state_url:
            places["PostgreSQL"] = numbers.state_url
        found = {name: asyncio.run(_measured(place, numbers)) for name, place in places.items()}
    return result(numbers, found)


async def _measured(place: str, numbers: Numbers) -> dict[str, Any]:
    async with _open(place) as store:
        if await store.jobs.count(JobQuery()):
            raise SystemExit("--state-url: the database has jobs already; give an empty one")
        began = time.perf_counter()
        for group in _groups(numbers):
            await store.jobs.write(group)
        figures: dict[str, Any] = {"fill_seconds": time.perf_counter() - began}
    opens = []
    for _ in range(numbers.opens):
        began = time.perf_counter()
        async with _open(place) as store:
            opens.append(1000 * (time.perf_counter() - began))
            size = await _size(store, place)
    figures |= {"open_ms": sorted(opens), "bytes_per_job": size / numbers.jobs}
    async with _open(place) as store:
        figures["page_ms"] = {
            f"{name}, {whose}": await _pages(store, numbers, {**chosen, "tenant": tenant})
            for name, chosen in FILTERS.items()
            for whose, tenant in (("one tenant", TENANTS[0]), ("all tenants", None))
        }
        figures["writes"] = {group: await _writes(store, group, numbers.seconds) for group in GROUPS}
    return figures


@asynccontextmanager
async def _open(place: str) -> AsyncIterator[SqlStore]:
    store = SqlStore.postgresql(place) if "://" in place else SqlStore.sqlite(Path(place))
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def _size(store: SqlStore, place: str) -> int:
    """Bytes of the database with its indexes."""
    if "://" not in place:
        return sum(path.stat().st_size for path in Path(place).parent.iterdir())
    sized = sa.text("SELECT pg_database_size(current_database())")
    return int(await store._database.read(lambda connection: connection.scalar(sized)))


async def _pages(store: SqlStore, numbers: Numbers, chosen: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds. The first ones, for which statements are compiled, do not count."""
    chance, taken, count = random.Random(5), [], 0
    for number in range(numbers.pages + 5):
        place = None if number % 4 == 0 else (chance.uniform(0, numbers.jobs), "")
        began = time.perf_counter()
        found = await store.jobs.page(JobQuery(**chosen, after=place, limit=PAGE))
        if number >= 5:
            taken.append(1000 * (time.perf_counter() - began))
            count += len(found)
    return {"p50": quantile(taken, 0.5), "p99": quantile(taken, 0.99), "jobs": count / len(taken)}


async def _writes(store: SqlStore, group: int, seconds: float) -> dict[str, float]:
    """New jobs per second, milliseconds of a commit, and the longest that the loop was held during one (median and
    99th percentile of all).
    """
    held: list[float] = []
    watching = asyncio.create_task(_watch(held))
    commits, stalls, count = [], [], itertools.count()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        writes = [_new(f"{group}-{next(count)}") for _ in range(group)]
        held.clear()
        started = time.perf_counter()
        await store.jobs.write(writes)
        commits.append(time.perf_counter() - started)
        await asyncio.sleep(0)
        stalls.append(1000 * max(held, default=0.0))
    watching.cancel()
    # without the time in which the records are made
    return {
        "jobs_per_second": group * len(commits) / sum(commits),
        "commit_p50_ms": 1000 * quantile(commits, 0.5),
        "commit_p99_ms": 1000 * quantile(commits, 0.99),
        "loop_held_p50_ms": quantile(stalls, 0.5),
        "loop_held_p99_ms": quantile(stalls, 0.99),
    }


async def _watch(held: list[float]) -> None:
    """Seconds of each turn of the loop."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0)
        held.append(time.perf_counter() - began)


def _spec(name: str) -> JobSpec:
    request = Request(
        id=name,
        model="tiny",
        prompt=PROMPT,
        task=Task.TEXT_TO_IMAGE,
        negative_prompt=None,
        width=1024,
        height=1024,
        steps=30,
        guidance=Guidance(scale=3.5),
        seeds=(7,),
        num_outputs=1,
        output_format=ImageFormat.PNG,
    )
    return JobSpec(request=request, defaults_used={"sampling.steps": "30"})


def _record(name: str, at: float, number: int, **changes: Any) -> JobRecord:
    return JobRecord(
        id=f"job-{name:0>32}",
        spec=_spec(name),
        model="tiny",
        task=Task.TEXT_TO_IMAGE.value,
        create_time=at,
        tenant=TENANTS[number % len(TENANTS)],
        subject="somebody",
        request_id=f"request-{name}",
        fingerprint=bytes(32),
        labels={"project": f"p{number // len(TENANTS) % PROJECTS}", "user": f"u{number % 1000}"},
        server="server-1",
        **changes,
    )


def new_record(name: str) -> JobRecord:
    """A job that waits."""
    return _record(name, time.time(), 1, state=JobState.QUEUED)


def _new(name: str) -> JobWrite:
    record = new_record(name)
    return JobWrite(record=record, entries=(Entry(1, 1.0, events.Queued(position=1, queue_depth=2)),), created=True)


def _ended(count: int) -> Iterator[JobWrite]:
    chance = random.Random(3)
    for number in range(count):
        at, name = float(number), f"{chance.getrandbits(96):024x}"
        state = chance.choice(STATES)
        record = _record(name, at, number, state=state, start_time=at, end_time=at + 5, expire_time=at + 1e9)
        output = ArtifactRow(
            artifact_id=f"output-{name}", job_id=record.id, tenant=record.tenant, size_bytes=1_000_000, create_time=at
        )
        yield JobWrite(record=record, entries=_log(record, at), artifacts=(output,), created=True)


def _groups(numbers: Numbers) -> Iterator[Sequence[JobWrite]]:
    every = _ended(numbers.jobs)
    while group := list(itertools.islice(every, 500)):
        yield group


def _log(record: JobRecord, at: float) -> tuple[Entry, ...]:
    """What is kept of a job that took 30 steps."""
    artifact = Artifact(
        artifact_id="output-1",
        job_id=record.id,
        index=0,
        mime_type="image/png",
        size_bytes=1_000_000,
        sha256="ab" * 32,
        width=1024,
        height=1024,
        seed=7,
    )
    effective = Effective(
        width=1024,
        height=1024,
        steps=30,
        evals=30,
        seeds=(7,),
        guidance=record.spec.request.guidance,
        scheduler="FlowMatchEulerDiscreteScheduler",
        output_format=ImageFormat.PNG,
        attention_backend="sdpa",
    )
    log = (
        events.Queued(position=1, queue_depth=2),
        events.Started(model="tiny", seeds=(7,), width=1024, height=1024, total_steps=30, queue_wait=0.1),
        events.EncodeDone(elapsed=0.05, prompt_tokens=22),
        events.ArtifactReady(artifact=artifact),
        events.Completed(artifacts=(artifact,), effective=effective, warnings=(), stats=Stats(total=5.0, steps_run=30)),
    )
    return tuple(Entry(seq, at + seq, event) for seq, event in enumerate(log, start=1))


def result(numbers: Numbers, found: Mapping[str, Mapping[str, Any]]) -> Result:
    rows: list[tuple[str, str, str, str]] = []
    for name, figures in found.items():
        opens = figures["open_ms"]
        rows.append((name, "open, ms", f"{quantile(opens, 0.5):.1f}", f"{opens[-1]:.1f}"))
        rows.append((name, "bytes per job that has ended", f"{figures['bytes_per_job']:.0f}", ""))
        for what, taken in figures["page_ms"].items():
            rows.append((name, f"page, {what}, ms", f"{taken['p50']:.2f}", f"{taken['p99']:.2f}"))
        for group, taken in figures["writes"].items():
            rows.append((name, f"new jobs per second, {group} per commit", f"{taken['jobs_per_second']:.0f}", ""))
            commit = (f"{taken['commit_p50_ms']:.2f}", f"{taken['commit_p99_ms']:.2f}")
            rows.append((name, f"commit of {group}, ms", *commit))
            stall = (f"{taken['loop_held_p50_ms']:.2f}", f"{taken['loop_held_p99_ms']:.2f}")
            rows.append((name, f"the loop was held by {group}, ms", *stall))
    counted = dataclasses.asdict(numbers) | {"state_url": bool(numbers.state_url)}
    return Result(
        columns=("database", "what", "p50", "p99 (open: the longest)"),
        rows=rows,
        figures={"numbers": counted, "databases": found},
    )
