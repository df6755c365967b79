"""Parameters in the files of `generate` and the like, `show`, `--like` and `--output-dir`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import PIL.Image
import pytest

from omni_grpc.cli.main import main
from omni_grpc.metadata import embedded, parameters_in
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.version import __version__
from tests.server.fake_executor import picture
from tests.server.studio import png, serving_studio, studio

pytestmark = pytest.mark.service


def pixels(path: Path) -> bytes:
    return PIL.Image.open(path).tobytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
async def test_the_file_says_how_it_was_made(run, server, tmp_path, suffix):
    out, plain = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
    options = ("--negative-prompt", "blur", "--seed", 7, "--true-cfg-scale", 3, "--label", "secret=1", "--quiet")
    assert (await run("generate", "a red circle", "--out", out, *server, *options)).code == 0
    assert (await run("generate", "a red circle", "--out", plain, *server, *options, "--no-metadata")).code == 0
    assert plain.read_bytes() == picture(64, 32, 7, ImageFormat({"jpg": "JPEG"}.get(suffix, suffix.upper())))
    assert pixels(out) == pixels(plain)
    shown = await run("show", out)
    assert shown.code == 0
    lines = dict(line.split(maxsplit=1) for line in shown.out.splitlines() if not line.startswith(("effe", "writ")))
    assert lines == {
        "prompt": "a red circle", "model": "toy", "kind": "image", "seed": "7", "negative_prompt": "blur",
        "true_cfg_scale": "3", "output_format": parameters_in(out).effective["output_format"],
        "output": f"0, {parameters_in(out).effective['output_format']}",
    }  # fmt: skip
    assert f"omni_grpc {__version__}, server {__version__}" in shown.out
    record = json.loads((await run("show", out, "--json")).out)
    assert (record["file"], record["omni_grpc"], record["effective"]["steps"]) == (str(out), __version__, 4)
    assert "secret" not in json.dumps(record)
    without = await run("show", plain)
    assert (without.code, without.err.startswith("error: FAILED_PRECONDITION NO_PARAMETERS: ")) == (1, True)
    assert str(plain) in without.err


async def test_show_of_several_files(run, server, tmp_path):
    assert (await run("generate", "x", "--out", tmp_path / "a.png", *server, "--num-outputs", 2, "--seed", 3)).code == 0
    first, second = tmp_path / "a-0.png", tmp_path / "a-1.png"
    shown = (await run("show", first, second)).out
    assert shown.startswith(f"{first}:\n")
    assert f"\n\n{second}:\n" in shown
    records = [json.loads(line) for line in (await run("show", first, second, "--json")).out.splitlines()]
    assert [(record["seed"], record["index"]) for record in records] == [(3, 0), (4, 1)]
    missing = await run("show", tmp_path / "none.png")
    assert (missing.code, missing.err) == (1, f"error: {tmp_path / 'none.png'}: there is no such file or folder\n")


async def test_raw_pixels_have_no_place_and_no_warning(run, server, tmp_path):
    done = await run("generate", "x", "--out", tmp_path / "a.rgb", *server, "--seed", 7)
    assert (done.code, "warning" in done.err) == (0, False)
    assert (tmp_path / "a.rgb").read_bytes() == picture(64, 32, 7, ImageFormat.RAW_RGB8)
    shown = await run("show", tmp_path / "a.rgb")
    assert (shown.code, "no picture, video or sound" in shown.err) == (1, True)


async def test_an_output_that_takes_no_parameters_is_saved_and_told(run, tmp_path):
    async with serving_studio() as service:  # its videos are noise
        address = "--server", f"127.0.0.1:{service.server.port}"
        done = await run("video", "a ball", "--out", tmp_path / "a.mp4", *address, "--quiet")
    assert done.code == 0
    assert "warning: output 0 is written without its parameters: the file is not MP4, or damaged" in done.err
    assert (tmp_path / "a.mp4").stat().st_size == 1000


async def test_names_in_a_folder(run, server, tmp_path):
    folder = tmp_path / "made"
    more = (*server, "--output-dir", folder, "--quiet")
    for arguments in (("--seed", 7), ("--seed", 7), ("--seeds", "5,9", "--format", "webp")):
        done = await run("generate", "x", *more, *arguments)
        assert (done.code, done.err) == (0, "")
    assert names(folder) == ["00001-7.png", "00002-7.png", "00003-5.webp", "00003-9.webp"]
    assert done.out.startswith(f"{folder / '00003-5.webp'}  ")
    (folder / "00041-1.txt").write_text("of someone else")
    assert (await run("generate", "x", *more, "--seed", 7)).code == 0
    assert "00042-7.png" in names(folder)


async def test_a_folder_that_cannot_be_had_is_refused_before_anything_is_asked(run, server, service, tmp_path):
    (tmp_path / "file").write_text("")
    for where, why in (("file", "it already exists"), ("no/where", "there is no such file or folder")):
        done = await run("generate", "x", *server, "--output-dir", tmp_path / where)
        assert (done.code, why in done.err) == (2, True)
    both = await run("generate", "x", *server, "--output-dir", tmp_path, "--out", tmp_path / "a.png")
    assert (both.code, "not allowed with" in both.err) == (2, True)
    assert len(service.engine.jobs) == 0


async def test_like_repeats_one_output_and_takes_what_is_given(run, server, service, tmp_path):
    first = tmp_path / "a.png"
    options = ("--width", 48, "--steps", 3, "--negative-prompt", "", "--num-outputs", 2, "--seed", 7, "--priority", 5)
    assert (await run("generate", "a star", "--out", first, *server, *options, "--extra", "a=1")).code == 1
    assert (await run("generate", "a star", "--out", first, *server, *options)).code == 0
    again = await run("generate", "--like", tmp_path / "a-1.png", "--out", tmp_path / "b.png", *server, "--quiet")
    assert (again.code, again.err) == (0, "")
    assert pixels(tmp_path / "b.png") == pixels(tmp_path / "a-1.png")
    request = service.engine.jobs.newest()[0].request
    assert (request.prompt, request.width, request.height, request.steps) == ("a star", 48, 32, 3)
    assert (request.seeds, request.negative_prompt) == ((8,), "")
    other = await run(
        "generate", "two stars", "--like", tmp_path / "b.png", "--output-dir", tmp_path, *server,
        "--seeds", "1,2", "--steps", 5,
    )  # fmt: skip
    assert other.code == 0, other.err
    request = service.engine.jobs.newest()[0].request
    assert (request.prompt, request.seeds, request.steps, request.width) == ("two stars", (1, 2), 5, 48)
    assert "00001-1.png" in names(tmp_path)


async def test_like_and_another_model(run, server, service, tmp_path):
    assert (await run("generate", "x", "--out", tmp_path / "a.png", *server)).code == 0
    async with serving_studio(dataclasses.replace(studio(), name="other")) as elsewhere:
        there = ("--server", f"127.0.0.1:{elsewhere.server.port}", "--like", tmp_path / "a.png", "--quiet")
        refused = await run("generate", *there, "--out", tmp_path / "b.png")
        assert len(elsewhere.engine.jobs) == 0
        told = await run("generate", *there, "--out", tmp_path / "b.png", "--model", "other")
    assert (refused.code, told.code) == (1, 0)
    assert "was made with toy; to use another model, name it with --model" in refused.err
    assert "was made with the model toy, not other; the output will be another one" in told.err


async def test_like_tells_what_is_done_otherwise(run, server, service, tmp_path):
    assert (await run("generate", "x", "--out", tmp_path / "a.png", *server, "--negative-prompt", "y")).code == 0
    found = parameters_in(tmp_path / "a.png")
    assert found.effective["guidance"]["true_cfg_scale"] == 4
    like = ("generate", "--like", tmp_path / "a.png", *server, "--quiet", "--out", tmp_path / "b.png")
    assert (await run(*like)).err == ""
    assert (await run(*like, "--negative-prompt", "z", "--steps", 2)).err == ""


async def test_inputs_must_be_given_again_by_name(run, tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        (tmp_path / f"{name}.png").write_bytes(png(seed=seed))
    (tmp_path / "m.png").write_bytes(png(mode="L"))
    async with serving_studio() as service:
        address = ("--server", f"127.0.0.1:{service.server.port}", "--quiet")
        media = ("--image", tmp_path / "a.png", "--image", tmp_path / "b.png", "--mask", tmp_path / "m.png")
        out, again = ("--out", tmp_path / "out.png"), ("--like", tmp_path / "out.png", "--out", tmp_path / "again.png")
        made = await run("edit", "blue", *media, "--strength", 0.5, *out, *address)
        assert made.code == 0, made.err
        missing = await run("edit", *again, *address, *media[:4])
        assert (missing.code, "give --mask (1) again" in missing.err) == (2, True)
        missing = await run("edit", *again, *address)
        assert "give --image (2), --mask (1) again" in missing.err
        wrong = await run("generate", *again, *address)
        assert (wrong.code, "made by another command: omni-grpc edit --like" in wrong.err) == (2, True)
        done = await run("edit", *again, *address, *media)
        assert (done.code, done.err) == (0, "")
        assert service.executor.request.strength == 0.5
        swapped = await run("edit", *again, *address, *media[:2], *media[:2], *media[4:])
        assert f"warning: --image {tmp_path / 'a.png'} is not the file that" in swapped.err
    assert pixels(tmp_path / "again.png") == pixels(tmp_path / "out.png")


async def test_a_file_of_somebody_else(run, server, tmp_path):
    """Nothing in it steers the terminal, and what this version does not know is told."""
    out = tmp_path / "a.png"
    assert (await run("generate", "red \x1b[31m", "--out", out, *server, "--seed", 7, "--no-metadata")).code == 0
    assert (await run("generate", "red \x1b[31m", "--out", tmp_path / "b.png", *server, "--seed", 7)).code == 0
    record = parameters_in(tmp_path / "b.png").record()
    record["options"]["warp"] = 9
    out.write_bytes(embedded(out.read_bytes(), ImageFormat.PNG, json.dumps(record), ""))
    shown = await run("show", out)
    assert ("\x1b" in shown.out, "red \\x1b[31m" in shown.out) == (False, True)
    done = await run("generate", "--like", out, "--out", tmp_path / "c.png", *server)
    assert (done.code, f"warning: {out} has warp, which this version does not know" in done.err) == (0, True)


def test_the_bundled_model_repeats_its_picture_to_the_byte(tmp_path, capsys):
    def made(*arguments: object) -> Path:
        where = ("--model", "demo", "--device", "cpu", "--quiet", "--json")
        assert main(["generate", *map(str, (*arguments, *where))]) == 0
        return Path(json.loads(capsys.readouterr().out)["files"][0])

    first = made("a red circle", "--out", tmp_path / "a.png", "--steps", 3, "--width", 64, "--height", 64)
    second = made("--like", first, "--output-dir", tmp_path)
    assert second.name == f"00001-{parameters_in(first).seed}.png"
    assert pixels(first) == pixels(second)
