"""The progress of loading a model: the same words for the worker, the server and its clients."""

from __future__ import annotations

import dataclasses
import enum


class LoadPhase(enum.StrEnum):
    """The phases of loading, in order."""

    DOWNLOADING = "DOWNLOADING"
    LOADING = "LOADING"
    WARMING_UP = "WARMING_UP"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """The newest of a download is `file` of `component`; `done_bytes` of the `total_bytes` of all weights are here.

    Empty and 0 in the other phases, and as long as the sizes are not known.
    """

    phase: LoadPhase = LoadPhase.LOADING
    component: str = ""
    file: str = ""
    done_bytes: int = 0
    total_bytes: int = 0

    def __str__(self) -> str:
        words = self.phase.replace("_", " ").lower()
        if not self.total_bytes:
            return words
        component = f" {self.component}" if self.component else ""
        return f"{words}{component}, {size_text(self.done_bytes)} of {size_text(self.total_bytes)}"


def size_text(count: float) -> str:
    """A number of bytes for people, in powers of 1000."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
