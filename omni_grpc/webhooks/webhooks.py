"""The webhooks of one server: what is refused, what is owed, and its sender."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from omni_grpc.config import OutboundConfig, WebhooksConfig
from omni_grpc.identity.files import Reloaded
from omni_grpc.outbound import Poster
from omni_grpc.outbound.connections import Resolve
from omni_grpc.store.job import Job
from omni_grpc.store.records import Delivery, JobState, Webhook
from omni_grpc.store.seam import Store
from omni_grpc.types.errors import InvalidArgument, Violation
from omni_grpc.webhooks.schedule import Schedule
from omni_grpc.webhooks.secrets_file import Secrets, read_secrets
from omni_grpc.webhooks.sender import LOOK_EVERY, Sender

Render = Callable[[Job], bytes]
"""The body that tells of a job as it stands."""

STATES = tuple(state for state in JobState if state.terminal)
"""What is told of where a request does not say."""
GRACE = 5.0
"""Seconds that attempts get to end when a server stops."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AskedWebhook:
    """A webhook as a request has it. `states` are names, which may be those of no state; none: the three that end a
    job.
    """

    url: str
    secret_name: str = ""
    states: tuple[str, ...] = ()


class Webhooks:
    """It may be used on one event loop at a time."""

    def __init__(
        self,
        config: WebhooksConfig,
        outbound: OutboundConfig,
        store: Store,
        render: Render,
        *,
        server: str,
        schedule: Schedule | None = None,
        clock: Callable[[], float] = time.time,
        look_every: float = LOOK_EVERY,
        resolve: Resolve | None = None,
    ) -> None:
        """`server`: its name, which no other one that is alive has. `clock`: Unix seconds. `look_every`: seconds
        between two looks for what is owed. `resolve`: stands in for the system's resolver. Raises ConfigError for a
        file of secrets or of authorities that cannot be used.
        """
        self._on = bool(config.webhook_hosts)
        self._store = store
        self._render = render
        self._server = server
        self._clock = clock
        self._file = None if config.webhook_secrets is None else Reloaded(Path(config.webhook_secrets), read_secrets)
        self._poster = Poster(config, outbound, resolve=resolve)
        self._sender = Sender(
            store.deliveries,
            self._poster,
            self.refresh,
            owner=server,
            timeout=config.webhook_timeout,
            schedule=schedule or Schedule(),
            clock=clock,
            look_every=look_every,
        )

    @property
    def on_attempt(self) -> list[Callable[[str], None]]:
        """Observers, told of each attempt: "delivered", "failed", or "given_up" for the last one."""
        return self._sender.on_attempt

    async def start(self) -> None:
        """Begins to deliver what is owed, also from before: the store is open by now. Raises StoreError."""
        # what a process before this one had claimed nobody else delivers
        await self._store.deliveries.release(self._server if self._store.shared else "")
        self._sender.start()

    async def stop(self, grace: float = GRACE) -> None:
        """Gives attempts that are on their way so many seconds; what is owed then is delivered after the next start."""
        await self._sender.stop(grace)
        self._poster.close()

    async def refresh(self) -> Secrets:
        """The secrets as their file has them, as of a second ago or later; `check` knows them from then on."""
        return Secrets() if self._file is None else await self._file.current()

    def check(self, asked: AskedWebhook, tenant: str, *, field: str = "options.webhook") -> tuple[Violation, ...]:
        """What is wrong with a webhook of a tenant's request, by field and with the fix."""
        if not self._on:
            rule = "this server calls no webhooks; the operator lists the hosts that it may call with --webhook-hosts"
            return (Violation(field, rule),)
        return tuple(self._violations(asked, tenant, field))

    def accepted(self, asked: AskedWebhook) -> Webhook:
        """A webhook that `check` finds nothing wrong with, as it is kept with its job."""
        states = tuple(JobState(name) for name in asked.states) or STATES
        return Webhook(url=asked.url, secret_name=asked.secret_name, states=states)

    def deliveries_for(self, job: Job) -> tuple[Delivery, ...]:
        """What is owed because a job has entered its state: none, or one, for the JobWrite that has this event. Call
        `wake` once that is committed.
        """
        record, state = job.record, job.state
        webhook = record.spec.webhook
        if webhook is None or state not in webhook.states:
            return ()
        now = self._clock()
        delivery = Delivery(
            # no dots: they part what is signed
            id=f"{record.id}-{state.lower()}",
            job_id=record.id,
            tenant=record.tenant,
            state=state,
            url=webhook.url,
            host=self._poster.host(webhook.url),
            secret_name=webhook.secret_name,
            body=self._render(job),
            create_time=now,
            due=now,
        )
        return (delivery,)

    def wake(self) -> None:
        """Has the sender look at once for what is owed, and not up to a second later."""
        self._sender.wake()

    def _violations(self, asked: AskedWebhook, tenant: str, field: str) -> Iterator[Violation]:
        if asked.url:
            try:
                self._poster.check(asked.url, field=f"{field}.url")
            except InvalidArgument as error:
                yield from error.violations
        else:
            yield Violation(f"{field}.url", "is required: the https URL to call")
        secrets = Secrets() if self._file is None else self._file.value
        if asked.secret_name and secrets.find(asked.secret_name, tenant) is None:
            names = ", ".join(secrets.names(tenant)) or "none"
            rule = f"there is no secret {asked.secret_name[:128]!r}; those of this tenant are: {names}"
            yield Violation(f"{field}.secret_name", f"{rule}; the operator adds one to --webhook-secrets")
        for index, name in enumerate(asked.states):
            if name not in {*JobState}:
                rule = f"{name[:64]} is no state of a job; there are {', '.join(JobState)}"
                yield Violation(f"{field}.states[{index}]", rule)
            elif name in asked.states[:index]:
                rule = f"{name} is there already; name each state once"
                yield Violation(f"{field}.states[{index}]", rule)
