"""How a client proves who it is, and how it knows the server: TLS, client certificates, tokens."""

from __future__ import annotations

import dataclasses
import functools
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import grpc

from omni_grpc.client.tracing import trace_metadata
from omni_grpc.types.address import is_local, is_unix
from omni_grpc.types.errors import InvalidArgument, Violation

TokenSource = str | Path | Callable[[], str]
"""A token, a file with one, or what returns one. The latter two are asked at every call, so that a token may change
while the client lives.
"""


class CredentialOptions(TypedDict, total=False):
    """What `Client` and `AsyncClient` take beside the address."""

    ca: str | Path | None
    """PEM file with the authorities that the server's certificate must come from; turns TLS on."""
    cert: str | Path | None
    """mTLS: PEM file with the client's certificate, and"""
    key: str | Path | None
    """with its private key."""
    token: TokenSource | None
    """Who calls: sent with every call, over TLS or to this machine alone."""
    tls: bool
    """TLS with the authorities that gRPC trusts by itself, if `ca` names no others."""
    insecure: bool
    """Send the token without TLS to another machine, too."""


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """The credentials of one client. `tls` is None for plain text."""

    tls: grpc.ChannelCredentials | None = None
    token: TokenSource | None = None

    def authorized(self, channel: Any) -> Any:
        """A channel of either gRPC stack, with the token on every call, and the trace that the caller is in."""
        return _Authorized(channel, self._metadata)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        trace = trace_metadata()
        return trace if self.token is None else (("authorization", f"Bearer {_read_token(self.token)}"), *trace)


def credentials(
    address: str,
    *,
    ca: str | Path | None = None,
    cert: str | Path | None = None,
    key: str | Path | None = None,
    token: TokenSource | None = None,
    tls: bool = False,
    insecure: bool = False,
) -> Credentials:
    """The credentials for an address. Raises InvalidArgument, by field, for files that cannot be used, for one of
    `cert` and `key` without the other, and for a token that would go to another machine in plain text.
    """
    if (cert is None) != (key is None):
        missing, given = ("key", "cert") if key is None else ("cert", "key")
        raise _wrong(missing, f"{given} is given without {missing}: a client certificate needs both")
    tls = tls or ca is not None or cert is not None
    if tls and is_unix(address):
        raise _wrong("tls", f"{address} is a Unix socket, which is never encrypted: leave out ca, cert, key and tls")
    if token is not None:
        if not (tls or insecure or is_local(address)):
            raise _wrong(
                "token",
                f"the token would go to {address} unencrypted, where anybody on the way can take it: give ca=FILE, or "
                "tls=True for a certificate that everybody trusts, or insecure=True (on the command line --ca, --tls, "
                "--insecure)",
                reason="TOKEN_NEEDS_TLS",
            )
        if not callable(token):
            _read_token(token)
    return Credentials(_channel_credentials(ca, cert, key) if tls else None, token)


def _channel_credentials(
    ca: str | Path | None, cert: str | Path | None, key: str | Path | None
) -> grpc.ChannelCredentials:
    roots = None if ca is None else _read("ca", ca)
    if roots is not None:
        # gRPC would say nothing, and reach no server
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=roots.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise _wrong("ca", f"ca {ca} has no certificates in PEM") from error
    if cert is None or key is None:
        return grpc.ssl_channel_credentials(roots)
    private, chain = _read("key", key), _read("cert", cert)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password=_no_passphrase)
    except (ssl.SSLError, ValueError) as error:
        raise _wrong("key", f"{key} is not the private key of {cert}, in PEM and without a passphrase") from error
    return grpc.ssl_channel_credentials(roots, private, chain)


def _no_passphrase() -> str:
    """Without it OpenSSL asks on the terminal."""
    raise ValueError("the key is encrypted")


def _read(field: str, path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _wrong(field, f"{field} {path}: {error.strerror}") from error


def _read_token(source: TokenSource) -> str:
    """The token, without white space around it. Raises InvalidArgument, without showing it."""
    if isinstance(source, Path):
        try:
            text = source.read_text(encoding="ascii")
        except OSError as error:
            raise _wrong("token", f"token file {source}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise _wrong("token", f"token file {source} has no token: expected printable ASCII") from None
    else:
        text = source if isinstance(source, str) else source()
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise _wrong("token", "the token is empty, or has characters that no token has (spaces, line ends)")
    return token


def _wrong(field: str, message: str, reason: str | None = None) -> InvalidArgument:
    return InvalidArgument(message, reason=reason, violations=(Violation(field, message),))


class _Authorized:
    """A channel whose calls have metadata of their own. gRPC's call credentials refuse plain channels, those to this
    machine too, and its interceptors change what asyncio's calls can do.
    """

    def __init__(self, channel: Any, metadata: Callable[[], tuple[tuple[str, str], ...]]) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_metadata(self._channel.stream_stream(*args, **kwargs))

    def close(self) -> Any:
        return self._channel.close()

    def _with_metadata(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method, assigned=(), updated=())
        def call(request: Any, **kwargs: Any) -> Any:
            return method(request, metadata=self._metadata(), **kwargs)

        return call
