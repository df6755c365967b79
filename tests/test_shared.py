import secrets
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
