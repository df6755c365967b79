"""Where outbound HTTP may go, as `--outbound-hosts` lists it."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Mapping, Sequence

from omni_grpc.types.errors import ConfigError, Violation

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

PORTS: Mapping[str, int] = {"https": 443, "http": 80}
"""The schemes that are fetched, and the port that each has where none is named."""
WIDEST: Mapping[int, int] = {4: 8, 6: 7}
"""The shortest prefix of a listed network, by IP version: what is wider is no list (10.0.0.0/8, fc00::/7)."""
FORMS = "list NAME, *.NAME, ADDRESS or ADDRESS/BITS, each also with :PORT, and with http:// before it for plain HTTP"

_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_BRACKETED = re.compile(r"\[([^\]]*)\](?::([0-9]+))?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """One entry: a name, or the addresses of a network.

    `subdomains`: every name below this one, without the name itself. `port` None: none was listed.
    """

    scheme: str = "https"
    name: str = ""
    subdomains: bool = False
    network: Network | None = None
    port: int | None = None

    def has_name(self, name: str) -> bool:
        """Whether this lists a name, which is in lower case and without a dot at its end."""
        if self.network is not None:
            return False
        return name.endswith(f".{self.name}") if self.subdomains else name == self.name

    def has_address(self, address: Address) -> bool:
        return self.network is not None and address.version == self.network.version and address in self.network

    def has_port(self, scheme: str, port: int) -> bool:
        """Whether URLs of this scheme and port are listed, if their host is."""
        return scheme == self.scheme and port == (self.port or PORTS[self.scheme])


def parse(entries: Sequence[str]) -> tuple[Origin, ...]:
    """The entries of a list. Raises ConfigError that names the first which is none, with the forms that there are."""
    return tuple(_origin(entry) for entry in entries)


def is_name(host: str) -> bool:
    """Whether this can be the name of a host: ASCII, in lower case. One whose last part is a number is no name, since
    resolvers read it as an address (127.1, 0x7f000001).
    """
    return _NAME.fullmatch(host) is not None and _NUMBER.fullmatch(host.rpartition(".")[2]) is None


def _origin(entry: str) -> Origin:
    text = entry.strip().lower()
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "https", text
    if scheme not in PORTS:
        raise _error(entry, f"has the scheme {scheme}; only https:// and http:// are fetched")
    host, port = _split(entry, rest)
    if (network := _network(entry, host)) is not None:
        return Origin(scheme=scheme, network=network, port=port)
    name = host.removeprefix("*.")
    if not name.isascii():
        raise _error(entry, f"is not ASCII; list the name as DNS has it{_as_dns_has_it(name)}")
    if not is_name(name):
        raise _error(entry, f"is no host; {FORMS}")
    return Origin(scheme=scheme, name=name, subdomains=name != host, port=port)


def _split(entry: str, text: str) -> tuple[str, int | None]:
    """Host and port; an IPv6 address has brackets where it has a port."""
    if match := _BRACKETED.fullmatch(text):
        host, digits = match[1], match[2]
    elif text.count(":") == 1:
        host, _, digits = text.partition(":")
    else:
        return text, None
    if digits is None:
        return host, None
    if not re.fullmatch(r"[0-9]{1,5}", digits) or not 1 <= int(digits) <= 65535:
        raise _error(entry, f"has the port {digits!r}; ports are 1 to 65535")
    return host, int(digits)


def _network(entry: str, text: str) -> Network | None:
    """The network that this names, None if it is a name."""
    address, slash, _ = text.partition("/")
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        if slash:
            raise _error(entry, f"is no network; {FORMS}") from None
        return None
    if slash and str(network.network_address) != str(ipaddress.ip_address(address)):
        raise _error(entry, f"has bits set behind its prefix; list {network}, or the address {address} alone")
    if network.version == 6 and network.network_address.ipv4_mapped is not None:
        raise _error(entry, "is an IPv4 network written as IPv6; list it as IPv4")
    if network.prefixlen < WIDEST[network.version]:
        raise _error(entry, f"lists more than a /{WIDEST[network.version]}; list the networks that are meant")
    return network


def _as_dns_has_it(name: str) -> str:
    try:
        return f" ({name.encode('idna').decode('ascii')})"
    except UnicodeError:
        return " (xn--...)"


def _error(entry: str, rule: str) -> ConfigError:
    message = f"--outbound-hosts: {entry!r} {rule}"
    return ConfigError(message, violations=(Violation("outbound_hosts", message),))
