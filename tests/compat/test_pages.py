"""Pages that tell what to type: every command is one, every flag is there, and "not yet" is true."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import omni_grpc
from omni_grpc.checkpoint.registry import specs
from omni_grpc.cli import doctor
from omni_grpc.cli import main as cli
from omni_grpc.config import options
from omni_grpc.config.settings import settings
from omni_grpc.resolve.memory_hints import REMEDIES
from omni_grpc.resolve.settings import check_settings
from omni_grpc.types.errors import ConfigError
from tests.compat.checks import ROOT
from tests.models.cases import ENTRIES, pipeline_of
from tests.toy import toy_checkpoint

RECIPES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("models/*/README.md"))
PAGES = ["docs/performance-guide.md", "docs/troubleshooting.md", "docs/adding-a-feature.md"]
HEADINGS = ["Overview", "Install", "Usage", "Configuration"]
OTHERS = ("pull ", "convert ")
"""Commands that have a command line of their own."""


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text(page), re.DOTALL | re.MULTILINE)
    return [block for name, block in fenced if name == language]


def commands(page: str) -> Iterator[str]:
    """Lines of blocks, and spans of code, that start a program of ours."""
    lines = [line.partition(" #")[0].strip() for block in blocks(page, "") for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```$", "", text(page), flags=re.DOTALL | re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    for line in [*lines, *spans]:
        command = re.sub(r"^CUDA_VISIBLE_DEVICES=\d ", "", line)
        if command.startswith("python -m omni_grpc"):
            yield command


def parse(command: str) -> str:
    """The name of the program, after its own parser has taken the rest."""
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "omni_grpc.serve"]:
        settings(words[3:], {}, prog="serve", description="")
        return "serve"
    name, *rest = words[3:]
    if name == "doctor":
        doctor._parser().parse_args(rest)
    elif not command.removeprefix("python -m omni_grpc ").startswith(OTHERS):
        cli._parser().parse_args([name, *rest])
    return name


@pytest.mark.parametrize("page", [*RECIPES, *PAGES])
def test_every_command_is_taken(page: str) -> None:
    found = list(commands(page))
    if page in RECIPES:
        names = {parse(command) for command in found}
        assert {"serve", "doctor"} <= names
        assert names & {"generate", "video", "edit"}
    for command in found:
        try:
            parse(command)
        except (ConfigError, SystemExit) as error:
            raise AssertionError(f"{command}: {error}") from error


@pytest.mark.parametrize(
    "command", ["python -m omni_grpc.serve --no-such-flag", "python -m omni_grpc generate --stepz 3"]
)
def test_a_wrong_command_is_found(command: str) -> None:
    with pytest.raises((ConfigError, SystemExit)):
        parse(command)


@pytest.mark.parametrize("page", RECIPES)
def test_a_recipe_has_its_four_parts(page: str) -> None:
    assert re.findall(r"^## (.*)$", text(page), re.MULTILINE) == HEADINGS


@pytest.mark.parametrize("page", RECIPES)
def test_flags_of_a_table_are_there(page: str) -> None:
    server = {option.flag for option in options()}
    told = {action for parser in _commands() for action in parser._option_string_actions}
    rows = re.findall(r"^\| (`--.*?) \|", text(page), re.MULTILINE)
    assert rows
    flags = {flag for row in rows for flag in re.findall(r"`(--[\w-]+)", row)}
    assert flags <= server | told


def _commands() -> list[Any]:
    (action,) = [action for action in cli._parser()._actions if hasattr(action, "choices") and action.choices]
    return list(action.choices.values())


@pytest.mark.parametrize("page", RECIPES)
def test_the_python_of_a_recipe_makes_a_file(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny checkpoint, with a small size and one step."""
    family = page.split("/")[1]
    entry = next(name for name in ENTRIES if specs()[pipeline_of(name)].family == family)
    folder = ENTRIES[entry].build(tmp_path / "tiny")
    small = {"width": 32, "height": 32, "steps": 1}

    class Tiny(omni_grpc.Omni):
        def __init__(self, model: str) -> None:
            super().__init__(str(folder), device="cpu", cpu_threads=1, warm_up_seconds=0)

        def generate(self, prompt: str, **options: Any) -> Any:
            return super().generate(prompt, **(options | small))

        def generate_video(self, prompt: str, **options: Any) -> Any:  # type: ignore[override]
            frames = {"num_frames": self.checkpoint.limits.frame_multiple + self.checkpoint.limits.frame_offset}
            return super().generate_video(prompt, **(options | small | frames))

    monkeypatch.setattr(omni_grpc, "Omni", Tiny)
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(page, "python")
    exec(code, {})
    (made,) = (*tmp_path.glob("*.png"), *tmp_path.glob("*.mp4"))
    assert made.stat().st_size


@pytest.mark.parametrize(
    "page", [*RECIPES, *PAGES, "README.md", "docs/adding-a-model.md", "docs/compat-python.md", "docs/features.md"]
)
def test_every_link_leads_somewhere(page: str) -> None:
    for target in re.findall(r"(?<!!)\[[^\]]*\]\(([^):]+)\)", text(page)):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in _anchors(file.read_text(encoding="utf-8")), target


def _anchors(page: str) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


# --- the guide --------------------------------------------------------------------------------------------------------

ROWS = re.findall(r"^\| [^|]+ \| `(--[^`]+)`[^|]* \| [^|]* \| ([^|]+) \|$", text(PAGES[0]), re.MULTILINE)


def start(*words: str) -> None:
    """As far as the settings of a server and of a model decide it."""
    check_settings(settings(["--model", "m", *words], {}, prog="serve", description=""), toy_checkpoint())


@pytest.mark.parametrize(("flag", "state"), ROWS)
def test_what_the_guide_calls_on_is_there_and_what_it_calls_not_yet_is_not(flag: str, state: str) -> None:
    words = shlex.split(flag)
    if words[0] == "--steps":
        cli._parser().parse_args(["generate", "x", "--out", "x.png", *words])
    elif state.startswith("not yet"):
        with pytest.raises(ConfigError):
            start(*words)
    else:
        assert state.startswith("on")
        settings(["--model", "m", *words], {}, prog="serve", description="")


def test_the_guide_has_every_setting_that_saves_memory_or_answers_steps() -> None:
    named = {flag.split()[0].removeprefix("--").replace("-", "_") for flag, state in ROWS if state.startswith("on")}
    assert {remedy.setting for remedy in REMEDIES} | {"cache_backend"} <= named


def test_lossless_methods_come_first() -> None:
    page = text(PAGES[0])
    first, second = page.index("\n## Lossless\n"), page.index("\n## Lossy\n")
    assert first < second
    for remedy in REMEDIES:
        flag = f"| `--{remedy.setting.replace('_', '-')}"
        assert (page.index(flag, first) < second) is remedy.lossless
    assert "```mermaid\nflowchart" in page
