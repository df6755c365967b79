"""Times on the command line: a length such as 30d, 12h or 45m, counted from now, or a date."""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Mapping

from omni_grpc.identity.records import time_of

UNITS: Mapping[str, str] = {"d": "days", "h": "hours", "m": "minutes"}
EXPECTED = "expected 30d, 12h, 45m, or a date such as 2026-12-31 or 2026-12-31T18:00:00Z"


def ahead(text: str) -> datetime.datetime:
    """The type of a flag for a time to come. Raises ArgumentTypeError for what is none."""
    moment = _moment(text, 1)
    if moment <= now():
        raise argparse.ArgumentTypeError(f"{text} has passed")
    return moment


def back(text: str) -> datetime.datetime:
    """The same for any time, where a length is one ago."""
    return _moment(text, -1)


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _moment(text: str, direction: int) -> datetime.datetime:
    try:
        match = re.fullmatch(r"([1-9]\d{0,5})([dhm])", text)
        length = match and datetime.timedelta(**{UNITS[match[2]]: int(match[1])})
        return now() + direction * length if length else time_of(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: {EXPECTED}") from None
