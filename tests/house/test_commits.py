"""The lint of commit messages, and the version that the changelog and the package agree on."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import omni_grpc
from tools import commit_lint

from .source import ROOT, read

TAGS = commit_lint.area_tags(read(Path("CONTRIBUTING.md")))
GOOD = "[engine] Admit jobs by their deadline\n\nLate jobs waited 3 s behind early ones; now 0.4 s.\n"


def test_contributing_lists_the_tags() -> None:
    assert {"engine", "server", "csrc", "docs"} <= TAGS
    assert 15 <= len(TAGS) <= 28


@pytest.mark.parametrize(
    ("message", "finding"),
    [
        (GOOD.replace("deadline", "deadline, " + "x" * 72), "at most 72"),
        (GOOD.replace("[engine] ", ""), r"not '\[tag\]"),
        (GOOD.replace("[engine]", "[gears]"), "no area tag"),
        (GOOD.replace("deadline", "deadline; [docs] say so"), "more than one tag"),
        (GOOD.replace("Admit", "Admits"), "imperative"),
        (GOOD.replace("Admit", "Admitted"), "imperative"),
        (GOOD.replace("Admit", "admit"), "imperative"),
        (GOOD.replace("deadline", "deadline."), "period"),
        (GOOD.replace("\n\n", "\n"), "no empty line"),
        (GOOD.partition("\n")[0], "body is empty"),
        (GOOD.partition("\n")[0] + "\n\nSigned-off-by: A <a@example.org>\n", "body is empty"),
    ],
)
def test_a_bad_message_is_found(message: str, finding: str) -> None:
    assert list(commit_lint.problems(GOOD, TAGS)) == []
    (found,) = commit_lint.problems(message, TAGS)
    assert re.search(finding, found)


def repository(folder: Path, *messages: str, tag_after: int | None) -> Path:
    """A repository with one empty commit for each message, and v0.1.0 on one of them."""
    shutil.copy(ROOT / "CONTRIBUTING.md", folder)
    settings = ("user.name=a", "user.email=a@example.org", "tag.gpgSign=false", "commit.gpgSign=false")
    command = ["git", "-C", str(folder), *(part for setting in settings for part in ("-c", setting))]
    subprocess.run([*command, "init", "-q"], check=True)
    for number, message in enumerate(messages):
        subprocess.run([*command, "commit", "-q", "--allow-empty", "-m", message], check=True)
        if number == tag_after:
            subprocess.run([*command, "tag", "-a", "v0.1.0", "-m", "0.1.0"], check=True)
    return folder


def test_commits_are_judged_from_the_tag_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commit_lint, "ROOT", repository(tmp_path, "before", GOOD, tag_after=0))
    assert commit_lint.main() == 0
    assert "1 commits since v0.1.0, 0 problems" in capsys.readouterr().out
    repository(tmp_path, "after", tag_after=None)
    assert commit_lint.main() == 1
    assert "not '[tag] Do something': after" in capsys.readouterr().out


@pytest.mark.parametrize("history", [True, False])
def test_without_a_tag_or_a_history_it_says_so_and_passes(
    history: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commit_lint, "ROOT", repository(tmp_path, "bad", tag_after=None) if history else tmp_path)
    assert commit_lint.main() == 0
    assert "nothing to check" in capsys.readouterr().out


def test_the_newest_release_of_the_changelog_is_this_version() -> None:
    headings = re.findall(r"^## (.*)$", read(Path("CHANGELOG.md")), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    releases = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", heading) for heading in headings[1:]]
    found = [(release[1], release[2]) for release in releases if release]
    assert len(found) == len(releases), "a heading is not '[X.Y.Z] - YYYY-MM-DD'"
    assert found[0][0] == omni_grpc.__version__
    dates = [date for _, date in found]
    assert dates == sorted(dates, reverse=True)
