"""Checks the messages of the commits since the newest version tag. `make commit-lint` and `make lint` run it.

The rules and the area tags are those of CONTRIBUTING.md. Merge commits are left out. Without a version tag, or
without a history (a shallow clone, an unpacked archive), there is nothing to judge: it says so and passes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUBJECT_LENGTH = 72
TRAILER = re.compile(r"[A-Z][A-Za-z-]+: \S.*")
"""`Signed-off-by: NAME` and the like, which are no body."""

NOT_IMPERATIVE = re.compile(r"\w+(?:[^e]ed|ing|[^su]s)", re.IGNORECASE)
IMPERATIVE = frozenset({"Embed", "Shed", "Bring", "Ring", "Bias", "Alias"})
"""Verbs that only look like another form."""


def main() -> int:
    tag = git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*")
    if tag is None:
        print("commit-lint: no version tag is reachable (new repository, shallow clone or archive): nothing to check")
        return 0
    listed = git("log", "--no-merges", "--format=%h%x00%B%x01", f"{tag}..HEAD")
    commits = [entry.strip("\n").split("\0", 1) for entry in (listed or "").split("\1") if entry.strip()]
    tags = area_tags((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    findings = [f"{commit}: {finding}" for commit, message in commits for finding in problems(message, tags)]
    print(*findings, sep="\n", end="\n" if findings else "")
    print(f"commit-lint: {len(commits)} commits since {tag}, {len(findings)} problems")
    return 1 if findings else 0


def git(*arguments: str) -> str | None:
    """What git prints; None where it fails or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip("\n")


def area_tags(contributing: str) -> frozenset[str]:
    """The tags that the section "Commits" of CONTRIBUTING.md lists, without brackets."""
    section = re.search(r"^## Commits\n(.*?)(?=^## )", contributing, re.MULTILINE | re.DOTALL)
    assert section, "CONTRIBUTING.md has no section Commits"
    return frozenset(re.findall(r"^\| `\[(\w+)\]`", section[1], re.MULTILINE))


def problems(message: str, tags: Collection[str]) -> Iterator[str]:
    """What is wrong with one commit message."""
    subject, _, body = message.partition("\n")
    if len(subject) > SUBJECT_LENGTH:
        yield f"the subject has {len(subject)} characters, at most {SUBJECT_LENGTH} are allowed: {subject}"
    shape = re.fullmatch(r"\[(\w+)\] (\S+)(.*)", subject)
    if shape is None:
        yield f"the subject is not '[tag] Do something': {subject}"
        return
    tag, verb, rest = shape.groups()
    if tag not in tags:
        yield f"[{tag}] is no area tag of CONTRIBUTING.md: {subject}"
    if re.search(r"\[(?:" + "|".join(tags) + r")\]", verb + rest):
        yield f"the subject has more than one tag; split the commit or take the area it is mainly about: {subject}"
    if not verb[0].isupper() or (NOT_IMPERATIVE.fullmatch(verb) and verb not in IMPERATIVE):
        yield f"the subject does not start with a capitalized imperative ('Add', not 'Adds', 'added'): {subject}"
    if subject.endswith("."):
        yield f"the subject ends with a period: {subject}"
    if body.strip() and not body.startswith("\n"):
        yield f"no empty line follows the subject: {subject}"
    if all(not line.strip() or TRAILER.fullmatch(line) for line in body.splitlines()):
        yield f"the body is empty; say why, with the figure that changed: {subject}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, allow_abbrev=False).parse_args()
    sys.exit(main())
