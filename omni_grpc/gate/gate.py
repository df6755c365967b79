"""The one layer that says no: identity, limits, rules and the record of who did what, below every stack."""

from __future__ import annotations

from collections.abc import Callable

from omni_grpc.engine import EngineState, Job
from omni_grpc.fleet import Fleet
from omni_grpc.gate.adapters import LoraGate
from omni_grpc.gate.addresses import Addresses
from omni_grpc.gate.audit import Audit
from omni_grpc.gate.changes import Changes
from omni_grpc.gate.entry import Entry
from omni_grpc.gate.files import FileGate
from omni_grpc.gate.intake import Intake
from omni_grpc.gate.jobs import JobGate
from omni_grpc.gate.media import MediaReader
from omni_grpc.gate.models import ModelGate
from omni_grpc.gate.operation import OperationGate
from omni_grpc.gate.profiles import ProfileGate
from omni_grpc.gate.quotas import Quotas
from omni_grpc.gate.recovery import Recovery
from omni_grpc.gate.sharing import Sharing
from omni_grpc.gate.stored import Stored, available
from omni_grpc.types.load_progress import Loading
from omni_grpc.webhooks import Webhooks
from omni_grpc.webhooks.sender import Attempt


class Gate:
    """A fleet as its callers see it. It belongs to the event loop on which it was made, and so does the fleet.

    Its parts are plain functions that take a Caller and our own types, and raise OmniError. A stack (gRPC, HTTP)
    translates messages to these and back, and does nothing else.
    """

    def __init__(self, fleet: Fleet) -> None:
        """Raises ConfigError for a file of identities or an audit log that cannot be used."""
        self.fleet = fleet
        self.audit = Audit(fleet)
        self._entry = Entry(fleet.config.identity, self.audit)
        self.caller = self._entry.caller
        changes, stored = Changes(), Stored(fleet)
        quotas = Quotas(fleet, fleet.config.tenants.tenant_limits)
        self._changes = changes
        self._quotas = quotas
        self._media = MediaReader(fleet, stored)
        self._recovery = Recovery(fleet, self._media)
        self._sharing = Sharing(fleet, self._recovery)
        self.render: Callable[[Job], bytes] | None = None
        """The body of a webhook: a stack's, which knows how jobs are written."""
        self.webhooks = Webhooks(
            fleet.config.webhooks,
            fleet.config.outbound,
            fleet.storage.store,
            self._render,
            server=fleet.storage.instance_id,
            clock=fleet.storage.clock,
        )
        fleet.storage.journal.owed = self.webhooks.deliveries_for
        fleet.storage.journal.on_owed = self.webhooks.wake
        self.intake = Intake(fleet, changes, stored, quotas, self.audit, self._media, self.webhooks)
        self.jobs = JobGate(fleet, changes, stored, self.audit, self._sharing)
        self.addresses = Addresses(fleet.config.http, fleet.config.store.signed_url_seconds)
        self.files = FileGate(fleet, stored, quotas, self.audit, self.addresses)
        self.models = ModelGate(fleet, stored, quotas, self.audit)
        self.loras = LoraGate(fleet, stored, self.models, self.audit)
        self._sharing.on_adapters = self.loras.kept.look
        self.loras.kept.on_change = self._sharing.tell_adapters
        self.profiles = ProfileGate(fleet, stored, self.models, self.audit)
        self.operation = OperationGate(fleet, changes, stored, self.models, self.audit)

    @property
    def serving(self) -> dict[str, bool]:
        """Whether each model that is known takes jobs, by name."""
        return {model.name: model.takes_jobs for model in self.fleet.models}

    @property
    def loading(self) -> dict[str, Loading]:
        """How far each model is that is being loaded, by name."""
        told = {model.name: model.loading_progress for model in self.fleet.models}
        return {name: loading for name, loading in told.items() if loading is not None}

    @property
    def state(self) -> EngineState:
        return self.fleet.state

    @property
    def on_state(self) -> list[Callable[[EngineState], None]]:
        """Observers, called on the loop at each change of state."""
        return self.fleet.on_state

    @property
    def on_end(self) -> list[Callable[[Job], None]]:
        """Observers, called on the loop with each job that has ended here."""
        return self.fleet.on_end

    @property
    def on_attempt(self) -> list[Callable[[Attempt], None]]:
        """Observers, called on the loop after each attempt to deliver a webhook."""
        return self.webhooks.on_attempt

    @property
    def instance_id(self) -> str:
        """The name of this server, which no other one has."""
        return self.fleet.storage.instance_id

    async def prepare(self) -> None:
        """Gets ready for calls, before the first one. Raises ConfigError for a store that cannot be used."""
        await self.fleet.storage.open()
        await self._entry.prepare()

    async def start(self) -> None:
        """Returns when the models of the start are ready. Raises the error that kept the last one from loading."""
        self.on_state.append(self._on_state)
        await self._quotas.refresh()
        with available():
            # before any job that was waiting for them, and before any worker
            await self.loras.kept.look()
            await self._sharing.start()
            await self.webhooks.start()
        # those that waited before go first
        await self._recovery.caught_up()
        await self.fleet.start()

    async def drain(self, seconds: float) -> None:
        """Refuses new jobs, gives existing ones `seconds` to finish, and fails the rest. Called again, it restarts the
        time.
        """
        await self.fleet.close(seconds)

    async def written(self) -> None:
        """Returns when the ends of jobs are committed, or have had their time: watchers see none before."""
        await self.fleet.storage.written()

    async def close(self) -> None:
        """Ends what the gate has started, once the fleet has stopped."""
        self._recovery.close()
        self._media.close()
        await self.profiles.close()
        await self.loras.close()
        await self.webhooks.stop()
        # others may take what this server still has from then on: not what has ended here
        await self.fleet.storage.finish()
        await self._sharing.stop()
        await self.fleet.storage.close()
        await self.audit.close()

    def _render(self, job: Job) -> bytes:
        assert self.render is not None, "no stack has said how jobs are written"
        return self.render(job)

    def _on_state(self, state: EngineState) -> None:
        self._changes.notify()
