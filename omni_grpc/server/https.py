"""TLS of what is served over HTTP: the same files as gRPC's, read again when they change."""

from __future__ import annotations

import ssl

from omni_grpc.config import TlsConfig
from omni_grpc.server.tls import TlsFiles


def server_context(config: TlsConfig) -> ssl.SSLContext | None:
    """The context of a server, None without TLS. Raises ConfigError, by field, for files that cannot be used."""
    if not config.on:
        return None
    files = TlsFiles(config)
    files.read()
    context = _context(config)

    def renewed(layer: ssl.SSLObject, name: str | None, current: ssl.SSLContext) -> None:
        # at every handshake: connections that are open stay as they are
        nonlocal context
        if files.changed() is not None:
            context = _context(config)
            context.sni_callback = renewed
        layer.context = context

    context.sni_callback = renewed
    return context


def _context(config: TlsConfig) -> ssl.SSLContext:
    assert config.tls_cert is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(config.tls_cert, config.tls_key)
    if config.tls_require_client_cert:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(config.tls_client_ca)
    return context
