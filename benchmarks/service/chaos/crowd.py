"""Clients that come back: they send a request again under its `request_id`, and watch on behind the last seq they saw.

Each is a thread with a connection of its own, as are the clients of `benchmarks.service.clients`, which end with their
server instead. What they are told goes into the ledger.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Collection, Iterator

import grpc

from omni_grpc.v1 import generation_pb2, job_pb2, options_pb2

from ..clients import AWAY, POLICIES, Client
from ..ledger import Known, Ledger

PATIENT = (*AWAY, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""What a client that comes back tries again after: the server is away, silent, or full."""
WATCH_SECONDS = 20.0
"""Longest stream: behind it the client watches on, so that it waits for no connection that is dead."""
CALL_SECONDS = 20.0
PAUSE = 0.2
"""Seconds before a client tries again."""


class Crowd:
    """`clients` make a job each, watch it to its end, and go on; one more makes jobs that nobody watches, up to
    `waiting` that have not ended. `broken`: streams and calls that did not get through, by what they ended with.
    """

    def __init__(
        self,
        address: str,
        ledger: Ledger,
        *,
        model: str,
        clients: int,
        waiting: int,
        steps: tuple[int, int],
        seed: int = 0,
        also: Collection[grpc.StatusCode] = (),
    ) -> None:
        """`also`: codes that a client bears beside those of PATIENT."""
        self._address = address
        self._ledger = ledger
        self._model = model
        self._waiting = waiting
        self._steps = steps
        self._also = frozenset(also)
        self._over = threading.Event()
        self.broken = 0
        acts = [self._one_watched] * clients + [self._one_unwatched] * bool(waiting)
        self._threads = [
            threading.Thread(target=self._run, args=(act, random.Random(f"{seed} {index}")), daemon=True)
            for index, act in enumerate(acts)
        ]

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(2 * WATCH_SECONDS)
                if thread.is_alive():
                    self._ledger.report("a client's call hangs")

    def _run(self, act: object, chance: random.Random) -> None:
        client = Client(self._address)
        try:
            while not self._over.is_set():
                act(client, chance)  # type: ignore[operator]
        except grpc.RpcError as error:
            self._ledger.report(f"{act.__name__}: {error.code()}: {error.details()}")  # type: ignore[attr-defined]
        finally:
            client.close()

    def _one_watched(self, client: Client, chance: random.Random) -> None:
        known = self._create(client, chance)
        if known is None:
            return
        while known.ended is None and not self._over.is_set():
            if chance.random() < 0.02:
                self._cancel(client, known)
            with self._patient():
                watch_on(client, self._ledger, known)

    def _one_unwatched(self, client: Client, chance: random.Random) -> None:
        if len(self._ledger.some(lambda known: known.ended is None)) < self._waiting:
            self._create(client, chance)
        self._over.wait(0.05)

    def _create(self, client: Client, chance: random.Random) -> Known | None:
        request = make(self._model, chance, self._steps)
        while not self._over.is_set():
            with self._patient():
                return self._ledger.acknowledge(request, client.jobs.CreateJob(request, timeout=CALL_SECONDS))
        # it may have made a job all the same
        with self._ledger.lock:
            self._ledger.unanswered.append(request)
        return None

    def _cancel(self, client: Client, known: Known) -> None:
        known.asked.add("cancel")
        with self._patient():
            client.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=known.job_id), timeout=CALL_SECONDS)

    @contextlib.contextmanager
    def _patient(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except grpc.RpcError as error:
            if error.code() not in PATIENT and error.code() not in self._also:  # type: ignore[attr-defined]
                raise
            # a stream that has lasted for as long as it was to is not broken; where the server is the first to see that
            # its time is up, it ends as cancelled
            over = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
            self.broken += not (over or time.monotonic() - began > WATCH_SECONDS - 1)
            self._over.wait(PAUSE)


def watch_on(client: Client, ledger: Ledger, known: Known) -> None:
    """Watches a job from the last seq that was seen, for WATCH_SECONDS at most. Within the stream every seq is greater
    than the one before.
    """
    last = known.last_seq
    call = client.jobs.WatchJob(job_pb2.WatchJobRequest(job_id=known.job_id, after_seq=last), timeout=WATCH_SECONDS)
    for message in call:
        event = message.event
        if not event.seq:
            continue
        if event.seq <= last:
            ledger.report(f"{known.job_id}: seq {event.seq} came behind {last} of one stream")
        last = event.seq
        ledger.report(known.see(event))
    if known.ended is None:
        ledger.report(f"{known.job_id}: its stream ended well, and not the job")


def make(model: str, chance: random.Random, steps: tuple[int, int]) -> job_pb2.CreateJobRequest:
    """A request that can be sent again."""
    options = options_pb2.JobOptions(
        on_disconnect=options_pb2.DISCONNECT_POLICY_KEEP,
        on_server_restart=chance.choice(POLICIES),
        request_id=f"{time.time_ns()}-{chance.getrandbits(64)}",
    )
    sampling = {"steps": chance.randint(*steps), "seed": chance.randrange(1 << 31)}
    image = generation_pb2.GenerateImageRequest(
        model=model, prompt="a red circle", width=64, height=64, sampling=sampling, options=options
    )
    return job_pb2.CreateJobRequest(generate_image=image)
