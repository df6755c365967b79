"""The unit of systemd: verified, rated, and in accordance with the server that it starts."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from .manifests import DEPLOY, STOP_SECONDS, read

FOLDER = DEPLOY / "systemd"
UNIT = FOLDER / "omni-grpc.service"
EXPOSED = 2.5
"""The highest rate of `systemd-analyze security` that is accepted, of 10."""


def service() -> dict[str, list[str]]:
    """The section [Service], with all values of each key."""
    _, _, rest = UNIT.read_text(encoding="utf-8").partition("[Service]\n")
    section, _, _ = rest.partition("\n[Install]")
    found: dict[str, list[str]] = {}
    for line in section.splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@pytest.fixture
def systemd(tmp_path: Path) -> Path:
    """A copy of the unit whose program is there; skipped where systemd is not."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    copy = tmp_path / UNIT.name
    text = UNIT.read_text(encoding="utf-8")
    copy.write_text(text.replace("/opt/omni-grpc/bin/omni-grpc", shutil.which("true") or "/bin/true"), encoding="utf-8")
    return copy


def analyze(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("drop_in", [False, True])
def test_systemd_knows_every_line(systemd, drop_in):
    if drop_in:
        folder = systemd.with_name(f"{systemd.name}.d")
        folder.mkdir()
        shutil.copy(FOLDER / "cpu.conf", folder)
    ran = analyze("verify", systemd)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_unit_is_hardened(systemd):
    ran = analyze("security", "--offline=yes", systemd)
    (rate,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", ran.stdout)
    assert float(rate) <= EXPOSED, ran.stdout


def test_the_settings_are_those_of_a_server(tmp_path):
    (start,) = service()["ExecStart"]
    _, command, *words = start.split()
    assert command == "serve"
    settings = FOLDER / Path(words[words.index("--config") + 1]).name
    config = read(["--config", str(settings)], {})
    seconds = int(service()["TimeoutStopSec"][0])
    assert seconds > config.server.drain_timeout + STOP_SECONDS
    for key, path in (("StateDirectory", config.store.state_dir), ("LogsDirectory", config.audit.audit_log)):
        base = {"StateDirectory": "/var/lib", "LogsDirectory": "/var/log"}[key]
        assert str(path).startswith(f"{base}/{service()[key][0]}"), "the rest of the disk cannot be written"
    (name,) = re.findall(r"^u (\S+) ", (FOLDER / "omni-grpc.sysusers").read_text(encoding="utf-8"), re.MULTILINE)
    assert [name] == service()["User"] == service()["Group"]


def test_it_waits_for_what_the_server_says():
    assert service()["Type"] == ["notify"]
    assert int(service()["WatchdogSec"][0]) > 0
    assert service()["RestartPreventExitStatus"] == ["2"], "a wrong setting"
    assert service()["KillMode"] == ["mixed"], "a drain ends the workers itself"


def test_the_drop_in_and_the_environment_are_read():
    parser = configparser.ConfigParser(strict=False)
    parser.read(FOLDER / "cpu.conf", encoding="utf-8")
    assert parser["Service"]["PrivateDevices"] == "yes"
    assert service()["EnvironmentFile"] == ["-/etc/omni-grpc/environment"]
    lines = (FOLDER / "environment").read_text(encoding="utf-8").splitlines()
    assert all(line.startswith("#") for line in lines), "it holds no secret"
