"""--out where nothing can be written: told before the job, or with the way to have its outputs."""

import shlex

import pytest

from omni_grpc.client import AsyncClient
from omni_grpc.types.errors import ResourceExhausted
from tests.full_disk import mounted, small_files

PICTURE = ("--width", "64", "--height", "64", "--seed", "7", "--steps", "1")


async def test_a_folder_that_cannot_be_written_is_refused_before_the_job(run, server, service, tmp_path):
    with mounted(tmp_path, read_only=True) as folder:
        out = tmp_path / "o.png" if folder else tmp_path / "none.png" / "o.png"
        if folder is None:
            (tmp_path / "none.png").touch()
        done = await run("generate", "x", "--out", out, *server)
        assert done.code in (1, 2)
        assert str(out) in done.err
        assert "Errno" not in done.err
    assert len(service.engine.jobs) == 0


async def test_outputs_that_found_no_room_are_fetched_with_the_commands_that_are_told(run, server, tmp_path):
    out = tmp_path / "o.png"
    with small_files(4096):
        done = await run("generate", "x", "--num-outputs", "2", *PICTURE, "--out", out, "--quiet", *server)
    assert done.code == 1
    assert f"cannot write {tmp_path / 'o-0.png'}: " in done.err
    assert "Errno" not in done.err
    assert list(tmp_path.iterdir()) == []
    commands = [shlex.split(line) for line in done.err.splitlines() if "omni_grpc download" in line]
    assert len(commands) == 2
    for command in commands:
        assert command[:3] == ["python", "-m", "omni_grpc"]
        assert (await run(*command[3:])).code == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["o-0.png", "o-1.png"]
    assert all((tmp_path / name).stat().st_size > 4096 for name in names)


async def test_a_download_that_finds_no_room_leaves_nothing_and_can_be_repeated(run, server, service, tmp_path):
    job = await service.finished(width=64, height=64)
    command = ("download", job.artifacts[0].artifact_id, *server, "--out", tmp_path / "o.png")
    with small_files(4096):
        done = await run(*command)
    assert done.code == 1
    assert "run this command again" in done.err
    assert list(tmp_path.iterdir()) == []
    assert (await run(*command)).code == 0


async def test_a_result_that_finds_no_room_says_that_it_is_still_there(service, tmp_path):
    async with AsyncClient(service.server.address) as client:
        result = await client.generate_image("x", width=64, height=64, steps=1)
        with small_files(4096), pytest.raises(ResourceExhausted, match=r"o\.png") as caught:
            result.save(tmp_path / "o.png")
        assert any(result.artifacts[0].artifact_id in note for note in caught.value.__notes__)
        assert list(tmp_path.iterdir()) == []
        result.save(tmp_path / "o.png")
    assert [path.name for path in tmp_path.iterdir()] == ["o.png"]
