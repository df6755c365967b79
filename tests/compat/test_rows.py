"""docs/compat.md tells the truth: each row has one line, what works is run, and what is not there does not work."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.compat.checks import ROOT, Checks
from tests.compat.table import FOLDER, Row, counts, extracted, faults, table
from tests.server.process import Process, served

ROWS: Sequence[Row] = table()
WORKING = sorted({check for row in ROWS if row.status == "works" for check in row.checks})
UNFINISHED = sorted({tuple(row.checks) for row in ROWS if row.status != "works" and row.checks})


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory, tiny_qwen_image: Path) -> Iterator[Checks]:
    """Checks that share their tiny checkpoints and one server, each made by the first that needs it."""
    folder = tmp_path_factory.mktemp("compat")
    built = {"qwen_image": tiny_qwen_image}
    server: list[Process] = []
    running = served(tiny_qwen_image, folder, "--warm-up-seconds", "0", "--device", "cpu")

    def tiny(model: str) -> Path:
        from tools.tiny_checkpoints import BUILDERS

        if model not in built:
            built[model] = BUILDERS[model](folder / model)
        return built[model]

    def address() -> str:
        if not server:
            server.append(running.__enter__())
        return server[0].address

    yield Checks(folder, tiny, address)
    if server:
        running.__exit__(None, None, None)


def failure(checks: Checks, names: Sequence[str]) -> str:
    """Why the checks do not all hold; empty where they do."""
    for check in names:
        try:
            checks.run(check)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a check raises says why
            return f"{check}: {type(error).__name__} {error}"
    return ""


def test_every_row_of_the_documents_has_one_line(capsys):
    assert faults(extracted(), ROWS) == []
    with capsys.disabled():
        for doc, numbers in counts(ROWS).items():
            sys.stdout.write(f"\n{doc}: " + ", ".join(f"{number} {status}" for status, number in numbers.items()))


def test_the_page_is_current():
    done = subprocess.run(
        [sys.executable, "tools/compat_page.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == (ROOT / "docs/compat.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("check", WORKING)
def test_what_works_works(checks, check):
    checks.run(check)


def test_what_is_not_there_is_not_called_works_too_late(checks):
    """A row that could be called "works" and is not is as wrong as the other way round."""
    ready = [names for names in UNFINISHED if not failure(checks, names)]
    rows = [
        f"{row.docs[0]} {row.kind} {row.name}" for row in ROWS if row.status != "works" and tuple(row.checks) in ready
    ]
    assert rows == []


@pytest.mark.parametrize(
    ("status", "broken"),
    [
        ("not yet", {"status": "works"}),
        ("works", {"checks": ["serve --no-such-flag 1"]}),
        ("works", {"checks": ["import omni_grpc:NoSuchName"]}),
        ("works", {"checks": ["proven tests/test_omni.py::test_that_nobody_wrote"]}),
        ("works", {"checks": ["client assert client.generate_image('x', width=7, height=7)"]}),
        ("works", {"checks": ["cli generate x --no-such-flag"]}),
        ("works", {"checks": ["no-such-verb"]}),
    ],
    ids=lambda value: json.dumps(value),
)
def test_a_broken_row_is_found(checks, capfd, status, broken):
    row = next(row for row in ROWS if row.status == status and row.checks)
    assert failure(checks, dataclasses.replace(row, **broken).checks)


def test_a_row_that_lacks_or_is_there_twice_is_found(tmp_path):
    copy = tmp_path / "status.toml"
    copy.write_text((FOLDER / "status.toml").read_text(encoding="utf-8"), encoding="utf-8")
    blocks = copy.read_text(encoding="utf-8").split("[[row]]\n")
    for changed in (
        blocks[:-1],
        [*blocks, blocks[-1]],
        [*blocks[:-1], blocks[-1].replace("name = ", 'name = "x"  # ')],
    ):
        assert faults(extracted(), table("[[row]]\n".join(changed)))
    silent = dataclasses.replace(next(row for row in ROWS if row.status == "works"), checks=[])
    assert faults(silent.keys, [silent])


def test_a_promise_that_is_gone_from_its_document_is_an_error(tmp_path):
    (tmp_path / "000_made_up.txt").write_text("vllm serve X --omni\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "tools/compat_rows.py", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "document 000 does not say" in done.stderr


def test_names_are_taken_from_a_document(tmp_path):
    models = "Models\n| Model | A |\n|---|---|\n| Thing-1 | x |\n"
    text = f"Use --usp N.\n\n{models}\nvllm serve M --omni\nomni = Omni(model=1)\n"
    (tmp_path / "900_made_up.txt").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "tools/compat_rows.py", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert sorted(extracted(done.stdout)) == [
        ("900", "argument", "Omni(model)"),
        ("900", "class", "Omni"),
        ("900", "command", "vllm serve M --omni"),
        ("900", "flag", "--omni"),
        ("900", "flag", "--usp"),
        ("900", "snippet", "Omni(model)"),
        ("900", "table row", "Models / Thing-1"),
    ]
