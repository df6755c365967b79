"""A folder of blobs: its files, a disk that is slow, full or read-only, and processes that are killed."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from omni_grpc.store.blobs.folder import FolderBlobs
from omni_grpc.store.blobs.open import artifacts_at
from omni_grpc.store.seam import StoreError
from omni_grpc.types.errors import ConfigError
from tests.full_disk import mounted, small_files
from tests.store.blob_conformance import MIB, STALL_SECONDS, missing, names, noise, pieces, read, stall_of
from tests.store.processes import KILLS, killed_while_putting, memory_of_a_large_one, whole


@pytest.fixture
async def blobs(tmp_path: Path) -> AsyncIterator[FolderBlobs]:
    blobs = FolderBlobs(tmp_path / "outputs")
    await blobs.open()
    yield blobs
    await blobs.close()


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if not path.is_dir())


async def test_only_the_owner_may_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        blobs = FolderBlobs(tmp_path / "new" / "outputs")
        await blobs.open()
        await blobs.put("a", pieces(b"x"))
    finally:
        os.umask(before)
    await blobs.close()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new" / "outputs").rglob("*")}
    assert modes == {0o600, 0o700}
    assert stat.S_IMODE((tmp_path / "new" / "outputs").stat().st_mode) == 0o700


async def test_files_are_spread_over_folders(tmp_path: Path, blobs: FolderBlobs) -> None:
    await asyncio.gather(*(blobs.put(f"a/{n}", pieces(b"x")) for n in range(300)))
    folders = {path.parent for path in files(tmp_path)}
    assert 150 < len(folders) <= 256
    assert len(await names(blobs, "a/")) == 300


async def test_what_others_put_there_is_left_alone(tmp_path: Path, blobs: FolderBlobs) -> None:
    await blobs.put("a", pieces(b"x"))
    (place,) = files(tmp_path)
    for path in (place.with_name("b"), place.with_name("a b"), tmp_path / "outputs" / "notes", place.with_name("d")):
        path.mkdir() if path.name == "d" else path.write_bytes(b"y")
    assert await names(blobs) == ["a"]
    again = FolderBlobs(tmp_path / "outputs", stale_seconds=0)
    await again.open()
    await again.close()
    assert len(files(tmp_path)) == 4


@pytest.mark.parametrize("after", ["delete", "replace"])
async def test_a_reader_goes_on_to_the_end_of_what_it_began(blobs: FolderBlobs, after: str) -> None:
    data = noise(4 * MIB)
    await blobs.put("a", pieces(data))
    reader = blobs.read("a")
    found = await anext(reader)
    if after == "delete":
        await blobs.delete(["a"])
        assert await missing(blobs, "a")
    else:
        await blobs.put("a", pieces(b"other"))
    assert found + b"".join([piece async for piece in reader]) == data


async def test_no_file_stays_open(blobs: FolderBlobs) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for n in range(5):
        await blobs.put("a", pieces(noise(3 * MIB)))
        reader = blobs.read("a")
        await anext(reader)
        await reader.aclose()
        task = asyncio.create_task(read(blobs, "a"))
        await asyncio.sleep(n / 2000)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path, blobs: FolderBlobs) -> None:
    await blobs.put("a", pieces(noise(3 * MIB)))
    reader = blobs.read("a")
    await anext(reader)
    os.truncate(files(tmp_path)[0], 10)
    with pytest.raises(StoreError, match="has become shorter while it was read"):
        await anext(reader)


async def test_a_slow_disk_does_not_stall_the_loop(
    tmp_path: Path, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    await blobs.put("a", pieces(noise(MIB)))

    on_the_loop: list[str] = []

    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def late(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                on_the_loop.append(function.__name__)
            time.sleep(0.025)
            return function(*args, **kwargs)

        return late

    for call in ("open", "write", "fsync", "pread", "utime", "scandir"):
        monkeypatch.setattr(os, call, slow(getattr(os, call)))
    cut = [noise(MIB // 8)] * 16

    async def given() -> AsyncIterator[bytes]:
        for piece in cut:
            yield piece

    async def work() -> None:
        await asyncio.gather(*(blobs.put(f"b{n}", given()) for n in range(17)))
        await asyncio.gather(*(read(blobs, "a") for _ in range(17)))
        await names(blobs, "a")
        await blobs.delete(["b1", "b2"])

    assert await stall_of(work) < STALL_SECONDS
    assert on_the_loop == []


async def test_a_file_that_does_not_answer_does_not_stall_the_loop(tmp_path: Path, blobs: FolderBlobs) -> None:
    await blobs.put("a", pieces(b"x"))
    (place,) = files(tmp_path)
    place.unlink()
    os.mkfifo(place)  # whoever opens it for reading waits for a writer

    async def work() -> None:
        threading.Timer(0.2, lambda: os.close(os.open(place, os.O_WRONLY))).start()
        assert await read(blobs, "a") == b""

    assert await stall_of(work) < STALL_SECONDS


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number), "/srv/outputs/secret-name")

    return fail


IN_WORDS = {
    errno.ENOSPC: ("the disk is full; free some space", True),
    errno.EDQUOT: ("the disk quota is used up; free some space", True),
    errno.EROFS: ("the file system is read-only; let the user", False),
    errno.EACCES: ("permission is denied; let the user", False),
    errno.EIO: ("the disk does not respond as it should; see to its disk", False),
    errno.EMFILE: ("too many files are open in this process", True),
}


@pytest.mark.parametrize("number", IN_WORDS)
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
async def test_what_the_system_says_is_said_in_words(
    tmp_path: Path, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    text, retryable = IN_WORDS[number]
    with monkeypatch.context() as patch:
        patch.setattr(Path if call == "replace" else os, call, failing(number))
        with pytest.raises(StoreError, match=f"^cannot write to the folder of outputs: {text}") as caught:
            await blobs.put("a", pieces(noise(2 * MIB)))
    assert caught.value.retryable is retryable
    assert "secret-name" not in str(caught.value)
    assert files(tmp_path) == []


async def test_what_was_not_synced_in_its_place_is_not_left_there(
    tmp_path: Path, blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    await blobs.put("a", pieces(b"x"))  # from now on its folder is there
    fsync = os.fsync

    def of_files_alone(file: int) -> None:
        (failing(errno.EIO) if stat.S_ISDIR(os.fstat(file).st_mode) else fsync)(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", of_files_alone)
        with pytest.raises(StoreError, match="the disk does not respond"):
            await blobs.put("a", pieces(b"y"))
    assert files(tmp_path) == []


async def test_a_folder_that_cannot_be_synced_is_no_error(blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def of_files_alone(file: int) -> None:
        (failing(errno.EINVAL) if stat.S_ISDIR(os.fstat(file).st_mode) else fsync)(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", of_files_alone)
        await blobs.put("a", pieces(b"y"))
    assert await read(blobs, "a") == b"y"


async def test_a_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path, kilobytes=4096) as folder:
        if folder is None:
            pytest.skip("this user may not mount a file system")
        blobs = FolderBlobs(folder)
        await blobs.open()
        await blobs.put("a", pieces(noise(2 * MIB)))
        with pytest.raises(StoreError, match="the disk is full"):
            await blobs.put("b", pieces(noise(3 * MIB)))
        assert await names(blobs) == ["a"]
        await blobs.delete(["a"])
        await blobs.put("b", pieces(noise(3 * MIB)))
        await blobs.close()


async def test_a_file_larger_than_the_process_may_write(tmp_path: Path, blobs: FolderBlobs) -> None:
    with small_files(MIB), pytest.raises(StoreError, match="larger than this process may write"):
        await blobs.put("b", pieces(noise(3 * MIB)))
    assert files(tmp_path) == []


async def test_a_folder_that_was_removed(tmp_path: Path, blobs: FolderBlobs) -> None:
    shutil.rmtree(tmp_path / "outputs")
    with pytest.raises(StoreError, match=r"cannot write to .* there is no such file or folder; make or mount it"):
        await blobs.put("a", pieces(b"x"))
    with pytest.raises(StoreError, match="cannot read from"):
        await names(blobs)
    assert not (tmp_path / "outputs").exists()


async def test_a_folder_in_which_it_cannot_write_is_refused(tmp_path: Path) -> None:
    tmp_path.joinpath("file").write_text("x", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"^artifact_url: cannot keep outputs in .*/file/a: .*; make or mount it again"
    ):
        await FolderBlobs(tmp_path / "file" / "a").open()


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_disk_that_takes_nothing_is_refused(tmp_path: Path, read_only: bool) -> None:
    with mounted(tmp_path, kilobytes=8, read_only=read_only) as mount:
        if mount is None:
            pytest.skip("this user may not mount a file system")
        if not read_only:
            mount.joinpath("other").write_bytes(bytes(8192))
        text = "the file system is read-only; let the user of the server" if read_only else "the disk is full; free"
        with pytest.raises(ConfigError, match=f"^artifact_url: cannot keep outputs in .*: {text}"):
            await FolderBlobs(tmp_path).open()


async def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    killed_while_putting(str(tmp_path))
    blobs = FolderBlobs(tmp_path)
    await blobs.open()
    count = await whole(blobs)
    left = len(files(tmp_path)) - count
    # none of those that were killed was between two files every time; another server's may be among them
    assert 0 < left <= KILLS
    await blobs.close()
    blobs = FolderBlobs(tmp_path, stale_seconds=0)
    await blobs.open()
    await blobs.close()
    assert len(files(tmp_path)) == count


async def test_the_names_of_a_running_server_remove_it_too(tmp_path: Path, blobs: FolderBlobs) -> None:
    await blobs.put("a", pieces(b"x"))
    (place,) = files(tmp_path)
    old, new = place.with_name("~old"), place.with_name("~new")
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 4000,) * 2)
    assert await names(blobs) == ["a"]
    assert files(tmp_path) == sorted([place, new])


def test_a_large_blob_is_never_whole_in_memory(tmp_path: Path) -> None:
    assert memory_of_a_large_one(str(tmp_path)) < 64


@pytest.mark.parametrize("place", ["{}", "file://{}", "file://localhost{}", "FILE://{}"])
async def test_a_path_and_a_file_address_are_a_folder(tmp_path: Path, place: str) -> None:
    blobs = artifacts_at(place.format(tmp_path / "a b" if place == "{}" else tmp_path / "a%20b"))
    assert isinstance(blobs, FolderBlobs)
    await blobs.open()
    await blobs.close()
    assert (tmp_path / "a b").is_dir()


OTHERS = (
    *("", "gs://bucket", "file://host/a", "file://", "a\0b"),
    "https://user:hunter2@host/b?secret=hunter2",  # pragma: allowlist secret
)


@pytest.mark.parametrize("place", OTHERS)
def test_any_other_place_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=r"^artifact_url: .* or a bucket \(s3://bucket") as caught:
        artifacts_at(place)
    assert "hunter2" not in str(caught.value)


def test_a_folder_loads_no_library_of_object_stores(tmp_path: Path) -> None:
    code = "import sys; from omni_grpc.store.blobs.open import artifacts_at; artifacts_at(sys.argv[1])\n"
    code += "assert 'obstore' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
