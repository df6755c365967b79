"""`.ci/run`, whole, on a Makefile whose phases are a line each: what it tells of those that fail, and how it ends."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .source import ROOT

MAKEFILE = """
test-ray:
\t{python} -m pytest -p no:randomly --import-mode=importlib $(ARGS) checks.py
{bad}
%:
\t@true
"""
CHECKS = """
from pathlib import Path

import pytest


def test_passes():
    mark = Path("runs")
    mark.write_text(mark.read_text() + "x" if mark.exists() else "x")


@pytest.mark.parametrize("number", range({count}))
def test_fails(number):
    mark = Path(f"mark-{{number}}")
    seen = mark.exists()
    mark.touch()
    assert seen and {heals}, "said by the check"
"""
BAD = "lint:\n\t@echo a line too long; false\n"


def run(folder: Path, count: int, *, heals: bool = True, bad: str = "") -> tuple[int, str]:
    """The exit status and the output of the script in a folder that is a project of its own."""
    (folder / ".ci").mkdir()
    (folder / "tools").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    (folder / "tools" / "ci_packages.sh").write_text("#!/bin/sh\n")
    (folder / "tools" / "ci_packages.sh").chmod(0o755)
    (folder / "Makefile").write_text(MAKEFILE.format(python=sys.executable, bad=bad))
    (folder / "checks.py").write_text(CHECKS.format(count=count, heals=heals))
    # the options of the run that this test is part of are not for the one it starts
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MAKE"))}
    done = subprocess.run(
        [folder / ".ci" / "run"], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout


def results(said: str) -> dict[str, str]:
    """What the table at the end says of each phase."""
    lines = said[said.rindex("\nphase ") :].splitlines()[2:-1]
    return {name: " ".join(rest) for name, _, *rest in map(str.split, lines)}


def test_all_phases_pass(tmp_path: Path) -> None:
    status, said = run(tmp_path, 0)
    assert (status, set(results(said).values()) - {"skipped: no nvcc"}) == (0, {"ok"})
    assert "what failed" not in said


def test_a_test_that_passes_alone_is_told_and_does_not_fail_the_run(tmp_path: Path) -> None:
    status, said = run(tmp_path, 2)
    assert (status, results(said)["test-ray"]) == (0, "ok; 2 on a second run: see above")
    told = said[said.index("=== what failed") :]
    assert "said by the check" in told
    assert "FAILED checks.py::test_fails[1]" in told
    assert (tmp_path / "runs").read_text() == "x", "what passed does not run again"


@pytest.mark.parametrize(("count", "heals"), [(2, False), (9, True)], ids=["fails-twice", "too-many"])
def test_a_test_that_fails_again_fails_the_run(tmp_path: Path, count: int, heals: bool) -> None:
    status, said = run(tmp_path, count, heals=heals)
    assert (status, results(said)["test-ray"]) == (1, "FAILED")
    assert results(said)["demo"] == "ok", "what comes later has run"
    assert ("--- test-ray, once more" in said) == (not heals)


def test_a_phase_that_is_no_tests_fails_at_once_with_its_last_lines(tmp_path: Path) -> None:
    status, said = run(tmp_path, 0, bad=BAD)
    assert (status, results(said)["lint"]) == (1, "FAILED")
    assert "a line too long" in said[said.index("--- lint") :]
