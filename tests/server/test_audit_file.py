"""The file of the audit log: what is written, what waits, what is lost, and files that are moved away."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_grpc.gate import audit_file
from omni_grpc.gate.audit_file import AuditFile
from omni_grpc.types.errors import ConfigError
from tests.full_disk import small_files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_file, "RETRY", 0.02)


def numbers(path: Path) -> list[int]:
    """The numbers of the lines; each must be whole."""
    return [line.get("n", -line.get("lines", 0)) for line in map(json.loads, path.read_text().splitlines())]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_lines_come_in_order_and_the_file_is_the_owners(path: Path) -> None:
    file = AuditFile(str(path), {"n": 0})
    for number in range(1, 500):
        file.write({"n": number})
    file.close({"n": 500})
    assert numbers(path) == list(range(501))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = AuditFile(str(path), {"n": 501})
    again.close({"n": 502})
    assert numbers(path) == list(range(503)), "it goes on"


@pytest.mark.parametrize("moved", ["renamed", "removed", "asked"])
def test_a_file_that_was_moved_is_made_anew(path: Path, moved: str) -> None:
    file = AuditFile(str(path), {"n": 0})
    file.write({"n": 1})
    until(lambda: path.read_text().count("\n") == 2)
    if moved == "removed":
        path.unlink()
    else:
        path.rename(path.with_suffix(".1"))
    if moved == "asked":
        file.reopen()
        until(path.exists)
    file.write({"n": 2})
    file.close({"n": 3})
    assert numbers(path) == [2, 3]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert moved == "removed" or numbers(path.with_suffix(".1")) == [0, 1]


def test_lines_of_a_truncated_file_go_on_at_its_beginning(path: Path) -> None:
    file = AuditFile(str(path), {"n": 0})
    os.truncate(path, 0)
    file.close({"n": 1})
    assert numbers(path) == [1], "without a hole before it, as copytruncate of logrotate leaves it"


def test_a_full_disk_holds_nobody_up_and_the_file_says_what_is_missing(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_file, "MOST_WAITING", 10)
    file = AuditFile(str(path), {"n": 0})
    with small_files(14):
        # the first of them fits in part
        for number in range(1, 14):
            file.write({"n": number})
        until(lambda: "cannot be written" in caplog.text)
        time.sleep(0.1)
    until(lambda: path.read_text().count("\n") == 11)
    file.write({"n": 14})
    file.close({"n": 15})
    assert numbers(path) == [*range(11), -3, 14, 15]
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("cannot be written" in message for message in told) == 1, "once, whatever the number of attempts"
    assert any("from now on lines are lost" in message for message in told)
    assert any("can be written again" in message for message in told)


def test_a_disk_that_stays_full_is_told_at_the_end(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = AuditFile(str(path), {"n": 0})
    with small_files(9):
        began = time.monotonic()
        file.write({"n": 1})
        file.close({"n": 2})
    assert time.monotonic() - began < audit_file.LAST
    assert "closed without its last 2 lines" in caplog.text


def test_standard_output_that_nobody_reads_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    kept = os.dup(1)
    os.dup2(writer, 1)
    try:
        file = AuditFile("-", {"n": 0})
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(writer)
    began = time.monotonic()
    for number in range(1, 9000):
        file.write({"n": number, "padding": "x" * 20})
    assert time.monotonic() - began < 5, "a pipe has room for 1500 of them"
    text: list[bytes] = []
    reading = threading.Thread(target=lambda: text.extend(iter(lambda: os.read(reader, 1 << 16), b"")))
    reading.start()
    file.close({"n": 9000})
    reading.join()
    os.close(reader)
    assert [json.loads(line)["n"] for line in b"".join(text).splitlines()] == list(range(9001))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "it is a folder"),
        (lambda path: os.mkfifo(path), "no regular file: name one|nothing reads from it"),
        (lambda path: path.symlink_to("/dev/full"), "no regular file: name one, or - for standard output"),
        (lambda path: (path.touch(), path.chmod(0o620)), "run `chmod go-w"),
    ],
)
def test_what_is_no_file_of_its_own_is_refused(path: Path, make: Callable[[Path], object], message: str) -> None:
    make(path)
    with pytest.raises(ConfigError, match=message) as caught:
        AuditFile(str(path), {"n": 0})
    assert caught.value.violations[0].field == "audit_log"


def test_a_full_disk_is_refused_at_the_start(path: Path) -> None:
    with small_files(0), pytest.raises(ConfigError, match=r"ulimit -f.*Name a file that this user may write"):
        AuditFile(str(path), {"n": 0})


def test_a_log_that_others_may_read_keeps_its_mode(path: Path) -> None:
    path.touch()
    path.chmod(0o640)
    AuditFile(str(path), {"n": 0}).close({"n": 1})
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
