"""Clients that make jobs, watch, cancel, delete and repeat them until their server is killed. Each is a thread with a
connection of its own; what they are told goes into the ledger.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import grpc
import PIL.Image

from omni_grpc.client.channel import DIRECT
from omni_grpc.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    artifact_pb2,
    artifact_pb2_grpc,
    event_pb2,
    generation_pb2,
    job_pb2,
    job_pb2_grpc,
    media_pb2,
    options_pb2,
)

from .ledger import ENDED, Known, Ledger

AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
"""What a call ends with whose server is killed."""
CALL_SECONDS = 30.0
POLICIES = (options_pb2.RESTART_POLICY_FAIL, options_pb2.RESTART_POLICY_REQUEUE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Habits:
    """What clients do. `open_jobs`: those that have not ended, above which nobody makes more; `ended_jobs`: those
    above which the oldest are deleted; `steps`: at least and at most; `inputs`: the part of jobs that edit an image.
    """

    creators: int = 4
    watchers: int = 4
    open_jobs: int = 20
    ended_jobs: int = 20
    steps: tuple[int, int] = (2, 40)
    inputs: float = 0.1
    size: int = 64
    model: str = "quick"
    durable: bool = True


class Client:
    """A connection that no other client shares."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1), *DIRECT))
        self.jobs = job_pb2_grpc.JobServiceStub(self.channel)
        self.artifacts = artifact_pb2_grpc.ArtifactServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    def create(self, request: job_pb2.CreateJobRequest) -> job_pb2.CreateJobResponse:
        response: job_pb2.CreateJobResponse = self.jobs.CreateJob(request, timeout=CALL_SECONDS)
        return response

    def job(self, job_id: str) -> job_pb2.Job:
        job: job_pb2.Job = self.jobs.GetJob(job_pb2.GetJobRequest(job_id=job_id), timeout=CALL_SECONDS).job
        return job

    def watch(self, job_id: str, after_seq: int = 0) -> Iterator[event_pb2.JobEvent]:
        """To the end of the job. Heartbeats are left out."""
        for message in self.jobs.WatchJob(job_pb2.WatchJobRequest(job_id=job_id, after_seq=after_seq)):
            if message.event.seq:
                yield message.event

    def log(self, job_id: str, last_seq: int) -> list[event_pb2.JobEvent]:
        """The events up to this seq: those that are there, without waiting for more."""
        events = []
        call = self.jobs.WatchJob(job_pb2.WatchJobRequest(job_id=job_id), timeout=CALL_SECONDS)
        for message in call:
            if message.event.seq and message.event.seq <= last_seq:
                events.append(message.event)
            if message.event.seq >= last_seq:
                call.cancel()
                break
        return events

    def download(self, artifact_id: str) -> bytes:
        """The SHA-256 of an output's bytes."""
        found = hashlib.sha256()
        asked = artifact_pb2.DownloadArtifactRequest(artifact_id=artifact_id)
        for message in self.artifacts.DownloadArtifact(asked, timeout=CALL_SECONDS):
            found.update(message.chunk.data)
        return found.digest()

    def upload(self, data: bytes) -> str:
        header = artifact_pb2.UploadHeader(mime_type="image/png", size_bytes=len(data))
        parts = [artifact_pb2.UploadAssetRequest(header=header), artifact_pb2.UploadAssetRequest(data=data)]
        asset_id: str = self.artifacts.UploadAsset(iter(parts), timeout=CALL_SECONDS).asset_id
        return asset_id

    def storage(self) -> admin_pb2.StorageInfo:
        """What the server says of where jobs are kept."""
        asked = admin_pb2.GetServerInfoRequest()
        storage: admin_pb2.StorageInfo = self.admin.GetServerInfo(asked, timeout=CALL_SECONDS).storage
        return storage

    def close(self) -> None:
        self.channel.close()


class Crowd:
    """The clients of one life of a server. They end by themselves when it is killed."""

    def __init__(self, address: str, ledger: Ledger, habits: Habits, seed: int) -> None:
        self._address = address
        self._ledger = ledger
        self._habits = habits
        self._over = threading.Event()
        self._seed = seed
        self._watched: set[str] = set()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        creators = [(self._create, 0.01)] * self._habits.creators
        watchers = [(self._watch, 0.01)] * self._habits.watchers
        others = [(self._cancel, 0.05), (self._delete, 0.02), (self._look, 0.01), (self._repeat, 0.05)]
        for number, (act, pause) in enumerate([*creators, *watchers, *others]):
            chance = random.Random(1000 * self._seed + number)
            thread = threading.Thread(target=self._run, args=(act, pause, chance), name=act.__name__)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Returns when all have ended, which a watcher does only with its job or its server."""
        self._over.set()
        for thread in self._threads:
            thread.join(2 * CALL_SECONDS)
            if thread.is_alive():
                self._ledger.report(f"a client ({thread.name}) still waits for a server that is gone")

    def _run(self, act: Callable[[Client, random.Random], None], pause: float, chance: random.Random) -> None:
        client = Client(self._address)
        try:
            while not self._over.is_set():
                act(client, chance)
                self._over.wait(chance.uniform(0, 2 * pause))
        except grpc.RpcError as error:
            if error.code() not in AWAY:  # type: ignore[attr-defined]
                self._ledger.report(f"{act.__name__}: {error.code()}: {error.details()}")  # type: ignore[attr-defined]
        finally:
            client.close()

    def _gone(self, known: Known, error: grpc.RpcError) -> None:
        """Another client was about to delete the job. Raises any other error."""
        if error.code() is not grpc.StatusCode.NOT_FOUND or "delete" not in known.asked:  # type: ignore[attr-defined]
            raise error

    def _create(self, client: Client, chance: random.Random) -> None:
        if len(self._ledger.some(lambda known: known.ended is None)) >= self._habits.open_jobs:
            return
        if self._habits.inputs and chance.random() < 0.03:
            data = picture(chance.randrange(1 << 20))
            asset_id = client.upload(data)
            with self._ledger.lock:
                self._ledger.assets[asset_id] = data
        request = make(self._habits, chance, list(self._ledger.assets))
        try:
            self._ledger.acknowledge(request, client.create(request))
        except grpc.RpcError as error:
            if _options_of(request).request_id and error.code() in AWAY:  # type: ignore[attr-defined]
                with self._ledger.lock:
                    self._ledger.unanswered.append(request)
            raise

    def _watch(self, client: Client, chance: random.Random) -> None:
        with self._ledger.lock:
            free = [known for known in self._ledger.jobs.values() if known.ended is None]
            free = [known for known in free if known.job_id not in self._watched]
            if not free:
                return
            known = chance.choice(free)
            self._watched.add(known.job_id)
        for event in client.watch(known.job_id, known.last_seq):
            self._ledger.report(known.see(event))
        if known.ended is None:
            self._ledger.report(f"{known.job_id}: its stream ended without an end of the job")

    def _cancel(self, client: Client, chance: random.Random) -> None:
        if not (found := self._ledger.some(lambda known: known.ended is None)) or chance.random() < 0.5:
            return
        known = chance.choice(found)
        known.asked.add("cancel")
        job = client.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=known.job_id), timeout=CALL_SECONDS).job
        known.told.add("cancel")
        if job.state not in ENDED:
            self._ledger.report(f"{known.job_id}: is {job.state} after it was cancelled")
        self._ledger.report(known.see_end(job.state, job.artifacts))

    def _delete(self, client: Client, chance: random.Random) -> None:
        found = self._ledger.some(lambda known: known.ended is not None and "delete" not in known.asked)
        if len(found) <= self._habits.ended_jobs:
            return
        delete(client, self._ledger, found[0])

    def _look(self, client: Client, chance: random.Random) -> None:
        found = self._ledger.some(lambda known: "delete" not in known.asked)
        if not found:
            return
        known = chance.choice(found)
        try:
            job = client.job(known.job_id)
        except grpc.RpcError as error:
            self._gone(known, error)
            return
        if job.state in ENDED:
            self._ledger.report(known.see_end(job.state, job.artifacts))

    def _repeat(self, client: Client, chance: random.Random) -> None:
        found = self._ledger.some(lambda known: bool(known.request_id) and "delete" not in known.asked)
        if found:
            repeat(client, self._ledger, chance.choice(found[-20:]))


def repeat(client: Client, ledger: Ledger, known: Known) -> None:
    """Sends a request again: it must give the same job."""
    response = client.create(known.request)
    ledger.counts["repeated requests"] += 1
    if (response.job.job_id != known.job_id or not response.deduplicated) and "delete" not in known.asked:
        ledger.report(f"{known.job_id}: its request_id gave another job, {response.job.job_id}")


def delete(client: Client, ledger: Ledger, known: Known) -> None:
    """Deletes a job that has ended."""
    known.asked.add("delete")
    client.jobs.DeleteJob(job_pb2.DeleteJobRequest(job_id=known.job_id), timeout=CALL_SECONDS)
    known.told.add("delete")
    ledger.counts["deleted"] += 1


def make(habits: Habits, chance: random.Random, assets: Sequence[str]) -> job_pb2.CreateJobRequest:
    """A request of any kind."""
    options = options_pb2.JobOptions(on_disconnect=options_pb2.DISCONNECT_POLICY_KEEP)
    if chance.random() < 0.6:
        options.request_id = f"{time.time_ns()}-{chance.getrandbits(64)}"
    if habits.durable:
        options.on_server_restart = chance.choice(POLICIES)
    sampling = {"steps": chance.randint(*habits.steps), "seed": chance.randrange(1 << 31)}
    values = {"model": habits.model, "prompt": "a red circle", "sampling": sampling, "options": options}
    if chance.random() < habits.inputs:
        known = assets and chance.random() < 0.5
        image = media_pb2.MediaInput(asset_id=chance.choice(assets)) if known else media_pb2.MediaInput(data=picture(1))
        return job_pb2.CreateJobRequest(edit_image=generation_pb2.EditImageRequest(images=[image], **values))
    image_request = generation_pb2.GenerateImageRequest(width=habits.size, height=habits.size, **values)
    return job_pb2.CreateJobRequest(generate_image=image_request)


def picture(seed: int) -> bytes:
    """A small PNG."""
    out = io.BytesIO()
    PIL.Image.frombytes("RGB", (32, 32), random.Random(seed).randbytes(32 * 32 * 3)).save(out, "PNG")
    return out.getvalue()


def _options_of(request: job_pb2.CreateJobRequest) -> options_pb2.JobOptions:
    options: options_pb2.JobOptions = getattr(request, request.WhichOneof("task") or "").options
    return options
