"""Files of the user's: whole or not at all, with the reason in words."""

import contextlib
import errno
import os
import stat
import threading

import pytest

from omni_grpc.types.errors import FailedPrecondition, OmniError, ResourceExhausted
from omni_grpc.types.os_errors import plain
from omni_grpc.types.output_files import check_writable, new_file, write_file
from tests.full_disk import mounted, small_files

DATA = bytes(range(256)) * 256


def test_a_file_is_written_whole_in_place_of_the_one_before(tmp_path):
    path = tmp_path / ("x" * 250 + ".png")
    write_file(path, b"first")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    path.chmod(0o640)
    write_file(path, DATA)
    assert path.read_bytes() == DATA
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def written_in_parts(path, data=DATA):
    with new_file(path) as file:
        for start in range(0, len(data), 1000):
            file.write(data[start : start + 1000])


def test_a_file_that_is_written_in_parts_takes_its_place_at_the_end(tmp_path):
    path = tmp_path / "jobs.csv"
    written_in_parts(path, b"first")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    path.chmod(0o640)
    with new_file(path) as file:
        file.write(DATA)
        assert path.read_bytes() == b"first"
    assert path.read_bytes() == DATA
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with contextlib.suppress(KeyboardInterrupt), new_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    with small_files(8192), pytest.raises(ResourceExhausted, match=f"{path}: the file is larger"):
        written_in_parts(path)
    assert path.read_bytes() == DATA
    assert list(tmp_path.iterdir()) == [path]


def test_without_room_nothing_is_left_and_the_file_before_stays(tmp_path):
    path = tmp_path / "out.png"
    write_file(path, b"before")
    with (
        small_files(8192),
        pytest.raises(ResourceExhausted, match=f"{path}: the file is larger") as caught,
    ):
        write_file(path, DATA)
    assert caught.value.reason == "DISK_FULL"
    assert "Errno" not in str(caught.value)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_noticed_before_the_work_and_after_it(tmp_path):
    with mounted(tmp_path) as folder:
        if folder is None:
            pytest.skip("this user may not mount a file system")
        check_writable(folder / "out.png")
        with pytest.raises(ResourceExhausted, match=r"out.png: the disk is full; free some space"):
            write_file(folder / "out.png", DATA * 2)
        assert list(folder.iterdir()) == []
        write_file(folder / "filling", DATA[:65000])
        with pytest.raises(ResourceExhausted, match="the disk is full"):
            check_writable(folder / "out.png")
        assert [path.name for path in folder.iterdir()] == ["filling"]


def test_a_read_only_disk_is_told_before_the_work(tmp_path):
    with mounted(tmp_path, read_only=True) as folder:
        if folder is None:
            pytest.skip("this user may not mount a file system")
        for write in (check_writable, lambda path: write_file(path, b"x")):
            with pytest.raises(FailedPrecondition, match=r"out\.png: the file system is read-only") as caught:
                write(folder / "out.png")
            assert caught.value.reason == "FILE_NOT_WRITTEN"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (".", "it is a folder"),
        ("none/out.png", "there is no such file"),
        ("file/out.png", "is a file and not a folder"),
    ],
)
def test_what_cannot_be_written_is_refused_by_all(tmp_path, path, why):
    (tmp_path / "file").touch()
    for write in (check_writable, lambda path: write_file(path, b"x"), written_in_parts):
        with pytest.raises(OmniError, match=why):
            write(tmp_path / path)


def test_a_link_stays_a_link_and_a_pipe_or_device_is_written_as_it_is(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.png"
    link.symlink_to(tmp_path / "there" / "real.png")
    check_writable(link)
    write_file(link, DATA)
    assert link.is_symlink()
    assert (tmp_path / "there" / "real.png").read_bytes() == DATA
    check_writable(tmp_path / "there" / "new.png")
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_file(pipe, DATA)
    reader.join()
    assert got == [DATA]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    for write in (write_file, written_in_parts):
        with pytest.raises(ResourceExhausted, match="cannot write /dev/full: the disk is full"):
            write(tmp_path.__class__("/dev/full"), DATA)
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_errors_of_the_system_come_without_its_numbers():
    assert plain(FileNotFoundError(errno.ENOENT, "No such file", "a.png")) == "a.png: there is no such file or folder"
    assert plain(OSError(errno.ENOSPC, "No space left")) == "the disk is full"
    assert plain(OSError(errno.EDOM, "Argument out of domain")) == "Argument out of domain"
    assert plain(RuntimeError("[Errno 111] Connection refused")) == "Connection refused"
    assert plain(ValueError("I/O error: No space left on device (os error 28)")) == "I/O error: No space left on device"
    assert plain(ValueError()) == "ValueError"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
