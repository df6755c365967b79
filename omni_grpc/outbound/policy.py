"""Which URLs and which addresses outbound HTTP may use. Pure: nothing is resolved or opened here.

A URL is checked twice: by `check` before anything is asked of the network, and by `addresses` once its name is
resolved. The connection is then made to one of the addresses that passed, never to the name.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Mapping, Sequence

import httpx2

from omni_grpc.config.origins import PORTS, Address, Network, Origin, is_name
from omni_grpc.types.errors import InvalidArgument, Violation

URL_CHARS = 8192
"""The longest URL."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_AUTHORITY = re.compile(r"[A-Za-z]+://([^/?#]*)")
_SUFFIX = re.compile(r":[^\]]*\Z")


def _networks(*texts: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


SPECIAL: Mapping[int, Sequence[Network]] = {
    4: _networks(
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
        *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
    ),
    6: _networks("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
}
"""Addresses that are not hosts of the public internet, by IP version (the IANA registries of special-purpose
addresses, https://www.iana.org/assignments/iana-ipv4-special-registry). Our own table, since that of `ipaddress`
differs between versions of Python. IPv6: those within GLOBAL.
"""
GLOBAL = ipaddress.IPv6Network("2000::/3")
"""The only IPv6 addresses that are handed out for the public internet; all others are special."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""A gateway passes what is sent here on to the IPv4 address in the last 32 bits (https://www.rfc-editor.org/rfc/rfc6052)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A URL that may be fetched. `host` is an ASCII name without a dot at its end, or an address; `path` has the query
    in it.
    """

    url: httpx2.URL
    scheme: str
    host: str
    port: int
    path: bytes
    address: Address | None

    @property
    def authority(self) -> str:
        """What the Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a list of hosts is for, in the words of a refusal: the setting that has the list, and what is done with
    URLs of those hosts. `plain`: it may list http too.
    """

    setting: str
    done: str
    plain: bool


FETCHING = Use(setting="--outbound-hosts", done="fetched", plain=True)
CALLING = Use(setting="--webhook-hosts", done="called", plain=False)


class Policy:
    """The rules of one list of hosts. Refusals are InvalidArgument with the path of the field that held the URL. They
    name the host and never the whole URL, which may hold a secret, and end with `instead`: what to do without a URL.
    """

    def __init__(self, origins: Sequence[Origin], use: Use = FETCHING) -> None:
        self._origins = tuple(origins)
        self._use = use

    @property
    def lists_any(self) -> bool:
        return bool(self._origins)

    def check(self, url: str, *, field: str, instead: str = "") -> Target:
        """The parts of a URL whose host is listed. Raises InvalidArgument."""
        parsed = _parsed(url, field, instead, self._use.done)
        host, address = _host(parsed, field, instead)
        target = Target(
            url=parsed,
            scheme=parsed.scheme,
            host=host,
            port=parsed.port or PORTS[parsed.scheme],
            path=parsed.raw_path,
            address=address,
        )
        self._check_listed(target, field, instead)
        return target

    def host(self, url: str) -> str:
        """The host of a URL, listed or not: an ASCII name, or an address. Raises InvalidArgument for what is no URL."""
        return _host(_parsed(url, "url", "", self._use.done), "url", "")[0]

    def redirect(self, source: Target, location: bytes, *, field: str, instead: str = "") -> Target:
        """Where a response sends the client to, checked like any URL. Raises InvalidArgument."""
        try:
            url = str(source.url.join(location.decode("utf-8")))
        except (UnicodeDecodeError, httpx2.InvalidURL):
            raise _refusal(field, "OUTBOUND_URL_INVALID", "redirects to something that is no URL", instead) from None
        target = self.check(url, field=field, instead=f"it is where {source.host} redirects to{_more(instead)}")
        if source.scheme == "https" and target.scheme == "http":
            rule = f"redirects from https to http, on {target.host}; send the URL of the file itself"
            raise _refusal(field, "OUTBOUND_SCHEME_NOT_ALLOWED", rule, instead)
        return target

    def addresses(self, target: Target, found: Sequence[str], *, field: str, instead: str = "") -> tuple[Address, ...]:
        """The addresses to connect to, without repeats. Raises InvalidArgument unless all that the name has may be
        used: with a private one among them, which one is used would be a matter of chance.
        """
        addresses = tuple(dict.fromkeys(map(plain, found)))
        for address in addresses:
            if not is_public(address) and not self._is_listed(address, target.port):
                # the address is not told: names of an internal DNS are not for the caller
                rule = (
                    f"names {target.host}, which has a private or reserved address; to allow that, the operator lists "
                    f"the address or its network too ({self._use.setting})"
                )
                raise _refusal(field, "OUTBOUND_ADDRESS_NOT_ALLOWED", rule, instead)
        return addresses

    def _check_listed(self, target: Target, field: str, instead: str) -> None:
        host, scheme = target.host, target.scheme
        if target.address is None:
            origins = [origin for origin in self._origins if origin.has_name(host)]
        else:
            origins = [origin for origin in self._origins if origin.has_address(embedded(target.address))]
        if any(origin.has_port(scheme, target.port) for origin in origins):
            return
        listed = self._use.setting
        entry = f"{'http://' if scheme == 'http' else ''}{target.authority}"
        if not origins and target.address is not None and not is_public(target.address):
            rule = f"names {host}, a private or reserved address, which is not listed in {listed}"
            raise _refusal(field, "OUTBOUND_ADDRESS_NOT_ALLOWED", rule, instead)
        if scheme == "http" and not (origins and self._use.plain):
            rule = f"is an http URL; only https URLs are {self._use.done}"
            raise _refusal(field, "OUTBOUND_SCHEME_NOT_ALLOWED", rule, instead)
        if not origins:
            rule = f"names the host {host}, which is not listed; the operator lists it with {listed} {entry}"
            raise _refusal(field, "OUTBOUND_HOST_NOT_ALLOWED", rule, instead)
        if scheme not in {origin.scheme for origin in origins}:
            rule = f"uses {scheme}, for which {host} is not listed; the operator lists it with {listed} {entry}"
            raise _refusal(field, "OUTBOUND_SCHEME_NOT_ALLOWED", rule, instead)
        rule = f"uses port {target.port}, for which {host} is not listed; the operator lists it with {listed} {entry}"
        raise _refusal(field, "OUTBOUND_PORT_NOT_ALLOWED", rule, instead)

    def _is_listed(self, address: Address, port: int) -> bool:
        """Whether an entry lists this address: one with a port for that port alone."""
        inner = embedded(address)
        return any(origin.has_address(inner) and origin.port in (None, port) for origin in self._origins)


def plain(address: str) -> Address:
    """An address as it is connected to: an IPv4 address that is written as IPv6 is one of IPv4."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found


def embedded(address: Address) -> Address:
    """The IPv4 address that a NAT64 gateway passes on to, otherwise the address itself."""
    if address.version == 6 and address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def is_public(address: Address) -> bool:
    """Whether this is the address of a host of the public internet."""
    inner = embedded(address)
    if inner.version == 6 and inner not in GLOBAL:
        return False
    return not any(inner in network for network in SPECIAL[inner.version])


def _parsed(url: str, field: str, instead: str, done: str) -> httpx2.URL:
    """The parts of a URL; what different programs would read differently is refused."""

    def invalid(rule: str) -> InvalidArgument:
        return _refusal(field, "OUTBOUND_URL_INVALID", rule, instead)

    if len(url) > URL_CHARS:
        raise invalid(f"has {len(url)} characters; the maximum is {URL_CHARS}")
    scheme = _SCHEME.match(url)
    if scheme is not None and scheme[1].lower() not in PORTS:
        rule = f"is a {scheme[1].lower()[:16]} URL; only https URLs are {done}"
        raise _refusal(field, "OUTBOUND_SCHEME_NOT_ALLOWED", rule, instead)
    match = _AUTHORITY.match(url)
    if match is None:
        raise invalid("is not a URL; the form is https://HOST/PATH")
    authority = match[1]
    if "@" in authority:
        raise invalid("has a user name or password in it; send a URL without them")
    if "\\" in url or not all(char.isprintable() for char in url) or " " in authority:
        raise invalid("has a backslash, a blank or a control character in it; percent-encode them in the path")
    suffix = _SUFFIX.search(authority)
    if suffix is not None and not re.fullmatch(r":([0-9]{1,5})?", suffix[0]):
        raise invalid("has a port that is not a number; ports are 1 to 65535")
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        raise invalid("is not a URL that has a valid host; the form is https://HOST/PATH") from None
    if parsed.port is not None and not 1 <= parsed.port <= 65535:
        raise invalid(f"has the port {parsed.port}; ports are 1 to 65535")
    return parsed


def _host(url: httpx2.URL, field: str, instead: str) -> tuple[str, Address | None]:
    """Host as DNS has it, and the address that it is, if it is one. A number that is no address as it is usually
    written (2130706433, 0x7f.1, 0177.0.0.1) is refused, since resolvers take it for one.
    """
    host = url.raw_host.decode("ascii").lower()
    try:
        address = None if "%" in host else plain(host)
    except ValueError:
        address = None
    if address is not None:
        return str(address), address
    name = host.removesuffix(".")
    if not is_name(name):
        rule = "has a host that is neither a name nor an address as a.b.c.d or [IPv6]; write it in that form"
        raise _refusal(field, "OUTBOUND_URL_INVALID", rule, instead)
    return name, None


def _more(text: str) -> str:
    return f"; {text}" if text else ""


def _refusal(field: str, reason: str, rule: str, instead: str) -> InvalidArgument:
    rule += _more(instead)
    return InvalidArgument(f"{field}: {rule}", reason=reason, violations=(Violation(field, rule),))
