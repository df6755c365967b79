"""How lines of the log are written: as text or JSON, and what comes too often."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator

import pytest

from omni_grpc.types.log_lines import Json, Lines, Text, Within, more, rfc3339, within

ID = "job_01k0y2t6zj8q4n5r7s9v0w1x2y"


class Log:
    """A logger with a handler of ours, whose clock is `now`."""

    def __init__(self, name: str) -> None:
        self.now = 0.0
        self.stream = io.StringIO()
        self.handler = Lines(self.stream, clock=lambda: self.now)
        self.handler.setFormatter(Json(""))
        self.logger = logging.getLogger(name)
        self.logger.handlers, self.logger.propagate = [self.handler], False
        self.logger.setLevel(logging.DEBUG)

    @property
    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    @property
    def messages(self) -> list[object]:
        return [line["message"] for line in self.lines]


@pytest.fixture
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    made = Log(f"tests.{request.node.name}")
    yield made
    made.handler.close()
    made.logger.handlers, made.logger.propagate = [], True


def test_a_line_of_json_has_what_is_known(log: Log) -> None:
    log.logger.warning("output of %s is not stored", ID)
    (line,) = log.lines
    assert line.pop("time").endswith("Z")  # type: ignore[attr-defined]
    assert line == {
        "level": "WARNING",
        "logger": log.logger.name,
        "process": "server",
        "message": f"output of {ID} is not stored",
        "job_id": ID,
    }


def test_a_line_within_a_call_has_its_trace_and_tenant_until_it_is_over(log: Log) -> None:
    call = Within(trace_id="0af7", tenant="studio")
    token = within.set(call)
    try:
        log.logger.info("one")
        call.over = True
        log.logger.info("two")
    finally:
        within.reset(token)
    one, two = log.lines
    assert (one["trace_id"], one["tenant"]) == ("0af7", "studio")
    assert "trace_id" not in two


def test_an_exception_is_one_line(log: Log) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.logger.exception("failed")
    (line,) = log.lines
    assert line["message"] == "failed"
    assert str(line["exception"]).endswith("ValueError: two\nlines")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "1970-01-01T00:00:00.000000Z"), (1786300000.25, "2026-08-09T18:26:40.250000Z")]
)
def test_times_are_those_of_rfc_3339(seconds: float, text: str) -> None:
    assert rfc3339(seconds) == text


def test_text_shows_what_a_terminal_would_obey() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "%s", ("\x1b[2Jx\ry\nz",), None)
    assert Text("worker").format(record).partition(" INFO ")[2] == "worker: \\x1b[2Jx\\x0dy\nz"
    assert Text("").format(record).partition(" INFO ")[2].startswith("a: ")


def test_what_comes_too_often_is_counted(log: Log) -> None:
    log.handler.most = 3
    for number in range(10):
        log.logger.info("refused %d", number)
    log.logger.info("other")
    assert log.messages == ["refused 0", "refused 1", "refused 2", "other"]
    log.now = 61.0
    log.logger.info("refused %d", 10)
    assert log.messages[4:] == ["repeated 7 times within 60 s, last: refused 9", "refused 10"]
    assert log.lines[4]["repeated"] == 7


@pytest.mark.parametrize(
    "write",
    [
        lambda log, number: log.logger.debug("%d", number),
        lambda log, number: log.logger.info("%d", number, extra=more(always=True)),
    ],
)
def test_lines_that_are_wanted_are_all_written(log: Log, write: Callable[[Log, int], None]) -> None:
    log.handler.most = 3
    for number in range(10):
        write(log, number)
    assert len(log.lines) == 10


def test_without_a_limit_all_are_written(log: Log) -> None:
    for _ in range(100):
        log.logger.info("again")
    assert len(log.lines) == 100


def test_what_is_left_is_said_at_the_end(log: Log) -> None:
    log.handler.most = 1
    for _ in range(4):
        log.logger.error("again")
    log.handler.close()
    assert log.messages == ["again", "repeated 3 times within 60 s, last: again"]


def test_it_is_said_in_a_silence_too(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_grpc.types.log_lines.WINDOW", 0.0)
    log.handler.most = 1
    for _ in range(4):
        log.logger.error("again")
    assert log.handler._timer is not None
    log.handler._timer.join(10)
    assert log.messages[0] == "again"
    assert sum("repeated" in str(message) for message in log.messages) == 1


def test_kinds_of_lines_that_were_seen_once_are_forgotten(log: Log) -> None:
    log.handler.most = 3
    for number in range(1000):
        log.now = float(number)
        log.logger.info(f"unlike {number}")
    assert len(log.handler._seen) < 70
