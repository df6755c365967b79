"""The sections of the configuration tree for a server among others: where it listens, who may call, whom it calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from omni_grpc.config import exposure, origins
from omni_grpc.config.options import setting
from omni_grpc.types.address import MAX_PORT, host_of, is_unix, listen_host


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The gRPC endpoint."""

    host: str = setting(
        "127.0.0.1",
        "host name or IP address to listen on; 0.0.0.0 or :: for all interfaces (with TLS, or --insecure), unix:PATH "
        "for a Unix socket",
        read=listen_host,
        empty="use localhost for this machine",
    )
    port: int = setting(50051, "port to listen on; 0 picks a free one", minimum=0, maximum=MAX_PORT)
    admin_address: str | None = setting(
        None,
        "HOST:PORT or unix:PATH that alone serves the admin service, beside health (default: where everything is)",
    )
    max_message_bytes: int = setting(32 << 20, "largest message accepted from a client", minimum=1 << 20)
    heartbeat_interval: float = setting(
        15.0, "seconds without an event after which a watcher gets a heartbeat", minimum=0.05
    )
    drain_timeout: float = setting(
        60.0, "drain: seconds that running jobs get to finish when the server is asked to stop", minimum=0
    )

    handover: str | None = setting(
        None,
        "Unix socket of this server for the one after it: a server that finds another one there takes its addresses "
        "over without a refused call, and has it end its jobs and leave",
    )
    handover_load: str = setting(
        "auto",
        "handover: load models beside the server before, or after it has gone, while calls wait; auto: after it with a "
        "store that one process alone can have, otherwise beside it",
        choices=("auto", "beside", "after"),
    )
    handover_seconds: float = setting(
        20.0, "handover: seconds after which a connection is moved to the server that takes over", minimum=1
    )

    def __post_init__(self) -> None:
        if self.admin_address is not None:
            exposure.check_admin_address(self.admin_address)
        if self.handover is not None:
            exposure.check_handover(dict(self.addresses))

    @property
    def admin(self) -> tuple[str, int]:
        """Host and port of `admin_address`; a Unix socket has the port 0."""
        assert self.admin_address is not None
        if is_unix(self.admin_address):
            return self.admin_address, 0
        return host_of(self.admin_address), int(self.admin_address.rpartition(":")[2])

    @property
    def addresses(self) -> Iterator[tuple[str, str]]:
        """The settings that name an address to listen on, and their values."""
        yield "host", self.host
        if self.admin_address is not None:
            yield "admin_address", self.admin_address


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Encryption of the endpoints. The files are read again when they change."""

    tls_cert: str | None = setting(None, "PEM file with the server's certificate, followed by its intermediate ones")
    tls_key: str | None = setting(None, "PEM file with the private key of --tls-cert, unencrypted")
    tls_client_ca: str | None = setting(
        None, "mTLS: PEM file with the authorities whose certificates clients must present"
    )
    tls_require_client_cert: bool = setting(
        False, "mTLS: refuse connections without a certificate of --tls-client-ca; the two are given together"
    )
    insecure: bool = setting(
        False, "listen without TLS on an address that other machines can reach, where something else encrypts"
    )

    def __post_init__(self) -> None:
        exposure.need({"tls_cert": self.tls_cert, "tls_key": self.tls_key})
        only = "gRPC asks a client for its certificate only where it must have one"
        authorities = "it says whose certificates are accepted"
        exposure.need(
            {"tls_client_ca": self.tls_client_ca, "tls_require_client_cert": self.tls_require_client_cert},
            because={"tls_require_client_cert": only, "tls_client_ca": authorities},
        )
        if self.tls_client_ca and not self.tls_cert:
            raise exposure.refused("tls_cert", "--tls-client-ca needs --tls-cert and --tls-key: mTLS is a part of TLS")

    @property
    def on(self) -> bool:
        return self.tls_cert is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IdentityConfig:
    """How a caller is known. With none of these, everybody may do everything."""

    token_file: str | None = setting(
        None, "file with the hashes of tokens and the names of client certificates, see `omni-grpc token --help`"
    )
    jwt_issuer: str | None = setting(None, "JWT: the issuer (iss) whose tokens are accepted")
    jwt_audience: str | None = setting(None, "JWT: the audience (aud) that tokens must be for")
    jwt_jwks: str | None = setting(None, "JWT: https address or file of the issuer's public keys (JWKS)")
    jwt_tenant_claim: str = setting("tenant", "JWT: claim that names the tenant")
    jwt_leeway: float = setting(60.0, "JWT: seconds by which the clocks of issuer and server may differ", minimum=0)

    def __post_init__(self) -> None:
        issuer = {"jwt_issuer": self.jwt_issuer, "jwt_audience": self.jwt_audience, "jwt_jwks": self.jwt_jwks}
        exposure.need(issuer, because=dict.fromkeys(issuer, "a token is checked against all three"))
        if self.jwt_jwks is not None:
            exposure.check_jwks(self.jwt_jwks)

    @property
    def on(self) -> bool:
        return self.token_file is not None or self.jwt_issuer is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TenantsConfig:
    """What each tenant may have."""

    tenant_limits: str | None = setting(
        None, "YAML file with the limits of each tenant, read again when it changes (default: nobody has any)"
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """The record of who did what."""

    audit_log: str | None = setting(
        None,
        "file that a line of JSON is appended to for each action, refusal and end of a job; - for standard output "
        "(default: none is kept)",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutboundConfig:
    """What this server may fetch over HTTP."""

    outbound_hosts: tuple[str, ...] = setting(
        (),
        "hosts that https URLs in requests may name, separated by commas: NAME, *.NAME, ADDRESS or ADDRESS/BITS, each "
        "also with :PORT, and with http:// before it for plain HTTP; private addresses are used only where an entry "
        "lists them as addresses (default: none, so nothing is fetched)",
    )
    outbound_timeout: float = setting(
        30.0, "seconds that fetching one URL may take, with its redirects and all of its bytes", minimum=0.1
    )
    outbound_ca: str | None = setting(
        None, "PEM file of certificate authorities that fetches and webhooks trust, in addition to those of the system"
    )

    def __post_init__(self) -> None:
        _ = self.origins  # an entry that is no host is an error at once

    @property
    def origins(self) -> tuple[origins.Origin, ...]:
        """The hosts that are listed. Raises ConfigError, see `origins`."""
        return origins.parse(self.outbound_hosts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WebhooksConfig:
    """Whom this server may tell of jobs by HTTP, and how it signs that."""

    webhook_hosts: tuple[str, ...] = setting(
        (),
        "hosts that webhooks of requests may name, separated by commas: NAME, *.NAME, ADDRESS or ADDRESS/BITS, each "
        "also with :PORT; private addresses are used only where an entry lists them as addresses (default: none, so "
        "webhooks are refused)",
    )
    webhook_secrets: str | None = setting(
        None, "YAML file with the secrets that webhooks are signed with, by name; read again when it changes"
    )
    webhook_timeout: float = setting(
        10.0, "seconds that a webhook's receiver has to take the connection and answer", minimum=0.1
    )

    def __post_init__(self) -> None:
        _ = self.origins  # an entry that is no host is an error at once
        if self.webhook_secrets is not None and not self.webhook_hosts:
            raise exposure.refused("webhook_hosts", "--webhook-secrets has no effect without --webhook-hosts")

    @property
    def origins(self) -> tuple[origins.Origin, ...]:
        """The hosts that are listed. Raises ConfigError, see `origins`."""
        return origins.parse(self.webhook_hosts, "webhook_hosts", plain=False)
