"""`omni-grpc jobs export` and the filters that it shares with `jobs`; `omni-grpc info`."""

from __future__ import annotations

import asyncio
import csv
import datetime
import io
import json
import os
import sys

import pytest

from omni_grpc.cli import export
from omni_grpc.client import AsyncClient, Client
from omni_grpc.engine.scheduler import Lane
from omni_grpc.store.records import JobState
from omni_grpc.types.errors import Code, Failure, InvalidArgument
from tests.server.service import serving
from tests.store.samples import new, record

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).timestamp()


async def keep(service, count: int, **changes) -> list[str]:
    """Writes ended jobs, one a minute from START on. Their ids, newest first."""
    known = {"state": JobState.SUCCEEDED, "expire_time": 4e9} | changes
    records = [record(n, id=f"job_{n:05}", create_time=START + 60.0 * n, **known) for n in range(count)]
    for start in range(0, count, 500):
        await service.engine.storage.store.jobs.write(new(*records[start : start + 500]))
    return [one.id for one in reversed(records)]


def where(service) -> tuple[str, str]:
    return "--server", f"127.0.0.1:{service.server.port}"


async def test_two_thousand_jobs_are_written_newest_first(run, tmp_path):
    async with serving(state_dir=str(tmp_path / "state")) as service:
        ids = await keep(service, 2000)
        done = await run("jobs", "export", *where(service))
        out = tmp_path / "jobs.csv"
        again = await run("jobs", "export", *where(service), "--format", "csv", "--output", out)
    assert (done.code, done.err) == (0, "2000 jobs\n")
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [line["job_id"] for line in lines] == ids
    assert lines[0]["create_time"] == "2026-01-02T09:19:00Z"
    assert (again.code, again.out, again.err) == (0, "", f"2000 jobs in {out}\n")
    with out.open(newline="") as file:
        assert [row["job_id"] for row in csv.DictReader(file)] == ids
    assert "a red circle" not in done.out + out.read_text(), "no prompts"


async def test_a_job_is_a_row_of_csv(run, server, service):
    labels = {"team": "red, blue", "a": "b"}
    job = await service.finished(options={"labels": labels, "client_job_id": "=1+1", "priority": 3})
    service.executor.failures[Lane.STEP] = Failure(code=Code.INTERNAL, reason="BROKE", message='it "broke",\nbadly')
    await service.finished()
    failed, succeeded = csv.DictReader(io.StringIO((await run("jobs", "export", *server, "--format", "csv")).out))
    assert tuple(succeeded) == tuple(export.COLUMNS)
    assert (succeeded["state"], succeeded["model"], succeeded["task"]) == ("SUCCEEDED", "toy", "TEXT_TO_IMAGE")
    assert succeeded["create_time"] == job.create_time.ToJsonString()
    assert (succeeded["step"], succeeded["width"], succeeded["seeds"]) == ("3", "32", "7")
    assert json.loads(succeeded["labels"]) == labels
    assert succeeded["client_job_id"] == "'=1+1", "a spreadsheet does not run it"
    assert succeeded["artifact_ids"] == job.artifacts[0].artifact_id
    assert int(succeeded["artifact_bytes"]) == job.artifacts[0].size_bytes
    assert float(succeeded["total_seconds"]) == pytest.approx(job.stats.total.ToTimedelta().total_seconds(), abs=1e-3)
    assert [succeeded[name] for name in ("error_code", "error_reason", "error_message")] == [""] * 3
    assert [failed[name] for name in ("error_code", "error_reason", "error_message")] == [
        "INTERNAL", "BROKE", 'it "broke",\nbadly',
    ]  # fmt: skip
    assert (failed["state"], failed["width"], failed["artifact_bytes"]) == ("FAILED", "", "0")


async def test_filters_select_in_a_list_and_in_an_export(run, tmp_path):
    async with serving(state_dir=str(tmp_path)) as service:
        await keep(service, 10)
        for flags, expected in [
            (("--created-from", "2026-01-01T00:05:00Z"), [9, 8, 7, 6, 5]),
            (("--created-before", "2026-01-01T00:02:00"), [1, 0]),
            (("--created-from", "2026-01-01T01:03+01:00", "--created-before", "2026-01-01T00:05Z"), [4, 3]),
            (("--created-from", "1d"), []),
            (("--created-before", "1m", "--model", "tiny", "--state", "succeeded"), list(range(9, -1, -1))),
            (("--model", "other"), []),
            (("--tenant", "nobody"), []),
        ]:
            rows = (await run("jobs", *where(service), *flags)).out.splitlines()[1:]
            assert [int(row.split()[0][-5:]) for row in rows] == expected, flags
            lines = (await run("jobs", "export", *where(service), *flags)).out.splitlines()
            assert [int(json.loads(line)["job_id"][-5:]) for line in lines] == expected, flags


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ("jobs", "--created-from", "yesterday"),
            2,
            "'yesterday' is not a time: expected 30d, 12h, 45m",
        ),
        (("jobs", "export", "--created-before", "999999d"), 2, "is not a time"),
        (("jobs", "export", "--format", "xml"), 2, "'xml' is not one of jsonl, csv"),
        (("jobs", "export", "--limit", "3"), 2, "unknown argument '--limit'"),
        (("jobs", "--limit", "3", "export"), 2, "unknown argument 'export'"),
        (("jobs", "export", "--created-from", "1d", "--created-before", "2d"), 1, "created_before: is not later"),
        (("jobs", "export", "--tenant", "a\tb"), 1, "tenant: is no name"),
        (("jobs", "export", "--output", "none/jobs.csv"), 1, "cannot write none/jobs.csv: there is no such file"),
    ],
)
async def test_what_is_wrong_is_refused(run, server, arguments, code, said):
    done = await run(*arguments, *server)
    assert (done.code, done.out) == (code, "")
    assert said in done.err


async def test_an_export_that_fails_leaves_the_file_before_and_can_be_repeated(run, tmp_path, monkeypatch):
    out = tmp_path / "jobs.jsonl"
    out.write_text("the one before\n")
    async with serving(state_dir=str(tmp_path / "state")) as service:
        ids = await keep(service, 1500)
        reply = service.engine.jobs.page
        asked = []

        async def stops(query):
            asked.append(query)
            if len(asked) == 2:
                raise RuntimeError("the second page fails")
            return await reply(query)

        monkeypatch.setattr(service.engine.jobs, "page", stops)
        done = await run("jobs", "export", *where(service), "--output", out)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith("error: INTERNAL")
        assert out.read_text() == "the one before\n"
        assert {path.name for path in tmp_path.iterdir()} == {"jobs.jsonl", "state"}
        assert (await run("jobs", "export", *where(service), "--output", out)).code == 0
    assert [json.loads(line)["job_id"] for line in out.read_text().splitlines()] == ids


async def test_on_a_terminal_jobs_are_counted_as_they_come(run, tmp_path, monkeypatch):
    async with serving(state_dir=str(tmp_path)) as service:
        await keep(service, 250)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        done = await run("jobs", "export", *where(service), "--output", os.devnull)
    assert done.err == f"\r100 jobs\r200 jobs\r250 jobs in {os.devnull}\n"


async def test_who_has_read_enough_of_an_export_ends_it_without_an_error(tmp_path):
    async with serving(state_dir=str(tmp_path)) as service:
        await keep(service, 1500)
        command = [sys.executable, "-m", "omni_grpc", "jobs", "export", *where(service)]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        await process.stdout.readline()
        process._transport.get_pipe_transport(1).close()
        error = await process.stderr.read()
        assert (await process.wait(), error) == (141, b"")


async def test_the_clients_go_through_all_jobs_with_a_page_in_memory(service, monkeypatch):
    jobs = [await service.finished(sampling={"steps": 1}) for _ in range(5)]
    newest = [job.job_id for job in reversed(jobs)]
    monkeypatch.setattr("omni_grpc.client.messages.MAX_PAGE", 2)
    async with AsyncClient(service.server.address) as client:
        assert [job.job_id async for job in client.iter_jobs()] == newest
        found = client.iter_jobs(created_from=jobs[1].create_time, created_before=jobs[3].create_time, model="toy")
        assert [job.job_id async for job in found] == newest[2:4]
        day = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
        assert await client.list_jobs(created_before=day, tenant="") == []
        assert len(await client.list_jobs(created_from=day, limit=3)) == 3
        with pytest.raises(InvalidArgument, match="time zone") as caught:
            await client.list_jobs(created_from=day.replace(tzinfo=None))
        assert caught.value.violations[0].field == "created_from"
        with pytest.raises(TypeError, match="unknown filter 'state'"):
            await client.list_jobs(state=["FAILED"])

    def threaded() -> list[str]:
        with Client(service.server.address) as client:
            return [job.job_id for job in client.iter_jobs(states=["succeeded"])]

    assert await asyncio.to_thread(threaded) == newest


async def test_info_says_where_jobs_are_kept(run, server, service, tmp_path):
    lines = dict(line.split(maxsplit=1) for line in (await run("info", *server)).out.splitlines())
    assert lines["jobs"].startswith("in memory: a restart loses them (--state-dir keeps them)")
    assert (lines["instance"], lines["device"]) == (service.engine.forgotten.instance_id, "cpu")
    async with serving(state_dir=str(tmp_path)) as kept:
        lines = dict(line.split(maxsplit=1) for line in (await run("info", *where(kept))).out.splitlines())
        assert lines["jobs"].startswith("in SQLite and outputs in a folder: a restart goes on with them; for 7 days")
        found = json.loads((await run("info", *where(kept), "--json")).out)
    assert found["storage"]["durable"] is True
    assert found["features"]["max_queue"] == str(found["max_queue"])
