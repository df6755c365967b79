"""The file of limits: what it gives, and what is refused by tenant and field."""

import pytest

from omni_grpc.gate.tenants import FIELDS, TenantLimits, read_tenants
from omni_grpc.types.errors import ConfigError

GOOD = """
default: {max_queued: 5, jobs_per_minute: 60, models: [toy]}
tenants:
  studio: {weight: 3, max_queued: null, pixel_steps_per_minute: 2.0e+9, models: [toy, other], loras: []}
  7: {max_priority: -5}
"""


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "limits.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_tenant_has_what_it_says_and_else_the_default(file):
    found = read_tenants(file(GOOD))
    assert found.of("anybody") == TenantLimits(max_queued=5, jobs_per_minute=60.0, models=("toy",))
    assert found.of("studio") == TenantLimits(
        weight=3.0, jobs_per_minute=60.0, pixel_steps_per_minute=2e9, models=("toy", "other"), loras=()
    )
    assert found.of("7").max_priority == -5


@pytest.mark.parametrize("name", FIELDS)
def test_every_limit_can_be_given(file, name):
    value = {"models": "[a]", "loras": "[a]", "weight": "2.5"}.get(name, "3")
    limits = read_tenants(file(f"tenants: {{t: {{{name}: {value}}}}}")).of("t")
    assert getattr(limits, name) != getattr(TenantLimits(), name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected `default:` and `tenants:`"),
        ("[]", "expected `default:` and `tenants:`"),
        ("a: [", "not valid YAML"),
        ("tennants: {}", "tennants: no such limit; did you mean tenants?"),
        ("tenants: [a]", "expected a mapping from a tenant's name"),
        ("tenants: {a: 5}", "tenants.a: expected limits"),
        ("tenants: {a: {max_queud: 5}}", "tenants.a.max_queud: no such limit; did you mean max_queued?"),
        ("default: {weight: 0}", "default.weight: 0 is not a number above 0"),
        ("default: {weight: null}", "default.weight: None is not a number above 0"),
        ("default: {weight: .inf}", "is not a number above 0"),
        ("default: {max_running: 0}", "default.max_running: 0 is not a whole number from 1"),
        ("default: {max_queued: true}", "is not a whole number from 0"),
        ("default: {max_queued: 1.5}", "is not a whole number from 0"),
        ("default: {pixel_steps_per_minute: 2e9}", "2.0e\\+9 with its point and sign"),
        ("default: {models: toy}", "expected a list of names"),
    ],
)
def test_what_is_wrong_is_named(file, text, says):
    with pytest.raises(ConfigError, match=says) as refused:
        read_tenants(file(text))
    assert (refused.value.reason, refused.value.violations[0].field) == ("BAD_TENANT_LIMITS", "tenant_limits")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml: there is no such file|none.yaml"):
        read_tenants(tmp_path / "none.yaml")
