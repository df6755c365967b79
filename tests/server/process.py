"""`python -m omni_grpc.serve` in a process of its own, with a real worker, and clients of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omni_grpc.client.channel import DIRECT
from omni_grpc.types.version import __version__
from omni_grpc.v1 import (
    admin_pb2_grpc,
    artifact_pb2_grpc,
    event_pb2,
    generation_pb2,
    generation_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
)

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"omni_grpc (\S+) listening on (\S+) \(model (\S+), cpu float32\)\n")
LONG: Mapping[str, int] = {"steps": 200, "seed": 1}


class Process:
    """A running server, and stubs of a client of its own."""

    def __init__(self, popen: subprocess.Popen[str], address: str, model: str, log: Path) -> None:
        self.popen = popen
        self.address = address
        self.model = model
        self.log = log
        self.channel = grpc.insecure_channel(address, options=DIRECT)
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.jobs = job_pb2_grpc.JobServiceStub(self.channel)
        self.artifacts = artifact_pb2_grpc.ArtifactServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    def image(self, **sampling: int) -> generation_pb2.GenerateImageRequest:
        return generation_pb2.GenerateImageRequest(
            model=self.model,
            prompt="a red circle left of a blue square",
            negative_prompt="",
            width=64,
            height=64,
            sampling={"steps": 4, "seed": 7} | sampling,
        )

    def generate(self, **sampling: int) -> list[event_pb2.JobEvent]:
        return [message.event for message in self.generation.GenerateImage(self.image(**sampling))]

    def create(self, request: generation_pb2.GenerateImageRequest) -> str:
        return self.jobs.CreateJob(job_pb2.CreateJobRequest(generate_image=request)).job.job_id

    def job(self, job_id: str) -> job_pb2.Job:
        return self.jobs.GetJob(job_pb2.GetJobRequest(job_id=job_id)).job

    def watch(self, job_id: str, **options: Any) -> list[event_pb2.JobEvent]:
        call = self.jobs.WatchJob(job_pb2.WatchJobRequest(job_id=job_id, **options))
        return [message.event for message in call]

    def health(self, name: str = "") -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=name)).status

    def worker(self) -> psutil.Process:
        (worker,) = (
            child for child in psutil.Process(self.popen.pid).children() if "spawn_main" in " ".join(child.cmdline())
        )
        return worker

    def stop(self) -> tuple[int, str]:
        """Asks the server to end. Returns its exit code and the rest of its output."""
        self.channel.close()
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        rest, _ = self.popen.communicate(timeout=120)
        return self.popen.returncode, rest


@contextlib.contextmanager
def served(checkpoint: Path, folder: Path, *flags: str) -> Iterator[Process]:
    log = folder / "server.log"
    with log.open("w") as stderr:
        popen = subprocess.Popen(
            [sys.executable, "-m", "omni_grpc.serve", "--model", str(checkpoint), "--port", "0", *flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        assert popen.stdout is not None
        line = popen.stdout.readline()
        match = LINE.fullmatch(line)
        assert match, f"{line!r}: {log.read_text()}"
        assert match[1] == __version__
        yield Process(popen, match[2], match[3], log)
    finally:
        popen.kill()
        popen.wait()


def data_of(events: list[event_pb2.JobEvent]) -> bytes:
    """The bytes that came on a stream."""
    return b"".join(event.artifact_chunk.data for event in events if event.HasField("artifact_chunk"))
