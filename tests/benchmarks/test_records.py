"""Records say where they come from, and documented figures name the records that they are from."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import provenance, timing

ROOT = provenance.ROOT
RESULTS = ROOT / "benchmarks/results"
OLDER = frozenset(
    re.findall(r"^\| ([\w.-]+\.(?:json|txt)) \|", (RESULTS / "README.md").read_text("utf-8"), re.MULTILINE)
)
"""Records that were made before they had to say their commit and versions."""
RECORDS = sorted(path for path in RESULTS.iterdir() if path.name != "README.md")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "models").glob("*/README.md"))]
MEASURED = re.compile(r"\d(?: ?(?:ms|us|s|GB/s|TB/s|TFLOP/s|jobs/s|MB|GiB|%)|x)(?![\w/-])")
"""A figure with a unit in which runs are measured."""
NOT_MEASURED = {
    ("README.md", "Usage"),
    ("docs/api.md", "Job options"),
    ("docs/api.md", "Events"),
    ("docs/api.md", "Error codes"),
    ("docs/jobs.md", "How long, and how much"),
    ("docs/operations.md", "Unsupported fields"),
    ("docs/parallel.md", "Ranks of several hosts with torchrun"),
    ("docs/webhooks.md", "When a call fails"),
    ("docs/media.md", "Limits"),
    ("docs/security.md", "Who a caller is"),
    ("docs/compat.md", "Table row"),
    ("docs/features.md", "CUDA graphs"),  # limits of memory; its figures of time are links to performance.md
    ("docs/features.md", "What is tested"),  # tolerances that tests enforce
    ("docs/features.md", "Attention in FP8 and INT8"),  # errors that tests/ops/attention_q_cases.py bounds
}
"""Sections with a table of limits, sizes or tolerances that have such units."""
WITHOUT_RECORD = {("docs/performance.md", "CPU kernels")}
"""Tables that no record was kept of. The section says so; nothing may be added here."""


def problem_of(record: Path) -> str:
    """What a record does not say of where it comes from; empty if it says all."""
    text = record.read_text(encoding="utf-8")
    if record.suffix == ".json":
        said = json.loads(text)
        missing = [key for key in provenance.KEYS if key not in said]
        return f"lacks {', '.join(missing)}" if missing else "no commit" if "unknown" in said["commit"] else ""
    first = text.partition("\n")[0]
    known = re.match(r"# .+: commit [0-9a-f]{7,}(\+changes)?, \d{4}-\d\d-\d\d, python [\d.]+, .*; cpu ", first)
    return "" if known else "its first line is not that of provenance.text"


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_a_record_says_where_it_comes_from_or_is_listed_as_older(record: Path) -> None:
    problem = problem_of(record)
    assert bool(problem) is (record.name in OLDER), problem or "is no longer older than the rule: take it off the list"


def test_the_list_of_older_records_has_files_only() -> None:
    assert {record.name for record in RECORDS} >= OLDER


@dataclasses.dataclass(frozen=True)
class Measurement:
    milliseconds: float


def test_what_scripts_write_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some Card")
    monkeypatch.setenv(provenance.COMMIT, "0123456789ab")
    file = timing.record("benchmarks/bench_x.py", "x", [Measurement(1.5)], tmp_path)
    assert problem_of(file) == ""
    said = json.loads(file.read_text(encoding="utf-8"))
    assert (said["commit"], said["packages"]["torch"]) == ("0123456789ab", torch.__version__)
    assert said["machine"]["cpu"]
    lines = tmp_path / "x.txt"
    lines.write_text(provenance.text("benchmarks/bench_x.py") + "\n1.5 ms\n", encoding="utf-8")
    assert problem_of(lines) == ""
    monkeypatch.setenv(provenance.COMMIT, provenance.UNKNOWN)
    lines.write_text(provenance.text("benchmarks/bench_x.py") + "\n1.5 ms\n", encoding="utf-8")
    assert problem_of(lines)
    assert problem_of(timing.record("benchmarks/bench_x.py", "x", [Measurement(1.5)], tmp_path)) == "no commit"


def test_what_a_command_prints_or_writes_is_kept_with_where_it_comes_from(tmp_path: Path) -> None:
    script = tmp_path / "measure.py"
    script.write_text("import sys\nopen(sys.argv[1], 'w').write('{\"runs\": [1]}')\nprint('took 1.5 ms')\n", "utf-8")
    lines, data = tmp_path / "x.txt", tmp_path / "x.json"
    for record in (lines, data):
        command = [sys.executable, "-m", "benchmarks.provenance", str(record), str(script), str(data)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        assert problem_of(record) == ""
    assert lines.read_text("utf-8").endswith("\ntook 1.5 ms\n")
    assert json.loads(data.read_text("utf-8"))["runs"] == [1]


def test_the_commit_is_that_of_the_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(provenance.COMMIT, raising=False)
    if (ROOT / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{12}(\+changes)?", provenance.commit())
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.commit() == provenance.UNKNOWN


SCRIPTS = [
    *sorted((ROOT / "benchmarks").glob("*.py")),
    *sorted((ROOT / "benchmarks/service").glob("*.py")),
    ROOT / "tools/gpu_test.py",
    ROOT / "tools/sanitize.py",
]
OTHER_FILES = {"tune_gemm", "tune_attention", "gpu_adapter", "provenance", "auth"}
"""These write tables of times for the package, or what their own processes read; `provenance` writes the line."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_no_script_writes_a_record_of_its_own_make(script: Path) -> None:
    """A card's name or a file goes through `provenance`, `timing.record` or `service.report`."""
    source = script.read_text(encoding="utf-8")
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}
    writes = {name for name in called if name.endswith((".write_text", "json.dump", ".get_device_name"))}
    stamps = {name for name in called if name in {"provenance.about", "provenance.text"}}
    assert not writes or stamps or script.stem in OTHER_FILES or called & {"timing.record", "record"}, writes
    if script.stem == "gpu_adapter":
        assert stamps


def sections(page: Path) -> list[tuple[str, str]]:
    """Headings of a page with what is under each, up to the next one."""
    parts = re.split(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return list(zip(["", *parts[1::2]], parts[::2], strict=True))


def tables(text: str) -> list[str]:
    return re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)


def records(text: str) -> list[str]:
    """The names of records in links and in code."""
    return re.findall(r"benchmarks/results/([\w.-]+\.(?:json|txt))", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_table_of_measurements_names_its_record(page: Path) -> None:
    name, missing = page.relative_to(ROOT).as_posix(), []
    for heading, text in sections(page):
        measured = any(MEASURED.search(table) for table in tables(text))
        every = name == "docs/performance.md" and tables(text)
        if (measured or every) and (name, heading) not in NOT_MEASURED | WITHOUT_RECORD and not records(text):
            missing.append(heading)
        assert [record for record in records(text) if not (RESULTS / record).is_file()] == []
        for link in re.findall(r"\]\(([^()]*benchmarks/results/[^()#]+)", text):
            assert (page.parent / link).is_file(), link
    assert missing == []


def test_a_section_without_a_record_says_so() -> None:
    for name, heading in WITHOUT_RECORD:
        (text,) = [text for found, text in sections(ROOT / name) if found == heading]
        assert "No record was kept" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_of_older_figures_says_that_they_are(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    older = {record for record in records(text) if record in OLDER and record.startswith("nvidia")}
    said = re.search(r"(are|is)\s+older\s+than\s+the\s+kernels\s+of\s+today", text)
    assert bool(said) is bool(older)
