"""The pages that list the rooms agree with each other, with the folders and with the import contracts."""

import re
import tomllib
from pathlib import Path

import pytest

from .source import ROOT, read

PAGES = ("docs/architecture.md", "CONTRIBUTING.md")
NO_ROOMS = {"v1", "demo"}
"""Generated code, and a checkpoint."""
LOOSE = {"omni"}
"""A room that is one file."""


def diagram(page: str) -> str:
    (found,) = re.findall(r"^```\n(cli > .*?)^```", read(Path(page)), re.MULTILINE | re.DOTALL)
    return found


def rooms_in(diagram: str) -> set[str]:
    """Those before and after each arrow, and those that the notes beside it name."""
    chains = {room for line in diagram.splitlines() for room in re.findall(r"\w+", line.partition("   ")[0])}
    return chains | set(re.findall(r"\w+", diagram.partition("beside it ")[2].splitlines()[0]))


def rooms() -> set[str]:
    return {path.parent.name for path in (ROOT / "omni_grpc").glob("*/__init__.py")} - NO_ROOMS | LOOSE


@pytest.mark.parametrize("page", PAGES)
def test_a_page_lists_the_rooms_that_there_are(page: str) -> None:
    assert rooms_in(diagram(page)) == rooms()
    assert diagram(page) == diagram(PAGES[0])


def test_each_room_is_explained() -> None:
    section = read(Path(PAGES[0])).partition("## Rooms")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == rooms()


def test_each_room_has_a_contract() -> None:
    tools = tomllib.loads(read(Path("pyproject.toml")))["tool"]
    named = set()
    for contract in tools["importlinter"]["contracts"]:
        kinds = (contract.get("source_modules", []), contract.get("layers", []), contract.get("modules", []))
        named |= {room for kind in kinds for entry in kind for room in re.findall(r"omni_grpc\.(\w+)", entry)}
    assert rooms() <= named
