"""A server is killed again and again under load, with all its processes, and started anew: what its clients were told
must still be so.

After each start every job that was acknowledged and not deleted is looked at: whether it is there; whether it ended as
it was seen to end, with outputs of the same SHA-256; whether its log has what watchers had seen, with the same seqs;
whether it goes on or has failed by its `on_server_restart`; whether those that waited start in order of creation;
whether a `request_id` gives the same job. With jobs in memory all of them are lost, and GetServerInfo says so before.

A part of the kills comes while the server starts. `fake` workers have no model, all else is the server that users run;
`real` is the worker of the bundled model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from omni_grpc.v1 import event_pb2

from .clients import Client, Crowd, Habits, delete, repeat
from .ledger import ENDED, Known, Ledger, was_lost
from .lives import FSYNC, POSTGRESQL, QUICK, REAL, SQLITE, Life, Place, place
from .report import Result, spread

HABITS: Mapping[str, Habits] = {
    QUICK: Habits(),
    REAL: Habits(model="demo", steps=(1, 6), inputs=0.0, open_jobs=12, size=128),
}
END_SECONDS = 120.0
"""What the jobs that are left get to end, once nobody kills any more."""
LEASE = 1.0
"""Seconds after which a server of PostgreSQL counts as lost: until then nobody may have its jobs."""
FLAGS = (
    *("--lease-seconds", f"{LEASE:g}", "--retention", "86400", "--max-queue", "4096"),
    *("--max-num-seqs", "4", "--restart-backoff", "0"),
)

COUNTED = (
    "kills during the start",
    "acknowledged",
    "looks",
    "ended before",
    "ended unseen",
    "waited on",
    "started over",
    "failed by policy",
    "lost",
    "deleted",
    "deleted, and still gone",
    "downloads",
    "neighbors in the queue",
    "repeated requests",
    "unanswered requests",
    "unanswered requests that had made a job",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """`longest`: most seconds from the start of the load to a kill. `starting`: the part of the kills that come while
    the server starts. `state_url`: an empty database of PostgreSQL; without it, one is started.
    """

    kills: int = 20
    store: str = SQLITE
    worker: str = QUICK
    state_url: str = ""
    longest: float = 1.2
    starting: float = 0.1
    seed: int = 0


def run(checkpoint: Path) -> Result:
    return measure(Numbers())


def measure(numbers: Numbers) -> Result:
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(place(numbers.store, numbers.state_url))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omni-restarts-")))
        return _Course(numbers, where, folder / "log").result()


class _Course:
    """All lives of one server, and what its clients know."""

    def __init__(self, numbers: Numbers, where: Place, log: Path) -> None:
        self._numbers = numbers
        self._where = where
        self._log = log
        self._ledger = Ledger()
        self._habits = dataclasses.replace(HABITS[numbers.worker], durable=where.durable)
        self._chance = random.Random(numbers.seed)
        self._starts: list[float] = []
        self._waiting: list[Known] = []
        """Those that waited when the server had started."""
        self._born = 0.0
        self._died = 0.0
        self._kills = 0

    def result(self) -> Result:
        try:
            while self._kills < self._numbers.kills:
                if self._kills and self._chance.random() < self._numbers.starting:
                    self._kill_early()
                else:
                    self._live()
            self._last_life()
        except grpc.RpcError as error:
            # what was found until then is not lost with it
            self._ledger.report(f"ended after {self._kills} kills: {error.code()}: {error.details()}")  # type: ignore[attr-defined]
        return self._result()

    def _last_life(self) -> None:
        life, client = self._start()
        try:
            self._ending(client)
        finally:
            client.close()
            life.kill()

    # --- lives --------------------------------------------------------------------------------------------------------

    def _life(self) -> Life:
        return Life(self._numbers.worker, (*FLAGS, *self._where.flags), self._log, {})

    def _kill(self, life: Life) -> None:
        life.kill()
        self._kills += 1
        self._died = time.monotonic()

    def _kill_early(self) -> None:
        """Kills a server while it starts: also among its first words to the store."""
        life = self._life()
        usual = self._starts[-1] if self._starts else 2.0
        life.address(self._chance.uniform(0.2, 1.0) * usual)
        self._kill(life)
        self._ledger.counts["kills during the start"] += 1

    def _live(self) -> None:
        life, client = self._start()
        crowd = Crowd(client.address, self._ledger, self._habits, self._kills)
        try:
            crowd.start()
            time.sleep(self._chance.uniform(0.05, self._numbers.longest))
        finally:
            self._kill(life)
        crowd.stop()
        client.close()

    def _start(self) -> tuple[Life, Client]:
        """A server that takes jobs and has everything that it must have."""
        began = time.monotonic()
        life = self._life()
        try:
            address = life.address()
            if address is None:
                raise RuntimeError("the server did not start")
            self._starts.append(time.monotonic() - began)
            client = Client(address)
            said = client.storage()
            if (said.durable, said.rows) != (self._where.durable, self._where.store):
                self._ledger.report(f"GetServerInfo says of where jobs are kept: {said}")
            if self._where.store == POSTGRESQL:
                # until its lease is over, and the next look at leases
                time.sleep(max(0.0, self._died + 1.25 * LEASE + 0.3 - time.monotonic()))
            self._verify(client)
        except BaseException:
            life.kill()
            raise
        self._born = life.began
        return life, client

    # --- what must hold -----------------------------------------------------------------------------------------------

    def _verify(self, client: Client) -> None:
        waited, self._waiting = self._waiting, []
        if not self._where.durable:
            self._ledger.assets.clear()
        for known in self._ledger.some(lambda known: True):
            self._look_at(client, known)
        self._check_order(waited)
        self._repeat(client)
        self._trim(client)

    def _look_at(self, client: Client, known: Known) -> None:
        ledger = self._ledger
        ledger.counts["looks"] += 1
        try:
            job = client.job(known.job_id)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:  # type: ignore[attr-defined]
                raise
            self._forget(known)
            return
        if "delete" in known.told:
            ledger.report(f"{known.job_id}: was deleted, and is there")
        before, ran, had_ended = known.restarts, known.started, known.ended is not None
        for problem in known.replayed(client.log(known.job_id, job.last_seq)):
            ledger.report(problem)
        if job.state in ENDED:
            ledger.report(known.see_end(job.state, job.artifacts))
            self._check_outputs(client, known)
        elif had_ended:
            ledger.report(f"{known.job_id}: had ended, and is {event_pb2.JobState.Name(job.state)}")
        if had_ended:
            ledger.counts["ended before"] += 1
            return
        if "cancel" in known.told and job.state != event_pb2.JOB_STATE_CANCELLED:
            ledger.report(f"{known.job_id}: was cancelled, and is {event_pb2.JobState.Name(job.state)}")
        self._check_policy(
            known, ran=ran, failed=was_lost(job), again=known.restarts > before, ended=job.state in ENDED
        )
        if job.state not in ENDED:
            self._waiting.append(known)

    def _forget(self, known: Known) -> None:
        if "delete" in known.asked:
            self._ledger.counts["deleted, and still gone"] += 1
        else:
            self._ledger.counts["lost"] += 1
            if self._where.durable:
                self._ledger.report(f"{known.job_id}: is lost")
        with self._ledger.lock:
            del self._ledger.jobs[known.job_id]

    def _check_policy(self, known: Known, *, ran: bool, failed: bool, again: bool, ended: bool) -> None:
        ledger = self._ledger
        started_over = known.restarts - again
        if failed:
            ledger.counts["failed by policy"] += 1
            if known.requeues and not started_over and not known.restarts:
                ledger.report(f"{known.job_id}: failed with its server, and was to be queued again")
        elif again:
            ledger.counts["started over"] += 1
            if not known.requeues:
                ledger.report(f"{known.job_id}: was queued again, and was to fail")
        elif ended:
            ledger.counts["ended unseen"] += 1
        else:
            ledger.counts["waited on"] += 1
            if ran:
                ledger.report(f"{known.job_id}: had started, and waits as if it had not")

    def _check_outputs(self, client: Client, known: Known) -> None:
        if known.downloaded and self._chance.random() > 0.1:
            return
        known.downloaded = True
        for artifact_id, sha256 in known.artifacts.items():
            self._ledger.counts["downloads"] += 1
            if client.download(artifact_id) != sha256:
                self._ledger.report(f"{known.job_id}: {artifact_id} has other bytes than its SHA-256 says")

    def _check_order(self, waited: Sequence[Known]) -> None:
        """Of jobs that waited when the server had started before, whether they started in order of creation."""
        order: list[tuple[Known, int | None]] = []
        for known in sorted(waited, key=lambda known: (known.create_time, known.job_id)):
            starts = [event.time.ToNanoseconds() for event in known.events.values() if event.HasField("started")]
            began = next((at for at in sorted(starts) if at / 1e9 >= self._born), None)
            if began is not None or known.ended is None:
                order.append((known, began))
        for (first, one), (second, two) in itertools.pairwise(order):
            self._ledger.counts["neighbors in the queue"] += 1
            if two is not None and (one is None or one > two):
                self._ledger.report(f"{second.job_id} started before {first.job_id}, which was created before it")

    def _repeat(self, client: Client) -> None:
        """Requests whose reply did not come are sent again, and so are some that were acknowledged."""
        with self._ledger.lock:
            unanswered, self._ledger.unanswered = self._ledger.unanswered, []
        for request in unanswered:
            response = client.create(request)
            self._ledger.counts["unanswered requests"] += 1
            self._ledger.counts["unanswered requests that had made a job"] += response.deduplicated
            self._ledger.acknowledge(request, response)
        for known in self._ledger.some(lambda known: bool(known.request_id) and not known.asked & {"delete"})[-10:]:
            repeat(client, self._ledger, known)

    def _trim(self, client: Client) -> None:
        """Deletes the oldest jobs that have ended, beyond those that are to be looked at after the next kill."""
        found = self._ledger.some(lambda known: known.ended is not None and "delete" not in known.asked)
        for known in found[: max(0, len(found) - self._habits.ended_jobs)]:
            delete(client, self._ledger, known)

    def _ending(self, client: Client) -> None:
        """Nobody kills any more: all that is left must end."""
        until = time.monotonic() + END_SECONDS
        left = self._ledger.some(lambda known: known.ended is None)
        while left and time.monotonic() < until:
            time.sleep(0.1)
            for known in left:
                job = client.job(known.job_id)
                if job.state in ENDED:
                    self._ledger.report(known.see_end(job.state, job.artifacts))
            left = [known for known in left if known.ended is None]
        for known in left:
            self._ledger.report(f"{known.job_id} does not end")
        for known in self._ledger.some(lambda known: known.ended is not None and "delete" not in known.asked):
            known.downloaded = False
            for problem in known.replayed(client.log(known.job_id, client.job(known.job_id).last_seq)):
                self._ledger.report(problem)
            self._check_outputs(client, known)

    # --- the report ---------------------------------------------------------------------------------------------------

    def _result(self) -> Result:
        counts, numbers = self._ledger.counts, self._numbers
        rows = [
            ("store", f"{numbers.store} ({FSYNC[numbers.store]})"),
            ("worker", numbers.worker),
            *((name, str(counts[name])) for name in COUNTED),
            ("start of the process to the first job that is taken", spread(self._starts, "s", 2)),
            ("promises broken", str(len(self._ledger.problems))),
        ]
        figures: dict[str, Any] = {
            "numbers": dataclasses.asdict(numbers) | {"state_url": bool(numbers.state_url)},
            "fsync": FSYNC[numbers.store],
            "kills": self._kills,
            "counts": dict(sorted(counts.items())),
            "start_seconds": spread(self._starts, "s", 3),
        }
        return Result(
            columns=("what", f"of {self._kills} kills"),
            rows=rows,
            figures=figures,
            problems=list(dict.fromkeys(self._ledger.problems))[:50],
            variant=f"{numbers.store}-{numbers.worker}",
            arguments=f"--kills {numbers.kills} --store {numbers.store} --worker {numbers.worker}",
        )
