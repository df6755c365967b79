"""Settings of TLS and identities that need each other, and the addresses that must not be served in plain text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from omni_grpc.types.address import host_of, is_local, is_unix
from omni_grpc.types.errors import ConfigError, Violation


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def refused(field: str, message: str, reason: str = "BAD_CONFIGURATION") -> ConfigError:
    return ConfigError(message, reason=reason, violations=(Violation(field, message),))


def need(given: Mapping[str, object], *, because: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError for the first setting without a value where another one has one."""
    present = [name for name, value in given.items() if value]
    for name in given:
        if present and name not in present:
            why = (because or {}).get(name, "they are given together")
            raise refused(name, f"{flag_of(present[0])} needs {flag_of(name)}: {why}")


def check_plaintext(addresses: Iterable[tuple[str, str]], *, identified: bool, what: str = "") -> None:
    """Raises ConfigError for the first address, of pairs (setting, address), that other machines can reach.
    `identified`: callers send tokens there. `what`: in words, what passes there, if it is not what callers and jobs
    have.
    """
    for name, address in addresses:
        if not is_local(address):
            unix = "" if what else " or unix:PATH"
            what = what or ("tokens, prompts and results" if identified else "prompts and results")
            raise refused(
                name,
                f"{flag_of(name)} {address} is reachable from other machines, and without TLS {what} would cross the "
                f"network unencrypted: give --tls-cert and --tls-key, or listen on 127.0.0.1{unix}, or add "
                "--insecure where something else encrypts",
                reason="PLAINTEXT_REFUSED",
            )


def check_admin_address(address: str) -> None:
    """Raises ConfigError unless it is HOST:PORT or unix:PATH."""
    if is_unix(address) and address.partition(":")[2]:
        return
    port = address.rpartition(":")[2]
    bracketed = address.startswith("[") or address.count(":") == 1
    if not (bracketed and host_of(address) and port.isdecimal() and int(port) < 1 << 16):
        raise refused(
            "admin_address",
            f"--admin-address is {address!r}: expected HOST:PORT or unix:PATH, such as 127.0.0.1:50052",
        )


def check_jwks(address: str) -> None:
    """Raises ConfigError for keys that would come over an unencrypted connection from another machine."""
    scheme, marks, rest = address.partition("://")
    if marks and scheme != "https" and not (scheme == "http" and is_local(rest.partition("/")[0])):
        raise refused(
            "jwt_jwks",
            f"--jwt-jwks is {address!r}: expected an https:// address or a file, since whoever can change the keys on "
            "their way can sign any token",
        )


def check_handover(addresses: Mapping[str, str]) -> None:
    """Raises ConfigError for an address that two servers cannot listen on at a time. `addresses`: by setting."""
    for name, address in addresses.items():
        if is_unix(address):
            rule = "is a Unix socket, which cannot be handed over (--handover); give a host and a port"
            message = f"--{name.replace('_', '-')} {rule}"
            raise ConfigError(message, violations=(Violation(name, message),))
