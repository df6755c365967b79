"""Signed addresses of outputs at this server's HTTP port: whoever has one can get the bytes for a while."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from pathlib import Path
from urllib.parse import quote, urlencode

from omni_grpc.config.http import HttpConfig
from omni_grpc.types.errors import ConfigError, PermissionDenied, Violation
from omni_grpc.types.os_errors import plain

PATH = "/files/"
KEY_BYTES = 32


class Addresses:
    """Makes addresses and checks them. `base` is where the port is reached: the stack that listens there says so."""

    def __init__(self, config: HttpConfig, seconds: float) -> None:
        """Raises ConfigError for a file of a key that cannot be used."""
        self.on = config.on
        self.base = (config.http_url or "").rstrip("/")
        self._seconds = seconds
        self._key = secrets.token_bytes(KEY_BYTES) if config.http_key_file is None else _key(Path(config.http_key_file))

    def path(self, artifact_id: str) -> str:
        """A signed address without its scheme and host, for a page of this server."""
        expires = str(int(time.time() + self._seconds))
        query = urlencode({"expires": expires, "signature": self._signature(artifact_id, expires)})
        return f"{PATH}{quote(artifact_id, safe='')}?{query}"

    def url(self, artifact_id: str) -> str:
        """The same, absolute."""
        return self.base + self.path(artifact_id)

    def check(self, artifact_id: str, expires: str, signature: str) -> None:
        """Raises PermissionDenied (ADDRESS_INVALID, ADDRESS_EXPIRED)."""
        if not hmac.compare_digest(self._signature(artifact_id, expires).encode(), signature.encode()):
            raise PermissionDenied(
                "the signature of this address is wrong: another server made it, or it was changed; get a new address",
                reason="ADDRESS_INVALID",
            )
        if int(expires) < time.time():
            raise PermissionDenied("this address has expired; get a new one", reason="ADDRESS_EXPIRED")

    def _signature(self, artifact_id: str, expires: str) -> str:
        return hmac.new(self._key, f"{artifact_id}\n{expires}".encode(), hashlib.sha256).hexdigest()


def _key(path: Path) -> bytes:
    try:
        key = path.read_bytes()
    except OSError as error:
        raise _wrong(f"--http-key-file {plain(error)}") from error
    if len(key) < KEY_BYTES:
        raise _wrong(
            f"--http-key-file {path} has {len(key)} bytes, but needs {KEY_BYTES}, such as "
            f"head -c {KEY_BYTES} /dev/urandom writes"
        )
    return key


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, violations=(Violation("http_key_file", message),))
