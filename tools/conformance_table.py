"""Runs what models and features have to hold, and prints as Markdown tables what is equal to what, and how close.

    python -m tools.conformance_table            about half an hour on two cores
    python -m tools.conformance_table --turns    each cell of the table of ranks on one family of blocks, ten minutes
    python -m tools.conformance_table --write    puts the tables into docs/features.md too
    python -m tools.conformance_table --lines    how long each model's code is; runs nothing

A test says which line it fills, `@pytest.mark.shows(what, like, close)`, or which cell of the table of ranks,
`@pytest.mark.crosses(way, feature)`, and in its property "shows" what it found there. All of it runs in float32 on the
CPU, on tiny checkpoints with random weights. The exit code is 1 where a test failed.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "features.md"
TESTS = (
    "tests/models/test_conformance.py",
    "tests/features/test_each.py",
    "tests/parallel/test_models.py",
    "tests/features/test_pairs.py",
    "tests/parallel/test_pairs.py",
)
SUBJECTS = ("model", "suite", "alone")
"""The fixtures whose parameter is what a test is about: an entry of tests/models/cases, or a family of blocks."""

FAILED, HELD = "FAILED", "yes"
LEFT_OUT = "too few heads"
"""What a cell of the table of ranks says of a family for whose tiny model there is no such way."""


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """What is equal to what, and how close."""

    what: str
    like: str
    close: str


CROSSED = "ranks"
"""What a claim is called that is a cell of the table of ranks."""


class Collector:
    """A plugin of pytest that fills the cells: claim -> subject -> what came of it. Those of the table of ranks are
    claims of a way beside a feature. in_turns: each of those on one family, see tests/parallel/conftest.py.
    """

    def __init__(self, in_turns: bool = False) -> None:
        self.in_turns = in_turns
        self.cells: dict[Claim, dict[str, str]] = {}
        self._shown: dict[str, tuple[list[Claim], str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            claims = [Claim(*mark.args) for mark in item.iter_markers("shows")]
            claims += [Claim(CROSSED, *mark.args) for mark in item.iter_markers("crosses")]
            parameters = item.callspec.params if isinstance(item, pytest.Function) and claims else {}
            for subject in [parameters[name] for name in SUBJECTS if name in parameters]:
                self._shown[item.nodeid] = claims, subject
                for claim in claims:
                    self.cells.setdefault(claim, {})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        claims, subject = self._shown.get(report.nodeid, ([], ""))
        if report.skipped or (report.passed and report.when != "call"):
            return
        said = dict(report.user_properties).get("shows", HELD)
        for claim in claims:
            cells = self.cells[claim]
            if cells.get(subject) != FAILED:
                cells[subject] = str(said) if report.passed else FAILED


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def tables(cells: Mapping[Claim, Mapping[str, str]]) -> str:
    """What single features do on each model, and what pairs do on one model of each family of blocks."""
    from tests.features.suite import FAMILIES  # here, so that --lines loads no model
    from tests.models.cases import ENTRIES

    parts = []
    for subjects in (list(ENTRIES), list(FAMILIES)):
        rows = [
            (claim.what, claim.like, claim.close, *(found.get(subject, "") for subject in subjects))
            for claim, found in cells.items()
            if found.keys() & set(subjects) and claim.what != CROSSED
        ]
        names = [subject.replace("Pipeline", "") for subject in subjects]
        parts.append(table(["feature", "same as", "tolerance", *names], rows))
    return "\n\n".join(parts)


def crossed(cells: Mapping[Claim, Mapping[str, str]]) -> str:
    """The table of ranks: a line for each way, a column for each feature, in each cell how close ranks are to one
    process on every family of blocks that was tried, or "refused".
    """
    found = {(claim.like, claim.close): set(told.values()) for claim, told in cells.items() if claim.what == CROSSED}
    ways, features = (list(dict.fromkeys(key[part] for key in found)) for part in (0, 1))

    def cell(way: str, feature: str) -> str:
        said = found.get((way, feature), set())
        return FAILED if FAILED in said else ", ".join(sorted(said - {LEFT_OUT} or said))

    return table(["ranks share", *features], [(way, *(cell(way, feature) for feature in features)) for way in ways])


def written(page: str, name: str, content: str) -> str:
    """The page with new content between the markers of that name."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"there is no <!-- {name} --> ... <!-- end of {name} -->")
    return pattern.sub(lambda found: f"{found[1]}{content}\n{found[2]}", page)


def code_lines(path: Path) -> int:
    """Lines with code: neither blank nor comments nor docstrings."""
    source = path.read_text(encoding="utf-8")
    strings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in strings
        for number, line in enumerate(source.splitlines(), 1)
    )


def lines() -> str:
    """Lines of code of each model's folder."""
    rows = []
    for folder in sorted(path.parent for path in (ROOT / "models").glob("*/__init__.py")):
        counts = {path.name: code_lines(path) for path in folder.glob("*.py")}
        spec, transformer = counts.pop("__init__.py"), counts.pop(f"{folder.name}_transformer.py")
        pipelines = sum(counts.pop(name) for name in list(counts) if name.startswith("pipeline_"))
        other = sum(counts.values())
        rows.append((folder.name, spec, transformer, pipelines, other, spec + transformer + pipelines + other))
    return table(["models/", "spec", "transformer", "pipelines", "other", "together"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--write", action="store_true", help="write the tables into docs/features.md")
    parser.add_argument("--turns", action="store_true", help="each cell of the table of ranks on one family of blocks")
    parser.add_argument("--lines", action="store_true", help="print the table of lines alone")
    options = parser.parse_args()
    if options.lines:
        print(lines())
        return 0
    collector = Collector(options.turns)
    quiet = "--durations-min=1000"
    code = pytest.main(["-m", "conformance", quiet, *(str(ROOT / path) for path in TESTS)], [collector])
    made, of_ranks = tables(collector.cells), crossed(collector.cells)
    print(f"\n{made}\n\n{of_ranks}\n\n{lines()}")
    if options.write and code == pytest.ExitCode.OK:
        page = PAGE.read_text(encoding="utf-8")
        for name, content in (("conformance", made), ("ranks", of_ranks), ("lines", lines())):
            page = written(page, name, content)
        PAGE.write_text(page, encoding="utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
