"""How a line of the log is written, in every process: as text, or as one object of JSON. What comes too often is said
once a minute.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, TextIO

WINDOW = 60.0
"""Seconds within which repeats are counted."""
JOB_ID = re.compile(r"\bjob_[0-9a-z]{26}\b")
TEXT = "%(asctime)s %(levelname)s {name}: %(message)s"
_CONTROLS: Mapping[int, str] = {code: f"\\x{code:02x}" for code in (*range(32), 127) if chr(code) not in "\n\t"}
"""What a terminal would obey, and what would look like the end of a line in some viewer."""


@dataclasses.dataclass(slots=True)
class Within:
    """The call within which a line is written. Tasks that it has begun and that outlive it have it too, so it says
    when it is over.
    """

    trace_id: str = ""
    tenant: str = ""
    over: bool = False


within: ContextVar[Within] = ContextVar("within")


def more(always: bool = False, **fields: object) -> Mapping[str, Any]:
    """What a line has beside its text, for `extra`: fields of its own in JSON. `always`: it is written however often it
    comes.
    """
    return {"fields": fields, "always": always}


class Text(logging.Formatter):
    """A line for people, beginning with who writes it: the name of the logger, or that of the process."""

    def __init__(self, who: str) -> None:
        super().__init__(TEXT.format(name=who or "%(name)s"))

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(_CONTROLS)
        return super().formatMessage(record)


class Json(logging.Formatter):
    """A line for programs. `process` names what wrote it; the other fields are there where they are known."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who or "server"

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        line: dict[str, object] = {
            "time": rfc3339(record.created),
            "level": record.levelname,
            "logger": record.name,
            "process": self._who,
            "message": message,
        }
        call = within.get(None)
        if call is not None and not call.over:
            line |= {name: value for name in ("tenant", "trace_id") if (value := getattr(call, name))}
        if (found := JOB_ID.search(message)) is not None:
            line["job_id"] = found[0]
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str)


def rfc3339(seconds: float) -> str:
    """A time in Unix seconds, as RFC 3339 has it, in UTC and to the microsecond."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="microseconds")[:-6] + "Z"


@dataclasses.dataclass(slots=True)
class _Seen:
    """A kind of line since the time `began`. `last` is the newest of those that were not written."""

    began: float
    count: int = 0
    last: logging.LogRecord | None = None


class Lines(logging.StreamHandler[TextIO]):
    """Writes lines. Of one logger and one text, not counting what is filled in, it writes at most `most` a minute, and
    then how many there were; 0: all. Those of level DEBUG are all written: whoever asks for them wants them.
    """

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self.most = 0
        self._clock = clock
        self._seen: dict[tuple[str, object], _Seen] = {}
        self._next_look = 0.0
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self._look()
        if not self._is_too_much(record):
            super().emit(record)

    def close(self) -> None:
        """Says what was still to be said."""
        self._tell_all()
        super().close()

    def _is_too_much(self, record: logging.LogRecord) -> bool:
        if not self.most or record.levelno <= logging.DEBUG or getattr(record, "always", False):
            return False
        now = self._clock()
        seen = self._seen.setdefault((record.name, record.msg), _Seen(now))
        seen.count += 1
        if seen.count <= self.most:
            return False
        seen.last = record
        if self._timer is None:
            # nothing else may come that would have it said
            self._timer = threading.Timer(max(0.0, seen.began + WINDOW - now) + 0.1, self._tell_all)
            self._timer.daemon = True
            self._timer.start()
        return True

    def _look(self) -> None:
        """Begins anew with what was first seen a minute ago."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + 1.0
        over = [key for key, seen in self._seen.items() if now - seen.began >= WINDOW]
        for key in over:
            self._tell(self._seen.pop(key))

    def _tell_all(self) -> None:
        self.acquire()
        try:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            seen, self._seen = self._seen, {}
            for one in seen.values():
                self._tell(one)
        finally:
            self.release()

    def _tell(self, seen: _Seen) -> None:
        if (last := seen.last) is None:
            return
        count = seen.count - self.most
        message = f"repeated {count} times within {WINDOW:g} s, last: {last.getMessage()}"
        said = logging.LogRecord(last.name, last.levelno, last.pathname, last.lineno, message, None, None)
        said.fields = {**getattr(last, "fields", {}), "repeated": count}
        super().emit(said)
