"""Bugs that users reported against other diffusion servers: each has a test here, or a reason why not yet.

The reports are numbered B001 to B137, by section. A test is named for what it shows; the comment above it names its
report.
"""

import re
from collections.abc import Mapping
from pathlib import Path

REPORTS: Mapping[str, tuple[int, ...]] = {
    "request validation": (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 15, 16, 17),
    "determinism": (18, 19, 20, 21, 23, 24, 25, 26, 27),
    "guidance": (28, 29, 31, 32),
    "quantisation": (57, 58, 59, 61, 62),
    "cancellation": (99, 101, 102, 103, 104, 105, 106, 107),
    "progress": (108, 110, 111, 112, 113),
    "concurrency": (114, 115, 116, 117, 118, 119),
    "robustness": (120, 121, 123, 124, 125, 126, 127),
}
"""The sections that are covered so far."""

NOT_YET: Mapping[int, str] = {
    25: "the number of GPUs changes the picture: there is no parallelism over GPUs yet",
    31: "the unconditional pass of an edit sees the condition image: there is no editing yet",
    127: "a fault of the GPU leaves a worker that lives and is of no use: needs a GPU to fault",
}
"""What needs a feature or a device that is not there."""

PARTLY: Mapping[int, str] = {
    4: "frames: the budget of pixels counts images alone until there is video",
    5: "the number of steps of video and sound: the one rule is there, the tasks are not",
    102: "what changes weights under a job: LoRA, sleep and unload are not there",
    111: "totals under img2img strength and samplers of higher order: neither is there",
}
"""What the tests of a report leave out, for the same reason."""


def covered() -> set[int]:
    folder = Path(__file__).parent
    sources = (path.read_text(encoding="utf-8") for path in folder.glob("test_*.py"))
    return {int(number) for source in sources for number in re.findall(r"^# report B(\d{3})$", source, re.MULTILINE)}


def test_every_report_has_a_test_or_a_reason():
    reported = {number for numbers in REPORTS.values() for number in numbers}
    assert covered() | NOT_YET.keys() == reported
    assert not covered() & NOT_YET.keys(), "a report that has a test now"
    assert PARTLY.keys() <= covered()
