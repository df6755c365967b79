"""The example of each task runs as its docstring says: the command there, with a tiny model and less to do."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import runpy
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import av
import numpy as np
import PIL.Image
import pytest

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config.settings import settings
from omni_grpc.engine import Engine, LocalExecutor
from omni_grpc.fleet import Fleet
from omni_grpc.gate import Gate
from omni_grpc.server import Server
from omni_grpc.types.plan import CostModel

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PICTURE = ["--width", "32", "--height", "64", "--steps", "2"]
CLIP = ["--width", "64", "--height", "32", "--num-frames", "5", "--steps", "2"]
TASKS: Mapping[str, tuple[str, Sequence[str]]] = {
    "text_to_image": ("qwen_image", PICTURE),
    "image_to_image": ("stable_diffusion", PICTURE),
    "text_to_video": ("wan_ti2v", CLIP),
    "image_to_video": ("wan_ti2v", CLIP),
    "text_to_audio": ("stable_audio", ["--duration", "0.5", "--steps", "2"]),
}
"""For each task a tiny checkpoint, and flags that ask for little."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    from tools.tiny_checkpoints import BUILDERS

    built: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in built:
            built[name] = BUILDERS[name](tmp_path_factory.mktemp("tiny") / name)
        return built[name]

    return folder


def commands(example: Path) -> list[list[str]]:
    """The command lines of a docstring, in words."""
    text = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or ""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith("python ")]


def put(words: list[str], flag: str, value: object) -> list[str]:
    """The command with another value for a flag that it has."""
    at = words.index(flag) + 1
    return [*words[:at], str(value), *words[at + 1 :]]


class Example:
    """One example, run in this process. `made` are the files in its output folder."""

    def __init__(self, place: str, task: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.task, self.made = EXAMPLES / place / f"{task}.py", task, folder / "out"
        *self.before, words = commands(self.path)
        assert words[:2] == ["python", f"examples/{place}/{task}.py"]
        assert len(self.path.read_text(encoding="utf-8").splitlines()) <= 40
        words = put(words[2:], "--output", self.made)
        if "--image" in words:
            picture = np.linspace(0, 255, 64 * 32 * 3).astype(np.uint8).reshape(64, 32, 3)
            PIL.Image.fromarray(picture).save(folder / "in.png")
            words = put(words, "--image", folder / "in.png")
        self.words, self.prompts = words, words[words.index("--prompt") + 1 : words.index("--output")]
        self._monkeypatch = monkeypatch

    def run(self, flag: str, value: object) -> None:
        argv = [str(self.path), *put(self.words, flag, value), *TASKS[self.task][1]]
        self._monkeypatch.setattr(sys, "argv", argv)
        runpy.run_path(str(self.path), run_name="__main__")

    def check(self, printed: str) -> None:
        extension = {"image": "png", "video": "mp4", "audio": "wav"}[self.task.rpartition("_")[2]]
        files = [self.made / f"output_{i}_0.{extension}" for i, _ in enumerate(self.prompts)]
        assert sorted(self.made.iterdir()) == files
        assert [line.partition(":")[0] for line in printed.splitlines()] == [str(file) for file in files]
        for file in files:
            self._check_file(file)

    def _check_file(self, file: Path) -> None:
        if file.suffix == ".png":
            assert PIL.Image.open(file).size == (32, 64)
            return
        with av.open(io.BytesIO(file.read_bytes())) as media:
            if file.suffix == ".mp4":
                frames = [(frame.width, frame.height) for frame in media.decode(video=0)]
                assert frames == [(64, 32)] * 5
            else:
                assert sum(frame.samples for frame in media.decode(audio=0)) == 4000


@contextlib.asynccontextmanager
async def served(words: Sequence[str], folder: Path) -> AsyncIterator[int]:
    """The server of a command line, with this model, in this process, at the port that it yields."""
    assert words[:3] == ["python", "-m", "omni_grpc.serve"]
    argv = put(put(list(words[3:]), "--model", folder), "--port", 0)
    config = settings([*argv, "--device", "cpu", "--warm-up-seconds", "0"], {}, prog="serve", description="")
    checkpoint = open_checkpoint(folder, load_format=config.model.diffusion_load_format)
    engine = Engine(config, checkpoint, LocalExecutor(config, checkpoint))
    server = Server(Gate(Fleet.of(engine)), config)
    await server.start()
    try:
        yield server.port
    finally:
        await server.stop()


def test_every_task_has_both_examples() -> None:
    for place in ("offline", "online"):
        assert sorted(path.stem for path in (EXAMPLES / place).glob("*.py")) == sorted(TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_offline(
    task: str,
    tiny: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = Example("offline", task, tmp_path, monkeypatch)
    assert example.before == []
    # nothing here shares a step, and it takes longer than the example
    monkeypatch.setattr("omni_grpc.worker.packed.warm_up", lambda *_: CostModel())
    example.run("--model", tiny(TASKS[task][0]))
    example.check(capsys.readouterr().out)


@pytest.mark.service
@pytest.mark.parametrize("task", TASKS)
async def test_online(
    task: str,
    tiny: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = Example("online", task, tmp_path, monkeypatch)
    (serve,) = example.before
    async with served(serve, tiny(TASKS[task][0])) as port:
        await asyncio.to_thread(example.run, "--server", f"127.0.0.1:{port}")
    example.check(capsys.readouterr().out)
