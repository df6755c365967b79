"""The table of what is tested: how it is filled, and that docs/features.md has a line for all of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.models.cases import ENTRIES
from tools.conformance_table import CROSSED, FAILED, HELD, PAGE, Claim, Collector, code_lines, crossed, tables, written

CLAIM = Claim("LoRA, scale 0", "without it", "bit for bit")
SUBJECT = "QwenImagePipeline"


def filled(*reports: tuple[str, bool | None, dict[str, str]]) -> dict[str, str]:
    """What becomes of one cell after reports of one test after the other: phase, whether it passed (None: it was
    skipped), properties.
    """
    collector = Collector()
    collector.cells[CLAIM] = {}
    for number, (when, passed, properties) in enumerate(reports):
        collector._shown[str(number)] = [CLAIM], SUBJECT
        said = {"passed": passed is True, "skipped": passed is None, "user_properties": list(properties.items())}
        report: Any = SimpleNamespace(nodeid=str(number), when=when, **said)
        collector.pytest_runtest_logreport(report)
    return collector.cells[CLAIM]


def test_a_cell_says_what_came_of_the_tests_that_fill_it() -> None:
    assert filled(("setup", True, {}), ("call", True, {}), ("teardown", True, {})) == {SUBJECT: HELD}
    assert filled(("call", True, {"shows": "refused"})) == {SUBJECT: "refused"}
    assert filled(("call", True, {}), ("call", False, {}), ("call", True, {})) == {SUBJECT: FAILED}
    assert filled(("setup", False, {})) == {SUBJECT: FAILED}
    assert filled(("setup", True, {})) == filled(("setup", None, {})) == {}


def test_a_line_has_a_cell_for_each_model() -> None:
    head, _, line = tables({CLAIM: {SUBJECT: HELD}}).split("\n\n")[0].splitlines()
    assert [cell.strip() for cell in head.split("|")[4:-1]] == [name.replace("Pipeline", "") for name in ENTRIES]
    assert line.startswith("| LoRA, scale 0 | without it | bit for bit |")
    assert line.count(HELD) == 1


def test_the_table_of_ranks_has_a_line_for_each_way_and_a_column_for_each_feature() -> None:
    """A cell says what was found on all families, without those that have no such way."""
    cells = {
        Claim(CROSSED, "ring", "int8"): {"dual": "2e-5", "cross": "2e-5", "single": "too few heads"},
        Claim(CROSSED, "ring", "LoRA"): {"dual": "refused"},
        Claim(CROSSED, "Ulysses", "int8"): {"dual": "2e-5", "cross": FAILED},
    }
    head, _, *lines = crossed(cells).splitlines()
    assert head == "| ranks share | int8 | LoRA |"
    assert lines == ["| ring | 2e-5 | refused |", f"| Ulysses | {FAILED} |  |"]
    assert "ring" not in tables(cells)


def test_content_is_put_between_its_markers() -> None:
    page = "a\n<!-- lines -->\nold\n<!-- end of lines -->\nb"
    assert written(page, "lines", "new") == "a\n<!-- lines -->\nnew\n<!-- end of lines -->\nb"
    with pytest.raises(ValueError, match="there is no <!-- other -->"):
        written(page, "other", "new")


def test_comments_and_docstrings_are_no_code(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""One.\n\nTwo."""\n\n# three\nX = """\nfour"""\n"""Of X."""\n')
    assert code_lines(tmp_path / "a.py") == 2


def test_the_page_has_a_line_for_each_claim(request: pytest.FixtureRequest) -> None:
    """Of the tests of this run."""
    page = PAGE.read_text(encoding="utf-8")
    claims = {Claim(*mark.args) for item in request.session.items for mark in item.iter_markers("shows")}
    missing = [claim for claim in claims if f"\n| {claim.what} | {claim.like} | {claim.close} |" not in page]
    ways = {mark.args for item in request.session.items for mark in item.iter_markers("crosses")}
    missing += [way for way, _ in ways if f"\n| {way} |" not in page]
    assert not missing, "python -m tools.conformance_table --write"
