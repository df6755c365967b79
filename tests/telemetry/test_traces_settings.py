"""What the settings of traces refuse, and with which fix."""

from __future__ import annotations

import pytest

from omni_grpc.config import EngineConfig, TracesConfig
from omni_grpc.types.errors import ConfigError


@pytest.mark.parametrize(
    ("endpoint", "rule"),
    [
        ("localhost:4317", "expected an address of a collector: http://HOST:4317"),
        ("ftp://host", "expected an address"),
        ("http://", "expected an address"),
        ("https://me:key@host", "give --otlp-headers-file"),  # pragma: allowlist secret
        ("https://host/?key=1", "goes in --otlp-headers-file"),
    ],
)
def test_an_address_that_is_none_is_refused(endpoint: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        EngineConfig.from_settings(model="m", otlp_endpoint=endpoint)
    assert [one.field for one in caught.value.violations] == ["otlp_endpoint"]


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_a_share_is_from_0_to_1(ratio: float) -> None:
    with pytest.raises(ConfigError, match="must be from 0 to 1"):
        EngineConfig.from_settings(model="m", trace_sample_ratio=ratio)


def test_the_variable_for_traces_alone_goes_first() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b",
    }
    assert TracesConfig().protocol(environ) == "http/protobuf"
    assert TracesConfig().collector(environ) == "http://b"
    chosen = TracesConfig(otlp_endpoint="http://c", otlp_protocol="grpc")
    assert (chosen.collector(environ), chosen.protocol(environ)) == ("http://c", "grpc")


def test_a_variable_that_names_another_protocol_is_refused() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json': expected grpc or http/protobuf"):
        TracesConfig().protocol({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
