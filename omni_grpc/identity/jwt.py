"""JSON Web Tokens (RFC 7519, with the advice of RFC 8725): signature, issuer, audience, times, then who is named."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Mapping
from typing import Any

import jwt

from omni_grpc.identity.jwks import ALGORITHMS, Keys, KeySource
from omni_grpc.identity.records import LONGEST_NAME, is_name
from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.errors import Unauthenticated, Unavailable

ACCEPTED = frozenset(name for names in ALGORITHMS.values() for name in names)
REQUIRED = ("exp", "iss", "aud", "sub")

REASONS: tuple[tuple[type[jwt.PyJWTError], str, str], ...] = (
    (jwt.ExpiredSignatureError, "TOKEN_EXPIRED", "the token has expired: get a new one from its issuer"),
    (
        jwt.ImmatureSignatureError,
        "TOKEN_NOT_YET_VALID",
        "the token is not valid yet (nbf or iat): the clocks of issuer and server differ",
    ),
    (jwt.InvalidAudienceError, "TOKEN_INVALID", "the token is for another audience (aud)"),
    (jwt.InvalidIssuerError, "TOKEN_INVALID", "the token is of another issuer (iss)"),
    (jwt.InvalidSignatureError, "TOKEN_INVALID", "the token's signature does not fit its issuer's key"),
)
"""What is said of an error. Not what PyJWT says, which may quote the token."""

# what PyJWT lets through for contents that nobody signs on purpose: numbers without end, lists within lists
_MALFORMED = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)


REMEMBERED = 4096
"""Tokens that are remembered as checked: the signature costs a hundred times what the rest does."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Checked:
    """A token that was good, for as long as the keys are those that it was checked with, and until it expires."""

    keys: Keys
    expires: float
    caller: Caller


class TokenVerifier:
    """Checks the tokens of one issuer. `leeway` is in seconds."""

    def __init__(self, keys: KeySource, *, issuer: str, audience: str, tenant_claim: str, leeway: float) -> None:
        self._keys = keys
        self._issuer = issuer
        self._audience = audience
        self._tenant_claim = tenant_claim
        self._leeway = leeway
        self._checked: collections.OrderedDict[bytes, _Checked] = collections.OrderedDict()
        """By SHA-256, so that tokens are not kept; those that were used last are at the end."""

    async def prepare(self) -> None:
        """Fetches the keys. The log has what is wrong with them."""
        with contextlib.suppress(Unavailable):
            await self._keys.current()

    async def caller(self, token: str, peer: str) -> Caller:
        """Who a token names. Raises Unauthenticated (TOKEN_INVALID, TOKEN_EXPIRED, TOKEN_NOT_YET_VALID,
        TOKEN_KEY_UNKNOWN), and Unavailable (JWKS_UNAVAILABLE).
        """
        digest = hashlib.sha256(token.encode("ascii")).digest()
        if (known := self._checked.get(digest)) is not None:
            if known.keys is await self._keys.current() and time.time() < known.expires + self._leeway:
                self._checked.move_to_end(digest)
                return dataclasses.replace(known.caller, peer=peer)
            self._checked.pop(digest, None)
        keys, key = await self._key(token)
        claims = self._claims(token, key)
        caller = self._named(claims, peer)
        self._checked[digest] = _Checked(keys, float(claims["exp"]), caller)
        if len(self._checked) > REMEMBERED:
            self._checked.popitem(last=False)
        return caller

    def _claims(self, token: str, key: jwt.PyJWK) -> Mapping[str, Any]:
        """What a token says, once its signature and its times are good."""
        try:
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[str(key.algorithm_name)],
                issuer=self._issuer,
                audience=self._audience,
                leeway=self._leeway,
                options={"require": list(REQUIRED)},
            )
        except jwt.MissingRequiredClaimError as error:
            raise _invalid(f"the token has no claim {error.claim}") from None
        except _MALFORMED as error:
            for kind, reason, message in REASONS:
                if isinstance(error, kind):
                    raise Unauthenticated(message, reason=reason) from None
            raise _invalid("the token is malformed") from None
        return claims

    async def _key(self, token: str) -> tuple[Keys, jwt.PyJWK]:
        """The keys that the issuer has published, and the one of them that the token's header names."""
        try:
            header = jwt.get_unverified_header(token)
            kid, algorithm = header.get("kid"), header.get("alg")
        except _MALFORMED:
            raise _invalid("the token is no JWT") from None
        if "crit" in header:
            raise _invalid("the token's header has extensions that must be understood (crit), and none is")
        if not isinstance(algorithm, str) or algorithm not in ACCEPTED:
            # before a key is looked for, so that none is fetched for it
            raise _invalid(f"the token's algorithm is not one of {', '.join(sorted(ACCEPTED))}")
        keys = await self._keys.current()
        key = keys.find(kid, algorithm)
        if key is None:
            keys = await self._keys.renewed()
            key = keys.find(kid, algorithm)
        if key is None:
            raise Unauthenticated(
                "the issuer has published no key for this token (kid, alg); it was withdrawn, or it is newer than the "
                "last look",
                reason="TOKEN_KEY_UNKNOWN",
            )
        return keys, key

    def _named(self, claims: Mapping[str, Any], peer: str) -> Caller:
        tenant, subject = claims.get(self._tenant_claim), claims["sub"]
        for claim, value in ((self._tenant_claim, tenant), ("sub", subject)):
            if not is_name(value):
                raise _invalid(f"the token's claim {claim} must be 1 to {LONGEST_NAME} printable characters")
        return Caller(tenant=str(tenant), subject=str(subject), scopes=_scopes(claims), peer=peer)


def _scopes(claims: Mapping[str, Any]) -> frozenset[Scope]:
    """Those of ours that `scope` (text, RFC 8693) or `scopes` (a list, or text) names. An issuer has others, too."""
    given: list[str] = []
    for claim in ("scope", "scopes"):
        value = claims.get(claim)
        if isinstance(value, str):
            given += value.split()
        elif isinstance(value, list):
            given += [item for item in value if isinstance(item, str)]
    return frozenset(scope for scope in Scope if scope in given)


def _invalid(message: str) -> Unauthenticated:
    return Unauthenticated(message, reason="TOKEN_INVALID")
