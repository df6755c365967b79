"""One question for every stack: who makes this call?"""

from __future__ import annotations

import datetime
from pathlib import Path

from omni_grpc.config import IdentityConfig
from omni_grpc.identity import certificates, tokens
from omni_grpc.identity.files import Reloaded
from omni_grpc.identity.jwks import key_source
from omni_grpc.identity.jwt import TokenVerifier
from omni_grpc.identity.records import Records, read_records
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import Unauthenticated

LONGEST = 16 << 10
"""Characters of the longest `authorization` that is looked at."""


class Authenticator:
    """Knows callers by a token of a file, a JWT, or the certificate of their connection. Without any of these,
    everybody may do everything.
    """

    def __init__(self, records: Reloaded[Records] | None = None, verifier: TokenVerifier | None = None) -> None:
        self._records = records
        self._verifier = verifier

    @property
    def on(self) -> bool:
        """Whether a caller has to say who it is."""
        return self._records is not None or self._verifier is not None

    async def prepare(self) -> None:
        """Fetches the issuer's keys, so that the first call does not wait for them. The log says if they cannot be had;
        the next token asks again.
        """
        if self._verifier is not None:
            await self._verifier.prepare()

    async def caller(self, *, authorization: str | None, certificate: str | None, peer: str) -> Caller:
        """Who makes a call.

        `authorization` is the header of that name (`Bearer TOKEN`), `certificate` the client's certificate in PEM as
        the transport has verified it, `peer` the network address. A token, where there is one, decides; it is never
        passed over in favor of a certificate. Raises Unauthenticated with a reason, and Unavailable (JWKS_UNAVAILABLE)
        where the issuer's keys cannot be had.
        """
        if not self.on:
            return Caller(peer=peer)
        if authorization is not None:
            return await self._by_token(_token(authorization), peer)
        if certificate is not None and self._records is not None:
            return certificates.find(await self._records.current(), certificate, _now()).caller(peer)
        raise Unauthenticated(
            "this server has to know who calls: send the metadata `authorization: Bearer TOKEN`", reason="TOKEN_MISSING"
        )

    async def _by_token(self, token: str, peer: str) -> Caller:
        if self._records is not None and (token.startswith(tokens.PREFIX) or self._verifier is None):
            return tokens.find(await self._records.current(), token, _now()).caller(peer)
        assert self._verifier is not None
        return await self._verifier.caller(token, peer)


def authenticator(config: IdentityConfig) -> Authenticator:
    """The authenticator of a configuration. Raises ConfigError for a file that cannot be used; an address of keys is
    asked at the first token.
    """
    records = None if config.token_file is None else Reloaded(Path(config.token_file), read_records)
    if config.jwt_issuer is None:
        return Authenticator(records)
    assert config.jwt_audience is not None
    assert config.jwt_jwks is not None
    verifier = TokenVerifier(
        key_source(config.jwt_jwks),
        issuer=config.jwt_issuer,
        audience=config.jwt_audience,
        tenant_claim=config.jwt_tenant_claim,
        leeway=config.jwt_leeway,
    )
    return Authenticator(records, verifier)


def _token(authorization: str) -> str:
    """The token of the header. Raises Unauthenticated (TOKEN_MISSING, TOKEN_INVALID), without a look at a long one."""
    if len(authorization) > LONGEST:
        raise Unauthenticated(f"the token is longer than {LONGEST} characters", reason="TOKEN_INVALID")
    scheme, _, token = authorization.strip().partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("expected `authorization: Bearer TOKEN`", reason="TOKEN_INVALID")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise Unauthenticated("the token has characters that no token has", reason="TOKEN_INVALID")
    return token


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
