"""What a server had and has no longer, so that "expired" and "never here" are told apart."""

from __future__ import annotations

import collections

from omni_grpc.store.records import Cause
from omni_grpc.store.seam import FileRows
from omni_grpc.types.errors import NotFound

CAPACITY = 1 << 14
"""Names that are remembered, the newest: about 3.4 MB."""


class Forgotten:
    """The names of jobs, artifacts and assets that are gone. `instance_id` names this life of the server process, which
    has a store that remembers what was before it if that is `durable`.
    """

    def __init__(self, instance_id: str, capacity: int = CAPACITY, *, durable: bool = False) -> None:
        self.instance_id = instance_id
        self._durable = durable
        self._capacity = capacity
        self._gone: collections.OrderedDict[str, tuple[Cause, str]] = collections.OrderedDict()
        """Cause and tenant by name."""

    def __len__(self) -> int:
        return len(self._gone)

    def add(self, name: str, cause: Cause, *, tenant: str) -> None:
        """`tenant`: whose it was."""
        self._gone.setdefault(name, (cause, tenant))
        if len(self._gone) > self._capacity:
            self._gone.popitem(last=False)

    @property
    def _where(self) -> str:
        if self._durable:
            return f"server's store (instance {self.instance_id}): was it another store, or very long ago?"
        return f"server process (instance {self.instance_id}): was it another process, or one before a restart?"

    async def look_up(self, name: str, files: FileRows) -> None:
        """Learns from the store what became of a name that another life of the server, or another server, has had."""
        if name not in self._gone and (gone := await files.cause(name)) is not None:
            self.add(name, gone[0], tenant=gone[1])

    def not_found(self, name: str, *, reason: str, tenant: str | None, hint: str = "", path: str = "") -> NotFound:
        """The error of a job that is not here (JOB_NOT_FOUND), or of another kind of thing, with name, cause and
        instance_id in its metadata. `tenant` asks for it, and learns nothing of what others had (None: of all); `hint`
        says what to do; `path` is the field that names it.
        """
        kind = reason.removesuffix("_NOT_FOUND").lower()
        cause, owner = self._gone.get(name, (Cause.UNKNOWN, tenant))
        if tenant is not None and owner != tenant:
            cause = Cause.UNKNOWN
        what = {
            Cause.EXPIRED: f"{kind} {name!r} has expired",
            Cause.DELETED: f"{kind} {name!r} was deleted",
            Cause.UNKNOWN: f"there is no {kind} {name!r}, and none is remembered by this {self._where}",
        }[cause]
        message = f"{path and path + ': '}{what}{hint and '; ' + hint}"
        metadata = {"name": name, "cause": cause.value, "instance_id": self.instance_id}
        return NotFound(message, reason=reason, metadata=metadata)
