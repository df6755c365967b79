"""The commands that look after a server's jobs."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

from omni_grpc.cli import connect
from omni_grpc.cli import main as cli
from omni_grpc.client import Client
from omni_grpc.engine.scheduler import Lane
from omni_grpc.gate.operation import LOAD_INTERVAL
from omni_grpc.types.errors import Code, Failure, Unavailable
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.plan import Died
from omni_grpc.types.version import __version__
from tests.server.fake_executor import picture
from tests.server.service import downloading, starting, until
from tests.server.test_load_model import GATED

ROOT = Path(__file__).resolve().parents[2]


async def test_models(run, server):
    done = await run("models", *server)
    head, row = done.out.splitlines()
    assert head.split() == ["MODEL", "STATE", "FAMILY", "TASKS", "SIZE", "STEPS"]
    assert row.split() == ["toy", "READY", "toy", "TEXT_TO_IMAGE", "64", "x", "32", "4"]
    (model,) = json.loads((await run("models", *server, "--json")).out)
    assert (model["name"], model["limits"]["size_multiple"]) == ("toy", 16)


async def test_wait_tells_how_far_the_model_is_until_it_is_ready(run):
    async with starting() as (service, _):
        address = "--server", f"127.0.0.1:{service.server.port}"
        service.executor._deliver(downloading(250))
        row = (await run("models", *address)).out.splitlines()[1]
        assert row.split() == ["toy", "LOADING", "-", "-"]
        waiting = asyncio.create_task(run("wait", *address))
        await until(lambda: service.server._calls.open_streams == 1)
        for done in (251, 260, 900):  # a line for each twentieth
            service.executor._deliver(downloading(done))
            await asyncio.sleep(1.5 * LOAD_INTERVAL)
        service.executor.loading.open()
        done = await waiting
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "downloading vae, 250 bytes of 1 kB",
        "downloading vae, 900 bytes of 1 kB",
        "toy is ready",
    ]


async def test_wait_says_what_keeps_the_model_from_loading(run):
    async with starting() as (service, _):
        waiting = asyncio.create_task(run("wait", "--server", f"127.0.0.1:{service.server.port}"))
        await until(lambda: service.server._calls.open_streams == 1)
        service.executor._deliver(Died(failure=GATED))
        done = await waiting
    assert (done.code, done.out) == (1, "loading\n")
    assert done.err == f"error: FAILED_PRECONDITION MODEL_GATED: {GATED.message}\n"


async def test_wait_looks_again_for_a_server_that_is_not_there(run, server, monkeypatch):
    looks = iter([Unavailable("cannot reach it", reason="SERVER_UNREACHABLE")] * 2)

    class Impatient(Client):
        """One that gives up at once where there is no server, as the real one does after its retries."""

        def load_model(self, model=None, *, timeout=None):
            if (absent := next(looks, None)) is not None:
                raise absent
            return super().load_model(model, timeout=timeout)

    monkeypatch.setattr(connect, "Client", Impatient)
    monkeypatch.setattr(cli, "LOOK_AGAIN", 0.01)
    done = await run("wait", *server, "--timeout", 60)
    assert (done.code, done.out, done.err) == (0, "toy is ready\n", f"no server at {server[1]} yet, waiting\n")
    looks = itertools.repeat(Unavailable("cannot reach it", reason="SERVER_UNREACHABLE"))
    done = await run("wait", *server, "--timeout", 0.05)
    assert (done.code, done.err.splitlines()[-1]) == (1, "error: UNAVAILABLE SERVER_UNREACHABLE: cannot reach it")


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
    assert f"cannot write {tmp_path / 'no' / 'o.png'}: there is no such file or folder" in nowhere.err


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
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == [
        "omni-grpc cancel: error: argument --server: 'localhost' has no port; write localhost:50051",
        "see omni-grpc cancel --help",
    ]
