"""Which URLs and addresses may be used, without any network."""

import ipaddress

import pytest

from omni_grpc.config import EngineConfig, OutboundConfig
from omni_grpc.outbound import Policy
from omni_grpc.outbound.policy import CALLING, URL_CHARS, is_public, plain
from omni_grpc.types.errors import ConfigError, InvalidArgument

HOSTS = (
    *("example.com", "*.cdn.example.com", "box:8443", "127.0.0.1:9000", "http://plain.test", "10.0.0.0/8"),
    *("xn--bcher-kva.de", "[fd00::/8]:8443", "203.0.113.9", "Upper.Example.com"),
)
FIELD = "images[1].uri"


def policy(*hosts):
    return Policy(OutboundConfig(outbound_hosts=hosts or HOSTS).origins)


def refused(call, reason):
    with pytest.raises(InvalidArgument) as caught:
        call()
    error = caught.value
    assert error.reason == reason
    assert [violation.field for violation in error.violations] == [FIELD]
    assert str(error) == f"{FIELD}: {error.violations[0].description}"
    assert "secret" not in str(error)
    return str(error)


@pytest.mark.parametrize(
    ("url", "scheme", "authority", "path"),
    [
        ("https://example.com", "https", "example.com", "/"),
        ("HTTPS://EXAMPLE.com./a/../b?c=d#e", "https", "example.com", "/b?c=d"),
        ("https://example.com:443/", "https", "example.com", "/"),
        ("https://example.com:/", "https", "example.com", "/"),
        ("https://a.b.cdn.example.com/x y", "https", "a.b.cdn.example.com", "/x%20y"),
        ("https://box:8443/", "https", "box:8443", "/"),
        ("https://127.0.0.1:9000/", "https", "127.0.0.1:9000", "/"),
        ("https://[::ffff:127.0.0.1]:9000/", "https", "127.0.0.1:9000", "/"),
        ("https://127\u30020\u30020\u30021:9000/", "https", "127.0.0.1:9000", "/"),
        ("https://10.11.12.13/", "https", "10.11.12.13", "/"),
        ("https://[fd00::0:1]:8443/", "https", "[fd00::1]:8443", "/"),
        ("http://plain.test/", "http", "plain.test", "/"),
        ("http://plain.test:80/", "http", "plain.test", "/"),
        ("https://b\u00fccher.de/\u00e4", "https", "xn--bcher-kva.de", "/%C3%A4"),
        ("https://upper.example.COM/", "https", "upper.example.com", "/"),
    ],
)
def test_a_url_of_a_listed_host_is_allowed(url, scheme, authority, path):
    target = policy().check(url, field=FIELD)
    assert (target.scheme, target.authority, target.path.decode()) == (scheme, authority, path)


@pytest.mark.parametrize(
    ("url", "reason", "text"),
    [
        ("https://example.org/?token=secret", "HOST_NOT_ALLOWED", "--outbound-hosts example.org"),
        ("https://example.org:8443/", "HOST_NOT_ALLOWED", "--outbound-hosts example.org:8443"),
        ("https://cdn.example.com/", "HOST_NOT_ALLOWED", "cdn.example.com"),
        ("https://notexample.com/", "HOST_NOT_ALLOWED", "notexample.com"),
        ("https://example.com.evil.org/", "HOST_NOT_ALLOWED", "evil.org"),
        ("https://8.8.8.8/", "HOST_NOT_ALLOWED", "8.8.8.8"),
        ("https://[::ffff:8.8.8.8]/", "HOST_NOT_ALLOWED", "8.8.8.8"),
        ("https://ex\u00e4mple.com/", "HOST_NOT_ALLOWED", "xn--exmple-cua.com"),
        ("https://example.com:444/", "PORT_NOT_ALLOWED", "--outbound-hosts example.com:444"),
        ("https://box/", "PORT_NOT_ALLOWED", "port 443"),
        ("https://127.0.0.1/", "PORT_NOT_ALLOWED", "port 443"),
        ("http://example.com/", "SCHEME_NOT_ALLOWED", "--outbound-hosts http://example.com"),
        ("https://plain.test/", "SCHEME_NOT_ALLOWED", "--outbound-hosts plain.test"),
        ("http://example.org/", "SCHEME_NOT_ALLOWED", "only https"),
        ("ftp://example.com/", "SCHEME_NOT_ALLOWED", "ftp"),
        ("file:///etc/secret", "SCHEME_NOT_ALLOWED", "file"),
        ("https://127.0.0.2:9000/", "ADDRESS_NOT_ALLOWED", "127.0.0.2"),
        ("https://0.0.0.0/", "ADDRESS_NOT_ALLOWED", "0.0.0.0"),
        ("https://169.254.169.254/latest/meta-data", "ADDRESS_NOT_ALLOWED", "169.254.169.254"),
        ("https://[::1]/", "ADDRESS_NOT_ALLOWED", "::1"),
        ("https://[::ffff:192.168.0.1]/", "ADDRESS_NOT_ALLOWED", "192.168.0.1"),
        ("https://[64:ff9b::c0a8:1]/", "ADDRESS_NOT_ALLOWED", "64:ff9b::c0a8:1"),
        ("https://[fe80::1]/", "ADDRESS_NOT_ALLOWED", "fe80::1"),
        ("https://example.com@evil.org/", "URL_INVALID", "user name"),
        ("https://user:secret@example.com/", "URL_INVALID", "user name"),
        ("https://@example.com/", "URL_INVALID", "user name"),
        ("https://evil.org\\@example.com/", "URL_INVALID", "user name"),
        ("https://example.com\\.evil.org/", "URL_INVALID", "backslash"),
        ("https://exa mple.com/", "URL_INVALID", "blank"),
        ("https://example.com/\r\nHost: evil.org", "URL_INVALID", "control"),
        ("https://example.com/\x00", "URL_INVALID", "control"),
        ("https://2130706433/", "URL_INVALID", "a.b.c.d"),
        ("https://0x7f000001/", "URL_INVALID", "a.b.c.d"),
        ("https://0x7f.0.0.1/", "URL_INVALID", "a.b.c.d"),
        ("https://0177.0.0.1/", "URL_INVALID", "valid host"),
        ("https://127.1/", "URL_INVALID", "a.b.c.d"),
        ("https://127.0.0.1.:9000/", "URL_INVALID", "a.b.c.d"),
        ("https://example.com../", "URL_INVALID", "a.b.c.d"),
        ("https://.example.com/", "URL_INVALID", "a.b.c.d"),
        ("https://ex%61mple.com/", "URL_INVALID", "a.b.c.d"),
        ("https://[fe80::1%25eth0]/", "URL_INVALID", "a.b.c.d"),
        ("https://[::1/", "URL_INVALID", "port"),
        ("https://\uff11\uff12\uff17.0.0.1:9000/", "URL_INVALID", "valid host"),
        ("https://example.com:443x/", "URL_INVALID", "port"),
        ("https://example.com:\uff14\uff14\uff13/", "URL_INVALID", "port"),
        ("https://example.com:99999/", "URL_INVALID", "99999"),
        ("https://example.com:0/", "URL_INVALID", "port 0"),
        ("https:///x", "URL_INVALID", "a.b.c.d"),
        ("https:example.com", "URL_INVALID", "https://HOST/PATH"),
        ("//example.com/", "URL_INVALID", "https://HOST/PATH"),
        (" https://example.com/", "URL_INVALID", "https://HOST/PATH"),
        ("", "URL_INVALID", "https://HOST/PATH"),
        ("https://" + "a" * 64 + ".com/", "URL_INVALID", "a.b.c.d"),
        ("https://example.com/" + "a" * URL_CHARS, "URL_INVALID", str(URL_CHARS)),
    ],
)
def test_any_other_url_is_refused_with_the_fix(url, reason, text):
    assert text in refused(lambda: policy().check(url, field=FIELD), f"OUTBOUND_{reason}")


def test_without_a_list_every_host_is_refused():
    nothing = Policy(())
    for url in ("https://example.com/", "https://8.8.8.8/", "https://[2606:4700::1]/"):
        refused(lambda url=url: nothing.check(url, field=FIELD), "OUTBOUND_HOST_NOT_ALLOWED")


def test_what_to_do_instead_ends_the_message():
    message = refused(
        lambda: policy().check("https://example.org/", field=FIELD, instead="or upload it"), "OUTBOUND_HOST_NOT_ALLOWED"
    )
    assert message.endswith("; or upload it")


# --- addresses --------------------------------------------------------------------------------------------------------

PRIVATE = (
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.255.255"),
    *("169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.9", "192.0.2.1", "192.88.99.1", "192.168.1.1"),
    *("198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1"),
    *("255.255.255.255", "::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:0:127.0.0.1"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808", "100::1", "2001::1", "2001:0:4136:e378::1"),
    *("2001:2::1", "2001:10::1", "2001:20::1", "2001:db8::1", "2002:7f00:1::", "2002:808:808::", "3fff::1", "4000::1"),
    *("5f00::1", "fc00::1", "fd12:3456::1", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "ff0e::1"),
)
PUBLIC = (
    *("1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.1", "100.63.255.255", "100.128.0.1", "172.15.0.1", "172.32.0.1"),
    *("192.0.1.1", "198.17.0.1", "198.20.0.1", "223.255.255.255", "::ffff:8.8.8.8", "64:ff9b::808:808"),
    *("2001:200::1", "2001:4860:4860::8888", "2606:4700::1111", "2a00:1450::1", "2003::1"),
)


@pytest.mark.parametrize("address", PRIVATE)
def test_private_and_reserved_addresses_are_refused(address):
    assert not is_public(plain(address))
    target = policy().check("https://example.com/", field=FIELD)
    message = refused(
        lambda: policy("example.com").addresses(target, [address], field=FIELD), "OUTBOUND_ADDRESS_NOT_ALLOWED"
    )
    assert address not in message, "names of an internal DNS are not for the caller"
    assert "--outbound-hosts" in message


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address):
    target = policy().check("https://example.com/", field=FIELD)
    assert policy("example.com").addresses(target, [address, address], field=FIELD) == (plain(address),)


def test_what_python_calls_private_is_refused():
    """Our table has at least what the standard library's has: each block's first and last address."""
    for networks in (ipaddress._IPv4Constants._private_networks, ipaddress._IPv6Constants._private_networks):
        for network in networks:
            assert not is_public(network[0]), network
            assert not is_public(network[-1]), network


def test_all_addresses_of_a_name_are_checked():
    rules = policy("example.com")
    target = rules.check("https://example.com/", field=FIELD)
    for found in (["8.8.8.8", "127.0.0.1"], ["127.0.0.1", "8.8.8.8"], ["2606:4700::1", "::1"]):
        refused(lambda found=found: rules.addresses(target, found, field=FIELD), "OUTBOUND_ADDRESS_NOT_ALLOWED")


@pytest.mark.parametrize(
    ("hosts", "url", "address", "allowed"),
    [
        (("a.test", "10.0.0.0/8"), "https://a.test/", "10.1.2.3", True),
        (("a.test", "10.0.0.0/8"), "https://a.test/", "192.168.0.1", False),
        (("a.test:8443", "10.0.0.0/8"), "https://a.test:8443/", "10.1.2.3", True),
        (("a.test:8443", "10.0.0.0/8:9000"), "https://a.test:8443/", "10.1.2.3", False),
        (("http://a.test", "10.0.0.0/8"), "http://a.test/", "10.1.2.3", True),
        (("a.test", "10.0.0.0/8"), "https://a.test/", "::ffff:10.0.0.1", True),
        (("a.test", "10.0.0.0/8"), "https://a.test/", "64:ff9b::a00:1", True),
        (("a.test", "64:ff9b::/96"), "https://a.test/", "64:ff9b::a00:1", False),
        (("a.test", "fd00::/8"), "https://a.test/", "fd00::1", True),
        (("a.test", "a.internal"), "https://a.test/", "10.0.0.1", False),
    ],
)
def test_a_private_address_is_allowed_where_an_entry_lists_it(hosts, url, address, allowed):
    rules = policy(*hosts)
    target = rules.check(url, field=FIELD)
    if allowed:
        assert rules.addresses(target, [address], field=FIELD) == (plain(address),)
    else:
        refused(lambda: rules.addresses(target, [address], field=FIELD), "OUTBOUND_ADDRESS_NOT_ALLOWED")


def test_a_listed_network_does_not_list_names():
    refused(lambda: policy("10.0.0.0/8").check("https://a.test/", field=FIELD), "OUTBOUND_HOST_NOT_ALLOWED")


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("*", "is no host"),
        ("*.", "is no host"),
        ("a.*.com", "is no host"),
        ("127.1", "is no host"),
        ("2130706433", "is no host"),
        ("user@example.com", "is no host"),
        ("https://example.com/path", "is no network"),
        ("ftp://example.com", "scheme ftp"),
        ("example.com:port", "ports are 1 to 65535"),
        ("example.com:0", "ports are 1 to 65535"),
        ("example.com:65536", "ports are 1 to 65535"),
        ("10.0.0.1/8", "list 10.0.0.0/8"),
        ("0.0.0.0/0", "lists more than a /8"),
        ("::/0", "lists more than a /7"),
        ("::ffff:10.0.0.0/104", "list it as IPv4"),
        ("b\u00fccher.de", "xn--bcher-kva.de"),
    ],
)
def test_an_entry_that_is_no_host_is_an_error_at_the_start(entry, text):
    with pytest.raises(ConfigError, match="--outbound-hosts") as caught:
        EngineConfig.from_settings(model="m", outbound_hosts=f"example.com,{entry}")
    assert text in str(caught.value)
    assert caught.value.violations[0].field == "outbound_hosts"


def test_webhooks_have_a_list_of_their_own():
    config = EngineConfig.from_settings(model="m", outbound_hosts="media.test", webhook_hosts="hooks.test,10.0.0.1")
    hooks = Policy(config.webhooks.origins, CALLING)
    assert hooks.check("https://hooks.test/a", field=FIELD).host == "hooks.test"
    assert "--webhook-hosts media.test" in refused(
        lambda: hooks.check("https://media.test/", field=FIELD), "OUTBOUND_HOST_NOT_ALLOWED"
    )
    assert "--webhook-hosts hooks.test:8443" in refused(
        lambda: hooks.check("https://hooks.test:8443/", field=FIELD), "OUTBOUND_PORT_NOT_ALLOWED"
    )
    for url in ("http://hooks.test/", "http://other.test/", "ftp://hooks.test/"):
        assert "only https URLs are called" in refused(
            lambda url=url: hooks.check(url, field=FIELD), "OUTBOUND_SCHEME_NOT_ALLOWED"
        )
    private = refused(lambda: hooks.check("https://127.0.0.1/", field=FIELD), "OUTBOUND_ADDRESS_NOT_ALLOWED")
    assert private.endswith("--webhook-hosts")


@pytest.mark.parametrize(
    ("entry", "text"),
    [("http://hooks.test", "without http://"), ("ftp://hooks.test", "https:// alone"), ("1.2", "ADDRESS/BITS")],
)
def test_webhooks_are_never_plain_http(entry, text):
    with pytest.raises(ConfigError, match="--webhook-hosts") as caught:
        EngineConfig.from_settings(model="m", webhook_hosts=f"example.com,{entry}")
    assert text in str(caught.value)
    assert "plain HTTP;" not in str(caught.value)
    assert caught.value.violations[0].field == "webhook_hosts"


def test_secrets_without_hosts_are_refused():
    with pytest.raises(ConfigError, match="--webhook-secrets has no effect without --webhook-hosts") as caught:
        EngineConfig.from_settings(model="m", webhook_secrets="secrets.yaml")
    assert caught.value.violations[0].field == "webhook_hosts"


def test_nothing_is_listed_by_default():
    assert EngineConfig.from_settings(model="m").outbound == OutboundConfig(
        outbound_hosts=(), outbound_timeout=30.0, outbound_ca=None
    )
    assert EngineConfig.from_settings(model="m").webhooks.origins == ()
