"""`omni-grpc top`: plain lines, a picture, and the live view in a real terminal."""

import asyncio
import contextlib
import os
import pty
import sys
from pathlib import Path
from xml.etree import ElementTree

from omni_grpc.engine.scheduler import Lane
from tests.server.service import downloading, starting, until
from tests.server.test_access import token
from tests.server.test_audit import audited

ROOT = Path(__file__).resolve().parents[2]


async def busy(service) -> tuple[str, str]:
    """A job that has taken one of its steps, and one that waits."""
    service.engine.replicas[0].scheduler.max_num_seqs = 1
    service.executor.gates[Lane.STEP].close()
    service.executor.gates[Lane.STEP].let(1)
    first = await service.create(sampling={"steps": 4})
    second = await service.create(width=64)
    await until(lambda: service.engine.jobs.get(first.job_id).step == 1)
    return first.job_id, second.job_id


async def test_without_a_terminal_one_frame_is_printed_as_lines(run, service, server):
    first, second = await busy(service)
    done = await run("top", *server)
    assert (done.code, done.err) == (0, "")
    head, model, replica, *jobs = done.out.splitlines()
    assert head.startswith("server: 1 running, 1 of 256 queued, wait ")
    assert model.startswith("model toy: READY, 1 running, 1 queued, wait ")
    assert "replica 0: READY, 1 jobs, step 10.0 ms, 1.0 jobs and 1.0 rows a step" in replica
    assert jobs[0].startswith(f"job {first}: RUNNING, toy, tenant -, 32 x 16, step 1 of 4, ")
    assert jobs[1] == f"job {second}: QUEUED, toy, tenant -, 64 x 16, step 0 of 3, 0 ahead"


async def test_a_model_that_loads_shows_how_far_it_is(run):
    async with starting() as (service, _):
        service.executor._deliver(downloading(250))
        done = await run("top", "--once", "--server", f"127.0.0.1:{service.server.port}")
    assert "model toy: LOADING (downloading 250 bytes of 1 kB)" in done.out


async def test_a_picture_has_what_the_server_does_and_fetches_nothing(run, service, server, tmp_path):
    first, _ = await busy(service)
    file = tmp_path / "top.svg"
    assert (await run("top", *server, "--svg", file)).code == 0
    text = "".join(ElementTree.parse(file).getroot().itertext())
    assert first in text
    assert "RUNNING" in text
    assert "url(" not in file.read_text().replace("url(#", "")


async def test_an_admin_sees_the_jobs_of_all_tenants_and_others_their_own(run, tmp_path):
    async with audited(tmp_path) as service:
        service.executor.gates[Lane.STEP].close()
        from omni_grpc.v1 import job_pb2
        from tests.server.service import image
        from tests.server.test_access import call

        for caller in ("owner", "stranger"):
            await call(service, "JobService/CreateJob", job_pb2.CreateJobRequest(generate_image=image()), caller)
        address = "--server", f"127.0.0.1:{service.server.port}"
        seen = {}
        for caller in ("admin", "owner"):
            seen[caller] = (await run("top", *address, "--token", token(caller))).out
        refused = await run("top", *address)
    assert {"tenant studio", "tenant other"} <= set(seen["admin"].split(", "))
    assert "tenant other" not in seen["owner"]
    assert "replica 0" in seen["admin"]
    assert "replica 0" not in seen["owner"]
    assert (refused.code, "TOKEN_MISSING" in refused.err) == (1, True)


async def test_in_a_terminal_it_is_live_until_q(service):
    first, second = await busy(service)
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "omni_grpc", "top", "--interval", "0.1"]
    command += ["--server", f"127.0.0.1:{service.server.port}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = await asyncio.create_subprocess_exec(*command, **streams, env=environment, cwd=ROOT)
    os.close(theirs)
    shown = bytearray()

    def read_until(word: bytes) -> None:
        with contextlib.suppress(OSError):  # of a terminal that nobody has open any more
            while word not in shown and (more := os.read(mine, 1 << 16)):
                shown.extend(more)

    try:
        async with asyncio.timeout(60):
            await asyncio.to_thread(read_until, second.encode())
            assert first.encode() in shown
            os.write(mine, b"q")
            reading = asyncio.create_task(asyncio.to_thread(read_until, b"never shown"))
            assert await process.wait() == 0
            await reading
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        os.close(mine)
