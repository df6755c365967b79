"""The one layer that says no: identity, limits, rules and the record of who did what, below every stack."""

from __future__ import annotations

from collections.abc import Callable

from omni_grpc.engine import Engine, EngineState, Job
from omni_grpc.gate.audit import Audit
from omni_grpc.gate.changes import Changes
from omni_grpc.gate.entry import Entry
from omni_grpc.gate.files import FileGate
from omni_grpc.gate.intake import Intake
from omni_grpc.gate.jobs import JobGate
from omni_grpc.gate.media import MediaReader
from omni_grpc.gate.models import ModelGate
from omni_grpc.gate.operation import OperationGate
from omni_grpc.gate.quotas import Quotas
from omni_grpc.gate.recovery import Recovery
from omni_grpc.gate.sharing import Sharing
from omni_grpc.gate.stored import Stored, available
from omni_grpc.webhooks import Webhooks


class Gate:
    """An engine as its callers see it. It belongs to the event loop on which it was made, and so does the engine.

    Its parts are plain functions that take a Caller and our own types, and raise OmniError. A stack (gRPC, HTTP)
    translates messages to these and back, and does nothing else.
    """

    def __init__(self, engine: Engine) -> None:
        """Raises ConfigError for a file of identities or an audit log that cannot be used."""
        self._engine = engine
        self.audit = Audit(engine)
        self._entry = Entry(engine.config.identity, self.audit)
        self.caller = self._entry.caller
        changes, stored = Changes(), Stored(engine)
        quotas = Quotas(engine, engine.config.tenants.tenant_limits)
        self._changes = changes
        self._quotas = quotas
        self._media = MediaReader(engine, stored)
        self._recovery = Recovery(engine, self._media)
        self._sharing = Sharing(engine, self._recovery)
        self.render: Callable[[Job], bytes] | None = None
        """The body of a webhook: a stack's, which knows how jobs are written."""
        self._webhooks = Webhooks(
            engine.config.webhooks,
            engine.config.outbound,
            engine.storage.store,
            self._render,
            server=engine.storage.instance_id,
        )
        engine.storage.journal.owed = self._webhooks.deliveries_for
        engine.storage.journal.on_owed = self._webhooks.wake
        self.intake = Intake(engine, changes, stored, quotas, self.audit, self._media, self._webhooks)
        self.jobs = JobGate(engine, changes, stored, self.audit, self._sharing)
        self.files = FileGate(engine, stored, quotas, self.audit)
        self.models = ModelGate(engine, stored, quotas, self.audit)
        self.operation = OperationGate(engine, changes, stored, self.models, self.audit)

    @property
    def model(self) -> str:
        """The name of the model that is served."""
        return self._engine.checkpoint.name

    @property
    def state(self) -> EngineState:
        return self._engine.state

    @property
    def on_state(self) -> list[Callable[[EngineState], None]]:
        """Observers, called on the loop at each change of state."""
        return self._engine.on_state

    async def prepare(self) -> None:
        """Gets ready for calls, before the first one. Raises ConfigError for a store that cannot be used."""
        await self._engine.storage.open()
        await self._entry.prepare()

    async def start(self) -> None:
        """Returns when the model is ready. Raises the error that kept it from loading."""
        self.on_state.append(self._on_state)
        await self._quotas.refresh()
        with available():
            await self._sharing.start()
            await self._webhooks.start()
        # those that waited before go first
        await self._recovery.caught_up()
        await self._engine.start()

    async def drain(self, seconds: float) -> None:
        """Refuses new jobs, gives existing ones `seconds` to finish, and fails the rest. Called again, it restarts the
        time.
        """
        await self._engine.close(seconds)

    async def close(self) -> None:
        """Ends what the gate has started, once the engine has stopped."""
        self._recovery.close()
        self._media.close()
        await self._webhooks.stop()
        # others may take what this server still has from then on: not what has ended here
        await self._engine.storage.finish()
        await self._sharing.stop()
        await self._engine.storage.close()
        await self.audit.close()

    def _render(self, job: Job) -> bytes:
        assert self.render is not None, "no stack has said how jobs are written"
        return self.render(job)

    def _on_state(self, state: EngineState) -> None:
        self._changes.notify()
