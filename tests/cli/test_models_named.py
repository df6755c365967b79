"""What a name of a model means to each command: the bundled model has one, and an empty one is refused by its field."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import omni_grpc
from omni_grpc.__main__ import main
from omni_grpc.cli import serve
from omni_grpc.config import BUNDLED, EngineConfig
from omni_grpc.types.errors import ConfigError
from tests.cli.conftest import Run

EMPTY = "give a checkpoint folder or ORG/NAME of the hub, or leave it out for the bundled model"


def ran(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["omni-grpc", *words])
    try:
        return main()
    except SystemExit as ended:
        return int(str(ended.code or 0))


def test_demo_is_the_bundled_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert EngineConfig.from_settings(model="demo").model.model == str(BUNDLED)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert EngineConfig.from_settings(model="demo").model.model == "demo", "a folder of one's own comes first"


def test_advice_and_pull_take_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(monkeypatch, "doctor", "--advise", "demo") == 0
    assert "model    QwenImagePipeline, native" in capsys.readouterr().out
    assert ran(monkeypatch, "pull", "demo") == 0
    assert capsys.readouterr() == (f"{BUNDLED}\n", "")
    assert ran(monkeypatch, "pull", "demo", "--revision", "x") == 2
    assert "--revision is for a model of the hub; demo comes with the package" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_refused_before_anything_is_looked_for(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=EMPTY) as caught:
        omni_grpc.Omni(name)
    assert [violation.field for violation in caught.value.violations] == ["model"]
    for words in (["doctor", "--advise", name], ["bench", "prompt-accuracy", "--model", name]):
        assert ran(monkeypatch, *words) in (1, 2)
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"--model is {name!r}: must not be empty; {EMPTY}" in error
    assert serve.main(["--model", name]) == 2
    assert f"error: --model is {name!r}: must not be empty; {EMPTY}\n" == capsys.readouterr().err
    assert ran(monkeypatch, "pull", name) == 2
    assert f"ORG/NAME is {name!r}: give the name of a model on the hub" in capsys.readouterr().err


def test_convert_names_the_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "unet").mkdir()
    (tmp_path / "model_index.json").write_text('{"_class_name": "P", "unet": ["diffusers", "U"]}', encoding="utf-8")
    (tmp_path / "unet" / "config.json").write_text("{}", encoding="utf-8")
    torch.save({"weight": torch.ones(2)}, tmp_path / "unet" / "diffusion_pytorch_model.bin")
    assert ran(monkeypatch, "convert", str(tmp_path), "/proc/none/out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: FILE_NOT_WRITTEN: ")
    assert ": /proc/none: there is no such file or folder; " in line
    assert ran(monkeypatch, "convert", "a" * 300, "out") == 2
    assert capsys.readouterr().err == f"error: {'a' * 300}/model_index.json: the name is too long\n"


@pytest.mark.parametrize("folders", [["", "out"], ["demo", ""]])
def test_convert_refuses_an_empty_folder(
    folders: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(monkeypatch, "convert", *folders) == 2
    assert "is empty; name a folder" in capsys.readouterr().err


@pytest.mark.parametrize("place", [(), ("--server", "127.0.0.1:1")])
async def test_generate_refuses_an_empty_name_too(run: Run, tmp_path: Path, place: tuple[str, ...]) -> None:
    done = await run("generate", "x", "--out", tmp_path / "o.png", "--model", "", *place)
    assert done.code == 2
    assert "--model is '': give a model's name or a checkpoint folder, or leave it out" in done.err
