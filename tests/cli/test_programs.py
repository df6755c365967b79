"""Every program of the repository says what it takes, and takes flags by their full names alone."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omni_grpc.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("examples", "tools", "benchmarks")
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
)
COMMANDS = (
    *("generate", "edit", "video", "audio", "models", "jobs", "watch", "wait", "cancel", "download"),
    *("serve", "doctor", "bench", "bench prompt-accuracy", "pull", "convert"),
)
MODULES = ("omni_grpc/serve.py",)

Ended = tuple[int, str, str]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Runs a script by its path, or a command of the command line: exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])  # as in a checkout that is installed; scripts add to it

    def run(name: str, *arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        try:
            if name.endswith("/__main__.py"):
                runpy.run_module(name.removesuffix("/__main__.py").replace("/", "."), run_name="__main__")
                code: object = 0
            elif name.endswith(".py"):
                runpy.run_path(str(ROOT / name), run_name="__main__")
                code = 0
            else:
                monkeypatch.setattr(sys, "argv", ["omni-grpc", *name.split(), *arguments])
                code = main()
        except SystemExit as ended:
            code = ended.code
        written = capsys.readouterr()
        return int(str(code or 0)), written.out, written.err

    return run


def test_the_programs_are_found() -> None:
    assert {path.split("/")[0] for path in SCRIPTS} == set(FOLDERS)
    assert len(SCRIPTS) > 50


@pytest.mark.parametrize("name", [*SCRIPTS, *MODULES, *COMMANDS])
def test_help_is_told_and_an_abbreviation_is_refused_with_the_full_name(
    name: str, program: Callable[..., Ended]
) -> None:
    code, out, err = program(name, "--help")
    assert code == 0, err
    assert out.startswith("usage: ")
    flags = [flag for flag in dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w-]+", out)) if flag != "--help"]
    if not flags:
        return
    short = next(flag for flag in flags if flag[:-1] not in flags)[:-1]
    code, out, err = program(name, *(["demo"] if name == "convert" else []), short)
    assert (code, out) == (2, "")
    assert short in err
    assert re.search(rf"{short}[\w-]+", err), "no full name is proposed"
    assert len(err.splitlines()) <= 4, "the message is lost in the usage"


def test_the_overview_lists_every_command(program: Callable[..., Ended]) -> None:
    code, out, _ = program("--help")
    assert code == 0
    assert [name for name in COMMANDS if " " not in name and not re.search(rf"\b{name}\b", out)] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_misspelled_command_gets_the_nearest(name: str, program: Callable[..., Ended]) -> None:
    *above, last = name.split()
    code, _, err = program(" ".join([*above, f"{last}x"]))
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
