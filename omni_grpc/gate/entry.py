"""Who makes a call, for every stack: what does not say it, or says it wrongly, is refused and audited here."""

from __future__ import annotations

from collections.abc import Sequence

from omni_grpc.config import IdentityConfig
from omni_grpc.gate.audit import Audit
from omni_grpc.identity import authenticator
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import OmniError, Unauthenticated


class Entry:
    """Finds the caller of a call."""

    def __init__(self, config: IdentityConfig, audit: Audit) -> None:
        """Raises ConfigError for a file of identities that cannot be used."""
        self._known = authenticator(config)
        self._audit = audit

    async def prepare(self) -> None:
        """Fetches the issuer's keys, so that the first call does not wait for them."""
        await self._known.prepare()

    async def caller(
        self, call: str, *, authorization: Sequence[str | bytes], certificate: str | None, peer: str
    ) -> Caller:
        """Who makes a call.

        `call` is its name for the audit log, "" for what this server has not; `authorization` is every value of the
        header of that name, `certificate` the client's certificate in PEM as the transport has verified it, `peer` the
        network address. Raises Unauthenticated, and Unavailable (JWKS_UNAVAILABLE).
        """
        try:
            return await self._known.caller(authorization=_only(authorization), certificate=certificate, peer=peer)
        except OmniError as error:
            self._audit.unknown_caller(peer, call, error.failure)
            raise


def _only(values: Sequence[str | bytes]) -> str | None:
    if not values:
        return None
    value = values[0]
    if len(values) > 1 or not isinstance(value, str):
        raise Unauthenticated("expected one `authorization: Bearer TOKEN`", reason="TOKEN_INVALID")
    return value
