"""A server whose ranks torchrun starts: two hosts, that is two of its agents on this machine."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import PIL.Image
import psutil
import pytest
from google.rpc import error_details_pb2

from omni_grpc import Omni
from omni_grpc.cli import serve
from omni_grpc.v1 import job_pb2, options_pb2
from tests.server.process import LINE, LONG, ROOT, Process, data_of

SOON = 120.0
"""Seconds in which a process is there, or gone, on a busy machine."""


def free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


class Launch:
    """The torchrun of each host. Each starts its process again when that dies."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder, (self.master, port) = folder, free_ports()
        secret = folder / "secret"
        secret.write_text("ab" * 32)
        settings = {
            "model": model,
            "port": 0,
            "device": "cpu",
            "cpu-threads": 1,
            "warm-up-seconds": 0,
            "restart-backoff": 0,
            "ulysses-degree": 2,
            "rank-port": port,
            "rank-secret-file": secret,
            "state-dir": folder / "state",
        }
        self.flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        self.hosts: list[subprocess.Popen[str]] = []

    def start(self, node: int) -> subprocess.Popen[str]:
        how = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--max-restarts", "3"]
        where = ["--master-addr", "127.0.0.1", "--master-port", str(self.master)]
        command = [sys.executable, "-m", "torch.distributed.run", *how, *where, "-m", "omni_grpc.serve", *self.flags]
        with (self.folder / f"host-{node}.log").open("a") as log:
            host = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        self.hosts.append(host)
        return host

    def log(self, node: int) -> str:
        return (self.folder / f"host-{node}.log").read_text()

    def end(self) -> None:
        """Kills what is left."""
        for host in self.hosts:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [*psutil.Process(host.pid).children(recursive=True), host]:
                    process.kill()
            host.wait()


@pytest.fixture
def launch(tiny_qwen_image: Path, tmp_path: Path) -> Iterator[Launch]:
    it = Launch(tiny_qwen_image, tmp_path)
    yield it
    it.end()


def started_by(process: int, *words: str) -> psutil.Process:
    """The only child whose command line has these words. A server also has processes that decode inputs."""
    (child,) = [one for one in psutil.Process(process).children() if all(word in str(one.cmdline()) for word in words)]
    return child


def agent(host: subprocess.Popen[str]) -> psutil.Process:
    return started_by(host.pid, "omni_grpc.serve")


def worker(host: subprocess.Popen[str]) -> psutil.Process:
    return started_by(agent(host).pid, "spawn_main")


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB"), dtype=int)


def announced(launch: Launch, host: subprocess.Popen[str]) -> Process:
    """The server of a launch, once it is ready."""
    assert host.stdout is not None
    line = host.stdout.readline()
    found = LINE.fullmatch(line)
    assert found, f"{line!r}: {launch.log(0)} {launch.log(1)}"
    return Process(host, found[2], found[3], launch.folder / "host-0.log")


def running(server: Process) -> str:
    """A job in the middle of its steps."""
    job_id = server.create(server.image(**LONG))
    call = server.jobs.WatchJob(job_pb2.WatchJobRequest(job_id=job_id))
    next(one for one in call if one.event.step_progress.step)
    call.cancel()
    return job_id


def lost(server: Process, job_id: str) -> tuple[str, str]:
    """Why a job failed, which may be sent again."""
    failed = server.watch(job_id)[-1].failed
    assert failed.retryable
    (info,) = [detail for detail in failed.status.details if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
    found = error_details_pb2.ErrorInfo()
    info.Unpack(found)
    return found.reason, failed.status.message


@pytest.mark.service
def test_two_hosts_generate_as_one_process_does_and_survive_the_loss_of_each_part(
    tiny_qwen_image: Path, launch: Launch
) -> None:
    with Omni(str(tiny_qwen_image), device="cpu", cpu_threads=1, warm_up_seconds=0.0) as omni:
        prompt = "a red circle left of a blue square"
        made = omni.generate(prompt, negative_prompt="", width=64, height=64, steps=4, seed=7)
    first, second = launch.start(0), launch.start(1)
    server = announced(launch, first)
    ours = pixels(data_of(server.generate()))
    assert np.abs(ours - pixels(made.files[0])).max() <= 1
    assert ours.std() > 1
    everything = [one for host in (first, second) for one in psutil.Process(host.pid).children(recursive=True)]

    # the rank of the second host: its agent stays
    job_id, (rank, its_agent) = running(server), (worker(second), agent(second))
    rank.kill()
    reason, message = lost(server, job_id)
    assert reason == "WORKER_DIED"
    assert f"rank 1 of 2, process {rank.pid} died by signal SIGKILL" in message
    assert np.array_equal(pixels(data_of(server.generate())), ours)
    assert agent(second).pid == its_agent.pid

    # its agent: torchrun starts another one
    job_id, rank = running(server), worker(second)
    its_agent.kill()
    reason, message = lost(server, job_id)
    assert reason == "WORKER_DIED"
    assert f"process {its_agent.pid}, was lost: " in message
    waiting = server.create(server.image())
    until(lambda: not rank.is_running())
    assert server.watch(waiting)[-1].HasField("completed")
    assert agent(second).pid != its_agent.pid

    # the whole host: the queue waits for another one
    waiting = [server.create(server.image())]
    for process in [second, *psutil.Process(second.pid).children(recursive=True)]:
        process.kill()
    second.wait()
    waiting.append(server.create(server.image()))
    second = launch.start(1)
    assert [server.watch(job_id)[-1].HasField("completed") for job_id in waiting[1:]] == [True]
    assert np.array_equal(pixels(data_of(server.generate())), ours)

    # the server: torchrun starts another one, with what was acknowledged, and the agent of the second host comes to it
    request = server.image()
    request.options.on_server_restart = options_pb2.RESTART_POLICY_REQUEUE
    kept, its_agent = server.create(request), agent(second)
    agent(first).kill()
    server.channel.close()
    server = announced(launch, first)
    assert server.watch(kept)[-1].HasField("completed")
    assert np.array_equal(pixels(data_of(server.generate())), ours)
    assert agent(second).pid == its_agent.pid

    everything += [one for host in (first, second) for one in psutil.Process(host.pid).children(recursive=True)]
    server.channel.close()
    for host in (first, second):
        host.send_signal(signal.SIGTERM)
    for host in (first, second):
        host.wait(SOON)
    assert not [one for one in everything if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


VARIABLES = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "65535"}
FOUR = ("--ulysses-degree", "4")


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "WORLD_SIZE is 4, as torchrun says, and the parallel sizes make 1 ranks; start it without torchrun, or"),
        (("--ring", "2"), "have torchrun start 2 (--nnodes x --nproc-per-node), or give sizes that make 4, such as"),
        (FOUR, "--rank-secret-file is needed under torchrun"),
        ((*FOUR, "--rank-secret-file", "short"), "short, which has 3 bytes; the least is 16: openssl rand -hex 32 >"),
        ((*FOUR, "--rank-secret-file", "none"), "none, which cannot be read"),
        ((*FOUR, "--rank-secret-file", "long"), "--rank-port would be 65536, one more than MASTER_PORT"),
        ((*FOUR, "--data-parallel-size", "2"), "--data-parallel-size must be 1 under torchrun"),
        ((*FOUR, "--distributed-executor-backend", "ray"), "--distributed-executor-backend is ray, and torchrun has"),
        ((*FOUR, "--devices", "0,1,2,3"), "--devices has no effect under torchrun"),
        (("--model", "a=x", "--model", "b=y"), "--model names several models"),
    ],
    ids=lambda given: "" if isinstance(given, str) else " ".join(given),
)
def test_what_does_not_fit_the_launch_is_refused_by_every_process_alike(
    flags: tuple[str, ...],
    said: str,
    rank: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("abc\n")
    (tmp_path / "long").write_text("abc" * 16)
    for name, value in (VARIABLES | {"RANK": rank}).items():
        monkeypatch.setenv(name, value)
    assert serve.main(["--device", "cpu", *flags]) == serve.BAD_SETTINGS
    assert said in capsys.readouterr().err


def test_settings_of_torchrun_need_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--device", "cpu", "--rank-port", "5000"]) == serve.BAD_SETTINGS
    assert "--rank-port is for ranks that torchrun starts" in capsys.readouterr().err
