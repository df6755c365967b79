"""Settings of TLS and identities: what needs what, and what must not be served in plain text."""

import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.config.settings import from_environment
from omni_grpc.types.address import is_local
from omni_grpc.types.errors import ConfigError

TLS = {"tls_cert": "c.pem", "tls_key": "k.pem"}
JWT = {"jwt_issuer": "https://i", "jwt_audience": "a", "jwt_jwks": "https://i/keys"}


def build(**settings):
    return EngineConfig.from_settings(model="m", **settings)


@pytest.mark.parametrize(
    ("settings", "field", "says"),
    [
        ({"tls_cert": "c.pem"}, "tls_key", "--tls-cert needs --tls-key"),
        ({"tls_key": "k.pem"}, "tls_cert", "--tls-key needs --tls-cert"),
        (TLS | {"tls_client_ca": "ca.pem"}, "tls_require_client_cert", "asks a client for its certificate only where"),
        (TLS | {"tls_require_client_cert": True}, "tls_client_ca", "whose certificates are accepted"),
        ({"tls_client_ca": "ca.pem", "tls_require_client_cert": True}, "tls_cert", "mTLS is a part of TLS"),
        ({"jwt_issuer": "i"}, "jwt_audience", "against all three"),
        ({"jwt_issuer": "i", "jwt_audience": "a"}, "jwt_jwks", "against all three"),
        ({"jwt_jwks": "keys.json"}, "jwt_issuer", "--jwt-jwks needs --jwt-issuer"),
        (JWT | {"jwt_jwks": "http://issuer.example/keys"}, "jwt_jwks", "https"),
        (JWT | {"jwt_jwks": "http://127.0.0.1.example/keys"}, "jwt_jwks", "https"),
        (JWT | {"jwt_jwks": "http://127.0.0.1@evil.example/keys"}, "jwt_jwks", "https"),
        (JWT | {"jwt_jwks": "file:///etc/keys"}, "jwt_jwks", "https"),
        ({"jwt_leeway": -1}, "jwt_leeway", "at least 0"),
        ({"host": "0.0.0.0"}, "host", "--insecure"),
        ({"host": "::"}, "host", "--tls-cert"),
        ({"host": "server.example"}, "host", "unix:PATH"),
        ({"host": ""}, "host", "must not be empty; use localhost for this machine"),
        ({"host": "0.0.0.0", "token_file": "t.yaml"}, "host", "tokens, prompts"),
        ({"admin_address": "0.0.0.0:50052"}, "admin_address", "--admin-address 0.0.0.0:50052 is reachable"),
        ({"admin_address": "50052"}, "admin_address", "HOST:PORT"),
        ({"metrics_port": 1, "metrics_host": "0.0.0.0"}, "metrics_host", "tenants and models would cross"),
        ({"metrics_port": 1, "metrics_host": "unix:a"}, "metrics_host", "Unix socket"),
        ({"metrics_host": "127.0.0.1"}, "metrics_host", "no effect without --metrics-port"),
        ({"metrics_port": 1, "enable_metrics": False}, "metrics_port", "no effect with --no-enable-metrics"),
        ({"admin_address": "localhost:x"}, "admin_address", "HOST:PORT"),
        ({"admin_address": "localhost:70000"}, "admin_address", "HOST:PORT"),
        ({"admin_address": "::1:5"}, "admin_address", "HOST:PORT"),
        ({"admin_address": "unix:"}, "admin_address", "unix:PATH"),
    ],
)
def test_a_setting_that_lacks_another_or_exposes_the_server_is_refused(settings, field, says):
    with pytest.raises(ConfigError, match=says) as caught:
        build(**settings)
    assert caught.value.violations[0].field == field


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"host": "127.0.0.7"},
        {"host": "::1"},
        {"host": "localhost"},
        {"host": "unix:/run/omni.sock"},
        {"host": "0.0.0.0", "insecure": True},
        {"host": "0.0.0.0", "token_file": "t.yaml", "insecure": True},
        TLS | {"host": "0.0.0.0", "admin_address": "0.0.0.0:1"},
        TLS | {"tls_client_ca": "ca.pem", "tls_require_client_cert": True},
        {"admin_address": "127.0.0.1:50052"},
        {"admin_address": "[::1]:50052"},
        {"admin_address": "unix:/run/omni-admin.sock"},
        JWT,
        JWT | {"jwt_jwks": "keys.json"},
        JWT | {"jwt_jwks": "http://localhost:8080/keys"},
    ],
)
def test_what_is_complete_and_safe_is_taken(settings):
    build(**settings)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        *((a, True) for a in ("localhost:1", "LOCALHOST", "localhost.:1", "127.0.0.1:50051", "127.1.2.3", "[::1]:1")),
        *(
            (a, True)
            for a in ("::1", "unix:x", "unix:///x", "unix-abstract:x", "dns:///localhost:1", "ipv4:127.0.0.1:1")
        ),
        *((a, True) for a in ("ipv6:[::1]:1", "[::ffff:127.0.0.1]:1", "::ffff:127.0.0.1")),
        *((a, False) for a in ("", ":1", "0.0.0.0", "::", "[::]:1", "10.0.0.1:1", "example.com:1", "localhost.evil:1")),
        *((a, False) for a in ("127.0.0.1.evil:1", "dns:///evil:1", "dns://127.0.0.1/evil:1", "ipv4:10.0.0.1:1")),
        *((a, False) for a in ("localhost@evil:1", "127.0.0.1,10.0.0.1:1", "[::ffff:10.0.0.1]:1", "127.1:1")),
    ],
)
def test_what_is_local(address, local):
    assert is_local(address) is local


def test_the_variables_of_the_client_are_no_settings():
    assert from_environment({"OMNI_GRPC_SERVER": "host:1", "OMNI_GRPC_TOKEN": "omni_x"}) == {}
