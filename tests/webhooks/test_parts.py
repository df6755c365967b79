"""The file of secrets, the signature and the schedule."""

import pytest

from omni_grpc.store.records import Delivery, JobState
from omni_grpc.types.errors import ConfigError
from omni_grpc.webhooks import Schedule, read_secrets, signed

KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "another secret, of 32 characters"


@pytest.fixture
def secrets_file(tmp_path):
    def write(text, mode=0o600):
        path = tmp_path / "webhooks.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)
        return path

    return write


# --- the file ---------------------------------------------------------------------------------------------------------


def test_secrets_have_names_and_tenants(secrets_file):
    path = secrets_file(
        f"- {{name: studio, tenants: [studio, lab], secret: {KEY}}}\n- name: all\n  secret: ['{OTHER}', {KEY}]\n"
    )
    secrets = read_secrets(path)
    assert len(secrets.find("studio", "lab").keys[0]) == 24
    assert secrets.find("studio", "shop") is None
    assert secrets.find("gone", "studio") is None
    assert secrets.find("all", "").keys == (OTHER.encode(), secrets.find("studio", "studio").keys[0])
    assert (secrets.names("studio"), secrets.names("shop")) == (["all", "studio"], ["all"])
    assert "MfKQ" not in repr(secrets)
    assert OTHER not in repr(secrets)
    assert read_secrets(secrets_file("[]")).names("") == []


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640])
def test_a_file_that_strangers_cannot_read_is_taken(secrets_file, mode):
    assert read_secrets(secrets_file("[]", mode)).by_name == {}


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o660, 0o602, 0o620])
def test_a_file_that_strangers_read_or_others_write_is_refused(secrets_file, mode):
    with pytest.raises(ConfigError, match=rf"mode {mode:o}\): chmod 600 .*webhooks\.yaml"):
        read_secrets(secrets_file("[]", mode))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "expected a list of secrets"),
        ("name: a", "expected a list of secrets"),
        ("- a", r"\[0\]: expected name, secret"),
        (f"- {{secret: {KEY}}}", r"\[0\]\.name: expected"),
        (f"- {{name: '', secret: {KEY}}}", r"\[0\]\.name: expected"),
        (f'- {{name: "a\\nb", secret: {KEY}}}', r"\[0\]\.name: expected"),
        (f"- {{name: a, secret: {KEY}}}\n- {{name: a, secret: {KEY}}}", r"\[1\]\.name: the same"),
        (f"- {{name: a, secert: {KEY}}}", r"there are name, secret, tenants"),
        (f"- {{{KEY}: a}}", r"there are name, secret, tenants"),
        ("- {name: a}", r"\[0\]\.secret: expected text, .*openssl rand"),
        ("- {name: a, secret: []}", r"\[0\]\.secret: expected one secret, or a list of up to 4"),
        (f"- {{name: a, secret: [{', '.join([KEY] * 5)}]}}", "list of up to 4"),
        ("- {name: a, secret: 123456789012345678901234567890}", "expected text"),
        ("- {name: a, secret: MfKQ9r8GKYqrTwjUPD8ILPZ}", r"has 23 bytes; .*openssl rand"),
        ("- {name: a, secret: whsec_MfKQ9r8GKYqrTwjU}", "has 12 bytes"),
        (f"- {{name: a, secret: whsec_{'MfKQ' * 22}}}", "has 66 bytes"),
        (f"- {{name: a, secret: [{KEY}, MfKQ]}}", r"\[0\]\.secret\[1\]: has 4 bytes"),
        ("- {name: a, secret: whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaS}", "not followed by base64"),
        ("- {name: a, secret: whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2L%LaSw}", "not followed by base64"),
        ("- {name: a, secret: whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2L\u00e4LaSw}", "not followed by base64"),
        (f"- {{name: a, secret: {KEY}, tenants: []}}", r"\[0\]\.tenants: expected a list"),
        (f"- {{name: a, secret: {KEY}, tenants: studio}}", r"\[0\]\.tenants: expected a list"),
        (f"- {{name: a, secret: {KEY}, tenants: [1]}}", r"\[0\]\.tenants: expected a list"),
        ("- name: a\n  secret: *MfKQ9r8GKYqrTwjUPD8ILPZI", r":2: not valid YAML$"),
        ("- name: a\n  secret: !MfKQ9r8GKYqrTwjUPD8ILPZI b", r":2: not valid YAML$"),
        ("- {name: a, secret: MfKQ\x07}", "not valid YAML$"),
        ("[" * 5000, "not valid YAML$"),
        (b"\xff", "not UTF-8 text, at byte 0"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_its_secrets(secrets_file, text, rule):
    with pytest.raises(ConfigError, match=rule) as caught:
        read_secrets(secrets_file(text))
    assert "MfKQ" not in str(caught.value)
    assert "MfKQ" not in str(caught.value.__cause__)
    assert [violation.field for violation in caught.value.violations] == ["webhook_secrets"]


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--webhook-secrets .*gone\.yaml: there is no such file"):
        read_secrets(tmp_path / "gone.yaml")


# --- the signature ----------------------------------------------------------------------------------------------------


def delivery(**changes):
    fields = {
        "id": "msg_p5jXN8AQM9LWM0D4loKWxJek", "job_id": "job_1", "tenant": "", "state": JobState.SUCCEEDED,
        "url": "https://hooks.test/", "host": "hooks.test", "secret_name": "a", "body": b'{"test": 2432232314}',
        "create_time": 0.0, "due": 0.0,
    }  # fmt: skip
    return Delivery(**fields | changes)


def test_a_signature_is_that_of_standard_webhooks(secrets_file):
    """The example of https://docs.svix.com/receiving/verifying-payloads/how-manual."""
    keys = read_secrets(secrets_file(f"- {{name: a, secret: {KEY}}}")).find("a", "").keys
    headers = signed(delivery(), keys, 1614265330.9)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert headers["webhook-timestamp"] == "1614265330"
    assert headers["webhook-id"] == "msg_p5jXN8AQM9LWM0D4loKWxJek"
    both = signed(delivery(), (OTHER.encode(), *keys), 1614265330.9)["webhook-signature"].split(" ")
    assert len(set(both)) == 2
    assert both[1] == headers["webhook-signature"]
    assert "webhook-signature" not in signed(delivery(), (), 0)


# --- the schedule -----------------------------------------------------------------------------------------------------


def pauses(schedule, chance):
    """The pauses until it is given up, for a receiver that answers at once."""
    now, found = 0.0, []
    while (due := schedule.due(len(found) + 1, created=0.0, now=now, chance=chance)) is not None:
        found.append(due - now)
        now = due
    return found


def test_the_default_schedule_is_the_documented_one():
    found = pauses(Schedule(), 0.5)
    assert found == pytest.approx([5, 15, 45, 135, 405, 1215, 3645, 10935, 21600, 21600])
    assert sum(found) == pytest.approx(16.56 * 3600, rel=1e-3)
    assert pauses(Schedule(), 0.0) == pytest.approx([0.8 * pause for pause in found])
    assert pauses(Schedule(), 1.0) == pytest.approx([1.2 * pause for pause in found])


@pytest.mark.parametrize(
    ("asked", "pause"), [(None, 45.0), (10.0, 45.0), (50.0, 50.0), (7200.0, 3600.0), (float("inf"), 3600.0)]
)
def test_a_receiver_may_ask_for_a_longer_pause(asked, pause):
    assert Schedule().due(3, created=0.0, now=100.0, chance=0.5, retry_after=asked) == pytest.approx(100 + pause)


def test_there_is_no_attempt_after_the_span():
    assert Schedule().due(10, created=0.0, now=86400 - 21601.0, chance=0.5) == pytest.approx(86399.0)
    assert Schedule().due(10, created=0.0, now=86400 - 21599.0, chance=0.5) is None
    assert Schedule().due(1, created=0.0, now=90000.0, chance=0.5) is None
    assert Schedule(attempts=10**6, span=1e12).due(10**5, created=0.0, now=0.0, chance=0.5) == 21600.0
