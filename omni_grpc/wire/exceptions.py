"""The fields that the mapper cannot convert by name and type alone, in one table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

from omni_grpc.types.events import Failed, Retrying, StepProgress
from omni_grpc.types.lora import Lora
from omni_grpc.types.request import Guidance, GuidanceNorm
from omni_grpc.types.results import Artifact, Effective
from omni_grpc.types.step_cache import CacheCount

ABSENT: Final = object()
"""Stands for "no value", where None is one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FieldRule:
    """How one field of a record differs from the field of its message. `why` is for the reader of the table.

    `name` is its name on the wire, if it has another one there. The value `hides` is sent as an unset field. An unset
    field reads as `reads` instead of the record's default. A field with `sent=False` is not on the wire at all.
    """

    why: str
    name: str = ""
    hides: Any = ABSENT
    reads: Any = ABSENT
    sent: bool = True


_STATUS = FieldRule(why="on the wire it is a google.rpc.Status, and named so", name="status")
_PLAYING_TIME = FieldRule(why="unset for what has no playing time, as pictures", hides=0.0)
_MEASURED = FieldRule(why="the wire has their ratio, mean_residual_diff", sent=False)

EXCEPTIONS: Mapping[tuple[type, str], FieldRule] = {
    (Failed, "failure"): _STATUS,
    (Retrying, "failure"): _STATUS,
    (StepProgress, "eta"): FieldRule(why="no estimate is not zero seconds", reads=math.nan),
    (StepProgress, "total_segments"): FieldRule(why="the wire says 0 where an output has one", hides=1, reads=1),
    (Artifact, "duration"): _PLAYING_TIME,
    (Effective, "duration"): _PLAYING_TIME,
    (Guidance, "norm"): FieldRule(why="unspecified where the model does not use it", reads=GuidanceNorm.NONE),
    (Lora, "uid"): FieldRule(why="which load an id means is the server's to say", sent=False),
    (CacheCount, "measured"): _MEASURED,
    (CacheCount, "change"): _MEASURED,
    (CacheCount, "observed"): FieldRule(why="the API has no calibration", sent=False),
}

_SAME = FieldRule(why="mapped by name")


def rule(record: type, name: str) -> FieldRule:
    """The row of a field, or one without differences."""
    return EXCEPTIONS.get((record, name), _SAME)
