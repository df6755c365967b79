"""The rows that were taken from the documents (rows.json) and what is ours of each (status.toml)."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
STATUSES = ("works", "not yet", "refused")
Key = tuple[str, str, str]
"""Document, kind, name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. It stands for a row of each document that has it."""

    kind: str
    name: str
    docs: Sequence[str]
    status: str
    ours: str
    checks: Sequence[str]

    @property
    def keys(self) -> list[Key]:
        return [(doc, self.kind, self.name) for doc in self.docs]


def extracted(text: str | None = None) -> list[Key]:
    content = (FOLDER / "rows.json").read_text(encoding="utf-8") if text is None else text
    return [(row["doc"], row["kind"], row["name"]) for row in json.loads(content)]


def table(text: str | None = None) -> list[Row]:
    content = (FOLDER / "status.toml").read_text(encoding="utf-8") if text is None else text
    rows: list[Mapping[str, Any]] = tomllib.loads(content)["row"]
    return [Row(**row) for row in rows]


def faults(wanted: Iterable[Key], rows: Sequence[Row]) -> list[str]:
    """What is wrong with the table as a table: rows that lack, that nobody asked for, that are there twice, and rows
    that say nothing.
    """
    wanted, found = Counter(wanted), Counter(key for row in rows for key in row.keys)
    return [
        *(f"no row for {key}" for key in wanted.keys() - found.keys()),
        *(f"not in the documents: {key}" for key in found.keys() - wanted.keys()),
        *(f"{count} rows for {key}" for key, count in found.items() if count > 1),
        *(f"{row.name}: status {row.status!r}" for row in rows if row.status not in STATUSES),
        *(f"{row.name}: does not say what is ours" for row in rows if not row.ours),
        *(f"{row.name}: works, and nothing checks it" for row in rows if row.status == "works" and not row.checks),
    ]


def counts(rows: Iterable[Row]) -> dict[str, dict[str, int]]:
    """Document -> status -> number of its rows."""
    numbers = Counter((doc, row.status) for row in rows for doc in row.docs)
    return {doc: {status: numbers[doc, status] for status in STATUSES} for doc in sorted({doc for doc, _ in numbers})}
