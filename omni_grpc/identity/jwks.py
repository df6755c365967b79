"""The public keys of a token issuer (JWKS, RFC 7517), from a file or an address, kept and fetched again."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from omni_grpc.identity.files import Reloaded
from omni_grpc.types.address import is_local
from omni_grpc.types.errors import ConfigError, Unavailable, Violation
from omni_grpc.types.os_errors import plain

logger = logging.getLogger(__name__)

ALGORITHMS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("RSA", ""): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
"""By type and curve of a key, what may be signed with it. Signatures of public keys alone: with HS256, say, whoever
knows the public key could sign.
"""
SMALLEST_RSA = 2048
"""Bits of the smallest RSA key that is accepted."""

FETCH_TIMEOUT = 5.0
REFRESH_EVERY = 600.0
"""Seconds after which the keys of an address are fetched again; a key that the issuer withdrew is good for so long."""
FETCH_AGAIN = 10.0
"""Seconds between two fetches, whatever tokens come: a stream of unknown keys must not become one of requests."""
LARGEST = 1 << 20
"""Bytes of the largest JWKS that is read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """Public keys, each with the one algorithm of a token: (kid or None, algorithm) -> keys."""

    by_kid: Mapping[tuple[str | None, str], tuple[jwt.PyJWK, ...]] = dataclasses.field(default_factory=dict)

    def find(self, kid: str | None, algorithm: str) -> jwt.PyJWK | None:
        """The key for a header. Without a kid, the only one for its algorithm, if there is only one."""
        if kid is not None:
            found = self.by_kid.get((kid, algorithm), ())
        else:
            found = tuple(key for (_, name), keys in self.by_kid.items() if name == algorithm for key in keys)
        return found[0] if len(found) == 1 else None


class KeySource(Protocol):
    """Where keys come from."""

    async def current(self) -> Keys:
        """The keys. Raises Unavailable (JWKS_UNAVAILABLE) where there never were any."""
        ...

    async def renewed(self) -> Keys:
        """The same after another look at the source, unless there was one just now."""
        ...


def parse_keys(data: bytes, source: str) -> Keys:
    """The keys of a JWKS that verify signatures; those of other kinds are passed over. Raises ConfigError for what is
    no JWKS, and for one without a single key that can be used.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    listed = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise _bad(f'{source} is no JWKS: expected {{"keys": [...]}}')
    found: dict[tuple[str | None, str], tuple[jwt.PyJWK, ...]] = {}
    why = []
    for number, key in enumerate(listed):
        try:
            kid, usable = _usable(key)
        except ValueError as error:
            why.append(f"keys[{number}] {error}")
            continue
        for made in usable:
            name = (kid, str(made.algorithm_name))
            found[name] = (*found.get(name, ()), made)
    if not found:
        raise _bad(f"{source} has no key that can be used: {'; '.join(why) or 'it is empty'}")
    if why:
        logger.info("%s has keys that are not used: %s", source, "; ".join(why))
    return Keys(found)


def _usable(key: Any) -> tuple[str | None, Sequence[jwt.PyJWK]]:
    """The kid of a key, and the key once for each of its algorithms. Raises ValueError with the reason against it."""
    if not isinstance(key, dict):
        raise ValueError("is no object")
    kid = key.get("kid")
    if kid is not None and not isinstance(kid, str):
        raise ValueError("has a kid that is no text")
    kind = str(key.get("kty")), str(key.get("crv", "")) if key.get("kty") != "RSA" else ""
    uses = key.get("key_ops", ["verify"])
    if key.get("use", "sig") != "sig" or not isinstance(uses, list) or "verify" not in uses:
        raise ValueError("is not for signatures")
    names = ALGORITHMS.get(kind, ())
    if "alg" in key:
        names = tuple(name for name in names if name == key["alg"])
    if not names:
        described = " ".join(str(key[name])[:32] for name in ("kty", "crv", "alg") if name in key)
        raise ValueError(f"({described}) is of a kind that is not accepted")
    # the public parts alone, should a private key have been published with them
    public = {name: value for name, value in key.items() if name not in ("d", "p", "q", "dp", "dq", "qi", "oth", "k")}
    try:
        usable = [jwt.PyJWK(public, name) for name in names]
    except jwt.PyJWTError:
        raise ValueError("is not a valid key") from None
    held = usable[0].key
    if isinstance(held, RSAPublicKey) and held.key_size < SMALLEST_RSA:
        raise ValueError(f"has {held.key_size} bits, and RSA needs {SMALLEST_RSA}")
    return kid, usable


# --- sources ----------------------------------------------------------------------------------------------------------


def key_source(where: str) -> KeySource:
    """The keys of an address or a file. Raises ConfigError for a file that is not there or no JWKS."""
    if "://" in where:
        return AddressKeys(where)
    return FileKeys(Path(where))


class FileKeys:
    """Keys of a file, read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._file = Reloaded(path, _read)

    async def current(self) -> Keys:
        return await self._file.current()

    async def renewed(self) -> Keys:
        return await self._file.current(look=True)


def _read(path: Path) -> Keys:
    try:
        return parse_keys(path.read_bytes(), str(path))
    except OSError as error:
        raise _bad(f"--jwt-jwks {path}: {error.strerror}") from error


class AddressKeys:
    """Keys of an address. They are fetched in a thread, by one fetch at a time, and stay where a fetch fails."""

    def __init__(self, address: str, *, refresh_every: float = REFRESH_EVERY, fetch_again: float = FETCH_AGAIN) -> None:
        self.address = address
        self._refresh_every = refresh_every
        self._fetch_again = fetch_again
        self._keys: Keys | None = None
        self._fetched = -float("inf")
        """When keys came last, and"""
        self._tried = -float("inf")
        """when a fetch began last."""
        self._why = ""
        self._fetching: asyncio.Task[None] | None = None

    async def current(self) -> Keys:
        age = time.monotonic() - self._fetched
        if self._keys is None:
            await self._fetch()
        elif age >= self._refresh_every:
            fetching = self._fetch()
            # keys that are somewhat old are used meanwhile. Very old ones, after a pause without calls, are not, unless
            # the issuer cannot be reached
            if age >= 2 * self._refresh_every and not self._why:
                await fetching
        if self._keys is None:
            raise Unavailable(
                f"the issuer's keys are not available, so that no token can be checked: {self._why}",
                reason="JWKS_UNAVAILABLE",
                retry_after=self._fetch_again,
            )
        return self._keys

    async def renewed(self) -> Keys:
        await self._fetch()
        return await self.current()

    def _fetch(self) -> asyncio.Future[None]:
        """Joins the fetch that is on its way, or begins one, unless the last one was just now."""
        if self._fetching is None and time.monotonic() - self._tried >= self._fetch_again:
            self._tried = time.monotonic()
            self._fetching = asyncio.create_task(self._replace())
        if self._fetching is not None:
            return asyncio.shield(self._fetching)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def _replace(self) -> None:
        try:
            async with asyncio.timeout(2 * FETCH_TIMEOUT):  # the other limit is on each read
                body = await asyncio.to_thread(_download, self.address)
            self._keys = parse_keys(body, self.address)
            self._fetched, self._why = time.monotonic(), ""
            logger.info("fetched the keys of %s", self.address)
        except (ConfigError, OSError, ValueError, http.client.HTTPException) as error:
            self._why = plain(error)
            kept = "those of before stay" if self._keys else "no token can be checked"
            logger.error("cannot fetch the keys of %s, %s: %s", self.address, kept, self._why)
        finally:
            self._fetching = None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could lead to an address without TLS, or into the network of the server."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        raise urllib.error.URLError(f"it redirects to {newurl[:200]}: set --jwt-jwks to that, if it is the issuer's")


def _download(address: str) -> bytes:
    """The body of an address. Raises OSError, of which URLError is one; ConfigError where there is too much of it."""
    handlers: list[Any] = [_NoRedirect()]
    if is_local(address.partition("://")[2].partition("/")[0]):
        handlers.append(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(address, headers={"Accept": "application/json", "User-Agent": "omni-grpc"})
    with urllib.request.build_opener(*handlers).open(request, timeout=FETCH_TIMEOUT) as reply:
        body: bytes = reply.read(LARGEST + 1)
    if len(body) > LARGEST:
        raise _bad(f"{address} is larger than {LARGEST} bytes")
    return body


def _bad(message: str) -> ConfigError:
    return ConfigError(message, reason="BAD_JWKS", violations=(Violation("jwt_jwks", message),))
