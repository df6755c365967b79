"""Signals to a command that waits for its job: real ones, to a process of its own, of a real server."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from omni_grpc.cli import signals
from omni_grpc.config import JobsConfig
from omni_grpc.engine import JobState
from omni_grpc.engine.scheduler import Lane
from tests.server.service import Service, until

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
REASONS = {
    signal.SIGINT: "interrupted by the user",
    signal.SIGTERM: "the client was ended by SIGTERM",
    signal.SIGHUP: "the client was ended by SIGHUP",
}
SHOWN = {signal.SIGINT: b"interrupted", signal.SIGTERM: b"ended by SIGTERM", signal.SIGHUP: b"ended by SIGHUP"}


async def started(after: bytes, command: str, *arguments: object, before: tuple[str, ...] = ()):
    """A command in a process of its own, once a line of what it writes begins with `after`."""
    process = await asyncio.create_subprocess_exec(
        *before, sys.executable, "-m", "omni_grpc", command, *map(str, arguments),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=ROOT, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    async for line in process.stdout:
        lines.append(line)
        if line.lstrip(b" 0123456789").startswith(after):
            return process
    raise AssertionError(b"".join(lines))


async def signalled(number: signal.Signals, after: bytes, command: str, *arguments: object) -> tuple[int | None, bytes]:
    process = await started(after, command, *arguments)
    process.send_signal(number)
    written, _ = await process.communicate()
    assert b"Traceback" not in written
    return process.returncode, written


@pytest.mark.parametrize("number", NUMBERS)
async def test_a_signal_cancels_the_job_and_is_the_exit_code(
    service: Service, server: tuple[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    service.executor.gates[Lane.STEP].close()
    code, written = await signalled(number, b"encoded", "generate", "x", "--out", tmp_path / "o.png", *server)
    assert code == 128 + number
    assert SHOWN[number] in written
    (job,) = service.engine.jobs.newest()
    assert (job.state, job.entries[-1].event.reason) == (JobState.CANCELLED, REASONS[number])
    assert os.listdir(tmp_path) == []


async def test_nohup_keeps_a_command_and_its_job(service: Service, server: tuple[str, str], tmp_path: Path) -> None:
    steps = service.executor.gates[Lane.STEP]
    steps.close()
    arguments = ("x", "--out", tmp_path / "o.png", *server)
    process = await started(b"encoded", "generate", *arguments, before=("nohup",))
    process.send_signal(signal.SIGHUP)
    await asyncio.sleep(0.2)
    steps.open()
    assert (await process.communicate(), process.returncode)[1] == 0
    assert (tmp_path / "o.png").stat().st_size


async def test_a_client_that_is_killed_keeps_its_job_for_the_grace(
    service: Service, server: tuple[str, str], tmp_path: Path
) -> None:
    service.executor.gates[Lane.STEP].close()
    process = await started(b"encoded", "generate", "x", "--out", tmp_path / "o.png", *server)
    process.kill()
    await process.communicate()
    (job,) = service.engine.jobs.newest()
    await until(lambda: "disconnect_grace" in service.engine._timers._handles.get(job.id, {}))
    assert (job.state, job.record.spec.disconnect_grace) == (JobState.RUNNING, 30.0)


@pytest.mark.parametrize("page", ["README.md", "docs/client.md", "docs/api.md"])
def test_the_pages_tell_the_grace_that_is_the_default(page: str) -> None:
    """Each number of seconds that stands near the name of the setting."""
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    told = [*re.findall(r"(\d+) s \(`--disconnect-grace`", text), *re.findall(r"disconnect.grace`[^.|]*?\((\d+)", text)]
    assert {float(number) for number in told} == {JobsConfig().disconnect_grace}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_watcher_that_is_ended_leaves_the_job_alone(
    service: Service, server: tuple[str, str], number: signal.Signals
) -> None:
    service.executor.gates[Lane.STEP].close()
    job = await service.create()
    code, _ = await signalled(number, b"encoded", "watch", job.job_id, *server)
    assert code == 128 + number
    assert service.engine.jobs.get(job.job_id).state is JobState.RUNNING


async def test_a_signal_ends_a_generation_on_this_machine(tmp_path: Path) -> None:
    number, size = signal.SIGTERM, ("--width", 256, "--height", 256, "--steps", 200)
    code, written = await signalled(
        number, b"step", "generate", "a red circle", "--out", tmp_path / "o.png", "--model", "demo", *size
    )
    assert code == 128 + number
    assert b"step 200/200" not in written
    assert os.listdir(tmp_path) == []


def test_a_command_that_needs_no_server_ends_the_same_way() -> None:
    def command() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal came to nothing")

    assert signals.run(command) == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "it was not put back"
