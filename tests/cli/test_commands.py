"""The commands that look after a server's jobs."""

import json
import os
import subprocess
import sys
from pathlib import Path

from omni_grpc.engine.scheduler import Lane
from omni_grpc.errors import Code, Failure
from omni_grpc.request import ImageFormat
from omni_grpc.version import __version__
from tests.server.fake_executor import picture

ROOT = Path(__file__).resolve().parents[2]


async def test_models(run, server):
    done = await run("models", *server)
    head, row = done.out.splitlines()
    assert head.split() == ["MODEL", "STATE", "FAMILY", "TASKS", "SIZE", "STEPS"]
    assert row.split() == ["toy", "READY", "toy", "TEXT_TO_IMAGE", "64", "x", "32", "4"]
    (model,) = json.loads((await run("models", *server, "--json")).out)
    assert (model["name"], model["limits"]["size_multiple"]) == ("toy", 16)


async def test_jobs(run, server, service):
    finished = await service.finished(options={"labels": {"team": "red"}})
    service.executor.gates[Lane.STEP].close()
    running = await service.create(sampling={"steps": 9})
    rows = (await run("jobs", *server)).out.splitlines()
    assert [row.split()[0] for row in rows] == ["JOB", running.job_id, finished.job_id]
    assert rows[2].split()[1:4] == ["SUCCEEDED", "toy", "3/3"]
    assert rows[1].split()[3] == "0/9"
    assert len((await run("jobs", *server, "--limit", 1)).out.splitlines()) == 2
    listed = json.loads((await run("jobs", *server, "--state", "succeeded", "--label", "team=red", "--json")).out)
    assert [job["job_id"] for job in listed] == [finished.job_id]
    assert (await run("jobs", *server, "--state", "lost")).code == 2
    assert (await run("jobs", *server, "--limit", 0)).code == 1


async def test_watch_follows_a_job_to_its_end(run, server, service):
    job = await service.finished(sampling={"steps": 2})
    done = await run("watch", job.job_id, *server)
    assert done.code == 0
    lines = [line.split(maxsplit=1) for line in done.out.splitlines()]
    assert [int(seq) for seq, _ in lines] == list(range(1, 9))
    assert lines[4][1].startswith("step 2/2")
    assert lines[-1][1].startswith("done: 1 output(s)")
    events = [
        json.loads(line)
        for line in (await run("watch", job.job_id, *server, "--after-seq", 6, "--json")).out.splitlines()
    ]
    assert [(event["seq"], next(iter(event.keys() - {"seq", "job_id", "time"}))) for event in events] == [
        ("7", "artifact_ready"),
        ("8", "completed"),
    ]


async def test_watching_a_failed_job_is_an_error(run, server, service):
    service.executor.failures[Lane.STEP] = Failure(code=Code.INTERNAL, reason="BROKE", message="it broke")
    job = await service.finished()
    for after_seq in (0, job.last_seq):
        done = await run("watch", job.job_id, *server, "--after-seq", after_seq)
        assert (done.code, done.err) == (1, "error: INTERNAL BROKE: it broke\n")
    assert (await run("watch", "job_x", *server)).err.startswith("error: NOT_FOUND JOB_NOT_FOUND: ")


async def test_cancel(run, server, service):
    service.executor.gates[Lane.STEP].close()
    job = await service.create()
    done = await run("cancel", job.job_id, *server, "--reason", "enough")
    assert (done.code, done.out) == (0, f"{job.job_id}  CANCELLED\n")
    assert service.engine.jobs.get(job.job_id).entries[-1].event.reason == "enough"
    assert (await run("cancel", "job_x", *server)).code == 1


async def test_download(run, server, service, tmp_path):
    job = await service.finished()
    out = tmp_path / "again.png"
    done = await run("download", job.artifacts[0].artifact_id, *server, "--out", out)
    assert done.code == 0
    assert out.read_bytes() == picture(32, 16, 7, ImageFormat.PNG)
    nowhere = await run("download", job.artifacts[0].artifact_id, *server, "--out", tmp_path / "no" / "o.png")
    assert nowhere.code == 1
    assert nowhere.err.startswith("error: [Errno 2]")


async def test_doctor(run):
    done = await run("doctor")
    assert "grpcio" in done.out
    assert done.code == ("broken:" in done.out)


async def test_version_and_help(run):
    done = await run("--version")
    assert (done.code, done.out) == (0, f"omni-grpc {__version__}\n")
    usage = (await run("--help")).out
    for command in ("generate", "models", "jobs", "watch", "cancel", "download", "doctor", "serve"):
        assert f"\n    {command} " in usage
    assert (await run()).code == 2


async def test_serve_takes_the_settings_of_the_server(run):
    assert "--max-queue" in (await run("serve", "--help")).out
    refused = await run("serve", "--max-qeue", "3", "--model", "x")
    assert refused.code == 2
    assert "--max-queue" in refused.err


def test_as_a_module():
    ran = subprocess.run(
        [sys.executable, "-m", "omni_grpc", "cancel", "job_x", "--server", "localhost"],
        cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert ran.stderr.startswith("error: INVALID_ARGUMENT INVALID_ARGUMENT: address 'localhost' has no port")
