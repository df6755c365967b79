"""The synchronous client is generated from the asyncio one, and has the same methods."""

from __future__ import annotations

import asyncio
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_grpc.client import AsyncClient, AsyncJobStream, Client, JobStream, _async, _sync
from omni_grpc.client.async_connection import AsyncConnection
from omni_grpc.client.connection import Connection
from tools.gen_sync_client import FOLDER, REPLACEMENTS, ROOT, SOURCES, generate, synchronous, unused_replacements

PAIRS = [(Client, AsyncClient), (JobStream, AsyncJobStream), (Connection, AsyncConnection), (_sync, _async)]
DUNDERS = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__anext__": "__next__", "__aiter__": "__iter__"}


@pytest.mark.parametrize("name", SOURCES.values())
def test_the_committed_file_is_what_the_script_generates(name: str, generated: dict[str, str]) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == generated[name]


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return generate(FOLDER)


def test_the_generated_file_says_where_it_is_from(generated: dict[str, str]) -> None:
    for source, name in SOURCES.items():
        first = generated[name].splitlines()[0]
        assert first == f"# generated from {source} by tools/gen_sync_client.py; do not edit"


def test_nothing_of_asyncio_is_left(generated: dict[str, str]) -> None:
    for text in generated.values():
        body = text.split("\n", 1)[1]
        assert re.findall(r"\b\w*(?:async|await|anext|aclose)\w*\b", body, re.IGNORECASE) == []


def test_the_rules_of_the_language() -> None:
    source = (
        "from omni_grpc.client import zebra\n"
        "from omni_grpc.client.async_stream import AsyncJobStream\n\n\n"
        "async def f(stream: AsyncJobStream) -> AsyncGenerator[int, None]:\n"
        "    async with stream:\n"
        "        with zebra:\n"
        "            async for one in stream:\n"
        "                yield await anext(one)\n"
    )
    assert synchronous("async_client.py", source).splitlines()[1:] == [
        "from omni_grpc.client import zebra",
        "from omni_grpc.client.stream import JobStream",
        "",
        "",
        "def f(stream: JobStream) -> Generator[int, None, None]:",
        "    with stream, zebra:",
        "        for one in stream:",
        "            yield next(one)",
    ]


def test_a_replacement_that_nothing_needs_is_found() -> None:
    assert unused_replacements([]) == list(REPLACEMENTS)
    assert r"\banext\b" not in unused_replacements(["await anext(events)"])


def test_check_names_a_file_that_was_edited(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "omni_grpc" / "client", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "omni_grpc/__init__.py", "tools/gen_sync_client.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "tools/gen_sync_client.py", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout

    assert run("--check") == (0, "")
    edited = tmp_path / "omni_grpc" / "client" / "stream.py"
    edited.write_text(edited.read_text(encoding="utf-8") + "\nX = 1\n", encoding="utf-8")
    assert run("--check") == (1, "omni_grpc/client/stream.py: stale\n")
    assert run() == (0, "omni_grpc/client/stream.py: written\n")
    assert run("--check") == (0, "")


@pytest.mark.parametrize(("own", "other"), PAIRS, ids=lambda one: one.__name__.rsplit(".")[-1])
def test_every_public_method_exists_in_both_with_the_same_parameters(own: Any, other: Any) -> None:
    methods = public_methods(own)
    assert methods
    assert methods == {DUNDERS.get(name, name): parameters for name, parameters in public_methods(other).items()}


def public_methods(owner: Any) -> dict[str, list[tuple[Any, ...]]]:
    """Name -> the name, kind, default and annotation of each parameter. Properties have none."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for name, member in vars(owner).items():
        if isinstance(member, property):
            found[name] = []
        elif inspect.isfunction(member) and (not name.startswith("_") or name.endswith("__")):
            parameters = inspect.signature(member).parameters.values()
            found[name] = [(one.name, one.kind, one.default, plain(one.annotation)) for one in parameters]
    return found


def plain(annotation: Any) -> str:
    return str(annotation).replace("AsyncConnection", "Connection")


def test_reasons_of_a_cancelled_job_differ() -> None:
    assert _sync.cancel_reason(KeyboardInterrupt()) == "interrupted by the user"
    assert _async.cancel_reason(asyncio.CancelledError()) == "the client's task was cancelled"
    assert _sync.cancel_reason(None) == _async.cancel_reason(ZeroDivisionError()) == "the client left the stream"
