"""What memory of the host and copies of blocks must hold, as plain functions: pytest runs them, and so does
tools/gpu_test.py.
"""

from __future__ import annotations

import functools
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from omni_grpc.ops.host import ALIGNMENT, HostLibraryError, NativeStreamer, Reading, Region, streamer

CASES = ((1, 1), (2, 3), (2, 5), (3, 4))
"""Slots, and blocks that take turns in them."""


def check_case(case: tuple[int, int], device: str, seed: int) -> None:
    """Blocks that are copied ahead arrive whole, in time, and are not overwritten while they are at work.

    The work takes long, on a stream that is not the copies', and reads its slot at the end.
    """
    slots, blocks = case
    where, size = torch.device(device), 1 << 20
    generator = torch.Generator().manual_seed(seed)
    region = Region(blocks * size)
    sources = [region.take((size // 4,), torch.float32) for _ in range(blocks)]
    for source in sources:
        source.copy_(torch.randn(size // 4, generator=generator))
    region.pin(where)
    assert region.pinned == (device == "cuda")
    memory = [torch.zeros(size, dtype=torch.uint8, device=where) for _ in range(slots)]
    copies = streamer(where, slots)
    assert isinstance(copies, NativeStreamer), "no library streams to this device"
    for slot in range(slots):
        copies.release(slot)
    sums = []
    order = [number % blocks for number in range(4 * blocks)]
    for at, number in enumerate(order[: slots - 1]):
        copies.copy(at % slots, memory[at % slots], sources[number])
    for at in range(len(order)):
        ahead = at + slots - 1
        if ahead < len(order):
            copies.copy(ahead % slots, memory[ahead % slots], sources[order[ahead]])
        copies.wait(at % slots)
        _work(device)
        sums.append(memory[at % slots].view(torch.float32).clone())
        copies.release(at % slots)
    for at, number in enumerate(order):
        same = torch.equal(sums[at].cpu(), sources[number])
        assert same, f"{slots} slots, turn {at} on {device}, seed {seed}: not block {number}"


def _work(device: str) -> None:
    if device == "cuda":
        torch.cuda._sleep(2_000_000)
    else:
        time.sleep(0.002)


def check_what_is_cut_is_aligned_and_ends_with_its_last_tensor(device: str, seed: int) -> None:
    region = Region(1 << 20)
    first, second = region.take((3, 5), torch.bfloat16), region.take((), torch.float32)
    assert [region.offset(x) for x in (first, second)] == [0, ALIGNMENT]
    assert region.address % (2 << 20) == 0
    assert region.offset(torch.zeros(3)) is None
    assert region.used == region.whole.nbytes == ALIGNMENT + 4
    first.fill_(2)
    second.fill_(7)
    region.pin(torch.device(device))
    if device == "cuda":
        assert first.is_pinned()
        assert torch.equal(first.to(device, non_blocking=True).cpu(), torch.full((3, 5), 2.0).bfloat16())
    assert "no room for 1048576" in _refused(functools.partial(region.take, (1 << 20,), torch.uint8))
    del region
    gc.collect()
    assert (second.item(), first.sum().item()) == (7, 30), "its memory is there for as long as a tensor is"
    address = f"{first.data_ptr():x}"
    del first, second
    gc.collect()
    maps = [line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines()]
    assert address not in maps, "the memory is given back"


def check_files_are_read_in_parts_by_threads(device: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    want = torch.randint(256, (20 << 20,), generator=generator, dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "weights")
        file.write_bytes(want.numpy().tobytes())
        region, reading = Region(64 << 20), Reading()
        parts = [(0, 3), (5, 17 << 20), (17 << 20, 3 << 20), (4, 0)]
        targets = [region.take((size,), torch.uint8) for _, size in parts]
        for (offset, _), target in zip(parts, targets, strict=True):
            reading.add(file, offset, target)
        reading.run(threads=4)
        for (offset, size), target in zip(parts, targets, strict=True):
            assert torch.equal(target, want[offset : offset + size]), f"{size} bytes from {offset}, seed {seed}"
        reading.add(file, (20 << 20) - 5, region.take((6,), torch.uint8))
        assert _refused(reading.run) == f"{file} ends at byte {20 << 20}"
        reading = Reading()
        reading.add(Path(folder, "none"), 0, targets[0])
        assert "none: No such file or directory" in _refused(reading.run)


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except HostLibraryError as error:
        return str(error)
    raise AssertionError("it was not refused")


CHECKS: tuple[Callable[[str, int], None], ...] = (
    check_what_is_cut_is_aligned_and_ends_with_its_last_tensor,
    check_files_are_read_in_parts_by_threads,
)
CUDA_CHECKS = CHECKS
