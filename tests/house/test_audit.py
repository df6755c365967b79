"""`make audit` finds a new secret, knows the listed ones, and says what it could not ask."""

import importlib.util
import json
import subprocess

import pytest

from tools import audit

SIX = {"name": "six", "skip_reason": "Dependency not found on PyPI and could not be audited: six (1.16.0)"}
GOOD = {"name": "good", "version": "1.0", "vulns": []}


def vulnerable(*fixes: str) -> dict[str, object]:
    return {"name": "bad", "version": "1.0", "vulns": [{"id": "CVE-1", "fix_versions": list(fixes), "aliases": []}]}


@pytest.mark.parametrize(
    ("packages", "failed", "says"),
    [
        ([SIX, SIX], False, "skipped: the vulnerability service knows none of 2 packages"),
        ([GOOD, SIX], False, "0 in 1 packages; 1 were skipped"),
        ([GOOD, vulnerable()], False, "bad 1.0: CVE-1: no version is without it yet"),
        ([GOOD, vulnerable("1.1", "2.0")], True, "bad 1.0: CVE-1: install bad 1.1 or 2.0"),
    ],
)
def test_what_pip_audit_answers(packages, failed, says):
    it = audit.vulnerabilities(json.dumps({"dependencies": packages, "fixes": []}), "")
    assert it[0] is failed
    assert says in it[1]


def test_a_service_that_does_not_answer_is_told_and_fails_nothing():
    failed, said = audit.vulnerabilities("", "Traceback\nConnectionError: no route to host\n")
    assert not failed
    assert said.startswith("vulnerabilities: skipped:")
    assert said.endswith("ConnectionError: no route to host")


def test_secrets_are_known_by_file_and_hash():
    one = {"type": "Secret Keyword", "hashed_secret": "aa", "line_number": 7}
    scan = {"version": "1", "results": {"a.py": [one], "b.py": [one]}}
    (line,) = audit.new_secrets(scan, {"a.py": ["aa"]})
    assert line.startswith("b.py:7: Secret Keyword")
    assert list(audit.new_secrets(scan, audit.kept(scan))) == []


@pytest.mark.skipif(importlib.util.find_spec("detect_secrets") is None, reason="detect-secrets is not installed")
def test_a_key_in_a_file_of_git_is_found(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "a.py").write_text('key = "' + "AKIA" + "IOSFODNN7EXAMPLA" + '"\n')
    subprocess.run(["git", "add", "a.py"], cwd=tmp_path, check=True)
    assert [line.partition(": take")[0] for line in audit.new_secrets(audit.scan(tmp_path), {})] == [
        "a.py:1: AWS Access Key"
    ]
