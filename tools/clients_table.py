"""Runs the list of behaviours that all clients share, and prints as a Markdown table what each client does.

    python -m tools.clients_table            the clients that are built (make clients); some minutes
    python -m tools.clients_table --write    puts the table into docs/clients.md too

A client that is not built has "not built" in its cells. The exit code is 1 where a test failed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence

import pytest

from tests.clients.programs import CLIENTS, LANGUAGES
from tools.conformance_table import FAILED, HELD, ROOT, table, written

PAGE = ROOT / "docs" / "clients.md"
TESTS = "tests/clients/test_conformance.py"
MISSING = "not built"
SUFFIXES = {".py", ".ts", ".mjs", ".js", ".go", ".cc", ".cpp", ".java"}
CASE = re.compile(r"::test_(\w+)\[(\w+)\]$")


class Collector:
    """A plugin of pytest that fills the cells: (behaviour, language) -> what came of it."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str], str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not (found := CASE.search(report.nodeid)):
            return
        at = (found[1], found[2])
        if report.failed:
            self.cells[at] = FAILED
        elif report.skipped:
            self.cells[at] = MISSING
        elif report.when == "call":
            self.cells.setdefault(at, HELD)


def behaviors(cells: Mapping[tuple[str, str], str], languages: Sequence[str]) -> str:
    names = list(dict.fromkeys(behaviour for behaviour, _ in cells))
    rows = [(f"`{name}`", *(cells.get((name, language), "") for language in languages)) for name in names]
    examples = ("lines of the example", *(example_lines(language) for language in languages))
    return table(["behaviour", *languages], [*rows, examples])


def example_lines(language: str) -> int | str:
    """How long a client's shortest example is, without empty lines and comments of a line."""
    files = [path for path in (CLIENTS / language / "examples").rglob("*") if path.suffix in SUFFIXES]
    lengths = [sum(1 for line in path.read_text().splitlines() if counts(line)) for path in files]
    return min(lengths, default="")


def counts(line: str) -> bool:
    return bool(line.strip()) and not line.strip().startswith(("//", "#!", "/*", "*", '"""'))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--write", action="store_true", help="write the table into docs/clients.md")
    options = parser.parse_args()
    collector = Collector()
    code = pytest.main(["--durations-min=1000", str(ROOT / TESTS)], [collector])
    made = behaviors(collector.cells, LANGUAGES)
    print(f"\n{made}")
    if options.write and code == pytest.ExitCode.OK:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), "behaviours", made), encoding="utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
