"""What the pages tell to type is there: every program, command, make target and flag; what can be run here, runs."""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.programs import COMMANDS, ROOT, SCRIPTS, SERVE, run
from tests.server.service import Service

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "models/*/README.md", "tools/*/README.md", "omni_grpc/demo/README.md")
    for path in ROOT.glob(pattern)
    # a log of the past, and a table of another project's commands
    if path.name not in ("CHANGELOG.md", "compat.md")
)
OURS = r"python (?:-m )?(?:omni_grpc|benchmarks|tools|examples)|omni-grpc |make |buf "
PROGRAM = re.compile(rf"(?:[A-Z_]+=\S* )*(?:{OURS})")
WORD = re.compile(r"(--[a-z][\w-]*)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHELLS = ("", "sh", "bash", "shell", "console")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
VARIABLES = {"PYTHON", "TORCH", "MODEL", "TESTS", "ARGS"}


def blocks(text: str) -> Iterator[str]:
    """Lines of the shell blocks that start a program of ours, continued lines joined, without comments."""
    for language, block in FENCE.findall(text):
        if language in SHELLS:
            for line in block.replace("\\\n", " ").splitlines():
                if PROGRAM.match(command := re.sub(r"\s+#.*", "", line).strip()):
                    yield command


def spans(text: str) -> Iterator[str]:
    """Code in prose and tables that does."""
    for span in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
        if PROGRAM.match(command := " ".join(span.split())):
            yield command


def docstrings() -> Iterator[tuple[str, str]]:
    for script in SCRIPTS:
        text = ast.get_docstring(ast.parse((ROOT / script).read_text(encoding="utf-8"))) or ""
        for line in text.replace("\\\n", " ").splitlines():
            if PROGRAM.match(command := re.split(r"\s{3,}", line.strip())[0]):
                yield script, command


def told() -> list[tuple[str, str]]:
    found = [
        (page, command)
        for page in PAGES
        for text in [(ROOT / page).read_text(encoding="utf-8")]
        for command in (*blocks(text), *spans(text))
    ]
    return list(dict.fromkeys([*found, *docstrings()]))


@functools.cache
def help_of(program: str) -> str:
    code, out, err = run(program, "--help")
    assert code == 0, err
    return out + help_of(SERVE) if program == "bench prompt-accuracy" else out


def program_of(words: list[str]) -> str:
    """The program that a command line starts. Raises AssertionError where there is none."""
    if words[0] == "omni-grpc" or words[:3] == ["python", "-m", "omni_grpc"]:
        rest = words[1:] if words[0] == "omni-grpc" else words[3:]
        names = [name for name in (" ".join(rest[:2]), rest[0] if rest else "") if name in COMMANDS]
        assert names, f"no command is called {rest[:1]}"
        return names[0]
    if words[:2] == ["python", "-m"]:
        path = words[2].replace(".", "/")
        found = [script for script in (f"{path}.py", f"{path}/__main__.py") if (ROOT / script).is_file()]
        assert found, f"no module is called {words[2]}"
        return found[0]
    assert (ROOT / words[1]).is_file(), f"there is no {words[1]}"
    return words[1]


def check(command: str) -> None:
    """Raises AssertionError for a command that is not one, or has a flag that its program has not."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise AssertionError(f"{command}: {error}") from error
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if words[0] == "make":
        for word in words[1:]:
            variable, equals, _ = word.partition("=")
            assert (variable in VARIABLES) if equals else (word in TARGETS), f"make has no {word}"
        return
    if words[0] == "buf":
        return
    program = program_of(words)
    if program == "benchmarks/provenance.py" and words[4:] not in ([], ["COMMAND"]):
        check(shlex.join(["python", *words[4:]]))  # what it runs and keeps
        return
    known = set(WORD.findall(help_of(program)))
    for word in words:
        flag = re.match(r"(--[a-z][\w-]*)", word)
        if flag is not None and " " not in word:
            assert {flag[1], flag[1].replace("--no-", "--")} & known, f"{word} is no flag of it"


@pytest.mark.parametrize(("page", "command"), told())
def test_a_command_of_the_pages_is_there(page: str, command: str) -> None:
    if command != "python -m omni_grpc":  # the program as such
        check(command)


@pytest.mark.parametrize(
    "command",
    [
        "make demonstrate", "make test TEST=tests", "python -m omni_grpc genrate x", "python -m benchmarks.nothing",
        "python tools/nothing.py", "python -m omni_grpc.serve --max-que 3", "omni-grpc generate x --stepz 3",
        "python tools/gpu_test.py --famly norm", "python -m omni_grpc bench prompt-accuracy --caption 3",
        "python -m benchmarks.provenance cpu.txt benchmarks/bench_rope.py --devise cpu",
    ],
)  # fmt: skip
def test_a_wrong_command_is_found(command: str) -> None:
    with pytest.raises(AssertionError):
        check(command)


def test_the_commands_are_found() -> None:
    programs = {command.split()[0] for _, command in told()}
    assert programs >= {"python", "omni-grpc", "make", "buf"}
    assert len(told()) > 150
    assert {page for page, _ in told()} >= {"README.md", "CONTRIBUTING.md", "docs/operations.md", "docs/client.md"}


BUF = [
    (page, command)
    for page in ("README.md", "docs/operations.md")
    for command in blocks((ROOT / page).read_text(encoding="utf-8"))
    if command.startswith("buf ")
]


@pytest.mark.parametrize(("page", "command"), BUF)
async def test_buf_curl_runs_as_it_stands(page: str, command: str, service: Service) -> None:
    """Against another port, and the model that is served there."""
    tool = Path(sys.executable).with_name("buf")
    if not tool.exists():
        pytest.skip("buf-bin is not installed")
    there = command.replace("localhost:50051", f"127.0.0.1:{service.server.port}").replace("qwen-image", "toy")
    process = await asyncio.create_subprocess_exec(
        str(tool), *shlex.split(there)[1:], stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err
    if "--list-services" in command:
        assert "omni_grpc.v1.GenerationService" in out.decode().split()
    else:
        last = json.JSONDecoder().raw_decode(out.decode()[out.decode().rindex("\n{\n") :].strip())[0]
        assert "completed" in last["event"]


@pytest.mark.parametrize("page", PAGES)
def test_what_make_setup_installs_is_put_on_the_path_before_it_is_run(page: str) -> None:
    for _, block in FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
        _, setup, after = block.partition("make setup\n")
        if setup and re.search(r"^(python|omni-grpc|buf) ", after, re.MULTILINE):
            assert after.startswith(". .venv/bin/activate\n")


def test_buf_curl_is_told_where_buf_is_and_on_both_pages() -> None:
    assert {page for page, _ in BUF} == {"README.md", "docs/operations.md"}
    for page in ("README.md", "docs/operations.md"):
        assert ".venv/bin" in (ROOT / page).read_text(encoding="utf-8"), "a fresh `make setup` puts nothing on the PATH"
