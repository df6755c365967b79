"""TLS of the endpoints: certificates that are read again when they change, and the one that a client presented."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import stat
import threading
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from omni_grpc.config import TlsConfig
from omni_grpc.identity.files import Stamp, stamp_of
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.os_errors import plain

logger = logging.getLogger(__name__)


def server_credentials(config: TlsConfig) -> grpc.ServerCredentials | None:
    """The credentials of a server, None without TLS. Raises ConfigError, by field, for files that cannot be used.

    Connections begin at TLS 1.2. When a file changes, new connections get the new certificate, and open ones stay. A
    change that cannot be used is logged, and what was there before is served on.
    """
    if not config.on:
        return None
    files = TlsFiles(config)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        pair = files.changed()
        return None if pair is None else _grpc(pair)

    return grpc.dynamic_ssl_server_credentials(
        _grpc(files.read()), changed, require_client_authentication=config.tls_require_client_cert
    )


def client_certificate(context: Any) -> str | None:
    """The certificate in PEM that the client of a call presented and the transport verified; None without one."""
    found = context.auth_context().get("x509_pem_cert")
    return found[0].decode("ascii") if found else None


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A certificate with its key, and the authorities of clients, all in PEM."""

    certificate: bytes
    key: bytes
    authorities: bytes | None


def _grpc(pair: Pair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)], root_certificates=pair.authorities)


class TlsFiles:
    """The files of a configuration. gRPC asks at every handshake, in threads of its own."""

    def __init__(self, config: TlsConfig) -> None:
        assert config.tls_cert is not None
        assert config.tls_key is not None
        self._cert, self._key = Path(config.tls_cert), Path(config.tls_key)
        self._client_ca = None if config.tls_client_ca is None else Path(config.tls_client_ca)
        self._lock = threading.Lock()
        self._stamps = self._look()

    def changed(self) -> Pair | None:
        """The certificate where the files have changed since the last time. Raises nothing."""
        with self._lock:
            stamps = self._look()
            if stamps == self._stamps:
                return None
            self._stamps = stamps
            try:
                return self.read()
            except (ConfigError, OSError) as error:
                logger.error("the new certificate cannot be used, so the one before it stays: %s", plain(error))
                return None

    def read(self) -> Pair:
        """Reads and checks the files. Raises ConfigError."""
        certificate, key = _bytes("tls_cert", self._cert), _bytes("tls_key", self._key)
        leaf = _certificates("tls_cert", self._cert, certificate)[0]
        if _public(_private_key(self._key, key)) != _public(leaf):
            raise _wrong("tls_key", f"--tls-key {self._key} is not the key of --tls-cert {self._cert}")
        ends = leaf.not_valid_after_utc
        if ends <= datetime.datetime.now(datetime.UTC):
            raise _wrong("tls_cert", f"--tls-cert {self._cert} expired at {ends:%Y-%m-%d %H:%M} UTC: renew it")
        if self._key.stat().st_mode & stat.S_IROTH:
            logger.warning("every user of this machine may read the private key %s: chmod o-r it", self._key)
        authorities = None
        if self._client_ca is not None:
            authorities = _bytes("tls_client_ca", self._client_ca)
            _certificates("tls_client_ca", self._client_ca, authorities)
        logger.info("TLS with the certificate %s, valid until %s", self._cert, f"{ends:%Y-%m-%d %H:%M} UTC")
        return Pair(certificate, key, authorities)

    def _look(self) -> tuple[Stamp | None, ...]:
        files = (self._cert, self._key, self._client_ca)
        return tuple(stamp_of(path) for path in files if path is not None)


def _bytes(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _wrong(field, f"{_flag(field)} {path}: {error.strerror}") from error


def _certificates(field: str, path: Path, data: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise _wrong(field, f"{_flag(field)} {path} has no certificates in PEM") from error


def _private_key(path: Path, data: bytes) -> Any:
    try:
        return serialization.load_pem_private_key(data, password=None)
    except TypeError as error:
        raise _wrong("tls_key", f"--tls-key {path} is encrypted: write it without a passphrase") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _wrong("tls_key", f"--tls-key {path} has no private key in PEM") from error


def _public(of: Any) -> bytes:
    """The public key of a certificate or a private key, in one form."""
    data: bytes = of.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return data


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _wrong(field: str, message: str) -> ConfigError:
    return ConfigError(message, reason="BAD_CERTIFICATE", violations=(Violation(field, message),))
