"""What must hold after any fault, checked the same way after each.

Nothing that was acknowledged is lost: the job is there, has exactly one end, its log has all that watchers saw with the
same seqs, in order and without repeats, and the outputs of those that succeeded have the bytes that their SHA-256
says. A server whose process has survived holds no more than before. Nothing is left of one that has ended.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator

import grpc

from omni_grpc.v1 import event_pb2, job_pb2

from ..clients import AWAY, Client
from ..ledger import ENDED, Known, Ledger
from ..lives import Life
from ..server import rss_bytes
from .crowd import make
from .machine import blocks_of, files_of, session_of, until
from .stage import Stage

END_SECONDS = 60.0
"""What the jobs that are left get to end, once the fault is over."""
GONE_SECONDS = 15.0
"""What is left of a server that has ended gets to end."""
GROWTH_BYTES = 96 << 20
GROWTH_FILES = 32
KEPT = 10
"""Jobs that are looked at after the next fault too."""
ENDS = ("completed", "failed", "cancelled")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holds:
    """What a server holds: memory in bytes, open files, and the processes of its session."""

    pid: int
    rss: int
    files: int
    processes: int


def holds(stage: Stage) -> Holds:
    pid = stage.life.pid
    return Holds(pid=pid, rss=rss_bytes(pid), files=files_of(pid), processes=len(session_of(pid)))


def recovered(stage: Stage, seconds: float) -> float | None:
    """Seconds until a new job was taken and done; None where that takes longer than `seconds`."""
    began = time.monotonic()
    client = Client(stage.address)
    request = make(stage.model, stage.chance, (2, 2))
    try:
        while time.monotonic() < began + seconds:
            try:
                job = client.jobs.CreateJob(request, timeout=2).job
                stage.ledger.acknowledge(request, client.jobs.CreateJob(request, timeout=2))
                for message in client.jobs.WatchJob(_watch(job.job_id), timeout=seconds):
                    if message.event.WhichOneof("event") == "completed":
                        return time.monotonic() - began
                    if message.event.WhichOneof("event") == "failed":
                        # it was taken by a worker that was about to die: send it again
                        request = make(stage.model, stage.chance, (2, 2))
            except grpc.RpcError:
                # it is away still
                time.sleep(0.05)
        return None
    finally:
        client.close()


def _watch(job_id: str) -> job_pb2.WatchJobRequest:
    return job_pb2.WatchJobRequest(job_id=job_id)


class Checker:
    """Counts jobs, and those that were lost, over the rounds of a fault."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.jobs = 0
        self.lost = 0
        self.ends: dict[str, int] = {}
        self._looked: set[str] = set()

    def check(self, before: Holds) -> None:
        """After a fault: what its ledger says must be so. Those that were looked at are let go of, but for KEPT."""
        ledger = self._stage.ledger
        client = Client(self._stage.address)
        try:
            self._resend(client, ledger)
            self._wait(client, ledger)
            for known in ledger.some(lambda known: True):
                for problem in self._look_at(client, known):
                    ledger.report(problem)
        except grpc.RpcError as error:
            ledger.report(f"the server cannot be asked: {error.code()}: {error.details()}")  # type: ignore[attr-defined]
        finally:
            client.close()
        with ledger.lock:
            for job_id in list(ledger.jobs)[:-KEPT]:
                del ledger.jobs[job_id]
        for problem in self._resources(before):
            ledger.report(problem)

    def _resend(self, client: Client, ledger: Ledger) -> None:
        """Requests whose answer did not come are sent again: each is one job."""
        with ledger.lock:
            unanswered, ledger.unanswered = ledger.unanswered, []
        for request in unanswered:
            ledger.acknowledge(request, client.create(request))

    def _wait(self, client: Client, ledger: Ledger) -> None:
        end = time.monotonic() + END_SECONDS
        for known in ledger.some(lambda known: known.ended is None):
            while time.monotonic() < end:
                try:
                    if (job := client.job(known.job_id)).state in ENDED:
                        ledger.report(known.see_end(job.state, job.artifacts))
                        break
                except grpc.RpcError as error:
                    if error.code() not in AWAY:  # type: ignore[attr-defined]
                        # `_look_at` says what is wrong
                        break
                time.sleep(0.05)

    def _look_at(self, client: Client, known: Known) -> Iterator[str]:
        new = known.job_id not in self._looked
        self._looked.add(known.job_id)
        self.jobs += new
        try:
            job = client.job(known.job_id)
        except grpc.RpcError as error:
            self.lost += 1
            yield f"{known.job_id}: is lost: {error.code()}: {error.details()}"  # type: ignore[attr-defined]
            return
        if job.state not in ENDED:
            self.lost += 1
            yield f"{known.job_id}: does not end, and is {event_pb2.JobState.Name(job.state)}"
            return
        if problem := known.see_end(job.state, job.artifacts):
            yield problem
        log = list(client.watch(known.job_id))
        yield from known.replayed(log)
        ends = [event.WhichOneof("event") for event in log if event.WhichOneof("event") in ENDS]
        if len(ends) != 1 or log[-1].WhichOneof("event") != ends[0]:
            yield f"{known.job_id}: its log has the ends {ends}, and the last event is {log[-1].WhichOneof('event')}"
        if new:
            self.ends[ends[-1] or ""] = self.ends.get(ends[-1] or "", 0) + 1
        for artifact_id, sha256 in known.artifacts.items():
            if client.download(artifact_id) != sha256:
                yield f"{known.job_id}: {artifact_id} has other bytes than its SHA-256 says"

    def _resources(self, before: Holds) -> Iterator[str]:
        stage = self._stage
        blocks = functools.partial(blocks_of, stage.life.pid, stage.life.began, stage.root)
        if not until(lambda: not blocks(), 5):
            yield f"blocks of shared memory are left: {blocks()[:3]}"
        if before.pid != stage.life.pid:
            return
        if not until(lambda: holds(stage).processes <= before.processes, 5):
            yield f"{holds(stage).processes} processes, and {before.processes} before"
        if not until(lambda: holds(stage).files <= before.files + GROWTH_FILES, 10):
            yield f"{holds(stage).files} open files, and {before.files} before"
        if (now := holds(stage).rss) > before.rss + GROWTH_BYTES:
            yield f"the server takes {now >> 20} MiB, and {before.rss >> 20} before"


def left_behind(life: Life) -> Iterator[str]:
    """What is wrong with the end of a server: processes of its session and blocks that outlive it."""
    if not until(lambda: not session_of(life.pid), GONE_SECONDS):
        yield f"processes of a server that has ended are left: {session_of(life.pid)}"
    if not until(lambda: not blocks_of(life.pid, life.began), 5):
        yield f"blocks of a server that has ended are left: {blocks_of(life.pid, life.began)[:3]}"
