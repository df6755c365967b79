"""Where outbound HTTP may go, as `--outbound-hosts` and `--webhook-hosts` list it."""

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
FORMS = "list NAME, *.NAME, ADDRESS or ADDRESS/BITS, each also with :PORT"
PLAIN = ", and with http:// before it for plain HTTP"

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


def parse(entries: Sequence[str], setting: str = "outbound_hosts", *, plain: bool = True) -> tuple[Origin, ...]:
    """The entries of the list of a setting; `plain`: plain HTTP may be listed too. Raises ConfigError that names the
    first which is none, with the forms that there are.
    """
    found = []
    for entry in entries:
        try:
            found.append(_origin(entry, plain))
        except ValueError as error:
            message = f"--{setting.replace('_', '-')}: {entry!r} {error}"
            raise ConfigError(message, violations=(Violation(setting, message),)) from None
    return tuple(found)


def is_name(host: str) -> bool:
    """Whether this can be the name of a host: ASCII, in lower case. One whose last part is a number is no name, since
    resolvers read it as an address (127.1, 0x7f000001).
    """
    return _NAME.fullmatch(host) is not None and _NUMBER.fullmatch(host.rpartition(".")[2]) is None


def _origin(entry: str, plain: bool) -> Origin:
    text = entry.strip().lower()
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "https", text
    if scheme not in PORTS:
        raise ValueError(f"has the scheme {scheme}; there are https://{' and http://' if plain else ' alone'}")
    if scheme == "http" and not plain:
        raise ValueError("is for plain HTTP, which is not used here; list it without http://")
    forms = FORMS + (PLAIN if plain else "")
    host, port = _split(rest)
    if (network := _network(host, forms)) is not None:
        return Origin(scheme=scheme, network=network, port=port)
    name = host.removeprefix("*.")
    if not name.isascii():
        raise ValueError(f"is not ASCII; list the name as DNS has it{_as_dns_has_it(name)}")
    if not is_name(name):
        raise ValueError(f"is no host; {forms}")
    return Origin(scheme=scheme, name=name, subdomains=name != host, port=port)


def _split(text: str) -> tuple[str, int | None]:
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
        raise ValueError(f"has the port {digits!r}; ports are 1 to 65535")
    return host, int(digits)


def _network(text: str, forms: str) -> Network | None:
    """The network that this names, None if it is a name."""
    address, slash, _ = text.partition("/")
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        if slash:
            raise ValueError(f"is no network; {forms}") from None
        return None
    if slash and str(network.network_address) != str(ipaddress.ip_address(address)):
        raise ValueError(f"has bits set behind its prefix; list {network}, or the address {address} alone")
    if network.version == 6 and network.network_address.ipv4_mapped is not None:
        raise ValueError("is an IPv4 network written as IPv6; list it as IPv4")
    if network.prefixlen < WIDEST[network.version]:
        raise ValueError(f"lists more than a /{WIDEST[network.version]}; list the networks that are meant")
    return network


def _as_dns_has_it(name: str) -> str:
    try:
        return f" ({name.encode('idna').decode('ascii')})"
    except UnicodeError:
        return " (xn--...)"
