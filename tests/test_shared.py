import os
import pickle
import secrets
import subprocess
from pathlib import Path

import pytest

from omni_grpc.types import shared_memory as shared


@pytest.fixture
def prefix():
    return f"omni-test-{secrets.token_hex(4)}-"


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 1000])
def test_bytes_come_back_once_and_the_block_is_gone(prefix, data):
    handle = shared.put(data, prefix)
    assert shared.take(handle) == data
    with pytest.raises(FileNotFoundError):
        shared.take(handle)


def test_sweeping_frees_what_has_the_prefix_and_nothing_else(prefix):
    other = shared.put(b"kept", f"x{prefix}")
    for i in range(3):
        shared.put(b"left", f"{prefix}{i}")
    assert shared.sweep(prefix) == 3
    assert not list(Path("/dev/shm").glob(f"{prefix}*"))
    assert shared.take(other) == b"kept"


def test_blocks_of_processes_that_have_ended_are_swept_and_those_of_others_are_not(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    mine = shared.own_prefix("in")
    pid, here, _ = mine.removeprefix("omni-in-").split("-", 2)
    token = secrets.token_hex(6)
    left = [f"omni-{kind}{ended.pid}-{here}-{token}-0" for kind in ("", "in-", "out-")]
    kept = [
        f"{mine}0",
        shared.own_prefix() + "0",
        # ids of another container, or of another machine whose ranks are here
        f"omni-{ended.pid}-{here[:-1]}-{token}-0",
        f"omni-{ended.pid}-{token}-0",
        "omni-test-1",
        "other",
    ]
    for name in (*left, *kept):
        (tmp_path / name).touch()
    assert shared.sweep_dead(folder=tmp_path) == 3
    assert {path.name for path in tmp_path.iterdir()} == set(kept)
    assert shared.sweep_dead(folder=tmp_path / "none") == 0
    assert int(pid) == os.getpid()


def test_a_block_that_was_begun_and_never_filled_is_swept(prefix):
    """What a worker leaves that is killed between the two."""
    (shared.BLOCKS / f"{prefix}0").touch()
    assert shared.sweep(prefix) == 1
    assert not list(shared.BLOCKS.glob(f"{prefix}*"))


@pytest.fixture
def small(tmp_path):
    """A real mount of 256 KiB."""
    folder = tmp_path / "shm"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_bytes_for_which_the_mount_has_no_room_travel_in_the_handle(small, prefix, caplog):
    data = bytes(range(256)) * 2048
    handle = pickle.loads(pickle.dumps(shared.put(data, prefix, folder=small)))
    assert (handle.size, handle.data) == (len(data), data)
    assert shared.take(handle, folder=small) == data
    assert f"{len(data)} bytes in {small} (the disk is full)" in caplog.text
    assert list(small.iterdir()) == [], "no half of a block is left"
    # and the mount is used again as soon as there is room
    handle = shared.put(data[:1000], prefix, folder=small)
    assert handle.data is None
    assert shared.take(handle, folder=small) == data[:1000]


def test_without_a_mount_the_bytes_travel_in_the_handle(tmp_path, prefix):
    handle = shared.put(b"abc", prefix, folder=tmp_path / "none")
    assert shared.take(handle, folder=tmp_path / "none") == b"abc"
