"""Memory of the host and copies of blocks: the compiled library's, and torch's where there is none."""

from __future__ import annotations

import threading

import pytest
import torch

from omni_grpc import ops
from omni_grpc.ops import host
from omni_grpc.ops.host import HostLibraryError, Region, TorchStreamer, streamer

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not ops.load_native().loaded, reason="no op library")


def test_a_copy_waits_until_its_slot_is_free() -> None:
    copies = streamer(CPU, 1)
    slot, one, two = torch.zeros(4), torch.ones(4), torch.full((4,), 2.0)
    copies.copy(0, slot, one)
    copies.wait(0)
    copies.copy(0, slot, two)
    arrived = threading.Event()
    waiting = threading.Thread(target=lambda: (copies.wait(0), arrived.set()))
    waiting.start()
    assert not arrived.wait(0.05)
    assert torch.equal(slot, one), "the slot is in use"
    copies.release(0)
    waiting.join(10)
    assert torch.equal(slot, two)


def test_what_cannot_be_is_said_in_words() -> None:
    copies = streamer(CPU, 2)
    with pytest.raises(HostLibraryError, match="there is no slot 2"):
        copies.wait(2)
    with pytest.raises(HostLibraryError, match="needs a slot"):
        streamer(CPU, 0)
    with pytest.raises(HostLibraryError, match=r"mapping .* bytes of host memory"):
        Region(1 << 60)


def test_without_the_library_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_library", lambda: None)
    region = Region(1 << 12)
    source = region.take((8,), torch.float32).fill_(3)
    assert region.offset(source) == 0
    region.pin(CPU)
    copies, slot = streamer(CPU, 1), torch.zeros(8)
    assert isinstance(copies, TorchStreamer)
    copies.copy(0, slot, source)
    copies.wait(0)
    copies.release(0)
    assert torch.equal(slot, source)
    assert not host.Reading.possible()
