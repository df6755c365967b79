"""`embed_parameters` through a real server: files say what was asked for, and clients leave them as they are."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from omni_grpc.checkpoint.registry import open_model
from omni_grpc.cli.main import main
from omni_grpc.client import AsyncClient
from omni_grpc.client.asked import asked_of
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, LocalExecutor
from omni_grpc.fleet import Fleet
from omni_grpc.gate import Gate
from omni_grpc.metadata import has_parameters, parameters_in
from omni_grpc.resolve.draft import requested
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.server import Server
from omni_grpc.server.requests import read
from omni_grpc.server.tasks import task_of
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.parameters import Parameters
from omni_grpc.types.request import Task
from omni_grpc.types.request_options import ALL, EDIT, VIDEO, options_of
from omni_grpc.types.version import __version__
from omni_grpc.v1 import media_pb2
from tests.client.test_asked import BUILD, OTHERS, VALUES

from .service import Service, image, refusal
from .studio import png, serving_studio

pytestmark = pytest.mark.service

TASKS = {EDIT: Task.IMAGE_EDIT, VIDEO: Task.TEXT_TO_VIDEO}


@pytest.mark.parametrize("kind", ALL)
def test_the_server_reads_what_the_client_writes(kind: str) -> None:
    given: dict[str, Any] = {
        option.name: VALUES.get(option.type.name) or next(iter(option.type.choices or ())).value
        for option in options_of(kind)
        if not option.of_job and option.name not in OTHERS
    }
    given |= {"task": TASKS[kind].value} if kind in TASKS else {}
    message = BUILD[kind](given | {"embed_parameters": True, "labels": {"a": "b"}, "priority": 3})
    draft = read(message, task_of(message), streaming=False).draft
    assert draft.embed_parameters
    assert requested(draft, "m") == asked_of(message)
    assert json.loads(json.dumps(requested(draft, "m").options)) == asked_of(message).options


async def test_the_worker_gets_the_words_of_the_request_only_where_it_asks_for_that() -> None:
    async with serving_studio() as service, AsyncClient(f"127.0.0.1:{service.server.port}") as client:
        await client.edit_image("a boat", images=[png()], strength=0.5)
        assert service.executor.request.embedding is None
        made = await client.edit_image("a boat", images=[png()], strength=0.5, embed_parameters=True)
        embedding = service.executor.request.embedding
    assert embedding.asked.options == made.asked.options | {"task": "IMAGE_TO_IMAGE"}
    assert embedding.asked.inputs == made.asked.inputs == {"images": [{"sha256": hashlib.sha256(png()).hexdigest()}]}
    assert embedding.defaults_used == made.effective.defaults_used


async def test_raw_pixels_are_refused_by_field_before_there_is_a_job(service: Service) -> None:
    raw = image(output_format=media_pb2.IMAGE_FORMAT_RAW_RGB8, options={"embed_parameters": True})
    refused = await refusal(service.generation.GenerateImage(raw))
    assert (refused.code, refused.fields) == ("INVALID_ARGUMENT", ["options.embed_parameters"])
    assert "choose the output_format PNG, JPEG, WEBP, or leave embed_parameters out" in refused.message
    assert len(service.engine.jobs) == 0


def run(*arguments: object) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


async def test_files_of_the_bundled_model_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig.from_settings(model="demo", port=0, device="cpu", cpu_threads=1, warm_up_seconds=0)
    checkpoint = open_model(config.model, apply=lambda found: apply_settings(config, found))
    server = Server(Gate(Fleet.of(Engine(config, checkpoint, LocalExecutor(config, checkpoint)))), config)
    await server.start()
    address = f"127.0.0.1:{server.port}"
    try:
        async with AsyncClient(address) as client:
            await the_python_client(client, tmp_path)
        await the_command_line(address, tmp_path, capsys)
    finally:
        await server.stop()


async def the_python_client(client: AsyncClient, folder: Path) -> None:
    options: dict[str, Any] = {"steps": 2, "seed": 7, "width": 64, "height": 64, "num_outputs": 2}
    plain = await client.generate_image("a red circle", **options)
    made = await client.generate_image("a red circle", **options, embed_parameters=True)
    again = await client.generate_image("a red circle", **options, embed_parameters=False)
    assert again.files == plain.files
    assert not any(map(has_parameters, plain.files))
    assert made.warnings == plain.warnings
    for index, path in enumerate(made.save(folder / "a.png")):
        data, artifact = path.read_bytes(), made.artifacts[index]
        assert data == made.files[index] != plain.files[index]
        assert (artifact.size_bytes, artifact.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        assert data.count(b"tEXtomni_grpc\0") == 1
        pixels = [PIL.Image.open(io.BytesIO(one)).tobytes() for one in (data, plain.files[index])]
        assert pixels[0] == pixels[1]
        found = parameters_in(path)
        assert made.asked is not None
        assert found == Parameters.of(made.asked, made.effective, seed=7 + index, index=index, layer=None)
    (path, _) = plain.save(folder / "b.png")
    assert parameters_in(path) == Parameters.of(made.asked, plain.effective, seed=7, index=0, layer=None)
    with pytest.raises(InvalidArgument, match="embed_parameters is 'yes', expected True or False"):
        await client.generate_image("a red circle", embed_parameters="yes")  # type: ignore[arg-type]


async def the_command_line(address: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, out, again = ("--server", address), folder / "c.webp", folder / "d.webp"
    asked = ("generate", "a red circle", *server, "--steps", 2, "--embed-parameters", "--quiet")
    assert await asyncio.to_thread(run, *asked, "--out", out) == 0
    capsys.readouterr()
    assert run("show", out) == 0
    shown = capsys.readouterr().out
    assert "a red circle" in shown
    assert shown.rstrip().endswith(f"omni_grpc {__version__}"), "the server wrote it, and no client over it"
    assert await asyncio.to_thread(run, "generate", "--like", out, "--out", again, *server, "--quiet") == 0
    assert PIL.Image.open(again).tobytes() == PIL.Image.open(out).tobytes()
    assert f"server {__version__}" in str(list(parameters_in(again).lines()))
    capsys.readouterr()
    assert await asyncio.to_thread(run, *asked, "--out", out, "--no-metadata") == 2
    assert "--embed-parameters writes what --no-metadata leaves out" in capsys.readouterr().err
