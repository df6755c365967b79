"""Who makes a call, and what they may do."""

from __future__ import annotations

import dataclasses
import enum

from omni_grpc.types.errors import PermissionDenied
from omni_grpc.types.trace import TraceContext


class Scope(enum.StrEnum):
    """What a caller may do. None includes another."""

    GENERATE = "generate"
    """Make jobs and upload assets; cancel and delete one's own."""
    READ = "read"
    """Look at models, and at one's own jobs, outputs and figures."""
    ADMIN = "admin"
    """Look at and stop the jobs of every tenant, and manage the server."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who makes a call. The default is everybody, on a server without identities.

    A tenant sees its own jobs, outputs, assets and figures alone. `subject` names the caller within it, and `peer` the
    network address, both for the audit log. `trace` is the span of the call, where it belongs to a trace.
    """

    tenant: str = ""
    subject: str = "anonymous"
    scopes: frozenset[Scope] = frozenset(Scope)
    peer: str = ""
    trace: TraceContext | None = dataclasses.field(default=None, compare=False)

    @property
    def admin(self) -> bool:
        return Scope.ADMIN in self.scopes

    def require(self, *scopes: Scope) -> None:
        """Raises PermissionDenied (SCOPE_MISSING) unless the caller has one of these scopes."""
        if self.scopes.isdisjoint(scopes):
            needed, held = " or ".join(scopes), ", ".join(sorted(self.scopes)) or "none"
            raise PermissionDenied(
                f"this call needs the scope {needed}; {self.subject} of tenant {self.tenant!r} has {held}",
                reason="SCOPE_MISSING",
                metadata={"needed": needed},
            )

    @property
    def sees(self) -> str | None:
        """The tenant of which jobs, outputs and assets exist for the caller; None: those of every tenant do."""
        return None if self.admin else self.tenant
