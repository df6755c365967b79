"""What an engine does with its replicas as a whole: pause, sleep, wake, and start one after the other anew."""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Sequence

from omni_grpc.config import EngineConfig
from omni_grpc.engine.executor import Executor
from omni_grpc.engine.holding import Holding
from omni_grpc.engine.inputs import InputStore
from omni_grpc.engine.profiling import Profiling
from omni_grpc.engine.replica import Replica, ReplicaState
from omni_grpc.store.storage import Storage
from omni_grpc.types.errors import Code, FailedPrecondition, Failure, NotFound, Unavailable
from omni_grpc.types.plan import Report, SleepLevel
from omni_grpc.types.spec import Checkpoint

logger = logging.getLogger(__name__)

DRAIN = "drain"
"""Name of the timer of a replica that ends what it has."""


class Resting(Holding, abc.ABC):
    """Replicas that stop for a while. What waits in the queue goes on waiting."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        executors: Sequence[Executor],
        storage: Storage | None = None,
        inputs: InputStore | None = None,
    ) -> None:
        super().__init__(config, checkpoint, executors, storage, inputs)
        self._quiet = asyncio.Event()
        self._renewals: set[asyncio.Task[None]] = set()
        self.profiling = Profiling(self._replicas, config.parallel.sizes.world, self._timers, self._outputs.take)
        self.on_end.append(self.profiling.job_ended)
        self.adapters.on_lost = lambda wanted: self.fail_without()

    @abc.abstractmethod
    def _on_report(self, replica: Replica, report: Report) -> None:
        """What a worker says."""

    @abc.abstractmethod
    def _follow_replicas(self) -> None:
        """Takes over the state that follows from those of the replicas."""

    @property
    def ending(self) -> bool:
        """Whether it ends for good."""
        return False

    @property
    def asleep(self) -> bool:
        """Whether its device memory is given back, or about to be."""
        return all(replica.resting for replica in self._replicas)

    @property
    def device_bytes(self) -> int:
        """Of the weights of one replica, what is in device memory while it is awake; 0 before that is known."""
        return max((one.ready.device_bytes for one in self._replicas if one.ready is not None), default=0)

    def pause(self) -> None:
        """From now on nothing leaves the queue. What runs goes on."""
        for replica in self._replicas:
            replica.pause(True)

    def unpause(self) -> None:
        """Goes on after a pause."""
        for replica in self._replicas:
            replica.pause(False)
        self._tick()

    async def sleep(self, level: SleepLevel) -> int:
        """Lets what runs end, then has every worker give its device memory back. Returns the bytes. What cannot sleep
        raises why, and all replicas are awake.
        """
        self.pause()
        try:
            self._look_for_quiet()
            await self._quiet.wait()
            if self.ending:
                raise Unavailable("the server is stopping", reason="SERVER_STOPPED")
            for replica in self._replicas:
                self._timers.clear_all(replica.owner)
            found = await asyncio.gather(*(one.sleep(level) for one in self._replicas), return_exceptions=True)
            if errors := [one for one in found if isinstance(one, BaseException)]:
                await self._wake_all()
                raise errors[0]
        except BaseException:
            self.unpause()
            raise
        finally:
            self._follow_replicas()
        freed = sum(one for one in found if isinstance(one, int))
        logger.info("model %s sleeps: %.1f GB given back", self.checkpoint.name, freed / 1e9)
        return freed

    async def wake(self) -> None:
        """Takes the device memory again. Raises what keeps every worker from that; those that are awake then work."""
        try:
            await self._wake_all()
        finally:
            self._follow_replicas()
        self.unpause()

    async def _wake_all(self) -> None:
        exclusive = self.checkpoint.spec.exclusive
        resting = [one for one in self._replicas if one.resting]
        woken = await asyncio.gather(
            *(one.wake(self._on_report, exclusive=exclusive) for one in resting), return_exceptions=True
        )
        errors = [one for one in woken if isinstance(one, BaseException)]
        for error in errors:
            logger.error("a worker of %s cannot be woken: %s", self.checkpoint.name, error)
        if errors and len(errors) == len(self._replicas):
            raise errors[0]
        # what was loaded while they slept
        await self.adapters.caught_up(resting)

    def renew(self, number: int, timeout: float) -> int:
        """Has one replica end what it has, for `timeout` seconds at most, and start anew; the others, and the queue, go
        on meanwhile. Returns the number of its jobs. Raises NotFound, and FailedPrecondition for one that is not ready.
        """
        if not 0 <= number < len(self._replicas):
            message = f"model {self.checkpoint.name!r} has no replica {number}: they are 0 to {len(self._replicas) - 1}"
            raise NotFound(message, reason="REPLICA_NOT_FOUND")
        replica = self._replicas[number]
        if replica.state not in (ReplicaState.READY, ReplicaState.DRAINING):
            raise FailedPrecondition(f"replica {number} is {replica.state}, not READY", reason="REPLICA_NOT_READY")
        replica.drain()
        running = len(replica.scheduler.held)
        self._timers.set(replica.owner, DRAIN, timeout, lambda *_: self._cut_short(replica))
        self._follow_replicas()
        self._tick()
        return running

    def _cut_short(self, replica: Replica) -> None:
        failure = _drained("before this job ended; send the request again")
        for job_id in replica.scheduler.held:
            if (run := self._runs.get(job_id)) is not None:
                self._fail(run, failure)
        self._tick()

    def _look_for_quiet(self) -> None:
        """To be called after each tick: sees who has nothing to do any more."""
        for replica in self._replicas:
            if replica.state is ReplicaState.DRAINING and replica.scheduler.quiet and not self.ending:
                replica.state = ReplicaState.RESTARTING
                self._timers.clear_all(replica.owner)
                renewal = asyncio.ensure_future(self._renew(replica))
                self._renewals.add(renewal)
                renewal.add_done_callback(self._renewals.discard)
        if all(replica.scheduler.quiet for replica in self._replicas):
            self._quiet.set()
        else:
            self._quiet.clear()

    async def _renew(self, replica: Replica) -> None:
        self._follow_replicas()
        await replica.executor.close()
        self.profiling.lost(replica, _drained("meanwhile"))
        self.adapters.lost(replica)
        if not self.ending and replica.state is ReplicaState.RESTARTING:
            self._begin_again(replica, "WORKER_DRAINED")
            logger.info("worker %d has ended what it had, and is started anew", replica.number)
            replica.scheduler.closed = replica.paused
            replica.start(self._on_report)


def _drained(when: str) -> Failure:
    message = f"the worker was started anew {when}"
    return Failure(code=Code.UNAVAILABLE, reason="WORKER_DRAINED", message=message)
