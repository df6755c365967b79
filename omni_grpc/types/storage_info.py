"""Where a server keeps jobs, outputs and uploads, as it may be told to anybody."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

PLACES: Mapping[str, str] = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "folder": "a folder", "s3": "S3"}
"""What keeps things, in words."""
GIB = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageInfo:
    """Without addresses and paths. `rows` is what keeps the jobs: "memory", "sqlite" or "postgresql"; `files` what
    keeps outputs and uploads: "memory", "folder" or "s3". Times in seconds.
    """

    durable: bool
    shared: bool
    rows: str
    files: str
    retention: float
    max_retention: float
    artifact_budget_bytes: int
    asset_budget_bytes: int

    def __str__(self) -> str:
        """One line: what a restart leaves, and for how long ended jobs are kept."""
        budget = f"{self.artifact_budget_bytes / GIB:.3g} GiB"
        kept = f"for {time_text(self.retention)} after their end, with outputs of at most {budget}"
        if not self.durable:
            return f"jobs are kept in memory: a restart loses them (--state-dir keeps them); {kept}"
        others = ", which other servers can share" if self.shared else ""
        rows, files = (PLACES.get(name, name) for name in (self.rows, self.files))
        return f"jobs are kept in {rows} and outputs in {files}{others}: a restart goes on with them; {kept}"


def time_text(seconds: float) -> str:
    """A time in the largest unit of which it is a whole number: "7 days", "10 minutes", "90 s"."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= size and seconds % size == 0:
            count = f"{seconds / size:g}"
            return f"1 {unit[:-1]}" if count == "1" else f"{count} {unit}"
    return f"{seconds:g} s"
