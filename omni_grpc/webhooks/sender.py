"""The sender: makes the attempts that are due, a few at a time, and writes down what became of them.

It lives by the store alone: what it has not written down when its process dies is done again, under the same id, by
whoever finds the claim run out. So everything is delivered at least once, and no two servers send the same at once.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping

from omni_grpc.outbound import Poster
from omni_grpc.store.records import Delivery
from omni_grpc.store.seam import Deliveries, StoreError
from omni_grpc.types.errors import OmniError
from omni_grpc.types.trace import TraceContext
from omni_grpc.webhooks.schedule import Schedule
from omni_grpc.webhooks.secrets_file import Secrets
from omni_grpc.webhooks.signature import signed

logger = logging.getLogger(__name__)

AT_ONCE = 8
"""Most attempts at the same time."""
PER_HOST = 2
"""Most of them to one host."""
FAILING = 4
"""Most of them to hosts that failed the last time, so that those which do not answer leave room for those which do."""
LOOK_EVERY = 1.0
"""Seconds between two looks whether something is due, where nobody says so before."""
FORGET_EVERY = 600.0
REMEMBER = 7 * 24 * 3600.0
"""How long an id is known after its end, in seconds: a state that a job enters again is not told of again."""
SETTLE = (0.2, 1.0, 3.0)
"""Pauses before the result of an attempt is written again, where the store cannot. In seconds."""
MARGIN = 30.0
"""How much longer than an attempt may take a claim holds, in seconds: for the store, and for clocks that differ."""
MOST_HOSTS = 4096
"""Hosts that failed that are remembered, the newest."""
GONE = 410
"""The status of a receiver that wants no more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """Why an attempt failed. `final`: there is to be no other one; `retry_after`: when its receiver wants one, in
    seconds.
    """

    reason: str
    final: bool = False
    retry_after: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt that was made. `trace` is its span, times are in Unix seconds. `status`: what the receiver answered
    with, None where it did not; `failed`: why it is no delivery, None where it is one. `outcome`: "delivered",
    "failed", or "given_up" for the last one.
    """

    delivery: Delivery
    trace: TraceContext | None
    began: float
    ended: float
    status: int | None
    failed: str | None
    outcome: str


class Sender:
    """Runs on one event loop, from `start` to `stop`."""

    def __init__(
        self,
        deliveries: Deliveries,
        poster: Poster,
        secrets: Callable[[], Awaitable[Secrets]],
        *,
        owner: str,
        timeout: float,
        schedule: Schedule,
        clock: Callable[[], float],
        look_every: float = LOOK_EVERY,
    ) -> None:
        """`owner` claims; no other server that is alive has the same name. `timeout`: seconds that an attempt may take.
        `clock`: Unix seconds. `look_every`: see LOOK_EVERY.
        """
        self._deliveries = deliveries
        self._poster = poster
        self._secrets = secrets
        self._owner = owner
        self._hold = timeout + MARGIN
        self._schedule = schedule
        self._clock = clock
        self._look_every = look_every
        self._woken = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._running: dict[asyncio.Task[None], str] = {}
        self._served: collections.Counter[str] = collections.Counter()
        self._turns = 0
        self._failing: dict[str, None] = {}
        self._forgot = float("-inf")
        self._store_away = False
        self.on_attempt: list[Callable[[Attempt], None]] = []
        """Observers, called on the loop after each attempt."""

    def start(self) -> None:
        self._loop = asyncio.create_task(self._run(), name="omni_grpc-webhooks")

    def wake(self) -> None:
        """Something may be due now."""
        self._woken.set()

    async def stop(self, grace: float) -> None:
        """Begins nothing more, gives attempts that are on their way so many seconds, and then gives back what it has
        claimed.
        """
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop])
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=grace)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        try:
            await self._deliveries.release(self._owner)
        except StoreError as error:
            logger.warning(
                "webhooks that are on their way wait for %.0f s, until their claim ends: %s", self._hold, error
            )

    # --- which --------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            try:
                while await self._begin_some():
                    pass
                await self._forget()
                # so that requests are checked by what the file says now, also while nothing is sent
                await self._secrets()
                self._store_away = False
            except StoreError as error:
                if not self._store_away:
                    logger.warning("webhooks wait for the store: %s", error)
                self._store_away = True
            except Exception:
                # a fault of ours: it ends neither the sender nor what is on its way
                logger.exception("webhooks could not be begun; they are looked at again")
            try:
                async with asyncio.timeout(self._look_every):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def _begin_some(self) -> bool:
        """Begins at most one attempt to each host that may have one more; whether there may be others to begin."""
        if len(self._running) >= AT_ONCE:
            return False
        now = self._clock()
        waiting = await self._deliveries.hosts(now)
        busy = collections.Counter(self._running.values())
        self._served = collections.Counter({host: self._served[host] for host in {*waiting, *busy}})
        begun = False
        # those that answered go before those that did not; among these, whoever was served longest ago
        for host in sorted(waiting, key=lambda host: (host in self._failing, self._served[host])):
            if not self._may_begin(host):
                continue
            until = now + self._hold
            for delivery in await self._deliveries.claim(host, now, owner=self._owner, until=until, limit=1):
                self._turns += 1
                self._served[host] = self._turns
                self._begin(delivery)
                begun = True
        return begun

    def _may_begin(self, host: str) -> bool:
        busy = collections.Counter(self._running.values())
        failing = sum(count for other, count in busy.items() if other in self._failing)
        return busy.total() < AT_ONCE and busy[host] < PER_HOST and (host not in self._failing or failing < FAILING)

    def _begin(self, delivery: Delivery) -> None:
        task = asyncio.create_task(self._deliver(delivery), name=f"omni_grpc-webhook-{delivery.id}")
        self._running[task] = delivery.host
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._woken.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a webhook could not be dealt with, and is tried again later", exc_info=error)

    async def _forget(self) -> None:
        now = self._clock()
        if now - self._forgot >= FORGET_EVERY:
            self._forgot = now
            await self._deliveries.forget(now - REMEMBER)

    # --- one attempt --------------------------------------------------------------------------------------------------

    async def _deliver(self, delivery: Delivery) -> None:
        # each attempt is a span of its own
        trace = None if delivery.trace is None else delivery.trace.child(f"{delivery.id}/{delivery.attempts}")
        began = self._clock()
        status, failed = await self._attempt(delivery, trace)
        made = functools.partial(
            Attempt,
            delivery=delivery,
            trace=trace,
            began=began,
            ended=self._clock(),
            status=status,
            failed=None if failed is None else failed.reason,
        )
        attempts = delivery.attempts + 1
        self._failing.pop(delivery.host, None)
        if failed is None:
            self._tell(made(outcome="delivered"))
            logger.info("told %s that job %s is %s", delivery.host, delivery.job_id, delivery.state)
            await self._settle(delivery, lambda: self._deliveries.done(delivery.id, self._clock(), attempts))
            return
        self._failing[delivery.host] = None
        if len(self._failing) > MOST_HOSTS:
            del self._failing[next(iter(self._failing))]
        await self._after(delivery, failed, attempts, made)

    async def _after(self, delivery: Delivery, failed: Failed, attempts: int, made: Callable[..., Attempt]) -> None:
        """Writes down when there is another attempt, or that there is none."""
        now = self._clock()
        due = None
        if not failed.final:
            due = self._schedule.due(
                attempts,
                created=delivery.create_time,
                now=now,
                chance=random.random(),
                retry_after=failed.retry_after,
            )
        what = f"{delivery.host} that job {delivery.job_id} is {delivery.state}"
        self._tell(made(outcome="given_up" if due is None else "failed"))
        if due is None:
            logger.warning("gave up telling %s, after %d attempts: %s", what, attempts, failed.reason)
            await self._settle(
                delivery,
                lambda: self._deliveries.give_up(delivery.id, now, attempts, failed.reason, owner=self._owner),
            )
            return
        again = f"attempt {attempts} of {self._schedule.attempts}; the next one is in {due - now:.0f} s"
        logger.info("could not tell %s: %s (%s)", what, failed.reason, again)
        await self._settle(
            delivery, lambda: self._deliveries.retry(delivery.id, due, attempts, failed.reason, owner=self._owner)
        )

    def _tell(self, attempt: Attempt) -> None:
        for observer in self.on_attempt:
            observer(attempt)

    async def _attempt(self, delivery: Delivery, trace: TraceContext | None) -> tuple[int | None, Failed | None]:
        """Makes an attempt: the status of the answer, if there is one, and why it was not delivered, if it was not."""
        keys: tuple[bytes, ...] = ()
        if delivery.secret_name:
            secret = (await self._secrets()).find(delivery.secret_name, delivery.tenant)
            if secret is None:
                # never without its signature
                gone = f"--webhook-secrets has no secret {delivery.secret_name!r} for its tenant any more"
                return None, Failed(gone)
            keys = secret.keys
        # receivers compare this with the clock of their machine
        headers = {**signed(delivery, keys, time.time()), **dict(() if trace is None else trace.headers)}
        return await self._posted(delivery, headers)

    async def _posted(self, delivery: Delivery, headers: Mapping[str, str]) -> tuple[int | None, Failed | None]:
        """The status of the answer, if there is one, and why it is no delivery, if it is none."""
        try:
            answered = await self._poster.post(delivery.url, delivery.body, headers, field="url")
        except OmniError as error:
            rules = "; ".join(found.description for found in error.violations)
            return None, Failed(f"{error.reason}: the URL {rules}")
        except Exception:
            # a fault of ours counts as an attempt, or it would be made for ever
            logger.exception("a webhook could not be sent")
            return None, Failed("an error of this server, which its log has")
        if answered.delivered:
            return answered.status, None
        reason = f"it answered with HTTP status {answered.status}"
        if answered.status == GONE:
            return answered.status, Failed(f"{reason}, so it wants no more", final=True)
        if 300 <= answered.status < 400:
            reason += "; redirects are not followed"
        return answered.status, Failed(reason, retry_after=answered.retry_after)

    async def _settle(self, delivery: Delivery, write: Callable[[], Awaitable[None]]) -> None:
        """Writes a result down. What the store does not take is done again once the claim has run out."""
        for pause in (*SETTLE, None):
            try:
                await write()
                return
            except StoreError as error:
                if pause is None:
                    logger.warning(
                        "the store did not take what became of the webhook %s, so it is sent again in %.0f s: %s",
                        delivery.id, self._hold, error,
                    )  # fmt: skip
                    return
                await asyncio.sleep(pause)
