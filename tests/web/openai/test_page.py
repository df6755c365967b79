"""docs/openai.md says what is taken and refused, and its examples run."""

from __future__ import annotations

import asyncio
import re
import shutil

import pytest

from omni_grpc.types.request_options import AUDIO, EDIT, IMAGE, VIDEO, options_of
from omni_grpc.web.openai import fields
from omni_grpc.web.openai.endpoint import ROOT
from omni_grpc.web.openai.fields import AUDIOS, EDITS, GENERATIONS, VIDEOS
from tests.server.process import ROOT as FOLDER

from .conftest import code

PAGE = (FOLDER / "docs" / "openai.md").read_text(encoding="utf-8")
TABLES = {"images": (GENERATIONS, EDITS), "edits": (EDITS,), "videos": (VIDEOS,), "audio": (AUDIOS,)}
TABLES["all"] = tuple(table for tables in TABLES.values() for table in tables)
OWN = {option.name for kind in (IMAGE, EDIT, VIDEO, AUDIO) for option in options_of(kind)}


def names(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


def listed(start: str) -> set[str]:
    """The names of a paragraph."""
    _, _, rest = PAGE.partition(start)
    assert rest, start
    return set(names(rest.split("\n\n")[0]))


def test_the_fields_on_the_page_are_those_of_the_endpoints():
    _, _, rows = PAGE.partition("| field | what it is here | endpoints |\n|---|---|---|\n")
    told: set[str] = set()
    for row in rows.split("\n\n")[0].splitlines():
        field, _, where = (cell.strip() for cell in row.strip("|").split("|"))
        told |= set(names(field))
        for place in where.split(", "):
            for name in names(field):
                assert all(name in table for table in TABLES[place]), f"{name} is not taken at {place}"
    taken, ignored, refused = set(), set(), set()
    for table in TABLES["all"]:
        for name, field in table.items():
            (refused if field.refused else ignored if field.ignored else taken).add(name)
    assert told - OWN == taken - OWN
    assert {"model", "prompt", "seed", "guidance_scale", "loras"} <= told
    assert listed("Named in `warnings`, since they change nothing here:") == ignored
    assert listed("Refused, since they would change the result:") - {"v1"} >= refused - taken - {"stream"}
    assert fields.MAX_PARTIAL_IMAGES == 3


@pytest.mark.service
@pytest.mark.filterwarnings("ignore:The Sora API")
async def test_the_examples_run(studio, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    (example,) = code(PAGE, "python")
    example = example.replace("http://localhost:8080", studio.http)
    await asyncio.to_thread(exec, example, {"print": lambda *said: None})
    assert (tmp_path / "circle.mp4").stat().st_size == 1000


@pytest.mark.service
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")
async def test_the_commands_run(studio, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (commands,) = code(PAGE, "sh")
    for line in commands.strip().splitlines():
        command = line.replace("http://localhost:8080", studio.http).replace("curl ", "curl -fsS ")
        shell = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE)
        printed, _ = await shell.communicate()
        assert shell.returncode == 0, line
        assert b'"seed' in printed, line
        assert ROOT in line
