"""Every program of the repository says what it takes, and takes flags by their full names alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.programs import COMMANDS, FOLDERS, ROOT, SCRIPTS, SERVE, run


def test_the_programs_are_found() -> None:
    assert {path.split("/")[0] for path in SCRIPTS} == set(FOLDERS)
    assert len(SCRIPTS) > 50


@pytest.mark.parametrize("name", [*SCRIPTS, SERVE, *COMMANDS])
def test_help_is_told_and_an_abbreviation_is_refused_with_the_full_name(name: str) -> None:
    code, out, err = run(name, "--help")
    assert code == 0, err
    assert out.startswith("usage: ")
    flags = [flag for flag in dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w-]+", out)) if flag != "--help"]
    if not flags:
        return
    short = next(flag for flag in flags if flag[:-1] not in flags)[:-1]
    code, out, err = run(name, *(["demo"] if name == "convert" else []), short)
    assert (code, out) == (2, "")
    assert short in err
    assert re.search(rf"{short}[\w-]+", err), "no full name is proposed"
    assert len(err.splitlines()) <= 4, "the message is lost in the usage"


def test_the_flags_of_a_command_that_a_program_runs_are_left_to_that_command(tmp_path: Path) -> None:
    record, script = tmp_path / "record.txt", "import sys; print(sys.argv[1:])"
    code, out, err = run("benchmarks/provenance.py", str(record), "-c", script, "--device", "cpu")
    assert (code, out) == (0, "['--device', 'cpu']\n"), err
    assert record.read_text(encoding="utf-8").endswith(out)
    assert run("benchmarks/provenance.py", "--device", str(record), "-c", script)[0] == 2


def test_the_overview_lists_every_command() -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert [name for name in COMMANDS if " " not in name and not re.search(rf"\b{name}\b", out)] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_misspelled_command_gets_the_nearest(name: str) -> None:
    *above, last = name.split()
    code, _, err = run(" ".join([*above, f"{last}x"]))
    assert code == 2
    assert f"unknown command '{last}x'; did you mean " in err
    assert repr(last) in err
    assert len(err.splitlines()) == 2


def test_no_parser_takes_abbreviations() -> None:
    lax = [f"{path}:{line}" for path, line in _parsers() if path != "omni_grpc/config/command_line.py"]
    assert lax == [], "use omni_grpc.config.command_line.Parser, or allow_abbrev=False where omni_grpc is not installed"


def _parsers() -> Iterator[tuple[str, int]]:
    """Where an `argparse.ArgumentParser` is made that takes abbreviations."""
    for folder in ("omni_grpc", *FOLDERS):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ArgumentParser"):
                    given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                    if given.get("allow_abbrev") != "False":
                        yield file.relative_to(ROOT).as_posix(), node.lineno
